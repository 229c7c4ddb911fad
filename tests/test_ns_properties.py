"""What orthogonalization must do to any matrix, whatever its form. Two shapes, so that little is compiled."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import muon_shard
from benchmarks.ns_oracle import polynomial, rows_of

SHAPES = [(7, 20), (9, 9)]
METHODS = ["direct", "gram"]
TOLERANCE = {"direct": 2e-4, "gram": 1e-3}  # rounding, which small singular values amplify up to 500 times


@functools.cache
def compiled(**arguments):
    return jax.jit(functools.partial(muon_shard.orthogonalize, **arguments))


def orthogonalized(x, method, **arguments):
    return np.asarray(compiled(method=method, **arguments)(x))


def rotation(rng, size, dtype="float32"):
    x = rng.standard_normal((size, size))
    if dtype == "complex64":
        x = x + 1j * rng.standard_normal((size, size))
    return np.linalg.qr(x)[0]


@st.composite
def matrices(draw, dtype="float32", count=None):
    """Gaussian, with singular values spread over up to three decades, or of low rank."""
    m, n = draw(st.sampled_from(SHAPES))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    decades, rank = draw(st.floats(0, 3)), draw(st.integers(1, m))
    x = rng.standard_normal((count or 1, m, n))
    if dtype == "complex64":
        x = x + 1j * rng.standard_normal(x.shape)
    scale = np.logspace(0, -decades, m) * (np.arange(m) < rank)
    x = rotation(rng, m, dtype) @ (scale[:, None] * x)
    return (x if count else x[0]).astype(dtype), rng


def few(test):
    return settings(max_examples=25, deadline=None)(test)


@pytest.mark.parametrize("method", METHODS)
@few
@given(matrices(), st.floats(-29, 29))
def test_scale_does_not_matter(method, drawn, exponent):
    x, _ = drawn
    x = x / np.abs(x).max()
    got = orthogonalized(x * np.float32(10**exponent), method)
    np.testing.assert_allclose(got, orthogonalized(x, method), atol=TOLERANCE[method])


@pytest.mark.parametrize("method", METHODS)
@few
@given(matrices(), st.integers(-95, 95))
def test_powers_of_two_and_the_sign_change_no_bit(method, drawn, exponent):
    x, _ = drawn
    x = x / np.abs(x).max()
    x[np.abs(x) < 1e-6] = 0  # nothing may become subnormal
    want = orthogonalized(x, method, eps=0)
    np.testing.assert_array_equal(orthogonalized(np.ldexp(x, exponent), method, eps=0), want)
    np.testing.assert_array_equal(orthogonalized(-x, method, eps=0), -want)


@pytest.mark.parametrize("method", METHODS)
@few
@given(matrices())
def test_rotations_pass_through(method, drawn):
    x, rng = drawn
    u, v = (rotation(rng, size) for size in x.shape)
    got = orthogonalized((u @ x @ v).astype(np.float32), method)
    np.testing.assert_allclose(got, u @ orthogonalized(x, method) @ v, atol=TOLERANCE[method])


@pytest.mark.parametrize("method", METHODS)
@few
@given(matrices("complex64"))
def test_unitary_factors_pass_through(method, drawn):
    x, rng = drawn
    u, v = (rotation(rng, size, "complex64") for size in x.shape)
    got = orthogonalized((u @ x @ v).astype(np.complex64), method)
    np.testing.assert_allclose(got, u @ orthogonalized(x, method) @ v, atol=TOLERANCE[method])


@pytest.mark.parametrize("method", METHODS)
@few
@given(matrices())
def test_rows_and_columns_may_be_permuted(method, drawn):
    x, rng = drawn
    rows, columns = (rng.permutation(size) for size in x.shape)
    got = orthogonalized(x[rows][:, columns], method)
    np.testing.assert_allclose(got, orthogonalized(x, method)[rows][:, columns], atol=TOLERANCE[method])


@pytest.mark.parametrize("method", METHODS)
@few
@given(matrices())
def test_transposing_commutes(method, drawn):
    x, _ = drawn
    np.testing.assert_allclose(orthogonalized(x.T, method), orthogonalized(x, method).T, atol=TOLERANCE[method])


@pytest.mark.parametrize("method", METHODS)
def test_transposing_changes_no_bit_unless_xla_fuses_it(method):
    x = jnp.asarray(np.random.default_rng(0).standard_normal((24, 8)), jnp.float32)
    tall, wide = (muon_shard.orthogonalize(y, method=method) for y in (x, x.T))
    np.testing.assert_array_equal(tall.T, wide)


@pytest.mark.parametrize("method", METHODS)
@few
@given(matrices(count=3), st.integers(0, 2), st.sampled_from([0.0, np.nan, np.inf, 1e30, 1e-30]))
def test_matrices_of_a_batch_change_no_bit_of_each_other(method, drawn, which, factor):
    x, _ = drawn
    other = x.copy()
    other[which] = factor if factor == 0 or not np.isfinite(factor) else x[which] * np.float32(factor)
    got, want = orthogonalized(other, method), orthogonalized(x, method)
    np.testing.assert_array_equal(np.delete(got, which, 0), np.delete(want, which, 0))
    assert np.isfinite(factor) == np.isfinite(got[which]).all()


@pytest.mark.parametrize("method", METHODS)
@few
@given(st.sampled_from(SHAPES), st.integers(0, 2**32 - 1), st.floats(1e-3, 1e3))
def test_orthogonal_matrices_are_kept_up_to_the_band_of_the_set(method, shape, seed, size):
    m, n = shape
    q = rotation(np.random.default_rng(seed), n)[:m].astype(np.float32)
    factor = polynomial(1 / np.sqrt(m), rows_of("standard"))
    assert 0.68 <= factor <= 1.135
    np.testing.assert_allclose(orthogonalized(q * np.float32(size), method), factor * q, atol=1e-5)


@pytest.mark.parametrize("method", METHODS)
@few
@given(matrices())
def test_singular_values_stay_within_the_band(method, drawn):
    x, _ = drawn
    assert np.linalg.norm(orthogonalized(x, method).astype(np.float64), 2) <= 1.21
