"""Where the time of one optimizer step goes, and how little it could be on this machine, all in one run.

`ms` holds medians of whole steps: momentum alone, then with everything but Newton–Schulz (the orthogonalizer returns
what it is given), then as they are; their differences are what packing and exchanging, and Newton–Schulz, take. `peak`
is what all devices together reach on large products in the same rounds, `floor_ms` what the FLOPs of our plan take at
that rate. One line of JSON.
"""

import argparse
import json
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import muon_shard
from benchmarks import rounds as timing
from benchmarks.peers import LEARNING_RATE, momentum_then, newton_schulz, stacked
from benchmarks.reference import SETS, laid_on

SIDE = 1024


def same(x: jax.Array) -> jax.Array:
    """In place of Newton–Schulz."""
    return x


def products() -> Any:
    """A function that multiplies two large matrices on every device at once."""
    mesh = jax.make_mesh((jax.device_count(),), ("device",), axis_types=(AxisType.Auto,))
    x = jnp.ones((jax.device_count(), SIDE, SIDE), jnp.float32, device=NamedSharding(mesh, P("device")))
    each = jax.jit(jax.shard_map(lambda x: x @ x, mesh=mesh, in_specs=P("device"), out_specs=P("device")))
    return lambda: each(x)


def measure(set_name: str, rounds: int) -> dict[str, Any]:
    """Every phase of our step, and of stacks by hand."""
    chosen = SETS[set_name]
    mesh = chosen.mesh()
    params, grads = chosen.arrays(mesh, 0), chosen.arrays(mesh, 1)
    ways = {
        "momentum": momentum_then(lambda updates: updates),
        "ours without NS": muon_shard.muon(LEARNING_RATE, orthogonalizer=same),
        "ours": muon_shard.muon(LEARNING_RATE),
        "stacked without NS": stacked(mesh, chosen.specs, same),
        "stacked": stacked(mesh, chosen.specs, newton_schulz),
    }
    steps = {n: timing.compile_step(tx, laid_on(mesh, tx.init(params)), grads, params) for n, tx in ways.items()}
    runs = {name: lambda step=step: step.run(grads, params) for name, step in steps.items()}
    with timing.progress("phases", rounds + 1) as tick:
        times = timing.interleaved(runs | {"products": products()}, rounds, tick)
    ms = timing.milliseconds(times)
    peak = jax.device_count() * 2 * SIDE**3 / ms.pop("products") * 1e3
    flops = muon_shard.make_plan(params).total_flops
    return {
        "set": set_name,
        "jax": jax.__version__,
        "rounds": rounds,
        "ms": ms,
        "phases_ms": {
            peer: {
                "momentum and update": ms["momentum"],
                "pack, exchange, return": round(ms[f"{peer} without NS"] - ms["momentum"], 3),
                "NS": round(ms[peer] - ms[f"{peer} without NS"], 3),
            }
            for peer in ("ours", "stacked")
        },
        "ns_gflop": flops / 1e9,
        "peak_gflops": round(peak / 1e9, 1),
        "floor_ms": round(1e3 * flops / peak, 1),
        "stacked_over_ours": timing.ratio(times, "stacked", "ours"),
    }


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.phases", description=__doc__)
    parser.add_argument("--set", choices=SETS, default="reference")
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    muon_shard.emulate_devices(8)
    print(json.dumps(measure(args.set, args.rounds)))


if __name__ == "__main__":
    main()
