"""The table of layouts that drives the tests: mesh × spec × dimension numbers."""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from optax.contrib import MuonDimensionNumbers as Dims

import muon_shard
from muon_shard import Blocks

WEIGHT = Dims()
AXIS_TYPES = {
    "auto": lambda rank: (AxisType.Auto,) * rank,
    "explicit": lambda rank: (AxisType.Explicit,) * rank,
    "mixed": lambda rank: tuple((AxisType.Auto, AxisType.Explicit)[i % 2] for i in range(rank)),
}


@dataclasses.dataclass(frozen=True)
class Leaf:
    shape: tuple[int, ...]
    spec: P = P()
    dims: Dims | Blocks | None = WEIGHT


@dataclasses.dataclass(frozen=True)
class Case:
    mesh: dict[str, int]
    leaves: dict[str, Leaf]

    def make_mesh(self, axis_type: str = "auto") -> jax.sharding.Mesh:
        types = AXIS_TYPES[axis_type](len(self.mesh))
        devices = jax.devices()[: int(np.prod(list(self.mesh.values())))]
        return jax.make_mesh(tuple(self.mesh.values()), tuple(self.mesh), axis_types=types, devices=devices)

    @property
    def dims(self) -> dict[str, Dims | Blocks | None]:
        return {name: leaf.dims for name, leaf in self.leaves.items()}

    def host(self, seed: int = 0, dtype: str = "float32") -> dict[str, np.ndarray]:
        rng = np.random.default_rng(seed)
        return {
            name: np.asarray(jnp.asarray(rng.standard_normal(leaf.shape), dtype)) for name, leaf in self.leaves.items()
        }

    def put(self, host: dict[str, np.ndarray], mesh: jax.sharding.Mesh) -> dict[str, jax.Array]:
        return {name: jax.device_put(host[name], NamedSharding(mesh, leaf.spec)) for name, leaf in self.leaves.items()}

    def abstract(self, mesh: object, dtype: str = "float32") -> dict[str, jax.ShapeDtypeStruct]:
        return {
            name: jax.ShapeDtypeStruct(leaf.shape, dtype, sharding=NamedSharding(mesh, leaf.spec))  # type: ignore
            for name, leaf in self.leaves.items()
        }


def repeat(prefix: str, count: int, *leaf: object) -> dict[str, Leaf]:
    return {f"{prefix}{i}": Leaf(*leaf) for i in range(count)}  # type: ignore[arg-type]


def _mixed(spec: P) -> dict[str, Leaf]:
    shapes: Sequence[tuple[int, int]] = [(32, 32)] * 5 + [(32, 64)] * 3 + [(64, 32)] * 2 + [(16, 48), (48, 16), (8, 96)]
    return {f"w{i}": Leaf(shape, spec) for i, shape in enumerate(shapes)}


SHARED = muon_shard.PlanOptions(dedup_axes="all")
"""Replicas share work whatever that costs: left to the planner, matrices as small as here are computed by each."""

CASES = {
    "one_device": Case({"x": 1}, _mixed(P()) | {"bias": Leaf((32,), P(), None)}),
    "fsdp_rows": Case({"fsdp": 8}, _mixed(P("fsdp")) | {"bias": Leaf((32,), P("fsdp"), None)}),
    "fsdp_cols": Case({"fsdp": 8}, _mixed(P(None, "fsdp"))),
    "hsdp": Case({"replica": 2, "fsdp": 4}, _mixed(P("fsdp")) | {"bias": Leaf((32,), P(), None)}),
    "replicated": Case({"x": 8}, _mixed(P())),
    "size_one_axes": Case(
        {"a": 1, "fsdp": 4, "b": 1}, {"w": Leaf((32, 16), P("fsdp", "b")), "v": Leaf((16, 32), P("a"))}
    ),
    "two_dimensional": Case(
        {"replica": 2, "fsdp": 2, "tensor": 2},
        {
            "a": Leaf((32, 64), P("fsdp", "tensor")),
            "b": Leaf((64, 32), P("fsdp", "tensor")),
            "c": Leaf((32, 32), P("tensor", "fsdp")),
            "d": Leaf((48, 32), P(("fsdp", "tensor"), None)),
            "e": Leaf((48, 32), P(None, ("tensor", "fsdp"))),
            "f": Leaf((64, 16), P(("replica", "fsdp"), "tensor")),
            "bias": Leaf((64,), P("tensor"), None),
        },
    ),
    "stacks": Case(
        {"replica": 2, "fsdp": 4},
        {
            "layers_first": Leaf((3, 32, 64), P(None, "fsdp", None), Dims(1, 2)),
            "layers_second": Leaf((32, 3, 64), P("fsdp", None, None), Dims(0, 2)),
            "layers_sharded": Leaf((4, 32, 16), P("fsdp", None, None), Dims(1, 2)),
            "layers_over_both": Leaf((8, 16, 16), P(("replica", "fsdp"), None, None), Dims(1, 2)),
            "biases": Leaf((3, 64), P(None, "fsdp"), None),
        },
    ),
    "experts": Case(
        {"replica": 2, "expert": 2, "fsdp": 2},
        {
            "up": Leaf((4, 32, 48), P("expert", "fsdp", None), Dims(1, 2)),
            "down": Leaf((4, 48, 32), P("expert", None, "fsdp"), Dims(1, 2)),
            "stacked": Leaf((2, 4, 16, 32), P(None, "expert", None, None), Dims(2, 3)),
            "behind": Leaf((3, 4, 16, 32), P(None, ("expert", "fsdp"), None, None), Dims(2, 3)),
            "dense": Leaf((32, 32), P("fsdp", "expert")),
            "router": Leaf((32, 4), P("fsdp", None), None),
        },
    ),
    "merged": Case(
        {"fsdp": 4, "tensor": 2},
        {
            "heads_out": Leaf((32, 4, 8), P("fsdp", "tensor", None), Dims(0, (1, 2))),
            "heads_in": Leaf((4, 8, 32), P("tensor", None, "fsdp"), Dims((0, 1), 2)),
            "minor": Leaf((32, 4, 8), P(None, None, ("fsdp", "tensor")), Dims(0, (1, 2))),
            "both": Leaf((32, 4, 8), P(None, "fsdp", "tensor"), Dims(0, (1, 2))),
            "swapped": Leaf((16, 4, 6), P("fsdp", "tensor", None), Dims((1, 0), 2)),
            "conv": Leaf((3, 3, 8, 16), P(None, None, "tensor", "fsdp"), Dims((0, 1, 2), 3)),
            "conv_stack": Leaf((2, 3, 3, 8, 16), P("tensor", None, None, None, "fsdp"), Dims((1, 2, 3), -1)),
        },
    ),
    "odd_sizes": Case(
        {"replica": 2, "fsdp": 4},
        {
            "eighteen": Leaf((18, 7), P(None, None)),
            "twelve": Leaf((12, 33), P("fsdp", None)),
            "row": Leaf((1, 20), P(None, "fsdp")),
            "column": Leaf((20, 1), P("fsdp", None)),
            "single": Leaf((1, 1)),
            "thin": Leaf((4, 101), P("fsdp", None)),
            "five": Leaf((5, 28, 9), P(None, "fsdp", None), Dims(1, 2)),
        },
    ),
}
