"""The demo from start to end: devices, plan, compilation, timing, training, report."""

from __future__ import annotations

import dataclasses
import functools
import time
from typing import Any

import jax
from jax.sharding import Mesh
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

import muon_shard
from muon_shard.demo import measure, report
from muon_shard.demo.config import DemoConfig
from muon_shard.demo.devices import describe, make_mesh, start_devices
from muon_shard.demo.results import DemoResult, OptimizerResult
from muon_shard.demo.train import (
    OURS,
    REFERENCE,
    Task,
    Trajectory,
    largest_difference,
    make_optimizers,
    make_task,
    train,
)
from muon_shard.labels import by_path


def run(config: DemoConfig, console: Console) -> DemoResult:
    """Train under three optimizers and compare them; writes `loss.png` and `demo.json` into `config.out`."""
    begin = time.perf_counter()
    devices = start_devices(config)
    mesh = make_mesh(config, devices)
    task = make_task(config, mesh)
    console.print(report.headline(config, describe(devices), dict(mesh.shape), task.params))
    plan = muon_shard.make_plan(task.params, muon_weight_dimension_numbers=by_path)
    console.print(str(plan), markup=False, highlight=False, soft_wrap=True)

    prepared = _prepare(config, task, mesh, console)
    trajectories = _train_all(config, task, prepared, console)
    ours, reference = trajectories[OURS], trajectories[REFERENCE]
    result = DemoResult(
        devices=describe(devices),
        mesh=tuple(mesh.shape.items()),
        optimizers=tuple(_optimizer_result(name, prepared[name], trajectories[name]) for name in prepared),
        first_step_difference=largest_difference(ours.first_params, reference.first_params),
        final_difference=largest_difference(ours.last_params, reference.last_params),
        seconds=time.perf_counter() - begin,
        plot=config.out / "loss.png",
        record=config.out / "demo.json",
    )
    report.write(result)
    report.show(result, console)
    return result


@dataclasses.dataclass(frozen=True)
class _Prepared:
    """One optimizer, ready to train: its compiled step, (params, state) at the start, and the step's time."""

    step: jax.stages.Compiled
    start: tuple[Any, Any]
    milliseconds: float


def _prepare(config: DemoConfig, task: Task, mesh: Mesh, console: Console) -> dict[str, _Prepared]:
    """Compile and time the step of every optimizer."""
    with console.status("compiling the model"):
        _, grads = task.loss_and_grads(task.params, jax.device_put(task.batches[0], task.tokens))
    steps: dict[str, jax.stages.Compiled] = {}
    starts: dict[str, tuple[Any, Any]] = {}
    for name, tx in make_optimizers(config).items():
        with console.status(f"compiling {name}"):
            state = measure.init_state(tx, task.params, mesh)
            starts[name] = (task.params, state)
            steps[name] = measure.compile_step(tx, task.params, state, grads)
    with console.status("timing the optimizer steps"):
        times = measure.median_milliseconds(steps, starts, grads, config.timing_rounds)
    return {name: _Prepared(steps[name], starts[name], times[name]) for name in steps}


def _train_all(config: DemoConfig, task: Task, prepared: dict[str, _Prepared], console: Console):
    """Train once per optimizer, each from a copy of the same start, with one progress bar each."""
    columns = (
        TextColumn("{task.description:18}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]:.3f}"),
        TimeElapsedColumn(),
    )
    trajectories: dict[str, Trajectory] = {}
    with Progress(*columns, console=console) as progress:
        for name, optimizer in prepared.items():
            bar = progress.add_task(name, total=config.steps, loss=float("nan"))
            advance = functools.partial(_advance, progress, bar)
            params, state = measure.copy(optimizer.start)
            trajectories[name] = train(task, optimizer.step, params, state, advance)
    return trajectories


def _advance(progress: Progress, bar: TaskID, loss: float) -> None:
    progress.update(bar, advance=1, loss=loss)


def _optimizer_result(name: str, prepared: _Prepared, trajectory: Trajectory) -> OptimizerResult:
    return OptimizerResult(
        name=name,
        losses=trajectory.losses,
        held_out_loss=trajectory.held_out_loss,
        step_milliseconds=prepared.milliseconds,
        collectives=measure.count_collectives(prepared.step.as_text() or ""),
    )
