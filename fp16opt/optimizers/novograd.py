"""NovoGrad: one second moment for each layer (Ginsburg et al., "Stochastic Gradient Methods with Layer-wise Adaptive
Moments for Training of Deep Networks", 2019)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .base import Batch, FP32StateOptimizer, norms, refuse_amsgrad


def novograd_update(
    values: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    moments: list[Tensor],
    steps: list[int],
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    bias_correction: bool,
    grad_averaging: bool,
    reg_inside_moment: bool,
) -> None:
    """One step of NovoGrad on FP32 or FP64 tensors; gradients are not written.

    With d = moment / sqrt(1 - beta2**step) + eps: ``m = beta1*m + beta3*g`` and
    ``value -= lr * (m / bc1 / d + weight_decay * value)``; or, with ``reg_inside_moment``,
    ``m = beta1*m + beta3*(g/d + weight_decay*value)`` and ``value -= lr * m / bc1``.

    Args:
        moments: For each tensor, the running norm of its gradients, this one included: float32, shape [].
        steps: For each tensor, which step this is, from 1.
        grad_averaging: beta3 is 1 - beta1; else 1.
    """
    beta1, beta2 = betas
    beta3 = 1.0 - beta1 if grad_averaging else 1.0
    for value, grad, exp_avg, moment, step in zip(values, grads, exp_avgs, moments, steps, strict=True):
        correct1 = 1.0 - beta1**step if bias_correction else 1.0
        correct2 = (1.0 - beta2**step) ** 0.5 if bias_correction else 1.0
        divisor = (moment / correct2 + eps).to(value)
        if reg_inside_moment:
            exp_avg.mul_(beta1).add_((grad / divisor + value * weight_decay) * beta3)
            value.sub_(exp_avg / correct1 * lr)
        else:
            exp_avg.mul_(beta1).add_(grad * beta3)
            value.sub_((exp_avg / correct1 / divisor + value * weight_decay) * lr)


class FusedNovoGrad(FP32StateOptimizer):
    """apex.optimizers.FusedNovoGrad. See :func:`novograd_update` for the formulas.

    Args:
        params: Parameters or groups; floating, dense gradients.
        lr, betas, eps, weight_decay: As for ``torch.optim.AdamW``.
        bias_correction: Correct both moments for their start.
        amsgrad: Refused.
        reg_inside_moment: Divide by the norm and add weight decay before the first moment instead of after it.
        grad_averaging: Weight new gradients with 1 - beta1.
        norm_type: 2, or 0 for the largest magnitude. The running norm is ``sqrt(beta2*v*v + (1-beta2)*n*n)`` for 2, and
            ``beta2*v + (1-beta2)*n`` for 0.
        init_zero: Start the running norm at 0 instead of at the first norm.
        set_grad_none: ``zero_grad`` sets gradients to None.

    Raises:
        RuntimeError: ``amsgrad``; in ``step``, a sparse gradient.
        ValueError: A setting is out of range.

    Example:
        >>> weight = torch.nn.Parameter(torch.zeros(4))
        >>> optimizer = FusedNovoGrad([weight], lr=0.5, bias_correction=False, grad_averaging=False)
        >>> weight.grad = torch.ones(4)
        >>> optimizer.step()
        >>> weight[0].item()
        -0.25
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        reg_inside_moment: bool = False,
        grad_averaging: bool = True,
        norm_type: int = 2,
        init_zero: bool = False,
        set_grad_none: bool = True,
    ) -> None:
        refuse_amsgrad("FusedNovoGrad", amsgrad)
        if norm_type not in (0, 2):
            raise ValueError(f"norm_type: expected 2 or 0 (the largest magnitude), got {norm_type!r}.")
        defaults = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "grad_averaging": grad_averaging,
            "norm_type": norm_type,
            "init_zero": init_zero,
        }
        super().__init__(params, defaults, set_grad_none)
        self.moment_mode = 0 if reg_inside_moment else 1

    def _new_state(self, value: Tensor, group: dict[str, Any]) -> dict[str, Any]:
        return {"step": 0, "exp_avg": torch.zeros_like(value)}

    def _update(self, batches: list[Batch]) -> None:
        for batch in batches:
            group = batch.group
            self._blend_norms(batch)
            novograd_update(
                batch.values,
                batch.grads,
                [state["exp_avg"] for state in batch.states],
                [state["exp_avg_sq"] for state in batch.states],
                batch.count_steps(),
                lr=group["lr"],
                betas=group["betas"],
                eps=group["eps"],
                weight_decay=group["weight_decay"],
                bias_correction=bool(group["bias_correction"]),
                grad_averaging=bool(group["grad_averaging"]),
                reg_inside_moment=self.moment_mode == 0,
            )

    def _blend_norms(self, batch: Batch) -> None:
        """Bring the running norms up to date. They are norms, not their squares, under the name that apex gave them."""
        group, beta2 = batch.group, batch.group["betas"][1]
        largest = group["norm_type"] == 0
        if largest:
            now = [grad.abs().max() if grad.numel() else grad.new_zeros(()) for grad in batch.grads]
        else:
            now = list(norms(batch.grads).unbind())
        for state, norm, value in zip(batch.states, now, batch.values, strict=True):
            norm = norm.to(value.device, torch.float32)
            if "exp_avg_sq" not in state:
                state["exp_avg_sq"] = torch.zeros_like(norm) if group["init_zero"] else norm
            before = state["exp_avg_sq"]
            if largest:
                state["exp_avg_sq"] = before * beta2 + norm * (1.0 - beta2)
            else:
                state["exp_avg_sq"] = (before.square() * beta2 + norm.square() * (1.0 - beta2)).sqrt()
