"""Pictures of what the benchmarks measured, PNG.

    python -m benchmarks --out results.json
    python -m benchmarks.pictures results.json --out pictures

Takes results files and the output of single scripts, any number of them; of two runs of one script the last counts.
What a picture needs and the files lack is left out, with a note on stderr; in `summary.png` its panel says so. Prints
the files written as one line of JSON.
"""

import argparse
import collections
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks import panels, reference, results
from benchmarks.results import Results
from benchmarks.transports import SETS as TRANSPORTED

DPI = 200


def about(name: str) -> str:
    """A set of matrices of `benchmarks.step` in words."""
    chosen = reference.SETS[name]
    axes = ", ".join(f"{axis} {size}" for axis, size in zip(chosen.mesh_axes, chosen.mesh_shape, strict=True))
    return f"{len(chosen.leaves)} matrices ({name}), {axes}"


def figure(width: float, height: float, title: str, found: Results) -> Figure:
    """An empty figure that says what it was measured on."""
    out = Figure(figsize=(width, height), layout="constrained")
    out.suptitle(title, fontsize=13)
    told = machine(found)
    if told:
        out.supxlabel(told, fontsize=8, color="dimgray")
    return out


def machine(found: Results) -> str:
    """Versions and device in one line; empty if the files do not tell."""
    if not found.machine:
        return ""
    about, versions = found.machine, found.machine["versions"]
    names = ", ".join(f"{name} {versions[name]}" for name in ("jax", "optax") if name in versions)
    return f"{about['cores']} cores ({about['device']}), {names}, commit {(about['commit'] or 'unknown')[:8]}"


def step(found: Results) -> Figure | None:
    """Time, bytes and memory of every set."""
    measured = {name: x for name in reference.SETS if (x := found.last("step", set=name))}
    if not measured:
        return None
    out = figure(13, 0.5 + 3.2 * len(measured), "One optimizer step on 8 emulated devices", found)
    for row, (name, x) in zip(out.subplots(len(measured), 3, squeeze=False), measured.items(), strict=True):
        panels.step_times(row[0], x, about(name))
        panels.step_bytes(row[1], x, "Bytes moved")
        panels.step_memory(row[2], x, "Memory")
        for axes in row[1:]:
            if len(axes.get_yticks()) == len(x["peers"]):
                axes.tick_params(labelleft=False)  # as on the left
    return out


def scaling(found: Results) -> Figure | None:
    """FLOPs against the ideal, bytes, temporaries, compile time, step time, planning time."""
    x = found.last("scaling")
    if x is None:
        return None
    out = figure(13, 7.5, "More emulated devices", found)
    (flops, received, memory), (compiling, seconds, planning) = out.subplots(2, 3)
    panels.scaling_flops(flops, x, "NS FLOPs per device, and strong scaling efficiency")
    lines: Any = panels.scaling_lines
    everything = ("fsdp", "hsdp", "weak")
    lines(received, x, "received_bytes", 1e6, "Bytes received per device", "MB per step", everything)
    lines(memory, x, "temp_bytes", 1e6, "Temporaries per device", "MB", everything)
    lines(compiling, x, "compile_seconds", 1, "Tracing and compiling", "seconds", everything)
    lines(seconds, x, "ms_median", 1e3, "Step: all devices share these cores", "seconds", ("fsdp", "hsdp"))
    panels.planning_seconds(planning, x, f"Planning {x['planning'][0]['model']}")
    return out


def transports(found: Results) -> Figure | None:
    """Measured beside simulated, and bytes, for each set of matrices."""
    x = found.last("transports")
    sets = [name for name in TRANSPORTED if x and name in x]
    if x is None or not sets:
        return None
    out = figure(10.5, 0.5 + 3.1 * len(sets), "Transports on 8 emulated devices, host 2 × fsdp 4", found)
    for row, name in zip(out.subplots(len(sets), 2, squeeze=False), sets, strict=True):
        panels.transport_times(row[0], x, name, f"Time: {name} matrices, {of(TRANSPORTED[name])}")
        panels.transport_bytes(row[1], x, name, "Bytes")
    return out


def of(shapes: Mapping[str, tuple[int, ...]]) -> str:
    """Shapes, and how many there are of each."""
    counts = collections.Counter(shapes.values())
    return ", ".join(f"{count} × {'×'.join(map(str, shape))}" for shape, count in counts.items())


def end_to_end(found: Results) -> Figure | None:
    """Shares of a training step, and losses."""
    x = found.last("end_to_end")
    if x is None:
        return None
    batches = list(x["batches"])
    out = figure(4.2 * (1 + len(batches)), 4.8, f"Training the demo's transformer on {x['device']}", found)
    first, *rest = out.subplots(1, 1 + len(batches))
    panels.shares(first, x, "Share of the optimizer")
    for axes, batch in zip(rest, batches, strict=True):
        panels.losses(axes, x, batch, f"Loss, batch of {batch} × {x['context']} bytes")
    return out


def one_panel(script: str, draw: Callable[..., None], title: str, rows: Callable[[Any], int]) -> Callable:
    """A figure of one panel of a script's output, as high as its rows need."""

    def picture(found: Results) -> Figure | None:
        x = found.last(script)
        if x is None:
            return None
        out = figure(9, 1.7 + 0.2 * rows(x), title, found)
        draw(out.subplots(), x, "")
        return out

    return picture


def summary(found: Results) -> Figure | None:
    """One figure: time, bytes, scaling, memory."""
    if not found.found:
        return None
    out = figure(11, 7.2, "Muon on sharded parameters: one optimizer step, 8 transformer layers, fp32", found)
    axes, reference, scaled = out.subplots(2, 2), found.last("step", set="reference"), found.last("scaling")
    wanted: list[tuple[Axes, Any, Callable[..., None], str, str]] = [
        (
            axes[0, 0],
            reference,
            panels.step_times,
            "Time on 8 emulated devices, replica 2 × fsdp 4",
            "step --set reference",
        ),
        (axes[0, 1], reference, panels.step_bytes, "Bytes moved, and collectives", "step --set reference"),
        (axes[1, 0], scaled, panels.scaling_flops, "Newton–Schulz work per device", "scaling"),
        (axes[1, 1], reference, panels.step_memory, "Temporaries", "step --set reference"),
    ]
    for panel, x, draw, title, command in wanted:
        if x is None:
            panels.missing(panel, title, command)
        else:
            draw(panel, x, title)
    return out


PICTURES: dict[str, Callable[[Results], Figure | None]] = {
    "summary": summary,
    "step": step,
    "scaling": scaling,
    "transports": transports,
    "end_to_end": end_to_end,
    "newton_schulz": one_panel(
        "newton_schulz", panels.newton_schulz_ratios, "Newton–Schulz on one device", lambda x: 2 * len(x["shapes"])
    ),
    "article": one_panel("article", panels.article_bars, "The article's figures", panels.article_height),
    "breadth": one_panel(
        "breadth", panels.breadth_bars, "Models and layouts on 8 emulated devices", lambda x: 2 * len(x["cases"])
    ),
}


def draw_all(found: Results, folder: Path) -> dict[str, Any]:
    """Writes what can be drawn; the files, and what was left out."""
    folder.mkdir(parents=True, exist_ok=True)
    written, left_out = [], []
    for name, picture in PICTURES.items():
        drawn = picture(found)
        if drawn is None:
            left_out.append(name)
            continue
        path = folder / f"{name}.png"
        drawn.savefig(path, dpi=DPI)
        written.append(str(path))
    return {"written": written, "left_out": left_out}


def main() -> None:
    """Parse, draw, print."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.pictures", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="+", type=Path, help="results files or outputs of scripts")
    parser.add_argument("--out", type=Path, default=Path("pictures"), help="folder")
    args = parser.parse_args()
    report = draw_all(results.read(args.files), args.out)
    for name in report["left_out"]:
        print(f"{name}.png is left out: its script's output is in none of the files.", file=sys.stderr)
    print(json.dumps(report))


if __name__ == "__main__":
    main()
