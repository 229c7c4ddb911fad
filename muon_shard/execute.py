"""Runs a plan, in each wave: pack → exchange in → one switch over programs → exchange out → share → unpack.

The only place that calls `shard_map`. Devices do different work in one SPMD program: every collective is outside the
switch, every Newton–Schulz inside.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from muon_shard.errors import Offence, raise_for_leaves
from muon_shard.gram_space import GramMatrices
from muon_shard.layout import Layout, spec_entries
from muon_shard.packing import Packing
from muon_shard.pages import Table, take_pages
from muon_shard.plan import Domain, MeshPlan, PlannedLeaf, Wave
from muon_shard.shardings import AnyMesh, axis_types, only_axes, partition_spec, varying
from muon_shard.transports import Gram
from muon_shard.views import View
from muon_shard.whole_matrices import WholeMatrices


def execute(
    plan: MeshPlan,
    mesh: AnyMesh | None,
    leaves: Sequence[jax.Array],
    operands: tuple[Any, ...],
) -> list[jax.Array]:
    """Orthogonalizes every matrix of `leaves` once on the whole mesh.

    Args:
        plan: for exactly these leaves.
        mesh: their mesh, concrete or abstract; None for one device.
        leaves: the momentum, one array per `plan.leaves`, on axes of any type; of Manual ones the local shards.
        operands: arrays handed to the orthogonalizer on every device (coefficients, eps).

    Returns:
        One array per leaf: same shape, the sharding of the leaf's `update`, its `out_dtype`.

    Raises:
        ValueError: inside a `shard_map` that checks what varies, listing leaves whose updates are equal on all
            replicas in a way that JAX cannot see.
    """
    operands = tuple(jnp.asarray(x) for x in operands)
    if mesh is not None:
        leaves = [match_type(x, leaf.layout, mesh) for x, leaf in zip(leaves, plan.leaves, strict=True)]
        operands = tuple(_replicated(x, mesh) for x in operands)
    return list(_compiled(plan, mesh, _is_checked(_manual(mesh)))(operands, *leaves))


@functools.lru_cache(maxsize=64)
def _compiled(plan: MeshPlan, mesh: AnyMesh | None, checked: bool) -> Callable[..., tuple[jax.Array, ...]]:
    """One jitted function per plan, so that eager updates compile once; inside `jit` it is inlined.

    Axes that a `shard_map` of the user's has made Manual are so already; ours is over the others, and checks what
    varies (check_vma) where that one does.
    """
    body = functools.partial(_body, plan)
    if mesh is None:
        return jax.jit(body)
    rest = [name for name in mesh.axis_names if name not in _manual(mesh)]
    if not rest:
        return jax.jit(body)
    nested = len(rest) < len(mesh.axis_names)
    specs, outs = (
        tuple(partition_spec(only_axes(layout.leaf_spec, rest)) for layout in layouts)
        for layouts in ([leaf.layout for leaf in plan.leaves], [leaf.update for leaf in plan.leaves])
    )
    run = jax.shard_map(
        # What a gradient keeps of the inside of a nested one, JAX would cut over the outer axes once more.
        jax.checkpoint(body) if nested else body,
        mesh=mesh,
        in_specs=(PartitionSpec(), *specs),
        out_specs=outs,
        axis_names=set(rest),
        check_vma=checked,
    )
    if nested:
        return jax.jit(run)
    # On mixed axes a dimension over a tuple of axes would come back without its Auto part.
    return jax.jit(run, out_shardings=tuple(NamedSharding(mesh, spec) for spec in outs))


def _manual(mesh: AnyMesh | None) -> list[str]:
    return [] if mesh is None else [name for name, kind in axis_types(mesh).items() if kind == AxisType.Manual]


def match_type(x: jax.Array, layout: Layout, mesh: AnyMesh) -> jax.Array:
    """Explicit axes want the argument's type to equal in_specs; Auto axes need nothing."""
    explicit = [name for name, kind in axis_types(mesh).items() if kind == AxisType.Explicit]
    return reshard_typed(x, partition_spec(only_axes(layout.leaf_spec, explicit)))


def reshard_typed(x: jax.Array, spec: PartitionSpec) -> jax.Array:
    """Brings the Explicit part of the sharding of `x` to `spec`; nothing to do without Explicit axes."""
    sharding = jax.typeof(x).sharding
    mesh = sharding.mesh
    if not any(kind == AxisType.Explicit for kind in mesh.axis_types):
        return x
    if spec_entries(sharding.spec, x.ndim) == spec_entries(spec, x.ndim):
        return x
    return jax.reshard(x, NamedSharding(mesh, spec))


def _replicated(x: jax.Array, mesh: AnyMesh) -> jax.Array:
    """Operands as `shard_map` takes them: typed on the mesh when it has Explicit axes."""
    if any(kind == AxisType.Explicit for kind in mesh.axis_types) and jax.typeof(x).sharding.mesh.axis_names:
        return reshard_typed(x, PartitionSpec())
    return x


def _body(plan: MeshPlan, operands: tuple[jax.Array, ...], *shards: jax.Array) -> tuple[jax.Array, ...]:
    """What every device does with its local shards.

    The exchange of a wave begins when the results of the wave `under_way` before it are there: with two, one can talk
    while the other computes. Left to itself XLA begins all at once, and keeps the buffers of all.
    """
    layouts = [leaf.layout for leaf in plan.leaves]
    blocks = [
        x.reshape(layout.local_shape).transpose(layout.order).reshape(layout.count, layout.kind.elements)
        for x, layout in zip(shards, layouts, strict=True)
    ]
    updates: list[list[jax.Array]] = [[] for _ in shards]
    signs: list[list[jax.Array]] = [[]] * min(plan.under_way, len(plan.waves))
    for wave, before in zip(plan.waves, signs, strict=False):
        parts = _wave(plan, wave, operands, blocks, before)
        signs.append([_sign(part) for _, part in parts])  # seen by the loop, which takes them in turn
        for leaf, part in parts:
            updates[leaf].append(part)
    done = [_shard(jnp.concatenate(parts, axis=1), leaf) for parts, leaf in zip(updates, plan.leaves, strict=True)]
    return _as_varying_as(plan, done, shards)


def _sign(part: jax.Array) -> jax.Array:
    """A small number that is known when the part is there: XLA on CPU takes no notice of `optimization_barrier`."""
    return jnp.isnan(part[0, 0, 0]).astype(jnp.int32)


def _is_checked(manual: Sequence[str]) -> bool:
    """Whether the `shard_map` that made these axes Manual checks what varies over them."""
    return bool(manual) and bool(varying(lax.axis_index(tuple(manual))))


def _as_varying_as(plan: MeshPlan, updates: Sequence[jax.Array], shards: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
    """The updates, known to vary along no more axes than shard their leaves."""
    sizes, found, offences = dict(plan.mesh_axes), [], []
    for leaf, x, shard in zip(plan.leaves, updates, shards, strict=True):
        extra = varying(x) - varying(shard) - {axis for axes in leaf.update.spec for axis in axes}
        single = tuple(sorted(axis for axis in extra if sizes[axis] == 1))
        found.append(lax.psum(x, single) if single else x)  # over one device nothing moves: only the type changes
        if rest := sorted(extra.difference(single)):
            reason = f"its update is computed on every replica over {rest}, by programs that differ"
            offences.append(Offence(leaf.path, reason, leaf.layout.leaf_shape, leaf.dtype))
    raise_for_leaves(
        "muon",
        "whose updates shard_map cannot know to be equal on all replicas (check_vma)",
        offences,
        "Consider PlanOptions(dedup_axes='all'), or check_vma=False.",
    )
    return tuple(found)


def _shard(parts: jax.Array, leaf: PlannedLeaf) -> jax.Array:
    """A leaf's local shard of the update from the blocks of its matrices, [replicas, matrices, elements].

    Replicas hold parts of dimensions, each the minor part of what the mesh cuts.
    """
    layout, of_axis = leaf.layout, {axis: i for i, axis in enumerate(leaf.gathered)}
    ways = [layout.sizes[axis] for axis in leaf.gathered]
    x = parts.reshape(ways + [layout.local_shape[d] for d in layout.order])
    x = x.transpose([*range(len(ways)), *(len(ways) + np.argsort(layout.order))])
    order: list[int] = []
    for d, axes in enumerate(layout.leaf_spec):
        order += [of_axis[axis] for axis in axes if axis in of_axis] + [len(ways) + d]
    return x.reshape(ways + list(layout.leaf_local_shape)).transpose(order).reshape(leaf.update.leaf_local_shape)


def _wave(
    plan: MeshPlan, wave: Wave, operands: tuple[jax.Array, ...], blocks: list[jax.Array], before: list[jax.Array]
) -> list[tuple[int, jax.Array]]:
    """The updates of one wave, leaf by leaf, as blocks of the matrices that are in it; see `_shard`."""
    views = [_view(plan, domain) for domain in wave.domains]
    buffers, kept = [], []
    for domain, view in zip(wave.domains, views, strict=True):
        p = domain.packing
        parts, mine = view.pack([blocks[leaf][first:last] for leaf, first, last in domain.spans])
        table = _table(p.tables.send, p, p.rows, p.shared)
        sent = domain.carrier.pack(_not_before(before, parts, p), table)
        buffers.append(domain.carrier.bring(sent, table, p.exchange_axes))
        kept.append(mine)
    outs = _run_programs(plan, wave, views, operands, buffers)
    updates: list[tuple[int, jax.Array]] = []
    for domain, view, mine, out in zip(wave.domains, views, kept, outs, strict=True):
        back = domain.carrier.back(out, domain.packing.exchange_axes)
        pages, table = _share(back.reshape(-1, domain.packing.page), domain.packing)
        updates += zip(domain.leaves, _gather(view.unpack(pages, table, mine), domain), strict=True)
    return updates


def _gather(blocks: list[jax.Array], domain: Domain) -> list[jax.Array]:
    """Blocks of all replicas that hold parts of the updates, [replicas, matrices, elements] for each leaf.

    All that crosses the same axes goes together.
    """
    whole = [x[None] for x in blocks]
    for axes, positions in domain.gathers.items():
        flat = jnp.concatenate([blocks[i].reshape(-1) for i in positions])
        rows = _all_gather(flat, axes)
        ends = np.cumsum([blocks[i].size for i in positions])[:-1]
        for i, of_leaf in zip(positions, jnp.split(rows, ends, axis=1), strict=True):
            whole[i] = of_leaf.reshape(-1, *blocks[i].shape)
    return whole


def _all_gather(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """The arrays of all devices along the axes in a new first dimension, known to be equal on all of them."""
    return lax.all_gather(x, axes, to="invarying" if _is_checked(axes) else "varying")


def _not_before(signs: list[jax.Array], parts: list[jax.Array], packing: Packing) -> list[jax.Array]:
    """The same parts, once the signs of an earlier wave are known: one waits for them, and all are packed together."""
    # A sign that varies where the parts do not would make JAX believe that the replicas' updates differ.
    known = frozenset(packing.shared).union(*map(varying, parts))
    signs = [sign for sign in signs if varying(sign) <= known]
    if not signs:
        return parts
    smallest = min(range(len(parts)), key=lambda i: len(parts[i]))
    part = parts[smallest]
    held = lax.dynamic_slice_in_dim(jnp.pad(part, ((0, 1), (0, 0))), jnp.minimum(sum(signs), 0), len(part))
    return [*parts[:smallest], held, *parts[smallest + 1 :]]


def _view(plan: MeshPlan, domain: Domain) -> View:
    view = GramMatrices if isinstance(domain.carrier, Gram) else WholeMatrices
    return view(domain.packing, plan.orthogonalizer, domain.dtype, domain.out_dtype)


def _share(pages: jax.Array, packing: Packing) -> tuple[jax.Array, Any]:
    """Results of the matrices owned in this replica → all results, and the table that puts them in pool order.

    Compacted before the gather: the exchange buffer is padded to the busiest peer, the gather need not be.
    """
    tables = packing.tables
    if not packing.shared:
        return pages, _table(_chain(tables.compact, tables.back), packing, packing.rows).here
    mine = _table(tables.compact, packing, packing.rows, packing.shared).here
    gathered = _all_gather(take_pages(pages, mine), packing.shared)
    return gathered.reshape(-1, packing.page), _table(tables.back, packing, packing.rows).here


def _chain(compact: np.ndarray, back: np.ndarray) -> np.ndarray:
    """Both tables in one, for a single replica."""
    return np.take_along_axis(compact[:, 0], back, axis=1)


def _table(numbers: np.ndarray, packing: Packing, *of: tuple[str, ...]) -> Table:
    """A table whose leading dimensions are coordinates over these axes."""
    axes = tuple(axis for part in of for axis in part)
    return Table.make(numbers.reshape(-1, *numbers.shape[len(of) :]), axes, dict(packing.mesh_axes))


def _run_programs(
    plan: MeshPlan, wave: Wave, views: Sequence[View], operands: tuple[jax.Array, ...], buffers: list[jax.Array]
) -> list[jax.Array]:
    branches = [functools.partial(_program, views, slots, operands) for slots in wave.programs]
    if len(branches) == 1:
        return branches[0](buffers)
    me = lax.axis_index(tuple(name for name, _ in plan.mesh_axes))
    return lax.switch(jnp.asarray(wave.program_of, jnp.int32)[me], branches, buffers)


def _program(
    views: Sequence[View],
    slots: Sequence[tuple[int, ...]],
    operands: tuple[jax.Array, ...],
    buffers: list[jax.Array],
) -> list[jax.Array]:
    """Reassembles what is owned, orthogonalizes what is alike in one batch, takes the results apart."""
    batches: dict[tuple[Any, ...], list[jax.Array]] = {}
    runs = []
    for d, (view, counts, buffer) in enumerate(zip(views, slots, buffers, strict=True)):
        p, at = view.packing, 0
        for kind, pages, count in zip(p.kinds, p.kind_pages, counts, strict=True):
            if count:
                width = count * pages * p.page
                places = []
                for x in view.assemble(buffer[:, at : at + width], kind, count):
                    # What varies along different axes stays apart: each result has the type of its own buffer.
                    key = (type(view), view.dtype, x.shape[1:], varying(buffer))
                    batch = batches.setdefault(key, [])
                    places.append((key, first := sum(len(b) for b in batch), first + len(x)))
                    batch.append(x)
                at += width
                runs.append((d, kind, places))
    of_type = {(type(view), view.dtype): view for view in views}
    done = {key: of_type[key[:2]].orthogonalize(jnp.concatenate(b), operands) for key, b in batches.items()}
    pieces: list[list[jax.Array]] = [[] for _ in views]
    for d, kind, places in runs:
        pieces[d].append(views[d].disassemble([done[key][first:last] for key, first, last in places], kind))
    return [_fill(*of_domain) for of_domain in zip(pieces, views, buffers, strict=True)]


def _fill(pieces: list[jax.Array], view: View, buffer: jax.Array) -> jax.Array:
    """The pieces side by side, padded to the capacity of the exchange."""
    used = sum(piece.shape[1] for piece in pieces)
    width = view.packing.capacity * view.packing.page - used
    filler = jnp.zeros_like(buffer, shape=(buffer.shape[0], width), dtype=view.returned)
    return jnp.concatenate([*pieces, filler], axis=1) if pieces else filler
