"""The optimizers compared: ours, and what a user of JAX would otherwise run.

| peer | what it is |
| --- | --- |
| `ours` | `muon_shard.muon` |
| `optax` | `optax.contrib.muon`; the compiler (GSPMD) decides who computes and moves what |
| `redundant` | every device gathers every matrix, computes it, keeps its slice: the usual baseline |
| `redundant_stacks` | the same, equal shapes gathered together and computed as one batch |
| `stacked` | a careful user: equal shapes stacked, the stack spread over all devices by staged constraints |
| `adamw` | `optax.adamw`: what a step costs with no matrix work at all |

All Muon peers apply the same momentum, Nesterov, bias correction, Newton–Schulz coefficients and scale as
`optax.contrib.muon` does by default, so their updates agree to rounding. Every leaf is a matrix; to `redundant` also
a stack of them, or what dimension numbers make of it.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from optax.contrib import MuonDimensionNumbers

LEARNING_RATE = 0.02
BETA = 0.95
STEPS = 5
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
EPSILON = 1e-8  # added to the norm, as optax does: a zero matrix stays zero

Updates = dict[str, jax.Array]
Specs = dict[str, P]
Dims = dict[str, MuonDimensionNumbers]


class MomentumState(NamedTuple):
    """State of `momentum_then`."""

    count: jax.typing.ArrayLike  # i32[]
    momentum: Updates  # like the parameters


def momentum_then(
    orthogonalize: Callable[[Updates], Updates], dims: Dims | None = None
) -> optax.GradientTransformation:
    """Muon with `orthogonalize` applied to the whole tree of Nesterov momenta."""
    numbers = dims or {}

    def init(params):
        return MomentumState(jnp.zeros([], jnp.int32), optax.tree.zeros_like(params))

    def update(updates, state, params=None):
        del params
        grads = updates
        count = optax.safe_increment(state.count)
        momentum = optax.tree.update_moment(grads, state.momentum, BETA, 1)
        ahead = optax.tree.bias_correction(momentum, BETA, optax.safe_increment(count))
        now = optax.tree.bias_correction(grads, BETA, count)
        nesterov = jax.tree.map(lambda m, g: BETA * m + (1 - BETA) * g, ahead, now)
        updates = {k: width_scale(u.shape, numbers.get(k)) * u for k, u in orthogonalize(nesterov).items()}
        return updates, MomentumState(count, momentum)

    return optax.chain(optax.GradientTransformation(init, update), optax.scale_by_learning_rate(LEARNING_RATE))


def width_scale(shape: tuple[int, ...], numbers: MuonDimensionNumbers | None = None) -> float:
    """The default scale of optax, sqrt(max(1, fan_out / fan_in))."""
    _, rows, cols = roles(len(shape), numbers)
    return math.sqrt(max(1.0, math.prod(shape[d] for d in cols) / math.prod(shape[d] for d in rows)))


def roles(rank: int, numbers: MuonDimensionNumbers | None) -> tuple[tuple[int, ...], ...]:
    """Batch axes, rows and columns of a leaf; without dimension numbers its last two are rows and columns."""
    given = numbers or MuonDimensionNumbers(-2, -1)
    rows, cols = (
        tuple(a % rank for a in ((axes,) if isinstance(axes, int) else axes))
        for axes in (given.reduction_axis, given.output_axis)
    )
    return tuple(d for d in range(rank) if d not in rows + cols), rows, cols


def as_matrices(x: jax.Array, numbers: MuonDimensionNumbers | None) -> jax.Array:
    """`newton_schulz` on the matrices that dimension numbers make of a leaf."""
    each = roles(x.ndim, numbers)
    order = sum(each, ())
    batch, rows, cols = ([x.shape[d] for d in axes] for axes in each)
    y = newton_schulz(x.transpose(order).reshape(*batch, math.prod(rows), math.prod(cols)))
    return y.reshape(batch + rows + cols).transpose([order.index(d) for d in range(x.ndim)])


def newton_schulz(x: jax.Array) -> jax.Array:
    """The quintic iteration on x[..., m, n], on the short side."""
    tall = x.shape[-2] > x.shape[-1]
    x = jnp.swapaxes(x, -1, -2) if tall else x
    x = x / (jnp.linalg.norm(x, axis=(-2, -1), keepdims=True) + EPSILON)
    a, b, c = COEFFICIENTS

    def step(_, x):
        gram = x @ jnp.swapaxes(x, -1, -2)
        return a * x + (b * gram + c * gram @ gram) @ x

    x = lax.fori_loop(0, STEPS, step, x)
    return jnp.swapaxes(x, -1, -2) if tall else x


def axes_of(entry) -> tuple[str, ...]:
    """The mesh axes of one entry of a spec."""
    return () if entry is None else entry if isinstance(entry, tuple) else (entry,)


def ours(mesh: Mesh, specs: Specs) -> optax.GradientTransformation:
    """`muon_shard.muon`, told nothing: it reads the shardings that init is shown."""
    import muon_shard  # here, so that the other peers run without it

    del mesh, specs
    return muon_shard.muon(LEARNING_RATE)


def optax_muon(mesh: Mesh, specs: Specs) -> optax.GradientTransformation:
    """`optax.contrib.muon`, left to the compiler."""
    del mesh, specs
    return optax.contrib.muon(LEARNING_RATE)


def adamw(mesh: Mesh, specs: Specs) -> optax.GradientTransformation:
    """`optax.adamw`."""
    del mesh, specs
    return optax.adamw(LEARNING_RATE)


def redundant(mesh: Mesh, specs: Specs, dims: Dims | None = None) -> optax.GradientTransformation:
    """Gather, compute everything everywhere, slice: leaf by leaf."""
    numbers = dims or {}

    def body(shards):
        return {k: repeated(x, specs[k], lambda w, k=k: as_matrices(w, numbers.get(k))) for k, x in shards.items()}

    return momentum_then(jax.shard_map(body, mesh=mesh, in_specs=(specs,), out_specs=specs), dims)


def redundant_stacks(mesh: Mesh, specs: Specs) -> optax.GradientTransformation:
    """The same, fused: all leaves of one shape and spec are gathered at once and computed as one batch."""

    def body(shards):
        out = {}
        for (_, spec), names in alike(shards, specs).items():
            done = repeated(jnp.stack([shards[name] for name in names]), P(None, *spec), newton_schulz)
            out |= {name: done[i] for i, name in enumerate(names)}
        return out

    return momentum_then(jax.shard_map(body, mesh=mesh, in_specs=(specs,), out_specs=specs))


def repeated(x: jax.Array, spec: P, compute: Callable[[jax.Array], jax.Array]) -> jax.Array:
    """Under `shard_map`: the own shard of `compute` applied to the whole array on every device."""
    for dim, entry in enumerate(spec):
        if entry is not None:
            x = lax.all_gather(x, axes_of(entry), axis=dim, tiled=True)
    x = compute(x)
    for dim, entry in enumerate(spec):
        if entry is not None:
            size = x.shape[dim] // lax.axis_size(axes_of(entry))
            x = lax.dynamic_slice_in_dim(x, lax.axis_index(axes_of(entry)) * size, size, dim)
    return x


def alike(updates: Updates, specs: Specs) -> dict[tuple[tuple[int, ...], P], list[str]]:
    """The names of leaves by shape and spec."""
    groups: dict[tuple[tuple[int, ...], P], list[str]] = {}
    for name, x in updates.items():
        groups.setdefault((x.shape, specs[name]), []).append(name)
    return groups


def stacked(
    mesh: Mesh, specs: Specs, ns: Callable[[jax.Array], jax.Array] = newton_schulz
) -> optax.GradientTransformation:
    """One stack [K, m, n] per shape and spec, K padded to the devices and spread over all of them.

    The constraints are staged: first K over the axes that cut the matrix, which is an all-to-all, then over
    the free axes too, which is a slice.
    """

    def constrain(x, spec):
        return lax.with_sharding_constraint(x, NamedSharding(mesh, spec))

    def run(stack, spec):
        cut = tuple(axis for entry in spec for axis in axes_of(entry))
        free = tuple(axis for axis in mesh.axis_names if axis not in cut)
        stages = [P(None, *spec), P(cut or None, None, None), P(cut + free, None, None)]
        for stage in stages:
            stack = constrain(stack, stage)
        stack = ns(stack)
        for stage in reversed(stages):
            stack = constrain(stack, stage)
        return stack

    def orthogonalize(updates):
        out = {}
        for (shape, spec), names in alike(updates, specs).items():
            padding = [jnp.zeros(shape, jnp.float32)] * (-len(names) % mesh.size)
            done = run(jnp.stack([updates[name] for name in names] + padding), spec)
            out |= {name: done[i] for i, name in enumerate(names)}
        return out

    return momentum_then(orthogonalize)


PEERS: dict[str, Callable[[Mesh, Specs], optax.GradientTransformation]] = {
    "ours": ours,
    "optax": optax_muon,
    "redundant": redundant,
    "redundant_stacks": redundant_stacks,
    "stacked": stacked,
    "adamw": adamw,
}
