"""`NewtonSchulz`, which owners run on batches of whole matrices, and `orthogonalize`, the numerics alone."""

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax

from muon_shard.newton_schulz.coefficients import coefficients, slopes
from muon_shard.newton_schulz.forms import METHODS, Form, choose, platform_of, segments
from muon_shard.newton_schulz.iterate import Each, apply, first_factor, iterate
from muon_shard.newton_schulz.products import PRODUCTS, gram, wide
from muon_shard.newton_schulz.scaling import PRECONDITIONINGS, times_power
from muon_shard.orthogonalizer import Adaptive, GramSpace, Orthogonalizer, Work, as_orthogonalizer

Method = Literal["auto", "direct", "gram"]
Preconditioning = Literal["frobenius", "spectral", "aol", "schatten"]
ENOUGH = 4096
"""Entries per matrix from which XLA on CPU is faster with one matrix after the other: it stays in cache."""


@dataclasses.dataclass(frozen=True)
class NewtonSchulz(Orthogonalizer):
    """Newton–Schulz by the cheapest safe form for each shape.

    Attributes:
        steps: Newton–Schulz steps.
        preconditioning: one of `PRECONDITIONINGS`.
        method: 'auto', or a form to be used whatever it costs.
        slopes: coefficient a of each step, see `coefficients.slopes`.
        precision: of the direct form's products, as in `jnp.matmul`.
        platform: what it will run on.
    """

    steps: int = 5
    preconditioning: str = "frobenius"
    method: str = "auto"
    slopes: tuple[float, ...] | None = None
    precision: Any = None
    platform: str = "cpu"

    def __post_init__(self) -> None:
        if not isinstance(self.steps, int) or self.steps < 1:
            raise ValueError(
                f"ns_steps must be a Python int of at least 1, got {self.steps!r}. "
                "Under optax.inject_hyperparams pass static_args=muon_shard.STATIC_ARGS."
            )
        if self.preconditioning not in PRECONDITIONINGS:
            raise ValueError(f"Unknown preconditioning {self.preconditioning!r}; known: {', '.join(PRECONDITIONINGS)}.")
        if self.method not in METHODS:
            raise ValueError(f"Unknown method {self.method!r}; known: {', '.join(METHODS)}.")

    def form(self, m: int, n: int, dtype: jax.typing.DTypeLike) -> Form:
        """The form for one m×n matrix, m ≤ n."""
        return self._choice(m, n, dtype)[0]

    def work(self, m: int, n: int, dtype: jax.typing.DTypeLike) -> Work:
        form, cost = self._choice(m, n, dtype)
        return Work(form.name, form.flops(m, n), round(cost))

    def in_gram_space(self, dtype: jax.typing.DTypeLike) -> "GramNewtonSchulz | str":
        if self.slopes is None:
            return "the coefficients are traced, so nobody can tell whether Gram matrices alone are safe"
        if len(cut := segments(self.slopes, PRODUCTS["highest"].delta)) > 1:
            return f"its {self.steps} steps need {len(cut) - 1} restarts from the whole matrix"
        if self.preconditioning == "aol":
            return "preconditioning='aol' scales rows, which makes its factor unsymmetric"
        return GramNewtonSchulz(self, str(jnp.dtype(dtype)))

    def on(self, platform: str) -> "NewtonSchulz":
        return dataclasses.replace(self, platform=platform)

    @property
    def each(self) -> Each:
        """How the platform runs a batch."""
        return one_by_one if self.platform == "cpu" else batched

    def _choice(self, m: int, n: int, dtype: jax.typing.DTypeLike) -> tuple[Form, float]:
        name = str(jnp.dtype(dtype))
        return choose(m, n, name, self.slopes, self.steps, self.method, self.platform, self.full)

    @property
    def full(self) -> bool:
        """Whether float32 products are wanted at full precision."""
        return self.precision in (lax.Precision.HIGHEST, "highest", "float32")

    def rows(self, coeffs: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
        """Coefficients [3] or [steps, 3] → [steps, 3] in the precision that matrices of `dtype` are worked on in."""
        return jnp.broadcast_to(coeffs, (self.steps, 3)).astype(wide(jnp.finfo(dtype).dtype))

    def __call__(self, x: jax.Array, coeffs: jax.Array, eps: jax.Array) -> jax.Array:
        """`x` [batch, m, n] with m ≤ n, `coeffs` [3] or [steps, 3], `eps` [] → [batch, m, n] of the same dtype."""
        rows = self.rows(coeffs, x.dtype)
        m, n = x.shape[-2:]
        form = self.form(m, n, x.dtype)
        each = self.each

        def run(x: jax.Array, each: Each) -> jax.Array:
            return iterate(x, rows, eps, form, self.preconditioning, self.precision, each)

        if x.shape[0] == 1:  # also more accurate: XLA on CPU treats batches of exactly one differently
            return run(x[0], batched)[None]
        if form.direct:
            return each(lambda x: run(x, batched), x)
        return run(x, each)


@dataclasses.dataclass(frozen=True)
class GramNewtonSchulz(GramSpace):
    """Newton–Schulz in one segment of the Gram form, taken apart."""

    whole: NewtonSchulz
    dtype: str

    @property
    def form(self) -> Form:
        return Form((self.whole.steps,), PRODUCTS["highest"])

    def gram(self, x: jax.Array, power: jax.Array) -> jax.Array:
        form, precision = self.form, self.whole.precision
        return self.whole.each(lambda x, p: gram(form.products, times_power(x, -p), form.blocks, precision), x, power)

    def factor(self, r: jax.Array, power: jax.Array, *operands: jax.Array) -> jax.Array:
        (coeffs, eps), whole = operands, self.whole
        rows = whole.rows(coeffs, self.dtype)

        def one(power: jax.Array, r: jax.Array) -> jax.Array:
            return first_factor(
                power, r, rows, eps, self.form, whole.preconditioning, whole.precision, jnp.dtype(self.dtype)
            )

        return whole.each(one, power, r)

    def apply(self, q: jax.Array, power: jax.Array, x: jax.Array) -> jax.Array:
        return apply(q, times_power(x, -power), self.form, self.whole.precision)

    def works(self, m: int, n: int) -> tuple[Work, Work]:
        square, gram, apply = self.form.flops_of_products(m, n)
        platform = platform_of(self.whole.platform)
        costs = self.form.costs(m, n, jnp.dtype(self.dtype), platform, self.whole.full)
        return tuple(
            Work("gram", flops, round(cost)) for flops, cost in zip((square, gram + apply), costs, strict=True)
        )  # type: ignore[return-value]


def batched(function: Any, *batches: jax.Array) -> Any:
    """All matrices in one product: what accelerators want."""
    return function(*batches)


def one_by_one(function: Any, *batches: jax.Array) -> Any:
    """One matrix after the other, two of them side by side, unless they are tiny."""
    if max(x[0].size for x in batches) < ENOUGH:
        return function(*batches)
    return lax.scan(lambda none, matrices: (none, function(*matrices)), None, batches, unroll=2)[1]


def make_orthogonalizer(
    given: Any,
    ns_coeffs: Any,
    ns_steps: int,
    preconditioning: str = "frobenius",
    *,
    method: str = "auto",
    adaptive: bool = False,
) -> Orthogonalizer:
    """What the owners run: Newton–Schulz, or what the user has given, scaled by the dual norm where asked for.

    Raises:
        ValueError: bad coefficients, steps or names, or no function was given.
    """
    if given is not None:
        run = as_orthogonalizer(given)
    else:
        run = NewtonSchulz(ns_steps, preconditioning, method)
        run = dataclasses.replace(run, slopes=slopes(ns_coeffs, ns_steps))
    return Adaptive(run) if adaptive else run


def narrowed(dtype: jax.typing.DTypeLike, ns_dtype: jax.typing.DTypeLike | None) -> str:
    """The dtype in which matrices of `dtype` are orthogonalized.

    Raises:
        ValueError: `ns_dtype` is no float, or cannot serve; see `why_not_narrowed`.
    """
    if reason := why_not_narrowed(dtype, ns_dtype):
        raise ValueError(f"{reason}.")
    return str(jnp.dtype(dtype if ns_dtype is None else ns_dtype))


def why_not_narrowed(dtype: jax.typing.DTypeLike, ns_dtype: jax.typing.DTypeLike | None) -> str:
    """Why matrices of `dtype` cannot be orthogonalized in `ns_dtype`, in one sentence; '' if they can.

    Raises:
        ValueError: `ns_dtype` is no float, whatever the matrices are.
    """
    if ns_dtype is None:
        return ""
    if not jnp.issubdtype(ns_dtype, jnp.inexact):
        raise ValueError(f"ns_dtype must be a float dtype, got {jnp.dtype(ns_dtype)}.")
    given, inner = (jnp.issubdtype(x, jnp.complexfloating) for x in (dtype, ns_dtype))
    if given and not inner:
        return f"ns_dtype={jnp.dtype(ns_dtype)} would drop the imaginary part of {jnp.dtype(dtype)} matrices"
    if inner and not given:
        return f"ns_dtype={jnp.dtype(ns_dtype)} is complex and {jnp.dtype(dtype)} matrices are real"
    return ""


def orthogonalize(
    x: jax.Array,
    *,
    ns_coeffs: Any = "standard",
    ns_steps: int = 5,
    method: Method = "auto",
    preconditioning: Preconditioning = "frobenius",
    ns_dtype: jax.typing.DTypeLike | None = None,
    precision: lax.PrecisionLike = None,
    eps: jax.typing.ArrayLike = 1e-8,
) -> jax.Array:
    """Orthogonalizes each matrix of `x` [..., m, n]; same shape and dtype.

    Zero in, zero out; NaN and infinity make their own matrix NaN and touch no other. Inputs times anything from 1e-30
    to 1e30 give the same result to rounding (fp32 and bfloat16); beyond that it fades, and entries below the smallest
    normal number of the dtype may be flushed to zero by the backend.

    Args:
        x: real or complex floats.
        ns_coeffs: a triple (a, b, c), rows of triples, or the name of a set: see `COEFFICIENTS`.
        ns_steps: steps; surplus rows of `ns_coeffs` are cut from the end.
        method: 'auto' takes the cheapest form for the shape on this platform, 'direct' or 'gram' insist.
        preconditioning: what X is divided by first: 'frobenius' norm, 'spectral' norm (a bound from above, tight to
            2e-5), 'aol' (rows, arXiv 2512.04632) or 'schatten' (4-norm, arXiv 2506.10935).
        ns_dtype: dtype of X during the iteration; None: its own. Gram matrices are float32 at least.
        precision: of the direct form's products, as in `jnp.matmul`.
        eps: added to the norm where that is at least 1, relative to it below.

    Raises:
        ValueError: `x` holds no matrices of floats, unknown names, fewer rows than steps, no safe Gram form.
    """
    if x.ndim < 2 or not jnp.issubdtype(x.dtype, jnp.inexact):
        raise ValueError(
            f"orthogonalize: x must be a float or complex array of rank 2 or more, got {x.dtype}{list(x.shape)}."
        )
    rows = coefficients(ns_coeffs, ns_steps)
    run = NewtonSchulz(ns_steps, preconditioning, method, slopes(ns_coeffs, ns_steps), precision, jax.default_backend())
    if x.size == 0:
        return x
    tall = x.shape[-2] > x.shape[-1]
    inner = x.astype(narrowed(x.dtype, ns_dtype))
    inner = inner.mT if tall else inner
    y = run(inner.reshape(-1, *inner.shape[-2:]), rows, jnp.asarray(eps, jnp.float32)).reshape(inner.shape)
    return (y.mT if tall else y).astype(x.dtype)
