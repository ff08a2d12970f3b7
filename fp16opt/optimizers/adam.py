"""FusedAdam: torch's fused Adam and AdamW behind apex's arguments."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim.adam import adam
from torch.optim.adamw import adamw

from ..kernels.lists import is_dense
from .base import WIDE, Batch, FP32StateOptimizer, refuse_amsgrad

# So many steps in, both bias corrections are exactly 1: how torch's functions are told to leave them out.
_WITHOUT_CORRECTION = 1e9


def adam_update(
    values: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    steps: list[Tensor],
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    decoupled: bool,
    bias_correction: bool,
) -> None:
    """One step of torch's AdamW (``decoupled``) or Adam on FP32 or FP64 tensors of one device, fused where it may be.

    Args:
        values, grads, exp_avgs, exp_avg_sqs: n tensors each, of equal shapes, strides and dtypes. All but grads are
            written.
        steps: n 0-dim float32 tensors, on the device: the steps before this one. Counted up.
        lr, betas, eps, weight_decay: As for ``torch.optim.AdamW``.
        decoupled: AdamW's weight decay instead of Adam's.
        bias_correction: Divide the moments by ``1 - beta**step``.
    """
    counted = steps if bias_correction else [torch.full_like(step, _WITHOUT_CORRECTION) for step in steps]
    fused = values[0].device.type in ("cpu", "cuda") and all(is_dense(value) or not value.numel() for value in values)
    (adamw if decoupled else adam)(
        values,
        grads,
        exp_avgs,
        exp_avg_sqs,
        [],
        counted,
        foreach=not fused,
        fused=fused,
        amsgrad=False,
        beta1=betas[0],
        beta2=betas[1],
        lr=lr,
        weight_decay=weight_decay,
        eps=eps,
        maximize=False,
    )
    if not bias_correction:
        torch._foreach_add_(steps, 1.0)


class FusedAdam(FP32StateOptimizer):
    """apex.optimizers.FusedAdam: ``torch.optim.AdamW``, or ``torch.optim.Adam`` where ``adam_w_mode=False``, fused.

    Args:
        params: Parameters or groups; floating, dense gradients.
        lr, betas, eps, weight_decay: As in torch.
        bias_correction: False leaves the division by ``1 - beta**step`` out.
        adam_w_mode: Decoupled weight decay; False adds it to the gradient.
        amsgrad: Refused.
        set_grad_none: ``zero_grad`` sets gradients to None.
        capturable: True: a ``torch.amp.GradScaler`` may drive it with 16-bit gradients. As torch's fused Adam it
            divides by the scale itself, leaves true gradients behind, and skips. The skip waits for the device: CUDA
            graphs can't capture it.
        master_weights: Keep FP32 masters of 16-bit parameters in the state; needs ``capturable``.

    Raises:
        RuntimeError: ``amsgrad``; ``master_weights`` without ``capturable``; in ``step``, a sparse gradient.
        ValueError: A setting is out of range.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(1))
        >>> optimizer = FusedAdam([weight], lr=0.5, weight_decay=0.5)
        >>> weight.grad = torch.zeros(1)
        >>> optimizer.step()
        >>> weight.item()
        0.75
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
        capturable: bool = False,
        master_weights: bool = False,
    ) -> None:
        refuse_amsgrad("FusedAdam", amsgrad)
        if master_weights and not capturable:
            raise RuntimeError(
                "FusedAdam: master_weights=True was given without capturable=True. Give both, or wrap the optimizer in "
                "fp16opt.MixedPrecisionOptimizer, which keeps masters and scales the loss."
            )
        defaults = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
        }
        super().__init__(params, defaults, set_grad_none)
        self.adam_w_mode = 1 if adam_w_mode else 0
        self.capturable = capturable
        self._step_supports_amp_scaling = capturable
        self.master_weights = master_weights
        self.KEEPS_MASTERS = master_weights

    def _unscale(self, batches: list[Batch], scale: Tensor) -> None:
        super()._unscale(batches, scale)
        for batch in batches:  # apex's kernel and torch's fused one write true gradients, too
            for param, grad in zip(batch.params, batch.grads, strict=True):
                if param.grad is not None:
                    param.grad.copy_(grad)

    def _new_state(self, value: Tensor, group: dict[str, Any]) -> dict[str, Any]:
        return {
            "step": torch.zeros((), dtype=torch.float32, device=value.device),
            "exp_avg": torch.zeros_like(value),
            "exp_avg_sq": torch.zeros_like(value),
        }

    def _update(self, batches: list[Batch]) -> None:
        for batch in batches:
            for state, value in zip(batch.states, batch.values, strict=True):
                if not isinstance(state["step"], Tensor):  # apex counted in an int, for the group
                    state["step"] = torch.tensor(float(state["step"]), dtype=torch.float32, device=value.device)
            for dtype in WIDE:
                chosen = [i for i, value in enumerate(batch.values) if value.dtype == dtype]
                if chosen:
                    self._update_one_dtype(batch, chosen)

    def _update_one_dtype(self, batch: Batch, chosen: list[int]) -> None:
        group, states = batch.group, [batch.states[i] for i in chosen]
        adam_update(
            [batch.values[i] for i in chosen],
            [batch.grads[i] for i in chosen],
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [state["step"] for state in states],
            lr=group["lr"],
            betas=group["betas"],
            eps=group["eps"],
            weight_decay=group["weight_decay"],
            decoupled=bool(self.adam_w_mode),
            bias_correction=bool(group["bias_correction"]),
        )
