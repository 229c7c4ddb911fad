"""How one leaf is seen: batch × rows × cols, and which mesh axes shard each."""

import dataclasses
import functools
import math
from collections.abc import Iterable, Sequence
from typing import Any

from muon_shard.logical import Cut, Parts

MeshAxes = tuple[tuple[str, int], ...]
"""Names and sizes of the axes of a mesh, in mesh order."""


@dataclasses.dataclass(frozen=True)
class Kind:
    """How blocks of one matrix lie on the devices; matrices of one kind are reassembled by the same program text.

    `block` is the local shape of the row dimensions then the column dimensions, `axes` the mesh axes that shard each of
    them (major to minor), `ways` their sizes, `row_dims` how many of them are rows. `parts`: the owner cuts the matrix.
    """

    block: tuple[int, ...]
    axes: tuple[tuple[str, ...], ...]
    ways: tuple[int, ...]
    row_dims: int
    parts: Parts | None = None

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

    @functools.cached_property
    def problems(self) -> tuple[tuple[tuple[int, int], int], ...]:
        """((m, n), how many) that are orthogonalized for one matrix, m ≤ n: itself, or its parts."""
        if self.parts is None:
            return ((self.canonical, 1),)
        other = self.shape[1 - self.parts.side]
        return tuple(((min(other, e), max(other, e)), count) for e, count in self.parts.extents)


@dataclasses.dataclass(frozen=True)
class Layout:
    """One leaf on one mesh.

    `shape` and `spec` are the leaf's; `spec` names the mesh axes of each dimension (axes of size 1 are left out),
    `rows` and `cols` are the dimensions that make up the matrix, in merging order; all others are batch dimensions.
    `cut`: the matrix holds several. Where these can be had as matrices of their own, they are a batch dimension:
    `shape` and `spec` then have several dimensions, `joined`, for one axis of the leaf.
    """

    shape: tuple[int, ...]
    spec: tuple[tuple[str, ...], ...]
    rows: tuple[int, ...]
    cols: tuple[int, ...]
    mesh_axes: MeshAxes
    cut: Cut | None = None
    joined: tuple[int, ...] = ()

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
    def problems(self) -> int:
        """What is orthogonalized of the whole leaf."""
        return self.matrices * (1 if self.cut is None else len(self.cut.sizes))

    @property
    def leaf_shape(self) -> tuple[int, ...]:
        return tuple(math.prod(self.shape[d] for d in dims) for dims in self._leaf_axes)

    @property
    def leaf_local_shape(self) -> tuple[int, ...]:
        return tuple(math.prod(self.local_shape[d] for d in dims) for dims in self._leaf_axes)

    @property
    def leaf_spec(self) -> tuple[tuple[str, ...], ...]:
        return tuple(tuple(a for d in dims for a in self.spec[d]) for dims in self._leaf_axes)

    @property
    def _leaf_axes(self) -> list[tuple[int, ...]]:
        """The dimensions that make up each axis of the leaf."""
        rest = [(d,) for d in range(len(self.shape)) if d not in self.joined]
        return sorted([*rest, self.joined] if self.joined else rest)

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
            self._parts,
        )

    @property
    def _parts(self) -> Parts | None:
        if self.cut is None:
            return None
        side = 0 if self.cut.axis in self.rows else 1
        dims = (self.rows, self.cols)[side]
        at = dims.index(self.cut.axis)
        outer, inner = (math.prod(self.shape[d] for d in part) for part in (dims[:at], dims[at + 1 :]))
        outer *= self.cut.periods(self.shape[self.cut.axis])
        return Parts(side, outer, tuple(size * inner for size in self.cut.sizes))

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

    @property
    def spec_over_replicas(self) -> tuple[tuple[str, ...], ...]:
        """The leaf's spec with every free axis that fits as the minor part of a dimension, so that replicas hold parts.

        An axis fits where it divides what each device holds: best on a dimension that is cut already, then on a batch
        dimension, then on the longest. Large axes choose first. One that fits nowhere stays free.
        """
        local, spec = list(self.leaf_local_shape), list(self.leaf_spec)
        apart = [self.local_shape[dims[0]] for dims in self._leaf_axes]  # a cut within blocks would join them again
        of_matrix = [not set(dims) <= set(self.batch) for dims in self._leaf_axes]
        for axis in sorted(self.free, key=lambda a: -self.sizes[a]):
            size = self.sizes[axis]
            fitting = [d for d, length in enumerate(local) if length and length % size == 0]
            if fitting:
                # Along one dimension XLA scatters the sum of gradients at once; along two it may sum all of it.
                d = min(fitting, key=lambda d: (apart[d] % size > 0, not spec[d], of_matrix[d], -local[d]))
                local[d] //= size
                apart[d] //= size
                spec[d] += (axis,)
        return tuple(spec)

    def __str__(self) -> str:
        """`G[L, M_fsdp, N_tensor] over {replica}`; L: a batch dimension, E: a sharded one, M: rows, N: cols.

        Blocks are shown behind the axis they divide, `N_tensor:768|2×256`, or as batch dimensions of it, `(L N)`.
        """
        names = [""] * len(self.shape)
        for letter, dims in (("M", self.rows), ("N", self.cols)):
            for i, d in enumerate(dims):
                names[d] = letter + (str(i) if len(dims) > 1 else "")
        for d in self.batch:
            names[d] = "E" if self.spec[d] else "L"
        names = [n + (f"_{'+'.join(axes)}" if axes else "") for n, axes in zip(names, self.spec, strict=True)]
        if self.cut is not None:
            names[self.cut.axis] += ":" + self.cut.shown(self.shape[self.cut.axis])
        axes = [" ".join(names[d] for d in dims) for dims in self._leaf_axes]
        shown = ", ".join(f"({a})" if len(dims) > 1 else a for a, dims in zip(axes, self._leaf_axes, strict=True))
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
    cut: Cut | None = None,
) -> Layout:
    """The layout of a legal leaf (see `why_illegal`); axes of size 1 are no-ops and vanish.

    Blocks of equal size are a batch dimension, where no shard holds a part of one that its neighbour has the rest of.
    """
    sizes = dict(mesh_axes)
    entries = tuple(tuple(a for a in axes if sizes[a] > 1) for axes in spec_entries(spec, len(shape)))
    layout = Layout(tuple(shape), entries, tuple(rows), tuple(cols), mesh_axes, cut)
    return layout if cut is None else _apart(layout, cut)


def _apart(layout: Layout, cut: Cut) -> Layout:
    """The layout with the blocks as a batch dimension: the axis becomes [periods, blocks, size]."""
    axis, periods = cut.axis, cut.periods(layout.shape[cut.axis])
    sharded = periods if periods > 1 else len(cut.sizes)
    if len(set(cut.sizes)) > 1 or sharded % layout.ways(layout.spec[axis]):
        return layout
    sizes = [periods, len(cut.sizes), cut.sizes[0]]
    of_matrix = [d for d in (0, 2) if sizes[d] > 1] or [2]
    dims = sorted([*of_matrix, 1])  # of [periods, blocks, size] those that there are
    joined = tuple(range(axis, axis + len(dims)))
    where = {axis: [axis + dims.index(d) for d in of_matrix]}
    where |= {d: [d if d < axis else d + len(dims) - 1] for d in range(len(layout.shape)) if d != axis}
    rows, cols = (tuple(new for d in part for new in where[d]) for part in (layout.rows, layout.cols))
    shape = (*layout.shape[:axis], *(sizes[d] for d in dims), *layout.shape[axis + 1 :])
    spec = [layout.spec[axis], *[()] * (len(dims) - 1)]
    spec = (*layout.spec[:axis], *spec, *layout.spec[axis + 1 :])
    return Layout(shape, spec, rows, cols, layout.mesh_axes, joined=joined)
