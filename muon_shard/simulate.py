"""A plan's step on a machine nobody here needs to own: when each device packs, talks, computes and waits.

    timeline = simulate(plan, 'ascend-a3')
    print(timeline)                                # a table, one row per class of devices
    timeline.plot()
    timeline.save_trace('step.json')               # for ui.perfetto.dev or chrome://tracing

The model, all waves and in them all phases one after the other: every device copies its shards into pages and sends
them; an owner copies what it received into matrices, orthogonalizes them and copies the results out; all wait for the
busiest; results return, are shared over replicas, and are copied into updates. Where Gram matrices travel, every device
first computes its part of them and multiplies its columns with the results in the end. Nothing overlaps, so every
second of communication is exposed. A copy takes the bytes read and written over the bandwidth of the memory, a
collective `collective_seconds`, a matrix the longer of its work over `domains.rate` and its bytes over the memory's
bandwidth. Parts of a plan on disjoint meshes run side by side.
"""

import dataclasses
import math
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from muon_shard.cost import Collective
from muon_shard.domains import rate
from muon_shard.newton_schulz import NewtonSchulz
from muon_shard.newton_schulz.forms import Form
from muon_shard.newton_schulz.products import PRODUCTS
from muon_shard.orthogonalizer import Adaptive, Orthogonalizer
from muon_shard.plan import Domain, MeshPlan, Plan, Wave, itemsize
from muon_shard.presets import resolve
from muon_shard.timeline import Lane, Span, Timeline
from muon_shard.topology import Topology, collective_seconds
from muon_shard.transports import Gather, Gram

Step = tuple[str, str, float]
"""Phase, domain, seconds."""

TOGETHER = ("matrix", "leaf", "shape")


@dataclasses.dataclass(frozen=True)
class Host:
    """A host that launches operation after operation, each `Topology.launch` seconds, and waits for each.

    Nothing is fused: X ← aX + QX is a product and a sum, which reads and writes X once more.

    Attributes:
        operations: launches that one orthogonalization takes.
        together: what one orthogonalization is: a 'matrix', a 'leaf' with all matrices that the device has of it, or
            all matrices of a 'shape'. Collectives are launched leaf by leaf.
    """

    operations: int = 25
    together: str = "matrix"

    def __post_init__(self) -> None:
        if self.operations < 0 or self.together not in TOGETHER:
            raise ValueError(
                f"Host: operations must be at least 0 and together one of {', '.join(TOGETHER)}; "
                f"got {self.operations} and {self.together!r}."
            )


def simulate(plan: Plan, topology: str | Topology, *, host: Host | None = None) -> Timeline:
    """When every device of a plan does what, on a machine.

    Args:
        plan: what is to be run. Owners and transports stay as planned; NS takes the forms of the machine's platform.
        topology: the machine, as in `PlanOptions`.
        host: a host that launches every operation on its own; None: one that is never late, as under `jit`.

    Raises:
        ValueError: no plan, an unknown name, or listing all that is wrong with a topology.
    """
    if not isinstance(plan, Plan):
        raise ValueError(
            f"simulate: expected a Plan, got a {type(plan).__name__}. Consider muon_shard.make_plan(params)."
        )
    lanes: list[Lane] = []
    name = topology if isinstance(topology, str) else ""
    for number, part in enumerate(plan.parts):
        machine = resolve(topology, None, part.mesh_axes)
        name = machine.name
        on = dataclasses.replace(part, orthogonalizer=part.orthogonalizer.on(machine.platform))
        lanes += _lanes(number, on, _Costs(machine, host))
    return Timeline(tuple(lanes), name, plan.peak_bytes)


def makespan(part: MeshPlan, machine: Topology) -> float:
    """Seconds of one part alone, on the platform that it was planned for."""
    return max(lane.end for lane in _lanes(0, part, _Costs(machine, None)))


def _lanes(number: int, part: MeshPlan, costs: "_Costs") -> Iterator[Lane]:
    """One lane per class of devices, wave after wave."""
    works = [np.stack([costs.ns(part, domain) for domain in wave.domains], axis=1) for wave in part.waves]
    total = sum(work.sum(1) for work in works)
    # With a host, devices of one class may differ in how many leaves their matrices belong to.
    devices = [max(members, key=lambda device: total[device]) for members in part.classes]  # type: ignore
    spans: list[list[Span]] = [[] for _ in devices]
    start = 0.0
    for wave, work in zip(part.waves, works, strict=True):
        before, after = _around(wave, part, costs)
        names = [str(part.leaves[d.leaves[0]].layout) for d in wave.domains]
        ready = start + sum(seconds for *_, seconds in before) + float(work.sum(1).max())
        for device, mine in zip(devices, spans, strict=True):
            ns = [("NS", name, float(seconds)) for name, seconds in zip(names, work[device], strict=True)]
            mine += [*_follow(start, before + ns), *_follow(ready, after)]
        start = ready + sum(seconds for *_, seconds in after)
    for device, mine, members in zip(devices, spans, part.classes, strict=True):
        yield Lane(number, len(members), device, tuple(mine))


def _around(wave: Wave, part: MeshPlan, costs: "_Costs") -> tuple[list[Step], list[Step]]:
    """What all devices of a part do alike before and after the owners' NS."""
    named = [(str(part.leaves[d.leaves[0]].layout), d) for d in wave.domains]
    grams = [("NS", name, costs.grams(part, domain)) for name, domain in named]
    before = [(phase, name, seconds(costs, domain)) for phase, seconds in _BEFORE for name, domain in named]
    after = [(phase, name, seconds(costs, domain)) for phase, seconds in _AFTER for name, domain in named]
    return grams + before, after + grams


def _follow(start: float, steps: Iterable[Step]) -> Iterator[Span]:
    """Spans one after the other, without the empty ones."""
    for phase, name, seconds in steps:
        if seconds:
            yield Span(phase, name, start, seconds)
            start += seconds


@dataclasses.dataclass(frozen=True)
class _Costs:
    """Seconds of one domain's phases on a machine."""

    machine: Topology
    host: Host | None

    def pack(self, domain: Domain) -> float:
        """Reads the shards; writes what is sent: the pages for each peer, or the pool where everyone gets all."""
        t = domain.traffic
        sent = t.pool if isinstance(domain.carrier, Gather) else t.peers * t.row
        return self._copy((t.pool + sent) * t.item)

    def exchange(self, domain: Domain) -> float:
        found = [c for c in domain.carrier.collectives(domain.traffic) if not _returns(c)]
        return self._talk(domain, found)

    def assemble(self, domain: Domain) -> float:
        """Received pages become whole matrices."""
        t = domain.traffic
        return self._copy(2 * t.peers * t.row * t.item)

    def disassemble(self, domain: Domain) -> float:
        """Results become pages."""
        t = domain.traffic
        return self._copy(2 * t.peers * t.row * t.out)

    def back(self, domain: Domain) -> float:
        found = [c for c in domain.carrier.collectives(domain.traffic) if _returns(c)]
        return self._talk(domain, found)

    def share(self, domain: Domain) -> float:
        return self._talk(domain, domain.traffic.share())

    def unpack(self, domain: Domain) -> float:
        """Pages become updates; before replicas share, what each gives is compacted; parts that are gathered join."""
        t = domain.traffic
        joined = sum(math.prod(size for _, size in axes) * given for axes, given in t.gathered)
        return self._copy(2 * ((t.pool + (t.returned if t.shared else 0)) * t.out + joined))

    def ns(self, part: MeshPlan, domain: Domain) -> np.ndarray:
        """Of each device, [devices]."""
        flops, memory = rate(domain.dtype, self.machine), self.machine.hbm_bandwidth * self.machine.achieved
        sums = 1 if self.host else 0
        each = [
            max(
                work.cost / flops,
                sum(n * _ns_bytes(part.orthogonalizer, domain, *shape, sums) for shape, n in kind.problems) / memory,
            )
            for kind, work in zip(domain.packing.kinds, part.works(domain), strict=True)
        ]
        slots = np.array(domain.packing.slots, np.int64).reshape(part.devices, -1)
        launched = _runs(domain, self.host.together) * self.host.operations if self.host else 0
        return slots @ np.array(each) + launched * self.machine.launch

    def grams(self, part: MeshPlan, domain: Domain) -> float:
        """Half of what every device does with its own columns where Gram matrices travel: XXᴴ, and again QX."""
        work = part.everywhere(domain, "cost") / 2
        if not work:
            return 0.0
        local = sum(domain.packing.kinds[k].elements * count for k, count in domain.packing.leaves)
        read = self._copy((local + domain.traffic.pool) * itemsize(domain.dtype))
        return max(work / rate(domain.dtype, self.machine), read)

    def _copy(self, size: float) -> float:
        return size / (self.machine.hbm_bandwidth * self.machine.achieved)

    def _talk(self, domain: Domain, collectives: Sequence[Collective]) -> float:
        """A launched collective also pays its latency again; leaf by leaf, as often as there are leaves."""
        sizes = dict(domain.packing.mesh_axes)
        total = 0.0
        for c in collectives:
            total += c.count * collective_seconds(c.kind, c.axes, sizes, c.bytes / c.count, self.machine)
            if self.host:
                launches = len(domain.leaves)
                idle = collective_seconds(c.kind, c.axes, sizes, 0, self.machine)
                total += c.count * ((launches - 1) * idle + launches * self.machine.launch)
        return total


_BEFORE = (("pack", _Costs.pack), ("exchange", _Costs.exchange), ("unpack", _Costs.assemble))
_AFTER = (
    ("pack", _Costs.disassemble),
    ("return", _Costs.back),
    ("share", _Costs.share),
    ("unpack", _Costs.unpack),
)


def _returns(collective: Collective) -> bool:
    return collective.purpose.startswith("results")


def _runs(domain: Domain, together: str) -> np.ndarray:
    """How many orthogonalizations each device launches, [devices]."""
    packing = domain.packing
    slots = np.array(packing.slots, np.int64)
    slots = slots.reshape(len(slots), -1)
    if together == "matrix":
        return slots @ np.array([sum(n for _, n in kind.problems) for kind in packing.kinds])
    if together == "leaf":
        return sum((packing.owned(i) > 0).astype(np.int64) for i in range(len(packing.leaves)))  # type: ignore
    shapes: dict[tuple[int, int], list[int]] = {}
    for k, kind in enumerate(packing.kinds):
        for shape, _ in kind.problems:
            shapes.setdefault(shape, []).append(k)
    return sum(slots[:, k].any(1).astype(np.int64) for k in shapes.values())  # type: ignore


def _ns_bytes(orthogonalizer: Orthogonalizer, domain: Domain, m: int, n: int, sums: int) -> int:
    """Bytes that an owner reads and writes on one m×n matrix: by every product of the form, at least the matrix once.

    `sums`: m×n sums per segment that are operations of their own.
    """
    while isinstance(orthogonalizer, Adaptive):
        orthogonalizer = orthogonalizer.inner
    if not isinstance(orthogonalizer, NewtonSchulz):
        return 2 * m * n * itemsize(domain.dtype)
    if isinstance(domain.carrier, Gram):
        return Form((orthogonalizer.steps,), PRODUCTS["highest"]).square_products() * 3 * m * m * domain.traffic.item
    form = orthogonalizer.form(m, n, domain.dtype)
    # R = XXᵀ, the products among m×m matrices, X ← QX.
    segment = (m * n + m * m) + (m * m + 2 * m * n) + sums * 3 * m * n
    return (len(form.segments) * segment + form.square_products() * 3 * m * m) * itemsize(domain.dtype)
