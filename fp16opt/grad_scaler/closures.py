"""GradScaler.step(closure): an evaluation that overflows lowers the scale and is made again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch.optim import Optimizer

from ..engine.closures import GaveUp
from ..engine.snapshot import Snapshot


def take_closure(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """(the closure or None, the other args, the other kwargs) of a call of ``optimizer.step``."""
    if "closure" in kwargs:
        return kwargs["closure"], args, {name: value for name, value in kwargs.items() if name != "closure"}
    if args and callable(args[0]):
        return args[0], args[1:], kwargs
    return None, args, kwargs


class Evaluation(NamedTuple):
    """What one evaluation of a closure gave.

    Attributes:
        overflowed: Whether the gradients that are there after it, unscaled, are not all finite.
        scaled: Whether it scaled a loss: if not, they are not its own, and another one would not change them.
    """

    loss: Any
    overflowed: bool
    scaled: bool


class Evaluations:
    """The closure as the optimizer sees it: gradients are unscaled and finite when it returns.

    Args:
        evaluate: Evaluates the user's closure once.
        back_off: Lowers the scale; False where it can't go lower.
    """

    def __init__(self, evaluate: Callable[[], Evaluation], back_off: Callable[[], bool]) -> None:
        self._evaluate = evaluate
        self._back_off = back_off
        self._loss: Any = None

    def __call__(self) -> Any:
        while True:
            self._loss, overflowed, scaled = self._evaluate()
            if not overflowed:
                return self._loss
            if not scaled or not self._back_off():
                raise GaveUp

    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> tuple[Any, bool]:
        """Step ``optimizer``, which may evaluate any number of times.

        Whatever goes wrong on the way, parameters and optimizer state are put back as they were: a copy is taken first.

        Returns:
            (what the optimizer returned, or the last loss where it gave up; whether it gave up).
        """
        before = Snapshot(optimizer, copies_tensors=True)
        try:
            return optimizer.step(self, *args, **kwargs), False
        except GaveUp:
            before.restore()
            return self._loss, True
        except BaseException:
            before.restore()
            raise
