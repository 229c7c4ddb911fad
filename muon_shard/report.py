"""Plans for people (a table of 100 columns) and for machines (plain values)."""

from __future__ import annotations

import dataclasses
import io
import math
import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from muon_shard.choose import Alternative, Choice
    from muon_shard.cost import Collective
    from muon_shard.labels import Route
    from muon_shard.plan import Domain, MeshPlan, Plan

WIDTH = 100


@dataclasses.dataclass(frozen=True)
class Group:
    """Leaves of one domain with the same layout and like names: one row of the table.

    `bytes` is the group's share of what each device receives per step; `least` and `most` are matrices per owner.
    """

    paths: tuple[str, ...]
    layout: str
    shape: tuple[int, ...]
    matrices: int
    transport: str
    owners: int
    least: int
    most: int
    form: str
    flops: int
    bytes: int
    why: str
    source: str

    @property
    def name(self) -> str:
        return common_name(self.paths)


def groups(part: MeshPlan) -> list[Group]:
    """The rows of one mesh's table, in order of first appearance."""
    alike: dict[Any, list[int]] = {}
    for domain in part.domains:
        for i in domain.leaves:
            leaf = part.leaves[i]
            members = alike.setdefault((domain.choice, leaf.dtype, leaf.layout, leaf.source, _pattern(leaf.path)), [])
            if i not in members:
                members.append(i)
    return [_group(part, choice, members) for (choice, *_), members in alike.items()]


def _group(part: MeshPlan, choice: Choice, members: list[int]) -> Group:
    leaf = part.leaves[members[0]]
    owned, received = np.zeros(part.devices, np.int64), 0
    work = None
    for domain in part.domains:
        packing = domain.packing
        for position, i in enumerate(domain.leaves):
            if i in members:
                kind, count = packing.leaves[position]
                owned += packing.owned(position)
                share = count * packing.kind_pages[kind] / packing.pool_pages
                gathered = packing.ways(domain.gathered[position]) - 1  # of this leaf alone; the rest is of all
                received += sum(c.received for c in domain.exchanged) * share + gathered * domain.given(position)
                work = part.works(domain)[kind]
    assert work is not None
    items, problems = (len(members) * n for n in (leaf.layout.matrices, leaf.layout.problems))
    return Group(
        tuple(part.leaves[i].path for i in members),
        str(leaf.layout),
        leaf.layout.leaf_shape,
        problems,
        choice.transport,
        int((owned > 0).sum()),
        int(owned[owned > 0].min(initial=owned.max())),
        int(owned.max()),
        work.form,
        items * work.flops,
        round(received),
        choice.why,
        leaf.source,
    )


def to_json(plan: Plan) -> dict[str, Any]:
    """Plain values: totals, collectives, `groups` (rows of the table) and `routes` (rows of the routing)."""
    return {
        "devices": plan.devices,
        "meshes": [dict(part.mesh_axes) for part in plan.parts],
        "balance": plan.balance,
        "efficiency": plan.efficiency,
        "programs": plan.programs,
        "flops_per_device": plan.flops_per_device,
        "total_flops": plan.total_flops,
        "bytes_by_axis": plan.bytes_by_axis,
        "peak_bytes": plan.peak_bytes,
        "momentum_bytes": plan.momentum_bytes,
        "momentum_bytes_by_sharding": plan.momentum_bytes_by_sharding,
        "collectives": [dataclasses.asdict(c) | {"received": c.received} for c in plan.collectives],
        "groups": [
            {**dataclasses.asdict(g), "name": g.name, "paths": list(g.paths)}
            for part in plan.parts
            for g in groups(part)
        ],
        "routes": [
            {
                "name": common_name([r.path for r in rs]),
                "leaves": len(rs),
                "shape": rs[0].shape,
                "label": rs[0].label,
                "rule": rs[0].rule,
                "doubt": rs[0].doubt,
            }
            for rs in route_groups(plan.routes)
        ],
    }


def to_text(plan: Plan) -> str:
    """The plan as `print` shows it: totals, what travels how and why, routing."""
    console = Console(width=WIDTH, file=io.StringIO(), color_system=None, legacy_windows=False, force_jupyter=False)
    for part in plan.parts:
        for line in _summary(part):
            console.print(Text(line))
        console.print(_table(groups(part)))
    if plan.routes:
        muon = sum(r.label == "muon" for r in plan.routes)
        console.print(Text(f"Routing: {_plural(muon, 'leaf', 'leaves')} to Muon, {len(plan.routes) - muon} to Adam"))
        console.print(_routing(plan.routes))
    if not plan.parts:
        console.print(Text("Muon plan: nothing to orthogonalize"))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    return "\n".join(line.rstrip() for line in text.splitlines())


def _summary(part: MeshPlan) -> Iterable[str]:
    most = int(part.load.max())
    mesh = " × ".join(f"{name} {size}" for name, size in part.mesh_axes) or "one device"
    matrices = sum(leaf.layout.problems for leaf in part.leaves)
    what = f"{matrices:,} {'matrix' if matrices == 1 else 'matrices'} in {_plural(len(part.leaves), 'leaf', 'leaves')}"
    yield f"Muon plan: {what} on {_plural(part.devices, 'device')} ({mesh})"
    yield (
        f"NS FLOPs   {_count(part.total('flops'))} in all, {_count(int(part.flops.max()))} on the busiest device: "
        f"balance {part.total('cost') / part.devices / most:.1%}, {part.bound / most:.1%} of the best possible"
    )
    yield (
        f"programs   {part.programs} compiled for {_plural(part.devices, 'device')}; temporaries about "
        f"{_bytes(part.peak_bytes)} per device"
    )
    yield from _momentum(part)
    if (need := part.peak_bytes + part.momentum_bytes) > part.memory:
        yield f"           together {_bytes(need)}, more than the {_bytes(part.memory)} of a device"
    if len(part.waves) > 1:
        yield from _waves(part)
    collectives = [c for domain in part.domains for c in domain.collectives]
    alike: dict[Any, list[Collective]] = {}
    for c in collectives:
        alike.setdefault((c.kind, c.axes, c.ways, c.purpose), []).append(c)
    for (kind, axes, ways, purpose), found in alike.items():
        times = f" {len(found)}×" if len(found) > 1 else ""
        received = _bytes(sum(c.received for c in found))
        yield f"collective {kind}{times} over {'+'.join(axes)} ({ways}): {received} received, {purpose}"
    if not collectives:
        yield "collective none"
    for choice in dict.fromkeys(domain.choice for domain in part.domains):
        yield from _alternatives(part, next(domain for domain in part.domains if domain.choice == choice))


def _momentum(part: MeshPlan) -> Iterable[str]:
    """What the momentum takes, as the parameters and over their replicas, and the leaves that replicas hold whole."""
    as_, taken = part.momentum_bytes_by_sharding, _bytes(part.momentum_bytes)
    if not any(leaf.gathered for leaf in part.leaves):
        less = f"; {_bytes(as_['replicas'])} with momentum_sharding='replicas'" if len(set(as_.values())) > 1 else ""
        yield f"momentum   {taken} per device, as the parameters{less}"
        return
    yield f"momentum   {taken} per device, over replicas; {_bytes(as_['params'])} as the parameters"
    whole: dict[tuple[str, ...], list[str]] = {}
    for leaf in part.leaves:
        if leaf.layout.free:
            whole.setdefault((*leaf.layout.free, _pattern(leaf.path)), []).append(leaf.path)
    if whole:
        some = [f"{common_name(paths)} over {'+'.join(axes)}" for (*axes, _), paths in whole.items()]
        more = f" and {len(some) - 3} more" if len(some) > 3 else ""
        yield f"           still replicated where no dimension divides: {', '.join(some[:3])}{more}"


def _waves(part: MeshPlan) -> Iterable[str]:
    """How many waves, what they hold, what they cost."""
    largest = max(wave.buffer_bytes for wave in part.waves)
    yield (
        f"waves      {len(part.waves)}, exchange buffers of at most {_bytes(largest)} each, "
        f"{min(part.under_way, len(part.waves))} under way at a time; NS takes {part.stretch:.3f}× as long as in one"
    )
    if largest > part.limit:
        yield f"           more than the {_bytes(part.limit)} asked for: no matrix is cut"


def _alternatives(part: MeshPlan, domain: Domain) -> Iterable[str]:
    """What else was weighed for a domain, cheapest first, with estimates of the domain alone."""
    name, choice = part.leaves[domain.leaves[0]].path, domain.choice
    best: dict[str, Alternative] = {}
    for a in sorted(choice.alternatives, key=lambda a: a.seconds):
        if not a.refused:
            best.setdefault(a.transport, a)
    if len(best) < 2:
        return
    told = "; ".join(f"{t} {_seconds(a.seconds)}" for t, a in best.items())
    yield f"estimates  {common_name([name])} and alike: {told}"


def _table(rows: Sequence[Group]) -> Table:
    table = _plain_table("leaf", "layout", "transport", "owners", "form", "FLOPs", "bytes", "why")
    cells = []
    for g in rows:
        each = str(g.most) if g.least == g.most else f"{g.least}–{g.most}"
        name = g.name + (f" ×{len(g.paths)}" if len(g.paths) > 1 else "")
        layout = g.layout + (" (layout assumed)" if g.source == "assumed" else "")
        cells.append(
            (name, layout, g.transport, f"{g.owners} × {each}", g.form, _count(g.flops), _bytes(g.bytes), g.why)
        )
        table.add_row(*cells[-1])
    # Where space is short the layout wraps first, at its blanks; names of leaves have none.
    widest = [max(map(len, column)) for column in zip(*cells, strict=True)]
    table.columns[1].max_width = max(17, WIDTH - sum(widest) + widest[1] - len(widest))
    return table


def _routing(routes: Sequence[Route]) -> Table:
    table = _plain_table("leaf", "shape", "to", "rule")
    for rs in route_groups(routes):
        count = f" ×{len(rs)}" if len(rs) > 1 else ""
        doubt = f" (?) {rs[0].doubt}" if rs[0].doubt else ""
        table.add_row(
            common_name([r.path for r in rs]) + count, str(list(rs[0].shape)), rs[0].label, rs[0].rule + doubt
        )
    return table


def _plain_table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for name in columns:
        table.add_column(
            name,
            justify="right" if name in ("bytes", "FLOPs") else "left",
            overflow="fold",
            no_wrap=name in ("bytes", "owners", "FLOPs"),
        )
    return table


def route_groups(routes: Sequence[Route]) -> list[list[Route]]:
    """Routes that differ only in numbers inside their paths."""
    alike: dict[Any, list[Route]] = {}
    for r in routes:
        alike.setdefault((_pattern(r.path), r.shape, r.label, r.rule, r.doubt), []).append(r)
    return list(alike.values())


def _pattern(path: str) -> str:
    return re.sub(r"\d+", "#", path)


def common_name(paths: Sequence[str]) -> str:
    """One short name for paths that differ only in numbers: `blocks.*.wq` for params['blocks'][0]['wq'] and so on."""
    short = [re.sub(r"\[['\"]?", ".", re.sub(r"['\"]?\]", "", path.removeprefix("params"))) for path in paths]
    split = [re.split(r"(\d+)", path.lstrip(".") or "params") for path in short]
    return "".join(parts[0] if len(set(parts)) == 1 else "*" for parts in zip(*split, strict=True))


def _plural(count: int, one: str, many: str = "") -> str:
    return f"{count:,} {one if count == 1 else many or one + 's'}"


def _count(value: float) -> str:
    """1.23e15 as '1.23 P'."""
    power = min(int(math.log10(max(value, 1)) // 3), 6)
    return f"{value / 1000**power:.3g} {['', 'k', 'M', 'G', 'T', 'P', 'E'][power]}".rstrip()


def _seconds(value: float) -> str:
    """0.00123 as '1.23 ms'."""
    power = next(p for p in (0, 1, 2, 3) if value >= 1000**-p or p == 3)
    return f"{value * 1000**power:.3g} {['s', 'ms', 'µs', 'ns'][power]}"


def _bytes(value: float) -> str:
    return f"{_count(value)}B" if value >= 1000 else f"{value:.0f} B"
