"""What benchmarks printed, read back: from `python -m benchmarks --out results.json`, or from single scripts."""

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

MARKS = {
    "step": "peers",
    "scaling": "strong",
    "end_to_end": "batches",
    "transports": "topology",
    "accelerator": "peaks",
    "newton_schulz": "shapes",
    "article": "figures",
    "breadth": "cases",
    "planning": "plan_seconds",
    "parity": "worst",
    "second_call": "eager_init",
    "phases": "floor_ms",
    "processes": "replicas_equal",
    "ns_accuracy": "errors",
}
"""By the script's name the key that tells its output; the first that fits counts."""


@dataclasses.dataclass(frozen=True)
class Results:
    """What each script measured, by its name; `machine` is empty unless a results file told it."""

    found: dict[str, tuple[dict[str, Any], ...]]
    machine: dict[str, Any]

    def last(self, script: str, **want: Any) -> dict[str, Any] | None:
        """The last output of a script, of those that have these values; None if there is none."""
        fitting = [x for x in self.found.get(script, ()) if all(x.get(key) == value for key, value in want.items())]
        return fitting[-1] if fitting else None


def read(paths: Iterable[Path]) -> Results:
    """Results files and scripts' outputs, in any order.

    Raises:
        ValueError: a file holds neither.
    """
    found: dict[str, tuple[dict[str, Any], ...]] = {}
    machine: dict[str, Any] = {}
    for path in paths:
        content = _content(path)
        machine |= content.get("machine", {})
        runs = [run["measured"] for run in content["runs"].values() if "measured" in run] if "runs" in content else None
        for measured in [content] if runs is None else runs:
            script = next((name for name, mark in MARKS.items() if mark in measured), None)
            if script:
                found[script] = (*found.get(script, ()), measured)
            elif runs is None:
                raise ValueError(f"{path}: neither a results file nor the output of one of {', '.join(MARKS)}.")
    return Results(found, machine)


def _content(path: Path) -> dict[str, Any]:
    """The JSON of a whole file, or of the last line that is an object."""
    text = path.read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if line.startswith("{")]
    for candidate in (text, *lines[-1:]):
        try:
            content = json.loads(candidate)
        except json.JSONDecodeError:
            continue
        if isinstance(content, dict):
            return content
    raise ValueError(f"{path}: holds no JSON object.")


# Words for tables and pictures


def rounds(measured: Mapping[str, Any]) -> str:
    """How often it was timed."""
    return f"{measured['rounds']} round{'s' * (measured['rounds'] != 1)}"


def article_ratios(article: Mapping[str, Any]) -> list[tuple[Mapping[str, Any], Sequence[Mapping[str, Any]]]]:
    """Every ratio that the article gives, and the cases measured for its figure."""
    return [(ratio, figure["cases"]) for figure in article["figures"].values() for ratio in figure["ratios"]]


def article_case(case: Mapping[str, Any]) -> str:
    """What a case was measured on: its mesh, or on one device its matrices."""
    on = [f"{name} {size}" for name, size in case["mesh"].items()]
    return f"({', '.join(on or [f'{count} × {shape}' for shape, count in case['matrices'].items()])})"
