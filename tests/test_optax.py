"""Every optax wrapper, state helper and JAX transformation, against `optax.contrib.muon` on one device."""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import export
from jax.sharding import PartitionSpec as P
from layouts import Case, Leaf

import muon_shard

TOLERANCE = 5e-5  # of the largest change of each parameter, float32; measured: 3e-6
CASE = Case(
    {"replica": 2, "fsdp": 4},
    {
        "w": Leaf((16, 32), P("fsdp")),
        "v": Leaf((32, 16), P(None, "fsdp")),
        "table": Leaf((32, 16), P("fsdp"), None),
        "b": Leaf((8,), P(), None),
    },
)
SPECS = {name: leaf.spec for name, leaf in CASE.leaves.items()}
HOST = [CASE.host(seed) for seed in range(5)]  # parameters, then a gradient per step
MAKES = {
    "ours": functools.partial(muon_shard.muon, muon_weight_dimension_numbers=CASE.dims, param_shardings=SPECS),
    "optax": functools.partial(optax.contrib.muon, muon_weight_dimension_numbers=CASE.dims),
}


def injected(make, **hyperparams):
    static = muon_shard.STATIC_ARGS if make is MAKES["ours"] else ("ns_steps",)
    return optax.inject_hyperparams(make, static_args=static)(**hyperparams)


WRAPPERS = {
    "plain": lambda make: make(0.1),
    "chain": lambda make: optax.chain(optax.clip_by_global_norm(1.0), make(0.1), optax.ema(0.9)),
    "named_chain": lambda make: optax.named_chain(("clip", optax.clip(0.5)), ("muon", make(0.1))),
    "masked": lambda make: optax.masked(make(0.1), {name: name != "table" for name in SPECS}),
    "partition": lambda make: optax.partition(
        {"muon": make(0.1), "sgd": optax.sgd(0.1)}, {"w": "muon", "v": "muon", "table": "sgd", "b": "sgd"}
    ),
    "MultiSteps": lambda make: optax.MultiSteps(make(0.1), every_k_schedule=2).gradient_transformation(),
    "apply_if_finite": lambda make: optax.apply_if_finite(make(0.1), 3),
    "inject_hyperparams": lambda make: injected(make, learning_rate=0.1, weight_decay=0.01, beta=0.9, adam_b1=0.8),
    "injected_schedule": lambda make: injected(make, learning_rate=optax.linear_schedule(0.1, 0.01, 4)),
    "schedules": lambda make: make(
        optax.linear_schedule(0.1, 0.01, 4), adam_learning_rate=optax.exponential_decay(0.1, 2, 0.5)
    ),
    "schedule_free": lambda make: optax.contrib.schedule_free(make(0.1), 0.1),
    "reduce_on_plateau": lambda make: optax.chain(make(0.1), optax.contrib.reduce_on_plateau(patience=1, factor=0.5)),
}
WITH_COND = ("MultiSteps", "apply_if_finite", "reduce_on_plateau")  # types of both branches must agree
CELLS = [(name, "auto") for name in WRAPPERS] + [(name, "explicit") for name in WITH_COND]


def put(host, axis_type="auto"):
    return CASE.put(host, CASE.make_mesh(axis_type))


def train(tx, params, grads):
    """Parameters and state after a step per gradient; `value` is for whom wants it, others ignore it."""

    @jax.jit
    def step(params, state, g):
        updates, state = tx.update(g, state, params, value=jnp.float32(1))
        return optax.apply_updates(params, updates), state

    tx = optax.with_extra_args_support(tx)
    state = tx.init(params)
    for g in grads:
        params, state = step(params, state, g)
    return params, state


@functools.lru_cache
def reference(name="plain"):
    return train(WRAPPERS[name](MAKES["optax"]), HOST[0], HOST[1:])


def assert_close(got, want, start=HOST[0]):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for g, w, s in zip(*map(jax.tree.leaves, (got, want, start)), strict=True):
        g, w, s = (np.asarray(x, np.float64) for x in (g, w, s))
        assert np.abs(g - w).max() <= TOLERANCE * np.abs(w - s).max()


def assert_sharded(params):
    for name, x in params.items():
        assert x.sharding.is_equivalent_to(jax.sharding.NamedSharding(x.sharding.mesh, SPECS[name]), x.ndim), name


@pytest.mark.parametrize(("name", "axis_type"), CELLS)
def test_wrappers(name, axis_type):
    got, state = train(WRAPPERS[name](MAKES["ours"]), *(lambda p, *g: (p, g))(*(put(h, axis_type) for h in HOST)))
    want, like = reference(name)
    assert_close(got, want)
    assert_sharded(got)
    assert jax.tree.structure(state) == jax.tree.structure(like)


@pytest.mark.parametrize("axis_type", ["auto", "explicit"])
@pytest.mark.parametrize("name", WRAPPERS)
def test_opt_state_shardings_need_no_device(name, axis_type):
    """From structs on an abstract mesh: where an eager init would put the moments."""
    mesh, tx = CASE.make_mesh(axis_type), WRAPPERS[name](MAKES["ours"])
    got = muon_shard.opt_state_shardings(tx, CASE.abstract(mesh.abstract_mesh))
    state = tx.init(put(HOST[0], axis_type))
    assert jax.tree.structure(got) == jax.tree.structure(state)
    moments = 0
    for sharding, x in zip(*map(jax.tree.leaves, (got, state)), strict=True):
        want = x.sharding.spec if isinstance(x.sharding, jax.sharding.NamedSharding) else P()
        assert sharding.is_equivalent_to(jax.sharding.NamedSharding(mesh.abstract_mesh, want), x.ndim)
        moments += x.ndim == 2 and any(want)
    assert moments >= 2


def test_lookahead():
    results = []
    for make, place in ((MAKES["ours"], put), (MAKES["optax"], lambda x: x)):
        params = optax.LookaheadParams.init_synced(place(HOST[0]))
        tx = optax.lookahead(make(0.1), sync_period=2, slow_step_size=0.5)
        state, update = tx.init(params), jax.jit(tx.update)
        for g in HOST[1:4]:
            updates, state = update(place(g), state, params)
            params = optax.apply_updates(params, updates)
        results.append(params)
    assert_close(*results, start=optax.LookaheadParams.init_synced(HOST[0]))


def test_injected_rate_is_set_by_hand():
    tx = injected(MAKES["ours"], learning_rate=0.1)
    params = put(HOST[0])
    state, update = tx.init(params), jax.jit(tx.update)
    once, _ = update(put(HOST[1]), state, params)
    twice, _ = update(put(HOST[1]), optax.tree.set(state, learning_rate=jnp.float32(0.2)), params)
    assert_close(twice["w"], 2 * np.asarray(once["w"]), 0)
    assert optax.tree.get(state, "learning_rate") == np.float32(0.1)


def test_injected_without_shardings_says_what_helps():
    """Every call makes a new transformation, which no init has shown the shardings."""
    tx = optax.inject_hyperparams(muon_shard.muon, static_args=muon_shard.STATIC_ARGS)(learning_rate=0.1)
    params = {"w": put(HOST[0])["w"]}
    state = tx.init(params)
    with pytest.warns(UserWarning, match=r"inject_hyperparams.*param_shardings="):
        got, _ = jax.jit(tx.update)(params, state, params)
    host, theirs = {"w": HOST[0]["w"]}, optax.contrib.muon(0.1)
    want, _ = theirs.update(host, theirs.init(host), host)
    assert_close(got, want, {"w": 0})  # no result is wrong for it


def test_static_arguments_are_all_that_are_no_numbers():
    numbers = {"learning_rate", "beta", "eps", "weight_decay", "consistent_rms"}
    booleans = {"nesterov", "adaptive"}
    for name in inspect.signature(muon_shard.muon).parameters:
        assert (name in muon_shard.STATIC_ARGS) != (name in numbers | booleans or name.startswith("adam_")), name


def test_steps_that_are_not_static_are_refused():
    with pytest.raises(ValueError, match="static_args=muon_shard.STATIC_ARGS"):
        jax.eval_shape(optax.inject_hyperparams(muon_shard.muon)(learning_rate=0.1).init, HOST[0])


def test_tree_helpers():
    tx, params = MAKES["ours"](0.1), put(HOST[0])
    _, state = train(tx, params, [put(HOST[1])])
    masked = lambda x: isinstance(x, optax.MaskedNode)  # noqa: E731
    is_muon = lambda path, _: "muon" in str(path)  # noqa: E731
    ones = optax.tree.map_params(tx, jnp.ones_like, state)
    moved = optax.tree.map_params(tx, lambda m, p: m if masked(m) else p, state, params, is_leaf=masked)
    for got, want in ((ones, np.ones_like(HOST[0]["w"])), (moved, HOST[0]["w"])):
        assert jax.tree.structure(got) == jax.tree.structure(state)
        np.testing.assert_array_equal(optax.tree.get(got, "mu", filtering=is_muon)["w"], want)
    mu = optax.tree.get(state, "mu", filtering=is_muon)
    doubled = optax.tree.set(state, is_muon, mu=jax.tree.map(lambda x: 2 * x, mu))
    np.testing.assert_array_equal(optax.tree.get(doubled, "mu", filtering=is_muon)["w"], 2 * np.asarray(mu["w"]))


@pytest.mark.parametrize("axis_type", ["auto", "explicit"])
def test_scan_and_cond_over_steps(axis_type):
    """Four steps in one compiled loop, each taken under a `cond`."""
    tx, params = MAKES["ours"](0.1), put(HOST[0], axis_type)
    grads = jax.tree.map(lambda *g: jnp.stack(g), *(put(h, axis_type) for h in HOST[1:]))

    def take(params, state, g):
        updates, state = tx.update(g, state, params)
        return optax.apply_updates(params, updates), state

    def body(carry, g):
        finite = jnp.isfinite(jnp.stack([jnp.sum(x) for x in jax.tree.leaves(g)])).all()
        return jax.lax.cond(finite, take, lambda p, s, g: (p, s), *carry, g), None

    (got, _), _ = jax.jit(lambda *carry: jax.lax.scan(body, carry, grads))(params, tx.init(params))
    assert_close(got, reference()[0])


def one_step(tx):
    """Parameters and state after a step, as a function to compile, export or differentiate."""

    def step(params, state, g):
        updates, state = tx.update(g, state, params)
        return optax.apply_updates(params, updates), state

    return step


def as_structs(tree):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree)


def test_ahead_of_time():
    """Nothing concrete until the compiled step runs: shapes and shardings only, the state's as they will be."""
    tx, params = MAKES["ours"](0.1), put(HOST[0])
    structs = as_structs(params)
    shardings = muon_shard.opt_state_shardings(tx, structs)
    abstract = jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), jax.eval_shape(tx.init, structs), shardings
    )
    step = one_step(tx)
    shapes = jax.eval_shape(step, structs, abstract, structs)
    compiled = jax.jit(step).lower(structs, abstract, structs).compile()
    got, state = compiled(params, jax.jit(tx.init, out_shardings=shardings)(params), put(HOST[1]))
    kinds = lambda tree: jax.tree.map(lambda x: (x.shape, x.dtype), tree)  # noqa: E731
    assert kinds((got, state)) == kinds(shapes)
    assert_close(got, one_step(MAKES["optax"](0.1))(HOST[0], MAKES["optax"](0.1).init(HOST[0]), HOST[1])[0])


def test_export():
    """The exported step is the step, bit for bit."""
    tx, params, g = MAKES["ours"](0.1), put(HOST[0]), put(HOST[1])
    arguments = params, tx.init(params), g
    step = jax.jit(one_step(tx))
    got = export.export(step)(*as_structs(arguments)).call(*arguments)
    for x, want in zip(*map(jax.tree.leaves, (got, step(*arguments))), strict=True):
        np.testing.assert_array_equal(x, want)


def test_gradient_through_a_checkpointed_step():
    """How the loss after a step depends on the parameters and gradient before it, as in meta-learning."""

    def meta_gradient(make, place):
        tx, (params, g) = make(0.1), map(place, HOST[:2])
        step = jax.checkpoint(one_step(tx))
        loss = lambda p, s, g: sum(jnp.sum(x**2) for x in jax.tree.leaves(step(p, s, g)[0]))  # noqa: E731
        return jax.jit(jax.grad(loss, argnums=(0, 2)))(params, tx.init(params), g)

    got, want = meta_gradient(MAKES["ours"], put), meta_gradient(MAKES["optax"], lambda x: x)
    assert_close(got, want, jax.tree.map(np.zeros_like, want))


def of_axes(tree, axes):
    """Specs without all other axes: what a `shard_map` over these axes alone is told."""
    kept = lambda spec: P(*(e if e in axes else None for e in spec))  # noqa: E731
    return jax.tree.map(kept, tree, is_leaf=lambda x: isinstance(x, P))


@pytest.mark.parametrize(
    ("manual", "axis_type", "check_vma"),
    [
        (("replica", "fsdp"), "auto", True),
        (("replica", "fsdp"), "explicit", False),
        (("fsdp",), "auto", True),
        (("fsdp",), "explicit", False),
        (("replica",), "auto", False),
        (("replica",), "explicit", True),
    ],
)
def test_inside_a_users_shard_map(manual, axis_type, check_vma):
    """A hand-written train step: shards are local, the gradients' mean over replicas is the user's own."""
    tx, params, grads = MAKES["ours"](0.1), put(HOST[0], axis_type), [put(g, axis_type) for g in HOST[1:3]]
    state = tx.init(params)
    specs = jax.tree.map(lambda s: s.spec, muon_shard.opt_state_shardings(tx, params))

    def steps(params, state, grads):
        def body(carry, g):
            g = jax.lax.pmean(g, "replica") if "replica" in manual else g
            return one_step(tx)(*carry, g), None

        stacked = jax.tree.map(lambda *g: jnp.stack(g), *grads)
        return jax.lax.scan(body, (params, state), stacked)[0]  # raises where a type changes

    mesh, given, inout = params["w"].sharding.mesh, of_axes(SPECS, manual), of_axes((SPECS, specs), manual)
    tx = MAKES["ours"](0.1, param_shardings=SPECS if axis_type == "auto" else params)
    mapped = jax.shard_map(
        steps,
        mesh=mesh,
        in_specs=(*inout, [given] * 2),
        out_specs=inout,
        axis_names=set(manual),
        check_vma=check_vma,
    )
    got, _ = jax.jit(mapped)(params, state, grads)
    assert_close(got, train(MAKES["optax"](0.1), HOST[0], HOST[1:3])[0])


def test_state_made_inside_a_users_shard_map():
    """No parameter outside: what `init` makes of local shards is what `update` returns."""
    tx = MAKES["ours"](0.1, param_shardings=SPECS)

    def steps(params, g):
        body = lambda carry, _: (one_step(tx)(*carry, g), None)  # noqa: E731
        return jax.lax.scan(body, (params, tx.init(params)), length=2)[0][0]

    params, g = put(HOST[0]), put(HOST[1])
    mapped = jax.shard_map(steps, mesh=params["w"].sharding.mesh, in_specs=(SPECS, SPECS), out_specs=SPECS)
    assert_close(jax.jit(mapped)(params, g), train(MAKES["optax"](0.1), HOST[0], [HOST[1]] * 2)[0])


@pytest.mark.parametrize(
    ("manual", "check_vma"),
    [
        (("fsdp",), True),
        pytest.param(("fsdp",), False, marks=pytest.mark.slow),
        pytest.param(("replica", "fsdp"), True, marks=pytest.mark.slow),
    ],
)
def test_gradient_inside_a_users_shard_map(manual, check_vma):
    host, weights = ({"w": tree["w"]} for tree in HOST[:2])
    specs, mesh = {"w": SPECS["w"]}, CASE.make_mesh()
    tx, given = muon_shard.scale_by_muon(param_shardings=specs), of_axes(specs, manual)
    mapped = jax.shard_map(
        lambda g: tx.update(g, tx.init(g))[0],
        mesh=mesh,
        in_specs=(given,),
        out_specs=given,
        axis_names=set(manual),
        check_vma=check_vma,
    )
    alone = muon_shard.scale_by_muon()
    got, want = (
        jax.jit(jax.grad(lambda g, update=update: jnp.sum(update(g)["w"] * weights["w"])))(g)["w"]
        for update, g in (
            (mapped, {"w": put(HOST[0])["w"]}),
            (lambda g: alone.update(g, alone.init(g))[0], host),
        )
    )
    np.testing.assert_allclose(got, want, atol=1e-4 * np.abs(want).max())


@pytest.mark.parametrize("axis_names", [{"fsdp"}, {"replica", "fsdp"}])
def test_inside_a_users_shard_map_global_shapes_must_be_given(axis_names):
    tx, params = MAKES["ours"](0.1, param_shardings=None), put(HOST[0])
    specs = of_axes(SPECS, axis_names)
    inside = jax.shard_map(
        tx.init, mesh=params["w"].sharding.mesh, in_specs=(specs,), out_specs=P(), axis_names=axis_names
    )
    reason = r"(?s)inside a shard_map.*\n\* params\['table'\].*\[8,16\]: .*does not tell its global.*\n\* params\['v'\]"
    with pytest.raises(ValueError, match=reason):
        jax.eval_shape(inside, params)


def test_inside_a_users_shard_map_gradients_must_be_equal_on_replicas():
    tx, params = MAKES["ours"](0.1, param_shardings=SPECS), put(HOST[0])

    def step(params, x):  # every replica has its own data, and no mean is taken
        g = jax.tree.map(lambda p: p * x.sum(), params)
        return one_step(tx)(params, tx.init(params), g)[0]

    mapped = jax.shard_map(step, mesh=params["w"].sharding.mesh, in_specs=(SPECS, P("replica")), out_specs=SPECS)
    with pytest.raises(
        ValueError, match=r"(?s)inside a shard_map.*\n\* params\['v'\].*differs along \['replica'\].*mean"
    ):
        jax.eval_shape(mapped, params, jnp.ones(2))


def test_inside_a_users_shard_map_manual_axes_cut_first():
    params = {"w": put(HOST[0])["w"]}
    tx = muon_shard.muon(0.1, param_shardings={"w": P(("replica", "fsdp"))})
    inside = jax.shard_map(
        tx.init, mesh=params["w"].sharding.mesh, in_specs=P("fsdp"), out_specs=P(), axis_names={"fsdp"}
    )
    with pytest.raises(ValueError, match=r"\* params\['w'\].*\['fsdp'\] of \['replica', 'fsdp'\] are Manual.*first"):
        jax.eval_shape(inside, params)


def test_second_call_does_not_compile_and_donation_aliases_the_state():
    tx, params, grads = MAKES["ours"](0.1), put(HOST[0]), put(HOST[1])
    state = tx.init(params)
    traces = []

    @functools.partial(jax.jit, donate_argnums=(1, 2))
    def step(grads, state, params):
        traces.append(1)
        updates, state = tx.update(grads, state, params)
        return state, optax.apply_updates(params, updates)

    donated = sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves((state, params)))
    aliased = step.lower(grads, state, params).compile().memory_analysis().alias_size_in_bytes
    state, params = step(grads, state, params)
    state, params = step(grads, state, params)
    assert aliased == donated
    assert len(traces) == 1


@pytest.mark.parametrize("name", ["chain", "masked", "MultiSteps", "inject_hyperparams", "schedule_free"])
def test_momentum_over_replicas_is_seen_through_wrappers(name):
    options = muon_shard.PlanOptions(momentum_sharding="replicas")
    params = put(HOST[0])

    def make(learning_rate):
        return muon_shard.muon(learning_rate, plan_options=options, param_shardings=params)

    if name == "inject_hyperparams":
        inject = optax.inject_hyperparams(muon_shard.muon, static_args=muon_shard.STATIC_ARGS)
        tx = inject(learning_rate=0.1, plan_options=options, param_shardings=params)
    else:
        tx = WRAPPERS[name](make)
    born, told = tx.init(params), muon_shard.opt_state_shardings(tx, params)
    moments = jax.tree.leaves(optax.tree.get_all_with_path(born, "mu"))
    assert any("replica" in str(x.sharding.spec) for x in moments if hasattr(x, "sharding"))
    for x, sharding in zip(jax.tree.leaves(born), jax.tree.leaves(told), strict=True):
        assert x.ndim < 2 or x.sharding.is_equivalent_to(sharding, x.ndim), x.shape  # scalars are born anywhere
