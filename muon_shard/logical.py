"""Logical matrices: several orthogonalization problems fused in one parameter, and how they lie in it.

What a user declares (`Blocks`), what it means for one leaf (`Cut`), and for one matrix, rows and cols merged (`Parts`).
All are sizes of whole leaves; how a leaf is sharded plays no part.
"""

import collections
import dataclasses
import functools
import itertools
import operator
from collections.abc import Sequence
from typing import Any


@dataclasses.dataclass(frozen=True)
class Blocks:
    """A leaf that holds several matrices side by side, each orthogonalized and scaled by itself.

    In place of `optax.contrib.MuonDimensionNumbers` in `muon_weight_dimension_numbers=`. The result is that of a
    parameter split by hand. Blocks need not align with shards.

        Blocks(axis=1, sizes=(768, 256, 256))                       # [in, q | k | v]
        Blocks(axis=1, sizes=64)                                    # [in, heads · 64], head by head
        Blocks(axis=1, sizes=(1, 1), interleaved=True)              # gate and up, column by column
        Blocks(axis=1, sizes=(4 * 64, 64, 64), interleaved=True)    # groups of 4 query heads, a key and a value head

    A head axis of its own, as in [in, heads, head_dim], needs no blocks: leave it out of the dimension numbers.

    Attributes:
        axis: the axis that is divided, one of the reduction or output axes; may be negative.
        sizes: extents along it, in order; they add up to the axis. An int: equal blocks of this extent.
        interleaved: `sizes` is one period, which repeats along the axis; what stands at one place in every period makes
            up one matrix.
        reduction_axis: as in `MuonDimensionNumbers`.
        output_axis: as in `MuonDimensionNumbers`.
    """

    axis: int
    sizes: int | Sequence[int]
    interleaved: bool = False
    reduction_axis: int | Sequence[int] = 0
    output_axis: int | Sequence[int] = 1

    def __post_init__(self) -> None:
        for name in ("sizes", "reduction_axis", "output_axis"):  # lists and arrays as tuples: a record is hashable
            given = getattr(self, name)
            if _integer(given) is None:
                object.__setattr__(self, name, _integers(given) or given)

    def why_not(self, shape: Sequence[int], matrix: Sequence[int]) -> str:
        """Why a leaf with these matrix axes cannot be divided so, in one sentence; '' if it can."""
        rank, axis, sizes = len(shape), _integer(self.axis), _integers(self.sizes)
        if axis is None or not -rank <= axis < rank:
            return f"{self} divides axis {self.axis!r} of a leaf of rank {rank}"
        if axis % rank not in matrix:
            return f"{self} divides axis {axis}, which is neither a reduction nor an output axis"
        if sizes is None or min(sizes, default=0) < 1:
            return f"{self} has sizes {self.sizes!r}; expected a positive integer, or several"
        extent, period = shape[axis % rank], sum(sizes)
        if self.interleaved and _integer(self.sizes) is not None:
            return f"{self} is interleaved; expected the sizes of one period"
        if self.interleaved or _integer(self.sizes) is not None:
            what = "periods" if self.interleaved else "blocks"
            return f"{what} of {period} do not divide axis {axis} of size {extent}" if extent % period else ""
        return "" if period == extent else f"sizes {sizes} add up to {period}, axis {axis} has size {extent}"

    def cut(self, shape: Sequence[int]) -> "Cut | None":
        """What this means for a leaf that can be divided so; None: one block, which is the whole."""
        axis = operator.index(self.axis) % len(shape)
        one, sizes = _integer(self.sizes), _integers(self.sizes) or ()
        if one is not None:
            sizes = (one,) * (shape[axis] // one)
        return Cut(axis, sizes) if len(sizes) > 1 else None


@dataclasses.dataclass(frozen=True)
class Cut:
    """The blocks of one leaf: `sizes` along `axis` (not negative), again and again until its end."""

    axis: int
    sizes: tuple[int, ...]

    def periods(self, extent: int) -> int:
        """How often the sizes repeat along an axis of this extent."""
        return extent // sum(self.sizes)

    def shown(self, extent: int) -> str:
        """`768|2×256`, `12×64`, `512×(1|1)`."""
        text = "|".join(f"{n}×{size}" if n > 1 else str(size) for size, n in runs(self.sizes))
        return text if self.periods(extent) == 1 else f"{self.periods(extent)}×({text})"


@dataclasses.dataclass(frozen=True)
class Parts:
    """The blocks of one matrix: of its rows (`side` 0) or cols (1), seen as [outer, sum of sizes].

    Block j takes all `outer` × `sizes[j]` of them.
    """

    side: int
    outer: int
    sizes: tuple[int, ...]

    @functools.cached_property
    def runs(self) -> tuple[tuple[int, int], ...]:
        """(size, how many) of neighbours of equal size."""
        return runs(self.sizes)

    @functools.cached_property
    def extents(self) -> tuple[tuple[int, int], ...]:
        """(rows or cols, how many) of all blocks, the largest first."""
        return tuple(sorted(collections.Counter(self.outer * size for size in self.sizes).items(), reverse=True))


def runs(sizes: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """(size, how many) of neighbours of equal size."""
    return tuple((size, len(list(same))) for size, same in itertools.groupby(sizes))


def _integer(x: Any) -> int | None:
    try:
        return operator.index(x)
    except TypeError:
        return None


def _integers(x: Any) -> tuple[int, ...] | None:
    """One integer or several as a tuple, numpy's too; None where it is neither."""
    one = _integer(x)
    if one is not None:
        return (one,)
    try:
        return tuple(operator.index(i) for i in x)
    except TypeError:
        return None
