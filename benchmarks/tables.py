"""The README's measured tables as Markdown, from the files that hold the measurements.

    python -m benchmarks --out results.json
    python -m benchmarks.tables results.json

Takes results files and the output of single scripts; of two runs of one script the last counts. A table whose script's
output is in none of the files is left out, with a note on stderr. `bars` holds measurements against what they should
reach. Prints Markdown: the one benchmark command that prints no JSON.
"""

import argparse
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import results
from benchmarks.results import Results

PEERS = {
    "ours": "**`muon_shard.muon`**",
    "stacked": "same-shape stacks with staged sharding constraints, by hand",
    "optax": "`optax.contrib.muon` under GSPMD",
    "redundant": "all-gather, every device computes everything",
    "redundant_stacks": "the same, equal shapes gathered and computed together",
    "adamw": "AdamW, the floor",
}


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """One table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def megabytes(value: float | None) -> str:
    """Three digits where there are that many."""
    return "" if value is None else f"{value / 1e6:,.3g}" if value < 1e8 else f"{value / 1e6:,.0f}"


def step(found: Results, name: str) -> str | None:
    """One optimizer step of a set, ours first, then by time."""
    x = found.last("step", set=name)
    if x is None:
        return None
    peers = sorted(x["peers"].items(), key=lambda item: (item[0] != "ours", item[0] == "adamw", item[1]["ms_median"]))
    rows = []
    for peer, facts in peers:
        collectives = ", ".join(f"{count} {kind}" for kind, count in facts["collectives"].items()) or "none"
        ratio = f"{facts['ratio_to_ours']:.3g}" if "ratio_to_ours" in facts else ""
        size = (megabytes(facts["total_bytes"]), megabytes(facts["temp_bytes"]))
        rows.append((PEERS.get(peer, f"`{peer}`"), f"{facts['ms_median']:,.0f}", ratio, collectives, *size))
    head = (f"set {name}, medians of {results.rounds(x)}", "ms", "÷ ours", "collectives")
    return markdown((*head, "MB moved per device", "MB of temporaries"), rows)


def scaling(found: Results, series: str) -> str | None:
    """Rows of one series, by devices."""
    x = found.last("scaling")
    if x is None:
        return None
    rows = []
    for row in x[series]:
        mesh = ", ".join(f"{name} {size}" for name, size in row["mesh"].items())
        measured = f"{row['ms_median'] / 1e3:.2f}" if "ms_median" in row else ""
        efficiency = f"{row['efficiency']:.1%}" if "efficiency" in row else ""
        work = (f"{row['compiled_flops'] / 1e9:,.3g}", efficiency, f"{row['best_possible']:.1%}")
        size = (megabytes(row["received_bytes"]), megabytes(row["temp_bytes"]))
        rows.append((f"{row['devices']} ({mesh})", *work, *size, f"{row['compile_seconds']:.1f}", measured))
    head = ("devices", "NS GFLOP per device", "efficiency", "best possible", "MB received", "MB of temporaries")
    return markdown((*head, "s to compile", "s per step, cores shared"), rows)


def planning(found: Results) -> str | None:
    """Seconds to plan, by devices."""
    x = found.last("scaling")
    if x is None:
        return None
    rows = [
        (
            p["model"],
            f"{p['devices']:,}",
            f"{p['plan_seconds']:.2f}",
            f"{p['eval_shape_seconds']:.2f}",
            f"{p['balance']:.1%}",
        )
        for p in x["planning"]
    ]
    return markdown(("model", "devices", "s to plan", "s of `jax.eval_shape` of optax's init", "balance"), rows)


def end_to_end(found: Results) -> str | None:
    """The demo's training step."""
    x = found.last("end_to_end")
    if x is None:
        return None
    rows = []
    for batch, by_name in x["batches"].items():
        for name, each in by_name.items():
            time = (f"{each['model_ms']:,.0f}", f"{each['optimizer_ms']:,.1f}", f"{each['share']:.1%}")
            losses = [
                f"{run['held_out_loss']:.3f} ({run['steps']})" for run in (each["equal_steps"], each["equal_time"])
            ]
            rows.append((batch, f"`{name}`", *time, *losses))
    head = ("batch", "optimizer", "ms model", "ms optimizer", "share", "held-out loss (steps)", "in the time of ours")
    return markdown(head, rows)


def article(found: Results) -> str | None:
    """The article's ratios."""
    x = found.last("article")
    if x is None:
        return None
    rows = []
    for ratio, cases in results.article_ratios(x):
        key = "flops" if ratio["name"].endswith("compute") else "measured"
        here = ", ".join(f"{case[key]:.3g} {results.article_case(case)}" for case in cases if key in case)
        note = "NS FLOPs " if key == "flops" and here else ""
        rows.append((ratio["name"], f"{ratio['published']:.3g}", f"{ratio['predicted']:.3g}", f"{note}{here}"))
    return markdown(("before ÷ after", "published", "simulated for their machine", "measured here"), rows)


def newton_schulz(found: Results) -> str | None:
    """Ratios of Newton–Schulz on one device."""
    x = found.last("newton_schulz")
    if x is None:
        return None
    ways = ("direct", "batched", "separate")
    rows = [
        (name.replace("x", "×"), each["form"], *(str(each.get(f"{way}_over_ours", "")) for way in ways))
        for name, each in x["shapes"].items()
    ]
    return markdown(("shape", "form", *(f"{way} ÷ ours" for way in ways)), rows)


def transports(found: Results) -> str | None:
    """Measured, simulated, bytes."""
    x = found.last("transports")
    if x is None:
        return None
    rows = [
        (
            name,
            f"`{t}`",
            f"{each['measured_ms']:,.0f}",
            f"{each['predicted_ms']:,.0f}",
            megabytes(each["received_bytes"]),
        )
        for name in ("square", "skinny")
        if name in x
        for t, each in x[name]["transports"].items()
    ]
    return markdown(("matrices", "transport", "ms measured", "ms simulated", "MB received"), rows)


def breadth(found: Results) -> str | None:
    """Models, layouts and dtypes: the peers against ours."""
    x = found.last("breadth")
    if x is None:
        return None
    ways = ("optax", "redundant")
    rows = []
    for case in x["cases"]:
        ratios = (f"{case['ways'][way]['to_ours']:.3g}" if way in case["ways"] else "" for way in ways)
        rows.append((case["model"], case["layout"], case["dtype"], *ratios))
    return markdown(("model", "layout", "dtype", *(f"{way} ÷ ours" for way in ways)), rows)


def accelerator(found: Results) -> str | None:
    """Newton–Schulz on one device: TFLOP/s against a product's measured in the same run."""
    x = found.last("accelerator")
    if x is None:
        return None
    rows = []
    for arithmetic, shapes in x["shapes"].items():
        peak = f"{arithmetic}, peak {x['peaks'][arithmetic]:.3g}"
        for shape, ways in shapes.items():
            for way, each in ways.items():
                told = (
                    (f"{each['ms']:.3g}", f"{each['tflops']:.3g}", f"{each['of_peak']:.1%}")
                    if "ms" in each
                    else ("",) * 3
                )
                rows.append(
                    (
                        peak,
                        shape.replace("x", "×"),
                        way,
                        each.get("form", "refused" if "refused" in each else ""),
                        *told,
                    )
                )
    head = ("arithmetic, TFLOP/s of a product", "shape", "way", "form", "ms", "TFLOP/s of direct FLOPs", "of peak")
    return markdown((f"{x['device']}: {head[0]}", *head[1:]), rows)


def accelerator_step(found: Results) -> str | None:
    """The optimizer step of a model on one device."""
    x = found.last("accelerator")
    if x is None:
        return None
    rows = [
        (
            dtype,
            f"{step['parameters'] / 1e6:,.0f}",
            way,
            f"{each['ms']:,.1f}",
            f"{each['to_ours']:.3g}",
            megabytes(each["temp_bytes"]),
        )
        for dtype, step in x["step"].items()
        for way, each in step.get("ways", {}).items()
    ]
    rows += [
        (dtype, f"{step['parameters'] / 1e6:,.0f}", f"failed: {step['failed']}", "", "", "")
        for dtype, step in x["step"].items()
        if "failed" in step
    ]
    head = ("dtype", "million parameters", "optimizer", "ms", "÷ ours", "MB of temporaries")
    return markdown((f"{x['device']}: {head[0]}", *head[1:]), rows) if rows else None


def bars(found: Results) -> str | None:
    """What was to be reached, and what was."""
    rows = []
    for what, wanted, least, value in _bars(found):
        met = value >= wanted if least else value <= wanted
        rows.append((what, f"{'≥' if least else '≤'} {wanted:.3g}", f"{value:.3g}", "yes" if met else "**no**"))
    return markdown(("ratio", "bar", "measured", "reached"), rows) if rows else None


def _bars(found: Results) -> Iterable[tuple[str, float, bool, float]]:
    """(what, bar, whether more is better, measured) where it was."""

    def ratio(name: str, peer: str, key: str = "") -> float | None:
        peers = (found.last("step", set=name) or {"peers": {}})["peers"]
        if peer not in peers or "ours" not in peers:
            return None
        return peers[peer][key] / peers["ours"][key] if key else peers[peer].get("ratio_to_ours")

    temporaries, scaled = ratio("reference", "optax", "temp_bytes"), found.last("scaling")
    eight = [row for row in (scaled or {"strong": []})["strong"] if row["devices"] == 8 and "efficiency" in row]
    headline = (found.last("article") or {"figures": {}})["figures"].get("headline", {"cases": []})["cases"]
    redundant = [case["to_ours"]["redundant"] for case in headline if "redundant" in case.get("to_ours", {})]
    listed: list[tuple[str, float, bool, float | None]] = [
        ("optax under GSPMD ÷ ours, HSDP (replica 2, fsdp 4)", 4, True, ratio("reference", "optax")),
        ("optax under GSPMD ÷ ours, replicated over (8,)", 14, True, ratio("replicated", "optax")),
        ("redundant all-gather ÷ ours", 8, True, ratio("reference", "redundant")),
        ("same-shape stacks by hand ÷ ours", 1.4, True, ratio("reference", "stacked")),
        ("same-shape stacks by hand ÷ ours, mixed set", 2.5, True, ratio("mixed", "stacked")),
        ("headline replay, redundant and unfused ÷ ours", 6, True, redundant[0] if redundant else None),
        ("bytes moved, optax under GSPMD ÷ ours", 15, True, ratio("reference", "optax", "total_bytes")),
        (
            "NS FLOPs per device, 8 devices ÷ 1",
            1 / 7.6,
            False,
            max((1 / 8 / r["efficiency"] for r in eight), default=None),
        ),
        ("temporaries, ours ÷ optax under GSPMD", 1.2, False, 1 / temporaries if temporaries else None),
    ]
    return [(what, wanted, least, value) for what, wanted, least, value in listed if value is not None]


TABLES: dict[str, Callable[[Results], str | None]] = {
    "bars": bars,
    "reference step": lambda found: step(found, "reference"),
    "replicated step": lambda found: step(found, "replicated"),
    "mixed step": lambda found: step(found, "mixed"),
    "strong scaling": lambda found: scaling(found, "strong"),
    "weak scaling": lambda found: scaling(found, "weak"),
    "planning": planning,
    "end to end": end_to_end,
    "article": article,
    "Newton–Schulz": newton_schulz,
    "transports": transports,
    "breadth": breadth,
    "accelerator": accelerator,
    "accelerator step": accelerator_step,
}


def measured_on(found: Results) -> str:
    """A sentence on the machine, if the files tell it."""
    about: dict[str, Any] = found.machine
    if not about:
        return ""
    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    commit = (about["commit"] or "unknown")[:8]
    return f"Measured at commit {commit} on {about['cores']} cores ({about['device']}), {versions}.\n"


def main() -> None:
    """Parse, print."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.tables", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="+", type=Path, help="results files or outputs of scripts")
    parser.add_argument("--only", nargs="+", choices=TABLES, help="these tables")
    args = parser.parse_args()
    found = results.read(args.files)
    if told := measured_on(found):
        print(told)
    for name in args.only or TABLES:
        table = TABLES[name](found)
        if table is None:
            print(f"{name!r} is left out: its script's output is in none of the files.", file=sys.stderr)
        else:
            print(f"### {name}\n\n{table}\n")


if __name__ == "__main__":
    main()
