"""One optimizer step of four kinds of models, in usual layouts, in float32 and bfloat16, on 8 emulated devices.

Ours against `optax.contrib.muon` under GSPMD and `redundant`: each device gathers, computes and slices every leaf.
One line of JSON: per model, layout and dtype the mesh, how leaves are sharded, and for each way milliseconds (medians),
its ratio to ours (medians of the rounds' ratios), collectives, temporaries, and its largest difference to
`optax.contrib.muon` on one device, in float32 from the same numbers, relative to the largest entry. All leaves are
Muon's.
"""

import argparse
import dataclasses
import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec as P
from optax.contrib import MuonDimensionNumbers

import muon_shard
from benchmarks import rounds as timing
from benchmarks.peers import LEARNING_RATE, redundant
from benchmarks.reference import ReferenceSet

SEEDS = (1, 2)
WAYS = ("ours", "optax", "redundant")
DTYPES = ("float32", "bfloat16")
MATRIX = MuonDimensionNumbers(-2, -1)
CONVOLUTION = MuonDimensionNumbers((0, 1, 2), 3)


@dataclasses.dataclass(frozen=True)
class Leaf:
    """A parameter; `names` say what its dimensions are, layouts which of these they shard."""

    shape: tuple[int, ...]
    names: str
    dims: MuonDimensionNumbers = MATRIX


Model = dict[str, Leaf]


def transformer(layers: int, width: int) -> Model:
    """Attention with as many heads for keys and values, and a 4× feed-forward."""
    leaves = {name: Leaf((width, width), "embed heads") for name in "qkv"}
    leaves |= {"o": Leaf((width, width), "heads embed")}
    leaves |= {"up": Leaf((width, 4 * width), "embed mlp"), "down": Leaf((4 * width, width), "mlp embed")}
    return {f"{i}.{name}": leaf for i in range(layers) for name, leaf in leaves.items()}


def scanned(layers: int, width: int) -> Model:
    """The same in one leaf per name, layers stacked in front."""
    one = transformer(1, width)
    return {name.removeprefix("0."): Leaf((layers, *leaf.shape), f"layers {leaf.names}") for name, leaf in one.items()}


def mixture(layers: int, width: int, experts: int) -> Model:
    """DeepSeek-V3's proportions: latent attention, one dense layer, then experts and a shared one.

    Its widths are 7168, ranks 1536 and 512 + 64, 128 heads of 128 + 64 and 128 + 128, experts 2048, dense 18432.
    """

    def part(share: int) -> int:
        return share * width // 448  # 448 is 7168 / 16

    attention = {
        "q_a": Leaf((width, part(96)), "embed rank"),
        "q_b": Leaf((part(96), part(1536)), "rank heads"),
        "kv_a": Leaf((width, part(36)), "embed rank"),
        "kv_b": Leaf((part(32), part(2048)), "rank heads"),
        "o": Leaf((part(1024), width), "heads embed"),
    }

    def feed_forward(inner: int, *batch: int, names: str = "") -> Model:
        return {
            "gate": Leaf((*batch, width, inner), f"{names}embed mlp"),
            "up": Leaf((*batch, width, inner), f"{names}embed mlp"),
            "down": Leaf((*batch, inner, width), f"{names}mlp embed"),
        }

    leaves: Model = {}
    for i in range(layers):
        leaves |= {f"{i}.{name}": leaf for name, leaf in attention.items()}
        if i == 0:
            leaves |= {f"{i}.{name}": leaf for name, leaf in feed_forward(part(1152)).items()}
            continue
        leaves |= {f"{i}.shared.{name}": leaf for name, leaf in feed_forward(part(128)).items()}
        routed = feed_forward(part(128), experts, names="experts ")
        leaves |= {f"{i}.experts.{name}": leaf for name, leaf in routed.items()}
    return leaves


def convolutional(blocks: int, width: int) -> Model:
    """Kernels [height, width, in, out] of a residual net: stages of growing width, each with a 1×1 shortcut."""
    leaves: Model = {}
    for stage, out in enumerate((width, 2 * width, 4 * width)):
        before = max(width, out // 2)
        leaves[f"{stage}.shortcut"] = Leaf((1, 1, before, out), "height width in out", CONVOLUTION)
        for block in range(blocks):
            inner = before if block == 0 else out
            leaves[f"{stage}.{block}.a"] = Leaf((3, 3, inner, out), "height width in out", CONVOLUTION)
            leaves[f"{stage}.{block}.b"] = Leaf((3, 3, out, out), "height width in out", CONVOLUTION)
    return leaves


MODELS = {
    "transformer": transformer(4, 256),
    "mixture of experts": mixture(3, 224, 32),
    "scanned": scanned(8, 192),
    "convolutional": convolutional(2, 64),
}
SMALL = {
    "transformer": transformer(2, 128),
    "mixture of experts": mixture(2, 112, 8),
    "scanned": scanned(4, 96),
    "convolutional": convolutional(1, 32),
}


@dataclasses.dataclass(frozen=True)
class Layout:
    """A mesh, and the mesh axis that shards each named dimension: the first of a leaf that an axis fits takes it."""

    mesh: dict[str, int]
    rules: dict[str, str]

    def spec(self, leaf: Leaf) -> P:
        """Of one leaf."""
        taken: list[str | None] = []
        for name, size in zip(leaf.names.split(), leaf.shape, strict=True):
            axis = self.rules.get(name)
            fits = axis is not None and axis not in taken and size % self.mesh[axis] == 0
            taken.append(axis if fits else None)
        return P(*taken)


FSDP = {"embed": "fsdp", "rank": "fsdp", "out": "fsdp"}
LAYOUTS = {
    "FSDP": Layout({"fsdp": 8}, FSDP | {"experts": "fsdp"}),
    "HSDP": Layout({"replica": 2, "fsdp": 4}, FSDP | {"experts": "fsdp"}),
    "FSDP × TP": Layout({"fsdp": 4, "tensor": 2}, FSDP | {"heads": "tensor", "mlp": "tensor", "in": "tensor"}),
    "EP × FSDP": Layout({"expert": 2, "fsdp": 4}, FSDP | {"experts": "expert"}),
}


@dataclasses.dataclass(frozen=True)
class Case:
    """A model in a layout, in one dtype."""

    model: str
    layout: str
    dtype: str
    leaves: Model

    def measure(self, rounds: int, tick: timing.Tick) -> dict[str, Any]:
        """Builds, checks and times every way."""
        layout = LAYOUTS[self.layout]
        specs = {name: layout.spec(leaf) for name, leaf in self.leaves.items()}
        dims = {name: leaf.dims for name, leaf in self.leaves.items()}
        shapes = {name: (leaf.shape, specs[name]) for name, leaf in self.leaves.items()}
        chosen = ReferenceSet(tuple(layout.mesh.values()), tuple(layout.mesh), shapes)
        mesh = chosen.mesh()
        host = [
            {name: x.astype(jnp.dtype(self.dtype)) for name, x in chosen.host_arrays(seed).items()}
            for seed in (0, *SEEDS)
        ]
        params, *grads = (jax.device_put(each, chosen.shardings(mesh)) for each in host)
        judge = optax.contrib.muon(LEARNING_RATE, muon_weight_dimension_numbers=dims)
        exact = [{name: x.astype(np.float32) for name, x in each.items()} for each in host]
        problem = timing.Problem(mesh, params, grads, timing.on_one_device(judge, exact[0], exact[1:]))
        ways = {
            "ours": muon_shard.muon(LEARNING_RATE, muon_weight_dimension_numbers=dims),
            "optax": judge,
            "redundant": redundant(mesh, specs, dims),
        }
        times, found = problem.measure(ways, rounds, tick)
        plan = muon_shard.make_plan(params, muon_weight_dimension_numbers=dims)
        for name in ways:
            found[name]["to_ours"] = timing.ratio(times, name, "ours")
        found["ours"]["flops_over_ideal"] = round(plan.flops_per_device * plan.devices / plan.total_flops, 3)
        return {
            "model": self.model,
            "layout": self.layout,
            "dtype": self.dtype,
            "mesh": layout.mesh,
            "leaves": len(shapes),
            "sharded": sorted({f"{leaf.names} {tuple(specs[name])}" for name, leaf in self.leaves.items()}),
            "ways": found,
        }


def cases(models: dict[str, Model], layouts: list[str], dtypes: list[str]) -> list[Case]:
    """Every combination; experts have an axis of their own only where there are experts."""
    return [
        Case(model, layout, dtype, leaves)
        for model, leaves in models.items()
        for layout in layouts
        for dtype in dtypes
        if layout != "EP × FSDP" or any("experts" in leaf.names for leaf in leaves.values())
    ]


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.breadth", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small models, each in one layout, float32, 1 round")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS))
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--rounds", type=int, help="3, or 1 with --quick")
    args = parser.parse_args()
    rounds = args.rounds or (1 if args.quick else 3)
    models = {name: (SMALL if args.quick else MODELS)[name] for name in args.models}
    chosen = cases(models, args.layouts, args.dtypes)
    if args.quick:
        chosen = one_each(chosen)
    muon_shard.emulate_devices(8)
    with timing.progress("cases", len(chosen) * timing.ticks(len(WAYS), rounds)) as tick:
        found = [case.measure(rounds, tick) for case in chosen]
    print(json.dumps({"jax": jax.__version__, "rounds": rounds, "cases": found}))


def one_each(chosen: list[Case]) -> list[Case]:
    """One case of each model in the first dtype, in layouts that are as different as can be."""
    by_model: dict[str, list[Case]] = {}
    for case in chosen:
        if case.dtype == chosen[0].dtype:
            by_model.setdefault(case.model, []).append(case)
    return [each[i % len(each)] for i, each in enumerate(by_model.values())]


if __name__ == "__main__":
    main()
