"""FusedAdagrad behind apex's arguments."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .base import Batch, FP32StateOptimizer


class FusedAdagrad(FP32StateOptimizer):
    """apex.optimizers.FusedAdagrad: ``torch.optim.Adagrad``, or the same with decoupled weight decay.

    Args:
        params: Parameters or groups; floating, dense gradients.
        lr, eps, weight_decay: As for ``torch.optim.Adagrad``.
        set_grad_none: ``zero_grad`` sets gradients to None.
        adagrad_w_mode: Add ``weight_decay * weight`` to the update instead of the gradient.

    Raises:
        ValueError: A setting is out of range.
        RuntimeError: In ``step``, a sparse gradient.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(1))
        >>> optimizer = FusedAdagrad([weight], lr=0.5)
        >>> weight.grad = torch.full((1,), 4.0)
        >>> optimizer.step()
        >>> weight.item()
        0.5
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-2,
        eps: float = 1e-10,
        weight_decay: float = 0.0,
        set_grad_none: bool = True,
        adagrad_w_mode: bool = False,
    ) -> None:
        super().__init__(params, {"lr": lr, "eps": eps, "weight_decay": weight_decay}, set_grad_none)
        self.adagrad_w_mode = 1 if adagrad_w_mode else 0

    def _new_state(self, value: Tensor, group: dict[str, Any]) -> dict[str, Any]:
        return {"sum": torch.zeros_like(value)}

    def _update(self, batches: list[Batch]) -> None:
        for batch in batches:
            lr, decay = batch.group["lr"], batch.group["weight_decay"]
            sums = [state["sum"] for state in batch.states]
            decayed = torch._foreach_mul(batch.values, decay)
            grads: Any = batch.grads if self.adagrad_w_mode else torch._foreach_add(batch.grads, decayed)
            torch._foreach_add_(sums, torch._foreach_mul(grads, grads))
            denominators = torch._foreach_add(torch._foreach_sqrt(sums), batch.group["eps"])
            updates = torch._foreach_div(grads, denominators)
            if self.adagrad_w_mode:
                updates = torch._foreach_add(updates, decayed)
            torch._foreach_sub_(batch.values, torch._foreach_mul(updates, lr))
