"""Programs: every function against its definition, then few programs on public models."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import (
    SIZES,
    check_complete,
    dense_cell,
    flops,
    joint_cell,
    many_rows,
    one_row,
    owned_bytes,
    problems,
    with_experts,
)

from muon_shard import assign, models, programs
from muon_shard.assign import Job, Workers

# place


@settings(max_examples=60, deadline=None)
@given(problems())
def test_place_permutes_within_cells_and_never_pads_more(problem):
    jobs, domains = problem
    counts = assign.balance(jobs, domains)
    placed = programs.place(counts, jobs, domains)
    check_complete(placed, jobs, domains)
    for row in domains[-1].rows:  # rows of the finest domain are the cells
        assert sorted(placed[row].tolist()) == sorted(counts[row].tolist())
    assert padded(placed, jobs, domains) <= padded(counts, jobs, domains)


def replica_bytes(counts, jobs, domains, d):
    """Bytes of each replica of each row, [rows, replicas]."""
    rows, replica = domains[d].rows, domains[d].replica
    owned = owned_bytes(counts, jobs, d)
    return np.array([np.bincount(replica[row], owned[row], replica.max() + 1) for row in rows])


def padded(counts, jobs, domains):
    return sum(replica_bytes(counts, jobs, domains, d).max() for d in range(len(domains)))


@pytest.mark.parametrize("name", ["deepseek-v3", "kimi-k2", "openpangu-ultra-moe-718b", "qwen3-235b-a22b"])
def test_place_evens_bytes_between_replicas(name):
    jobs, _ = dense_cell(name, 512)
    domains = [one_row(512, replicas=8)]
    counts = programs.place(assign.balance(jobs, domains), jobs, domains)
    owned = replica_bytes(counts, jobs, domains, 0)
    assert owned.mean() / owned.max() >= 0.99


@pytest.mark.parametrize(("name", "dense", "experts"), [("moonlight-16b-a3b", 0.97, 0.99), ("kimi-k2", 0.99, 0.99)])
def test_replicas_of_rows_are_even(name, dense, experts):
    # Whole rows of experts lie in one dense replica, where only the order of ties can help the dense bytes.
    jobs, domains = joint_cell(name, 4096)
    rows = domains[1].rows
    domains = [one_row(4096, replicas=2), Workers(rows, many_rows(4096, len(rows), 2).replica, False)]
    counts = programs.place(assign.balance(jobs, domains), jobs, domains)
    for d, least in enumerate((dense, experts)):
        owned = replica_bytes(counts, jobs, domains, d)
        assert owned.mean() / owned.max() >= least


def test_place_serves_two_replicated_domains():
    jobs = [Job(0, 4, 1, 8), Job(1, 3, 1, 3)]
    domains = [Workers(np.arange(16)[None], np.arange(16) % 2, True), many_rows(16, 4, replicas=2)]
    # All dense matrices in one replica; in each row two of the three expert matrices in the first one.
    counts = np.array([[1, 1], [0, 1], [1, 1], [0, 0]] * 4)
    placed = programs.place(counts, jobs, domains)
    check_complete(placed, jobs, domains)
    assert replica_bytes(placed, jobs, domains, 0).max() == 4
    assert replica_bytes(placed, jobs, domains, 1).max() == 2


# deal


@settings(max_examples=60, deadline=None)
@given(problems(), st.randoms(use_true_random=False))
def test_deal_splits_every_class(problem, random):
    jobs, domains = problem
    counts = assign.balance(jobs, domains)
    kinds = []
    for job in jobs:
        cuts = sorted(random.choices(range(job.count + 1), k=random.randrange(3)))
        kinds.append(tuple(b - a for a, b in zip([0, *cuts], [*cuts, job.count], strict=True)))
    dealt = programs.deal(counts, kinds, domains, jobs)
    first = 0
    for j, sizes in enumerate(kinds):
        mine = dealt[:, first : first + len(sizes)]
        np.testing.assert_array_equal(mine.sum(1), counts[:, j])
        rows = domains[jobs[j].domain].rows
        assert (mine[rows].sum(1) == sizes).all()
        first += len(sizes)
    assert (dealt >= 0).all() and dealt.shape[1] == first


def test_deal_keeps_equal_programs_equal():
    jobs, domains = dense_cell("deepseek-v3", 64)
    counts = np.random.default_rng(0).permutation(assign.balance(jobs, domains))
    cuts = [job.count * (j + 1) // 8 for j, job in enumerate(jobs)]
    kinds = [(cut, job.count - cut) for cut, job in zip(cuts, jobs, strict=True)]
    dealt = programs.deal(counts, kinds, domains, jobs)
    # The one boundary of each class falls within one run of equal devices: two more programs at most.
    assert len(np.unique(dealt, axis=0)) <= len(np.unique(counts, axis=0)) + 2 * len(jobs)


# merge


@given(
    st.lists(st.tuples(*[st.integers(0, 3)] * 3), min_size=1, max_size=12),
    st.integers(1, 6),
)
def test_merge_gives_slots_for_all_in_few_programs(owned, most):
    counts = np.array(owned, np.int64)
    slots = programs.merge(counts, [5, 3, 2], most)
    assert (slots >= counts).all()
    assert len(np.unique(slots, axis=0)) <= most
    if len(np.unique(counts, axis=0)) <= most:
        np.testing.assert_array_equal(slots, counts)
    # Slots of a program are the maximum of its users: none is there for nobody.
    for program in np.unique(slots, axis=0):
        np.testing.assert_array_equal(counts[(slots == program).all(1)].max(0), program)


def test_merge_takes_the_cheapest_pair():
    counts = np.array([[9, 0], [8, 0], [0, 4], [0, 4], [0, 3]])
    slots = programs.merge(counts, [1, 1], 3)
    # Both pairs leave the maximum at 9 and add one unit; the first in order is taken. Then the other.
    assert (slots @ [1, 1]).max() == 9
    assert (slots - counts).sum() == 1
    np.testing.assert_array_equal(programs.merge(counts, [1, 1], 2), [[9, 0], [9, 0], [0, 4], [0, 4], [0, 4]])


def test_merge_takes_hundreds_of_programs():
    counts = np.random.default_rng(0).integers(0, 5, (500, 30))
    slots = programs.merge(counts, range(1, 31), 8)
    assert (slots >= counts).all() and len(np.unique(slots, axis=0)) <= 8


# Public models


@pytest.mark.parametrize("cell", [dense_cell, joint_cell])
def test_eight_programs_are_free_on_models(cell):
    names = models.names() if cell is dense_cell else with_experts()
    for name, devices in itertools.product(names, SIZES):
        jobs, domains = cell(name, devices)
        counts = assign.balance(jobs, domains)
        slots = programs.merge(counts, flops(jobs), 8)
        assert (slots @ flops(jobs)).max() == (counts @ flops(jobs)).max()
