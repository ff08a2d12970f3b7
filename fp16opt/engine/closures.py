"""Closures: evaluated once before a step, or whenever the wrapped optimizer calls them (LBFGS, SAM)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from .dtensors import versions
from .snapshot import Snapshot
from .step_state import OverflowCheck, StepState
from .wrapped_step import StepFailed, run_step


class GaveUp(Exception):
    """Raised out of an evaluation that overflows while the scale can't go lower."""


def closure_mode(asked: str | None, optimizer: Optimizer) -> str:
    """ "once" or "reevaluate": what the user asked for, else what the class of the wrapped optimizer needs.

    Example:
        >>> closure_mode(None, torch.optim.SGD([torch.nn.Parameter(torch.ones(1))]))
        'once'
    """
    if asked is not None:
        return asked
    return "reevaluate" if isinstance(optimizer, torch.optim.LBFGS) else "once"


class EvaluatedClosure:
    """A closure that was evaluated before the step.

    Args:
        loss: what it returned.
        masters: what the wrapped optimizer steps. One that moves them and calls the closure then, or calls it twice,
            wants gradients at another point than there are.
    """

    def __init__(self, loss: Any, masters: Sequence[Tensor]) -> None:
        self._loss = loss
        self._masters = masters
        self._versions: list[int] = []
        self._called = False

    def before_step(self) -> None:
        """The wrapped optimizer is about to step masters, which have taken by now what was written to the model."""
        self._versions = versions(self._masters)

    def __call__(self) -> Any:
        if self._called or versions(self._masters) != self._versions:
            raise RuntimeError(
                "the wrapped optimizer evaluates its closure more than once in a step, or after it has moved the "
                'weights, as SAM does. Construct MixedPrecisionOptimizer with closure="reevaluate"; or evaluate the '
                "loss yourself, call backward(loss), then step() without a closure."
            )
        self._called = True
        return self._loss


class Reevaluations:
    """The closure as an optimizer sees it that evaluates it itself: gradients are true and finite when it returns.

    Args:
        closure: the user's.
        round_down: writes the masters' present values into the model.
        state: finalized after each evaluation.

    Attributes:
        loss: of the last evaluation.
        returned: what the optimizer's step returned.
        check: of its gradients; None where it made none.
    """

    def __init__(self, closure: Callable[[], Any], round_down: Callable[[], None], state: StepState) -> None:
        self._closure = closure
        self._round_down = round_down
        self._state = state
        self.loss: Any = None
        self.returned: Any = None
        self.check: OverflowCheck | None = None

    def __call__(self) -> Any:
        self._round_down()
        while True:
            before = self._state.backwards
            with torch.enable_grad():
                self.loss = self._closure()
            self.check = self._state.finalize(write=True)
            if self.check is None or not bool(self.check.found_inf):
                return self.loss
            if self._state.backwards == before or not _back_off(self.check):
                raise GaveUp  # it made no gradients of its own, or the scale can't go lower
            self._state.clear(set_to_none=True)

    def step(self, optimizer: Optimizer) -> bool:
        """Step ``optimizer``, which may evaluate any number of times.

        Whatever goes wrong on the way, masters and their state are put back as they were: a copy is taken first, which
        costs as much memory as both.

        Returns:
            Whether it was stepped: False where it gave up.
        """
        before = Snapshot(optimizer, copies_tensors=True)
        try:
            self.returned = run_step(optimizer, None, self)
        except StepFailed as failed:
            before.restore()
            self._round_down()
            if isinstance(failed.error, GaveUp):
                return False
            raise failed.error from None
        self._round_down()
        return True


def _back_off(check: OverflowCheck) -> bool:
    """Lower every scale whose backward overflowed; False where none of them can go lower. Syncs."""
    lowered = False
    for scaler, found in check.of:
        if bool(found):
            lowered |= scaler.back_off()
    return lowered
