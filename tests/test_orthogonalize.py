import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import muon_shard
from benchmarks.ns_oracle import compose, decompose, low_rank, oracle, rows_of, steps_of, with_condition
from muon_shard.newton_schulz import COEFFICIENTS, NewtonSchulz, coefficients, make_orthogonalizer, narrowed
from muon_shard.newton_schulz.coefficients import slopes
from muon_shard.newton_schulz.orthogonalize import ENOUGH
from muon_shard.newton_schulz.scaling import PRECONDITIONINGS

RNG = np.random.default_rng(0)
WIDE = RNG.standard_normal((16, 64)).astype(np.float32)

INPUTS = {
    "square": (RNG.standard_normal((32, 32)), 1e-4),
    "wide": (WIDE, 1e-5),
    "tall": (RNG.standard_normal((64, 16)), 1e-5),
    "batch": (RNG.standard_normal((2, 3, 8, 32)), 1e-5),
    "batch of one": (RNG.standard_normal((1, 8, 32)), 1e-5),
    "large batch": (RNG.standard_normal((3, 16, 512)), 1e-5),
    "odd": (RNG.standard_normal((7, 13)), 1e-4),
    "row": (RNG.standard_normal((1, 9)), 1e-5),
    "column": (RNG.standard_normal((9, 1)), 1e-5),
    "single": (np.array([[-3.0]]), 1e-5),
    "ones": (np.ones((8, 24)), 5e-4),
    "rank one": (low_rank(RNG, 32, 16, 1), 5e-4),
    "rank three": (low_rank(RNG, 16, 32, 3), 5e-4),
    "zero": (np.zeros((4, 6)), 0),
    "zero in a batch": (np.stack([RNG.standard_normal((8, 32)), np.zeros((8, 32))]), 1e-5),
    "condition 1e6": (with_condition(RNG, 16, 64, 1e6), 5e-4),
    "complex": (RNG.standard_normal((32, 8)) + 1j * RNG.standard_normal((32, 8)), 1e-5),
}


def single(x):
    return jnp.asarray(x, np.complex64 if np.iscomplexobj(x) else np.float32)


def compiled(**arguments):
    return jax.jit(functools.partial(muon_shard.orthogonalize, **arguments))


@pytest.mark.parametrize("name", INPUTS)
def test_against_the_svd(name):
    x, tolerance = INPUTS[name]
    got = compiled(ns_coeffs="dion")(single(x))
    assert got.shape == x.shape and got.dtype == single(x).dtype
    assert np.abs(np.asarray(got) - oracle(x, rows_of("dion"))).max() <= tolerance


@pytest.mark.parametrize("coeffs", COEFFICIENTS)
def test_every_set_on_tall_matrices(coeffs):
    steps = min(5, len(rows_of(coeffs)))
    got = compiled(ns_coeffs=coeffs, ns_steps=steps)(WIDE.T)
    assert np.abs(np.asarray(got) - oracle(WIDE.T, rows_of(coeffs, steps))).max() <= 1e-5


def test_defaults_are_five_standard_steps():
    got = compiled()(WIDE)
    assert np.abs(np.asarray(got) - oracle(WIDE, rows_of("standard", 5))).max() <= 1e-5


@pytest.mark.parametrize("preconditioning", PRECONDITIONINGS)
@pytest.mark.parametrize("kind", ["tall", "complex"])
def test_preconditioning_in_either_orientation(kind, preconditioning):
    x, _ = INPUTS[kind]
    got = compiled(ns_coeffs="dion", preconditioning=preconditioning)(single(x))
    assert np.abs(np.asarray(got) - oracle(x, rows_of("dion"), preconditioning)).max() <= 2e-5


def test_the_method_can_be_chosen():
    forms = [compiled(method=method)(WIDE) for method in ("direct", "gram")]
    np.testing.assert_allclose(*forms, atol=1e-5)
    assert (np.asarray(forms[0]) != np.asarray(forms[1])).any()
    np.testing.assert_array_equal(compiled()(WIDE), forms[1])


@pytest.mark.parametrize(
    ("shape", "preconditioning"),
    [*(((3, 8, 16), p) for p in PRECONDITIONINGS), ((3, 16, 512), "frobenius"), ((4, 64, 64), "frobenius")],
    ids=str,
)
def test_a_bad_matrix_touches_no_other(shape, preconditioning):
    x = RNG.standard_normal(shape).astype(np.float32)
    f = compiled(preconditioning=preconditioning)
    good = np.asarray(f(x))
    for poison in (np.nan, np.inf, 0.0):
        bad = x.copy()
        bad[1] = poison
        got = np.asarray(f(bad))
        np.testing.assert_array_equal(np.delete(got, 1, 0), np.delete(good, 1, 0))
        assert np.isnan(got[1]).all() if poison else not got[1].any()


@pytest.mark.parametrize("method", ["direct", "gram"])
def test_one_poisoned_entry_shows(method):
    f = compiled(method=method)
    for poison in (np.nan, np.inf, -np.inf):
        x = np.ones((4, 8), np.float32)
        x[2, 3] = poison
        assert np.isnan(f(x)).all()


@pytest.mark.parametrize("shape", [(0, 4), (4, 0), (2, 0, 4), (0, 4, 4)])
def test_empty_inputs_pass(shape):
    assert muon_shard.orthogonalize(jnp.zeros(shape)).shape == shape


@pytest.mark.parametrize("method", ["direct", "gram"])
def test_eager_jit_and_vmap_agree(method):
    x = RNG.standard_normal((3, 8, 32)).astype(np.float32)
    f = functools.partial(muon_shard.orthogonalize, method=method)
    want = np.asarray(jax.jit(f)(x))
    np.testing.assert_allclose(f(jnp.asarray(x)), want, atol=2e-6)
    np.testing.assert_allclose(jax.jit(jax.vmap(f))(x), want, atol=2e-6)
    last = jax.jit(jax.vmap(f, in_axes=2, out_axes=2))(np.moveaxis(x, 0, 2))
    np.testing.assert_allclose(last, np.moveaxis(want, 0, 2), atol=2e-6)


@pytest.mark.parametrize(
    ("method", "preconditioning"), [*(("direct", p) for p in PRECONDITIONINGS), ("gram", "frobenius")]
)
def test_inside_shard_map(method, preconditioning):
    x = RNG.standard_normal((16, 8, 32)).astype(np.float32)
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    f = functools.partial(muon_shard.orthogonalize, method=method, preconditioning=preconditioning)
    mapped = jax.jit(jax.shard_map(f, mesh=mesh, in_specs=P("x"), out_specs=P("x")))
    np.testing.assert_allclose(mapped(x), jax.jit(f)(x), atol=2e-6)


@pytest.mark.parametrize("shape", [(24, 80), (80, 24)])
def test_ns_dtype_is_that_of_the_iteration_only(shape):
    x = RNG.standard_normal(shape).astype(np.float32)
    got = compiled(ns_dtype="bfloat16", ns_coeffs="dion")(x)
    assert got.dtype == jnp.float32
    narrow = compiled(ns_coeffs="dion")(jnp.asarray(x, jnp.bfloat16))
    assert narrow.dtype == jnp.bfloat16
    np.testing.assert_array_equal(got, np.asarray(narrow, np.float32))
    want = oracle(x, rows_of("dion"))
    error = np.linalg.norm(np.asarray(got) - want) / np.linalg.norm(want)
    assert 1e-4 < error < 5e-3  # it did round, once each way


def test_dtypes_of_the_iteration():
    assert narrowed("float32", None) == "float32"
    assert narrowed(jnp.float32, jnp.bfloat16) == "bfloat16"
    assert narrowed("complex64", "complex64") == "complex64"
    with pytest.raises(ValueError, match="ns_dtype=bfloat16 would drop the imaginary part of complex64 matrices"):
        muon_shard.orthogonalize(jnp.ones((2, 3), np.complex64), ns_dtype="bfloat16")
    with pytest.raises(ValueError, match="ns_dtype must be a float dtype, got int8"):
        muon_shard.orthogonalize(jnp.ones((2, 3)), ns_dtype="int8")


@pytest.mark.parametrize(
    ("method", "precision"), [("direct", "highest"), ("direct", jax.lax.Precision.HIGH), ("gram", "default")]
)
def test_precision_is_accepted(method, precision):
    want = oracle(WIDE, rows_of("standard"))
    assert np.abs(np.asarray(compiled(method=method, precision=precision)(WIDE)) - want).max() <= 1e-5


def test_precision_reaches_the_products():
    text = {p: compiled(method="direct", precision=p).lower(WIDE).as_text() for p in (None, "highest")}
    assert "HIGHEST" in text["highest"] and "HIGHEST" not in text[None]
    assert "HIGHEST" in compiled(method="gram").lower(WIDE).as_text()


@pytest.mark.parametrize("x", [np.ones(3, np.float32), np.ones((3, 3), np.int32)])
def test_not_a_matrix_raises(x):
    with pytest.raises(ValueError, match="must be a float or complex array of rank 2 or more"):
        muon_shard.orthogonalize(jnp.asarray(x))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"method": "nonesuch"}, "Unknown method 'nonesuch'; known: auto, direct, gram"),
        ({"ns_coeffs": "nonesuch"}, "Unknown ns_coeffs preset 'nonesuch'; known: standard"),
        ({"preconditioning": "nonesuch"}, "Unknown preconditioning 'nonesuch'; known: frobenius, spectral, aol"),
        ({"ns_coeffs": "aol"}, "ns_coeffs has 4 rows, too few for ns_steps=5"),
        ({"ns_coeffs": (1.0, 2.0)}, r"must have shape \(3,\) or \(n, 3\)"),
        ({"method": "gram", "ns_coeffs": (1e4, 0.0, 0.0)}, "no safe form here"),
    ],
)
def test_wrong_arguments_raise(arguments, message):
    with pytest.raises(ValueError, match=message):
        muon_shard.orthogonalize(jnp.ones((4, 64)), **arguments)


@pytest.mark.parametrize("steps", [0, -1, 2.5, "5"])
def test_steps_are_a_positive_python_int(steps):
    with pytest.raises(ValueError, match="ns_steps must be a Python int of at least 1"):
        NewtonSchulz(steps)


def test_surplus_rows_are_cut_from_the_end():
    rows = COEFFICIENTS["dion"]
    np.testing.assert_array_equal(
        compiled(ns_coeffs="dion", ns_steps=2)(WIDE), compiled(ns_coeffs=rows[:2], ns_steps=2)(WIDE)
    )


def test_equal_orthogonalizers_share_a_compiled_function():
    one, other = (make_orthogonalizer(None, "dion", 5) for _ in range(2))
    assert one == other and hash(one) == hash(other)
    assert one != make_orthogonalizer(None, "standard", 5) and one != make_orthogonalizer(None, "dion", 4)


def test_work_is_that_of_the_chosen_form():
    run = make_orthogonalizer(None, "standard", 5)
    square, wide = run.work(64, 64, "float32"), run.work(24, 10240, "float32")
    assert (square.form, wide.form) == ("direct", "gram")
    assert square.flops == 5 * 6 * 64**3
    assert wide.flops == 4 * 24**2 * 10240 + 2 * 24**3 * 17
    assert wide.cost > wide.flops


@pytest.mark.parametrize("shape", [(16, 512), (64, 64)])
def test_a_batch_of_one_is_the_matrix_alone(shape):
    assert np.prod(shape) >= ENOUGH
    run = make_orthogonalizer(None, "dion", 5)
    x = jnp.asarray(with_condition(RNG, *shape, 1e6), jnp.float32)
    operands = coefficients("dion", 5), jnp.float32(1e-8)
    alone, more = (jax.jit(run)(jnp.stack([x] * count), *operands) for count in (1, 3))
    want = oracle(x, rows_of("dion"))
    assert np.abs(np.asarray(alone) - want).max() <= 5e-4
    assert np.abs(np.asarray(more) - want).max() <= 5e-4


@pytest.mark.parametrize("batch", [(), (4,)])
def test_more_steps_need_no_more_memory(batch):
    def temporaries(method, coeffs, steps):
        x = jax.ShapeDtypeStruct((*batch, 128, 512), jnp.float32)
        f = compiled(ns_coeffs=coeffs, ns_steps=steps, method=method)
        return f.lower(x).compile().memory_analysis().temp_size_in_bytes

    assert temporaries("direct", "standard", 10) == pytest.approx(temporaries("direct", "standard", 5), rel=0.05)
    rows = COEFFICIENTS["deepseek_v4"] * 4
    few, more, most = (temporaries("gram", rows, steps) for steps in (10, 20, 40))
    assert most == pytest.approx(more, rel=0.05)
    assert more <= few  # XLA unrolls the loop over the one segment after the first, which costs it a copy of X


LARGE = {
    "ones": (lambda m, n: np.ones((m, n)), 5e-4),
    "rank 1": (lambda m, n: low_rank(np.random.default_rng(1), m, n, 1), 5e-4),
    "gaussian": (lambda m, n: np.random.default_rng(4).standard_normal((m, n)), 1e-4),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", LARGE)
def test_matrices_large_enough_for_blocks(kind):
    """Within the tolerance, or no worse than the direct form: long sets amplify the rounding of X itself.

    Errors of coherent matrices are small in each entry and all alike, so the whole is measured too.
    """
    make, tolerance = LARGE[kind]
    x = make(1024, 1536).astype(np.float32)
    parts = decompose(x)
    for coeffs in COEFFICIENTS:
        steps = steps_of(coeffs)
        form = NewtonSchulz(steps, method="gram", slopes=slopes(coeffs, steps)).form(*x.shape, "float32")
        assert "sym" in form.name
        want = compose(parts, rows_of(coeffs))
        gram, direct = (
            np.asarray(compiled(ns_coeffs=coeffs, ns_steps=steps, method=m)(x), np.float64) - want
            for m in ("gram", "direct")
        )
        assert np.abs(gram).max() <= max(tolerance, 1.2 * np.abs(direct).max()), coeffs
        norm = np.linalg.norm(want)
        assert np.linalg.norm(gram) <= max(5e-3 * norm, 1.2 * np.linalg.norm(direct)), coeffs
