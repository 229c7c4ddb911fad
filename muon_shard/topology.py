"""Mesh axis → link: how fast devices compute and talk, and the seconds that collectives take between them.

    machine = Topology(
        axes={'replica': Link(50e9, 8e-6, level='ib'), 'fsdp': Link(450e9, 3e-6, level='nvlink')},
        flops=990e12, hbm_bytes=80e9, hbm_bandwidth=3.35e12,
    )
    collective_seconds('all-gather', ('replica', 'fsdp'), {'replica': 4, 'fsdp': 8}, 2**30, machine)

Presets and detection stand in `presets`. Seconds are latency plus bytes over bandwidth (α–β), in the manner of the
scaling book (jax-ml/scaling-book, sharding.md for tori, gpus.md for switches): with N devices, B bytes of result on
each, b the link's bandwidth and α its latency,

| | all-gather: bytes | messages | all-to-all: bytes | messages |
| --- | --- | --- | --- | --- |
| switch | (N−1)/N · B / b | ⌈log₂ N⌉ α | (N−1)/N · B / b | (1 + (N−1)/20) α |
| mesh | (N−1)/N · B / b | α | (N−1)/N · B / b | (1 + (N−1)/20) α |
| ring | (N−1)/N · B / b | ⌊N/2⌋ α | ⌊N²/4⌋/N · B / b | ⌊N/2⌋ α |
| line | twice the ring's | (N−1) α | twice the ring's | (N−1) α |

A ring forwards: over both directions a message of an all-to-all makes about N/4 hops, and each hop fills a link. In
an all-gather every device needs every byte, so forwarding loses nothing there. A line is a ring that is not closed:
its end devices have one link, and its middle carries what a ring would send around. A reduce-scatter is an all-gather
backwards (of N times its result), an all-reduce both. The shift of a collective-permute is not known here, so it
costs the mean over all shifts: N−1 permutes of B/N bytes send as much as one all-to-all, each by one way around.
"""

import dataclasses
import io
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

from rich.console import Console
from rich.table import Table
from rich.text import Text

WIDTH = 100

SHAPES = ("switch", "ring", "line", "mesh")
_TORUS = ("ring", "line")

PER_PEER = 1 / 20
"""Latencies that each peer costs in an all-to-all over a switch or mesh: messages are posted one by one (assumed)."""


@dataclasses.dataclass(frozen=True)
class Link:
    """What joins the devices along one mesh axis.

    Attributes:
        bandwidth: bytes/s that one device can send along the axis, and receive at the same time, by all its links of
            the axis together. On a ring or line these are the links to both neighbours. On a mesh they are the links
            to all others: a pair has its share of 1 / (ways − 1).
        latency: seconds per message, on a ring or line per hop.
        shape: 'switch'; 'ring', also one closed axis of a torus; 'line', one that is not closed; 'mesh', a link for
            every pair.
        peers: the most devices that one all-to-all may span along the axis; None is any number. A fact for whoever
            chooses collectives; `collective_seconds` prices any.
        level: the physical network, such as 'nvlink'. In a collective over several axes those of one level act as one
            larger switch or mesh, or as axes of one torus; axes without a level stay apart.
        within: (ways, link) where blocks of this many neighbours along the axis are joined by a faster link, such as
            the nodes of 8 on an axis of 64.
    """

    bandwidth: float
    latency: float = 5e-6
    shape: str = "switch"
    peers: int | None = None
    level: str = ""
    within: "tuple[int, Link] | None" = None

    def parts(self, ways: int) -> "tuple[tuple[Link, int], ...]":
        """The levels of an axis of `ways` devices, outermost first, each with the ways it joins."""
        if self.within is None:
            return ((self, ways),)
        block, inner = self.within
        block = math.gcd(ways, block)  # blocks that an axis does not fill, or not evenly, are smaller
        return ((self, ways // block), *inner.parts(block))


Group: TypeAlias = tuple[tuple[Link, int], ...]
"""Links of one level and the ways of each: they act as one in a collective over their axes."""


@dataclasses.dataclass(frozen=True)
class Topology:
    """The machine that a mesh lives on. Hashable; compares and prints by its figures, wherever they came from.

    Attributes:
        axes: mesh axis → `Link`; given as a mapping or as pairs, kept as pairs in the given order.
        flops: FLOP/s of dense bfloat16 (or float16) products on one device, at its peak.
        hbm_bytes: bytes of memory of one device.
        hbm_bandwidth: bytes/s between one device and its memory, at its peak.
        name: the preset's, or yours.
        platform: whose rates of products apply: 'cpu', 'gpu' or 'tpu'.
        launch: seconds that the host needs per launched operation; counts where the host is the bottleneck.
        achieved: share of peak FLOP/s and bandwidths that real kernels and collectives reach.
        assumed: which figures nobody vouches for: names of fields, or 'level.field' (without a level 'axis.field').
    """

    axes: "Mapping[str, Link] | tuple[tuple[str, Link], ...]"
    flops: float
    hbm_bytes: float
    hbm_bandwidth: float
    name: str = "custom"
    platform: str = "gpu"
    launch: float = 5e-6
    achieved: float = 0.7
    assumed: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        pairs = self.axes.items() if isinstance(self.axes, Mapping) else self.axes
        object.__setattr__(self, "axes", tuple((axis, link) for axis, link in pairs))
        object.__setattr__(self, "assumed", tuple(self.assumed))

    @property
    def links(self) -> dict[str, Link]:
        """Axis name → link."""
        return dict(self.axes)

    def link(self, axis: str) -> Link:
        """The link of one mesh axis.

        Raises:
            ValueError: naming the axes there are.
        """
        if axis not in self.links:
            has = ", ".join(map(repr, self.links)) or "none"
            raise ValueError(
                f"topology {self.name!r} has no link for axis {axis!r}, only {has}; "
                f"add {axis!r}: Link(bandwidth=…) to axes."
            )
        return self.links[axis]

    def over(self, axes: Sequence[str], sizes: Mapping[str, int]) -> tuple[Group, ...]:
        """The levels that a collective over these axes crosses, slowest first; axes of size 1 cross none.

        Args:
            axes: mesh axes, in any order.
            sizes: axis name → devices.

        Raises:
            ValueError: for an axis without a link.
        """
        groups: dict[tuple, list[tuple[Link, int]]] = {}
        for axis in axes:
            if sizes[axis] == 1:
                continue
            for depth, (link, ways) in enumerate(self.link(axis).parts(sizes[axis])):
                apart = "" if link.level else (axis, depth)
                key = (link.level, "torus" if link.shape in _TORUS else link.shape, apart)
                if ways > 1:
                    groups.setdefault(key, []).append((link, ways))
        return tuple(sorted(map(tuple, groups.values()), key=lambda group: (_rate(group), -_ways(group))))

    def describe(self) -> str:
        """A short table of what each axis is; figures that nobody vouches for are marked '(assumed)'."""
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
        for column in ("axis", "level", "bandwidth", "latency", "shape", "peers"):
            table.add_column(column, overflow="fold", no_wrap=column != "axis")
        for axis, link in self.links.items():
            for row in _rows(axis, link, self, axis):
                table.add_row(*row)
        console = Console(width=WIDTH, file=io.StringIO(), color_system=None, legacy_windows=False, force_jupyter=False)
        for line in _heading(self):
            console.print(Text(line))
        console.print(table)
        text = console.file.getvalue()  # type: ignore[attr-defined]
        return "\n".join(line.rstrip() for line in text.splitlines())

    def __str__(self) -> str:
        return self.describe()


def collective_seconds(
    kind: str, axes: Sequence[str], sizes: Mapping[str, int], result_bytes: float, topology: Topology
) -> float:
    """How long one collective takes, by the formulas above.

    Over several levels the bytes that cross each are counted: an all-gather crosses the slowest level first, while
    its pieces are small. Levels work at the same time, so the slowest of them counts; latencies add up. An all-to-all
    pays at each level for the peers that lie across it, so hops axis by axis post fewer messages than one over all.

    Args:
        kind: a key of `KINDS`.
        axes: mesh axes it spans, in any order.
        sizes: axis name → devices.
        result_bytes: size of its result on each device, as the compiled module shows it.
        topology: the machine.

    Raises:
        ValueError: for an unknown kind, or an axis without a link.
    """
    if kind not in KINDS:
        raise ValueError(f"collective_seconds: unknown kind {kind!r}. Known are: {', '.join(KINDS)}.")
    groups = topology.over(axes, sizes)
    wire, latency = KINDS[kind](groups, result_bytes)
    return wire / topology.achieved + latency


def _all_gather(groups: Sequence[Group], result: float) -> tuple[float, float]:
    """Seconds on the slowest level, and seconds of latency."""
    piece = result / math.prod(map(_ways, groups))
    slowest = latency = 0.0
    for group in groups:
        slowest = max(slowest, piece * (_ways(group) - 1) / _rate(group))
        latency += _steps(group)
        piece *= _ways(group)
    return slowest, latency


def _reduce_scatter(groups: Sequence[Group], result: float) -> tuple[float, float]:
    return _all_gather(groups, result * math.prod(map(_ways, groups)))


def _all_reduce(groups: Sequence[Group], result: float) -> tuple[float, float]:
    wire, latency = _all_gather(groups, result)
    return 2 * wire, 2 * latency


def _all_to_all(groups: Sequence[Group], result: float) -> tuple[float, float]:
    total = math.prod(map(_ways, groups))
    slowest = latency = 0.0
    for group in groups:
        if _is_torus(group):
            slowest = max(slowest, *(result / n * (n**2 // 4) / _both_ways(link) for link, n in group))
            latency += _steps(group)
        else:
            ways = _ways(group)
            slowest = max(slowest, result / ways * (ways - 1) / _rate(group))
            across = total - total // ways  # peers that differ in this level
            latency += _latency(group) * (1 + PER_PEER * across)
    return slowest, latency


def _permute(groups: Sequence[Group], result: float) -> tuple[float, float]:
    slowest = latency = 0.0
    for group in groups:
        if _is_torus(group):
            # Shift by s loads links with min(s, N−s) messages in one direction, closed or not.
            slowest = max(slowest, *(result * _mean_shift(n) / (link.bandwidth / 2) for link, n in group))
            latency += sum(
                link.latency * (_mean_shift(n) if link.shape == "ring" else n - _mean_shift(n)) for link, n in group
            )
        else:
            pairs = _ways(group) - 1 if group[0][0].shape == "mesh" else 1
            slowest = max(slowest, result / _rate(group) * pairs)
            latency += _latency(group)
    return slowest, latency


KINDS: Mapping[str, Callable[[Sequence[Group], float], tuple[float, float]]] = {
    "all-to-all": _all_to_all,
    "all-gather": _all_gather,
    "reduce-scatter": _reduce_scatter,
    "all-reduce": _all_reduce,
    "collective-permute": _permute,
}
"""Collective → seconds of bytes at full bandwidth and of latency, from the levels it crosses and its result."""


def _ways(group: Group) -> int:
    return math.prod(ways for _, ways in group)


def _is_torus(group: Group) -> bool:
    return group[0][0].shape in _TORUS


def _both_ways(link: Link) -> float:
    """Bytes/s that every device of a ring can pass on, and of a line the last one."""
    return link.bandwidth if link.shape == "ring" else link.bandwidth / 2


def _rate(group: Group) -> float:
    """Bytes/s that one device can receive in an all-gather over the group.

    A torus splits the bytes over its axes. Axes of one mesh form a larger mesh, where a device has more links in use.
    """
    if _is_torus(group):
        return sum(_both_ways(link) for link, _ in group)
    if group[0][0].shape == "mesh":
        return min(link.bandwidth / (ways - 1) for link, ways in group) * (_ways(group) - 1)
    return min(link.bandwidth for link, _ in group)


def _latency(group: Group) -> float:
    return max(link.latency for link, _ in group)


def _steps(group: Group) -> float:
    """Seconds until the first byte has come from the farthest device, forwarded from one to the next."""
    if _is_torus(group):
        return sum(link.latency * (n // 2 if link.shape == "ring" else n - 1) for link, n in group)
    if group[0][0].shape == "mesh":
        return _latency(group)
    return _latency(group) * math.ceil(math.log2(_ways(group)))


def _mean_shift(n: int) -> float:
    """Mean of min(s, n−s) over the shifts 1 … n−1."""
    return n**2 // 4 / (n - 1)


def _heading(topology: Topology) -> list[str]:
    def shown(name: str, text: str) -> str:
        return text + (" (assumed)" if name in topology.assumed else "")

    return [
        f"Topology {topology.name} ({topology.platform})",
        f"compute  {shown('flops', si(topology.flops, 'FLOP/s'))} per device",
        f"memory   {shown('hbm_bytes', si(topology.hbm_bytes, 'B'))} at "
        f"{shown('hbm_bandwidth', si(topology.hbm_bandwidth, 'B/s'))} per device",
        f"reached  {shown('achieved', f'{topology.achieved:.0%}')} of all rates; the host launches an operation in "
        f"{shown('launch', si(topology.launch, 's'))}",
    ]


def _rows(axis: str, link: Link, topology: Topology, label: str) -> list[tuple[str, ...]]:
    """The cells of one axis, and of the blocks within it."""

    def shown(field: str, text: str) -> str:
        return text + (" (assumed)" if f"{link.level or axis}.{field}" in topology.assumed else "")

    row = (
        label,
        link.level or "–",
        shown("bandwidth", si(link.bandwidth, "B/s")),
        shown("latency", si(link.latency, "s")),
        link.shape,
        "any" if link.peers is None else f"{link.peers:,}",
    )
    if link.within is None:
        return [row]
    block, inner = link.within
    return [row, *_rows(axis, inner, topology, f"  blocks of {block}")]


def si(value: float, unit: str) -> str:
    """4.5e11 as '450 GB/s' (unit 'B/s'), 3e-06 as '3 µs' (unit 's')."""
    power = 0 if value == 0 or not math.isfinite(value) else math.floor(math.log10(abs(value)) / 3)
    power = min(max(power, -3), 6)
    return f"{value / 1000**power:.4g} {'nµm kMGTPE'[power + 3].strip()}{unit}"
