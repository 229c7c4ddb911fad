import json
import subprocess
import sys

import pytest

from muon_shard.__main__ import main, parse_mesh


def test_parse_mesh():
    assert parse_mesh("replica=2,fsdp=4") == {"replica": 2, "fsdp": 4}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["plan", "--model", "nonesuch", "--mesh", "fsdp=8"], "no model is called 'nonesuch'"),
        (["plan", "--model", "kimi-k2", "--mesh", "fsdp"], "'fsdp' is not an axis"),
        (["plan", "--model", "kimi-k2", "--mesh", "fsdp=0"], "'fsdp=0' is not an axis"),
        (["plan", "--model", "kimi-k2", "--mesh", "fsdp=2,fsdp=4"], "named twice"),
        (["plan", "--model", "kimi-k2", "--mesh", "fsdp=²"], "'fsdp=²' is not an axis"),
        (["demo", "--mesh", "fsdp=99999"], "mesh of 99999 devices"),
        (
            ["plan", "--model", "kimi-k2", "--mesh", "fsdp=8", "--ns-steps", "0"],
            "'0' is not a positive whole number",
        ),
        (["nonesuch"], "invalid choice"),
        ([], "required: COMMAND"),
    ],
)
def test_wrong_arguments_are_one_line_and_exit_two(arguments, message, capsys):
    try:
        code = main(arguments)
    except SystemExit as stop:  # argparse
        code = stop.code
    error = capsys.readouterr().err
    assert code == 2 and message in error
    assert "Traceback" not in error


def test_plan_prints_json(capsys):
    assert main(["plan", "--model", "moonlight-16b-a3b", "--mesh", "replica=2,fsdp=8", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert {"balance", "programs", "flops_per_device", "bytes_by_axis", "collectives", "groups"} <= set(plan)
    assert plan["devices"] == 16


def test_plan_of_momentum_over_replicas(capsys):
    asked = ["plan", "--model", "smollm2-135m", "--mesh", "replica=2,fsdp=4", "--json", "--momentum-sharding"]
    assert main([*asked, "replicas"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["momentum_bytes"] == plan["momentum_bytes_by_sharding"]["replicas"] > 0
    assert plan["momentum_bytes_by_sharding"]["params"] == 2 * plan["momentum_bytes"]
    assert main([*asked, "devices"]) == 2 and "momentum_sharding must be" in capsys.readouterr().err


def test_plan_prints_a_table_of_100_columns(capsys):
    assert main(["plan", "--model", "deepseek-v3", "--mesh", "replica=2,fsdp=64"]) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 100
    assert "layers.experts.gate_proj.*" in out.replace("\n", "") and "Routing:" in out


@pytest.mark.parametrize("arguments", [["--help"], ["plan", "--help"], ["demo", "--help"]])
def test_help(arguments, capsys):
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 0 and "usage: muon-shard" in capsys.readouterr().out


def test_runs_as_a_module():
    run = subprocess.run([sys.executable, "-m", "muon_shard", "--help"], capture_output=True, text=True, check=True)
    assert "plan" in run.stdout
