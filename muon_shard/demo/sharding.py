"""Where arrays live: weights over `fsdp`, `tensor` and `expert`, copies over every other mesh axis."""

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

# For matrices [rows, cols] and stacks of experts [E, rows, cols]: the dimensions an axis likes, best first.
# Axes choose in this order: an `expert` axis leaves the rows to `fsdp`; without one `fsdp` takes the experts.
WISHES = {
    2: (("fsdp", (0, 1)), ("tensor", (1, 0))),
    3: (("expert", (0,)), ("fsdp", (0, 1, 2)), ("tensor", (2, 1))),
}


def weight_spec(shape: tuple[int, ...], mesh: Mesh) -> P:
    """Give each axis its first wish that is still free and divides evenly; vectors stay replicated."""
    spec: list[str | None] = [None] * len(shape)
    for axis, dimensions in WISHES.get(len(shape), ()):
        size = mesh.shape.get(axis, 1)
        fits = (dim for dim in dimensions if spec[dim] is None and shape[dim] % size == 0)
        dim = next(fits, None)
        if size > 1 and dim is not None:
            spec[dim] = axis
    return P(*spec)


def weight_shardings(params: Any, mesh: Mesh) -> Any:
    """A tree of `NamedSharding` like `params`."""
    return jax.tree.map(lambda x: NamedSharding(mesh, weight_spec(x.shape, mesh)), params)


def batch_axes(mesh: Mesh, batch: int) -> tuple[str, ...]:
    """The axes that split the batch: all but `tensor`, as long as the batch divides evenly."""
    axes, parts = [], 1
    for axis, size in mesh.shape.items():
        if axis != "tensor" and batch % (parts * size) == 0:
            axes.append(axis)
            parts *= size
    return tuple(axes)


def state_shardings(state: Any, mesh: Mesh) -> Any:
    """Shardings an optimizer state arrived with; what lives on no mesh (step counts) is replicated."""
    everywhere = NamedSharding(mesh, P())
    return jax.tree.map(lambda x: x.sharding if isinstance(x.sharding, NamedSharding) else everywhere, state)
