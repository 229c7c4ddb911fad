import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from muon_shard.layout import make_layout, why_illegal
from muon_shard.logical import Cut, Parts

MESH = (("replica", 2), ("fsdp", 4), ("tensor", 2), ("one", 1))


@pytest.mark.parametrize(
    ("shape", "spec", "rows", "cols", "text"),
    [
        ((8, 6), P("fsdp", "tensor"), (0,), (1,), "G[M_fsdp, N_tensor] over {replica}"),
        ((8, 6), P(), (0,), (1,), "G[M, N] over {replica, fsdp, tensor}"),
        ((3, 8, 6), P(None, ("fsdp", "tensor")), (1,), (2,), "G[L, M_fsdp+tensor, N] over {replica}"),
        ((8, 8, 6), P(("replica", "fsdp"), None, "tensor"), (1,), (2,), "G[E_replica+fsdp, M, N_tensor]"),
        ((8, 4, 6), P("one", "fsdp", None), (0,), (1, 2), "G[M, N0_fsdp, N1] over {replica, tensor}"),
    ],
)
def test_printed_form(shape, spec, rows, cols, text):
    assert str(make_layout(shape, spec, rows, cols, MESH)) == text


@pytest.mark.parametrize(
    ("cut", "spec", "text"),
    [
        (Cut(1, (6, 2)), P("fsdp", "tensor"), "G[M_fsdp, N_tensor:6|2] over {replica}"),
        (Cut(0, (2, 1, 1)), P("fsdp"), "G[M_fsdp:2×(2|2×1), N] over {replica, tensor}"),
        (Cut(1, (4, 4)), P("fsdp", "tensor"), "G[M_fsdp, (E_tensor N)] over {replica}"),
        (Cut(1, (4, 4)), P(None, "fsdp"), "G[M, N_fsdp:2×4] over {replica, tensor}"),
        (Cut(1, (1, 1)), P("tensor", "fsdp"), "G[M_tensor, (N_fsdp L)] over {replica}"),
        (Cut(1, (2, 2)), P("tensor", ("replica", "fsdp")), "G[M_tensor, N_replica+fsdp:2×(2×2)]"),
        (Cut(1, (2, 2)), P("fsdp", "tensor"), "G[M_fsdp, (N0_tensor L N1)] over {replica}"),
    ],
)
def test_blocks_are_printed(cut, spec, text):
    layout = make_layout((8, 8), spec, (0,), (1,), MESH, cut)
    assert str(layout) == text
    assert layout.leaf_shape == (8, 8) and layout.problems == len(cut.sizes)
    assert layout.leaf_spec == make_layout((8, 8), spec, (0,), (1,), MESH).spec


def test_blocks_of_merged_dimensions():
    kind = make_layout((6, 4, 5, 2), P(), (0,), (1, 2, 3), (), Cut(2, (3, 1, 1))).kind
    assert kind.parts == Parts(1, 4, (6, 2, 2)) and kind.problems == (((6, 24), 1), ((6, 8), 2))


def test_axes_have_roles():
    layout = make_layout((4, 3, 16, 8), P("tensor", None, "fsdp"), (2,), (3,), MESH)
    assert (layout.exchange, layout.batch_axes, layout.free) == (("fsdp",), ("tensor",), ("replica",))
    assert (layout.count, layout.matrices, layout.kind.shape, layout.kind.block) == (6, 12, (16, 8), (4, 8))


@pytest.mark.parametrize(
    ("shape", "spec", "text"),
    [
        ((32, 6), P("fsdp", "tensor"), "G[M_fsdp+replica, N_tensor]"),
        ((4, 6), P("fsdp", "tensor"), "G[M_fsdp, N_tensor] over {replica}"),  # 2 divides neither 1 nor 3
        ((4, 8), P("fsdp", "one"), "G[M_fsdp, N_replica+tensor]"),
        ((6, 8), P(), "G[M_tensor, N_fsdp+replica]"),  # the large axis first, on the long side
        ((2, 8, 8), P(None, "fsdp"), "G[E_tensor, M_fsdp+replica, N]"),
        ((16, 8, 8), P(), "G[E_fsdp+replica+tensor, M, N]"),
        ((16, 64, 8), P("tensor", "fsdp"), "G[E_tensor+replica, M_fsdp, N]"),
        ((8, 0), P("fsdp"), "G[M_fsdp+replica, N] over {tensor}"),
        ((1, 1), P(), "G[M, N] over {replica, fsdp, tensor}"),
    ],
)
def test_over_replicas(shape, spec, text):
    rank = len(shape)
    layout = make_layout(shape, spec, (rank - 2,), (rank - 1,), MESH)
    over = make_layout(shape, layout.spec_over_replicas, (rank - 2,), (rank - 1,), MESH)
    assert str(over) == text and over.spec_over_replicas == over.spec
    assert all(more[: len(axes)] == axes for more, axes in zip(over.spec, layout.spec, strict=True))  # the minor part


def test_orientation_is_canonical():
    tall, wide = (make_layout(s, P(), (0,), (1,), ()) for s in ((8, 4), (4, 8)))
    assert tall.kind.canonical == wide.kind.canonical == (4, 8)


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        (P("fsdp", "tensor"), ""),
        (P(None, None, "fsdp"), "3 entries"),
        (P("nonesuch"), "unknown mesh axes"),
        (P("fsdp", "fsdp"), "shards two dimensions"),
        (P(None, "fsdp"), "dimension 1 of size 6 does not divide"),
    ],
)
def test_why_illegal(spec, reason):
    got = why_illegal((8, 6), list(spec) if spec == P("fsdp", "fsdp") else spec, MESH) if spec else ""
    assert (reason in got) if reason else got == ""


def test_order_is_a_permutation():
    layout = make_layout((4, 3, 16, 8), P(), (2, 0), (3,), ())
    assert np.array_equal(np.sort(layout.order), np.arange(4)) and layout.order == (1, 2, 0, 3)
