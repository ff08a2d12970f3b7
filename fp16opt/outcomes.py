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

    def record(self, skipped: bool, grads: MasterGrads) -> None:
        """Note a step that was decided on the host. No sync."""
        self._flags = [flags.clone() for flags in grads.flags_on_devices()] if skipped else None
        self._last = skipped
        self._skipped_here += skipped

    def memory(self, flags: list[Tensor], device: torch.device) -> tuple[list[Tensor], Tensor, Tensor]:
        """Where a step is noted that nobody looked at. Made once, and written in place: a CUDA graph that is replayed
        goes on counting here.

        Args:
            flags: int32, those that are to be kept.
            device: Where the decision is taken.

        Returns:
            (for each of ``flags`` the memory of its copy; the flag of the last step; the number of skipped steps).
        """
        self._flags = self._kept = room_for(flags, self._kept)
        if self._skipped_on_device is None or self._last_on_device is None:
            self._last_on_device, self._skipped_on_device = counters(device)
        self._last = self._last_on_device
        return self._kept, self._last_on_device, self._skipped_on_device

    def report(self, grads: MasterGrads) -> list[Overflow]:
        """Which parameters had non-finite gradients if the last step was skipped. Syncs."""
        if self._flags is None or not self.last_was_skipped:
            return []
        return diagnostics.overflows_from_flags(grads.read_flags(self._flags), grads.params.names, grads.params.places)


def room_for(flags: list[Tensor], known: list[Tensor]) -> list[Tensor]:
    """``known``, if copies of ``flags`` fit there; else new memory."""
    if [(one.shape, one.device) for one in flags] == [(one.shape, one.device) for one in known]:
        return known
    return [torch.empty_like(one) for one in flags]


def counters(device: torch.device) -> tuple[Tensor, Tensor]:
    """(float32: whether the last step was skipped; float64: how many were), 0-dim, zeros."""
    wide = kernels.stats.sum_dtype(device)  # whole numbers up to 2**53
    return torch.zeros((), device=device), torch.zeros((), dtype=wide, device=device)


def check_consecutive(scalers: Sequence[LossScaler], report: list[Overflow]) -> None:
    """Raise ``LossScaleError`` where a scaler's limit of non-finite steps in a row is reached. Syncs if it has one."""
    for scaler in scalers:
        limit = scaler.max_consecutive_skips
        if limit is not None and int(scaler.consecutive_skips) >= limit:
            names = diagnostics.blamed([str(overflow) for overflow in report])
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
