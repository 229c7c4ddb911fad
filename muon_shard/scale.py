"""`optax.contrib.scale_by_shape`, by the global shape of each matrix, or of each block where a leaf holds several."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import AxisType

from muon_shard.labels import DimensionNumbers, Route, route
from muon_shard.shardings import Memory, Placement, Shardings, axis_types, only_axes, place_leaves, whole


def scale_by_shape(
    dimension_numbers: DimensionNumbers, consistent_rms: jax.typing.ArrayLike | None, param_shardings: Shardings
) -> optax.GradientTransformation:
    """Multiplies by √max(1, fan_out / fan_in), or √max(fan_in, fan_out) · `consistent_rms` (arXiv 2502.16982)."""

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        del params
        leaves, treedef = jax.tree.flatten(updates)
        seen = whole(updates, param_shardings, "muon")
        factors = [_factor(r, consistent_rms) for r in route(seen, dimension_numbers)]
        if seen is not updates:
            placements = place_leaves(seen, param_shardings, Memory(), "muon")
            factors = [_of_shard(*each) for each in zip(factors, placements, strict=True)]
        return treedef.unflatten([x * jnp.asarray(f, x.dtype) for x, f in zip(leaves, factors, strict=True)]), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def _factor(r: Route, consistent_rms: jax.typing.ArrayLike | None) -> Any:
    """A number; where blocks have different ones, an array of the leaf's rank, as long as the axis they divide."""
    fan_in, fan_out = (math.prod(r.shape[d] for d in dims) for dims in (r.rows, r.cols))
    if r.cut is None or not fan_in * fan_out:
        return _scale(fan_in, fan_out, consistent_rms)
    axis, total = r.cut.axis, sum(r.cut.sizes)
    if axis in r.rows:
        scales = [_scale(fan_in * size // total, fan_out, consistent_rms) for size in r.cut.sizes]
    else:
        scales = [_scale(fan_in, fan_out * size // total, consistent_rms) for size in r.cut.sizes]
    if len(set(r.cut.sizes)) == 1:
        return scales[0]
    places = np.tile(np.repeat(np.arange(len(scales)), r.cut.sizes), r.cut.periods(r.shape[axis]))
    return jnp.asarray(scales)[places].reshape([-1 if d == axis else 1 for d in range(len(r.shape))])


def _scale(fan_in: int, fan_out: int, consistent_rms: jax.typing.ArrayLike | None) -> Any:
    if consistent_rms is None:
        return math.sqrt(max(1, fan_out / fan_in)) if fan_in else 1.0
    return math.sqrt(max(fan_in, fan_out)) * consistent_rms


def _of_shard(factor: Any, placement: Placement) -> Any:
    """The part of an array of factors that belongs to this device's shard, inside a user's `shard_map`."""
    kinds = {} if placement.mesh is None else axis_types(placement.mesh)
    manual = [name for name, kind in kinds.items() if kind == AxisType.Manual]
    for axis, axes in enumerate(only_axes(placement.spec, manual)):
        if axes and jnp.ndim(factor) and factor.shape[axis] > 1:
            size = factor.shape[axis] // lax.axis_size(axes)
            factor = lax.dynamic_slice_in_dim(factor, lax.axis_index(axes) * size, size, axis)
    return factor
