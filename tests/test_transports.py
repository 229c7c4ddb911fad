"""Every transport on every layout it serves: the result of one device, and the planned collectives to the byte."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from layouts import CASES, Case, Leaf

import muon_shard
from muon_shard.audit import audit
from muon_shard.cost import Traffic
from muon_shard.pages import Table
from muon_shard.transports import TRANSPORTS

SCATTERING = [name for name in TRANSPORTS if name != "local"]


def muon_leaves(case):
    return Case(case.mesh, {name: leaf for name, leaf in case.leaves.items() if leaf.dims is not None})


def pinned(case, transport, dedup_axes="all"):
    """The case without leaves that the transport cannot serve, and options that pin it."""
    options = muon_shard.PlanOptions(transport=transport, dedup_axes=dedup_axes)
    leaves = {}
    for name, leaf in case.leaves.items():
        one = Case(case.mesh, {name: leaf})
        try:
            muon_shard.make_plan(one.abstract(one.make_mesh()), muon_weight_dimension_numbers=one.dims, options=options)
        except ValueError as error:
            assert "cannot serve it" in str(error) and "Legal here" in str(error)
        else:
            leaves[name] = leaf
    return Case(case.mesh, leaves), options


def check(case, options, axis_type="auto"):
    host, mesh = case.host(), case.make_mesh(axis_type)
    params = case.put(host, mesh)
    plan = muon_shard.make_plan(params, muon_weight_dimension_numbers=case.dims, options=options)
    tx = muon_shard.scale_by_muon(weight_dimension_numbers=case.dims, plan_options=options)
    state = tx.init(params)
    compiled = jax.jit(tx.update).lower(params, state, params).compile()
    found = audit(compiled, plan)
    assert found.ok, str(found)
    got, _ = compiled(params, state, params)
    alone = muon_shard.scale_by_muon(weight_dimension_numbers=case.dims)
    want, _ = alone.update(host, alone.init(host), host)
    # The Gram form is less exact than the direct one on matrices that are not skinny.
    tolerance = 1e-4 if options.transport == "gram" else 2e-5
    for name in case.leaves:
        np.testing.assert_allclose(np.asarray(got[name]), want[name], atol=tolerance)
        copies = {}
        for shard in got[name].addressable_shards:  # replicas agree bit for bit
            first = copies.setdefault(str(shard.index), np.asarray(shard.data))
            np.testing.assert_array_equal(np.asarray(shard.data), first)
    return plan


@pytest.mark.slow
@pytest.mark.parametrize("transport", SCATTERING)
@pytest.mark.parametrize("name", CASES)
def test_every_transport_on_every_layout(name, transport):
    case, options = pinned(muon_leaves(CASES[name]), transport)
    if case.leaves:
        check(case, options)


@pytest.mark.parametrize("transport", SCATTERING)
@pytest.mark.parametrize("axis_type", ["auto", "explicit", "mixed"])
def test_every_transport_on_every_kind_of_axis(transport, axis_type):
    case, options = pinned(muon_leaves(CASES["two_dimensional"]), transport)
    case = Case(case.mesh, dict(list(case.leaves.items())[:2]))
    plan = check(case, options, axis_type)
    assert {domain.choice.transport for part in plan.parts for domain in part.domains} == {transport}


@pytest.mark.parametrize("transport", ["all_to_all", "gather"])
@pytest.mark.parametrize("dedup_axes", [(), ("replica",), ("replica", "pod")])
def test_work_is_shared_over_the_replicas_that_are_named(transport, dedup_axes):
    leaves = CASES["hsdp"].leaves | {"whole": CASES["replicated"].leaves["w0"]}
    case = muon_leaves(Case({"pod": 2, "replica": 2, "fsdp": 2}, leaves))
    plan = check(case, muon_shard.PlanOptions(transport=transport, dedup_axes=dedup_axes))
    gathers = [c for c in plan.collectives if c.purpose == "updates to replicas"]
    assert {axis for c in gathers for axis in c.axes} - {"fsdp"} == set(dedup_axes)


def test_redundant_work_shows_in_the_balance():
    case = muon_leaves(CASES["fsdp_rows"])
    sharded = case.abstract(case.make_mesh())
    once = muon_shard.make_plan(sharded, options=muon_shard.PlanOptions(transport="all_to_all"))
    plan = muon_shard.make_plan(sharded, options=muon_shard.PlanOptions(transport="redundant"))
    assert plan.flops_per_device == once.total_flops
    assert plan.programs == 1


@pytest.mark.parametrize("name", ["all_to_all", "two_hops", "ring", "gather"])
def test_what_is_sent_comes_back(name):
    """`back` undoes `bring`, and row p of what was brought is what peer p had for this device."""
    exchange, page = (("a", 2), ("b", 4)), 3
    mesh = jax.make_mesh((2, 4), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
    pools = np.arange(8 * 16 * page, dtype=np.float32).reshape(8, 16, page)
    order = np.random.default_rng(0).permutation(16).reshape(8, 2)
    table = Table(order[None])
    transport = TRANSPORTS[name]

    def body(pool):
        brought = transport.bring(transport.pack(jnp.split(pool[0], [5]), table), table, exchange)
        return brought[None], transport.back(brought, exchange)[None]

    run = jax.shard_map(body, mesh=mesh, in_specs=P(("a", "b")), out_specs=P(("a", "b")), check_vma=False)
    brought, returned = jax.jit(run)(pools)
    sent = pools[:, order].reshape(8, 8, 2 * page)  # [device, peer, elements]
    np.testing.assert_array_equal(brought, sent.transpose(1, 0, 2))
    np.testing.assert_array_equal(returned, sent)


def test_bytes_received_grow_with_the_peers_only_where_everything_is_gathered():
    received = {}
    for peers in (8, 64):
        traffic = Traffic((("host", peers // 4), ("chip", 4)), (), 64 * 1000, 64 * 1000 // peers, 64 * 1000, 4, 4)
        received[peers] = {
            name: sum(c.received for c in transport.collectives(traffic)) for name, transport in TRANSPORTS.items()
        }
    assert received[64]["all_to_all"] == received[64]["ring"] < received[64]["two_hops"] < 2 * received[64]["ring"]
    assert received[64]["gather"] > 7 * received[8]["gather"]
    assert received[64]["gather"] == 2 * received[64]["redundant"]


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_transport_that_cannot_serve_says_why(transport):
    whole, one, two = (), (("fsdp", 8),), (("fsdp", 4), ("tensor", 2))
    refusals = [TRANSPORTS[transport].refuses(axes) for axes in (whole, one, two)]
    wanted = {"local": (False, True, True), "two_hops": (True, True, False)}.get(transport, (True, False, False))
    assert tuple(map(bool, refusals)) == wanted


def test_a_pinned_transport_that_is_illegal_lists_the_leaves_and_what_is_legal():
    case = muon_leaves(CASES["hsdp"])
    with pytest.raises(ValueError, match=r"\* params\['w0'\].*two_hops.*only one mesh axis.*Legal here: all_to_all"):
        muon_shard.make_plan(case.abstract(case.make_mesh()), options=muon_shard.PlanOptions(transport="two_hops"))


def test_axes_that_do_not_exist_raise():
    case = muon_leaves(CASES["hsdp"])
    with pytest.raises(ValueError, match="dedup_axes names pod; the mesh has replica, fsdp"):
        muon_shard.make_plan(case.abstract(case.make_mesh()), options=muon_shard.PlanOptions(dedup_axes=("pod",)))
    for bad in ({"transport": "pigeon"}, {"dedup_axes": "some"}, {"ns_method": "svd"}):
        with pytest.raises(ValueError, match="PlanOptions"):
            muon_shard.PlanOptions(**bad)


SKINNY = Case({"replica": 2, "fsdp": 4}, {f"w{i}": Leaf((8, 4096), P(None, "fsdp")) for i in range(12)})


def test_only_halves_of_gram_matrices_travel():
    plan = check(SKINNY, muon_shard.PlanOptions(transport="gram"))
    kinds = {c.kind: c.bytes for c in plan.collectives}
    assert list(kinds) == ["all-reduce", "all-to-all", "all-gather"]
    half = 8 * 9 // 2 + 1  # and its scale
    assert plan.parts[0].domains[0].packing.sizes == (half,)
    moved = sum(c.received for c in plan.collectives)
    blocks = muon_shard.make_plan(
        SKINNY.abstract(SKINNY.make_mesh()), options=muon_shard.PlanOptions(transport="all_to_all")
    )
    assert moved < sum(c.received for c in blocks.collectives) / 50


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "complex64", "float64"])
def test_gram_matrices_of_every_dtype(dtype):
    with jax.enable_x64(dtype == "float64"):
        mesh = SKINNY.make_mesh()
        rng = np.random.default_rng(0)
        host = [rng.standard_normal((6, 64)) * scale for scale in (1e-3, 1.0, 1e3, 0.0)]
        host += [rng.standard_normal((64, 6))]
        if dtype == "complex64":
            host = [x + 1j * x[:, ::-1] for x in host]
        specs = [P(None, "fsdp")] * 3 + [P(None, ("replica", "fsdp"))] + [P("fsdp", "replica")]
        params = [
            jax.device_put(np.asarray(x, jax.numpy.dtype(dtype)), jax.NamedSharding(mesh, s))
            for x, s in zip(host, specs, strict=True)
        ]
        tx = muon_shard.scale_by_muon(plan_options=muon_shard.PlanOptions(transport="gram"))
        got, _ = jax.jit(tx.update)(params, tx.init(params), params)
        alone = muon_shard.scale_by_muon()
        host = [np.asarray(x) for x in params]
        want, _ = alone.update(host, alone.init(host), host)
        tolerance = {"float16": 5e-3, "bfloat16": 2e-2, "complex64": 1e-5, "float64": 1e-11}[dtype]
        for g, w in zip(got, want, strict=True):
            assert g.dtype == w.dtype
            np.testing.assert_allclose(np.asarray(g, np.complex128), np.asarray(w, np.complex128), atol=tolerance)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"ns_coeffs": "polar_express", "ns_steps": 8}, "its 8 steps need 1 restarts"),
        ({"preconditioning": "aol"}, "'aol' scales rows"),
        ({"adaptive": True}, "only Newton–Schulz"),
        ({"orthogonalizer": lambda x: x}, "only Newton–Schulz"),
    ],
)
def test_gram_matrices_that_cannot_serve_say_why(arguments, reason):
    tx = muon_shard.scale_by_muon(**arguments, plan_options=muon_shard.PlanOptions(transport="gram"))
    params = SKINNY.put(SKINNY.host(), SKINNY.make_mesh())
    with pytest.raises(ValueError, match=f"transport='gram' cannot serve it: .*{reason}"):
        tx.update(params, tx.init(params), params)


@pytest.mark.parametrize(("bandwidth", "found"), [(1e9, {"gram": 74, "all_to_all": 8}), (1e12, {"all_to_all": 82})])
def test_skinny_matrices_leave_the_others_where_their_gram_matrices_are_cheaper(bandwidth, found):
    leaves = {f"s{i}": Leaf((24, 10240), P(None, "fsdp")) for i in range(74)}
    leaves |= {f"w{i}": Leaf((512, 512), P(None, "fsdp")) for i in range(8)}
    topology = muon_shard.Topology({"fsdp": muon_shard.Link(bandwidth)}, 1e15, 80e9, 3e12)
    params = Case({"fsdp": 8}, leaves).abstract(jax.sharding.AbstractMesh((8,), ("fsdp",)))
    plan = muon_shard.make_plan(params, options=muon_shard.PlanOptions(topology=topology))
    assert {d.choice.transport: len(d.leaves) for d in plan.parts[0].domains} == found
    assert muon_shard.Plan.from_json(plan.to_json()) == plan
