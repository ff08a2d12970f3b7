"""Which optimizer classes have a one-pass kernel: rows, made of formulas, that say what groups and state mean to it."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..kernels import backend, operations
from ..kernels.formulas import FORMULAS, Formula

Columns = dict[str, "list[Tensor | None]"]


class CannotServe(Exception):
    """Something about a gradient or about optimizer state needs the wrapped optimizer's own step."""


def check_state(name: str, tensor: object, master: Tensor) -> None:
    """Raise :class:`CannotServe` unless this is FP32 state as torch keeps it. No sync."""
    if not isinstance(tensor, Tensor):
        raise CannotServe(f"the state of a parameter has no tensor {name!r}")
    if tensor.dtype != torch.float32 or (tensor.shape != master.shape and name != "step"):
        dtype = str(tensor.dtype).removeprefix("torch.")
        raise CannotServe(f"state {name!r} is {dtype} of shape {tuple(tensor.shape)}")
    away = tensor.device != master.device and not (name == "step" and tensor.device.type == "cpu")
    if tensor.layout is not torch.strided or away or tensor.requires_grad:
        raise CannotServe(f"state {name!r} is not a dense tensor on {master.device}")


@dataclass(frozen=True)
class OnePassRow:
    """What a one-pass step needs to know of an optimizer class.

    Attributes:
        numbers: settings of a group that must be numbers.
        options: from a group's settings to the kernel's. No sync: an lr that is a tensor stays one.
        state: names of the state tensors that a group's parameters need.
        make: fills the state of a parameter that has none: (state, group, model parameter).
        call: the kernel: (columns, options, group_of, factors, first, the rest by keyword).
        fills_first: whether a state tensor that is new holds nothing before the first step, which fills it.
        check: raises :class:`CannotServe` unless a kernel takes a state tensor: (name, tensor, master).
        wanted: settings without which there is no step.
        neutral: settings that a class may lack, and what they are then.
        keys: from a setting to the group's key for it, or keys for its parts, where the class is not torch's own; such
            a class is tried before it is believed (one_pass_trial.py).
    """

    numbers: tuple[str, ...]
    options: Callable[[dict[str, Any]], Any]
    state: Callable[[dict[str, Any]], tuple[str, ...]]
    make: Callable[[dict[str, Any], dict[str, Any], Tensor], None]
    call: Callable[..., None]
    fills_first: bool
    check: Callable[[str, object, Tensor], None] = check_state
    wanted: tuple[str, ...] = ("lr",)
    neutral: Mapping[str, Any] = field(default_factory=dict)
    keys: Mapping[str, str | tuple[str, ...]] = field(default_factory=dict)

    def keys_used(self) -> list[str]:
        """The keys that :meth:`settings` looks for in a group of a class that is not torch's own."""
        return [part for key in self.keys.values() for part in ((key,) if isinstance(key, str) else key)]

    def settings(self, group: dict[str, Any]) -> dict[str, Any]:
        """A group's settings under the names that the functor's own class has for them."""
        if not self.keys:
            return group
        told = {
            name: group[key] if isinstance(key, str) else tuple(group[part] for part in key)
            for name, key in self.keys.items()
        }
        return {**self.neutral, **told}


def steps_on_device(device: torch.device) -> bool:
    """Whether kernels step parameters on ``device`` that read counters and the decision to skip there. No sync.

    Example:
        >>> steps_on_device(torch.device("meta"))
        False
    """
    return backend(device) == "cuda"


def new_counter(group: dict[str, Any], model: Tensor) -> Tensor:
    """A parameter's counter of steps at 0: where torch keeps it, or where kernels want it. No sync."""
    beside = group.get("fused") or group.get("capturable") or steps_on_device(model.device)
    return torch.zeros((), dtype=torch.float32, device=model.device if beside else torch.device("cpu"))


# -- from formulas to rows, and which class has which ------------------------------------------------------------------


def _make_state(formula: Formula, state: dict[str, Any], group: dict[str, Any], model: Tensor) -> None:
    """As torch's own classes make it; what the first step fills holds anything."""
    new = torch.empty_like if formula.fills_first else torch.zeros_like
    for name in formula.state_of(group):
        of_shape = name != "step"
        state[name] = new(model, dtype=torch.float32, requires_grad=False) if of_shape else new_counter(group, model)


def _row(name: str, formula: Formula) -> OnePassRow:
    return OnePassRow(
        formula.numbers(),
        formula.options_of,
        formula.state_of,
        functools.partial(_make_state, formula),
        functools.partial(operations.step_columns, name, formula),
        formula.fills_first,
        wanted=formula.wanted,
        neutral=formula.neutral,
    )


FUNCTORS = {name: _row(name, formula) for name, formula in FORMULAS.items()}
"""What is compiled, by name."""

ROWS: dict[type[Optimizer], OnePassRow] = {
    cls: FUNCTORS[name] for name, formula in FORMULAS.items() for cls in formula.classes
}
"""By class; one_pass_classes.py adds those that users register."""

_PACKAGED = {
    tuple(path.split(".")): replace(FUNCTORS[name], keys=keys)
    for name, formula in FORMULAS.items()
    for path, keys in formula.packaged.items()
}


def row_of(cls: type) -> OnePassRow | None:
    """The row of exactly this class: of torch.optim, registered, or of a package; None where it has none.

    Imports nothing: who has an optimizer of a package has imported it.

    Example:
        >>> row_of(torch.optim.SGD) is FUNCTORS["sgd"], row_of(torch.optim.Adagrad) is None
        (True, True)
    """
    if cls in ROWS:
        return ROWS[cls]
    for (package, name), row in _PACKAGED.items():
        module = sys.modules.get(package)
        if module is not None and getattr(module, name, None) is cls:
            return row
    return None


def no_row(cls: type) -> str:
    """That a class has no one-pass step, in words."""
    return f"{cls.__name__} is not exactly SGD, Adam or AdamW of torch.optim, Lion, or a registered class"


# -- what stands in the way --------------------------------------------------------------------------------------------


def group_obstacle(row: OnePassRow, group: dict[str, Any]) -> str:
    """Why a group can't be stepped by the kernel now, in words; "" where it can. No sync."""
    if group.get("differentiable"):
        return "differentiable=True"
    if group.get("capturable") and not all(map(steps_on_device, {param.device for param in group["params"]})):
        return "capturable=True"  # for a graph, which torch operations here could not be part of
    missing = [key for key in row.keys_used() if key not in group] if row.keys else []
    if missing:
        return f"no {missing[0]!r}"
    group = row.settings(group)
    lr = group["lr"]
    if isinstance(lr, Tensor) and (lr.numel() != 1 or lr.requires_grad):
        return "an lr that is a tensor of several elements or requires grad"
    betas = group.get("betas", ())
    for name in ("lr", *row.numbers):
        if not isinstance(group[name], (int, float)) and not (name == "lr" and isinstance(lr, Tensor)):
            return f"a {name} of type {type(group[name]).__name__}"
    for beta in betas:
        if not isinstance(beta, (int, float)):
            return f"a betas of type {type(beta).__name__}"
        if not 0.0 <= beta < 1.0:
            return f"betas of {betas}"
    return ""


# -- counters of steps -------------------------------------------------------------------------------------------------
#
# torch keeps the counters of groups that are neither ``fused`` nor ``capturable`` on the host. Kernels that can skip
# count beside the parameters. torch's own steps take these, but wait for each; so they go back before torch's own step
# runs, and in checkpoints.


def bring_counter(state: dict[str, Any], device: torch.device) -> None:
    """Have a parameter's counter on ``device`` where kernels want it there. No sync."""
    step = state.get("step")
    if isinstance(step, Tensor) and step.device != device and steps_on_device(device):
        state["step"] = step.to(device, non_blocking=True)


def _stays(group: dict[str, Any]) -> bool:
    return bool(group.get("fused") or group.get("capturable"))


def _is_away(state: dict[str, Any] | None) -> bool:
    step = None if state is None else state.get("step")
    return isinstance(step, Tensor) and step.device.type != "cpu" and step.numel() == 1


def _on_host(counters: list[Tensor]) -> list[Tensor]:
    """Copies on the host, with one wait for each device."""
    found: list[Tensor] = list(counters)
    for device in {step.device for step in counters}:
        places = [k for k, step in enumerate(counters) if step.device == device]
        values = torch.stack([counters[k].reshape(()) for k in places]).cpu()
        for k, value in zip(places, values.unbind(), strict=True):
            found[k] = value.clone().reshape(counters[k].shape)
    return found


def counters_to_host(optimizer: Optimizer) -> None:
    """Before ``optimizer`` steps itself: its counters where torch has them. Syncs where one was elsewhere."""
    groups = [group for group in optimizer.param_groups if not _stays(group)]
    states = [optimizer.state[p] for group in groups for p in group["params"] if _is_away(optimizer.state.get(p))]
    for state, step in zip(states, _on_host([state["step"] for state in states]), strict=True):
        state["step"] = step


def counters_saved(state_dict: dict[str, Any]) -> dict[str, Any]:
    """An optimizer's ``state_dict()`` with the counters where torch has them; the optimizer keeps its own.

    Syncs where one was elsewhere.
    """
    groups = [group for group in state_dict["param_groups"] if not _stays(group)]
    keys = [key for group in groups for key in group["params"] if _is_away(state_dict["state"].get(key))]
    if not keys:
        return state_dict
    states = dict(state_dict["state"])
    for key, step in zip(keys, _on_host([states[key]["step"] for key in keys]), strict=True):
        states[key] = {**states[key], "step": step}
    return {**state_dict, "state": states}
