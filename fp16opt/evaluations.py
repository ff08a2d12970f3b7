"""GradScaler.step(closure): an evaluation that overflows lowers the scale and is made again."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

from . import wrapped

if TYPE_CHECKING:
    from .grad_scaler import GradScaler


def take_closure(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """(the closure or None, the other args, the other kwargs) of a call of ``optimizer.step``."""
    if "closure" in kwargs:
        return kwargs["closure"], args, {name: value for name, value in kwargs.items() if name != "closure"}
    if args and callable(args[0]):
        return args[0], args[1:], kwargs
    return None, args, kwargs


def step(scaler: GradScaler, optimizer: Optimizer, closure: Callable[[], Any], *args: Any, **kwargs: Any) -> Any:
    """Step with a closure; the optimizer may evaluate it any number of times.

    Whatever goes wrong on the way, parameters and optimizer state are put back as they were: a copy is taken first.

    Returns:
        (what the optimizer returned, or the last loss where the step was skipped; whether it was skipped)
    """
    before = wrapped.Snapshot(optimizer)
    evaluations = _Evaluations(scaler, optimizer, closure)
    try:
        return optimizer.step(evaluations, *args, **kwargs), False
    except wrapped.GaveUp:
        before.restore()
        return evaluations.last_loss, True
    except BaseException:
        before.restore()
        scaler._start_over(optimizer)
        raise


class _Evaluations:
    """The closure as the optimizer sees it: gradients are unscaled and finite when it returns."""

    def __init__(self, scaler: GradScaler, optimizer: Optimizer, closure: Callable[[], Any]) -> None:
        self.scaler = scaler
        self.optimizer = optimizer
        self.closure = closure
        self.last_loss: Any = None

    def __call__(self) -> Any:
        while True:
            self.scaler._start_over(self.optimizer)
            with torch.enable_grad():
                self.last_loss = self.closure()
            if not self.scaler._overflowed(self.optimizer):
                return self.last_loss
            if not self.scaler._back_off():
                raise wrapped.GaveUp
