"""Matrix products at a stated precision, and products that are known to be Hermitian at almost half the FLOPs."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax


def adjoint(x: jax.Array) -> jax.Array:
    """Conjugate transpose of each matrix."""
    return x.conj().mT


def is_narrow(dtype: jax.typing.DTypeLike) -> bool:
    """Whether a float dtype is shorter than float32."""
    return jnp.dtype(dtype).itemsize < 4


def wide(dtype: jax.typing.DTypeLike) -> jnp.dtype:
    """The dtype in which Gram matrices are kept: at least float32, complex if need be."""
    return jnp.promote_types(dtype, jnp.float32)


@dataclasses.dataclass(frozen=True)
class Products:
    """How the m×m products of a form are multiplied.

    Attributes:
        name: 'same', 'highest', 'split' or 'half', see `PRODUCTS`.
        delta: relative rounding of one product, which the Gram form amplifies; 0 where nothing does.
        passes: products of the hardware's matrix units for one of ours.
    """

    name: str
    delta: float
    passes: int

    def dot(self, a: jax.Array, b: jax.Array, precision: lax.PrecisionLike = None) -> jax.Array:
        """`a` [..., i, k] times `b` [..., k, j] → [..., i, j] in at least float32."""
        if is_narrow(a.dtype) and a.dtype == b.dtype:
            return _dot(a, b, precision)  # such products are exact in float32
        if self.name == "highest":
            return _dot(a, b, lax.Precision.HIGHEST)
        if self.name == "half":
            return _dot(a.astype(jnp.float16), b.astype(jnp.float16), None)
        if self.name == "split":
            (a1, a2), (b1, b2) = split(a), split(b)
            return _dot(a1, b1, None) + (_dot(a1, b2, None) + _dot(a2, b1, None))
        return _dot(a, b, precision)


PRODUCTS = {
    products.name: products
    for products in (
        # In the dtype of X, at the precision the caller asked for: what the direct form does.
        Products("same", 0.0, 1),
        # float32 (or wider) throughout; TF32 is not float32.
        Products("highest", 1e-7, 1),
        # Three bfloat16 products of high and low parts, added in float32.
        Products("split", 2e-5, 3),
        # float16 operands, added in float32.
        Products("half", 5e-4, 1),
    )
}


def split(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """High and low parts of x, both bfloat16."""
    # XLA may see through a cast and back; a reduction of precision it must keep.
    high = lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)
    return high.astype(jnp.bfloat16), (x - high).astype(jnp.bfloat16)


def gram(products: Products, x: jax.Array, blocks: int, precision: lax.PrecisionLike) -> jax.Array:
    """XXᴴ of x [..., m, n]: [..., m, m], exactly Hermitian where it is multiplied by blocks."""
    if blocks == 1:
        return products.dot(x, adjoint(x), precision)
    return _mirrored(products, x, x, blocks, precision)


def commuting(products: Products, a: jax.Array, b: jax.Array, blocks: int, precision: lax.PrecisionLike) -> jax.Array:
    """`a` times `b`, Hermitian matrices that commute, so that the result is Hermitian too.

    By blocks, both must be exactly Hermitian. Multiplied in full they need not be, and no factor may be replaced by its
    adjoint: rounding has made them slightly different, and NS amplifies that a thousandfold.
    """
    if blocks == 1:
        return products.dot(a, b, precision)
    return _mirrored(products, a, b, blocks, precision)


def _mirrored(products: Products, a: jax.Array, b: jax.Array, blocks: int, precision: lax.PrecisionLike) -> jax.Array:
    """`a` times the adjoint of `b`, only blocks on and right of the diagonal: (blocks + 1) / (2 · blocks) of the FLOPs.

    The rest is mirrored. Whole rows of both factors are read, which needs no copies.
    """
    m = a.shape[-2]
    edges = [m * i // blocks for i in range(blocks + 1)]
    out = jnp.zeros((*a.shape[:-2], m, m), wide(a.dtype))
    for low, high in zip(edges, edges[1:], strict=False):
        row = products.dot(a[..., low:high, :], adjoint(b[..., low:, :]), precision)
        out = out.at[..., low:high, low:].set(row)
        if products.delta:  # the corner is Hermitian only to rounding, which the Gram form would amplify
            corner = row[..., : high - low]
            out = out.at[..., low:high, low:high].set((corner + adjoint(corner)) / 2)
        if high < m:
            out = out.at[..., high:, low:high].set(adjoint(row[..., high - low :]))
    return out


def _dot(a: jax.Array, b: jax.Array, precision: lax.PrecisionLike) -> jax.Array:
    dtype = wide(jnp.promote_types(a.dtype, b.dtype))
    return jnp.matmul(a, b, precision=precision, preferred_element_type=dtype)
