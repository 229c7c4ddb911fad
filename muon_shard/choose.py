"""How the matrices of one domain travel, and over which replicas their work is shared: the cheapest by estimate.

An estimate divides work and bytes evenly; the plan that is built from the choice has the exact figures.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterator

from muon_shard.cost import Traffic
from muon_shard.layout import MeshAxes
from muon_shard.options import PlanOptions
from muon_shard.topology import Topology, collective_seconds
from muon_shard.transports import TRANSPORTS, Gram, Transport, names

USUAL = ("local", "all_to_all")
"""What serves unless something else is clearly better."""

WORTHWHILE_SHARE, WORTHWHILE_SECONDS = 0.05, 2e-4
"""How much another way must save, of the usual one's time and absolutely: estimates are no better than this."""


@dataclasses.dataclass(frozen=True)
class Load:
    """What one row of a domain moves and computes, one way of travelling or another.

    Attributes:
        pool: elements of each device that travel.
        item: bytes of an element on the way in.
        out: bytes of an element on the way back.
        work: of the owners of all matrices of one row, in FLOPs of the platform's usual products.
        largest: of the largest of them.
        everywhere: work that each device has, whoever owns what.
        scales: as in `Traffic`.
        turned: as in `Traffic`.
    """

    pool: int
    item: int
    out: int
    work: int
    largest: int
    everywhere: int = 0
    scales: int = 0
    turned: tuple[tuple[MeshAxes, int], ...] = ()


@dataclasses.dataclass(frozen=True)
class Question:
    """What the choice for one domain depends on.

    Attributes:
        exchange: mesh axes over which matrices are scattered.
        batch: mesh axes that shard a batch dimension.
        free: mesh axes that replicate.
        blocks: what matrices are as blocks.
        grams: what they are as Gram matrices; why they cannot be.
        gathered: as in `Traffic`.
    """

    exchange: MeshAxes
    batch: tuple[str, ...]
    free: MeshAxes
    blocks: Load
    grams: Load | str
    gathered: tuple[tuple[MeshAxes, int], ...] = ()


@dataclasses.dataclass(frozen=True)
class Alternative:
    """A transport and the replicating axes over which work is shared: its estimate, or why it cannot be."""

    transport: str
    shared: tuple[str, ...]
    seconds: float
    refused: str = ""


@dataclasses.dataclass(frozen=True)
class Choice:
    """What was chosen, in words why, and what it was chosen from."""

    transport: str
    shared: tuple[str, ...]
    why: str
    alternatives: tuple[Alternative, ...]

    @property
    def seconds(self) -> dict[str, float]:
        """The best estimate of every transport that can serve, in the order of `TRANSPORTS`."""
        found: dict[str, float] = {}
        for a in self.alternatives:
            if not a.refused:
                found[a.transport] = min(a.seconds, found.get(a.transport, math.inf))
        return found

    @property
    def taken(self) -> Alternative:
        """The alternative that was chosen."""
        return next(a for a in self.alternatives if (a.transport, a.shared) == (self.transport, self.shared))

    @property
    def estimate(self) -> float:
        return self.taken.seconds

    def pinned(self, transport: str, sharing: str | tuple[str, ...]) -> Alternative:
        """What would be chosen of a transport that can serve, over all replicas ('all') or the fewest."""
        of_transport = [a for a in self.alternatives if a.transport == transport and not a.refused]
        return of_transport[0 if sharing == "all" else -1]


def choose(question: Question, topology: Topology, rate: float, options: PlanOptions) -> Choice | str:
    """The choice for one domain; why the options cannot be met, and what can, if they cannot.

    Args:
        question: what is to be moved and computed.
        topology: where.
        rate: FLOP/s that one device reaches on the platform's usual products.
        options: what is pinned.
    """
    alternatives = tuple(_alternatives(question, topology, rate, options))
    legal = [a for a in alternatives if not a.refused]
    if options.transport != "auto" and question.exchange:
        pinned = [a for a in legal if a.transport == options.transport]
        if not pinned:
            reason = next(a.refused for a in alternatives if a.transport == options.transport)
            known = ", ".join(dict.fromkeys(a.transport for a in legal))
            return f"transport={options.transport!r} cannot serve it: {reason}. Legal here: {known}"
        legal = pinned
    best = min(legal, key=lambda a: a.seconds)
    usual = next((a for a in legal if a.transport in USUAL), best)
    if not is_worthwhile(usual.seconds, best.seconds):
        best = usual
    return Choice(best.transport, best.shared, _why(best, usual, question), alternatives)


def is_worthwhile(usual: float, other: float) -> bool:
    """Whether another way, by its seconds, is enough faster than the usual one."""
    return usual - other >= max(WORTHWHILE_SHARE * usual, WORTHWHILE_SECONDS)


def _alternatives(question: Question, topology: Topology, rate: float, options: PlanOptions) -> Iterator[Alternative]:
    """Transport by transport, the widest sharing first."""
    for transport in TRANSPORTS.values():
        load = question.grams if isinstance(transport, Gram) else question.blocks
        refused = transport.refuses(question.exchange) or _too_many_peers(transport, question.exchange, topology)
        if refused or isinstance(load, str):
            yield Alternative(transport.name, (), math.inf, refused or str(load))
            continue
        for shared in _sharings(question.free, options) if not transport.repeats else [()]:
            seconds = estimate(question, load, transport, shared, topology, rate)
            yield Alternative(transport.name, names(shared), seconds)


def _sharings(free: MeshAxes, options: PlanOptions) -> list[MeshAxes]:
    if options.dedup_axes == "all":
        return [free]
    if options.dedup_axes == "auto":
        return [s for k in range(len(free), -1, -1) for s in itertools.combinations(free, k)]
    return [tuple(axis for axis in free if axis[0] in options.dedup_axes)]


def _too_many_peers(transport: Transport, exchange: MeshAxes, topology: Topology) -> str:
    """Why a topology without full connection rules a transport out."""
    groups = {"all_to_all": [exchange], "two_hops": [(axis,) for axis in exchange], "ring": [exchange]}
    for group in groups.get(transport.name, []):
        peers = math.prod(size for _, size in group)
        for name, _ in group:
            most = topology.link(name).peers
            if most is not None and peers > most:
                return f"{name} lets at most {most} devices talk to each other, not {peers}"
    return ""


def estimate(
    question: Question, load: Load, transport: Transport, shared: MeshAxes, topology: Topology, rate: float
) -> float:
    """Seconds of one domain alone: compute on the busiest device, then every collective after the other."""
    peers = math.prod(size for _, size in question.exchange)
    replicas = math.prod(size for _, size in shared)
    workers = 1 if transport.repeats else peers * replicas
    work = load.everywhere + max(load.work / workers, load.largest)
    returned = -(-load.pool // replicas)
    row = load.pool if transport.repeats else -(-returned // peers)
    traffic = Traffic(
        question.exchange,
        shared,
        load.pool,
        row,
        returned,
        load.item,
        load.out,
        load.scales,
        load.turned,
        question.gathered,
    )
    sizes = dict(question.exchange) | dict(question.free) | {a: n for axes, _ in question.gathered for a, n in axes}
    total = work / rate
    for c in (*transport.collectives(traffic), *traffic.share()):
        total += c.count * collective_seconds(c.kind, c.axes, sizes, c.bytes // c.count, topology)
    return total


def _why(best: Alternative, usual: Alternative, question: Question) -> str:
    why = TRANSPORTS[best.transport].why(names(question.exchange), question.batch)
    if best != usual:
        what = usual.transport if usual.transport != best.transport else f"sharing over {'+'.join(usual.shared)}"
        why += f"; {what} would take {usual.seconds / best.seconds:.3g}×"
    elif set(best.shared) != set(names(question.free)):
        why += "; every replica computes"
    return why
