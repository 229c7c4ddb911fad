"""The forms of Newton–Schulz, what each costs, and the choice between them.

Per step the direct form multiplies three times with X: R = XXᴴ, then X ← (aI + bR + cR²) X. The Gram form stays among
m×m matrices: from R once, Q ← QZ and R ← ZRZ with Z = aI + bR + cR², and X ← QX in the end. Both are one scheme: the
steps are cut into segments, each starts from R = XXᴴ and ends in X ← QX. The direct form has segments of one step.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterable, Sequence

import jax.numpy as jnp

from muon_shard.newton_schulz.products import PRODUCTS, Products, is_narrow

METHODS = ("auto", "direct", "gram")


@dataclasses.dataclass(frozen=True)
class Platform:
    """What steers the choice of a form on one kind of device.

    Attributes:
        narrow: rate of bfloat16 and float16 products, in units of full float32 products.
        default: rate of float32 products at JAX's default precision, in the same units.
        rounding: relative rounding of those default products.
        overhead: FLOPs that an m×m result costs per entry beside its product (writing, adding, small sizes).
        symmetric_from: rows from which Hermitian products are multiplied in four to six block rows.
        products: names of the products that serve the Gram form.
    """

    narrow: float
    default: float
    rounding: float
    overhead: int
    symmetric_from: int
    products: tuple[str, ...]


PLATFORMS = {
    # Measured on 2 cores: benchmarks/newton_schulz.py. XLA on CPU widens narrow dtypes.
    "cpu": Platform(1, 1, 1e-7, 35, 1024, ("highest",)),
    # By arithmetic, not measured: H100 data sheet, 67 TFLOP/s in float32, 494 in TF32, 990 in half precision.
    "gpu": Platform(15, 7, 5e-4, 35, 4096, ("highest", "split", "half")),
    # By arithmetic, not measured: one bfloat16 pass by default, six for float32.
    "tpu": Platform(6, 6, 4e-3, 35, 4096, ("highest", "split")),
}
"""By the platform of the devices; any other is taken for a GPU."""

MIRRORED = 10
"""How much coarser Hermitian products by blocks count in the restart rule: mirroring amplifies what rounding leaves of
the commutator."""

ALIASES = {"cuda": "gpu", "rocm": "gpu"}
WORTHWHILE = 0.97
"""A form must promise at least this share of the direct form's cost to be chosen in its stead."""


@dataclasses.dataclass(frozen=True)
class Form:
    """One way to run the steps on a matrix.

    Attributes:
        segments: steps of each segment.
        products: how m×m products are multiplied.
        blocks: block rows of Hermitian products; 1: multiplied in full.
    """

    segments: tuple[int, ...]
    products: Products
    blocks: int = 1

    @property
    def direct(self) -> bool:
        return set(self.segments) == {1}

    @property
    def name(self) -> str:
        """'direct' or 'gram', with its segments if more than one, 'sym' for products by blocks, 'half' or 'split'."""
        count = "" if self.direct or len(self.segments) == 1 else f"/{len(self.segments)}"
        parts = ["direct" if self.direct else f"gram{count}"]
        if self.blocks > 1:
            parts.append("sym")
        if self.products.name in ("half", "split"):
            parts.append(self.products.name)
        return " ".join(parts)

    def square_products(self) -> int:
        """Products of two m×m matrices."""
        return sum(1 if steps == 1 else 4 * steps - 3 for steps in self.segments)

    def flops(self, m: int, n: int) -> int:
        """FLOPs on one m×n matrix, m ≤ n, each product counted once."""
        return sum(self.flops_of_products(m, n))

    def flops_of_products(self, m: int, n: int) -> tuple[int, int, int]:
        """FLOPs of the products among m×m matrices, of all XXᴴ, and of all QX."""
        share = (self.blocks + 1) / (2 * self.blocks) if self.blocks > 1 else 1
        square = int(share * 2 * m**3) * self.square_products()
        gram = int(share * 2 * m * m * n) * len(self.segments)
        return square, gram, 2 * m * m * n * len(self.segments)

    def cost(self, m: int, n: int, dtype: jnp.dtype, platform: Platform, full: bool) -> float:
        """FLOPs weighted by rate: as many products of the direct form would take as long.

        `full` where float32 products are asked for at full precision.
        """
        return sum(self.costs(m, n, dtype, platform, full))

    def costs(self, m: int, n: int, dtype: jnp.dtype, platform: Platform, full: bool) -> tuple[float, float]:
        """The same for the products among m×m matrices, and for those with X."""
        narrow = is_narrow(dtype)
        plain = platform.narrow if narrow else 1.0 if full else platform.default
        square, gram, apply = self.flops_of_products(m, n)
        rest = platform.overhead * m * m * (self.square_products() + len(self.segments))
        if self.direct:
            return square + rest, gram + apply
        rate = {"highest": 1.0, "split": platform.narrow / 3, "half": platform.narrow}[self.products.name]
        # A narrow X: its Gram matrix is one product of its own kind; Q is applied to bfloat16 as high and low part.
        rate_gram = plain if narrow else rate
        rate_apply = plain / 2 if dtype == jnp.bfloat16 else 1.0 if narrow else rate
        return square * plain / rate + rest, gram * plain / rate_gram + apply * plain / rate_apply


def platform_of(name: str) -> Platform:
    """By the name JAX gives a platform."""
    return PLATFORMS.get(ALIASES.get(name, name), PLATFORMS["gpu"])


def segments(slopes: Sequence[float], delta: float, budget: float = 0.1) -> tuple[int, ...]:
    """The fewest segments, nearly equal and long ones first, for which rounding `delta` stays harmless.

    Where even segments of two steps exceed the budget this ends in segments of one step.
    """
    steps = len(slopes)
    for count in range(1, steps):
        cut = tuple(steps // count + (i < steps % count) for i in range(count))
        if amplification(slopes, cut) * delta <= budget:
            return cut
    return (1,) * steps


def amplification(slopes: Sequence[float], cut: Sequence[int]) -> float:
    """How rounding in R grows in the worst segment: S², with S the product of a over all its steps but the last."""
    ends = itertools.accumulate(cut)
    return max(math.prod(slopes[end - length : end - 1]) ** 2 for end, length in zip(ends, cut, strict=True))


def steadiest(slopes: Sequence[float], cut: tuple[int, ...]) -> tuple[int, ...]:
    """The same segments in the order that amplifies least; for float32, where a restart does not round X again."""
    orders = {cut, tuple(reversed(cut)), *(itertools.permutations(cut) if len(cut) < 5 else ())}
    return min(sorted(orders, reverse=True), key=lambda order: amplification(slopes, order))


def candidates(
    slopes: tuple[float, ...] | None, steps: int, m: int, dtype: jnp.dtype, platform: Platform, full: bool
) -> Iterable[Form]:
    """All forms that are safe for these coefficients and this dtype; the direct one first."""
    blocks = min(m // 256, 6) if m >= platform.symmetric_from else 1
    yield Form((1,) * steps, PRODUCTS["same"], blocks)
    if slopes is None:
        return
    narrow, single = is_narrow(dtype), dtype == jnp.float32
    for name in platform.products:
        products = PRODUCTS[name]
        # Products coarser than those of the direct form would be a change for the worse.
        if name == "half" and not narrow:
            continue
        if name == "split" and not (narrow or (single and not full and platform.rounding > products.delta)):
            continue
        delta = 1e-15 if name == "highest" and _is_double(dtype) else products.delta
        for count, rounding in {1: delta, blocks: delta if blocks == 1 else MIRRORED * delta}.items():
            cut = segments(slopes, rounding)
            if len(cut) < steps:
                yield Form(cut if narrow else steadiest(slopes, cut), products, count)


@functools.lru_cache(maxsize=4096)
def choose(
    m: int,
    n: int,
    dtype: str,
    slopes: tuple[float, ...] | None,
    steps: int,
    method: str,
    platform: str,
    full: bool,
) -> tuple[Form, float]:
    """The cheapest form for one m×n matrix, m ≤ n, and its cost.

    Args:
        m: rows.
        n: columns.
        dtype: of the matrix.
        slopes: coefficient a of each step; None where unknown, which leaves the direct form.
        steps: Newton–Schulz steps.
        method: 'auto', 'direct' or 'gram'.
        platform: as JAX names it.
        full: whether float32 products are wanted at full precision.

    Raises:
        ValueError: 'gram' was asked for and no Gram form is safe.
    """
    kind = platform_of(platform)
    options = {
        f: f.cost(m, n, jnp.dtype(dtype), kind, full)
        for f in candidates(slopes, steps, m, jnp.dtype(dtype), kind, full)
    }
    direct = next(iter(options.items()))
    gram = min((item for item in options.items() if not item[0].direct), key=lambda item: item[1], default=None)
    if method == "direct" or (method == "auto" and (gram is None or gram[1] > WORTHWHILE * direct[1])):
        return direct
    if gram is None:
        reason = (
            "the coefficients are traced" if slopes is None else f"{steps} steps leave nothing to gain or are unsafe"
        )
        raise ValueError(f"method='gram' has no safe form here: {reason}. Consider method='direct' or 'auto'.")
    return gram


def _is_double(dtype: jnp.dtype) -> bool:
    return float(jnp.finfo(dtype).eps) < 1e-10
