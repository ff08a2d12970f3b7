"""GradScaler.step(closure): an evaluation that overflows lowers the scale and is made again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..engine.modes.closures import Evaluation, Reevaluations


def split_closure(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """(the closure or None, the other args, the other kwargs) of a call of ``optimizer.step``."""
    if "closure" in kwargs:
        return kwargs["closure"], args, {name: value for name, value in kwargs.items() if name != "closure"}
    if args and callable(args[0]):
        return args[0], args[1:], kwargs
    return None, args, kwargs


class ScaledReevaluations(Reevaluations):
    """Closures that scale their loss with a GradScaler.

    Args:
        evaluate: evaluates the user's closure once.
        back_off: lowers the GradScaler's scale; False where it can't go lower.
    """

    def __init__(self, evaluate: Callable[[], Evaluation], back_off: Callable[[], bool]) -> None:
        super().__init__()
        self._evaluate_once = evaluate
        self._lower_scale = back_off

    def _evaluate(self) -> Evaluation:
        return self._evaluate_once()

    def _back_off(self) -> bool:
        return self._lower_scale()

    def until_finite(self) -> Any:
        """What a ``MixedPrecisionOptimizer`` calls: where no scale is low enough it skips, and counts, by itself."""
        self.evaluate()
        return self.loss
