"""From parameters, gradients and optimizer state to the lists that a kernel steps in one call."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, AdamW, Optimizer

from ..kernels.reference_steps import AdamOptions, SgdOptions
from . import counters

Column = list["Tensor | None"]


class CannotServe(Exception):
    """Something about a gradient or about optimizer state needs the wrapped optimizer's own step."""


@dataclass
class Lists:
    """Entries of one kernel call: all with the same state tensors, all with models or all without.

    Attributes:
        positions: in the engine's parameters, of each entry.
        columns: by name: ``grads``, ``masters``, ``models``, and the names of torch's state.
        group_of: the group of each entry.
        first: entries whose momentum buffer holds nothing yet.
    """

    positions: list[int]
    columns: dict[str, Column] = field(default_factory=dict)
    group_of: list[int] = field(default_factory=list)
    first: list[bool] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.group_of = [0] * len(self.positions)
        self.first = [False] * len(self.positions)

    def put(self, place: int, group: int, entries: dict[str, Tensor]) -> None:
        for name, tensor in entries.items():
            if name not in self.columns:
                self.columns[name] = [None] * len(self.positions)
            self.columns[name][place] = tensor
        self.group_of[place] = group


def options_of(optimizer: Optimizer) -> list[Any]:
    """What each param_group says, as the kernels take it. No sync: an lr that is a tensor stays one."""
    return [
        _sgd_options(g) if type(optimizer) is SGD else _adam_options(g, type(optimizer)) for g in optimizer.param_groups
    ]


def _lr(group: dict[str, Any]) -> float | Tensor:
    lr = group["lr"]
    return lr if isinstance(lr, Tensor) else float(lr)


def _sgd_options(group: dict[str, Any]) -> SgdOptions:
    momentum, dampening, weight_decay = (float(group[k]) for k in ("momentum", "dampening", "weight_decay"))
    return SgdOptions(_lr(group), momentum, dampening, weight_decay, bool(group["nesterov"]), bool(group["maximize"]))


def _adam_options(group: dict[str, Any], cls: type[Optimizer]) -> AdamOptions:
    decoupled = group.get("decoupled_weight_decay", cls is AdamW)
    beta1, beta2 = group["betas"]
    eps, weight_decay = float(group["eps"]), float(group["weight_decay"])
    return AdamOptions(
        _lr(group), float(beta1), float(beta2), eps, weight_decay, bool(decoupled), bool(group["maximize"])
    )


def state_of(
    optimizer: Optimizer, group: dict[str, Any], master: Tensor, model: Tensor
) -> tuple[dict[str, Tensor], bool]:
    """The tensors of a parameter's state that a step needs, made like torch makes them, and whether they are new.

    A new momentum buffer is not put into the state: it holds nothing before the step was done.
    """
    if type(optimizer) is SGD:
        if not group["momentum"]:
            return {}, False
        buffer = optimizer.state[master].get("momentum_buffer")
        if buffer is None:
            return {"momentum_buffer": torch.empty_like(model, dtype=torch.float32, requires_grad=False)}, True
        return _checked({"momentum_buffer": buffer}, master), False
    state = optimizer.state[master]
    new = not state
    if new:
        _make_adam_state(state, group, model)
    counters.bring(state, master.device)
    names = ["step", "exp_avg", "exp_avg_sq"] + (["max_exp_avg_sq"] if group["amsgrad"] else [])
    missing = [name for name in names if not isinstance(state.get(name), Tensor)]
    if missing:
        raise CannotServe(f"the state of a parameter has no tensor {missing[0]!r}")
    return _checked({name: state[name] for name in names}, master), new


def _make_adam_state(state: dict[str, Any], group: dict[str, Any], model: Tensor) -> None:
    """What torch's ``Adam._init_group`` makes, but for counters where kernels want them."""
    device = counters.device_for(group, model.device)
    state["step"] = torch.zeros((), dtype=torch.float32, device=device)
    names = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq") if group["amsgrad"] else ("exp_avg", "exp_avg_sq")
    for name in names:
        state[name] = torch.zeros_like(model, dtype=torch.float32, requires_grad=False)


def _checked(state: dict[str, Tensor], master: Tensor) -> dict[str, Tensor]:
    for name, tensor in state.items():
        if tensor.dtype != torch.float32 or (tensor.shape != master.shape and name != "step"):
            raise CannotServe(
                f"state {name!r} is {str(tensor.dtype).removeprefix('torch.')} of shape {tuple(tensor.shape)}"
            )
        away = tensor.device != master.device and not (name == "step" and tensor.device.type == "cpu")
        if tensor.layout is not torch.strided or away or tensor.requires_grad:
            raise CannotServe(f"state {name!r} is not a dense tensor on {master.device}")
    return state
