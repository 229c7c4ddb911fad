"""Momentum that is cut over the replicas of its parameter, too: `PlanOptions(momentum_sharding='replicas')`.

The planner says where it lies, this brings arrays there, on every kind of mesh axes, in and outside of `jit`.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.sharding import Mesh, NamedSharding

from muon_shard.execute import match_type
from muon_shard.layout import Layout
from muon_shard.shardings import AnyMesh, concrete_sharding, partition_spec


@dataclasses.dataclass(frozen=True)
class Home:
    """Where the momentum of one leaf lies; `mesh` is None on a single device."""

    mesh: AnyMesh | None
    layout: Layout

    @property
    def sharding(self) -> NamedSharding | None:
        return None if self.mesh is None else NamedSharding(self.mesh, partition_spec(self.layout.leaf_spec))

    def bring(self, x: jax.Array) -> jax.Array:
        """`x`, a gradient or the momentum, with this sharding: under `jit` XLA may reduce and scatter in one."""
        sharding = self.sharding
        if sharding is None:
            return x
        if isinstance(self.mesh, Mesh) and not isinstance(x, Tracer):
            here = concrete_sharding(x)
            same = here is not None and here.is_equivalent_to(sharding, x.ndim)
            return x if same else jax.device_put(x, sharding)
        x = match_type(x, self.layout, sharding.mesh)
        # with_sharding_constraint takes no specs with Explicit axes, and on mixed ones loses the order of axes.
        return jax.jit(_same, out_shardings=sharding)(x)

    def zeros(self, param: Any, dtype: Any) -> jax.Array:
        """The first momentum of `param`, never whole anywhere."""
        dtype = param.dtype if dtype is None else dtype
        if isinstance(param, Tracer):
            # What does not depend on the parameter would lie on one device after jit, whatever its constraint.
            return self.bring(jnp.where(False, param, 0).astype(dtype))
        if isinstance(self.mesh, Mesh):
            zeros = jnp.zeros(param.shape, dtype, device=self.sharding)
        else:
            zeros = jnp.zeros_like(param, dtype)
        if isinstance(param, Asking):
            param.told.append((zeros, self.sharding))
        return zeros


def _same(x: jax.Array) -> jax.Array:
    return x


class Asking(jax.ShapeDtypeStruct):
    """A parameter's shape that asks for the sharding of its momentum: `told` lists momenta and where they lie."""

    __slots__ = ("told",)

    def __init__(self, param: Any, told: list[tuple[Any, NamedSharding | None]]) -> None:
        super().__init__(param.shape, param.dtype, sharding=param.sharding)
        self.told = told
