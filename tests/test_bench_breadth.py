"""Models and layouts of the breadth benchmark, and that its ways agree on each kind of leaf."""

import json
import sys

import pytest
from jax.sharding import PartitionSpec as P

from benchmarks import breadth as bench
from benchmarks.breadth import LAYOUTS, MODELS, SMALL, Case, Leaf, cases, mixture, one_each
from muon_shard import models


def test_the_mixture_has_the_proportions_of_deepseek():
    published = models.load("deepseek-v3").params
    layers = {"q_a": "q_a_proj", "q_b": "q_b_proj", "kv_b": "kv_b_proj", "o": "o_proj"}
    ours = mixture(5, 448, 256)
    for name, theirs in layers.items():
        assert tuple(16 * d for d in ours[f"0.{name}"].shape) == published[f"layers.attn.{theirs}.0"]
    shapes = {shape for shape in published.values()}
    for name in ("0.gate", "0.down", "0.kv_a", "4.shared.up"):
        assert tuple(16 * d for d in ours[name].shape) in shapes
    assert (256, *(16 * d for d in ours["4.experts.down"].shape[1:])) in shapes


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_leaf_is_sharded(layout):
    chosen = LAYOUTS[layout]
    for model in (*MODELS.values(), *SMALL.values()):
        for name, leaf in model.items():
            spec = chosen.spec(leaf)
            axes = [axis for axis in spec if axis]
            assert axes and len(axes) == len(set(axes)), name
            assert len(axes) > 1 or layout != "FSDP × TP" or "rank" in leaf.names, name
            assert all(size % chosen.mesh[axis] == 0 for size, axis in zip(leaf.shape, spec) if axis), name


def test_the_first_dimension_that_fits_takes_the_axis():
    experts = Leaf((16, 32, 64), "experts embed mlp")
    assert LAYOUTS["FSDP"].spec(experts) == P("fsdp", None, None)
    assert LAYOUTS["FSDP"].spec(Leaf((12, 32, 64), "experts embed mlp")) == P(None, "fsdp", None)
    assert LAYOUTS["EP × FSDP"].spec(experts) == P("expert", "fsdp", None)
    assert LAYOUTS["FSDP × TP"].spec(experts) == P(None, "fsdp", "tensor")


def test_expert_parallelism_is_for_experts():
    every = cases(MODELS, list(LAYOUTS), ["float32", "bfloat16"])
    assert len(every) == 2 * (4 * 3 + 1)
    assert {case.model for case in every if case.layout == "EP × FSDP"} == {"mixture of experts"}
    quick = one_each(every)
    assert [case.model for case in quick] == list(MODELS)
    assert len({case.layout for case in quick}) >= 3 and {case.dtype for case in quick} == {"float32"}


LEAVES = {
    "kernel": Leaf((3, 3, 8, 16), "height width in out", bench.CONVOLUTION),
    "stack": Leaf((3, 16, 24), "layers embed mlp"),
    "down": Leaf((24, 16), "mlp embed"),
}


def test_all_ways_agree_on_all_kinds_of_leaves():
    found = Case("some", "FSDP × TP", "float32", LEAVES).measure(1, lambda: None)
    ways = found["ways"]
    assert tuple(ways) == bench.WAYS
    for way in ways.values():
        assert way["relative_difference"] < 1e-5 and way["ms"] > 0
    assert ways["redundant"]["collectives"] == {"all-gather": 6}  # two axes each
    assert ways["ours"]["to_ours"] == 1.0 and ways["ours"]["flops_over_ideal"] >= 1
    assert found["sharded"] == [
        "height width in out (None, None, 'tensor', 'fsdp')",
        "layers embed mlp (None, 'fsdp', 'tensor')",
        "mlp embed ('tensor', 'fsdp')",
    ]


def test_the_command_prints_one_line_of_json(monkeypatch, capsys):
    monkeypatch.setattr(bench, "SMALL", {"transformer": {"down": LEAVES["down"]}})
    chosen = ["--models", "transformer", "--layouts", "HSDP", "--dtypes", "bfloat16"]
    monkeypatch.setattr(sys, "argv", ["breadth", "--quick", *chosen])
    bench.main()
    out, _ = capsys.readouterr()
    (case,) = json.loads(out)["cases"]
    assert out.count("\n") == 1
    assert (case["model"], case["layout"], case["dtype"], case["leaves"]) == ("transformer", "HSDP", "bfloat16", 1)
    # Judged in float32, narrow steps are all wrong, but not by much.
    assert all(1e-4 < way["relative_difference"] < 0.1 for way in case["ways"].values())
