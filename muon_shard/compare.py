"""One model on one machine, planned every way: what each takes in the simulator."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

from muon_shard import labels, models
from muon_shard.options import PlanOptions
from muon_shard.plan import Plan
from muon_shard.planner import make_plan
from muon_shard.simulate import simulate
from muon_shard.timeline import Timeline, plain_table, text_of
from muon_shard.topology import Topology, si
from muon_shard.transports import TRANSPORTS

AUTO = "auto"
FORCED = ("redundant", "gather", "all_to_all", "gram", "ring", "two_hops")
"""Transports that are compared where matrices are scattered; others follow in the order they are known."""


@dataclasses.dataclass(frozen=True)
class Row:
    """One way to travel.

    Attributes:
        transport: pinned for every domain with scattered matrices; 'auto': chosen for each.
        dedup: replicas that share work: 'none', 'all' or 'auto'.
        timeline: the simulated step; None where the plan is refused.
        received: bytes that each device receives per step.
        refused: why there is no such plan.
    """

    transport: str
    dedup: str
    timeline: Timeline | None = None
    received: int = 0
    refused: str = ""

    @property
    def total(self) -> float:
        """Seconds of the step, infinite where the plan is refused."""
        return self.timeline.makespan if self.timeline else float("inf")

    def to_json(self) -> dict[str, Any]:
        """Plain values, times in milliseconds."""
        row: dict[str, Any] = {"transport": self.transport, "dedup_axes": self.dedup}
        if self.timeline is None:
            return row | {"refused": self.refused}
        t = self.timeline
        times = {"compute": t.compute, "communication": t.exposed, "copying": t.copying, "total": t.makespan}
        return (
            row
            | {f"{name}_ms": seconds * 1e3 for name, seconds in times.items()}
            | {"idle_share": t.idle_share, "received_bytes": self.received, "peak_bytes": t.peak_bytes}
        )


@dataclasses.dataclass(frozen=True)
class Comparison:
    """All ways, the automatic plan last. `print` shows a table of 100 columns."""

    what: str
    topology: str
    rows: tuple[Row, ...]

    @property
    def auto(self) -> Row:
        """The plan that `PlanOptions()` makes."""
        return self.rows[-1]

    @property
    def best(self) -> Row:
        """The fastest of the others."""
        return min(self.rows[:-1], key=lambda row: row.total)

    def to_json(self) -> dict[str, Any]:
        """Plain values, times in milliseconds."""
        return {"what": self.what, "topology": self.topology, "rows": [row.to_json() for row in self.rows]}

    def __str__(self) -> str:
        refused = dict.fromkeys((row.transport, row.refused) for row in self.rows if row.refused)
        return text_of(
            f"Muon step of {self.what} on {self.topology}, predicted, in milliseconds",
            self._table(),
            *(f"{transport} is refused: {reason}" for transport, reason in refused),
        )

    def _table(self) -> Table:
        columns = ("transport", "shared", "compute", "communication", "copying", "total", "received", "temporaries")
        table = plain_table(*columns, left=2)
        for row in self.rows:
            if row.timeline is None:
                table.add_row(row.transport, row.dedup, *["–"] * 3, "refused")
                continue
            t = row.timeline
            times = (f"{s * 1e3:,.2f}" for s in (t.compute, t.exposed, t.copying, t.makespan))
            table.add_row(row.transport, row.dedup, *times, si(row.received, "B"), si(t.peak_bytes, "B"))
        return table


def compare_model(
    model: str,
    mesh_axes: Mapping[str, int],
    topology: str | Topology,
    dtype: str = "bfloat16",
    console: Console | None = None,
) -> Comparison:
    """Every transport, with and without sharing over replicas, and the automatic plan, for a public model.

    Args:
        model: a name that `models.load` takes.
        mesh_axes: axis name → size, in mesh order.
        topology: the machine, as in `PlanOptions`.
        dtype: of the momentum.
        console: shows a progress bar; None: none.

    Raises:
        ValueError: for an unknown model, or what is wrong with a topology.
    """
    params = models.abstract_params(models.load(model), mesh_axes, dtype)
    return compare(params, topology, f"{model} ({_mesh(mesh_axes)})", labels.by_path, console)


def compare(
    params: Any,
    topology: str | Topology,
    what: str = "the model",
    muon_weight_dimension_numbers: labels.DimensionNumbers = None,
    console: Console | None = None,
) -> Comparison:
    """The same for any pytree that `make_plan` takes.

    Args:
        params: as for `make_plan`.
        topology: the machine, as in `PlanOptions`.
        what: how the table calls it.
        muon_weight_dimension_numbers: as for `make_plan`.
        console: shows a progress bar; None: none.

    Raises:
        ValueError: as `make_plan`.
    """

    def planned(transport: str, dedup: str) -> tuple[Plan, Row]:
        axes = () if dedup == "none" else dedup
        options = PlanOptions(topology=topology, transport=transport, dedup_axes=axes)
        plan = make_plan(params, options=options, muon_weight_dimension_numbers=muon_weight_dimension_numbers)
        return plan, Row(transport, dedup, simulate(plan, topology), sum(plan.bytes_by_axis.values()))

    plan, auto = planned(AUTO, AUTO)  # first, because it raises whatever is wrong with the arguments
    refused = dict(_refused(plan))
    forced = [(transport, dedup) for transport in _transports() for dedup in ("none", "all")]

    def tried(transport: str, dedup: str) -> Row:
        try:
            return planned(transport, dedup)[1]
        except ValueError:  # what is refused for good; some is only never chosen
            if transport not in refused:
                raise
            return Row(transport, dedup, refused=refused[transport])

    silent = console is None or not console.is_terminal
    rows = [
        tried(transport, dedup)
        for transport, dedup in track(
            forced, "planning", console=console or Console(stderr=True), transient=True, disable=silent
        )
    ]
    name = auto.timeline.topology if auto.timeline else ""
    return Comparison(what, name, (*rows, auto))


def write(compared: Comparison, plot: str | None, trace: str | None) -> None:
    """Writes the timeline of the automatic plan to files, those that are named.

    Args:
        compared: what has the plan.
        plot: picture, of the format that its name ends in.
        trace: as `Timeline.save_trace`.

    Raises:
        ValueError: a file cannot be written, and why.
        ModuleNotFoundError: a picture without matplotlib.
    """
    timeline = compared.auto.timeline
    if timeline is None:
        return
    path = plot
    try:
        if plot:
            ax = timeline.plot()
            ax.set_title(f"Muon step of {compared.what} on {compared.topology}: {si(timeline.makespan, 's')}")
            ax.figure.savefig(plot, dpi=150)
            _close(ax.figure)
        path = trace
        if trace:
            timeline.save_trace(trace)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ValueError(f"cannot write {path}: {reason}") from error


def _close(figure: Any) -> None:
    from matplotlib import pyplot  # there, since it has drawn the figure

    pyplot.close(figure)


def _transports() -> tuple[str, ...]:
    """Those that carry scattered matrices."""
    return FORCED + tuple(name for name in TRANSPORTS if name not in (*FORCED, "local"))


def _refused(plan: Plan) -> Iterator[tuple[str, str]]:
    """Transports that cannot serve every domain with scattered matrices, and why."""
    for part in plan.parts:
        for domain in part.domains:
            for a in domain.choice.alternatives:
                if a.refused and domain.packing.exchange:
                    yield a.transport, a.refused


def _mesh(mesh_axes: Mapping[str, int]) -> str:
    return " × ".join(f"{name} {size}" for name, size in mesh_axes.items())
