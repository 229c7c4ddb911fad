"""FLOPs of the matrix products in the text of a compiled module (`compiled.as_text()`), per device.

`compiled.cost_analysis()` counts the body of a loop once. Here a product counts as often as its loop turns, and of a
conditional the branch with most FLOPs counts: what the busiest device does, where one conditional holds all work.
"""

import functools
import math
import re

_HEADER = re.compile(r"(?:ENTRY )?%?([\w.\-]+)(?: \(.*)? \{\s*$")
_INSTRUCTION = re.compile(r"\s*(?:ROOT )?%?([\w.\-]+) = (.*?)\s([a-z][a-z\d\-]*)\((.*)")
_SHAPE = re.compile(r"[a-z]\w*\[([\d,]*)\]")
_CONTRACTED = re.compile(r"lhs_contracting_dims=\{([\d,]*)\}")
_CALLED = re.compile(
    r"\b(?:calls|to_apply|body|branch_computations|true_computation|false_computation)=(?:\{([^{}]*)\}|%?([\w.\-]+))"
)
_TURNS = re.compile(r'known_trip_count":\{"n":"?(\d+)')


def product_flops(text: str) -> int:
    """FLOPs of all products of a module that XLA compiled for CPU, 2 per multiply and add.

    Raises:
        ValueError: products in a loop whose turns the module does not tell.
    """
    computations, entry = _parse(text)

    @functools.cache
    def of(name: str) -> int:
        return sum(_flops(*line, of, shapes) for line in computations.get(name, ()))

    shapes = {name: result for body in computations.values() for name, result, _, _ in body}
    return of(entry)


def _flops(name: str, result: str, opcode: str, rest: str, of, shapes: dict[str, str]) -> int:
    """Of one instruction and what it calls."""
    if opcode == "dot":
        contracted = _CONTRACTED.search(rest)
        left = _dims(shapes[re.findall(r"%([\w.\-]+)", rest)[0]])
        over = [left[int(i)] for i in contracted[1].split(",") if i] if contracted else []
        return 2 * math.prod(_dims(result)) * math.prod(over)
    called = [c.strip().lstrip("%") for many, one in _CALLED.findall(rest) for c in (many or one).split(",")]
    each = [of(c) for c in called]
    if opcode == "while" and any(each):
        turns = _TURNS.search(rest)
        if not turns:
            raise ValueError(f"product_flops: the module does not tell how often the loop {name} turns.")
        return int(turns[1]) * sum(each)
    return max(each, default=0) if opcode == "conditional" else sum(each)


def _dims(result: str) -> list[int]:
    """The sizes of an array type, `f32[8,4]{1,0}`."""
    shape = _SHAPE.match(result)
    return [int(n) for n in shape[1].split(",") if n] if shape else []


def _parse(text: str) -> tuple[dict[str, list[tuple[str, str, str, str]]], str]:
    """(name, type, opcode, rest) of the instructions of each computation, and the entry's name."""
    computations: dict[str, list[tuple[str, str, str, str]]] = {}
    entry, current = "", []
    for line in text.splitlines():
        if header := _HEADER.match(line):
            current = computations.setdefault(header[1], [])
            entry = header[1] if line.startswith("ENTRY") else entry
        elif found := _INSTRUCTION.match(line):
            current.append(found.groups())  # type: ignore[arg-type]
    return computations, entry
