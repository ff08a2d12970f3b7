"""Faults planted in the PTX of CUDA kernels, one instruction each, and what the proof at first use says of them.

    python tests/kernels/ptx_faults.py [--arch 70 75 80 90] [--each N] [--others N] [--kernels adam cast] [--table PATH]

compiles every kernel for the cards, plants up to N faults of each kind in each, chosen by a seed, and executes the
proof in a process of its own for each. A fault that the proof does not find is executed on other lists too, of other
sizes and numbers: one that changes nothing there either is counted apart. Cards whose instructions are the same are
tried once. What the proof itself executes is counted, too.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import sys
import tempfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import emulated  # noqa: E402
import pytest  # noqa: E402
import torch  # noqa: E402
from ptx import Instruction  # noqa: E402
from ptx_machine import Code, Machine, build  # noqa: E402

from fp16opt.kernels import planted, proof  # noqa: E402
from fp16opt.kernels.cuda_rows import KERNELS, OPTIONS, source_of  # noqa: E402
from fp16opt.kernels.nvrtc import find  # noqa: E402

KINDS = ("arithmetic", "operand", "address", "store", "rounding", "predicate", "branch", "constant")
OTHERS = 2
"""Random lists that a fault is tried on that the proof has not found."""
HEAD = """# What the proof says of faults in the kernels' instructions

`python tests/kernels/ptx_faults.py --arch 70 75 80 90 --table tests/faults/instructions.md` writes this. Each fault is
one changed instruction; the proof at first use is executed with it, and what that does not refuse is executed on
other lists. docs/gpu.md has what the columns mean.

"""
_OTHER = {
    "add": "sub", "sub": "add", "min": "max", "max": "min", "and": "or", "or": "and", "xor": "or",
    "shl": "shr", "shr": "shl", "neg": "mov", "abs": "mov", "not": "mov", "sqrt": "mov", "rcp": "mov", "mul": "add",
}  # fmt: skip
_COMPARE = {
    "eq": "ne", "ne": "eq", "lt": "le", "le": "lt", "gt": "ge", "ge": "gt",
    "equ": "neu", "neu": "equ", "ltu": "leu", "leu": "ltu", "gtu": "geu", "geu": "gtu", "num": "nan", "nan": "num",
}  # fmt: skip
_ORDERED = ("sub", "div", "rem", "shl", "shr", "selp")


class Fault(NamedTuple):
    """One instruction that is another.

    Attributes:
        kind: of KINDS.
        at: its place.
        instruction: what stands there now; None for nothing.
    """

    kind: str
    at: int
    instruction: Instruction | None


def _register(text: Any) -> str:
    """Its class, as in "%rd"; "" for what is none."""
    found = re.fullmatch(r"(%[a-z]+)\d+", text) if isinstance(text, str) else None
    return found[1] if found and found[1] != "%p" else ""


def _moved(text: str, by: int) -> str:
    base, _, offset = text.partition("+")
    return f"{base}+{int(offset or 0) + by}"


def _with(i: Instruction, parts: list[str]) -> Instruction:
    return i._replace(op=".".join(parts), parts=parts)


def faults(code: Code) -> Iterator[Fault]:
    """All that are planted in a kernel."""
    last: dict[str, list[str]] = {}  # by class of register: those that were written before
    for at, i in enumerate(code.program.code):
        name, kind, operands = i.parts[0], i.parts[-1], i.operands
        plain = all(isinstance(operand, str) for operand in operands)
        if name in _OTHER and plain and kind != "pred" and not (name == "mul" and i.parts[1] in ("wide", "hi")):
            parts = [_OTHER[name], *i.parts[1:]]
            yield Fault("arithmetic", at, _with(i, [p for p in parts if not (parts[0] == "add" and p == "lo")]))
        if plain and name in _ORDERED and operands[1] != operands[2]:
            swapped = [operands[0], operands[2], operands[1], *operands[3:]]
            yield Fault("operand", at, i._replace(operands=swapped))
        elif plain and name in ("add", "mul", "mad", "and", "or", "xor", "min", "max", "cvt", "setp"):
            for k, text in enumerate(operands[1:], 1):
                others = [one for one in last.get(_register(text), []) if one != text]
                if others:
                    given = [*operands[:k], others[-1], *operands[k + 1 :]]
                    yield Fault("operand", at, i._replace(operands=given))
                    break
        if name in ("ld", "st") and i.parts[1] in ("global", "shared"):
            where, size = (1 if name == "ld" else 0), int(kind[1:]) // 8
            size *= len(operands[1 - where]) if isinstance(operands[1 - where], list) else 1
            given = list(operands)
            given[where] = _moved(operands[where], size)
            yield Fault("address", at, i._replace(operands=given))
        if name == "st":
            yield Fault("store", at, None)
        if "rn" in i.parts and not (name == "cvt" and i.parts[-1][0] in "us"):
            yield Fault("rounding", at, _with(i, ["rz" if part == "rn" else part for part in i.parts]))
        if name == "setp":
            yield Fault("predicate", at, _with(i, [name, _COMPARE[i.parts[1]], *i.parts[2:]]))
        if i.guard and name != "bra":
            guard = i.guard[1:] if i.guard.startswith("!") else f"!{i.guard}"
            yield Fault("predicate", at, i._replace(guard=guard))
        if name == "bra":
            if i.guard:
                guard = i.guard[1:] if i.guard.startswith("!") else f"!{i.guard}"
                yield Fault("branch", at, i._replace(guard=guard))
            yield Fault("branch", at, None)
        if plain and name in ("mov", "add", "mul", "and", "shl", "shr", "setp", "selp", "mad"):
            for k, text in enumerate(operands[1:], 1):
                if re.fullmatch(r"-?\d+", text):
                    given = [*operands[:k], str(int(text) + 1), *operands[k + 1 :]]
                    yield Fault("constant", at, i._replace(operands=given))
                    break
        target = operands[0] if operands else ""
        for one in target if isinstance(target, list) else [target]:
            if _register(one) and name != "st":
                last.setdefault(_register(one), []).append(one)


_NOTHING = Instruction("", "membar", ["membar"], [])


def plant(code: Code, fault: Fault) -> None:
    """Put a fault into the table."""
    code.table[fault.at] = code.encode(_NOTHING if fault.instruction is None else fault.instruction)


def judge(made: planted.Planted, wanted: torch.Tensor) -> str:
    """What is wrong with memory that the kernels which serve now have worked in; "" for nothing."""
    memory = made.before.clone()
    with proof.proving(), torch.no_grad():
        try:
            made.run(planted.Room(made.parts, memory, True))
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    return proof.compare(made.parts, memory, wanted).words


class Trial:
    """A kernel, what proves it, and other lists.

    Args:
        machine: what executes.
        name: of the kernel.
        others: how many other lists.
    """

    def __init__(self, machine: Machine, name: str, others: int = OTHERS) -> None:
        self.machine, self.name = machine, name
        self._proof = planted.planted(name), planted.expected(name)
        self._others = [_other_lists(name, seed) for seed in range(others)]

    def right(self) -> str:
        """What the proof says of the kernel as it is; sets the limit of instructions for the others."""
        self.machine.longest, self.machine.limit = 0, 2**40
        found = [judge(*self._proof), *(judge(*other) for other in self._others)]
        self.machine.limit = 4 * self.machine.longest + 100_000
        return next(filter(None, found), "")

    def outcome(self, fault: Fault) -> str:
        """ "refused", "missed": not by the proof, and other lists show it; or "same": nowhere."""
        return self.apart(lambda: self._outcome(fault))

    def _outcome(self, fault: Fault) -> str:
        plant(self.machine.code(self.name), fault)
        if judge(*self._proof):
            return "refused"
        return "missed" if any(judge(*other) for other in self._others) else "same"

    @staticmethod
    def apart(run: Callable[[], str]) -> str:
        """In a process of its own: what a fault writes to is lost with it. One that dies has been found."""
        sys.stdout.flush()
        child = os.fork()
        if child == 0:
            code = 3
            try:
                code = {"refused": 0, "missed": 1, "same": 2}[run()]
            finally:
                os._exit(code)
        _, status = os.waitpid(child, 0)
        return {1: "missed", 2: "same"}.get(os.waitstatus_to_exitcode(status), "refused")


def _other_lists(name: str, seed: int) -> tuple[planted.Planted, torch.Tensor]:
    """What proves a kernel, with other sizes and numbers. Only for a CPU that nothing is pretended of."""
    rng = random.Random(seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planted, "_SEED", 1000 + seed)
        patch.setattr(
            planted, "_SMALL", tuple(rng.choice((0, 1, 5, 64, 300, 2000, 4000)) + rng.randrange(9) for _ in range(11))
        )
        patch.setattr(planted, "_LONG", rng.randrange(8000, 14000))
        planted._pool.cache_clear()
        made = planted.planted.__wrapped__(name)
        after = made.before.clone()
        made.run(planted.Room(made.parts, after, False))
    planted._pool.cache_clear()
    return made, after


def compile_for(arch: int, names: list[str]) -> dict[str, str]:
    """The PTX of kernels."""
    compiler, code = find([12]), emulated.flattened()

    def one(name: str) -> str:
        kernel = KERNELS[name]
        return compiler.compile(source_of(kernel, code), name, arch, OPTIONS, ("PTX",))[0].rstrip(b"\0").decode()

    return {name: one(name) for name in names}


def chosen(code: Code, each: int, seed: int) -> list[Fault]:
    """Up to ``each`` faults of each kind."""
    found: dict[str, list[Fault]] = {kind: [] for kind in KINDS}
    for fault in faults(code):
        found[fault.kind].append(fault)
    rng = random.Random(seed)
    return [fault for some in found.values() for fault in rng.sample(some, min(each, len(some)))]


def serve(machine: Machine, patch: pytest.MonkeyPatch) -> None:
    """Have the machine serve CPU tensors."""

    class Shuffled:
        value = 0

    empty = torch.empty

    def dirty(*shape: Any, **more: Any) -> torch.Tensor:
        """What was there before, where a proof was made already, would be the right results."""
        made = empty(*shape, **more)
        made.untyped_storage().fill_(0x5A)
        return made

    patch.setattr(torch, "empty", dirty)
    patch.setattr(emulated, "shuffle", lambda device: Shuffled())
    emulated.use(machine, patch)


def distinct(archs: list[int], names: list[str]) -> Iterator[tuple[str, list[int], str]]:
    """(kernel, cards, their PTX), once for all cards whose instructions are the same."""
    texts = {arch: compile_for(arch, names) for arch in archs}
    for name in names:
        bodies: dict[str, list[int]] = {}
        for arch in archs:
            bodies.setdefault(texts[arch][name].partition(".address_size")[2], []).append(arch)
        for alike in bodies.values():
            yield name, alike, texts[alike[0]][name]


def tried(library: Any, name: str, text: str, each: int, others: int) -> dict[str, Any]:
    """What became of the faults of one kernel."""
    machine = Machine(library, {name: text})
    trial, code = Trial(machine, name, 0), machine.code(name)
    with pytest.MonkeyPatch.context() as patch:
        serve(machine, patch)
        words = trial.right()
        seen = list(code.seen)
        guards = [seen[at] for at, i in enumerate(code.program.code) if i.guard and seen[at]]
    trial = Trial(machine, name, others)
    found: list[list[Any]] = []
    with pytest.MonkeyPatch.context() as patch:
        serve(machine, patch)
        words = words or trial.right()
        for fault in [] if words else chosen(code, each, zlib.crc32(name.encode())):
            was, now = code.program.code[fault.at], fault.instruction
            line = "nothing" if now is None else f"{now.guard} {now.op} {now.operands}"
            found.append([fault.kind, trial.outcome(fault), fault.at, f"{was.guard} {was.op} {was.operands}", line])
    return {
        "refused as it is": words,
        "instructions": len(seen),
        "never": seen.count(0),
        "guards": [len(guards), guards.count(3)],
        "faults": found,
    }


def row(name: str, outcomes: Counter[str]) -> str:
    """A line of a table: planted, refused, missed, the same everywhere."""
    numbers = (outcomes.total(), outcomes["refused"], outcomes["missed"], outcomes["same"])
    return f"| {name} | {' | '.join(map(str, numbers))} |"


def table(results: dict[str, Any]) -> str:
    """All results as Markdown."""
    kinds: dict[str, Counter[str]] = {kind: Counter() for kind in KINDS}
    lines, missed = [], []
    for name, one in results.items():
        of_this: Counter[str] = Counter()
        for kind, outcome, at, was, now in one["faults"]:
            kinds[kind][outcome] += 1
            of_this[outcome] += 1
            if outcome == "missed":
                missed.append(f"- {name}, {kind}, instruction {at}: `{was.strip()}` became `{now.strip()}`")
        cards, (guards, both) = ", ".join(f"sm_{arch}" for arch in one["cards"]), one["guards"]
        more = f"{one['instructions']} | {one['never']} | {both} of {guards} | {cards} |"
        lines.append(f"{row(name, of_this)} {more}")
    total = sum(kinds.values(), Counter[str]())
    wrong = [name for name, one in results.items() if one["refused as it is"]]
    return "\n".join(
        [
            f"{len(results)} kernels; refused as they are: {', '.join(wrong) or 'none'}.",
            "",
            "| kind | planted | refused | missed | the same on all lists |",
            "|---|---|---|---|---|",
            *(row(kind, found) for kind, found in kinds.items()),
            row("all", total),
            "",
            "| kernel | planted | refused | missed | the same | instructions | never run | guards both ways | cards |",
            "|---|---|---|---|---|---|---|---|---|",
            *lines,
            "",
            "Missed:" if missed else "None was missed.",
            "",
            *missed,
            "",
        ]
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--arch", type=int, nargs="+", default=[70])
    parser.add_argument("--each", type=int, default=3, help="faults of a kind in a kernel")
    parser.add_argument("--kernels", nargs="+", default=list(KERNELS))
    parser.add_argument("--others", type=int, default=OTHERS, help="other lists")
    parser.add_argument("--table", type=Path, help="write it there; what stands beside it as .json is not run again")
    given = parser.parse_args()
    torch.set_num_threads(1)
    library = build(Path(tempfile.mkdtemp()))
    kept = None if given.table is None else given.table.with_suffix(".json")
    results: dict[str, Any] = {} if kept is None or not kept.exists() else json.loads(kept.read_text())
    for name, cards, text in distinct(given.arch, given.kernels):
        if name in results and cards == results[name]["cards"]:
            continue
        key = name if name not in results or results[name]["cards"] == cards else f"{name} of sm_{cards[0]}"
        results[key] = {"cards": cards, **tried(library, name, text, given.each, given.others)}
        print(key, cards, dict(Counter(outcome for _, outcome, *_ in results[key]["faults"])), flush=True)
        if kept is not None:
            kept.write_text(json.dumps(results, indent=1))
            given.table.write_text(f"{HEAD}{table(results)}")
    print(table(results))
    return 1 if any(one["refused as it is"] for one in results.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
