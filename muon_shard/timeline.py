"""A simulated step as a record: a table, a plot, a trace."""

import dataclasses
import io
import json
import os
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from muon_shard.topology import WIDTH, si

COLOURS: Mapping[str, str] = {
    "pack": "#b8a9c9",
    "exchange": "#f2a65a",
    "NS": "#0b3c6f",
    "return": "#e2711d",
    "share": "#a63c06",
    "unpack": "#7a7a7a",
}
"""Phase → colour in plots, in the order in which phases run; 'pack' and 'unpack' stand on both sides of 'NS'."""

COMMUNICATION = ("exchange", "return", "share")


@dataclasses.dataclass(frozen=True)
class Span:
    """One phase of one domain on a device: `start` and `seconds` in seconds from the beginning of the step."""

    phase: str
    domain: str
    start: float
    seconds: float

    @property
    def end(self) -> float:
        return self.start + self.seconds


@dataclasses.dataclass(frozen=True)
class Lane:
    """What devices with the same program do.

    Attributes:
        part: index into `Plan.parts`.
        devices: how many there are.
        device: one of them, its number within the part's mesh.
        spans: in order of time; what lies between two is waiting for the busiest.
    """

    part: int
    devices: int
    device: int
    spans: tuple[Span, ...]

    @property
    def end(self) -> float:
        return max((span.end for span in self.spans), default=0.0)

    def seconds(self, *phases: str) -> float:
        """Seconds spent in these phases."""
        return sum(span.seconds for span in self.spans if span.phase in phases)


@dataclasses.dataclass(frozen=True)
class Timeline:
    """The simulated step. Times are in seconds, `peak_bytes` the plan's estimate of temporaries on one device."""

    lanes: tuple[Lane, ...]
    topology: str
    peak_bytes: int

    @property
    def makespan(self) -> float:
        """Seconds until the last device is done."""
        return max((lane.end for lane in self.lanes), default=0.0)

    @property
    def busiest(self) -> Lane | None:
        """The lane that works longest, of the part that ends last."""
        return max(self.lanes, key=lambda lane: (lane.end, lane.seconds("NS")), default=None)

    @property
    def compute(self) -> float:
        """Seconds of orthogonalization: in each wave those of the device that has most."""
        return self.makespan - self.exposed - self.copying

    @property
    def exposed(self) -> float:
        """Seconds in which the busiest device waits for communication."""
        return self.busiest.seconds(*COMMUNICATION) if self.busiest else 0.0

    @property
    def copying(self) -> float:
        """Seconds in which the busiest device packs and unpacks."""
        return self.busiest.seconds("pack", "unpack") if self.busiest else 0.0

    @property
    def idle_share(self) -> float:
        """Mean over all devices of the share of their part's longest NS in which they wait for it; 0 to 1."""
        most = {lane.part: 0.0 for lane in self.lanes}
        for lane in self.lanes:
            most[lane.part] = max(most[lane.part], lane.seconds("NS"))
        idle = [(lane.devices, 1 - lane.seconds("NS") / most[lane.part]) for lane in self.lanes if most[lane.part]]
        devices = sum(lane.devices for lane in self.lanes)
        return sum(count * share for count, share in idle) / devices if devices else 0.0

    def to_trace(self) -> list[dict[str, Any]]:
        """Complete events of the Chrome trace format, times in microseconds, one thread per lane."""
        return [
            {
                "name": span.phase,
                "cat": span.domain,
                "ph": "X",
                "ts": span.start * 1e6,
                "dur": span.seconds * 1e6,
                "pid": lane.part,
                "tid": lane.device,
                "args": {"domain": span.domain, "devices": lane.devices},
            }
            for lane in self.lanes
            for span in lane.spans
        ]

    def save_trace(self, path: str | os.PathLike[str]) -> None:
        """Writes `to_trace` as JSON."""
        with open(path, "w", encoding="utf-8") as file:
            json.dump(self.to_trace(), file)

    def plot(self, path_or_ax: Any = None) -> Any:
        """Draws a bar per lane, coloured by phase; blank is waiting.

        Args:
            path_or_ax: a file to write (its suffix decides the format), or matplotlib axes to draw on; None makes a
                figure.

        Returns:
            The axes.

        Raises:
            ModuleNotFoundError: without matplotlib, saying what to install.
        """
        to_file = isinstance(path_or_ax, str | os.PathLike)
        ax = _axes(len(self.lanes)) if path_or_ax is None or to_file else path_or_ax
        height = 0.8 if len(self.lanes) > 1 else 0.4
        for phase, colour in COLOURS.items():
            spans = [(y, s) for y, lane in enumerate(self.lanes) for s in lane.spans if s.phase == phase]
            if spans:
                ys, widths, lefts = zip(*((y, s.seconds, s.start) for y, s in spans), strict=True)
                ax.barh(ys, widths, height, lefts, color=colour, label=phase)
        ax.set_yticks(range(len(self.lanes)), [_label(lane) for lane in self.lanes])
        ax.set_ylim(len(self.lanes) - 0.5, -0.5)
        ax.set_xlim(0, self.makespan or None)
        ax.set_title(f"Muon step on {self.topology}: {si(self.makespan, 's')}")
        ax.set_xlabel("time (s)")
        ax.set_ylabel("devices with one program")
        if self.lanes:
            ax.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False)
        if to_file:
            ax.figure.savefig(path_or_ax, dpi=150)
        return ax

    def __str__(self) -> str:
        table = plain_table("devices", *COLOURS, "waits", "ends")
        for lane in self.lanes:
            waits = lane.end - lane.seconds(*COLOURS)
            cells = [*(lane.seconds(phase) for phase in COLOURS), max(waits, 0.0), lane.end]
            table.add_row(_label(lane), *(_short(seconds) for seconds in cells))
        summary = (
            f"Muon step on {self.topology}: {si(self.makespan, 's')}, of it NS {si(self.compute, 's')}, "
            f"communication {si(self.exposed, 's')}, copying {si(self.copying, 's')}; "
            f"NS waits for the busiest {self.idle_share:.1%}; temporaries {si(self.peak_bytes, 'B')} per device"
        )
        return text_of(summary, table)


def plain_table(*columns: str, left: int = 1) -> Table:
    """A table without lines; the first `left` columns hold text, the others numbers."""
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for i, name in enumerate(columns):
        table.add_column(name, justify="left" if i < left else "right", no_wrap=True)
    return table


def text_of(*parts: str | Table) -> str:
    """Paragraphs and tables as lines of at most 100 columns."""
    console = Console(width=WIDTH, file=io.StringIO(), color_system=None, legacy_windows=False, force_jupyter=False)
    for part in parts:
        console.print(Text(part) if isinstance(part, str) else part)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    return "\n".join(line.rstrip() for line in text.splitlines())


def _axes(lanes: int) -> Any:
    try:
        from matplotlib import pyplot
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("Timeline.plot needs matplotlib: pip install 'muon_shard[plot]'.") from error
    return pyplot.subplots(figsize=(10, 1.6 + 0.28 * max(lanes, 3)), layout="constrained")[1]


def _label(lane: Lane) -> str:
    where = f"mesh {lane.part}: " if lane.part else ""
    return f"{where}{lane.devices:,} (e.g. {lane.device})"


def _short(seconds: float) -> str:
    return si(seconds, "s") if seconds else "–"
