"""``python -m fp16opt old-lines FILE``: lines of a script that mean something else once its optimizer is wrapped.

The rules are rows of docs/old-lines.md, in the same words. The file is read and never run, so a line is known by its
shape alone: what a name holds is not known.
"""

from __future__ import annotations

import argparse
import ast
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple


@dataclass(frozen=True)
class Rule:
    """A row of the page.

    Attributes:
        row: what stands in the script, as the page has it.
        write: what to write.
        is_silent: whether nothing tells of the line while it runs.
    """

    row: str
    write: str
    is_silent: bool


class Found(NamedTuple):
    """A line that a rule knows."""

    path: str
    line: int
    text: str
    rule: Rule

    def __str__(self) -> str:
        silent = " (nothing tells of it while it runs)" if self.rule.is_silent else ""
        return f"{self.path}:{self.line}: {self.text}{silent}\n    write: {self.rule.write}"


BACKWARD = Rule("`loss.backward()`", "`opt.backward(loss)`", False)
CLIP = Rule(
    "`clip_grad_norm_(model.parameters(), 1.0)`, or",
    "`opt.clip_master_grads(1.0)`; for other edits `opt.update_master_grads()` after them",
    False,
)
GRAD_DATA = Rule("`p.grad.data.clamp_(-1, 1)`", "`opt.clip_master_values(1.0)`", True)
GRAD_SET = Rule(
    "`p.grad = g`",
    "`torch.autograd.grad(opt.scale_loss(loss), ...)`, then `opt.update_master_grads()`",
    False,
)
HOOK = Rule(
    "`p.register_hook",
    "`opt.clip_master_values(1.0)` after the last backward; `grad / opt.loss_scale` to read",
    True,
)
DATA = Rule(
    "`p.data.clamp_",
    "`with torch.no_grad():` clamp each of `opt.master_params()`; then `opt.write_masters()`",
    True,
)
SCALER = Rule(
    "`scaler.scale(loss).backward()`",
    "drop one: `opt.backward(loss)` and `opt.step()`, or construct `opt` without `dynamic`, `loss_scale`, `scaler`",
    False,
)
SAVED = Rule("`torch.save(model", "`opt.fp32_state_dict(model)` for FP32", True)
AVERAGED = Rule("`AveragedModel(model)`", "[`AveragedMasters`](averages.md)", True)
GET_SCALE = Rule("`scale_before", "`opt.step_was_skipped`, `opt.skipped_steps`", True)
APEX = Rule(
    "`from apex",
    "run it with `python -m fp16opt.apex`, or `from fp16opt import amp`: [from apex](from-apex.md)",
    False,
)
RULES = (BACKWARD, CLIP, GRAD_DATA, GRAD_SET, HOOK, DATA, SCALER, SAVED, AVERAGED, GET_SCALE, APEX)

_CLIPS = ("clip_grad_norm_", "clip_grad_value_", "clip_grads_with_norm_")
_OURS = ("master_params", "model_params")


def find(path: str | os.PathLike[str]) -> list[Found]:
    """What the rules know in a file, by line.

    Raises:
        OSError: It can't be read.
        SyntaxError: It is no Python.

    Example:
        >>> import tempfile
        >>> file = Path(tempfile.mkdtemp(), "train.py")
        >>> _ = file.write_text("loss.backward()\\nfor p in net.parameters():\\n    p.grad.data.clamp_(-1, 1)\\n")
        >>> [(one.line, one.rule is GRAD_DATA) for one in find(file)]
        [(1, False), (3, True)]
    """
    source = Path(path).read_text(encoding="utf-8")
    lines = source.splitlines()
    found: dict[tuple[int, str], Found] = {}
    tree = ast.parse(source, str(path))
    scaled = {name for node in ast.walk(tree) if isinstance(node, ast.With) for name in _scaled_by(node)}
    for node in ast.walk(tree):
        for rule in _rules_of(node):
            if rule is BACKWARD and ast.unparse(node).partition(".")[0] in scaled:
                continue
            at = int(getattr(node, "lineno", 0))
            found[at, rule.row] = Found(str(path), at, lines[at - 1].strip(), rule)
    return [found[key] for key in sorted(found)]


def _scaled_by(node: ast.With) -> Iterator[str]:
    """Names of losses that ``with amp.scale_loss(loss, optimizer) as name`` scales."""
    for item in node.items:
        if _called(item.context_expr) == "scale_loss" and item.optional_vars is not None:
            yield ast.unparse(item.optional_vars)


def _rules_of(node: ast.AST) -> Iterator[Rule]:
    if isinstance(node, ast.Call):
        yield from _of_call(node)
    elif isinstance(node, ast.Assign) and any(map(_is_grad, node.targets)):
        if not (isinstance(node.value, ast.Constant) and node.value.value is None):
            yield GRAD_SET
    elif isinstance(node, ast.AugAssign) and _is_grad(node.target):
        yield CLIP
    elif isinstance(node, ast.AugAssign) and _is_grad_data(node.target):
        yield GRAD_DATA
    elif isinstance(node, ast.AugAssign) and _is_attribute(node.target, "data"):
        yield DATA
    elif isinstance(node, (ast.Import, ast.ImportFrom)):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
        if any(name.split(".")[0] == "apex" for name in names):
            yield APEX


def _of_call(call: ast.Call) -> Iterator[Rule]:
    name = _called(call)
    holder = call.func.value if isinstance(call.func, ast.Attribute) else None
    if name == "backward" and holder is not None and not call.args:
        yield SCALER if isinstance(holder, ast.Call) and _called(holder) == "scale" else BACKWARD
    elif name in _CLIPS and call.args and not _is_ours(call.args[0]):
        yield CLIP
    elif name.endswith("_") and not name.endswith("__") and name != "zero_" and holder is not None:
        if _is_grad_data(holder):
            yield GRAD_DATA
        elif _is_grad(holder):
            yield CLIP
        elif _is_attribute(holder, "data"):
            yield DATA
    elif name == "register_hook":
        yield HOOK
    elif name == "AveragedModel":
        yield AVERAGED
    elif name == "get_scale":
        yield GET_SCALE
    elif name == "save" and any(_called(one) == "state_dict" for one in _calls_in(call.args[:1])):
        yield SAVED


def _called(call: ast.AST) -> str:
    """The last name of what is called."""
    func = call.func if isinstance(call, ast.Call) else None
    return str(getattr(func, "attr", getattr(func, "id", "")))


def _calls_in(nodes: list[ast.expr]) -> Iterator[ast.AST]:
    for node in nodes:
        for one in ast.walk(node):
            if isinstance(one, ast.Call) and "model" in ast.dump(one.func).lower():
                yield one


def _is_attribute(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Attribute) and node.attr == name and not _is_attribute(node.value, "grad")


def _is_grad(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and node.attr == "grad"


def _is_grad_data(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and node.attr == "data" and _is_grad(node.value)


def _is_ours(given: ast.expr) -> bool:
    """Whether what is clipped is asked of the wrapper."""
    return any(_called(one) in _OURS for one in ast.walk(given))


def add_arguments(parser: Any) -> None:
    """Of the command."""
    parser.add_argument("files", nargs="+", metavar="FILE", help="a script; a folder is searched for *.py")


def answer(given: argparse.Namespace, say: Callable[[str], object]) -> int:
    """Say what was found: 0 where that is nothing, else 1.

    Raises:
        OSError, SyntaxError: A file can't be read.
    """
    paths = [Path(name) for name in given.files]
    files = [file for path in paths for file in (sorted(path.rglob("*.py")) if path.is_dir() else [path])]
    found = [one for file in files for one in find(file)]
    for one in found:
        say(str(one))
    lines = f"{len(found)} line{'' if len(found) == 1 else 's'}"
    say(f"{lines} in {len(files)} file{'' if len(files) == 1 else 's'}. docs/old-lines.md has what each does.")
    return int(bool(found))
