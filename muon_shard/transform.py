"""The optax face: `scale_by_muon` and `muon`, with optax's arguments, defaults, state and labels."""

import operator
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax
from jax.core import Tracer
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from optax.contrib import MuonState

from muon_shard.errors import Offence, raise_for_leaves
from muon_shard.execute import execute, reshard_typed
from muon_shard.labels import (
    DimensionNumbers,
    Route,
    require_matrices,
    require_moments,
    route,
    warn_of_doubts,
    warn_of_unused,
)
from muon_shard.momentum import Home
from muon_shard.newton_schulz import coefficients, make_orthogonalizer
from muon_shard.options import PlanOptions
from muon_shard.orthogonalizer import Orthogonalizer
from muon_shard.planner import inner_dtypes, layouts, plan_meshes
from muon_shard.scale import scale_by_shape
from muon_shard.shardings import (
    Memory,
    Placement,
    Shardings,
    concrete_sharding,
    mesh_of,
    place_leaves,
    place_quietly,
    whole,
)

Preconditioning = Literal["frobenius", "spectral", "aol", "schatten"]

STATIC_ARGS = (
    "ns_coeffs",
    "ns_steps",
    "weight_decay_mask",
    "mu_dtype",
    "preconditioning",
    "muon_weight_dimension_numbers",
    "param_shardings",
    "ns_dtype",
    "orthogonalizer",
    "plan_options",
)
"""Arguments of `muon` that are no numbers, for `optax.inject_hyperparams(muon, static_args=STATIC_ARGS)`."""


def scale_by_muon(
    ns_coeffs: Any = "standard",
    ns_steps: int = 5,
    beta: jax.typing.ArrayLike = 0.95,
    eps: jax.typing.ArrayLike = 1e-8,
    mu_dtype: jax.typing.DTypeLike | None = None,
    *,
    nesterov: bool = True,
    adaptive: bool = False,
    preconditioning: Preconditioning = "frobenius",
    weight_dimension_numbers: DimensionNumbers = None,
    param_shardings: Shardings = None,
    ns_dtype: jax.typing.DTypeLike | None = None,
    orthogonalizer: Callable[[jax.Array], jax.Array] | Orthogonalizer | None = None,
    plan_options: PlanOptions = PlanOptions(),  # noqa: B008 (frozen)
) -> optax.GradientTransformation:
    """`optax.contrib.scale_by_muon` whose Newton–Schulz work is done once on the whole mesh.

    Arguments, state (`optax.contrib.MuonState`) and updates are optax's, to rounding, but for these differences:

    * `adaptive` scales each matrix by its own dual norm; optax sums over batch axes too.
    * More coefficient rows than `ns_steps` are cut from the end, fewer raise; optax has this check inverted.
    * Zero gives zero, and magnitudes from 1e-30 to 1e30 give the same update: `eps` counts relative to norms below 1.
    * The dtypes of the state are those of `init`, whatever the gradients'. Updates have the dtype and, where it can be
      seen, the sharding of the parameters (of the gradients when `update` is not given the parameters).

    Args:
        ns_coeffs: a triple, rows of triples, or the name of a set: 'standard', 'dion', 'you6', 'polar_express', 'aol',
            'deepseek_v4'. Whether the Gram form is safe is judged by these, not by what a restored state holds.
        ns_steps: Newton–Schulz steps, a Python int.
        beta: decay of the momentum.
        eps: added to the norm, see above.
        mu_dtype: dtype of the momentum; None: the parameter's.
        nesterov: whether to use Nesterov momentum.
        adaptive: whether to scale by the dual norm (arXiv 2409.20325).
        preconditioning: 'frobenius', 'spectral', 'aol' (arXiv 2512.04632) or 'schatten' (arXiv 2506.10935).
        weight_dimension_numbers: `optax.contrib.MuonDimensionNumbers`, a tree or prefix of them, or a callable of the
            tree; `muon_shard.Blocks` for leaves that hold several matrices; None: every leaf is a matrix of rank 2.
        param_shardings: a pytree, prefix or callable of params of `NamedSharding`, `PartitionSpec`, arrays or
            `ShapeDtypeStruct`s. Needed only where shardings cannot be seen: on Auto mesh axes with `init` under jit or
            under `optax.inject_hyperparams`, and inside a `shard_map` of one's own, where `update` sees local shards:
            there the in_specs of the parameters, with the axes that are not Manual added behind. Manual axes are used
            as they are, with `check_vma` or without; take the mean of the gradients over replicas first.
        ns_dtype: dtype in which matrices travel and are orthogonalized, for example bfloat16 for half the bytes; None:
            that of momentum and gradient together. State and updates keep their dtypes, Gram matrices are at least
            float32.
        orthogonalizer: a function [batch, m, n] → [batch, m, n], m ≤ n, to run in place of Newton–Schulz, or a
            `CustomOrthogonalizer` that also says what it costs. `ns_coeffs`, `ns_steps`, `eps` and `preconditioning`
            then have no effect.
        plan_options: what steers the plan.

    Raises:
        ValueError: at init or update, listing every leaf that cannot be served and why.
    """
    if not isinstance(plan_options, PlanOptions):
        raise ValueError(
            f"plan_options must be a PlanOptions, got {plan_options!r}. Consider PlanOptions(transport=…, …)."
        )
    ns_steps = _static(ns_steps)
    run = make_orthogonalizer(
        orthogonalizer, ns_coeffs, ns_steps, preconditioning, method=plan_options.ns_method, adaptive=adaptive
    )
    memory, over_replicas = Memory(), plan_options.momentum_sharding == "replicas"
    where = "muon with momentum_sharding='replicas'" if over_replicas else "muon"

    def matrices(tree: Any) -> list[Route]:
        routes = route(tree, weight_dimension_numbers, "scale_by_muon")
        raise_for_leaves(
            "scale_by_muon",
            "declared no matrix",
            [Offence(r.path, r.rule, r.shape, r.dtype) for r in routes if r.label != "muon"],
            "Consider muon_shard.muon, which sends such leaves to Adam, or weight_dimension_numbers= for these leaves.",
        )
        require_matrices(routes, "scale_by_muon")
        return routes

    def homes(routes: list[Route], placements: list[Placement], treedef: Any) -> Any:
        """Where the momentum of each leaf lies with momentum_sharding='replicas'."""
        pairs = zip(routes, placements, strict=True)
        return treedef.unflatten([Home(p.mesh, layouts(r, p, plan_options)[0]) for r, p in pairs])

    def init(params: Any) -> MuonState:
        routes = matrices(whole(params, param_shardings, "muon"))
        memory.remember(params)
        rows = coefficients(ns_coeffs, ns_steps)
        if over_replicas:
            placements = place_quietly(params, param_shardings, memory, where)
            lying = homes(routes, placements, jax.tree.structure(params))
            mu = jax.tree.map(lambda home, p: home.zeros(p, mu_dtype), lying, params)
        else:
            mu = optax.tree.zeros_like(params, dtype=mu_dtype)
        return _on_mesh(MuonState(jnp.zeros([], jnp.int32), mu, rows), params)

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        seen = whole(updates, param_shardings, "muon")
        routes = matrices(seen)
        like = updates if params is None else params
        # As the parameters lies the momentum itself, which knows best; one that lies on no mesh yet as its gradient.
        known, otherwise = (like, state.mu) if over_replicas and params is not None else (state.mu, updates)
        lying = jax.tree.map(lambda x, y: y if mesh_of(x) is None else x, known, otherwise)
        shown = lying if seen is updates or over_replicas else seen
        placements = place_leaves(shown, param_shardings, memory, where)
        if over_replicas:
            home = homes(routes, placements, jax.tree.structure(updates))
            grads, old = (jax.tree.map(Home.bring, home, tree) for tree in (updates, state.mu))
        else:
            home, old = None, state.mu
            grads = jax.tree.map(_onto, updates, old)
        count = optax.safe_increment(state.count)
        mu = jax.tree.map(lambda g, m: _momentum(g, m, beta), grads, old)
        mu_hat = jax.tree.map(lambda g, m: _bias_corrected(g, m, beta, count, nesterov), grads, mu)
        leaves, treedef = jax.tree.flatten(mu_hat)
        targets = treedef.flatten_up_to(like)
        inner = inner_dtypes(routes, [str(x.dtype) for x in leaves], ns_dtype, "muon")
        out = inner if ns_dtype is not None else [str(x.dtype) for x in targets]
        outs = [jnp.zeros_like(x) if x.size == 0 else x for x in targets]  # empty leaves are in no plan
        states = [str(m.dtype) for m in treedef.flatten_up_to(old)]
        for mesh, indices, plan in plan_meshes(routes, placements, states, inner, out, run, plan_options):
            done = execute(plan, mesh, [leaves[i].astype(inner[i]) for i in indices], (state.ns_coeffs, eps))
            for i, y in zip(indices, done, strict=True):
                outs[i] = _onto(y.astype(targets[i].dtype), targets[i])
        mu = jax.tree.map(lambda new, old: new.astype(old.dtype), mu, old)
        mu = jax.tree.map(Home.bring, home, mu) if over_replicas else mu
        return treedef.unflatten(outs), MuonState(count, mu, state.ns_coeffs)

    return optax.GradientTransformation(init, update)


def muon(
    learning_rate: optax.ScalarOrSchedule,
    ns_coeffs: Any = "standard",
    ns_steps: int = 5,
    beta: jax.typing.ArrayLike = 0.95,
    eps: jax.typing.ArrayLike = 1e-8,
    weight_decay: optax.ScalarOrSchedule = 0.0,
    weight_decay_mask: Any | Callable[[Any], Any] | None = None,
    mu_dtype: jax.typing.DTypeLike | None = None,
    *,
    nesterov: bool = True,
    adaptive: bool = False,
    preconditioning: Preconditioning = "frobenius",
    adam_b1: jax.typing.ArrayLike = 0.9,
    adam_b2: jax.typing.ArrayLike = 0.999,
    adam_eps_root: jax.typing.ArrayLike = 0.0,
    adam_weight_decay: optax.ScalarOrSchedule = 0.0,
    adam_learning_rate: optax.ScalarOrSchedule | None = None,
    muon_weight_dimension_numbers: DimensionNumbers = None,
    consistent_rms: jax.typing.ArrayLike | None = None,
    param_shardings: Shardings = None,
    ns_dtype: jax.typing.DTypeLike | None = None,
    orthogonalizer: Callable[[jax.Array], jax.Array] | Orthogonalizer | None = None,
    plan_options: PlanOptions = PlanOptions(),  # noqa: B008 (frozen)
) -> optax.GradientTransformation:
    """`optax.contrib.muon` for sharded parameters: the same arguments, state and updates, a fraction of the step time.

    Matrices go to Muon, all other leaves to AdamW. By default every rank-2 leaf is a matrix, as in optax; pass
    `muon_weight_dimension_numbers=muon_shard.labels.by_path` for rules that know embeddings, heads, stacks and experts.

    Args:
        learning_rate: a number or schedule.
        ns_coeffs: see `scale_by_muon`, as for `ns_steps`, `beta`, `eps`, `mu_dtype`, `nesterov`, `adaptive`,
            `preconditioning`, `param_shardings`, `ns_dtype`, `orthogonalizer` and `plan_options`.
        weight_decay: decay of Muon's leaves, multiplied by the learning rate.
        weight_decay_mask: tree, prefix or callable of booleans.
        adam_b1: decay of Adam's first moment; `adam_b2` of its second; `adam_eps_root` and `adam_weight_decay` as in
            `optax.adamw`.
        adam_learning_rate: None: `learning_rate`.
        muon_weight_dimension_numbers: a tree (or prefix) of `optax.contrib.MuonDimensionNumbers`, None for Adam; or a
            callable of params; `muon_shard.Blocks` for leaves that hold several matrices (fused QKV, gate and up), each
            of which is orthogonalized and scaled as if it were a leaf; None: the rank-2 rule.
        consistent_rms: scale updates by √max(fan_in, fan_out) · consistent_rms (arXiv 2502.16982); None: by
            √max(1, fan_out / fan_in).

    Raises:
        ValueError: listing every leaf that cannot be served and why; also when there are leaves and none is Muon's.
    """
    ns_steps = _static(ns_steps)

    def labels(params: Any) -> Any:
        routes = route(whole(params, param_shardings, "muon"), muon_weight_dimension_numbers)
        require_matrices(routes)
        require_moments(routes)
        return jax.tree.unflatten(jax.tree.structure(params), [r.label for r in routes])

    both = optax.partition(
        {
            "muon": optax.chain(
                scale_by_muon(
                    ns_coeffs,
                    ns_steps,
                    beta,
                    eps,
                    mu_dtype,
                    nesterov=nesterov,
                    adaptive=adaptive,
                    preconditioning=preconditioning,
                    weight_dimension_numbers=muon_weight_dimension_numbers,
                    param_shardings=param_shardings,
                    ns_dtype=ns_dtype,
                    orthogonalizer=orthogonalizer,
                    plan_options=plan_options,
                ),
                scale_by_shape(muon_weight_dimension_numbers, consistent_rms, param_shardings),
                optax.add_decayed_weights(weight_decay, weight_decay_mask),
                optax.scale_by_learning_rate(learning_rate),
            ),
            "adam": _steady(
                optax.adamw(
                    learning_rate if adam_learning_rate is None else adam_learning_rate,
                    b1=adam_b1,
                    b2=adam_b2,
                    eps=eps,
                    eps_root=adam_eps_root,
                    weight_decay=adam_weight_decay,
                    mu_dtype=mu_dtype,
                    nesterov=nesterov,
                )
            ),
        },
        labels,
    )

    def init(params: Any) -> Any:
        routes = route(whole(params, param_shardings, "muon"), muon_weight_dimension_numbers)
        warn_of_unused(muon_weight_dimension_numbers, routes)
        warn_of_doubts(routes)
        return _on_mesh(both.init(params), params)

    return optax.GradientTransformationExtraArgs(init, both.update)


def _steady(adam: optax.GradientTransformation) -> optax.GradientTransformation:
    """Adam whose state keeps the dtypes and shardings of `init`, whatever the gradients', as Muon's does.

    Moments may be sharded over more axes than parameters (ZeRO-1), gradients over more or fewer than either.
    """

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        moments = state[0].mu
        onto = lambda tree: jax.tree.map(_onto, tree, moments)  # noqa: E731
        done, after = adam.update(onto(updates), state, None if params is None else onto(params))
        after = jax.tree.map(lambda new, old: new.astype(old.dtype), after, state)
        like = updates if params is None else params
        return jax.tree.map(lambda x, to: _onto(x.astype(to.dtype), to), done, like), after

    return optax.GradientTransformation(adam.init, update)


def _static(ns_steps: Any) -> Any:
    """Numpy integers and concrete arrays as Python ints; anything else is left for `NewtonSchulz` to refuse."""
    try:
        return ns_steps if isinstance(ns_steps, Tracer) else operator.index(ns_steps)
    except TypeError:
        return ns_steps


def _momentum(g: jax.Array, mu: jax.Array, beta: Any) -> jax.Array:
    return (1 - beta) * g + beta * mu


def _bias_corrected(g: jax.Array, mu: jax.Array, beta: Any, count: Any, nesterov: bool) -> jax.Array:
    """The momentum that is orthogonalized, as in optax. Leaf by leaf: leaves may live on different meshes."""

    def corrected(x: jax.Array, steps: Any) -> jax.Array:
        return x / (1 - beta**steps).astype(x.dtype)

    if not nesterov:
        return corrected(mu, count)
    return _momentum(corrected(g, count), corrected(mu, optax.safe_increment(count)), beta)


def _on_mesh(state: Any, params: Any) -> Any:
    """Lays what `init` makes on one device (counts, coefficients) on the mesh of the parameters, replicated.

    A jitted step returns them on the mesh: born anywhere else, they would make its second call compile again.
    """
    shardings = [concrete_sharding(leaf) for leaf in jax.tree.leaves(params)]
    meshes = {sharding.mesh for sharding in shardings if sharding is not None and isinstance(sharding.mesh, Mesh)}
    if len(meshes) != 1:
        return state
    everywhere = NamedSharding(meshes.pop(), PartitionSpec())

    def lay(x: Any) -> Any:
        return x if isinstance(x, Tracer) or concrete_sharding(x) is not None else jax.device_put(x, everywhere)

    return jax.tree.map(lay, state)


def _onto(x: jax.Array, like: Any) -> jax.Array:
    """`x` with the sharding of `like`, where both live on one mesh and it can be seen: typed, or concrete."""
    mesh, target = mesh_of(x), mesh_of(like)
    if mesh is None or target is None or mesh.axis_names != target.axis_names:
        return x
    here, there = concrete_sharding(x), concrete_sharding(like)
    if here is not None and there is not None and not here.is_equivalent_to(there, x.ndim):
        return jax.device_put(x, there)
    return reshard_typed(x, jax.typeof(like).sharding.spec)
