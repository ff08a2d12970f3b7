"""One training step of the contract in plain torch, to be read from top to bottom; it knows nothing of the library.

A model's gradient is what autograd left for a scaled loss, in the parameter's dtype. A master is FP32 (FP64 for an FP64
parameter). Nothing here is fast and nothing is in place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

Grads = Sequence[Tensor | None]
Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype of a master of a parameter of this dtype."""
    return torch.promote_types(dtype, torch.float32)


def scaled(true: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    """What autograd leaves in a parameter of ``dtype`` where the loss was multiplied by the scale: one rounding."""
    return (true.to(wide(dtype)) * scale).to(dtype)


def unscaled(model_grad: Tensor, scale: float) -> Tensor:
    """FP32 of the model's gradient times FP32 1/scale: one multiplication an element."""
    inv_scale = torch.ones((), dtype=torch.float32) / torch.tensor(scale, dtype=torch.float32)
    return model_grad.to(wide(model_grad.dtype)) * inv_scale


def found_inf(grads: Grads) -> bool:
    """The verdict, element by element on what will be stepped, never by the norm."""
    return any(g is not None and not bool(torch.isfinite(g).all()) for g in grads)


def total_norm(grads: Grads, norm_type: float = 2.0) -> float:
    """Over all elements of all gradients, in double, rounded once to FP32."""
    there = [g.double().reshape(-1) for g in grads if g is not None]
    if not there:
        return 0.0
    return float(torch.linalg.vector_norm(torch.cat(there), norm_type).float())


def clip_factor(norm: float, max_norm: float) -> Tensor:
    """torch.nn.utils.clip_grad_norm_'s, in FP32: a number over a tensor is the number times the tensor's reciprocal."""
    return (max_norm / (torch.tensor(norm, dtype=torch.float32) + 1e-6)).clamp(max=1.0)


def clipped(grads: Grads, norm: float, max_norm: float) -> list[Tensor | None]:
    """Gradients after a clip; as they are where one is not finite, or where the factor is 1."""
    factor = clip_factor(norm, max_norm)
    if found_inf(grads) or float(factor) == 1.0:
        return list(grads)
    return [None if g is None else g * factor.to(g.dtype) for g in grads]


def rounded(master: Tensor, dtype: torch.dtype) -> Tensor:
    """The model's weight: the master rounded to nearest even; from 65520 on it is inf in FP16."""
    return master.detach().to(dtype)


@dataclass
class Scale:
    """The loss scale, moved after the step by what the step found. ``growth_interval=None``: it never moves."""

    value: float
    growth_interval: int | None = None
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    hysteresis: int = 1
    min_scale: float = 2.0**-14
    max_scale: float = 2.0**24
    clean: int = 0
    overflows: int = 0

    @property
    def is_one(self) -> bool:
        """What the contract calls a scale of 1: static, and exactly that."""
        return self.growth_interval is None and self.value == 1.0

    def write(self, value: float) -> None:
        """The user sets it: finite steps are counted from zero again."""
        self.value, self.clean = value, 0

    def update(self, overflow: bool) -> None:
        if self.growth_interval is None:
            return
        if overflow:
            self.clean, self.overflows = 0, self.overflows + 1
            if self.overflows >= self.hysteresis:
                self.value = max(self.value * self.backoff_factor, self.min_scale)
            return
        self.clean, self.overflows = self.clean + 1, 0
        if self.clean == self.growth_interval:
            self.clean = 0
            self.value = min(self.value * self.growth_factor, self.max_scale)


@dataclass
class Reference:
    """FP32 masters kept by hand and stepped by the torch optimizer itself.

    Attributes:
        masters: One for each parameter, in order.
        optimizer: torch's, on the masters.
        largest: The largest magnitude that each master has had; rounding errors are measured by it.
        steps: Steps that were not skipped.
    """

    masters: list[nn.Parameter]
    dtypes: list[torch.dtype]
    optimizer: torch.optim.Optimizer
    scale: Scale
    skipped_steps: int = 0
    step_was_skipped: bool = False
    steps: int = 0
    largest: list[float] = field(default_factory=list)

    @classmethod
    def of(cls, params: Sequence[Tensor], make: Make, scale: Scale) -> Reference:
        masters = [nn.Parameter(p.detach().to(wide(p.dtype), copy=True)) for p in params]
        made = cls(masters, [p.dtype for p in params], make(masters), scale)
        made._measure()
        return made

    def step(self, grads: Grads) -> bool:
        """Decide, step, round, then move the scale, in this order. ``grads`` are true ones. Whether it was skipped."""
        overflow = found_inf(grads)
        if not overflow and any(g is not None for g in grads):
            for master, grad in zip(self.masters, grads, strict=True):
                master.grad = None if grad is None else grad.detach().to(master.dtype, copy=True).reshape(master.shape)
            self.optimizer.step()
            self.steps += 1
        self.skipped_steps += overflow
        self.step_was_skipped = overflow
        self.scale.update(overflow)
        self._measure()
        return overflow

    def model(self) -> list[Tensor]:
        return [rounded(m, d) for m, d in zip(self.masters, self.dtypes, strict=True)]

    def _measure(self) -> None:
        now = [float(m.detach().abs().max()) if m.numel() else 0.0 for m in self.masters]
        self.largest = now if not self.largest else [max(a, b) for a, b in zip(self.largest, now, strict=True)]
