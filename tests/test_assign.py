"""Owners and programs: every function against its definition, then the bars on public models."""

import heapq
import itertools
import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from muon_shard import assign, models, programs
from muon_shard.assign import Job, Workers

ADAM = {"embed", "wte", "lm_head", "router", "value_embeds"}
SIZES = [2**k for k in range(3, 13)]


def one_row(devices, replicas=1):
    return Workers(np.arange(devices)[None], np.arange(devices) * replicas // devices, True)


def many_rows(devices, rows, replicas=1):
    """Rows of neighbours; the replicas cut each row."""
    workers = devices // rows
    replica = np.tile(np.arange(workers) * replicas // workers, rows)
    return Workers(np.arange(devices).reshape(rows, workers), replica, replicas > 1)


def flops(jobs):
    return np.array([job.flops for job in jobs])


def owned_bytes(counts, jobs, domain):
    return counts @ np.array([job.size if job.domain == domain else 0 for job in jobs])


def check_complete(counts, jobs, domains):
    """Every row owns exactly its matrices."""
    assert (counts >= 0).all()
    for j, job in enumerate(jobs):
        assert (counts[domains[job.domain].rows, j].sum(1) == job.count).all()


@st.composite
def problems(draw):
    """Jobs of a domain with one row, one with several, or both, on a few devices."""
    rows, workers = draw(st.sampled_from([(1, 4), (2, 3), (4, 2), (4, 4), (8, 1)]))
    replicas = draw(st.sampled_from([r for r in (1, 2, 4) if workers % r == 0]))
    devices = rows * workers
    domains = [one_row(devices, draw(st.sampled_from([r for r in (1, 2) if devices % r == 0])))]
    domains += draw(st.sampled_from([[], [many_rows(devices, rows, replicas)]]))
    job = st.builds(
        Job,
        domain=st.integers(0, len(domains) - 1),
        flops=st.integers(1, 50),
        size=st.integers(1, 20),
        count=st.integers(0, 15),
    )
    return draw(st.lists(job, min_size=1, max_size=5)), domains


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


def newton_schulz_flops(m, n):
    return 5 * (4 * m * m * n + 2 * m**3)


def inventory(name):
    """Dense and expert matrices per canonical shape, and the number of experts."""
    dense, experts, width = Counter(), Counter(), 1
    for path, shape in models.load(name).params.items():
        parts = set(path.split("."))
        if "experts" in parts:
            experts[tuple(sorted(shape[1:]))] += 1
            width = shape[0]
        elif not parts & ADAM:
            dense[tuple(sorted(shape[-2:]))] += math.prod(shape[:-2])
    return dense, experts, width


def dense_cell(name, devices):
    dense, _, _ = inventory(name)
    jobs = [Job(0, newton_schulz_flops(*shape), 2 * math.prod(shape), k) for shape, k in dense.items()]
    return jobs, [one_row(devices)]


def joint_cell(name, devices):
    """Dense matrices on all devices, experts on rows as many as devices and experts allow.

    The experts' bytes do not count: the bars are of FLOPs, and capping them trades FLOPs for bytes.
    """
    jobs, domains = dense_cell(name, devices)
    _, experts, width = inventory(name)
    rows = math.gcd(devices, width)
    for shape, k in experts.items():
        jobs.append(Job(1, newton_schulz_flops(*shape), 2 * math.prod(shape), k * width // rows))
    return jobs, [*domains, many_rows(devices, rows)]


def with_experts():
    return [name for name in models.names() if inventory(name)[1]]


def shares(cell, names):
    """Share of the lower bound reached, for all names and sizes."""
    out = []
    for name, devices in itertools.product(names, SIZES):
        jobs, domains = cell(name, devices)
        counts = assign.balance(jobs, domains)
        check_complete(counts, jobs, domains)
        out.append(assign.lower_bound(jobs, domains) / (counts @ flops(jobs)).max())
    return np.array(out)


def test_dense_cells_reach_the_bound():
    reached = shares(dense_cell, models.names())
    assert len(reached) == 150
    assert (reached >= 0.95).sum() >= 146 and reached.min() >= 0.89 and reached.mean() >= 0.996


def test_joint_cells_reach_the_bound():
    reached = shares(joint_cell, with_experts())
    assert len(reached) == 100
    assert (reached >= 0.95).sum() >= 98 and reached.min() >= 0.91 and reached.mean() >= 0.995


@pytest.mark.parametrize("cell", [dense_cell, joint_cell])
def test_eight_programs_are_free_on_models(cell):
    names = models.names() if cell is dense_cell else with_experts()
    for name, devices in itertools.product(names, SIZES):
        jobs, domains = cell(name, devices)
        counts = assign.balance(jobs, domains)
        slots = programs.merge(counts, flops(jobs), 8)
        assert (slots @ flops(jobs)).max() == (counts @ flops(jobs)).max()
