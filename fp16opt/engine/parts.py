"""What a ``MixedPrecisionOptimizer`` shows of itself to the rest of the package."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch.optim import Optimizer

from ..scaling import LossScaler
from .config import Config
from .gradients import StepState
from .masters import Masters
from .model_writes import ModelWrites
from .outcome import Outcome
from .params import ParamTable
from .passes import Gradients


class Wrapper(Protocol):
    """The components of a ``MixedPrecisionOptimizer``. Not a stable interface.

    Attributes:
        optimizer: The wrapped one.
        inner: The one that holds what is stepped on this rank: ``optimizer``, or the one inside of ZeRO.
        config: What was asked for.
    """

    optimizer: Optimizer
    inner: Optimizer
    params: ParamTable
    masters: Masters
    model_writes: ModelWrites
    gradients: Gradients
    step_state: StepState
    outcome: Outcome
    scaler: LossScaler
    device: torch.device
    config: Config

    def settle(self, call: str) -> None:
        """Finish a step that an exception has stopped; raise ``RuntimeError`` for a ``call`` within one."""

    def steps_counted(self) -> int:
        """How many steps were taken, with one that was taken in backward and that ``step`` is yet to count."""

    def state_to_save(self, entry: Any) -> Any:
        """A parameter's state in FP32, where it is to be saved from."""


def is_wrapper(optimizer: object) -> bool:
    """Whether this is a ``MixedPrecisionOptimizer``."""
    return isinstance(optimizer, Optimizer) and isinstance(optimizer.__dict__.get("params"), ParamTable)


def inside(optimizer: object) -> object:
    """A ``MixedPrecisionOptimizer`` that a trainer holds in an optimizer of its own, as ``.optimizer``.

    Accelerate's prepared optimizers are such, and Lightning's and Fabric's. Anything else is returned as it is.
    """
    held = getattr(optimizer, "optimizer", None)
    return held if is_wrapper(held) else optimizer
