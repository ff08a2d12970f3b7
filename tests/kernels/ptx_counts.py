"""What a step with 8-bit state executes for an element on a card, by kind of instruction, as its PTX says.

    python tests/kernels/ptx_counts.py [--arch 90] [--kernels adam8 sgd8] [--any]

Whole rows of 256 threads are executed on weights and state of a training, twice, with more rows the second time: the
difference is what a row takes. A division, a root or a reciprocal that is rounded correctly is one instruction of PTX,
and ten of a card: each counts as ten. With it registers, spills, shared memory and blocks, as ptxas says.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import emulated  # noqa: E402
import ptx_faults  # noqa: E402
import ptx_machine  # noqa: E402
import pytest  # noqa: E402
import torch  # noqa: E402
from ptx import Instruction  # noqa: E402

from fp16opt.kernels import CastStats, multi_tensor_split, state8  # noqa: E402
from fp16opt.kernels.changed import ChangedBits  # noqa: E402
from fp16opt.kernels.cuda import OF_DTYPES  # noqa: E402
from fp16opt.kernels.cuda_rows import KERNELS, OPTIONS, of_kind, source_of  # noqa: E402
from fp16opt.kernels.nvrtc import find  # noqa: E402
from fp16opt.kernels.operations import AdamOptions, Factors, SgdOptions  # noqa: E402

ROWS = (4, 12)
THREADS, GROUP = 256, 8
IEEE = 10
"""Instructions that ptxas makes of a correctly rounded division, root or reciprocal, on its usual way."""
KINDS = ("global", "shared", "float", "divisions, roots", "guesses", "integer", "choice", "conversion", "other")
MASTERS = {
    "split": torch.int16,
    "split24": torch.int8,
    "full": torch.float32,
}


def kind_of(i: Instruction) -> str:
    """Which of KINDS an instruction is; "" where a card has none for it."""
    name, last = i.parts[0], i.parts[-1]
    if name in ("ld", "st", "atom"):
        return "shared" if i.parts[1] == "shared" else "global" if i.parts[1] != "param" else ""
    if "approx" in i.parts:
        return "guesses"
    if last in ("f32", "f64") and name in ("div", "sqrt", "rcp"):
        return "divisions, roots"
    if name in ("setp", "selp", "min", "max"):
        return "choice"
    if name == "cvt":
        return "conversion" if "f" in f"{i.parts[-1]}{i.parts[-2]}" else ""
    if last in ("f32", "f64") and name != "mov":
        return "float"
    if name in ("bra", "bar", "shfl", "ret"):
        return "other"
    return "" if name in ("mov", "cvta") or last == "pred" else "integer"


def compiled(name: str, arch: int) -> tuple[str, str]:
    """PTX, and what ptxas says."""
    flags, code = [*OPTIONS, "--ptxas-options=-v"], emulated.flattened()
    ptx, log = find([12]).compile(source_of(KERNELS[name], code), name, arch, flags, ("PTX", "ProgramLog"))
    return ptx.rstrip(b"\0").decode(), log.decode()


def step(name: str, dtype: torch.dtype, masters: str, grads: torch.dtype, numel: int, steps: int) -> Any:
    """A training's tensors after some steps, and what makes the next."""
    torch.manual_seed(0)
    weights, marks = 0.02 * torch.randn(numel), name.endswith("marking")
    model, rest = weights.to(dtype), torch.zeros(numel, dtype=MASTERS[masters])
    stats = CastStats.allocate(1, "cpu")
    if masters == "full":
        rest = weights
    else:
        multi_tensor_split([weights], [model], [rest], stats)
    if marks:
        stats.changed = ChangedBits.allocate([model], "cpu")
    scales = torch.zeros(-(-numel // state8.BLOCK))
    first, second = torch.zeros(numel, dtype=torch.int8), torch.zeros(numel, dtype=torch.uint8)
    count, factors = [torch.tensor(0.0)], Factors(torch.tensor(2.0**-14), torch.tensor(0.8))
    adam, sgd = [AdamOptions(1e-3, 0.9, 0.999, 1e-8, 0.1, True, False)], [SgdOptions(1e-2, 0.9, 0.0, 0.0, False, False)]

    def run(number: int) -> None:
        given = [(torch.randn(numel) * 2.0**14 * 1e-3).to(grads)], [rest]
        more: dict[str, Any] = {"models": [model], "stats": stats}
        if name.startswith("adam8"):
            lists = (*given, [first], [second], [scales], count)
            state8.multi_tensor_adam8(*lists, adam, [0], factors, number, **more)
        else:
            more["first"] = [number == 1]
            state8.multi_tensor_sgd8(*given, [first], [scales], sgd, [0], factors, number, **more)

    for number in range(1, steps + 1):
        run(number)
    return lambda: run(steps + 1)


def counted(machine: ptx_machine.Machine, name: str, call: Any) -> Counter[int]:
    """How often the call executes each instruction."""
    code = machine.code(name)
    code.counts[:] = [0] * len(code.counts)
    with pytest.MonkeyPatch.context() as patch:
        ptx_faults.serve(machine, patch)
        call()
    return Counter(dict(enumerate(code.counts)))


def per_element(
    machine: ptx_machine.Machine, name: str, dtype: torch.dtype, masters: str, grads: torch.dtype
) -> Counter[str]:
    """Instructions by kind; "barriers" and "shared reads" of a thread's eight elements."""
    few, many = (counted(machine, name, step(name, dtype, masters, grads, rows * THREADS * GROUP, 5)) for rows in ROWS)
    elements, found = (ROWS[1] - ROWS[0]) * THREADS * GROUP, Counter[str]()
    for at, i in enumerate(machine.code(name).program.code):
        times = (many[at] - few[at]) / elements
        kind = kind_of(i)
        if kind:
            found[kind] += times * (IEEE if kind == "divisions, roots" else 1)
        found["PTX"] += times
        if i.parts[:2] == ["ld", "shared"]:
            found["shared reads"] += times * GROUP
        if i.parts[0] == "bar":
            found["barriers"] += times * GROUP
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--arch", type=int, default=90)
    parser.add_argument("--kernels", nargs="+", default=["adam8", "sgd8"])
    parser.add_argument("--any", action="store_true", help="the kernel for any masters, of FP32 gradients")
    given = parser.parse_args()
    library = ptx_machine.build(Path(tempfile.mkdtemp()))
    torch.set_num_threads(1)
    columns = (*KINDS, "sum", "PTX", "shared reads", "barriers")
    print(f"| kernel | weights, masters | registers | spills | {' | '.join(columns)} |")
    print("|---" * (4 + len(columns)) + "|")
    for name in given.kernels:
        for dtype, short in ((torch.float16, "FP16"), (torch.bfloat16, "BF16")):
            for masters, rest in MASTERS.items():
                if name.endswith("marking"):
                    kernel, grads = name, dtype
                else:
                    kernel, grads = of_kind(name, OF_DTYPES[dtype, rest, dtype]), dtype
                if given.any:
                    kernel, grads = name, torch.float32
                text, log = compiled(kernel, given.arch)
                machine = ptx_machine.Machine(library, {kernel: text})
                registers = re.findall(r"Used (\d+) registers", log)[0]
                spills = sum(map(int, re.findall(r"(\d+) bytes spill", log)))
                found = per_element(machine, kernel, dtype, masters, grads)
                found["sum"] = sum(found[kind] for kind in KINDS)
                cells = " | ".join(f"{abs(found[column]):.1f}" for column in columns)
                print(f"| {kernel} | {short}, {masters} | {registers} | {spills} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
