"""The collectives of a compiled module: how many, and how many bytes each device receives as their results.

The text of the compiled module is read, not the lowered one: the partitioner adds and removes collectives. A
collective inside a loop is counted once.
"""

import collections
import re

KINDS = ("all-to-all", "all-gather", "all-reduce", "reduce-scatter", "collective-permute")

# `%name = TYPE kind(operands)…`, with TYPE free of '=' so that an operation quoted in metadata cannot match.
_INSTRUCTION = re.compile(
    rf"^\s*(?:ROOT )?%?[\w.\-]+ = (?P<type>[^=]*?) (?P<kind>{'|'.join(KINDS)})(?P<start>-start)?\(",
    re.MULTILINE,
)
_COMMENT = re.compile(r"/\*.*?\*/")  # long tuples print /*index=5*/
_LAYOUT = re.compile(r"\{[^{}]*\}")  # {1,0:T(8,128)}
_ARRAY = re.compile(r"([a-z]\w*)\[([\d,]*)\]")
_BITS = re.compile(r"\d+")


def collectives(text: str) -> dict[str, dict[str, int]]:
    """Counts and result bytes per kind in `compiled.as_text()`; kinds that do not occur are left out."""
    found = collections.defaultdict(lambda: {"count": 0, "bytes": 0})
    for match in _INSTRUCTION.finditer(_LAYOUT.sub("", _COMMENT.sub("", text))):
        kind, result = match["kind"], match["type"]
        if match["start"] and kind != "all-reduce":
            # An asynchronous start has type (operands, results, …); only all-reduce-start has its result's.
            result = top_level(result)[1]
        found[kind]["count"] += 1
        found[kind]["bytes"] += type_bytes(result)
    return {kind: found[kind] for kind in KINDS if kind in found}


def type_bytes(text: str) -> int:
    """Bytes of an array type, `f32[8,4]`, or of all elements of a tuple type; tokens are free."""
    total = 0
    for dtype, dims in _ARRAY.findall(text):
        size = 1
        for dim in filter(None, dims.split(",")):
            size *= int(dim)
        total += -(-size * bits(dtype) // 8)
    return total


def bits(dtype: str) -> int:
    """Bits of one element, from the name: the first number in `f32`, `bf16`, `f8e4m3fn`, `s4`, `c64`."""
    if dtype == "pred":
        return 8
    number = _BITS.search(dtype)
    return int(number.group()) if number else 0


def top_level(text: str) -> list[str]:
    """The elements of a tuple type, nested tuples whole: `((f32[2]), f32[4])` → `(f32[2])`, `f32[4]`."""
    parts, depth = [""], 0
    for char in text.strip()[1:-1]:
        depth += (char in "([") - (char in ")]")
        if char == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += char
    return [part.strip() for part in parts]


def total(census: dict[str, dict[str, int]], field: str) -> int:
    """Sum of `count` or `bytes` over all kinds."""
    return sum(entry[field] for entry in census.values())
