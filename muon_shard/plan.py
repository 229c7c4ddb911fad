"""Who orthogonalizes what: pure Python over shapes and specs, no device is touched."""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from muon_shard import assign, programs, report
from muon_shard.cost import Collective, choose_page, ns_flops
from muon_shard.labels import DimensionNumbers, Route, require_matrices, route
from muon_shard.layout import Kind, Layout, MeshAxes, make_layout
from muon_shard.packing import Packing, device_index
from muon_shard.shardings import Memory, Placement, Shardings, place_leaves
from muon_shard.transports import AllToAll, Local, Transport

TRANSPORTS: tuple[Transport, ...] = (Local(), AllToAll())
"""In order of preference: the first that does not refuse a domain serves it."""


@dataclasses.dataclass(frozen=True)
class PlanOptions:
    """All that steers a plan.

    `max_programs` bounds how many different device programs are compiled (compile time grows with it); when the
    assignment needs more, programs are merged and the FLOPs this costs show in `Plan.balance`.
    """

    max_programs: int = 32

    def __post_init__(self) -> None:
        if self.max_programs < 1:
            raise ValueError(f"PlanOptions: max_programs must be at least 1, got {self.max_programs}.")


@dataclasses.dataclass(frozen=True)
class PlannedLeaf:
    """One Muon leaf; `dtype` is what travels to the owner, `out_dtype` the update's; `source` is who told its sharding."""

    path: str
    layout: Layout
    dtype: str
    out_dtype: str
    source: str


@dataclasses.dataclass(frozen=True)
class Domain:
    """Leaves that share one exchange: same exchange, batch and free axes, same dtypes. `leaves` index `MeshPlan.leaves`."""

    leaves: tuple[int, ...]
    dtype: str
    out_dtype: str
    packing: Packing

    @property
    def transport(self) -> Transport:
        return next(t for t in TRANSPORTS if not t.refuses(self.packing.exchange))

    @property
    def why(self) -> str:
        """Why matrices of this domain travel as they do."""
        shared = f"; shared over {'+'.join(self.packing.free)}" if self.packing.free else ""
        return self.transport.why(self.packing.exchange) + shared

    @functools.cached_property
    def collectives(self) -> tuple[Collective, ...]:
        p = self.packing
        item, out = _itemsize(self.dtype), _itemsize(self.out_dtype)
        sent = p.ways(p.exchange) * p.capacity * p.page
        carried = self.transport.collectives(p.exchange, p.ways(p.exchange), sent * item, sent * out)
        if not p.free:
            return carried
        ways = p.ways(p.free)
        gathered = Collective("all-gather", p.free, ways, ways * p.returned * p.page * out, "updates to replicas")
        return (*carried, gathered)


@dataclasses.dataclass(frozen=True)
class MeshPlan:
    """What one `shard_map` runs. Devices are numbered row-major over `mesh_axes`."""

    mesh_axes: MeshAxes
    leaves: tuple[PlannedLeaf, ...]
    domains: tuple[Domain, ...]
    steps: int

    @property
    def devices(self) -> int:
        return math.prod(size for _, size in self.mesh_axes)

    @functools.cached_property
    def programs(self) -> tuple[tuple[tuple[int, ...], ...], ...]:
        """Distinct programs: matrices per domain and kind."""
        return tuple(dict.fromkeys(self._program(device) for device in range(self.devices)))

    @functools.cached_property
    def program_of(self) -> tuple[int, ...]:
        """Index into `programs` of every device."""
        number = {program: i for i, program in enumerate(self.programs)}
        return tuple(number[self._program(device)] for device in range(self.devices))

    def _program(self, device: int) -> tuple[tuple[int, ...], ...]:
        return tuple(domain.packing.slots[device] for domain in self.domains)

    @functools.cached_property
    def flops(self) -> np.ndarray:
        """NS FLOPs that each device executes, [devices]."""
        return self._load("slots")

    @functools.cached_property
    def useful_flops(self) -> np.ndarray:
        """NS FLOPs of the matrices each device owns, [devices]: `flops` less what merged programs compute in vain."""
        return self._load("counts")

    def _load(self, field: str) -> np.ndarray:
        load = np.zeros(self.devices, np.int64)
        for domain in self.domains:
            cost = np.array([ns_flops(*kind.shape, self.steps) for kind in domain.packing.kinds], np.int64)
            load += np.array(getattr(domain.packing, field), np.int64).reshape(self.devices, -1) @ cost
        return load

    @functools.cached_property
    def bound(self) -> int:
        """FLOPs below which no assignment of whole matrices can bring the busiest device."""
        jobs, workers, _ = _jobs(self.leaves, _group(self.leaves), self.mesh_axes, self.steps)
        return assign.lower_bound(jobs, workers)

    @property
    def peak_bytes(self) -> int:
        """Estimated temporaries per device: exchange buffers, and a stack in NS with its Gram matrices."""
        going = working = coming = stack = 0
        for domain in self.domains:
            p, item, out = domain.packing, _itemsize(domain.dtype), _itemsize(domain.out_dtype)
            pool, sent = p.pool_pages * p.page, p.ways(p.exchange) * p.capacity * p.page
            gathered = p.ways(p.free) * p.returned * p.page if p.free else 0
            going += (pool + 2 * sent) * item
            working += sent * (item + out)
            coming += (2 * sent + gathered + pool) * out
            for kind, most in zip(p.kinds, np.array(p.slots).max(0), strict=True):
                m, n = kind.canonical
                stack = max(stack, int(most) * (2 * m * n + 3 * m * m) * item)
        return max(going, working + stack, coming)


@dataclasses.dataclass(frozen=True)
class Plan:
    """What will run where, and why. `print(plan)` shows it as a table.

    `parts` holds one executable plan per mesh (pipeline stages on disjoint meshes are never mixed), `routes` the routing of
    every leaf.
    """

    parts: tuple[MeshPlan, ...]
    routes: tuple[Route, ...] = ()

    @property
    def devices(self) -> int:
        return sum(part.devices for part in self.parts)

    @property
    def programs(self) -> int:
        """Different device programs that are compiled."""
        return sum(len(part.programs) for part in self.parts)

    @property
    def flops_per_device(self) -> int:
        """NS FLOPs of the busiest device."""
        return max((int(part.flops.max()) for part in self.parts), default=0)

    @property
    def total_flops(self) -> int:
        """NS FLOPs of all matrices, each counted once."""
        return sum(int(part.useful_flops.sum()) for part in self.parts)

    @property
    def balance(self) -> float:
        """Ideal over busiest: 1 when every device of the mesh works equally long, none in vain."""
        return self._least(lambda part: int(part.useful_flops.sum()) / part.devices)

    @property
    def efficiency(self) -> float:
        """Like `balance`, against the best that whole matrices allow."""
        return self._least(lambda part: part.bound)

    def _least(self, ideal: Any) -> float:
        return min((ideal(part) / int(part.flops.max()) for part in self.parts if part.flops.max()), default=1.0)

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
    def peak_bytes(self) -> int:
        """Estimated temporaries on one device, in bytes."""
        return max((part.peak_bytes for part in self.parts), default=0)

    def to_json(self) -> dict[str, Any]:
        """The plan as plain Python values, for `json.dumps`."""
        return report.to_json(self)

    def __str__(self) -> str:
        return report.to_text(self)


def make_plan(
    params: Any,
    *,
    options: PlanOptions = PlanOptions(),  # noqa: B008 (frozen)
    muon_weight_dimension_numbers: DimensionNumbers = None,
    param_shardings: Shardings = None,
    ns_steps: int = 5,
) -> Plan:
    """Plans the Muon part of an optimizer step for `params`.

    Args:
        params: pytree of arrays or `jax.ShapeDtypeStruct`s; shardings may name abstract meshes of any size.
        options: what steers the plan.
        muon_weight_dimension_numbers: as for `muon`.
        param_shardings: shardings where `params` does not carry them, as for `muon`.
        ns_steps: Newton–Schulz steps, for FLOPs.

    Raises:
        ValueError: listing every leaf that cannot be a matrix or whose sharding is illegal, or when no leaf is Muon's.
    """
    routes = route(params, muon_weight_dimension_numbers, "make_plan")
    require_matrices(routes, "make_plan")
    placements = place_leaves(params, param_shardings, Memory(), "make_plan")
    dtypes = [r.dtype for r in routes]
    parts = plan_meshes(routes, placements, dtypes, dtypes, ns_steps, options)
    return Plan(tuple(plan for _, _, plan in parts), tuple(routes))


def plan_meshes(
    routes: Sequence[Route], placements: Sequence[Placement], dtypes: Sequence[str], out_dtypes: Sequence[str], steps: int,
    options: PlanOptions,
) -> list[tuple[Any, tuple[int, ...], MeshPlan]]:
    """(mesh, positions in `routes`, plan) for every mesh that holds Muon leaves; empty leaves are left out."""
    meshes: list[Any] = []
    members: list[list[int]] = []
    for i, (r, placement) in enumerate(zip(routes, placements, strict=True)):
        if r.label != "muon" or 0 in r.shape:
            continue
        if placement.mesh not in meshes:
            meshes.append(placement.mesh)
            members.append([])
        members[meshes.index(placement.mesh)].append(i)
    plans = []
    for mesh, indices in zip(meshes, members, strict=True):
        axes = placements[indices[0]].mesh_axes
        leaves = tuple(
            PlannedLeaf(routes[i].path, make_layout(routes[i].shape, placements[i].spec, routes[i].rows, routes[i].cols, axes),
                        dtypes[i], out_dtypes[i], placements[i].source)
            for i in indices)
        plans.append((mesh, tuple(indices), plan_mesh(leaves, axes, steps, options)))
    return plans


@functools.lru_cache(maxsize=64)
def plan_mesh(leaves: tuple[PlannedLeaf, ...], mesh_axes: MeshAxes, steps: int, options: PlanOptions) -> MeshPlan:
    """Domains, owners, programs and pages of the leaves on one mesh. Deterministic; cached, since every trace asks again."""
    groups = _group(leaves)
    jobs, workers, kinds = _jobs(leaves, groups, mesh_axes, steps)
    counts = programs.place(assign.balance(jobs, workers), jobs, workers)
    kind_counts = tuple(tuple(count for _, count in k) for k in kinds)
    owned = programs.deal(counts, kind_counts, workers, jobs)
    costs = [ns_flops(*kind.shape, steps) for k in kinds for kind, _ in k]
    slots = programs.merge(owned, costs, options.max_programs)
    domains, at = [], 0
    for d, members in enumerate(groups):
        mine = tuple(kind for job, k in zip(jobs, kinds, strict=True) if job.domain == d for kind, _ in k)
        here = slice(at, at + len(mine))
        at += len(mine)
        domains.append(_domain(leaves, members, mine, owned[:, here], slots[:, here], mesh_axes))
    return MeshPlan(mesh_axes, leaves, tuple(domains), steps)


def _itemsize(dtype: str) -> int:
    import jax.numpy as jnp  # bfloat16 is known to JAX's numpy, not to numpy

    return jnp.dtype(dtype).itemsize


def _group(leaves: Sequence[PlannedLeaf]) -> list[tuple[int, ...]]:
    """Leaves of each domain, in order of first appearance."""
    groups: dict[Any, list[int]] = {}
    for i, leaf in enumerate(leaves):
        key = (leaf.layout.exchange, leaf.layout.batch_axes, leaf.layout.free, leaf.dtype, leaf.out_dtype)
        groups.setdefault(key, []).append(i)
    return [tuple(members) for members in groups.values()]


def _jobs(leaves: Sequence[PlannedLeaf], groups: Sequence[tuple[int, ...]], mesh_axes: MeshAxes, steps: int) -> tuple[
        list[assign.Job], list[assign.Workers], list[tuple[tuple[Kind, int], ...]]]:
    """Classes of equal problems, the devices that may own them, and the (kind, matrices per row) that make up each class.

    Within a class wide kinds come first, then tall: owners are dealt contiguous runs, so few programs differ by orientation.
    """
    jobs, workers, kinds = [], [], []
    for d, members in enumerate(groups):
        first = leaves[members[0]].layout
        row, itemsize = device_index(mesh_axes, first.batch_axes), _itemsize(leaves[members[0]].dtype)
        rows = np.argsort(row, kind="stable").reshape(int(row.max()) + 1, -1)
        replica = device_index(mesh_axes, first.free)
        workers.append(assign.Workers(rows, replica, bool(first.exchange or first.free)))
        classes: dict[tuple[int, int], dict[Kind, int]] = {}
        for i in members:
            layout = leaves[i].layout
            of_class = classes.setdefault(layout.kind.canonical, {})
            of_class[layout.kind] = of_class.get(layout.kind, 0) + layout.count
        for (m, n), of_class in sorted(classes.items(), reverse=True):
            ordered = sorted(of_class.items(), key=lambda item: item[0].shape)
            jobs.append(assign.Job(d, ns_flops(m, n, steps), m * n * itemsize, sum(of_class.values())))
            kinds.append(tuple(ordered))
    return jobs, workers, kinds


def _domain(leaves: Sequence[PlannedLeaf], members: tuple[int, ...], kinds: tuple[Kind, ...], counts: np.ndarray,
            slots: np.ndarray, mesh_axes: MeshAxes) -> Domain:
    layouts = [leaves[i].layout for i in members]
    number = {kind: k for k, kind in enumerate(kinds)}
    blocks: dict[int, int] = {}
    for layout in layouts:
        blocks[layout.kind.elements] = blocks.get(layout.kind.elements, 0) + layout.count
    packing = Packing(
        mesh_axes, layouts[0].exchange, layouts[0].batch_axes, layouts[0].free, choose_page(blocks), kinds,
        tuple((number[layout.kind], layout.count) for layout in layouts), _rows(counts), _rows(slots))
    return Domain(members, leaves[members[0]].dtype, leaves[members[0]].out_dtype, packing)


def _rows(array: np.ndarray) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(map(int, row)) for row in array.tolist())
