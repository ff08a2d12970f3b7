"""What went wrong, in words: which parameters overflowed, and what to log about it and how often."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .. import kernels
from ..scaling import LossScaler

__all__ = ["Overflow", "SkipLog", "blamed", "describe", "overflows_from_flags", "warn", "warn_cast", "warn_model_write"]

logger = logging.getLogger("fp16opt")

_MANY = 3  # skips in a row from which on they are no rare overflows


class Overflow(NamedTuple):
    """A parameter whose gradient was not finite when a step was skipped.

    Fields:
        name: the parameter's name, or 'group 0, param 3' where it has none.
        group, index: its place in the optimizer's param_groups.
        inf, nan: which of the two its unscaled gradient held.

    Example:
        >>> print(Overflow("fc.weight", 0, 3, inf=True, nan=False))
        fc.weight (inf)
    """

    name: str
    group: int
    index: int  # type: ignore[assignment]  # hides tuple.index, which has no use here
    inf: bool
    nan: bool

    def __str__(self) -> str:
        kinds = [kind for kind, held in (("inf", self.inf), ("nan", self.nan)) if held]
        return f"{self.name} ({' and '.join(kinds)})"


def describe(names: Iterable[object], limit: int = 5) -> str:
    """Names in one line, the first ``limit`` of them.

    Example:
        >>> describe(["a", "b", "c", "d"], limit=2)
        'a, b and 2 more'
    """
    listed = [str(name) for name in names]
    if not listed:
        return "none"
    more = len(listed) - limit
    comma = "; " if any(", " in name for name in listed) else ", "  # "group 0, param 3" has one of its own
    return comma.join(listed) if more <= 0 else f"{comma.join(listed[:limit])} and {more} more"


def blamed(overflows: Sequence[object]) -> str:
    """:func:`describe` for overflows. There may be none here: another rank, or a GradScaler, found them elsewhere.

    Example:
        >>> blamed([])
        "none of this rank's parameters"
    """
    return describe(overflows) if overflows else "none of this rank's parameters"


def overflows_from_flags(
    flags: Sequence[int], names: Sequence[str], places: Sequence[tuple[int, int]]
) -> list[Overflow]:
    """The parameters with a flag set, in order.

    Args:
        flags: bits of ``kernels.GradStats.nonfinite``, one int for each parameter.
        names: of the parameters.
        places: their (group, index in the group).
    """
    return [
        Overflow(name, *place, inf=bool(bits & kernels.INF), nan=bool(bits & kernels.NAN))
        for bits, name, place in zip(flags, names, places, strict=True)
        if bits
    ]


def are_finite(losses: Sequence[Tensor]) -> bool | None:
    """Whether all losses of a step are; None where the engine has seen none. Syncs."""
    return all([bool(loss.isfinite().all()) for loss in losses]) if losses else None  # noqa: C419


class SkipLog:
    """Decides what to log after each skipped step.

    A dynamic scaler finds its scale by overflowing: until the first step is taken a skip is logged at INFO
    level as calibration; afterwards one is a rare overflow, a WARNING with the parameters' names. Three in a
    row, or a scale that calibration has brought under 1, are no rare overflows: the warning says so, and
    at the 3rd, 4th, 8th, 16th ... alone. So does one where the loss itself was not finite. No scale can help that
    (an ERROR) at the lowest scale, and at one where the loss was finite before.
    Where the scale can't go lower, skips will go on: the 1st, 2nd, 4th, 8th ... of them is an ERROR (a WARNING
    with a static scaler), the others are silent.

    Attributes:
        calibrating: Whether no step was taken yet.
        awaits_step: Whether :meth:`stepped` is to be told of the next step that is taken.
        grad_scaler_logs: Whether the GradScaler that drives logs skips itself.
        what, advice: What a skip at a static scale is called, and what to do about it.
    """

    what = "step skipped"
    advice = "Use a lower scale or dynamic=True."

    def __init__(self) -> None:
        self.grad_scaler_logs = False
        self._taken = 0
        self._stuck = 0
        self._fine = 0.0  # the largest scale that a step was seen to be taken with
        self.awaits_step = True

    @property
    def calibrating(self) -> bool:
        """See the class."""
        return self._taken == 0

    def stepped(self, scale: float) -> None:
        """A step was taken with this loss scale."""
        self._taken += 1
        self._fine = max(self._fine, scale)
        self.awaits_step = self.calibrating

    def skipped(
        self,
        scaler: LossScaler,
        old: float,
        overflows: Sequence[Overflow],
        losses: Sequence[Tensor] = (),
    ) -> None:
        """A step was skipped, and the scaler has been updated. Syncs (a skip is known on the host anyway).

        Args:
            old: the loss scale that the step was made with.
            overflows: the parameters with non-finite gradients.
            losses: of the step, unscaled; none where they are not known.
        """
        loss_is_finite = are_finite(losses)
        self.awaits_step = True
        new = float(scaler.scale)
        stuck = not scaler.dynamic or (not new < old and scaler.at_floor())
        in_a_row = int(scaler.consecutive_skips)
        change = f"{old:g} -> {new:g}" if new != old else f"stays at {new:g}" + ("" if stuck else " (hysteresis)")
        if loss_is_finite is False:
            if _is_power_of_two(in_a_row):
                hopeless = (stuck and scaler.dynamic) or old <= max(self._fine, 0.0 if scaler.dynamic else 1.0)
                logger.log(
                    logging.ERROR if stuck and scaler.dynamic else logging.WARNING,
                    "step skipped, loss scale %s: the loss itself is not finite (%d in a row)%s; non-finite gradients "
                    "in %s. %s",
                    change,
                    in_a_row,
                    ", so that no loss scale can help" if hopeless else "",
                    blamed(overflows),
                    _about_the_loss(hopeless, any(loss.dtype == torch.float16 for loss in losses)),
                )
        elif stuck:
            self._stuck += 1
            if _is_power_of_two(self._stuck):
                self._log_stuck(scaler.dynamic, new, overflows)
        elif in_a_row >= _MANY if not self.calibrating else new < 1.0:
            if in_a_row == _MANY or _is_power_of_two(in_a_row) or self.calibrating:
                logger.warning(
                    "%s, %d times in a row: step skipped, loss scale %s, non-finite gradients in %s. See "
                    "fp16opt.diagnose(model, loss_fn, optimizer): it says where they overflow, and at which scale "
                    "they would not.",
                    "the loss is finite and gradients are not" if loss_is_finite else "gradients are not finite",
                    in_a_row,
                    change,
                    blamed(overflows),
                )
        elif self.calibrating:
            logger.info(
                "calibrating the loss scale: step skipped, the scale is now %g. The first steps of a dynamic "
                "scaler are expected to overflow.",
                new,
            )
        else:
            logger.warning(
                "step skipped, loss scale %s: a rare overflow, non-finite gradients in %s.", change, blamed(overflows)
            )

    def skipped_by_grad_scaler(self, overflows: Sequence[Overflow]) -> None:
        """A step was skipped under a GradScaler, which lowers its scale itself, and may log it."""
        calm = logging.INFO if self.calibrating else logging.WARNING
        level = logging.DEBUG if self.grad_scaler_logs else calm
        logger.log(level, "step skipped by the GradScaler: non-finite gradients in %s.", blamed(overflows))

    def _log_stuck(self, dynamic: bool, scale: float, overflows: Sequence[Overflow]) -> None:
        if dynamic:
            logger.error(
                "step skipped at the lowest loss scale, %g (%d so far): non-finite gradients in %s. Look for "
                "inf or nan in the loss or the data, or give DynamicLossScaler a lower min_scale.",
                scale,
                self._stuck,
                blamed(overflows),
            )
        else:
            logger.warning(
                "%s, static loss scale %g (%d so far): non-finite gradients in %s. %s",
                self.what,
                scale,
                self._stuck,
                blamed(overflows),
                self.advice,
            )


def _about_the_loss(hopeless: bool, is_fp16: bool) -> str:
    if is_fp16:
        return "The loss is FP16, which ends at 65504: compute it in FP32, with .float() on the model's outputs."
    where = "Look for inf or nan in the data, or see fp16opt.diagnose(model, loss_fn)."
    return (
        where if hopeless else f"A part of it that was scaled may be finite at a lower scale. If this goes on: {where}"
    )


def _is_power_of_two(count: int) -> bool:
    return count & (count - 1) == 0


def warn(text: str, *arguments: object) -> None:
    """Log a warning."""
    logger.warning(text, *arguments)


def warn_cast(flags: Iterable[tuple[str, int]], warned: set[str]) -> None:
    """Warn of masters that their model parameter can't hold, each parameter once for each reason.

    Args:
        flags: names and bits of ``kernels.CastStats.overflow``.
        warned: remembers what was warned of; added to.
    """
    reasons = (
        (kernels.NOT_FINITE, "not finite", "FP32 masters hold inf or nan"),
        (
            kernels.TOO_LARGE,
            "too large",
            "FP32 masters are too large for their 16-bit parameters, which became inf",
        ),
    )
    flags = list(flags)
    for bit, key, text in reasons:
        names = [name for name, bits in flags if bits & bit and f"{key}: {name}" not in warned]
        if names:
            warned.update(f"{key}: {name}" for name in names)
            warn("%s: %s.", text, describe(names))


def warn_model_write(names: Iterable[str]) -> None:
    """Warn that something else wrote model parameters, and that their masters take the new values."""
    warn(
        "model weights were written by something else than the optimizer; masters take the values: %s. "
        "There is nothing to do after a load. To write in every step, as a clamp does, edit master_params() and call "
        'write_masters(). on_model_write="error" finds the place.',
        describe(names),
    )
