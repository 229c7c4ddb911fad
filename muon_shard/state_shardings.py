"""Where the leaves of an optimizer's state should lie, whatever the transformation."""

from typing import Any

import jax
import optax
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from muon_shard.errors import Offence, raise_for_leaves
from muon_shard.momentum import Asking


def opt_state_shardings(tx: optax.GradientTransformation, params: Any) -> Any:
    """The sharding each leaf of `tx.init(params)` should have: moments like their parameters, the rest replicated.

    With `PlanOptions(momentum_sharding='replicas')` Muon's momentum is also cut over the axes that replicate its
    parameter; Adam's moments are not.

    For `jax.jit(tx.init, out_shardings=…)` and as the target of a checkpoint restore; without it, a jitted init on Auto
    axes leaves the momentum on one device or replicated.

    Args:
        tx: any optax transformation.
        params: pytree of arrays or `ShapeDtypeStruct`s with `NamedSharding`s on one mesh.

    Raises:
        ValueError: listing leaves without a `NamedSharding`.
    """
    named, _ = jax.tree_util.tree_flatten_with_path(params)
    raise_for_leaves(
        "opt_state_shardings",
        "without a NamedSharding",
        [
            Offence(
                "params" + jax.tree_util.keystr(path),
                f"its sharding is {getattr(leaf, 'sharding', None)}",
                leaf.shape,
                str(leaf.dtype),
            )
            for path, leaf in named
            if not isinstance(getattr(leaf, "sharding", None), NamedSharding)
        ],
        "Consider jax.device_put, or ShapeDtypeStructs that carry a sharding.",
    )
    told: list[Any] = []
    structs = jax.tree.map(lambda x: Asking(x, told), params)
    shardings: list[Any] = []

    def init() -> Any:
        state = tx.init(structs)
        own = {id(momentum): sharding for momentum, sharding in told}  # no id is used again: `told` keeps the momenta
        shardings.extend(own.get(id(leaf)) for leaf in jax.tree.leaves(state))
        return state

    try:  # closed over, not traced: so ours also remembers the shardings, and a jitted init needs no other hint
        shapes, treedef = jax.tree.flatten(jax.eval_shape(init))
    except TypeError:  # some (schedule_free, inject_hyperparams) compute with the parameters, and must be traced
        shapes, treedef = jax.tree.flatten(jax.eval_shape(tx.init, jax.tree.map(_explicit, params)))
        shardings = [_on(named[0][1].sharding.mesh, x) for x in shapes]
    state = treedef.unflatten(
        [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s) for x, s in zip(shapes, shardings, strict=True)]
    )
    meshes = list(dict.fromkeys(leaf.sharding.mesh for _, leaf in named))
    rest = NamedSharding(meshes[0], PartitionSpec()) if meshes else None
    masked = lambda x: isinstance(x, optax.MaskedNode)  # noqa: E731
    return optax.tree.map_params(
        tx,
        lambda moment, param: moment if masked(moment) else moment.sharding or param.sharding,
        state,
        params,
        transform_non_params=lambda _: rest,
        is_leaf=masked,
    )


def _explicit(x: Any) -> jax.ShapeDtypeStruct:
    """Its shape on Explicit axes, on which a trace shows how everything lies."""
    mesh = x.sharding.mesh
    twin = AbstractMesh(mesh.axis_sizes, mesh.axis_names, axis_types=(AxisType.Explicit,) * len(mesh.axis_names))
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(twin, x.sharding.spec))


def _on(mesh: Any, x: jax.ShapeDtypeStruct) -> NamedSharding | None:
    """What was traced on Explicit axes, on this mesh; None where it does not tell."""
    spec = getattr(x.sharding, "spec", None)
    return NamedSharding(mesh, spec) if spec is not None and any(spec) else None
