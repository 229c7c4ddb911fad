"""Momentum over replicas: optax's updates, 1/R of the memory, and the planned collectives to the byte."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from layouts import CASES, Case, Leaf
from optax.contrib import MuonDimensionNumbers as Dims

import muon_shard
from muon_shard import transform
from muon_shard.execute import execute
from muon_shard.plan import Plan

TOLERANCE = 5e-5  # of the update's largest entry, float32; measured: 3e-6
REPLICAS = muon_shard.PlanOptions(momentum_sharding="replicas", dedup_axes="all")
CASE = Case(
    {"replica": 2, "fsdp": 4, "one": 1},
    {
        "rows": Leaf((32, 24), P("fsdp", "one")),
        "cols": Leaf((24, 32), P(None, "fsdp")),
        "odd": Leaf((12, 9), P("fsdp")),  # 2 divides neither 3 nor 9
        "full": Leaf((16, 8), P(("replica", "fsdp"))),
        "stack": Leaf((4, 8, 12), P(None, "fsdp"), Dims(1, 2)),
        "whole": Leaf((8, 8)),
        "bias": Leaf((32,), P("fsdp"), None),
    },
)
HOMES = {
    "rows": P(("fsdp", "replica")),
    "cols": P(None, ("fsdp", "replica")),
    "odd": P("fsdp"),
    "full": P(("replica", "fsdp")),
    "stack": P(None, ("fsdp", "replica")),
    "whole": P(("fsdp", "replica")),
}

SMALL = Case({"replica": 2, "fsdp": 4}, {"rows": Leaf((16, 12), P("fsdp")), "cols": Leaf((12, 16), P(None, "fsdp"))})


def make(case, options=REPLICAS, **arguments):
    return muon_shard.muon(0.1, muon_weight_dimension_numbers=case.dims, plan_options=options, **arguments)


def momentum(state):
    mu = state.inner_states["muon"].inner_state[0].mu
    return {name: x for name, x in mu.items() if not isinstance(x, optax.MaskedNode)}


def muon_leaves(case):
    return Case(case.mesh, {name: leaf for name, leaf in case.leaves.items() if leaf.dims is not None})


def assert_lies(mu, homes=HOMES):
    for name, x in mu.items():
        assert x.sharding.is_equivalent_to(NamedSharding(x.sharding.mesh, homes[name]), x.ndim), name


@functools.lru_cache
def compiles():
    """A list that grows with every compilation from now on."""
    seen = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, seconds, **_: seen.append(event) if event.endswith("backend_compile_duration") else None
    )
    return seen


def check(case, axis_type):
    """Three steps like optax's on one device; nothing moves house, nothing compiles twice, replicas are equal."""
    mesh, host = case.make_mesh(axis_type), case.host()
    params, tx = case.put(host, mesh), make(case)
    state, shardings = tx.init(params), muon_shard.opt_state_shardings(tx, params)
    # On mixed axes JAX itself drops the Auto part of a tuple from what jit returns, unless told the shardings.
    outs = (jax.tree.map(lambda x: x.sharding, params), shardings) if axis_type == "mixed" else None
    update = jax.jit(tx.update, out_shardings=outs)
    reference = optax.contrib.muon(0.1, muon_weight_dimension_numbers=case.dims)
    expected, want_state = jax.jit(reference.update), reference.init(host)
    assert jax.tree.structure(state) == jax.tree.structure(want_state)
    for step in range(3):
        grads = case.put(case.host(step + 1), mesh)
        before = len(compiles())
        updates, state = update(grads, state, params)
        assert step == 0 or len(compiles()) == before
        want, want_state = expected(case.host(step + 1), want_state, host)
        for name, x in updates.items():
            np.testing.assert_allclose(x, want[name], atol=TOLERANCE * np.abs(want[name]).max(), err_msg=name)
            assert x.sharding.is_equivalent_to(params[name].sharding, x.ndim), name
            copies = {}
            for shard in x.addressable_shards:
                first = copies.setdefault(str(shard.index), np.asarray(shard.data))
                np.testing.assert_array_equal(np.asarray(shard.data), first, err_msg=name)
    for x, sharding in zip(*map(jax.tree.leaves, (state, shardings)), strict=True):
        assert x.sharding.is_equivalent_to(sharding, x.ndim)
    return state


@pytest.mark.parametrize("axis_type", ["auto", "explicit", "mixed"])
def test_updates_are_those_of_optax(axis_type):
    assert_lies(momentum(check(CASE, axis_type)))


@pytest.mark.slow
@pytest.mark.parametrize("axis_type", ["auto", "explicit", "mixed"])
@pytest.mark.parametrize("name", CASES)
def test_updates_are_those_of_optax_on_every_layout(name, axis_type):
    check(CASES[name], axis_type)


@pytest.mark.parametrize("axis_type", ["auto", "explicit", "mixed"])
@pytest.mark.parametrize("given", [False, True])
def test_momentum_lies_there_after_every_init(axis_type, given, recwarn):
    """Under jit, too; on Auto axes the shardings must be told, by `param_shardings` or by an init before."""
    case = muon_leaves(CASE)
    params = case.put(case.host(), case.make_mesh(axis_type))
    tx = make(case, param_shardings=params if given else None)
    if not given:
        assert_lies(momentum(tx.init(params)))
    structs = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), params)
    shardings = muon_shard.opt_state_shardings(tx, structs)
    for name, sharding in momentum(shardings).items():
        assert sharding.is_equivalent_to(NamedSharding(sharding.mesh, HOMES[name]), params[name].ndim)
    # Without out_shardings JAX loses parts of dimensions on mixed axes.
    outs = shardings if axis_type == "mixed" else None
    mu = momentum(jax.jit(tx.init, out_shardings=outs)(params))
    assert_lies(mu)
    assert all(not np.asarray(x).any() for x in mu.values())
    assert_lies(momentum(jax.jit(lambda: tx.init(structs), out_shardings=shardings)()))
    assert not [str(w.message) for w in recwarn if "muon_shard" in str(w.message)]


def test_unknown_shardings_are_warned_of_once():
    case = SMALL
    params = case.put(case.host(), case.make_mesh())
    tx = make(case)
    with pytest.warns(UserWarning, match="not visible under jit") as seen:
        updates, _ = jax.jit(tx.update)(params, jax.jit(tx.init)(params), params)
    assert len(seen) == 1
    alone, _ = make(case).update(host := case.host(), make(case).init(host), host)
    for name, x in updates.items():
        np.testing.assert_allclose(x, alone[name], atol=TOLERANCE * np.abs(alone[name]).max())


def test_each_replica_holds_its_part():
    case = Case({"pod": 2, "replica": 2, "fsdp": 2}, {"w": Leaf((32, 24), P("fsdp")), "v": Leaf((24, 32), P())})
    params = case.put(case.host(), case.make_mesh())
    held = {}
    for how in ("params", "replicas"):
        state = make(case, muon_shard.PlanOptions(momentum_sharding=how), mu_dtype="bfloat16").init(params)
        held[how] = [0] * 8
        for x in momentum(state).values():
            for shard in x.addressable_shards:
                held[how][shard.device.id] += shard.data.nbytes
        plan = muon_shard.make_plan(
            params, options=muon_shard.PlanOptions(momentum_sharding=how), mu_dtype=jnp.bfloat16
        )
        assert {plan.momentum_bytes} == set(held[how])
    assert held["params"] == [2 * 32 * 24 * 3 // 2] * 8 and held["replicas"] == [2 * 2 * 32 * 24 // 8] * 8
    assert plan.momentum_bytes_by_sharding == {"params": held["params"][0], "replicas": held["replicas"][0]}


def audited(case, options, axis_type="auto"):
    params = case.put(case.host(), case.make_mesh(axis_type))
    tx = muon_shard.scale_by_muon(weight_dimension_numbers=case.dims, plan_options=options)
    compiled = jax.jit(tx.update).lower(params, tx.init(params), params).compile()
    plan = muon_shard.make_plan(params, muon_weight_dimension_numbers=case.dims, options=options)
    assert (found := muon_shard.audit(compiled, plan)).ok, str(found)
    host = case.host()
    alone = muon_shard.scale_by_muon(weight_dimension_numbers=case.dims)
    want, _ = alone.update(host, alone.init(host), host)
    got, _ = compiled(params, tx.init(params), params)
    for name, x in got.items():
        np.testing.assert_allclose(x, want[name], atol=1e-4, err_msg=name)
    return plan, compiled


@pytest.mark.parametrize("axis_type", ["auto", pytest.param("explicit", marks=pytest.mark.slow)])
def test_the_module_holds_what_the_plan_promises(axis_type):
    plan, _ = audited(muon_leaves(CASE), REPLICAS, axis_type)
    gathers = [c for c in plan.collectives if c.purpose == "updates to parameters"]
    # One for the matrices over (replica, fsdp), one for the stack and what is whole, whatever the number of leaves.
    assert {c.axes for c in gathers} == {("replica",), ("replica", "fsdp")} and len(gathers) == 2


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_the_module_of_every_layout_holds_what_the_plan_promises(name):
    plan, compiled = audited(muon_leaves(CASES[name]), REPLICAS)
    assert muon_shard.audit(compiled, plan).ok


@pytest.mark.parametrize("transport", ["ring", "gather", "two_hops", "gram", "redundant"])
def test_every_transport(transport):
    case = Case({"replica": 2, "fsdp": 4}, {"w": Leaf((16, 64), P(None, "fsdp")), "v": Leaf((64, 16), P("fsdp"))})
    options = muon_shard.PlanOptions(momentum_sharding="replicas", transport=transport)
    plan, _ = audited(case, options)
    assert {d.choice.transport for d in plan.parts[0].domains} == {transport}


def test_many_leaves_are_gathered_in_one_and_waves_wave_by_wave():
    case = Case({"replica": 2, "fsdp": 4}, {f"w{i}": Leaf((16, 32), P("fsdp")) for i in range(16)})
    plan, compiled = audited(case, REPLICAS)
    assert [c.kind for c in plan.collectives] == ["all-to-all", "all-to-all", "all-gather"]
    assert compiled.as_text().count(" all-gather(") == 1
    waves = [muon_shard.PlanOptions(momentum_sharding="replicas", max_wave_bytes=size) for size in (2048, 1024)]
    plan, _ = audited(case, waves[0])
    assert len(plan.parts[0].waves) > 1
    experts = Leaf((16, 16, 16), P("expert", "fsdp"), Dims(1, 2))
    stack = Case({"replica": 2, "expert": 2, "fsdp": 2}, {"w": experts})
    assert len(audited(stack, waves[1])[0].parts[0].waves) > 1


@pytest.mark.parametrize("ns_dtype", [None, "bfloat16"])
def test_the_plan_is_that_of_the_transform(ns_dtype, monkeypatch):
    run = []
    case = muon_leaves(CASE)
    monkeypatch.setattr(transform, "execute", lambda plan, *a: run.append(plan) or execute(plan, *a))
    params = case.put(case.host(), case.make_mesh())
    tx = make(case, ns_dtype=ns_dtype, mu_dtype="bfloat16", param_shardings=params)
    jax.eval_shape(tx.update, params, tx.init(params), params)
    plan = muon_shard.make_plan(
        params,
        options=REPLICAS,
        muon_weight_dimension_numbers=case.dims,
        param_shardings=params,
        ns_dtype=ns_dtype,
        mu_dtype="bfloat16",
    )
    assert plan.parts == tuple(run)
    assert Plan.from_json(plan.to_json()) == plan


def test_the_plan_says_what_the_momentum_takes():
    text = {
        how: str(
            muon_shard.make_plan(
                CASE.abstract(CASE.make_mesh()),
                options=muon_shard.PlanOptions(momentum_sharding=how),
                muon_weight_dimension_numbers=CASE.dims,
            )
        )
        for how in ("params", "replicas")
    }
    assert (
        "momentum   2.35 kB per device, as the parameters; 1.16 kB with momentum_sharding='replicas'" in text["params"]
    )
    assert "momentum   1.16 kB per device, over replicas; 2.35 kB as the parameters" in text["replicas"]
    assert "still replicated where no dimension divides: odd over replica" in text["replicas"]
    assert "updates to parameters" in text["replicas"] and "updates to parameters" not in text["params"]


@pytest.mark.parametrize("axis_type", ["auto", pytest.param("explicit", marks=pytest.mark.slow)])
def test_gradients_of_a_real_loss(axis_type):
    """A batch over all devices; how XLA sums gradients is its own affair, the plan's collectives are all there."""
    case = Case({"replica": 2, "fsdp": 4}, {"up": Leaf((16, 32), P("fsdp")), "down": Leaf((32, 16), P("fsdp"))})
    mesh, host = case.make_mesh(axis_type), case.host()
    params = case.put(host, mesh)
    batch = np.random.default_rng(1).standard_normal((64, 16)).astype(np.float32)
    batch_there = jax.device_put(batch, NamedSharding(mesh, P(("replica", "fsdp"))))

    def step(tx, gathered, params, state, x):
        def loss(p):
            return jnp.mean((jnp.tanh(x @ gathered(p["up"])) @ gathered(p["down"]) - x) ** 2)

        updates, state = tx.update(jax.grad(loss)(params), state, params)
        return updates, state

    whole = (lambda p: jax.reshard(p, P())) if axis_type == "explicit" else lambda p: p
    tx, reference = make(case), optax.contrib.muon(0.1)
    run = jax.jit(functools.partial(step, tx, whole))
    state, want_state = tx.init(params), reference.init(host)
    with jax.set_mesh(mesh):
        for _ in range(2):
            updates, state = run(params, state, batch_there)
            want, want_state = jax.jit(functools.partial(step, reference, lambda p: p))(host, want_state, batch)
    for name in host:
        np.testing.assert_allclose(updates[name], want[name], atol=2e-4 * np.abs(want[name]).max())
        assert updates[name].sharding.is_equivalent_to(params[name].sharding, 2)
    assert_lies(momentum(state), {"up": P(("fsdp", "replica")), "down": P(("fsdp", "replica"))})


def test_wrappers_and_tree_helpers():
    """Only Muon's momentum is over replicas: accumulated gradients and Adam's moments lie as the parameters."""
    case = CASE
    params = case.put(case.host(), case.make_mesh())
    tx = optax.MultiSteps(optax.chain(optax.clip(1.0), make(case)), 2).gradient_transformation()
    state, shardings = tx.init(params), muon_shard.opt_state_shardings(tx, params)
    for x, sharding in zip(*map(jax.tree.leaves, (state, shardings)), strict=True):
        assert x.ndim == 0 or x.sharding.is_equivalent_to(sharding, x.ndim)
    mine = state.inner_opt_state[1]
    assert_lies(momentum(mine))
    specs = {name: leaf.spec for name, leaf in case.leaves.items()}
    assert_lies(state.acc_grads, specs)
    assert_lies({"bias": mine.inner_states["adam"].inner_state[0].mu["bias"]}, specs)
    ones = optax.tree.map_params(tx, jnp.ones_like, state)
    assert jax.tree.structure(ones) == jax.tree.structure(state)
    assert_lies(momentum(ones.inner_opt_state[1]))


def test_donation_aliases_the_state():
    case = muon_leaves(CASE)
    params = case.put(case.host(), case.make_mesh())
    tx = make(case)
    state = tx.init(params)
    step = jax.jit(lambda g, s, p: (*reversed(tx.update(g, s, p)),), donate_argnums=1)
    donated = sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(state))
    compiled = step.lower(params, state, params).compile()
    assert compiled.memory_analysis().alias_size_in_bytes == donated


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("axis_type", ["auto", "explicit"])
def test_a_state_that_lies_as_the_parameters_moves_at_the_first_update(axis_type, eager):
    case = SMALL
    params = case.put(case.host(), case.make_mesh(axis_type))
    first, tx = make(case, muon_shard.PlanOptions()), make(case)
    tx.init(params)
    want, _ = jax.jit(first.update)(params, first.init(params), params)
    update = tx.update if eager else jax.jit(tx.update)
    updates, state = update(params, first.init(params), params)
    assert_lies(momentum(state))
    for name, x in updates.items():
        np.testing.assert_allclose(x, want[name], atol=1e-5, err_msg=name)


def test_inside_a_users_shard_map_raises_by_name():
    case = Case({"replica": 2, "fsdp": 4}, {"w": Leaf((16, 32), P("fsdp"))})
    params = case.put(case.host(), case.make_mesh())
    tx = make(case, param_shardings={"w": P("fsdp")})
    state = tx.init(params)
    for body in (lambda p: tx.init(p).inner_states, lambda p: tx.update(p, state, p)[0]):
        inside = jax.shard_map(
            body, mesh=params["w"].sharding.mesh, in_specs=P("fsdp"), out_specs=P("fsdp"), check_vma=False
        )
        with pytest.raises(ValueError, match=r"(?s)momentum_sharding='replicas'.*inside a shard_map.*params\['w'\]"):
            jax.eval_shape(inside, params)


def test_other_values_are_refused():
    with pytest.raises(ValueError, match="momentum_sharding must be 'params' or 'replicas', got 'zero'"):
        muon_shard.PlanOptions(momentum_sharding="zero")


FUSED = {
    "qkv": Leaf((16, 64), P("fsdp"), muon_shard.Blocks(1, (32, 16, 16))),
    "qkv cut": Leaf((16, 64), P(None, "fsdp"), muon_shard.Blocks(1, (32, 16, 16))),
    "heads": Leaf((16, 64), P(None, "fsdp"), muon_shard.Blocks(1, 8)),
    "heads and more": Leaf((24, 64), P(None, "fsdp"), muon_shard.Blocks(1, 16)),
    "gate and up": Leaf((64, 16), P("fsdp"), muon_shard.Blocks(0, (1, 1), interleaved=True)),
    "stack": Leaf((2, 16, 24), P(None, None, "fsdp"), muon_shard.Blocks(2, 12, reduction_axis=1, output_axis=2)),
}


@pytest.mark.parametrize(("axis_type", "limit"), [("auto", 1), ("explicit", "auto")])
def test_blocks_of_a_leaf_are_the_same_over_replicas(axis_type, limit):
    """An axis that joins what blocks divide cuts the leaf, not the batch dimension that equal blocks may be."""
    more = {f"qkv {i}": FUSED["qkv"] for i in range(8)}  # so that some device owns two
    case = Case({"replica": 2, "fsdp": 4}, FUSED | more)
    params = case.put(case.host(), case.make_mesh(axis_type))
    updates = []
    for how in ("params", "replicas"):
        options = muon_shard.PlanOptions(momentum_sharding=how, max_wave_bytes=limit)
        tx = make(case, options)
        state = tx.init(params)
        done, _ = jax.jit(tx.update)(params, state, params)
        updates.append(jax.tree.map(np.asarray, done))
        assert all(done[name].sharding.is_equivalent_to(params[name].sharding, params[name].ndim) for name in done)
    for name in FUSED:
        np.testing.assert_allclose(updates[1][name], updates[0][name], rtol=0, atol=1e-6, err_msg=name)
    plan = muon_shard.make_plan(params, muon_weight_dimension_numbers=case.dims, options=options)
    assert len(plan.parts[0].waves) > 1 if limit != "auto" else len(plan.parts[0].waves) == 1
    assert plan.momentum_bytes * 2 == plan.momentum_bytes_by_sharding["params"]
    assert Plan.from_json(plan.to_json()) == plan


def test_heads_stay_apart_over_replicas():
    case = Case({"replica": 2, "fsdp": 4}, {"heads": Leaf((1024, 1024), P(None, "fsdp"), muon_shard.Blocks(1, 256))})
    plans = [
        muon_shard.make_plan(
            case.abstract(case.make_mesh()),
            muon_weight_dimension_numbers=case.dims,
            options=muon_shard.PlanOptions(momentum_sharding=how, dedup_axes="all"),
        )
        for how in ("params", "replicas")
    ]
    assert plans[1].flops_per_device <= plans[0].flops_per_device
    assert plans[1].momentum_bytes * 2 == plans[0].momentum_bytes


def test_momentum_stays_without_parameters():
    case = Case(SMALL.mesh, {"rows": SMALL.leaves["rows"]})
    params = case.put(case.host(), case.make_mesh("explicit"))
    tx = muon_shard.scale_by_muon(plan_options=REPLICAS)
    state = tx.init(params)
    grads = jax.tree.map(lambda x: jax.device_put(x, NamedSharding(x.sharding.mesh, P(("replica", "fsdp")))), params)
    _, after = jax.jit(tx.update)(grads, state)
    assert after.mu["rows"].sharding == state.mu["rows"].sharding
