"""All benchmarks, one after the other, each in a process of its own; one JSON file with everything they print.

    python -m benchmarks --quick --out results.json

The file holds the commit, versions and the machine, and per run its command, its seconds and what it measured.
`python -m benchmarks.tables results.json` makes tables of it, `python -m benchmarks.pictures results.json` pictures.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from typing import Any

import jax
import numpy as np
import optax
from rich.console import Console
from rich.progress import track

QUICK = {
    "reference step": ["step", "--set", "reference", "--rounds", "1"],
    "mixed step": ["step", "--set", "mixed", "--rounds", "1"],
    "phases": ["phases", "--rounds", "2"],
    "Newton–Schulz": ["newton_schulz", "--rounds", "3", "--shapes", "1024x4096", "512x2048", "74x24x10240"],
    "transports": ["transports", "--rounds", "2"],
    "article": ["article", "--quick"],
    "breadth": ["breadth", "--quick"],
    "scaling": ["scaling", "--quick"],
    "end to end": ["end_to_end", "--quick"],
    "one accelerator": ["accelerator", "--quick"],
    "planning": ["planning"],
    "parity": ["parity"],
    "second call": ["second_call"],
}
FULL = QUICK | {
    "reference step": ["step", "--set", "reference", "--rounds", "5"],
    "mixed step": ["step", "--set", "mixed", "--rounds", "5"],
    "replicated step": ["step", "--set", "replicated", "--rounds", "2", "--peers", "ours", "stacked", "optax"],
    "phases": ["phases", "--rounds", "7"],
    "Newton–Schulz": ["newton_schulz", "--rounds", "9"],
    "accuracy": ["ns_accuracy"],
    "transports": ["transports", "--rounds", "5"],
    "article": ["article"],
    "breadth": ["breadth"],
    "scaling": ["scaling"],
    "end to end": ["end_to_end"],
    "one accelerator": ["accelerator"],
    "processes": ["processes", "--processes", "2"],
}


def measure(arguments: list[str]) -> dict[str, Any]:
    """Runs one benchmark; what it printed, or the end of what it complained about."""
    start = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", f"benchmarks.{arguments[0]}", *arguments[1:]], capture_output=True, text=True
    )
    found: dict[str, Any] = {"command": " ".join(["python -m", f"benchmarks.{arguments[0]}", *arguments[1:]])}
    found["seconds"] = round(time.perf_counter() - start, 1)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        return found | {"failed": done.stderr.strip().splitlines()[-5:], "exit": done.returncode}
    return found | {"measured": json.loads(lines[-1])}


def machine() -> dict[str, Any]:
    """What the figures depend on."""
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip()
    return {
        "commit": commit or None,
        "versions": {"python": platform.python_version()} | {m.__name__: m.__version__ for m in (jax, optax, np)},
        "platform": platform.machine(),
        "cores": os.cpu_count(),
        "device": jax.devices()[0].device_kind,
        "date": time.strftime("%Y-%m-%d"),
    }


def main() -> int:
    """Parse, run everything, write."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few rounds of the most important")
    parser.add_argument("--only", nargs="+", choices=FULL, help="names of runs")
    parser.add_argument("--out", default="results.json")
    args = parser.parse_args()
    runs = QUICK if args.quick else FULL
    chosen = {name: runs.get(name, FULL[name]) for name in args.only or runs}
    console = Console(stderr=True)
    results = {"machine": machine(), "runs": {}}
    for name, arguments in track(chosen.items(), "benchmarks", console=console):
        results["runs"][name] = measure(arguments)
        with open(args.out, "w", encoding="utf-8") as file:  # what is done is kept if a later one is stopped
            json.dump(results, file, indent=1)
    failed = [name for name, run in results["runs"].items() if "failed" in run]
    print(
        f"{len(chosen) - len(failed)} of {len(chosen)} runs in {args.out}"
        + (f"; failed: {', '.join(failed)}" if failed else "")
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
