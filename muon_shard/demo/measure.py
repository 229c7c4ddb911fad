"""What an optimizer step costs: the collectives in its compiled module, and its time."""

from __future__ import annotations

import collections
import statistics
import time
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from muon_shard import hlo
from muon_shard.demo.sharding import state_shardings

COLLECTIVES = ("all-to-all", "all-gather", "all-reduce", "reduce-scatter", "collective-permute")


def count_collectives(text: str) -> dict[str, int]:
    """How often each collective stands in the text of a compiled module; once where it stands in a loop."""
    found = collections.Counter(f.kind for f in hlo.collectives(text))
    return {name: found[name] for name in COLLECTIVES}


def init_state(tx: optax.GradientTransformation, params: Any, mesh: Mesh) -> Any:
    """Optimizer state for sharded params; eager, because a jitted init forgets shardings on Auto axes."""
    state = tx.init(params)
    return jax.device_put(state, state_shardings(state, mesh))


def compile_step(tx: optax.GradientTransformation, params: Any, state: Any, grads: Any) -> jax.stages.Compiled:
    """The optimizer alone: (params, state, grads) → (params, state), which are donated and stay put."""

    def step(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    shardings = jax.tree.map(lambda x: x.sharding, (params, state))
    return jax.jit(step, donate_argnums=(0, 1), out_shardings=shardings).lower(params, state, grads).compile()


def copy(tree: Any) -> Any:
    """A copy that may be donated, sharded as the original."""
    return jax.tree.map(jnp.copy, tree)


def median_milliseconds(
    steps: Mapping[str, jax.stages.Compiled], starts: Mapping[str, tuple], grads: Any, rounds: int
) -> dict[str, float]:
    """Median time of each step over `rounds`, in ms, after one to warm up.

    The steps take turns, so that a busy moment of the machine falls on all of them alike.
    """
    carried = {name: copy(start) for name, start in starts.items()}
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds + 1):
        for name, step in steps.items():
            begin = time.perf_counter()
            carried[name] = jax.block_until_ready(step(*carried[name], grads))
            times[name].append(1e3 * (time.perf_counter() - begin))
    return {name: statistics.median(values[1:]) for name, values in times.items()}
