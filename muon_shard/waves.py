"""Waves: the exchange cut into several smaller ones, so that its buffers stay within a bound.

The plan is made once and then cut; planning each wave from nothing would lose its balance. Three ways to cut are tried.
*Core first*: what all devices of a domain own alike may be cut anywhere, such a wave needs no switch, and the rest,
which is balanced as a whole, goes into the last wave. *Even*: every device does the same share of what it owns in each
wave. *Aligned*: every device begins with its largest matrices and fills wave after wave, so that large ones meet.
"""

from collections.abc import Sequence

import numpy as np


def cut(
    owned: np.ndarray,
    rows: Sequence[np.ndarray],
    sizes: Sequence[int],
    costs: Sequence[int],
    domain_of: Sequence[int],
    limit: int,
) -> list[np.ndarray]:
    """Who owns what in each wave: as few waves as keep the exchange buffers within `limit` bytes.

    Where single matrices are larger than that, the waves are as many as bring the buffers down to the least possible.
    Of the ways to cut that one counts in which the waves' busiest devices work least.

    Args:
        owned: int64 [devices, kinds].
        rows: for each kind the devices of each row of its domain, int [rows, workers]; all rows own equally many.
        sizes: bytes that one matrix of each kind takes in an exchange buffer.
        costs: work of one matrix of each kind.
        domain_of: the domain of each kind; each has a buffer of its own.
        limit: bytes of all buffers of a wave.

    Returns:
        int64 [devices, kinds] per wave; they add up to `owned`. In each wave all rows own equally many.
    """
    best = [owned]
    least = buffer_bytes(owned, sizes, domain_of)
    most = int(owned[:, np.asarray(sizes) > 0].sum(1).max(initial=0))
    waves = min(-(-least // max(limit, *sizes)), most)
    while least > limit:
        found = [
            (max(buffer_bytes(wave, sizes, domain_of) for wave in way), work(way, costs), way)
            for way in (
                _core_first(owned, rows, sizes, waves),
                _even(owned, rows, waves),
                *_aligned(owned, rows, sizes, limit),
            )
        ]
        largest, _, way = min(found, key=lambda f: (max(f[0], limit), f[1]))
        if largest < least:
            best, least = way, largest
        if waves >= most:
            break
        waves = min(most, waves + max(1, waves // 8))
    return best


def buffer_bytes(owned: np.ndarray, sizes: Sequence[int], domain_of: Sequence[int]) -> int:
    """Bytes of the exchange buffers: in each domain those of the busiest device."""
    held = owned * np.asarray(sizes, np.int64)
    domains = np.asarray(domain_of)
    return sum(int(held[:, domains == d].sum(1).max(initial=0)) for d in dict.fromkeys(domain_of))


def work(waves: Sequence[np.ndarray], costs: Sequence[int]) -> int:
    """Of all waves, one after the other: each waits for its busiest device."""
    return sum(int((wave @ np.asarray(costs, np.int64)).max()) for wave in waves)


def _core_first(owned: np.ndarray, rows: Sequence[np.ndarray], sizes: Sequence[int], waves: int) -> list[np.ndarray]:
    """Equal shares of the core for each wave; what is left of it goes where there is least, the rest into the last."""
    found = [np.zeros_like(owned) for _ in range(waves)]
    filled = [0] * waves
    left = []
    for k, devices in enumerate(rows):
        core = int(owned[devices, k].min())
        for wave in found:
            wave[devices, k] = core // waves
        left += [k] * (core % waves)
        found[-1][devices, k] += owned[devices, k] - core
        filled[-1] += sizes[k] * int(owned[devices, k].max() - core)
    for k in sorted(left, key=lambda k: -sizes[k]):
        v = filled.index(min(filled))
        found[v][rows[k], k] += 1
        filled[v] += sizes[k]
    return [wave for wave in found if wave.any()]


def _even(owned: np.ndarray, rows: Sequence[np.ndarray], waves: int) -> list[np.ndarray]:
    """Every device's matrices of a kind lie evenly between 0 and 1, and the waves take what comes next, row by row."""
    found: np.ndarray = np.zeros((waves, *owned.shape), np.int64)
    for k, devices in enumerate(rows):
        counts = owned[devices, k]
        total = int(counts[0].sum())
        if devices.shape[1] == 1:  # many experts: no device's matrices need be told from another's
            found[:, devices[:, 0], k] = np.bincount(_turns(total, waves, k), minlength=waves)[:, None]
            continue
        row, worker = (index.reshape(-1).repeat(counts.reshape(-1)) for index in np.indices(counts.shape))
        nth = np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts.reshape(-1), counts.reshape(-1))
        place = (nth + 0.5) / counts[row, worker]
        order = np.lexsort((worker, place, row))
        wave = np.tile(_turns(total, waves, k), len(counts))
        np.add.at(found[:, :, k], (wave, devices[row[order], worker[order]]), 1)
    return [wave for wave in list(found) if wave.any()]


def _turns(total: int, waves: int, kind: int) -> np.ndarray:
    """The wave of each of `total` matrices. Kinds with few start at different waves, or all would fill the first."""
    turn = np.arange(total) * waves // max(total, 1)
    return (turn + kind) % waves if total < waves else turn


def _aligned(owned: np.ndarray, rows: Sequence[np.ndarray], sizes: Sequence[int], limit: int) -> list[list[np.ndarray]]:
    """One way at most: none where the rows of a domain would not own equally many in each wave."""
    programs, program_of = np.unique(owned, axis=0, return_inverse=True)
    order = sorted(range(len(sizes)), key=lambda k: -sizes[k])
    split = [_next_fit(program, order, sizes, limit) for program in programs]
    found = np.zeros((max(map(len, split)), *programs.shape), np.int64)
    for p, waves in enumerate(split):
        found[: len(waves), p] = waves
    found = found[:, program_of.reshape(-1)]
    for k, devices in enumerate(rows):
        totals = found[:, devices, k].sum(2)
        if (totals != totals[:, :1]).any():
            return []
    return [[wave for wave in list(found) if wave.any()]]


def _next_fit(program: np.ndarray, order: Sequence[int], sizes: Sequence[int], limit: int) -> list[np.ndarray]:
    """What one device owns, kind by kind, in waves of at most `limit` bytes, or one matrix."""
    waves, filled = [np.zeros_like(program)], 0
    for k in order:
        left = int(program[k])
        while left:
            fits = left if not sizes[k] else min(left, max((limit - filled) // sizes[k], 0 if filled else 1))
            if not fits:
                waves.append(np.zeros_like(program))
                filled = 0
                continue
            waves[-1][k] += fits
            filled += fits * sizes[k]
            left -= fits
    return waves
