"""The demo's training step under three optimizers: what share of it the optimizer takes, and what it buys.

The transformer, text, weights, batches and learning rates are the demo's (`muon_shard.demo`), the latter not tuned.
At each batch size one line per optimizer: milliseconds of the model (loss and gradients) and of the optimizer (medians
of interleaved rounds), the optimizer's share of their sum, and the held-out loss (nats per byte)

* at equal steps: all take `--steps`;
* at equal time: each takes as many steps as fit in the time of ours, by the milliseconds above, with a learning rate
  schedule of that length.

A larger batch makes the model dearer and leaves the optimizer as it is. On emulated devices all share this machine's
cores, so the share is larger than where the model runs on accelerators with many tokens each.
"""

import argparse
import dataclasses
import json
import statistics
import time
from collections.abc import Mapping
from typing import Any

import jax
from rich.console import Console
from rich.progress import Progress

from muon_shard.demo import DemoConfig
from muon_shard.demo.devices import describe, make_mesh, start_devices
from muon_shard.demo.measure import compile_step, copy, init_state
from muon_shard.demo.train import OURS, Task, make_optimizers, make_task, train


@dataclasses.dataclass(frozen=True)
class Optimizer:
    """A compiled optimizer step and the (params, state) it starts from."""

    step: jax.stages.Compiled
    start: tuple[Any, Any]


def prepare(config: DemoConfig, task: Task, mesh: jax.sharding.Mesh, grads: Any, names: list[str]) -> dict:
    """The optimizers `names` by name, their schedules as long as `config.steps`."""
    chosen = {name: tx for name, tx in make_optimizers(config).items() if name in names}
    states = {name: init_state(tx, task.params, mesh) for name, tx in chosen.items()}
    return {
        name: Optimizer(compile_step(tx, task.params, states[name], grads), (task.params, states[name]))
        for name, tx in chosen.items()
    }


def timed(task: Task, optimizers: Mapping[str, Optimizer], rounds: int) -> dict[str, dict[str, float]]:
    """Medians over rounds in which the optimizers take turns, after one to warm up; shares are of each round."""
    carried = {name: copy(optimizer.start) for name, optimizer in optimizers.items()}
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in optimizers}
    tokens = jax.device_put(task.batches[0], task.tokens)
    for _ in range(rounds + 1):
        for name, optimizer in optimizers.items():
            params, state = carried[name]
            begin = time.perf_counter()
            _, grads = jax.block_until_ready(task.loss_and_grads(params, tokens))
            between = time.perf_counter()
            carried[name] = jax.block_until_ready(optimizer.step(params, state, grads))
            times[name].append((between - begin, time.perf_counter() - between))
    return {
        name: {
            "model_ms": round(1e3 * statistics.median(model for model, _ in each[1:]), 2),
            "optimizer_ms": round(1e3 * statistics.median(own for _, own in each[1:]), 2),
            "share": round(statistics.median(own / (model + own) for model, own in each[1:]), 4),
        }
        for name, each in times.items()
    }


def steps_in_time(found: Mapping[str, Mapping[str, float]], steps: int) -> dict[str, int]:
    """How many steps each optimizer takes in the time in which ours takes `steps`."""
    # The model is the same for all of them: one figure for it, or its noise would decide.
    model = statistics.median(each["model_ms"] for each in found.values())
    ours = steps * (model + found[OURS]["optimizer_ms"])
    return {name: max(1, round(ours / (model + each["optimizer_ms"]))) for name, each in found.items()}


def trained(task: Task, optimizer: Optimizer, steps: int, name: str, progress: Progress) -> dict[str, Any]:
    """Losses of a training run of the first `steps` batches."""
    bar = progress.add_task(name, total=steps)
    params, state = copy(optimizer.start)
    shorter = dataclasses.replace(task, batches=task.batches[:steps])
    done = train(shorter, optimizer.step, params, state, lambda loss: progress.advance(bar))
    progress.remove_task(bar)
    return {
        "steps": steps,
        "held_out_loss": round(done.held_out_loss, 4),
        "losses": [round(loss, 4) for loss in done.losses],
    }


def measure(config: DemoConfig, mesh: jax.sharding.Mesh, progress: Progress) -> dict[str, dict[str, Any]]:
    """All figures of one batch size, by optimizer."""
    task = make_task(config, mesh)
    _, grads = task.loss_and_grads(task.params, jax.device_put(task.batches[0], task.tokens))
    names = list(make_optimizers(config))
    optimizers = prepare(config, task, mesh, grads, names)
    found: dict[str, dict[str, Any]] = dict(timed(task, optimizers, config.timing_rounds))
    for name, steps in steps_in_time(found, config.steps).items():
        label = f"{name}, batch {config.batch}"
        equal = trained(task, optimizers[name], config.steps, f"{label}, equal steps", progress)
        found[name]["equal_steps"] = found[name]["equal_time"] = equal
        if steps != config.steps:
            other = dataclasses.replace(config, steps=steps)
            # The seed draws the same batches, more or fewer of them.
            longer = dataclasses.replace(task, batches=make_task(other, mesh).batches)
            optimizer = prepare(other, task, mesh, grads, [name])[name]
            found[name]["equal_time"] = trained(longer, optimizer, steps, f"{label}, equal time", progress)
    return found


def run(config: DemoConfig, batches: list[int]) -> dict[str, Any]:
    """Every batch size."""
    devices = start_devices(config)
    mesh = make_mesh(config, devices)
    with Progress(console=Console(stderr=True), transient=True) as progress:
        found = {
            str(batch): measure(dataclasses.replace(config, batch=batch), mesh, progress)
            for batch in progress.track(batches, description="batch sizes")
        }
    return {
        "jax": jax.__version__,
        "device": describe(devices),
        "mesh": dict(mesh.shape),
        "context": config.context,
        "rounds": config.timing_rounds,
        "model": dataclasses.asdict(config.model),
        "batches": found,
    }


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.end_to_end",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--quick", action="store_true", help="the demo's smaller model, 10 steps, 3 rounds")
    parser.add_argument("--batches", nargs="+", type=int, default=[16, 64], help="sequences per step")
    parser.add_argument("--steps", type=int, help="default 40")
    parser.add_argument("--rounds", type=int, help="default 5")
    args = parser.parse_args()
    config = DemoConfig.quick(steps=10) if args.quick else DemoConfig()
    given = {"steps": args.steps, "timing_rounds": args.rounds}
    config = dataclasses.replace(config, **{name: value for name, value in given.items() if value is not None})
    print(json.dumps(run(config, args.batches)))


if __name__ == "__main__":
    main()
