"""How one leaf is seen: batch × rows × cols, and which mesh axes shard each."""

import dataclasses
import functools
import math
from collections.abc import Iterable, Sequence
from typing import Any

MeshAxes = tuple[tuple[str, int], ...]
"""Names and sizes of the axes of a mesh, in mesh order."""


@dataclasses.dataclass(frozen=True)
class Kind:
    """How blocks of one matrix lie on the devices; matrices of one kind are reassembled by the same program text.

    `block` is the local shape of the row dimensions then the column dimensions, `axes` the mesh axes that shard each of
    them (major to minor), `ways` their sizes, `row_dims` how many of them are rows.
    """

    block: tuple[int, ...]
    axes: tuple[tuple[str, ...], ...]
    ways: tuple[int, ...]
    row_dims: int

    @property
    def shape(self) -> tuple[int, int]:
        """Global (rows, cols) of one matrix."""
        full = [b * w for b, w in zip(self.block, self.ways, strict=True)]
        return math.prod(full[: self.row_dims]), math.prod(full[self.row_dims :])

    @property
    def canonical(self) -> tuple[int, int]:
        """(m, n) with m ≤ n: a matrix and its transpose share one batch."""
        m, n = sorted(self.shape)
        return m, n

    @property
    def elements(self) -> int:
        """Elements of one local block."""
        return math.prod(self.block)


@dataclasses.dataclass(frozen=True)
class Layout:
    """One leaf on one mesh.

    `spec` names the mesh axes of each dimension (axes of size 1 are left out), `rows` and `cols` are the leaf's
    dimensions that make up the matrix, in merging order; all others are batch dimensions.
    """

    shape: tuple[int, ...]
    spec: tuple[tuple[str, ...], ...]
    rows: tuple[int, ...]
    cols: tuple[int, ...]
    mesh_axes: MeshAxes

    @functools.cached_property
    def sizes(self) -> dict[str, int]:
        return dict(self.mesh_axes)

    @property
    def batch(self) -> tuple[int, ...]:
        return tuple(d for d in range(len(self.shape)) if d not in self.rows + self.cols)

    @functools.cached_property
    def local_shape(self) -> tuple[int, ...]:
        return tuple(s // self.ways(axes) for s, axes in zip(self.shape, self.spec, strict=True))

    @functools.cached_property
    def count(self) -> int:
        """Matrices of which every device holds a block."""
        return math.prod(self.local_shape[d] for d in self.batch)

    @property
    def matrices(self) -> int:
        """Matrices of the whole leaf."""
        return math.prod(self.shape[d] for d in self.batch)

    @property
    def order(self) -> tuple[int, ...]:
        """Dimensions as batch, rows, cols: the transpose that makes the leaf `[batch, rows, cols]`."""
        return self.batch + self.rows + self.cols

    @functools.cached_property
    def kind(self) -> Kind:
        dims = self.rows + self.cols
        return Kind(
            tuple(self.local_shape[d] for d in dims),
            tuple(self.spec[d] for d in dims),
            tuple(self.ways(self.spec[d]) for d in dims),
            len(self.rows),
        )

    @functools.cached_property
    def exchange(self) -> tuple[str, ...]:
        """Axes that scatter the matrix, in mesh order."""
        return self._in_mesh_order(self.rows + self.cols)

    @functools.cached_property
    def batch_axes(self) -> tuple[str, ...]:
        """Axes along which problems are already apart, in mesh order."""
        return self._in_mesh_order(self.batch)

    @functools.cached_property
    def free(self) -> tuple[str, ...]:
        """Axes over which the leaf is replicated, in mesh order."""
        used = self.exchange + self.batch_axes
        return tuple(name for name, size in self.mesh_axes if size > 1 and name not in used)

    def over_replicas(self) -> "Layout":
        """The layout with every free axis that fits as the minor part of a dimension, so that replicas hold parts.

        An axis fits where it divides what each device holds: best on a dimension that is cut already, then on a batch
        dimension, then on the longest. Large axes choose first. One that fits nowhere stays free.
        """
        local, spec = list(self.local_shape), list(self.spec)
        for axis in sorted(self.free, key=lambda a: -self.sizes[a]):
            size = self.sizes[axis]
            fitting = [d for d, length in enumerate(local) if length and length % size == 0]
            if fitting:
                # Along one dimension XLA scatters the sum of gradients at once; along two it may sum all of it.
                d = min(fitting, key=lambda d: (not spec[d], d not in self.batch, -local[d]))
                local[d] //= size
                spec[d] += (axis,)
        return dataclasses.replace(self, spec=tuple(spec))

    def __str__(self) -> str:
        """`G[L, M_fsdp, N_tensor] over {replica}`; L: a batch dimension, E: a sharded one, M: rows, N: cols."""
        names = [""] * len(self.shape)
        for letter, dims in (("M", self.rows), ("N", self.cols)):
            for i, d in enumerate(dims):
                names[d] = letter + (str(i) if len(dims) > 1 else "")
        for d in self.batch:
            names[d] = "E" if self.spec[d] else "L"
        shown = ", ".join(n + (f"_{'+'.join(axes)}" if axes else "") for n, axes in zip(names, self.spec, strict=True))
        return f"G[{shown}]" + (f" over {{{', '.join(self.free)}}}" if self.free else "")

    def ways(self, axes: Sequence[str]) -> int:
        """Devices along these axes."""
        return math.prod(self.sizes[a] for a in axes)

    def _in_mesh_order(self, dims: Sequence[int]) -> tuple[str, ...]:
        used = {a for d in dims for a in self.spec[d]}
        return tuple(name for name, _ in self.mesh_axes if name in used)


def spec_entries(spec: Iterable[Any], rank: int) -> tuple[tuple[str, ...], ...]:
    """A `PartitionSpec` (or its plain-tuple form) as one tuple of axis names per dimension."""
    entries = tuple(spec) + (None,) * (rank - len(tuple(spec)))
    return tuple(() if e is None else (e,) if isinstance(e, str) else tuple(e) for e in entries)


def why_illegal(shape: Sequence[int], spec: Iterable[Any], mesh_axes: MeshAxes) -> str:
    """Why this spec cannot shard this shape on this mesh, in one sentence; '' if it can."""
    if len(tuple(spec)) > len(shape):
        return f"the spec has {len(tuple(spec))} entries for a leaf of rank {len(shape)}"
    sizes, entries = dict(mesh_axes), spec_entries(spec, len(shape))
    used = [a for axes in entries for a in axes]
    unknown = sorted({a for a in used if a not in sizes})
    if unknown:
        return f"unknown mesh axes {unknown}; the mesh has {sizes}"
    if len(set(used)) < len(used):
        return "a mesh axis shards two dimensions"
    for d, axes in enumerate(entries):
        ways = math.prod(sizes[a] for a in axes)
        if shape[d] % ways:
            return f"dimension {d} of size {shape[d]} does not divide over {axes} of size {ways}"
    return ""


def make_layout(
    shape: Sequence[int],
    spec: Iterable[Any],
    rows: Sequence[int],
    cols: Sequence[int],
    mesh_axes: MeshAxes,
) -> Layout:
    """The layout of a legal leaf (see `why_illegal`); axes of size 1 are no-ops and vanish."""
    sizes = dict(mesh_axes)
    entries = tuple(tuple(a for a in axes if sizes[a] > 1) for axes in spec_entries(spec, len(shape)))
    return Layout(tuple(shape), entries, tuple(rows), tuple(cols), mesh_axes)
