"""What things cost: NS FLOPs and the bytes of collectives."""

import dataclasses
import math


def ns_flops(m: int, n: int, steps: int = 5) -> int:
    """FLOPs of the direct quintic iteration on one m×n matrix: per step XXᵀ and BX (2m²n each) and A² (2m³), m ≤ n."""
    m, n = sorted((m, n))
    return steps * (4 * m * m * n + 2 * m**3)


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective that the compiled module must hold, or `count` equal ones.

    `bytes` is the size of its result on each device, of all of them together, as the compiled module shows it;
    `received` is the part of it that comes from other devices.
    """

    kind: str
    axes: tuple[str, ...]
    ways: int
    bytes: int
    purpose: str
    count: int = 1

    @property
    def received(self) -> int:
        if self.kind == "collective-permute":
            return self.bytes
        if self.kind == "reduce-scatter":  # the result is one of `ways` parts
            return self.bytes * (self.ways - 1)
        return (2 if self.kind == "all-reduce" else 1) * self.bytes * (self.ways - 1) // self.ways


@dataclasses.dataclass(frozen=True)
class Traffic:
    """What one domain moves, per device.

    Attributes:
        exchange: mesh axes over which matrices are scattered.
        shared: mesh axes over which replicas share the work.
        pool: elements of the local shards.
        row: elements sent to each peer.
        returned: elements that each replica gives to the others.
        item: bytes of an element on the way in.
        out: bytes of an element on the way back.
        scales: bytes of the numbers that all devices agree on first.
        turned: mesh axes that cut the short side of matrices which travel as Gram matrices, and the bytes of these.
        gathered: mesh axes that cut the momentum and not the parameters, and the bytes of updates that each device
            gives to the others along them.
    """

    exchange: tuple[tuple[str, int], ...]
    shared: tuple[tuple[str, int], ...]
    pool: int
    row: int
    returned: int
    item: int
    out: int
    scales: int = 0
    turned: tuple[tuple[tuple[tuple[str, int], ...], int], ...] = ()
    gathered: tuple[tuple[tuple[tuple[str, int], ...], int], ...] = ()

    @property
    def axes(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self.exchange)

    @property
    def peers(self) -> int:
        return math.prod(size for _, size in self.exchange)

    def share(self) -> tuple[Collective, ...]:
        """The gathers of all replicas' results, and of updates that replicas hold in parts."""
        given = [(self.shared, self.returned * self.out, "updates to replicas")] if self.shared else []
        given += [(axes, size, "updates to parameters") for axes, size in self.gathered]
        found = []
        for axes, size, purpose in given:
            ways = math.prod(size for _, size in axes)
            found.append(Collective("all-gather", tuple(name for name, _ in axes), ways, ways * size, purpose))
        return tuple(found)


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
