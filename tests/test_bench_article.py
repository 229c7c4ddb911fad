"""The article's figures, tiny: what is compared with what, and that FLOPs fall as they should."""

import json
import sys

import jax
import pytest
from jax.sharding import PartitionSpec as P

import muon_shard
from benchmarks import article as bench
from benchmarks.article import FIGURES, MATRIX, OPTIONS, QUICK, SCHEME, Case, Dispatch, Size, everything, inventory
from muon_shard import article


def test_the_model_has_the_proportions_of_the_stand_in():
    size = Size(16, 2, 8)
    leaves = size.moe()
    published = article.dense() | article.experts()
    assert len(leaves) == 2 * len(published) // article.LAYERS
    for name, (shape, spec) in leaves.items():
        want = published[name].shape
        assert spec[0] == "fsdp" and not any(spec[1:])
        for got, of in zip(shape[-2:], want[-2:], strict=True):
            assert got == (of if of == bench.STREAMS else of // 16)
        assert shape[:-2] == ((8,) if len(want) == 3 else ())
    assert list(size.expert_tensor()) == ["experts.gate.0"]
    assert all("experts" not in name for name in size.dense())


@pytest.mark.parametrize("size", [(80, 1, 8), (16, 1, 12)])
def test_a_size_that_devices_cannot_share_is_refused(size, monkeypatch, capsys):
    with pytest.raises(ValueError, match="8 devices cannot share"):
        Size(*size)
    arguments = [f"--{name}={value}" for name, value in zip(("scale", "layers", "experts"), size)]
    monkeypatch.setattr(sys, "argv", ["article", *arguments])
    with pytest.raises(SystemExit):
        bench.main()
    assert "cannot share" in capsys.readouterr().err


def test_flops_of_the_redundant_way_are_those_of_all_matrices():
    leaves = Size(16, 1, 8).moe()
    params = {name: jax.ShapeDtypeStruct(shape, "float32") for name, (shape, _) in leaves.items()}
    plan = muon_shard.make_plan(params, options=SCHEME, muon_weight_dimension_numbers=dict.fromkeys(params, MATRIX))
    assert plan.total_flops == everything(leaves)


def test_inventory():
    leaves = {"a": ((4, 6), P("fsdp", None)), "b": ((4, 6), P("fsdp", None)), "c": ((2, 4, 6), P(None, None, "x"))}
    assert inventory(leaves) == {"[4_fsdp, 6]": 2, "[2, 4, 6_x]": 1}


def test_a_case_compares_the_same_step():
    leaves = {f"w{i}": ((32, 16), P("fsdp", None)) for i in range(7)} | {"e": ((8, 16, 24), P("fsdp", None, None))}
    found = Case({"fsdp": 8}, leaves, "redundant", "scheme", ("optax", "ours")).measure(1, lambda: None)
    ways = found["ways"]
    assert list(ways) == ["redundant", "scheme", "optax", "ours"]
    assert all(way["relative_difference"] < 1e-5 and way["ms"] > 0 for way in ways.values())
    assert ways["redundant"]["collectives"] == {"all-gather": 8}
    assert ways["scheme"]["collectives"] == {"all-gather": 2}
    assert ways["ours"]["collectives"] == {"all-to-all": 2}
    # 7 equal matrices on 8 owners, and one expert on each.
    assert found["flops"] == pytest.approx(everything(leaves) / ways["scheme"]["flops_per_device"], abs=0.01)
    assert 6 < found["flops"] < 8 and found["to_ours"].keys() == {"redundant", "scheme", "optax"}
    assert "flops_per_device" not in ways["optax"]  # nobody planned it


def test_replicas_share_flops():
    (case,) = FIGURES["fig10"].cases(Size(16, 1, 8), True)
    case = Case(case.mesh, {"w": ((8, 16, 16), P(None, "fsdp", None))}, case.before, case.after, ("ours",))
    found = case.measure(1, lambda: None)
    assert found["flops"] == 2.0
    assert [way["relative_difference"] < 1e-5 for way in found["ways"].values()] == [True] * 3


def test_dispatches_are_counted_and_right():
    small = Dispatch((4, 10), 3)
    ticks = []
    found = small.measure(2, lambda: ticks.append(0))
    assert len(ticks) == bench.timing.ticks(len(small.ways), 2)
    ways = found["ways"]
    assert tuple(ways) == small.ways
    assert all(way["relative_difference"] < 1e-5 for way in ways.values())
    assert ways["one program, fused"]["to_fused"] == 1.0
    each = len(jax.make_jaxpr(bench.operations)(jax.numpy.ones((4, 10))).eqns)
    assert ways["operation by operation"]["operations"] == 3 * each > 3 * 25
    assert found["matrices"] == {"[4, 10]": 3}


def test_every_figure_names_ways_that_exist():
    for figure in FIGURES.values():
        for case in figure.cases(QUICK, False):
            if isinstance(case, Case):
                assert set(case.ways) <= {"redundant", "optax", *OPTIONS} and "ours" in case.ways
            else:
                assert case.count == 74
    assert [len(figure.cases(QUICK, False)) for figure in FIGURES.values()] == [1, 2, 2, 3, 1]


def test_the_command_prints_one_line_of_json(monkeypatch, capsys):
    arguments = ["--quick", "--figures", "fig5", "--scale", "16", "--layers", "1", "--experts", "8"]
    monkeypatch.setattr(sys, "argv", ["article", *arguments])
    bench.main()
    out, _ = capsys.readouterr()
    report = json.loads(out)
    assert out.count("\n") == 1 and report["size"] == {"scale": 16, "layers": 1, "experts": 8}
    found = report["figures"]["fig5"]
    (figure,) = article.experts_in_place()
    (ratios,) = found["ratios"]
    assert (ratios["published"], ratios["predicted"]) == (4.45, round(figure.predicted, 2))
    (case,) = found["cases"]
    assert case["mesh"] == {"fsdp": 8} and case["matrices"] == {"[8_fsdp, 160, 88]": 1}
    assert case["ways"]["ours"]["collectives"] == {}
    assert case["flops"] >= 8
