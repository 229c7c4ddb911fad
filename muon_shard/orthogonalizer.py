"""What owners run on whole matrices: the common face, a user's own function, and the dual-norm scaling."""

import abc
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from muon_shard.cost import ns_flops


@dataclasses.dataclass(frozen=True)
class Work:
    """What one matrix costs: the name of its form, FLOPs, and FLOPs weighted by how fast each product runs."""

    form: str
    flops: int
    cost: int


class GramSpace(abc.ABC):
    """An orthogonalizer taken apart for matrices X of which nobody holds the whole: R = XXᴴ, then Q, then QX.

    X [batch, m, n] may be any columns of the whole; R of the whole is the sum. All Grams are of X · 2^-power, with one
    power [batch, 1, 1] for the whole.
    """

    @abc.abstractmethod
    def gram(self, x: jax.Array, power: jax.Array) -> jax.Array:
        """[batch, m, n] → Gram matrices [batch, m, m], in float32 at least."""

    @abc.abstractmethod
    def factor(self, r: jax.Array, power: jax.Array, *operands: jax.Array) -> jax.Array:
        """Q [batch, m, m] for the Gram matrices of whole matrices; Hermitian."""

    @abc.abstractmethod
    def apply(self, q: jax.Array, power: jax.Array, x: jax.Array) -> jax.Array:
        """Q · X · 2^-power, shape and dtype of x."""

    @abc.abstractmethod
    def works(self, m: int, n: int) -> tuple[Work, Work]:
        """What the factor of one m×n matrix costs, m ≤ n, and what its Gram matrix and product with Q cost."""


class Orthogonalizer(abc.ABC):
    """Runs on batches of whole matrices. Hashable: equal ones share plans and compiled functions."""

    @abc.abstractmethod
    def __call__(self, x: jax.Array, *operands: jax.Array) -> jax.Array:
        """[batch, m, n] with m ≤ n, and arrays that are the same on every device → same shape and dtype."""

    @abc.abstractmethod
    def work(self, m: int, n: int, dtype: jax.typing.DTypeLike) -> Work:
        """What one m×n matrix costs, m ≤ n."""

    def work_of(self, problems: Sequence[tuple[tuple[int, int], int]], dtype: jax.typing.DTypeLike) -> Work:
        """What several matrices cost together: ((m, n), how many) of each shape."""
        works = [(self.work(m, n, dtype), count) for (m, n), count in problems]
        forms = dict.fromkeys(work.form for work, _ in works)
        flops, cost = (sum(count * getattr(work, field) for work, count in works) for field in ("flops", "cost"))
        return Work(", ".join(forms), flops, cost)

    def in_gram_space(self, dtype: jax.typing.DTypeLike) -> "GramSpace | str":
        """The same from Gram matrices alone, for matrices of `dtype`; why not, where it cannot be."""
        return "only Newton–Schulz works from Gram matrices alone"

    def on(self, platform: str) -> "Orthogonalizer":
        """The same for another platform ('cpu', 'gpu', 'tpu')."""
        return self


@dataclasses.dataclass(frozen=True)
class CustomOrthogonalizer(Orthogonalizer):
    """A function [batch, m, n] → [batch, m, n], m ≤ n, and the FLOPs (m, n) → int of one matrix.

    Without `flops`, work is balanced as for five direct Newton–Schulz steps.
    """

    function: Callable[[jax.Array], jax.Array]
    flops: Callable[[int, int], int] | None = None

    def __call__(self, x: jax.Array, *operands: jax.Array) -> jax.Array:
        y = self.function(x)
        if not isinstance(y, jax.Array) or y.shape != x.shape or not jnp.issubdtype(y.dtype, jnp.inexact):
            got = f"{y.dtype}{list(y.shape)}" if isinstance(y, jax.Array) else repr(y)
            raise ValueError(
                f"orthogonalizer: {self.name} must keep the shape of its batch of wide matrices, "
                f"{x.dtype}{list(x.shape)}; it returned {got}."
            )
        return y.astype(x.dtype)

    @property
    def name(self) -> str:
        return getattr(self.function, "__name__", type(self.function).__name__)

    def work(self, m: int, n: int, dtype: jax.typing.DTypeLike) -> Work:
        flops = int((self.flops or ns_flops)(m, n))
        if flops < 1:
            raise ValueError(f"orthogonalizer: flops({m}, {n}) of {self.name} must be at least 1, got {flops}.")
        return Work(self.name, flops, flops)


@dataclasses.dataclass(frozen=True)
class Adaptive(Orthogonalizer):
    """Scales each result by the dual norm of its input (arXiv 2409.20325)."""

    inner: Orthogonalizer

    def __call__(self, x: jax.Array, *operands: jax.Array) -> jax.Array:
        y = self.inner(x, *operands)
        return jnp.sum(x.conj() * y, axis=(-2, -1), keepdims=True) * y

    def work(self, m: int, n: int, dtype: jax.typing.DTypeLike) -> Work:
        return self.inner.work(m, n, dtype)

    def on(self, platform: str) -> Orthogonalizer:
        return Adaptive(self.inner.on(platform))


def as_orthogonalizer(given: Any) -> Orthogonalizer:
    """A plain function as `CustomOrthogonalizer`.

    Raises:
        ValueError: not callable, or not hashable.
    """
    if isinstance(given, Orthogonalizer):
        return given
    if not callable(given) or getattr(given, "__hash__", None) is None:
        raise ValueError(f"orthogonalizer must be a hashable function [batch, m, n] → [batch, m, n], got {given!r}.")
    function: Callable[[jax.Array], Any] = given
    return CustomOrthogonalizer(function)
