"""Problems of assignment that several test files share: small random ones, and public models."""

import itertools
import math
from collections import Counter

import numpy as np
from hypothesis import strategies as st

from muon_shard import assign, models
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
