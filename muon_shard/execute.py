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

from muon_shard.blocks import Blocks
from muon_shard.gram_space import GramMatrices
from muon_shard.layout import Layout, MeshAxes, spec_entries
from muon_shard.packing import Packing
from muon_shard.plan import Domain, MeshPlan, PlannedLeaf, Wave
from muon_shard.shardings import AnyMesh, axis_types, only_axes, partition_spec
from muon_shard.transports import Gram, take_pages
from muon_shard.views import View


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
        leaves: the momentum, one array per `plan.leaves`, on Auto, Explicit or mixed axes.
        operands: arrays handed to the orthogonalizer on every device (coefficients, eps).

    Returns:
        One array per leaf: same shape, the sharding of the leaf's `update`, its `out_dtype`.
    """
    operands = tuple(jnp.asarray(x) for x in operands)
    if mesh is not None:
        leaves = [_match_type(x, leaf.layout, mesh) for x, leaf in zip(leaves, plan.leaves, strict=True)]
        operands = tuple(_replicated(x, mesh) for x in operands)
    return list(_compiled(plan, mesh)(operands, *leaves))


@functools.lru_cache(maxsize=64)
def _compiled(plan: MeshPlan, mesh: AnyMesh | None) -> Callable[..., tuple[jax.Array, ...]]:
    """One jitted function per plan, so that eager updates compile once; inside `jit` it is inlined."""
    body = functools.partial(_body, plan)
    if mesh is None:
        return jax.jit(body)
    specs = tuple(partition_spec(leaf.layout.leaf_spec) for leaf in plan.leaves)
    outs = tuple(partition_spec(leaf.update.leaf_spec) for leaf in plan.leaves)
    run = jax.shard_map(body, mesh=mesh, in_specs=(PartitionSpec(), *specs), out_specs=outs, check_vma=False)
    # On mixed axes a dimension over a tuple of axes would come back without its Auto part.
    return jax.jit(run, out_shardings=tuple(NamedSharding(mesh, spec) for spec in outs))


def _match_type(x: jax.Array, layout: Layout, mesh: AnyMesh) -> jax.Array:
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

    With two waves under way, so that one can talk while the other computes, the third begins when the results of the
    first are there. Left to itself XLA begins all at once, and keeps the buffers of all.
    """
    layouts = [leaf.layout for leaf in plan.leaves]
    blocks = [
        x.reshape(layout.local_shape).transpose(layout.order).reshape(layout.count, layout.kind.elements)
        for x, layout in zip(shards, layouts, strict=True)
    ]
    updates: list[list[jax.Array]] = [[] for _ in shards]
    starts: list[Any] = [0] * plan.under_way
    for wave, start in zip(plan.waves, starts, strict=False):
        parts = _wave(plan, wave, operands, blocks, start)
        starts.append(_after(parts))  # seen by the loop, which takes them in turn
        for leaf, part in parts:
            updates[leaf].append(part)
    return tuple(_shard(jnp.concatenate(parts, axis=1), leaf) for parts, leaf in zip(updates, plan.leaves, strict=True))


def _after(parts: list[tuple[int, jax.Array]]) -> jax.Array:
    """Zero, but only when all parts are there: XLA on CPU takes no notice of `optimization_barrier`."""
    seen = [jnp.isnan(part[0, 0, 0]).astype(jnp.int32) for _, part in parts]
    return jnp.minimum(sum(seen), 0)


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
    plan: MeshPlan, wave: Wave, operands: tuple[jax.Array, ...], blocks: list[jax.Array], start: Any
) -> list[tuple[int, jax.Array]]:
    """The updates of one wave, leaf by leaf, as blocks of the matrices that are in it; see `_shard`."""
    views = [_view(plan, domain) for domain in wave.domains]
    buffers, kept = [], []
    for domain, view in zip(wave.domains, views, strict=True):
        p = domain.packing
        pool, mine = view.pack([blocks[leaf][first:last] for leaf, first, last in domain.spans])
        table = _of_device(_of_device(p.tables.send, p.mesh_axes, p.rows), p.mesh_axes, p.shared)
        buffers.append(domain.carrier.bring(_not_before(start, pool), table, p.exchange_axes))
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
        rows = lax.all_gather(flat, axes)
        ends = np.cumsum([blocks[i].size for i in positions])[:-1]
        for i, of_leaf in zip(positions, jnp.split(rows, ends, axis=1), strict=True):
            whole[i] = of_leaf.reshape(-1, *blocks[i].shape)
    return whole


def _not_before(start: Any, pool: jax.Array) -> jax.Array:
    """The same pool, once `start` is known to be zero."""
    if isinstance(start, int):
        return pool
    return lax.dynamic_slice_in_dim(jnp.pad(pool, ((0, 1), (0, 0))), start, len(pool))


def _view(plan: MeshPlan, domain: Domain) -> View:
    view = GramMatrices if isinstance(domain.carrier, Gram) else Blocks
    return view(domain.packing, plan.orthogonalizer, domain.dtype, domain.out_dtype)


def _share(pages: jax.Array, packing: Packing) -> tuple[jax.Array, Any]:
    """Results of the matrices owned in this replica → all results, and the table that puts them in pool order.

    Compacted before the gather: the exchange buffer is padded to the busiest peer, the gather need not be.
    """
    tables = packing.tables
    if not packing.shared:
        return pages, _of_device(_chain(tables.compact, tables.back), packing.mesh_axes, packing.rows)
    mine = _of_device(_of_device(tables.compact, packing.mesh_axes, packing.rows), packing.mesh_axes, packing.shared)
    gathered = lax.all_gather(take_pages(pages, mine), packing.shared, axis=0, tiled=True)
    return gathered, _of_device(tables.back, packing.mesh_axes, packing.rows)


def _chain(compact: np.ndarray, back: np.ndarray) -> np.ndarray:
    """Both tables in one, for a single replica."""
    return np.take_along_axis(compact[:, 0], back, axis=1)


def _of_device(table: Any, mesh_axes: MeshAxes, axes: tuple[str, ...]) -> Any:
    """The part of a table, by its leading dimension, for this device's coordinate over `axes`; static if single."""
    if not axes:
        return table[0]
    return jnp.asarray(table)[lax.axis_index(axes)]


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
                    key = (type(view), view.dtype, x.shape[1:])
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
    filler = jnp.zeros((buffer.shape[0], view.packing.capacity * view.packing.page - used), view.returned)
    return jnp.concatenate([*pieces, filler], axis=1) if pieces else filler
