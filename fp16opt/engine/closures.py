"""Steps of optimizers that evaluate their closure more than once (LBFGS, SAM): masters down before, back off after."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

from ..certify import closure_calls, factory_like
from ..certify.buckets import NOT_SETTINGS, settings_of
from .accumulation import Accumulation, Verdict
from .snapshot import Snapshot
from .wrapped_step import StepFailed, run_step

_ALIKE = (*NOT_SETTINGS, "lr", "initial_lr")  # optimizers that differ in these call their closures alike


class GaveUp(Exception):
    """Raised out of an evaluation that overflows while the scale can't go lower."""


class ClosureHabits:
    """How often the wrapped optimizer's class calls its closure: tried once for each kind of settings."""

    def __init__(self) -> None:
        self._known: dict[str, bool] = {}

    def calls_again(self, optimizer: Optimizer) -> bool:
        """Whether a closure that is evaluated before the step, once, would not do. No sync."""
        group = optimizer.param_groups[0] if optimizer.param_groups else {}
        kind = repr([(key, value) for key, value in sorted(group.items()) if key not in _ALIKE])
        if kind not in self._known:
            self._known[kind] = closure_calls(factory_like(optimizer, settings_of(group))) not in ("never", "once")
        return self._known[kind]


class Evaluations:
    """The closure as such an optimizer sees it: gradients are true and finite when it returns.

    Args:
        closure: The user's.
        round_down: Writes the masters' present values into the model.
        accumulation: Settled after each evaluation.

    Attributes:
        loss: Of the last evaluation.
        returned: What the optimizer's step returned.
        verdict: On its gradients; None where it made none.
    """

    def __init__(self, closure: Callable[[], Any], round_down: Callable[[], None], accumulation: Accumulation) -> None:
        self._closure = closure
        self._round_down = round_down
        self._accumulation = accumulation
        self.loss: Any = None
        self.returned: Any = None
        self.verdict: Verdict | None = None

    def __call__(self) -> Any:
        self._round_down()
        while True:
            before = self._accumulation.backwards
            with torch.enable_grad():
                self.loss = self._closure()
            self.verdict = self._accumulation.settle(write=True)
            if self.verdict is None or not bool(self.verdict.found_inf):
                return self.loss
            if self._accumulation.backwards == before or not self._back_off(self.verdict):
                raise GaveUp  # it made no gradients of its own, or the scale can't go lower
            self._accumulation.abandon()

    def _back_off(self, verdict: Verdict) -> bool:
        """Lower every scale whose backward overflowed; False where none of them can go lower. Syncs."""
        lowered = False
        for scaler, found in verdict.of:
            if bool(found):
                lowered |= scaler.back_off()
        return lowered

    def step(self, optimizer: Optimizer, copies: bool) -> bool:
        """Step ``optimizer``, which may evaluate any number of times.

        Whatever goes wrong on the way, masters and their state are put back as they were: with ``copies`` a copy is
        taken first, which costs as much memory as both.

        Returns:
            Whether it was stepped: False where it gave up.
        """
        before = Snapshot(optimizer, copies_tensors=copies)
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
