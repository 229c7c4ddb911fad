"""Owners: every function against its definition, then the bars on public models."""

import heapq
import itertools

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from problems import (
    check_complete,
    dense_cell,
    flops,
    joint_cell,
    many_rows,
    one_row,
    owned_bytes,
    problems,
    shares,
    with_experts,
)

from muon_shard import assign, models
from muon_shard.assign import Job, Workers

# waterfill


def heap_lpt(loads, cost, count, limit):
    heap = [(load, w) for w, load in enumerate(loads) if limit[w]]
    heapq.heapify(heap)
    items = [0] * len(loads)
    for _ in range(count):
        load, w = heapq.heappop(heap)
        items[w] += 1
        if items[w] < limit[w]:
            heapq.heappush(heap, (load + cost, w))
    return items


@given(
    st.lists(st.tuples(st.integers(0, 60), st.integers(0, 9)), min_size=1, max_size=9),
    st.integers(1, 25),
    st.integers(0, 60),
)
def test_waterfill_is_lpt(workers, cost, count):
    loads, limit = np.array(workers, np.int64).T
    items = assign.waterfill(loads[None], cost, count, limit[None])
    if limit.sum() < count:
        assert items is None
    else:
        assert items[0].tolist() == heap_lpt(loads.tolist(), cost, count, limit.tolist())


def test_waterfill_fills_each_row_by_itself():
    loads = np.random.default_rng(0).integers(0, 10**15, (16, 8))
    limit = np.full(loads.shape, 37)
    items = assign.waterfill(loads, 10**13, 37, limit)
    expected = [heap_lpt(row.tolist(), 10**13, 37, [37] * 8) for row in loads]
    assert items.tolist() == expected


def test_waterfill_says_when_one_row_has_no_room():
    assert assign.waterfill(np.zeros((2, 2), np.int64), 1, 3, np.array([[2, 2], [2, 0]])) is None


# balance and lower_bound


@settings(max_examples=60, deadline=None)
@given(problems())
def test_balance_owns_everything_once_and_respects_the_bound(problem):
    jobs, domains = problem
    counts = assign.balance(jobs, domains)
    check_complete(counts, jobs, domains)
    assert assign.lower_bound(jobs, domains) <= (counts @ flops(jobs)).max()
    np.testing.assert_array_equal(counts, assign.balance(jobs, domains))


def best_by_brute_force(jobs, domains):
    """Least maximum load over all assignments of all matrices of all rows."""
    choices, costs = [], []
    for job in jobs:
        for row in domains[job.domain].rows:
            choices += [row.tolist()] * job.count
            costs += [job.flops] * job.count
    devices = domains[0].rows.size

    def most(owners):
        load = [0] * devices
        for owner, cost in zip(owners, costs, strict=True):
            load[owner] += cost
        return max(load)

    return min(most(owners) for owners in itertools.product(*choices))


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 1), st.integers(1, 9), st.integers(1, 2)), min_size=1, max_size=3))
def test_lower_bound_is_below_the_optimum(triples):
    jobs = [Job(domain, cost, 1, count) for domain, cost, count in triples]
    domains = [one_row(4), many_rows(4, 2)]
    assume(sum(job.count * len(domains[job.domain].rows) for job in jobs) <= 7)
    assert assign.lower_bound(jobs, domains) <= best_by_brute_force(jobs, domains)


@pytest.mark.parametrize(
    ("jobs", "bound"),
    [
        ([Job(0, 3, 1, 8)], 6),  # the mean: 8 of 3 on 4
        ([Job(0, 9, 1, 1), Job(0, 1, 1, 3)], 9),  # the largest
        ([Job(0, 3, 1, 5)], 6),  # two of five share one of four
        ([Job(0, 4, 1, 4), Job(0, 3, 1, 1)], 7),  # of five, the two lightest
        ([Job(1, 3, 1, 3)], 6),  # three in a row of two
        ([Job(1, 2, 1, 4), Job(0, 6, 1, 1)], 7),  # a row that has 8 gets the 6 too: 14 on two
    ],
)
def test_lower_bound_knows_integrality_and_rows(jobs, bound):
    assert assign.lower_bound(jobs, [one_row(4), many_rows(4, 2)]) == bound


def test_bytes_are_capped_for_a_little_compute():
    # By FLOPs alone some devices would own 1.5 times the mean: skinny matrices carry more bytes per FLOP.
    jobs, domains = dense_cell("qwen3-235b-a22b", 64)
    counts = assign.balance(jobs, domains)
    owned = owned_bytes(counts, jobs, 0)
    assert owned.max() <= 1.02 * owned.mean()
    assert assign.lower_bound(jobs, domains) >= 0.99 * (counts @ flops(jobs)).max()


def test_bytes_do_not_count_where_nothing_travels():
    stays = Workers(np.arange(4)[None], np.zeros(4, int), False)
    jobs = [Job(0, 100, 1, 4), Job(0, 1, 10**6, 4), Job(0, 99, 1, 1)]
    heavier = [Job(0, 100, 10**6, 4), Job(0, 1, 1, 4), Job(0, 99, 10**6, 1)]
    np.testing.assert_array_equal(assign.balance(jobs, [stays]), assign.balance(heavier, [stays]))


def test_large_dense_matrices_go_around_the_expert_rows():
    # Four dense matrices on the four devices of one row would leave its experts no room.
    jobs = [Job(0, 40, 1, 4), Job(1, 1, 1, 200)]
    counts = assign.balance(jobs, [one_row(16), many_rows(16, 4)])
    assert (counts @ flops(jobs)).max() == 60


def test_confined_classes_first_where_that_is_better():
    # By FLOPs alone the two of 7 come first and the five of 3 in each row end at 14; those first, all fits.
    jobs = [Job(0, 7, 1, 2), Job(0, 2, 1, 4), Job(1, 3, 1, 5)]
    domains = [many_rows(4, 1), many_rows(4, 2)]
    assert (assign.balance(jobs, domains) @ flops(jobs)).max() == assign.lower_bound(jobs, domains) == 13


def test_swaps_repair_lpt():
    # The worst case of LPT: 5+3+3, 5+3, 4+4, where 5+4, 5+4, 3+3+3 is possible.
    jobs = [Job(0, 5, 1, 2), Job(0, 4, 1, 2), Job(0, 3, 1, 3)]
    assert (assign.balance(jobs, [one_row(3)]) @ flops(jobs)).max() == 9


# Public models


def test_dense_cells_reach_the_bound():
    reached = shares(dense_cell, models.names())
    assert len(reached) == 150
    assert (reached >= 0.95).sum() >= 146 and reached.min() >= 0.89 and reached.mean() >= 0.996


def test_joint_cells_reach_the_bound():
    reached = shares(joint_cell, with_experts())
    assert len(reached) == 100
    assert (reached >= 0.95).sum() >= 98 and reached.min() >= 0.91 and reached.mean() >= 0.995
