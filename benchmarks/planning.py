"""Seconds to plan a public model on a large mesh: shapes and specs only, no device is touched.

The first call is timed, since plans are cached. As the peer of the same run, one call of `jax.eval_shape` on
`optax.contrib.muon(...).init` walks the same leaves: what JAX takes to look at the model once.
"""

import argparse
import json
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import muon_shard
from muon_shard import labels, models


def abstract_params(model: models.Model, replica: int, fsdp: int) -> dict[str, jax.ShapeDtypeStruct]:
    """bf16 leaves of `model` with their usual shardings on an abstract mesh (replica, fsdp)."""
    sizes = {"replica": replica, "fsdp": fsdp}
    mesh = AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))
    specs = models.specs(model, sizes)
    return {
        path: jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, P(*specs[path])))
        for path, shape in model.params.items()
    }


def seconds(call: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds of one call, and what it returned."""
    start = time.perf_counter()
    result = call()
    return time.perf_counter() - start, result


def measure(name: str, replica: int, fsdp: int) -> dict:
    """Plan `name` once on replica × fsdp devices."""
    params = abstract_params(models.load(name), replica, fsdp)
    tx = optax.contrib.muon(1e-3, muon_weight_dimension_numbers=labels.by_path)
    walk, _ = seconds(lambda: jax.eval_shape(tx.init, params))
    took, plan = seconds(lambda: muon_shard.make_plan(params, muon_weight_dimension_numbers=labels.by_path))
    return {
        "model": name,
        "mesh": {"replica": replica, "fsdp": fsdp},
        "devices": replica * fsdp,
        "leaves": len(params),
        "jax": jax.__version__,
        "plan_seconds": round(took, 3),
        "eval_shape_seconds": round(walk, 3),
        "ratio": round(took / walk, 2),
        "balance": round(plan.balance, 4),
        "programs": plan.programs,
        "flops_per_device": plan.flops_per_device,
        "bytes_by_axis": plan.bytes_by_axis,
        "peak_bytes": plan.peak_bytes,
    }


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.planning", description=__doc__)
    parser.add_argument("--model", choices=models.names(), default="kimi-k2")
    parser.add_argument("--replica", type=int, default=32)
    parser.add_argument("--fsdp", type=int, default=128, help="4,096 devices with the default --replica 32")
    args = parser.parse_args()
    print(json.dumps(measure(args.model, args.replica, args.fsdp)))


if __name__ == "__main__":
    main()
