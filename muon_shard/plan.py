"""The plan as a record: who orthogonalizes what, how it travels, and what that costs. Hashable, touches no device."""

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from muon_shard import gram_space, report
from muon_shard.choose import Choice
from muon_shard.cost import Collective, Traffic
from muon_shard.labels import Route
from muon_shard.layout import Layout, MeshAxes
from muon_shard.options import MOMENTUM_SHARDINGS
from muon_shard.orthogonalizer import Orthogonalizer, Work
from muon_shard.packing import Packing
from muon_shard.transports import TRANSPORTS, Gram, Transport


@dataclasses.dataclass(frozen=True)
class PlannedLeaf:
    """One Muon leaf.

    `layout` is that of the momentum, which is exchanged, `update` that of the parameter, which updates leave with.
    `state_dtype` is the momentum's, `dtype` travels to the owner, `out_dtype` is the update's, `source` told the
    parameter's sharding.
    """

    path: str
    layout: Layout
    update: Layout
    state_dtype: str
    dtype: str
    out_dtype: str
    source: str

    @property
    def gathered(self) -> tuple[str, ...]:
        """Axes that cut the momentum and not the parameter, in mesh order."""
        return tuple(axis for axis in self.update.free if axis not in self.layout.free)


@dataclasses.dataclass(frozen=True)
class Domain:
    """Matrices that share one exchange: same exchange, batch and free axes, same dtypes.

    `leaves` (of `MeshPlan.leaves`) hold them, `first` is the first local matrix of each that is meant; the packing
    knows how many. `gathered` are the axes over which the updates of each are gathered in the end.
    """

    leaves: tuple[int, ...]
    first: tuple[int, ...]
    gathered: tuple[tuple[str, ...], ...]
    dtype: str
    out_dtype: str
    packing: Packing
    choice: Choice

    @property
    def spans(self) -> tuple[tuple[int, int, int], ...]:
        """(leaf, first, last + 1) of the local matrices."""
        counts = [count for _, count in self.packing.leaves]
        return tuple((i, at, at + n) for i, at, n in zip(self.leaves, self.first, counts, strict=True))

    @property
    def carrier(self) -> Transport:
        return TRANSPORTS[self.choice.transport]

    @functools.cached_property
    def gathers(self) -> dict[tuple[str, ...], tuple[int, ...]]:
        """Positions in `leaves` of what is gathered over the same axes, all in one."""
        found: dict[tuple[str, ...], tuple[int, ...]] = {}
        for position, axes in enumerate(self.gathered):
            if axes:
                found[axes] = (*found.get(axes, ()), position)
        return found

    def given(self, position: int) -> int:
        """Bytes of updates that a device holds of the leaf at this position of `leaves`, before they are gathered."""
        kind, count = self.packing.leaves[position]
        return self.packing.kinds[kind].elements * count * itemsize(self.out_dtype)

    @functools.cached_property
    def traffic(self) -> Traffic:
        p, sizes = self.packing, dict(self.packing.mesh_axes)
        gathered = tuple(
            (tuple((axis, sizes[axis]) for axis in axes), sum(map(self.given, positions)))
            for axes, positions in self.gathers.items()
        )
        if not isinstance(self.carrier, Gram):
            return p.traffic(itemsize(self.dtype), itemsize(self.out_dtype), gathered=gathered)
        held = [(p.kinds[k], count) for k, count in p.leaves]
        return p.traffic(*gram_space.items(self.dtype, held, p.mesh_axes), gathered=gathered)

    @functools.cached_property
    def collectives(self) -> tuple[Collective, ...]:
        return (*self.carrier.collectives(self.traffic), *self.traffic.share())

    @property
    def exchanged(self) -> tuple[Collective, ...]:
        """The collectives that all leaves take part in: not the gathers of updates that replicas hold in parts."""
        return self.collectives[: len(self.collectives) - len(self.gathers)]


@dataclasses.dataclass(frozen=True)
class Wave:
    """What is exchanged and computed together."""

    domains: tuple[Domain, ...]

    @functools.cached_property
    def programs(self) -> tuple[tuple[tuple[int, ...], ...], ...]:
        """Distinct programs: matrices per domain and kind."""
        return tuple(dict.fromkeys(self._of_devices))

    @functools.cached_property
    def program_of(self) -> tuple[int, ...]:
        """Index into `programs` of every device."""
        number = {program: i for i, program in enumerate(self.programs)}
        return tuple(number[program] for program in self._of_devices)

    @functools.cached_property
    def _of_devices(self) -> list[tuple[tuple[int, ...], ...]]:
        return list(zip(*(domain.packing.slots for domain in self.domains), strict=True))

    @property
    def buffer_bytes(self) -> int:
        """Of the exchange buffers of one device, on the way in."""
        total = 0
        for d in self.domains:
            if d.packing.exchange:
                going = [c.bytes for c in d.carrier.collectives(d.traffic) if not c.purpose.startswith("results")]
                total += max(d.traffic.peers * d.traffic.row * d.traffic.item, *going)
        return total


@dataclasses.dataclass(frozen=True)
class MeshPlan:
    """What one `shard_map` runs. Devices are numbered row-major over `mesh_axes`.

    `limit` is how many bytes the exchange buffers of a wave may take, `under_way` how many waves may be at a time,
    `memory` how many bytes each device has, `bound` how little work the busiest device can have, whatever the
    assignment of whole matrices.
    """

    mesh_axes: MeshAxes
    leaves: tuple[PlannedLeaf, ...]
    waves: tuple[Wave, ...]
    orthogonalizer: Orthogonalizer
    limit: int
    memory: int
    under_way: int
    bound: int

    @property
    def devices(self) -> int:
        return math.prod(size for _, size in self.mesh_axes)

    @property
    def domains(self) -> tuple[Domain, ...]:
        """Of all waves."""
        return tuple(domain for wave in self.waves for domain in wave.domains)

    @property
    def programs(self) -> int:
        """Different programs that are compiled, in all waves."""
        return sum(len(wave.programs) for wave in self.waves)

    @functools.cached_property
    def classes(self) -> tuple[tuple[int, ...], ...]:
        """Devices that run the same program in every wave."""
        members: dict[tuple[int, ...], list[int]] = {}
        for device, programs in enumerate(zip(*(wave.program_of for wave in self.waves), strict=True)):
            members.setdefault(programs, []).append(device)
        return tuple(map(tuple, members.values()))

    @property
    def momentum_bytes(self) -> int:
        """Of one device."""
        return sum(math.prod(leaf.layout.local_shape) * itemsize(leaf.state_dtype) for leaf in self.leaves)

    @property
    def momentum_bytes_by_sharding(self) -> dict[str, int]:
        """What `momentum_bytes` is with each `PlanOptions.momentum_sharding`."""
        found: dict[str, int] = dict.fromkeys(MOMENTUM_SHARDINGS, 0)
        for leaf in self.leaves:
            of_param = leaf.update
            for how, spec in (("params", of_param.leaf_spec), ("replicas", of_param.spec_over_replicas)):
                ways = of_param.ways([axis for axes in spec for axis in axes])
                found[how] += math.prod(of_param.shape) // ways * itemsize(leaf.state_dtype)
        return found

    @property
    def stretch(self) -> float:
        """How much longer NS takes in waves than in one: each waits for its busiest device."""
        one = int(self.load.max())
        return sum(int(self.wave_load(wave).max()) for wave in self.waves) / one if one else 1.0

    def works(self, domain: Domain) -> tuple[Work, ...]:
        """What one matrix of each kind of the domain costs its owner."""
        if isinstance(domain.carrier, Gram):
            space = gram_space.space(self.orthogonalizer, domain.dtype)
            return tuple(space.works(*kind.canonical)[0] for kind in domain.packing.kinds)
        return tuple(self.orthogonalizer.work_of(kind.problems, domain.dtype) for kind in domain.packing.kinds)

    def everywhere(self, domain: Domain, field: str) -> int:
        """FLOPs ('flops') or work ('cost') that every device has, whoever owns what."""
        p = domain.packing
        if not isinstance(domain.carrier, Gram):
            return 0
        space = gram_space.space(self.orthogonalizer, domain.dtype)
        whole = sum(count * getattr(space.works(*p.kinds[k].canonical)[1], field) for k, count in p.leaves)
        return whole // p.ways(p.exchange)

    @functools.cached_property
    def flops(self) -> np.ndarray:
        """NS FLOPs that each device executes, [devices]."""
        return self._load("flops", self.domains)

    @functools.cached_property
    def load(self) -> np.ndarray:
        """Work of each device, [devices]: FLOPs weighted by how fast each product runs; what is balanced."""
        return self._load("cost", self.domains)

    def total(self, field: str) -> int:
        """FLOPs ('flops') or work ('cost') of all matrices of the mesh, each counted once."""
        total = 0
        for domain in self.domains:
            layout = self.leaves[domain.leaves[0]].layout
            copies = domain.packing.ways(domain.packing.rows) // domain.packing.ways(layout.batch_axes)
            counts = np.array(domain.packing.counts, np.int64).sum(0)
            total += sum(int(n) * getattr(w, field) for n, w in zip(counts, self.works(domain), strict=True)) // copies
            rows = domain.packing.ways(layout.batch_axes) * domain.packing.ways(layout.exchange)
            total += self.everywhere(domain, field) * rows
        return total

    def wave_load(self, wave: Wave) -> np.ndarray:
        """Work of each device in one wave, [devices]."""
        return self._load("cost", wave.domains)

    def _load(self, field: str, domains: Sequence[Domain]) -> np.ndarray:
        load = np.zeros(self.devices, np.int64)
        for domain in domains:
            each = np.array([getattr(work, field) for work in self.works(domain)], np.int64)
            load += np.array(domain.packing.slots, np.int64).reshape(self.devices, -1) @ each
            load += self.everywhere(domain, field)
        return load

    @property
    def peak_bytes(self) -> int:
        """Estimated temporaries per device: exchange buffers, and a stack in NS with its Gram matrices."""
        peaks = [self._peak(wave) for wave in self.waves]
        return max((sum(peaks[i : i + self.under_way]) for i in range(len(peaks))), default=0)

    def _peak(self, wave: Wave) -> int:
        going = working = coming = stack = 0
        for domain in wave.domains:
            p, item, out = domain.packing, domain.traffic.item, domain.traffic.out
            pool, sent = p.pool_pages * p.page, p.ways(p.exchange) * p.capacity * p.page
            shared = p.ways(p.shared) * p.returned * p.page if p.shared else 0
            going += (pool + 2 * sent) * item
            working += sent * (item + out)
            coming += (2 * sent + shared) * out  # unpacking ends in the updates, which are no temporaries
            coming += sum((1 + p.ways(axes)) * domain.given(i) for axes, of in domain.gathers.items() for i in of)
            for kind, most in zip(p.kinds, np.array(p.slots).max(0), strict=True):
                for (m, n), each in kind.problems:
                    stack = max(stack, int(most) * each * (2 * m * n + 3 * m * m) * item)
        return max(going, working + stack, coming)


@dataclasses.dataclass(frozen=True)
class Plan:
    """What will run where, and why. `print(plan)` shows it as a table.

    `parts` holds one executable plan per mesh (pipeline stages on disjoint meshes are never mixed), `routes` the
    routing of every leaf.
    """

    parts: tuple[MeshPlan, ...]
    routes: tuple[Route, ...] = ()

    @property
    def devices(self) -> int:
        return sum(part.devices for part in self.parts)

    @property
    def programs(self) -> int:
        """Different device programs that are compiled."""
        return sum(part.programs for part in self.parts)

    @property
    def flops_per_device(self) -> int:
        """NS FLOPs of the busiest device."""
        return max((int(part.flops.max()) for part in self.parts), default=0)

    @property
    def total_flops(self) -> int:
        """NS FLOPs of all matrices, each counted once."""
        return sum(part.total("flops") for part in self.parts)

    @property
    def balance(self) -> float:
        """Ideal over busiest: 1 when every device of the mesh works equally long, none in vain."""
        return self._least(lambda part: part.total("cost") / part.devices)

    @property
    def efficiency(self) -> float:
        """Like `balance`, against the best that whole matrices allow."""
        return self._least(lambda part: part.bound)

    def _least(self, ideal: Any) -> float:
        return min((ideal(part) / int(part.load.max()) for part in self.parts if part.load.max()), default=1.0)

    @property
    def collectives(self) -> tuple[Collective, ...]:
        return tuple(c for part in self.parts for domain in part.domains for c in domain.collectives)

    @property
    def bytes_by_axis(self) -> dict[str, int]:
        """Bytes received per device and step over each mesh axis (axes used together are joined by '+')."""
        totals: dict[str, int] = {}
        for c in self.collectives:
            totals["+".join(c.axes)] = totals.get("+".join(c.axes), 0) + c.received
        return totals

    @property
    def momentum_bytes(self) -> int:
        """What the momentum of Muon's leaves takes on one device."""
        return max((part.momentum_bytes for part in self.parts), default=0)

    @property
    def momentum_bytes_by_sharding(self) -> dict[str, int]:
        """What `momentum_bytes` is with each `PlanOptions.momentum_sharding`."""
        found = [part.momentum_bytes_by_sharding for part in self.parts]
        return {how: max((of_part[how] for of_part in found), default=0) for how in MOMENTUM_SHARDINGS}

    @property
    def peak_bytes(self) -> int:
        """Estimated temporaries on one device, in bytes."""
        return max((part.peak_bytes for part in self.parts), default=0)

    def to_json(self) -> dict[str, Any]:
        """The plan as plain Python values, for `json.dumps`: figures to read, and under 'plan' the exact record."""
        from muon_shard import serialize  # it imports this module

        return {**report.to_json(self), "plan": serialize.to_record(self)}

    @staticmethod
    def from_json(given: Mapping[str, Any] | str) -> "Plan":
        """The plan that `to_json` wrote, from its values or their JSON text; equal to the one written.

        Raises:
            ValueError: no plan, another version, or a plan that runs a user's function, which JSON cannot hold.
        """
        from muon_shard import serialize  # it imports this module

        return serialize.from_json(given)

    def plot(self, path_or_ax: Any = None) -> Any:
        """Draws the work of every device, and the bytes it receives over each mesh axis.

        Args:
            path_or_ax: a file to write (its suffix decides the format), or a matplotlib `Axes` for the work alone.

        Returns:
            The matplotlib `Figure`.

        Raises:
            ModuleNotFoundError: matplotlib is not installed.
        """
        try:
            from muon_shard.plot import draw
        except ModuleNotFoundError as error:
            if not (error.name or "").startswith("matplotlib"):
                raise
            message = "Plan.plot needs matplotlib. Consider pip install 'muon_shard[plot]'."
            raise ModuleNotFoundError(message, name=error.name) from error
        return draw(self, path_or_ax)

    def __str__(self) -> str:
        return report.to_text(self)


def itemsize(dtype: str) -> int:
    """Bytes of one element, bfloat16 included."""
    return jnp.dtype(dtype).itemsize
