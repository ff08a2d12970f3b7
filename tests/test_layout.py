"""The house's rules, read from the source: who may import whom, who may reach into whom, what every file has.

Every check is a function from sources to a list of complaints, "file:line: what". The first half of this file is these
functions, the second half runs them on the package, and on small sources in which each must find something.
"""

from __future__ import annotations

import ast
import functools
import graphlib
import os
import re
import subprocess
import sys
from collections.abc import Callable, Container, Iterable, Iterator
from pathlib import Path

import pytest

import fp16opt

ROOT = Path(fp16opt.__file__).parent
Files = dict[str, ast.Module]  # by path inside the package: "engine/params.py"

# The engine's files in the order in which a gradient walks through them: each may import those before it.
ENGINE = [
    "errors",
    "dtensors",
    "schema",
    "snapshot",
    "arguments",
    "config",
    "ranks",
    "diagnostics",
    "params",
    "attributes",
    "masters",
    "missing_scale",
    "model_writes",
    "folded",
    "stage",
    "look",
    "passes",
    "step",
    "gradients",
    "true_gradients",
    "outcome",
    "wrapped_step",
    "fused_registry",
    "one_pass",
    "checkpoint",
    "parts",
    # What an argument of the wrapper asks for: no file of the engine imports one of these.
    "modes/sums",
    "modes/split",
    "modes/regions",
    "modes/changes",
    "modes/state8",
    "modes/offload",
    "modes/release",
    "modes/closures",
]

# Rooms below the faces, and the other rooms that each may import. Rooms that are not listed are faces and
# integrations: they may import any of these, and each other as long as no circle comes of it. parallel.py is the door
# between the optimizer and fp16opt.distributed.
ROOMS = {
    "scaling": set[str](),
    "kernels": set[str](),
    "engine": {"kernels", "scaling"},
    "memory": {"kernels", "engine"},
    "delta_files": {"engine"},
    "delta_patches": {"kernels", "engine"},
    "deltas": {"kernels", "engine", "delta_files", "delta_patches"},
    "optimizer": {"kernels", "scaling", "engine", "memory", "parallel", "deltas"},
}

# What the rest of a place (a path's beginning) imports nowhere, but in the files named: tools are for a user who asks,
# and the proof of CUDA kernels puts itself behind the hook cuda_devices.Proof.
APART = [
    ("", ("tools/",), {"__init__.py", "__main__.py"}),
    ("kernels/", ("kernels/planted.py", "kernels/proof.py", "kernels/verdicts.py"), {"kernels/__init__.py"}),
]

# Private names that are not ours, and why nothing public serves. A name may be read on any object; our files may
# define none of them but those in REDEFINED.
FOREIGN = {
    # torch.Tensor
    "_version": "the version counter: nothing public tells of an in-place write",
    "_values": "of a sparse gradient: values() refuses one that is not coalesced",
    "_indices": "of a sparse gradient: indices() refuses one that is not coalesced",
    "_base": "what a view holds: its memory must move along",
    "_is_view": "a gradient that is a view may not be kept",
    "_local_tensor": "of a DTensor: to_local() goes through autograd",
    "_foreach_add": "torch's multi-tensor calls are private only by name",
    "_foreach_add_": "as above",
    "_foreach_sub_": "as above",
    "_foreach_mul": "as above",
    "_foreach_mul_": "as above",
    "_foreach_div": "as above",
    "_foreach_sqrt": "as above",
    "_dtensor_spec": "how a DTensor is laid out: from_local moves pieces to the mesh's devices",
    "_utils": "torch._utils: flattening, as torch.nn.parallel does it",
    "_flatten_dense_tensors": "as above",
    "_unflatten_dense_tensors": "as above",
    "_python_dispatch": "TorchDispatchMode has no public place",
    "_local_scalar_dense": "the operation of Tensor.item, by which a look of the host is seen",
    "_make_wrapper_subclass": "a tensor without memory: torch's page on such subclasses names it",
    "_C": "torch._C: where the next name is",
    "_increment_version": "of many tensors: the public function is one more call of Python in each operation",
    "_disabled_torch_function_impl": "what a subclass of Tensor without a say in torch's functions has",
    "_disable_dynamo": "torch.optim hides its own methods from the compiler by it; the public one imports the compiler",
    "_current_graph_task_id": "nothing public tells whether autograd runs in this thread",
    "_execution_engine": "where the next name's callbacks are queued: nothing public is called when a backward ends",
    "_VF": "where torch.nn's RNNs find the functions that autocast",
    "_sleep": "of torch.cuda: keeps a card busy until the host has queued what is to be timed, or to race",
    # torch.optim
    "_opt_called": "a scheduler warns where it is not set",
    "_wrapped_by_lr_sched": "tells a scheduler's patch of step from a user's",
    "_step_supports_amp_scaling": "torch.amp.GradScaler's protocol for found_inf",
    "_is_profiler_enabled": "of torch.autograd.profiler: nothing public tells whether a profiler runs",
    "_optimizer_step_pre_hooks": "hooks are kept in the Optimizer, and nothing public lists them",
    "_optimizer_step_post_hooks": "as above",
    "_optimizer_state_dict_pre_hooks": "as above",
    "_optimizer_state_dict_post_hooks": "as above",
    "_optimizer_load_state_dict_pre_hooks": "as above",
    "_optimizer_load_state_dict_post_hooks": "as above",
    "_global_optimizer_pre_hooks": "as above, of all optimizers",
    "_global_optimizer_post_hooks": "as above, of all optimizers",
    "_unscale_grads_": "what torch.amp.GradScaler says a subclass overrides",
    # torch.nn and torch.distributed
    "_join_config": "of DDP: nothing public tells whether Join is on",
    "_parameters": "of a Module, as above",
    "_buffers": "of a Module: what is replaced there needs no setattr, which a subclass may forbid",
    "_BatchNorm": "the base of all batch norms",
    "_register_state_dict_hook": "before torch 2.5 there is no public one that runs after state_dict",
    "_orig_mod": "of torch.compile: the module inside",
    "_comm_hooks": "of DistributedDataParallel: the states of hooks that were registered",
    "_fsdp_flattened": "a parameter of FSDP1",
    "_get_default_store": "of torch.distributed, whose ranks tell there where they wait",
    "_get_backend": "of a ProcessGroup: what holds its time-out",
    "_device_types": "of a ProcessGroup: those of which it has a backend",
    "_timeout": "of a backend's options: what init_process_group or new_group was given",
    "_get_root_mesh": "of a DeviceMesh, whose flattened form serves all of its dimensions",
    "_flatten": "as above",
    "_mesh_resources": "as above, before torch 2.10",
    "_overlap_with_ddp": "of ZeroRedundancyOptimizer, which shows none of its parts",
    "_default_device": "as above",
    "_param_to_rank": "as above",
    "_sync_param_groups": "as above",
    "_sync_params": "as above",
    # trainers
    "_forward_module": "of Fabric's module: the DDP around the model, which nothing public gives",
    "_optimizers": "of Accelerator: what was prepared",
    # Python
    "_getframe": "sys._getframe: who called",
    # apex
    "_amp_state": "the module's name in apex, which scripts import",
}
REDEFINED = {"_step_supports_amp_scaling", "_unscale_grads_", "_wrapped_by_lr_sched", "_amp_state"}  # meant to be

# How our code names the wrapper.
OPTIMIZERS = {"engine", "opt", "optimizer", "wrapper"}


def read(root: Path) -> Files:
    return {
        path.relative_to(root).as_posix(): ast.parse(path.read_text("utf-8")) for path in sorted(root.rglob("*.py"))
    }


OF_NAMEDTUPLES = {"_fields", "_replace", "_asdict", "_make"}  # public, for all their underscores


def private(name: str) -> bool:
    if name in OF_NAMEDTUPLES:
        return False
    return name.startswith("_") and not (name.startswith("__") and name.endswith("__")) and name != "_"


def room(path: str) -> str:
    return path.split("/")[0].removesuffix(".py")


# -- imports ----------------------------------------------------------------------------------------------------------


def file_of(files: Files, module: list[str]) -> str | None:
    """The file of a module of the package, given as its names below ``fp16opt``."""
    for path in ("/".join(module) + ".py", "/".join([*module, "__init__.py"])):
        if path in files:
            return path
    return None


def called_imports(node: ast.Call) -> list[str]:
    """Modules that ``importlib.import_module("...")`` and ``__import__("...")`` name."""
    if ast.unparse(node.func).split(".")[-1] not in ("import_module", "__import__"):
        return []
    return [arg.value for arg in node.args[:1] if isinstance(arg, ast.Constant) and isinstance(arg.value, str)]


@functools.cache
def walk(tree: ast.AST) -> tuple[ast.AST, ...]:
    """``ast.walk``, once for each tree."""
    return tuple(ast.walk(tree))


def imported_modules(files: Files, path: str) -> Iterator[tuple[list[str], int]]:
    """(names below ``fp16opt``, line) of everything of the package that a file imports, wherever in the file.

    ``from .a import b`` gives ``a.b``, which may be a module or a name in ``a``.
    """
    package = path.split("/")[:-1]
    for node in walk(files[path]):
        found: list[list[str]] = []
        if isinstance(node, ast.Import):
            found = [alias.name.split(".") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = ["fp16opt", *package][: len(package) + 2 - node.level] if node.level else []
            base += node.module.split(".") if node.module else []
            found = [[*base, alias.name] for alias in node.names]
        elif isinstance(node, ast.Call):
            for name in called_imports(node):
                up = len(name) - len(name.lstrip("."))
                start = ["fp16opt", *package][: len(package) + 2 - up] if up else []
                found.append([*start, *filter(None, name.lstrip(".").split("."))])
        yield from ((names[1:], node.lineno) for names in found if names[0] == "fp16opt")


def annotations(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """(name, line) of every name in an annotation, strings inside of it parsed."""
    for node in walk(tree):
        marks = [getattr(node, "annotation", None), getattr(node, "returns", None)]
        for mark in filter(None, marks):
            yield from ((name, mark.lineno) for name in names_in(mark))


def names_in(annotation: ast.expr) -> Iterator[str]:
    for node in walk(annotation):
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            try:
                yield from names_in(ast.parse(node.value, mode="eval").body)
            except SyntaxError:
                continue  # a string in a Literal


def bound(tree: ast.Module) -> set[str]:
    """Names that a file imports or defines."""
    found = set()
    for node in walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            found |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
        elif isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
    return found


def homes_of_classes(files: Files) -> dict[str, str]:
    """The file of each class whose name is there once: what an annotation with that name means."""
    homes: dict[str, list[str]] = {}
    for path, tree in files.items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef):
                homes.setdefault(node.name, []).append(path)
    return {name: paths[0] for name, paths in homes.items() if len(paths) == 1}


def imports(files: Files) -> dict[str, dict[str, int]]:
    """What `found_imports` finds; in the package, where nothing changes, once."""
    return package_imports() if files is FILES else found_imports(files)


@functools.cache
def package_imports() -> dict[str, dict[str, int]]:
    return found_imports(FILES)


def found_imports(files: Files) -> dict[str, dict[str, int]]:
    """For each file, the files of the package that it needs, with a line: imports under ``TYPE_CHECKING`` and inside of
    functions count, and so does a class that is only named in an annotation."""
    homes = homes_of_classes(files)
    found: dict[str, dict[str, int]] = {path: {} for path in files}
    for path, tree in files.items():
        for names, line in imported_modules(files, path):
            target = file_of(files, names) or file_of(files, names[:-1])
            if target is not None and names[-1:] != ["_cpu"]:  # compiled_code looks after these
                found[path].setdefault(target, line)
        ours = bound(tree)
        for name, line in annotations(tree):
            if name not in ours and name in homes:
                found[path].setdefault(homes[name], line)
        found[path].pop(path, None)
    return found


def circles(files: Files) -> list[str]:
    """One circle of files that import each other, where there is any."""
    try:
        graphlib.TopologicalSorter(imports(files)).prepare()
    except graphlib.CycleError as error:
        circle = error.args[1]
        return [f"{circle[0]}:1: files import each other: {' <- '.join(circle)}"]
    return []


def rooms_entered_wrongly(files: Files) -> list[str]:
    complaints = []
    for path, targets in imports(files).items():
        mine = room(path)
        for target, line in targets.items():
            if mine in ROOMS and room(target) not in ROOMS[mine] | {mine}:
                may = sorted(ROOMS[mine]) or "nothing of ours"
                complaints.append(f"{path}:{line}: imports {target}; {mine} may import {may}")
    return complaints


def apart(files: Files) -> list[str]:
    return [
        f"{path}:{line}: imports {target}, which stands apart"
        for place, rooms, doors in APART
        for path, targets in imports(files).items()
        for target, line in targets.items()
        if target.startswith(rooms) and path.startswith(place) and not path.startswith(rooms) and path not in doors
    ]


def engine_out_of_order(files: Files, order: list[str]) -> list[str]:
    """Files of engine/ that are not in the list, are missing, or import one that comes later."""
    names = [path.removeprefix("engine/").removesuffix(".py") for path in files if path.startswith("engine/")]
    there = {name for name in names if not name.endswith("__init__")}
    complaints = [
        f"engine/{name}.py:1: is not in the list ENGINE of {Path(__file__).name}" for name in there - {*order}
    ]
    complaints += [f"engine/{name}.py:1: is in the list ENGINE and not there" for name in order if name not in there]
    place = {f"engine/{name}.py": number for number, name in enumerate(order)}
    for path, targets in imports(files).items():
        for target, line in targets.items():
            if path in place and target in place and place[target] > place[path]:
                complaints.append(f"{path}:{line}: imports {target}, which comes later")
            if path.startswith("engine/") and target == "engine/__init__.py":
                complaints.append(f"{path}:{line}: imports from engine/__init__.py; name the file")
    return complaints


def compiled_code(files: Files) -> list[str]:
    """Importers of the compiled modules, where there is more than one, or outside of kernels/."""
    importers: dict[str, int] = {}
    for path, tree in files.items():
        for node in walk(tree):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [f"{node.module or ''}.{alias.name}" for alias in node.names]
            elif isinstance(node, ast.Call) and "import_module" in ast.unparse(node.func):
                names = [ast.unparse(arg).strip("'\"") for arg in node.args]
            if any(re.search(r"(^|\.)_cpu\b", name) for name in names):
                importers.setdefault(path, node.lineno)
    wrong = [path for path in importers if room(path) != "kernels"] or list(importers)[1:]
    return [f"{path}:{importers[path]}: imports compiled code, and {next(iter(importers))} does too" for path in wrong]


# -- privacy ----------------------------------------------------------------------------------------------------------


def defined(tree: ast.Module) -> set[str]:
    """Private names that a file defines: functions, classes, variables, fields, attributes of self and cls."""
    found = set()
    for node in walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_own(node.value):
            found.add(node.attr)
        elif isinstance(node, ast.Assign) and any(ast.unparse(t) == "__slots__" for t in node.targets):
            found |= {n.value for n in walk(node.value) if isinstance(n, ast.Constant) and isinstance(n.value, str)}
    return {name for name in found if private(name)}


def is_own(node: ast.expr) -> bool:
    """Whether it is ``self``, ``cls`` or ``super()``."""
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Name) and node.func.id == "super"
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def reaching_in(files: Files, foreign: Container[str]) -> list[str]:
    """``x._name``, ``getattr(x, "_name")`` and imports of ``_name`` where another file of ours defines the name.

    A file may use what it defines itself on another object, as in ``other._value`` of a comparison, but not on an
    optimizer or on what an attribute holds, which is most likely another file's. torch's own names are in ``foreign``.
    """
    complaints = []
    for path, tree in files.items():
        own = defined(tree)
        for line, name, base, text in private_uses(tree):
            excused = name in own and "." not in base and base not in OPTIMIZERS
            if not excused and name not in foreign:
                complaints.append(f"{path}:{line}: {text}")
    return complaints


def private_uses(tree: ast.Module) -> Iterator[tuple[int, str, str, str]]:
    """(line, private name, what it is asked of, what is written) of each use on something that is not self."""
    for node in walk(tree):
        if isinstance(node, ast.Attribute) and private(node.attr) and not is_own(node.value):
            yield node.lineno, node.attr, ast.unparse(node.value), ast.unparse(node)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "setattr", "hasattr", "delattr"):
            name = node.args[1].value if len(node.args) > 1 and isinstance(node.args[1], ast.Constant) else ""
            if isinstance(name, str) and private(name) and not is_own(node.args[0]):
                yield node.lineno, name, ast.unparse(node.args[0]), ast.unparse(node)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            module = (getattr(node, "module", None) or "").split(".")
            for name in [*module, *(part for alias in node.names for part in alias.name.split("."))]:
                if private(name) and name != "_cpu":
                    yield node.lineno, name, ".".join(module), ast.unparse(node)


def not_used(files: Files, foreign: Iterable[str]) -> list[str]:
    used = {name for tree in files.values() for _, name, _, _ in private_uses(tree)}
    # a hook table or protocol flag of our own is set on self or as a class's field
    used |= {name for tree in files.values() for name in defined(tree)}
    used |= {n.value for tree in files.values() for n in walk(tree) if isinstance(n, ast.Constant) and n.value}
    return [f"FOREIGN[{name!r}]: no file uses it" for name in foreign if name not in used]


def ours_too(files: Files, foreign: Iterable[str], redefined: Iterable[str]) -> list[str]:
    """Names that are torch's by the list and that a file of ours defines: such a use could not be told from ours."""
    doubtful = {*foreign} - {*redefined}
    return [f"{path}:1: defines {n}, torch's name" for path, tree in files.items() for n in defined(tree) & doubtful]


# -- tensors -----------------------------------------------------------------------------------------------------------

MAKERS = {"arange", "empty", "eye", "full", "linspace", "ones", "rand", "randint", "randn", "tensor", "zeros"}
ASKS_TORCH = {"tools/certify/surroundings.py"}
"""Files that make a tensor to see what torch's defaults are."""


def made_by_default(files: Files) -> list[str]:
    """Tensors whose dtype or device would be torch's default one, which users set."""
    complaints = []
    for path, tree in files.items():
        for node in walk(tree):
            if not (isinstance(node, ast.Call) and ast.unparse(node.func) in {f"torch.{name}" for name in MAKERS}):
                continue
            given = {keyword.arg for keyword in node.keywords}
            missing = [word for word in ("dtype", "device") if not given & {word, None}]
            if missing and path not in ASKS_TORCH:
                complaints.append(f"{path}:{node.lineno}: {ast.unparse(node)} has no {' and no '.join(missing)}")
    return complaints


# -- the package ------------------------------------------------------------------------------------------------------

FILES = read(ROOT)


def report(complaints: list[str]) -> None:
    if complaints:
        places = sorted({*complaints})
        pytest.fail("\n".join([f"{len(places)} places:", *places]), pytrace=False)


def test_engine_files_import_only_earlier_ones() -> None:
    report(engine_out_of_order(FILES, ENGINE))


def test_rooms_import_only_what_stands_below() -> None:
    report(rooms_entered_wrongly(FILES))


def test_tools_and_the_proof_stand_apart() -> None:
    report(apart(FILES))


def test_no_files_import_each_other() -> None:
    report(circles(FILES))


def test_one_file_imports_compiled_code() -> None:
    report(compiled_code(FILES))
    assert any("_cpu" in ast.unparse(tree) for path, tree in FILES.items() if room(path) == "kernels")


def test_no_file_reaches_into_another() -> None:
    report(reaching_in(FILES, FOREIGN))


def test_the_list_of_foreign_names_is_exact() -> None:
    report(not_used(FILES, FOREIGN) + ours_too(FILES, FOREIGN, REDEFINED))


def test_no_tensor_is_made_by_default() -> None:
    report(made_by_default(FILES))


SIDE_EFFECTS = """
import logging, os, sys, threading, warnings
import torch

def look():
    loggers = [logging.getLogger(name) for name in (None, "torch", "fp16opt")]
    return {
        "torch": (torch.get_default_dtype(), torch.get_num_threads(), torch.is_grad_enabled(), torch.Tensor.backward,
                  torch.optim.Optimizer.step, torch.optim.SGD.step, torch.nn.Module.to),
        "random numbers": torch.get_rng_state().tolist(),
        "torch.distributed": sorted(name for name in sys.modules if name.startswith("torch.distributed")),
        "CUDA": torch.cuda.is_initialized(),
        "threads": (threading.active_count(), len(os.listdir("/proc/self/task")) if os.path.isdir("/proc/self") else 0),
        "log handlers": [type(handler).__name__ for one in loggers for handler in one.handlers],
        "log levels": [one.level for one in loggers],
        "environment": dict(os.environ),
        "warning filters": list(warnings.filters),
    }

warnings.simplefilter("error")
before = look()
import fp16opt
changed = [name for name, value in look().items() if value != before[name]]
if changed:
    raise SystemExit("importing fp16opt changed " + ", ".join(changed))
"""


def test_importing_has_no_side_effects() -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT.parent), *sys.path])}
    done = subprocess.run([sys.executable, "-c", SIDE_EFFECTS], capture_output=True, text=True, env=environment)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


# -- the checks themselves --------------------------------------------------------------------------------------------


def sources(**texts: str) -> Files:
    """Files by path, with "__" for "/"; an ``__init__`` is ``init``."""
    return {
        name.replace("__", "/").replace("init", "__init__") + ".py": ast.parse(text) for name, text in texts.items()
    }


HOUSE = {
    "init": "'''The house.'''\nfrom .optimizer import MixedPrecisionOptimizer",
    "optimizer": "from .engine.later import Later\nclass MixedPrecisionOptimizer: ...",
    "engine__earlier": "class Earlier: ...",
    "engine__later": "from .earlier import Earlier\nclass Later: ...",
    "kernels__init": "from . import native",
    "kernels__proof": "from . import native",
    "tools__init": "from ..optimizer import MixedPrecisionOptimizer",
    "kernels__native": "import importlib\nimportlib.import_module('fp16opt._cpu')",
    "face": "from .optimizer import MixedPrecisionOptimizer",
}
ORDER = ["earlier", "later"]


def in_order(files: Files) -> list[str]:
    return engine_out_of_order(files, ORDER)


def privacy(files: Files) -> list[str]:
    return reaching_in(files, {"_version"})


CHECKS: list[Callable[[Files], list[str]]] = [
    in_order,
    rooms_entered_wrongly,
    apart,
    circles,
    compiled_code,
    privacy,
    made_by_default,
]


@pytest.mark.parametrize("check", CHECKS)
def test_nothing_is_found_in_a_good_house(check: Callable[[Files], list[str]]) -> None:
    assert check(sources(**HOUSE)) == []


BAD: list[tuple[Callable[[Files], list[str]], str, str, str]] = [
    # (check, file, its source, what is said)
    (in_order, "engine__earlier", "from .later import Later", "engine/earlier.py:1: imports engine/later.py"),
    (in_order, "engine__earlier", "from . import later", "engine/earlier.py:1: imports engine/later.py"),
    (in_order, "engine__earlier", "import fp16opt.engine.later", "engine/earlier.py:1: imports engine/later.py"),
    (in_order, "engine__earlier", "if TYPE_CHECKING:\n    from .later import Later", "engine/earlier.py:2: imports"),
    (in_order, "engine__earlier", "def f():\n    from .later import Later", "engine/earlier.py:2: imports"),
    (in_order, "engine__earlier", "def f(x: 'Later'): ...", "engine/earlier.py:1: imports engine/later.py"),
    (in_order, "engine__earlier", "x: list[Later | None]", "engine/earlier.py:1: imports engine/later.py"),
    (in_order, "engine__earlier", "import_module('.later', 'fp16opt.engine')", "engine/earlier.py:1: imports"),
    (in_order, "engine__new", "", "engine/new.py:1: is not in the list"),
    (in_order, "engine__modes__new", "", "engine/modes/new.py:1: is not in the list"),
    (
        rooms_entered_wrongly,
        "engine__earlier",
        "from ..optimizer import MixedPrecisionOptimizer",
        "imports optimizer.py",
    ),
    (rooms_entered_wrongly, "engine__earlier", "def f(x: 'MixedPrecisionOptimizer'): ...", "imports optimizer.py"),
    (rooms_entered_wrongly, "engine__earlier", "from .. import face", "imports face.py"),
    (rooms_entered_wrongly, "kernels__native", "from ..engine import earlier", "kernels may import nothing of ours"),
    (
        rooms_entered_wrongly,
        "scaling",
        "def f():\n    from . import kernels",
        "scaling.py:2: imports kernels/__init__.py",
    ),
    (apart, "face", "from .tools import plan", "face.py:1: imports tools/__init__.py, which stands apart"),
    (
        apart,
        "kernels__native",
        "def f():\n    from .proof import prove",
        "kernels/native.py:2: imports kernels/proof.py",
    ),
    (rooms_entered_wrongly, "memory", "from . import face", "memory may import ['engine'"),
    (circles, "engine__earlier", "from .later import Later", "engine/earlier.py"),
    (circles, "engine__earlier", "from ..face import x", "files import each other"),
    (circles, "engine__earlier", "from fp16opt import MixedPrecisionOptimizer", "files import each other"),
    (compiled_code, "engine__earlier", "from fp16opt import _cpu", "engine/earlier.py:1: imports compiled code"),
    (privacy, "face", "def f(opt): return opt._pairs", "face.py:1: opt._pairs"),
    (privacy, "face", "class A:\n    def f(self): return self.opt._pairs", "face.py:2: self.opt._pairs"),
    (privacy, "face", "class A:\n    def f(self): self._x = self.a._x", "face.py:2: self.a._x"),
    (privacy, "face", "def f(opt): return getattr(opt, '_pairs', None)", "face.py:1: getattr(opt, '_pairs', None)"),
    (privacy, "face", "from .kernels.native import _bump", "face.py:1: from .kernels.native import _bump"),
    (privacy, "face", "from torch._new import thing", "face.py:1: from torch._new import thing"),
    (made_by_default, "face", "torch.zeros(3)", "face.py:1: torch.zeros(3) has no dtype and no device"),
    (made_by_default, "face", "torch.tensor(x, device='cpu')", "has no dtype"),
    (
        made_by_default,
        "face",
        "def f():\n    return torch.ones(3, dtype=x)",
        "face.py:2: torch.ones(3, dtype=x) has no device",
    ),
]


@pytest.mark.parametrize(("check", "file", "source", "said"), BAD)
def test_each_check_finds_what_it_is_for(
    check: Callable[[Files], list[str]], file: str, source: str, said: str
) -> None:
    found = check(sources(**{**HOUSE, file: source}))
    assert any(said in complaint for complaint in found), found


GOOD: list[tuple[Callable[[Files], list[str]], str, str]] = [
    (
        privacy,
        "face",
        "class A:\n    def __eq__(self, other): return self._x == other._x\n    def g(self): self._x = 1",
    ),
    (privacy, "face", "def f(t): return t._version, t.__dict__"),
    (privacy, "face", "class A(B):\n    def _f(self): return super()._f()"),
    (privacy, "face", "class A(B):\n    def f(self): return super()._inherited(), self._inherited"),
    (circles, "face", "from .kernels import native\nfrom . import kernels"),
    (rooms_entered_wrongly, "engine__later", "from .. import kernels\nimport torch\nfrom .earlier import Earlier"),
    (made_by_default, "face", "torch.zeros(3, **options), torch.ones((), dtype=x, device=y), torch.zeros_like(z)"),
]


@pytest.mark.parametrize(("check", "file", "source"), GOOD)
def test_checks_leave_good_sources_alone(check: Callable[[Files], list[str]], file: str, source: str) -> None:
    assert check(sources(**{**HOUSE, file: source})) == []


def test_a_list_that_is_not_exact_is_told() -> None:
    files = sources(face="def f(t): return t._version\ndef _values(): ...")
    assert not_used(files, ["_version", "_gone"]) == ["FOREIGN['_gone']: no file uses it"]
    assert ours_too(files, ["_version", "_values"], []) == ["face.py:1: defines _values, torch's name"]
    assert ours_too(files, ["_values"], ["_values"]) == []
