"""Builds fp16opt: its compiled CPU module `_cpu`, and the one text that CUDA kernels are compiled from where they run.

The module needs a C++17 compiler and Python's headers; neither torch nor its headers. It is optional: on a machine
without a working compiler the package is installed all the same, and plain torch operations serve. The text needs
nothing.

Environment:
    CXX, CXXFLAGS, LDFLAGS: the compiler and more flags for it.
    FP16OPT_CPU: 0 skips the module, 1 makes a failure to build it an error.
"""

import hashlib
import json
import os
import platform
import runpy
import shlex
import shutil
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
CSRC = ROOT / "csrc"
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
MOST_JOBS = 8  # of compiling: each takes up to half a gigabyte of memory


def made_of_sources() -> dict[str, Any]:
    """The functions of csrc/flatten.py."""
    return runpy.run_path(str(CSRC / "flatten.py"))


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
    named = os.environ.get("CXX")
    for candidate in [named] if named else [sysconfig.get_config_var("CXX"), "c++", "g++", "clang++"]:
        command = shlex.split(candidate or "")
        if command and shutil.which(command[0]):
            return command
    not_found = "no C++ compiler was found (c++, g++, clang++)"
    raise BuildFailed(f"CXX is set to {named!r}, which is not a program" if named else not_found)


def units() -> list[tuple[Path, list[str]]]:
    """The translation units, each with flags of its own. Those that take longest first, so that no core waits."""
    leveled = [CSRC / "backends" / "cpu_steps.cpp", CSRC / "backends" / "cpu.cpp"]
    others = sorted(set((CSRC / "backends").glob("*.cpp")).difference(leveled))
    return [
        (CSRC / "bindings_cpu.cpp", []),
        *[(s, [f"-DFP16OPT_LEVEL={name}", *flags]) for s in leveled for name, flags in reversed(levels().items())],
        *[(source, []) for source in others],
    ]


def run(command: list[str]) -> None:
    """Run the compiler. Raises BuildFailed, with its output printed, where it fails."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        print(done.stdout + done.stderr, file=sys.stderr)
        raise BuildFailed(f"the compiler {shlex.join(compiler())!r} failed (its output is above)")


def build_module(output: Path, folder: Path) -> None:
    """Compile into ``folder`` what is not there as it is now, and link ``output``."""
    folder.mkdir(parents=True, exist_ok=True)
    made_of_sources()["write_formulas"](folder)
    machine = [f"-DFP16OPT_BASELINE={next(iter(levels()))}", f"-I{sysconfig.get_paths()['include']}"]
    machine += [f"-I{folder}", f"-I{CSRC}"]  # formulas.h, and what it names
    machine += ["-DFP16OPT_X86=1"] if levels() is X86_LEVELS else []
    common = [*compiler(), *FLAGS, *shlex.split(os.environ.get("CXXFLAGS", "")), *machine]
    headers = max(path.stat().st_mtime for path in [*CSRC.rglob("*.h"), folder / "formulas.h"])
    objects, commands = [], []
    for source, flags in units():
        command = [*common, *flags, "-c", str(source), "-o"]
        objects.append(folder / f"{source.stem}-{hashlib.sha256(repr(command).encode()).hexdigest()[:8]}.o")
        written = max(headers, source.stat().st_mtime)
        if not objects[-1].exists() or objects[-1].stat().st_mtime <= written:
            commands.append([*command, str(objects[-1])])
    output.parent.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(min(MOST_JOBS, os.cpu_count() or 1)) as pool:
        list(pool.map(run, commands))
    shared = ["-bundle", "-undefined", "dynamic_lookup"] if sys.platform == "darwin" else ["-shared"]
    more = shlex.split(os.environ.get("LDFLAGS", ""))
    run([*compiler(), *shared, "-pthread", *map(str, objects), "-o", str(output), *more])


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
        wish = os.environ.get("FP16OPT_CPU", "")
        if wish == "0":
            self.outcome = "skipped, because FP16OPT_CPU=0 was set when fp16opt was installed"
            return
        try:
            build_module(Path(self.get_ext_fullpath(ext.name)).resolve(), Path(self.build_temp).resolve() / "_cpu")
            self.outcome = "built"
        except BuildFailed as failure:
            if wish == "1":
                raise SystemExit(f"fp16opt: FP16OPT_CPU=1 is set, but {failure}.") from None
            self.outcome = f"could not be built when fp16opt was installed: {failure}"
            print(WARNING.format(failure), file=sys.stderr)


# optional: setuptools must not miss the file when the build above was given up.
setup(
    ext_modules=[Extension("fp16opt._cpu", sources=[], optional=True)],
    cmdclass={"build_ext": BuildModule},
)
