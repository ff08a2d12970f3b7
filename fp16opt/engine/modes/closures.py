"""Closures: evaluated once before a step, or whenever the wrapped optimizer calls them (LBFGS, SAM)."""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from .. import errors
from ..dtensors import versions
from ..gradients import StepState
from ..snapshot import Snapshot
from ..stage import Check
from ..wrapped_step import run_step


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
        """The loss. Raises ``RuntimeError`` where it is asked for again, or masters have moved since."""
        if self._called or versions(self._masters) != self._versions:
            raise errors.EVALUATED_TWICE()
        self._called = True
        return self._loss


class Evaluation(NamedTuple):
    """What one evaluation of a closure gave.

    Attributes:
        loss: what the closure returned.
        overflowed: whether the gradients that are there after it, unscaled, are not all finite.
        is_new: whether it ran a backward. If not, another evaluation would find the same gradients.
    """

    loss: Any
    overflowed: bool
    is_new: bool


class Reevaluations(abc.ABC):
    """The closure as an optimizer sees it that evaluates it itself: gradients are true and finite when it returns.

    Attributes:
        loss: of the last evaluation.
        returned: what the optimizer's step returned.
    """

    def __init__(self) -> None:
        self.loss: Any = None
        self.returned: Any = None

    @abc.abstractmethod
    def _evaluate(self) -> Evaluation:
        """Evaluate the user's closure once. Syncs."""

    @abc.abstractmethod
    def _back_off(self) -> bool:
        """Lower the scale; False where it can't go lower. Syncs."""

    def evaluate(self) -> bool:
        """Evaluate, and again at a lower scale as long as gradients overflow; False where that does not help."""
        while True:
            self.loss, overflowed, is_new = self._evaluate()
            if not overflowed:
                return True
            if not (is_new and self._back_off()):
                return False

    def __call__(self) -> Any:
        """Evaluate; returns the loss. Raises :class:`GaveUp` where no scale was low enough."""
        if not self.evaluate():
            raise GaveUp
        return self.loss

    def step(self, optimizer: Optimizer, run: Callable[[Callable[[], Any]], Any]) -> bool:
        """Have ``run`` step ``optimizer`` with this closure, which may evaluate any number of times.

        Whatever goes wrong on the way, parameters and their state are put back as they were: a copy is taken first,
        which costs as much memory as both.

        Returns:
            Whether it was stepped: False where no scale was low enough.
        """
        before = Snapshot(optimizer, copies_tensors=True)
        try:
            self.returned = run(self)
        except GaveUp:
            before.restore()
            return False
        except BaseException:
            before.restore()
            raise
        return True


class MasterReevaluations(Reevaluations):
    """Closures that call ``backward`` of the wrapper, whose masters are stepped.

    Args:
        closure: the user's.
        round_down: writes the masters' present values into the model.
        state: finalized after each evaluation.

    Attributes:
        check: of the last evaluation's gradients; None where it made none.
    """

    def __init__(self, closure: Callable[[], Any], round_down: Callable[[], None], state: StepState) -> None:
        super().__init__()
        self._closure = closure
        self._round_down = round_down
        self._state = state
        self.check: Check | None = None

    def _evaluate(self) -> Evaluation:
        self._round_down()
        before = self._state.backwards
        with torch.enable_grad():
            loss = self._closure()
        self.check = self._state.finalize(self._state.look(), write=True)
        overflowed = self.check is not None and bool(self.check.found_inf)
        return Evaluation(loss, overflowed, self._state.backwards != before)

    def evaluate(self) -> bool:
        """What the closure calls is its own: it is no call within the step."""
        step, self._state.step = self._state.step, None
        try:
            return super().evaluate()
        finally:
            self._state.step = step

    def _back_off(self) -> bool:
        """Every scale whose backward overflowed."""
        if self.check is None:
            return False
        lowered = False
        for scaler, found in self.check.found:
            if bool(found):
                lowered |= scaler.back_off()
        if lowered:
            self._state.clear(set_to_none=True)
        return lowered

    def step_masters(self, optimizer: Optimizer) -> bool:
        """:meth:`step` of the wrapped optimizer; then the model has the masters' values, stepped or put back."""
        try:
            return self.step(optimizer, lambda closure: run_step(optimizer, closure=closure))
        finally:
            self._round_down()
