"""Whole grids of a CUDA kernel as its PTX says: what a card would leave in memory.

tests/native/ptx_machine.cpp executes; here PTX, as ptx.py parses it, is turned into its table of instructions.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from ptx import SHARED, Instruction, Program

SOURCE = Path(__file__).resolve().parents[1] / "native" / "ptx_machine.cpp"
OPS = (
    *(
        "add",
        "sub",
        "mul",
        "mulhi",
        "mulwide",
        "mad",
        "fma",
        "div",
        "rem",
        "rcp",
        "sqrt",
        "rsqrt",
        "neg",
        "abs",
        "min",
        "max",
    ),
    *(
        "and",
        "or",
        "xor",
        "not",
        "shl",
        "shr",
        "mov",
        "pack",
        "unpack",
        "selp",
        "cvt",
        "setp",
        "bfi",
        "bfe",
        "shf",
        "prmt",
    ),
    *("ldparam", "ldshared", "ldglobal", "stshared", "stglobal", "atomadd", "atomor", "bra", "ret", "bar", "shfl"),
    "nop",
)
TYPES = ["u8", "s8", "u16", "s16", "u32", "s32", "u64", "s64", "f16", "f32", "f64", "pred"]
COMPARISONS = ["eq", "ne", "lt", "le", "gt", "ge", "equ", "neu", "ltu", "leu", "gtu", "geu", "num", "nan"]
SPECIAL = ("%tid.x", "%ntid.x", "%ctaid.x", "%nctaid.x")
SINKS = ("tmp", "_")  # registers that compilers name for what they don't want
ACCESSES = 1 << 18
"""Of a thread, as many as are noted."""
WITHOUT_VALUES = ("bar", "membar", "fence")


class Encoded(ctypes.Structure):
    """One instruction, as the machine reads it."""

    _fields_ = (
        *((name, ctypes.c_int32) for name in ("op", "type", "source", "extra", "guard", "negated", "count", "down")),
        ("to", ctypes.c_int32 * 4),
        ("given", ctypes.c_int32 * 4),
        ("offset", ctypes.c_int64),
    )


def build(folder: Path) -> ctypes.CDLL:
    """The machine, compiled into ``folder``. Skips the test where there is no compiler."""
    compiler, library = shutil.which(os.environ.get("CXX", "c++")), folder / "ptx_machine.so"
    if compiler is None:
        pytest.skip("needs a C++ compiler")
    if not library.exists():
        flags = ["-std=c++17", "-O2", "-frounding-math", "-ffp-contract=off", "-fPIC", "-shared", "-w"]
        subprocess.run([compiler, *flags, str(SOURCE), "-o", str(library)], check=True)
    return ctypes.CDLL(str(library))


def _is_register(text: str) -> bool:
    return text.startswith("%") or text in SINKS


def _type(text: str) -> int:
    return TYPES.index("pred" if text == "pred" else "u" + text[1:] if text[0] == "b" else text)


class Code:
    """A kernel's PTX as the machine reads it.

    Args:
        program: parsed.

    Attributes:
        table: the instructions.
        seen: by instruction: 1 where a thread executed it, 2 where its guard kept one from that, 3 for both.
        counts: by instruction: how often threads executed it.
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        self._slots: dict[str, int] = {}
        self._constants: dict[int, int] = {}  # value: slot
        texts = list(program.code)
        for i in texts:
            self._gather(i)
        self._constant_values = list(self._constants)
        for k, value in enumerate(self._constant_values):
            self._constants[value] = k
        count = len(self._constant_values)
        self._spare = [count + k for k in range(64)]  # for constants that a change brings in
        self._constant_values += [0] * 64
        names = list(self._slots)
        for k, name in enumerate((*SPECIAL, *(name for name in names if name not in SPECIAL))):
            self._slots[name] = count + 64 + k
        self.registers = count + 64 + len(self._slots)
        self.table = (Encoded * len(texts))(*(self.encode(i) for i in texts))
        self.seen = (ctypes.c_ubyte * len(texts))()
        self.counts = (ctypes.c_int64 * len(texts))()

    def _tokens(self, i: Instruction) -> list[str]:
        found: list[str] = [i.guard.lstrip("!")] if i.guard else []
        for operand in i.operands:
            for text in operand if isinstance(operand, list) else operand.split("|"):
                found.append(text)
        return found

    def _gather(self, i: Instruction) -> None:
        if i.parts[0] == "bra" or (i.parts[0] == "ld" and i.parts[1] == "param"):
            texts = self._tokens(i)[: -1 if i.parts[0] == "ld" else 0] + ([i.guard.lstrip("!")] if i.guard else [])
            texts = [text for text in texts if _is_register(text)]
        else:
            texts = [text.partition("+")[0] for text in self._tokens(i)]
        for text in texts:
            if _is_register(text):
                self._slots.setdefault(text, 0)
            else:
                self._constants.setdefault(self._value(text), 0)

    def _value(self, text: str) -> int:
        if text.startswith(("0f", "0d")):
            return int(text[2:], 16)
        if text in self.program.symbols:
            return self.program.symbols[text]
        return int(text.rstrip("U"), 0) & (2**64 - 1)

    def slot(self, text: str) -> int:
        """Where an operand lies."""
        if _is_register(text):
            return self._slots[text]
        value = self._value(text)
        if value not in self._constants:
            self._constants[value] = self._spare.pop()
            self._constant_values[self._constants[value]] = value
        return self._constants[value]

    def encode(self, i: Instruction) -> Encoded:
        """One instruction."""
        made, name = Encoded(), i.parts[0]
        made.guard, made.negated = (self.slot(i.guard.lstrip("!")) if i.guard else -1), i.guard.startswith("!")
        made.to[:], made.given[:] = [-1] * 4, [-1] * 4
        made.count, made.type = 1, _type("u32")
        made.down = 1 if "rz" in i.parts else 2 if "rm" in i.parts else 0
        operands = i.operands
        if name in ("ret", "bar") or name in WITHOUT_VALUES:
            made.op = OPS.index(name if name in ("ret", "bar") else "nop")
        elif name == "bra":
            made.op, made.extra = OPS.index("bra"), self.program.labels[operands[0]]
        elif name in ("ld", "st"):
            self._memory(made, i)
        elif name == "atom":
            made.op = OPS.index("atomor" if "or" in i.parts else "atomadd")
            made.to[0] = self.slot(operands[0])
            base, _, offset = operands[1].partition("+")
            made.given[0], made.given[1], made.offset = self.slot(base), self.slot(operands[2]), int(offset or 0)
        elif name == "shfl":
            made.op, made.extra = OPS.index("shfl"), int(i.parts[2] == "bfly")
            for k, text in enumerate(operands[0].split("|")):
                made.to[k] = self.slot(text)
            made.given[:3] = [self.slot(operands[k]) for k in (1, 2, 4)]  # what, how far, and the mask
        elif name == "mov" and any(isinstance(operand, list) for operand in operands):
            self._parts(made, i)
        elif name == "cvta":
            made.op, made.type = OPS.index("mov"), _type("u64")
            made.to[0], made.given[0] = self.slot(operands[0]), self.slot(operands[1])
        else:
            kind = {"wide": "mulwide", "hi": "mulhi"}.get(i.parts[1], name) if name == "mul" else name
            made.op, made.type, made.to[0] = OPS.index(kind), _type(i.parts[-1]), self.slot(operands[0])
            if name == "cvt":
                made.type, made.source = _type(i.parts[-2]), _type(i.parts[-1])
            if "approx" in i.parts:
                made.extra = 1
            if name == "shf":
                made.extra = int(i.parts[1] == "l") + 2 * int(i.parts[2] == "clamp")
            if name == "setp":
                made.extra = COMPARISONS.index(i.parts[1])
            if len(operands) > 5:
                raise ValueError(f"unknown to the machine: {i.op}")
            for k, text in enumerate(operands[1:]):
                made.given[k] = self.slot(text)
        return made

    def _memory(self, made: Encoded, i: Instruction) -> None:
        space, made.type = i.parts[1], _type(i.parts[-1])
        where, values = (i.operands[1], i.operands[0]) if i.parts[0] == "ld" else (i.operands[0], i.operands[1])
        values = values if isinstance(values, list) else [values]
        made.op, made.count = OPS.index(i.parts[0] + space), len(values)
        base, _, offset = where.partition("+")
        made.offset = int(offset or 0)
        if space == "param":
            made.extra = int(base.rpartition("_")[2])
        elif i.parts[0] == "ld":
            made.given[0] = self.slot(base)
        else:
            made.to[0] = self.slot(base)
        into = made.to if i.parts[0] == "ld" else made.given
        for k, text in enumerate(values):
            into[k] = self.slot(text)

    def _parts(self, made: Encoded, i: Instruction) -> None:
        size, (to, source) = int(i.parts[1][1:]), i.operands
        packs = isinstance(source, list)
        parts = source if packs else to
        made.op, made.count, made.extra = OPS.index("pack" if packs else "unpack"), len(parts), size // len(parts)
        for k, text in enumerate(parts):
            (made.given if packs else made.to)[k] = self.slot(text)
        (made.to if packs else made.given)[0] = self.slot(to if packs else source)

    def constants(self) -> Any:
        """Those that every thread begins with."""
        return (ctypes.c_uint64 * len(self._constant_values))(*self._constant_values)


class Stopped(RuntimeError):
    """A grid that did what a card would not let it do, or ran too long."""


class Machine:
    """What launches kernels, in place of a card.

    Args:
        library: as :func:`build` gives it.
        kernels: PTX by the kernel's name.

    Attributes:
        executed: instructions until now.
        longest: launch, in instructions.
        limit: of a launch.
        loads, stores: of global memory by the first thread in the last launch, in their order: (address, bytes).
    """

    def __init__(self, library: ctypes.CDLL, kernels: dict[str, str]) -> None:
        self._library, self._texts = library, kernels
        self._codes: dict[str, Code] = {}
        self.executed, self.longest, self.limit = 0, 0, 2**40
        self.loads: list[tuple[int, int]] = []
        self.stores: list[tuple[int, int]] = []
        self._accesses = (ctypes.c_int64 * 2 * ACCESSES)()

    def code(self, name: str) -> Code:
        """A kernel's, made once."""
        if name not in self._codes:
            self._codes[name] = Code(Program(self._texts[name]))
        return self._codes[name]

    def launch(self, name: str, blocks: int, stream: int, *arguments: bytes) -> None:
        code, program = self.code(name), self.code(name).program
        size = max((at - SHARED for at in program.symbols.values()), default=0) + 32768
        special = (ctypes.c_int * 4)(*(code._slots[one] for one in SPECIAL))
        given = (ctypes.c_char_p * len(arguments))(*(one + bytes(256) for one in arguments))
        constants, executed, accessed = code.constants(), ctypes.c_int64(), ctypes.c_int64(ACCESSES)
        status = self._library.ptx_run(
            code.table, constants, len(constants), code.registers, special, ctypes.c_int64(size),
            ctypes.c_int64(SHARED), ctypes.c_int64(blocks), given, ctypes.c_int64(self.limit), ctypes.byref(executed),
            code.seen, code.counts, self._accesses, ctypes.byref(accessed),
        )  # fmt: skip
        found = [(address, size) for address, size in self._accesses[: accessed.value]]
        self.loads = [(address, size) for address, size in found if size > 0]
        self.stores = [(address, -size) for address, size in found if size < 0]
        self.executed += executed.value
        self.longest = max(self.longest, executed.value)
        if status:
            raise Stopped("an access that is not allowed" if status == 1 else "it does not come to an end")
