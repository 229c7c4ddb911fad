"""Runs a form on matrices: segments of R = XXᴴ, m×m products, X ← QX."""

import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from muon_shard.newton_schulz.forms import Form
from muon_shard.newton_schulz.products import PRODUCTS, commuting, gram, is_narrow, split, wide
from muon_shard.newton_schulz.scaling import exponent, factors, largest, times_power

Each = Callable[..., Any]
"""(function of matrices, *batches) → the function's results for every matrix of the batches."""


def iterate(
    x: jax.Array,
    rows: jax.Array,
    eps: jax.Array,
    form: Form,
    preconditioning: str,
    precision: lax.PrecisionLike,
    each: Each,
) -> jax.Array:
    """All steps on x [..., m, n], m ≤ n, with coefficients `rows` [steps, 3]; same shape and dtype.

    The scaling that the first step needs is folded into its Q, so that X itself is never rewritten for it.
    """
    foldable = jnp.finfo(x.dtype).maxexp >= 128  # float16 could not hold the folded scale

    def prescaled_gram(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        power = exponent(largest(x), x.dtype)
        return power, gram(form.products, times_power(x, -power), form.blocks, precision)

    def first_segment(power: jax.Array, r: jax.Array) -> jax.Array:
        q = first_factor(power, r, rows, eps, form, preconditioning, precision, x.dtype)
        return times_power(q, -power) if foldable else q

    power, r = each(prescaled_gram, x)
    x = apply(each(first_segment, power, r), x if foldable else times_power(x, -power), form, precision)

    start = form.segments[0]
    for length, run in itertools.groupby(form.segments[1:]):
        count = len(list(run))

        def segment(i: jax.Array, x: jax.Array, start: int = start, length: int = length) -> jax.Array:
            mine = lax.dynamic_slice_in_dim(rows, start + i * length, length)
            r = each(lambda x: gram(form.products, x, form.blocks, precision), x)
            return apply(each(lambda r: _segment(r, mine, form, precision, x.dtype), r), x, form, precision)

        # A rolled loop: unrolled steps keep their temporaries alive and compile slower.
        x = lax.fori_loop(0, count, segment, x)
        start += count * length
    return x


def first_factor(
    power: jax.Array,
    r: jax.Array,
    rows: jax.Array,
    eps: jax.Array,
    form: Form,
    preconditioning: str,
    precision: lax.PrecisionLike,
    dtype: jax.typing.DTypeLike,
) -> jax.Array:
    """Q of the first segment from the Gram matrix r of X · 2^-power, which Q times the same makes the next X."""
    scale = factors(r, power, eps, preconditioning)
    return _segment(scale * r * scale.mT, rows[: form.segments[0]], form, precision, dtype) * scale.mT


def _segment(
    r: jax.Array, rows: jax.Array, form: Form, precision: lax.PrecisionLike, dtype: jax.typing.DTypeLike
) -> jax.Array:
    """Q with X ← QX for all steps of one segment. R, Y and Q are polynomials of one matrix: Hermitian, they commute.

    A step is Y = bR + cR², R ← R(a + Y)², Q ← Q(a + Y), with Q = q + P. By blocks the identity is held apart (q, not
    P, begins with it): a large diagonal inside mirrored products rounds each column differently, and the steps amplify
    what that leaves of the commutator. In full it is safe inside, where it cancels before it is rounded.
    """
    operands = dtype if form.direct else r.dtype
    eye = jnp.eye(r.shape[-1], dtype=r.dtype)
    apart = form.blocks > 1 and not form.direct

    def times(a: jax.Array, b: jax.Array) -> jax.Array:
        return commuting(form.products, a.astype(operands), b.astype(operands), form.blocks, precision)

    def polynomial(r: jax.Array, row: jax.Array) -> jax.Array:
        return row[1] * r + row[2] * times(r, r)

    def shifted(x: jax.Array, a: jax.Array, y: jax.Array) -> jax.Array:
        return a * x + times(x, y) if apart else times(x, a * eye + y)

    def step(i: jax.Array, carry: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
        (q, p, r), a = carry, rows[i, 0]
        y = polynomial(r, rows[i])
        return q * a, q * y + shifted(p, a, y), shifted(shifted(r, a, y), a, y)

    last = rows.shape[0] - 1
    a, y = rows[0, 0], polynomial(r, rows[0])
    q, p = (a, y) if apart else (jnp.zeros_like(a), a * eye + y)
    if last:
        q, p, r = lax.fori_loop(1, last, step, (q, p, shifted(shifted(r, a, y), a, y)))
        a, y = rows[last, 0], polynomial(r, rows[last])
        q, p = q * a, q * y + shifted(p, a, y)
    return q * eye + p


def apply(q: jax.Array, x: jax.Array, form: Form, precision: lax.PrecisionLike) -> jax.Array:
    """QX in the dtype of X. In Gram space Q cancels against X, so it is never rounded to a narrow dtype."""
    if form.direct:
        return jnp.matmul(q.astype(x.dtype), x, precision=precision, preferred_element_type=q.dtype).astype(x.dtype)
    if x.dtype == jnp.bfloat16:
        high, low = split(q)
        parts = [jnp.matmul(part, x, preferred_element_type=q.dtype) for part in (high, low)]
        return (parts[0] + parts[1]).astype(x.dtype)
    products = PRODUCTS["highest"] if is_narrow(x.dtype) else form.products
    return products.dot(q, x.astype(wide(x.dtype))).astype(x.dtype)
