"""Whether a class that is not torch's steps as its row says: both ways on small tensors, before it is believed."""

from __future__ import annotations

from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from ..certify.buckets import settings_of
from ..certify.surroundings import undisturbed
from ..certify.trials import Setting, Trial, factory_like, quote
from ..kernels.reference_steps import Factors
from .one_pass_rows import OnePassRow, bring_counter

_SMALL = Setting(((5, 7), (9,), (), (70,)), "dense", "parameters of 0 to 2 dimensions")
_STEPS = 4
_LR, _DECAY = 0.01, 0.1
# A class's formulas may be rounded in other places, and contracted. Four steps of lr 0.01 move numbers of size 1 by
# 0.01 each, and each rounds a handful of times to 2^-24: 1e-5 is a hundred times that, and a thousandth of a move.
_TOLERANCE = 1e-5


class Trials:
    """What classes that are not torch's were found to do, with each kind of settings that their groups have had.

    Settings are of one kind where a class can be expected to step by the same formulas: numbers that the row knows are
    on or off alike, and all others are equal.
    """

    def __init__(self) -> None:
        self._found: dict[Any, str] = {}

    def difference(self, row: OnePassRow, optimizer: Optimizer, group: dict[str, Any]) -> str:
        """How the class of ``optimizer``, with settings of ``group``, steps otherwise than ``row``; "" if it agrees.

        The first time that a kind of settings is seen, four steps of small FP32 tensors on the CPU, in some
        milliseconds, with lr 0.01 and weight decay, where there is any, of 0.1: at those of the groups an update may be
        too small to show. Leaves random state and defaults as they were.
        """
        kind = type(optimizer), _kind(row, group)
        if kind not in self._found:
            with undisturbed():
                try:
                    found = _difference(row, optimizer, _visible(row, settings_of(group)))
                except Exception as error:
                    found = f"can't be tried on small tensors: {quote(error)}"
            self._found[kind] = found
        return self._found[kind]


def _kind(row: OnePassRow, group: dict[str, Any]) -> tuple[Any, ...]:
    known = set(row.keys_used())
    return tuple(
        (key, _on_or_off(value) if key in known else repr(value))
        for key, value in group.items()
        if key != "params" and key != row.keys["lr"]
    )


def _on_or_off(value: Any) -> Any:
    if isinstance(value, (tuple, list)):  # betas, which some schedulers change at every step
        return tuple(map(_on_or_off, value))
    return bool(value) if isinstance(value, (int, float)) else repr(value)


def _visible(row: OnePassRow, settings: dict[str, Any]) -> dict[str, Any]:
    """``settings`` with an lr and a weight decay that show."""
    shown: dict[Any, Any] = {row.keys["lr"]: _LR}
    if "weight_decay" in row.keys and row.settings(settings)["weight_decay"]:
        shown[row.keys["weight_decay"]] = _DECAY
    return {**settings, **shown}


def _own_ways(optimizer: Optimizer) -> dict[str, Any]:
    """What a class keeps beside its groups that may change how it steps: numbers, words and functions."""
    kinds = (bool, int, float, str, type(None), FunctionType)
    return {name: value for name, value in vars(optimizer).items() if isinstance(value, kinds) and name != "step"}


def _difference(row: OnePassRow, optimizer: Optimizer, settings: dict[str, Any]) -> str:
    trial = Trial(factory_like(optimizer, settings), _SMALL)
    params, own = trial.make()
    vars(own).update(_own_ways(optimizer))
    group = row.settings({**own.param_groups[0], **settings})
    others = [Parameter(param.detach().clone()) for param in params]
    names = row.state(group)
    states: list[dict[str, Any]] = [{} for _ in others]
    for step in range(_STEPS):
        trial.train(params, own, 1, first=step)
        _step(row, group, names, others, states, trial.gradients(others, step), step)
        for param, other, state in zip(params, others, states, strict=True):
            found = _state_difference(names, own.state[param], state) or _apart("weights", param, other)
            if found:
                return f"{found} after {step + 1} step{'s' if step else ''}"
    return ""


def _step(
    row: OnePassRow,
    group: dict[str, Any],
    names: tuple[str, ...],
    params: list[Parameter],
    states: list[dict[str, Any]],
    grads: list[Tensor],
    number: int,
) -> None:
    one = torch.ones((), dtype=torch.float32, device="cpu")
    for param, state in zip(params, states, strict=True):
        if not state:
            row.make(state, group, param)
        bring_counter(state, param.device)
    columns: dict[str, list[Tensor | None]] = {"grads": list(grads), "masters": [p.detach() for p in params]}
    columns |= {name: [state[name] for state in states] for name in names}
    first = [row.fills_first and number == 0] * len(params)
    row.call(columns, [row.options(group)], [0] * len(params), Factors(one, one), first)


def _state_difference(names: tuple[str, ...], own: dict[str, Any], made: dict[str, Any]) -> str:
    own = {name: value for name, value in own.items() if value is not None}
    if sorted(own) != sorted(names):
        return f"keeps state {sorted(own)} where {sorted(names)} is wanted,"
    for name in names:
        if not isinstance(own[name], Tensor):
            return f"keeps {name!r} as {type(own[name]).__name__} where a tensor is wanted,"
        found = _apart(f"state {name!r}", own[name], made[name])
        if found:
            return found
    return ""


def _apart(what: str, own: Tensor, made: Tensor) -> str:
    if own.shape != made.shape:
        return f"has {what} of shape {tuple(own.shape)} where {tuple(made.shape)} is wanted,"
    if torch.allclose(own, made, rtol=_TOLERANCE, atol=_TOLERANCE, equal_nan=True):
        return ""
    return f"gives other {what}: {float((own - made).abs().max()):.2g} apart,"
