"""Fused parameters against `optax.contrib.muon` on one device, on the tree where they are split by hand."""

import dataclasses
import functools
import math

import jax
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P
from layouts import Case, Leaf
from optax.contrib import MuonDimensionNumbers as Dims
from test_transform import TOLERANCE, assert_sharded_like, largest_difference

import muon_shard
from muon_shard import Blocks
from muon_shard.audit import audit
from muon_shard.layout import spec_entries
from muon_shard.logical import Cut
from muon_shard.shardings import only_axes, partition_spec
from muon_shard.simulate import Host
from muon_shard.transports import TRANSPORTS

FUSED = {
    "one_device": Case(
        {"x": 1},
        {
            "qkv": Leaf((24, 40), P(), Blocks(1, (24, 8, 8))),
            "rows": Leaf((40, 24), P(), Blocks(0, (24, 8, 8))),
            "heads": Leaf((24, 24), P(), Blocks(1, 8)),
        },
    ),
    "across": Case(  # blocks end within shards
        {"fsdp": 4, "tensor": 2},
        {
            "qkv": Leaf((24, 40), P("fsdp", "tensor"), Blocks(1, (21, 13, 6))),
            "rows": Leaf((40, 24), P(("fsdp", "tensor")), Blocks(0, (21, 13, 6))),
            "swapped": Leaf(
                (40, 16), P(None, ("tensor", "fsdp")), Blocks(0, (24, 8, 8), reduction_axis=1, output_axis=0)
            ),
            "heads": Leaf((24, 48), P(None, ("fsdp", "tensor")), Blocks(-1, 16)),
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
            "heads": Leaf((24, 24), P("fsdp"), Blocks(1, 8)),
            "heads_apart": Leaf((24, 40), P(None, "fsdp"), Blocks(1, 10)),
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
            "each_head": Leaf((32, 4, 6), P("fsdp", "tensor"), Blocks(1, 1, False, 0, (1, 2))),
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
            "whole_head": Leaf((24, 16), P("x"), Blocks(1, 16)),
            "vector": Leaf((16, 24), P("x"), Blocks(1, (23, 1))),
            "vectors": Leaf((3, 8), P(None, "x"), Blocks(0, 1)),
            "tall_in_wide": Leaf((16, 40), P("x"), Blocks(1, (24, 9, 7))),
            "one_row": Leaf((1, 24), P(None, "x"), Blocks(1, (20, 4))),
            "many": Leaf((8, 16), P(None, "x"), Blocks(1, (5, 1, 5, 5))),
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
    return by_hand(FUSED[name], 2)


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


@dataclasses.dataclass(frozen=True)
class Few(Case):
    of: Case

    def host(self, seed=0, dtype="float32"):
        host = self.of.host(seed, dtype)
        return {name: host[name] for name in self.leaves}


def only(case, *names):
    """The case with these leaves alone, and the values they have in it."""
    return Few(case.mesh, {name: case.leaves[name] for name in names}, case)


AXIS_TYPES = [
    pytest.param(name, kind, marks=() if kind == ("explicit" if name == "across" else "auto") else pytest.mark.slow)
    for name in FUSED
    for kind in ("auto", "explicit", "mixed")
]


@pytest.mark.parametrize(("name", "axis_type"), AXIS_TYPES)
def test_updates_are_those_of_parameters_split_by_hand(name, axis_type):
    check_all(ours(FUSED[name], axis_type, 2), oracle(name))


FEW = only(FUSED["across"], "qkv", "gate_up")


@pytest.mark.parametrize(
    "arguments",
    [
        {"weight_decay": 0.1, "consistent_rms": 0.2},
        {"adaptive": True, "nesterov": False},
        {"preconditioning": "aol", "ns_coeffs": "dion"},
    ],
    ids=lambda a: ",".join(a),
)
def test_arguments_mean_what_they_mean_for_each_block(arguments):
    check_all(ours(FEW, **arguments), by_hand(FEW, **arguments))


@pytest.mark.parametrize(("dtype", "bound"), [("bfloat16", 0.1), ("complex64", TOLERANCE)])
def test_every_dtype(dtype, bound):
    case = only(FEW, "qkv")
    got, want = ours(case, dtype=dtype)[0], by_hand(case, dtype=dtype)[0]
    for name in case.leaves:
        g, w = (np.asarray(x, "complex128") for x in (got[name], want[name]))
        assert np.linalg.norm(g - w) <= bound * np.linalg.norm(w), name


SERVING = [name for name in TRANSPORTS if name not in ("local", "gram")]


@pytest.mark.parametrize("transport", SERVING)
def test_every_transport_but_gram(transport):
    """And the planned collectives, no more: neither blocks nor their scales move anything."""
    case, options = only(FUSED["across"], "qkv", "gate_up"), muon_shard.PlanOptions(transport=transport)
    params = case.put(case.host(), case.make_mesh())
    plan = muon_shard.make_plan(params, muon_weight_dimension_numbers=case.dims, options=options)
    tx = muon_shard.muon(0.1, muon_weight_dimension_numbers=case.dims, plan_options=options)
    state = tx.init(params)
    compiled = jax.jit(tx.update).lower(params, state, params).compile()
    found = audit(compiled, plan)
    assert found.ok, str(found)
    grads = case.put(case.host(1), case.make_mesh())
    check_all([compiled(grads, state, params)[0]], [{name: oracle("across")[0][name] for name in case.leaves}])


@pytest.mark.parametrize("options", [{"max_wave_bytes": 1}, {"max_programs": 1, "dedup_axes": ()}], ids=str)
def test_waves_and_merged_programs(options):
    case = only(FUSED["hsdp"], "grouped", "grouped_across", "heads_apart", "plain")
    got = ours(case, plan_options=muon_shard.PlanOptions(**options))
    check_all(got, [{name: oracle("hsdp")[0][name] for name in case.leaves}])


def plan_of(case, **options):
    mesh = AbstractMesh(tuple(case.mesh.values()), tuple(case.mesh))
    return muon_shard.make_plan(
        case.abstract(mesh),
        muon_weight_dimension_numbers=case.dims,
        options=muon_shard.PlanOptions(**options),
    )


def test_gram_matrices_are_refused_by_name_unless_blocks_lie_apart():
    case = Case({"fsdp": 8}, {"plain": Leaf((8, 64), P("fsdp")), "qkv": Leaf((8, 64), P("fsdp"), Blocks(1, (40, 24)))})
    with pytest.raises(ValueError, match=r"1 leaf.*\n\* params\['qkv'\].*'gram' cannot serve it: its blocks.*Legal"):
        plan_of(case, transport="gram")
    apart = Case({"fsdp": 8}, {"heads": Leaf((64, 16), P("fsdp"), Blocks(1, 8))})
    (domain,) = plan_of(apart, transport="gram").parts[0].domains
    assert domain.packing.kinds[0].canonical == (8, 64)


@pytest.mark.parametrize("name", FUSED)
def test_a_plan_costs_what_the_blocks_cost(name):
    case = FUSED[name]
    plan = plan_of(case, topology="cpu")
    by_hand = muon_shard.make_plan(
        split(case.host(), case),
        muon_weight_dimension_numbers=dims_by_hand(case),
        options=muon_shard.PlanOptions(topology="cpu"),
    )
    assert plan.total_flops == by_hand.total_flops
    assert sum(leaf.layout.problems for leaf in plan.parts[0].leaves) == sum(
        leaf.layout.problems for leaf in by_hand.parts[0].leaves
    )
    assert muon_shard.Plan.from_json(plan.to_json()) == plan
    assert {r["shape"] for r in plan.to_json()["groups"]} <= {leaf.shape for leaf in case.leaves.values()}
    timelines = [str(muon_shard.simulate(plan, "tpu-v5p", host=h)) for h in (None, Host(25, "shape"), Host())]
    assert len(set(timelines)) == 3


def test_the_table_shows_the_blocks():
    plan = plan_of(FUSED["hsdp"])
    text, layouts = str(plan), {g["name"]: g["layout"] for g in plan.to_json()["groups"]}
    assert layouts["grouped"] == "G[M_fsdp, N:4×(8|2×2)] over {replica}" and "N:4×(8|2×2)]" in text
    assert layouts["grouped_across"] == "G[M, N_fsdp:2×(16|2×4)] over {replica}"
    assert layouts["heads_over_both"] == "G[(E_fsdp+replica M), N]"
    assert f"Muon plan: {3 + 3 + 3 + 4 + 8 + 2 + 1} matrices in 7 leaves" in text


def test_plots_count_blocks():
    plot = pytest.importorskip("muon_shard.plot")
    (part,) = plan_of(only(FUSED["hsdp"], "grouped", "plain")).parts
    loads = plot.measure(part)
    found = dict(zip(loads.shapes, loads.matrices, strict=True))
    assert found == {(24, 32): 1, (8, 24): 2, (16, 24): 1}
    assert (loads.owned.sum(1) + loads.filler == part.load).all()


def test_equal_blocks_within_shards_are_matrices_of_their_own():
    """Heads that no shard cuts need no exchange over the axis that shards them, and have owners of their own."""
    sharded = Case({"tensor": 8}, {"wq": Leaf((64, 128), P(None, "tensor"), Blocks(1, 16))})
    plan = plan_of(sharded)
    assert not plan.collectives and plan.balance == 1
    rows = Case({"fsdp": 8}, {"wq": Leaf((64, 128), P("fsdp"), Blocks(1, 16))})
    assert plan_of(rows, topology="cpu").balance == 1


def test_one_block_is_the_whole():
    plans = [
        plan_of(Case({"x": 8}, {"w": Leaf((24, 16), P("x"), dims)}))
        for dims in (Dims(), Blocks(1, (16,)), Blocks(1, 16), Blocks(0, [24]), Blocks(0, (4,), interleaved=True))
    ]
    assert all(plan.parts == plans[0].parts for plan in plans)


@pytest.mark.parametrize(
    ("axis_type", "manual", "checked"),
    [("auto", None, False), ("explicit", None, True), ("auto", {"fsdp"}, True), ("explicit", {"fsdp"}, False)],
)
def test_inside_a_users_shard_map(axis_type, manual, checked):
    # Manual axes cut first, so where some are they must come first.
    case = only(FUSED["across"], "qkv", "rows", *(["swapped"] if manual is None else []))
    mesh = case.make_mesh(axis_type)
    params, grads = (case.put(case.host(seed), mesh) for seed in (0, 1))
    specs = {name: leaf.spec for name, leaf in case.leaves.items()}
    tx = muon_shard.muon(0.1, muon_weight_dimension_numbers=case.dims, param_shardings=specs)

    def step(params, grads):
        return tx.update(grads, tx.init(params), params)[0]

    axes = set(manual or mesh.axis_names)
    cut = {name: partition_spec(only_axes(spec_entries(spec, 2), list(axes))) for name, spec in specs.items()}
    mapped = jax.shard_map(step, mesh=mesh, in_specs=(cut, cut), out_specs=cut, axis_names=axes, check_vma=checked)
    check_all([jax.jit(mapped)(params, grads)], [{name: oracle("across")[0][name] for name in case.leaves}])


def test_a_users_function_sees_the_blocks():
    seen = []

    def spy(x):
        seen.append(x.shape)
        return x

    tx = muon_shard.scale_by_muon(weight_dimension_numbers=Blocks(1, (8, 8, 24)), orthogonalizer=spy)
    params = [np.random.default_rng(0).standard_normal((16, 40)).astype(np.float32)]
    updates, _ = tx.update(params, tx.init(params))
    assert sorted(seen) == [(1, 16, 24), (2, 8, 16)]
    np.testing.assert_allclose(updates[0] / params[0], (updates[0] / params[0])[0, 0], rtol=1e-5)


@pytest.mark.parametrize("poison", [0.0, np.nan])
def test_one_block_never_touches_another(poison):
    case = only(FUSED["across"], "qkv")
    good, bad = case.host(), {"qkv": case.host()["qkv"].copy()}
    bad["qkv"][:, 21:34] = poison
    tx = muon_shard.scale_by_muon(weight_dimension_numbers=case.dims)
    params = case.put(good, case.make_mesh())
    update = jax.jit(tx.update)
    want, got = (np.array(update(case.put(x, case.make_mesh()), tx.init(params))[0]["qkv"]) for x in (good, bad))
    of_block = got[:, 21:34]
    assert np.isnan(of_block).all() if poison else not of_block.any()
    got[:, 21:34] = want[:, 21:34]
    np.testing.assert_array_equal(got, want)


def cubic(x):
    """Quick to compile; every entry of the result depends on the whole matrix, which may lie either way."""
    return x @ x.mT @ x + x * (x * x).sum((-2, -1), keepdims=True)


def by_axes(x, dims, function):
    """A function of [batch, m, n] on a dense array, by dimension numbers."""
    rows, cols = (np.atleast_1d(axes) % x.ndim for axes in dims)
    order = [*(d for d in range(x.ndim) if d not in [*rows, *cols]), *rows, *cols]
    y = x.transpose(order).astype(np.float64)
    m, n = (int(np.prod([x.shape[d] for d in dims])) for dims in (rows, cols))
    return function(y.reshape(-1, m, n)).reshape(y.shape).transpose(np.argsort(order))


@st.composite
def fused_leaves(draw, mesh):
    """Any rank, matrix axes, spec, and blocks of any kind along any matrix axis."""
    rank = draw(st.integers(2, 4))
    order = draw(st.permutations(range(rank)))
    first = draw(st.integers(1, rank - 1))
    rows, cols = tuple(order[:first]), tuple(order[first : draw(st.integers(first + 1, rank))])
    spec: list[list[str]] = [[] for _ in range(rank)]
    for name in draw(st.lists(st.sampled_from(list(mesh)), unique=True)):
        spec[draw(st.integers(0, rank - 1))].append(name)
    shape = tuple(draw(st.integers(1, 3)) * math.prod(mesh[name] for name in names) for names in spec)
    axis, interleaved = draw(st.sampled_from(rows + cols)), draw(st.booleans())
    divisors = [d for d in range(1, shape[axis] + 1) if shape[axis] % d == 0]
    period = draw(st.sampled_from(divisors)) if interleaved else shape[axis]
    cuts = sorted(draw(st.sets(st.integers(1, period)))) if draw(st.booleans()) or interleaved else None
    sizes = draw(st.sampled_from(divisors)) if cuts is None else np.diff([0, *cuts, period]).tolist()
    sizes = sizes if isinstance(sizes, int) else tuple(size for size in sizes if size)
    return Leaf(shape, P(*(tuple(names) or None for names in spec)), Blocks(axis, sizes, interleaved, rows, cols))


@settings(max_examples=8, deadline=None, derandomize=True)
@given(st.data())
def test_any_blocks_of_any_leaves_in_any_layout(data):
    mesh = data.draw(st.sampled_from([{"a": 8}, {"a": 2, "b": 4}, {"a": 2, "b": 2, "c": 2}]))
    case = Case(mesh, {f"w{i}": data.draw(fused_leaves(mesh)) for i in range(3)})
    on = case.make_mesh(data.draw(st.sampled_from(["auto", "explicit"])))
    options = muon_shard.PlanOptions(max_wave_bytes=data.draw(st.sampled_from(["auto", 1])))
    tx = muon_shard.scale_by_muon(
        beta=0.0, weight_dimension_numbers=case.dims, orthogonalizer=cubic, plan_options=options
    )
    params = case.put(case.host(), on)
    updates, _ = jax.jit(tx.update)(params, tx.init(params), params)
    numbers = dims_by_hand(case)
    want = fuse({key: by_axes(x, numbers[key], cubic) for key, x in split(case.host(), case).items()}, case)
    for name, update in updates.items():
        np.testing.assert_allclose(update, want[name], rtol=1e-4, atol=1e-5 * np.abs(want[name]).max())


FORMS = {
    "tree": {"a": {"qkv": Blocks(1, (8, 8, 24))}, "b": None},
    "prefix": {"a": Blocks(1, [8, 8, 24]), "b": None},
    "callable": lambda tree: jax.tree.map(
        lambda x: Blocks(np.int64(-1), (8, np.int32(8), 24)) if x.ndim == 2 else None, tree
    ),
    "rules": muon_shard.labels.from_rules([("qkv", Blocks(-1, (8, 8, 24), False, -2, -1))]),
}


@pytest.mark.parametrize("form", FORMS)
def test_blocks_in_every_form(form):
    found = muon_shard.labels.route({"a": {"qkv": np.ones((16, 40))}, "b": np.ones(3)}, FORMS[form])
    assert [(r.label, r.rows, r.cols, r.cut) for r in found] == [
        ("muon", (0,), (1,), Cut(1, (8, 8, 24))),
        ("adam", (), (), None),
    ]


def test_hyperparameters_are_injected():
    tree = {"qkv": np.random.default_rng(0).standard_normal((16, 40)).astype(np.float32)}
    make = optax.inject_hyperparams(muon_shard.muon, static_args=muon_shard.STATIC_ARGS)
    tx = make(0.1, consistent_rms=0.2, muon_weight_dimension_numbers=Blocks(1, (8, 8, 24)))
    got, _ = tx.update(tree, tx.init(tree), tree)
    alone, parts = optax.contrib.muon(0.1, consistent_rms=0.2), dict(enumerate(np.split(tree["qkv"], [8, 16], 1)))
    want, _ = alone.update(parts, alone.init(parts), parts)
    np.testing.assert_allclose(got["qkv"], np.concatenate(list(want.values()), 1), atol=1e-5)


@pytest.mark.parametrize(
    ("dims", "reason"),
    [
        (Blocks(2, (8, 8)), r"divides axis 2 of a leaf of rank 2"),
        (Blocks("q", (8, 8)), r"divides axis 'q'"),  # type: ignore[arg-type]
        (Blocks(1, (8, 8), output_axis=(0,)), r"reduction axes \(0,\) and output axes \(0,\) overlap"),
        (Blocks(1, (8, 24)), r"sizes \(8, 24\) add up to 32, axis 1 has size 40"),
        (Blocks(1, 7), r"blocks of 7 do not divide axis 1 of size 40"),
        (Blocks(1, (2, 1), interleaved=True), r"periods of 3 do not divide axis 1 of size 40"),
        (Blocks(1, 8, interleaved=True), r"is interleaved; expected the sizes of one period"),
        (Blocks(1, (40, 0)), r"expected a positive integer, or several"),
        (Blocks(1, ()), r"expected a positive integer, or several"),
        (Blocks(1, 0), r"expected a positive integer, or several"),
        (Blocks(1, 8.0), r"expected a positive integer, or several"),  # type: ignore[arg-type]
        (Blocks(1, ("8", 32)), r"expected a positive integer, or several"),  # type: ignore[arg-type]
        ("qkv", r"'qkv' is neither MuonDimensionNumbers nor Blocks nor None"),
    ],
    ids=str,
)
def test_blocks_that_cannot_be_are_all_listed(dims, reason):
    tree = {"a": np.ones((16, 40), np.float32), "b": np.ones((3, 16, 40), np.float32), "c": np.ones((4, 4), np.float32)}
    given = {"a": dims, "b": Blocks(0, 1, False, 1, 2), "c": Blocks(0, 2)}
    message = rf"(?s)make_plan: 2 leaves cannot be viewed as matrices.*params\['a'\] of shape f32\[16,40\]: .*{reason}"
    with pytest.raises(ValueError, match=message + r".*params\['b'\].*axis 0, which is neither"):
        muon_shard.make_plan(tree, muon_weight_dimension_numbers=given)


def test_empty_leaves_have_blocks_too():
    params = {"w": np.ones((4, 6), np.float32), "none": np.ones((0, 6), np.float32)}
    tx = muon_shard.muon(0.1, muon_weight_dimension_numbers=Blocks(1, (4, 2)))
    assert tx.update(params, tx.init(params), params)[0]["none"].shape == (0, 6)
