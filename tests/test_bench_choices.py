"""Every choice against each single transport: what is counted, and what the command says."""

import json
import sys

import pytest

from benchmarks import choices
from muon_shard.compare import Comparison, Row
from muon_shard.timeline import Lane, Span, Timeline


def comparison(chosen, *others):
    def row(name, seconds):
        return Row(name, "all", Timeline((Lane(0, 1, 0, (Span("NS", "all", 0.0, seconds),)),), "here", 0))

    return Comparison("a model", "here", (*(row(name, s) for name, s in others), row("auto", chosen)))


@pytest.mark.parametrize(
    ("chosen", "slower"),
    [(0.9, 0.0), (1.0, 0.0), (1.0 + 1e-12, 0.0), (1.25, 0.25)],
)
def test_what_counts_as_slower(chosen, slower):
    found = choices.verdict(comparison(chosen, ("ring", 1.0), ("gather", 2.0)))
    assert found["best"] == "ring" and found["slower"] == slower
    assert found["best_ms"] == 1000 and found["chosen_ms"] == pytest.approx(1000 * chosen)


def test_the_command_counts_cells(monkeypatch, capsys):
    arguments = ["--models", "nanochat-d12", "--meshes", "replica=2,fsdp=4", "fsdp=8", "--topologies", "h100"]
    monkeypatch.setattr(sys, "argv", ["choices", *arguments])
    choices.main()
    found = json.loads(capsys.readouterr().out)
    assert found["cells"] == 2 and found["slower"] == []
    assert [cell["mesh"] for cell in found["every"]] == [{"replica": 2, "fsdp": 4}, {"fsdp": 8}]
