"""How far ours is from `optax.contrib.muon` on one device, over ten steps, for every layout of the tests.

Replicas share work. A difference is the largest over steps and leaves, relative to the largest entry of the update.
"""

import argparse
import json
from typing import Any

import jax
import numpy as np
import optax

import muon_shard
from tests.layouts import AXIS_TYPES, CASES, SHARED, Case

LEARNING_RATE = 0.1


def steps_of(tx: optax.GradientTransformation, params, gradients) -> list[dict[str, np.ndarray]]:
    """The updates of one jitted step per gradient, on the host."""
    state, update, out = tx.init(params), jax.jit(tx.update), []
    for grads in gradients:
        updates, state = update(grads, state, params)
        out.append(jax.tree.map(np.asarray, updates))
    return out


def relative_difference(got: list, want: list) -> float:
    """Largest over steps and leaves of max |got − want| / max |want|."""
    pairs = zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)
    return max(float(np.abs(g - w).max() / max(np.abs(w).max(), 1e-30)) for g, w in pairs)


def compare(case: Case, steps: int) -> dict[str, float]:
    """Differences of one layout, per kind of mesh axis."""
    host = [case.host(seed) for seed in range(steps + 1)]
    dims: Any = case.dims  # optax's annotation has no place for a tree with None in it
    oracle = optax.contrib.muon(LEARNING_RATE, muon_weight_dimension_numbers=dims)
    want = steps_of(oracle, host[0], host[1:])
    report = {}
    for axis_type in AXIS_TYPES:
        mesh = case.make_mesh(axis_type)
        params, *gradients = [case.put(arrays, mesh) for arrays in host]
        ours = muon_shard.muon(LEARNING_RATE, muon_weight_dimension_numbers=dims, plan_options=SHARED)
        report[axis_type] = relative_difference(steps_of(ours, params, gradients), want)
    return {name: float(f"{value:.2e}") for name, value in report.items()}


def main() -> None:
    """Parse, compare, print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.parity", description=__doc__)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--layouts", nargs="+", choices=CASES, default=list(CASES))
    args = parser.parse_args()
    muon_shard.emulate_devices(8)
    layouts = {name: compare(CASES[name], args.steps) for name in args.layouts}
    worst = max(value for report in layouts.values() for value in report.values())
    report = {"jax": jax.__version__, "optax": optax.__version__, "steps": args.steps, "worst": worst}
    print(json.dumps(report | {"layouts": layouts}))


if __name__ == "__main__":
    main()
