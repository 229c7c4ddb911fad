"""From shapes and specs to a `Plan`: pure Python and numpy, no device is touched."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from muon_shard import assign, domains, gram_space, programs
from muon_shard.choose import Choice
from muon_shard.cost import choose_page
from muon_shard.labels import DimensionNumbers, Route, require_matrices, route
from muon_shard.layout import Kind, MeshAxes, make_layout
from muon_shard.newton_schulz import make_orthogonalizer, narrowed
from muon_shard.options import PlanOptions
from muon_shard.orthogonalizer import Orthogonalizer
from muon_shard.packing import Packing, device_index
from muon_shard.plan import Domain, MeshPlan, Plan, PlannedLeaf, itemsize
from muon_shard.presets import resolve
from muon_shard.shardings import Memory, Placement, Shardings, place_leaves
from muon_shard.topology import Topology
from muon_shard.transports import TRANSPORTS, Gram


def make_plan(
    params: Any,
    *,
    options: PlanOptions = PlanOptions(),  # noqa: B008 (frozen)
    muon_weight_dimension_numbers: DimensionNumbers = None,
    param_shardings: Shardings = None,
    ns_coeffs: Any = "standard",
    ns_steps: int = 5,
    ns_dtype: jax.typing.DTypeLike | None = None,
    orthogonalizer: Any = None,
) -> Plan:
    """Plans the Muon part of an optimizer step for `params`.

    Args:
        params: pytree of arrays or `jax.ShapeDtypeStruct`s; shardings may name abstract meshes of any size.
        options: what steers the plan.
        muon_weight_dimension_numbers: as for `muon`.
        param_shardings: shardings where `params` does not carry them, as for `muon`.
        ns_coeffs: as for `muon`, like `ns_steps`, `ns_dtype` and `orthogonalizer`: they decide what a matrix costs.
        ns_steps: Newton–Schulz steps.
        ns_dtype: dtype in which matrices travel and are orthogonalized.
        orthogonalizer: in place of Newton–Schulz.

    Raises:
        ValueError: listing every leaf that cannot be a matrix or whose sharding is illegal, or when no leaf is Muon's.
    """
    routes = route(params, muon_weight_dimension_numbers, "make_plan")
    require_matrices(routes, "make_plan")
    placements = place_leaves(params, param_shardings, Memory(), "make_plan")
    dtypes = [narrowed(r.dtype, ns_dtype) if r.label == "muon" else r.dtype for r in routes]
    runs = make_orthogonalizer(orthogonalizer, ns_coeffs, ns_steps, method=options.ns_method)
    parts = plan_meshes(routes, placements, dtypes, dtypes, runs, options)
    return Plan(tuple(plan for _, _, plan in parts), tuple(routes))


def plan_meshes(
    routes: Sequence[Route],
    placements: Sequence[Placement],
    dtypes: Sequence[str],
    out_dtypes: Sequence[str],
    orthogonalizer: Orthogonalizer,
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
            PlannedLeaf(
                routes[i].path,
                make_layout(routes[i].shape, placements[i].spec, routes[i].rows, routes[i].cols, axes),
                dtypes[i],
                out_dtypes[i],
                placements[i].source,
            )
            for i in indices
        )
        topology = resolve(options.topology, mesh, axes)
        plan = plan_mesh(leaves, axes, orthogonalizer.on(topology.platform), topology, options)
        plans.append((mesh, tuple(indices), plan))
    return plans


@functools.lru_cache(maxsize=64)
def plan_mesh(
    leaves: tuple[PlannedLeaf, ...],
    mesh_axes: MeshAxes,
    orthogonalizer: Orthogonalizer,
    topology: Topology,
    options: PlanOptions,
) -> MeshPlan:
    """Domains, owners, programs and pages of the leaves on one mesh. Cached: every trace asks again."""
    groups, choices = domains.group(leaves, mesh_axes, orthogonalizer, topology, options)
    jobs, workers, kinds = _jobs(leaves, groups, choices, mesh_axes, orthogonalizer)
    counts = assign.balance(jobs, workers, domains.flops_per_byte(leaves, topology))
    counts = domains.repeat(
        programs.place(counts, jobs, workers), [job.domain for job in jobs], choices, leaves, groups
    )
    kind_counts = tuple(tuple(count for _, count in k) for k in kinds)
    owned = programs.deal(counts, kind_counts, workers, jobs)
    owner_domain = [job.domain for job, k in zip(jobs, kinds, strict=True) for _ in k]
    owned = domains.repeat(owned, owner_domain, choices, leaves, groups)
    costs = [job.flops for job, k in zip(jobs, kinds, strict=True) for _ in k]
    slots = programs.merge(owned, costs, options.max_programs)
    planned, at = [], 0
    for d, members in enumerate(groups):
        mine = tuple(kind for job, k in zip(jobs, kinds, strict=True) if job.domain == d for kind, _ in k)
        here = slice(at, at + len(mine))
        at += len(mine)
        planned.append(_domain(leaves, members, choices[d], mine, owned[:, here], slots[:, here], mesh_axes))
    bound = assign.lower_bound(jobs, workers)
    plan = MeshPlan(mesh_axes, leaves, tuple(planned), orthogonalizer, bound)
    spread = sum(plan.everywhere(domain, "cost") for domain in planned)
    return dataclasses.replace(plan, bound=bound + spread) if spread else plan


def _jobs(
    leaves: Sequence[PlannedLeaf],
    groups: Sequence[tuple[int, ...]],
    choices: Sequence[Choice],
    mesh_axes: MeshAxes,
    orthogonalizer: Orthogonalizer,
) -> tuple[list[assign.Job], list[assign.Workers], list[tuple[tuple[Kind, int], ...]]]:
    """Classes of equal problems, the devices that may own them, and the (kind, matrices per row) in each class.

    Within a class wide kinds come first, then tall: owners are dealt runs, so few programs differ by orientation.
    """
    jobs, workers, kinds = [], [], []
    for d, members in enumerate(groups):
        first = leaves[members[0]].layout
        row, size = device_index(mesh_axes, domains.rows_over(first, choices[d])), itemsize(leaves[members[0]].dtype)
        rows = np.argsort(row, kind="stable").reshape(int(row.max()) + 1, -1)
        replica = device_index(mesh_axes, choices[d].shared)
        travels = not TRANSPORTS[choices[d].transport].repeats and bool(first.exchange or choices[d].shared)
        workers.append(assign.Workers(rows, replica, travels))
        classes: dict[tuple[int, int], dict[Kind, int]] = {}
        for i in members:
            layout = leaves[i].layout
            of_class = classes.setdefault(layout.kind.canonical, {})
            of_class[layout.kind] = of_class.get(layout.kind, 0) + layout.count
        for (m, n), of_class in sorted(classes.items(), reverse=True):
            ordered = sorted(of_class.items(), key=lambda item: item[0].shape)
            cost, travelling = orthogonalizer.work(m, n, leaves[members[0]].dtype).cost, m * n * size
            if choices[d].transport == Gram.name:
                cost = gram_space.space(orthogonalizer, leaves[members[0]].dtype).works(m, n)[0].cost
                travelling = gram_space.size(ordered[0][0]) * 4
            jobs.append(assign.Job(d, cost, travelling, sum(of_class.values())))
            kinds.append(tuple(ordered))
    return jobs, workers, kinds


def _domain(
    leaves: Sequence[PlannedLeaf],
    members: tuple[int, ...],
    choice: Choice,
    kinds: tuple[Kind, ...],
    counts: np.ndarray,
    slots: np.ndarray,
    mesh_axes: MeshAxes,
) -> Domain:
    layouts = [leaves[i].layout for i in members]
    number = {kind: k for k, kind in enumerate(kinds)}
    sizes = tuple(gram_space.size(kind) if choice.transport == Gram.name else kind.elements for kind in kinds)
    blocks: dict[int, int] = {}
    for layout in layouts:
        size = sizes[number[layout.kind]]
        blocks[size] = blocks.get(size, 0) + layout.count
    packing = Packing(
        mesh_axes,
        layouts[0].exchange,
        domains.rows_over(layouts[0], choice),
        choice.shared,
        choose_page(blocks),
        kinds,
        sizes,
        tuple((number[layout.kind], layout.count) for layout in layouts),
        _tuples(counts),
        _tuples(slots),
    )
    return Domain(members, leaves[members[0]].dtype, leaves[members[0]].out_dtype, packing, choice)


def _tuples(array: np.ndarray) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(map(int, row)) for row in array.tolist())
