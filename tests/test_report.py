import dataclasses

import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P
from layouts import CASES, SHARED, Case, Leaf

import muon_shard
from muon_shard.report import common_name


@pytest.mark.parametrize("name", CASES)
def test_tables_fit_100_columns(name):
    case = CASES[name]
    text = str(muon_shard.make_plan(case.abstract(case.make_mesh()), muon_weight_dimension_numbers=case.dims))
    assert max(map(len, text.splitlines())) <= 100
    for leaf in case.leaves:  # every leaf is shown, alone or in a group
        assert leaf.rstrip("0123456789") in text


def test_the_table_says_what_runs_where_and_why():
    mesh = AbstractMesh((2, 4), ("replica", "fsdp"))
    leaf = jax.ShapeDtypeStruct((64, 128), "float32", sharding=NamedSharding(mesh, P("fsdp")))
    text = str(muon_shard.make_plan({"blocks": [{"wq": leaf} for _ in range(8)]}, options=SHARED))
    for part in (
        "8 matrices in 8 leaves on 8 devices (replica 2 × fsdp 4)",
        "balance 100.0%",
        "blocks.*.wq ×8",
        "G[M_fsdp, N]",
        "{replica}",
        "all_to_all",
        "8 × 1",
        "scattered over fsdp",
        "updates to replicas",
        "all-to-all over fsdp (4)",
        "all-gather over replica (2)",
        "8 leaves to Muon, 0 to Adam",
    ):
        assert part in text, part


def test_common_name():
    assert common_name(["params['a'][0].w12", "params['a'][1].w12"]) == "a.*.w12"
    assert common_name(["params['layers.wq.0']", "params['layers.wq.1']"]) == "layers.wq.*"
    assert common_name(["params"]) == "params"


def test_one_of_each_is_singular():
    text = str(muon_shard.make_plan({"w": jax.ShapeDtypeStruct((4, 8), "float32")}))
    assert "1 matrix in 1 leaf on 1 device (one device)" in text and "Routing: 1 leaf to Muon, 0 to Adam" in text


def test_tables_are_text_in_notebooks_too(monkeypatch):
    """There rich would show a table itself and leave nothing to print."""
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    plan = muon_shard.make_plan({"w": np.ones((4, 8), np.float32)})
    timeline = muon_shard.simulate(plan, "h100")
    assert str(plan).startswith("Muon plan") and "NS" in str(timeline)


def test_a_plan_that_no_device_can_hold_says_so():
    leaves = {f"w{i}": Leaf((256, 256), P("fsdp")) for i in range(8)}
    params = Case({"fsdp": 8}, leaves).abstract(AbstractMesh((8,), ("fsdp",)))
    machine = muon_shard.Topology({"fsdp": muon_shard.Link(1e9, 1e-6)}, flops=1e12, hbm_bytes=1e6, hbm_bandwidth=1e11)
    small, large = (
        str(muon_shard.make_plan(params, options=muon_shard.PlanOptions(topology=topology)))
        for topology in (machine, dataclasses.replace(machine, hbm_bytes=1e9))
    )
    assert "more than the 1 MB of a device" in small
    assert "of a device" not in large
