"""One thread of a CUDA kernel as its PTX says: which addresses it loads from and stores to, how wide, and what.

The thread reads the host's memory at the addresses that it is given, and writes to a copy of its own. Of what other
threads do it sees nothing: it must be one that needs no other. What is not known of PTX raises an error.
"""

from __future__ import annotations

import ctypes
import functools
import re
import struct
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

_SHARED = 1 << 24  # where the memory of a block begins: some compilers have its addresses in 32 bits
_SIZES = {"8": 1, "16": 2, "32": 4, "64": 8}
_FLOATS = {"f16": np.float16, "f32": np.float32, "f64": np.float64}
_SPECIAL = {"%tid.x": 0, "%ntid.x": 256, "%ctaid.x": 0, "%nctaid.x": 1}
_COMPARE: dict[str, Callable[[Any, Any], bool]] = {
    "eq": lambda a, b: a == b,
    "ne": lambda a, b: a != b,
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
}


class Access(NamedTuple):
    """One load or store of global memory."""

    address: int
    size: int


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
        at = _SHARED
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


def _signed(value: int, bits: int) -> int:
    value &= (1 << bits) - 1
    return value - (1 << bits) if value >> (bits - 1) else value


def _number(bits: int, kind: str) -> Any:
    """What a register holds, as a number of type ``kind``."""
    if kind in _FLOATS:
        size = int(kind[1:])
        return np.array(bits & ((1 << size) - 1), f"u{size // 8}").view(_FLOATS[kind])[()]
    size = int(kind[1:])
    return _signed(bits, size) if kind[0] == "s" else bits & ((1 << size) - 1)


def _fused(a: Any, b: Any, c: Any) -> Any:
    """a * b + c of float32, rounded once: the product is exact in float64, and the sum is rounded there to odd."""
    product, added = np.float64(a) * np.float64(b), np.float64(c)
    total = product + added
    if not np.isfinite(total):
        return np.float32(total)
    back = total - product
    rest = (product - (total - back)) + (added - back)
    if rest != 0 and not int(total.view(np.uint64)) & 1:
        total = np.nextafter(total, np.float64(np.inf if rest > 0 else -np.inf))
    return np.float32(total)


def _down(a: Any, b: Any) -> Any:
    """a + b of float32, rounded down; their sum is exact in float64."""
    exact = np.float64(a) + np.float64(b)
    near = np.float32(exact)
    return np.nextafter(near, np.float32(-np.inf)) if near > exact else near


def _bits(number: Any, kind: str) -> int:
    if kind in _FLOATS:
        if np.isnan(number):  # a card has one for all
            return (1 << (int(kind[1:]) - 1)) - 1
        return int(np.array(number, _FLOATS[kind]).view(f"u{int(kind[1:]) // 8}"))
    return int(number) & ((1 << int(kind[1:])) - 1)


class Thread:
    """Thread 0 of block 0.

    Args:
        program: what it executes.
        arguments: of the kernel, as the library packs them.

    Attributes:
        loads, stores: of global memory, in their order.
        written: byte by byte, what it stored there.
    """

    def __init__(self, program: Program, arguments: tuple[bytes, ...]) -> None:
        self._program, self._arguments = program, arguments
        self._registers: dict[str, int] = {}
        self._unset: dict[str, int] = {}  # by register: those of its bits that registers without a value gave
        self._shared: dict[int, int] = {}
        self.loads: list[Access] = []
        self.stores: list[Access] = []
        self.written: dict[int, int] = {}

    def run(self) -> Thread:
        """Execute to the end."""
        at, code = 0, self._program.code
        with np.errstate(all="ignore"):
            while True:
                guard, _, parts, operands = instruction = code[at]
                at += 1
                if guard and bool(self._value(guard.lstrip("!"))) is guard.startswith("!"):
                    continue
                if parts[0] == "ret":
                    return self
                if parts[0] == "bra":
                    at = self._program.labels[operands[0]]
                else:
                    getattr(self, f"_do_{parts[0]}")(instruction)

    # -- operands

    def _value(self, text: str) -> int:
        if self._unset.get(text):
            raise KeyError(f"a part of {text}")
        if text in self._registers:
            return self._registers[text]
        if text.startswith("0f"):
            return int(text[2:], 16)
        if text.startswith("0d"):
            return int(text[2:], 16)
        if text in self._program.symbols:
            return self._program.symbols[text]
        return _SPECIAL[text] if text.startswith("%") else int(text.rstrip("U"), 0)

    def _partial(self, text: str) -> tuple[int, int]:
        """A value, and those of its bits that nothing was put in on this way: using them raises KeyError."""
        if text.startswith("%") and text not in self._registers and text not in _SPECIAL:
            return 0, (1 << 64) - 1
        unset = self._unset.get(text, 0)
        return (self._registers[text] if unset else self._value(text)), unset

    def _set(self, register: str, value: int, unset: int = 0) -> None:
        self._registers[register] = value
        if unset:
            self._unset[register] = unset
        else:
            self._unset.pop(register, None)

    def _apply(self, i: Instruction, kind: str, function: Callable[..., Any], result: str = "") -> None:
        given = [_number(self._value(text), kind) for text in i.operands[1:]]
        self._set(i.operands[0], _bits(function(*given), result or kind))

    def _address(self, text: str) -> int:
        base, _, offset = text.partition("+")
        return self._value(base) + (int(offset) if offset else 0)

    # -- memory

    def _read(self, space: str, text: str, size: int) -> bytes:
        if space == "param":
            name, _, offset = text.partition("+")
            argument, at = self._arguments[int(name.rpartition("_")[2])], int(offset or 0)
            return argument[at : at + size]
        address = self._address(text)
        if space == "shared":
            return bytes(self._shared.get(address + k, 0) for k in range(size))
        self.loads.append(Access(address, size))
        memory = bytearray(ctypes.string_at(address, size))
        for k in range(size):
            memory[k] = self.written.get(address + k, memory[k])
        return bytes(memory)

    @staticmethod
    def _layout(parts: list[str]) -> tuple[str, int, int]:
        """The kind, its size, and how many of them."""
        kind, vector = parts[-1], next((int(part[1]) for part in parts if re.fullmatch(r"v\d", part)), 1)
        return kind, _SIZES[kind[1:]], vector

    def _do_ld(self, i: Instruction) -> None:
        kind, size, vector = self._layout(i.parts)
        memory = self._read(i.parts[1], i.operands[1], size * vector)
        targets = i.operands[0] if isinstance(i.operands[0], list) else [i.operands[0]]
        for k, target in enumerate(targets):
            value = int.from_bytes(memory[k * size : (k + 1) * size], "little")
            self._set(target, _signed(value, 8 * size) & (2**64 - 1) if kind[0] == "s" else value)

    def _do_st(self, i: Instruction) -> None:
        _, size, vector = self._layout(i.parts)
        sources = i.operands[1] if isinstance(i.operands[1], list) else [i.operands[1]]
        address = self._address(i.operands[0])
        values = [self._value(source) & ((1 << 8 * size) - 1) for source in sources]
        memory = b"".join(value.to_bytes(size, "little") for value in values)
        to = self._shared if i.parts[1] == "shared" else self.written
        if to is self.written:
            self.stores.append(Access(address, size * vector))
        to.update(zip(range(address, address + len(memory)), memory, strict=True))

    def _do_atom(self, i: Instruction) -> None:
        before = int.from_bytes(self._read("global", i.operands[1], 4), "little")
        address = self._address(i.operands[1])
        given = self._value(i.operands[2])
        after = before | given if "or" in i.parts else before + given
        after &= 0xFFFFFFFF
        self.written.update(zip(range(address, address + 4), struct.pack("<I", after), strict=True))
        self._set(i.operands[0], before)

    def _nothing(self, i: Instruction) -> None:
        """Barriers and fences, of which one thread sees nothing."""

    _do_bar = _do_membar = _do_fence = _nothing

    # -- moves

    def _do_mov(self, i: Instruction) -> None:
        """Whole and packed registers, with bits that nothing was put in: compilers move them along."""
        to, source = i.operands
        size = int(i.parts[1][1:]) if i.parts[1] != "pred" else 1
        if isinstance(source, list):
            part = size // len(source)
            whole = [0, 0]
            for k, text in enumerate(source):
                for n, bits in enumerate(self._partial(text)):
                    whole[n] |= (bits & ((1 << part) - 1)) << part * k
            self._set(to, *whole)
        else:
            targets = to if isinstance(to, list) else [to]
            part, (value, unset) = size // len(targets), self._partial(source)
            for k, target in enumerate(targets):
                self._set(target, *(bits >> part * k & ((1 << part) - 1) for bits in (value, unset)))

    def _do_cvta(self, i: Instruction) -> None:
        self._set(i.operands[0], self._value(i.operands[1]))

    def _do_selp(self, i: Instruction) -> None:
        to, yes, no, which = i.operands
        self._set(to, self._value(yes if self._value(which) else no) & ((1 << int(i.parts[1][1:])) - 1))

    def _do_cvt(self, i: Instruction) -> None:
        to, kind = i.parts[-2:]
        if to[0] == kind[0] == "u" and int(to[1:]) < int(kind[1:]):
            self._set(i.operands[0], *(_number(bits, to) for bits in self._partial(i.operands[1])))
            return
        value = _number(self._value(i.operands[1]), kind)
        if kind in _FLOATS and to not in _FLOATS:  # .rzi
            low, high = (
                (-(1 << int(to[1:]) - 1), (1 << int(to[1:]) - 1) - 1) if to[0] == "s" else (0, (1 << int(to[1:])) - 1)
            )
            value = 0 if np.isnan(value) else low if value <= low else high if value >= high else int(value)
        whole = _bits(value, to)  # numbers of 8 bits keep their sign in the 16 of a register
        self._set(i.operands[0], _signed(whole, int(to[1:])) & (2**64 - 1) if to[0] == "s" else whole)

    # -- arithmetic

    def _two(self, i: Instruction, function: Callable[[Any, Any], Any]) -> None:
        self._apply(i, i.parts[-1], function)

    def _do_add(self, i: Instruction) -> None:
        self._two(i, _down if "rm" in i.parts else lambda a, b: a + b)

    def _do_sub(self, i: Instruction) -> None:
        self._two(i, lambda a, b: a - b)

    def _do_mul(self, i: Instruction) -> None:
        kind = i.parts[-1]
        if i.parts[1] == "wide":
            self._apply(i, kind, lambda a, b: a * b, f"{kind[0]}{2 * int(kind[1:])}")
        elif i.parts[1] == "hi":
            self._apply(i, kind, lambda a, b: (a * b) >> int(kind[1:]))
        else:
            self._apply(i, kind, lambda a, b: a * b)

    def _do_mad(self, i: Instruction) -> None:
        self._apply(i, i.parts[-1], lambda a, b, c: a * b + c)

    def _do_fma(self, i: Instruction) -> None:
        self._apply(i, i.parts[-1], _fused)

    def _do_div(self, i: Instruction) -> None:
        kind = i.parts[-1]
        self._apply(
            i, kind, (lambda a, b: a / b) if kind in _FLOATS else lambda a, b: int(a / b) if a * b < 0 else a // b
        )

    def _do_rem(self, i: Instruction) -> None:
        self._apply(i, i.parts[-1], lambda a, b: a - b * (abs(a) // abs(b) * (1 if a * b >= 0 else -1)))

    def _do_rcp(self, i: Instruction) -> None:
        self._apply(i, i.parts[-1], lambda a: type(a)(1) / a)

    def _do_sqrt(self, i: Instruction) -> None:
        self._apply(i, i.parts[-1], np.sqrt)

    def _do_rsqrt(self, i: Instruction) -> None:
        self._apply(i, i.parts[-1], lambda a: type(a)(1) / np.sqrt(a))

    def _do_shfl(self, i: Instruction) -> None:
        """Of a thread alone: what it gives itself."""
        self._set(i.operands[0].split("|")[0], self._value(i.operands[1]))

    def _do_neg(self, i: Instruction) -> None:
        self._apply(i, i.parts[-1], lambda a: -a)

    def _do_abs(self, i: Instruction) -> None:
        self._apply(i, i.parts[-1], abs)

    def _do_min(self, i: Instruction) -> None:
        self._two(i, np.fmin if i.parts[-1] in _FLOATS else min)

    def _do_max(self, i: Instruction) -> None:
        self._two(i, np.fmax if i.parts[-1] in _FLOATS else max)

    # -- bits

    @staticmethod
    def _unsigned(i: Instruction) -> str:
        return "u1" if i.parts[-1] == "pred" else f"u{i.parts[-1][1:]}"

    def _do_and(self, i: Instruction) -> None:
        self._apply(i, self._unsigned(i), lambda a, b: a & b)

    def _do_or(self, i: Instruction) -> None:
        self._apply(i, self._unsigned(i), lambda a, b: a | b)

    def _do_xor(self, i: Instruction) -> None:
        self._apply(i, self._unsigned(i), lambda a, b: a ^ b)

    def _do_not(self, i: Instruction) -> None:
        self._apply(i, self._unsigned(i), lambda a: ~a)

    def _do_shl(self, i: Instruction) -> None:
        self._shift(i, self._unsigned(i), lambda a, by: a << by)

    def _do_shr(self, i: Instruction) -> None:
        self._shift(i, i.parts[-1] if i.parts[-1][0] == "s" else self._unsigned(i), lambda a, by: a >> by)

    def _shift(self, i: Instruction, kind: str, function: Callable[[int, int], int]) -> None:
        by = min(self._value(i.operands[2]) & 0xFFFFFFFF, int(kind[1:]))
        given = self._partial(i.operands[1]) if kind[0] == "u" else (self._value(i.operands[1]), 0)
        self._set(i.operands[0], *(_bits(function(_number(bits, kind), by), kind) for bits in given))

    def _do_shf(self, i: Instruction) -> None:
        """A funnel shift: of 64 bits, the second operand above the first, the upper or lower 32 of what is shifted."""
        low, high, by = (self._value(text) & 0xFFFFFFFF for text in i.operands[1:])
        by = min(by, 32) if i.parts[2] == "clamp" else by % 32
        both = high << 32 | low
        self._set(i.operands[0], (both << by >> 32 if i.parts[1] == "l" else both >> by) & 0xFFFFFFFF)

    def _do_bfi(self, i: Instruction) -> None:
        into, (a, b, at, count) = i.operands[0], (self._value(text) for text in i.operands[1:])
        mask = ((1 << count) - 1) << at
        self._set(into, (b & ~mask) | (a << at & mask))

    def _do_bfe(self, i: Instruction) -> None:
        """Behind the last of 32 bits are zeros or copies of the sign."""
        kind = i.parts[-1]
        a, at, count = _number(self._value(i.operands[1]), kind), *(self._value(text) & 255 for text in i.operands[2:])
        count = min(count, 32)
        part = a >> at & ((1 << count) - 1)
        self._set(i.operands[0], (_signed(part, count) if kind[0] == "s" and count else part) & 0xFFFFFFFF)

    def _do_prmt(self, i: Instruction) -> None:
        a, b, which = (self._value(text) & 0xFFFFFFFF for text in i.operands[1:])
        both, value = a | b << 32, 0
        for k in range(4):
            nibble = which >> 4 * k & 15
            byte = both >> 8 * (nibble & 7) & 255
            value |= (byte if nibble < 8 else 255 * (byte >> 7)) << 8 * k
        self._set(i.operands[0], value)

    def _do_setp(self, i: Instruction) -> None:
        compare, kind = i.parts[1], i.parts[-1]
        a, b = (_number(self._value(text), kind if kind[0] != "b" else self._unsigned(i)) for text in i.operands[1:3])
        unordered = kind in _FLOATS and bool(np.isnan(a) or np.isnan(b))
        if compare in ("num", "nan"):
            result = unordered is (compare == "nan")
        elif kind in _FLOATS and len(compare) == 3:  # equ and so on: true where one of the two is a nan
            result = unordered or _COMPARE[compare[:2]](a, b)
        else:
            result = not unordered and _COMPARE[compare](a, b)
        self._set(i.operands[0], int(result))


@functools.lru_cache(maxsize=128)
def program(text: str) -> Program:
    """The kernel's PTX, parsed once."""
    return Program(text)
