"""Audits of modules compiled here, which must agree with their plans, and of modules made to differ."""

import functools
import json
import re

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P
from layouts import CASES, SHARED, Case, Leaf

import muon_shard
from muon_shard import audit, hlo
from muon_shard.__main__ import main
from muon_shard.audit import Tally


@functools.cache
def compiled_case(name, dtype="float32", axis_type="auto"):
    """A layout's Muon leaves: (text of the compiled update, plan)."""
    case = CASES[name]
    case = Case(case.mesh, {leaf: x for leaf, x in case.leaves.items() if x.dims is not None})
    params = case.put(case.host(dtype=dtype), case.make_mesh(axis_type))
    tx = muon_shard.scale_by_muon(weight_dimension_numbers=case.dims, plan_options=SHARED)
    text = jax.jit(tx.update).lower(params, tx.init(params), params).compile().as_text()
    return text, muon_shard.make_plan(params, muon_weight_dimension_numbers=case.dims, options=SHARED)


@pytest.fixture
def hsdp():
    return compiled_case("hsdp")


# Modules compiled here

LONG = ("one_device", "fsdp_cols", "replicated", "merged")  # compile longest for what they add


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] if name in LONG else []) for name in CASES],
)
def test_the_update_of_every_layout_holds_what_the_plan_promises(name):
    text, plan = compiled_case(name)
    audited = audit(text, plan)
    assert audited.ok and not audited.extra + audited.missing + audited.resized, str(audited)
    assert sum(row.found.bytes for row in audited.rows) == sum(c.bytes for c in plan.collectives)
    assert {row.axes for row in audited.rows} == {c.axes for c in plan.collectives}
    assert "the module holds what the plan promises" in str(audited)


def test_explicit_axes_add_nothing():
    assert audit(*compiled_case("size_one_axes", axis_type="explicit")).ok


def test_bf16_is_twice_as_wide_on_cpu_and_the_reason_says_so():
    audited = audit(*compiled_case("size_one_axes", dtype="bfloat16"))
    assert audited.resized and audited.resized == audited.rows
    for row in audited.rows:
        assert row.found == Tally(row.planned.count, 2 * row.planned.bytes)
        assert row.reason.startswith("twice the bytes, as XLA on CPU widens bf16 to f32: ")


def test_a_sum_of_the_user_is_extra_until_the_baseline_accounts_for_it():
    case = Case({"fsdp": 8}, {f"w{i}": Leaf((32, 32), P("fsdp")) for i in range(8)})
    mesh = case.make_mesh()
    params = case.put(case.host(), mesh)
    tx = muon_shard.scale_by_muon()

    def gradients(params, scale):
        total = jax.shard_map(lambda x: lax.psum(x, "fsdp"), mesh=mesh, in_specs=P("fsdp"), out_specs=P())(scale)
        return jax.tree.map(lambda x: x * total[0], params)

    def step(params, state, scale):
        return tx.update(gradients(params, scale), state, params)

    scale = jnp.ones(8)
    compiled = jax.jit(step).lower(params, tx.init(params), scale).compile()
    plan = muon_shard.make_plan(params)
    audited = audit(compiled, plan)
    assert not audited.ok and not audited.missing and not audited.resized
    (row,) = audited.extra
    assert (row.kind, row.axes, row.planned, row.found) == ("all-reduce", ("fsdp",), Tally(0, 0), Tally(1, 4))
    assert row.reason.startswith("not planned: ")
    without = jax.jit(gradients).lower(params, scale).compile()
    for baseline in (without, without.as_text()):
        explained = audit(compiled, plan, baseline)
        assert explained.ok and explained.baseline == Tally(1, 4)
        assert "baseline   1 collectives, 4 B" in str(explained)


# The plan


def test_a_plan_from_json_works_alike(hsdp):
    text, plan = hsdp
    assert audit(text, json.loads(json.dumps(plan.to_json()))) == audit(text, plan)


def promised(plan, change):
    """The JSON of a plan whose collectives `change` has altered."""
    values = json.loads(json.dumps(plan.to_json()))
    change(values["collectives"])
    return values


def test_other_bytes_are_resized(hsdp):
    text, plan = hsdp
    audited = audit(text, promised(plan, lambda cs: cs[-1].update(bytes=cs[-1]["bytes"] - 4)))
    (row,) = audited.resized
    assert not audited.ok and not audited.extra and not audited.missing
    assert (row.kind, row.axes) == ("all-gather", ("replica",)) and row.found.bytes == row.planned.bytes + 4
    assert row.reason.startswith(f"{row.found.bytes:,} B for {row.planned.bytes:,} B: ")


def test_what_the_module_lacks_is_missing(hsdp):
    text, plan = hsdp
    more = promised(plan, lambda cs: cs.append({**cs[0], "axes": ["replica"], "bytes": 512}))
    (row,) = audit(text, more).missing
    assert (row.kind, row.axes, row.planned, row.found) == ("all-to-all", ("replica",), Tally(1, 512), Tally(0, 0))
    assert row.reason == "not in the module"
    (row,) = audit(text, promised(plan, lambda cs: cs.append(cs[0]))).missing
    assert row.reason == "1 fewer than planned" and row.planned.count == row.found.count + 1


def test_the_wrong_axes_are_missing_here_and_extra_there(hsdp):
    text, plan = hsdp
    audited = audit(text, promised(plan, lambda cs: cs[-1].update(axes=["fsdp"])))
    assert [row.axes for row in audited.missing] == [("fsdp",)] and [row.axes for row in audited.extra] == [
        ("replica",)
    ]


def test_collectives_over_axes_of_size_one_are_not_expected(hsdp):
    text, plan = hsdp
    values = promised(plan, lambda cs: cs[0].update(axes=["one", "fsdp"]))
    values["collectives"].append({"kind": "all-gather", "axes": ["one"], "ways": 1, "bytes": 4})
    values["meshes"] = [{"replica": 2, "one": 1, "fsdp": 4}]
    assert audit(text, values).ok


# Modules written here, on a mesh a 2 × b 4

OVER = {
    "a": "replica_groups={{0,4},{1,5},{2,6},{3,7}}",
    "b": "replica_groups=[2,4]<=[8]",
    "ab": "replica_groups={}",
    "none": "replica_groups={{0,1,2},{3,4,5,6,7}}",
    "alone": "replica_groups={{0},{1},{2},{3},{4},{5},{6},{7}}",
}


def module(*lines):
    """A module of lines 'type kind axes'."""
    body = (
        f"  %{kind}.{i} = {form} {kind}(%p), {OVER.get(axes, axes)}"
        for i, (form, kind, axes) in enumerate(line.split(" ") for line in lines)
    )
    return "\n".join(["HloModule test, num_partitions=8", "", "ENTRY %main (p: f32[8]) -> f32[8] {", *body, "}", ""])


def plan_of(*collectives):
    """A plan of (kind, axes, bytes[, count])."""
    keys = ("kind", "axes", "bytes", "count")
    return {"meshes": [{"a": 2, "b": 4}], "collectives": [dict(zip(keys, c, strict=False)) for c in collectives]}


GATHERS = plan_of(("all-gather", ["b"], 400), ("all-gather", ["b"], 800), ("all-reduce", ["a"], 16))
REDUCE = "f32[4] all-reduce a"


@pytest.mark.parametrize(
    ("lines", "baseline", "verdict", "reason"),
    [
        (["f32[100] all-gather b", "f32[200] all-gather b"], [], "ok", ""),
        (["f32[300] all-gather b"], [], "ok", "2 planned as 1: combined or split"),
        (["(f32[100],f32[200]) all-gather b"], [], "ok", "2 planned as 1: combined or split"),
        (["f32[200] all-gather b", *["f32[50] all-gather b"] * 2], [], "ok", "1 planned as 2: combined or split"),
        (["f32[301] all-gather b"], [], "resized", "1,204 B for 1,200 B: all-gather.0"),
        (["f32[200] all-gather b", "f32[150] all-gather b"], [], "resized", "600 B for 400 B: all-gather.1"),
        (["f32[200] all-gather b", "f32[400] all-gather b"], [], "resized", "1,600 B for 400 B: all-gather.1"),
        (
            ["f32[200] all-gather b", "f32[200] all-gather b"],
            [],
            "resized",
            "twice the bytes, as XLA on CPU widens bf16 to f32: all-gather.0, all-gather.1",
        ),
        (
            ["f32[200] all-gather b", "f32[150] all-gather b", "f32[50] all-gather b"],
            [],
            "resized",
            "800 B for 400 B: all-gather.1, all-gather.2",
        ),
        (["f32[200] all-gather b"], [], "missing", "1 fewer than planned"),
        ([], [], "missing", "not in the module"),
        (
            ["f32[200] all-gather b", *["f32[100] all-gather b"] * 5],
            [],
            "extra",
            "4 more than planned: all-gather.1, all-gather.2, all-gather.3 and 2 more",
        ),
        (["f32[100] all-gather b", "f32[200] all-gather b", "f32[7] all-gather b"], ["f32[7] all-gather b"], "ok", ""),
        (["f32[307] all-gather b"], ["f32[7] all-gather b"], "ok", "combined with what the baseline has"),
        (["f32[100] all-gather b", "f32[200] all-gather b"], ["f32[7] all-gather b"], "ok", ""),
        (
            ["f32[100] all-gather b", "f32[200] all-gather b"],
            ["f32[100] all-gather b"],
            "missing",
            "1 fewer than planned",
        ),
        (["f32[100] all-gather b", "f32[200] all-gather b"], ["f32[100] all-gather a"], "ok", ""),
    ],
)
def test_verdicts(lines, baseline, verdict, reason):
    audited = audit(module(*lines, REDUCE), GATHERS, module(*baseline))
    row, reduced = audited.rows
    assert (row.kind, row.axes, row.verdict, row.reason) == ("all-gather", ("b",), verdict, reason)
    assert row.planned == Tally(2, 1200) and (reduced.kind, reduced.verdict) == ("all-reduce", "ok")
    assert audited.ok == (verdict == "ok")
    if verdict == "ok":
        assert row.found.bytes == 1200


def test_groups_that_fit_no_axes_are_extra_and_those_of_one_device_are_nothing():
    audited = audit(
        module(REDUCE, "f32[4] all-reduce none", "f32[4] all-reduce alone"), plan_of(("all-reduce", ["a"], 16))
    )
    (row,) = audited.extra
    assert row.axes == () and row.found == Tally(1, 16) and "(no axes fit)" in str(audited)


def test_a_planned_count_stands_for_equal_collectives():
    text = module(*["f32[5] all-to-all ab"] * 7)
    assert audit(text, plan_of(("all-to-all", ["a", "b"], 140, 7))).ok
    assert audit(text, plan_of(("all-to-all", ["b", "a"], 140, 7))).ok
    assert audit(text, plan_of(("all-to-all", ["a", "b"], 120, 6))).extra


def shifts(*distances):
    pairs = (",".join(f"{{{p},{(p + shift) % 8}}}" for p in range(8)) for shift in distances)
    return module(*(f"f32[5] collective-permute source_target_pairs={{{p}}}" for p in pairs))


def test_a_permute_over_fewer_axes_is_a_part_of_a_planned_one():
    assert hlo.collectives(shifts(4))[0].axes((("a", 2), ("b", 4))) == ("a",)
    whole = plan_of(("collective-permute", ["a", "b"], 140, 7))
    assert audit(shifts(*range(1, 8)), whole).ok
    apart = audit(shifts(1, 4), plan_of(("collective-permute", ["a", "b"], 20), ("collective-permute", ["a"], 20)))
    assert apart.ok and [row.found for row in apart.rows] == [Tally(1, 20)] * 2
    assert [row.axes for row in audit(shifts(1), plan_of(("collective-permute", ["b"], 20))).extra] == [("a", "b")]


LOOP = """\
HloModule test, num_partitions=8

%body (p: f32[4]) -> f32[4] {
  ROOT %r = f32[4] all-reduce(%p), replica_groups=[2,4]<=[8], to_apply=%add
}

ENTRY %main (p: f32[4]) -> f32[4] {
  ROOT %w = f32[4] while(%p), condition=%c, body=%bodyKNOWN
}
"""


def test_collectives_in_loops_count_as_often_as_they_run():
    five = LOOP.replace("KNOWN", ', backend_config={"known_trip_count":{"n":"5"}}')
    assert audit(five, plan_of(("all-reduce", ["b"], 80, 5))).ok
    (row,) = audit(five, plan_of(("all-reduce", ["b"], 16))).extra
    assert row.found == Tally(5, 80)


def test_a_loop_of_unknown_length_is_never_ok():
    text = LOOP.replace("KNOWN", "")
    (row,) = audit(text, plan_of(("all-reduce", ["b"], 16))).resized
    assert row.found == row.planned and row.reason == "counted once in a loop of unknown length: r"
    (row,) = audit(text, plan_of()).extra
    assert row.reason == "not planned: r; counted once in a loop of unknown length: r"
    assert audit(text, plan_of(), text).ok


# What is shown


def test_a_table_of_100_columns():
    kinds = [f"f32[{10**8 + i}] all-gather b" for i in range(40)] + ["f32[123456789] collective-broadcast ab"]
    audited = audit(module(*kinds), plan_of(("all-gather", ["b"], 4 * 10**8), ("reduce-scatter", ["a", "b"], 64)))
    lines = str(audited).splitlines()
    assert max(map(len, lines)) <= 100
    assert lines[0] == "Audit on a 2 × b 4: 2 extra, 1 missing"
    assert lines[1].split() == ["collective", "over", "planned", "bytes", "found", "bytes", "verdict"]
    assert lines[2].split()[:7] == ["all-gather", "b", "1", "400,000,000", "40", "16,000,003,120", "extra:"]
    assert "and 36 more" in " ".join(" ".join(line.split()) for line in lines)


def test_json_says_the_same():
    audited = audit(module("f32[4] all-reduce a", "f32[2] all-to-all b"), plan_of(("all-reduce", ["a"], 16)))
    values = json.loads(json.dumps(audited.to_json()))
    assert (
        values["ok"] is False and values["mesh"] == {"a": 2, "b": 4} and values["baseline"] == {"count": 0, "bytes": 0}
    )
    assert [row["verdict"] for row in values["rows"]] == ["ok", "extra"] and values["missing"] == values[
        "resized"
    ] == []
    assert values["extra"] == [
        {
            "kind": "all-to-all",
            "axes": ["b"],
            "planned": {"count": 0, "bytes": 0},
            "found": {"count": 1, "bytes": 8},
            "verdict": "extra",
            "reason": "not planned: all-to-all.1",
        }
    ]


def test_nothing_planned_and_nothing_found():
    audited = audit(module(), plan_of())
    assert audited.ok and str(audited).endswith("no collectives, neither planned nor found")


# Errors

NOTHING = "HloModule test, num_partitions=8"


class Silent:
    def as_text(self):
        return None


@pytest.mark.parametrize(
    ("compiled", "plan", "baseline", "message"),
    [
        ("module @jit_f {}", plan_of(), None, "compiled: .*no line `HloModule"),
        (Silent(), plan_of(), None, "compiled: .*no line `HloModule"),
        (NOTHING, plan_of(), "", "baseline: .*no line `HloModule"),
        ("HloModule test, num_partitions=4", plan_of(), None, "compiled is a module for 4 devices, the plan is for 8"),
        (NOTHING, plan_of(), "HloModule test", "baseline is a module for 1 devices, the plan is for 8"),
        (NOTHING, plan_of(("all-gather", ["x", "a"], 8)), None, r"over \['x'\], axes that its mesh lacks"),
        (NOTHING, {"meshes": [{"a": 8}, {"b": 8}], "collectives": []}, None, "spans 2 meshes"),
        (NOTHING, {}, None, "no plan.*KeyError.*meshes"),
        (NOTHING, {"meshes": [8], "collectives": []}, None, "no plan"),
        (NOTHING, {"meshes": [{"a": 8}], "collectives": [{"kind": "all-gather"}]}, None, "no plan.*axes"),
        (NOTHING, None, None, "no plan"),
    ],
)
def test_what_cannot_be_audited(compiled, plan, baseline, message):
    with pytest.raises(ValueError, match=f"audit: .*{message}"):
        audit(compiled, plan, baseline)


# Command line


@pytest.fixture
def files(tmp_path, hsdp):
    text, plan = hsdp
    (tmp_path / "dump.txt").write_text(text)
    (tmp_path / "plan.json").write_text(json.dumps(plan.to_json()))
    (tmp_path / "less.json").write_text(json.dumps(promised(plan, lambda cs: cs.pop())))
    (tmp_path / "step.txt").write_text(text.rstrip()[:-1] + "  %s = f32[4] all-reduce(%p), replica_groups={}\n}\n")
    (tmp_path / "rest.txt").write_text(module("f32[4] all-reduce ab"))
    (tmp_path / "broken.json").write_text('{"meshes": ')
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00\x81")
    return lambda *arguments: main(["audit", *(str(tmp_path / x) if x[0] not in "-/" else x for x in arguments)])


def test_the_command_line_prints_a_table_and_exits_one_on_a_difference(files, capsys):
    assert files("dump.txt", "--plan", "plan.json") == 0
    assert "the module holds what the plan promises" in capsys.readouterr().out
    assert files("dump.txt", "--plan", "less.json") == 1
    assert "extra: not planned" in " ".join(capsys.readouterr().out.split())


def test_the_command_line_takes_a_baseline(files, capsys):
    assert files("step.txt", "--plan", "plan.json") == 1
    assert files("step.txt", "--plan", "plan.json", "--baseline", "rest.txt") == 0
    assert "baseline   1 collectives, 16 B, left out" in capsys.readouterr().out


def test_the_command_line_prints_json(files, capsys):
    assert files("dump.txt", "--plan", "less.json", "--json") == 1
    values = json.loads(capsys.readouterr().out)
    assert not values["ok"] and [row["kind"] for row in values["extra"]] == ["all-gather"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere.txt", "--plan", "plan.json"], "cannot read .*nowhere.txt: No such file"),
        (["dump.txt", "--plan", "nowhere.json"], "cannot read .*nowhere.json: No such file"),
        (["dump.txt", "--plan", "plan.json", "--baseline", "/"], "cannot read /: "),
        (["binary", "--plan", "plan.json"], "cannot read .*binary: it is not text"),
        (["dump.txt", "--plan", "broken.json"], "broken.json is not JSON"),
        (["dump.txt", "--plan", "dump.txt"], "dump.txt is not JSON"),
        (["plan.json", "--plan", "plan.json"], "no line `HloModule"),
    ],
)
def test_files_that_cannot_be_read_are_one_line(files, arguments, message, capsys):
    assert files(*arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("muon-shard audit: ") and error.count("\n") == 1
    assert re.search(message, error)
