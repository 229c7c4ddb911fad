"""FLOPs of the matrix products in the text of a compiled module (`compiled.as_text()`), per device.

`compiled.cost_analysis()` counts the body of a loop once. Here a product counts as often as its loop turns, and of a
conditional the branch with most FLOPs counts: what the busiest device does, where one conditional holds all work.
"""

import functools
import math
import re
from collections.abc import Callable

from benchmarks.module_text import Instruction, computations

_SHAPE = re.compile(r"[a-z]\w*\[([\d,]*)\]")
_CONTRACTED = re.compile(r"lhs_contracting_dims=\{([\d,]*)\}")
_TURNS = re.compile(r'known_trip_count":\{"n":"?(\d+)')


def product_flops(text: str) -> int:
    """FLOPs of all products of a module that XLA compiled for CPU, 2 per multiply and add.

    Raises:
        ValueError: products in a loop whose turns the module does not tell.
    """
    found, entry = computations(text)

    @functools.cache
    def of(name: str) -> int:
        return sum(_flops(instruction, of, shapes) for instruction in found.get(name, ()))

    shapes = {instruction.name: instruction.result for body in found.values() for instruction in body}
    return of(entry)


def _flops(instruction: Instruction, of: Callable[[str], int], shapes: dict[str, str]) -> int:
    """Of one instruction and what it calls."""
    name, result, opcode, rest = instruction
    if opcode == "dot":
        contracted = _CONTRACTED.search(rest)
        left = _dims(shapes[re.findall(r"%([\w.\-]+)", rest)[0]])
        over = [left[int(i)] for i in contracted[1].split(",") if i] if contracted else []
        return 2 * math.prod(_dims(result)) * math.prod(over)
    each = [of(called) for called in instruction.called]
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
