"""The package as people get it: installed without a compiler, its metadata, its report, its README's commands."""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import interpreters
import pytest
import torch
from packaging.requirements import Requirement
from packaging.version import Version

import fp16opt

ROOT = Path(__file__).resolve().parents[1]
BUILD_REQUIREMENTS = ("setuptools", "pybind11", "ninja")
NOT_IN_A_CLONE = (
    ".git", "build", "dist", "*.egg-info", "*.so", "*.pyd", "_build.json", "__pycache__", ".*_cache", ".hypothesis",
    "*venv*", "*-output",
)  # fmt: skip
SAYS_SO = "fp16opt is installed without its compiled CPU module"

STEP = """
import sys, torch, fp16opt
from fp16opt import kernels
weight = torch.nn.Parameter(torch.ones(5, dtype=torch.float16))
opt = fp16opt.MixedPrecisionOptimizer(torch.optim.SGD([weight], lr=2.0**-13), loss_scale=128.0)
for _ in range(8):
    opt.zero_grad()
    opt.backward(weight.float().sum())
    norm = opt.clip_master_grads(100.0)
    opt.step()
opt.state_dict()
print(kernels.backend("cpu"), weight.tolist(), abs(float(norm) ** 2 - 5.0) < 1e-5, "fp16opt._cpu" in sys.modules)
"""


@dataclass
class Install:
    """A copy of the package in a folder of its own.

    Attributes:
        folder: what goes on the import path.
        log: all that pip printed.
    """

    folder: Path
    log: str

    def python(self, *arguments: str, environment: dict[str, str] | None = None) -> str:
        """Standard output of Python with this copy, run where the repository is not importable.

        ``-S`` keeps .pth files out: an editable install's hook would lend its compiled module to this copy.
        """
        packages = Path(torch.__file__).parents[1]
        path = os.pathsep.join([str(self.folder), str(packages)])
        given = {**os.environ, **(environment or {}), "PYTHONPATH": path}
        done = subprocess.run(
            [sys.executable, "-S", *arguments],
            cwd=self.folder.parent,
            env=given,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        if done.returncode != 0:
            pytest.fail(f"python {' '.join(arguments)} failed:\n{done.stdout}\n{done.stderr}")
        return done.stdout

    @property
    def metadata(self) -> importlib.metadata.PackageMetadata:
        (distribution,) = importlib.metadata.distributions(path=[str(self.folder)])
        return distribution.metadata


def pip(
    command: str, source: Path, option: str, folder: Path, environment: dict[str, str]
) -> subprocess.CompletedProcess[str]:
    """Build ``source``, with this environment's build requirements where it has them all."""
    here = all(importlib.util.find_spec(name) is not None for name in BUILD_REQUIREMENTS)
    options = ["--no-build-isolation"] if here else []
    given = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "FP16OPT_CPU")}
    return subprocess.run(
        [sys.executable, "-m", "pip", command, "-v", "--no-deps", *options, option, str(folder), str(source)],
        env={**given, **environment},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def copy_of_the_tree(target: Path) -> Path:
    """The repository without anything that was built: a module left in build/ would be packed."""
    shutil.copytree(ROOT, target, ignore=shutil.ignore_patterns(*NOT_IN_A_CLONE))
    return target


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Install:
    """fp16opt installed where every call of a compiler fails."""
    folder = tmp_path_factory.mktemp("bare")
    source = copy_of_the_tree(folder / "source")
    done = pip("install", source, "--target", folder / "target", environment={"CC": "/bin/false", "CXX": "/bin/false"})
    if done.returncode != 0:
        pytest.fail(f"the install without a compiler failed:\n{done.stdout}\n{done.stderr}")
    shutil.rmtree(source)
    return Install(folder / "target", done.stdout + done.stderr)


@pytest.mark.all
def test_install_without_a_compiler_succeeds_and_says_once_that_it_is_pure_python(bare: Install) -> None:
    assert bare.log.count(SAYS_SO) == 1
    assert "/bin/false" in bare.log
    assert not [path.name for path in bare.folder.rglob("*") if path.suffix in (".so", ".pyd", ".dylib")]


@pytest.mark.all
def test_install_without_a_compiler_steps_on_the_reference_kernels_and_says_why(bare: Install) -> None:
    # Eight updates of 2**-13: each alone is lost in FP16, all together are two of its gaps below 1.
    program = f"{STEP}\nimport runpy\nrunpy.run_module('fp16opt', run_name='__main__')"
    stepped, report = bare.python("-c", program).split("\n", 1)
    assert stepped == f"reference {[1 - 2.0**-10] * 5} True False"
    assert fp16opt.__version__ in report
    assert "reference" in report
    assert "could not be built" in report
    assert "/bin/false" in report


@pytest.mark.all
def test_wheel_without_the_module_serves_every_python_of_this_system(tmp_path: Path) -> None:
    """As the wheel for Windows is made. Other systems go on compiling the sdist."""
    source = copy_of_the_tree(tmp_path / "source")
    done = pip("wheel", source, "--wheel-dir", tmp_path / "wheels", environment={"FP16OPT_CPU": "0"})
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = (tmp_path / "wheels").iterdir()
    system = re.sub(r"\W", "_", sysconfig.get_platform())
    assert wheel.name == f"fp16opt-{fp16opt.__version__}-py3-none-{system}.whl"
    with zipfile.ZipFile(wheel) as packed:
        assert json.loads(packed.read("fp16opt/_build.json"))["_cpu"].startswith("skipped")
        assert not [name for name in packed.namelist() if name.endswith((".so", ".pyd"))]


def test_import_touches_no_gpu(tmp_path: Path) -> None:
    """No device is visible, and CUDA is not initialised by the import."""
    program = "import fp16opt, torch; print(torch.cuda.is_initialized(), torch.cuda.is_available())"
    done = interpreters.python("-c", program, cwd=tmp_path, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""})
    assert done.stdout.split() == ["False", "False"], done.stderr


HIDES = "is a source tree in which nothing was built, and Python takes it before the fp16opt that is installed in"
"""What Python started in a clone hears, where fp16opt is installed."""


@pytest.mark.all
def test_a_clone_that_hides_an_install_says_so_once_and_what_to_type(bare: Install, tmp_path: Path) -> None:
    clone = copy_of_the_tree(tmp_path / "clone")

    def python(*arguments: str, folder: Path = clone) -> subprocess.CompletedProcess[str]:
        path = os.pathsep.join([str(bare.folder), str(Path(torch.__file__).parents[1])])
        return subprocess.run(
            [sys.executable, "-S", *arguments],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": path},
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        )

    stepped = python("-c", f"import sys, fp16opt; print(fp16opt.__file__, file=sys.stderr)\n{STEP}")
    assert stepped.stdout.startswith("reference")
    assert stepped.stderr.splitlines()[0] == str(clone / "fp16opt" / "__init__.py"), "the import says nothing"
    assert len(stepped.stderr.splitlines()) == 2
    for said in (stepped.stderr, python("-m", "fp16opt").stdout):
        assert f"{clone} {HIDES} {bare.folder}. Mend it: start Python in another folder" in said
        assert f"or build in {clone}: pip install setuptools" in said
        assert "python setup.py build_ext --inplace" in said
    outside = python("-c", f"{STEP}\nimport runpy; runpy.run_module('fp16opt', run_name='__main__')", folder=tmp_path)
    assert "source tree" not in outside.stdout
    assert outside.stderr == "", "the install without a compiler has said so"


@pytest.mark.all
def test_typing_marker_and_stub_are_installed(bare: Install) -> None:
    assert (bare.folder / "fp16opt" / "py.typed").is_file()
    assert (bare.folder / "fp16opt" / "_cpu.pyi").is_file()


@pytest.mark.all
def test_only_the_package_is_installed(bare: Install) -> None:
    names = {path.name for path in bare.folder.iterdir() if not path.name.endswith(".dist-info")}
    assert names == {"fp16opt"}


@pytest.mark.all
def test_version_has_one_source(bare: Install) -> None:
    assert bare.metadata["Version"] == fp16opt.__version__
    texts = [ROOT / "setup.py", ROOT / "pyproject.toml", *(ROOT / "fp16opt").rglob("*.py")]
    holders = [path.relative_to(ROOT).as_posix() for path in texts if literal_of(fp16opt.__version__, path)]
    assert holders == ["fp16opt/__init__.py"]


def literal_of(version: str, path: Path) -> bool:
    """Whether ``path`` has ``version`` as a quoted string."""
    return bool(re.search(rf"[\"']{re.escape(version)}[\"']", path.read_text(encoding="utf-8")))


def pinned(name: str) -> Version:
    """The version of ``name`` that requirements/examples.txt pins."""
    lines = (ROOT / "requirements/examples.txt").read_text(encoding="utf-8").splitlines()
    requirements = [Requirement(line) for line in lines if line.strip() and not line.startswith(("#", "-"))]
    (pin,) = {specifier.version for r in requirements if r.name == name for specifier in r.specifier}
    return Version(pin)


@pytest.mark.all
def test_metadata_asks_for_a_range_of_torch_that_holds_the_pinned_one(bare: Install) -> None:
    required = [Requirement(text) for text in bare.metadata.get_all("Requires-Dist") or []]
    needed = [requirement for requirement in required if requirement.marker is None]
    assert [requirement.name for requirement in needed] == ["torch"]
    (torch_range,) = needed
    assert pinned("torch") in torch_range.specifier
    bounds = [specifier for specifier in torch_range.specifier if specifier.operator == ">="]
    assert len(bounds) == 1
    assert Version(bounds[0].version) < pinned("torch")
    assert bare.metadata["Requires-Python"] == ">=3.10"


def test_tests_run_against_the_installed_package() -> None:
    """Where the package is installed, the tree's copy, which holds no compiled module, must not be tested instead."""
    try:
        installed = Path(str(importlib.metadata.distribution("fp16opt").locate_file("fp16opt/__init__.py")))
    except importlib.metadata.PackageNotFoundError:
        installed = ROOT / "fp16opt" / "__init__.py"
    if installed.is_file():  # an editable install has none there
        assert Path(fp16opt.__file__).resolve() == installed.resolve()


def test_build_needs_no_torch() -> None:
    """setup.py imports the standard library and setuptools; pybind11 and ninja it asks for where it has a compiler."""
    imported: set[str] = set()
    for node in ast.walk(ast.parse((ROOT / "setup.py").read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            imported |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            imported.add(node.module.split(".")[0])
    assert imported - set(sys.stdlib_module_names) == {"setuptools"}
    (requires,) = re.findall(
        r"^requires = \[(.+)\]$", (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.MULTILINE
    )
    assert {Requirement(text).name for text in ast.literal_eval(f"[{requires}]")} == set(BUILD_REQUIREMENTS)


# -- the README's commands -----------------------------------------------------------------------------------------


def readme_commands() -> ModuleType:
    """CI's reader of the README, loaded from its file."""
    spec = importlib.util.spec_from_file_location("readme_commands", ROOT / ".ci" / "readme_commands.py")
    if spec is None or spec.loader is None:
        pytest.fail(".ci/readme_commands.py can't be loaded")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_readme_has_the_two_commands_that_ci_runs() -> None:
    install, check = readme_commands().commands((ROOT / "README.md").read_text(encoding="utf-8"))
    assert [word in install for word in ("pip install", "requirements/examples.txt", "examples/train_digits.py")] == [
        True
    ] * 3
    assert [word in check for word in ("pip install", "pytest")] == [True] * 2


def test_readme_commands_are_read_as_written() -> None:
    mark = "<!-- ci: command -->\n"
    text = f"a\n```sh\nnot this\n```\n{mark}```sh\none && \\\n  two\n```\n{mark}```\nthree\n```\n"
    assert readme_commands().commands(text) == ["one && \\\n  two", "three"]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["<!-- ci: command -->"], "line 1: .* right above"),
        (["<!-- ci: command -->", "", "```", "x", "```"], "line 1: .* right above"),
        (["<!-- ci: command -->", "```", "x"], "line 2: this block is never closed"),
        (["<!-- ci: command -->", "```", "", "```"], "line 2: this block holds no command"),
    ],
    ids=["nothing", "gap", "open", "empty"],
)
def test_readme_commands_refuse_a_mark_without_a_command(lines: Sequence[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        readme_commands().commands("\n".join(lines))
