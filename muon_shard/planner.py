"""From shapes and specs to a `Plan`: pure Python and numpy, no device is touched."""

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from muon_shard import assign, domains, gram_space, programs, waves
from muon_shard.choose import Choice, is_worthwhile
from muon_shard.cost import choose_page
from muon_shard.errors import Offence, raise_for_leaves
from muon_shard.labels import DimensionNumbers, Route, require_matrices, route
from muon_shard.layout import Kind, Layout, MeshAxes, make_layout
from muon_shard.newton_schulz import make_orthogonalizer, narrowed, why_not_narrowed
from muon_shard.options import PlanOptions
from muon_shard.orthogonalizer import Orthogonalizer
from muon_shard.packing import Packing, device_index
from muon_shard.plan import Domain, MeshPlan, Plan, PlannedLeaf, Wave, itemsize
from muon_shard.presets import resolve
from muon_shard.shardings import Memory, Placement, Shardings, place_leaves
from muon_shard.simulate import makespan
from muon_shard.topology import Topology
from muon_shard.transports import TRANSPORTS, Gather, Gram

CLOSE = 2.0
"""How far above the least a transport's estimate may lie for a plan of its own to be tried."""

ROUNDING = 1e-9
"""Of the simulated seconds: what two equal plans may differ by."""


def make_plan(
    params: Any,
    *,
    options: PlanOptions = PlanOptions(),  # noqa: B008 (frozen)
    muon_weight_dimension_numbers: DimensionNumbers = None,
    param_shardings: Shardings = None,
    ns_coeffs: Any = "standard",
    ns_steps: int = 5,
    ns_dtype: jax.typing.DTypeLike | None = None,
    mu_dtype: jax.typing.DTypeLike | None = None,
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
        ns_dtype: dtype in which matrices travel and are orthogonalized; None: the parameters', which is what gradients
            of the same dtype make of it.
        mu_dtype: dtype of the momentum, which tells the memory it takes.
        orthogonalizer: in place of Newton–Schulz.

    Raises:
        ValueError: listing every leaf that cannot be a matrix or whose sharding is illegal, or when no leaf is Muon's.
    """
    routes = route(params, muon_weight_dimension_numbers, "make_plan")
    require_matrices(routes, "make_plan")
    placements = place_leaves(params, param_shardings, Memory(), "make_plan")
    dtypes = inner_dtypes(routes, [r.dtype for r in routes], ns_dtype, "make_plan")
    state_dtypes = [r.dtype if mu_dtype is None else str(jnp.dtype(mu_dtype)) for r in routes]
    runs = make_orthogonalizer(orthogonalizer, ns_coeffs, ns_steps, method=options.ns_method)
    parts = plan_meshes(routes, placements, state_dtypes, dtypes, dtypes, runs, options)
    return Plan(tuple(plan for _, _, plan in parts), tuple(routes))


def inner_dtypes(
    routes: Sequence[Route], dtypes: Sequence[str], ns_dtype: jax.typing.DTypeLike | None, where: str
) -> list[str]:
    """The dtype in which each Muon leaf is orthogonalized; of others their own.

    Raises:
        ValueError: listing the leaves that cannot be in `ns_dtype`.
    """
    asked = [ns_dtype if r.label == "muon" else None for r in routes]
    reasons = [why_not_narrowed(*each) for each in zip(dtypes, asked, strict=True)]
    raise_for_leaves(
        where,
        "cannot be orthogonalized in ns_dtype",
        [Offence(r.path, why, r.shape, dtype) for r, why, dtype in zip(routes, reasons, dtypes, strict=True) if why],
        "Consider ns_dtype=None, or a transformation of their own for these leaves.",
    )
    return [narrowed(*each) for each in zip(dtypes, asked, strict=True)]


def plan_meshes(
    routes: Sequence[Route],
    placements: Sequence[Placement],
    state_dtypes: Sequence[str],
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
                *layouts(routes[i], placements[i], options),
                state_dtypes[i],
                dtypes[i],
                out_dtypes[i],
                placements[i].source,
            )
            for i in indices
        )
        topology = resolve(options.topology, mesh, axes)
        plan = best_plan(leaves, axes, orthogonalizer.on(topology.platform), topology, options)
        plans.append((mesh, tuple(indices), plan))
    return plans


def layouts(leaf: Route, placement: Placement, options: PlanOptions) -> tuple[Layout, Layout]:
    """Of the momentum and of the parameter of a leaf that is placed so."""

    def seen(spec: Any) -> Layout:
        return make_layout(leaf.shape, spec, leaf.rows, leaf.cols, placement.mesh_axes, leaf.cut)

    param = seen(placement.spec)
    return seen(param.spec_over_replicas) if options.momentum_sharding == "replicas" else param, param


@functools.lru_cache(maxsize=64)
def best_plan(
    leaves: tuple[PlannedLeaf, ...],
    mesh_axes: MeshAxes,
    orthogonalizer: Orthogonalizer,
    topology: Topology,
    options: PlanOptions,
) -> MeshPlan:
    """The plan by estimates, or one that pins what they left open, where that is faster in the simulator.

    Estimates divide evenly; plans have whole matrices and padding. A transport by which everyone computes everything
    must be as much faster as by estimate: for less, tiny plans would repeat work. Cached: every trace asks again.
    """
    plan = plan_mesh(leaves, mesh_axes, orthogonalizer, topology, options)
    best, seconds = plan, makespan(plan, topology)
    for rival in _rivals(plan, options):
        other = plan_mesh(leaves, mesh_axes, orthogonalizer, topology, rival)
        took = makespan(other, topology)
        repeats = rival.transport != "auto" and TRANSPORTS[rival.transport].repeats
        if is_worthwhile(seconds, took) if repeats else took < (1 - ROUNDING) * seconds:
            best, seconds = other, took
    return best


def _rivals(plan: MeshPlan, options: PlanOptions) -> list[PlanOptions]:
    """Options that pin one transport and one sharing for all domains, where estimates come close to those chosen."""
    found_in: dict[Any, Domain] = {}
    for domain in plan.domains:  # of all waves: none need hold matrices of all domains
        seen = plan.leaves[domain.leaves[0]].layout
        key = (seen.exchange, seen.batch_axes, seen.free, domain.dtype, domain.out_dtype, domain.choice)
        found_in.setdefault(key, domain)
    domains_ = list(found_in.values())
    free = any(leaf.layout.free for leaf in plan.leaves)
    sharings = ("all", ()) if free and options.dedup_axes == "auto" else (options.dedup_axes,)
    scattered = [domain.choice.seconds for domain in domains_ if domain.packing.exchange]
    legal = [t for t in scattered[0] if all(t in each for each in scattered)] if scattered else []
    if options.dedup_axes != "auto":
        legal = [t for t in legal if not TRANSPORTS[t].repeats]  # who names axes wants work shared over them
    transports = legal if options.transport == "auto" else [options.transport]
    chosen = sum(domain.choice.estimate for domain in domains_)
    rivals = []
    for transport, shared in itertools.product(transports or ["auto"], sharings):
        found = [d.choice.pinned(transport if d.packing.exchange else "local", shared) for d in domains_]
        same = all(a == d.choice.taken for a, d in zip(found, domains_, strict=True))
        if not same and sum(a.seconds for a in found) <= CLOSE * chosen:
            rivals.append(dataclasses.replace(options, transport=transport, dedup_axes=shared))
    return rivals


def plan_mesh(
    leaves: tuple[PlannedLeaf, ...],
    mesh_axes: MeshAxes,
    orthogonalizer: Orthogonalizer,
    topology: Topology,
    options: PlanOptions,
) -> MeshPlan:
    """Domains, owners, programs and pages of the leaves on one mesh, all choices by estimates."""
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
    flat = [kind for k in kinds for kind, _ in k]
    sizes = [_exchanged(leaves[groups[d][0]], choices[d], kind) for d, kind in zip(owner_domain, flat, strict=True)]
    rows = [_rows(leaves[groups[d][0]].layout, choices[d], mesh_axes) for d in owner_domain]
    limit = options.max_wave_bytes if isinstance(options.max_wave_bytes, int) else int(topology.hbm_bytes) // 8
    planned, done = [], np.zeros(len(flat), np.int64)
    for counts in waves.cut(owned, rows, sizes, costs, owner_domain, limit):
        slots = programs.merge(counts, costs, options.max_programs)
        taken = np.array([int(counts[row[0], k].sum()) for k, row in enumerate(rows)])
        parts = []
        for d, members in enumerate(groups):
            mine = [k for k, of in enumerate(owner_domain) if of == d and taken[k]]
            if mine:
                spans = _spans(leaves, members, {flat[k]: (int(done[k]), int(done[k] + taken[k])) for k in mine})
                of_wave = tuple(flat[k] for k in mine)
                parts.append(_domain(leaves, spans, choices[d], of_wave, counts[:, mine], slots[:, mine], mesh_axes))
        planned.append(Wave(tuple(parts)))
        done += taken
    bound = assign.lower_bound(jobs, workers)
    memory, under_way = int(topology.hbm_bytes), options.waves_under_way
    plan = MeshPlan(mesh_axes, leaves, tuple(planned), orthogonalizer, limit, memory, under_way, bound)
    spread = sum(plan.everywhere(domain, "cost") for domain in plan.domains)
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
        rows, size = _rows(first, choices[d], mesh_axes), itemsize(leaves[members[0]].dtype)
        replica = device_index(mesh_axes, choices[d].shared)
        travels = not TRANSPORTS[choices[d].transport].repeats and bool(first.exchange or choices[d].shared)
        workers.append(assign.Workers(rows, replica, travels))
        classes: dict[Any, dict[Kind, int]] = {}
        for i in members:
            layout = leaves[i].layout
            of_class = classes.setdefault(layout.kind.problems, {})
            of_class[layout.kind] = of_class.get(layout.kind, 0) + layout.count
        for problems, of_class in sorted(classes.items(), reverse=True):
            ordered = sorted(of_class.items(), key=lambda item: item[0].shape)
            m, n = ordered[0][0].canonical
            cost, travelling = orthogonalizer.work_of(problems, leaves[members[0]].dtype).cost, m * n * size
            if choices[d].transport == Gram.name:
                cost = gram_space.space(orthogonalizer, leaves[members[0]].dtype).works(m, n)[0].cost
                travelling = gram_space.size(ordered[0][0]) * 4
            jobs.append(assign.Job(d, cost, travelling, sum(of_class.values())))
            kinds.append(tuple(ordered))
    return jobs, workers, kinds


def _rows(layout: Layout, choice: Choice, mesh_axes: MeshAxes) -> np.ndarray:
    """The devices of each row of a domain, [rows, workers]."""
    row = device_index(mesh_axes, domains.rows_over(layout, choice))
    return np.argsort(row, kind="stable").reshape(int(row.max()) + 1, -1)


def _exchanged(leaf: PlannedLeaf, choice: Choice, kind: Kind) -> int:
    """Bytes in the exchange buffer for each matrix of a kind that the busiest device owns."""
    layout, transport = leaf.layout, TRANSPORTS[choice.transport]
    peers = layout.ways(layout.exchange)
    if peers == 1:
        return 0
    if isinstance(transport, Gram):
        return peers * gram_space.size(kind) * gram_space.items(leaf.dtype, (), ())[0]
    # Where everyone gets everything, the matrices of all owners are in everyone's buffer.
    owners = peers * layout.ways(choice.shared) if isinstance(transport, Gather) and not transport.repeats else 1
    return peers * kind.elements * itemsize(leaf.dtype) * owners


Spans = tuple[tuple[int, int, int], ...]
"""(leaf, first, last + 1) of local matrices."""


def _spans(leaves: Sequence[PlannedLeaf], members: tuple[int, ...], runs: dict[Kind, tuple[int, int]]) -> Spans:
    """Where the runs of matrices of each kind, counted through all leaves of a domain, lie in these leaves."""
    at, spans = dict.fromkeys(runs, 0), []
    for i in members:
        kind, count = leaves[i].layout.kind, leaves[i].layout.count
        if kind in runs:
            first, last = (min(max(end - at[kind], 0), count) for end in runs[kind])
            at[kind] += count
            if first < last:
                spans.append((i, first, last))
    return tuple(spans)


def _domain(
    leaves: Sequence[PlannedLeaf],
    spans: Spans,
    choice: Choice,
    kinds: tuple[Kind, ...],
    counts: np.ndarray,
    slots: np.ndarray,
    mesh_axes: MeshAxes,
) -> Domain:
    number = {kind: k for k, kind in enumerate(kinds)}
    sizes = tuple(gram_space.size(kind) if choice.transport == Gram.name else kind.elements for kind in kinds)
    held = tuple((number[leaves[i].layout.kind], last - first) for i, first, last in spans)
    blocks: dict[int, int] = {}
    for k, count in held:
        blocks[sizes[k]] = blocks.get(sizes[k], 0) + count
    one = leaves[spans[0][0]]
    packing = Packing(
        mesh_axes,
        one.layout.exchange,
        domains.rows_over(one.layout, choice),
        choice.shared,
        choose_page(blocks),
        kinds,
        sizes,
        held,
        _tuples(counts),
        _tuples(slots),
    )
    members, first = tuple(i for i, _, _ in spans), tuple(at for _, at, _ in spans)
    gathered = tuple(leaves[i].gathered for i in members)
    return Domain(members, first, gathered, one.dtype, one.out_dtype, packing, choice)


def _tuples(array: np.ndarray) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(map(int, row)) for row in array.tolist())
