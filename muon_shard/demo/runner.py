"""The demo from start to end: devices, plan, compilation, timing, training, report."""

from __future__ import annotations

import time

import jax
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

import muon_shard
from muon_shard.labels import by_path

from . import measure, report
from .config import DemoConfig
from .devices import describe, make_mesh, start_devices
from .results import DemoResult, OptimizerResult
from .train import OURS, REFERENCE, Task, Trajectory, largest_difference, make_optimizers, make_task, train


def run(config: DemoConfig, console: Console) -> DemoResult:
    """Train under three optimizers and compare them; writes `loss.png` and `demo.json` into `config.out`."""
    begin = time.perf_counter()
    devices = start_devices(config)
    mesh = make_mesh(config, devices)
    task = make_task(config, mesh)
    console.print(report.headline(config, describe(devices), dict(mesh.shape), task.params))
    dimension_numbers = by_path(task.params)
    plan = muon_shard.make_plan(task.params, muon_weight_dimension_numbers=dimension_numbers)
    console.print(str(plan), markup=False, highlight=False, soft_wrap=True)

    steps, starts, milliseconds = _prepare(config, task, mesh, dimension_numbers, console)
    trajectories = _train_all(config, task, steps, starts, console)
    ours, reference = trajectories[OURS], trajectories[REFERENCE]
    result = DemoResult(
        devices=describe(devices),
        mesh=tuple(mesh.shape.items()),
        optimizers=tuple(
            OptimizerResult(
                name=name,
                losses=run.losses,
                held_out_loss=run.held_out_loss,
                step_milliseconds=milliseconds[name],
                collectives=measure.count_collectives(steps[name].as_text()),
            )
            for name, run in trajectories.items()
        ),
        first_step_difference=largest_difference(ours.first_params, reference.first_params),
        final_difference=largest_difference(ours.last_params, reference.last_params),
        seconds=time.perf_counter() - begin,
        plot=config.out / "loss.png",
        record=config.out / "demo.json",
    )
    report.write(result)
    report.show(result, console)
    return result


def _prepare(config: DemoConfig, task: Task, mesh: jax.sharding.Mesh, dimension_numbers, console: Console):
    """Compile and time every optimizer step: (compiled steps, (params, state) at the start, ms), each by name."""
    optimizers = make_optimizers(config, dimension_numbers)
    with console.status("compiling the model"):
        _, grads = task.loss_and_grads(task.params, jax.device_put(task.batches[0], task.tokens))
    starts = {name: (task.params, measure.init_state(tx, task.params, mesh)) for name, tx in optimizers.items()}
    steps = {}
    for name, tx in optimizers.items():
        with console.status(f"compiling {name}"):
            steps[name] = measure.compile_step(tx, *starts[name], grads)
    with console.status("timing the optimizer steps"):
        milliseconds = measure.median_milliseconds(steps, starts, grads, config.timing_rounds)
    return steps, starts, milliseconds


def _train_all(config: DemoConfig, task: Task, steps, starts, console: Console) -> dict[str, Trajectory]:
    """Train once per optimizer, each from a copy of the same start, with one progress bar each."""
    columns = (
        TextColumn("{task.description:18}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]:.3f}"),
        TimeElapsedColumn(),
    )
    trajectories = {}
    with Progress(*columns, console=console) as progress:
        for name, step in steps.items():
            bar = progress.add_task(name, total=config.steps, loss=float("nan"))
            trajectories[name] = train(
                task, step, *measure.copy(starts[name]), lambda loss: progress.update(bar, advance=1, loss=loss)
            )
    return trajectories
