"""`Plan.plot`: what is drawn equals the plan, is named, and has units."""

import dataclasses
import sys
import warnings

import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P
from layouts import CASES, SHARED

import muon_shard
from muon_shard import labels, models

pytest.importorskip("matplotlib")

from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: E402
from matplotlib.figure import Figure  # noqa: E402

from muon_shard import plot  # noqa: E402


def plan_of(name, **options):
    case = CASES[name]
    return muon_shard.make_plan(
        case.abstract(case.make_mesh()),
        muon_weight_dimension_numbers=case.dims,
        options=dataclasses.replace(SHARED, **options),
    )


def plan_on(mesh, leaves, **options):
    """Leaves name → (shape, spec) on an abstract mesh."""
    on = AbstractMesh(tuple(mesh.values()), tuple(mesh))
    params = {
        name: jax.ShapeDtypeStruct(s, "float32", sharding=NamedSharding(on, p)) for name, (s, p) in leaves.items()
    }
    return muon_shard.make_plan(params, options=dataclasses.replace(SHARED, **options))


def stacks(axes):
    """Height of each bar, from its stacked pieces; the bar at the left of a device that shares nothing set apart."""
    heights: dict[float, float] = {}
    for container in axes.containers:
        for bar in container:
            x = round(bar.get_x() + bar.get_width() / 2, 6)
            heights[x] = heights.get(x, 0) + bar.get_height()
    alone = {x: heights.pop(x) for x in list(heights) if x < 0}
    return np.array([heights[x] for x in sorted(heights)]), alone


def lengths(axes):
    """(axis, purpose) → length of the bar."""
    names = [label.get_text() for label in axes.get_yticklabels()]
    return {
        (name, container.get_label()): bar.get_width()
        for container in axes.containers
        for name, bar in zip(names, container)
        if bar.get_width()
    }


def legend(axes):
    return [text.get_text() for text in axes.get_legend().get_texts()]


def ticks(axes):
    return [label.get_text() for label in axes.get_xticklabels()]


def outside(figure):
    """Texts that do not lie wholly on the page at 100 dpi."""
    figure.set_dpi(100)
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    page, renderer = figure.bbox, canvas.get_renderer()
    texts = [t for t in figure.findobj(lambda a: hasattr(a, "get_text") and a.get_visible()) if t.get_text().strip()]
    boxes = {t.get_text(): t.get_window_extent(renderer) for t in texts}
    return [text for text, b in boxes.items() if b.x0 < 0 or b.y0 < 0 or b.x1 > page.x1 or b.y1 > page.y1]


@pytest.mark.parametrize("name", CASES)
def test_bars_are_the_plans_work_and_bytes(name):
    plan = plan_of(name)
    (part,) = plan.parts
    figure = plan.plot()
    assert isinstance(figure, Figure)
    work, received = figure.axes[:2]
    heights, alone = stacks(work)
    factor, prefix = plot.scale(part.load.max())
    assert len(heights) == plan.devices
    np.testing.assert_allclose(np.sort(heights * factor), np.sort(part.load), rtol=1e-12)
    assert f"({prefix}FLOP" in work.get_ylabel() and "per device and step" in work.get_ylabel()
    assert f"balance {plan.balance:.1%}" in work.get_title()
    assert bool(alone) == (name != "one_device")
    if not plan.collectives:
        assert [text.get_text() for text in received.texts] == ["no device receives anything"]
        return
    unit, prefix = plot.scale(max(plan.bytes_by_axis.values()))
    assert received.get_xlabel() == f"received per device and step ({prefix}B)"
    drawn: dict[str, float] = {}
    for (axis, _), length in lengths(received).items():
        drawn[axis] = drawn.get(axis, 0) + length * unit
    assert drawn == pytest.approx(plan.bytes_by_axis)
    assert not outside(figure)


def test_replicas_stand_apart_and_shapes_are_named():
    plan = plan_of("hsdp")
    figure = plan.plot()
    work, received = figure.axes[:2]
    assert ticks(work) == ["not\nshared", *map(str, range(8))]
    (below,) = work.child_axes
    assert [name.strip() for name in ticks(below)] == ["replica 0", "replica 1"]
    x = np.array(work.get_xticks())[1:]
    np.testing.assert_allclose(np.diff(x), [1, 1, 1, 1.8, 1, 1, 1])
    assert legend(work) == [
        "8×96 (1)",
        "16×48 (2)",
        "32×32 (5)",
        "32×64 (5)",
        "best possible 2.68 MFLOP",
        "ideal 2.18 MFLOP",
    ]
    assert legend(received) == ["blocks to owners", "results back", "updates to replicas"]
    assert [axis for axis, _ in lengths(received)] == ["fsdp", "fsdp", "replica"]
    assert "13 matrices on 8 devices (replica 2 × fsdp 4)" in work.get_title()


def test_lines_and_the_bar_of_a_device_that_shares_nothing():
    plan = plan_of("hsdp")
    (part,) = plan.parts
    (work, *_) = plan.plot().axes
    factor, _ = plot.scale(part.load.max())
    ideal, best = (line.get_ydata()[0] * factor for line in work.lines[:2])
    assert ideal == pytest.approx(part.total("cost") / 8)
    assert best == pytest.approx(part.bound)
    assert plot.measure(part).unshared == part.total("cost")  # every device of the row holds a part of each matrix
    told = next(text.get_text() for text in work.texts)
    assert told == f"{plot.text(part.total('cost'))}FLOP\n{part.total('cost') / part.load.max():.3g}× the busiest"


def test_a_low_bar_of_what_is_not_shared_is_drawn_to_scale():
    plan = plan_on({"replica": 2}, {f"w{i}": ((32, 64), P()) for i in range(21)})
    (part,) = plan.parts
    factor, _ = plot.scale(part.load.max())
    _, alone = stacks(plan.plot().axes[0])
    cut = plot.CUT * part.load.max() / factor
    assert 21 / 11 > plot.CUT and list(alone.values()) == pytest.approx([0.8 * cut])
    plan = plan_on({"replica": 2}, {"w": ((64, 64), P()), "v": ((4, 4), P())})
    (part,) = plan.parts
    factor, _ = plot.scale(part.load.max())
    _, alone = stacks(plan.plot().axes[0])
    assert list(alone.values()) == pytest.approx([part.total("cost") / factor])


def test_single_matrices_are_told_apart_where_they_are_few():
    few = plan_on({"x": 2}, {f"w{i}": ((32, 32), P("x")) for i in range(8)}, topology="h100")
    many = plan_on({"x": 2}, {f"w{i}": ((32, 32), P("x")) for i in range(80)}, topology="h100")
    assert [len(p.plot().axes[0].collections[0].get_segments()) for p in (few, many)] == [8, 2]


def test_filler_of_merged_programs_is_hatched():
    (work, *_) = plan_of("hsdp", max_programs=1).plot().axes
    assert legend(work)[0] == "filler: fewer programs"
    filler = next(c for c in work.containers if c.get_label().startswith("filler"))
    assert all(bar.get_hatch() for bar in filler)


def test_work_that_replicas_repeat_is_named():
    plan = plan_of("hsdp", dedup_axes=())
    assert "32×64 (5, computed 2×)" in legend(plan.plot().axes[0])


def test_many_shapes_share_one_entry():
    plan = plan_on({"x": 8}, {f"w{i}": ((64 + 8 * i, 256), P("x")) for i in range(14)})
    figure = plan.plot()
    assert [name for name in legend(figure.axes[0]) if name.startswith("other")] == ["other (5)"]
    assert sum("×" in name for name in legend(figure.axes[0])) == plot.MOST_SHAPES - 1
    assert not outside(figure)


def test_many_replicas_are_named_by_number():
    figure = plan_on({"pod": 2, "replica": 8, "x": 4}, {f"w{i}": ((64, 64), P("x")) for i in range(64)}).plot()
    (below,) = figure.axes[0].child_axes
    assert [name.strip() for name in ticks(below)] == [f"{pod},{r}" for pod in range(2) for r in range(8)]
    assert figure.axes[0].get_xlabel() == "device, and its place on pod, replica"


def test_512_devices_are_drawn_by_program():
    params = models.abstract_params(models.load("deepseek-v3"), {"replica": 8, "fsdp": 64}, "bfloat16")
    plan = muon_shard.make_plan(
        params, options=muon_shard.PlanOptions(topology="tpu-v5p"), muon_weight_dimension_numbers=labels.by_path
    )
    (part,) = plan.parts
    figure = plan.plot()
    (work, *_) = figure.axes
    heights, _ = stacks(work)
    factor, _ = plot.scale(part.load.max())
    assert len(heights) == plan.programs > 1
    assert heights[0] * factor == pytest.approx(part.load.max())
    devices = [int(label.removeprefix("×")) for label in ticks(work) if label.startswith("×")]
    assert sum(devices) == 512
    assert heights @ devices * factor == pytest.approx(part.load.sum())
    assert work.get_xlabel() == "program: how many devices run it"
    assert not outside(figure)


def test_a_file_is_written(tmp_path):
    plan = plan_of("hsdp")
    for path in (tmp_path / "plan.png", str(tmp_path / "plan.svg")):
        assert isinstance(plan.plot(path), Figure)
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")
    assert "<svg" in (tmp_path / "plan.svg").read_text()


def test_axes_take_the_work_alone():
    figure = Figure()
    left, right = figure.subplots(1, 2)
    assert plan_of("hsdp").plot(left) is figure
    assert left.containers and not right.containers
    (part,) = figure.subfigures(1, 1, squeeze=False)[0]
    assert plan_of("hsdp").plot(part.subplots()) is figure


def test_several_meshes_have_panels_each():
    one, two = (AbstractMesh((8,), (name,)) for name in "xy")
    params = {
        f"w{i}": jax.ShapeDtypeStruct((64, 64), "float32", sharding=NamedSharding(mesh, P(mesh.axis_names[0])))
        for i, mesh in enumerate((one, two))
    }
    plan = muon_shard.make_plan(params)
    figure = plan.plot()
    assert [axes.get_title().split("(")[-1][:3] for axes in figure.axes[::2]] == ["x 8", "y 8"]
    with pytest.raises(ValueError, match="one Axes takes a plan on one mesh, this one is on 2"):
        plan.plot(figure.axes[0])


def test_an_empty_plan_says_so():
    figure = muon_shard.Plan(()).plot()
    assert figure.get_suptitle() == "Muon plan: nothing to orthogonalize" and not figure.axes


def test_what_is_no_path_is_refused():
    with pytest.raises(TypeError, match="expected a path or a matplotlib Axes, got 3"):
        plan_of("one_device").plot(3)


def test_no_warning_is_raised():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plan_of("experts").plot().canvas.draw()


def test_without_matplotlib_the_extra_is_named(monkeypatch):
    plan = plan_of("one_device")
    monkeypatch.delitem(sys.modules, "muon_shard.plot")
    for name in [name for name in sys.modules if name.split(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'muon_shard\[plot\]'"):
        plan.plot()
