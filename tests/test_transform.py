"""Against `optax.contrib.muon` on one device: the oracle of the whole transform."""

import functools

import flax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from layouts import CASES, SHARED, Case, Leaf
from optax.contrib import MuonDimensionNumbers as Dims

import muon_shard

TOLERANCE = 5e-5  # of the update's largest entry, float32; measured: 2e-6
BFLOAT16 = 0.1  # of the update's norm; measured: .04 to .07, while bfloat16 moves optax itself by .05 to .08


def largest_difference(got, want):
    """Over all leaves, relative to the largest entry of each."""
    pairs = zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)
    gaps = [
        (
            np.abs(np.asarray(g, np.float64) - np.asarray(w, np.float64)).max(),
            np.abs(np.asarray(w, np.float64)).max(),
        )
        for g, w in pairs
    ]
    return max(float(gap / max(scale, 1e-30)) for gap, scale in gaps)


def assert_sharded_like(updates, params):
    for name, update in updates.items():
        assert update.sharding.is_equivalent_to(params[name].sharding, update.ndim), name
        assert update.dtype == params[name].dtype and update.shape == params[name].shape, name


@functools.lru_cache
def oracle(name, dtype, steps):
    """Updates of every step of `optax.contrib.muon` on one device."""
    case = CASES[name]
    tx = optax.contrib.muon(0.1, muon_weight_dimension_numbers=case.dims)
    params, update = case.host(dtype=dtype), jax.jit(tx.update)
    state, out = tx.init(params), []
    for step in range(steps):
        updates, state = update(case.host(step + 1, dtype), state, params)
        out.append(jax.tree.map(np.asarray, updates))
    return out


@pytest.mark.parametrize("axis_type", ["auto", "explicit", "mixed"])
@pytest.mark.parametrize("name", CASES)
def test_ten_steps_agree_with_optax(name, axis_type):
    case = CASES[name]
    mesh = case.make_mesh(axis_type)
    params = case.put(case.host(), mesh)
    tx = muon_shard.muon(0.1, muon_weight_dimension_numbers=case.dims, plan_options=SHARED)
    # On mixed axes JAX itself drops the Auto part of a tuple from what jit returns, unless told the shardings.
    shardings = (jax.tree.map(lambda x: x.sharding, params), None) if axis_type == "mixed" else None
    state, update = tx.init(params), jax.jit(tx.update, out_shardings=shardings)
    for step, want in enumerate(oracle(name, "float32", 10)):
        updates, state = update(case.put(case.host(step + 1), mesh), state, params)
        assert largest_difference(updates, want) <= TOLERANCE, step
        assert_sharded_like(updates, params)


@pytest.mark.parametrize("name", CASES)
def test_bfloat16_agrees_with_optax(name):
    case = CASES[name]
    mesh = case.make_mesh()
    params = case.put(case.host(dtype="bfloat16"), mesh)
    tx = muon_shard.muon(0.1, muon_weight_dimension_numbers=case.dims, plan_options=SHARED)
    updates, state = jax.jit(tx.update)(case.put(case.host(1, "bfloat16"), mesh), tx.init(params), params)
    for leaf, want in oracle(name, "bfloat16", 1)[0].items():
        got, want = np.asarray(updates[leaf], np.float32), np.asarray(want, np.float32)
        assert np.linalg.norm(got - want) <= BFLOAT16 * np.linalg.norm(want)
    assert_sharded_like(updates, params)
    assert {
        str(x.dtype) for x in jax.tree.leaves(optax.tree.get(state, "mu", filtering=lambda p, _: "muon" in str(p)))
    } == {"bfloat16"}


@pytest.mark.parametrize("name", ["hsdp", "experts"])
@pytest.mark.parametrize("axis_type", ["auto", "explicit", "mixed"])
@pytest.mark.parametrize("how", ["eager", "scan", "cond", "set_mesh"])
def test_every_way_to_call(name, axis_type, how):
    case = CASES[name]
    mesh = case.make_mesh(axis_type)
    params, grads = case.put(case.host(), mesh), case.put(case.host(1), mesh)
    tx = muon_shard.muon(0.1, muon_weight_dimension_numbers=case.dims, plan_options=SHARED)
    state = tx.init(params)

    def in_scan(grads, state, params):
        def body(state, _):
            updates, state = tx.update(grads, state, params)
            return state, updates

        state, updates = jax.lax.scan(body, state, length=1)
        return jax.tree.map(lambda x: x[0], updates), state

    def in_cond(grads, state, params):
        return jax.lax.cond(
            state.inner_states["muon"].inner_state[0].count == 0,
            tx.update,
            lambda g, s, p: (g, s),
            grads,
            state,
            params,
        )

    def in_mesh(grads, state, params):
        with jax.set_mesh(mesh):
            return jax.jit(tx.update)(grads, state, params)

    call = {"eager": tx.update, "scan": jax.jit(in_scan), "cond": jax.jit(in_cond), "set_mesh": in_mesh}[how]
    updates, _ = call(grads, state, params)
    assert largest_difference(updates, oracle(name, "float32", 10)[0]) <= TOLERANCE


@pytest.mark.parametrize("axis_type", ["auto", "explicit"])
def test_replicas_are_bitwise_equal(axis_type):
    case = CASES["hsdp"]
    mesh = case.make_mesh(axis_type)
    params = case.put(case.host(), mesh)
    tx = muon_shard.muon(0.1, muon_weight_dimension_numbers=case.dims, plan_options=SHARED)
    updates, _ = jax.jit(tx.update)(params, tx.init(params), params)
    for name, update in updates.items():
        by_index = {}
        for shard in update.addressable_shards:
            first = by_index.setdefault(str(shard.index), np.asarray(shard.data))
            np.testing.assert_array_equal(np.asarray(shard.data), first, err_msg=name)


@pytest.mark.parametrize(
    "arguments",
    [
        {"nesterov": False},
        {"ns_coeffs": "dion"},
        {"ns_coeffs": (2.0, -1.5, 0.5), "ns_steps": 3},
        {"ns_coeffs": ((3.4445, -4.7750, 2.0315), (2.0, -1.5, 0.5)), "ns_steps": 2},
        {"preconditioning": "spectral"},
        {"preconditioning": "aol"},
        {"preconditioning": "schatten"},
        {"preconditioning": "aol", "ns_coeffs": "dion"},
        {"adaptive": True},
        {"weight_decay": 0.1},
        {"weight_decay": 0.1, "weight_decay_mask": lambda p: {k: k == "w" for k in p}},
        {"consistent_rms": 0.2},
        {"mu_dtype": "bfloat16"},
        {"beta": 0.8, "eps": 1e-3},
        {
            "adam_b1": 0.5,
            "adam_b2": 0.9,
            "adam_eps_root": 1e-6,
            "adam_weight_decay": 0.1,
            "adam_learning_rate": 0.01,
        },
        {"learning_rate": optax.linear_schedule(1.0, 0.1, 4)},
    ],
    ids=lambda a: ",".join(f"{k}={getattr(v, '__name__', v)}" for k, v in a.items())[:50],
)
def test_arguments_mean_what_they_mean_in_optax(arguments):
    case = Case(
        {"replica": 2, "fsdp": 4},
        {"w": Leaf((16, 32), P("fsdp")), "v": Leaf((64, 24), P(None, "fsdp")), "b": Leaf((8,))},
    )
    mesh = case.make_mesh()
    arguments = {"learning_rate": 0.1} | arguments
    ours, theirs = muon_shard.muon(**arguments), optax.contrib.muon(**arguments)
    host, params = case.host(), case.put(case.host(), mesh)
    state, reference = ours.init(params), theirs.init(host)
    assert jax.tree.structure(state) == jax.tree.structure(reference)
    update, expected = jax.jit(ours.update), jax.jit(theirs.update)
    for step in range(3):
        updates, state = update(case.put(case.host(step + 1), mesh), state, params)
        want, reference = expected(case.host(step + 1), reference, host)
        assert largest_difference(updates, want) <= TOLERANCE


@pytest.mark.parametrize("form", ["tree", "prefix", "callable", "nested none"])
def test_dimension_numbers_in_every_form(form):
    host = {
        "a": {"w": np.ones((3, 8, 16), np.float32), "v": np.full((2, 8, 8), 2, np.float32)},
        "b": np.ones((4, 4), np.float32),
    }
    dims = {
        "tree": {"a": {"w": Dims(1, 2), "v": Dims(1, 2)}, "b": None},
        "prefix": {"a": Dims(1, 2), "b": None},
        "callable": lambda params: jax.tree.map(lambda x: Dims(x.ndim - 2, x.ndim - 1), params),
        "nested none": {"a": {"w": Dims(1, 2), "v": None}, "b": Dims(0, 1)},
    }[form]
    ours, theirs = (f(0.1, muon_weight_dimension_numbers=dims) for f in (muon_shard.muon, optax.contrib.muon))
    got, _ = jax.jit(ours.update)(host, ours.init(host), host)
    want, _ = jax.jit(theirs.update)(host, theirs.init(host), host)
    assert largest_difference(got, want) <= TOLERANCE


def test_state_moves_between_optax_and_ours():
    case = CASES["hsdp"]
    mesh = case.make_mesh()
    ours, theirs = (f(0.1, muon_weight_dimension_numbers=case.dims) for f in (muon_shard.muon, optax.contrib.muon))
    host = case.host()
    params = case.put(host, mesh)
    ours_state, theirs_state = ours.init(params), theirs.init(host)
    for first in (1, 2):  # one step each, then swap states and step again
        updates, ours_state = jax.jit(ours.update)(case.put(case.host(first), mesh), ours_state, params)
        want, theirs_state = jax.jit(theirs.update)(case.host(first), theirs_state, host)
        assert largest_difference(updates, want) <= TOLERANCE
        gathered = jax.tree.map(np.asarray, ours_state)
        shardings = muon_shard.opt_state_shardings(ours, params)
        ours_state, theirs_state = jax.device_put(jax.tree.map(np.asarray, theirs_state), shardings), gathered


def test_state_keeps_its_dtypes_when_gradients_are_wider():
    params = {"w": jnp.ones((8, 16), jnp.bfloat16), "bias": jnp.ones((8,), jnp.bfloat16)}
    grads = {"w": jnp.ones((8, 16), jnp.float32), "bias": jnp.ones((8,), jnp.float32)}
    tx = muon_shard.muon(0.1)
    state = tx.init(params)

    def body(state, _):
        updates, state = tx.update(grads, state, params)
        return state, updates

    state, updates = jax.lax.scan(body, state, length=2)  # scan raises when a dtype of the carry changes
    assert {x.dtype for x in updates.values()} == {jnp.dtype(jnp.bfloat16)}
    assert (
        jax.tree.leaves(optax.tree.get(state, "mu", filtering=lambda p, _: "muon" in str(p)))[0].dtype == jnp.bfloat16
    )


@pytest.mark.parametrize(
    "wrap",
    [flax.core.freeze, lambda tree: [tree["a"], {"x": tree["b"]}, None], lambda tree: (tree, ())],
    ids=["frozen", "list", "tuple"],
)
def test_any_pytree(wrap):
    tree = wrap({"a": np.eye(4, 8, dtype=np.float32), "b": np.ones((8, 4), np.float32)})
    tx = muon_shard.muon(0.1)
    updates, _ = tx.update(tree, tx.init(tree), tree)
    assert jax.tree.structure(updates) == jax.tree.structure(tree)


def test_empty_leaves_and_trees():
    tx = muon_shard.muon(0.1)
    assert tx.update({}, tx.init({}), {})[0] == {}
    params = {"empty": jnp.zeros((0, 5)), "w": jnp.ones((2, 3)), "scalar": jnp.ones(()), "none": None}
    updates, _ = tx.update(params, tx.init(params), params)
    assert updates["empty"].shape == (0, 5) and updates["scalar"].shape == () and updates["none"] is None


@pytest.mark.parametrize("axis_type", ["auto", "explicit"])
def test_empty_leaves_on_a_mesh(axis_type):
    case = Case(
        {"fsdp": 8},
        {"empty": Leaf((0, 16), P(None, "fsdp")), "scalar": Leaf((), P(), None), "w": Leaf((8, 4), P("fsdp"))},
    )
    params = case.put(case.host(), case.make_mesh(axis_type)) | {"none": None}
    tx = muon_shard.muon(0.1)
    updates, _ = jax.jit(tx.update)(params, tx.init(params), params)
    assert updates.pop("none") is None
    assert updates.pop("empty").shape == (0, 16)  # where nothing lies is jit's own affair
    assert_sharded_like(updates, params)


def test_integer_leaves_are_named():
    """Adam in optax makes NaN of them."""
    params = {"w": jnp.ones((2, 3)), "step": jnp.zeros((4,), jnp.int32)}
    with pytest.raises(ValueError, match=r"1 leaf cannot be optimized by Adam.\n\* params\['step'\] of shape i32\[4\]"):
        muon_shard.muon(0.1).init(params)


def test_complex_matrices_agree_with_optax():
    rng = np.random.default_rng(0)
    params = {"w": (rng.standard_normal((8, 16)) + 1j * rng.standard_normal((8, 16))).astype(np.complex64)}
    tx, reference = muon_shard.muon(0.1), optax.contrib.muon(0.1)
    got, _ = tx.update(params, tx.init(params), params)
    want, _ = reference.update(params, reference.init(params), params)
    np.testing.assert_allclose(got["w"], want["w"], atol=1e-5)


def test_gradients_sharded_over_more_axes_than_parameters():
    """ZeRO-1 under Explicit axes: brought to the moments' spec, updates leave with the parameter's; Adam's as well."""
    leaves = {"w": (Leaf((16, 32)), Dims()), "embed": (Leaf((24, 8)), None), "bias": (Leaf((16,)), None)}
    dims = {name: dims for name, (_, dims) in leaves.items()}
    less, more, other = (
        Case({"replica": 2, "fsdp": 4}, {name: Leaf(leaf.shape, spec) for name, (leaf, _) in leaves.items()})
        for spec in (P("fsdp"), P(("fsdp", "replica")), P("replica"))
    )
    mesh, host = less.make_mesh("explicit"), less.host()
    params = less.put(host, mesh)
    weights = {"weight_decay": 0.1, "adam_weight_decay": 0.1, "muon_weight_dimension_numbers": dims}
    tx, reference = muon_shard.muon(0.1, **weights), optax.contrib.muon(0.1, **weights)
    widened = jax.tree.map(
        lambda x: (
            jax.reshard(x, NamedSharding(mesh, P(("fsdp", "replica"))))
            if x.shape in {y.shape for y in params.values()}
            else x
        ),
        tx.init(params),
    )
    want, _ = reference.update(host, reference.init(host), host)
    for state in (tx.init(params), widened):
        for grads in (more.put(host, mesh), other.put(host, mesh)):
            updates, after = jax.jit(tx.update)(grads, state, params)
            assert largest_difference(updates, want) <= TOLERANCE
            assert_sharded_like(updates, params)
            assert jax.tree.map(jax.typeof, state) == jax.tree.map(jax.typeof, after)


@pytest.mark.parametrize("axis_type", ["auto", "explicit"])
def test_eager_updates_have_the_parameters_sharding_whatever_the_gradients(axis_type):
    case = Case({"replica": 2, "fsdp": 4}, {"w": Leaf((8, 16), P("fsdp")), "v": Leaf((16, 8), P("replica", "fsdp"))})
    other = Case(case.mesh, {"w": Leaf((8, 16), P(None, "fsdp")), "v": Leaf((16, 8))})
    mesh = case.make_mesh(axis_type)
    params, grads = case.put(case.host(), mesh), other.put(case.host(1), mesh)
    tx, reference = muon_shard.muon(0.1), optax.contrib.muon(0.1)
    updates, _ = tx.update(grads, tx.init(params), params)
    assert_sharded_like(updates, params)
    want, _ = reference.update(case.host(1), reference.init(case.host()), case.host())
    assert largest_difference(updates, want) <= TOLERANCE


def test_numpy_integers_are_integers():
    params = {"w": np.ones((4, 6), np.float32)}
    dims = {"w": Dims(np.int64(0), (np.int32(-1),))}
    tx = muon_shard.muon(0.1, ns_steps=np.int64(5), muon_weight_dimension_numbers=dims)  # type: ignore[arg-type]
    updates, _ = tx.update(params, tx.init(params), params)
    plain = muon_shard.muon(0.1)
    np.testing.assert_array_equal(updates["w"], plain.update(params, plain.init(params), params)[0]["w"])


def test_disjoint_meshes_are_planned_apart():
    stages = [
        jax.make_mesh((4,), ("fsdp",), axis_types=(AxisType.Auto,), devices=jax.devices()[i : i + 4]) for i in (0, 4)
    ]
    rng = np.random.default_rng(0)
    host = {f"stage{i}": rng.standard_normal((16, 32)).astype(np.float32) for i in range(2)}
    params = {f"stage{i}": jax.device_put(host[f"stage{i}"], NamedSharding(stages[i], P("fsdp"))) for i in range(2)}
    tx, reference = (
        muon_shard.scale_by_muon(),
        optax.contrib.scale_by_muon(weight_dimension_numbers={"stage0": Dims(), "stage1": Dims()}),
    )
    updates, _ = tx.update(params, tx.init(params), params)
    want, _ = reference.update(host, reference.init(host), host)
    assert largest_difference(updates, want) <= TOLERANCE
    assert_sharded_like(updates, params)
    assert len(muon_shard.make_plan(params).parts) == 2


def test_momentum_after_a_jitted_init_is_cured_by_opt_state_shardings(recwarn):
    case = CASES["hsdp"]
    mesh = case.make_mesh()
    params = case.put(case.host(), mesh)
    tx = muon_shard.muon(0.1, muon_weight_dimension_numbers=case.dims, plan_options=SHARED)
    shardings = muon_shard.opt_state_shardings(tx, params)
    state = jax.jit(tx.init, out_shardings=shardings)(params)
    jax.jit(tx.update)(params, state, params)
    assert not [w for w in recwarn if "assuming" in str(w.message)]
    mu = state.inner_states["muon"].inner_state[0].mu
    assert all(mu[name].sharding.is_equivalent_to(params[name].sharding, 2) for name in params if name != "bias")


def test_assumed_layout_is_warned_of_once_and_right():
    case = CASES["hsdp"]
    mesh = case.make_mesh()
    params = case.put(case.host(), mesh)
    tx = muon_shard.muon(0.1, muon_weight_dimension_numbers=case.dims, plan_options=SHARED)
    state = jax.jit(tx.init)(params)
    with pytest.warns(UserWarning, match=r"params\['w0'\].*param_shardings=") as seen:
        updates, state = jax.jit(tx.update)(params, state, params)
        jax.jit(lambda *a: tx.update(*a))(params, state, params)
    assert len(seen) == 1
    reference = optax.contrib.muon(0.1, muon_weight_dimension_numbers=case.dims)
    want, _ = jax.jit(reference.update)(case.host(), reference.init(case.host()), case.host())
    assert largest_difference(updates, want) <= TOLERANCE


@pytest.mark.parametrize("form", ["arrays", "specs", "shardings", "structs", "callable", "prefix"])
def test_param_shardings_in_every_form(form, recwarn):
    case = Case(
        {"replica": 2, "fsdp": 4},
        {"a": Leaf((16, 32), P("fsdp")), "b": Leaf((24, 8), P("fsdp")), "c": Leaf((8,))},
    )
    mesh = case.make_mesh()
    params = case.put(case.host(), mesh)
    given = {
        "arrays": params,
        "specs": {name: leaf.spec for name, leaf in case.leaves.items()},
        "shardings": {name: x.sharding for name, x in params.items()},
        "structs": case.abstract(mesh),
        "callable": lambda tree: {name: leaf.spec for name, leaf in case.leaves.items()},
        "prefix": P("fsdp"),
    }[form]
    tx = muon_shard.muon(0.1, param_shardings=given)
    updates, _ = jax.jit(tx.update)(params, jax.jit(tx.init)(params), params)
    assert not [w for w in recwarn if "assuming" in str(w.message)]
    assert_sharded_like({k: updates[k] for k in "ab"}, params)


def test_per_matrix_adaptive_on_stacks():
    """optax sums the dual norm over batch axes too; ours is per matrix: a stack equals its matrices alone."""
    stack = np.random.default_rng(0).standard_normal((3, 8, 16)).astype(np.float32)
    tx = muon_shard.muon(0.1, adaptive=True, muon_weight_dimension_numbers={"w": Dims(1, 2)})
    got, _ = tx.update({"w": stack}, tx.init({"w": stack}), {"w": stack})
    alone = optax.contrib.muon(0.1, adaptive=True)
    for i in range(3):
        want, _ = alone.update({"w": stack[i]}, alone.init({"w": stack[i]}), {"w": stack[i]})
        np.testing.assert_allclose(got["w"][i], want["w"], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("poison", [0.0, np.nan, np.inf])
def test_one_expert_never_touches_another(poison):
    case = CASES["experts"]
    mesh = case.make_mesh()
    tx = muon_shard.scale_by_muon(weight_dimension_numbers={"up": Dims(1, 2)})
    leaf = {"up": case.leaves["up"]}
    host = {"up": case.host()["up"]}
    bad = {"up": host["up"].copy()}
    bad["up"][2] = poison
    update = jax.jit(tx.update)
    put = lambda h: Case(case.mesh, leaf).put(h, mesh)  # noqa: E731
    state = tx.init(put(host))
    good, _ = update(put(host), state, None)
    got, _ = update(put(bad), state, None)
    keep = [0, 1, 3]
    np.testing.assert_array_equal(np.asarray(got["up"])[keep], np.asarray(good["up"])[keep])
    assert np.isnan(np.asarray(got["up"])[2]).all() if poison else not np.asarray(got["up"])[2].any()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: muon_shard.muon(0.1, ns_coeffs="nonesuch"),
            "Unknown ns_coeffs preset 'nonesuch'; known: standard, dion",
        ),
        (lambda: muon_shard.muon(0.1, ns_coeffs=((1, 2, 3),) * 3), "3 rows, too few for ns_steps=5"),
        (lambda: muon_shard.muon(0.1, ns_coeffs=(1, 2)), r"must have shape \(3,\) or \(n, 3\), got \(2,\)"),
        (lambda: muon_shard.muon(0.1, preconditioning="nonesuch"), "Unknown preconditioning 'nonesuch'"),
        (lambda: muon_shard.PlanOptions(max_programs=0), "max_programs must be at least 1"),
    ],
)
def test_wrong_arguments_raise_at_once(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_more_coefficient_rows_than_steps_are_cut_from_the_end():
    rows = muon_shard.newton_schulz.COEFFICIENTS["dion"]
    params = {"w": np.eye(4, 8, dtype=np.float32)}
    state = muon_shard.scale_by_muon(rows, ns_steps=3).init(params)
    np.testing.assert_allclose(state.ns_coeffs, rows[:3], rtol=1e-6)
