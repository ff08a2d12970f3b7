"""Builds fp16opt and, where there are compilers, its compiled modules: `_cpu`, and with CUDA's nvcc `_cuda`.

The modules need pybind11 and ninja, both named in pyproject.toml, and neither torch nor its headers; `_cuda` needs no
GPU to be built. They are optional: on a machine without a working compiler the package is installed all the same, and
plain torch operations serve.

Environment:
    CXX, CXXFLAGS, LDFLAGS: the compiler and more flags for it.
    CUDA_HOME, NVCC_APPEND_FLAGS: where CUDA is, if nvcc is not on PATH, and more flags for it (nvcc's own variable).
    FP16OPT_CPU, FP16OPT_CUDA: 0 skips the module, 1 makes a failure to build it an error.
    FP16OPT_CUDA_ARCHS: the GPUs to build for, as in "75 80 90"; PTX of the newest is added for those to come.
"""

import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
BUILD_INFO = "_build.json"
# No contraction and no fast-math: every SIMD level, and CUDA, must give the same bits.
FLAGS = ["-std=c++17", "-O3", "-g0", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off", "-fno-math-errno"]
CUDA_FLAGS = ["-std=c++17", "-O3", "-fmad=false", "-Xcompiler=-fPIC,-fvisibility=hidden,-ffp-contract=off"]
CUDA_ARCHS = [70, 75, 80, 86, 89, 90, 100, 120]  # of which a CUDA release knows some: 70 until CUDA 12
CUDA_STEPS = ["cuda_adam", "cuda_sgd", "cuda_lion"]
CUDA_SOURCES = ["cuda_unscale", *CUDA_STEPS, "cuda_norm", "cuda_map", "cuda_split", "cuda_decisions"]
X86_LEVELS = {
    "portable": [],
    "avx2": ["-mavx2", "-mfma", "-mf16c"],
    # gcc 12 warns about its own AVX-512 headers without the last flag.
    "avx512": [
        *["-mavx2", "-mfma", "-mf16c", "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl"],
        "-Wno-maybe-uninitialized",
    ],
}


class BuildFailed(Exception):
    """A compiled module can't be built here; the message says why."""


class NotThere(BuildFailed):
    """The machine has no tools for it, which is nothing to warn of."""


def levels() -> dict[str, list[str]]:
    """The SIMD levels for this machine's kind of processor, each with its flags. The first is the baseline."""
    machine = platform.machine().lower()
    if machine in ("x86_64", "amd64"):
        return X86_LEVELS
    return {"neon": []} if machine in ("aarch64", "arm64") else {"portable": []}


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


def bindings_flags() -> list[str]:
    """What a file that includes pybind11 needs."""
    import pybind11

    return [f"-I{shlex.quote(sysconfig.get_paths()['include'])}", f"-I{shlex.quote(pybind11.get_include())}"]


class Unit(NamedTuple):
    """A translation unit: the rule that compiles it, and more flags."""

    object: str
    rule: str
    source: str
    flags: list[str]


def cpu_units() -> list[Unit]:
    """The translation units of `_cpu`."""
    found = levels()
    baseline = next(iter(found))
    dispatch = [f"-DFP16OPT_BASELINE={baseline}"] + (["-DFP16OPT_X86=1"] if found is X86_LEVELS else [])
    return [
        Unit("bindings_cpu.o", "compile", "bindings_cpu.cpp", bindings_flags()),
        *[
            Unit(f"{source}_{name}.o", "compile", f"backends/{source}.cpp", [f"-DFP16OPT_LEVEL={name}", *f])
            for name, f in found.items()
            for source in ("cpu", "cpu_steps", "cpu_split")
        ],
        Unit("cpu_dispatch.o", "compile", "backends/cpu_dispatch.cpp", dispatch),
        Unit("cpu_operations.o", "compile", "backends/cpu_operations.cpp", []),
        Unit("cpu_decisions.o", "compile", "backends/cpu_decisions.cpp", []),
        Unit("split_operations.o", "compile", "backends/split_operations.cpp", []),
        Unit("step_operations.o", "compile", "backends/step_operations.cpp", []),
        Unit("threads.o", "compile", "backends/threads.cpp", []),
    ]


def nvcc() -> str:
    """The path of CUDA's compiler."""
    for home in (os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH")):
        found = shutil.which("nvcc", path=str(Path(home) / "bin")) if home else None
        if found:
            return found
    found = shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")
    if found is None or sys.platform != "linux":
        raise NotThere("nvcc, CUDA's compiler, was not found (on PATH, or in CUDA_HOME)")
    return found


def cuda_architectures() -> list[int]:
    """The GPUs to build for: what FP16OPT_CUDA_ARCHS names, else those of ours that this nvcc knows."""
    wanted = os.environ.get("FP16OPT_CUDA_ARCHS", "").replace(",", " ").replace(";", " ").split()
    try:
        if wanted:
            return sorted({int(name.lower().removeprefix("sm_").replace(".", "")) for name in wanted})
    except ValueError:
        raise BuildFailed(f"FP16OPT_CUDA_ARCHS is {' '.join(wanted)!r}; give numbers, as in '75 80 90'") from None
    done = subprocess.run([nvcc(), "--list-gpu-arch"], capture_output=True, text=True, check=False)
    known = {line.strip() for line in done.stdout.splitlines()}
    found = [arch for arch in CUDA_ARCHS if f"compute_{arch}" in known]
    if not found:
        raise BuildFailed(f"{nvcc()!r} lists no GPU that this package knows: {(done.stdout + done.stderr).strip()!r}")
    return found


def cuda_units() -> list[Unit]:
    """The translation units of `_cuda`."""
    names = [f"sm_{arch}" for arch in cuda_architectures()] + [f"compute_{cuda_architectures()[-1]}"]
    return [
        Unit(
            "bindings_cuda.o",
            "compile",
            "bindings_cuda.cpp",
            [*bindings_flags(), shlex.quote(f'-DFP16OPT_CUDA_NAMES="{" ".join(names)}"')],
        ),
        Unit("cuda_table.o", "compile", "backends/cuda_table.cpp", []),
        *[Unit(f"{name}.o", "compile_cuda", f"backends/{name}.cu", []) for name in CUDA_SOURCES],
    ]


def cuda_rules() -> list[str]:
    """How CUDA's compiler is called: one code for each GPU, PTX of the newest, and CUDA's runtime linked statically."""
    archs = cuda_architectures()
    codes = [f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in archs]
    codes.append(f"-gencode=arch=compute_{archs[-1]},code=compute_{archs[-1]}")
    command = shlex.quote(nvcc())
    host = ["-ccbin", shlex.quote(compiler()[0])] if os.environ.get("CXX") else []
    flags = " ".join([*host, *CUDA_FLAGS, *codes])
    return [
        "rule compile_cuda",
        f"  command = {command} {flags} -MD -MF $out.d -c $in -o $out",
        "  depfile = $out.d",
        "  deps = gcc",
        "rule link",
        # The runtime's own symbols stay inside: torch has another copy of them.
        f"  command = {command} {' '.join(host)} -shared -cudart=static -Xlinker=--exclude-libs,ALL $in -o $out",
    ]


def ninja_file(output: Path, units: list[Unit], rules: list[str]) -> str:
    """The text of a build.ninja that makes ``output``."""

    def path(name: Path) -> str:
        return str(name).replace("$", "$$").replace(" ", "$ ").replace(":", "$:")

    flags = " ".join([*FLAGS, os.environ.get("CXXFLAGS", "")])
    lines = [
        "rule compile",
        f"  command = {shlex.join(compiler())} {flags} $more -MD -MF $out.d -c $in -o $out".replace("$$", "$"),
        "  depfile = $out.d",
        "  deps = gcc",
        *rules,
    ]
    for unit in units:
        lines += [f"build {unit.object}: {unit.rule} {path(ROOT / 'csrc' / unit.source)}"]
        lines += [f"  more = {' '.join(unit.flags)}"]
    lines.append(f"build {path(output)}: link {' '.join(unit.object for unit in units)}")
    return "\n".join(lines) + "\n"


def cpu_rules() -> list[str]:
    """How `_cpu` is linked."""
    shared = "-bundle -undefined dynamic_lookup" if sys.platform == "darwin" else "-shared -Wl,--no-undefined-version"
    command = f"{shlex.join(compiler())} {shared} -pthread $in -o $out {os.environ.get('LDFLAGS', '')}"
    return ["rule link", f"  command = {command}"]


class Module(NamedTuple):
    """A compiled module, how it is built, and what a user is told where it can't be."""

    name: str
    wish: str
    units: Callable[[], list[Unit]]
    rules: Callable[[], list[str]]
    warning: str


MODULES = {
    "fp16opt._cpu": Module(
        "_cpu",
        "FP16OPT_CPU",
        cpu_units,
        cpu_rules,
        "\nWARNING: fp16opt is installed without its compiled CPU module: {}.\n"
        "It works all the same, slower, in plain torch operations. To get the module, install a C++17\n"
        "compiler and reinstall fp16opt. `python -m fp16opt` shows what is in use.\n",
    ),
    "fp16opt._cuda": Module(
        "_cuda",
        "FP16OPT_CUDA",
        cuda_units,
        cuda_rules,
        "\nWARNING: fp16opt is installed without its compiled CUDA module: {}.\n"
        "On a GPU plain torch operations serve, with the same results. `python -m fp16opt` shows what is in use.\n",
    ),
}


class BuildModule(build_ext):
    """Compiles with ninja, and lets the installation go on without a module where that fails."""

    def run(self) -> None:
        self.outcomes: dict[str, str] = {}
        super().run()
        self._write_info(Path(self.build_lib) / "fp16opt")
        if self.inplace or getattr(self, "editable_mode", False):
            self._write_info(ROOT / "fp16opt")
            for name in MODULES:
                if self.outcomes.get(MODULES[name].name) != "built":
                    (ROOT / self._module_file(name)).unlink(missing_ok=True)

    def _module_file(self, name: str) -> str:
        """A module's file, relative to the folder that holds the package."""
        return str(self.get_ext_filename(name))

    def _write_info(self, folder: Path) -> None:
        """Leave the outcomes where `python -m fp16opt` reads them."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / BUILD_INFO).write_text(json.dumps(self.outcomes) + "\n", encoding="utf-8")

    def build_extension(self, ext: Extension) -> None:
        module = MODULES[ext.name]
        wish = os.environ.get(module.wish, "")
        # A module that an earlier build left there must not be taken for this one's.
        (Path(self.build_lib) / self._module_file(ext.name)).unlink(missing_ok=True)
        if wish == "0":
            self.outcomes[module.name] = f"skipped, because {module.wish}=0 was set when fp16opt was installed"
            return
        try:
            self._compile(module, Path(self.get_ext_fullpath(ext.name)).resolve())
            self.outcomes[module.name] = "built"
        except BuildFailed as failure:
            if wish == "1":
                raise SystemExit(f"fp16opt: {module.wish}=1 is set, but {failure}.") from None
            self.outcomes[module.name] = f"could not be built when fp16opt was installed: {failure}"
            if not isinstance(failure, NotThere):
                print(module.warning.format(failure), file=sys.stderr)

    def _compile(self, module: Module, output: Path) -> None:
        folder = Path(self.build_temp).resolve() / module.name
        folder.mkdir(parents=True, exist_ok=True)
        output.parent.mkdir(parents=True, exist_ok=True)
        try:
            text = ninja_file(output, module.units(), module.rules())
        except ImportError as error:
            raise BuildFailed(f"a build requirement is missing ({error})") from None
        (folder / "build.ninja").write_text(text, encoding="utf-8")
        done = subprocess.run([ninja(), "-C", str(folder)], capture_output=True, text=True, check=False)
        if done.returncode != 0:
            print(done.stdout + done.stderr, file=sys.stderr)
            used = nvcc() if module.name == "_cuda" else shlex.join(compiler())
            raise BuildFailed(f"the compiler {used!r} failed (its output is above)")


# optional: setuptools must not miss the file when the build above was given up.
setup(
    ext_modules=[Extension(name, sources=[], optional=True) for name in MODULES],
    cmdclass={"build_ext": BuildModule},
)
