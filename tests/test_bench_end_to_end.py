"""The end-to-end benchmark on a tiny model."""

import json
import sys

import pytest

from benchmarks import end_to_end
from muon_shard.demo import DemoConfig, ModelConfig
from muon_shard.demo.train import ADAMW, OURS, REFERENCE

SMALL = ModelConfig(width=32, heads=2, layers=1, hidden=32, experts=8, expert_hidden=16)


def test_steps_in_equal_time_share_one_figure_for_the_model():
    found = {
        OURS: {"model_ms": 90.0, "optimizer_ms": 20.0},
        REFERENCE: {"model_ms": 100.0, "optimizer_ms": 140.0},
        ADAMW: {"model_ms": 110.0, "optimizer_ms": 0.0},
    }
    assert end_to_end.steps_in_time(found, 20) == {OURS: 20, REFERENCE: 10, ADAMW: 24}
    found[REFERENCE]["optimizer_ms"] = 1e6
    assert end_to_end.steps_in_time(found, 20)[REFERENCE] == 1


def test_the_command_measures_every_optimizer(monkeypatch, capsys):
    timed, seen = end_to_end.timed, {}

    def known(task, optimizers, rounds):
        seen.update(timed(task, optimizers, rounds))
        return {name: {"model_ms": 10.0, "optimizer_ms": 0.0 if name == ADAMW else 10.0} for name in optimizers}

    monkeypatch.setattr(end_to_end, "timed", known)
    monkeypatch.setattr(end_to_end, "DemoConfig", lambda: DemoConfig(model=SMALL, context=16))
    monkeypatch.setattr(sys, "argv", ["end_to_end", "--batches", "8", "--steps", "2", "--rounds", "1"])
    end_to_end.main()
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert list(seen) == [OURS, REFERENCE, ADAMW]
    for each in seen.values():
        assert each["model_ms"] > 0 and each["optimizer_ms"] > 0 and 0 < each["share"] < 1

    batch = found["batches"]["8"]
    steps = {name: (each["equal_steps"]["steps"], each["equal_time"]["steps"]) for name, each in batch.items()}
    assert steps == {OURS: (2, 2), REFERENCE: (2, 2), ADAMW: (2, 4)}
    ours, reference, adamw = batch.values()
    assert ours["equal_steps"]["losses"] == pytest.approx(reference["equal_steps"]["losses"], abs=2e-4)
    # The same batches, only more of them.
    assert adamw["equal_time"]["losses"][0] == adamw["equal_steps"]["losses"][0] == ours["equal_steps"]["losses"][0]
    assert len(adamw["equal_time"]["losses"]) == 4
    assert adamw["equal_time"]["held_out_loss"] < ours["equal_steps"]["losses"][0]
