import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from muon_shard.newton_schulz.products import PRODUCTS, commuting, gram, is_narrow, split, wide

RNG = np.random.default_rng(0)


def random(*shape, dtype="float32"):
    x = RNG.standard_normal(shape)
    if np.issubdtype(dtype, np.complexfloating):
        x = x + 1j * RNG.standard_normal(shape)
    return jnp.asarray(x, dtype)


def exact(x):
    return np.asarray(x).astype(np.complex128 if jnp.iscomplexobj(x) else np.float64)


def relative(got, want):
    return np.linalg.norm(exact(got) - want) / np.linalg.norm(want)


@pytest.mark.parametrize("name", ["highest", "split", "half"])
@pytest.mark.parametrize("compiled", [False, True])
def test_rounding_of_a_product_is_within_its_delta(name, compiled):
    products = PRODUCTS[name]
    dot = jax.jit(products.dot) if compiled else products.dot
    a, b = random(40, 50), random(50, 30)
    error = relative(dot(a, b), exact(a) @ exact(b))
    # More would be unsafe, far less would mean that the emulation does not round, or that delta costs restarts.
    assert products.delta / 100 < error <= 2 * products.delta


@pytest.mark.parametrize("name", PRODUCTS)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_products_of_narrow_operands_are_exact_to_float32(name, dtype):
    a, b = random(20, 30, dtype=dtype), random(30, 10, dtype=dtype)
    got = PRODUCTS[name].dot(a, b)
    assert got.dtype == jnp.float32
    assert relative(got, exact(a) @ exact(b)) < 1e-6


@pytest.mark.parametrize("compiled", [False, True])
def test_high_and_low_part_together_hold_sixteen_bits(compiled):
    x = random(64, 64) * jnp.float32(1e20)
    high, low = (jax.jit(split) if compiled else split)(x)
    assert high.dtype == low.dtype == jnp.bfloat16
    error = np.abs(exact(high) + exact(low) - exact(x)) / np.abs(exact(x))
    assert error.max() <= 2.0**-16
    np.testing.assert_array_equal(np.asarray(high), np.asarray(x).astype(ml_dtypes.bfloat16))


@pytest.mark.parametrize("blocks", [1, 6])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "complex64"])
def test_gram_matrices_by_blocks_are_those_in_full(dtype, blocks):
    x = random(3, 25, 40, dtype=dtype)
    got = jax.jit(lambda x: gram(PRODUCTS["highest"], x, blocks, None))(x)
    assert got.dtype == wide(dtype)
    assert relative(got, exact(x) @ exact(x).conj().mT) < 1e-6
    if blocks > 1:
        np.testing.assert_array_equal(np.asarray(got), np.asarray(got).conj().mT)


@pytest.mark.parametrize(
    ("name", "dtype"), [*((name, "float32") for name in PRODUCTS), ("same", "complex64"), ("highest", "complex64")]
)
@pytest.mark.parametrize("blocks", [1, 6])
def test_commuting_hermitian_factors_by_blocks(blocks, name, dtype):
    x = exact(random(25, 40, dtype=dtype)) / 10
    r = x @ x.conj().T
    z = np.eye(25) + 2 * r + r @ r
    r, z = (jnp.asarray((y + y.conj().T) / 2, dtype) for y in (r, z))
    got = jax.jit(lambda r, z: commuting(PRODUCTS[name], r, z, blocks, None))(r, z)
    assert relative(got, exact(r) @ exact(z)) < max(2 * PRODUCTS[name].delta, 1e-6)
    if blocks > 1 and PRODUCTS[name].delta:
        np.testing.assert_array_equal(np.asarray(got), np.asarray(got).conj().T)


def test_widths_of_dtypes():
    assert [is_narrow(d) for d in ("float16", "bfloat16", "float32", "complex64")] == [True, True, False, False]
    assert [str(wide(d)) for d in ("float16", "bfloat16", "float32", "complex64")] == ["float32"] * 3 + ["complex64"]
