"""The scaling benchmark: what it counts is what is compiled, and each number of devices has its process."""

import json
import sys

import pytest

from benchmarks import scaling

TINY = {"layers": 1, "width": 32}


@pytest.fixture(scope="module")
def eight():
    return scaling.worker(8, rounds=1, **TINY)


def test_all_series_of_eight_devices(eight):
    assert [row["mesh"] for row in eight["strong"]] == [{"fsdp": 8}, {"replica": 2, "fsdp": 4}]
    assert [row["mesh"] for row in eight["weak"]] == [{"fsdp": 8}]
    assert [row["matrices"] for rows in eight.values() for row in rows] == [6, 6, 48]
    assert all("ms_median" in row for row in eight["strong"])
    assert "ms_median" not in eight["weak"][0]


def test_what_is_planned_is_compiled(eight):
    flat, hsdp = eight["strong"]
    for row in (flat, hsdp, *eight["weak"]):
        assert row["compiled_flops"] == row["flops_per_device"] > 0
        assert row["temp_bytes"] > 0 and row["compile_seconds"] > 0
    assert flat["collectives"] == {"all-to-all": 2}
    assert hsdp["collectives"] == {"all-to-all": 2}  # so small that each replica computes
    # 6 matrices cannot keep 8 devices busy.
    assert flat["best_possible"] < 1
    assert eight["weak"][0]["best_possible"] == 1


def test_efficiency_is_against_one_device():
    rows = [{"devices": 1, "flops_per_device": 80}, {"devices": 8, "flops_per_device": 20}]
    assert [row["efficiency"] for row in scaling.with_efficiency(rows, lambda row: 80)] == [1.0, 0.5]
    assert scaling.with_efficiency(rows, lambda row: None) == rows


def test_the_command_runs_processes_and_plans(monkeypatch, capsys):
    monkeypatch.setattr(scaling, "PLANNED", ((1, 8),))
    arguments = ["--devices", "1", "2", "--rounds", "0", "--layers", "1", "--width", "32"]
    monkeypatch.setattr(sys, "argv", ["scaling", *arguments])
    scaling.main()
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    one, two = found["strong"]
    assert (one["devices"], two["devices"]) == (1, 2)
    assert one["collectives"] == {} and one["efficiency"] == 1.0
    assert 0.8 < two["efficiency"] <= two["best_possible"] <= 1.0
    assert found["weak"] == []
    assert [plan["devices"] for plan in found["planning"]] == [8]


def test_a_process_that_fails_is_heard_of():
    with pytest.raises(RuntimeError, match="(?s)scaling on 3 devices exited with 1.*divi"):
        scaling.in_a_process(3, 0, 1, 32)  # 3 devices do not divide 32 rows
