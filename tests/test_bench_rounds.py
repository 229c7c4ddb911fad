"""What benchmarks share: rounds, ratios, and the judge that would see a wrong optimizer."""

import jax
import numpy as np
import optax
import pytest

from benchmarks import rounds as timing
from benchmarks.peers import LEARNING_RATE
from benchmarks.reference import SETS, ReferenceSet


def test_every_way_runs_in_every_round_in_changing_order():
    called = []
    ways = {name: lambda name=name: called.append(name) for name in "abcd"}
    ticks = []
    times = timing.interleaved(ways, 5, lambda: ticks.append(0))
    assert [len(each) for each in times.values()] == [5] * 4 and len(ticks) == 6
    orders = ["".join(called[i : i + 4]) for i in range(0, 24, 4)]
    assert all(sorted(order) == list("abcd") for order in orders)
    assert len(set(orders)) > 1


def test_short_ways_are_called_until_a_measurement_is_long_enough(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(timing.time, "perf_counter", lambda: clock[0])
    calls = []

    def way():
        calls.append(clock[0])
        clock[0] += 0.002

    times = timing.interleaved({"way": way}, 2, least=0.02)
    assert len(calls) >= 2 * 10
    assert times["way"] == pytest.approx([0.002, 0.002])


def test_ratios_are_paired_by_round():
    times = {"a": [2.0, 20.0, 3.0], "b": [1.0, 10.0, 1.0]}
    assert timing.ratio(times, "a", "b") == 2.0
    assert timing.milliseconds(times) == {"a": 3000.0, "b": 1000.0}


def test_difference_is_relative_to_the_largest_entry():
    want = {"x": np.array([1.0, -4.0]), "y": np.array([0.5])}
    got = {"x": np.array([1.0, -4.0]), "y": np.array([0.7])}
    assert timing.difference(got, want) == pytest.approx(0.05)


@pytest.fixture(scope="module")
def problem():
    chosen = ReferenceSet((2, 4), ("replica", "fsdp"), dict(list(SETS["mixed"].leaves.items())[-3:]))
    mesh = chosen.mesh()
    host = [chosen.host_arrays(seed) for seed in (0, 1, 2)]
    wanted = timing.on_one_device(optax.contrib.muon(LEARNING_RATE), host[0], host[1:])
    params, *grads = (jax.device_put(each, chosen.shardings(mesh)) for each in host)
    return timing.Problem(mesh, params, grads, wanted)


def test_a_wrong_momentum_is_seen(problem):
    ways = {"right": optax.contrib.muon(LEARNING_RATE), "wrong": optax.contrib.muon(LEARNING_RATE, beta=0.5)}
    ticks = []
    times, facts = problem.measure(ways, 1, lambda: ticks.append(0))
    assert facts["right"]["relative_difference"] < 1e-5 < 1e-2 < facts["wrong"]["relative_difference"]
    assert facts["right"]["ms"] > 0 and facts["right"]["temp_bytes"] > 0 and facts["right"]["collective_bytes"] > 0
    assert len(ticks) == timing.ticks(2, 1)
    assert times.keys() == ways.keys()


def test_a_step_donates_its_state_and_keeps_shardings(problem):
    tx = optax.sgd(0.1, momentum=0.9)
    state = tx.init(problem.params)
    step = timing.compile_step(tx, state, problem.grads[0], problem.params)
    updates = step.run(problem.grads[0], problem.params)
    assert all(x.is_deleted() for x in jax.tree.leaves(state))
    for name, x in problem.params.items():
        assert updates[name].sharding.is_equivalent_to(x.sharding, x.ndim)
    assert step.facts()["collectives"] == {}
