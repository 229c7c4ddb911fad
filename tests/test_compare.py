import json

import jax
import pytest
from jax.sharding import AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P
from rich.console import Console

from muon_shard.__main__ import main
from muon_shard.compare import FORCED, compare, compare_model
from muon_shard.transports import TRANSPORTS

HSDP = {"replica": 8, "fsdp": 64}
TENSOR = {"replica": 2, "fsdp": 8, "tensor": 4}
WIDE = {"replica": 64, "fsdp": 8}
SMALL = ["--model", "llama-3.1-8b", "--mesh", "replica=2,fsdp=8,tensor=4", "--topology", "h100"]


@pytest.mark.parametrize(
    ("model", "mesh", "topology"),
    [
        *(
            (model, mesh, topology)
            for topology in ("tpu-v5p", "h100", "gb200-nvl72", "ascend-a2", "ascend-a3", "generic")
            for model, mesh in (("llama-3.1-8b", TENSOR), ("gpt-oss-120b", HSDP))
        ),
        *(("deepseek-v3", HSDP, topology) for topology in ("h100", "ascend-a3")),
        # Where estimates mislead: replicas that share work cost more than they save, by microseconds.
        *(("nanochat-d12", HSDP, topology) for topology in ("tpu-7x", "gb200-nvl72", "h100")),
        ("smollm2-135m", HSDP, "gb200-nvl72"),
        ("moonlight-16b-a3b", HSDP, "h100"),
        ("moonlight-16b-a3b", WIDE, "h100"),
        ("pangu-pro-moe-72b", WIDE, "ascend-a2"),
    ],
)
def test_the_automatic_plan_is_never_slower(model, mesh, topology):
    compared = compare_model(model, mesh, topology)
    assert compared.auto.total <= compared.best.total * (1 + 1e-9), str(compared)


def test_all_ways_are_shown_and_those_refused_say_why():
    compared = compare_model("llama-3.1-8b", HSDP, "h100")
    ways = [(row.transport, row.dedup) for row in compared.rows]
    assert ways[: 2 * len(FORCED)] == [(transport, dedup) for transport in FORCED for dedup in ("none", "all")]
    assert {transport for transport, _ in ways} == {*TRANSPORTS, "auto"} - {"local"}
    assert ways[-1] == ("auto", "auto")
    two_hops = [row for row in compared.rows if row.transport == "two_hops"]
    assert all(row.timeline is None and "only one mesh axis, fsdp" in row.refused for row in two_hops)
    assert str(compared).count("two_hops is refused: only one mesh axis, fsdp, scatters matrices") == 1


def test_what_redundancy_costs():
    rows = {(row.transport, row.dedup): row for row in compare_model("llama-3.1-8b", TENSOR, "h100").rows}
    redundant, gather, exchange = (rows[name, "none"] for name in ("redundant", "gather", "all_to_all"))
    assert redundant.timeline.compute > 10 * gather.timeline.compute  # 32 devices share what one computed
    assert gather.received > redundant.received > 10 * exchange.received
    # Gathered matrices need waves, which cost some of what sharing saves.
    assert rows["gather", "all"].timeline.compute < 0.7 * gather.timeline.compute
    assert exchange.timeline.compute == pytest.approx(gather.timeline.compute)


def test_any_tree_and_no_progress_bar_without_a_console(capsys):
    mesh = AbstractMesh((2, 4), ("replica", "fsdp"))
    leaf = jax.ShapeDtypeStruct((64, 128), "float32", sharding=NamedSharding(mesh, P("fsdp")))
    assert compare({"w": leaf}, "cpu").auto.total > 0
    compare({"w": leaf}, "cpu", console=Console(stderr=True))  # not a terminal
    assert capsys.readouterr() == ("", "")


def test_replicated_leaves_have_nothing_to_refuse():
    mesh = AbstractMesh((2,), ("replica",))
    leaf = jax.ShapeDtypeStruct((64, 128), "float32", sharding=NamedSharding(mesh, P()))
    compared = compare({"w": leaf}, "h100")
    assert not any(row.refused for row in compared.rows)


@pytest.mark.parametrize(
    "arguments", [SMALL, ["--model", "deepseek-v3", "--mesh", "replica=8,fsdp=64", "--topology", "ascend-a3"]]
)
def test_command_prints_a_table_of_100_columns(arguments, capsys):
    assert main(["simulate", *arguments]) == 0
    out, err = capsys.readouterr()
    assert err == "" and max(map(len, out.splitlines())) <= 100
    for word in (*FORCED, "auto", "compute", "communication", "total", "received", "temporaries", "milliseconds"):
        assert word in out


def test_command_prints_json(capsys):
    assert main(["simulate", *SMALL, "--dtype", "float32", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["topology"] == "h100"
    auto = found["rows"][-1]
    assert auto["transport"] == "auto"
    parts = auto["compute_ms"] + auto["communication_ms"] + auto["copying_ms"]
    assert parts == pytest.approx(auto["total_ms"]) and auto["received_bytes"] > 0 and auto["peak_bytes"] > 0


def test_command_writes_plot_and_trace(tmp_path, capsys):
    pytest.importorskip("matplotlib").use("Agg")
    plot, trace = tmp_path / "step.png", tmp_path / "step.json"
    assert main(["simulate", *SMALL, "--json", "--plot", str(plot), "--trace", str(trace)]) == 0
    assert plot.read_bytes().startswith(b"\x89PNG")
    total = json.loads(capsys.readouterr().out)["rows"][-1]["total_ms"]
    assert max(event["ts"] + event["dur"] for event in json.loads(trace.read_text())) == pytest.approx(total * 1e3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give --model and --mesh, or --article"),
        (["--model", "llama-3.1-8b"], "give --model and --mesh"),
        ([*SMALL, "--topology", "nonesuch"], "no topology is called 'nonesuch'. Known are: auto, tpu-v4"),
        (["--model", "nonesuch", "--mesh", "fsdp=8"], "no model is called 'nonesuch'"),
        (["--model", "llama-3.1-8b", "--mesh", "fsdp"], "'fsdp' is not an axis"),
        ([*SMALL, "--plot", "/nonesuch/step.png"], "cannot write /nonesuch/step.png: No such file or directory"),
        ([*SMALL, "--plot", "step.nonesuch"], "cannot write step.nonesuch: Format 'nonesuch' is not supported"),
        ([*SMALL, "--trace", "/nonesuch/step.json"], "cannot write /nonesuch/step.json: No such file or directory"),
        (["--article", "--model", "llama-3.1-8b"], "--article has a model, a mesh and a machine of its own"),
    ],
)
def test_wrong_arguments_are_one_line_and_exit_two(arguments, message, capsys):
    try:
        code = main(["simulate", *arguments])
    except SystemExit as stop:  # argparse
        code = stop.code
    out, error = capsys.readouterr()
    assert code == 2 and message in error and out == ""
    assert "Traceback" not in error
