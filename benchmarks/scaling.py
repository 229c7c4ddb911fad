"""The same optimizer step on more and more emulated devices: NS FLOPs, bytes, memory, seconds, programs, compile time.

Every number of devices runs in a process of its own, since emulation is fixed when JAX starts. Three series:

* `strong`: the 48 matrices of the reference set on meshes (fsdp n) and, from 4 devices on, (replica 2, fsdp n/2).
  `efficiency` is NS FLOPs on one device ÷ (n × NS FLOPs of the busiest of n), `best_possible` what an assignment of
  whole matrices can reach at all: with 48 matrices, 64 devices cannot all work. Milliseconds cannot fall with n, all
  devices share the cores of this machine: they show what n adds. More than TIMED devices are compiled for, not run.
* `weak`: a stack of n layers on n devices, compiled only: what a device does should not grow. `efficiency` is against
  all FLOPs ÷ n.
* `planning`: seconds to plan a public model, up to 4,096 devices, from shapes alone.

FLOPs are given as planned and as counted in the compiled module; bytes are results of collectives on one device, as
compiled, and `received_bytes` those of them that come from other devices, as planned.
"""

import argparse
import dataclasses
import json
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from rich.console import Console
from rich.progress import track

import muon_shard
from benchmarks import planning
from benchmarks.product_flops import product_flops
from benchmarks.reference import LAYERS, WIDTH, transformer
from muon_shard import hlo

DEVICES = (1, 2, 4, 8, 16, 64, 512)
WEAK = (8, 64, 512)
TIMED = 64
PLANNED = ((1, 8), (1, 64), (4, 128), (32, 128))
"""(replica, fsdp) that `kimi-k2` is planned for."""
TIMEOUT = 900  # seconds, for one process


@dataclasses.dataclass(frozen=True)
class Case:
    """Shapes on a mesh; stacks of matrices have rank 3, their rows lie over `fsdp`."""

    series: str
    mesh_axes: tuple[tuple[str, int], ...]
    shapes: dict[str, tuple[int, ...]]

    def mesh(self) -> Mesh:
        """On the emulated devices."""
        names, sizes = zip(*self.mesh_axes, strict=True)
        return jax.make_mesh(sizes, names, axis_types=(AxisType.Auto,) * len(names))

    def params(self, mesh: Mesh) -> dict[str, jax.ShapeDtypeStruct]:
        """Abstract fp32 parameters."""
        return {
            name: jax.ShapeDtypeStruct(
                shape, jnp.float32, sharding=NamedSharding(mesh, P(*[None] * (len(shape) - 2), "fsdp", None))
            )
            for name, shape in self.shapes.items()
        }

    def dimensions(self) -> dict[str, optax.contrib.MuonDimensionNumbers]:
        """The last two dimensions are the matrix."""
        return {name: optax.contrib.MuonDimensionNumbers(len(s) - 2, len(s) - 1) for name, s in self.shapes.items()}


def cases(devices: int, layers: int, width: int) -> list[Case]:
    """What is measured on so many devices."""
    one = {name: shape for name, (shape, _) in transformer(layers, width, P()).items()}
    found = [Case("strong", (("fsdp", devices),), one)]
    if devices >= 4:
        found.append(Case("strong", (("replica", 2), ("fsdp", devices // 2)), one))
    if devices in WEAK:
        layer = {name: shape for name, (shape, _) in transformer(1, width, P()).items()}
        stacks = {name: (devices, *shape) for name, shape in layer.items()}
        found.append(Case("weak", (("fsdp", devices),), stacks))
    return found


def measure(case: Case, rounds: int) -> dict[str, Any]:
    """Plan, compile, and for `rounds` ≥ 1 time one case."""
    params, dimensions = case.params(case.mesh()), case.dimensions()
    tx = muon_shard.muon(0.02, muon_weight_dimension_numbers=dimensions, param_shardings=params)
    shardings = muon_shard.opt_state_shardings(tx, params)
    state = jax.tree.map(
        lambda x, on: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=on), jax.eval_shape(tx.init, params), shardings
    )
    out = (jax.tree.map(lambda x: x.sharding, params), shardings)
    start = time.perf_counter()
    step = jax.jit(tx.update, out_shardings=out, donate_argnums=1).lower(params, state, params).compile()
    compile_seconds = time.perf_counter() - start
    plan = muon_shard.make_plan(params, muon_weight_dimension_numbers=dimensions)
    report = {
        "mesh": dict(case.mesh_axes),
        "devices": math.prod(size for _, size in case.mesh_axes),
        "matrices": sum(math.prod(shape[:-2]) for shape in case.shapes.values()),
        **planned(plan),
        **compiled(step),
        "compile_seconds": round(compile_seconds, 2),
    }
    if rounds:
        grads = {name: filled(i + 1, x) for i, (name, x) in enumerate(params.items())}
        state = jax.jit(tx.init, out_shardings=shardings)(grads)
        report["ms_median"] = round(median_milliseconds(step, grads, state, rounds), 1)
    return report


def planned(plan: muon_shard.Plan) -> dict[str, Any]:
    """What follows from shapes and mesh alone."""
    # `Plan.efficiency` is the bound ÷ the busiest device, in FLOPs weighted by speed; here plain FLOPs are compared.
    best = plan.total_flops / (plan.devices * plan.flops_per_device) / plan.efficiency
    return {
        "flops_per_device": plan.flops_per_device,
        "total_flops": plan.total_flops,
        "best_possible": round(min(1.0, best), 4),
        "received_bytes": sum(plan.bytes_by_axis.values()),
        "programs": plan.programs,
    }


def compiled(step: jax.stages.Compiled) -> dict[str, Any]:
    """What the compiled module holds."""
    text, memory = step.as_text() or "", step.memory_analysis()
    found = hlo.collectives(text)
    return {
        "compiled_flops": product_flops(text),
        "compiled_bytes": sum(f.bytes * f.count for f in found),
        "collectives": {k: n for k in hlo.KINDS if (n := sum(f.count for f in found if f.kind == k))},
        "temp_bytes": memory.temp_size_in_bytes if memory else None,
    }


def filled(seed: int, like: jax.ShapeDtypeStruct) -> jax.Array:
    """Normal numbers, laid out as `like`."""
    draw = jax.jit(lambda: jax.random.normal(jax.random.key(seed), like.shape), out_shardings=like.sharding)
    return draw()


def median_milliseconds(step: jax.stages.Compiled, grads: Any, state: Any, rounds: int) -> float:
    """Of `rounds` steps after one to warm up."""
    times = []
    for _ in range(rounds + 1):
        start = time.perf_counter()
        updates, state = step(grads, state, grads)
        jax.block_until_ready((updates, state))
        times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times[1:])


def in_a_process(devices: int, rounds: int, layers: int, width: int) -> dict[str, list[dict[str, Any]]]:
    """The rows of one number of devices, by series.

    Raises:
        RuntimeError: with the last words of the process that failed.
    """
    command = [sys.executable, "-m", "benchmarks.scaling", "--worker", str(devices), "--rounds", str(rounds)]
    command += ["--layers", str(layers), "--width", str(width)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT)
    if done.returncode:
        raise RuntimeError(f"scaling on {devices} devices exited with {done.returncode}:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def worker(devices: int, rounds: int, layers: int, width: int) -> dict[str, list[dict[str, Any]]]:
    """The same, in this process."""
    muon_shard.emulate_devices(devices)
    rows: dict[str, list[dict[str, Any]]] = {"strong": [], "weak": []}
    for case in cases(devices, layers, width):
        timed = case.series == "strong" and devices <= TIMED
        rows[case.series].append(measure(case, rounds if timed else 0))
    return rows


def with_efficiency(rows: list[dict[str, Any]], whole: Callable[[dict[str, Any]], int | None]) -> list[dict[str, Any]]:
    """Against `whole(row)` FLOPs, shared by all devices; rows for which that is unknown stay as they are."""
    return [
        row | {"efficiency": round(work / (row["devices"] * row["flops_per_device"]), 4)}
        if (work := whole(row))
        else row
        for row in rows
    ]


def run(devices: Sequence[int], rounds: int, layers: int, width: int, meshes: Sequence[tuple[int, int]]) -> dict:
    """All series."""
    console, rows = Console(stderr=True), {"strong": [], "weak": []}
    for count in track(devices, "devices", console=console, transient=True):
        for series, found in in_a_process(count, rounds, layers, width).items():
            rows[series] += found
    plans = [planning.measure("kimi-k2", *mesh) for mesh in track(meshes, "plans", console=console, transient=True)]
    alone = next((row["flops_per_device"] for row in rows["strong"] if row["devices"] == 1), None)
    keep = ("model", "mesh", "devices", "plan_seconds", "eval_shape_seconds", "balance", "programs")
    return {
        "jax": jax.__version__,
        "rounds": rounds,
        "strong": with_efficiency(rows["strong"], lambda row: alone),
        "weak": with_efficiency(rows["weak"], lambda row: row["total_flops"]),
        "planning": [{key: plan[key] for key in keep} for plan in plans],
    }


def main() -> None:
    """Parse, then launch all processes, or be one of them."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.scaling", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="1, 8 and 64 devices, one round")
    parser.add_argument("--devices", nargs="+", type=int, help=f"default: {' '.join(map(str, DEVICES))}")
    parser.add_argument("--rounds", type=int, help="timed steps after one to warm up, default 3")
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument("--width", type=int, default=WIDTH)
    parser.add_argument("--worker", type=int, help="be the process with so many devices, not the launcher")
    args = parser.parse_args()
    rounds = args.rounds if args.rounds is not None else 1 if args.quick else 3
    if args.worker:
        print(json.dumps(worker(args.worker, rounds, args.layers, args.width)))
        return
    devices = args.devices or ((1, 8, 64) if args.quick else DEVICES)
    print(json.dumps(run(devices, rounds, args.layers, args.width, PLANNED)))


if __name__ == "__main__":
    main()
