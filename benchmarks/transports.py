"""Every transport on 8 emulated devices: the step measured, and predicted by the simulator on a calibrated topology.

Emulated devices share one host's cores and memory, so the figures of the `Topology` (products, copies, messages) are
measured first, all devices at work at once. One line of JSON: the topology, and per set and transport milliseconds
(medians of interleaved rounds), predicted milliseconds and bytes received. Read the order: `pairs` counts pairs of
transports whose measured times differ by more than 10 %, `agree` those of them that the simulator puts in the same
order.
"""

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from rich.console import Console
from rich.progress import track

import muon_shard
from benchmarks.reference import laid_on
from muon_shard.transports import TRANSPORTS

AXES = ("host", "fsdp")
ALL = P(AXES)
SETS = {
    "square": {f"w{i}": (512, 512) for i in range(48)},
    "skinny": {f"w{i}": (32, 16384) for i in range(64)},
}
APART = 1.1
"""Times closer than this are a draw."""


def seconds(function: Callable[..., Any], *args: Any, rounds: int = 7) -> float:
    """Median of some calls after one that compiles."""
    times = []
    for _ in range(rounds + 1):
        start = time.perf_counter()
        jax.block_until_ready(function(*args))
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


def calibrate(mesh: Mesh) -> muon_shard.Topology:
    """Rates and latencies that all devices reach at once."""

    def timed(body: Callable[[jax.Array], jax.Array], elements: int) -> float:
        x = jax.device_put(jnp.ones((8, elements)), NamedSharding(mesh, ALL))
        run = jax.shard_map(lambda x: body(x[0])[None], mesh=mesh, in_specs=ALL, out_specs=ALL, check_vma=False)
        return seconds(jax.jit(run), x)

    m, large, small = 512, 2**21, 2**10
    idle = timed(lambda x: x, 8)
    product = timed(lambda x: lax.fori_loop(0, 8, lambda i, a: a @ a, x.reshape(m, m)).reshape(-1), m * m)
    copy = timed(lambda x: x * 2, large)
    turn = [
        timed(lambda x: lax.all_to_all(x.reshape(8, -1), AXES, 0, 0, tiled=True).reshape(-1), n) for n in (small, large)
    ]
    latency = max(turn[0] - idle, 1e-6)
    link = muon_shard.Link(4 * large * 7 / 8 / max(turn[1] - turn[0], 1e-6), latency, level="memory")
    return muon_shard.Topology(
        dict.fromkeys(AXES, link),
        flops=8 * 2 * m**3 / (product - idle),
        hbm_bytes=2e9,
        hbm_bandwidth=2 * 4 * large / max(copy - idle, 1e-6),
        name="calibrated",
        platform="cpu",
        achieved=1.0,
    )


def measure(name: str, mesh: Mesh, topology: muon_shard.Topology, rounds: int, console: Console) -> dict[str, Any]:
    """All transports on one set of matrices, cut along their long side."""
    params = {
        leaf: jax.device_put(jax.random.normal(jax.random.key(i), shape), NamedSharding(mesh, P(None, AXES)))
        for i, (leaf, shape) in enumerate(SETS[name].items())
    }
    steps, found = {}, {}
    for transport in (t for t in TRANSPORTS if t != "local"):
        options = muon_shard.PlanOptions(transport=transport, topology=topology)
        plan = muon_shard.make_plan(params, options=options)
        tx = muon_shard.scale_by_muon(plan_options=options)
        state = laid_on(mesh, tx.init(params))
        compiled = jax.jit(tx.update).lower(params, state, params).compile()
        steps[transport] = lambda step=compiled, state=state: step(params, state, params)
        found[transport] = {
            "predicted_ms": round(1e3 * muon_shard.simulate(plan, topology).makespan, 1),
            "received_bytes": sum(plan.bytes_by_axis.values()),
        }
    times: dict[str, list[float]] = {transport: [] for transport in steps}
    for _ in track(range(rounds + 1), name, console=console, transient=True):
        for transport, step in steps.items():
            start = time.perf_counter()
            jax.block_until_ready(step())
            times[transport].append(1e3 * (time.perf_counter() - start))
    for transport, each in times.items():
        found[transport]["measured_ms"] = round(statistics.median(each[1:]), 1)
    return found


def order(found: dict[str, Any]) -> dict[str, int]:
    """Pairs of transports that are apart, and how many of them are predicted in the order that was measured."""
    apart = agree = 0
    for a, b in itertools.permutations(found.values(), 2):
        if a["measured_ms"] > APART * b["measured_ms"]:
            apart += 1
            agree += a["predicted_ms"] > b["predicted_ms"]
    return {"pairs": apart, "agree": agree}


def main() -> None:
    """Parse, calibrate, measure, print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.transports", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sets", nargs="+", choices=SETS, default=list(SETS))
    args = parser.parse_args()
    muon_shard.emulate_devices(8)
    mesh = jax.make_mesh((2, 4), AXES, axis_types=(AxisType.Auto,) * 2)
    topology, console = calibrate(mesh), Console(stderr=True)
    report: dict[str, Any] = {"jax": jax.__version__, "rounds": args.rounds}
    link = topology.link("fsdp")
    report["topology"] = {
        "gflops": round(topology.flops / 1e9, 1),
        "copy_gb_per_s": round(topology.hbm_bandwidth / 1e9, 2),
        "link_gb_per_s": round(link.bandwidth / 1e9, 2),
        "latency_ms": round(1e3 * link.latency, 3),
    }
    for name in args.sets:
        found = measure(name, mesh, topology, args.rounds, console)
        report[name] = {**order(found), "transports": found}
    print(json.dumps(report))


if __name__ == "__main__":
    main()
