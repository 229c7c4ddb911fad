"""The demo's findings for people: a headline, a table; and for programs: JSON."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from typing import Any

import jax
from rich import box
from rich.console import Console
from rich.table import Table

from muon_shard.demo.config import DemoConfig
from muon_shard.demo.measure import COLLECTIVES
from muon_shard.demo.plot import draw
from muon_shard.demo.results import DemoResult, OptimizerResult


def headline(config: DemoConfig, devices: str, mesh: Mapping[str, int], params: Any) -> str:
    """What is about to be trained, and on what."""
    count = sum(x.size for x in jax.tree.leaves(params))
    axes = ", ".join(f"{name}={size}" for name, size in mesh.items())
    return (
        f"Devices: {devices}, mesh ({axes})\n"
        f"Model: {count / 1e6:.2f} M parameters, {config.model.layers} layers of width {config.model.width}, "
        f"every second one with {config.model.experts} experts\n"
        f"Data: {config.steps} steps of {config.batch} × {config.context} bytes of English"
    )


def write(result: DemoResult) -> None:
    """Write the plot and the JSON record."""
    result.plot.parent.mkdir(parents=True, exist_ok=True)
    draw(result)
    record = dataclasses.asdict(result)
    result.record.write_text(json.dumps(record, indent=2, default=str) + "\n")


def show(result: DemoResult, console: Console) -> None:
    """Print the table and what to read from it."""
    console.print(table(result))
    console.print(
        f"Largest weight difference between the two Muons: {result.first_step_difference:.1e} after one "
        f"step, {result.final_difference:.1e} after {len(result.optimizers[0].losses)}.\n"
        "Training magnifies rounding, above all where it flips a top-k choice of experts: changing the last bit of "
        "the first weights does as much."
    )
    files = f"Loss curves: {result.plot}\nRecord: {result.record}"
    console.print(f"{files}\nDone in {result.seconds:.0f} s", soft_wrap=True)


def table(result: DemoResult) -> Table:
    """One column per optimizer, one row per finding."""
    reference = result.optimizers[1].step_milliseconds
    rows: list[tuple[str, Callable[[OptimizerResult], str]]] = [
        ("first loss, nats/byte", lambda x: f"{x.losses[0]:.3f}"),
        ("final loss, nats/byte", lambda x: f"{x.final_loss:.3f}"),
        ("held-out, nats/byte", lambda x: f"{x.held_out_loss:.3f}"),
        ("optimizer step, ms", lambda x: f"{x.step_milliseconds:.1f}"),
        ("time / optax Muon's", lambda x: f"{x.step_milliseconds / reference:.2f}"),
        *((name, lambda x, name=name: str(x.collectives[name])) for name in COLLECTIVES),
    ]
    # Collectives are those of the optimizer step alone: the model's own are the same in every column.
    title = "Optimizers compared (collectives: in the compiled optimizer step)"
    out = Table(title=title, box=box.SIMPLE_HEAD)
    out.add_column("")
    for optimizer in result.optimizers:
        out.add_column(optimizer.name, justify="right", no_wrap=True)
    for name, value in rows:
        out.add_row(name, *(value(optimizer) for optimizer in result.optimizers))
    return out
