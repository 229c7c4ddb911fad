"""Fused parameters against `optax.contrib.muon` on one device, on the tree where they are split by hand."""

import functools

import jax
import numpy as np
import optax
import pytest
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P
from layouts import Case, Leaf
from optax.contrib import MuonDimensionNumbers as Dims
from test_transform import TOLERANCE, assert_sharded_like, largest_difference

import muon_shard
from muon_shard import Blocks
from muon_shard.audit import audit
from muon_shard.transports import TRANSPORTS

FUSED = {
    "one_device": Case(
        {"x": 1},
        {
            "qkv": Leaf((24, 40), P(), Blocks(1, (24, 8, 8))),
            "rows": Leaf((40, 24), P(), Blocks(0, (24, 8, 8))),
            "heads": Leaf((24, 40), P(), Blocks(1, 8)),
        },
    ),
    "across": Case(  # blocks end within shards
        {"fsdp": 4, "tensor": 2},
        {
            "qkv": Leaf((24, 40), P("fsdp", "tensor"), Blocks(1, (21, 13, 6))),
            "rows": Leaf((40, 24), P(("fsdp", "tensor")), Blocks(0, (21, 13, 6))),
            "swapped": Leaf((40, 16), P(None, ("tensor", "fsdp")), Blocks(0, (24, 8, 8), reduction_axis=1, output_axis=0)),
            "heads": Leaf((24, 48), P(None, ("fsdp", "tensor")), Blocks(-1, 4)),
            "gate_up": Leaf((16, 64), P("fsdp", "tensor"), Blocks(1, (1, 1), interleaved=True)),
            "side_by_side": Leaf((16, 64), P("tensor", "fsdp"), Blocks(1, (32, 32))),
            "plain": Leaf((24, 13), P("fsdp")),
        },
    ),
    "hsdp": Case(
        {"replica": 2, "fsdp": 4},
        {
            "grouped": Leaf((24, 48), P("fsdp"), Blocks(1, (8, 2, 2), interleaved=True)),
            "grouped_across": Leaf((24, 48), P(None, "fsdp"), Blocks(1, (16, 4, 4), interleaved=True)),
            "heads": Leaf((24, 40), P("fsdp"), Blocks(1, 8)),
            "heads_apart": Leaf((24, 40), P(None, "fsdp"), Blocks(1, 5)),
            "heads_over_both": Leaf((40, 24), P(("fsdp", "replica")), Blocks(0, 5)),
            "gate_up": Leaf((64, 16), P("fsdp"), Blocks(0, (1, 1), interleaved=True)),
            "plain": Leaf((24, 16), P("fsdp")),
            "bias": Leaf((16,), P(), None),
        },
    ),
    "stacks": Case(
        {"replica": 2, "fsdp": 4},
        {
            "layers": Leaf((3, 16, 40), P(None, None, "fsdp"), Blocks(2, (24, 8, 8), False, 1, 2)),
            "sharded": Leaf((4, 16, 40), P("fsdp"), Blocks(-1, (24, 8, 8), False, -2, -1)),
            "behind": Leaf((16, 3, 48), P("fsdp"), Blocks(2, (2, 1), True, 0, 2)),
            "experts": Leaf((4, 16, 32), P("fsdp", None, "replica"), Blocks(2, 8, False, 1, 2)),
        },
    ),
    "merged": Case(
        {"fsdp": 4, "tensor": 2},
        {
            "head_axis": Leaf((32, 8, 6), P("fsdp", "tensor"), Blocks(1, (5, 2, 1), False, 0, (1, 2))),
            "each_head": Leaf((32, 8, 6), P("fsdp", "tensor"), Blocks(1, 1, False, 0, (1, 2))),
            "within_heads": Leaf((32, 8, 6), P("fsdp", "tensor"), Blocks(2, (4, 2), False, 0, (1, 2))),
            "halves_of_heads": Leaf((32, 8, 6), P("fsdp", None, "tensor"), Blocks(2, 3, False, 0, (1, 2))),
            "rope": Leaf((32, 8, 6), P("fsdp", "tensor"), Blocks(2, (1, 1), True, 0, (1, 2))),
            "from_heads": Leaf((8, 6, 32), P("tensor", None, "fsdp"), Blocks(0, (5, 3), False, (0, 1), 2)),
            "turned": Leaf((6, 8, 32), P(None, "fsdp", "tensor"), Blocks(1, (3, 1), True, (1, 0), 2)),
        },
    ),
    "odd": Case(
        {"x": 8},
        {
            "whole": Leaf((24, 16), P("x"), Blocks(1, (16,))),
            "whole_head": Leaf((24, 16), P("x"), Blocks(1, 16)),
            "vector": Leaf((16, 24), P("x"), Blocks(1, (23, 1))),
            "vectors": Leaf((16, 8), P("x"), Blocks(0, 1)),
            "tall_in_wide": Leaf((16, 40), P("x"), Blocks(1, (24, 9, 7))),
            "one_row": Leaf((1, 24), P(None, "x"), Blocks(1, (20, 4))),
            "many": Leaf((8, 24), P(None, "x"), Blocks(1, (5, 1, 5, 1, 5, 7))),
        },
    ),
}


def places(shape, dims):
    """Along the axis, the indices of each block."""
    extent = shape[dims.axis]
    sizes = [dims.sizes] * (extent // dims.sizes) if isinstance(dims.sizes, int) else dims.sizes
    period = np.repeat(np.arange(len(sizes)), sizes)
    blocks = np.tile(period, extent // len(period))
    return [np.flatnonzero(blocks == j) for j in range(len(sizes))]


def split(tree, case):
    """The same tree with a leaf for each block."""
    out = {}
    for name, x in tree.items():
        dims = case.leaves[name].dims
        if isinstance(dims, Blocks):
            blocks = places(x.shape, dims)
            out |= {(name, j): np.take(np.asarray(x), at, dims.axis) for j, at in enumerate(blocks)}
        else:
            out[name, 0] = np.asarray(x)
    return out


def fuse(parts, case):
    out = {}
    for name, leaf in case.leaves.items():
        if not isinstance(leaf.dims, Blocks):
            out[name] = np.asarray(parts[name, 0])
            continue
        out[name] = np.empty(leaf.shape, parts[name, 0].dtype)
        whole = np.moveaxis(out[name], leaf.dims.axis, 0)
        for j, at in enumerate(places(leaf.shape, leaf.dims)):
            whole[at] = np.moveaxis(np.asarray(parts[name, j]), leaf.dims.axis, 0)
    return out


def dims_by_hand(case):
    out = {}
    for name, j in split(case.host(), case):
        dims = case.leaves[name].dims
        out[name, j] = Dims(dims.reduction_axis, dims.output_axis) if isinstance(dims, Blocks) else dims
    return out


def by_hand(case, steps=1, dtype="float32", **arguments):
    """Updates of every step of `optax.contrib.muon` on one device, fused again."""
    tx = optax.contrib.muon(**{"learning_rate": 0.1} | arguments, muon_weight_dimension_numbers=dims_by_hand(case))
    params, update = split(case.host(dtype=dtype), case), jax.jit(tx.update)
    state, out = tx.init(params), []
    for step in range(steps):
        updates, state = update(split(case.host(step + 1, dtype), case), state, params)
        out.append(fuse(updates, case))
    return out


@functools.lru_cache
def oracle(name):
    return by_hand(FUSED[name], 3)


def ours(case, axis_type="auto", steps=1, dtype="float32", **arguments):
    mesh = case.make_mesh(axis_type)
    params = case.put(case.host(dtype=dtype), mesh)
    tx = muon_shard.muon(**{"learning_rate": 0.1} | arguments, muon_weight_dimension_numbers=case.dims)
    shardings = (jax.tree.map(lambda x: x.sharding, params), None) if axis_type == "mixed" else None
    state, update, out = tx.init(params), jax.jit(tx.update, out_shardings=shardings), []
    for step in range(steps):
        updates, state = update(case.put(case.host(step + 1, dtype), mesh), state, params)
        assert_sharded_like(updates, params)
        out.append(updates)
    return out


def check_all(got, want):
    for g, w in zip(got, want, strict=True):
        for name in w:
            assert largest_difference(g[name], w[name]) <= TOLERANCE, name


def only(case, *names):
    return Case(case.mesh, {name: case.leaves[name] for name in names})


@pytest.mark.parametrize("axis_type", ["auto", "explicit", "mixed"])
@pytest.mark.parametrize("name", FUSED)
def test_updates_are_those_of_parameters_split_by_hand(name, axis_type):
    check_all(ours(FUSED[name], axis_type, 3), oracle(name))
