"""Outcome: what became of the steps. Scalers follow, skips are counted and logged, parameters are blamed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .. import kernels
from ..kernels import backends
from ..scaling import LossScaler
from . import errors
from .diagnostics import Lines, Overflow, SkipLog, are_finite, blamed, overflows_from_flags
from .params import ParamTable
from .ranks import Origin
from .stage import Check
from .step import Step

_PATIENCE = 4  # steps without a gradient: one may come before any backward, or after one of another loss


def update_scale(scaler: LossScaler, found_inf: Tensor) -> None:
    """``scaler.update(found_inf)``, in one call of compiled code where that can be. No host sync."""
    memory = scaler.memory
    moved = None if memory is None else backends.follow(found_inf, memory)
    if moved is None:
        scaler.update(found_inf)
    else:
        scaler.generation += moved


def back_off_where(scaler: LossScaler, found_inf: Tensor) -> None:
    """``scaler.update`` where ``found_inf`` (float32, 0-dim) is 1.0, and nothing elsewhere.

    Syncs only where what ``update`` does is known to the scaler alone.
    """
    memory = scaler.memory
    if memory is None:
        if bool(found_inf):
            scaler.update(found_inf)
        return
    before = memory.scale.clone(), memory.trackers.clone()
    update_scale(scaler, found_inf)
    for tensor, then in zip((memory.scale, memory.trackers), before, strict=True):
        tensor.copy_(torch.where(found_inf.to(tensor.device) > 0, tensor, then))


def note(found_inf: Tensor, flags: list[Tensor], kept: list[Tensor], last: Tensor, skipped: Tensor) -> None:
    """Copy the flags of a step, and its outcome to ``last``, and count it in ``skipped``. No host sync.

    Args:
        found_inf: float32, 0-dim.
        flags, kept: int32, by device.
        last, skipped: float32 and float64, 0-dim, on the device of ``found_inf``.
    """
    if len(flags) == 1 and flags[0].device == found_inf.device and backends.are_compiled(found_inf.device):
        backends.close_step(flags=flags[0], kept=kept[0], found_inf=found_inf, outcome=(last, skipped))
        return
    for one, copy in zip(flags, kept, strict=True):
        copy.copy_(one)
    last.copy_(found_inf)
    skipped.add_(found_inf)


class EmptySteps:
    """Steps in a row that have found no gradient at all.

    Args:
        optimizers: how many one backward serves: their steps are counted together.
    """

    def __init__(self, optimizers: int = 1) -> None:
        self.in_a_row = 0
        self._sharing = optimizers

    def is_due(self) -> bool:
        """Whether the last one was the fourth, of each optimizer."""
        return self.in_a_row == _PATIENCE * self._sharing


class Outcome:
    """What became of the last step, and how many were skipped.

    Args:
        lines: where it is logged.
        all_or_nothing: whether a skipped step has stepped nothing. Else parameters are stepped one by one, and one that
            counts as skipped has left alone some of them: it counts as taken too.

    Attributes:
        log: what is logged after a skip.
        steps: how many were taken or skipped, but for those that a CUDA graph has replayed.
        all_or_nothing: as it was given.
        last: whether the last step was skipped: decided, or the device's flag (float32, 0-dim), which the next writes.
        empty: how many steps have found no gradient, since one has.
        clipped: the norm before the last clip and its factor (float32, 0-dim).
        scale: the loss scale that the last step's gradients were made with (float32, 0-dim); None before the first.
        before, losses: for the log line of the step that is being closed: the scale before it, and its losses. None
            where nothing is to be logged.
        origin: which ranks found something in the last step that was skipped by decision of the host; None where
            masters are all here.
    """

    def __init__(self, lines: Lines, all_or_nothing: bool = True) -> None:
        self.log = SkipLog(lines)
        if not all_or_nothing:
            self.log.what, self.log.advice = errors.LEFT_ALONE, errors.LOWER
        self.steps = 0
        self.empty = EmptySteps()
        self.clipped: tuple[Tensor, Tensor] | None = None
        self.scale: Tensor | None = None
        self.before: float | None = None
        self.losses: Sequence[Tensor] = ()
        self.origin: Origin | None = None
        self._skipped_here = 0
        self._taken_before = 0
        self._skipped_before = 0
        self.all_or_nothing = all_or_nothing
        self._skipped_on_device: Tensor | None = None
        self._given_up: Tensor | None = None
        self._last_on_device: Tensor | None = None
        self.last: bool | Tensor = False
        self._kept: list[Tensor] = []
        self._flags: list[Tensor] | None = None

    @property
    def skipped_steps(self) -> int:
        """Those before a checkpoint was loaded included. Syncs where decisions were taken on the device."""
        return self._skipped_before + self._skipped_since() + self._count_given_up()

    @skipped_steps.setter
    def skipped_steps(self, count: int) -> None:
        self._skipped_before = count - self._skipped_since() - self._count_given_up()

    def _count_given_up(self) -> int:
        return 0 if self._given_up is None else int(self._given_up)

    def _skipped_since(self) -> int:
        return self._skipped_here + (0 if self._skipped_on_device is None else int(self._skipped_on_device))

    @property
    def steps_taken(self) -> int:
        """Steps that were not skipped, those before a checkpoint was loaded included. Syncs as :attr:`skipped_steps`.

        Replays of a CUDA graph are not among them.
        """
        return self.number() - 1

    @steps_taken.setter
    def steps_taken(self, count: int) -> None:
        self._taken_before = count - (self.steps - self.all_or_nothing * self._skipped_since())
        self.log.taken = count

    def number(self) -> int:
        """Of the step that is being taken, or comes next, from 1."""
        return max(0, self._taken_before + self.steps - self.all_or_nothing * self._skipped_since()) + 1

    def give_up(self, check: Check) -> None:
        """A batch that was checked is given up: where it is not finite it counts as a skip, and the scale falls.

        No step was begun, so that none is counted beside it. No sync with a device, but as :func:`back_off_where` says.
        """
        for scaler, found in check.found:
            back_off_where(scaler, found)
        if self._given_up is None:
            self._given_up = torch.zeros_like(check.found_inf, dtype=kernels.stats.sum_dtype(check.found_inf.device))
        self._given_up.add_(check.found_inf)

    def nothing(self) -> None:
        """``step`` was called and there was nothing to step. No sync."""
        self.last, self._flags = False, None
        self.empty.in_a_row += 1

    def record(
        self,
        check: Check,
        skipped: bool | Tensor,
        stats: Sequence[kernels.GradStats],
        step: Step,
    ) -> None:
        """Note what became of a step, and have the scalers follow; nothing has been cleared yet.

        An exception may stop it, and it is called again then, but where the step says that it is counted.

        Args:
            skipped: Decided, or the device's flag (float32, 0-dim), which may lie in memory that is soon cleared.
            stats: Of the passes, by device, in memory that is soon overwritten; none where nothing was skipped.
            step: This one. Its mark is set before anything that can't be done twice.

        No host sync.
        """
        self.empty.in_a_row = 0
        if step.counts is None:
            step.counts = self.steps, self._skipped_here, self.log.taken
        steps, skipped_here, taken = step.counts
        flags = [one.nonfinite for one in stats]
        self.steps, self._skipped_here = steps + 1, skipped_here + (skipped is True)
        self.log.taken = taken + (skipped is False)
        if isinstance(skipped, bool):
            self._flags, self.last = [one.clone() for one in flags] if skipped else None, skipped
        else:
            outcome = self._memory(flags, skipped.device)
        step.is_counted = True
        for scaler, norm in check.norms:
            scaler.see(norm)
        if not isinstance(skipped, bool):
            devices = [one.device for one in flags]
            if devices and skipped.device == devices[0] and all(map(backends.are_compiled, devices)):
                self._record_on_device(check, skipped, flags, stats, outcome)
                return
            note(skipped, flags, self._kept, *outcome)
        for scaler, found in check.found:
            update_scale(scaler, found)

    def _record_on_device(
        self,
        check: Check,
        skipped: Tensor,
        flags: list[Tensor],
        stats: Sequence[kernels.GradStats],
        outcome: tuple[Tensor, Tensor],
    ) -> None:
        """Outcome, scale and statistics, in one launch a device where that can be."""
        single = check.found[0] if len(check.found) == 1 and check.found[0][1] is skipped else None
        memory = None if single is None else single[0].memory
        if single is None or memory is None or memory.trackers.device != skipped.device:
            memory = None
            for scaler, found in check.found:
                update_scale(scaler, found)
        else:
            single[0].generation += memory.settings is not None
        told: dict[str, Any] = {"found_inf": skipped, "outcome": outcome, "scaler": memory or (None, None, None)}
        for one, bits, kept in zip(stats, flags, self._kept, strict=True):
            backends.close_step(stats=one, flags=bits, kept=kept, **told)
            told = {}  # the first device has it

    def _memory(self, flags: list[Tensor], device: torch.device) -> tuple[Tensor, Tensor]:
        """(the flag of the last step; the number of skipped steps) of steps that were not read yet.

        Made once, with the memory of flags, and written in place: a CUDA graph that is replayed goes on counting here.
        """
        self._flags = self._kept = room_for(flags, self._kept)
        if self._skipped_on_device is None or self._last_on_device is None:
            self._last_on_device, self._skipped_on_device = counters(device)
        self.last = self._last_on_device
        return self._last_on_device, self._skipped_on_device

    def numbers(self) -> dict[str, float | Tensor]:
        """Steps in all, taken and skipped; whether the last was skipped, how many parameters it blames. No sync."""
        skipped: float | Tensor = self._skipped_before + self._skipped_here
        if self._skipped_on_device is not None:
            skipped = self._skipped_on_device + skipped
        given_up: float | Tensor = 0.0 if self._given_up is None else self._given_up
        last = self.last.gt(0) if isinstance(self.last, Tensor) else self.last
        flags = [] if self._flags is None or last is False else self._flags
        count = sum((one.ne(0).sum().to(flags[0].device) for one in flags), start=0 * last)
        steps = self._taken_before + (self._skipped_before if self.all_or_nothing else 0) + self.steps
        return {
            "steps": steps + given_up,
            "steps_taken": steps - skipped if self.all_or_nothing else steps,
            "skipped_steps": skipped + given_up,
            "step_was_skipped": last,
            "parameters_blamed": count * last,
        }

    def report(self, params: ParamTable) -> list[Overflow]:
        """Which parameters had non-finite gradients if the last step was skipped, in param_groups order. Syncs."""
        if self._flags is None or not bool(self.last):
            return []
        bits = [0] * len(params)
        for group, flags in zip(params.devices, self._flags, strict=False):
            for position, flag in zip(group.positions, flags.tolist(), strict=False):
                bits[position] = flag
        return overflows_from_flags(bits, params.names, params.indices())

    def tell(
        self,
        skipped: bool | Tensor,
        scaler: LossScaler,
        check: Check,
        params: ParamTable,
        under_grad_scaler: bool = False,
        raises: bool = True,
    ) -> None:
        """Log a step that was decided on the host, where :attr:`before` tells the scale that it was made with.

        Args:
            under_grad_scaler: Whether a GradScaler has handed over its scale, and follows itself.
            raises: Whether a limit on skips in a row is looked at.

        Raises:
            LossScaleError: a scaler's limit of non-finite steps in a row is reached.
        """
        old_scale, losses = self.before or 0.0, self.losses
        self.before, self.losses = None, ()
        if skipped is True:
            report = self.report(params)
            if under_grad_scaler:
                self.log.skipped_by_grad_scaler(report, self.origin)
            else:
                is_bad = are_finite(losses) is False if self.origin is None else bool(self.origin.losses)
                weights = params.not_finite() if is_bad else []
                self.log.skipped(scaler, old_scale, report, losses, weights, self.origin)
            if raises:
                check_consecutive([one for one, _ in check.found], report, self.origin)
        elif skipped is False:
            self.log.stepped(old_scale)


def read_at_once(numbers: dict[str, float | Tensor]) -> dict[str, float]:
    """Numbers and 0-dim tensors as numbers. Syncs once, with the device of the first that lies on one.

    Example:
        >>> read_at_once({"a": torch.tensor(2, dtype=torch.int32), "b": 0.5})
        {'a': 2.0, 'b': 0.5}
    """
    tensors = {name: value for name, value in numbers.items() if isinstance(value, Tensor)}
    read: dict[str, float] = {}
    if tensors:
        away = [value.device for value in tensors.values() if not kernels.is_host(value.device)]
        home = away[0] if away else torch.device("cpu")
        wide = kernels.stats.sum_dtype(home)
        together = torch.stack([kernels.moved(value.detach(), home, wide) for value in tensors.values()])
        read = dict(zip(tensors, together.tolist(), strict=True))
    return {name: read[name] if isinstance(value, Tensor) else float(value) for name, value in numbers.items()}


def room_for(flags: list[Tensor], known: list[Tensor]) -> list[Tensor]:
    """``known``, if copies of ``flags`` fit there; else new memory."""
    if [(one.shape, one.device) for one in flags] == [(one.shape, one.device) for one in known]:
        return known
    return [torch.empty_like(one) for one in flags]


def counters(device: torch.device) -> tuple[Tensor, Tensor]:
    """(float32: whether the last step was skipped; float64: how many were), 0-dim, zeros."""
    wide = kernels.stats.sum_dtype(device)  # whole numbers up to 2**53
    zero = torch.zeros((), dtype=torch.float32, device=device)
    return zero, torch.zeros((), dtype=wide, device=device)


def check_consecutive(scalers: Sequence[LossScaler], report: list[Overflow], origin: Origin | None = None) -> None:
    """Raise ``LossScaleError`` where a scaler's limit of non-finite steps in a row is reached. Syncs if it has one."""
    for scaler in scalers:
        limit = scaler.max_consecutive_skips
        if limit is not None and int(scaler.consecutive_skips) >= limit:
            names = blamed([str(overflow) for overflow in report], origin)
            times = int(scaler.consecutive_skips)
            raise errors.TOO_MANY_IN_A_ROW(times=times, limit=limit, scale=float(scaler.scale), where=names)
