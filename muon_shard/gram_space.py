"""Matrices travel as Gram matrices: R = XXᴴ to the owners, Q back, QX where X lies.

Each device has some columns of X, in whatever order: R is the sum over the devices, and no column needs another to be
multiplied with Q. Rows may stand in any order as long as all devices agree. So a block only has to be turned until it
holds whole columns of the short side; only then it is moved at all.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from muon_shard import triangles
from muon_shard.layout import Kind, MeshAxes
from muon_shard.newton_schulz.products import wide
from muon_shard.newton_schulz.scaling import exponent, largest
from muon_shard.orthogonalizer import GramSpace, Orthogonalizer
from muon_shard.packing import Packing
from muon_shard.views import View
from muon_shard.whole_matrices import rows_of_leaves, to_pages


@dataclasses.dataclass(frozen=True)
class Sides:
    """The local block of one matrix as short × long.

    `short` and `long` are its local sizes, `over` the mesh axes that cut the short side; `rows_long`: the rows of the
    matrix are its long side.
    """

    short: int
    long: int
    over: tuple[str, ...]
    rows_long: bool

    @staticmethod
    def of(kind: Kind) -> "Sides":
        d = kind.row_dims
        rows, cols = math.prod(kind.block[:d]), math.prod(kind.block[d:])
        over = tuple(tuple(a for axes in part for a in axes) for part in (kind.axes[:d], kind.axes[d:]))
        # Of equal sides the one that is cut counts as the long one.
        rows_long = (kind.shape[0], math.prod(kind.ways[:d])) > (kind.shape[1], math.prod(kind.ways[d:]))
        return Sides(cols, rows, over[1], True) if rows_long else Sides(rows, cols, over[0], False)

    def turned(self, ways: int) -> int:
        """Elements of a block whose columns are filled up until `ways` devices can divide them."""
        return self.short * (self.long + -self.long % ways)


def size(kind: Kind) -> int:
    """Elements of a matrix that travel: half its Gram matrix, and its scale."""
    return triangles.size(kind.canonical[0]) + 1


def space(orthogonalizer: Orthogonalizer, dtype: str) -> GramSpace:
    """What plans that travel as Gram matrices run.

    Raises:
        ValueError: the orthogonalizer cannot work so; a plan for another one was given.
    """
    found = orthogonalizer.in_gram_space(dtype)
    if isinstance(found, str):
        raise ValueError(f"Gram matrices cannot serve this orthogonalizer: {found}.")
    return found


def items(
    dtype: str, leaves: Sequence[tuple[Kind, int]], mesh_axes: MeshAxes
) -> tuple[int, int, int, tuple[tuple[MeshAxes, int], ...]]:
    """Bytes of an element on the way in and back, of all scales, and of what is turned, by axes; see `Traffic`."""
    item, scale = wide(dtype).itemsize, wide(jnp.finfo(dtype).dtype).itemsize
    moved = {axes: count * jnp.dtype(dtype).itemsize for axes, count in turned(leaves, mesh_axes).items()}
    return item, item, scale * sum(count for _, count in leaves), tuple(moved.items())


def turned(leaves: Sequence[tuple[Kind, int]], mesh_axes: MeshAxes) -> dict[MeshAxes, int]:
    """Elements, by the axes that cut their short side, of all matrices that must be turned."""
    sizes, found = dict(mesh_axes), {}
    for kind, count in leaves:
        if over := Sides.of(kind).over:
            axes = tuple((name, sizes[name]) for name in over)
            ways = math.prod(size for _, size in axes)
            found[axes] = found.get(axes, 0) + count * Sides.of(kind).turned(ways)
    return found


class GramMatrices(View):
    """Owners hold Gram matrices; all devices keep their columns of X."""

    @property
    def returned(self) -> jnp.dtype:
        return wide(self.dtype)

    @property
    def space(self) -> GramSpace:
        return space(self.orthogonalizer, self.dtype)

    def pack(self, blocks: list[jax.Array]) -> tuple[list[jax.Array], Any]:
        sides = [Sides.of(kind) for kind in self.kinds]
        xs = _turn([_wide(x, s) for x, s in zip(blocks, sides, strict=True)], sides, self.packing, there=True)
        powers = self._powers(xs)
        first = lax.axis_index(self.packing.exchange) == 0
        flat = []
        for x, power in zip(xs, powers, strict=True):
            r = triangles.pack(self.space.gram(x, power))
            told = jnp.where(first, power, 0)[:, 0].astype(r.dtype)  # the sum over the devices is the power itself
            flat.append(to_pages(jnp.concatenate([r, told], axis=1), self.packing.page).reshape(-1, self.packing.page))
        return flat, (xs, powers)

    def _powers(self, xs: list[jax.Array]) -> list[jax.Array]:
        """One power of two for each matrix, [count, 1, 1], the same on all devices that have columns of it."""
        most = lax.pmax(jnp.concatenate([largest(x) for x in xs]), self.packing.exchange)
        ends = np.cumsum([len(x) for x in xs])[:-1]
        return jnp.split(exponent(most, xs[0].dtype), ends)

    def assemble(self, received: jax.Array, kind: Kind, count: int) -> list[jax.Array]:
        """→ [count, m + 1, m]: the Gram matrix, and a row that tells the scale."""
        rows, m = received.reshape(count, -1), kind.canonical[0]
        r = triangles.unpack(rows[:, : triangles.size(m)], m)
        told = rows[:, triangles.size(m), None, None]
        return [jnp.concatenate([r, jnp.broadcast_to(told, (count, 1, m))], axis=1)]

    def orthogonalize(self, x: jax.Array, operands: tuple[jax.Array, ...]) -> jax.Array:
        """→ Q [count, m, m]."""
        power = jnp.round(x[:, -1:, :1].real).astype(jnp.int32)
        return self.space.factor(x[:, :-1], power, *operands)

    def disassemble(self, ys: list[jax.Array], kind: Kind) -> jax.Array:
        rows = jnp.pad(triangles.pack(ys[0]), ((0, 0), (0, 1)))  # as long as on the way in
        return to_pages(rows, self.packing.page).reshape(1, -1)

    def unpack(self, pages: jax.Array, table: Any, kept: Any) -> list[jax.Array]:
        ys = []
        for kind, rows, x, power in zip(self.kinds, rows_of_leaves(pages, table, self.packing), *kept, strict=True):
            m = kind.canonical[0]
            q = triangles.unpack(rows[:, : triangles.size(m)], m)
            ys.append(self.space.apply(q, power, x).astype(self.out_dtype))
        sides = [Sides.of(kind) for kind in self.kinds]
        ys = _turn(ys, sides, self.packing, there=False)
        return [(y.mT if s.rows_long else y).reshape(len(y), -1) for y, s in zip(ys, sides, strict=True)]


def _wide(x: jax.Array, sides: Sides) -> jax.Array:
    """Local blocks [count, elements] as [count, short, long]."""
    if sides.rows_long:
        return x.reshape(len(x), sides.long, sides.short).mT
    return x.reshape(len(x), sides.short, sides.long)


def _turn(xs: list[jax.Array], sides: list[Sides], packing: Packing, there: bool) -> list[jax.Array]:
    """Matrices whose short side is cut: columns cut instead, or back. One `all_to_all` for all that share axes."""
    xs = list(xs)
    for over in dict.fromkeys(side.over for side in sides if side.over):
        members, ways = [i for i, side in enumerate(sides) if side.over == over], packing.ways(over)
        parts = [_columns_apart(xs[i], ways) if there else _rows_apart(xs[i], ways) for i in members]
        sent = jnp.concatenate([part.reshape(ways, -1) for part in parts], axis=1)
        received = lax.all_to_all(sent, over, split_axis=0, concat_axis=0, tiled=True)
        ends = np.cumsum([part.size // ways for part in parts])[:-1]
        for i, part, flat in zip(members, parts, jnp.split(received, ends, axis=1), strict=True):
            got = flat.reshape(part.shape)
            xs[i] = _rows_together(got) if there else _columns_together(got)[:, :, : sides[i].long]
    return xs


def _columns_apart(x: jax.Array, ways: int) -> jax.Array:
    """[count, m, n] → [ways, count, m, n / ways], with columns of zeros to fill up."""
    x = jnp.pad(x, ((0, 0), (0, 0), (0, -x.shape[2] % ways)))
    return x.reshape(*x.shape[:2], ways, -1).transpose(2, 0, 1, 3)


def _columns_together(x: jax.Array) -> jax.Array:
    return x.transpose(1, 2, 0, 3).reshape(*x.shape[1:3], -1)


def _rows_apart(x: jax.Array, ways: int) -> jax.Array:
    """[count, m, n] → [ways, count, m / ways, n]."""
    return x.reshape(x.shape[0], ways, -1, x.shape[2]).swapaxes(0, 1)


def _rows_together(x: jax.Array) -> jax.Array:
    return x.swapaxes(0, 1).reshape(x.shape[1], -1, x.shape[3])
