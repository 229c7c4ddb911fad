"""The collectives of a compiled module, read from its text (`compiled.as_text()`), as CPU, TPU and GPU print it.

The compiled module is read, not the lowered one: the partitioner and the backends add, combine and remove collectives.
Which devices take part is read by `muon_shard.replica_groups`.
"""

import dataclasses
import graphlib
import math
import re
from collections.abc import Iterator

from muon_shard.replica_groups import Groups, MeshAxes, axes_crossed, axes_of, parse_groups

KINDS = (
    "all-to-all",
    "all-gather",
    "all-reduce",
    "reduce-scatter",
    "collective-permute",
    "ragged-all-to-all",
    "collective-broadcast",
)


@dataclasses.dataclass(frozen=True)
class Found:
    """One collective instruction.

    `groups` are the devices that exchange, by their position in the mesh: () for all of them, (source, target) pairs
    for a collective-permute. `bytes` is the size of its result on each device, each time it runs. `count` is how often
    it runs: more than once in loops. `certain` is False where the module does not tell how often a loop around it
    turns: it is then counted as if once.
    """

    kind: str
    groups: Groups
    bytes: int
    count: int
    name: str
    certain: bool = True

    def axes(self, mesh_axes: MeshAxes) -> tuple[str, ...]:
        """The mesh axes it spans, in mesh order; () if its groups fit no set of axes."""
        spanned = axes_crossed if self.kind == "collective-permute" else axes_of
        return spanned(self.groups, mesh_axes)


@dataclasses.dataclass(frozen=True)
class _Instruction:
    """`ROOT %name = type opcode(operands), attributes`."""

    name: str
    type: str
    opcode: str
    operands: str
    attributes: str
    root: bool

    @property
    def kind(self) -> str:
        """The collective it starts; '' for everything else, `-done` included: a pair counts once."""
        kind = self.opcode.removesuffix("-start")
        return kind if kind in KINDS else ""

    @property
    def unquoted(self) -> str:
        """Its attributes without strings: metadata may quote anything."""
        return _STRING.sub("", self.attributes)

    @property
    def result(self) -> str:
        """The type of its result, also where the type of a `-start` is (operands, results, contexts…)."""
        parts = top_level(self.type[1:-1]) if self.opcode.endswith("-start") and self.type.startswith("(") else []
        # An all-reduce-start has the type of its result, unless it is short for async-start: then operands are a tuple.
        if len(parts) < 2 or (self.kind == "all-reduce" and not parts[0].startswith("(")):
            return self.type
        return parts[1]


_Computations = dict[str, list[_Instruction]]
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"')


def collectives(text: str) -> tuple[Found, ...]:
    """The collectives in the text of a module, in its order; bare lines of a module do as well.

    A collective in a loop runs as often as the loop turns; one in a branch of a conditional counts as if it always ran.

    Raises:
        ValueError: when computations call each other in a circle, which no module does.
    """
    computations = _parse(text)
    runs, fused = _runs(computations)
    found = []
    for name, body in computations.items():
        count, certain = runs[name]
        for i, kind, result in _held(name, body, name in fused):
            found.append(Found(kind, parse_groups(i.unquoted), type_bytes(result), count, i.name, certain))
    return tuple(f for f in found if f.count)


def device_count(text: str) -> int:
    """How many devices a module is compiled for.

    Raises:
        ValueError: when this is not the text of a compiled module.
    """
    header = re.search(r"^HloModule [^\n]*", text, re.MULTILINE)
    if not header:
        raise ValueError(
            "this is not the text of a compiled module: it has no line `HloModule …`. Give compiled.as_text() of "
            "jax.jit(f).lower(…).compile(), or a file *after_optimizations.txt that --xla_dump_to wrote."
        )
    return math.prod(int(n) for n in re.findall(r"(?:num_partitions|replica_count)=(\d+)", header[0]))


def _held(name: str, body: list[_Instruction], fused: bool) -> Iterator[tuple[_Instruction, str, str]]:
    """The collectives of a computation: instruction, kind, type of the result.

    TPU repeats and disguises them in fusions. An asynchronous one stands in a chain of fusions, from
    AsyncCollectiveStart to AsyncCollectiveDone, and counts in the first. A reduce-scatter is a fusion
    `all-reduce-scatter` of an all-reduce and a slice.
    """
    starts = any('custom_call_target="AsyncCollectiveStart"' in i.attributes for i in body)
    for i in body:
        if not i.kind or (fused and "chain_id=" in i.attributes and not starts):
            continue
        if fused and i.kind == "all-reduce" and name.startswith("all-reduce-scatter"):
            yield i, "reduce-scatter", next((r.type for r in body if r.root), i.result)
        else:
            yield i, i.kind, i.result


# Computations and how often they run

_CALL = re.compile(
    r"\b(calls|to_apply|body|condition|branch_computations|true_computation|false_computation|called_computations)="
    r"(?:\{([^{}]*)\}|%?([\w.\-]+))"
)
_TOLD = re.compile(r'known_trip_count\\?":\s*\{\s*\\?"n\\?":\s*\\?"?(\d+)')


def _runs(computations: _Computations) -> tuple[dict[str, tuple[int, bool]], set[str]]:
    """How often each computation runs and whether that is certain, and those that are called by fusions."""
    callers: dict[str, list[tuple[str, int | None]]] = {name: [] for name in computations}
    fused = set()
    for caller, body in computations.items():
        for i in body:
            for attribute, name in _calls(i):
                if name in computations:
                    callers[name].append((caller, _times(i, attribute, body, computations)))
                    if i.opcode == "fusion":
                        fused.add(name)
    runs: dict[str, tuple[int, bool]] = {}
    for name in graphlib.TopologicalSorter({n: [c for c, _ in cs] for n, cs in callers.items()}).static_order():
        # Nobody calls the entry, nor what stands alone in a part of a module.
        called = callers[name]
        count = sum(runs[caller][0] * (1 if times is None else times) for caller, times in called)
        certain = all(runs[caller][1] and times is not None for caller, times in called)
        runs[name] = (count if called else 1, certain)
    return runs, fused


def _calls(i: _Instruction) -> list[tuple[str, str]]:
    """(attribute, computation) for everything an instruction calls."""
    calls = _CALL.findall(i.unquoted)
    return [(key, name.strip().lstrip("%")) for key, many, one in calls for name in (many or one).split(",")]


def _times(i: _Instruction, attribute: str, here: list[_Instruction], computations: _Computations) -> int | None:
    """How often an instruction runs what it calls, each time it runs; None if the module does not tell."""
    if i.opcode.endswith(("-done", "-update")) or i.kind:
        return 0  # `-done` repeats the call of its start, and a collective only names its reduction
    if i.opcode != "while":
        return 1
    told = _TOLD.search(i.attributes)
    trips = int(told[1]) if told else _counted(i, here, computations)
    return trips if trips is None or attribute == "body" else trips + 1


def _counted(loop: _Instruction, here: list[_Instruction], computations: _Computations) -> int | None:
    """Turns of a loop over range(start, stop, step) of constants, which TPU modules do not note; None for others."""
    called = dict(_calls(loop))
    condition, body = (computations.get(called.get(part, ""), []) for part in ("condition", "body"))
    test, last = (next((i for i in part if i.root), None) for part in (condition, body))
    first = _origin(names(loop.operands)[0], here)
    if not (test and last and first and first.opcode == last.opcode == "tuple" and "direction=LT" in test.unquoted):
        return None
    counter, bound = names(test.operands)
    place = _element(counter, condition)
    added = _origin(names(last.operands)[place], body) if place is not None else None
    if place is None or not added or added.opcode != "add":
        return None
    steps = [_constant(name, body) for name in names(added.operands) if _element(name, body) != place]
    start, stop = _constant(names(first.operands)[place], here), _constant(bound, condition)
    if start is None or stop is None or len(steps) != 1 or not steps[0] or steps[0] < 0:
        return None
    return max(0, -(-(stop - start) // steps[0]))


def _origin(name: str, body: list[_Instruction]) -> _Instruction | None:
    """The instruction of this name, behind copies."""
    named = {i.name: i for i in body}
    while (i := named.get(name)) and i.opcode == "copy":
        name = names(i.operands)[0]
    return i


def _constant(name: str, body: list[_Instruction]) -> int | None:
    i = _origin(name, body)
    return int(i.operands) if i and i.opcode == "constant" and re.fullmatch(r"-?\d+", i.operands) else None


def _element(name: str, body: list[_Instruction]) -> int | None:
    """Which element of a tuple this is."""
    i = _origin(name, body)
    index = re.search(r"\bindex=(\d+)", i.attributes) if i and i.opcode == "get-tuple-element" else None
    return int(index[1]) if index else None


# Text

_HEADER = re.compile(r"(?:ENTRY )?%?([\w.\-]+)(?: \(.*)? \{\s*$")
_NAME = re.compile(r"\s*(ROOT )?%?([\w.\-]+) = ")
_PARENTHESIS = re.compile(r"[()]")
_COMMENT = re.compile(r"/\*.*?\*/")  # long tuples print /*index=5*/
_ARRAY = re.compile(r"([a-z]\w*)\[([\d,<=]*)\]")  # f32[<=8] has a bounded dynamic size


def _parse(text: str) -> _Computations:
    """The instructions of each computation; '' holds lines outside of all."""
    outside: list[_Instruction] = []
    computations, current = {"": outside}, outside
    for line in text.splitlines():
        if line.startswith("}"):
            current = outside
        elif header := _HEADER.match(line):
            current = computations.setdefault(header[1], [])
        elif i := _instruction(line):
            current.append(i)
    return computations


def _instruction(line: str) -> _Instruction | None:
    head = _NAME.match(line)
    if not head:
        return None
    start = head.end()
    # A type has blanks only where it is a tuple; its layouts have parentheses: {1,0:T(8,128)(2,1)S(1)}.
    end = _closing(line, start) if line.startswith("(", start) else line.find(" ", start)
    opening = line.find("(", end)
    if end < 0 or opening < 0:
        return None
    close = _closing(line, opening)
    operands, attributes = line[opening + 1 : close - 1], line[close:]
    return _Instruction(head[2], line[start:end], line[end:opening].strip(), operands, attributes, bool(head[1]))


def _closing(text: str, opening: int) -> int:
    """The place after the parenthesis that closes the one at `opening`."""
    depth = 0
    for match in _PARENTHESIS.finditer(text, opening):
        depth += 1 if match[0] == "(" else -1
        if not depth:
            return match.end()
    return len(text)


def top_level(text: str) -> list[str]:
    """Parts between the commas of a list, nested ones whole: `(f32[2,3]), f32[4]` → `(f32[2,3])`, `f32[4]`."""
    parts, depth = [""], 0
    for char in _COMMENT.sub("", text):
        depth += (char in "([{") - (char in ")]}")
        if char == "," and not depth:
            parts.append("")
        else:
            parts[-1] += char
    return [part.strip() for part in parts]


def names(operands: str) -> list[str]:
    """The names in a list of operands, with or without their types."""
    return [part.split(" ")[-1].lstrip("%") for part in top_level(operands)]


def type_bytes(text: str) -> int:
    """Bytes of an array type, `f32[8,4]{1,0}`, or of all elements of a tuple type; tokens are free."""
    total = 0
    for dtype, dims in _ARRAY.findall(_COMMENT.sub("", text)):
        size = math.prod(int(dim.lstrip("<=")) for dim in dims.split(",") if dim)
        total += -(-size * bits(dtype) // 8)
    return total


def bits(dtype: str) -> int:
    """Bits of one element, from the name: the first number in `f32`, `bf16`, `f8e4m3fn`, `s4`, `c64`."""
    number = re.search(r"\d+", dtype)
    return 8 if dtype == "pred" else int(number.group()) if number else 0
