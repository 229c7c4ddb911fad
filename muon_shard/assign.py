"""Who orthogonalizes what: owners and programs.  Pure numpy, integers only, so equal inputs give equal plans.

A *class* is a set of equal problems (canonical m <= n, dtype) of one domain, described by a `Job`.  The devices
of a domain are partitioned into *rows*, one per coordinate of its batch axes: an expert matrix never leaves its
row.  A domain without batch axes has one row, with all devices.  Outline, in the order a plan uses it:

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

# What weighs FLOPs against bytes when plans are compared.  Half the dense bf16 peak of a current accelerator, and
# a network port of 400 Gbit/s; only the ratio matters, and the choice is flat around it.
FLOPS_PER_SECOND = 500_000_000_000_000
BYTES_PER_SECOND = 50_000_000_000

# How far above the least possible a device's bytes may lie, in percent; None is no cap.
BYTE_SLACKS = (2, 5, 10, 20, 35, 50, 100, None)

# A plan that reaches this share of the lower bound (in percent) is not worth another order, or a local search.
GOOD_ENOUGH = 97
WORTH_EXCHANGING = 99

# The local search: its rounds, and how many matrices go one way and the other, the most that MOVES swaps allow.
ROUNDS, SWAPS, MOVES = 64, ((2, 3), (2, 2), (1, 2), (1, 1)), 30_000


@dataclasses.dataclass(frozen=True)
class Job:
    """One class of equal problems.

    Attributes:
      domain: index of its domain.
      flops: Newton-Schulz FLOPs of one matrix.
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
    """Gives `count` equal items of `cost` to the least loaded workers, one after the other, ties to the first.

    Worker w takes its next item at load L_w, then at L_w + cost, ...: LPT takes the `count` least of all these
    starts.  With L_w = cost * base_w + rest_w the starts order by (step, rest_w, w), where step counts up from
    base_w; so whole steps are found by bisection, and one sort settles the step that is only partly taken.

    Args:
      loads: int64 [rows, workers], nonnegative; each row is filled by itself.
      limit: int64 [rows, workers], the most items a worker can take.

    Returns:
      int64 [rows, workers], each row sums to `count`; None if a row's limits are too small.
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
    open_ = (base <= low[:, None]) & (items < limit)
    order = np.argsort(np.where(open_, rest, cost), axis=1, kind="stable")
    last = np.zeros_like(items)
    np.put_along_axis(last, order, np.arange(items.shape[1]) < left[:, None], axis=1)
    return items + last


def balance(jobs: Sequence[Job], domains: Sequence[Workers]) -> np.ndarray:
    """Owners by LPT (longest processing time first) on FLOPs, one load per device across all domains.

    Bytes are a hard cap, swept, never part of the cost: a tie-break by bytes changes nothing, and an additive
    cost balances neither.  The sweep's plans are compared by estimated seconds.

    Returns:
      int64 [devices, jobs], how many matrices of each class each device owns.
    """
    slacks = BYTE_SLACKS if any(d.exchanged for d in domains) else (None,)
    bound = lower_bound(jobs, domains)
    best, least = None, None
    for order in _orders(jobs, domains):
        for slack in slacks:
            counts = _lpt(jobs, domains, order, slack)
            if counts is None:
                continue
            score = _score(counts, jobs, domains)
            if least is None or score < least:
                best, least = counts, score
        if _reaches(GOOD_ENOUGH, best, jobs, bound):
            break
    if all(len(d.rows) == 1 for d in domains) and not _reaches(WORTH_EXCHANGING, best, jobs, bound):
        size = np.array([job.size * domains[job.domain].exchanged for job in jobs])
        return min(best, _exchange(best, jobs, size), key=lambda counts: _score(counts, jobs, domains))
    return best


def _reaches(percent: int, counts: np.ndarray, jobs: Sequence[Job], bound: int) -> bool:
    return 100 * bound >= percent * int((counts @ _flops(jobs)).max())


def _flops(jobs: Sequence[Job]) -> np.ndarray:
    return np.array([job.flops for job in jobs], np.int64)


def _orders(jobs: Sequence[Job], domains: Sequence[Workers]) -> Iterator[list[int]]:
    """Orders to deal classes in: by FLOPs; then those confined to a row first, as the others can fill around them."""

    def key(j):
        return -jobs[j].flops, -jobs[j].size, confined(j), j

    def confined(j):
        return len(domains[jobs[j].domain].rows) > 1

    yield sorted(range(len(jobs)), key=key)
    if len({confined(j) for j in range(len(jobs))}) == 2:
        yield sorted(range(len(jobs)), key=lambda j: (not confined(j), key(j)))


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
    """The rows of each domain, devices ordered so that ties go around the rows of others, and around its replicas.

    Else the first row of experts would get all the large dense matrices, and its experts cannot leave it.
    """
    column = np.zeros(domains[0].rows.size, np.int64)  # sum of a device's columns in all domains with several rows
    for domain in domains:
        if len(domain.rows) > 1:
            column[domain.rows] += np.arange(domain.rows.shape[1])
    seats = []
    for domain in domains:
        _, group, size = np.unique(np.stack([column, domain.replica]), axis=1, return_inverse=True, return_counts=True)
        turn = np.empty_like(column)  # the how-manieth of its column and replica
        turn[np.argsort(group.reshape(-1), kind="stable")] = np.arange(len(column)) - np.repeat(
            np.cumsum(size) - size, size)
        rank = np.empty_like(column)
        rank[np.lexsort((domain.replica, turn, column))] = np.arange(len(column))
        seats.append(np.take_along_axis(domain.rows, np.argsort(rank[domain.rows], axis=1), axis=1))
    return seats


def _byte_cap(jobs: Sequence[Job], index: int, domain: Workers, slack: int | None) -> int:
    """Most bytes a device may own of domain `index`: `slack` percent above the least possible."""
    mine = [job for job in jobs if job.domain == index and job.count]
    total = sum(job.count * job.size for job in mine)
    if slack is None or not domain.exchanged or not mine:
        return total
    least = max(-(-total // domain.rows.shape[1]), max(job.size for job in mine))
    return least * (100 + slack) // 100


def _exchange(counts: np.ndarray, jobs: Sequence[Job], size: np.ndarray) -> np.ndarray:
    """Swaps a few matrices of the most loaded devices for a few of others, as long as the maximum load falls.

    Moving x FLOPs from a device to one that has g less leaves the greater of the two loads min(x, g - x) lower.
    No device comes to own more bytes than one owned before.

    Args:
      counts: int64 [devices, jobs].
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
    """Ways to swap a few matrices for a few others, int64 [moves, classes]: given positive, taken negative."""

    def bundles(most):
        picks = (p for k in range(most + 1) for p in itertools.combinations_with_replacement(range(classes), k))
        return np.stack([np.bincount(np.array(p, np.int64), minlength=classes) for p in picks])

    given, taken = next((swap for swap in SWAPS if math.prod(math.comb(classes + k, k) for k in swap) <= MOVES),
                        SWAPS[-1])
    return (bundles(given)[:, None] - bundles(taken)).reshape(-1, classes)


def _score(counts: np.ndarray, jobs: Sequence[Job], domains: Sequence[Workers]) -> int:
    """Seconds of a step, slowest device's compute plus exchange in and out, times both rates: an integer.

    An exchange is padded to its fullest device, so its time is that of the maximum, domain by domain.
    """
    compute = int((counts @ _flops(jobs)).max())
    owned = _bytes(counts, jobs, len(domains))
    exchange = sum(int(owned[:, d].max()) for d, domain in enumerate(domains) if domain.exchanged)
    return compute * BYTES_PER_SECOND + 2 * exchange * FLOPS_PER_SECOND


def _bytes(counts: np.ndarray, jobs: Sequence[Job], domains: int) -> np.ndarray:
    """Bytes each device owns of each domain, int64 [devices, domains]."""
    size = np.zeros((len(jobs), domains), np.int64)
    for j, job in enumerate(jobs):
        size[j, job.domain] = job.size
    return counts @ size


def lower_bound(jobs: Sequence[Job], domains: Sequence[Workers]) -> int:
    """FLOPs that some device must do under any assignment: no plan has a smaller maximum.

    For all devices, and for each row of each domain with the rows of other domains that lie inside it: the mean
    load, and pigeonhole bounds over whole matrices.
    """
    flops, count = _flops(jobs), np.array([job.count for job in jobs])
    home = [job.domain for job in jobs]
    everywhere = count * [len(domains[d].rows) for d in home]
    best = _pigeonhole(flops, everywhere, domains[0].rows.size)
    for domain in domains:
        rows, workers = domain.rows.shape
        whole = np.stack([_rows_inside(domain.rows, other.rows) for other in domains], axis=1)[:, home] * count
        best = max(best, *(_pigeonhole(flops, inside, workers) for inside in np.unique(whole, axis=0)))
        outside = _pigeonhole(flops, everywhere - whole.sum(0), rows)
        best = max(best, -(-(int((whole @ flops).min()) + outside) // workers))
    return best


def _rows_inside(outer: np.ndarray, inner: np.ndarray) -> np.ndarray:
    """How many rows of `inner` lie wholly inside each row of `outer`, int [outer rows]."""
    row_of = np.empty(outer.size, np.int64)
    row_of[outer] = np.arange(len(outer))[:, None]
    home = row_of[inner]
    whole = (home == home[:, :1]).all(1)
    return np.bincount(home[whole, 0], minlength=len(outer))


def _pigeonhole(flops: np.ndarray, count: np.ndarray, workers: int) -> int:
    """Lower bound on the maximum load of `workers` equal workers that share count[j] items of flops[j] each.

    Of the k * workers + 1 heaviest, some worker holds k + 1, which weigh at least as much as the k + 1 lightest
    of them.  k = 0 is the heaviest item.
    """
    order = np.argsort(-flops, kind="stable")
    flops, count = flops[order], count[order]
    ends = np.concatenate([[0], np.cumsum(count)])
    sums = np.concatenate([[0], np.cumsum(flops * count)])

    def heaviest(k):  # FLOPs of the k heaviest items
        at = np.clip(np.searchsorted(ends, k, side="left") - 1, 0, None)
        return sums[at] + (k - ends[at]) * flops[at]

    total = -(-int(sums[-1]) // workers)
    last = np.arange(1, ends[-1] + 1, workers)
    k = np.arange(len(last))
    return max(total, int((heaviest(last) - heaviest(last - k - 1)).max(initial=0)))


def place(counts: np.ndarray, jobs: Sequence[Job], domains: Sequence[Workers]) -> np.ndarray:
    """Permutes programs among interchangeable devices so that the replicas of a domain own equal bytes.

    Devices in the same row of every domain are interchangeable.  What a replica owned it sends to the others
    padded to the fullest, so uneven replicas move padding.  Programs go heaviest first, each to the free device
    whose replicas have least so far: least growth of the sum of squared bytes, over all replicated domains.

    Returns:
      int64 [devices, jobs], rows of `counts` permuted.
    """
    devices = len(counts)
    shared = [d for d, domain in enumerate(domains) if (domain.replica != domain.replica[0]).any()]
    if not shared:
        return counts
    row_of = np.stack([_row_of(domain) for domain in domains], axis=1)
    cell = np.unique(row_of, axis=0, return_inverse=True)[1].reshape(-1)
    # One bin per replica of a row; bins[devices, shared].
    bins = np.stack([row_of[:, d] * devices + domains[d].replica for d in shared], axis=1)
    bins = np.unique(bins + np.arange(len(shared)) * devices**2, return_inverse=True)[1].reshape(bins.shape)
    owned = _bytes(counts, jobs, len(domains))[:, shared]
    owned = owned // max(1, int(owned.sum()) >> 30)  # so that products of two sums fit 64 bits

    spots = {c: np.flatnonzero(cell == c) for c in range(cell.max() + 1)}
    filled = np.zeros(bins.max() + 1, np.int64)
    source = np.empty(devices, np.int64)
    for device in np.lexsort((np.arange(devices), -owned.sum(1))):
        free = spots[cell[device]]
        pick = int((filled[bins[free]] @ owned[device]).argmin())
        spot = free[pick]
        source[spot] = device
        filled[bins[spot]] += owned[device]
        spots[cell[device]] = np.delete(free, pick)
    return counts[source]


def _row_of(domain: Workers) -> np.ndarray:
    """The row each device is in, int [devices]."""
    row_of = np.empty(domain.rows.size, np.int64)
    row_of[domain.rows] = np.arange(len(domain.rows))[:, None]
    return row_of


def deal(counts: np.ndarray, kinds: Sequence[tuple[int, ...]], domains: Sequence[Workers],
         jobs: Sequence[Job]) -> np.ndarray:
    """Splits each class into its kinds: in every row, workers sorted by program take the kinds in blocks.

    Args:
      counts: int64 [devices, jobs].
      kinds: for each job, how many matrices of each of its kinds a row has; sums to the job's count.

    Returns:
      int64 [devices, kinds of all jobs in order].  Devices with equal programs mostly stay equal: each boundary
      between two kinds falls on one worker.
    """
    rank = np.empty(len(counts), np.int64)
    rank[np.lexsort(-counts.T[::-1])] = np.arange(len(counts))
    columns = []
    for j, job in enumerate(jobs):
        rows = domains[job.domain].rows
        rows = np.take_along_axis(rows, np.argsort(rank[rows], axis=1), axis=1)
        ends = np.cumsum(counts[rows, j], axis=1)
        starts = ends - counts[rows, j]
        first = 0
        for size in kinds[j]:
            column = np.empty(len(counts), np.int64)
            column[rows] = np.clip(np.minimum(ends, first + size) - np.maximum(starts, first), 0, None)
            columns.append(column)
            first += size
    return np.stack(columns, axis=1)


def merge(counts: np.ndarray, flops: Sequence[int], max_programs: int) -> np.ndarray:
    """Slots for at most `max_programs` programs, each the element-wise maximum of those it replaces.

    A slot without a matrix runs on zeros.  Greedy: always the pair with the least resulting maximum load, then
    the least added FLOPs over all devices.

    Args:
      counts: int64 [devices, kinds].
      flops: FLOPs of one matrix of each kind.

    Returns:
      int64 [devices, kinds], nowhere less than `counts`, with at most `max_programs` distinct rows.
    """
    flops = np.asarray(flops, np.int64)
    programs, group, users = np.unique(counts, axis=0, return_inverse=True, return_counts=True)
    group = group.reshape(-1)
    size, never = len(programs), np.iinfo(np.int64).max
    load = programs @ flops
    merged = np.full((size, size), never)  # load of a pair once merged; never on the diagonal and for the gone
    added = np.zeros((size, size), np.int64)  # FLOPs that merging the pair adds over all devices

    def price(i, others):
        merged[i, others] = merged[others, i] = np.maximum(programs[others], programs[i]) @ flops
        added[i, others] = added[others, i] = (
            (merged[i, others] - load[i]) * users[i] + (merged[i, others] - load[others]) * users[others])

    for i in range(size):
        price(i, np.arange(i))
    left = np.arange(size)
    while len(left) > max(max_programs, 1):
        highest = max(load[left].max(), merged.min())
        keep, gone = np.unravel_index(np.where(merged <= highest, added, never).argmin(), merged.shape)
        programs[keep] = np.maximum(programs[keep], programs[gone])
        load[keep], users[keep] = programs[keep] @ flops, users[keep] + users[gone]
        group[group == gone] = keep
        merged[gone] = merged[:, gone] = never
        left = left[left != gone]
        price(keep, left[left != keep])
    return programs[group]
