"""The text of a compiled module (`compiled.as_text()`) as computations and their instructions, in its order."""

import re
from typing import NamedTuple

_HEADER = re.compile(r"(ENTRY )?%?([\w.\-]+)(?: \(.*)? \{\s*$")
_INSTRUCTION = re.compile(r"\s*(?:ROOT )?%?([\w.\-]+) = (.*?)\s([a-z][a-z\d\-]*)\((.*)")
_CALLED = re.compile(
    r"\b(?:calls|to_apply|body|branch_computations|true_computation|false_computation)=(?:\{([^{}]*)\}|%?([\w.\-]+))"
)


class Instruction(NamedTuple):
    """`%name = result opcode(rest`: operands and attributes are not told apart."""

    name: str
    result: str
    opcode: str
    rest: str

    @property
    def called(self) -> tuple[str, ...]:
        """The computations that it runs."""
        found = _CALLED.findall(self.rest)
        return tuple(c.strip().lstrip("%") for many, one in found for c in (many or one).split(","))


def computations(text: str) -> tuple[dict[str, list[Instruction]], str]:
    """The instructions of each computation by its name, and the name of the entry ('' without one)."""
    found: dict[str, list[Instruction]] = {}
    entry, current = "", []
    for line in text.splitlines():
        if header := _HEADER.match(line):
            current = found.setdefault(header[2], [])
            entry = header[2] if header[1] else entry
        elif instruction := _INSTRUCTION.match(line):
            current.append(Instruction(*instruction.groups()))
    return found, entry
