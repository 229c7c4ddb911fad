"""Scaling before the first step: exact powers of two, then a norm taken from the Gram matrix.

All preconditionings of optax come from R = XXᴴ alone, so no pass over X is spent on them.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

FARTHEST = 100
"""Largest exponent that is scaled away in float32's range: 2^±100 is 1e±30. Both ends leave room for the norm."""

SQUARINGS = 18
"""The Schatten norm of order 2^19 exceeds the spectral norm by at most ln(m) / 2^19: 2e-5 for 4096 rows."""


def largest(x: jax.Array) -> jax.Array:
    """[..., m, n] → [..., 1, 1]: the size of each largest entry, in float32 at least."""
    most = jnp.max(jnp.abs(x), axis=(-2, -1), keepdims=True)
    return most.astype(jnp.promote_types(most.dtype, jnp.float32))


def exponent(most: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
    """int32: the power of two of the `largest` entries of matrices of `dtype`; 0 for zero, inf, NaN."""
    farthest = FARTHEST if jnp.finfo(dtype).maxexp <= 128 else 8 * FARTHEST
    return jnp.where(jnp.isfinite(most), jnp.clip(jnp.frexp(most)[1], -farthest, farthest), 0)


def times_power(x: jax.Array, power: jax.Array) -> jax.Array:
    """Returns x · 2^power, exact unless it leaves the range of the dtype."""
    real = jnp.promote_types(jnp.finfo(x.dtype).dtype, jnp.float32)
    return (x * jnp.ldexp(jnp.ones((), real), power)).astype(x.dtype)


def frobenius(gram: jax.Array) -> jax.Array:
    """Root of the trace."""
    return jnp.sqrt(jnp.trace(gram.real, axis1=-2, axis2=-1)[..., None, None])


def spectral(gram: jax.Array) -> jax.Array:
    """Largest singular value, from repeated squaring of the Gram matrix: a bound from above, tight to 2e-5.

    tr(R^N)^(1/N) → λ_max. Only products, where an SVD of X would be slow on accelerators.
    """

    def square(i: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        power, log = carry
        trace = frobenius(power) ** 2
        power = power / jnp.where(trace == 0, 1, trace)
        return jnp.matmul(power, power, precision=lax.Precision.HIGHEST), log + jnp.log(trace) * 0.5 ** i.astype(
            log.dtype
        )

    trace = frobenius(gram)
    power, log = lax.fori_loop(0, SQUARINGS, square, (gram, jnp.zeros_like(trace)))
    return jnp.exp(0.5 * (log + jnp.log(frobenius(power) ** 2) * 0.5**SQUARINGS))


def schatten(gram: jax.Array) -> jax.Array:
    """Schatten-4 norm, the root of the Frobenius norm of the Gram matrix (arXiv 2506.10935)."""
    return jnp.sqrt(jnp.linalg.norm(gram, axis=(-2, -1), keepdims=True))


def aol(gram: jax.Array) -> jax.Array:
    """One divisor per row, the root of the absolute row sum of the Gram matrix (arXiv 2512.04632)."""
    return jnp.sqrt(jnp.sum(jnp.abs(gram), axis=-1, keepdims=True))


PRECONDITIONINGS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "frobenius": frobenius,
    "spectral": spectral,
    "aol": aol,
    "schatten": schatten,
}
"""Gram matrix [..., m, m] → divisor of X, [..., 1, 1] or [..., m, 1]."""

WITH_EPS = ("frobenius", "spectral")


def factors(gram: jax.Array, power: jax.Array, eps: jax.Array, preconditioning: str) -> jax.Array:
    """What each row of the prescaled X is multiplied with before the first step: [..., 1, 1] or [..., m, 1].

    `eps` is added to the norm as in optax where the norm (of X before it was prescaled by 2^-power) is at least 1, and
    counts relative to the norm below that, so that tiny inputs give the same update as large ones.
    """
    norm = PRECONDITIONINGS[preconditioning](gram)
    if preconditioning in WITH_EPS:
        eps = jnp.asarray(eps, norm.dtype)
        norm = norm + jnp.minimum(jnp.ldexp(eps, -power), eps * norm)
    return 1 / jnp.where(norm == 0, 1, norm)
