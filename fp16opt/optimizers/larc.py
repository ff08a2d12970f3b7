"""LARC: layer-wise adaptive rates around any optimizer (You, Gitman, Ginsburg, "Large Batch Training of Convolutional
Networks", 2017)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..engine.wrapped_step import HOOKS, make_hook_tables
from .base import norms


class LARC(Optimizer):
    """apex.parallel.LARC: scales each parameter's gradient by ``trust * |p| / (|g| + weight_decay * |p| + eps)``.

    Weight decay is added to the gradient first, and the wrapped optimizer steps without it. Where the norm of a
    parameter or of its gradient is 0, the gradient stays. Gradients are as before when ``step`` returns.

    Args:
        optimizer: Any ``torch.optim.Optimizer`` with ``weight_decay`` in its groups; kept as ``.optim``.
        trust_coefficient: ``trust`` above.
        clip: Use the factor ``min(rate / lr, 1)``, so that the layer's rate is at most ``lr``.
        eps: Keeps the denominator from 0.

    Raises:
        TypeError: ``optimizer`` is no torch Optimizer.

    Example:
        >>> weight = torch.nn.Parameter(torch.full((4,), 1.0))
        >>> optimizer = LARC(torch.optim.SGD([weight], lr=1.0), trust_coefficient=0.25, eps=0.0)
        >>> weight.grad = torch.full((4,), 2.0)
        >>> optimizer.step()
        >>> weight[0].item()
        0.75
    """

    def __init__(
        self, optimizer: Optimizer, trust_coefficient: float = 0.02, clip: bool = True, eps: float = 1e-8
    ) -> None:
        if not isinstance(optimizer, Optimizer):
            raise TypeError(f"optimizer: expected a torch.optim.Optimizer, got {type(optimizer).__name__}.")
        self.optim = optimizer
        self.trust_coefficient = trust_coefficient
        self.clip = clip
        self.eps = eps
        make_hook_tables(self)
        self._patch_step_function()

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The wrapped optimizer's."""
        return self.optim.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """The wrapped optimizer's."""
        return self.optim.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """The wrapped optimizer's."""
        return self.optim.defaults

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in (*HOOKS, "step")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        make_hook_tables(self)
        self._patch_step_function()

    def __repr__(self) -> str:
        return f"LARC({self.optim!r}, trust_coefficient={self.trust_coefficient}, clip={self.clip}, eps={self.eps})"

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As the wrapped optimizer's."""
        self.optim.add_param_group(param_group)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As the wrapped optimizer's."""
        self.optim.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """As the wrapped optimizer's."""
        state: dict[str, Any] = self.optim.state_dict()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As the wrapped optimizer's."""
        self.optim.load_state_dict(state_dict)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step the wrapped optimizer on the scaled gradients.

        Args:
            closure: Evaluates the model again and returns the loss; it is called once.

        Returns:
            The closure's loss, or None. No host sync.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        grads: list[tuple[Tensor, Tensor]] = []
        decays = [(group, group["weight_decay"]) for group in self.optim.param_groups if "weight_decay" in group]
        try:
            with torch.no_grad():
                for group in self.optim.param_groups:
                    grads += [(p, p.grad) for p in group["params"] if p.grad is not None]
                    self._scale_group(group)
            for group, _ in decays:
                group["weight_decay"] = 0.0
            self.optim.step()
        finally:
            for group, decay in decays:
                group["weight_decay"] = decay
            for param, grad in grads:
                param.grad = grad
        return loss

    def _scale_group(self, group: dict[str, Any]) -> None:
        """Give the group's parameters new gradients."""
        params = [param for param in group["params"] if param.grad is not None]
        if not params:
            return
        decay = float(group.get("weight_decay", 0.0))
        values, grads = norms(params), norms([param.grad for param in params])
        rates = self.trust_coefficient * values / (grads + decay * values + self.eps)
        if self.clip:
            rates = (rates / group["lr"]).clamp(max=1.0)
        both = (values > 0) & (grads > 0)
        for param, rate, scales in zip(params, rates.unbind(), both.unbind(), strict=True):
            scaled = (param.grad + decay * param) * rate.to(param)
            param.grad = torch.where(scales.to(param.device), scaled, param.grad)
