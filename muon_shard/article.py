"""The published figures of Muon on HyperParallel-FSDP (MindSpore, Ascend NPUs), replayed with one stand-in.

The article gives times, but neither the model's shapes nor the links. What is assumed stands here, once, and serves all
figures; nothing is set for one of them.

Model: hidden size 2,560 and 37 layers, because the 74 matrices [24, 10240] look like hyper-connections of 4 streams
(4·4 + 2·4 rows, 4·2,560 columns, two per layer). Attention of 32 heads of 128 with 8 for keys and values; 256 experts
and a shared one of width 1,408, which makes 104B parameters without embeddings and routers.

Mesh: 512 devices as 8 replicas (the published compute falls 7 times) of 64 that share every matrix. The 64 are 8 × 8:
experts are parallel over 8, and each tensor of 32 that such a group holds is cut over the other 8. Of all splits this
one has the baseline nearest to the published 2.7 s.

Machine: preset ascend-a3, since the article speaks of super-nodes (ascend-a2 has nodes of 8 and RoCE between), with its
share of peak rates; the host launches 5 operations in each of 5 steps, 40 µs each, which makes the published 1.0 ms
for one matrix [24, 10240]. As published, Newton–Schulz takes the direct form, and what is gathered or launched on its
own is a parameter; an expert tensor counts as one. Where experts are gathered, their rows are cut here, not their
number: equal bytes, equal work.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec
from rich.table import Table

from muon_shard import labels
from muon_shard.layout import MeshAxes
from muon_shard.options import PlanOptions
from muon_shard.plan import Plan
from muon_shard.planner import make_plan
from muon_shard.presets import preset
from muon_shard.simulate import Host, simulate
from muon_shard.timeline import Timeline, plain_table, text_of
from muon_shard.topology import Topology

PRESET = "ascend-a3"
LAUNCH = 40e-6
"""Seconds per launched operation: the published 1.0 ms for a small matrix over 25 operations."""
OPERATIONS = 25
"""Per orthogonalization: 5 steps of XXᵀ, its square, a sum, a product with X, a sum."""
MESH: MeshAxes = (("replica", 8), ("expert", 8), ("fsdp", 8))
LAYERS, HIDDEN, EXPERTS, WIDTH_OF_EXPERT, HYPER = 37, 2560, 256, 1408, (10240, 24)
TOLERANCE = 0.3

ONE_BY_ONE = Host(OPERATIONS, "leaf")
FUSED = Host(OPERATIONS, "shape")

Params = dict[str, jax.ShapeDtypeStruct]


@dataclasses.dataclass(frozen=True)
class Figure:
    """One published ratio beside the predicted one.

    Attributes:
        name: what is compared.
        published: the ratio of the article.
        published_ms: its times, before and after; empty where it gives only the ratio.
        before: seconds, predicted.
        after: seconds, predicted.
        unknown: what the article leaves open that this ratio depends on.
    """

    name: str
    published: float
    published_ms: tuple[float, ...]
    before: float
    after: float
    unknown: str

    @property
    def predicted(self) -> float:
        return self.before / self.after

    @property
    def off(self) -> float:
        """How far the prediction is off, relative to the published ratio."""
        return self.predicted / self.published - 1

    @property
    def reached(self) -> bool:
        return abs(self.off) <= TOLERANCE


@dataclasses.dataclass(frozen=True)
class Replay:
    """All figures, and what the automatic plan takes on the same machine, host never late."""

    figures: tuple[Figure, ...]
    ours: Timeline

    def to_json(self) -> dict[str, Any]:
        """Plain values, times in milliseconds."""
        rows = [
            {
                "name": f.name,
                "published_ms": list(f.published_ms),
                "published_ratio": f.published,
                "predicted_ms": [f.before * 1e3, f.after * 1e3],
                "predicted_ratio": f.predicted,
                "within_30_percent": f.reached,
                "unknown": f.unknown,
            }
            for f in self.figures
        ]
        return {
            "topology": PRESET,
            "mesh": dict(MESH),
            "launch_seconds": LAUNCH,
            "operations": OPERATIONS,
            "figures": rows,
            "auto_plan_ms": self.ours.makespan * 1e3,
            "auto_plan_compute_ms": self.ours.compute * 1e3,
        }

    def __str__(self) -> str:
        mesh, t = " × ".join(f"{name} {size}" for name, size in MESH), self.ours
        billions = sum(x.size for x in (dense() | experts()).values()) / 1e9
        return text_of(
            f"Muon of a stand-in of {billions:.0f}B parameters on {PRESET}, {mesh}. From the article's own times: "
            f"{OPERATIONS} launches of {LAUNCH * 1e6:.0f} µs per matrix (1.0 ms for a small one), 8 replicas (compute "
            "falls 7 times), the split of experts (2.7 s before).",
            _table(self.figures),
            *(f"! {f.name}: {f.unknown}" for f in self.figures if not f.reached),
            f"Our automatic plan on the same machine, compiled: {t.makespan * 1e3:.1f} ms, of it NS "
            f"{t.compute * 1e3:.1f}, communication {t.exposed * 1e3:.1f}, copying {t.copying * 1e3:.1f}.",
        )


def _table(figures: Sequence[Figure]) -> Table:
    """'!' marks what is off by more than the tolerance."""
    table = plain_table("figure", "published ms", "predicted ms", "published", "predicted", "off")
    for f in figures:
        table.add_row(
            f.name,
            " → ".join(f"{ms:,g}" for ms in f.published_ms) or "–",
            f"{f.before * 1e3:,.1f} → {f.after * 1e3:,.1f}",
            f"{f.published:.2f}×",
            f"{f.predicted:.2f}×",
            f"{f.off:+.0%}" + (" " if f.reached else "!"),
        )
    return table


def replay() -> Replay:
    """Plans and simulates every figure."""
    ours = simulate(_plan(dense() | experts(), PlanOptions(topology=machine())), machine())
    return Replay(tuple(figure for make in FIGURES for figure in make()), ours)


def machine(mesh: MeshAxes = MESH) -> Topology:
    """The preset with the launch overhead of the article's host."""
    return dataclasses.replace(preset(PRESET, mesh), launch=LAUNCH)


def dense() -> Params:
    """The matrices that are no experts, rows cut over the 64."""
    narrow, wide = (HIDDEN, WIDTH_OF_EXPERT), (WIDTH_OF_EXPERT, HIDDEN)
    attention = {"q": (HIDDEN, 4096), "k": (HIDDEN, 1024), "v": (HIDDEN, 1024), "o": (4096, HIDDEN)}
    shapes = attention | {"hyper_attn": HYPER, "hyper_mlp": HYPER, "gate": narrow, "up": narrow, "down": wide}
    return {f"{name}.{i}": _leaf(shape, ("expert", "fsdp")) for name, shape in shapes.items() for i in range(LAYERS)}


def experts(*spec: Any, mesh: MeshAxes = MESH) -> Params:
    """The expert tensors [E, in, out], by default in place: cut along E alone."""
    down, up = (EXPERTS, WIDTH_OF_EXPERT, HIDDEN), (EXPERTS, HIDDEN, WIDTH_OF_EXPERT)
    shapes = {"gate": up, "up": up, "down": down}
    spec = spec or (("expert", "fsdp"),)
    return {
        f"experts.{name}.{i}": _leaf(shape, *spec, mesh=mesh) for name, shape in shapes.items() for i in range(LAYERS)
    }


def scattered_experts(mesh: MeshAxes = MESH) -> Params:
    """The expert tensors, whole only after a gather over 'fsdp'."""
    return experts("expert", "fsdp", mesh=mesh)


def split(ways: int) -> MeshAxes:
    """The mesh on which so many devices share one expert tensor, and experts are parallel over the rest of the 64."""
    return (("replica", 8), ("expert", 64 // ways), ("fsdp", ways))


def deduplicated() -> tuple[Figure, ...]:
    """All matrices but experts: everyone computes all; then each only its own, results to all."""
    before, after = _run(dense(), "redundant", (), ONE_BY_ONE), _run(dense(), "gather", (), ONE_BY_ONE)
    return (
        Figure(
            "de-duplication over FSDP",
            485 / 129,
            (485, 129),
            before.makespan,
            after.makespan,
            f"neither which matrices it covers nor the links are given. Over 64 owners {_rest(485, 129, 64):.0f} of "
            f"485 ms are no compute; here it is {(before.makespan - before.compute) * 1e3:.0f} ms before and "
            f"{(after.makespan - after.compute) * 1e3:.0f} after, beside {before.compute * 1e3:.0f} of compute.",
        ),
    )


def experts_in_place() -> tuple[Figure, ...]:
    """One expert tensor: gathered over 'fsdp' and computed whole; then each device its own experts."""
    pairs = {ways: _expert_seconds(split(ways)) for ways in (4, 8, 64)}
    told = ", ".join(f"{before / after:.1f} over {ways}" for ways, (before, after) in pairs.items())
    return (
        Figure(
            "one expert tensor in place",
            4.9 / 1.1,
            (4.9, 1.1),
            *pairs[dict(MESH)["fsdp"]],
            "neither its shape nor over how many devices one tensor was cut is given, and the ratio is little else: "
            f"here it is {told}.",
        ),
    )


def _expert_seconds(mesh: MeshAxes) -> tuple[float, float]:
    """One expert tensor before and after."""
    name = "experts.gate.0"
    before = _run({name: scattered_experts(mesh)[name]}, "redundant", (), ONE_BY_ONE, mesh)
    after = _run({name: experts(mesh=mesh)[name]}, "auto", (), ONE_BY_ONE, mesh)
    return before.makespan, after.makespan


def fused() -> tuple[Figure, ...]:
    """74 matrices [24, 10240] on one device: one after the other; then in one batch."""
    params = {f"hyper.{i}": jax.ShapeDtypeStruct(HYPER, "bfloat16") for i in range(2 * LAYERS)}
    before, after = _run(params, "auto", (), ONE_BY_ONE), _run(params, "auto", (), FUSED)
    return (
        Figure(
            "fusion of 74 × [24, 10240]",
            74 * 1.0 / 2.4,
            (74, 2.4),
            before.makespan,
            after.makespan,
            "what else a launch waits for is not given.",
        ),
    )


def replicas_share() -> tuple[Figure, ...]:
    """The whole model with all the above: every replica computes; then they share."""
    params = dense() | experts()
    before, after = _run(params, "gather", (), FUSED), _run(params, "gather", "all", FUSED)
    unknown = "the links between replicas are not given."
    return (
        Figure("replica sharing, whole step", 2, (), before.makespan, after.makespan, unknown),
        Figure("replica sharing, compute", 7, (), before.compute, after.compute, unknown),
    )


def all_together() -> tuple[Figure, ...]:
    """The whole model: redundant and one by one; then de-duplicated, in place, fused, shared."""
    before = _run(dense() | scattered_experts(), "redundant", (), ONE_BY_ONE)
    after = _run(dense() | experts(), "gather", "all", FUSED)
    return (
        Figure(
            "all together",
            2700 / 450,
            (2700, 450),
            before.makespan,
            after.makespan,
            f"a step that halves to 450 ms while its compute falls 7 times has {_rest(900, 450, 7):.0f} ms that are no "
            f"compute; here it is {(after.makespan - after.compute) * 1e3:.0f}. Neither bytes nor links are given to "
            "tell why theirs took longer.",
        ),
    )


def _rest(before: float, after: float, ways: int) -> float:
    """What stays of a time when the rest of it falls so many times."""
    return (ways * after - before) / (ways - 1)


FIGURES = (deduplicated, experts_in_place, fused, replicas_share, all_together)


def _leaf(shape: tuple[int, ...], *spec: Any, mesh: MeshAxes = MESH) -> jax.ShapeDtypeStruct:
    abstract = AbstractMesh(tuple(size for _, size in mesh), tuple(name for name, _ in mesh))
    return jax.ShapeDtypeStruct(shape, "bfloat16", sharding=NamedSharding(abstract, PartitionSpec(*spec)))


def _plan(params: Params, options: PlanOptions) -> Plan:
    return make_plan(params, options=options, muon_weight_dimension_numbers=labels.by_path)


def _run(
    params: Params, transport: str, dedup_axes: str | tuple[str, ...], host: Host, mesh: MeshAxes = MESH
) -> Timeline:
    here = machine(mesh)
    options = PlanOptions(topology=here, transport=transport, dedup_axes=dedup_axes, ns_method="direct")
    return simulate(_plan(params, options), here, host=host)
