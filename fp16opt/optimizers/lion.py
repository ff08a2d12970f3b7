"""Lion (Chen et al., "Symbolic Discovery of Optimization Algorithms", 2023, algorithm 2), which torch.optim lacks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..engine.fused_registry import register_fused_step
from .base import Batch, FP32StateOptimizer


class Lion(FP32StateOptimizer):
    """Lion: the sign of a mix of gradient and momentum is the update; one moment, "exp_avg".

    With m = exp_avg: ``value = value * (1 - lr*weight_decay) - lr * sign(beta1*m + (1-beta1)*g)``, then
    ``m = beta2*m + (1-beta2)*g``. ``MixedPrecisionOptimizer`` steps it in one pass.

    Args:
        params: Parameters or groups; floating, dense gradients.
        lr: Some 3 to 10 times smaller than AdamW's, with a weight decay as much larger.
        betas: For the mix and for the moment.
        weight_decay: As for ``torch.optim.AdamW``.
        maximize: Go up the gradient.

    Raises:
        ValueError: A setting is out of range.
        RuntimeError: In ``step``, a sparse gradient.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(1))
        >>> optimizer = Lion([weight], lr=0.25, weight_decay=0.5)
        >>> weight.grad = torch.full((1,), 1e-6)
        >>> optimizer.step()
        >>> weight.item()
        0.625
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "weight_decay": weight_decay, "maximize": maximize}
        super().__init__(params, defaults, set_grad_none=True)

    def _new_state(self, value: Tensor, group: dict[str, Any]) -> dict[str, Any]:
        return {"exp_avg": torch.zeros_like(value)}

    def _update(self, batches: list[Batch]) -> None:
        for batch in batches:
            lr, decay = float(batch.group["lr"]), float(batch.group["weight_decay"])
            beta1, beta2 = batch.group["betas"]
            moments = [state["exp_avg"] for state in batch.states]
            up = -1.0 if batch.group["maximize"] else 1.0
            mixed = torch._foreach_add(torch._foreach_mul(moments, beta1), batch.grads, alpha=up * (1.0 - beta1))
            torch._foreach_mul_(batch.values, 1.0 - lr * decay)
            torch._foreach_sub_(batch.values, torch._foreach_mul([each.sign() for each in mixed], lr))
            torch._foreach_mul_(moments, beta2)
            torch._foreach_add_(moments, batch.grads, alpha=up * (1.0 - beta2))


register_fused_step(Lion, "lion", {name: name for name in ("lr", "betas", "weight_decay", "maximize")})
