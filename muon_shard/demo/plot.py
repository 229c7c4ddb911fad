"""The demo's picture: loss curves, and the time of an optimizer step."""

from __future__ import annotations

from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from muon_shard.demo.results import DemoResult

# Told apart in grey print by line style, width and lightness. The reference lies under ours, wide and pale,
# because two equal optimizers draw one curve.
STYLES: tuple[dict[str, Any], ...] = (
    dict(color="#0b3c6f", linewidth=1.6, linestyle="-", zorder=3),
    dict(color="#f2a65a", linewidth=5.0, linestyle="-", zorder=2),
    dict(color="#7a7a7a", linewidth=1.6, linestyle="--", zorder=1),
)


def draw(result: DemoResult) -> None:
    """Save the picture to `result.plot`."""
    figure = Figure(figsize=(9, 4), layout="constrained")
    curves, bars = figure.subplots(1, 2, width_ratios=(2, 1))
    _draw_losses(curves, result)
    _draw_times(bars, result)
    mesh = ", ".join(f"{name}={size}" for name, size in result.mesh)
    figure.suptitle(f"Muon on sharded weights: {result.devices}, mesh {mesh}")
    figure.savefig(result.plot, dpi=200)


def _draw_losses(axes: Axes, result: DemoResult) -> None:
    for optimizer, style in zip(result.optimizers, STYLES, strict=True):
        steps = range(1, len(optimizer.losses) + 1)
        axes.plot(steps, optimizer.losses, label=optimizer.name, **style)
    axes.set(title="Training loss", xlabel="step", ylabel="cross-entropy (nats per byte)")
    axes.grid(alpha=0.3)
    axes.legend()


def _draw_times(axes: Axes, result: DemoResult) -> None:
    names = [optimizer.name.replace(".", ".\n") for optimizer in result.optimizers]
    times = [optimizer.step_milliseconds for optimizer in result.optimizers]
    bars = axes.bar(names, times, color=[style["color"] for style in STYLES])
    axes.bar_label(bars, fmt="%.1f")
    axes.set(title="Optimizer step alone", ylabel="median time (ms)")
    axes.tick_params(axis="x", labelsize=8)
    axes.margins(y=0.15)
