"""Which leaves travel together, how, and which devices divide their work."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from muon_shard import assign, gram_space
from muon_shard.choose import Choice, Load, Question, choose
from muon_shard.errors import Offence, raise_for_leaves
from muon_shard.layout import Kind, Layout, MeshAxes
from muon_shard.newton_schulz.forms import platform_of
from muon_shard.newton_schulz.products import is_narrow
from muon_shard.options import PlanOptions
from muon_shard.orthogonalizer import Orthogonalizer
from muon_shard.plan import PlannedLeaf, itemsize
from muon_shard.shardings import partition_spec
from muon_shard.topology import Topology
from muon_shard.transports import TRANSPORTS, Gram

WIDE = 2
"""Columns per row from which random matrices are well conditioned, so that Gram matrices tell as much as they do."""


def group(
    leaves: Sequence[PlannedLeaf],
    mesh_axes: MeshAxes,
    orthogonalizer: Orthogonalizer,
    topology: Topology,
    options: PlanOptions,
) -> tuple[list[tuple[int, ...]], list[Choice]]:
    """Leaves of each domain, in order of first appearance, and how each travels.

    Skinny matrices stand apart from the others they could travel with where their Gram matrices travel instead.

    Raises:
        ValueError: listing the leaves for which a pinned option cannot be met, or axes the mesh does not have.
    """
    _require_work(leaves, orthogonalizer)
    asked = mesh_axes, orthogonalizer, topology, options
    apart: set[int] = set()
    if options.transport == Gram.name:
        apart = {i for i, leaf in enumerate(leaves) if leaf.layout.cut is not None}  # to be named where it is refused
    if options.transport == "auto":
        skinny = {i for i, leaf in enumerate(leaves) if _is_skinny(leaf.layout)}
        groups = _group(leaves, skinny)
        for members, choice in zip(groups, _choices(leaves, groups, *asked) if skinny else (), strict=False):
            if choice.transport == Gram.name:
                apart |= skinny & set(members)
    groups = _group(leaves, apart)
    return groups, _choices(leaves, groups, *asked)


def _require_work(leaves: Sequence[PlannedLeaf], orthogonalizer: Orthogonalizer) -> None:
    """Raises a `ValueError` that lists all leaves that the orthogonalizer cannot serve, and why."""
    reasons = {}
    kinds = [(leaf.layout.kind.problems, leaf.dtype) for leaf in leaves]
    for problems, dtype in set(kinds):
        try:
            orthogonalizer.work_of(problems, dtype)
        except ValueError as error:
            reasons[problems, dtype] = str(error)
    raise_for_leaves(
        "PlanOptions",
        "cannot be orthogonalized as asked",
        [_offence(leaf, reasons[kind]) for leaf, kind in zip(leaves, kinds, strict=True) if kind in reasons],
        "Consider ns_method='auto', or other ns_coeffs=.",
    )


def _offence(leaf: PlannedLeaf, reason: str) -> Offence:
    return Offence(leaf.path, reason, leaf.layout.leaf_shape, leaf.dtype, partition_spec(leaf.layout.leaf_spec))


def _is_skinny(layout: Layout) -> bool:
    """Whether half a Gram matrix, in float32, is smaller than a block in bfloat16 that goes and comes back."""
    m, n = layout.kind.canonical
    return bool(layout.exchange) and layout.cut is None and n > m * layout.ways(layout.exchange)


def _group(leaves: Sequence[PlannedLeaf], apart: set[int]) -> list[tuple[int, ...]]:
    groups: dict[Any, list[int]] = {}
    for i, leaf in enumerate(leaves):
        key = (leaf.layout.exchange, leaf.layout.batch_axes, leaf.layout.free, leaf.dtype, leaf.out_dtype, i in apart)
        groups.setdefault(key, []).append(i)
    return [tuple(members) for members in groups.values()]


def _choices(
    leaves: Sequence[PlannedLeaf],
    groups: Sequence[tuple[int, ...]],
    mesh_axes: MeshAxes,
    orthogonalizer: Orthogonalizer,
    topology: Topology,
    options: PlanOptions,
) -> list[Choice]:
    unknown = set(options.dedup_axes) - {name for name, _ in mesh_axes}
    if not isinstance(options.dedup_axes, str) and unknown:
        have = ", ".join(name for name, _ in mesh_axes)
        raise ValueError(
            f"PlanOptions: dedup_axes names {', '.join(sorted(unknown))}; the mesh has {have or 'no axes'}."
        )
    sizes, found, offences = dict(mesh_axes), [], []
    for members in groups:
        first, layout = leaves[members[0]], leaves[members[0]].layout
        works = {leaves[i].layout.kind: 0 for i in members}
        for i in members:
            works[leaves[i].layout.kind] += leaves[i].layout.count
        costs = {kind: orthogonalizer.work_of(kind.problems, first.dtype).cost for kind in works}
        question = Question(
            tuple((name, sizes[name]) for name in layout.exchange),
            layout.batch_axes,
            tuple((name, sizes[name]) for name in layout.free),
            Load(
                sum(kind.elements * count for kind, count in works.items()),
                itemsize(first.dtype),
                itemsize(first.out_dtype),
                sum(costs[kind] * count for kind, count in works.items()),
                max(costs.values()),
            ),
            _as_grams(works, layout, first.dtype, orthogonalizer, options),
            _gathered([leaves[i] for i in members], mesh_axes),
        )
        choice = choose(question, topology, rate(first.dtype, topology), options)
        if isinstance(choice, str):
            offences += [_offence(leaves[i], choice) for i in members]
        else:
            found.append(choice)
    raise_for_leaves("PlanOptions", "cannot travel as asked", offences, "Consider transport='auto'.")
    return found


def _gathered(members: Sequence[PlannedLeaf], mesh_axes: MeshAxes) -> tuple[tuple[MeshAxes, int], ...]:
    """What `Traffic.gathered` will be."""
    found: dict[MeshAxes, int] = {}
    for leaf in members:
        if leaf.gathered:
            axes = tuple(axis for axis in mesh_axes if axis[0] in leaf.gathered)
            size = leaf.layout.count * leaf.layout.kind.elements * itemsize(leaf.out_dtype)
            found[axes] = found.get(axes, 0) + size
    return tuple(found.items())


def _as_grams(
    counts: dict[Kind, int], layout: Layout, dtype: str, orthogonalizer: Orthogonalizer, options: PlanOptions
) -> Load | str:
    """What the matrices of one domain move and cost as Gram matrices; why they cannot."""
    space = orthogonalizer.in_gram_space(dtype)
    if isinstance(space, str):
        return space
    if options.transport == "auto" and any(n < WIDE * m for m, n in (kind.canonical for kind in counts)):
        return "nearly square matrices lose digits as Gram matrices, so it must be asked for"
    if any(kind.parts for kind in counts):
        return "its blocks have Gram matrices of their own, and shards hold parts of several blocks"
    works = {kind: space.works(*kind.canonical) for kind in counts}
    item, out, scales, turned = gram_space.items(dtype, tuple(counts.items()), layout.mesh_axes)
    return Load(
        sum(gram_space.size(kind) * count for kind, count in counts.items()),
        item,
        out,
        sum(works[kind][0].cost * count for kind, count in counts.items()),
        max(owner.cost for owner, _ in works.values()),
        sum(works[kind][1].cost * count for kind, count in counts.items()) // layout.ways(layout.exchange),
        scales,
        turned,
    )


def rate(dtype: str, topology: Topology) -> float:
    """FLOP/s that one device reaches on products of this dtype."""
    platform = platform_of(topology.platform)
    return topology.flops * topology.achieved * (1 if is_narrow(dtype) else platform.default / platform.narrow)


def flops_per_byte(leaves: Sequence[PlannedLeaf], topology: Topology) -> int:
    """FLOPs in the time in which one byte crosses the slowest axis that any matrix crosses."""
    axes = {axis for leaf in leaves for axis in leaf.layout.exchange}
    if not axes:
        return assign.FLOPS_PER_BYTE
    slowest = min(topology.link(axis).bandwidth for axis in axes) * topology.achieved
    return max(1, round(rate(leaves[0].dtype, topology) / slowest))


def rows_over(layout: Layout, choice: Choice) -> tuple[str, ...]:
    """Axes whose devices own matrices independently: batch axes, and those over which work is repeated."""
    if TRANSPORTS[choice.transport].repeats:
        return tuple(name for name, _ in layout.mesh_axes)
    repeated = set(layout.free) - set(choice.shared)
    return tuple(name for name, _ in layout.mesh_axes if name in layout.batch_axes or name in repeated)


def repeat(
    counts: np.ndarray,
    domain_of: Sequence[int],
    choices: Sequence[Choice],
    leaves: Sequence[PlannedLeaf],
    groups: Sequence[tuple[int, ...]],
) -> np.ndarray:
    """Replicas that repeat work get the same of it, so that they stay equal bit for bit.

    `counts` [devices, classes]; each class has its domain. Devices along a repeated axis copy the first of them.
    """
    counts = counts.copy()
    for d, (members, choice) in enumerate(zip(groups, choices, strict=True)):
        layout = leaves[members[0]].layout
        repeated = set(rows_over(layout, choice)) - set(layout.batch_axes) - set(layout.exchange)
        if not repeated:
            continue
        shape = tuple(size for _, size in layout.mesh_axes)
        first = np.arange(len(counts)).reshape(shape)[
            tuple(slice(0, 1) if name in repeated else slice(None) for name, _ in layout.mesh_axes)
        ]
        first = np.broadcast_to(first, shape).reshape(-1)
        columns = np.array(domain_of) == d
        counts[:, columns] = counts[first][:, columns]
    return counts
