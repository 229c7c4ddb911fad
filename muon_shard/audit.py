"""A compiled module against a plan: every planned collective, to the byte, and no other."""

from __future__ import annotations

import collections
import dataclasses
import io
import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from rich.console import Console
from rich.table import Table
from rich.text import Text

from muon_shard import hlo
from muon_shard.report import WIDTH

if TYPE_CHECKING:
    from muon_shard.plan import Plan

MeshAxes = tuple[tuple[str, int], ...]
Key = tuple[str, tuple[str, ...]]
Sizes = collections.Counter[int]
"""How many collectives have how many bytes."""


class Compiled(Protocol):
    """What `jax.jit(f).lower(…).compile()` gives."""

    def as_text(self) -> str | None:
        """The text of the module."""
        ...


@dataclasses.dataclass(frozen=True)
class Tally:
    """How many collectives, and the bytes of their results on each device, all together."""

    count: int
    bytes: int


@dataclasses.dataclass(frozen=True)
class Row:
    """All collectives of one kind over the same mesh axes; `axes` is () where they fit no set of mesh axes.

    `found` leaves out what the baseline accounts for. `verdict` is 'ok', 'extra', 'missing' or 'resized'.
    """

    kind: str
    axes: tuple[str, ...]
    planned: Tally
    found: Tally
    verdict: str
    reason: str


@dataclasses.dataclass(frozen=True)
class Audit:
    """What a compiled module holds beside what its plan promised. `print(audit)` shows it as a table.

    `baseline` are the collectives of the module that the baseline accounts for.
    """

    mesh_axes: MeshAxes
    rows: tuple[Row, ...]
    baseline: Tally

    @property
    def ok(self) -> bool:
        """Whether the module holds exactly the planned collectives."""
        return all(row.verdict == "ok" for row in self.rows)

    @property
    def extra(self) -> tuple[Row, ...]:
        """Rows with collectives that nobody planned."""
        return self._judged("extra")

    @property
    def missing(self) -> tuple[Row, ...]:
        """Rows with planned collectives that the module does not hold."""
        return self._judged("missing")

    @property
    def resized(self) -> tuple[Row, ...]:
        """Rows whose bytes are not the planned ones."""
        return self._judged("resized")

    def _judged(self, verdict: str) -> tuple[Row, ...]:
        return tuple(row for row in self.rows if row.verdict == verdict)

    def to_json(self) -> dict[str, Any]:
        """The audit as plain Python values, for `json.dumps`."""
        return {
            "ok": self.ok,
            "mesh": dict(self.mesh_axes),
            "baseline": dataclasses.asdict(self.baseline),
            **{
                name: [dataclasses.asdict(row) | {"axes": list(row.axes)} for row in rows]
                for name, rows in [
                    ("rows", self.rows),
                    *((verdict, self._judged(verdict)) for verdict in ("extra", "missing", "resized")),
                ]
            },
        }

    def __str__(self) -> str:
        return _to_text(self)


def audit(compiled: Compiled | str, plan: Plan | Mapping[str, Any], baseline: Compiled | str | None = None) -> Audit:
    """Compares the collectives of a compiled module with those of a plan.

    XLA may combine planned collectives of one kind over the same axes, or split them: their bytes must then agree in
    all. A planned `collective-permute` over several axes may cross fewer of them.

    Args:
        compiled: `jax.jit(tx.update).lower(…).compile()`, or the text of the module.
        plan: what `make_plan` gave for the same parameters and arguments (`ns_steps` shifts work), or its `to_json()`.
        baseline: a module, compiled or as text, of the same step without Muon; its collectives do not count.

    Raises:
        ValueError: when one of them is not what it should be, or they are for different numbers of devices.
    """
    mesh_axes, planned = _planned(plan)
    found = _collectives(compiled, mesh_axes, "compiled")
    others = _collectives(baseline, mesh_axes, "baseline") if baseline is not None else []
    shifted = {axes for kind, axes in planned if kind == "collective-permute"}
    seen, before = _by_key(found, mesh_axes, shifted), _by_key(others, mesh_axes, shifted)
    rows, covered = [], []
    for key in dict.fromkeys((*planned, *seen)):
        base = _sizes(before.get(key, []))
        covered.append(_tally(base & _sizes(seen.get(key, []))))
        rows.append(_row(key, planned.get(key, Sizes()), seen.get(key, []), base))
    explained = Tally(sum(tally.count for tally in covered), sum(tally.bytes for tally in covered))
    return Audit(mesh_axes, tuple(row for row in rows if row.planned.count or row.found.count), explained)


def _planned(plan: Plan | Mapping[str, Any]) -> tuple[MeshAxes, dict[Key, Sizes]]:
    """The mesh of a plan and its collectives, less those over axes of total size 1, which exist on paper only."""
    try:
        if not isinstance(plan, Mapping):
            plan = {
                "meshes": [dict(part.mesh_axes) for part in plan.parts],
                "collectives": [dataclasses.asdict(c) for c in plan.collectives],
            }
        meshes = [tuple((name, int(size)) for name, size in mesh.items()) for mesh in plan["meshes"]]
        promised = [
            (str(c["kind"]), tuple(c["axes"]), int(c["bytes"]), int(c.get("count", 1))) for c in plan["collectives"]
        ]
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"audit: this is no plan, nor what Plan.to_json() gives ({error!r}).") from error
    if len(meshes) > 1:
        raise ValueError(
            f"audit: the plan spans {len(meshes)} meshes, and a module is compiled for one. Plan and audit what lies "
            "on each mesh alone."
        )
    mesh_axes = meshes[0] if meshes else ()
    planned: dict[Key, Sizes] = {}
    for kind, axes, size, count in promised:
        if unknown := sorted(set(axes) - set(dict(mesh_axes))):
            raise ValueError(f"audit: the plan has a collective over {unknown}, axes that its mesh lacks.")
        if over := tuple(name for name, ways in mesh_axes if name in axes and ways > 1):
            planned.setdefault((kind, over), Sizes())[size // count] += count
    return mesh_axes, planned


def _collectives(module: Compiled | str, mesh_axes: MeshAxes, role: str) -> list[hlo.Found]:
    """The collectives of a module that join several devices."""
    if not isinstance(module, str) and not hasattr(module, "as_text"):
        raise ValueError(
            f"audit: {role} is a {type(module).__name__}, not a compiled module. Consider "
            "jax.jit(tx.update).lower(grads, state, params).compile()."
        )
    text = module if isinstance(module, str) else module.as_text()
    try:
        devices = hlo.device_count(text or "")
    except ValueError as error:
        raise ValueError(f"audit: {role}: {error}") from error
    expected = math.prod(size for _, size in mesh_axes)
    if mesh_axes and devices != expected:
        raise ValueError(f"audit: {role} is a module for {devices} devices, the plan is for {expected}.")
    return [f for f in hlo.collectives(text or "") if not f.groups or any(len(group) > 1 for group in f.groups)]


def _by_key(found: list[hlo.Found], mesh_axes: MeshAxes, shifted: set[tuple[str, ...]]) -> dict[Key, list[hlo.Found]]:
    """Found collectives by kind and axes; a permute over fewer axes than a planned one is taken for a part of it."""
    keyed: dict[Key, list[hlo.Found]] = {}
    for f in found:
        axes = f.axes(mesh_axes)
        if f.kind == "collective-permute" and axes not in shifted:
            wider = [over for over in shifted if set(axes) < set(over)]
            axes = min(wider, key=lambda over: (len(over), over), default=axes)
        keyed.setdefault((f.kind, axes), []).append(f)
    return keyed


def _row(key: Key, planned: Sizes, found: list[hlo.Found], base: Sizes) -> Row:
    """Judges all collectives of one kind over the same axes."""
    rest, left = _sizes(found) - base, base - _sizes(found)
    wanted, surplus = planned - rest, rest - planned
    more, less, other = _tally(surplus), _tally(wanted), _tally(left)
    tally, names = _tally(rest), _some(f.name for f in found if f.bytes in surplus)
    verdict, reason = "ok", ""
    if surplus and more.bytes == less.bytes + other.bytes and other.count:
        tally = Tally(tally.count - other.count, tally.bytes - other.bytes)
        reason = "combined with what the baseline has"
    elif wanted and surplus and more.bytes == less.bytes:
        reason = f"{less.count} planned as {more.count}: combined or split"
    elif wanted and surplus:
        verdict, reason = "resized", f"{more.bytes:,} B for {less.bytes:,} B: {names}"
        if more.bytes == 2 * less.bytes and more.count <= less.count:
            reason = f"twice the bytes, as XLA on CPU widens bf16 to f32: {names}"
    elif surplus:
        verdict, reason = "extra", f"{f'{more.count:,} more than planned' if planned else 'not planned'}: {names}"
    elif wanted:
        verdict, reason = "missing", f"{less.count:,} fewer than planned" if rest else "not in the module"
    if vague := _some(f.name for f in found if not f.certain and f.bytes in rest):
        verdict = "resized" if verdict == "ok" else verdict
        reason += f"{'; ' if reason else ''}counted once in a loop of unknown length: {vague}"
    return Row(*key, _tally(planned), tally, verdict, reason)


def _some(names: Iterable[str], most: int = 3) -> str:
    """The first names of many."""
    listed = list(names)
    return ", ".join(listed[:most]) + (f" and {len(listed) - most:,} more" if len(listed) > most else "")


def _sizes(found: list[hlo.Found]) -> Sizes:
    sizes = Sizes()
    for f in found:
        sizes[f.bytes] += f.count
    return sizes


def _tally(sizes: Sizes) -> Tally:
    return Tally(sum(sizes.values()), sum(size * count for size, count in sizes.items()))


def _to_text(audited: Audit) -> str:
    """The audit as `print` shows it: the verdict, then one row for each kind and axes."""
    console = Console(
        width=WIDTH, file=io.StringIO(), color_system=None, legacy_windows=False, force_jupyter=False, markup=False
    )
    mesh = " × ".join(f"{name} {size}" for name, size in audited.mesh_axes) or "one device"
    judged = {"extra": audited.extra, "missing": audited.missing, "resized": audited.resized}
    wrong = [f"{len(rows)} {verdict}" for verdict, rows in judged.items() if rows]
    console.print(Text(f"Audit on {mesh}: {', '.join(wrong) or 'the module holds what the plan promises'}"))
    if audited.baseline.count:
        console.print(
            Text(f"baseline   {audited.baseline.count:,} collectives, {audited.baseline.bytes:,} B, left out")
        )
    console.print(_table(audited.rows) if audited.rows else Text("no collectives, neither planned nor found"))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    return "\n".join(line.rstrip() for line in text.splitlines())


def _table(rows: Iterable[Row]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for name in ("collective", "over", "planned", "bytes", "found", "bytes", "verdict"):
        numbers = name in ("planned", "bytes", "found")
        table.add_column(name, justify="right" if numbers else "left", overflow="fold", no_wrap=numbers)
    for row in rows:
        counts = [f"{n:,}" for tally in (row.planned, row.found) for n in (tally.count, tally.bytes)]
        verdict = row.verdict + (f": {row.reason}" if row.reason else "")
        table.add_row(row.kind, "+".join(row.axes) or "(no axes fit)", *counts, verdict)
    return table
