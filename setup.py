"""Builds fp16opt: its compiled CPU module `_cpu`, and the one text that CUDA kernels are compiled from where they run.

The module needs Python's headers, and ninja, which pyproject.toml names; neither torch nor its headers. It is
optional: on a machine without a working compiler the package is installed all the same, and plain torch operations
serve. The text needs nothing.

Environment:
    CXX, CXXFLAGS, LDFLAGS: the compiler and more flags for it.
    FP16OPT_CPU: 0 skips the module, 1 makes a failure to build it an error.
"""

import json
import os
import platform
import runpy
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import NamedTuple

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
BUILD_INFO = "_build.json"
CUDA_SOURCE = "_cuda.cuh"
# No contraction and no fast-math: every SIMD level, and CUDA, must give the same bits.
FLAGS = ["-std=c++17", "-O2", "-g0", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off", "-fno-math-errno"]
X86_LEVELS = {
    # Of -O3 what plain loops over a block need; unrolled as well they take twice as long to compile, and run no faster.
    "portable": ["-ftree-vectorize", "-fvect-cost-model=dynamic", "-funswitch-loops"],
    # Blocks stay in registers only where loops over their vectors are unrolled.
    "avx2": ["-O3", "-mavx2", "-mfma", "-mf16c"],
    # gcc 12 warns about its own AVX-512 headers without the last flag.
    "avx512": [
        *["-O3", "-mavx2", "-mfma", "-mf16c", "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl"],
        "-Wno-maybe-uninitialized",
    ],
}


class BuildFailed(Exception):
    """A compiled module can't be built here; the message says why."""


def levels() -> dict[str, list[str]]:
    """The SIMD levels for this machine's kind of processor, each with its flags. The first is the baseline."""
    machine = platform.machine().lower()
    if machine in ("x86_64", "amd64"):
        return X86_LEVELS
    return {"neon": ["-O3"]} if machine in ("aarch64", "arm64") else {"portable": ["-O3"]}


def compiler() -> list[str]:
    """The C++ compiler's command."""
    if sys.platform == "win32":
        raise BuildFailed("the compiled module is not built on Windows")
    for candidate in (os.environ.get("CXX"), sysconfig.get_config_var("CXX"), "c++", "g++", "clang++"):
        command = shlex.split(candidate or "")
        if command and shutil.which(command[0]):
            return command
        if candidate and candidate == os.environ.get("CXX"):
            raise BuildFailed(f"CXX is set to {candidate!r}, which is not a program")
    raise BuildFailed("no C++ compiler was found (c++, g++, clang++)")


def ninja() -> str:
    """The path of the ninja program: the build requirement's own, else one on PATH."""
    try:
        from ninja import BIN_DIR

        found = shutil.which("ninja", path=BIN_DIR)
    except ImportError:
        found = None
    found = found or shutil.which("ninja")
    if found is None:
        raise BuildFailed("ninja was not found")
    return found


class Unit(NamedTuple):
    """A translation unit, and more flags for it."""

    object: str
    source: str
    flags: list[str]


def cpu_units() -> list[Unit]:
    """The translation units of `_cpu`."""
    found = levels()
    baseline = next(iter(found))
    dispatch = [f"-DFP16OPT_BASELINE={baseline}"] + (["-DFP16OPT_X86=1"] if found is X86_LEVELS else [])
    # Those that take longest first, so that no core waits for the last one.
    return [
        *[
            Unit(f"{source}_{name}.o", f"backends/{source}.cpp", [f"-DFP16OPT_LEVEL={name}", *flags])
            for source in ("cpu_steps", "cpu")
            for name, flags in reversed(found.items())
        ],
        Unit("bindings_cpu.o", "bindings_cpu.cpp", [f"-I{shlex.quote(sysconfig.get_paths()['include'])}"]),
        Unit("step_operations.o", "backends/step_operations.cpp", []),
        Unit("cpu_operations.o", "backends/cpu_operations.cpp", []),
        Unit("threads.o", "backends/threads.cpp", []),
        Unit("split_operations.o", "backends/split_operations.cpp", []),
        Unit("measure_operations.o", "backends/measure_operations.cpp", []),
        Unit("cpu_dispatch.o", "backends/cpu_dispatch.cpp", dispatch),
        Unit("cpu_decisions.o", "backends/cpu_decisions.cpp", []),
    ]


def ninja_file(output: Path) -> str:
    """The text of a build.ninja that makes the module."""

    def path(name: Path) -> str:
        return str(name).replace("$", "$$").replace(" ", "$ ").replace(":", "$:")

    units, flags = cpu_units(), " ".join([*FLAGS, os.environ.get("CXXFLAGS", "")])
    shared = "-bundle -undefined dynamic_lookup" if sys.platform == "darwin" else "-shared -Wl,--no-undefined-version"
    link = f"{shlex.join(compiler())} {shared} -pthread $in -o $out {os.environ.get('LDFLAGS', '')}"
    lines = [
        "rule compile",
        f"  command = {shlex.join(compiler())} {flags} $more -MD -MF $out.d -c $in -o $out".replace("$$", "$"),
        "  depfile = $out.d",
        "  deps = gcc",
        "rule link",
        f"  command = {link}",
    ]
    for unit in units:
        lines += [f"build {unit.object}: compile {path(ROOT / 'csrc' / unit.source)}"]
        lines += [f"  more = {' '.join(unit.flags)}"]
    lines.append(f"build {path(output)}: link {' '.join(unit.object for unit in units)}")
    return "\n".join(lines) + "\n"


WARNING = """
WARNING: fp16opt is installed without its compiled CPU module: {}.
It works all the same, slower, in plain torch operations. To get the module, install a C++17
compiler and reinstall fp16opt. `python -m fp16opt` shows what is in use.
"""


class BuildModule(build_ext):
    """Compiles with ninja, and lets the installation go on without the module where that fails."""

    def run(self) -> None:
        self.outcomes: dict[str, str] = {}
        super().run()
        self._write_data(Path(self.build_lib) / "fp16opt")
        if self.inplace or getattr(self, "editable_mode", False):
            self._write_data(ROOT / "fp16opt")
            if self.outcomes.get("_cpu") != "built":
                (ROOT / self._module_file()).unlink(missing_ok=True)

    def _module_file(self) -> str:
        """The module's file, relative to the folder that holds the package."""
        return str(self.get_ext_filename("fp16opt._cpu"))

    def _write_data(self, folder: Path) -> None:
        """Leave the outcome where `python -m fp16opt` reads it, and the text of the CUDA kernels."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / BUILD_INFO).write_text(json.dumps(self.outcomes) + "\n", encoding="utf-8")
        text = runpy.run_path(str(ROOT / "csrc" / "flatten.py"))["flatten"]()
        (folder / CUDA_SOURCE).write_text(text, encoding="utf-8")

    def build_extension(self, ext: Extension) -> None:
        wish = os.environ.get("FP16OPT_CPU", "")
        # A module that an earlier build left there must not be taken for this one's.
        (Path(self.build_lib) / self._module_file()).unlink(missing_ok=True)
        if wish == "0":
            self.outcomes["_cpu"] = "skipped, because FP16OPT_CPU=0 was set when fp16opt was installed"
            return
        try:
            self._compile(Path(self.get_ext_fullpath(ext.name)).resolve())
            self.outcomes["_cpu"] = "built"
        except BuildFailed as failure:
            if wish == "1":
                raise SystemExit(f"fp16opt: FP16OPT_CPU=1 is set, but {failure}.") from None
            self.outcomes["_cpu"] = f"could not be built when fp16opt was installed: {failure}"
            print(WARNING.format(failure), file=sys.stderr)

    def _compile(self, output: Path) -> None:
        folder = Path(self.build_temp).resolve() / "_cpu"
        folder.mkdir(parents=True, exist_ok=True)
        output.parent.mkdir(parents=True, exist_ok=True)
        (folder / "build.ninja").write_text(ninja_file(output), encoding="utf-8")
        done = subprocess.run([ninja(), "-C", str(folder)], capture_output=True, text=True, check=False)
        if done.returncode != 0:
            print(done.stdout + done.stderr, file=sys.stderr)
            raise BuildFailed(f"the compiler {shlex.join(compiler())!r} failed (its output is above)")


# optional: setuptools must not miss the file when the build above was given up.
setup(
    ext_modules=[Extension("fp16opt._cpu", sources=[], optional=True)],
    cmdclass={"build_ext": BuildModule},
)
