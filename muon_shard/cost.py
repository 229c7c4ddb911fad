"""What things cost: NS FLOPs and the bytes of collectives."""

import dataclasses
import math


def ns_flops(m: int, n: int, steps: int = 5) -> int:
    """FLOPs of the direct quintic iteration on one m×n matrix: per step XXᵀ and BX (2m²n each) and A² (2m³), m ≤ n."""
    m, n = sorted((m, n))
    return steps * (4 * m * m * n + 2 * m**3)


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective that the compiled module must hold.

    `bytes` is the size of its result on each device, as the compiled module shows it; `received` is the part of it
    that comes from other devices.
    """

    kind: str
    axes: tuple[str, ...]
    ways: int
    bytes: int
    purpose: str

    @property
    def received(self) -> int:
        return self.bytes * (self.ways - 1) // self.ways


def choose_page(blocks: dict[int, int], waste: float = 0.01, most: int = 4096) -> int:
    """Elements per page for local blocks of `blocks[elements] = how many`.

    The greatest common divisor packs without filler. When it is small (odd sizes) tables would be as long as the data,
    so the largest power of two that wastes at most `waste` of the bytes is taken instead.
    """
    divisor = math.gcd(*blocks)
    total = sum(size * count for size, count in blocks.items())
    page = most
    while page > divisor:
        if sum((-size % page) * count for size, count in blocks.items()) <= waste * total:
            return page
        page //= 2
    return divisor
