"""FusedSGD: torch's SGD behind apex's arguments."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim.sgd import sgd

from .base import Batch, FP32StateOptimizer


def sgd_update(
    values: list[Tensor],
    grads: list[Tensor],
    buffers: list[Tensor | None],
    *,
    lr: float,
    momentum: float,
    dampening: float,
    weight_decay: float,
    nesterov: bool,
    wd_after_momentum: bool,
) -> None:
    """One step of torch's SGD.

    Args:
        values, grads: n tensors each, of equal shapes and dtypes. Only values are written. 16-bit ones are
            rounded after each operation, as torch's are.
        buffers: Momentum buffers, or None where a tensor had no step yet: the list's entry then becomes its buffer.
        lr, momentum, dampening, weight_decay, nesterov: As for ``torch.optim.SGD``.
        wd_after_momentum: Add ``weight_decay * value`` to the update and not to the gradient.
    """
    if nesterov and not weight_decay:  # torch's foreach form overwrites the gradients here
        grads = [grad.clone() for grad in grads]
    if wd_after_momentum and weight_decay:
        torch._foreach_mul_(values, 1.0 - lr * weight_decay)
        weight_decay = 0.0
        grads = [grad.clone() for grad in grads] if nesterov else grads
    sgd(
        values,
        grads,
        buffers,
        # On the CPU foreach is a loop as well, and rounds the number `momentum` to the tensor's dtype first.
        foreach=all(value.device.type != "cpu" for value in values),
        fused=False,
        weight_decay=weight_decay,
        momentum=momentum,
        lr=lr,
        dampening=dampening,
        nesterov=nesterov,
        maximize=False,
    )


class FusedSGD(FP32StateOptimizer):
    """apex.optimizers.FusedSGD: ``torch.optim.SGD``, to the bit, for parameters of any floating dtype.

    So 16-bit parameters have momentum of their own dtype, and lose what it can't hold: wrap the optimizer in
    ``fp16opt.MixedPrecisionOptimizer`` for FP32 masters and momentum.

    Args:
        params: Parameters or groups; floating, dense gradients.
        lr: May be left out where each group has its own.
        momentum, dampening, weight_decay, nesterov: As in torch.
        wd_after_momentum: Add weight decay to the update instead of the gradient. torch has no such SGD; 16-bit
            parameters are stepped in FP32 then, with FP32 momentum, and rounded once.
        materialize_master_grads: Taken for compatibility; the engine keeps FP32 gradients once in any case.
        set_grad_none: ``zero_grad`` sets gradients to None.

    Raises:
        ValueError: A setting is out of range, a group has no lr, or nesterov goes without momentum or with dampening.
        RuntimeError: In ``step``, a sparse gradient.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(1))
        >>> optimizer = FusedSGD([weight], lr=0.5, momentum=0.5)
        >>> weight.grad = torch.ones(1)
        >>> optimizer.step()
        >>> weight.item()
        0.5
    """

    def __init__(
        self,
        params: Any,
        lr: float | None = None,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        wd_after_momentum: bool = False,
        materialize_master_grads: bool = True,
        set_grad_none: bool = False,
    ) -> None:
        if nesterov and (momentum <= 0 or dampening != 0):
            raise ValueError(
                f"nesterov: expected a momentum over 0 and no dampening, got {momentum!r} and {dampening!r}. "
                "Change them, or leave nesterov out."
            )
        defaults = {
            **({} if lr is None else {"lr": lr}),
            "momentum": momentum,
            "dampening": dampening,
            "weight_decay": weight_decay,
            "nesterov": nesterov,
        }
        super().__init__(params, defaults, set_grad_none)
        self.wd_after_momentum = wd_after_momentum
        self.materialize_master_grads = materialize_master_grads

    def _dtype(self, param: Tensor) -> torch.dtype:
        return super()._dtype(param) if self.wd_after_momentum else param.dtype

    def _new_state(self, value: Tensor, group: dict[str, Any]) -> dict[str, Any]:
        return {"momentum_buffer": None}

    def _update(self, batches: list[Batch]) -> None:
        for batch in batches:
            buffers = [state.get("momentum_buffer") for state in batch.states]
            group = batch.group
            sgd_update(
                batch.values,
                batch.grads,
                buffers,
                lr=group["lr"],
                momentum=group["momentum"],
                dampening=group["dampening"],
                weight_decay=group["weight_decay"],
                nesterov=group["nesterov"],
                wd_after_momentum=self.wd_after_momentum,
            )
            if group["momentum"]:
                for state, buffer in zip(batch.states, buffers, strict=True):
                    state["momentum_buffer"] = buffer
