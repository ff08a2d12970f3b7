"""Finds, in a script that is read and never run, the lines of which a rule tells.

A line is known by its shape, and by where its names come from: ``p`` of ``opt.master_params()`` is a master, whose
gradient may be read and edited; ``p`` of ``model.parameters()`` is not.
"""

from __future__ import annotations

import ast
import enum
import os
import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple, TypeGuard

from . import rules
from .rules import Rule
from .script import Facts, Scaling, called, facts_of, is_given_a_loss, name_of, root
from .sources import Source, UnreadableError, read


class Limit(NamedTuple):
    """What a line clips to: whether by the norm, and its numbers as they stand there."""

    is_norm: bool
    numbers: str


class Found(NamedTuple):
    """A line that a rule knows."""

    path: str
    line: int
    text: str
    rule: Rule
    limit: Limit | None = None

    @property
    def write(self) -> str:
        """What to write, with the numbers that stand in the line."""
        if self.limit is None:
            return self.rule.write
        advice = self.rule.write
        if not self.limit.is_norm:
            advice = advice.replace("clip_master_grads(", "clip_master_values(").replace("grad_norm_(", "grad_value_(")
        return advice.replace("1.0)", f"{self.limit.numbers})", 1)

    def __str__(self) -> str:
        silent = " (nothing tells of it while it runs)" if self.rule.is_silent else ""
        return f"{self.path}:{self.line}: {self.text}{silent}\n    write: {self.write}"


class From(enum.Flag):
    """What a name, or an expression, was made of."""

    MASTERS = enum.auto()
    PARAMETERS = enum.auto()
    ARGUMENT = enum.auto()  # of a function
    SCALED_LOSS = enum.auto()
    GRAD_SCALER_LOSS = enum.auto()
    MODEL_STATE = enum.auto()
    OPTIMIZER_STATE = enum.auto()


NOWHERE = From(0)
_CALLS = {
    "master_params": From.MASTERS,
    "parameters": From.PARAMETERS,
    "named_parameters": From.PARAMETERS,
    "model_params": From.PARAMETERS,
    "Parameter": From.PARAMETERS,
    "scale_loss": From.SCALED_LOSS,
    "fp32_state_dict": From.OPTIMIZER_STATE,
}
_CLIPS = (
    "clip_grad_norm_",
    "clip_grad_norm",
    "clip_grad_value_",
    "clip_grad_value",
    "clip_grads_with_norm_",
    "dispatch_clip_grad",
    "adaptive_clip_grad",
)
_READS = ("norm", "vector_norm", "get_total_norm", "_foreach_norm", "pow", "square", "mean", "std", "var", "histc")
_HOOKS = ("register_hook", "register_post_accumulate_grad_hook", "register_full_backward_hook")
_BY_SIZE = re.compile(
    r"^(_foreach_)?(clamp|clamp_min|clamp_max|clip|norm|nan_to_num|hardtanh|tanh|threshold|add|sub)_?$"
)
"""Calls whose answer is another one where a gradient is multiplied by the scale."""
_LOGS = ("append", "print", "log", "add_scalar", "add_histogram", "item")
_HARMLESS = ("zero_", "detach_", "requires_grad_", "record_stream", "retain_grad")
_VIEWS = ("view", "view_as", "flatten", "reshape", "narrow", "select", "squeeze", "unsqueeze", "t", "transpose")
_SOME_ELEMENTS = re.compile(
    r"^(_foreach_)?(clamp|clamp_min|clamp_max|clip|where|masked_fill|masked_scatter|index_\w+|scatter\w*|put|relu|renorm"
    r"|fill_diagonal|threshold|hardtanh|hardshrink|softshrink|maximum|minimum|fmax|fmin)_?$"
)
"""Operations that leave most elements as they are: through ``.data`` nothing may notice what they write."""
_AVERAGES = (
    "AveragedModel",
    "EMA",
    "ModelEMA",
    "ModelEma",
    "ModelEmaV2",
    "ModelEmaV3",
    "EMAModel",
    "ExponentialMovingAverage",
)
_AVERAGING_CALLBACKS = ("StochasticWeightAveraging", "EMAWeightAveraging", "WeightAveraging")
_BEFORE_TRAINING = re.compile(r"init|reset|build|create|make|load|restore|tie|convert", re.IGNORECASE)
_OF_A_MODEL = re.compile(r"model|^net|net$|module|coder|backbone|generator|discriminator|critic|actor|policy|former")
_OF_AN_OPTIMIZER = re.compile(r"opt|sched|scaler|sgd|adam", re.IGNORECASE)
_IS_PARAMETER = re.compile(r"^(p|q|w)$|param|weight|bias")
_EXEMPT_IN_LOSSES = (Scaling.NONE, Scaling.AMP_TRUE)


def find(path: str | os.PathLike[str]) -> list[Found]:
    """What the rules know in a script or a notebook, by line.

    Raises:
        UnreadableError: it can't be read, or is no Python.

    Example:
        >>> import pathlib, tempfile
        >>> file = pathlib.Path(tempfile.mkdtemp(), "train.py")
        >>> _ = file.write_text("loss.backward()\\nfor p in net.parameters():\\n    p.grad.data.clamp_(-1, 1)\\n")
        >>> [(one.line, one.rule is rules.GRAD_DATA) for one in find(file)]
        [(1, False), (3, True)]
    """
    return look(path)[0]


def look(path: str | os.PathLike[str]) -> tuple[list[Found], Scaling]:
    """As :func:`find`, and what scales the script's losses."""
    source = read(path)
    facts = facts_of(source.tree)
    walk = _Walk(facts)
    try:
        walk.block(source.tree.body)
    except RecursionError:
        raise UnreadableError(f"{path}: its expressions are nested too deep.") from None
    return _in_order(walk.found, source), facts.scaling


def _in_order(rules_at: dict[tuple[int, Rule], Limit | None], source: Source) -> list[Found]:
    found = []
    for (line, rule), limit in sorted(rules_at.items(), key=lambda one: (one[0][0], one[0][1].row)):
        path, number = source.places[line - 1]
        found.append(Found(path, number, source.lines[line - 1].strip(), rule, limit))
    return found


def _limit_of(node: ast.AST) -> Limit | None:
    """What a clip in a line clips to; None where there is none, or its numbers are not those of a symmetric range."""
    for call in ast.walk(node):
        if not isinstance(call, ast.Call):
            continue
        name, named = called(call), {word.arg: ast.unparse(word.value) for word in call.keywords}
        given = [ast.unparse(argument) for argument in call.args]
        if name in _CLIPS and "mode" not in named:
            is_norm = "value" not in name
            here = given[1:] if "parameters" not in named else given
            here += [named[key] for key in ("max_norm", "clip_value") if key in named]
            more = [f"{key}={named[key]}" for key in ("norm_type", "error_if_nonfinite") if key in named]
            numbers = here[: 3 if name.startswith("clip_grad_norm") else 1] + more
            return Limit(is_norm, ", ".join(numbers)) if here else None
        if name in ("clamp", "clamp_", "clip", "clip_"):
            lowest, highest = given[-2:] if len(given) > 1 else [named.get("min", ""), named.get("max", "")]
            return Limit(False, highest) if highest and lowest == f"-{highest}" else None
    return None


class _Walk:
    """Goes through a script as it stands, with what each name was last bound to."""

    def __init__(self, facts: Facts) -> None:
        self.facts = facts
        self.found: dict[tuple[int, Rule], Limit | None] = {}
        self.names: dict[str, From] = {}
        self.attributes: dict[str, From] = {}
        self.scope = ""
        self.scope_ends = 10**9

    # -- names ---------------------------------------------------------------------------------------------------------

    def origin(self, node: ast.AST) -> From:
        """Of all that stands in an expression."""
        found, names = NOWHERE, self.names_in(node)
        for one in ast.walk(node):
            if isinstance(one, ast.Name):
                found |= names.get(one.id, NOWHERE)
            elif isinstance(one, ast.Attribute):
                found |= self.attributes.get(ast.unparse(one), NOWHERE)
                found |= From.MASTERS if one.attr == "param_groups" else NOWHERE
            elif isinstance(one, ast.Call):
                found |= _CALLS.get(called(one), NOWHERE) | _made_by(one)
        return found

    def names_in(self, node: ast.AST) -> dict[str, From]:
        """Those that are known, and those that comprehensions inside an expression bind."""
        inside = [one for one in ast.walk(node) if isinstance(one, ast.comprehension) and one.iter is not node]
        if not inside:
            return self.names
        outer, self.names = self.names, dict(self.names)
        try:
            for one in inside:
                self.bind(one.target, one.iter)
            return self.names
        finally:
            self.names = outer

    def bind(self, target: ast.AST, value: ast.AST) -> None:
        if isinstance(target, (ast.Tuple, ast.List)):
            parts: list[ast.expr] = []
            if isinstance(value, (ast.Tuple, ast.List)):
                parts = value.elts
            elif called(value) == "zip":
                parts = value.args  # type: ignore[attr-defined]
            elif called(value) == "enumerate":
                parts = [ast.Constant(0), value.args[0]]  # type: ignore[attr-defined]
            same = len(parts) == len(target.elts)
            for index, one in enumerate(target.elts):
                self.bind(one, parts[index] if same else value)
        elif isinstance(target, ast.Starred):
            self.bind(target.value, value)
        elif isinstance(target, ast.Name):
            self.names[target.id] = self.origin(value)
        elif isinstance(target, ast.Attribute):
            self.attributes[ast.unparse(target)] = self.origin(value)
        elif isinstance(target, ast.Subscript) and isinstance(target.value, ast.Name):
            name = target.value.id
            self.names[name] = self.names.get(name, NOWHERE) | self.origin(value)

    def is_of_a_model(self, node: ast.AST) -> bool:
        """Whether parameters, or one, are the model's own as far as is known, and no masters."""
        origin = self.origin(node)
        if From.MASTERS in origin:
            return False
        return From.PARAMETERS in origin or not (From.ARGUMENT in origin and self.facts.knows_masters)

    def is_a_parameter(self, node: ast.expr) -> bool:
        """Whether a tensor is a parameter by its origin or its name: inputs have gradients and data, too."""
        if From.PARAMETERS in self.origin(node) or _IS_PARAMETER.search(name_of(node)):
            return True
        parts = [name_of(one) for one in ast.walk(node) if isinstance(one, (ast.Attribute, ast.Name))]
        return any(_OF_A_MODEL.search(part.lower()) for part in parts[1:])

    # -- the walk ------------------------------------------------------------------------------------------------------

    def block(self, body: Iterable[ast.AST]) -> None:
        for node in body:
            self.visit(node)

    def visit(self, node: ast.AST) -> None:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            self.function(node)
            return
        self.judge(node)
        if isinstance(node, (ast.For, ast.AsyncFor)):
            self.visit(node.iter)
            self.bind(node.target, node.iter)
            self.block(node.body + node.orelse)
        elif isinstance(node, (ast.ListComp, ast.SetComp, ast.GeneratorExp, ast.DictComp)):
            self.comprehension(node)
        elif isinstance(node, (ast.With, ast.AsyncWith)):
            for item in node.items:
                self.visit(item.context_expr)
                if item.optional_vars is not None:
                    self.bind(item.optional_vars, item.context_expr)
            self.block(node.body)
        else:
            self.block(ast.iter_child_nodes(node))
        if isinstance(node, ast.Assign):
            for target in node.targets:
                self.bind(target, node.value)
        elif isinstance(node, (ast.AnnAssign, ast.NamedExpr)) and node.value is not None:
            self.bind(node.target, node.value)

    def comprehension(self, node: ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp) -> None:
        outer = dict(self.names)
        for generator in node.generators:
            self.visit(generator.iter)
            self.bind(generator.target, generator.iter)
            self.block(generator.ifs)
        self.block([node.key, node.value] if isinstance(node, ast.DictComp) else [node.elt])
        self.names = outer

    def function(self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) -> None:
        outer = (self.names, self.scope, self.scope_ends)
        self.names = dict(self.names)
        given = node.args
        for argument in (*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg):
            if argument is not None:
                self.names[argument.arg] = From.ARGUMENT
        if isinstance(node, ast.Lambda):
            self.visit(node.body)
        else:
            self.scope, self.scope_ends = node.name, node.end_lineno or node.lineno
            self.block(node.decorator_list)
            self.block(node.body)
        self.names, self.scope, self.scope_ends = outer

    # -- the rules -----------------------------------------------------------------------------------------------------

    def judge(self, node: ast.AST) -> None:
        for rule in self.rules_of(node):
            self.found.setdefault((int(getattr(node, "lineno", 1)), rule), _limit_of(node))

    def rules_of(self, node: ast.AST) -> Iterator[Rule]:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            if any(name.split(".")[0] == "apex" for name in names) and not getattr(node, "level", 0):
                yield rules.APEX
        elif self.facts.scaling is Scaling.GRAD_SCALER:
            return  # torch's own protocol on weights that nothing wraps
        elif isinstance(node, ast.Call):
            yield from self.of_call(node)
        elif isinstance(node, ast.Assign):
            for target in node.targets:
                yield from self.of_write(target, node.value, node)
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            yield from self.of_write(node.target, node.value, node)
        elif isinstance(node, ast.AugAssign):
            name = {ast.Mult: "mul_", ast.Div: "div_"}.get(type(node.op), "add_")
            yield from self.of_in_place(node.target, name, node)

    def of_call(self, call: ast.Call) -> Iterator[Rule]:
        name = called(call)
        holder = call.func.value if isinstance(call.func, ast.Attribute) else None
        is_function = holder is None or root(holder) in self.facts.modules
        if name == "backward" and holder is not None:
            yield from self.of_backward(call, holder)
        elif name in _CLIPS:
            if is_function and self.is_of_a_model(_argument(call, "parameters", "model")):
                yield from self.of_edit(call, is_a_clip=True)
        elif name in _READS:
            yield from self.of_read(call, holder)
        elif name in _HOOKS and holder is not None and call.args:
            yield from self.of_hook(call, name, holder)
        elif name in _AVERAGES or name in _AVERAGING_CALLBACKS:
            if From.MASTERS not in self.origin(call):
                yield rules.AVERAGED
        elif name == "get_scale" and self.facts.scaling is Scaling.OWN:
            yield rules.GET_SCALE
        elif name in ("save", "save_file") and call.args:
            origin = self.origin(call.args[0])
            if From.MODEL_STATE in origin and From.OPTIMIZER_STATE not in origin and not self.facts.ships_fp32:
                yield rules.SAVED
        elif name.endswith("_") and not name.endswith("__"):
            target = call.args[0] if is_function and call.args else holder
            if isinstance(target, (ast.List, ast.Tuple)) and target.elts:
                target = target.elts[0]
            if target is not None:
                yield from self.of_in_place(target, name, call)

    def of_backward(self, call: ast.Call, holder: ast.expr) -> Iterator[Rule]:
        is_autograd = name_of(holder) == "autograd" and root(holder) in self.facts.modules
        if is_autograd:
            origin = self.origin(_argument(call, "tensors"))
        elif is_given_a_loss(call) or name_of(holder) == "self" or called(holder) == "super":
            return
        else:
            origin = self.origin(holder)
        if From.GRAD_SCALER_LOSS in origin:
            if self.facts.scaling is Scaling.OWN:
                yield rules.SCALER
        elif From.SCALED_LOSS not in origin and self.facts.scaling in (Scaling.UNKNOWN, Scaling.OWN):
            yield rules.BACKWARD

    def of_hook(self, call: ast.Call, name: str, holder: ast.expr) -> Iterator[Rule]:
        if self.facts.scaling in _EXEMPT_IN_LOSSES or name_of(call.args[0]) in self.facts.modules:
            return
        body = self.body_of(call.args[0])
        calls = {called(one) for part in body or () for one in ast.walk(part)}
        is_logged = body is None or any(name in calls for name in _LOGS)
        is_told = any(map(_BY_SIZE.match, calls)) or (is_logged and self.is_a_parameter(holder))
        if is_told and From.MASTERS not in self.origin(holder):
            yield rules.HOOK

    def body_of(self, hook: ast.expr) -> list[ast.AST] | None:
        """Of a function of this script; None where it is another's."""
        if isinstance(hook, ast.Lambda):
            return [hook.body]
        if called(hook) == "partial" and hook.args:  # type: ignore[attr-defined]
            hook = hook.args[0]  # type: ignore[attr-defined]
        function = self.facts.functions.get(name_of(hook))
        return None if function is None else list(function.body)

    # -- gradients and weights that are written ------------------------------------------------------------------------

    def of_edit(self, node: ast.AST, is_a_clip: bool = False, rule: Rule | None = None) -> Iterator[Rule]:
        """Of an edit of the model's gradients, which is right where they are true ones and are taken after it.

        Args:
            is_a_clip: whether it is another edit where the gradients are scaled.
            rule: what tells of it where nothing sums gradients, or unscales them elsewhere.
        """
        scaling, line = self.facts.scaling, int(getattr(node, "lineno", 0))
        is_taken = any(line <= update for update in self.facts.updates)
        if self.facts.is_summed:
            yield rules.SUMMED
        elif scaling is Scaling.NONE:
            if self.facts.takes_losses and not is_taken and rule is not rules.GRAD_DATA:
                yield rule or rules.CLIP
        elif scaling is Scaling.EXTERNAL:
            yield rules.GRAD_DATA if rule is rules.GRAD_DATA else rules.CLIP_UNSCALED
        elif scaling is Scaling.AMP:
            yield rules.GRAD_DATA if rule is rules.GRAD_DATA else rules.CLIP_AMP
        elif scaling is Scaling.AMP_TRUE or (rule is rules.GRAD_DATA and not is_a_clip):
            return  # nothing notices the write, and a product of scaled gradients is right
        elif is_a_clip or not is_taken:
            yield rule or rules.CLIP

    def of_read(self, call: ast.Call, holder: ast.expr | None) -> Iterator[Rule]:
        if self.facts.scaling in _EXEMPT_IN_LOSSES and not self.facts.is_summed:
            return
        grads = [one for part in (holder, *call.args) if part is not None for one in ast.walk(part) if _is_grad(one)]
        functions = {id(one.func) for one in ast.walk(call) if isinstance(one, ast.Call)}
        outer, self.names = self.names, self.names_in(call)
        params = [one.value for one in grads if id(one) not in functions]
        is_read = any(self.is_of_a_model(param) and self.is_a_parameter(param) for param in params)
        self.names = outer
        if is_read:
            yield rules.SUMMED if self.facts.is_summed else rules.GRAD_READ

    def of_in_place(self, target: ast.expr, name: str, node: ast.AST) -> Iterator[Rule]:
        """Of an operation in place on ``target``, or on each of a list."""
        if isinstance(target, (ast.ListComp, ast.GeneratorExp)):
            outer, self.names = self.names, self.names_in(target)
            yield from list(self.of_in_place(target.elt, name, node))
            self.names = outer
            return
        place = _place_of(target)
        if place is None or (name in _HARMLESS and not place.is_part) or not self.is_of_a_model(place.param):
            return
        if place.is_grad:
            by_size = bool(_BY_SIZE.match(name))
            yield from self.of_edit(node, by_size, rules.GRAD_DATA if place.through_data else None)
        elif place.through_data and self.is_a_parameter(place.param) and not self.is_before_training(node):
            by_mask = name == "mul_" and "mask" in ast.unparse(node).lower()
            if place.is_part or by_mask or _SOME_ELEMENTS.match(name):
                yield rules.DATA

    def of_write(self, target: ast.expr, value: ast.expr, node: ast.AST) -> Iterator[Rule]:
        """Of ``target = value``."""
        if isinstance(target, (ast.Tuple, ast.List)):
            for one in target.elts:
                yield from self.of_write(one, value, node)
            return
        place = _place_of(target)
        if place is None or not self.is_of_a_model(place.param) or name_of(place.param) in ("self", "ctx"):
            return
        if place.is_grad and not place.is_part and not place.through_data:
            if not _clears(value):
                edits = any(_is_grad(one) for one in ast.walk(value)) and not _asks_autograd(value)
                yield from self.of_edit(node, edits and _is_by_size(value), None if edits else rules.GRAD_SET)
        elif place.is_grad:
            if place.is_part or not _clears(value):
                yield from self.of_edit(node, _is_by_size(value), rules.GRAD_DATA if place.through_data else None)
        elif place.through_data and self.is_a_parameter(place.param) and not self.is_before_training(node):
            inside = list(ast.walk(value))
            by_mask = any(isinstance(one, ast.BinOp) for one in inside) and "mask" in ast.unparse(value).lower()
            some = any(_SOME_ELEMENTS.match(called(one)) for one in inside)
            if place.is_part or by_mask or some:
                yield rules.DATA

    def is_before_training(self, node: ast.AST) -> bool:
        """Whether weights are written before there is an optimizer: masters are made of what is written."""
        line = int(getattr(node, "lineno", 0))
        return bool(_BEFORE_TRAINING.search(self.scope)) or any(
            line < made <= self.scope_ends for made in self.facts.optimizers
        )


class _Place(NamedTuple):
    """What an operation writes: a parameter, or its gradient.

    Attributes:
        is_part: whether some elements of it alone.
        through_data: whether no version counter tells.
    """

    param: ast.expr
    is_grad: bool
    is_part: bool
    through_data: bool


def _place_of(target: ast.expr) -> _Place | None:
    """None where it is neither a gradient nor ``.data``."""
    is_part = through_data = False
    while True:
        if isinstance(target, ast.Subscript):
            is_part |= not _is_all(target.slice)
            target = target.value
        elif isinstance(target, ast.Call) and isinstance(target.func, ast.Attribute):
            if target.func.attr not in (*_VIEWS, "detach"):
                return None
            is_part |= target.func.attr in ("narrow", "select")
            target = target.func.value
        elif isinstance(target, ast.Attribute) and target.attr == "data":
            through_data, target = True, target.value
        elif _is_grad(target):
            return _Place(target.value, True, is_part, through_data)
        else:
            return _Place(target, False, is_part, through_data) if through_data else None


def _is_all(index: ast.expr) -> bool:
    """Of ``[:]`` and ``[...]``."""
    is_slice = isinstance(index, ast.Slice) and index.lower is index.upper is index.step is None
    return is_slice or (isinstance(index, ast.Constant) and index.value is Ellipsis)


def _is_grad(node: ast.AST) -> TypeGuard[ast.Attribute]:
    return isinstance(node, ast.Attribute) and node.attr == "grad" and name_of(node.value) != "autograd"


def _asks_autograd(value: ast.expr) -> bool:
    return any(called(one) == "grad" for one in ast.walk(value))


def _is_by_size(value: ast.expr) -> bool:
    return any(_BY_SIZE.match(called(one)) or isinstance(one, (ast.Add, ast.Sub)) for one in ast.walk(value))


def _clears(value: ast.expr) -> bool:
    """Of None and zeros."""
    return (isinstance(value, ast.Constant) and value.value in (None, 0)) or called(value) in ("zeros_like", "zeros")


def _argument(call: ast.Call, *names: str) -> ast.expr:
    """The first argument, also given by name."""
    if call.args:
        return call.args[0]
    return next((word.value for word in call.keywords if word.arg in names), ast.Constant(None))


def _made_by(call: ast.Call) -> From:
    """What a method whose object must be looked at gives."""
    holder = call.func.value if isinstance(call.func, ast.Attribute) else None
    name = name_of(holder) if holder is not None else ""
    if called(call) == "scale" and call.args and "scal" in name.lower():
        return From.GRAD_SCALER_LOSS
    if called(call) != "state_dict":
        return NOWHERE
    if _OF_AN_OPTIMIZER.search(name):
        return From.OPTIMIZER_STATE
    return From.MODEL_STATE if _OF_A_MODEL.search(name.lower()) else NOWHERE
