"""The compiled module holds the plan's collectives, to the byte, and none inside the programs."""

import dataclasses
import re

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from layouts import CASES, SHARED, Case, Leaf

import muon_shard
from muon_shard import hlo, pages


def collectives(text):
    found = {}
    for f in hlo.collectives(text):
        if f.groups and all(len(group) == 1 for group in f.groups):
            continue  # over one device nothing moves
        entry = found.setdefault(f.kind, {"count": 0, "bytes": 0})
        entry["count"] += f.count
        entry["bytes"] += f.count * f.bytes
    return found


def compiled_update(tx, params):
    return jax.jit(tx.update).lower(params, tx.init(params), params).compile()


def muon_leaves(case):
    return Case(case.mesh, {name: leaf for name, leaf in case.leaves.items() if leaf.dims is not None})


def expected(plan):
    found = {}
    for c in plan.collectives:
        entry = found.setdefault(c.kind, {"count": 0, "bytes": 0})
        entry["count"] += 1
        entry["bytes"] += c.bytes
    return found


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", CASES)
def test_planned_collectives_are_the_compiled_ones(name, dtype):
    case = muon_leaves(CASES[name])
    params = case.put(case.host(dtype=dtype), case.make_mesh())
    plan = muon_shard.make_plan(params, muon_weight_dimension_numbers=case.dims, options=SHARED)
    tx = muon_shard.scale_by_muon(weight_dimension_numbers=case.dims, plan_options=SHARED)
    found = collectives(compiled_update(tx, params).as_text())
    if dtype == "bfloat16":  # XLA on CPU widens bf16 collectives to f32: counts must agree, bytes may double
        for kind, entry in expected(plan).items():
            assert found[kind]["count"] == entry["count"]
            assert found[kind]["bytes"] in (entry["bytes"], 2 * entry["bytes"])
    else:
        assert found == expected(plan)


def test_the_reference_set_needs_three_collectives():
    shapes = {"q": (64, 64), "k": (64, 64), "v": (64, 64), "o": (64, 64), "up": (64, 256), "down": (256, 64)}
    leaves = {f"{k}{i}": Leaf(shape, P("fsdp", None)) for i in range(8) for k, shape in shapes.items()}
    case = Case({"replica": 2, "fsdp": 4}, leaves)
    params = case.put(case.host(), case.make_mesh())
    text = compiled_update(muon_shard.scale_by_muon(), params).as_text()
    found = collectives(text)
    assert {kind: entry["count"] for kind, entry in found.items()} == {"all-to-all": 2, "all-gather": 1}
    assert not collectives_in_branches(text)
    total = sum(x.size for x in params.values()) * 4
    minimum = {
        "all-to-all": 2 * total // 8,
        "all-gather": total // 4,
    }  # result bytes of a perfectly even split
    for kind, least in minimum.items():
        assert least <= found[kind]["bytes"] <= 1.02 * least
    plan = muon_shard.make_plan(params)
    assert plan.flops_per_device / (plan.total_flops / 8) <= 1.05 and plan.balance > 0.96


def test_the_mixed_set_of_the_prototype_is_balanced():
    shapes = (
        [(512, 512)] * 20
        + [(512, 2048)] * 5
        + [(2048, 512)] * 5
        + [(512, 1024), (1536, 512), (512, 256), (512, 256), (256, 512)]
    )
    leaves = {f"w{i}": Leaf(shape, P("fsdp", None)) for i, shape in enumerate(shapes)}
    case = Case({"replica": 2, "fsdp": 4}, leaves)
    mesh = jax.sharding.AbstractMesh((2, 4), ("replica", "fsdp"))
    plan = muon_shard.make_plan(case.abstract(mesh), options=muon_shard.PlanOptions(topology="cpu"))
    assert plan.flops_per_device / (plan.total_flops / 8) <= 1.05 and plan.balance > 0.96
    assert [c.kind for c in plan.collectives] == ["all-to-all", "all-to-all", "all-gather"]


def collectives_in_branches(text):
    """Collectives in computations that are branches of a conditional, or called from one."""
    bodies = dict(re.findall(r"^%?([\w.\-]+) [^\n]*\{\n(.*?)^\}", text, re.MULTILINE | re.DOTALL))
    todo = re.findall(r"branch_computations=\{([^}]*)\}", text)
    todo = [name.strip().lstrip("%") for names in todo for name in names.split(",")]
    assert todo, "the module has no conditional"
    seen, found = set(), {}
    while todo:
        name = todo.pop()
        if name in seen or name not in bodies:
            continue
        seen.add(name)
        found |= collectives(bodies[name])
        todo += re.findall(r"(?:body|condition|to_apply|calls)=%?([\w.\-]+)", bodies[name])
    assert len(seen) > 2
    return found


def test_no_collective_inside_a_program():
    case = CASES["hsdp"]
    params = muon_leaves(case).put(case.host(), case.make_mesh())
    text = compiled_update(muon_shard.scale_by_muon(plan_options=SHARED), params).as_text()
    assert not collectives_in_branches(text)


@pytest.mark.parametrize("max_programs", [1, 2, 3])
def test_merged_programs_give_the_same_updates(max_programs):
    case = muon_leaves(CASES["hsdp"])
    params = case.put(case.host(), case.make_mesh())
    options = dataclasses.replace(SHARED, max_programs=max_programs)
    plan = muon_shard.make_plan(params, options=options)
    assert plan.programs <= max_programs < muon_shard.make_plan(params, options=SHARED).programs
    got, _ = (tx := muon_shard.scale_by_muon(plan_options=options)).update(params, tx.init(params), params)
    want, _ = (tx := muon_shard.scale_by_muon()).update(params, tx.init(params), params)
    for name in params:
        np.testing.assert_allclose(got[name], want[name], atol=1e-5)


@pytest.mark.parametrize("transport", ["all_to_all", "ring", "gram"])
def test_pages_copied_run_by_run_are_those_gathered(transport, monkeypatch):
    """In waves, too, where one part waits for the wave before."""
    case = muon_leaves(CASES["hsdp"])
    params = case.put(case.host(), case.make_mesh())
    options = dataclasses.replace(SHARED, transport=transport, max_wave_bytes=8192)
    assert len(muon_shard.make_plan(params, options=options).parts[0].waves) > 1
    tx = muon_shard.scale_by_muon(plan_options=options)
    state, found, switches = tx.init(params), [], []
    for most in (pages.MOST_TABLES, 0):
        monkeypatch.setattr(pages, "MOST_TABLES", most)
        jax.clear_caches()  # or the body is not traced anew
        lowered = jax.jit(tx.update).lower(params, state, params)
        switches.append(lowered.as_text().count("stablehlo.case"))
        found.append(lowered.compile()(params, state, params)[0])
    assert switches[0] > switches[1]
    for name, update in found[0].items():
        np.testing.assert_array_equal(update, found[1][name])


def test_one_program_compiles_to_no_conditional():
    case = Case({"fsdp": 8}, {f"w{i}": Leaf((32, 32), P("fsdp")) for i in range(8)})
    params = case.put(case.host(), case.make_mesh())
    assert muon_shard.make_plan(params).programs == 1
    assert "conditional(" not in compiled_update(muon_shard.scale_by_muon(), params).as_text()


def test_loops_are_rolled():
    """Memory of 5 and of 10 steps is the same: no step keeps its temporaries."""
    params = {f"w{i}": np.ones((64, 128), np.float32) for i in range(8)}
    direct = muon_shard.PlanOptions(ns_method="direct")
    updates = [muon_shard.scale_by_muon(ns_steps=k, plan_options=direct) for k in (5, 10)]
    temp = [compiled_update(tx, params).memory_analysis().temp_size_in_bytes for tx in updates]
    assert temp[1] <= 1.05 * temp[0]


def test_inside_a_users_shard_map_raises_by_name():
    case = CASES["fsdp_rows"]
    mesh = case.make_mesh()
    params = {"w": case.put(case.host(), mesh)["w0"]}
    tx = muon_shard.scale_by_muon()
    state = tx.init(params)
    inside = jax.shard_map(
        lambda p: tx.update(p, state._replace(mu=p), p)[0], mesh=mesh, in_specs=P("fsdp"), out_specs=P("fsdp")
    )
    with pytest.raises(ValueError, match=r"inside a shard_map.*\n\* params\['w'\].*Manual"):
        jax.jit(inside)(params)


def inside(case, **arguments):
    """A step in a `shard_map` of one's own that checks what varies, as it does by default."""
    specs = {name: leaf.spec for name, leaf in case.leaves.items()}
    tx = muon_shard.scale_by_muon(weight_dimension_numbers=case.dims, param_shardings=specs, **arguments)
    step = lambda g: tx.update(g, tx.init(g))[0]  # noqa: E731
    return jax.jit(jax.shard_map(step, mesh=case.make_mesh(), in_specs=(specs,), out_specs=specs))


SMALL = Case(
    {"replica": 2, "fsdp": 4, "single": 1},
    {
        "rows": Leaf((16, 32), P("fsdp", "single")),
        "cols": Leaf((32, 16), P(None, "fsdp")),
        "skinny": Leaf((8, 256), P(None, "fsdp")),
        "whole": Leaf((16, 32)),
        "both": Leaf((16, 8), P("replica", "fsdp")),
    },
)


@pytest.mark.parametrize(
    ("case", "options"),
    [
        (SMALL, {"dedup_axes": "all"}),
        (SMALL, {"dedup_axes": (), "max_wave_bytes": 4096}),
        (SMALL, {"transport": "gram"}),
        (CASES["experts"], {"transport": "redundant"}),
    ],
    ids=["", "waves", "gram", "experts"],
)
def test_inside_a_checked_shard_map_nothing_else_is_done(case, options):
    """Updates are those outside, and nothing more moves for what `shard_map` must know."""
    case, options = muon_leaves(case), muon_shard.PlanOptions(**options)
    params = case.put(case.host(), case.make_mesh())
    plan = muon_shard.make_plan(params, muon_weight_dimension_numbers=case.dims, options=options)
    compiled = inside(case, plan_options=options).lower(params).compile()
    assert collectives(compiled.as_text()) == expected(plan)
    tx = muon_shard.scale_by_muon(weight_dimension_numbers=case.dims, plan_options=options)
    got, (want, _) = compiled(params), jax.jit(tx.update)(params, tx.init(params))
    for leaf in params:
        np.testing.assert_allclose(got[leaf], want[leaf], atol=1e-4)


@pytest.mark.parametrize(
    ("case", "arguments"),
    [(muon_leaves(case), {"plan_options": SHARED}) for case in CASES.values()]
    + [(SMALL, {"preconditioning": "spectral"}), (SMALL, {"adaptive": True}), (SMALL, {"ns_dtype": "bfloat16"})]
    + [
        (SMALL, {"plan_options": muon_shard.PlanOptions(transport=name, dedup_axes=shared, max_programs=2)})
        for name, shared in (("gather", "all"), ("ring", ()), ("redundant", "auto"))
    ],
    ids=[*CASES, "spectral", "adaptive", "bfloat16", "gather", "ring", "redundant"],
)
def test_inside_a_checked_shard_map_all_types_agree(case, arguments):
    """Tracing is enough: it raises where a type is not what `shard_map` or a loop must have."""
    structs = case.abstract(case.make_mesh())
    got = jax.eval_shape(inside(case, **arguments), structs)
    assert {name: x.shape for name, x in got.items()} == {name: x.shape for name, x in structs.items()}


def test_inside_a_checked_shard_map_replicas_of_different_programs():
    """Work is repeated over fsdp, by programs that put it at different places: equal, but nothing proves it."""
    sharded = [(16, 16), (16, 32), (16, 16), (16, 32), (32, 16), (16, 8)]
    leaves = {f"a{i}": Leaf(shape, P("fsdp")) for i, shape in enumerate(sharded)}
    case = Case(
        {"replica": 2, "fsdp": 4},
        leaves | {f"b{i}": Leaf(shape) for i, shape in enumerate([(8, 16), (8, 16), (16, 16)])},
    )
    params = case.put(case.host(), case.make_mesh())
    options = {"max_programs": 2, "dedup_axes": ("replica",)}
    with pytest.raises(ValueError, match=r"(?s)3 leaves.*\n\* params\['b0'\].*over \['fsdp'\].*dedup_axes='all'"):
        inside(case, plan_options=muon_shard.PlanOptions(**options))(params)
    inside(case, plan_options=muon_shard.PlanOptions(**options | {"dedup_axes": "all"})).lower(params)


def test_vmap_over_the_update():
    params = {"w": np.random.default_rng(0).standard_normal((3, 8, 16)).astype(np.float32)}
    tx = muon_shard.scale_by_muon()
    states = jax.vmap(tx.init)(params)
    got, _ = jax.vmap(tx.update)(params, states)
    one = {"w": params["w"][1]}
    want, _ = tx.update(one, tx.init(one))
    np.testing.assert_allclose(got["w"][1], want["w"], atol=1e-5)
