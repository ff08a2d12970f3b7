"""What went wrong, in words: which parameters overflowed, what is logged of it, how often."""

from __future__ import annotations

import itertools
import logging
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

from .. import kernels
from ..scaling import LossScaler
from . import errors
from .ranks import Origin

logger = logging.getLogger("fp16opt")

_MANY = 3  # skips in a row from which on they are no rare overflows
_CALIBRATED = 10  # steps taken, after which the loss scale has been found
_MOST = 4  # lines of one kind
_WITHIN = 60.0  # seconds


class Named(Protocol):
    """What has parameters and their names: the engine's table of them."""

    names: list[str]
    models: list[Tensor]


class _Kind:
    """What was said of one kind of line.

    Attributes:
        times: when the last ones were logged.
        left_out: how many were not, since.
    """

    def __init__(self) -> None:
        self.times: deque[float] = deque(maxlen=_MOST)
        self.left_out = 0


HeldLine = tuple[logging.Logger, int, str]


class Lines:
    """What one optimizer logs, and how often: every line of the engine is said here.

    A line is known by its text before names and numbers are filled in. No more than four of a kind are logged within a
    minute; the next one that is logged says how many were left out. Lines that count what they tell of come at a
    falling rate besides: at the 1st, 2nd, 4th, 8th. Where several optimizers live, a line ends with whose it is.

    Args:
        whose: the class of the optimizer; "" for what speaks for several.
        params: whose names tell the optimizer from others of its class.

    Attributes:
        held: where lines go that are due while a step is under way, for :meth:`log` at its end; None: they are logged.

    Example:
        >>> [Lines("SGD").say(logging.DEBUG - 1, "step %d skipped", step) for step in range(2)]
        [False, False]
    """

    _living: ClassVar[weakref.WeakSet[Lines]] = weakref.WeakSet()
    _numbers = itertools.count(1)
    clock = staticmethod(time.monotonic)

    def __init__(self, whose: str = "", params: Named | None = None) -> None:
        self._whose = whose
        self._params = params
        self._once: set[str] = set()
        self.held: list[HeldLine] | None = None
        self._begin()

    def _begin(self) -> None:
        self._kinds: dict[str, _Kind] = {}
        self._number = 0
        if self._whose:
            self._number = next(self._numbers)
            self._living.add(self)

    def __getstate__(self) -> dict[str, Any]:
        """A copy is another optimizer's: it has a number of its own, and may say again what this one has said."""
        return {name: value for name, value in self.__dict__.items() if name not in ("_kinds", "_number", "held")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.held = None
        self._begin()

    def say(
        self, level: int, text: str, *arguments: object, nth: int = 1, once: bool = False, to: logging.Logger = logger
    ) -> bool:
        """Log a line, if it is due.

        Args:
            text: with places for ``arguments``, as :mod:`logging` fills them in.
            nth: its ordinal among lines of this kind; the 1st, 2nd, 4th, 8th are logged.
            once: whether a second one of its kind is never logged.
            to: the logger.

        Returns:
            Whether it was logged.
        """
        return self._log(level, text, lambda: text % arguments if arguments else text, nth, once, to)

    def tell(
        self, line: errors.Line, *, level: int | None = None, nth: int = 1, once: bool = False, **known: object
    ) -> bool:
        """:meth:`say` for a line of the table.

        Args:
            level: None: the line's own.
            known: by the names of the places in its text.
        """
        level = line.kind if level is None else level
        return self._log(level, line.text, lambda: line.filled(**known), nth, once, logger)

    def _log(self, level: int, text: str, whole: Callable[[], str], nth: int, once: bool, to: logging.Logger) -> bool:
        if not (to.isEnabledFor(level) and _is_power_of_two(nth)) or (once and text in self._once):
            return False
        kind, now = self._kinds.setdefault(text, _Kind()), self.clock()
        if len(kind.times) == _MOST and now - kind.times[0] < _WITHIN:
            kind.left_out += 1
            return False
        if once:
            self._once.add(text)
        more = f" ({kind.left_out} more like it since the last.)" if kind.left_out else ""
        kind.times.append(now)
        kind.left_out = 0
        line = to, level, f"{whole()}{more}{self._signature()}"
        if self.held is None:
            self.log([line])
        else:
            self.held.append(line)
        return True

    @staticmethod
    def log(lines: Iterable[HeldLine]) -> None:
        """Log lines that were due, in their order. Handlers are code of the user's."""
        for to, level, text in lines:
            to.log(level, text)

    def of_others(self, models: Iterable[Tensor]) -> str:
        """Which other living optimizers have one of these parameters of the model too; "" where none does."""
        ids = set(map(id, models))
        also = [
            f"optimizer {other._number} ({other._whose})"
            for other in sorted(self._living, key=lambda one: one._number)
            if other is not self and other._params is not None and not ids.isdisjoint(map(id, other._params.models))
        ]
        return describe(also) if also else ""

    def _signature(self) -> str:
        """Whose line it is, where it could be another's."""
        if not self._number or len(self._living) <= 1:
            return ""
        names = "" if self._params is None else f" over {describe(self._params.names, limit=1)}"
        return f" [optimizer {self._number}: {self._whose}{names}]"


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


def blamed(overflows: Sequence[object], origin: Origin | None = None) -> str:
    """:func:`describe` for overflows. There may be none here: another rank, or a GradScaler, found them elsewhere.

    Args:
        origin: which ranks found some; None where masters are all here.

    Example:
        >>> blamed([], Origin("rank 3", ""))
        "none of this rank's parameters, found on rank 3"
    """
    names = describe(overflows) if overflows else "none of this rank's parameters"
    return f"{names}, found on {origin.grads}" if origin is not None and origin.grads else names


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

    A dynamic scaler finds its scale by overflowing: until ten steps were taken a skip is logged at INFO
    level as calibration; afterwards one is a rare overflow, a WARNING with the parameters' names. Three in a
    row after a step, or a scale that was brought under 1 before any step, are neither: the warning says so, and
    at the 3rd, 4th, 8th, 16th ... alone. So does one where the loss itself was not finite. No scale can help that
    (an ERROR) at the lowest scale, and at one where the loss was finite before.
    The first time that the scale falls below 1 later, or by a loss that is not finite, a line says so besides.
    Where the scale can't go lower, skips will go on: the 1st, 2nd, 4th, 8th ... of them is an ERROR (a WARNING
    with a static scaler), the others are silent.

    Args:
        lines: where it is said.

    Attributes:
        taken: How many steps were taken, as far as the host has decided them.
        calibrating: Whether fewer than ten steps were taken.
        awaits_step: Whether :meth:`stepped` is to be told of the next step that is taken.
        grad_scaler_logs: Whether the GradScaler that drives logs skips itself.
        what, advice: What a skip at a static scale is called, and what to do about it.
    """

    what = errors.SKIPPED
    advice = errors.LOWER_OR_DYNAMIC

    def __init__(self, lines: Lines | None = None) -> None:
        self.lines = Lines() if lines is None else lines
        self.grad_scaler_logs = False
        self.taken = 0
        self._stuck = 0
        self._fine = 0.0  # the largest scale that a step was seen to be taken with
        self.awaits_step = True

    @property
    def calibrating(self) -> bool:
        """See the class."""
        return self.taken < _CALIBRATED

    def stepped(self, scale: float) -> None:
        """A step was taken with this loss scale; :attr:`taken` counts it already."""
        self._fine = max(self._fine, scale)
        self.awaits_step = False

    def skipped(
        self,
        scaler: LossScaler,
        old: float,
        overflows: Sequence[Overflow],
        losses: Sequence[Tensor] = (),
        weights: Sequence[str] = (),
        origin: Origin | None = None,
    ) -> None:
        """A step was skipped, and the scaler has been updated. Syncs (a skip is known on the host anyway).

        Where masters are spread over ranks, all say the same but for names: they go by what all of them know.

        Args:
            old: the loss scale that the step was made with.
            overflows: the parameters with non-finite gradients.
            losses: of the step, unscaled; none where they are not known.
            weights: names of parameters that hold inf or nan, looked for where a loss is not finite.
            origin: which ranks found something; None where masters are all here.
        """
        if origin is None:
            loss_is_finite, ranks = are_finite(losses), ""
        else:
            loss_is_finite = False if origin.losses else None
            ranks = f" on {origin.losses}"
        self.awaits_step = True
        new = float(scaler.scale)
        stuck = not scaler.dynamic or (not new < old and scaler.at_floor())
        in_a_row = int(scaler.consecutive_skips)
        change = f"{old:g} -> {new:g}" if new != old else f"stays at {new:g}" + ("" if stuck else " (hysteresis)")
        tell, where = self.lines.tell, self.where(overflows, origin)
        if loss_is_finite is False:
            hopeless = (
                (bool(weights) and origin is None)
                or (stuck and scaler.dynamic)
                or old <= max(self._fine, 0.0 if scaler.dynamic else 1.0)
            )
            tell(
                errors.LOSS_NOT_FINITE,
                level=logging.ERROR if stuck and scaler.dynamic else logging.WARNING,
                nth=in_a_row,
                change=change,
                ranks=ranks,
                times=in_a_row,
                hopeless=errors.NO_SCALE_CAN_HELP if hopeless else "",
                where=where,
                advice=_about_the_loss(hopeless, losses, weights, origin),
            )
        elif stuck:
            self._stuck += 1
            self._say_stuck(scaler.dynamic, new, where)
        elif in_a_row >= _MANY if self.taken else new < 1.0:
            tell(
                errors.IN_A_ROW,
                nth=1 if in_a_row == _MANY or not self.taken else in_a_row,
                what=errors.ONLY_GRADIENTS if loss_is_finite else errors.GRADIENTS,
                times=in_a_row,
                change=change,
                where=where,
            )
        elif self.calibrating:
            tell(errors.CALIBRATING, scale=new)
        else:
            tell(errors.RARE, change=change, where=where)
        if scaler.dynamic and new < 1.0 <= old and (self.taken or loss_is_finite is False):
            tell(errors.BELOW_ONE, once=True, scale=new, losses=errors.LOSSES[loss_is_finite])

    def where(self, overflows: Sequence[Overflow], origin: Origin | None = None) -> str:
        """What overflowed, in words."""
        return blamed(overflows, origin)

    def skipped_by_grad_scaler(self, overflows: Sequence[Overflow], origin: Origin | None = None) -> None:
        """A step was skipped under a GradScaler, which lowers its scale itself, and may log it."""
        calm = logging.INFO if self.calibrating else logging.WARNING
        level = logging.DEBUG if self.grad_scaler_logs else calm
        self.lines.tell(errors.UNDER_A_GRAD_SCALER, level=level, where=self.where(overflows, origin))

    def _say_stuck(self, dynamic: bool, scale: float, where: str) -> None:
        times = self._stuck
        if dynamic:
            self.lines.tell(errors.FLOOR, nth=times, scale=scale, times=times, where=where)
        else:
            what, advice = self.what, self.advice
            self.lines.tell(errors.STATIC, nth=times, what=what, scale=scale, times=times, where=where, advice=advice)


def _about_the_loss(hopeless: bool, losses: Sequence[Tensor], weights: Sequence[str], origin: Origin | None) -> str:
    if weights:
        return errors.BAD_WEIGHTS.format(names=describe(weights))
    if any(loss.dtype == torch.float16 for loss in losses):
        return errors.LOSS_IN_FP16
    advice = errors.LOOK_AT_THE_DATA if hopeless else errors.MAY_FIT_A_LOWER_SCALE
    return advice.format(there="" if origin is None else errors.ON_THOSE_RANKS)


def _is_power_of_two(count: int) -> bool:
    return count & (count - 1) == 0


def warn_cast(lines: Lines, flags: Iterable[tuple[str, int]], warned: set[str]) -> None:
    """Warn of masters that their model parameter can't hold, each parameter once for each reason.

    Args:
        flags: names and bits of ``kernels.CastStats.overflow``.
        warned: remembers what was warned of; added to.
    """
    flags = list(flags)
    for bit, line in ((kernels.NOT_FINITE, errors.NOT_FINITE), (kernels.TOO_LARGE, errors.TOO_LARGE)):
        names = [name for name, bits in flags if bits & bit and f"{line.key}: {name}" not in warned]
        if names and lines.tell(line, names=describe(names)):
            warned.update(f"{line.key}: {name}" for name in names)


def warn_model_write(lines: Lines, names: Iterable[str], times: int, models: Iterable[Tensor] = ()) -> None:
    """Warn that something else wrote model parameters, and that their masters take the new values.

    Args:
        times: how many steps have found such writes, this one included.
        models: the parameters, which another optimizer may step too.
    """
    others = lines.of_others(models)
    also = errors.ALSO_IN_ANOTHER.format(others=others) if others else ""
    how_often = "" if times == 1 else f" ({times} times so far)"
    lines.tell(errors.MODEL_WRITTEN_AND_TAKEN, nth=times, names=describe(names), times=how_often, also=also)


def groups_without_eps(groups: Sequence[dict[str, Any]]) -> list[tuple[int, float]]:
    """(number, eps) of the groups that train FP16 parameters themselves with an ``eps`` that is 0 in FP16."""
    found = []
    for number, group in enumerate(groups):
        eps = group.get("eps")
        has_fp16 = any(param.dtype == torch.float16 and param.requires_grad for param in group["params"])
        if not (has_fp16 and isinstance(eps, float) and eps > 0.0):
            continue
        if float(torch.tensor(eps, dtype=torch.float16, device="cpu")) == 0.0:
            found.append((number, eps))
    return found


def warn_eps(lines: Lines, groups: Sequence[dict[str, Any]]) -> None:
    """Without masters FP16 parameters are stepped in FP16, where the usual ``eps`` of Adam is 0."""
    for number, eps in groups_without_eps(groups):
        lines.tell(errors.EPS, group=number, eps=eps)
