"""The build of the compiled module, with and without a compiler, and what `python -m fp16opt` says about it."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import pytest
import torch

import fp16opt
from fp16opt import __main__ as report_module
from fp16opt import kernels
from fp16opt.kernels import native

ROOT = Path(__file__).resolve().parents[2]


def setuptools_version() -> int:
    """The major version, 0 where there is none."""
    try:
        return int(importlib.metadata.version("setuptools").partition(".")[0])
    except importlib.metadata.PackageNotFoundError:
        return 0


needs_build_tools = pytest.mark.skipif(
    not (ROOT / "setup.py").exists() or setuptools_version() < 77 or find_spec("pybind11") is None,
    reason="needs the setuptools and pybind11 that pyproject.toml names",
)


def build(folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run setup.py's build of the module into ``folder``."""
    command = [sys.executable, "setup.py", "build_ext", "--build-lib", str(folder / "lib")]
    return subprocess.run(
        [*command, "--build-temp", str(folder / "temp")],
        cwd=ROOT,
        env={**os.environ, "FP16OPT_CUDA": "0", **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def outcome(folder: Path) -> str:
    return str(json.loads((folder / "lib" / "fp16opt" / "_build.json").read_text())["_cpu"])


@needs_build_tools
@pytest.mark.parametrize(
    ("compiler", "reason"),
    [("/bin/false", "the compiler '/bin/false' failed"), ("/no/such/compiler", "CXX is set to '/no/such/compiler'")],
)
def test_without_a_compiler_the_build_goes_on_and_says_so_once(tmp_path: Path, compiler: str, reason: str) -> None:
    done = build(tmp_path, CXX=compiler)
    assert done.returncode == 0
    assert done.stderr.count("WARNING: fp16opt is installed without its compiled CPU module") == 1
    assert reason in done.stderr
    assert reason in outcome(tmp_path)
    assert not list(tmp_path.rglob("*.so"))


@needs_build_tools
def test_the_module_can_be_demanded_or_skipped(tmp_path: Path) -> None:
    demanded = build(tmp_path / "demanded", CXX="/bin/false", FP16OPT_CPU="1")
    assert demanded.returncode != 0
    assert "FP16OPT_CPU=1 is set, but" in demanded.stderr
    assert build(tmp_path / "skipped", FP16OPT_CPU="0").returncode == 0
    assert outcome(tmp_path / "skipped").startswith("skipped")


HIDDEN = """
import runpy, shutil, sys
which = shutil.which
shutil.which = lambda name, *args, **kwargs: None if name == "nvcc" else which(name, *args, **kwargs)
runpy.run_path("setup.py", run_name="__main__")
"""


def build_without_nvcc(folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """:func:`build` on a machine that has no nvcc, wherever this one keeps its own."""
    command = [sys.executable, "-c", HIDDEN, "build_ext", "--build-lib", str(folder / "lib")]
    return subprocess.run(
        [*command, "--build-temp", str(folder / "temp")],
        cwd=ROOT,
        env={**os.environ, "CUDA_HOME": "", "CUDA_PATH": "", "FP16OPT_CPU": "0", **environment},
        capture_output=True,
        text=True,
        check=False,
    )


@needs_build_tools
def test_the_cuda_module_can_be_demanded(tmp_path: Path) -> None:
    done = build_without_nvcc(tmp_path, FP16OPT_CUDA="1")
    assert done.returncode != 0
    assert "FP16OPT_CUDA=1 is set, but nvcc, CUDA's compiler, was not found (on PATH, or in CUDA_HOME)" in done.stderr
    assert not list(tmp_path.rglob("*.so"))


@needs_build_tools
def test_without_nvcc_the_cuda_module_is_silently_left_out(tmp_path: Path) -> None:
    done = build_without_nvcc(tmp_path, FP16OPT_CUDA="")
    assert done.returncode == 0, done.stderr
    assert "CUDA" not in done.stderr, "a machine without CUDA is nothing to warn of"
    noted = json.loads((tmp_path / "lib" / "fp16opt" / "_build.json").read_text())
    assert noted["_cuda"].startswith("could not be built when fp16opt was installed: nvcc, CUDA's compiler, was not")


@needs_build_tools
def test_architectures_must_be_numbers(tmp_path: Path) -> None:
    done = build(tmp_path, FP16OPT_CPU="0", FP16OPT_CUDA="1", FP16OPT_CUDA_ARCHS="ampere", **pretended_nvcc(tmp_path))
    assert done.returncode != 0
    assert "FP16OPT_CUDA=1 is set, but FP16OPT_CUDA_ARCHS is 'ampere'; give numbers, as in '75 80 90'" in done.stderr


# What `nvcc --list-gpu-arch` of these releases prints, as numbers.
LISTED = {
    "12.0": "50 52 53 60 61 62 70 72 75 80 86 87 89 90",
    "12.4": "50 52 53 60 61 62 70 72 75 80 86 87 89 90",
    "12.8": "50 52 53 60 61 62 70 72 75 80 86 87 89 90 100 101 120",
    "12.9": "50 52 53 60 61 62 70 72 75 80 86 87 89 90 100 101 103 120 121",
    "13.0": "75 80 86 87 88 89 90 100 103 110 120 121",
}


def pretended_nvcc(folder: Path, listed: str = LISTED["12.9"], code: int = 0) -> dict[str, str]:
    """The environment of a machine whose nvcc knows these architectures, and compiles nothing."""
    program = folder / "cuda" / "bin" / "nvcc"
    program.parent.mkdir(parents=True)
    names = " ".join(f"compute_{number}" for number in listed.split())
    program.write_text(f"#!/bin/sh\n[ \"$1\" = --list-gpu-arch ] || exit 1\nprintf '%s\\n' {names}\nexit {code}\n")
    program.chmod(0o755)
    return {"CUDA_HOME": str(folder / "cuda")}


def setup_says(expression: str, **environment: str) -> str:
    """What an expression over setup.py's names gives."""
    code = f"import setuptools; setuptools.setup = lambda **k: None; import setup; print({expression})"
    clean = {key: value for key, value in os.environ.items() if key not in ("FP16OPT_CUDA_ARCHS", "CUDA_HOME")}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, env={**clean, **environment}, capture_output=True, text=True, check=False)
    assert done.returncode == 0 or "BuildFailed" in done.stderr, done.stderr
    return (done.stdout or done.stderr.splitlines()[-1]).strip()


@needs_build_tools
@pytest.mark.parametrize("release", list(LISTED))
def test_the_build_takes_the_architectures_that_a_release_knows(tmp_path: Path, release: str) -> None:
    environment = pretended_nvcc(tmp_path, LISTED[release])
    known = {int(number) for number in LISTED[release].split()}
    wanted = [arch for arch in (70, 75, 80, 86, 89, 90, 100, 120) if arch in known]
    assert setup_says("setup.cuda_architectures()", **environment) == str(wanted)
    assert (70 in wanted) is release.startswith("12.")
    rule = setup_says("setup.cuda_rules()[1]", **environment)
    codes = re.findall(r"-gencode=arch=compute_(\d+),code=(sm|compute)_(\d+)", rule)
    assert [int(a) for a, kind, b in codes if kind == "sm" and a == b] == wanted
    assert [(int(a), int(b)) for a, kind, b in codes if kind == "compute"] == [(wanted[-1], wanted[-1])], "PTX"
    names = " ".join(f"sm_{arch}" for arch in wanted)
    assert f'FP16OPT_CUDA_NAMES="{names} compute_{wanted[-1]}"' in setup_says(
        "setup.cuda_units()[0].flags", **environment
    )


@needs_build_tools
def test_architectures_that_are_asked_for_are_not_looked_up(tmp_path: Path) -> None:
    environment = pretended_nvcc(tmp_path, "75", code=1)
    for text, wanted in (("70", [70]), ("9.0 sm_80;75", [75, 80, 90]), ("SM_120,7.0", [70, 120])):
        assert setup_says("setup.cuda_architectures()", FP16OPT_CUDA_ARCHS=text, **environment) == str(wanted)


@needs_build_tools
@pytest.mark.parametrize("listed", ["50 52", ""])
def test_an_nvcc_that_knows_none_of_ours_is_refused(tmp_path: Path, listed: str) -> None:
    said = setup_says("setup.cuda_architectures()", **pretended_nvcc(tmp_path, listed))
    assert "lists no GPU that this package knows" in said


@needs_build_tools
def test_an_nvcc_that_fails_is_told_where_the_module_is_demanded(tmp_path: Path) -> None:
    environment = {"FP16OPT_CPU": "0", "FP16OPT_CUDA": "1", **pretended_nvcc(tmp_path)}
    done = build(tmp_path, **environment)
    assert done.returncode != 0
    assert "FP16OPT_CUDA=1 is set, but the compiler" in done.stderr
    assert "nvcc" in done.stderr.rsplit("FP16OPT_CUDA=1", 1)[1], "the message names what failed"


@needs_build_tools
def test_the_cuda_module_is_skipped_or_silently_left_out(tmp_path: Path) -> None:
    assert build(tmp_path / "skipped", FP16OPT_CPU="0").returncode == 0
    noted = json.loads((tmp_path / "skipped" / "lib" / "fp16opt" / "_build.json").read_text())
    assert noted["_cuda"] == "skipped, because FP16OPT_CUDA=0 was set when fp16opt was installed"


@needs_build_tools
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc, CUDA's compiler")
def test_the_nvcc_of_this_machine_lists_what_the_build_reads() -> None:
    listed = subprocess.run(["nvcc", "--list-gpu-arch"], capture_output=True, text=True, check=True).stdout.split()
    found = [int(number) for number in setup_says("setup.cuda_architectures()").strip("[]").split(",")]
    assert {75, 80, 86, 89, 90} <= set(found)
    assert {f"compute_{arch}" for arch in found} <= set(listed)
    assert ("compute_70" in listed) == (70 in found)


@needs_build_tools
def test_flags_never_allow_contraction_or_fast_math() -> None:
    text = (ROOT / "setup.py").read_text()
    assert "-ffp-contract=off" in text
    assert "-ffast-math" not in text
    assert "-Ofast" not in text


def test_only_the_bindings_know_python_and_nothing_knows_torch() -> None:
    sources = [path for path in (ROOT / "csrc").rglob("*") if path.suffix in (".h", ".cpp", ".cu", ".cuh")]
    assert sources
    for path in sources:
        includes = re.findall(r'#include [<"](.*)[>"]', path.read_text())
        assert not [name for name in includes if "torch" in name or "ATen" in name or "c10" in name]
        if path.name not in ("bindings_cpu.cpp", "bindings_cuda.cpp", "seen_lists.h", "dlpack_exchange.h"):
            assert not [name for name in includes if "pybind" in name or "Python" in name]
        if path.parent.name in ("core", "functors"):
            allowed = ("cstdint", "cstring", *(other.name for other in sources))
            assert all(name.rsplit("/", 1)[-1] in allowed for name in includes)


@pytest.mark.parametrize(
    "header", sorted(p.relative_to(ROOT).as_posix() for p in (ROOT / "csrc").glob("[cf][ou][rn]*/*.h"))
)
def test_core_and_functors_compile_alone(header: str, tmp_path: Path) -> None:
    compiler = shutil.which(os.environ.get("CXX", "c++"))
    if compiler is None:
        pytest.skip("there is no C++ compiler")
    source = tmp_path / "alone.cpp"
    source.write_text(f'#include "{ROOT / header}"\nint main() {{ return 0; }}\n')
    subprocess.run([compiler, "-std=c++17", "-Wall", "-Wextra", "-Werror", "-fsyntax-only", str(source)], check=True)


def test_report_of_a_complete_install(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(fp16opt.__file__).parents[1])}
    command = [sys.executable, "-m", "fp16opt"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    facts = dict(re.split(r"\s{2,}", line, maxsplit=1) for line in done.stdout.splitlines())
    assert facts["fp16opt"] == fp16opt.__version__
    assert facts["torch"].startswith(torch.__version__)
    assert "module _cuda" in facts
    assert facts["threads"].split()[0].isdigit()
    if native.available():
        assert facts["device cpu"] == "compiled kernels (_cpu)"
        assert facts["SIMD level"].split()[0] in native._cpu.simd_levels()


def test_report_says_why_the_module_is_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(native, "_cpu", None)
    monkeypatch.setattr(native, "_cpu_missing", "could not be built: no C++ compiler was found")
    text = report_module.report()
    assert "missing: could not be built: no C++ compiler was found" in text
    assert "torch operations (reference.py)" in text
    assert kernels.backend("cpu") == "reference"


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ('{"_cpu": "could not be built: x"}', "could not be built: x"),
        ('{"_cpu": "built"}', "its file is missing"),
        ("{", "this install was made without it"),
        (None, "this install was made without it"),
    ],
)
def test_the_build_leaves_its_reason(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, content: str | None, reason: str
) -> None:
    (tmp_path / "kernels").mkdir()
    if content is not None:
        (tmp_path / "_build.json").write_text(content)
    monkeypatch.setattr(native, "__file__", str(tmp_path / "kernels" / "native.py"))

    def refuse(name: str) -> ModuleType:
        raise ModuleNotFoundError(name)

    monkeypatch.setattr(native.importlib, "import_module", refuse)
    module, why = native._load("_cpu")
    assert module is None
    assert reason in why
