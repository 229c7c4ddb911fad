"""The plan that is chosen against each single transport, pinned, in the simulator: every public model on every machine.

Prints the cells (model, mesh, machine) in which some transport, with or without sharing over replicas, would be faster
than what was chosen, and by how much. Shapes and specs only, no device is touched; it takes half an hour or more.
"""

import argparse
import itertools
import json
from typing import Any

from rich.console import Console
from rich.progress import track

from muon_shard import models, presets
from muon_shard.__main__ import parse_mesh
from muon_shard.compare import Comparison, compare_model
from muon_shard.planner import ROUNDING

MESHES = ({"fsdp": 64}, {"replica": 8, "fsdp": 64}, {"replica": 2, "fsdp": 4})


def verdict(compared: Comparison) -> dict[str, Any]:
    """Milliseconds of what was chosen and of the fastest single transport; `slower`: chosen ÷ fastest − 1."""
    chosen, best = compared.auto.total, compared.best
    return {
        "chosen_ms": round(1e3 * chosen, 4),
        "best_ms": round(1e3 * best.total, 4),
        "best": best.transport,
        "dedup_axes": best.dedup,
        "slower": round(chosen / best.total - 1, 5) if chosen > best.total * (1 + ROUNDING) else 0.0,
    }


def main() -> None:
    """Parse, plan and simulate, print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.choices", description=__doc__)
    parser.add_argument("--models", nargs="+", choices=models.names(), default=models.names(), metavar="MODEL")
    parser.add_argument("--meshes", nargs="+", type=parse_mesh, default=MESHES, metavar="MESH")
    parser.add_argument("--topologies", nargs="+", choices=presets.names(), default=presets.names(), metavar="MACHINE")
    args = parser.parse_args()
    console, cells = Console(stderr=True), []
    every = list(itertools.product(args.meshes, args.models, args.topologies))
    for mesh, model, topology in track(every, "cells", console=console):
        cell = {"model": model, "mesh": mesh, "topology": topology}
        cell |= verdict(compare_model(model, mesh, topology))
        if cell["slower"]:
            console.print(f"slower by {cell['slower']:.2%}: {cell}", markup=False, soft_wrap=True)
        cells.append(cell)
    slower = [cell for cell in cells if cell["slower"]]
    print(json.dumps({"cells": len(cells), "slower": slower, "every": cells}))


if __name__ == "__main__":
    main()
