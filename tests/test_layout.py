"""The house's rules, read from the source with ast: import direction, sizes, docstrings, no assert."""

from __future__ import annotations

import ast
import importlib
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import fp16opt

ROOT = Path(fp16opt.__file__).parent
FILES = sorted(p for p in ROOT.rglob("*.py"))
MAX_FUNCTION, MAX_FILE = 70, 500

# Rooms from the top down: a file may import from its own room and from rooms below it, never upwards.
FACES = {"amp", "grad_scaler", "fp16_utils", "apex"}
ENGINE = {"optimizer"}
MIDDLE = {"masters", "checkpoint", "distributed", "diagnostics", "optimizers"}
KERNELS = {"kernels", "fused"}
ALONE = {"scaling"}


def room(path: Path) -> str:
    relative = path.relative_to(ROOT)
    return relative.parts[0] if len(relative.parts) > 1 else relative.stem


def level(name: str) -> int:
    """Higher may import lower. Other modules of the package serve the engine: below it, above the kernels."""
    if name in FACES | {"__init__", "__main__"}:
        return 4
    if name in ENGINE:
        return 3
    if name in KERNELS:
        return 1
    if name in ALONE:
        return 0
    return 2


def imported_rooms(path: Path) -> set[str]:
    """The package's own rooms that a file imports, at module level or inside functions; not under
    TYPE_CHECKING."""
    tree = ast.parse(path.read_text())
    package = ["fp16opt", *path.relative_to(ROOT).parts[:-1]]
    skipped: set[ast.AST] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            skipped.update(inner for stmt in node.body for inner in ast.walk(stmt))
    names: set[str] = set()
    for node in ast.walk(tree):
        if node in skipped:
            continue
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            names |= {f"{module}.{alias.name}" for alias in node.names}
    ours = {n.split(".")[1] for n in names if n.startswith("fp16opt.")}
    return {n for n in ours if (ROOT / n).is_dir() or (ROOT / f"{n}.py").exists()}


by_file = pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))


def test_the_rooms_of_the_design_are_there() -> None:
    there = {room(p) for p in FILES}
    assert there >= {
        "__init__",
        "__main__",
        "optimizer",
        "scaling",
        "masters",
        "checkpoint",
        "kernels",
        "diagnostics",
        "apex",
        "fp16_utils",
        "optimizers",
    }
    assert {"reference.py", "native.py"} <= {p.name for p in FILES if room(p) == "kernels"}
    assert (ROOT / "py.typed").exists()


def test_the_import_reader_sees_imports(tmp_path: Path) -> None:
    """The checks below mean something: these files are known to import what they are known to import."""
    assert "optimizer" in imported_rooms(ROOT / "__init__.py")
    assert imported_rooms(ROOT / "optimizer.py") & {"masters", "checkpoint", "scaling"}
    assert level("amp") > level("optimizer") > level("masters") > level("kernels") > level("scaling")


@by_file
def test_imports_run_one_way(path: Path) -> None:
    mine = room(path)
    upwards = {
        other
        for other in imported_rooms(path)
        if (other != mine and level(other) > level(mine))
        or (level(mine) == 4 and other in FACES and mine in FACES - {other})
    }
    upwards -= {"optimizer"} if mine in FACES else set()
    assert not upwards, f"{path.name} ({mine}) imports {sorted(upwards)}, which stand above it"


@by_file
def test_kernels_import_nothing_of_the_engine_and_scaling_stands_alone(path: Path) -> None:
    others = imported_rooms(path) - {room(path)}
    if room(path) == "kernels":
        assert not others
    if room(path) == "scaling":
        assert not others


@by_file
def test_only_native_imports_the_compiled_modules(path: Path) -> None:
    if path.relative_to(ROOT).as_posix() == "kernels/native.py":
        assert re.search(r"_cpu", path.read_text())
        return
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module or ''}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            names = [ast.unparse(arg) for arg in node.args]
        for name in names:
            assert not re.search(r"(^|\.)_(cpu|cuda)\b", name), f"line {node.lineno} imports {name}"


def test_the_package_itself_imports_without_a_cycle_of_rooms() -> None:
    graph = {p: imported_rooms(p) - {room(p)} for p in FILES}
    rooms: dict[str, set[str]] = {}
    for path, others in graph.items():
        rooms.setdefault(room(path), set()).update(others)
    rooms.pop("__init__", None)
    done: set[str] = set()
    while len(done) < len(rooms):
        free = {r for r in rooms if r not in done and rooms[r] & set(rooms) <= done}
        assert free, f"rooms that import each other: {sorted(set(rooms) - done)}"
        done |= free


@by_file
def test_no_assert_statements(path: Path) -> None:
    lines = [n.lineno for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Assert)]
    assert not lines, f"assert at lines {lines}: it vanishes under -O; raise instead"


@by_file
def test_functions_and_files_fit_the_limits(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) <= MAX_FILE
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            first = min([node.lineno, *[d.lineno for d in node.decorator_list]])
            length = (node.end_lineno or first) - first + 1
            assert length <= MAX_FUNCTION, f"{node.name} has {length} lines"


@by_file
def test_modules_and_public_definitions_have_docstrings(path: Path) -> None:
    tree = ast.parse(path.read_text())
    assert ast.get_docstring(tree), "the module has no docstring"
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith("_"):
            assert ast.get_docstring(node), f"{node.name} has no docstring"


def test_public_methods_have_docstrings() -> None:
    missing = []
    rooms = (fp16opt, importlib.import_module("fp16opt.fp16_utils"), importlib.import_module("fp16opt.optimizers"))
    for home, name in [(room, name) for room in rooms for name in room.__all__]:
        obj = getattr(home, name)
        if not inspect.isclass(obj):
            continue
        if not inspect.getdoc(obj):
            missing.append(name)
        for attribute, member in vars(obj).items():
            target = member.fget if isinstance(member, property) else getattr(member, "__func__", member)
            if attribute.startswith("_") or not inspect.isfunction(target):
                continue
            if not inspect.getdoc(getattr(obj, attribute)) and not target.__doc__:
                missing.append(f"{name}.{attribute}")
    assert not missing


@by_file
def test_no_print_and_no_unfinished_marks(path: Path) -> None:
    text = path.read_text()
    if room(path) != "__main__":
        calls = [
            n.lineno
            for n in ast.walk(ast.parse(text))
            if isinstance(n, ast.Call) and isinstance(n.func, ast.Name) and n.func.id == "print"
        ]
        assert not calls, f"print at lines {calls}: use logging"
    code = re.sub(r">>> .*", "", text)
    assert not re.search(r"\b(TODO|FIXME|XXX|HACK)\b", code)


@by_file
def test_no_module_level_state(path: Path) -> None:
    """Module-level names are constants, functions, classes or loggers: no lists, dicts or sets that code
    fills."""
    if room(path) == "amp":
        return  # the one session object lives there
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        assert not isinstance(node, ast.Global), f"global at line {node.lineno}"


def test_importing_has_no_side_effects_on_torch_and_no_output() -> None:
    code = """
import torch
def look():
    return (torch.get_default_dtype(), torch.get_num_threads(), torch.is_grad_enabled(),
            torch.optim.Optimizer.step, torch.optim.SGD.step, torch.Tensor.backward, torch.nn.Module.to)
before = look()
import fp16opt
if look() != before:
    raise SystemExit("importing fp16opt changed torch")
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT.parent), *sys.path])}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
