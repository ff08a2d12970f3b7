"""What nvcc makes of the CUDA sources, for one architecture: exact arithmetic, wide accesses, nothing spilled."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]
NVCC = shutil.which("nvcc")
FINDING = {
    "Unscale": (True, True),
    "Norm": (True, False),
    "Cast": (True, True),
    "Sample": (True, False),
    "Split": (True, True),
}
MAPPING = {
    "UnscaleClipped": (True, True),
    "Scale": (True, True),
    "Axpby": (True, True),
    "Take": (True, True),
    "Join": (True, True),
    "Renew": (True, True),
}
STEPPING = {"AdamStep": (True, True), "SgdStep": (True, True)}
WIDE = {**FINDING, **MAPPING, **STEPPING}
REGISTERS = {"AdamStep": 128}  # two blocks of 256 threads fit on a multiprocessor; else 80, and three
SINGLE = {"CaptureScale", "DecideClip", "CloseStep"}  # one block, over a few numbers

pytestmark = pytest.mark.skipif(
    NVCC is None or not (ROOT / "csrc").is_dir(), reason="needs nvcc, CUDA's compiler, and the sources"
)


class Compiled(NamedTuple):
    """The kernels' PTX by the name of their operation, and what ptxas said."""

    kernels: dict[str, str]
    ptxas: str


def flags() -> list[str]:
    """Those of the build."""
    found = re.search(r"^CUDA_FLAGS = \[(.*)\]$", (ROOT / "setup.py").read_text(), re.MULTILINE)
    assert found is not None
    return re.findall(r'"([^"]+)"', found[1])


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Compiled:
    folder = tmp_path_factory.mktemp("cuda_code")
    arch = min(int(line[8:]) for line in listed_archs())
    kernels, said = {}, ""
    for source in sorted((ROOT / "csrc" / "backends").glob("*.cu")):
        command = [str(NVCC), *flags(), f"-gencode=arch=compute_{arch},code=sm_{arch}", "-Xptxas=-v", "--keep"]
        command += [f"--keep-dir={folder}", "-c", str(source), "-o", str(folder / f"{source.stem}.o")]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        said += done.stdout + done.stderr
        ptx = (folder / f"{source.stem}.ptx").read_text()
        for body in ptx.split(".visible .entry ")[1:]:
            name = re.match(r"\S*?(?:finding|mapping|stepping|single)_kernelINS_6common\d+(\w+?)E", body)
            assert name is not None, body[:200]
            kernels[name[1]] = body
    return Compiled(kernels, said)


def listed_archs() -> list[str]:
    done = subprocess.run([str(NVCC), "--list-gpu-arch"], capture_output=True, text=True, check=True)
    return done.stdout.split()


def instructions(body: str) -> Counter[str]:
    return Counter(re.findall(r"^\s+(?:@!?%p\d+ )?([a-z][a-z0-9_]*(?:\.[a-z0-9_:]+)+)", body, re.MULTILINE))


def test_every_operation_is_one_kernel(compiled: Compiled) -> None:
    assert set(compiled.kernels) == {*WIDE, *SINGLE}


def test_arithmetic_is_exact(compiled: Compiled) -> None:
    for name, body in compiled.kernels.items():
        used = instructions(body)
        assert sum(used.values()) > (10 if name in SINGLE else 50), "the reader sees instructions"
        inexact = [op for op in used if re.search(r"approx|ftz|\.full|^ex2|^lg2|^rsqrt|^rcp(?!\.rn)|^sin|^cos", op)]
        assert not inexact, f"{name} uses {inexact}"
        rounded = [op for op in used if re.match(r"(add|sub|mul|div|sqrt|fma)\..*f(32|64)$", op)]
        assert all(".rn." in op for op in rounded), f"{name} uses {rounded}"


def test_nothing_is_fused(compiled: Compiled) -> None:
    for name, body in compiled.kernels.items():
        fused = {op for op in instructions(body) if op.startswith("fma")}
        assert not fused, f"{name} uses {fused}"


def test_sums_of_squares_add_floats_where_they_may(compiled: Compiled) -> None:
    """Consumer GPUs have one unit for doubles beside 32 or 64 for floats; doubles in numbers are for groups that leave
    float32's range."""
    norm = instructions(compiled.kernels["Norm"])
    assert norm["mul.rn.f32"] >= 8
    assert norm["add.rn.f32"] >= 7


def test_steps_divide_and_take_roots_as_the_cpu_does(compiled: Compiled) -> None:
    """A correctly rounded instruction each, for every one of a thread's eight elements, with and without amsgrad."""
    used = instructions(compiled.kernels["AdamStep"])
    assert used["sqrt.rn.f32"] == 16
    assert used["div.rn.f32"] == 32
    assert used["sqrt.rn.f64"] == 1, "of the bias correction, which one thread of a block computes"
    assert used["cvt.rn.f16.f32"] > 0, "float16 weights are rounded in the pass"
    assert not instructions(compiled.kernels["SgdStep"])["div.rn.f32"]


@pytest.mark.parametrize("name", list(WIDE))
def test_loads_and_stores_are_16_bytes_wide(compiled: Compiled, name: str) -> None:
    used = instructions(compiled.kernels[name])
    wide = [sum(n for op, n in used.items() if re.match(rf"{kind}\.global\.v4\.[fub]32", op)) for kind in ("ld", "st")]
    loads, stores = WIDE[name]
    assert (wide[0] > 0) >= loads
    assert (wide[1] > 0) >= stores
    generic = [op for op in used if re.match(r"(ld|st)\.(v\d\.)?[fubs]\d+$", op)]
    assert not generic, f"addresses that the compiler does not know to be global: {generic}"


def test_nothing_is_spilled_and_no_atomic_adds_numbers(compiled: Compiled) -> None:
    spills = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", compiled.ptxas)
    assert len(spills) == len(compiled.kernels)
    assert {number for spill in spills for number in spill} == {"0"}
    reports = r"Compiling entry function '\S*?_kernelINS_6common\d+(\w+?)E.*?Used (\d+) registers"
    used_by = re.findall(reports, compiled.ptxas, re.DOTALL)
    assert {name for name, _ in used_by} == set(compiled.kernels)
    crowded = {name: number for name, number in used_by if int(number) > REGISTERS.get(name, 80)}
    assert not crowded, "fewer blocks fit on a multiprocessor than were reckoned with"
    for name, body in compiled.kernels.items():
        used = instructions(body)
        assert not [op for op in used if re.match(r"(ld|st)\.local", op)], name
        atomics = {op for op in used if op.startswith(("atom", "red"))}
        assert atomics <= {"atom.global.add.u32", "atom.add.u32"}, f"{name} uses {atomics}"


def test_flags_of_the_build_are_those_that_keep_the_bits() -> None:
    assert "-fmad=false" in flags()
    assert not [
        flag for flag in flags() if "fast" in flag or "ftz=true" in flag or ("=false" in flag[6:] and "prec" in flag)
    ]
