"""The article's figures on 8 emulated devices: each ratio as published, as simulated for its machine, and here.

The model is the stand-in of `muon_shard.article`, every width divided by one number, with fewer layers and experts. For
each figure: `published` and `predicted` ratios; per case the mesh, the matrices, `measured`, which is seconds before ÷
after (medians of the rounds' ratios), `flops`, which is NS FLOPs of the busiest device before ÷ after, `to_ours`, which
is seconds ÷ those of ours, and every way with its milliseconds, FLOPs, collectives, temporaries, and its largest
difference to `optax.contrib.muon` on one device.
`here` says what of a figure cannot be shown on such devices.

| way | what it is |
| --- | --- |
| `redundant` | each device gathers every tensor, computes it, keeps its slice: tensor by tensor, nothing fused |
| `scheme` | as published: gathered, each computed by one owner in direct form, results gathered |
| `scheme, replicas apart` | the same, and every replica computes everything |
| `ours`, `ours, replicas apart` | what the plan takes by itself |
| `optax` | `optax.contrib.muon`, left to the compiler |
"""

import argparse
import collections
import dataclasses
import json
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec as P
from optax.contrib import MuonDimensionNumbers

import muon_shard
from benchmarks import rounds as timing
from benchmarks.newton_schulz import textbook
from benchmarks.peers import COEFFICIENTS, EPSILON, LEARNING_RATE, redundant
from benchmarks.reference import Leaves, ReferenceSet
from muon_shard import article
from muon_shard.cost import ns_flops

SEEDS = (1, 2)
MATRIX = MuonDimensionNumbers(-2, -1)
SCHEME = muon_shard.PlanOptions(transport="gather", dedup_axes="all", ns_method="direct")
OPTIONS = {
    "scheme": SCHEME,
    "scheme, replicas apart": dataclasses.replace(SCHEME, dedup_axes=()),
    "ours": muon_shard.PlanOptions(),
    "ours, replicas apart": muon_shard.PlanOptions(dedup_axes=()),
}
DEVICES = 8
STREAMS = 24
"""Rows of the hyper-connections: they do not grow with the model."""


@dataclasses.dataclass(frozen=True)
class Size:
    """How far the stand-in is scaled down: widths divided by `scale`, so many layers and experts of it.

    Raises:
        ValueError: 8 devices cannot share a width, or the experts.
    """

    scale: int
    layers: int
    experts: int

    def __post_init__(self) -> None:
        widths = {d for x in (article.dense() | article.experts()).values() for d in x.shape[-2:]} - {STREAMS}
        odd = sorted(d for d in widths if d % (DEVICES * self.scale))
        if odd or self.experts % DEVICES:
            raise ValueError(
                f"{DEVICES} devices cannot share {self.experts} experts and widths divided by {self.scale}: "
                f"{', '.join(f'{d / self.scale:g}' for d in odd) or 'all of these divide'}."
            )

    def dense(self) -> Leaves:
        """The matrices that are no experts, rows cut over 'fsdp'."""
        return self._leaves(article.dense(), P("fsdp", None))

    def moe(self) -> Leaves:
        """All matrices; experts lie whole, some on each device of 'fsdp', as FSDP cuts the first dimension."""
        return self.dense() | self._leaves(article.experts(), P("fsdp", None, None))

    def expert_tensor(self) -> Leaves:
        """One expert tensor."""
        return {name: leaf for name, leaf in self.moe().items() if name == "experts.gate.0"}

    def _leaves(self, params: article.Params, spec: P) -> Leaves:
        def scaled(shape: tuple[int, ...]) -> tuple[int, ...]:
            matrix = tuple(d if d == STREAMS else d // self.scale for d in shape[-2:])
            return (self.experts, *matrix) if len(shape) == 3 else matrix

        layers = {name: x for name, x in params.items() if int(name.rsplit(".", 1)[1]) < self.layers}
        return {name: (scaled(x.shape), spec) for name, x in layers.items()}


QUICK, FULL = Size(16, 2, 16), Size(8, 4, 16)


@dataclasses.dataclass(frozen=True)
class Case:
    """Ways to run one step on some matrices; the figure compares `before` with `after`."""

    mesh: dict[str, int]
    leaves: Leaves
    before: str
    after: str
    beside: tuple[str, ...] = ()

    @property
    def ways(self) -> tuple[str, ...]:
        return (self.before, self.after, *self.beside)

    def measure(self, rounds: int, tick: timing.Tick) -> dict[str, Any]:
        """Builds, checks and times every way."""
        chosen = ReferenceSet(tuple(self.mesh.values()), tuple(self.mesh), self.leaves)
        mesh, dims = chosen.mesh(), dict.fromkeys(self.leaves, MATRIX)
        params, *grads = (chosen.arrays(mesh, seed) for seed in (0, *SEEDS))
        host, *host_grads = (chosen.host_arrays(seed) for seed in (0, *SEEDS))
        judge = optax.contrib.muon(LEARNING_RATE, muon_weight_dimension_numbers=dims)
        problem = timing.Problem(mesh, params, grads, timing.on_one_device(judge, host, host_grads))
        given: dict[str, Any] = {"redundant": redundant(mesh, chosen.specs, dims), "optax": judge}
        given |= {
            name: muon_shard.muon(LEARNING_RATE, muon_weight_dimension_numbers=dims, plan_options=options)
            for name, options in OPTIONS.items()
        }
        times, ways = problem.measure({name: given[name] for name in self.ways}, rounds, tick)
        flops = {"redundant": everything(self.leaves)}
        for name in OPTIONS:
            plan = muon_shard.make_plan(params, options=OPTIONS[name], muon_weight_dimension_numbers=dims)
            flops[name] = plan.flops_per_device
        for name in self.ways:
            if name in flops:
                ways[name]["flops_per_device"] = flops[name]
        return {
            "mesh": self.mesh,
            "matrices": inventory(self.leaves),
            "measured": timing.ratio(times, self.before, self.after),
            "flops": round(flops[self.before] / flops[self.after], 2),
            "to_ours": {name: timing.ratio(times, name, "ours") for name in self.ways if name != "ours"},
            "ways": ways,
        }


@dataclasses.dataclass(frozen=True)
class Dispatch:
    """Many small matrices on one device: how often the host is needed."""

    shape: tuple[int, ...]
    count: int = 2 * article.LAYERS

    @property
    def ways(self) -> tuple[str, ...]:
        return tuple(self._ways(self._matrices()))

    def _matrices(self) -> list[jax.Array]:
        rng = np.random.default_rng(0)
        return [jnp.asarray(rng.standard_normal(self.shape, np.float32)) for _ in range(self.count)]

    def _ways(self, xs: list[jax.Array]) -> dict[str, Callable[[], Any]]:
        each, one_by_one = jax.jit(textbook), jax.jit(lambda xs: [textbook(x) for x in xs])
        fused = jax.jit(lambda xs: list(muon_shard.orthogonalize(jnp.stack(xs), method="direct")))
        return {
            "operation by operation": lambda: [operations(x) for x in xs],
            "one program each": lambda: [each(x) for x in xs],
            "one program, one by one": lambda: one_by_one(xs),
            "one program, fused": lambda: fused(xs),
        }

    def measure(self, rounds: int, tick: timing.Tick) -> dict[str, Any]:
        """Times the ways, against the fused one."""
        xs = self._matrices()
        ways = self._ways(xs)
        dims = dict.fromkeys(map(str, range(len(xs))), MATRIX)
        # Without momentum: the orthogonalized gradient itself.
        judge = optax.contrib.scale_by_muon(beta=0.0, nesterov=False, weight_dimension_numbers=dims)
        host = {str(i): np.asarray(x) for i, x in enumerate(xs)}
        (wanted,) = timing.on_one_device(judge, host, [host])
        found: dict[str, dict[str, Any]] = {}
        for name, way in ways.items():
            got = {str(i): y for i, y in enumerate(way())}
            found[name] = {"relative_difference": float(f"{timing.difference(got, wanted):.2g}")}
            tick()
        times = timing.interleaved(ways, rounds, tick)
        before, *_, after = ways
        for name, took in timing.milliseconds(times).items():
            found[name] = {"ms": took, "to_fused": timing.ratio(times, name, after)} | found[name]
        found[before]["operations"] = len(jax.make_jaxpr(operations)(xs[0]).eqns) * self.count
        return {
            "mesh": {},
            "matrices": {str(list(self.shape)): self.count},
            "measured": timing.ratio(times, before, after),
            "ways": found,
        }


def operations(x: jax.Array) -> jax.Array:
    """The textbook form without `jit`: the host launches every operation."""
    a, b, c = COEFFICIENTS
    x = x / (jnp.sqrt((x * x).sum()) + EPSILON)
    for _ in range(5):
        r = x @ x.T
        x = a * x + (b * r + c * r @ r) @ x
    return x


def everything(leaves: Leaves) -> int:
    """Direct FLOPs of all matrices."""
    return sum(math.prod(shape[:-2]) * ns_flops(*shape[-2:]) for shape, _ in leaves.values())


def inventory(leaves: Leaves) -> dict[str, int]:
    """How many tensors of each shape, sharded dimensions marked as `320_fsdp`."""

    def shown(shape: tuple[int, ...], spec: P) -> str:
        dims = (f"{size}_{axis}" if axis else str(size) for size, axis in zip(shape, spec, strict=True))
        return f"[{', '.join(dims)}]"

    return dict(collections.Counter(shown(*leaf) for leaf in leaves.values()))


@dataclasses.dataclass(frozen=True)
class Figure:
    """One figure of the article: its simulated replay, the cases here, and what they cannot show."""

    replay: Callable[[], tuple[article.Figure, ...]]
    cases: Callable[[Size, bool], list[Case | Dispatch]]
    here: str

    def measure(self, cases: list[Case | Dispatch], rounds: int, tick: timing.Tick) -> dict[str, Any]:
        """Replays and measures."""
        replayed = [
            {
                "name": f.name,
                "published_ms": f.published_ms,
                "published": round(f.published, 2),
                "predicted": round(f.predicted, 2),
                "unknown": f.unknown,
            }
            for f in self.replay()
        ]
        return {
            "ratios": replayed,
            "here": self.here,
            "cases": [case.measure(rounds, tick) for case in cases],
        }


def deduplicated(size: Size, quick: bool) -> list[Case | Dispatch]:
    """All matrices but experts over one FSDP axis."""
    return [Case({"fsdp": DEVICES}, size.dense(), "redundant", "scheme", ("ours",))]


def experts_in_place(size: Size, quick: bool) -> list[Case | Dispatch]:
    """One expert tensor over 8 devices; over 4, each twice."""
    meshes = [{"fsdp": DEVICES}] if quick else [{"fsdp": DEVICES}, {"replica": 2, "fsdp": 4}]
    return [Case(mesh, size.expert_tensor(), "redundant", "ours, replicas apart", ("ours",)) for mesh in meshes]


def fused(size: Size, quick: bool) -> list[Case | Dispatch]:
    """The published matrices; and small ones, where launching takes longer than computing, as on an NPU."""
    return [Dispatch((article.HYPER[1], article.HYPER[0] // by)) for by in ((128,) if quick else (1, 128))]


def replicas_share(size: Size, quick: bool) -> list[Case | Dispatch]:
    """The whole model on 2, 4 and 8 replicas."""
    meshes = [{"replica": r, "fsdp": DEVICES // r} for r in ((2,) if quick else (2, 4, 8))]
    beside = ("ours",) if quick else ("ours, replicas apart", "ours")
    return [Case(mesh, size.moe(), "scheme, replicas apart", "scheme", beside) for mesh in meshes]


def all_together(size: Size, quick: bool) -> list[Case | Dispatch]:
    """The whole model on HSDP."""
    return [Case({"replica": 2, "fsdp": 4}, size.moe(), "redundant", "scheme", ("optax", "ours"))]


FIGURES = {
    "fig3": Figure(
        article.deduplicated,
        deduplicated,
        "8 owners, not 64. Emulated devices share the cores, so a step takes as long as the work of all of them, and "
        "what is gathered is copied in memory: ratios lie nearer to the FLOPs than on links.",
    ),
    "fig5": Figure(
        article.experts_in_place,
        experts_in_place,
        "At most 8 devices hold one tensor. Its gather is a copy in memory, so the ratio is that of the work.",
    ),
    "fig7": Figure(
        article.fused,
        fused,
        "Under jit the host launches one program, however many matrices it holds: what the article fuses away is not "
        "there. Operation by operation the host is as late as theirs, but on these cores computing [24, 10240] takes "
        "longer than launching, which hides it; the small matrices show it. What remains between programs is what "
        "fusing saves in memory traffic and in calls of the library.",
    ),
    "fig10": Figure(
        article.replicas_share,
        replicas_share,
        "All links are memory: sharing results over replicas costs what any copy does, not what a link between nodes "
        "does. The FLOPs are exact: they fall by the replicas.",
    ),
    "headline": Figure(
        article.all_together,
        all_together,
        "8 devices, not 512, experts gathered over 4 of them; no late host and no links. What remains is the work that "
        "is not repeated.",
    ),
}


def chosen_cases(names: list[str], size: Size, quick: bool) -> Iterator[tuple[str, list[Case | Dispatch]]]:
    """The cases of each figure."""
    for name in names:
        yield name, FIGURES[name].cases(size, quick)


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.article", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="a smaller model, fewer cases, 1 round")
    parser.add_argument("--figures", nargs="+", choices=FIGURES, default=list(FIGURES))
    parser.add_argument("--rounds", type=int, help="5, or 1 with --quick")
    parser.add_argument("--scale", type=int, help="divides all widths")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--experts", type=int)
    args = parser.parse_args()
    rounds = args.rounds or (1 if args.quick else 5)
    given = {field: value for field in ("scale", "layers", "experts") if (value := getattr(args, field))}
    try:
        size = dataclasses.replace(QUICK if args.quick else FULL, **given)
    except ValueError as error:
        parser.error(str(error))
    muon_shard.emulate_devices(DEVICES)
    cases = dict(chosen_cases(args.figures, size, args.quick))
    total = sum(timing.ticks(len(case.ways), rounds) for each in cases.values() for case in each)
    with timing.progress("figures", total) as tick:
        figures = {name: FIGURES[name].measure(each, rounds, tick) for name, each in cases.items()}
    report = {"jax": jax.__version__, "rounds": rounds, "size": dataclasses.asdict(size)}
    print(json.dumps(report | {"figures": figures}))


if __name__ == "__main__":
    main()
