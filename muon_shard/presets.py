"""Topologies of known machines: by name, or from the devices of a mesh; and the check of those that users build.

The figures stand in `data/topology.json`, each machine with its sources and the figures that have none.

    preset('h100', (('replica', 4), ('fsdp', 8)))        # fsdp on NVLink, replica on InfiniBand
    resolve('auto', mesh, tuple(mesh.shape.items()))     # what the devices say they are

Devices are numbered row-major over the mesh axes, so the last axes fill the fast level (the eight GPUs of a node, the
torus of a TPU slice) and the others go over the slow one. The fast level's blocks are as large as can be equal: 64 of
the 72 GPUs of an NVL72 for a mesh of 256. An axis that a block holds only in part is both: the slow link, `within`
blocks of the fast one, because collectives use both. An axis that does not nest evenly with the blocks (of 3, in blocks
of 8) counts as slow.
"""

import dataclasses
import functools
import importlib.resources
import itertools
import json
import math
import numbers
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh

from muon_shard.layout import MeshAxes
from muon_shard.shardings import AnyMesh
from muon_shard.topology import SHAPES, Link, Topology

AUTO = "auto"
GENERIC = "generic"
PLATFORMS = ("cpu", "gpu", "tpu")


@dataclasses.dataclass(frozen=True)
class Level:
    """One network of a machine.

    Attributes:
        name: what it is called.
        shape: 'switch', 'mesh' or 'torus'.
        bandwidth: bytes/s one way: of one device on a switch, of its two links along one axis of a torus, of one pair
            on a mesh.
        latency: seconds per message, on a torus per hop.
        domain: the most devices it joins; None is any number.
        borders: attributes of a device of which the first that all have tells where the level ends.
        torus_axes: how many axes a torus has.
        wraps: sides of a torus that are multiples of it are closed,
        wraps_from: in slices of at least so many devices.
    """

    name: str
    shape: str
    bandwidth: float
    latency: float
    domain: int | None = None
    borders: tuple[str, ...] = ()
    torus_axes: int = 1
    wraps: int = 1
    wraps_from: int = 1


@dataclasses.dataclass(frozen=True)
class Machine:
    """One entry of the figures; units and words as in `Topology`.

    Attributes:
        levels: its networks, fastest first: one, or two of which the slow one joins what the fast one cannot.
        device_kinds: what JAX calls its devices.
        assumed: figures without a source, as in `Topology`.
        sources: where the others were read.
        notes: what is particular about it, and where sources disagree.
    """

    name: str
    title: str
    platform: str
    device_kinds: tuple[str, ...]
    flops: float
    hbm_bytes: float
    hbm_bandwidth: float
    launch: float
    achieved: float
    levels: tuple[Level, ...]
    assumed: tuple[str, ...]
    sources: tuple[str, ...]
    notes: str


def names() -> tuple[str, ...]:
    """Names that `preset` takes."""
    return tuple(_machines())


def machine(name: str) -> Machine:
    """The figures of the machine called `name`.

    Raises:
        ValueError: listing the known names.
    """
    if name not in _machines():
        raise ValueError(f"no topology is called {name!r}. Known are: {', '.join((AUTO, *names()))}.")
    return _machines()[name]


def preset(name: str, mesh_axes: MeshAxes) -> Topology:
    """The topology of a mesh whose last axes fill the fast level of the machine called `name`.

    Args:
        name: one of `names`.
        mesh_axes: (name, size) of every mesh axis, in mesh order.

    Raises:
        ValueError: listing the known names.
    """
    known = machine(name)
    return _topology(known, mesh_axes, _counted(mesh_axes, known.levels[0].domain))


def detect(mesh: AnyMesh | None, mesh_axes: MeshAxes) -> Topology:
    """The topology of a concrete mesh by its devices' kind, and by the slices or processes that they belong to.

    An axis along which the slice changes (on machines whose fast level ends at a host: the slice or else the process)
    goes over the slow level. Where there is one process per GPU, or no such attribute, the fast level is counted as in
    `preset`; so it is for an abstract mesh that knows the kind of its devices, as one has inside `jit`. Without a mesh
    it is the device that JAX uses. An abstract mesh that knows nothing, or unknown devices, are 'generic'.
    """
    if mesh is None or isinstance(mesh, AbstractMesh):
        kind = jax.devices()[0].device_kind if mesh is None else getattr(mesh.abstract_device, "device_kind", None)
        return preset(next((m.name for m in _machines().values() if kind in m.device_kinds), GENERIC), mesh_axes)
    devices = np.asarray(mesh.devices, dtype=object).reshape([size for _, size in mesh_axes])
    first = devices.flat[0]
    for known in _machines().values():
        if first.device_kind in known.device_kinds:
            return _topology(known, mesh_axes, _inside(devices, mesh_axes, known.levels[0]))
    generic = preset(GENERIC, mesh_axes)
    return dataclasses.replace(generic, platform=first.platform) if first.platform in PLATFORMS else generic


def resolve(choice: str | Topology, mesh: AnyMesh | None, mesh_axes: MeshAxes) -> Topology:
    """The topology that a user asks for.

    Args:
        choice: 'auto' to `detect`, the name of a preset, or a topology, which is checked.
        mesh: the mesh, where there is one.
        mesh_axes: (name, size) of every mesh axis, in mesh order.

    Raises:
        ValueError: for an unknown name, with the known ones; for a topology, listing all that is wrong with it.
    """
    if isinstance(choice, str):
        return detect(mesh, mesh_axes) if choice == AUTO else preset(choice, mesh_axes)
    if not isinstance(choice, Topology):
        raise ValueError(
            f"topology: expected a Topology or one of {', '.join((AUTO, *names()))}, got {choice!r}. "
            "Consider muon_shard.Topology(axes={…}, flops=…, hbm_bytes=…, hbm_bandwidth=…)."
        )
    faults = [*_missing(choice, mesh_axes), *_machine_faults(choice)]
    for axis, link in choice.links.items():
        faults += _link_faults(f"axis {axis!r}", link)
    if faults:
        count = "1 fault" if len(faults) == 1 else f"{len(faults)} faults"
        raise ValueError("\n".join([f"topology {choice.name!r}: {count}.", *(f"* {fault}" for fault in faults)]))
    return choice


@functools.cache
def _machines() -> Mapping[str, Machine]:
    file = importlib.resources.files("muon_shard") / "data" / "topology.json"
    entries = json.loads(file.read_text(encoding="utf-8"))
    return {name: _machine(name, entry) for name, entry in entries.items() if not name.startswith("_")}


def _machine(name: str, entry: Mapping[str, Any]) -> Machine:
    levels = tuple(Level(**level | {"borders": tuple(level.get("borders", ()))}) for level in entry["levels"])
    fields: dict[str, Any] = {k: tuple(value) if isinstance(value, list) else value for k, value in entry.items()}
    return Machine(**fields | {"name": name, "levels": levels})


def _counted(mesh_axes: MeshAxes, domain: int | None) -> list[int]:
    """Per axis, how many neighbours share a block, when devices are numbered row-major and fill equal blocks."""
    devices = math.prod(size for _, size in mesh_axes)
    block = max(d for d in _divisors(devices) if domain is None or d <= domain)
    inside, stride = [], 1
    for _, size in reversed(mesh_axes):
        nests = block % stride == 0  # never for a stride beyond the block
        inside.append(math.gcd(size, block // stride) if nests else 1)
        stride *= size
    return inside[::-1]


def _inside(devices: np.ndarray, mesh_axes: MeshAxes, fast: Level) -> list[int]:
    """Per axis, how many neighbours the fast level joins: by what the devices say, or counted where they do not."""
    blocks = _blocks(devices, fast)
    if blocks is None:
        return _counted(mesh_axes, fast.domain)
    return [_neighbours(np.moveaxis(blocks, axis, 0)) for axis in range(blocks.ndim)]


def _blocks(devices: np.ndarray, fast: Level) -> np.ndarray | None:
    """The number of the fast level's block that each device is in; None where the devices do not tell."""
    for border in fast.borders:
        if any(getattr(device, border, None) is None for device in devices.flat):
            continue
        blocks = np.array([getattr(device, border) for device in devices.flat]).reshape(devices.shape)
        sizes = np.unique(blocks, return_counts=True)[1]
        one_process_each = border == "process_index" and sizes.max() == 1
        return None if one_process_each or sizes.max() > (fast.domain or sizes.max()) else blocks
    return None


def _neighbours(blocks: np.ndarray) -> int:
    """The largest divisor of the first axis into which no change of block falls."""
    size = len(blocks)
    for ways in reversed(_divisors(size)):
        split = blocks.reshape(size // ways, ways, -1)
        if (split == split[:, :1]).all():
            return ways
    return 1


def _topology(known: Machine, mesh_axes: MeshAxes, inside: Sequence[int]) -> Topology:
    fast, slow = known.levels[0], known.levels[-1]
    links = {}
    for (axis, size), ways, parts in zip(mesh_axes, inside, _fast_parts(fast, inside)):
        links[axis] = _nested([(_plain(slow, size // ways), size // ways), *parts], _plain(fast, 1))
    return Topology(
        links,
        known.flops,
        known.hbm_bytes,
        known.hbm_bandwidth,
        name=known.name,
        platform=known.platform,
        launch=known.launch,
        achieved=known.achieved,
        assumed=known.assumed,
    )


def _nested(parts: Sequence[tuple[Link, int]], alone: Link) -> Link:
    """One link of several, outermost first; `alone` for an axis of one device, which crosses none."""
    link, block = None, 1
    for outer, ways in reversed([part for part in parts if part[1] > 1]):
        link = outer if link is None else dataclasses.replace(outer, within=(block, link))
        block *= ways
    return link or alone


def _plain(level: Level, ways: int) -> Link:
    """The level as a link between `ways` devices."""
    shape = "line" if level.shape == "torus" else level.shape
    pairs = max(ways - 1, 1) if level.shape == "mesh" else 1
    return Link(level.bandwidth * pairs, level.latency, shape, level=level.name)


def _fast_parts(fast: Level, inside: Sequence[int]) -> list[list[tuple[Link, int]]]:
    """Per axis, the links of the fast level that it lies on, and the ways of each."""
    if fast.shape == "torus":
        return _torus_parts(fast, inside)
    return [[(_plain(fast, ways), ways)] for ways in inside]


def _torus_parts(torus: Level, inside: Sequence[int]) -> list[list[tuple[Link, int]]]:
    """Lays mesh axes on the axes of a torus, innermost first, whole torus axes where they fit.

    The slice is taken to be as even as its devices allow, as most slices are (v5e: 4×4, 4×8; v5p: 4×4×8). A mesh axis
    longer than a torus axis lies on several. One that shares a torus axis lies over the inner ones: its neighbours
    are their size apart, so each hop is that many hops and its links are shared by so many.
    """
    devices = math.prod(inside)
    sides = _even_sides(devices, torus.torus_axes)
    taken, parts = [1] * len(sides), []
    for ways in reversed(inside):
        free = [side // t for side, t in zip(sides, taken)]
        factors = min(_factorings(ways, free), key=lambda f: _awkwardness(f, free, taken))
        part = []
        for i, factor in enumerate(factors):
            closed = devices >= torus.wraps_from and sides[i] % torus.wraps == 0 and factor == free[i]
            # Inner parts of a shared torus axis do not reach around it; its outermost part does.
            shape = "ring" if closed else "line"
            part.append((Link(torus.bandwidth / taken[i], torus.latency * taken[i], shape, level=torus.name), factor))
            taken[i] *= factor
        parts.append(part)
    return parts[::-1]


def _awkwardness(factors: Sequence[int], free: Sequence[int], taken: Sequence[int]) -> tuple:
    """Orders ways to lay a mesh axis: few torus axes cut in two, then little sharing, then the longest torus axes."""
    used = [i for i, factor in enumerate(factors) if factor > 1]
    cut = sum(factors[i] != free[i] for i in used)
    return cut, max((taken[i] for i in used), default=1), tuple(factors)


def _factorings(number: int, most: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """All ways to write `number` as a product of one divisor of each of `most`."""
    divisors = [_divisors(math.gcd(number, m)) for m in most]
    return (factors for factors in itertools.product(*divisors) if math.prod(factors) == number)


@functools.cache
def _even_sides(devices: int, axes: int) -> tuple[int, ...]:
    """The most even sides of a torus of so many devices, shortest first: 32 over 3 axes is (2, 4, 4)."""
    return min(map(tuple, map(sorted, _factorings(devices, [devices] * axes))), key=lambda sides: sides[::-1])


def _divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


def _missing(topology: Topology, mesh_axes: MeshAxes) -> Iterator[str]:
    for axis, size in mesh_axes:
        if size > 1 and axis not in topology.links:
            has = ", ".join(map(repr, topology.links)) or "none"
            yield f"axis {axis!r} of {size} devices has no link, only {has}; add {axis!r}: Link(bandwidth=…) to axes."


def _machine_faults(topology: Topology) -> Iterator[str]:
    for field, unit in (("flops", "FLOP/s"), ("hbm_bytes", "bytes"), ("hbm_bandwidth", "bytes/s")):
        if not _is_number(getattr(topology, field), above=0):
            yield f"{field} is {getattr(topology, field)!r}; give {unit} of one device, above 0 and finite."
    if not _is_number(topology.launch, least=0):
        yield f"launch is {topology.launch!r}; give seconds per launched operation, at least 0 and finite."
    if not (_is_number(topology.achieved, above=0) and topology.achieved <= 1):
        yield f"achieved is {topology.achieved!r}; give a share of the peak, above 0 and at most 1."
    if topology.platform not in PLATFORMS:
        yield f"platform is {topology.platform!r}; known are: {', '.join(PLATFORMS)}."


def _link_faults(where: str, link: Any) -> Iterator[str]:
    if not isinstance(link, Link):
        yield f"{where} is {link!r}; give a Link(bandwidth=…)."
        return
    if not _is_number(link.bandwidth, above=0):
        yield f"{where}: bandwidth is {link.bandwidth!r}; give bytes/s that one device can send, above 0 and finite."
    if not _is_number(link.latency, least=0):
        yield f"{where}: latency is {link.latency!r}; give seconds per message, at least 0 and finite."
    if link.shape not in SHAPES:
        yield f"{where}: shape is {link.shape!r}; known are: {', '.join(SHAPES)}."
    if link.peers is not None and not _is_whole(link.peers):
        yield f"{where}: peers is {link.peers!r}; give the most devices of one all-to-all, at least 2, or None for any."
    if link.within is not None:
        yield from _within_faults(where, link.within)


def _within_faults(where: str, within: Any) -> Iterator[str]:
    if not (isinstance(within, tuple) and len(within) == 2 and _is_whole(within[0])):
        yield f"{where}: within is {within!r}; give (devices of a block, at least 2, and their Link)."
        return
    yield from _link_faults(f"{where}, within {within[0]}", within[1])


def _is_whole(value: Any) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool) and int(value) >= 2


def _is_number(value: Any, *, above: float = -math.inf, least: float = -math.inf) -> bool:
    """Whether it is a finite number in range."""
    if not isinstance(value, numbers.Real) or isinstance(value, bool):
        return False
    number = float(value)
    return math.isfinite(number) and number > above and number >= least
