"""The PTX of a CUDA kernel, parsed."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

SHARED = 1 << 24  # where the memory of a block begins: some compilers have its addresses in 32 bits


class Instruction(NamedTuple):
    """One line of PTX."""

    guard: str
    op: str
    parts: list[str]
    operands: list[Any]


def _operands(text: str) -> list[Any]:
    """Vectors as lists; addresses without their brackets."""
    found: list[Any] = []
    for vector, address, one in re.findall(r"\{([^}]*)\}|\[([^\]]*)\]|([^,\s{}\[\]]+)", text):
        found.append([part.strip() for part in vector.split(",")] if vector else address or one)
    return found


class Program:
    """A kernel's PTX, parsed.

    Args:
        text: from NVRTC, or what is behind ``.visible .entry`` of it.
    """

    def __init__(self, text: str) -> None:
        self.symbols: dict[str, int] = {}
        self.code: list[Instruction] = []
        self.labels: dict[str, int] = {}
        at = SHARED
        for align, name, size in re.findall(r"\.shared \.align (\d+) \.b8 (\w+)\[(\d+)\]", text):
            at = -(-at // int(align)) * int(align)
            self.symbols[name] = at
            at += int(size)
        body = text.rpartition(".visible .entry ")[2].split("{", 1)[1]
        body = re.sub(r"//[^\n]*", "", body)
        body = re.sub(r"\{\s*\.reg [^;]*;([^\n]*)\}\s*$", r"\1", body, flags=re.MULTILINE)  # a name for one line
        for line in filter(None, (line.strip() for line in body.splitlines())):
            if line.startswith(".") or line in "{}":
                continue  # a declaration, or where a block begins and ends
            if label := re.fullmatch(r"(\$?\w+):", line):
                self.labels[label[1]] = len(self.code)
                continue
            known = re.fullmatch(r"(?:@(!?%p\d+)\s+)?([a-z][\w.:]+)\s*([^;]*);\s*", line)
            if known is None:
                raise ValueError(f"a line of PTX that is no instruction: {line!r}")
            guard, op, rest = known.groups()
            self.code.append(Instruction(guard or "", op, op.split("."), _operands(rest)))
