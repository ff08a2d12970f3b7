"""What an optimizer is composed of, for those who need a part of it: faces and distributed training."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.optim import Optimizer

from ..scaling import LossScaler
from .accumulation import Accumulation
from .choices import Choices
from .gradients import Gradients
from .masters import Masters
from .model_writes import ModelWrites
from .outcome import Outcome
from .pairs import Pairs


@dataclass(frozen=True)
class Engine:
    """The components of a ``MixedPrecisionOptimizer``.

    Attributes:
        optimizer: The wrapped one.
        holder: The one that holds what is stepped on this rank: ``optimizer``, or the one inside of ZeRO.
        choices: What was asked for.
    """

    optimizer: Optimizer
    holder: Optimizer
    pairs: Pairs
    masters: Masters
    model_writes: ModelWrites
    gradients: Gradients
    accumulation: Accumulation
    outcome: Outcome
    scaler: LossScaler
    device: torch.device
    choices: Choices

    def steps_counted(self) -> int:
        """How many steps were taken, with one that was taken in backward and that ``step`` is yet to count."""
        return self.outcome.steps_taken + self.accumulation.steps_ahead()


def inside(optimizer: object) -> object:
    """A ``MixedPrecisionOptimizer`` that a trainer holds in an optimizer of its own, as ``.optimizer``.

    Accelerate's prepared optimizers are such, and Lightning's and Fabric's. Anything else is returned as it is.
    """
    held = getattr(optimizer, "optimizer", None)
    return held if isinstance(getattr(held, "engine", None), Engine) else optimizer
