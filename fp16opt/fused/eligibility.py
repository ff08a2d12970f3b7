"""What stands in the way of a fused step: in words, or nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer

from ..kernels.tables import is_dense
from . import counters

SERVED: tuple[type[Optimizer], ...] = (SGD, Adam, AdamW)
_NUMBERS = {
    SGD: ("momentum", "dampening", "weight_decay"),
    Adam: ("eps", "weight_decay"),
    AdamW: ("eps", "weight_decay"),
}


def obstacle(optimizer: Optimizer, params: Sequence[Tensor], names: Sequence[str]) -> str:
    """Why ``optimizer`` can't be stepped by a fused kernel now; "" where it can.

    Args:
        optimizer: the wrapped optimizer.
        params: the model's parameters, in param_groups order.
        names: of the parameters, for the message.

    Returns:
        The reason, which names the class, the option or the parameter. No sync.
    """
    cls = type(optimizer)
    if cls not in SERVED:
        return f"{cls.__name__} is not exactly SGD, Adam or AdamW of torch.optim"
    if "step" in optimizer.__dict__ and not hasattr(optimizer.step, "_wrapped_by_lr_sched"):
        return f"the step of this {cls.__name__} was replaced"
    return changing_obstacle(optimizer) or _of_params(params, names)


def changing_obstacle(optimizer: Optimizer) -> str:
    """The part of :func:`obstacle` that may change from one step to the next."""
    for number, group in enumerate(optimizer.param_groups):
        reason = _of_group(_NUMBERS[type(optimizer)], group)
        if reason:
            return f"group {number} has {reason}"
    return ""


def _of_group(numbers: tuple[str, ...], group: dict[str, Any]) -> str:
    if group.get("differentiable"):
        return "differentiable=True"
    if group.get("capturable") and not all(map(counters.serves, {param.device for param in group["params"]})):
        return "capturable=True"  # for a graph, which torch operations here could not be part of
    lr = group["lr"]
    if isinstance(lr, Tensor) and (lr.numel() != 1 or lr.requires_grad):
        return "an lr that is a tensor of several elements or requires grad"
    values = [("lr", 0.0 if isinstance(lr, Tensor) else lr), *((name, group[name]) for name in numbers)]
    values += [("betas", beta) for beta in group.get("betas", ())]
    for name, value in values:
        if not isinstance(value, (int, float)):
            return f"a {name} of type {type(value).__name__}"
    if not all(0.0 <= beta < 1.0 for beta in group.get("betas", ())):
        return f"betas of {group['betas']}"
    return ""


def _of_params(params: Sequence[Tensor], names: Sequence[str]) -> str:
    for param, name in zip(params, names, strict=True):
        if param.dtype not in (torch.float16, torch.bfloat16, torch.float32):
            return f"parameter {name!r} is {str(param.dtype).removeprefix('torch.')}"
        if type(param).__torch_dispatch__ is not Tensor.__torch_dispatch__:
            return f"parameter {name!r} is a {type(param).__name__}"
        if param.layout is not torch.strided or (param.numel() and not is_dense(param)):
            return f"the memory of parameter {name!r} is not dense"
    return ""
