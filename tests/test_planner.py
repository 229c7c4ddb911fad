import json
import re

import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from layouts import CASES, SHARED, WEIGHT, Case, Leaf
from optax.contrib import MuonDimensionNumbers as Dims

import muon_shard
from muon_shard import labels, models
from muon_shard.planner import best_plan


def abstract(mesh, leaves, dtype="float32"):
    mesh = AbstractMesh(tuple(mesh.values()), tuple(mesh))
    return {
        name: jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))
        for name, (shape, spec) in leaves.items()
    }


@pytest.mark.parametrize("name", CASES)
def test_every_matrix_has_one_owner_in_its_row(name):
    case = CASES[name]
    plan = muon_shard.make_plan(
        case.abstract(case.make_mesh()),
        muon_weight_dimension_numbers=case.dims,
        options=muon_shard.PlanOptions(dedup_axes="all"),
    )
    for part in plan.parts:
        for domain in part.domains:
            packing = domain.packing
            row, counts = packing.index(packing.rows), np.array(packing.counts)
            for kind in range(len(packing.kinds)):
                per_row = np.bincount(row, weights=counts[:, kind])
                assert (per_row == sum(count for k, count in packing.leaves if k == kind)).all()
    matrices = sum(leaf.layout.matrices for part in plan.parts for leaf in part.leaves)
    owned = sum(sum(map(sum, d.packing.counts)) for part in plan.parts for d in part.domains)
    assert owned == matrices


@pytest.mark.parametrize("name", CASES)
def test_concrete_and_abstract_meshes_give_the_same_plan(name):
    case = CASES[name]
    mesh = case.make_mesh()
    plans = [
        muon_shard.make_plan(case.abstract(m), muon_weight_dimension_numbers=case.dims)
        for m in (mesh, mesh.abstract_mesh)
    ]
    plans.append(muon_shard.make_plan(case.put(case.host(), mesh), muon_weight_dimension_numbers=case.dims))
    assert plans[0] == plans[1] == plans[2]
    assert len(set(map(str, plans))) == 1 and len(set(map(hash, plans))) == 1


def test_plans_are_deterministic():
    case = CASES["experts"]
    params = case.abstract(AbstractMesh(tuple(case.mesh.values()), tuple(case.mesh)))
    first = muon_shard.make_plan(params, muon_weight_dimension_numbers=case.dims)
    best_plan.cache_clear()
    assert first == muon_shard.make_plan(params, muon_weight_dimension_numbers=case.dims)


def test_thousands_of_devices():
    leaves = {f"layers.{i}.{n}": ((4096, 4096), P("fsdp")) for i in range(64) for n in "qkvo"}
    plan = muon_shard.make_plan(abstract({"replica": 64, "fsdp": 64}, leaves))
    assert plan.devices == 4096 and plan.programs <= 2
    owners = np.array([sum(c) for c in plan.parts[0].domains[0].packing.counts])
    assert owners.max() == 1 and owners.sum() == 256


def test_experts_stay_in_their_row_and_move_nothing():
    plan = muon_shard.make_plan(
        abstract({"expert": 8}, {"up": ((64, 256, 128), P("expert"))}),
        muon_weight_dimension_numbers=Dims(1, 2),
    )
    assert not plan.collectives and plan.balance == 1 and plan.programs == 1


def test_balance_is_by_flops_over_all_domains():
    """Replicated matrices fill the devices that the sharded ones leave idle."""
    leaves = {f"s{i}": ((256, 256), P("fsdp")) for i in range(4)} | {f"r{i}": ((256, 256), P()) for i in range(4)}
    plan = muon_shard.make_plan(abstract({"fsdp": 8}, leaves), options=SHARED)
    assert plan.balance == 1 and len(plan.parts[0].domains) == 2


def test_max_programs_is_a_bound_and_its_price_shows():
    leaves = {f"w{i}": ((128 + 16 * i, 256), P(None, "fsdp")) for i in range(12)}
    free = muon_shard.make_plan(abstract({"fsdp": 8}, leaves))
    tight = muon_shard.make_plan(abstract({"fsdp": 8}, leaves), options=muon_shard.PlanOptions(max_programs=2))
    assert free.programs > 2 >= tight.programs
    assert tight.balance < free.balance and tight.total_flops == free.total_flops


def test_dtypes_do_not_share_an_exchange():
    leaves = abstract({"fsdp": 4}, {"a": ((16, 16), P("fsdp"))}) | {
        "b": abstract({"fsdp": 4}, {"b": ((16, 16), P("fsdp"))}, "bfloat16")["b"]
    }
    assert len(muon_shard.make_plan(leaves).parts[0].domains) == 2


def test_peak_bytes_is_near_the_compiled_temporaries():
    leaves = {f"w{i}": Leaf((128, 256), P("fsdp"), WEIGHT) for i in range(16)}
    case = Case({"replica": 2, "fsdp": 4}, leaves)
    params = case.put(case.host(), case.make_mesh())
    tx = muon_shard.scale_by_muon()
    compiled = jax.jit(tx.update).lower(params, tx.init(params), params).compile()
    measured = compiled.memory_analysis().temp_size_in_bytes
    assert 0.3 * measured <= muon_shard.make_plan(params).peak_bytes <= 3 * measured


def test_bytes_by_axis_counts_what_others_send():
    leaves = {f"w{i}": ((64, 64), P("fsdp")) for i in range(8)}
    plan = muon_shard.make_plan(abstract({"replica": 2, "fsdp": 4}, leaves), options=SHARED)
    one = 64 * 64 * 4
    assert plan.bytes_by_axis == {"fsdp": 2 * one * 3 // 4, "replica": one}


def test_json_is_plain_and_complete():
    case = CASES["experts"]
    plan = muon_shard.make_plan(case.abstract(case.make_mesh()), muon_weight_dimension_numbers=case.dims)
    values = json.loads(json.dumps(plan.to_json()))
    assert {"balance", "programs", "flops_per_device", "bytes_by_axis", "collectives", "groups"} <= set(values)
    assert sum(g["matrices"] for g in values["groups"]) == sum(leaf.layout.matrices for leaf in plan.parts[0].leaves)


@pytest.mark.parametrize(
    ("params", "arguments", "message"),
    [
        (
            {"w": np.ones(3, np.float32)},
            {"muon_weight_dimension_numbers": {"w": Dims()}},
            r"params\['w'\] of shape f32\[3\].*rank 1",
        ),
        (
            {"w": np.ones((3, 4, 5), np.float32)},
            {"muon_weight_dimension_numbers": {"w": Dims((0, 1), 1)}},
            r"\(0, 1\) and output axes \(1,\) overlap",
        ),
        (
            {"w": np.ones((3, 4), np.float32)},
            {"muon_weight_dimension_numbers": {"w": Dims(0, 2)}},
            r"axes \[2\] of a leaf of rank 2",
        ),
        (
            {"w": np.ones((3, 4), np.float32)},
            {"muon_weight_dimension_numbers": {"w": Dims((), 1)}},
            "no reduction or no output axis",
        ),
        (
            {"w": np.ones((3, 4), np.float32)},
            {"muon_weight_dimension_numbers": {"v": Dims()}},
            "muon_weight_dimension_numbers does not match the tree",
        ),
        (
            {"w": np.ones((3, 4), np.int32)},
            {},
            r"1 leaf cannot be optimized by Muon.\n\* params\['w'\] of shape i32\[3,4\].*int32",
        ),
        (
            {"a": np.ones(3, np.float32), "b": np.ones(4, np.float32)},
            {},
            r"2 leaves and not one is a Muon leaf(.|\n)*params\['a'\](.|\n)*params\['b'\]",
        ),
    ],
)
def test_bad_leaves_are_listed(params, arguments, message):
    with pytest.raises(ValueError, match=message):
        muon_shard.make_plan(params, **arguments)
    with pytest.raises(ValueError, match=message):
        muon_shard.muon(0.1, **arguments).init(params)


MESH = AbstractMesh((2, 4), ("replica", "fsdp"))
CONCRETE = jax.make_mesh((2, 4), ("replica", "fsdp"), axis_types=(AxisType.Auto,) * 2)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"w": P("nonesuch")},
            r"params\['w'\].*unknown mesh axes \['nonesuch'\]; the mesh has \{'replica': 2, 'fsdp': 4\}",
        ),
        ({"w": P(None, "fsdp")}, r"dimension 1 of size 6 does not divide over \('fsdp',\) of size 4"),
        ({"w": P(None, None, "fsdp")}, "3 entries for a leaf of rank 2"),
        ({"v": P()}, "param_shardings does not match the tree"),
        ({"w": P(P.UNCONSTRAINED)}, r"params\['w'\].*UNCONSTRAINED does not say"),
        ({"w": "fsdp"}, "holds a str"),
        ({"w": jax.ShapeDtypeStruct((4, 4), "float32")}, r"holds an array of shape \[4, 4\]"),
        (
            {"w": NamedSharding(AbstractMesh((8,), ("x",)), P("x"))},
            r"lives on mesh .* param_shardings= names mesh \{'x': 8\}",
        ),
    ],
)
def test_bad_shardings_are_listed(given, message):
    params = {"w": jax.ShapeDtypeStruct((8, 6), "float32", sharding=NamedSharding(MESH, P()))}
    with pytest.raises(ValueError, match=message):
        muon_shard.make_plan(params, param_shardings=given)


@pytest.mark.parametrize(
    ("dtype", "arguments", "problem", "reason"),
    [
        (
            "float32",
            {"ns_dtype": "complex64"},
            "cannot be orthogonalized in ns_dtype",
            "ns_dtype=complex64 is complex and float32 matrices are real",
        ),
        (
            "complex64",
            {"ns_dtype": "bfloat16"},
            "cannot be orthogonalized in ns_dtype",
            "would drop the imaginary part of complex64 matrices",
        ),
        (
            "float32",
            {"ns_coeffs": (1e4, 0.0, 0.0), "options": muon_shard.PlanOptions(ns_method="gram")},
            "cannot be orthogonalized as asked",
            "method='gram' has no safe form here",
        ),
        (
            "float32",
            {"options": muon_shard.PlanOptions(transport="two_hops")},
            "cannot travel as asked",
            "transport='two_hops' cannot serve it",
        ),
    ],
    ids=["real", "complex", "gram", "transport"],
)
def test_all_leaves_an_option_cannot_serve_are_listed(dtype, arguments, problem, reason):
    put = lambda shape: jax.device_put(np.ones(shape, dtype), NamedSharding(CONCRETE, P("fsdp")))  # noqa: E731
    params = {"v": put((16, 6)), "w": put((8, 6))}
    line = r"\n\* params\['{}'\] of shape " + dtype + r"\[{},6\].*: .*" + re.escape(reason) + ".*"
    message = rf"2 leaves {problem}\." + line.format("v", 16) + line.format("w", 8) + r"\nConsider"
    with pytest.raises(ValueError, match=message):
        muon_shard.make_plan(params, **arguments)
    arguments = dict(arguments)
    tx = muon_shard.muon(0.1, plan_options=arguments.pop("options", muon_shard.PlanOptions()), **arguments)
    state = tx.init(params)
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(tx.update, params, state, params)


def test_a_bare_spec_needs_a_mesh():
    with pytest.raises(ValueError, match="needs a mesh"):
        muon_shard.make_plan({"w": np.ones((8, 8), np.float32)}, param_shardings=P("fsdp"))


def test_leaves_that_are_no_arrays_are_listed():
    with pytest.raises(ValueError, match=r"1 leaf not an array.\n\* params\['s'\]: a float"):
        muon_shard.make_plan({"w": np.ones((4, 6), np.float32), "s": 1.0})


def test_nothing_to_plan():
    plan = muon_shard.make_plan({})
    assert str(plan) == "Muon plan: nothing to orthogonalize" and plan.balance == 1 and not plan.collectives


def test_overlapping_meshes_raise():
    devices = jax.devices()
    meshes = [jax.make_mesh((4,), ("x",), axis_types=(AxisType.Auto,), devices=devices[i : i + 4]) for i in (0, 2)]
    params = {
        str(i): jax.device_put(np.ones((8, 8), np.float32), NamedSharding(m, P("x"))) for i, m in enumerate(meshes)
    }
    with pytest.raises(ValueError, match=r"overlapping meshes.\n\* params\['1'\].*shares some, not all, devices"):
        muon_shard.make_plan(params)


@pytest.mark.parametrize("model", ["deepseek-v3", "llama-3.1-405b"])
@pytest.mark.parametrize("mesh", [{"replica": 2, "fsdp": 32}, {"replica": 8, "fsdp": 64}], ids=str)
def test_what_replicas_give_each_other_is_hardly_padded(model, mesh):
    params = dense(models.abstract_params(models.load(model), mesh, "bfloat16"))
    options = muon_shard.PlanOptions(dedup_axes="all", transport="all_to_all", max_wave_bytes=2**40)
    plan = muon_shard.make_plan(params, options=options, muon_weight_dimension_numbers=labels.by_path)
    useful = sent = 0
    for domain in plan.parts[0].domains:
        packing = domain.packing
        useful += int((np.array(packing.counts) @ np.array(packing.kind_pages)).sum())
        sent += packing.returned * packing.ways(packing.rows) * packing.ways(packing.shared)
    assert useful / sent >= 0.99


def test_two_hops_instead_of_gathers_on_512_devices():
    mesh = AbstractMesh((64, 8), ("node", "chip"))
    params = {
        path: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, P(("node", "chip"))))
        for path, x in dense(models.abstract_params(models.load("deepseek-v3"), {"fsdp": 1}, "bfloat16")).items()
        if x.shape[0] % 512 == 0
    }
    received = {}
    for transport in ("gather", "two_hops"):
        options = muon_shard.PlanOptions(transport=transport, max_wave_bytes=2**40)
        plan = muon_shard.make_plan(params, options=options, muon_weight_dimension_numbers=labels.by_path)
        received[transport] = sum(plan.bytes_by_axis.values())
    assert received["gather"] >= 50 * received["two_hops"]


def dense(params):
    """Without the experts."""
    return {path: x for path, x in params.items() if "experts" not in path.split(".")}


@pytest.mark.parametrize(
    ("shape", "spec", "dims"),
    [((256, 128), P(("x", "r")), muon_shard.Blocks(1, (64, 32, 32))), ((128, 128), P("x"), Dims(0, 1))],
)
@pytest.mark.parametrize("topology", ["h100", "cpu"])
def test_rivals_know_the_domains_of_all_waves(shape, spec, dims, topology):
    """A transport that one domain refuses, or that only others are better off with, is no rival."""
    leaves = {f"skinny{i}": ((64, 4096), P(None, "x")) for i in range(64)} | {"other": (shape, spec)}
    plan = muon_shard.make_plan(
        abstract({"x": 4, "r": 2}, leaves),
        options=muon_shard.PlanOptions(max_wave_bytes=2**20, topology=topology),
        muon_weight_dimension_numbers={name: dims if name == "other" else Dims(0, 1) for name in leaves},
    )
    (part,) = plan.parts
    other = [leaf.path for leaf in part.leaves].index("params['other']")
    assert {d.choice.transport for d in part.domains if other in d.leaves}.isdisjoint({"gram"})
    assert len(part.waves) > 1 and any(other not in d.leaves for d in part.waves[0].domains)
