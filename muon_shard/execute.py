"""Runs a plan: pack pages → exchange in → one switch over programs → exchange out → share over free axes → unpack.

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

from muon_shard.layout import Kind, Layout, MeshAxes, spec_entries
from muon_shard.orthogonalizer import Orthogonalizer
from muon_shard.packing import Packing
from muon_shard.plan import Domain, MeshPlan
from muon_shard.shardings import AnyMesh, axis_types, only_axes, partition_spec
from muon_shard.transports import take_pages


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
        One array per leaf: same shape and sharding, `out_dtype` of the leaf.
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
    specs = tuple(partition_spec(leaf.layout.spec) for leaf in plan.leaves)
    run = jax.shard_map(body, mesh=mesh, in_specs=(PartitionSpec(), *specs), out_specs=specs, check_vma=False)
    # On mixed axes a dimension over a tuple of axes would come back without its Auto part.
    return jax.jit(run, out_shardings=tuple(NamedSharding(mesh, spec) for spec in specs))


def _match_type(x: jax.Array, layout: Layout, mesh: AnyMesh) -> jax.Array:
    """Explicit axes want the argument's type to equal in_specs; Auto axes need nothing."""
    explicit = [name for name, kind in axis_types(mesh).items() if kind == AxisType.Explicit]
    return reshard_typed(x, partition_spec(only_axes(layout.spec, explicit)))


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
    """What every device does with its local shards."""
    buffers = []
    for domain in plan.domains:
        p = domain.packing
        pool = _pack([shards[i] for i in domain.leaves], [plan.leaves[i].layout for i in domain.leaves], p)
        table = _of_device(_of_device(p.tables.send, p.mesh_axes, p.rows), p.mesh_axes, p.shared)
        buffers.append(domain.carrier.bring(pool, table, p.exchange_axes))
    outs = _run_programs(plan, operands, buffers)
    updates: dict[int, jax.Array] = {}
    for domain, out in zip(plan.domains, outs, strict=True):
        back = domain.carrier.back(out, domain.packing.exchange_axes)
        pages, table = _share(back.reshape(-1, domain.packing.page), domain.packing)
        layouts = [plan.leaves[i].layout for i in domain.leaves]
        updates |= dict(zip(domain.leaves, _unpack(pages, table, layouts, domain.packing), strict=True))
    return tuple(updates[i] for i in range(len(shards)))


def _pack(shards: Sequence[jax.Array], layouts: Sequence[Layout], packing: Packing) -> jax.Array:
    """The local shards as pages, [pool pages, page]."""
    flat = []
    for x, layout in zip(shards, layouts, strict=True):
        rows = x.transpose(layout.order).reshape(layout.count, layout.kind.elements)
        flat.append(jnp.pad(rows, ((0, 0), (0, -layout.kind.elements % packing.page))).reshape(-1, packing.page))
    return jnp.concatenate(flat)


def _unpack(pages: jax.Array, table: Any, layouts: Sequence[Layout], packing: Packing) -> list[jax.Array]:
    """Local shards from the pages that `table` lists in pool order; leaf by leaf, so that every byte is copied once."""
    shards, at = [], 0
    for layout, (kind, count) in zip(layouts, packing.leaves, strict=True):
        end = at + count * packing.kind_pages[kind]
        rows = take_pages(pages, table[at:end]).reshape(count, -1)[:, : layout.kind.elements]
        at = end
        x = rows.reshape([layout.local_shape[d] for d in layout.order])
        shards.append(x.transpose(np.argsort(layout.order)))
    return shards


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


def _run_programs(plan: MeshPlan, operands: tuple[jax.Array, ...], buffers: list[jax.Array]) -> list[jax.Array]:
    branches = [
        functools.partial(_program, plan.domains, slots, plan.orthogonalizer, operands) for slots in plan.programs
    ]
    if len(branches) == 1:
        return branches[0](buffers)
    me = lax.axis_index(tuple(name for name, _ in plan.mesh_axes))
    return lax.switch(jnp.asarray(plan.program_of, jnp.int32)[me], branches, buffers)


def _program(
    domains: Sequence[Domain],
    slots: Sequence[tuple[int, ...]],
    orthogonalizer: Orthogonalizer,
    operands: tuple[jax.Array, ...],
    buffers: list[jax.Array],
) -> list[jax.Array]:
    """Reassembles the owned matrices, orthogonalizes equal canonical shapes in one batch, takes them apart."""
    batches: dict[tuple[Any, ...], list[jax.Array]] = {}
    runs = []
    for domain, counts, buffer in zip(domains, slots, buffers, strict=True):
        p, at = domain.packing, 0
        for kind, pages, count in zip(p.kinds, p.kind_pages, counts, strict=True):
            if count:
                width = count * pages * p.page
                x = _assemble(buffer[:, at : at + width], kind, count, p)
                at += width
                batch = batches.setdefault((*kind.canonical, x.dtype), [])
                runs.append((domain, kind, count, x.dtype, sum(len(b) for b in batch)))
                batch.append(x)
    done = {key: orthogonalizer(jnp.concatenate(batch), *operands) for key, batch in batches.items()}
    pieces: dict[int, list[jax.Array]] = {id(domain): [] for domain in domains}
    for domain, kind, count, dtype, start in runs:
        y = done[*kind.canonical, dtype][start : start + count].astype(domain.out_dtype)
        pieces[id(domain)].append(_disassemble(y, kind, domain.packing))
    return [_fill(pieces[id(domain)], domain) for domain in domains]


def _fill(pieces: list[jax.Array], domain: Domain) -> jax.Array:
    """The pieces side by side, padded to the capacity of the exchange."""
    p = domain.packing
    used = sum(piece.shape[1] for piece in pieces)
    filler = jnp.zeros((p.ways(p.exchange), p.capacity * p.page - used), domain.out_dtype)
    return jnp.concatenate([*pieces, filler], axis=1) if pieces else filler


def _grid(kind: Kind, packing: Packing) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Sizes of the exchange axes, and the order of [exchange axes…, matrix, block dims…] that places blocks."""
    sizes = dict(packing.mesh_axes)
    order = [len(packing.exchange)]
    for d, axes in enumerate(kind.axes):
        order += [*(packing.exchange.index(a) for a in axes), len(packing.exchange) + 1 + d]
    return tuple(sizes[a] for a in packing.exchange), tuple(order)


def _assemble(received: jax.Array, kind: Kind, count: int, packing: Packing) -> jax.Array:
    """Blocks from all peers [peers, count · padded block] → whole matrices [count, m, n], m ≤ n."""
    ways, order = _grid(kind, packing)
    blocks = received.reshape(-1, count, received.shape[1] // count)[:, :, : kind.elements]
    x = blocks.reshape(*ways, count, *kind.block).transpose(order).reshape(count, *kind.shape)
    return x.mT if kind.shape[0] > kind.shape[1] else x


def _disassemble(y: jax.Array, kind: Kind, packing: Packing) -> jax.Array:
    """Inverse of `_assemble`."""
    ways, order = _grid(kind, packing)
    y = y.mT if kind.shape[0] > kind.shape[1] else y
    placed = (*ways, y.shape[0], *kind.block)
    blocks = y.reshape([placed[i] for i in order]).transpose(np.argsort(order))
    blocks = blocks.reshape(-1, y.shape[0], kind.elements)
    padded = jnp.pad(blocks, ((0, 0), (0, 0), (0, -kind.elements % packing.page)))
    return padded.reshape(blocks.shape[0], -1)
