"""The one session object, and helpers that scripts import from here."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from .casting import Casts
from .policy import AmpError, Properties

if TYPE_CHECKING:
    from .scaler import LossScaler

__all__ = ["AmpState", "_amp_state", "master_params", "maybe_print", "rank", "warn_or_err"]

logger = logging.getLogger("fp16opt.amp")


class AmpState:
    """What ``amp`` knows about this process: the last ``initialize``, and the function casts.

    Attributes:
        verbosity: 0: silent. 1: a line at ``initialize``, and skipped steps. 2: each O1 cast.
        hard_override: Refusals only warn.
        allow_incoming_model_not_fp32: Models with 16-bit parameters are let in.
        opt_properties: What the last ``initialize`` resolved.
        loss_scalers: One a loss id, of the last ``initialize``: those that all optimizers use. Always the same list.
        handle: Its ``_deactivate()`` takes the O1 casts out.
        min_loss_scale, max_loss_scale: Of the last ``initialize``.
        fp32_modules: Module classes that stay in FP32 wherever batch norm does. Add your own norms.
        casts: The O1 casts.
    """

    def __init__(self) -> None:
        self.verbosity = 1
        self.hard_override = False
        self.allow_incoming_model_not_fp32 = False
        self.opt_properties = Properties()
        self.loss_scalers: list[LossScaler] = []
        self.handle: Any = None
        self.min_loss_scale: float | None = None
        self.max_loss_scale: float | None = 2.0**24
        self.fp32_modules: list[type[nn.Module]] = []
        self.casts = Casts()


_amp_state = AmpState()


def maybe_print(msg: object, rank0: bool = False) -> None:
    """Log ``msg`` unless verbosity is 0; with ``rank0`` only on rank 0 of a distributed run."""
    if _amp_state.verbosity > 0 and not (rank0 and rank() != 0):
        logger.info("%s", msg)


def rank() -> int:
    """This process's rank in a distributed run, else 0."""
    distributed = torch.distributed
    return distributed.get_rank() if distributed.is_available() and distributed.is_initialized() else 0


def warn_or_err(msg: str) -> None:
    """Raise ``msg``, or only log it where ``hard_override`` is set.

    Raises:
        AmpError: ``hard_override`` is False.
    """
    if not _amp_state.hard_override:
        raise AmpError(f"{msg} (amp._amp_state.hard_override = True turns this into a warning.)")
    logger.warning("%s", msg)


def master_params(optimizer: Any) -> Iterator[Tensor]:
    """The parameters that ``optimizer`` steps: FP32 masters where there are masters, else the model's.

    Gradients are unscaled after ``scale_loss``, so these are the ones to clip. Pairs with ``model.parameters()`` where
    the optimizer was made of them.

    Args:
        optimizer: One that went through ``initialize``, or any other.
    """
    for group in optimizer.param_groups:
        yield from group["params"]
