"""Who orthogonalizes what: owners and programs.  Integers only, so equal inputs give equal plans.

A *class* is a set of equal problems (canonical m <= n, dtype) of one domain, described by a `Job`.  The
devices of a domain are partitioned into *rows*, one per coordinate of its batch axes: an expert matrix never
leaves its row.  A domain without batch axes has one row, with all devices.  In the order a plan uses it:

    counts = balance(jobs, domains)              # how many matrices of each class a device owns
    counts = place(counts, jobs, domains)        # which device of equals: even bytes per replica
    dealt = deal(counts, kinds, domains, jobs)   # a class holds several kinds, e.g. wide and tall matrices
    slots = merge(dealt, flops, max_programs)    # few programs: some devices get slots that stay empty
"""

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence

import numpy as np

# What weighs FLOPs against bytes when plans are compared: half the dense bf16 peak of a current accelerator,
# 500 TFLOP/s, over a network port of 400 Gbit/s.
FLOPS_PER_BYTE = 10_000

# How far above the least possible a device's bytes may lie, in percent; None is no cap.
BYTE_SLACKS = (2, 5, 10, 20, 35, 50, 100, None)

# A plan that reaches this percentage of the lower bound is not worth another order, or a local search.
GOOD_ENOUGH = 97
WORTH_EXCHANGING = 99

# The local search: its rounds, and how many matrices it swaps for how many, at most MOVES different swaps.
ROUNDS = 64
SWAPS = ((2, 3), (2, 2), (1, 2), (1, 1))
MOVES = 30_000


@dataclasses.dataclass(frozen=True)
class Job:
    """One class of equal problems.

    Attributes:
      domain: index of its domain.
      flops: Newton-Schulz FLOPs of one matrix, weighted by how fast its products run, positive.
      size: bytes of one matrix that travel to its owner (and again on the way back).
      count: matrices per row of the domain.
    """

    domain: int
    flops: int
    size: int
    count: int


@dataclasses.dataclass(frozen=True, eq=False)
class Workers:
    """The devices of one domain.

    Attributes:
      rows: int [rows, workers], a partition of range(devices); a matrix never leaves its row.
      replica: int [devices], coordinate over the domain's free axes.
      exchanged: whether matrices of this domain travel at all, so that their bytes count.
    """

    rows: np.ndarray
    replica: np.ndarray
    exchanged: bool


def waterfill(loads: np.ndarray, cost: int, count: int, limit: np.ndarray) -> np.ndarray | None:
    """Gives equal items to the least loaded workers, one after the other, ties to the first.

    Worker w takes its next item at load L_w, then at L_w + cost, ...; LPT takes the `count` least of all
    these starts.  With L_w = cost * base_w + rest_w they order by (step, rest_w, w), step counting up from
    base_w: bisection finds the steps that are taken whole, one sort settles the step that is taken in part.

    Args:
      loads: int64 [rows, workers], nonnegative; each row is filled by itself.
      cost: what one item adds to a load.
      count: items per row.
      limit: int64 [rows, workers], the most items a worker can take.

    Returns:
      int64 [rows, workers], each row sums to `count`; None if the limits of a row are too small.
    """
    if (limit.sum(1) < count).any():
        return None
    base, rest = np.divmod(loads, cost)

    def before(step):  # items taken when all steps below `step` are
        return np.clip(step[:, None] - base, 0, limit)

    low, high = base.min(1), base.max(1) + count + 1
    while (high - low > 1).any():
        middle = (low + high) // 2
        fits = before(middle).sum(1) <= count
        low, high = np.where(fits, middle, low), np.where(fits, high, middle)
    items = before(low)
    left = count - items.sum(1)
    takes_more = (base <= low[:, None]) & (items < limit)
    order = np.argsort(np.where(takes_more, rest, cost), axis=1, kind="stable")
    last = np.zeros_like(items)
    np.put_along_axis(last, order, np.arange(items.shape[1]) < left[:, None], axis=1)
    return items + last


def balance(jobs: Sequence[Job], domains: Sequence[Workers], flops_per_byte: int = FLOPS_PER_BYTE) -> np.ndarray:
    """Owners by LPT (longest processing time first) on FLOPs, one load per device across all domains.

    Bytes are a hard cap, swept, never part of the cost: a tie-break by bytes changes nothing, and an additive
    cost balances neither.  Of the sweep's plans the one with the least estimated seconds wins.

    Returns:
      int64 [devices, jobs], how many matrices of each class each device owns.
    """

    def score(counts):
        return _score(counts, jobs, domains, flops_per_byte)

    slacks = BYTE_SLACKS if any(domain.exchanged for domain in domains) else (None,)
    bound = lower_bound(jobs, domains)
    plans = []
    for order in _orders(jobs, domains):
        plans += [_lpt(jobs, domains, order, slack) for slack in slacks]
        best = min((plan for plan in plans if plan is not None), key=score)
        reached = 100 * bound // max(1, int((best @ _flops(jobs)).max()))
        if reached >= GOOD_ENOUGH:
            break
    if reached < WORTH_EXCHANGING and all(len(domain.rows) == 1 for domain in domains):
        size = np.array([job.size * domains[job.domain].exchanged for job in jobs])
        best = min(best, _exchange(best, jobs, size), _exchange(best, jobs, 0 * size), key=score)
    return best


def _flops(jobs: Sequence[Job]) -> np.ndarray:
    return np.array([job.flops for job in jobs], np.int64)


def _orders(jobs: Sequence[Job], domains: Sequence[Workers]) -> Iterator[list[int]]:
    """Orders to assign classes in: by FLOPs; then those confined to a row first, others fill around them."""
    confined = [len(domains[job.domain].rows) > 1 for job in jobs]
    default = sorted(range(len(jobs)), key=lambda j: (-jobs[j].flops, -jobs[j].size, confined[j], j))
    yield default
    if len(set(confined)) == 2:
        yield sorted(default, key=lambda j: not confined[j])


def _lpt(jobs, domains, order: Sequence[int], slack: int | None) -> np.ndarray | None:
    """One pass over the classes in `order`; None if the byte cap leaves no room."""
    devices = domains[0].rows.size
    counts = np.zeros((devices, len(jobs)), np.int64)
    load = np.zeros(devices, np.int64)
    room = [np.full(devices, _byte_cap(jobs, d, domain, slack)) for d, domain in enumerate(domains)]
    seats = _seats(domains)
    for j in order:
        job = jobs[j]
        rows, free = seats[job.domain], room[job.domain]
        limit = np.minimum(free[rows] // max(job.size, 1), job.count)
        items = waterfill(load[rows], job.flops, job.count, limit)
        if items is None:
            return None
        counts[rows, j] = items
        load[rows] += items * job.flops
        free[rows] -= items * job.size
    return counts


def _seats(domains: Sequence[Workers]) -> list[np.ndarray]:
    """The rows of each domain, devices ordered so that ties go around others' rows and own replicas.

    Else the first row of experts would get all the large dense matrices, and its experts cannot leave it.
    """
    column = np.zeros(domains[0].rows.size, np.int64)  # of a device, summed over the domains with several rows
    for domain in domains:
        if len(domain.rows) > 1:
            column[domain.rows] += np.arange(domain.rows.shape[1])
    seats = []
    for domain in domains:
        by_replica = np.lexsort((domain.replica, column))
        new = np.diff(column[by_replica], prepend=-1) | np.diff(domain.replica[by_replica], prepend=-1)
        first = np.maximum.accumulate(np.where(new != 0, np.arange(len(new)), 0))
        turn, rank = np.empty_like(column), np.empty_like(column)
        turn[by_replica] = np.arange(len(new)) - first  # the how-manieth of its column and replica
        rank[np.lexsort((domain.replica, turn, column))] = np.arange(len(new))
        seats.append(np.take_along_axis(domain.rows, np.argsort(rank[domain.rows], axis=1), axis=1))
    return seats


def _byte_cap(jobs: Sequence[Job], index: int, domain: Workers, slack: int | None) -> int:
    """Most bytes a device may own of domain `index`: `slack` percent above the least possible."""
    mine = [job for job in jobs if job.domain == index and job.count]
    total = sum(job.count * max(job.size, 1) for job in mine)
    if slack is None or not domain.exchanged or not mine:
        return total
    least = max(-(-total // domain.rows.shape[1]), max(job.size for job in mine))
    return least * (100 + slack) // 100


def _exchange(counts: np.ndarray, jobs: Sequence[Job], size: np.ndarray) -> np.ndarray:
    """Swaps a few matrices of the most loaded devices for a few of others, as long as they gain by it.

    Moving x FLOPs from a device to one that has g less leaves the greater of their loads min(x, g - x) lower.
    No device comes to own more bytes that count than some device did before.

    Args:
      counts: int64 [devices, jobs].
      jobs: the classes, all of domains with one row.
      size: bytes of one matrix of each job that count, int64 [jobs].
    """
    flops, cap = _flops(jobs), (counts @ size).max()
    moves = _moves(len(jobs))
    moves = moves[moves @ flops > 0]
    for _ in range(ROUNDS):
        programs, group = np.unique(counts, axis=0, return_inverse=True)
        load, owned = programs @ flops, programs @ size
        worst = load.argmax()
        able = moves[(moves <= programs[worst]).all(1) & (owned[worst] - moves @ size <= cap)]
        best = (0, 0, 0)
        for other in np.flatnonzero(load < load[worst]):
            fits = (programs[other] + able >= 0).all(1) & (owned[other] + able @ size <= cap)
            gain = np.where(fits, np.minimum(able @ flops, load[worst] - load[other] - able @ flops), 0)
            if gain.max(initial=0) > best[0]:
                best = (gain.max(), gain.argmax(), other)
        gain, move, other = best
        if gain == 0:
            break
        givers, takers = (np.flatnonzero(group.reshape(-1) == i) for i in (worst, other))
        pairs = min(len(givers), len(takers))
        counts = counts.copy()
        counts[givers[:pairs]] -= able[move]
        counts[takers[:pairs]] += able[move]
    return counts


def _moves(classes: int) -> np.ndarray:
    """Ways to swap a few matrices, int64 [moves, classes]: those given positive, those taken negative."""

    def bundles(most):
        sizes = (itertools.combinations_with_replacement(range(classes), k) for k in range(most + 1))
        picks = itertools.chain.from_iterable(sizes)
        return np.stack([np.bincount(np.array(pick, np.int64), minlength=classes) for pick in picks])

    def ways(swap):
        return math.prod(math.comb(classes + k, k) for k in swap)

    given, taken = next((swap for swap in SWAPS if ways(swap) <= MOVES), SWAPS[-1])
    return (bundles(given)[:, None] - bundles(taken)).reshape(-1, classes)


def _score(counts: np.ndarray, jobs: Sequence[Job], domains: Sequence[Workers], flops_per_byte: int) -> int:
    """The time of a step in FLOPs: slowest compute plus exchange in and out.

    An exchange is padded to its fullest device, so its time is that of the maximum, domain by domain.
    """
    compute = int((counts @ _flops(jobs)).max())
    owned = owned_bytes(counts, jobs, len(domains))
    exchange = sum(int(owned[:, d].max()) for d, domain in enumerate(domains) if domain.exchanged)
    return compute + 2 * exchange * flops_per_byte


def owned_bytes(counts: np.ndarray, jobs: Sequence[Job], domains: int) -> np.ndarray:
    """Bytes each device owns of each domain, int64 [devices, domains]."""
    size = np.zeros((len(jobs), domains), np.int64)
    for j, job in enumerate(jobs):
        size[j, job.domain] = job.size
    return counts @ size


def lower_bound(jobs: Sequence[Job], domains: Sequence[Workers]) -> int:
    """FLOPs that some device must do under any assignment: no plan has a smaller maximum.

    Mean and pigeonhole bounds over all devices; over each row of a domain, for the matrices that cannot leave
    it; and over the rows of a domain, of which some row also gets its share of the matrices that can.
    """
    flops, home = _flops(jobs), [job.domain for job in jobs]
    count = np.array([job.count for job in jobs], np.int64)
    everywhere = count * np.array([len(domain.rows) for domain in domains])[home]
    bound = _pigeonhole(flops, everywhere, domains[0].rows.size)
    for domain in domains:
        rows, workers = domain.rows.shape
        inside = np.stack([_rows_inside(domain, other) for other in domains], axis=1)[:, home] * count
        bound = max(bound, *(_pigeonhole(flops, row, workers) for row in np.unique(inside, axis=0)))
        outside = _pigeonhole(flops, everywhere - inside.sum(0), rows)
        bound = max(bound, -(-(int((inside @ flops).min()) + outside) // workers))
    return bound


def _rows_inside(outer: Workers, inner: Workers) -> np.ndarray:
    """How many rows of `inner` lie wholly inside each row of `outer`, int64 [outer rows]."""
    home = row_of(outer)[inner.rows]
    whole = (home == home[:, :1]).all(1)
    return np.bincount(home[whole, 0], minlength=len(outer.rows))


def row_of(domain: Workers) -> np.ndarray:
    """The row each device is in, int64 [devices]."""
    row_of = np.empty(domain.rows.size, np.int64)
    row_of[domain.rows] = np.arange(len(domain.rows))[:, None]
    return row_of


def _pigeonhole(flops: np.ndarray, count: np.ndarray, workers: int) -> int:
    """Lower bound on the maximum load of equal workers that share count[j] items of flops[j] each.

    The mean; and of the k * workers + 1 heaviest items some worker holds k + 1, which weigh at least as much
    as the k + 1 lightest of them (k = 0: the heaviest item).
    """
    order = np.argsort(-flops, kind="stable")
    flops, count = flops[order], count[order]
    ends = np.concatenate([[0], np.cumsum(count)])
    sums = np.concatenate([[0], np.cumsum(flops * count)])

    def heaviest(k):  # FLOPs of the k heaviest items
        at = np.clip(np.searchsorted(ends, k, side="left") - 1, 0, None)
        return sums[at] + (k - ends[at]) * flops[at]

    last = np.arange(1, ends[-1] + 1, workers)
    held = heaviest(last) - heaviest(last - np.arange(len(last)) - 1)
    return max(-(-int(sums[-1]) // workers), int(held.max(initial=0)))
