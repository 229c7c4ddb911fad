"""Newton–Schulz orthogonalization of batches of matrices: the direct quintic iteration.

p(X) = a X + b (XXᵀ)X + c (XXᵀ)²X, applied to a matrix that was scaled so that its largest singular value is at most
about one (Jordan et al., Muon, 2024).
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

COEFFICIENTS: dict[str, tuple] = {
    # Keller Jordan, github.com/KellerJordan/Muon; optax's default.
    "standard": (3.4445, -4.7750, 2.0315),
    # Ahn et al., Dion (arXiv 2504.05295); optax's 'dion'.
    "dion": (
        (4.0848, -6.8946, 2.9270),
        (3.9505, -6.3029, 2.6377),
        (3.7418, -5.5913, 2.3037),
        (2.8769, -3.1427, 1.2046),
        (2.8366, -3.0525, 1.2012),
    ),
}
PRECONDITIONINGS = ("frobenius", "spectral", "aol", "schatten")


def coefficients(ns_coeffs: Any, ns_steps: Any) -> jax.Array:
    """Coefficients as optax keeps them in its state: a triple `[3]`, or one row per step `[ns_steps, 3]`.

    Surplus rows are cut from the end.

    Raises:
        ValueError: unknown preset, wrong shape, or fewer rows than steps (differs from optax, whose check is inverted).
    """
    if isinstance(ns_coeffs, str):
        if ns_coeffs not in COEFFICIENTS:
            raise ValueError(f"Unknown ns_coeffs preset {ns_coeffs!r}; known: {', '.join(COEFFICIENTS)}.")
        ns_coeffs = COEFFICIENTS[ns_coeffs]
    rows = jnp.asarray(ns_coeffs)
    if rows.ndim not in (1, 2) or rows.shape[-1] != 3:
        raise ValueError(f"ns_coeffs must have shape (3,) or (n, 3), got {rows.shape}.")
    if rows.ndim == 2:
        if rows.shape[0] < ns_steps:
            raise ValueError(f"ns_coeffs has {rows.shape[0]} rows, too few for ns_steps={ns_steps}.")
        rows = rows[:ns_steps]
    return rows


@dataclasses.dataclass(frozen=True)
class NewtonSchulz:
    """The orthogonalizer that owners run on batches of whole matrices.

    With `adaptive` the result is scaled by the dual norm of its input, per matrix (arXiv 2409.20325).
    """

    steps: int = 5
    preconditioning: str = "frobenius"
    adaptive: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.steps, int) or self.steps < 1:
            raise ValueError(
                f"ns_steps must be a Python int of at least 1, got {self.steps!r}. "
                "Under optax.inject_hyperparams pass static_args=('ns_steps',)."
            )
        if self.preconditioning not in PRECONDITIONINGS:
            raise ValueError(f"Unknown preconditioning {self.preconditioning!r}; known: {', '.join(PRECONDITIONINGS)}.")

    def __call__(self, x: jax.Array, coeffs: jax.Array, eps: jax.Array) -> jax.Array:
        """`x` [batch, m, n] with m ≤ n, `coeffs` [3] or [steps, 3], `eps` [] → [batch, m, n] of the same dtype.

        Accelerators want one product over the whole batch. On CPU one matrix after the other stays in cache through all
        steps; `benchmarks/ns_batching.py` compares the two (one device: mostly 1 to 1.8 times faster, slower only where
        matrices are tiny or, at times, few and large).
        """
        return lax.platform_dependent(x, coeffs, eps, cpu=self._one_by_one, default=self._batched)

    def _one_by_one(self, x: jax.Array, coeffs: jax.Array, eps: jax.Array) -> jax.Array:
        return lax.map(lambda one: self._batched(one[None], coeffs, eps)[0], x)

    def _batched(self, x: jax.Array, coeffs: jax.Array, eps: jax.Array) -> jax.Array:
        rows = jnp.broadcast_to(coeffs, (self.steps, 3)).astype(x.dtype)
        y, start = normalize(x, eps, self.preconditioning), 0
        if self.preconditioning in FIRST_STEPS:
            y, start = FIRST_STEPS[self.preconditioning](y, rows[0]), 1
        # A rolled loop: unrolled steps keep their temporaries alive and compile slower.
        y = lax.fori_loop(start, self.steps, lambda i, y: step(y, y @ _adjoint(y), rows[i]), y)
        if not self.adaptive:
            return y
        return jnp.sum(x.conj() * y, axis=(-2, -1), keepdims=True) * y


def orthogonalize(
    x: jax.Array,
    *,
    ns_coeffs: Any = "standard",
    ns_steps: int = 5,
    preconditioning: str = "frobenius",
    eps: float = 1e-8,
) -> jax.Array:
    """Orthogonalizes each matrix of `x` [..., m, n]; same shape and dtype.

    Zero in, zero out; NaN and infinity make their own matrix NaN and touch no other. Entries below the smallest normal
    number of the dtype may be flushed to zero by the backend.
    """
    if x.ndim < 2 or not jnp.issubdtype(x.dtype, jnp.inexact):
        raise ValueError(
            f"orthogonalize: x must be a float or complex array of rank 2 or more, got {x.dtype}{list(x.shape)}."
        )
    if x.size == 0:
        return x
    tall = x.shape[-2] > x.shape[-1]
    wide = x.mT if tall else x
    run = NewtonSchulz(ns_steps, preconditioning)
    y = run(wide.reshape(-1, *wide.shape[-2:]), coefficients(ns_coeffs, ns_steps), jnp.asarray(eps, jnp.float32))
    y = y.reshape(wide.shape)
    return y.mT if tall else y


def step(x: jax.Array, gram: jax.Array, coeffs: jax.Array) -> jax.Array:
    """One quintic step on x [batch, m, n] with its Gram matrix [batch, m, m].

    As (aI + bA + cA²)X: a pass over m×m instead of one over m×n for aX.
    """
    eye = jnp.eye(gram.shape[-1], dtype=gram.dtype)
    return (coeffs[0] * eye + coeffs[1] * gram + coeffs[2] * (gram @ gram)) @ x


def normalize(x: jax.Array, eps: jax.Array, preconditioning: str) -> jax.Array:
    """Scales each matrix so that NS converges, whatever its magnitude.

    An exact power of two first brings the largest entry near one, so that no square over- or underflows; the norm is
    taken in at least float32. `eps` is added to the norm as in optax where the norm is at least 1, and counts relative
    to the norm below that, so that tiny inputs give the same update as large ones.
    """
    wide = jnp.promote_types(jnp.finfo(x.dtype).dtype, jnp.float32)
    largest = jnp.max(jnp.abs(x), axis=(-2, -1), keepdims=True).astype(wide)
    exponent = jnp.frexp(largest)[1]
    half = exponent // 2  # 2^-exponent alone can overflow
    for part in (half, exponent - half):
        x = x * jnp.ldexp(jnp.ones((), wide), -part).astype(x.real.dtype)
    if preconditioning in FIRST_STEPS:
        return x
    if preconditioning == "spectral":
        full = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        norm = jnp.linalg.svd(full, compute_uv=False)[..., :1, None]
    else:
        norm = jnp.sqrt(
            jnp.sum(jnp.square(jnp.abs(x.astype(jnp.promote_types(x.dtype, wide)))), axis=(-2, -1), keepdims=True)
        )
    eps = jnp.asarray(eps, wide)
    norm = norm + jnp.minimum(jnp.ldexp(eps, -exponent), eps * norm)
    return jnp.where(largest == 0, jnp.zeros_like(x), (x / jnp.where(largest == 0, 1, norm)).astype(x.dtype))


def _aol_first_step(x: jax.Array, coeffs: jax.Array) -> jax.Array:
    """Rescales rows by the absolute row sums of the Gram matrix (Turbo-Muon, arXiv 2512.04632)."""
    gram = x @ _adjoint(x)
    scale = lax.rsqrt(jnp.clip(jnp.sum(jnp.abs(gram), axis=-1, keepdims=True), min=1e-8)).astype(x.dtype)
    return step(x * scale, gram * scale * scale.mT, coeffs)


def _schatten_first_step(x: jax.Array, coeffs: jax.Array) -> jax.Array:
    """Rescales by the Schatten-4 norm, the root of the Frobenius norm of the Gram matrix (arXiv 2506.10935)."""
    gram = x @ _adjoint(x)
    norm = jnp.linalg.norm(gram, axis=(-2, -1), keepdims=True)
    scale = lax.rsqrt(jnp.clip(norm, min=1e-8)).astype(x.dtype)
    return step(x * scale, gram * scale**2, coeffs)


FIRST_STEPS = {"aol": _aol_first_step, "schatten": _schatten_first_step}


def _adjoint(x: jax.Array) -> jax.Array:
    return x.conj().mT
