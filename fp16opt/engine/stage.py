"""Stages: the values that hold all that is known of a step's gradients. Leaving a stage forgets what it held.

docs/engine.md has the table: what ``.grad`` holds in each, and what each call does. A transition makes the next value
of the present one; nothing is changed in place.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from ..kernels import backends
from ..scaling import LossScaler
from .gradients import Waiting
from .progress import Progress
from .stamps import GradientStamp


class BackwardScale(NamedTuple):
    """The scale that gradients were made with. It stays theirs whatever the scaler does.

    Attributes:
        generation: of the scaler, then.
        scale, inv_scale: float32, 0-dim.
        is_plain: whether the user's own ``loss.backward()`` made them, or a GradScaler's.
        is_told: whether a GradScaler has told its scale: ``inv_scale`` is of that.
        is_told_in_step: whether it did so in ``step`` alone, and will tell it again.
    """

    scaler: LossScaler
    generation: int
    scale: Tensor
    inv_scale: Tensor
    is_plain: bool = False
    is_told: bool = False
    is_told_in_step: bool = False

    @classmethod
    def of(cls, scaler: LossScaler, is_plain: bool = False) -> BackwardScale:
        """``scaler``'s present scale. No sync."""
        memory = scaler.memory
        scale, inv_scale = backends.capture_scale(scaler.scale if memory is None else memory.scale)
        return cls(scaler, scaler.generation, scale, inv_scale, is_plain)

    def is_current(self, scaler: LossScaler) -> bool:
        """Whether a backward with ``scaler`` would use this scale."""
        return self.scaler is scaler and self.generation == scaler.generation


class UnitScales:
    """Which scalers are static with a scale of exactly 1: gradients that they made are true ones.

    Example:
        >>> from fp16opt import StaticLossScaler
        >>> UnitScales().has(StaticLossScaler(1.0)), UnitScales().has(StaticLossScaler(2.0))
        (True, False)
    """

    def __init__(self) -> None:
        self._known: tuple[LossScaler | None, int, bool] = (None, 0, False)

    def has(self, scaler: LossScaler) -> bool:
        """Whether ``scaler`` is one. Syncs once for each value of a static scale."""
        if scaler.dynamic:
            return False
        known, generation, is_one = self._known
        if known is not scaler or generation != scaler.generation:
            is_one = float(scaler.scale) == 1.0
            self._known = (scaler, scaler.generation, is_one)
        return is_one


class OverflowCheck(NamedTuple):
    """Whether the gradients that are about to be stepped are finite, over all ranks.

    Attributes:
        found_inf: float32, 0-dim, on the engine's device: 1.0 where one is not.
        of: each scaler that took part, with what its own backwards gave.
        norm: float64, 0-dim: over all gradients, on all ranks, where it was asked for.
    """

    found_inf: Tensor
    of: list[tuple[LossScaler, Tensor]]
    norm: Tensor | None = None


class Verdict(NamedTuple):
    """What was found in a step's gradients.

    Attributes:
        found: each scaler with what its own backwards gave: float32, 0-dim, 1.0 where an element is not finite.
        is_agreed: whether it is that of all ranks.
        turn: how many messages were sent of these gradients.
        has_grads: whether this rank has any: others may have some, and expect what this one has found.
        untold: norms that scalers which follow norms are yet to be told.
        origin: which ranks found something: see :meth:`.ranks.Ranks.origin`. None where masters are all here.
    """

    found: tuple[tuple[LossScaler, Tensor], ...] = ()
    is_agreed: bool = False
    turn: int = 0
    has_grads: bool = True
    untold: tuple[tuple[LossScaler, Tensor], ...] = ()
    origin: Tensor | None = None


class Ready(NamedTuple):
    """Nothing of this step.

    Attributes:
        used: stamp of gradients that a step has used, or that ``zero_grad(set_to_none=False)`` has made zeros.
        holds_true: whether masters may still hold gradients of the step before, to be read.
    """

    used: GradientStamp | None = None
    holds_true: bool = True


class Scaled(NamedTuple):
    """The model's gradients, as backwards left them. Masters have none.

    Attributes:
        stamp: only after ``backward(loss)``; without it they are the user's, and edits count.
        losses: of the backwards, unscaled, where they are single numbers.
        left_over: names, and weak references of gradients of an earlier step, over which the user scaled a loss.
    """

    scale: BackwardScale
    stamp: GradientStamp | None = None
    losses: tuple[Tensor, ...] = ()
    left_over: tuple[list[str], list[Any]] | None = None


class Checked(NamedTuple):
    """The same, with flags and norm known. Masters have none.

    Attributes:
        waiting: by device, the gradients as kernels take them, with the factor of a clip.
        factor: of a clip (float32, 0-dim); None where there was none.
        is_measured: whether the sums of squares that were found are those of the gradients with the factor.
    """

    scale: BackwardScale
    stamp: GradientStamp
    verdict: Verdict
    waiting: Sequence[Waiting]
    factor: Tensor | None = None
    is_measured: bool = True
    losses: tuple[Tensor, ...] = ()

    @property
    def is_closed(self) -> bool:
        """Whether a further backward would undo a clip."""
        return self.factor is not None


class Unscaled(NamedTuple):
    """Masters hold true gradients: these are what is stepped.

    Attributes:
        stamp: of the model's gradients, which are not read again.
        true_stamp: of the masters' gradients.
        is_closed: whether they were clipped or edited, which a further backward would undo.
        is_divided: whether torch's GradScaler has read them, to divide them where they lie.
        is_measured: whether the sums of squares that were found are those of the gradients as they are.
    """

    scale: BackwardScale
    stamp: GradientStamp
    true_stamp: GradientStamp
    verdict: Verdict
    is_closed: bool = False
    is_divided: bool = False
    is_measured: bool = True
    losses: tuple[Tensor, ...] = ()


class Summed(NamedTuple):
    """Masters hold sums of true gradients, to which the next backward is added.

    Attributes:
        scale: of the last backward.
        stamp: of the model's gradients, which were folded: none, or zeros that DDP still reduces.
        true_stamp: of the sums.
        pending: whether the model may hold gradients of that backward, which the next call folds.
        verdict: of each scaler that had a part.
        flags: by device, of each row: int32 bits of all that went into the sums.
        unreduced: ids of scalers whose sums were made under DDP's no_sync.
        is_closed, is_divided, is_measured, losses: as of :class:`Unscaled`.
    """

    scale: BackwardScale
    stamp: GradientStamp
    true_stamp: GradientStamp
    pending: bool
    verdict: Verdict = Verdict()
    flags: tuple[Tensor, ...] = ()
    unreduced: frozenset[int] = frozenset()
    is_closed: bool = False
    is_divided: bool = False
    is_measured: bool = True
    losses: tuple[Tensor, ...] = ()


class Interrupted(NamedTuple):
    """A backward raised: gradients are incomplete until they are cleared."""


class Stepping(NamedTuple):
    """A step is writing; or an exception has stopped it, and the next call finishes it.

    Attributes:
        before: the stage whose gradients are stepped.
        skipped: the decision: known, or the device's flag (float32, 0-dim).
        progress: what was written so far. This one object is filled as the step goes on.
    """

    before: Any
    check: OverflowCheck
    skipped: bool | Tensor
    progress: Progress


def check_of(verdict: Verdict, norm: Tensor | None = None) -> OverflowCheck:
    """What a step, or a clip, goes by."""
    each = list(verdict.found)
    found = each[0][1]
    for _, one in each[1:]:
        found = found.maximum(one)
    return OverflowCheck(found, each, norm)
