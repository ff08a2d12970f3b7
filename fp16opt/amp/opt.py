"""OptimWrapper: the older interface, an optimizer with a dynamic scaler for each loss of a step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from torch.optim import Optimizer

from ..scaling import LARGEST_SCALE
from .casting import Casts
from .initialised import Initialised, Setup, is_initialised
from .optimizers import adopt, wrapped_in
from .policy import AmpError
from .scaler import LossScaler

__all__ = ["OptimWrapper"]

Scaling = Callable[..., AbstractContextManager[Any]]


class OptimWrapper:
    """``opt.scale_loss(loss)`` is called ``num_loss`` times a step, in the same order; ``step`` skips on overflow.

    Args:
        optimizer: Of FP32 parameters. Attributes that are not here are its own.
        num_loss: Losses a step; each has a dynamic scaler.
        casts: The function casts of the handle; None: neither scale nor skip.
        scale: ``amp.scale_loss``.

    Raises:
        TypeError: ``optimizer`` is no torch optimizer.
        AmpError: ``num_loss`` is not a positive whole number.
    """

    def __init__(self, optimizer: Any, num_loss: int, casts: Casts | None, scale: Scaling) -> None:
        inner = wrapped_in(optimizer)
        if inner is None:
            raise TypeError(f"optimizer: expected a torch.optim.Optimizer, got {type(optimizer).__name__}.")
        if isinstance(num_loss, bool) or not isinstance(num_loss, int) or num_loss < 1:
            raise AmpError(f"num_loss: expected a whole number from 1 on, got {num_loss!r}.")
        self._optimizer = optimizer
        self._casts = casts
        self._scale = scale
        self._num_loss = num_loss
        self._loss_idx = 0
        self._loss_scaler: list[LossScaler] = []
        if casts is not None:
            self._loss_scaler = [LossScaler("dynamic", max_loss_scale=LARGEST_SCALE) for _ in range(num_loss)]
            if not is_initialised(inner):
                adopt(inner, Setup(self._loss_scaler, False, True, 1), ())

    @contextmanager
    def scale_loss(self, loss: Any) -> Iterator[Any]:
        """As ``amp.scale_loss``, with the next of the scalers.

        Raises:
            AmpError: It is called more often than ``num_loss`` times before ``step``.
        """
        if self._casts is None:
            yield loss
            return
        if self._loss_idx >= self._num_loss:
            raise AmpError(
                f"scale_loss: expected {self._num_loss} losses before step(), this is one more. Give wrap_optimizer "
                "the right num_loss."
            )
        with self._scale(loss, self._optimizer, loss_id=self._loss_idx) as scaled:
            yield scaled
        self._loss_idx += 1

    def step(self, closure: Any = None) -> Any:
        """Step the optimizer, unless a loss overflowed.

        Raises:
            NotImplementedError: A closure was given.
        """
        if closure is not None:
            raise NotImplementedError(
                "step(closure) does not go with wrap_optimizer. Call step() without one, or use "
                "fp16opt.MixedPrecisionOptimizer."
            )
        self._loss_idx = 0
        return self._optimizer.step()

    def __getattr__(self, name: str) -> Any:
        inner = self.__dict__.get("_optimizer")
        if inner is None:
            raise AttributeError(name)
        return getattr(inner, name)

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer inside."""
        inner: Optimizer = self._optimizer
        return inner

    @property
    def loss_scale(self) -> float:
        """The scale that the next loss is multiplied by."""
        if not self._loss_scaler:
            return 1.0
        return self._loss_scaler[min(self._loss_idx, self._num_loss - 1)].loss_scale()

    @property
    def engine(self) -> Initialised | None:
        """The optimizer inside, where it waits for what ``scale_loss`` finds."""
        inner = wrapped_in(self._optimizer)
        return inner if isinstance(inner, Initialised) else None
