"""Pages by tables: which pages a device takes, and in which order."""

import dataclasses
import functools
import itertools
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from muon_shard.packing import ANY
from muon_shard.shardings import varying

MOST_TABLES, MOST_RUNS = 32, 2048
"""Up to how many tables, and runs of neighbours in all of them, pages are copied run by run."""


@dataclasses.dataclass(frozen=True, eq=False)
class Table:
    """Numbers of pages, [coordinates over `axes`, …]: each device has those at its own coordinate."""

    numbers: np.ndarray
    axes: tuple[str, ...] = ()

    @staticmethod
    def make(numbers: np.ndarray, axes: Sequence[str], sizes: Mapping[str, int]) -> "Table":
        """Numbers for every coordinate over `axes`, without the axes along which they are the same.

        These are not asked for, so that JAX sees what is equal on all replicas.
        """
        grid = numbers.reshape(*(sizes[axis] for axis in axes), *numbers.shape[1:])
        for d in range(len(axes)):
            if (grid == (first := grid.take([0], d))).all():
                grid = first
        left = tuple(axis for axis, size in zip(axes, grid.shape, strict=False) if size > 1)
        return Table(grid.reshape(-1, *numbers.shape[1:]), left)

    @property
    def here(self) -> np.ndarray | jax.Array:
        """This device's numbers under `shard_map`; static if all devices have the same."""
        known = np.maximum(self.numbers, 0)
        return jnp.asarray(known)[lax.axis_index(self.axes)] if self.axes else known[0]


def take_pages(pages: jax.Array, table: np.ndarray | jax.Array) -> jax.Array:
    """Rows of `pages` by a table whose entries all exist; a slice where the table is static and lists neighbours."""
    if isinstance(table, np.ndarray):
        table = table.reshape(-1)
        if (table == table[0] + np.arange(table.size)).all():
            return pages[table[0] : table[0] + table.size]
    return jnp.take(pages, table.reshape(-1), axis=0, mode="clip")


def pack_pages(parts: Sequence[jax.Array], table: Table) -> jax.Array:
    """The same from the pages of several arrays, one after the other, without putting those together first.

    A switch over the tables: gathering by one that only the device knows would read a copy of all pages.
    """
    ends = np.cumsum([len(part) for part in parts])
    if len(table.numbers) <= MOST_TABLES:
        runs = [_runs(row.reshape(-1), ends) for row in table.numbers]
        if sum(map(len, runs)) <= MOST_RUNS:
            axes = frozenset().union(*map(varying, parts))
            branches = [functools.partial(_copy, runs=each, axes=axes) for each in runs]
            return lax.switch(lax.axis_index(table.axes), branches, parts) if table.axes else branches[0](parts)
    return take_pages(jnp.concatenate(parts), table.here)


Run = tuple[int, int, int]
"""(part, first page of it, last + 1); part ANY for as many pages of any kind."""


def _runs(numbers: np.ndarray, ends: np.ndarray) -> list[Run]:
    """Neighbours of one part, which can be copied together."""
    part = np.where(numbers == ANY, ANY, np.searchsorted(ends, numbers, side="right"))
    in_part = numbers - np.concatenate([[0], ends])[np.maximum(part, 0)]
    follows = (part[1:] == part[:-1]) & ((part[1:] == ANY) | (np.diff(in_part) == 1))
    bounds = [0, *(np.flatnonzero(~follows) + 1).tolist(), len(numbers)]
    found = []
    for begin, end in itertools.pairwise(bounds):
        first = 0 if part[begin] == ANY else int(in_part[begin])
        found.append((int(part[begin]), first, first + end - begin))
    return found


def _copy(parts: Sequence[jax.Array], runs: Sequence[Run], axes: frozenset[str]) -> jax.Array:
    """The runs, one after the other; it varies along `axes`, as what other tables make of the parts does."""
    page = parts[0].shape[1]
    found = [
        jnp.zeros((last - first, page), parts[0].dtype) if part == ANY else parts[part][first:last]
        for part, first, last in runs
    ]
    x = jnp.concatenate(found)
    missing = tuple(axes - varying(x))
    return lax.pcast(x, missing, to="varying") if missing else x
