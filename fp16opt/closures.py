"""step(closure): evaluations see the masters' values, an overflow lowers the scale and is evaluated again."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from . import parallel, wrapped, writes

if TYPE_CHECKING:
    from .optimizer import MixedPrecisionOptimizer


def step(engine: MixedPrecisionOptimizer, closure: Callable[[], Any]) -> Any:
    """What ``MixedPrecisionOptimizer.step(closure)`` does; its docstring says it.

    The wrapped optimizer may evaluate any number of times. Whatever goes wrong on the way, masters, their state and the
    model are put back as they were: a copy is taken first, which costs as much memory as masters and state.
    """
    if not callable(closure):
        raise TypeError(f"closure: expected a callable that returns the loss, got {type(closure).__name__}.")
    parallel.refuse_on_zero(engine, "step(closure)", "Use an optimizer that steps without one, or FSDP2.")
    engine._follow_changes()
    writes.notice(engine._params, engine.on_model_write)
    evaluations = _Evaluations(engine, closure)
    before = None if engine.master_weights == "split" else wrapped.Snapshot(engine.optimizer)
    try:
        loss = engine._run_wrapped(None, evaluations)
    except wrapped.GaveUp:
        _put_back(engine, before)
        engine._finish(skipped=True)
        engine.zero_grad()
        return evaluations.last_loss
    except BaseException:
        _put_back(engine, before)
        engine.zero_grad()
        raise
    engine._finish(skipped=False)
    return loss


def _put_back(engine: MixedPrecisionOptimizer, before: wrapped.Snapshot | None) -> None:
    if before is not None:  # split masters are stepped after the evaluation, which changes nothing
        before.restore()
        engine._copy_down()


class _Evaluations:
    """The closure as the wrapped optimizer sees it."""

    def __init__(self, engine: MixedPrecisionOptimizer, closure: Callable[[], Any]) -> None:
        self.engine = engine
        self.closure = closure
        self.last_loss: Any = None

    def __call__(self) -> Any:
        engine = self.engine
        engine._copy_down()
        while True:
            with torch.enable_grad():
                self.last_loss = self.closure()
            if not engine._take_gradients() or not bool(engine._steps.found_inf()):
                return self.last_loss
            if not self._back_off():
                raise wrapped.GaveUp

    def _back_off(self) -> bool:
        """Lower every scale whose backward overflowed; False where none of them can go lower."""
        lowered = False
        for scaler, found in self.engine._steps.verdicts.values():
            if bool(found):
                lowered |= scaler.back_off()
        return lowered
