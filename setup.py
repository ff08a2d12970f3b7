"""Builds fp16opt: its compiled CPU module `_cpu`, and the one text that CUDA kernels are compiled from where they run.

The module needs a C++17 compiler, Python's headers, pybind11's, and ninja, for which a `build.ninja` is written that
compiles only what changed; neither torch nor its headers. It is optional: on a machine without a working compiler the
package is installed all the same, and plain torch operations serve. The text needs nothing.

On Windows the module is not built. A wheel that is made without it, there or by FP16OPT_CPU=0, serves every Python.

Environment:
    CXX, CXXFLAGS, LDFLAGS: the compiler and more flags for it.
    FP16OPT_CPU: 0 skips the module, 1 makes a failure to build it an error.
    _PYTHON_HOST_PLATFORM: "linux-aarch64", say: what CXX compiles for, where that is not this machine.
"""

import importlib
import importlib.util
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
from typing import Any

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
CSRC = ROOT / "csrc"
# No contraction and no fast-math: every SIMD level, and CUDA, must give the same bits.
# Without NDEBUG pybind11 asks, at every count of a reference, whether this thread holds Python's lock.
FLAGS = ["-std=c++17", "-O2", "-g0", "-DNDEBUG", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off", "-fno-math-errno"]
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
BINDINGS = ["-O1"]  # they wait for the kernels, and pybind11's templates compile in two thirds of the time
SHARED = ["-bundle", "-undefined", "dynamic_lookup"] if sys.platform == "darwin" else ["-shared", "-s"]
MOST_JOBS = 8  # of compiling: each takes up to half a gigabyte of memory


def made_of_sources() -> dict[str, Any]:
    """The functions of csrc/flatten.py."""
    return runpy.run_path(str(CSRC / "flatten.py"))


class BuildFailed(Exception):
    """A compiled module can't be built here; the message says why."""


def levels() -> dict[str, list[str]]:
    """The SIMD levels for the processor that is compiled for, each with its flags. The first is the baseline."""
    machine = os.environ.get("_PYTHON_HOST_PLATFORM", platform.machine()).rpartition("-")[2].lower()
    if machine in ("x86_64", "amd64"):
        return X86_LEVELS
    return {"neon": ["-O3"]} if machine in ("aarch64", "arm64") else {"portable": ["-O3"]}


def left_out() -> str:
    """Why the module is not even tried, or ""."""
    wish = os.environ.get("FP16OPT_CPU", "")
    if sys.platform == "win32" and wish != "1":
        return "left out, because it is not built on Windows: torch operations serve"
    return "skipped, because FP16OPT_CPU=0 was set when fp16opt was installed" if wish == "0" else ""


def compiler() -> list[str]:
    """The C++ compiler's command."""
    if sys.platform == "win32":
        raise BuildFailed("the compiled module is not built on Windows")
    named = os.environ.get("CXX")
    for candidate in [named] if named else [sysconfig.get_config_var("CXX"), "c++", "g++", "clang++"]:
        command = shlex.split(candidate or "")
        if command and shutil.which(command[0]):
            return command
    not_found = "no C++ compiler was found (c++, g++, clang++)"
    raise BuildFailed(f"CXX is set to {named!r}, which is not a program" if named else not_found)


def build_tools() -> str:
    """The folder of pybind11's headers. Raises BuildFailed where it, or ninja, is not installed."""
    missing = [name for name in ("pybind11", "ninja") if importlib.util.find_spec(name) is None]
    if missing:
        raise BuildFailed(f"the build's Python packages are not all installed: pip install {' '.join(missing)}")
    return str(importlib.import_module("pybind11").get_include())


def units() -> list[tuple[Path, list[str]]]:
    """The translation units, each with flags of its own. Those that take longest first, so that no core waits."""
    leveled = [CSRC / "backends" / "cpu_steps.cpp", CSRC / "backends" / "cpu.cpp"]
    others = sorted(set((CSRC / "backends").glob("*.cpp")).difference(leveled))
    return [
        *[(source, BINDINGS) for source in sorted(CSRC.glob("bindings_*.cpp"))],
        *[(s, [f"-DFP16OPT_LEVEL={name}", *flags]) for s in leveled for name, flags in reversed(levels().items())],
        *[(source, []) for source in others],
    ]


def escaped(path: Path) -> str:
    """A path as ninja reads it."""
    return "".join("$" + letter if letter in "$ :" else letter for letter in str(path))


def command(arguments: list[str]) -> str:
    """A part of a command line as ninja reads it."""
    return shlex.join(arguments).replace("$", "$$")


def rules(output: Path, folder: Path, pybind11: str) -> str:
    """The text of build.ninja, which compiles into ``folder`` and links ``output``."""
    headers = [sysconfig.get_paths()["include"], pybind11, str(folder), str(CSRC)]  # formulas.h, and what it names
    machine = [f"-DFP16OPT_BASELINE={next(iter(levels()))}", *[f"-I{path}" for path in headers]]
    machine += ["-DFP16OPT_X86=1"] if levels() is X86_LEVELS else []
    common = [*compiler(), *FLAGS, *shlex.split(os.environ.get("CXXFLAGS", "")), *machine]
    more = shlex.split(os.environ.get("LDFLAGS", ""))
    lines = [
        "ninja_required_version = 1.5",
        "rule compile",
        f"  command = {command(common)} $flags -MMD -MF $out.d -c $in -o $out",
        "  depfile = $out.d",
        "  deps = gcc",
        "rule link",
        f"  command = {command([*compiler(), *SHARED, '-pthread'])} $in -o $out {command(more)}",
    ]
    objects = []
    for source, flags in units():
        level = [flag.partition("=")[2] for flag in flags if flag.startswith("-DFP16OPT_LEVEL=")]
        objects.append("-".join([source.stem, *level]) + ".o")
        lines += [f"build {objects[-1]}: compile {escaped(source)}", f"  flags = {command(flags)}"]
    lines.append(f"build {escaped(output)}: link {' '.join(objects)}")
    return "\n".join([*lines, ""])


def build_module(output: Path, folder: Path) -> None:
    """Compile into ``folder`` what is not there as it is now, and link ``output``."""
    text = rules(output, folder, build_tools())
    folder.mkdir(parents=True, exist_ok=True)
    output.parent.mkdir(parents=True, exist_ok=True)
    made_of_sources()["write_formulas"](folder)
    (folder / "build.ninja").write_text(text, encoding="utf-8")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    ninja = [sys.executable, "-m", "ninja", "-C", str(folder), "-j", str(min(MOST_JOBS, cores))]
    done = subprocess.run(ninja, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        print(done.stdout + done.stderr, file=sys.stderr)
        raise BuildFailed(f"the compiler {shlex.join(compiler())!r} failed (its output is above)")


WARNING = """
WARNING: fp16opt is installed without its compiled CPU module: {}.
It works all the same, slower, in plain torch operations. To get the module, install a C++17
compiler and reinstall fp16opt. `python -m fp16opt` shows what is in use.
"""


class BuildModule(build_ext):
    """Compiles the module, and lets the installation go on without it where that fails."""

    def run(self) -> None:
        """Build, and leave the outcome where `python -m fp16opt` reads it, and the text of the CUDA kernels."""
        super().run()
        text = made_of_sources()["flatten"]()
        in_place = self.inplace or getattr(self, "editable_mode", False)
        for base in [Path(self.build_lib), ROOT] if in_place else [Path(self.build_lib)]:
            folder = base / "fp16opt"
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "_build.json").write_text(json.dumps({"_cpu": self.outcome}) + "\n", encoding="utf-8")
            (folder / "_cuda.cuh").write_text(text, encoding="utf-8")
            if self.outcome != "built":  # what an earlier build left there must not be taken for this one's
                (base / self.get_ext_filename("fp16opt._cpu")).unlink(missing_ok=True)

    def build_extension(self, ext: Extension) -> None:
        """Build the one module. Exits where it was demanded and can't be built."""
        self.outcome = left_out()
        if self.outcome:
            return
        try:
            build_module(Path(self.get_ext_fullpath(ext.name)).resolve(), Path(self.build_temp).resolve() / "_cpu")
            self.outcome = "built"
        except BuildFailed as failure:
            if os.environ.get("FP16OPT_CPU") == "1":
                raise SystemExit(f"fp16opt: FP16OPT_CPU=1 is set, but {failure}.") from None
            self.outcome = f"could not be built when fp16opt was installed: {failure}"
            print(WARNING.format(failure), file=sys.stderr)


class BuildWheel(bdist_wheel):
    """Names the wheel after what is in it."""

    def get_tag(self) -> tuple[str, str, str]:
        """Without the module it serves every Python; but only this system, so that others go on compiling the sdist."""
        python, abi, system = super().get_tag()
        return ("py3", "none", system) if left_out() else (python, abi, system)


# optional: setuptools must not miss the file when the build above was given up.
setup(
    ext_modules=[Extension("fp16opt._cpu", sources=[], optional=True)],
    cmdclass={"bdist_wheel": BuildWheel, "build_ext": BuildModule},
)
