"""Against the scalar polynomial applied to the singular values, in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import muon_shard
from muon_shard.newton_schulz import COEFFICIENTS, NewtonSchulz, coefficients

RNG = np.random.default_rng(0)


def polynomial(sigma, coeffs, steps):
    for a, b, c in np.broadcast_to(np.array(COEFFICIENTS[coeffs], np.float64), (steps, 3)):
        sigma = a * sigma + b * sigma**3 + c * sigma**5
    return sigma


def oracle(x, coeffs="standard", steps=5):
    u, s, vt = np.linalg.svd(np.asarray(x, np.complex128 if np.iscomplexobj(x) else np.float64), full_matrices=False)
    norm = np.sqrt((s**2).sum(-1, keepdims=True))
    s = polynomial(np.divide(s, norm, out=np.zeros_like(s), where=norm > 0), coeffs, steps)
    return (u * s[..., None, :]) @ vt


def low_rank(m, n, rank):
    return RNG.standard_normal((m, rank)) @ RNG.standard_normal((rank, n))


INPUTS = {
    "square": (RNG.standard_normal((32, 32)), 1e-4),
    "wide": (RNG.standard_normal((16, 64)), 1e-5),
    "tall": (RNG.standard_normal((64, 16)), 1e-5),
    "batch": (RNG.standard_normal((2, 3, 8, 32)), 1e-5),
    "odd": (RNG.standard_normal((7, 13)), 1e-4),
    "row": (RNG.standard_normal((1, 9)), 1e-5),
    "column": (RNG.standard_normal((9, 1)), 1e-5),
    "single": (np.array([[-3.0]]), 1e-5),
    "ones": (np.ones((8, 24)), 5e-3),
    "rank one": (low_rank(16, 32, 1), 5e-3),
    "rank three": (low_rank(16, 32, 3), 5e-3),
    "zero": (np.zeros((4, 6)), 0),
    "zero in a batch": (np.stack([RNG.standard_normal((8, 32)), np.zeros((8, 32))]), 1e-5),
    "condition 1e6": (RNG.standard_normal((16, 64)) * np.logspace(0, -6, 16)[:, None], 5e-3),
    "complex": (RNG.standard_normal((8, 32)) + 1j * RNG.standard_normal((8, 32)), 1e-5),
}


@pytest.mark.parametrize("coeffs", COEFFICIENTS)
@pytest.mark.parametrize("name", INPUTS)
def test_against_the_svd(name, coeffs):
    x, tolerance = INPUTS[name]
    got = muon_shard.orthogonalize(jnp.asarray(x, np.complex64 if np.iscomplexobj(x) else np.float32), ns_coeffs=coeffs)
    assert np.abs(np.asarray(got) - oracle(x, coeffs)).max() <= tolerance


@pytest.mark.parametrize("preconditioning", ["frobenius", "spectral", "aol", "schatten"])
@pytest.mark.parametrize("scale", [1e-30, 1e-12, 1e12, 1e30])
def test_scale_invariance(scale, preconditioning):
    x = RNG.standard_normal((16, 32)).astype(np.float32)
    f = jax.jit(lambda x: muon_shard.orthogonalize(x, preconditioning=preconditioning))
    np.testing.assert_allclose(f(x * np.float32(scale)), f(x), atol=2.3e-5)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_neither_overflows_nor_vanishes(dtype):
    x = RNG.standard_normal((16, 64)).astype(np.float32)
    for scale in (2.0**-12, 1.0, 2.0**12):
        got = muon_shard.orthogonalize(jnp.asarray(x * scale, dtype))
        assert got.dtype == dtype
        assert np.abs(np.asarray(got, np.float32) - oracle(x)).max() < 0.1
    assert not np.asarray(muon_shard.orthogonalize(jnp.zeros((4, 4), dtype))).any()


@pytest.mark.parametrize("poison", [np.nan, np.inf, 0.0])
@pytest.mark.parametrize("preconditioning", ["frobenius", "spectral", "aol", "schatten"])
def test_a_bad_matrix_touches_no_other(poison, preconditioning):
    x = RNG.standard_normal((3, 8, 16)).astype(np.float32)
    bad = x.copy()
    bad[1] = poison
    f = jax.jit(lambda x: muon_shard.orthogonalize(x, preconditioning=preconditioning))
    good, got = np.asarray(f(x)), np.asarray(f(bad))
    np.testing.assert_array_equal(got[[0, 2]], good[[0, 2]])
    assert np.isnan(got[1]).all() if poison else not got[1].any()


def test_one_poisoned_entry_shows():
    x = np.ones((4, 8), np.float32)
    x[2, 3] = np.nan
    assert np.isnan(muon_shard.orthogonalize(jnp.asarray(x))).all()


def test_eps_keeps_its_meaning_for_inputs_of_normal_size():
    x = RNG.standard_normal((8, 16)).astype(np.float32)
    got = muon_shard.orthogonalize(jnp.asarray(x), ns_coeffs=(1.0, 0.0, 0.0), ns_steps=1, eps=0.5)
    np.testing.assert_allclose(got, x / (np.linalg.norm(x) + 0.5), rtol=1e-5)


def test_transpose_symmetry():
    x = jnp.asarray(RNG.standard_normal((24, 8)), jnp.float32)
    np.testing.assert_array_equal(muon_shard.orthogonalize(x.T), muon_shard.orthogonalize(x).T)


def test_empty_inputs_pass():
    assert muon_shard.orthogonalize(jnp.zeros((0, 4))).shape == (0, 4)
    assert muon_shard.orthogonalize(jnp.zeros((2, 0, 4))).shape == (2, 0, 4)


@pytest.mark.parametrize("x", [np.ones(3, np.float32), np.ones((3, 3), np.int32)])
def test_not_a_matrix_raises(x):
    with pytest.raises(ValueError, match="must be a float or complex array of rank 2 or more"):
        muon_shard.orthogonalize(jnp.asarray(x))


def test_coefficients_have_optax_shapes():
    assert coefficients("standard", 5).shape == (3,)
    assert coefficients("dion", 5).shape == (5, 3)


def test_equal_orthogonalizers_share_a_compiled_function():
    assert NewtonSchulz(5) == NewtonSchulz(5) and hash(NewtonSchulz(5)) == hash(NewtonSchulz(5))


@pytest.mark.parametrize("steps", [0, -1, 2.5])
def test_steps_are_a_positive_python_int(steps):
    with pytest.raises(ValueError, match="ns_steps must be a Python int of at least 1"):
        NewtonSchulz(steps)
