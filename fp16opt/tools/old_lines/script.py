"""What a script as a whole tells: what wraps its optimizers, what scales its losses."""

from __future__ import annotations

import ast
import enum
import re
from dataclasses import dataclass, field

_WRAPPERS = ("MixedPrecisionOptimizer", "FP16_Optimizer")
_SCALES = {
    "dynamic": (False,),
    "loss_scale": (None, 1, 1.0),
    "scaler": (None,),
    "dynamic_loss_scale": (False,),
    "static_loss_scale": (1, 1.0),
}
"""Arguments that give a wrapper a scale, and their values that give none."""
_OPTIMIZER = re.compile(r"^(SGD|Adam\w*|Adagrad|Lion|Muon|RMSprop|LBFGS|LAMB|SAM|Fused\w+)$")
_TRUE_LEVELS = ("O0", "O1", "O3")
"""Levels of amp at which the model's gradients are true ones after ``amp.scale_loss``."""


class Scaling(enum.Enum):
    """What multiplies the losses of a script, as far as its text tells."""

    UNKNOWN = "the script wraps nothing: it is read as if its optimizer had a scale"
    OWN = "a wrapper has a scale"
    NONE = "wrappers have none"
    EXTERNAL = "a GradScaler's, of wrapped optimizers"
    GRAD_SCALER = "a GradScaler's, and nothing is wrapped"
    AMP = "amp.scale_loss, and the model's gradients stay scaled"
    AMP_TRUE = "amp.scale_loss, which leaves true gradients"


@dataclass
class Facts:
    """What a script has, wherever it stands.

    Attributes:
        functions: by name.
        modules: names of what is imported.
        updates: lines that call ``update_master_grads()``.
        optimizers: lines that construct an optimizer.
        knows_masters: whether it asks a wrapper for masters.
        is_summed: whether gradients go to FP32 sums.
        takes_losses: whether an object's ``backward(loss)`` is called.
    """

    scaling: Scaling = Scaling.UNKNOWN
    functions: dict[str, ast.FunctionDef | ast.AsyncFunctionDef] = field(default_factory=dict)
    modules: set[str] = field(default_factory=lambda: {"torch", "nn"})
    updates: list[int] = field(default_factory=list)
    optimizers: list[int] = field(default_factory=list)
    knows_masters: bool = False
    is_summed: bool = False
    takes_losses: bool = False
    ships_fp32: bool = False


def called(call: ast.AST) -> str:
    """The last name of what is called."""
    return name_of(call.func) if isinstance(call, ast.Call) else ""


def name_of(node: ast.AST) -> str:
    """The last name of a dotted one; "" of what has none."""
    return str(getattr(node, "attr", getattr(node, "id", "")))


def root(node: ast.AST) -> str:
    """The first name of a dotted one."""
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def is_given_a_loss(call: ast.Call) -> bool:
    """Whether ``backward`` is of an object that gets the loss, not of the loss itself."""
    if any(word.arg == "loss" for word in call.keywords):
        return True
    return bool(call.args) and not (_is_none(call.args[0]) or _looks_like_a_gradient(call.args[0]))


def _is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def _looks_like_a_gradient(node: ast.expr) -> bool:
    names = [name_of(one).lower() for one in ast.walk(node)]
    return any("grad" in name or name in ("ones", "ones_like", "full_like", "randn_like") for name in names)


def facts_of(tree: ast.Module) -> Facts:
    """Read them."""
    facts = Facts()
    wrappers: list[ast.Call] = []
    levels: list[str | None] = []
    has_grad_scaler = has_amp = False
    ours = _names_of_ours(tree)
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            facts.functions[node.name] = node
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            facts.modules |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
        elif isinstance(node, ast.Call):
            name = called(node)
            if name in _WRAPPERS or _is_of_our_optim(node, ours):
                wrappers.append(node)
            if name in _WRAPPERS or _constructs_an_optimizer(node):
                facts.optimizers.append(node.lineno)
            has_grad_scaler |= name in ("GradScaler", "ShardedGradScaler") or name == "unscale_"
            has_amp |= name == "scale_loss" and bool(node.args[1:])
            levels += _level_of(node)
            if name == "update_master_grads":
                facts.updates.append(node.lineno)
            facts.knows_masters |= name == "master_params"
            facts.ships_fp32 |= name == "fp32_state_dict"
            is_method = isinstance(node.func, ast.Attribute) and name_of(node.func.value) != "autograd"
            facts.takes_losses |= name == "backward" and is_method and is_given_a_loss(node)
    facts.is_summed = any(_gives(one, "grad_accumulation", ("model",)) for one in wrappers)
    facts.scaling = _scaling(wrappers, has_grad_scaler, has_amp, levels)
    return facts


def _names_of_ours(tree: ast.Module) -> set[str]:
    """What ``from fp16opt.optim import ...`` brings."""
    brought = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module == "fp16opt.optim"]
    return {alias.asname or alias.name for node in brought for alias in node.names}


def _is_of_our_optim(call: ast.Call, ours: set[str]) -> bool:
    return (isinstance(call.func, ast.Name) and call.func.id in ours) or ast.unparse(call.func).startswith(
        "fp16opt.optim."
    )


def _constructs_an_optimizer(call: ast.Call) -> bool:
    """By its name, or as a class that is given a model's parameters."""
    name = called(call)
    given = {called(one) for argument in call.args[:1] for one in ast.walk(argument)}
    of_parameters = name[:1].isupper() and not given.isdisjoint(("parameters", "named_parameters"))
    return of_parameters or bool(_OPTIMIZER.search(name))


def _level_of(call: ast.Call) -> list[str | None]:
    """Of an ``amp.initialize``; None where it is not written there."""
    if called(call) != "initialize" or len(call.args) < 1 or name_of(getattr(call.func, "value", call)) == "hydra":
        return []
    given = [word.value for word in call.keywords if word.arg == "opt_level"] or call.args[3:4]
    if not given:
        return ["O1"]
    return [given[0].value if isinstance(given[0], ast.Constant) else None]  # type: ignore[list-item]


def _gives(call: ast.Call, argument: str, nothing: tuple[object, ...]) -> bool:
    """Whether a call gives an argument a value that is none of these."""
    for word in call.keywords:
        if word.arg == argument:
            return not (isinstance(word.value, ast.Constant) and word.value.value in nothing)
    return False


def _scaling(wrappers: list[ast.Call], has_grad_scaler: bool, has_amp: bool, levels: list[str | None]) -> Scaling:
    if has_amp:
        return Scaling.AMP_TRUE if levels and all(level in _TRUE_LEVELS for level in levels) else Scaling.AMP
    if not wrappers:
        return Scaling.GRAD_SCALER if has_grad_scaler else Scaling.UNKNOWN
    spreads = any(word.arg is None for one in wrappers for word in one.keywords)
    if spreads or any(_gives(one, argument, none) for one in wrappers for argument, none in _SCALES.items()):
        return Scaling.OWN
    return Scaling.EXTERNAL if has_grad_scaler else Scaling.NONE
