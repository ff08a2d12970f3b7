"""LAMB: Adam's update with a layer-wise learning rate (You et al., "Large Batch Optimization for Deep Learning")."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .base import Batch, FP32StateOptimizer, norms, refuse_amsgrad, total_norm


def clip_divisor(norm: Tensor, max_norm: float | Tensor | None) -> Tensor | None:
    """What gradients of this total norm are divided by: norm / max_norm where that is over 1, else 1. None: no clip."""
    if max_norm is None or (not isinstance(max_norm, Tensor) and max_norm <= 0):
        return None
    return (norm / max_norm).clamp(min=1.0).float()


def lamb_update(
    values: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    steps: list[int],
    *,
    lr: float | Tensor,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    decoupled: bool,
    bias_correction: bool,
    grad_averaging: bool,
    divisor: Tensor | None,
    use_nvlamb: bool,
) -> None:
    """One step of LAMB on FP32 or FP64 tensors; gradients are not written.

    With g = grad / divisor: ``m = beta1*m + beta3*g``, ``v = beta2*v + (1-beta2)*g*g``,
    ``u = (m/bc1) / (sqrt(v/bc2) + eps)`` and ``value -= lr * ratio * u``, where ratio = |value| / |u| for tensors under
    weight decay (all, with ``use_nvlamb``) if neither norm is 0, else 1. Weight decay adds ``weight_decay * value``
    to u (``decoupled``) or to g.

    Args:
        steps: For each tensor, which step this is, from 1.
        grad_averaging: beta3 is 1 - beta1; else 1.
        divisor: float32, shape [], from :func:`clip_divisor`.
    """
    beta1, beta2 = betas
    correct1 = [1.0 - beta1**step if bias_correction else 1.0 for step in steps]
    correct2 = [1.0 - beta2**step if bias_correction else 1.0 for step in steps]
    scaled = list(grads) if divisor is None else [grad / divisor.to(grad) for grad in grads]
    if weight_decay and not decoupled:
        scaled = _added(scaled, torch._foreach_mul(values, weight_decay))
    torch._foreach_mul_(exp_avgs, beta1)
    torch._foreach_add_(exp_avgs, torch._foreach_mul(scaled, 1.0 - beta1 if grad_averaging else 1.0))
    torch._foreach_mul_(exp_avg_sqs, beta2)
    torch._foreach_add_(exp_avg_sqs, torch._foreach_mul(torch._foreach_mul(scaled, scaled), 1.0 - beta2))
    denominators = torch._foreach_sqrt(torch._foreach_div(exp_avg_sqs, correct2))
    torch._foreach_add_(denominators, eps)
    updates = list(torch._foreach_div(torch._foreach_div(exp_avgs, correct1), denominators))
    if weight_decay and decoupled:
        updates = _added(updates, torch._foreach_mul(values, weight_decay))
    rates: list[Any] = [lr] * len(values)
    if weight_decay or use_nvlamb:
        over, under = norms(values), norms(updates)
        ratio = torch.where((over > 0) & (under > 0), over / under, torch.ones_like(over))
        rates = list((ratio * lr).unbind())
    for value, update, rate in zip(values, updates, rates, strict=True):
        value.sub_(update * (rate.to(value) if isinstance(rate, Tensor) else rate))


def _added(left: Any, right: Any) -> list[Tensor]:
    return list(torch._foreach_add(left, right))


class FusedLAMB(FP32StateOptimizer):
    """apex.optimizers.FusedLAMB. See :func:`lamb_update` for the formulas.

    Args:
        params: Parameters or groups; floating, dense gradients.
        lr, betas, eps, weight_decay: As for ``torch.optim.AdamW``.
        bias_correction: Divide the moments by ``1 - beta**step``.
        amsgrad: Refused.
        adam_w_mode: Decoupled weight decay; False adds it to the gradient.
        grad_averaging: Weight new gradients with 1 - beta1.
        set_grad_none: ``zero_grad`` sets gradients to None.
        max_grad_norm: All gradients are divided so that their total norm is at most this; 0 or None: never.
        use_nvlamb: The layer-wise rate also for parameters without weight decay.

    Raises:
        RuntimeError: ``amsgrad``; in ``step``, a sparse gradient.
        ValueError: A setting is out of range.

    Example:
        >>> weight = torch.nn.Parameter(torch.full((4,), 2.0))
        >>> optimizer = FusedLAMB([weight], lr=0.25, weight_decay=0.5)
        >>> weight.grad = torch.zeros(4)
        >>> optimizer.step()
        >>> weight[0].item()
        1.5
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        amsgrad: bool = False,
        adam_w_mode: bool = True,
        grad_averaging: bool = True,
        set_grad_none: bool = True,
        max_grad_norm: float | None = 1.0,
        use_nvlamb: bool = False,
    ) -> None:
        refuse_amsgrad(type(self).__name__, amsgrad)
        defaults = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "grad_averaging": grad_averaging,
            "max_grad_norm": max_grad_norm,
        }
        super().__init__(params, defaults, set_grad_none)
        self.adam_w_mode = 1 if adam_w_mode else 0
        self.use_nvlamb = use_nvlamb

    def _new_state(self, value: Tensor, group: dict[str, Any]) -> dict[str, Any]:
        return {"step": 0, "exp_avg": torch.zeros_like(value), "exp_avg_sq": torch.zeros_like(value)}

    def _update(self, batches: list[Batch]) -> None:
        total = total_norm(norms([grad for batch in batches for grad in batch.grads]))
        divisor = clip_divisor(total, self.defaults["max_grad_norm"])
        for batch in batches:
            group = batch.group
            lamb_update(
                batch.values,
                batch.grads,
                [state["exp_avg"] for state in batch.states],
                [state["exp_avg_sq"] for state in batch.states],
                batch.count_steps(),
                lr=group["lr"],
                betas=group["betas"],
                eps=group["eps"],
                weight_decay=group["weight_decay"],
                decoupled=bool(self.adam_w_mode),
                bias_correction=bool(group["bias_correction"]),
                grad_averaging=bool(group["grad_averaging"]),
                divisor=divisor,
                use_nvlamb=self.use_nvlamb,
            )


class FusedMixedPrecisionLamb(FusedLAMB):
    """apex.optimizers.FusedMixedPrecisionLamb: LAMB with FP32 masters of 16-bit parameters in its state.

    A ``torch.amp.GradScaler`` may drive it with 16-bit gradients: it divides by the scale itself, and skips.

    Args:
        step: The step to count on from.
        reduced_precision_dtype: Taken for compatibility: every 16-bit parameter gets a master.
        The others: as for :class:`FusedLAMB`.

    Example:
        >>> weight = torch.nn.Parameter(torch.full((4,), 2.0).half())
        >>> optimizer = FusedMixedPrecisionLamb([weight], lr=0.25, weight_decay=0.5)
        >>> weight.grad = torch.zeros(4).half()
        >>> optimizer.step()
        >>> weight[0].item(), optimizer.state[weight]["master_param"].dtype
        (1.5, torch.float32)
    """

    KEEPS_MASTERS = True
    _step_supports_amp_scaling = True

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        step: int = 0,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        amsgrad: bool = False,
        adam_w_mode: bool = True,
        grad_averaging: bool = True,
        max_grad_norm: float | None = 1.0,
        use_nvlamb: bool = False,
        reduced_precision_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            params,
            lr=lr,
            bias_correction=bias_correction,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            amsgrad=amsgrad,
            adam_w_mode=adam_w_mode,
            grad_averaging=grad_averaging,
            max_grad_norm=max_grad_norm,
            use_nvlamb=use_nvlamb,
        )
        self.first_step = int(step)
        self.reduced_precision_dtype = reduced_precision_dtype

    def _new_state(self, value: Tensor, group: dict[str, Any]) -> dict[str, Any]:
        return {**super()._new_state(value, group), "step": self.first_step}
