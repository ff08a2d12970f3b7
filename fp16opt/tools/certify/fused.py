"""Whether an optimizer steps as its fused step does: both ways on small tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from ...engine.fused_registry import FusedStepSpec, counter_to_device, fused_spec_for
from ...kernels.steps import Factors, StepValues, run_step
from .report import Check
from .trials import Setting, Trial, quote

__all__ = ["fused_step"]

_SMALL = Setting(((5, 7), (9,), (), (70,)), "dense", "parameters of 0 to 2 dimensions")
_STEPS = 4
_LR, _DECAY = 0.01, 0.1
# A class's formulas may be rounded in other places, and contracted. Four steps of lr 0.01 move numbers of size 1 by
# 0.01 each, and each rounds a handful of times to 2^-24: 1e-5 is a hundred times that, and a thousandth of a move.
_TOLERANCE = 1e-5


def fused_step(trial: Trial) -> Check:
    """The check ``fused_step``: four steps by the class and four by its fused step, from the same beginning.

    The lr is 0.01 and weight decay, where there is any, 0.1: at the optimizer's own an update may be too small to show.
    """
    small = Trial(trial.factory, _SMALL)
    _, optimizer = trial.make()
    cls = type(optimizer)
    spec = fused_spec_for(cls)
    if spec is None:
        return Check(None, "has no fused step")
    if not spec.group_keys:
        return Check(None, "is torch's own: the library's tests compare its fused step with it")
    try:
        found = _difference(spec, small)
    except Exception as error:
        found = f"can't be tried on small tensors: {quote(error)}"
    return Check(
        not found, f"{cls.__name__} {found}" if found else f"{_STEPS} fused steps are its own, within rounding"
    )


def _difference(spec: FusedStepSpec, trial: Trial) -> str:
    """How the class steps otherwise than its fused step; "" if they agree."""
    params, own = trial.make()
    group = own.param_groups[0]
    missing = [key for key in spec.keys_used() if key not in group]
    if missing:
        return f"has no {missing[0]!r} in its groups"
    _make_visible(spec, own)
    obstacle = spec.group_obstacle(group)
    if obstacle:
        return f"can't be stepped so: its group has {obstacle}"
    settings = spec.settings(group)
    names = spec.state_names(settings)
    others = [Parameter(param.detach().clone()) for param in params]
    states: list[dict[str, Any]] = [{} for _ in others]
    for step in range(_STEPS):
        trial.train(params, own, 1, first=step)
        _step(spec, settings, names, others, states, trial.gradients(others, step), step)
        for param, other, state in zip(params, others, states, strict=True):
            found = _state_difference(names, own.state[param], state) or _apart("weights", param, other)
            if found:
                return f"{found} after {step + 1} step{'s' if step else ''}"
    return ""


def _make_visible(spec: FusedStepSpec, optimizer: Optimizer) -> None:
    for group in optimizer.param_groups:
        group[spec.group_keys["lr"]] = _LR  # type: ignore[index]
        if "weight_decay" in spec.group_keys and spec.settings(group)["weight_decay"]:
            group[spec.group_keys["weight_decay"]] = _DECAY  # type: ignore[index]


def _step(
    spec: FusedStepSpec,
    settings: dict[str, Any],
    names: tuple[str, ...],
    params: list[Parameter],
    states: list[dict[str, Any]],
    grads: list[Tensor],
    number: int,
) -> None:
    one = torch.ones((), dtype=torch.float32, device="cpu")
    for param, state in zip(params, states, strict=True):
        if not state:
            spec.make_state(state, settings, param)
        counter_to_device(state, param.device)
    step, masters = spec.step(names, False), [param.detach() for param in params]
    lists = step.lists(grads, masters, None, {name: [state[name] for state in states] for name in names})
    first = [number == 0] * len(params) if step.fills_first else False
    given = StepValues([spec.options(settings)], [0] * len(params), Factors(one, one), None, None, first, 0)
    run_step(step.step, lists, given, None)


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
