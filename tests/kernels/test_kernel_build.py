"""The build of the compiled module, with and without a compiler, and what `python -m fp16opt` says about it."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import emulated
import interpreters
import pytest
import torch

import fp16opt
from fp16opt import __main__ as report_module
from fp16opt import kernels
from fp16opt.kernels import installed, native

ROOT = Path(__file__).resolve().parents[2]


def major_version(package: str) -> int:
    """0 where there is none."""
    try:
        return int(importlib.metadata.version(package).partition(".")[0])
    except importlib.metadata.PackageNotFoundError:
        return 0


needs_build_tools = pytest.mark.skipif(
    not (ROOT / "setup.py").exists()
    or major_version("setuptools") < 77
    or 0 in map(major_version, ("pybind11", "ninja")),
    reason="needs setuptools, pybind11 and ninja as pyproject.toml names them",
)


def build(folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run setup.py's build of the module into ``folder``."""
    command = [sys.executable, "setup.py", "build_ext", "--build-lib", str(folder / "lib")]
    return subprocess.run(
        [*command, "--build-temp", str(folder / "temp")],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def outcome(folder: Path) -> str:
    return str(json.loads((folder / "lib" / "fp16opt" / "_build.json").read_text())["_cpu"])


def test_the_installed_package_is_small() -> None:
    """3.5 MB of files as a wheel holds them: 1.4 MB are text, and a level of SIMD more must not go unseen."""
    folder = Path(fp16opt.__file__).parent
    files = [
        path for path in folder.rglob("*") if path.is_file() and path.suffix in (".py", ".pyi", ".so", ".cuh", ".csv")
    ]
    assert sum(path.stat().st_size for path in files) < 3_500_000


@pytest.mark.all
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


@pytest.mark.all
@needs_build_tools
def test_the_module_can_be_demanded_or_skipped(tmp_path: Path) -> None:
    demanded = build(tmp_path / "demanded", CXX="/bin/false", FP16OPT_CPU="1")
    assert demanded.returncode != 0
    assert "FP16OPT_CPU=1 is set, but the compiler '/bin/false' failed" in demanded.stderr
    assert build(tmp_path / "skipped", FP16OPT_CPU="0").returncode == 0
    assert outcome(tmp_path / "skipped").startswith("skipped")


# As a compiler does, it leaves a file of the headers that it read.
COMPILER = """#!/bin/sh
echo "$@" >> "$0.log"
while [ $# -gt 0 ]; do
    [ "$1" = -MF ] && depfile=$2
    [ "$1" = -o ] && out=$2
    shift
done
[ -z "$depfile" ] || echo "$out: $HEADER" > "$depfile"
touch "$out"
"""


@pytest.mark.all
@needs_build_tools
def test_the_build_compiles_what_changed_and_nothing_else(tmp_path: Path) -> None:
    """By a compiler that notes what it is asked: each unit is one command, and what is there as it is now stays."""
    compiler, log, header = tmp_path / "c++", tmp_path / "c++.log", tmp_path / "half.h"
    header.touch()
    compiler.write_text(COMPILER)
    compiler.chmod(0o755)

    def compiled(**environment: str) -> list[str]:
        log.unlink(missing_ok=True)
        assert build(tmp_path, CXX=str(compiler), HEADER=str(header), **environment).returncode == 0
        assert outcome(tmp_path) == "built"
        if not log.exists():
            return []
        *units, link = log.read_text().splitlines()
        assert "-shared" in link or "-bundle" in link
        assert all("-ffp-contract=off" in unit and "-ffast-math" not in unit and "-Ofast" not in unit for unit in units)
        return sorted(unit.split(" -c ")[1].split()[0] for unit in units)

    first = compiled()
    assert set(first) >= {str(path) for path in (ROOT / "csrc").rglob("*.cpp")}
    assert compiled() == [], "nothing changed"
    assert compiled(CXXFLAGS="-O1") == first, "other flags"
    next((tmp_path / "temp").rglob("threads.o")).unlink()
    assert [Path(source).name for source in compiled(CXXFLAGS="-O1")] == ["threads.cpp"]
    newer = time.time() + 10
    os.utime(header, (newer, newer))
    assert compiled(CXXFLAGS="-O1") == first, "a header that all include"


@pytest.mark.all
@needs_build_tools
@pytest.mark.parametrize(
    ("target", "levels"),
    [("linux-aarch64", {"neon"}), ("macosx-11.0-arm64", {"neon"}), ("linux-x86_64", {"portable", "avx2", "avx512"})],
)
def test_the_build_takes_the_simd_levels_of_what_it_compiles_for(tmp_path: Path, target: str, levels: set[str]) -> None:
    """As builds that cross-compile name it, whatever machine this is."""
    compiler, log = tmp_path / "c++", tmp_path / "c++.log"
    compiler.write_text(COMPILER)
    compiler.chmod(0o755)
    done = build(
        tmp_path,
        CXX=str(compiler),
        HEADER="",
        _PYTHON_HOST_PLATFORM=target,
        SETUPTOOLS_EXT_SUFFIX=".other.so",
    )
    assert done.returncode == 0
    assert (tmp_path / "lib" / "fp16opt" / "_cpu.other.so").is_file()
    text = log.read_text()
    assert set(re.findall(r"-DFP16OPT_LEVEL=(\w+)", text)) == levels
    assert ("-DFP16OPT_X86=1" in text) == (len(levels) == 3)
    assert ("-mavx2" in text) == (len(levels) == 3)


def test_on_windows_the_module_is_left_out_and_can_not_be_demanded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiler there would not help, so that nothing asks for one."""
    setuptools = pytest.importorskip("setuptools")
    monkeypatch.setattr(setuptools, "setup", lambda **_: None)
    build_of_ours = runpy.run_path(str(ROOT / "setup.py"))
    monkeypatch.delenv("FP16OPT_CPU", raising=False)
    assert build_of_ours["left_out"]() == ""
    monkeypatch.setattr(sys, "platform", "win32")
    assert "not built on Windows" in build_of_ours["left_out"]()
    monkeypatch.setenv("FP16OPT_CPU", "1")
    assert build_of_ours["left_out"]() == ""
    with pytest.raises(build_of_ours["BuildFailed"], match="the compiled module is not built on Windows"):
        build_of_ours["compiler"]()


@pytest.mark.all
@needs_build_tools
@pytest.mark.parametrize("missing", [("pybind11",), ("ninja",), ("pybind11", "ninja")])
def test_the_build_says_which_packages_it_lacks(tmp_path: Path, missing: tuple[str, ...]) -> None:
    """As in an install without build isolation. Here a finder of modules hides them."""
    (tmp_path / "sitecustomize.py").write_text(
        "import importlib.util\nfind = importlib.util.find_spec\n"
        f"importlib.util.find_spec = lambda name, package=None: None if name in {missing!r} else find(name, package)\n"
    )
    done = build(tmp_path, PYTHONPATH=str(tmp_path), FP16OPT_CPU="1")
    assert done.returncode != 0
    assert (
        f"FP16OPT_CPU=1 is set, but the build's Python packages are not all installed: pip install {' '.join(missing)}"
        in (done.stderr)
    )


@pytest.mark.all
@needs_build_tools
def test_the_build_leaves_the_source_of_the_cuda_kernels(tmp_path: Path) -> None:
    """In one text, with every header of ours in it once, and whatever becomes of the CPU module."""
    assert build(tmp_path, CXX="/bin/false").returncode == 0
    text = (tmp_path / "lib" / "fp16opt" / "_cuda.cuh").read_text()
    assert text == emulated.flattened()
    assert '#include "' not in text
    names = re.findall(r'^#line 1 "(.+)"$', text, re.MULTILINE)
    assert len(names) == len(set(names))
    assert {"launch/cuda.cuh", "launch/cuda_steps.cuh", "functors/adam.h", "core/half.h"} <= set(names)
    system = set(re.findall(r"#include <(.+)>", text))
    assert system == {"cstddef", "cstdint", "cstdlib", "cstring", "vector"}, "for a host compiler; NVRTC has none"


def test_only_the_bindings_know_python_and_nothing_knows_torch() -> None:
    sources = [path for path in (ROOT / "csrc").rglob("*") if path.suffix in (".h", ".cpp", ".cu", ".cuh")]
    assert sources
    for path in sources:
        includes = re.findall(r'#include [<"](.*)[>"]', path.read_text())
        assert not [name for name in includes if "torch" in name or "ATen" in name or "c10" in name]
        if not path.name.startswith("bindings_"):
            assert not [name for name in includes if "Python" in name or "pybind11" in name]
        if path.parent.name in ("core", "functors"):
            allowed = ("cstdint", "cstring", *(other.name for other in sources))
            assert all(name.rsplit("/", 1)[-1] in allowed for name in includes)


@pytest.mark.all
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
    done = interpreters.python("-m", "fp16opt", cwd=tmp_path, env=environment)
    facts = dict(re.split(r"\s{2,}", line, maxsplit=1) for line in done.stdout.splitlines())
    assert facts["fp16opt"] == fp16opt.__version__
    assert facts["torch"].startswith(torch.__version__)
    assert facts["module _cpu"] == native.status()
    assert any(name.startswith("CUDA ") for name in facts)
    assert facts["threads"].split()[0].isdigit()
    if native.available():
        assert facts["device cpu"] == "compiled kernels (_cpu)"
        assert facts["SIMD level"].split()[0] in native.module.simd_levels()


def test_report_says_why_the_module_is_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(native, "module", None)
    monkeypatch.setattr(native, "_cpu_missing", "could not be built: no C++ compiler was found")
    text = report_module.report()
    assert "missing: could not be built: no C++ compiler was found" in text
    assert "torch operations (reference.py)" in text
    assert kernels.backend("cpu") == "reference"


@pytest.mark.parametrize("is_tree", [False, True])
@pytest.mark.parametrize(
    ("content", "reason", "in_a_tree"),
    [
        ('{"_cpu": "could not be built: x"}', "could not be built: x", "could not be built: x"),
        ('{"_cpu": "built"}', "its file is missing: reinstall fp16opt", "in which nothing was built for this Python"),
        ("{", "this install was made without it", "is a source tree in which nothing was built"),
        (None, "this install was made without it", "is a source tree in which nothing was built"),
    ],
)
def test_the_build_leaves_its_reason(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    is_tree: bool,
    content: str | None,
    reason: str,
    in_a_tree: str,
) -> None:
    """A source tree tells where kernels are first asked for; what an install has said is not said again."""
    (tmp_path / "fp16opt").mkdir()
    if is_tree:
        (tmp_path / "setup.py").touch()
        (tmp_path / "csrc").mkdir()
    if content is not None:
        (tmp_path / "fp16opt" / "_build.json").write_text(content)
    monkeypatch.setattr(installed, "PACKAGE", tmp_path / "fp16opt")
    monkeypatch.setattr(installed.importlib.metadata, "distributions", lambda **_: [])

    def refuse(name: str) -> ModuleType:
        raise ModuleNotFoundError(name)

    monkeypatch.setattr(native.importlib, "import_module", refuse)
    module, why, is_untold = native._load("_cpu")
    assert module is None
    assert (in_a_tree if is_tree else reason) in why
    says_more = is_tree and "could not" not in why
    assert is_untold == says_more
    assert ("python setup.py build_ext --inplace" in why) == says_more
    monkeypatch.setattr(native, "module", None)
    monkeypatch.setattr(native, "_cpu_missing", why)
    monkeypatch.setattr(native, "_is_untold", is_untold)
    monkeypatch.setattr(native, "_told", [])
    for _ in range(3):
        assert kernels.backend("cpu") == "reference"
    said = [record.getMessage() for record in caplog.records]
    assert said == ([f"slower torch operations serve in place of fp16opt's kernels: {why}"] if says_more else [])
    caplog.clear()
    monkeypatch.setattr(native, "_told", [])
    assert why in report_module.report()
    assert not caplog.records, "the report has given the reason"
