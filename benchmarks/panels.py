"""The panels of `benchmarks.pictures`: each draws what one script measured on one `Axes`."""

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes

from benchmarks.results import article_case, article_ratios, rounds
from muon_shard.plot import scale, text

# One colour per peer in all pictures, dark and light enough apart to be told in grey print.
PEERS = {
    "ours": ("muon_shard", "#0b3c6f"),
    "stacked": ("stacks by hand", "#44aa99"),
    "optax": ("optax.contrib.muon\n(GSPMD)", "#f2a65a"),
    "redundant": ("all-gather,\nall compute all", "#cc6677"),
    "redundant_stacks": ("all-gather,\nequal shapes fused", "#aa4499"),
    "adamw": ("AdamW (floor)", "#999999"),
}
COLLECTIVES = {
    "all-to-all": ("#0b3c6f", ""),
    "all-gather": ("#f2a65a", "//"),
    "all-reduce": ("#cc6677", ".."),
    "reduce-scatter": ("#44aa99", "\\\\"),
    "collective-permute": ("#999999", "xx"),
}
BLUE, ORANGE, TEAL, RED, GREY = "#0b3c6f", "#f2a65a", "#44aa99", "#cc6677", "#999999"
LABEL = 8  # points, of numbers at bars


def named(peer: str) -> tuple[str, str]:
    """What a peer is called, and its colour."""
    return PEERS.get(peer, (peer.replace("_", " "), "#882255"))


def missing(axes: Axes, title: str, command: str) -> None:
    """Instead of a panel, where nothing was measured."""
    axes.set_axis_off()
    axes.set_title(title)
    told = f"not in the results file\n\npython -m benchmarks.{command}"
    axes.text(0.5, 0.5, told, ha="center", va="center", transform=axes.transAxes, color="dimgray")


def plain(axes: Axes, grid: str) -> None:
    """Few lines, and those behind the data."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis=grid, alpha=0.3)  # type: ignore[arg-type]
    axes.set_axisbelow(True)


def by_peer(axes: Axes, values: Mapping[str, float], labels: Sequence[str], title: str, xlabel: str) -> None:
    """One horizontal bar per peer, from the top, with a label at its end."""
    names, colors = zip(*(named(peer) for peer in values), strict=True)
    bars = axes.barh(range(len(values)), list(values.values()), 0.7, color=colors)
    axes.bar_label(bars, labels, padding=3, fontsize=LABEL)
    axes.set_yticks(range(len(values)), names, fontsize=9)
    axes.set(title=title, xlabel=xlabel, ylim=(len(values) - 0.5, -0.5), xlim=(0, 1.4 * max(values.values()) or 1))
    axes.locator_params(axis="x", nbins=6)
    plain(axes, "x")


def step_times(axes: Axes, step: Mapping[str, Any], title: str) -> None:
    """Milliseconds of each peer, and its ratio to ours."""
    peers = step["peers"]
    values = {name: facts["ms_median"] for name, facts in peers.items()}
    labels = [
        f"{facts['ms_median']:,.0f} ms" + (f", {facts['ratio_to_ours']:.3g}×" if "ratio_to_ours" in facts else "")
        for facts in peers.values()
    ]
    by_peer(axes, values, labels, title, f"ms per step, median of {rounds(step)}; × ours")


def step_bytes(axes: Axes, step: Mapping[str, Any], title: str) -> None:
    """Results of collectives by kind; how many collectives there are."""
    peers = step["peers"]
    factor, prefix = scale(max(facts["total_bytes"] for facts in peers.values()) or 1)
    left, place = [0.0] * len(peers), range(len(peers))
    for kind, (color, hatch) in COLLECTIVES.items():
        widths = [facts["collective_bytes"].get(kind, 0) / factor for facts in peers.values()]
        if any(widths):
            axes.barh(place, widths, 0.7, left, color=color, hatch=hatch, edgecolor="white", label=kind)
            left = [a + b for a, b in zip(left, widths, strict=True)]
    for i, facts in enumerate(peers.values()):
        count = sum(facts["collectives"].values())
        told = f"{text(facts['total_bytes'])}B in {count:,}" if count else "none"
        axes.annotate(told, (left[i], i), (4, 0), textcoords="offset points", va="center", fontsize=LABEL)
    axes.set_yticks(place, [named(peer)[0] for peer in peers], fontsize=9)
    xlabel = f"{prefix}B per device and step, in how many collectives"
    axes.set(title=title, xlabel=xlabel, ylim=(len(peers) - 0.5, -0.5), xlim=(0, 1.4 * max(left) or 1))
    axes.locator_params(axis="x", nbins=6)
    axes.legend(fontsize=LABEL, loc="lower right", frameon=False)
    plain(axes, "x")


def step_memory(axes: Axes, step: Mapping[str, Any], title: str) -> None:
    """Temporaries of the compiled step."""
    temp = {name: facts["temp_bytes"] for name, facts in step["peers"].items() if facts["temp_bytes"] is not None}
    factor, prefix = scale(max(temp.values()) or 1)
    ours = temp.get("ours")
    labels = [f"{text(value)}B" + (f", {value / ours:.3g}×" if ours else "") for value in temp.values()]
    by_peer(axes, {k: v / factor for k, v in temp.items()}, labels, title, f"{prefix}B of temporaries on each device")


# Scaling


def fsdp_rows(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Those on a mesh of one axis, by devices."""
    return sorted((row for row in rows if len(row["mesh"]) == 1), key=lambda row: row["devices"])


def hsdp_rows(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Those with replicas, by devices."""
    return sorted((row for row in rows if len(row["mesh"]) == 2), key=lambda row: row["devices"])


def scaling_flops(axes: Axes, scaling: Mapping[str, Any], title: str) -> None:
    """NS FLOPs of the busiest device: fixed work against the ideal, and work that grows with the devices."""
    strong, weak = fsdp_rows(scaling["strong"]), fsdp_rows(scaling["weak"])
    x = [row["devices"] for row in strong]
    total, factor = strong[0]["total_flops"], 1e9
    axes.plot(x, [total / n / factor for n in x], color="black", linestyle="--", linewidth=1, label="ideal: 1/n")
    best = [total / row["devices"] / row["best_possible"] / factor for row in strong]
    axes.plot(x, best, color=GREY, linestyle=":", linewidth=4, label="best with whole matrices")
    flops = [row["compiled_flops"] / factor for row in strong]
    label = f"{strong[0]['matrices']} matrices, as compiled (efficiency)"
    axes.plot(x, flops, color=BLUE, marker="o", label=label)
    if weak:
        grown = [row["compiled_flops"] / factor for row in weak]
        x_weak = [row["devices"] for row in weak]
        axes.plot(x_weak, grown, color=ORANGE, marker="s", linewidth=2, label="one layer per device")
    for row, y in zip(strong, flops, strict=True):
        if "efficiency" in row and row["devices"] > 1:
            look: Any = {"textcoords": "offset points", "fontsize": LABEL, "color": BLUE, "ha": "right", "va": "top"}
            look["bbox"] = {"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 0.5}
            axes.annotate(f"{row['efficiency']:.0%}", (row["devices"], y), (-4, -3), **look)
    axes.set(title=title, ylabel="NS GFLOP of the busiest device")
    devices_axis(axes, sorted({*x, *(row["devices"] for row in weak)}))
    axes.set_yscale("log")
    low, high = axes.get_ylim()
    ticks = [n * 10.0**power for power in range(-6, 7) for n in (1, 2, 5) if low <= n * 10.0**power <= high]
    axes.set_yticks(ticks, [f"{tick:g}" for tick in ticks], minor=False)
    axes.minorticks_off()
    axes.legend(fontsize=LABEL, frameon=False, loc="upper right")
    plain(axes, "both")


def devices_axis(axes: Axes, devices: Sequence[int]) -> None:
    """Logarithmic, with the numbers that were measured as its ticks."""
    axes.set_xscale("log", base=2)
    axes.set_xticks(devices, [f"{n:,}" for n in devices])
    axes.minorticks_off()
    axes.set_xlabel("devices")


def scaling_lines(
    axes: Axes, scaling: Mapping[str, Any], key: str, factor: float, title: str, ylabel: str, parts: Sequence[str]
) -> None:
    """One figure by devices: `parts` of 'fsdp', 'hsdp' and 'weak'."""
    series = {
        "fsdp": ("fixed work, (fsdp n)", fsdp_rows(scaling["strong"]), BLUE, "o", "-"),
        "hsdp": ("fixed work, (replica 2, fsdp n/2)", hsdp_rows(scaling["strong"]), RED, "^", "--"),
        "weak": ("one layer per device", fsdp_rows(scaling["weak"]), ORANGE, "s", "-."),
    }
    seen: set[int] = set()
    for part in parts:
        label, rows, color, marker, line = series[part]
        shown = [(row["devices"], row[key] / factor) for row in rows if row.get(key) is not None]
        if shown:
            axes.plot(*zip(*shown, strict=True), color=color, marker=marker, linestyle=line, label=label)
            seen |= {n for n, _ in shown}
    axes.set(title=title, ylabel=ylabel)
    axes.set_ylim(bottom=0)
    devices_axis(axes, sorted(seen))
    axes.legend(fontsize=LABEL, frameon=False)
    plain(axes, "both")


def planning_seconds(axes: Axes, scaling: Mapping[str, Any], title: str) -> None:
    """Seconds to plan, beside what JAX takes to look at the same leaves once."""
    plans = scaling["planning"]
    x = [plan["devices"] for plan in plans]
    axes.plot(x, [plan["plan_seconds"] for plan in plans], color=BLUE, marker="o", label="make_plan")
    walk = [plan["eval_shape_seconds"] for plan in plans]
    axes.plot(x, walk, color=GREY, marker="s", linestyle="--", label="jax.eval_shape of optax's init")
    axes.set(title=title, ylabel="seconds, first call")
    axes.set_ylim(bottom=0)
    devices_axis(axes, x)
    axes.legend(fontsize=LABEL, frameon=False)
    plain(axes, "both")


# Others


def transport_times(axes: Axes, transports: Mapping[str, Any], name: str, title: str) -> None:
    """Measured beside predicted."""
    found = transports[name]["transports"]
    looks = (("measured_ms", -0.2, BLUE, "", "measured"), ("predicted_ms", 0.2, ORANGE, "//", "simulated"))
    for key, shift, color, hatch, label in looks:
        place = [i + shift for i in range(len(found))]
        values = [each[key] for each in found.values()]
        bars = axes.barh(place, values, 0.4, color=color, hatch=hatch, edgecolor="white", label=label)
        axes.bar_label(bars, [f"{value:,.0f}" for value in values], padding=2, fontsize=LABEL)
    axes.set_yticks(range(len(found)), list(found))
    longest = max(max(each["measured_ms"], each["predicted_ms"]) for each in found.values())
    axes.set(title=title, xlabel=f"ms per step, median of {rounds(transports)}", xlim=(0, 1.15 * longest))
    axes.set_ylim(len(found) - 0.4, -0.6)
    axes.legend(fontsize=LABEL, frameon=False)
    plain(axes, "x")


def transport_bytes(axes: Axes, transports: Mapping[str, Any], name: str, title: str) -> None:
    """What a device receives."""
    found = {t: each["received_bytes"] for t, each in transports[name]["transports"].items()}
    factor, prefix = scale(max(found.values()))
    bars = axes.barh(range(len(found)), [value / factor for value in found.values()], 0.7, color=TEAL)
    axes.bar_label(bars, [f"{text(value)}B" for value in found.values()], padding=3, fontsize=LABEL)
    axes.set_yticks(range(len(found)), list(found))
    axes.set(title=title, xlabel=f"{prefix}B received per device and step, as planned")
    axes.set(ylim=(len(found) - 0.4, -0.6), xlim=(0, 1.2 * max(found.values()) / factor))
    plain(axes, "x")


OPTIMIZERS = {
    "optax.adamw": ("AdamW", GREY, ":"),
    "muon_shard.muon": ("ours", BLUE, "-"),
    "optax.contrib.muon": ("optax Muon", ORANGE, "--"),
}


def shares(axes: Axes, end_to_end: Mapping[str, Any], title: str) -> None:
    """The model and the optimizer, stacked, for each batch size."""
    place, ticks, groups, tallest = 0.0, [], [], 0.0
    for batch, by_name in end_to_end["batches"].items():
        first = place
        for name, (short, color, _) in OPTIMIZERS.items():
            each = by_name[name]
            axes.bar(place, each["model_ms"], 0.8, color="#e4e4e4", edgecolor="gray")
            axes.bar(place, each["optimizer_ms"], 0.8, each["model_ms"], color=color, edgecolor="gray")
            top = each["model_ms"] + each["optimizer_ms"]
            axes.text(place, top, f"{each['share']:.1%}", ha="center", va="bottom", fontsize=LABEL)
            ticks.append((place, short.replace(" ", "\n")))
            place, tallest = place + 1, max(tallest, top)
        groups.append(((first + place - 1) / 2, f"\n\nbatch {int(batch)}"))
        place += 0.6
    axes.set_xticks([x for x, _ in ticks], [name for _, name in ticks], fontsize=LABEL)
    below = axes.secondary_xaxis(location=0)
    below.set_xticks([x for x, _ in groups], [name for _, name in groups], fontsize=9)
    below.tick_params(axis="x", length=0)
    axes.set(title=title, ylabel=f"ms per training step, median of {rounds(end_to_end)}", ylim=(0, 1.15 * tallest))
    axes.text(0.02, 0.98, "below: model\non top: optimizer, its share", transform=axes.transAxes, va="top", fontsize=8)
    plain(axes, "y")


def losses(axes: Axes, end_to_end: Mapping[str, Any], batch: str, title: str) -> None:
    """Curves at equal steps; ours wide and pale beneath optax's, because two equal optimizers draw one curve."""
    for name, (short, color, line) in OPTIMIZERS.items():
        each = end_to_end["batches"][batch][name]
        curve = each["equal_steps"]["losses"]
        width = 5.0 if name == "optax.contrib.muon" else 1.6
        steady = "-" if name == "optax.contrib.muon" else line
        steps, loss = each["equal_time"]["steps"], each["equal_time"]["held_out_loss"]
        label = f"{short}: {each['equal_steps']['held_out_loss']:.3f}; {loss:.3f} ({steps} steps)"
        axes.plot(
            range(1, len(curve) + 1),
            curve,
            label=label,
            color=color,
            linestyle=steady,
            linewidth=width,
            zorder=2 if width < 5 else 1,
        )
    axes.set(title=title, xlabel="step", ylabel="training loss (nats per byte)")
    look: Any = {"title": "held-out loss after as many steps; in the time of ours", "alignment": "left"}
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.17), fontsize=8, title_fontsize=8, frameon=False, **look)
    plain(axes, "both")


def newton_schulz_ratios(axes: Axes, found: Mapping[str, Any], title: str) -> None:
    """How much longer the textbook ways take than ours."""
    shapes, height = found["shapes"], 0.27
    looks = {"direct": (BLUE, ""), "batched": (ORANGE, "//"), "separate": (TEAL, "..")}
    for way, (color, hatch) in looks.items():
        key, shown = f"{way}_over_ours", []
        for i, each in enumerate(shapes.values()):
            ways = [other for other in looks if f"{other}_over_ours" in each]
            if way in ways:
                shown.append((i + (ways.index(way) - (len(ways) - 1) / 2) * height, each[key]))
        if shown:
            look: Any = {"color": color, "hatch": hatch, "edgecolor": "white", "label": f"{way} ÷ ours"}
            ys, values = zip(*shown, strict=True)
            bars = axes.barh(ys, values, height, **look)
            axes.bar_label(bars, fmt="%.2f", padding=2, fontsize=7)
    axes.axvline(1, color="black", linewidth=1)
    axes.set_yticks(range(len(shapes)), [f"{name.replace('x', '×')} ({each['form']})" for name, each in shapes.items()])
    axes.tick_params(axis="y", labelsize=LABEL)
    axes.set(title=title, xlabel=f"time ÷ ours, median of {rounds(found)}", ylim=(len(shapes) - 0.5, -0.5))
    axes.margins(x=0.1)
    legend_above(axes, 3)
    plain(axes, "x")


# The article


def article_bars(axes: Axes, article: Mapping[str, Any], title: str) -> None:
    """Published, simulated and measured ratios of every figure, a bar for each case that was measured.

    What the article says of compute is held against NS FLOPs, everything else against time.
    """
    looks = {
        "published": (GREY, ""),
        "simulated for their machine": (ORANGE, "//"),
        "time measured here": (BLUE, ""),
        "NS FLOPs here": (TEAL, ".."),
    }
    bars, middles, place = [], [], 0.0
    for ratio, cases in article_ratios(article):
        key, kind = ("flops", 3) if ratio["name"].endswith("compute") else ("measured", 2)
        group = [(0, ratio["published"], ""), (1, ratio["predicted"], "")]
        group += [(kind, case[key], f" {article_case(case)}") for case in cases if key in case]
        bars += [(place + i, *bar) for i, bar in enumerate(group)]
        middles.append((place + (len(group) - 1) / 2, ratio["name"]))
        place += len(group) + 0.8
    for i, (label, (color, hatch)) in enumerate(looks.items()):
        shown = [(y, value, told) for y, look, value, told in bars if look == i]
        if shown:
            ys, values, tolds = zip(*shown, strict=True)
            # From 1, where nothing is gained.
            widths = [value - 1 for value in values]
            drawn = axes.barh(ys, widths, 0.9, 1, color=color, hatch=hatch, edgecolor="white", label=label)
            labels = [f"{value:.3g}×{told}" for value, told in zip(values, tolds, strict=True)]
            axes.bar_label(drawn, labels, padding=3, fontsize=LABEL)
    axes.axvline(1, color="black", linewidth=1)
    values = [value for _, _, value, _ in bars]
    axes.set_xscale("log")
    axes.set_xlim(0.9 * min(1, *values), 4 * max(values))
    ticks = [n for n in (0.5, 1, 2, 5, 10, 20, 50, 100) if 0.9 * min(1, *values) <= n <= 2 * max(values)]
    axes.set_xticks(ticks, [f"{n:g}" for n in ticks])
    axes.minorticks_off()
    axes.set_yticks([y for y, _ in middles], [name for _, name in middles])
    axes.set(title=title, xlabel="before ÷ after, log scale", ylim=(place - 0.6, -0.7))
    legend_above(axes, 2)
    plain(axes, "x")


def article_height(article: Mapping[str, Any]) -> int:
    """How many bars `article_bars` draws at most."""
    return sum(3 + len(cases) for _, cases in article_ratios(article))


def legend_above(axes: Axes, columns: int) -> None:
    """Where no bar can be."""
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=columns, fontsize=LABEL, frameon=False)


def breadth_bars(axes: Axes, breadth: Mapping[str, Any], title: str) -> None:
    """Per model, layout and dtype, how much longer the peers take than ours."""
    cases = breadth["cases"]
    looks = {"optax": (*named("optax")[1:], ""), "redundant": (*named("redundant")[1:], "//")}
    for k, (way, (color, hatch)) in enumerate(looks.items()):
        rows = [(i, case["ways"][way]["to_ours"]) for i, case in enumerate(cases) if way in case["ways"]]
        place = [i + (k - 0.5) * 0.4 for i, _ in rows]
        label = f"{named(way)[0]} ÷ ours".replace("\n", " ")
        bars = axes.barh(place, [v for _, v in rows], 0.4, color=color, hatch=hatch, edgecolor="white", label=label)
        axes.bar_label(bars, fmt="%.1f", padding=2, fontsize=7)
    axes.axvline(1, color="black", linewidth=1)
    axes.set_yticks(range(len(cases)), [f"{case['model']}, {case['layout']}, {case['dtype']}" for case in cases])
    axes.tick_params(axis="y", labelsize=LABEL)
    axes.set(title=title, xlabel=f"time ÷ ours, median of {rounds(breadth)}", ylim=(len(cases) - 0.5, -0.5))
    axes.margins(x=0.12)
    legend_above(axes, 2)
    plain(axes, "x")
