"""`Plan.to_json` and `Plan.from_json`: nothing is lost, and what is no plan is refused in words."""

import copy
import dataclasses
import json
import time

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P
from layouts import CASES, SHARED

import muon_shard
from muon_shard import labels, models, serialize
from muon_shard.newton_schulz.orthogonalize import NewtonSchulz
from muon_shard.orthogonalizer import Adaptive, CustomOrthogonalizer, Orthogonalizer
from muon_shard.plan import Plan


def plan_of(name="hsdp", **arguments):
    case = CASES[name]
    given = {"muon_weight_dimension_numbers": case.dims, "options": SHARED} | arguments
    return muon_shard.make_plan(case.abstract(case.make_mesh()), **given)


def plan_for(model, mesh, **options):
    return muon_shard.make_plan(
        models.abstract_params(models.load(model), mesh, "bfloat16"),
        options=muon_shard.PlanOptions(topology="tpu-v5p", **options),
        muon_weight_dimension_numbers=labels.by_path,
    )


def through_json(plan):
    """As a file holds it; strictly JSON, without NaN or Infinity."""
    return Plan.from_json(json.loads(json.dumps(plan.to_json(), allow_nan=False)))


def running(orthogonalizer):
    plan = plan_of()
    return Plan(tuple(dataclasses.replace(part, orthogonalizer=orthogonalizer) for part in plan.parts), plan.routes)


@pytest.mark.parametrize("name", CASES)
def test_every_layout_comes_back(name):
    plan = plan_of(name)
    back = through_json(plan)
    assert back == plan and hash(back) == hash(plan) and str(back) == str(plan)
    assert back.to_json() == plan.to_json()


@pytest.mark.parametrize(
    "options", [{"max_programs": 1}, {"dedup_axes": ()}, {"transport": "ring"}, {"transport": "redundant"}], ids=str
)
def test_every_option_comes_back(options):
    plan = plan_of(options=muon_shard.PlanOptions(**options))
    assert through_json(plan) == plan


@pytest.mark.parametrize(("model", "mesh"), [("qwen3-30b-a3b", {"replica": 2, "fsdp": 64}), ("smollm2-135m", {"x": 6})])
def test_a_model_comes_back(model, mesh):
    plan = plan_for(model, mesh)
    assert through_json(plan) == plan


def test_4096_devices_are_short_and_quick():
    plan = plan_for("kimi-k2", {"replica": 64, "fsdp": 64}, max_programs=128)
    start = time.perf_counter()
    text = json.dumps(plan.to_json())
    back = Plan.from_json(text)
    assert time.perf_counter() - start < 20  # 1.6 s on an idle core
    assert back == plan
    assert len(text) < 1_000_000


def test_no_plan_and_several_meshes():
    assert through_json(Plan(())) == Plan(())
    params = {
        name: jax.ShapeDtypeStruct((64, 64), "float32", sharding=NamedSharding(AbstractMesh((8,), (name,)), P(name)))
        for name in "xy"
    }
    plan = muon_shard.make_plan(params)
    assert len(plan.parts) == 2 and through_json(plan) == plan


@pytest.mark.parametrize(
    "precision",
    [None, "highest", lax.Precision.HIGHEST, (lax.Precision.HIGH, "default"), lax.DotAlgorithmPreset.BF16_BF16_F32],
)
def test_orthogonalizers_come_back(precision):
    for orthogonalizer in (
        NewtonSchulz(4, "aol", "direct", (2.0, 1.5, 1.0, float("inf")), precision, "tpu"),
        Adaptive(NewtonSchulz(precision=precision)),
    ):
        plan = running(orthogonalizer)
        assert through_json(plan) == plan


def polar(x):
    return x


@dataclasses.dataclass(frozen=True)
class Own(Orthogonalizer):
    def __call__(self, x, *operands):
        return x

    def work(self, m, n, dtype):
        return NewtonSchulz().work(m, n, dtype)


@pytest.mark.parametrize(
    ("orthogonalizer", "name"),
    [
        (CustomOrthogonalizer(polar), "CustomOrthogonalizer 'polar'"),
        (Adaptive(CustomOrthogonalizer(polar)), "CustomOrthogonalizer 'polar'"),
        (Own(), "Own 'Own'"),
        (NewtonSchulz(precision=jnp.sin), "NewtonSchulz .*precision="),
    ],
)
def test_code_is_written_by_name_and_refused(orthogonalizer, name):
    values = json.loads(json.dumps(running(orthogonalizer).to_json()))
    assert values["groups"]
    with pytest.raises(ValueError, match=rf"{name}.* is code, which JSON cannot hold"):
        Plan.from_json(values)


def test_figures_for_readers_stay():
    plan = plan_of()
    values = plan.to_json()
    assert values["bytes_by_axis"] == plan.bytes_by_axis and values["balance"] == plan.balance
    assert len(values["collectives"]) == len(plan.collectives) and values["groups"] and values["routes"]
    assert values["plan"]["version"] == serialize.VERSION


def test_layouts_are_written_once_and_tables_as_runs():
    plan = plan_for("smollm2-135m", {"fsdp": 64})
    record = serialize.to_record(plan)
    leaves = plan.parts[0].leaves
    assert len(record["layouts"]) == len({leaf.layout for leaf in leaves}) < len(leaves) / 10
    slots = record["parts"][0]["waves"][0]["domains"][0]["packing"]["slots"]
    assert len(slots["rows"]) == plan.parts[0].programs and sum(times for _, times in slots["runs"]) == 64


def changed(*path, to=None):
    """The values of a plan with one of them changed, or left out."""
    values = json.loads(json.dumps(plan_of().to_json()))
    at = values
    for key in path[:-1]:
        at = at[key]
    if to is None:
        del at[path[-1]]
    else:
        at[path[-1]] = to
    return values


DOMAIN = ("plan", "parts", 0, "waves", 0, "domains", 0)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("{", "the text is not JSON"),
        ("[1]", "not what Plan.to_json"),
        (3, "not what Plan.to_json"),
        ({"balance": 1.0}, "the exact record, 'plan', is missing"),
        ({"plan": []}, "plan: it has no 'version'"),
        (changed("plan", "version"), "plan: it has no 'version'"),
        (changed("plan", "version", to=99), "it has version 99, this muon_shard reads version 3; make the plan anew"),
        (changed("plan", "layouts"), "plan: the list 'layouts' is missing"),
        (changed("plan", "parts"), "plan: Plan with missing 'parts'"),
        (changed("plan", "waves", to=2), "plan: Plan with unknown 'waves'"),
        (
            changed(*DOMAIN, "packing", "counts"),
            r"plan.parts\[0\].waves\[0\].domains\[0\].packing: Packing with missing 'counts'",
        ),
        (changed(*DOMAIN, "packing", "page", to="8"), r"packing.page: expected int, got '8'"),
        (changed(*DOMAIN, "packing", to=3), r"packing: a Packing is a dict, not 3"),
        (changed(*DOMAIN, "leaves", to=3), r"leaves: expected a list, got 3"),
        (changed(*DOMAIN, "packing", "leaves", 0, to=[1]), r"leaves\[0\]: expected 2 values, got \[1\]"),
        (changed(*DOMAIN, "packing", "counts", to=[[1]]), r"'counts' and 'slots' must have 8 rows of \d numbers"),
        (changed(*DOMAIN, "packing", "counts", to={"rows": []}), "expected a list, or 'rows' and 'runs'"),
        (
            changed(*DOMAIN, "packing", "counts", to={"rows": [[1]], "runs": [[1, 8]]}),
            "a run of a row that does not exist; there are 1",
        ),
        (changed(*DOMAIN, "packing", "mesh_axes", to=[["x", 8]]), "its mesh is not the plan's"),
        (changed(*DOMAIN, "packing", "leaves", to=[]), "differ in number"),
        (changed(*DOMAIN, "packing", "leaves", 0, to=[99, 1]), "kinds that do not exist"),
        (changed(*DOMAIN, "leaves", 0, to=99), "leaves that do not exist"),
        (changed(*DOMAIN, "choice", "transport", to="pigeon"), "unknown transport 'pigeon'"),
        (changed("plan", "parts", 0, "leaves", 0, "layout", to=99), "layout: expected the number of a layout, got 99"),
        (changed("plan", "parts", 0, "bound", to=True), "bound: expected int, got True"),
        (changed("plan", "parts", 0, "orthogonalizer", to=3), "an orthogonalizer is a dict with 'type', not 3"),
        (
            changed("plan", "parts", 0, "orthogonalizer", "type", to="Magic"),
            "unknown type 'Magic'; known: NewtonSchulz",
        ),
        (changed("plan", "parts", 0, "orthogonalizer", "method", to="magic"), "orthogonalizer: Unknown method 'magic'"),
        (
            changed("plan", "parts", 0, "orthogonalizer", "precision", to={"enum": "os", "name": "system"}),
            "precision: unknown {'enum': 'os'",
        ),
    ],
)
def test_what_is_no_plan_is_refused(given, message):
    with pytest.raises(ValueError, match=r"^Plan\.from_json: .*" + message):
        Plan.from_json(copy.deepcopy(given))
