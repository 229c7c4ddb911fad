"""Hermitian matrices by their upper half: m(m+1)/2 elements, packed by slices and masks, without index tables.

With h = m/2 the matrix is [[A, B], [Bᴴ, C]]. B is stored whole, the upper half of A and the lower half of C share one
h × (h+1) rectangle (LAPACK's rectangular full packed format, up to the order of its parts).
"""

import jax
import jax.numpy as jnp
from jax import lax


def size(m: int) -> int:
    """Elements that one m×m matrix takes; an odd one is packed with a row of zeros more."""
    m += m % 2
    return m * (m + 1) // 2


def pack(r: jax.Array) -> jax.Array:
    """Hermitian [..., m, m] → [..., size(m)]; what is below the diagonal is not read but for C's half."""
    m = r.shape[-1]
    r = jnp.pad(r, ((0, 0),) * (r.ndim - 2) + ((0, m % 2),) * 2)
    h = r.shape[-1] // 2
    a, b, c = r[..., :h, :h], r[..., :h, h:], r[..., h:, h:]
    none = ((0, 0),) * (r.ndim - 1)
    shared = jnp.where(_above(h), jnp.pad(a, (*none, (1, 0))), jnp.pad(c, (*none, (0, 1))))
    flat = [x.reshape(*x.shape[:-2], x.shape[-2] * x.shape[-1]) for x in (b, shared)]
    return jnp.concatenate(flat, axis=-1)


def unpack(packed: jax.Array, m: int) -> jax.Array:
    """Inverse of `pack`: [..., size(m)] → [..., m, m]."""
    h = (m + 1) // 2
    b = packed[..., : h * h].reshape(*packed.shape[:-1], h, h)
    shared = packed[..., h * h :].reshape(*packed.shape[:-1], h, h + 1)
    a = _mirror(jnp.triu(shared[..., 1:]), jnp.triu(shared[..., 1:], 1))
    c = _mirror(jnp.tril(shared[..., :-1]), jnp.tril(shared[..., :-1], -1))
    top = jnp.concatenate([a, b], axis=-1)
    bottom = jnp.concatenate([b.conj().mT, c], axis=-1)
    return jnp.concatenate([top, bottom], axis=-2)[..., :m, :m]


def _above(h: int) -> jax.Array:
    """Where the shared rectangle holds A: column > row."""
    return lax.broadcasted_iota(jnp.int32, (h, h + 1), 1) > lax.broadcasted_iota(jnp.int32, (h, h + 1), 0)


def _mirror(kept: jax.Array, strict: jax.Array) -> jax.Array:
    """The Hermitian matrix from one half with its diagonal, and the same half without."""
    return kept + strict.conj().mT
