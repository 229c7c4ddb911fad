import jax
import jax.numpy as jnp
import numpy as np
import pytest

from muon_shard import triangles


@pytest.mark.parametrize("dtype", ["float32", "complex64"])
@pytest.mark.parametrize("shape", [(1, 1), (2, 2), (3, 5, 5), (2, 3, 8, 8), (24, 24), (0, 4, 4)])
def test_half_a_matrix_is_enough(shape, dtype):
    rng = np.random.default_rng(0)
    r = rng.standard_normal(shape) + (1j * rng.standard_normal(shape) if dtype == "complex64" else 0)
    r = (r + r.conj().swapaxes(-1, -2)).astype(dtype)
    m = shape[-1]
    packed = jax.jit(triangles.pack)(r)
    assert packed.shape == (*shape[:-2], triangles.size(m)) and triangles.size(m) <= (m + 1) * (m + 2) // 2
    np.testing.assert_array_equal(jax.jit(triangles.unpack, static_argnums=1)(packed, m), r)


def test_no_index_tables():
    text = jax.jit(triangles.pack).lower(jnp.ones((2, 64, 64))).compile().as_text()
    assert "gather(" not in text
