"""The exact record of a plan as plain values, and back.

    record = to_record(plan)   # {'version': 3, 'layouts': […], 'parts': […], 'routes': […]}
    from_record(record) == plan

Records are dicts by field, tuples are lists. Values are written as they are and read by the type hints of their
records, so a new field needs no code here, only another `VERSION`. Two things keep it short: many leaves share few
layouts, which stand once under 'layouts' and are named by number; and what long tables say device after device is
written as their different rows and the runs of each, `{'rows': [[1, 0], [0, 2]], 'runs': [[0, 512], [1, 512]]}`.
"""

import dataclasses
import functools
import itertools
import json
import math
import types
import typing
from collections.abc import Mapping
from typing import Any

import numpy as np
from jax import lax

from muon_shard.layout import Layout
from muon_shard.newton_schulz.orthogonalize import NewtonSchulz
from muon_shard.orthogonalizer import Adaptive, Orthogonalizer
from muon_shard.plan import MeshPlan, Plan
from muon_shard.transports import TRANSPORTS

VERSION = 3
LONG = 16
"""Rows from which a table is written as runs."""

ORTHOGONALIZERS = {cls.__name__: cls for cls in (NewtonSchulz, Adaptive)}
ENUMS = {cls.__name__: cls for cls in (lax.Precision, lax.DotAlgorithmPreset)}
# JSON has no such numbers, and json.dumps would write what other readers refuse.
UNBOUNDED = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}

Numbers = dict[Layout, int]


def to_record(plan: Plan) -> dict[str, Any]:
    """The plan for `json.dumps`; a user's function is written by name, and `from_record` refuses it."""
    numbers: Numbers = {}
    fields = _fields(plan, numbers)
    return {"version": VERSION, "layouts": [_fields(layout, numbers) for layout in numbers], **fields}


def from_record(record: Any) -> Plan:
    """The plan that `to_record` was given.

    Raises:
        ValueError: another version, keys or values that do not belong, or a function that cannot be written.
    """
    if not isinstance(record, Mapping) or "version" not in record:
        raise _error("plan", "it has no 'version', so it is no record of a plan")
    version = record["version"]
    if version != VERSION:
        raise _error("plan", f"it has version {version!r}, this muon_shard reads version {VERSION}; make the plan anew")
    if not isinstance(record.get("layouts"), list):
        raise _error("plan", "the list 'layouts' is missing")
    layouts = tuple(_read_fields(Layout, entry, f"plan.layouts[{i}]", ()) for i, entry in enumerate(record["layouts"]))
    fields = {name: value for name, value in record.items() if name not in ("version", "layouts")}
    plan = _read_fields(Plan, fields, "plan", layouts)
    for i, part in enumerate(plan.parts):
        _check(part, f"plan.parts[{i}]")
    return plan


def from_json(given: Mapping[str, Any] | str) -> Plan:
    """The plan in what `Plan.to_json` gave, or in its JSON text.

    Raises:
        ValueError: it is no JSON, holds no record, or `from_record` refuses that.
    """
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except json.JSONDecodeError as error:
            raise ValueError(f"Plan.from_json: the text is not JSON: {error}.") from error
    if not isinstance(given, Mapping) or "plan" not in given:
        raise ValueError("Plan.from_json: this is not what Plan.to_json() gives: the exact record, 'plan', is missing.")
    return from_record(given["plan"])


def _fields(value: Any, numbers: Numbers) -> dict[str, Any]:
    return {f.name: _write(getattr(value, f.name), numbers) for f in dataclasses.fields(value)}


def _write(value: Any, numbers: Numbers) -> Any:
    """One value, by what it is; layouts are numbered as they come."""
    if isinstance(value, Layout):
        return numbers.setdefault(value, len(numbers))
    if isinstance(value, Orthogonalizer):
        return _write_orthogonalizer(value, numbers)
    if dataclasses.is_dataclass(value):
        return _fields(value, numbers)
    if isinstance(value, tuple):
        return _runs(value, numbers) or [_write(item, numbers) for item in value]
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if type(value).__name__ in ENUMS and isinstance(value, tuple(ENUMS.values())):
        return {"enum": type(value).__name__, "name": value.name}
    raise TypeError(f"serialize: no way to write {value!r}; give records such fields only as JSON can hold.")


def _runs(value: tuple[Any, ...], numbers: Numbers) -> dict[str, Any] | None:
    """A long table that repeats itself; None where a list serves."""
    if len(value) < LONG or not isinstance(value[0], tuple):
        return None
    number = {row: i for i, row in enumerate(dict.fromkeys(value))}
    runs = [[number[row], len(list(run))] for row, run in itertools.groupby(value)]
    if 2 * len(number) > len(value):
        return None
    return {"rows": [_write(row, numbers) for row in number], "runs": runs}


def _write_orthogonalizer(value: Orthogonalizer, numbers: Numbers) -> dict[str, Any]:
    kind = type(value).__name__
    if type(value) in ORTHOGONALIZERS.values():
        try:
            return {"type": kind, **_fields(value, numbers)}
        except TypeError:  # such as a precision of a kind not in ENUMS
            return {"type": kind, "unwritable": repr(value)}
    return {"type": kind, "unwritable": getattr(value, "name", kind)}


def _error(where: str, problem: str) -> ValueError:
    return ValueError(f"Plan.from_json: {where}: {problem}.")


@functools.cache
def _hints(cls: type) -> dict[str, Any]:
    hints = typing.get_type_hints(cls)
    return {f.name: hints[f.name] for f in dataclasses.fields(cls)}


def _read_fields(cls: type, value: Any, where: str, layouts: tuple[Any, ...]) -> Any:
    """A record from a dict with exactly its fields."""
    if not isinstance(value, Mapping):
        raise _error(where, f"a {cls.__name__} is a dict, not {_shown(value)}")
    hints = _hints(cls)
    for what, names in (("missing", hints.keys() - value.keys()), ("unknown", value.keys() - hints.keys())):
        if names:
            raise _error(where, f"{cls.__name__} with {what} {', '.join(sorted(map(repr, names)))}")
    fields = {name: _read(hint, value[name], f"{where}.{name}", layouts) for name, hint in hints.items()}
    try:
        return cls(**fields)
    except ValueError as error:
        raise _error(where, str(error).rstrip(".")) from error


def _read(hint: Any, value: Any, where: str, layouts: tuple[Any, ...]) -> Any:
    """One value, by the type hint of its field."""
    origin, choices = typing.get_origin(hint), typing.get_args(hint)
    if hint is Layout:
        if type(value) is int and 0 <= value < len(layouts):
            return layouts[value]
    elif hint is Orthogonalizer:
        return _read_orthogonalizer(value, where, layouts)
    elif dataclasses.is_dataclass(hint):
        return _read_fields(typing.cast(type, hint), value, where, layouts)
    elif origin is tuple:
        return _read_tuple(choices, value, where, layouts)
    elif origin in (types.UnionType, typing.Union) and type(None) in choices:
        (one,) = (choice for choice in choices if choice is not type(None))
        return None if value is None else _read(one, value, where, layouts)
    elif hint is float:
        if type(value) in (int, float):
            return float(value)
        if isinstance(value, str) and value in UNBOUNDED:
            return UNBOUNDED[value]
    elif hint is Any:
        return _read_any(value, where)
    elif type(value) is hint:
        return value
    expected = "the number of a layout" if hint is Layout else getattr(hint, "__name__", hint)
    raise _error(where, f"expected {expected}, got {_shown(value)}")


def _read_tuple(items: tuple[Any, ...], value: Any, where: str, layouts: tuple[Any, ...]) -> tuple[Any, ...]:
    if isinstance(value, Mapping):
        return _read_runs(items, value, where, layouts)
    if not isinstance(value, list | tuple):
        raise _error(where, f"expected a list, got {_shown(value)}")
    hints = items[:1] * len(value) if items[1:] == (...,) else items
    if len(hints) != len(value):
        raise _error(where, f"expected {len(hints)} values, got {_shown(value)}")
    return tuple(_read(hint, v, f"{where}[{i}]", layouts) for i, (hint, v) in enumerate(zip(hints, value)))


def _read_runs(items: tuple[Any, ...], value: Mapping[str, Any], where: str, layouts: tuple[Any, ...]) -> tuple:
    if value.keys() != {"rows", "runs"} or items[1:] != (...,):
        raise _error(where, f"expected a list, or 'rows' and 'runs', got {_shown(value)}")
    rows = _read_tuple(items, value["rows"], f"{where}.rows", layouts)
    runs = _read_tuple((tuple[int, int], ...), value["runs"], f"{where}.runs", layouts)
    if any(not 0 <= row < len(rows) for row, _ in runs):
        raise _error(where, f"a run of a row that does not exist; there are {len(rows)}")
    return tuple(itertools.chain.from_iterable(itertools.repeat(rows[row], times) for row, times in runs))


def _read_any(value: Any, where: str) -> Any:
    """A precision: None, a name, a member of one of `ENUMS`, or several of them."""
    if isinstance(value, list):
        return tuple(_read_any(v, where) for v in value)
    if isinstance(value, Mapping):
        members, name = ENUMS.get(str(value.get("enum"))), str(value.get("name"))
        if members is None or name not in members.__members__:
            raise _error(where, f"unknown {_shown(value)}")
        return members[name]
    return value


def _read_orthogonalizer(value: Any, where: str, layouts: tuple[Any, ...]) -> Orthogonalizer:
    if not isinstance(value, Mapping) or "type" not in value:
        raise _error(where, f"an orthogonalizer is a dict with 'type', not {_shown(value)}")
    if "unwritable" in value:
        name = value["unwritable"]
        raise _error(
            where, f"{value['type']} {name!r} is code, which JSON cannot hold; make the plan anew with make_plan"
        )
    if str(value["type"]) not in ORTHOGONALIZERS:
        raise _error(where, f"unknown type {value['type']!r}; known: {', '.join(ORTHOGONALIZERS)}")
    fields = {name: v for name, v in value.items() if name != "type"}
    return _read_fields(ORTHOGONALIZERS[value["type"]], fields, where, layouts)


def _check(part: MeshPlan, where: str) -> None:
    """Whether the pieces of a plan fit each other, as far as a slip in an edited file would show."""
    for w, i, domain in ((w, i, d) for w, wave in enumerate(part.waves) for i, d in enumerate(wave.domains)):
        packing, kinds = domain.packing, len(domain.packing.kinds)
        tables = [
            len(table) == part.devices and {*map(len, table)} == {kinds} for table in (packing.counts, packing.slots)
        ]
        for right, problem in (
            (packing.mesh_axes == part.mesh_axes, "its mesh is not the plan's"),
            (domain.choice.transport in TRANSPORTS, f"unknown transport {domain.choice.transport!r}"),
            (all(0 <= leaf < len(part.leaves) for leaf in domain.leaves), "it names leaves that do not exist"),
            (
                len(packing.leaves) == len(domain.leaves) == len(domain.first) == len(domain.gathered),
                "'leaves', 'first' and 'gathered' of the domain and 'leaves' of its packing differ in number",
            ),
            (all(tables), f"'counts' and 'slots' must have {part.devices} rows of {kinds} numbers"),
            (all(0 <= kind < kinds for kind, _ in packing.leaves), "its packing names kinds that do not exist"),
        ):
            if not right:
                raise _error(f"{where}.waves[{w}].domains[{i}]", problem)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}…"
