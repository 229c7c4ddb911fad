"""A user's own function, alone and on 8 devices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from layouts import SHARED, Case, Leaf
from optax.contrib import MuonDimensionNumbers as Dims

import muon_shard
from muon_shard import CustomOrthogonalizer
from muon_shard.cost import ns_flops
from muon_shard.newton_schulz import make_orthogonalizer
from muon_shard.orthogonalizer import Adaptive, as_orthogonalizer

CASE = Case(
    {"replica": 2, "fsdp": 4},
    {
        "wide": Leaf((8, 32), P("fsdp", None)),
        "tall": Leaf((32, 8), P(None, "fsdp")),
        "square": Leaf((16, 16), P("fsdp", "replica")),
        "stack": Leaf((3, 8, 32), P(None, None, "fsdp"), Dims(1, 2)),
        "alone": Leaf((5, 9), P()),
    },
)


def by_rows(x):
    """Depends on the orientation, on every entry of its matrix and on no other matrix."""
    return x / jnp.sum(jnp.abs(x), axis=-1, keepdims=True) + x[:, :, :1] * jnp.max(x, axis=(-2, -1), keepdims=True)


class Recorder:
    """A function that remembers the shapes it was traced with."""

    def __init__(self, function=by_rows):
        self.function, self.shapes = function, []

    def __call__(self, x):
        self.shapes.append(x.shape)
        return self.function(x)


def wanted(function, x):
    """On one device, matrix by matrix, always wide."""
    matrices = x.reshape(-1, *x.shape[-2:])
    tall = x.shape[-2] > x.shape[-1]
    wide = matrices.mT if tall else matrices
    out = np.concatenate([np.asarray(function(jnp.asarray(matrix[None]))) for matrix in wide])
    return (out.mT if tall else out).reshape(x.shape)


def without_momentum(**arguments):
    """What the orthogonalizer is given is the gradient itself."""
    return muon_shard.scale_by_muon(beta=0.0, nesterov=False, **arguments)


def updates_of(tx, case, host):
    params = case.put(host, case.make_mesh())
    updates, _ = jax.jit(tx.update)(params, tx.init(params), params)
    return {name: np.asarray(update) for name, update in updates.items()}


@pytest.mark.parametrize(
    "function",
    [by_rows, lambda x: x * 2, CustomOrthogonalizer(by_rows, lambda m, n: m * n)],
    ids=["function", "lambda", "custom"],
)
def test_on_eight_devices_it_is_the_function_on_one(function):
    tx = without_momentum(orthogonalizer=function, weight_dimension_numbers=CASE.dims)
    host = CASE.host()
    for name, got in updates_of(tx, CASE, host).items():
        np.testing.assert_allclose(got, wanted(function, host[name]), rtol=2e-5, atol=1e-6, err_msg=name)


def test_it_sees_batches_of_wide_matrices_only():
    recorder = Recorder()
    tx = without_momentum(orthogonalizer=recorder, weight_dimension_numbers=CASE.dims)
    updates_of(tx, CASE, CASE.host())
    assert {shape[1:] for shape in recorder.shapes} == {(8, 32), (16, 16), (5, 9)}
    assert all(len(shape) == 3 and shape[0] >= 1 for shape in recorder.shapes)


def test_every_matrix_is_owned_once_on_the_whole_mesh():
    case = Case({"replica": 2, "fsdp": 4}, {f"w{i}": Leaf((16, 32), P("fsdp", None)) for i in range(8)})
    recorder = Recorder()
    updates_of(without_momentum(orthogonalizer=recorder, plan_options=SHARED), case, case.host())
    assert recorder.shapes == [(1, 16, 32)]  # one program for all of the 8 devices
    orthogonalizer = CustomOrthogonalizer(by_rows, lambda m, n: 7 * m * n)
    params = case.abstract(case.make_mesh())
    plan = muon_shard.make_plan(params, orthogonalizer=orthogonalizer, options=SHARED)
    assert plan.total_flops == 8 * 7 * 16 * 32
    assert plan.flops_per_device == 7 * 16 * 32


def test_its_cost_steers_the_plan():
    leaves = {f"{k}{i}": Leaf((8, n), P("fsdp", None)) for i in range(4) for k, n in (("a", 32), ("b", 64))}
    case = Case({"fsdp": 4}, leaves)
    params = case.abstract(case.make_mesh())

    def busiest(cost):
        return muon_shard.make_plan(params, orthogonalizer=CustomOrthogonalizer(by_rows, cost)).flops_per_device

    assert busiest(lambda m, n: 1000 * n) == 1000 * (32 + 64)
    assert busiest(lambda m, n: 1000 if n == 32 else 5000) == 6000
    assert busiest(lambda m, n: 10**6 if n == 32 else 1) == 10**6 + 1


def test_without_a_cost_it_is_that_of_five_direct_steps():
    work = CustomOrthogonalizer(by_rows).work(8, 32, "float32")
    assert (work.form, work.flops, work.cost) == ("by_rows", ns_flops(8, 32), ns_flops(8, 32))
    assert CustomOrthogonalizer(by_rows, lambda m, n: m + n).work(8, 32, "float32").flops == 40


@pytest.mark.parametrize("flops", [0, -5])
def test_a_cost_below_one_raises(flops):
    with pytest.raises(ValueError, match=rf"flops\(8, 32\) of by_rows must be at least 1, got {flops}"):
        CustomOrthogonalizer(by_rows, lambda m, n: flops).work(8, 32, "float32")


def flattened(x):
    return x.reshape(x.shape[0], -1)


@pytest.mark.parametrize(
    ("function", "returned"),
    [
        (flattened, r"flattened must keep the shape .* float32\[1, 8, 32\]; it returned float32\[1, 256\]"),
        (lambda x: x.mT, r"<lambda> must keep .*; it returned float32\[1, 32, 8\]"),
        (lambda x: x[0], r"it returned float32\[8, 32\]"),
        (lambda x: jnp.argsort(x), r"it returned int32\[1, 8, 32\]"),
        (lambda x: None, r"it returned None"),
        (lambda x: (x, x), r"it returned \("),
    ],
)
def test_a_wrong_result_raises_and_is_named(function, returned):
    with pytest.raises(ValueError, match=f"orthogonalizer: .*{returned}"):
        CustomOrthogonalizer(function)(jnp.ones((1, 8, 32)))
    tx = without_momentum(orthogonalizer=function)
    params = {"w": jnp.ones((8, 32))}
    with pytest.raises(ValueError, match=f"orthogonalizer: .*{returned}"):
        tx.update(params, tx.init(params), params)


class Unhashable:
    __hash__ = None

    def __call__(self, x):
        return x


@pytest.mark.parametrize("given", [3, "newton", Unhashable()])
def test_what_is_no_hashable_function_raises_at_once(given):
    message = "orthogonalizer must be a hashable function"
    with pytest.raises(ValueError, match=message):
        muon_shard.scale_by_muon(orthogonalizer=given)
    with pytest.raises(ValueError, match=message):
        muon_shard.muon(0.1, orthogonalizer=given)
    with pytest.raises(ValueError, match=message):
        muon_shard.make_plan({"w": jnp.ones((8, 32))}, orthogonalizer=given)


def test_results_get_the_dtype_of_the_matrices():
    x = jnp.ones((2, 3, 4), jnp.bfloat16)
    assert CustomOrthogonalizer(lambda x: x.astype(jnp.float32))(x).dtype == jnp.bfloat16
    tx = without_momentum(orthogonalizer=by_rows, ns_dtype="bfloat16")
    host = {"w": CASE.host()["wide"]}
    got, _ = tx.update(host, tx.init(host), host)
    assert got["w"].dtype == jnp.float32
    narrow = jnp.asarray(host["w"], jnp.bfloat16)[None]
    np.testing.assert_array_equal(got["w"], np.asarray(by_rows(narrow)[0], np.float32))


def test_newton_schulz_settings_have_no_effect():
    host = {"w": CASE.host()["wide"]}

    def update(**arguments):
        tx = without_momentum(orthogonalizer=by_rows, **arguments)
        return tx.update(host, tx.init(host), host)[0]["w"]

    changed = update(ns_coeffs="dion", ns_steps=3, eps=1.0, preconditioning="spectral")
    np.testing.assert_array_equal(changed, update())


def test_equal_ones_share_plans():
    cost = lambda m, n: m * n  # noqa: E731
    assert CustomOrthogonalizer(by_rows, cost) == CustomOrthogonalizer(by_rows, cost)
    assert hash(CustomOrthogonalizer(by_rows)) == hash(as_orthogonalizer(by_rows))
    assert CustomOrthogonalizer(by_rows, cost) != CustomOrthogonalizer(by_rows)
    assert as_orthogonalizer(CustomOrthogonalizer(by_rows, cost)) == CustomOrthogonalizer(by_rows, cost)
    assert CustomOrthogonalizer(by_rows).on("tpu") == CustomOrthogonalizer(by_rows)


@pytest.mark.parametrize("dtype", ["float32", "complex64"])
def test_adaptive_scales_by_the_dual_norm_of_each_matrix(dtype):
    rng = np.random.default_rng(0)
    x = rng.standard_normal((3, 4, 6))
    x = (x + 1j * rng.standard_normal(x.shape) if dtype == "complex64" else x).astype(dtype)
    y = np.asarray(by_rows(jnp.asarray(np.abs(x)))) * x
    got = Adaptive(CustomOrthogonalizer(lambda x: by_rows(jnp.abs(x)).astype(dtype) * x))(jnp.asarray(x))
    np.testing.assert_allclose(got, np.vecdot(x.reshape(3, -1), y.reshape(3, -1))[:, None, None] * y, rtol=1e-4)


def test_adaptive_keeps_the_work_and_reaches_the_transform():
    plain = make_orthogonalizer(None, "standard", 5)
    adaptive = make_orthogonalizer(None, "standard", 5, adaptive=True)
    assert adaptive.work(24, 10240, "float32") == plain.work(24, 10240, "float32")
    assert adaptive.on("tpu").work(64, 64, "float32") == plain.on("tpu").work(64, 64, "float32")
    tx = without_momentum(orthogonalizer=by_rows, adaptive=True, weight_dimension_numbers=CASE.dims)
    host = CASE.host()
    for name, got in updates_of(tx, CASE, host).items():
        y = wanted(by_rows, host[name])
        want = (host[name] * y).sum((-2, -1), keepdims=True) * y
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5, err_msg=name)


def test_newton_schulz_runs_as_a_custom_function_too():
    case = Case(CASE.mesh, {"tall": CASE.leaves["tall"]})
    host = case.host()
    got = updates_of(without_momentum(orthogonalizer=muon_shard.orthogonalize), case, host)["tall"]
    want = updates_of(without_momentum(), case, host)["tall"]
    np.testing.assert_allclose(got, want, atol=1e-5)
