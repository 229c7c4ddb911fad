import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import muon_shard
from benchmarks.ns_accuracy import form_of, run
from benchmarks.ns_oracle import low_rank, oracle, relative_errors, rows_of
from muon_shard.newton_schulz.scaling import PRECONDITIONINGS, exponent, factors, largest, spectral, times_power

RNG = np.random.default_rng(0)
WIDE = RNG.standard_normal((16, 64)).astype(np.float32)
SCALES = [1e-30, 1e-19, 1e-8, 1e-2, 1.0, 3e3, 1e12, 1e21, 1e30]


def test_exponents_are_those_of_the_largest_entry():
    x = np.zeros((7, 2, 3), np.float32)
    x[:, 1, 2] = [0, 1, -1.5, 2.0**-90, 3e38, np.inf, np.nan]
    assert exponent(largest(jnp.asarray(x)), jnp.float32).reshape(-1).tolist() == [0, 1, 1, -89, 100, 0, 0]


@pytest.mark.parametrize("dtype", ["float16", "float32", "complex64"])
def test_powers_of_two_are_exact(dtype):
    x = (WIDE * (1 + 1j) if dtype == "complex64" else WIDE).astype(dtype)
    power = jnp.full((1, 1), 7)
    got = np.asarray(times_power(times_power(jnp.asarray(x), power), -power))
    np.testing.assert_array_equal(got, x)
    np.testing.assert_array_equal(np.asarray(times_power(jnp.asarray(x), power)), x * np.asarray(128, dtype))


SPECTRA = {
    "gaussian": WIDE,
    "one dominates": WIDE + 100,
    "all equal": np.linalg.qr(RNG.standard_normal((64, 16)))[0].T,
    "two lead": np.diag([1.0, 1.0 - 1e-6, *[0.5] * 14]),
    "rank 1": low_rank(RNG, 16, 64, 1),
    "complex": WIDE * np.exp(1j * RNG.standard_normal((16, 64))),
}


@pytest.mark.parametrize("kind", SPECTRA)
def test_the_spectral_norm_is_a_tight_bound(kind):
    x = SPECTRA[kind].astype(np.complex64 if kind == "complex" else np.float32)
    exact = np.linalg.norm(x.astype(np.complex128), 2)
    got = float(jax.jit(spectral)(jnp.asarray(x @ x.conj().T)).item())
    assert exact * (1 - 1e-5) <= got <= exact * (1 + 1e-4)


@pytest.mark.parametrize(
    ("preconditioning", "exact"),
    [
        ("frobenius", lambda x: np.linalg.norm(x)),
        ("schatten", lambda x: (np.linalg.svd(x, compute_uv=False) ** 4).sum() ** 0.25),
        ("aol", lambda x: np.sqrt(np.abs(x @ x.conj().T).sum(1, keepdims=True))),
    ],
)
@pytest.mark.parametrize("kind", ["gaussian", "rank 1", "complex"])
def test_the_other_norms(kind, preconditioning, exact):
    x = SPECTRA[kind].astype(np.complex64 if kind == "complex" else np.float32)
    got = PRECONDITIONINGS[preconditioning](jnp.asarray(x @ x.conj().T))
    np.testing.assert_allclose(got, np.broadcast_to(exact(x.astype(np.complex128)), got.shape), rtol=1e-5)


@pytest.mark.parametrize("preconditioning", PRECONDITIONINGS)
def test_zero_is_divided_by_one(preconditioning):
    got = factors(jnp.zeros((4, 4)), jnp.zeros((1, 1), jnp.int32), jnp.float32(0), preconditioning)
    assert (np.asarray(got) == 1).all()


@pytest.mark.parametrize(("size", "added"), [(100.0, 0.5), (2.0, 0.5), (0.25, 0.125), (1e-20, 0.5e-20)])
def test_eps_is_absolute_for_norms_above_one_and_relative_below(size, added):
    x = WIDE / np.linalg.norm(WIDE) * np.float32(size)
    f = jax.jit(lambda x: muon_shard.orthogonalize(x, ns_coeffs=(1.0, 0.0, 0.0), ns_steps=1, eps=0.5))
    np.testing.assert_allclose(f(x), x / (size + added), rtol=1e-5)


def test_eps_does_not_count_where_optax_has_none():
    for preconditioning in ("aol", "schatten"):
        r, power = jnp.asarray(WIDE @ WIDE.T), jnp.zeros((1, 1), jnp.int32)
        got = [factors(r, power, jnp.float32(eps), preconditioning) for eps in (0, 0.5)]
        np.testing.assert_array_equal(*got)


@pytest.mark.parametrize("preconditioning", PRECONDITIONINGS)
@pytest.mark.parametrize("method", ["direct", "gram"])
def test_scale_invariance(method, preconditioning):
    f = jax.jit(functools.partial(muon_shard.orthogonalize, method=method, preconditioning=preconditioning))
    got = np.asarray(f(np.stack([WIDE * np.float32(scale) for scale in SCALES])))
    np.testing.assert_allclose(got, np.broadcast_to(got[SCALES.index(1.0)], got.shape), atol=2.3e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("how", ["direct", "gram"])
def test_powers_of_two_change_no_bit(how, dtype):
    x = jnp.asarray(np.stack([np.ldexp(WIDE, k) for k in (-99, -40, -1, 0, 1, 40, 97)]), dtype)
    got = np.asarray(run(x, jnp.asarray(rows_of("dion"), jnp.float32), form_of(how, "dion", 5, dtype)), np.float32)
    np.testing.assert_array_equal(got, np.broadcast_to(got[3], got.shape))


@pytest.mark.parametrize("how", ["direct", "gram"])
def test_float16_neither_overflows_nor_vanishes(how):
    scales = [6e-8 * 2**10, 2.0**-12, 1.0, 2.0**12, 6e4 / np.abs(WIDE).max()]
    x = jnp.asarray(np.stack([WIDE * np.float32(scale) for scale in scales]), "float16")
    got = run(x, jnp.asarray(rows_of("standard"), jnp.float32), form_of(how, "standard", 5, "float16"))
    want = oracle(np.asarray(x, np.float64), rows_of("standard"))
    assert relative_errors(np.asarray(got, np.float64), want).max() <= 6e-3


@pytest.mark.parametrize(
    ("dtype", "preconditioning"),
    [
        *(("float32", p) for p in PRECONDITIONINGS),
        ("bfloat16", "frobenius"),
        ("float16", "frobenius"),
        ("float16", "aol"),
    ],
)
def test_zero_stays_zero_and_subnormals_stay_finite(dtype, preconditioning):
    tiny = np.float64(jnp.finfo(dtype).smallest_subnormal) * np.arange(8.0)
    x = jnp.asarray(np.stack([np.zeros((4, 8)), np.tile(tiny, (4, 1)), np.full((4, 8), jnp.finfo(dtype).max)]), dtype)
    got = jax.jit(functools.partial(muon_shard.orthogonalize, preconditioning=preconditioning))(x)
    assert got.dtype == dtype
    got = np.asarray(got, np.float32)
    assert not got[0].any()
    assert np.isfinite(got).all() and np.abs(got).max() <= 1.3
