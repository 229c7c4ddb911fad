import builtins
import dataclasses
import json

import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P

from muon_shard import CustomOrthogonalizer, Link, Plan, PlanOptions, Topology, labels, make_plan, models
from muon_shard.domains import rate
from muon_shard.presets import names
from muon_shard.simulate import Host, simulate
from muon_shard.timeline import COLOURS, Lane, Span, Timeline

# Round numbers: at half the peak, 1,000 FLOP/s, 100 bytes/s of memory, 10 bytes/s over either axis.
MACHINE = Topology(
    axes={"replica": Link(20.0, 0.0), "fsdp": Link(20.0, 0.0)},
    flops=2000.0,
    hbm_bytes=1e9,
    hbm_bandwidth=200.0,
    name="made up",
    launch=0.5,
    achieved=0.5,
)


def flops(m, n):
    return 10_000 * m


def plan_of(leaves, mesh=None, run=flops, **options):
    """`leaves`: name → (shape, spec), bfloat16."""
    mesh = mesh or {"replica": 2, "fsdp": 2}
    abstract = AbstractMesh(tuple(mesh.values()), tuple(mesh))
    params = {
        name: jax.ShapeDtypeStruct(shape, "bfloat16", sharding=NamedSharding(abstract, P(*spec)))
        for name, (shape, spec) in leaves.items()
    }
    orthogonalizer = None if run is None else CustomOrthogonalizer(lambda x: x, run)
    options = PlanOptions(**{"topology": MACHINE, "transport": "all_to_all", "dedup_axes": "all"} | options)
    return make_plan(
        params, options=options, orthogonalizer=orthogonalizer, muon_weight_dimension_numbers=labels.by_path
    )


def spans(lane):
    return [(span.phase, pytest.approx(span.start), pytest.approx(span.seconds)) for span in lane.spans]


def test_a_timeline_by_hand():
    """Two 4×8 matrices over fsdp 2, replicas share: two devices own one each, of 64 bytes."""
    timeline = simulate(plan_of({f"w{i}": ((4, 8), ("fsdp",)) for i in range(2)}), MACHINE)
    # Pool: 2 shards of 32 bytes; a matrix per peer: each device sends its 32 bytes to 2 peers of its replica.
    steps = [
        ("pack", 0.0, 1.28),  # reads 64, writes 64 bytes at 100 bytes/s
        ("exchange", 1.28, 3.2),  # 64 bytes, of which the half comes from the other, at 10 bytes/s
        ("unpack", 4.48, 1.28),  # 64 bytes read, 64 written
        ("NS", 5.76, 40.0),  # 40,000 FLOPs at 1,000 FLOP/s
        ("pack", 45.76, 1.28),
        ("return", 47.04, 3.2),
        ("share", 50.24, 3.2),  # each replica gives its matrix, a shard of 32 bytes, to the other
        ("unpack", 53.44, 1.92),  # 32 bytes compacted for the other replica, then 64 read and written
    ]
    owners = next(lane for lane in timeline.lanes if lane.seconds("NS"))
    assert [(span.phase, span.start, span.seconds) for span in owners.spans] == [
        (phase, pytest.approx(start), pytest.approx(seconds)) for phase, start, seconds in steps
    ]
    idle = next(lane for lane in timeline.lanes if not lane.seconds("NS"))
    assert spans(idle) == [step for step in spans(owners) if step[0] != "NS"]  # waits 40 s, then goes on with them
    assert (owners.devices, idle.devices) == (2, 2)
    assert timeline.makespan == pytest.approx(55.36)
    assert timeline.compute == pytest.approx(40)
    assert timeline.exposed == pytest.approx(9.6)
    assert timeline.copying == pytest.approx(5.76)
    assert timeline.idle_share == pytest.approx(0.5)


def test_experts_in_place_talk_to_nobody():
    timeline = simulate(plan_of({"experts": ((4, 4, 8), ("fsdp",))}, dedup_axes=()), MACHINE)
    (lane,) = timeline.lanes
    assert [span.phase for span in lane.spans] == ["pack", "unpack", "NS", "pack", "unpack"]
    assert lane.devices == 4 and timeline.exposed == 0 and timeline.compute == pytest.approx(80)


def test_small_matrices_take_as_long_as_memory():
    run = simulate(plan_of({"w": ((4, 8), ())}, {"fsdp": 1}, run=lambda m, n: 1), MACHINE)
    assert run.compute == pytest.approx(2 * 4 * 8 * 2 / 100)  # read and written once, at 100 bytes/s


def test_a_late_host_launches_every_operation():
    plan = plan_of({f"w{i}": ((4, 8), ("fsdp",)) for i in range(4)} | {"x": ((16, 8), ("fsdp",))}, dedup_axes=())
    free = simulate(plan, MACHINE)
    launched = {}
    for together in ("matrix", "leaf", "shape"):
        busy = simulate(plan, MACHINE, host=Host(6, together))
        # Two all-to-alls for each of five leaves, 0.5 s a launch.
        assert busy.exposed - free.exposed == pytest.approx(5 * 2 * 0.5)
        launched[together] = max(lane.seconds("NS") for lane in busy.lanes) - free.compute
    owned = max(sum(sum(kinds) for kinds in program) for program in plan.parts[0].waves[0].programs)
    assert launched["matrix"] == launched["leaf"] == pytest.approx(owned * 6 * 0.5)
    assert launched["shape"] < launched["matrix"]


def test_an_expert_tensor_is_one_launch_as_a_leaf_and_many_as_matrices():
    plan = plan_of({"experts": ((8, 4, 8), ("fsdp",))}, dedup_axes=())
    free = simulate(plan, MACHINE).compute
    extra = {t: simulate(plan, MACHINE, host=Host(2, t)).compute - free for t in ("matrix", "leaf", "shape")}
    assert extra == {"matrix": pytest.approx(4 * 2 * 0.5), "leaf": pytest.approx(1.0), "shape": pytest.approx(1.0)}


@pytest.mark.parametrize("given", [{"operations": -1}, {"together": "nonesuch"}])
def test_bad_hosts(given):
    with pytest.raises(ValueError, match="Host: operations must be at least 0 and together one of matrix, leaf, shape"):
        Host(**given)


def test_parts_run_side_by_side():
    one, two = plan_of({"small": ((4, 8), ("fsdp",))}), plan_of({"wide": ((12, 8), ("fsdp",))})
    both = simulate(Plan(one.parts + two.parts), MACHINE)
    apart = [simulate(plan, MACHINE).makespan for plan in (one, two)]
    assert apart[0] < apart[1] == both.makespan
    assert {lane.part for lane in both.lanes} == {0, 1}
    assert both.busiest is not None and both.busiest.part == 1
    assert all(min(s.start for s in lane.spans) == 0 for lane in both.lanes)


@pytest.mark.parametrize("transport", ["all_to_all", "ring", "gather", "redundant"])
def test_faster_links_and_memory_are_never_slower(transport):
    plan = plan_of({f"w{i}": ((8, 16), ("fsdp",)) for i in range(5)}, transport=transport)

    def makespan(**changes):
        return simulate(plan, dataclasses.replace(MACHINE, **changes)).makespan

    for axis in ("replica", "fsdp"):
        times = [makespan(axes=MACHINE.links | {axis: Link(rate, latency)}) for rate, latency in
                 ((1.0, 1.0), (20.0, 1.0), (20.0, 0.0), (1e9, 0.0))]  # fmt: skip
        assert times == sorted(times, reverse=True)
    assert makespan(flops=1e3) >= makespan() >= makespan(flops=1e9)
    assert makespan(hbm_bandwidth=1.0) >= makespan() >= makespan(hbm_bandwidth=1e9)
    assert makespan(achieved=0.1) > makespan(achieved=1.0)


def test_work_is_conserved():
    """Where nothing is repeated, NS spans of all devices are all matrices at the device's rate."""
    params = models.abstract_params(models.load("llama-3.1-8b"), {"replica": 2, "fsdp": 8}, "bfloat16")
    options = PlanOptions(topology="h100", dedup_axes="all")
    plan = make_plan(params, options=options, muon_weight_dimension_numbers=labels.by_path)
    timeline = simulate(plan, "h100")
    spent = sum(lane.devices * lane.seconds("NS") for lane in timeline.lanes)
    machine = Topology({}, 990e12, 80e9, 3.35e12, achieved=0.7)
    assert spent == pytest.approx(plan.parts[0].total("cost") / rate("bfloat16", machine), rel=1e-9)
    assert sum(lane.devices for lane in timeline.lanes) == plan.devices
    assert len(timeline.lanes) == plan.programs
    assert timeline.peak_bytes == plan.peak_bytes


@pytest.mark.parametrize("name", [name for name in names() if name not in ("cpu",)])
def test_every_preset(name):
    timeline = simulate(plan_of({"w": ((64, 128), ("fsdp",))}, run=None, topology=name), name)
    assert timeline.topology == name and np.isfinite(timeline.makespan) and timeline.makespan > 0
    for lane in timeline.lanes:
        for before, after in zip(lane.spans, lane.spans[1:], strict=False):
            assert after.start >= before.end - 1e-15


def test_bad_topologies_are_one_clear_error():
    plan = plan_of({"w": ((4, 8), ("fsdp",))})
    with pytest.raises(ValueError, match="no topology is called 'nonesuch'"):
        simulate(plan, "nonesuch")
    bad = Topology({"replica": Link(0.0)}, 1e3, 1e9, 1e2)
    with pytest.raises(ValueError) as error:
        simulate(plan, bad)
    message = str(error.value)
    assert "2 faults" in message and "axis 'fsdp' of 2 devices has no link" in message and "bandwidth is 0.0" in message


def test_an_empty_plan_takes_no_time():
    timeline = simulate(Plan(()), "h100")
    assert (timeline.makespan, timeline.compute, timeline.exposed, timeline.idle_share) == (0, 0, 0, 0)
    assert timeline.to_trace() == [] and "0 s" in str(timeline)


def test_the_trace_ends_at_the_makespan(tmp_path):
    timeline = simulate(plan_of({f"w{i}": ((4, 8), ("fsdp",)) for i in range(3)}), MACHINE)
    timeline.save_trace(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())
    assert {event["ph"] for event in events} == {"X"}
    assert max(event["ts"] + event["dur"] for event in events) == pytest.approx(timeline.makespan * 1e6)
    assert {event["tid"] for event in events} == {lane.device for lane in timeline.lanes}
    assert sum(e["dur"] * e["args"]["devices"] for e in events if e["name"] == "NS") == pytest.approx(3 * 40e6)


def test_the_plot_names_phases_and_units():
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    from matplotlib import pyplot

    timeline = simulate(plan_of({f"w{i}": ((4, 8), ("fsdp",)) for i in range(3)}), MACHINE)
    ax = timeline.plot()
    legend = ax.get_legend()
    assert legend is not None and [text.get_text() for text in legend.get_texts()] == list(COLOURS)
    assert ax.get_xlabel() == "time (s)" and "made up" in ax.get_title()
    assert len(ax.get_yticklabels()) == len(timeline.lanes)
    assert sum(len(bars) for bars in ax.containers) == sum(len(lane.spans) for lane in timeline.lanes)
    assert timeline.plot(ax) is ax
    ax.figure.canvas.draw()
    pyplot.close(ax.figure)


def test_a_plot_without_matplotlib_says_what_to_install(monkeypatch):
    real = builtins.__import__

    def missing(name, *args, **kwargs):
        if name.startswith("matplotlib"):
            raise ModuleNotFoundError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(ModuleNotFoundError, match="pip install"):
        Timeline((Lane(0, 1, 0, (Span("NS", "", 0.0, 1.0),)),), "made up", 0).plot()


def test_the_table_fits_100_columns():
    params = models.abstract_params(models.load("deepseek-v3"), {"replica": 8, "fsdp": 64}, "bfloat16")
    options = PlanOptions(topology="ascend-a3")
    plan = make_plan(params, options=options, muon_weight_dimension_numbers=labels.by_path)
    text = str(simulate(plan, "ascend-a3"))
    assert max(map(len, text.splitlines())) <= 100
    for word in (*COLOURS, "waits", "ends", "ascend-a3"):
        assert word in text
