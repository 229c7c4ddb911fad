"""Programs: which device of equals owns what, in which kinds of matrix, and how few programs suffice."""

from collections.abc import Sequence

import numpy as np

from muon_shard.assign import Job, Workers, owned_bytes, row_of


def place(counts: np.ndarray, jobs: Sequence[Job], domains: Sequence[Workers]) -> np.ndarray:
    """Permutes programs among interchangeable devices so that the replicas of a domain own equal bytes.

    Devices in the same row of every domain are interchangeable: a *cell*.  What a replica of a row (a *bin*)
    owned it sends to the others padded to the fullest, so uneven bins move padding.  Programs go heaviest
    first, each to the free device whose bins own least so far: least growth of the sum of squared bytes.

    Returns:
      int64 [devices, jobs], rows of `counts` permuted; `counts` itself where that pads less.
    """
    row = np.stack([row_of(domain) for domain in domains], axis=1)
    cell = np.unique(row, axis=0, return_inverse=True)[1].reshape(-1)
    bins = _bins(row, domains)
    # Devices of a cell in the same bins are one spot; the spots of a cell stand side by side.
    spots, spot, size = np.unique(np.column_stack([cell, bins]), axis=0, return_inverse=True, return_counts=True)
    seats = np.argsort(spot.reshape(-1), kind="stable")
    starts = np.searchsorted(spots[:, 0], np.arange(cell.max() + 2))
    ends, bins_of = np.cumsum(size), spots[:, 1:]
    taken = ends - size

    owned = owned_bytes(counts, jobs, len(domains))
    total = owned.copy()
    owned //= max(1, int(owned.sum()) >> 30)  # so that products of two sums fit 64 bits
    # Where a cell has only one bin there is nothing to choose: its bytes are there from the start.
    low, high = (f.reduceat(bins_of, starts[:-1])[cell] for f in (np.minimum, np.maximum))
    filled = _fill(low, np.where(low == high, owned, 0), bins.max() + 1)
    owned[low == high] = 0
    source = np.empty(len(counts), np.int64)
    for device in np.argsort(-owned.sum(1), kind="stable"):
        options = slice(starts[cell[device]], starts[cell[device] + 1])
        growth = filled[bins_of[options]] @ owned[device]
        growth[taken[options] == ends[options]] = np.iinfo(np.int64).max
        pick = options.start + growth.argmin()
        source[seats[taken[pick]]] = device
        taken[pick] += 1
        filled[bins_of[pick]] += owned[device]
    before, after = (_padded(bins, total[order]) for order in (np.arange(len(counts)), source))
    return counts[source] if after < before else counts


def _bins(row: np.ndarray, domains: Sequence[Workers]) -> np.ndarray:
    """Number of the (domain, row, replica) that a device is in, for each domain, int64 [devices, domains]."""
    devices = len(row)
    keys = [(d * devices + row[:, d]) * devices + domain.replica for d, domain in enumerate(domains)]
    return np.unique(np.stack(keys, axis=1), return_inverse=True)[1].reshape(row.shape)


def _fill(bins: np.ndarray, owned: np.ndarray, size: int) -> np.ndarray:
    """Bytes in each bin, int64 [size]."""
    filled = np.zeros(size, np.int64)
    np.add.at(filled, bins, owned)
    return filled


def _padded(bins: np.ndarray, owned: np.ndarray) -> int:
    """Bytes of the fullest bin of each domain, summed: what a return over the free axes is padded to."""
    filled = _fill(bins, owned, bins.max() + 1)
    return int(filled[bins].max(0).sum())


def deal(
    counts: np.ndarray, kinds: Sequence[tuple[int, ...]], domains: Sequence[Workers], jobs: Sequence[Job]
) -> np.ndarray:
    """Splits each class into its kinds: in every row, workers sorted by program take the kinds in blocks.

    Devices with equal programs mostly stay equal, since a boundary between two kinds falls on one worker.

    Args:
      counts: int64 [devices, jobs].
      kinds: for each job, how many matrices of each of its kinds a row has; sums to the job's count.
      domains: the domains of the jobs.
      jobs: the classes.

    Returns:
      int64 [devices, kinds of all jobs in order].
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

    A slot without a matrix runs on zeros.  Greedy: always the pair with the least resulting maximum load, of
    those the one that adds the fewest FLOPs over all devices.  Memory grows with the square of the programs.

    Args:
      counts: int64 [devices, kinds].
      flops: FLOPs of one matrix of each kind.
      max_programs: at least 1.

    Returns:
      int64 [devices, kinds], nowhere less than `counts`, with at most `max_programs` distinct rows.
    """
    cost = np.asarray(flops, np.int64)
    programs, group, users = np.unique(counts, axis=0, return_inverse=True, return_counts=True)
    group = group.reshape(-1)
    size, never = len(programs), np.iinfo(np.int64).max
    load = programs @ cost
    merged = np.full((size, size), never)  # load of a pair once merged; never: no pair, or one that is gone
    added = np.zeros((size, size), np.int64)  # FLOPs that merging the pair adds over all devices

    def price(i, others):
        merged[i, others] = merged[others, i] = np.maximum(programs[others], programs[i]) @ cost
        added[i, others] = added[others, i] = (merged[i, others] - load[i]) * users[i] + (
            merged[i, others] - load[others]
        ) * users[others]

    for i in range(size):
        price(i, np.arange(i))
    left = np.arange(size)
    while len(left) > max_programs:
        highest = max(load[left].max(), merged.min())
        keep, gone = np.unravel_index(np.where(merged <= highest, added, never).argmin(), merged.shape)
        programs[keep] = np.maximum(programs[keep], programs[gone])
        load[keep], users[keep] = programs[keep] @ cost, users[keep] + users[gone]
        group[group == gone] = keep
        merged[gone] = merged[:, gone] = never
        left = left[left != gone]
        price(keep, left[left != keep])
    return programs[group]
