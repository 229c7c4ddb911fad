"""Figures that repeat exactly, of small cases on 8 devices: tests/golden/*.json, for tests/test_golden.py.

    python -m tests.golden_figures     writes planned.json and the file of the JAX version that runs

`planned.json` follows from shapes and meshes alone; `compiled_0.12.json` is what XLA makes of it under JAX 0.12. Read
`git diff tests/golden` before you commit: a figure that grew is a regression, or has a reason that the commit tells.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax

import muon_shard
from benchmarks.product_flops import product_flops
from benchmarks.second_call import CompileCounter
from muon_shard import hlo
from tests.layouts import CASES, SHARED, Case

FOLDER = Path(__file__).parent / "golden"
VERSION = ".".join(jax.__version__.split(".")[:2])
FIGURES: tuple[tuple[str, str], ...] = (
    ("fsdp_rows", "all_to_all"),
    ("fsdp_rows", "ring"),
    ("fsdp_rows", "gather"),
    ("fsdp_rows", "redundant"),
    ("fsdp_cols", "gram"),
    ("hsdp", "all_to_all"),
    ("hsdp", "gather"),
    ("two_dimensional", "two_hops"),
    ("replicated", "auto"),
    ("experts", "auto"),
    ("merged", "auto"),
)
"""(layout, transport)"""
LEAVES = 10
"""At most so many of a layout: enough to give devices different work, few enough to compile fast."""


def case_of(layout: str, transport: str) -> Case:
    """The Muon leaves of a layout that the transport serves."""
    case = CASES[layout]
    leaves = {name: leaf for name, leaf in case.leaves.items() if leaf.dims is not None}
    if transport == "two_hops":  # it needs two axes
        leaves = {name: leaf for name, leaf in leaves.items() if len(leaf.spec) == 2 and all(leaf.spec)}
    return Case(case.mesh, dict(list(leaves.items())[:LEAVES]))


def planned(layout: str, transport: str) -> dict[str, Any]:
    """From shapes and mesh alone."""
    case, options = case_of(layout, transport), dataclasses.replace(SHARED, transport=transport)
    params = case.abstract(case.make_mesh())
    plan = muon_shard.make_plan(params, muon_weight_dimension_numbers=case.dims, options=options)
    by_kind: dict[str, dict[str, int]] = {}
    for c in plan.collectives:
        kind = by_kind.setdefault(c.kind, {"count": 0, "bytes": 0})
        kind["count"] += c.count
        kind["bytes"] += c.bytes
    return {
        "collectives": by_kind,
        "received_bytes": plan.bytes_by_axis,
        "flops_per_device": plan.flops_per_device,
        "total_flops": plan.total_flops,
        "programs": plan.programs,
        "peak_bytes": plan.peak_bytes,
    }


def compiled(layout: str, transport: str) -> dict[str, Any]:
    """From the module that XLA compiles, and how many it compiles on two calls."""
    case, options = case_of(layout, transport), dataclasses.replace(SHARED, transport=transport)
    params = case.put(case.host(), case.make_mesh())
    tx = muon_shard.scale_by_muon(weight_dimension_numbers=case.dims, plan_options=options)
    shardings = muon_shard.opt_state_shardings(tx, params)
    state = jax.device_put(tx.init(params), shardings)
    out = (jax.tree.map(lambda x: x.sharding, params), shardings)
    step = jax.jit(tx.update, out_shardings=out, donate_argnums=1)
    compiles = []
    for _ in range(2):
        with CompileCounter() as counter:
            _, state = jax.block_until_ready(step(params, state, params))
        compiles.append(counter.count)
    module = step.lower(params, state, params).compile()
    text, memory = module.as_text() or "", module.memory_analysis()
    by_kind: dict[str, dict[str, int]] = {}
    for f in hlo.collectives(text):
        kind = by_kind.setdefault(f.kind, {"count": 0, "bytes": 0})
        kind["count"] += f.count
        kind["bytes"] += f.count * f.bytes
    return {
        "collectives": by_kind,
        "product_flops": product_flops(text),
        "temp_bytes": memory.temp_size_in_bytes if memory else None,
        "compiles": compiles,
    }


def read(name: str) -> dict[str, Any] | None:
    """A file of golden figures; None if there is none."""
    path = FOLDER / f"{name}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def main() -> None:
    """Measure and write."""
    muon_shard.emulate_devices(8)
    for name, figures in (("planned", planned), (f"compiled_{VERSION}", compiled)):
        found = {" ".join(figure): figures(*figure) for figure in FIGURES}
        (FOLDER / f"{name}.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
