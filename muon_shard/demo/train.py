"""One model, one text, one set of initial weights; training under a given optimizer step."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import muon_shard
from muon_shard.demo.config import DemoConfig
from muon_shard.demo.model import Transformer
from muon_shard.demo.sharding import batch_axes, weight_shardings
from muon_shard.demo.text import load_corpus, sample_batches
from muon_shard.labels import by_path

Step = Callable[[Any, Any, Any], tuple[Any, Any]]  # (params, state, grads) → (params, state)
HELD_OUT_BATCHES = 4
OURS, REFERENCE, ADAMW = "muon_shard.muon", "optax.contrib.muon", "optax.adamw"


@dataclasses.dataclass(frozen=True)
class Task:
    """What the optimizers share, so that nothing but the optimizer differs between them.

    loss, loss_and_grads  jitted functions of (params, i32[batch, context + 1]); loss in nats per byte
    params                sharded initial weights, a nested dict
    batches, held_out     i32[count, batch, context + 1] on the host
    tokens                where one batch lives
    """

    params: Any
    loss: Callable[[Any, jax.Array], jax.Array]
    loss_and_grads: Callable[[Any, jax.Array], tuple[jax.Array, Any]]
    batches: np.ndarray
    held_out: np.ndarray
    tokens: NamedSharding


@dataclasses.dataclass(frozen=True)
class Trajectory:
    """Losses of every step (nats per byte), the held-out loss at the end, and host copies of the weights."""

    losses: tuple[float, ...]
    held_out_loss: float
    first_params: Any  # after one step
    last_params: Any


def make_task(config: DemoConfig, mesh: Mesh) -> Task:
    """Weights, functions and batches of a run, from the seed."""
    model = Transformer(config.model, config.context, nnx.Rngs(config.seed))
    graph, weights = nnx.split(model, nnx.Param)
    params = nnx.to_pure_dict(weights)
    shardings = weight_shardings(params, mesh)
    split = batch_axes(mesh, config.batch)

    def loss(params: Any, tokens: jax.Array) -> jax.Array:
        logits = nnx.merge(graph, params)(tokens[:, :-1], NamedSharding(mesh, P(split)))
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    scalar = NamedSharding(mesh, P())
    corpus = load_corpus()
    return Task(
        params=jax.device_put(params, shardings),
        loss=jax.jit(loss),
        loss_and_grads=jax.jit(jax.value_and_grad(loss), out_shardings=(scalar, shardings)),
        batches=sample_batches(corpus.train, config.steps, config.batch, config.context, config.seed),
        held_out=sample_batches(corpus.held_out, HELD_OUT_BATCHES, config.batch, config.context, config.seed),
        tokens=NamedSharding(mesh, P(split)),
    )


def make_optimizers(config: DemoConfig) -> dict[str, optax.GradientTransformation]:
    """The three optimizers by name. Both Muons get the same arguments: their curves should be one curve."""

    def schedule(peak: float) -> optax.Schedule:
        # Warm-up starts above zero, or the first step would do nothing.
        low, warmup = peak / 10, max(1, config.steps // 10)
        return optax.warmup_cosine_decay_schedule(low, peak, warmup, max(config.steps, warmup + 1), low)

    muon_arguments: dict[str, Any] = dict(
        learning_rate=schedule(config.learning_rate),
        adam_learning_rate=schedule(config.adam_learning_rate),
        muon_weight_dimension_numbers=by_path,
    )
    return {
        OURS: muon_shard.muon(**muon_arguments),
        REFERENCE: optax.contrib.muon(**muon_arguments),
        ADAMW: optax.adamw(schedule(config.adam_learning_rate)),
    }


def train(task: Task, step: Step, params: Any, state: Any, on_step: Callable[[float], None]) -> Trajectory:
    """Apply `step`, which donates params and state, once per batch; `on_step` hears each loss."""
    losses, first = [], None
    for batch in task.batches:
        loss, grads = task.loss_and_grads(params, jax.device_put(batch, task.tokens))
        params, state = step(params, state, grads)
        losses.append(float(loss))
        on_step(losses[-1])
        first = _host_copy(params) if first is None else first
    held_out = jnp.stack([task.loss(params, jax.device_put(batch, task.tokens)) for batch in task.held_out])
    return Trajectory(tuple(losses), float(held_out.mean()), first, _host_copy(params))


def largest_difference(left: Any, right: Any) -> float:
    """Max |left − right| over all entries of two host trees."""
    return max(float(np.max(np.abs(a - b))) for a, b in zip(jax.tree.leaves(left), jax.tree.leaves(right)))


def _host_copy(params: Any) -> Any:
    # np.array copies: on CPU device_get may return a view of a buffer that the next step is about to reuse.
    return jax.tree.map(np.array, params)
