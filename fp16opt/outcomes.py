"""Outcomes: what became of the last steps. Counts, flags to name parameters with, log lines."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from torch import Tensor

from . import diagnostics, kernels
from .diagnostics import Overflow
from .gradients import MasterGrads
from .scaling import LossScaleError, LossScaler

logger = logging.getLogger("fp16opt")


class Outcomes:
    """Skipped steps, counted on the host where the decision was taken there and on the device elsewhere."""

    def __init__(self) -> None:
        self.log = diagnostics.SkipLog()
        self._skipped_here = 0
        self._skipped_on_device: Tensor | None = None
        self._last_on_device: Tensor | None = None
        self._last: bool | Tensor = False
        self._kept: list[Tensor] = []
        self._flags: list[Tensor] | None = None

    @property
    def last_was_skipped(self) -> bool:
        """Syncs where the decision was taken on the device."""
        return bool(self._last)

    @property
    def skipped_steps(self) -> int:
        """Syncs where decisions were taken on the device."""
        return self._skipped_here + (0 if self._skipped_on_device is None else int(self._skipped_on_device))

    def record(self, skipped: bool | Tensor, grads: MasterGrads) -> None:
        """Note a step. ``skipped``: decided, or the device's flag (float32, 0-dim) where nobody looked. No sync."""
        self._flags = None if skipped is False else [flags.clone() for flags in grads.flags_on_devices()]
        self._last = skipped
        if isinstance(skipped, Tensor):
            self._last, counted = self._counters(skipped.device)
            self._last.copy_(skipped)
            counted.add_(skipped)
        elif skipped:
            self._skipped_here += 1

    def memory(self, flags: list[Tensor], device: torch.device) -> tuple[list[Tensor], tuple[Tensor, Tensor]]:
        """What a kernel writes to in place of :meth:`record`.

        Args:
            flags: int32, those that it is to keep a copy of.
            device: Where the decision is taken.

        Returns:
            (for each of ``flags`` the memory of its copy; (the flag of the last step, the number of skipped steps)).
        """
        if [(kept.shape, kept.device) for kept in self._kept] != [(one.shape, one.device) for one in flags]:
            self._kept = [torch.empty_like(one) for one in flags]
        self._flags = self._kept
        self._last, counted = self._counters(device)
        return self._kept, (self._last, counted)

    def _counters(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Made once and written in place: a CUDA graph that is replayed goes on counting here."""
        if self._skipped_on_device is None or self._last_on_device is None:
            dtype = kernels.stats.sum_dtype(device)  # whole numbers up to 2**53
            self._skipped_on_device = torch.zeros((), dtype=dtype, device=device)
            self._last_on_device = torch.zeros((), device=device)
        return self._last_on_device, self._skipped_on_device

    def report(self, grads: MasterGrads) -> list[Overflow]:
        """Which parameters had non-finite gradients if the last step was skipped. Syncs."""
        if self._flags is None or not self.last_was_skipped:
            return []
        return diagnostics.overflows_from_flags(grads.read_flags(self._flags), grads.params.names, grads.params.places)


def check_consecutive(scalers: Sequence[LossScaler], report: list[Overflow]) -> None:
    """Raise ``LossScaleError`` where a scaler's limit of non-finite steps in a row is reached. Syncs if it has one."""
    for scaler in scalers:
        limit = scaler.max_consecutive_skips
        if limit is not None and int(scaler.consecutive_skips) >= limit:
            names = diagnostics.describe([str(overflow) for overflow in report])
            raise LossScaleError(
                f"{int(scaler.consecutive_skips)} steps in a row had non-finite gradients (max_consecutive_skips="
                f"{limit}); the loss scale is {float(scaler.scale):g}. Last in: {names}. Lowering the scale did not "
                "help: look for inf or nan in the loss and in the data."
            )


def warn_no_gradients(names: Sequence[str], warned: set[str]) -> None:
    """Once: the model may hold other parameters by now, and those of this optimizer be a dead copy."""
    if "no gradients" not in warned:
        warned.add("no gradients")
        logger.warning(
            "backward gave no gradient to any parameter of this optimizer: %s. If the model's parameters were replaced "
            "after the optimizer was made, make and wrap the optimizer anew.",
            diagnostics.describe(names),
        )
