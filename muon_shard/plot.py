"""A plan as a picture: the work of every device by matrix shape, and the bytes it receives over each mesh axis."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import math
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

if TYPE_CHECKING:
    from muon_shard.plan import MeshPlan, Plan

MOST_BARS = 64
"""Devices that get a bar each; more are drawn as one bar per program."""
MOST_SHAPES = 10
MOST_SEGMENTS = 24
"""Matrices of a bar up to which each is set apart."""
WIDTH = 0.8
# Dark and light in turn, so that neighbours in a bar differ in grey print too (Paul Tol's muted scheme).
COLORS = "#332288 #88ccee #117733 #ddcc77 #882255 #44aa99 #661100 #cc6677 #4477aa #aa4499".split()
OTHER, FILLER, UNSHARED = "#aaaaaa", "#eeeeee", "#d9d9d9"
PURPOSES = {"blocks": "#0b3c6f", "results": "#f2a65a", "updates": "#7a7a7a"}
"""By the first word of a purpose."""
CUT = 1.35
"""Height of the panel over its busiest device: what would rise further is cut off."""


@dataclasses.dataclass(frozen=True, eq=False)
class Loads:
    """Work by device and canonical shape, the shape with most work first.

    Attributes:
        shapes: (m, n), m ≤ n.
        matrices: how many there are of each on the mesh.
        count: matrices that the device owns, [devices, shapes].
        owned: work on them, [devices, shapes].
        filler: work in slots that hold no matrix, since programs were merged, [devices].
        unshared: what each device would do if it computed every matrix of which it holds a part.
        weighted: whether work is more than FLOPs, weighted by how fast each product runs.
    """

    shapes: tuple[tuple[int, int], ...]
    matrices: tuple[int, ...]
    count: np.ndarray
    owned: np.ndarray
    filler: np.ndarray
    unshared: int
    weighted: bool


@dataclasses.dataclass(frozen=True, eq=False)
class Bars:
    """Where bars stand and what they say: `rows[i]` are the devices of bar i, whose mean is drawn."""

    rows: tuple[np.ndarray, ...]
    x: np.ndarray
    labels: tuple[str, ...]
    groups: tuple[tuple[float, str], ...]
    xlabel: str


def draw(plan: Plan, path_or_ax: Any = None) -> Figure:
    """The picture of a plan, two panels for each mesh.

    Args:
        plan: what to draw.
        path_or_ax: a file to write, or an `Axes` that takes the work of the devices alone.

    Raises:
        ValueError: an `Axes` was given for a plan on several meshes.
        TypeError: it is neither a path nor an `Axes`.
    """
    if isinstance(path_or_ax, Axes):
        if len(plan.parts) != 1:
            raise ValueError(f"Plan.plot: one Axes takes a plan on one mesh, this one is on {len(plan.parts)}.")
        draw_work(path_or_ax, plan.parts[0])
        return path_or_ax.figure.figure  # type: ignore[return-value]  # of a subfigure its figure, which is its own
    if not isinstance(path_or_ax, str | os.PathLike | None):
        raise TypeError(f"Plan.plot: expected a path or a matplotlib Axes, got {path_or_ax!r}.")
    rows = [max(1, len(_received(part))) for part in plan.parts]
    heights = [height for count in rows for height in (3.7, 0.75 + 0.4 * count)]
    figure = Figure(figsize=(10, sum(heights, 0.4)), layout="constrained")
    panels = figure.subplots(len(heights), 1, height_ratios=heights) if heights else np.array([])
    for part, work, bytes_ in zip(plan.parts, panels[::2], panels[1::2], strict=True):
        draw_work(work, part)
        draw_bytes(bytes_, part)
    if not plan.parts:
        figure.suptitle("Muon plan: nothing to orthogonalize")
    if path_or_ax is not None:
        figure.savefig(path_or_ax, dpi=200)
    return figure


def draw_work(axes: Axes, part: MeshPlan) -> None:
    """One stacked bar per device, or per program where there are many devices."""
    loads, bars = measure(part), arrange(part)
    busiest, ideal = int(part.load.max()), part.total("cost") / part.devices
    factor, prefix = scale(busiest)
    _draw_stacks(axes, loads, bars, factor)
    axes.axhline(ideal / factor, color="black", linestyle="--", linewidth=1.2, label=f"ideal {text(ideal)}FLOP")
    if part.bound > 1.01 * ideal:
        best = f"best possible {text(part.bound)}FLOP"
        axes.axhline(part.bound / factor, color="black", linestyle=":", linewidth=1.2, label=best)
    axes.set_ylim(0, CUT * busiest / factor)
    ticks, labels = list(bars.x), list(bars.labels)
    if loads.unshared > busiest:
        ticks, labels = [_draw_unshared(axes, loads, busiest, factor, len(ticks)), *ticks], ["not\nshared", *labels]
    axes.set_xticks(ticks, labels, fontsize=8)
    axes.set_xlim(min(-3, 1.3 * ticks[0]), max(3, ticks[-1] + 1))
    shown = [len(label) for label in bars.labels if label]
    if len(shown) * max(shown) > 72:  # side by side they would touch
        axes.tick_params(axis="x", labelrotation=90)
    if bars.groups:
        below = axes.secondary_xaxis(location=0)
        below.set_xticks([x for x, _ in bars.groups], [f"\n{name}" for _, name in bars.groups], fontsize=9)
        below.tick_params(axis="x", length=0)
    unit = f"{prefix}FLOP, weighted by speed" if loads.weighted else f"{prefix}FLOP"
    axes.set(xlabel=bars.xlabel, ylabel=f"work per device and step\n({unit})")
    axes.set_title(_title(part), fontsize=11)
    axes.spines[["top", "right"]].set_visible(False)
    # As they are stacked; matplotlib would put the lines first.
    handles, names = axes.get_legend_handles_labels()
    order = sorted(range(len(names)), key=lambda i: (isinstance(handles[i], Line2D), -i))
    _legend(axes, [handles[i] for i in order], [names[i] for i in order], "matrices m×n (number)")


def _draw_stacks(axes: Axes, loads: Loads, bars: Bars, factor: float) -> None:
    """The mean work of the devices of each bar, shape upon shape; single matrices where they can be told apart."""
    owned, count = (np.stack([f[rows].mean(0) for rows in bars.rows]) for f in (loads.owned / factor, loads.count))
    filler = np.array([loads.filler[rows].mean() for rows in bars.rows]) / factor
    bottom, ends = np.zeros(len(bars.x)), []
    few = count.sum(1).max() <= MOST_SEGMENTS
    for name, color, columns in _names(loads):
        axes.bar(bars.x, owned[:, columns].sum(1), WIDTH, bottom, color=color, label=name)
        for column in columns:
            for x, low, height, n in zip(bars.x, bottom, owned[:, column], count[:, column], strict=True):
                parts = np.arange(1, math.floor(n) + 1) / n if few and n else [1]
                ends += [(x, low + part * height) for part in parts]
            bottom = bottom + owned[:, column]
    x, y = np.array(ends).T
    axes.hlines(y, x - WIDTH / 2, x + WIDTH / 2, color="white", linewidth=0.8)
    if filler.any():
        look: Any = {"color": FILLER, "edgecolor": "gray", "hatch": "///", "linewidth": 0.4}
        axes.bar(bars.x, filler, WIDTH, bottom, label="filler: fewer programs", **look)


def _draw_unshared(axes: Axes, loads: Loads, busiest: int, factor: float, bars: int) -> float:
    """The bar of a device that shares nothing, cut off near the top of the panel; where it stands."""
    x, top = -max(1.6, 0.07 * bars), CUT * busiest
    width, height = max(WIDTH, 0.03 * bars), min(loads.unshared, 0.8 * top)
    look: Any = {"color": UNSHARED, "edgecolor": "gray", "hatch": "..", "linewidth": 0.8, "zorder": 3}
    (bar,) = axes.bar([x], [height / factor], width, **look)
    if loads.unshared > height:  # a slanting gap says that the bar goes on
        for y in (0.67, 0.71):
            rise = [y * top / factor, (y + 0.04) * top / factor]
            (gap,) = axes.plot([x - width, x + width], rise, color="white", linewidth=2.5, zorder=4)
            gap.set_clip_path(bar)
    told = f"{text(loads.unshared)}FLOP\n{loads.unshared / busiest:.3g}× the busiest"
    axes.text(x - width / 2, (height + 0.02 * top) / factor, told, fontsize=8, va="bottom", ha="left")
    return x


def draw_bytes(axes: Axes, part: MeshPlan) -> None:
    """One bar per set of mesh axes: bytes that a device receives over it, by purpose."""
    received = _received(part)
    totals = [sum(by_purpose.values()) for by_purpose in received.values()]
    if not any(totals):
        axes.text(0.5, 0.5, "no device receives anything", ha="center", va="center", transform=axes.transAxes)
        axes.set_axis_off()
        return
    factor, prefix = scale(max(totals))
    left, drawn = np.zeros(len(received)), []
    for purpose in dict.fromkeys(p for by_purpose in received.values() for p in by_purpose):
        widths = np.array([by_purpose.get(purpose, 0) / factor for by_purpose in received.values()])
        color = PURPOSES.get(purpose.split()[0], OTHER)
        drawn.append(axes.barh(list(received), widths, 0.6, left, color=color, edgecolor="white", label=purpose))
        left = left + widths
    # The last bars end where the stacks do.
    axes.bar_label(drawn[-1], [f"{text(total)}B" for total in totals], padding=4, fontsize=8)
    axes.set(xlim=(0, 1.12 * max(totals) / factor), ylim=(len(received) - 0.5, -0.5))
    axes.set(xlabel=f"received per device and step ({prefix}B)", ylabel="over mesh axis")
    axes.spines[["top", "right"]].set_visible(False)
    _legend(axes, *axes.get_legend_handles_labels(), "purpose")


def measure(part: MeshPlan) -> Loads:
    """The work of a plan on one mesh, taken apart."""
    count, work, matrices = (collections.defaultdict[tuple[int, int], Any](int) for _ in range(3))
    filler, unshared, weighted = np.zeros(part.devices, np.int64), 0, False
    for domain in part.domains:
        counts, slots = (np.array(table, np.int64) for table in (domain.packing.counts, domain.packing.slots))
        costs = [each.cost for each in part.works(domain)]
        weighted = weighted or any(each.cost != each.flops for each in part.works(domain))
        for kind, cost, own, slot in zip(domain.packing.kinds, costs, counts.T, slots.T, strict=True):
            for shape, times in kind.problems:
                of_shape = part.orthogonalizer.work(*shape, domain.dtype).cost if kind.parts else cost
                count[shape] += times * own
                work[shape] += times * of_shape * own
            filler += cost * (slot - own)
        unshared += sum(costs[kind] * n for kind, n in domain.packing.leaves)
    for leaf in part.leaves:
        for shape, times in leaf.layout.kind.problems:
            matrices[shape] += times * leaf.layout.matrices
    shapes = tuple(sorted(work, key=lambda shape: (-int(work[shape].sum()), shape)))
    counts, works = (np.stack([table[shape] for shape in shapes], axis=1) for table in (count, work))
    return Loads(shapes, tuple(matrices[shape] for shape in shapes), counts, works, filler, unshared, weighted)


def arrange(part: MeshPlan) -> Bars:
    """A bar per device, replicas apart; a bar per program, the heaviest first, where that would be too many."""
    if part.devices > MOST_BARS:
        rows = [np.array(members) for members in part.classes]
        rows.sort(key=lambda devices: (-int(part.load[devices[0]]), int(devices[0])))
        labels = tuple(f"×{len(devices):,}" for devices in rows)
        return Bars(tuple(rows), np.arange(len(rows)) * 1.0, labels, (), "program: how many devices run it")
    replica, axes, places = _replicas(part)
    order = np.argsort(replica, kind="stable")
    apart = 1 < len(places) < part.devices
    x = np.arange(part.devices) + (0.8 * replica[order] if apart else 0.0)
    every = -(-part.devices // 32)
    labels = tuple(str(device) if i % every == 0 else "" for i, device in enumerate(order))
    if not apart:
        return Bars(tuple(order[:, None]), x, labels, (), "device")
    xlabel = "device"
    names = [", ".join(f"{axis} {at}" for axis, at in zip(axes, place, strict=True)) for place in places]
    if sum(map(len, names)) > 80:  # side by side they would overlap
        xlabel = f"device, and its place on {', '.join(axes)}"
        names = [",".join(map(str, place)) for place in places]
    groups = tuple((float(x[replica[order] == r].mean()), name) for r, name in enumerate(names))
    return Bars(tuple(order[:, None]), x, labels, groups, xlabel)


def _replicas(part: MeshPlan) -> tuple[np.ndarray, tuple[str, ...], list[tuple[int, ...]]]:
    """Replica of each device, by the axes that replicate the domain with most work; their coordinates."""
    works = [np.sum(np.array(d.packing.counts) @ [work.cost for work in part.works(d)]) for d in part.domains]
    heaviest = part.domains[int(np.argmax(works))]
    sizes, free = dict(part.mesh_axes), part.leaves[heaviest.leaves[0]].layout.free
    places = list(itertools.product(*(range(sizes[axis]) for axis in free)))
    return heaviest.packing.index(free), free, places


def _names(loads: Loads) -> list[tuple[str, str, Sequence[int]]]:
    """(name, color, columns) of what is told apart in a bar."""
    columns = range(len(loads.shapes))
    alone = columns if len(columns) <= MOST_SHAPES else columns[: MOST_SHAPES - 1]
    rest = columns[len(alone) :]
    entries: list[tuple[str, str, Sequence[int]]] = []
    for c in alone:
        (m, n), times = loads.shapes[c], loads.count[:, c].sum() / loads.matrices[c]
        repeated = f", computed {times:.3g}×" if times > 1 else ""
        entries.append((f"{m:,}×{n:,} ({loads.matrices[c]:,}{repeated})", COLORS[c], [c]))
    if rest:
        entries.append((f"other ({sum(loads.matrices[c] for c in rest):,})", OTHER, rest))
    return entries


def _legend(axes: Axes, handles: Sequence[Any], names: Sequence[str], title: str) -> None:
    look: Any = {"bbox_to_anchor": (1, 1), "loc": "upper left", "alignment": "left", "frameon": False}
    axes.legend(handles, names, title=title, fontsize=8, title_fontsize=8, **look)


def _received(part: MeshPlan) -> dict[str, dict[str, int]]:
    """Bytes that each device receives, by axes (in the order of first use) and purpose."""
    received: dict[str, dict[str, int]] = {}
    for domain in part.domains:
        for c in domain.collectives:
            by_purpose = received.setdefault("+".join(c.axes), {})
            by_purpose[c.purpose] = by_purpose.get(c.purpose, 0) + c.received
    return received


def _title(part: MeshPlan) -> str:
    mesh = " × ".join(f"{name} {size}" for name, size in part.mesh_axes) or "one device"
    matrices, busiest = sum(leaf.layout.problems for leaf in part.leaves), int(part.load.max())
    noun = "matrix" if matrices == 1 else "matrices"
    return (
        f"Muon plan: {matrices:,} {noun} on {part.devices:,} device{'s' * (part.devices > 1)} ({mesh})\n"
        f"balance {part.total('cost') / part.devices / busiest:.1%}, {part.bound / busiest:.1%} of the best possible"
    )


def scale(value: float) -> tuple[float, str]:
    """The power of 1000 in which a value reads well, and its prefix."""
    power = 0
    while value >= 1000 and power < 6:
        value, power = value / 1000, power + 1
    return 1000.0**power, ["", "k", "M", "G", "T", "P", "E"][power]


def text(value: float) -> str:
    """1.23e15 as '1.23 P'."""
    factor, prefix = scale(value)
    return f"{value / factor:.3g} {prefix}"
