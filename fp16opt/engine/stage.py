"""Stages: the five frozen values that hold all that is known of a step's gradients, with what they are made of.

docs/engine.md has the table: what ``.grad`` holds in each, and what each call does. A transition makes the next value
of the present one; nothing is changed in place, so that leaving a stage forgets what it held.
"""

from __future__ import annotations

import copy
import enum
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from .. import kernels
from ..kernels import backends
from ..kernels.readings import Rows
from ..kernels.tensor_lists import any_there, are_references_to, references_to, types_of
from ..scaling import LossScaler
from . import errors
from .dtensors import any_sharded, is_sharded, local, pieces, raw_grads, versions
from .params import HALF_DTYPES
from .ranks import Agreed, Ranks, Replicas

Grads = Sequence["Tensor | None"]
_Stage = TypeVar("_Stage")

# -- the scale ---------------------------------------------------------------------------------------------------------


class ScaledBy(enum.Enum):
    """Whose backward made gradients, and who divides them by its scale."""

    ENGINE = "opt.backward(loss) or opt.scale_loss(loss)"
    USER = "a plain loss.backward()"
    TOLD = "a plain one: a GradScaler has told its scale"
    TOLD_IN_STEP = "a plain one: a GradScaler has told its scale in step alone, and will tell it again"
    DIVIDED = "a plain one: a GradScaler divides the masters' gradients where they lie"

    @property
    def is_told(self) -> bool:
        """Whether the engine multiplies by what a GradScaler has told."""
        return self in (ScaledBy.TOLD, ScaledBy.TOLD_IN_STEP)

    @property
    def is_grad_scaler(self) -> bool:
        """Whether the scale is a GradScaler's."""
        return self.is_told or self is ScaledBy.DIVIDED


class BackwardScale(NamedTuple):
    """The scale that gradients were made with. It stays theirs whatever the scaler does.

    Attributes:
        generation: of the scaler, then.
        scale, inv_scale: float32, 0-dim. Where a GradScaler has told its own, ``inv_scale`` is of that.
    """

    scaler: LossScaler
    generation: int
    scale: Tensor
    inv_scale: Tensor
    by: ScaledBy = ScaledBy.ENGINE

    @classmethod
    def of(cls, scaler: LossScaler, by: ScaledBy = ScaledBy.ENGINE) -> BackwardScale:
        """``scaler``'s present scale. No sync."""
        memory = scaler.memory
        scale, inv_scale = backends.capture_scale(scaler.scale if memory is None else memory.scale)
        return cls(scaler, scaler.generation, scale, inv_scale, by)

    def is_current(self, scaler: LossScaler) -> bool:
        """Whether a backward with ``scaler`` would use this scale."""
        return self.scaler is scaler and self.generation == scaler.generation


# -- the stamp ---------------------------------------------------------------------------------------------------------

_SAMPLED = 32
"""About how many DTensors' gradients of a step are sampled."""


class GradientStamp:
    """Which gradients there were at one moment, in which versions. It keeps none of them alive, and never changes.

    torch counts no version where a foreach operation writes a DTensor, as ``clip_grad_norm_`` does: of these a sample
    of the bits is compared too, which syncs.

    Args:
        grads: of all parameters, in the order of the table.

    Attributes:
        reading: what was read of them, with versions; None where that is not known.
        references: weak ones, to each gradient; of DTensors to their pieces, as torch moves no module of which weak
            references to a gradient are held.
        is_empty: whether there was none.
    """

    def __init__(self, grads: Grads) -> None:
        tensors, self.reading = _read(grads)
        self._versions = versions(tensors) if self.reading is None else None
        self._digests = _digests(tensors) if self.reading is None else {}
        self.references = references_to(_pieces(tensors))
        self.is_empty = not any_there(tensors)

    @classmethod
    def of(cls, tensors: Sequence[Tensor]) -> GradientStamp:
        """Of the gradients of some tensors, as they are now."""
        return cls(raw_grads(tensors))

    def compare(self, now: Grads) -> tuple[list[int], list[int]]:
        """(positions with another gradient, or a written one; positions where it was set to None)."""
        tensors, reading = _read(now)
        if len(tensors) != len(self.references):  # of others nothing is known
            return [], []
        is_same = reading is not None and self.reading is not None and reading.has_counts_of(self.reading)
        held = tensors if is_same else _pieces(tensors)
        if is_same and are_references_to(self.references, held):
            return [], []
        counted, known = versions(tensors) if reading is None else reading.counts, self._counts()
        digests = _digests(tensors, self._digests) if self._digests else {}
        if counted == known and digests == self._digests and are_references_to(self.references, held):
            return [], []
        each = enumerate(zip(self.references, known, held, counted, strict=True))
        moved = [
            position
            for position, (a, v, b, w) in each
            if not are_references_to([a], [b]) or v != w or digests.get(position) != self._digests.get(position)
        ]
        gone = [position for position in moved if tensors[position] is None]
        return [position for position in moved if tensors[position] is not None], gone

    def is_of(self, position: int, grad: Tensor | None) -> bool:
        """Whether this is the tensor that was there, in whatever version."""
        return grad is not None and are_references_to([self.references[position]], _pieces([grad]))

    def are_of(self, positions: Iterable[int], grads: Grads) -> bool:
        """Whether those at these positions are the tensors that were there."""
        return all(self.is_of(position, grads[position]) for position in positions)

    def among(self, grads: Grads) -> list[int]:
        """Positions where the tensor that was there still is, in whatever version."""
        return [position for position, grad in enumerate(grads) if self.is_of(position, grad)]

    def without(self, positions: Iterable[int]) -> GradientStamp:
        """The same, but that there was no gradient at these positions."""
        gone = set(positions)
        came_from = [None if at in gone else at for at in range(len(self.references))]
        return self.moved(came_from, [None] * len(came_from))

    def moved(self, came_from: Sequence[int | None], now: Grads) -> GradientStamp:
        """The same for parameters in another order: what was known of those that stay is known on.

        Args:
            came_from: by new position, the old one; None for a parameter that came.
            now: by new position, what counts as known of those that came.
        """
        come, counted, known = references_to(_pieces(now)), versions(now), self._counts()
        places = {old: at for at, old in enumerate(came_from) if old is not None}
        made = copy.copy(self)
        made.reading = None
        made.references = [come[at] if old is None else self.references[old] for at, old in enumerate(came_from)]
        made._versions = [counted[at] if old is None else known[old] for at, old in enumerate(came_from)]
        made._digests = {places[old]: digest for old, digest in self._digests.items() if old in places}
        made.is_empty = not any_there(made.references)
        return made

    def _counts(self) -> list[int]:
        found: list[int] = self.reading.counts if self._versions is None else self._versions
        return found


def _read(grads: Grads) -> tuple[Sequence[Tensor | None], Any]:
    """Gradients as a list or tuple, and what was read of them, if these are plain tensors."""
    if not isinstance(grads, Rows):
        return grads, None
    reading = grads.reading
    return grads.tensors, reading if reading is not None and reading.types in ([Tensor], []) else None


def _pieces(grads: Grads) -> Grads:
    """Of DTensors this rank's pieces."""
    return pieces(grads) if any_sharded(grads) else grads


def _digests(grads: Grads, positions: Iterable[int] | None = None) -> dict[int, int]:
    """By position: digests of sampled bits of this rank's pieces of some DTensors. Syncs where they are on a device.

    Of some, as what torch does not count are foreach operations, and a clip by these writes all gradients.

    Args:
        positions: of which; None: of about ``_SAMPLED`` of all.
    """
    if positions is None:
        if set(types_of(grads)) <= {Tensor, type(None)}:
            return {}
        there = [i for i, grad in enumerate(grads) if grad is not None and is_sharded(grad)]
        positions = there[:: len(there) // _SAMPLED | 1]  # an odd step, as layers come in pairs
    with torch.no_grad():
        chosen = {i: local(grad).detach() for i in positions if (grad := grads[i]) is not None}
        found: dict[int, int] = {}
        for device in {piece.device for piece in chosen.values()}:
            here = [i for i, piece in chosen.items() if piece.device == device]
            samples = torch.zeros(len(here), dtype=torch.int64, device=device)
            kernels.multi_tensor_sample([_as_halves(chosen[i]) for i in here], samples)
            found.update(zip(here, samples.tolist(), strict=True))
    return found


def _as_halves(piece: Tensor) -> Tensor:
    return piece if piece.dtype in HALF_DTYPES else piece.reshape(-1).view(torch.float16)


# -- what a check has found --------------------------------------------------------------------------------------------


class Check(NamedTuple):
    """What was found in the gradients that are about to be stepped.

    Attributes:
        found: each scaler that took part, with what its own backwards gave: float32, 0-dim, 1.0 where an element is
            not finite.
        is_agreed: whether it is that of all ranks.
        turn: how many messages were sent of these gradients.
        has_grads: whether this rank has any: others may have some, and expect what this one has found.
        norms: for scalers that follow norms, the largest norm of a single gradient: float32, 0-dim.
        origin: which ranks found something: see :meth:`.ranks.Ranks.origin`. None where masters are all here.
        norm: float64, 0-dim: over all gradients, on all ranks, where it was asked for.
    """

    found: tuple[tuple[LossScaler, Tensor], ...]
    is_agreed: bool = False
    turn: int = 0
    has_grads: bool = True
    norms: tuple[tuple[LossScaler, Tensor], ...] = ()
    origin: Tensor | None = None
    norm: Tensor | None = None

    @property
    def found_inf(self) -> Tensor:
        """float32, 0-dim: 1.0 where a gradient is not finite, whichever scaler's."""
        (_, found), *others = self.found
        for _, one in others:
            found = found.maximum(one)
        return found

    def with_found(self, scaler: LossScaler, one: Tensor) -> Check:
        """With what a further backward of ``scaler`` gave."""
        if not any(known is scaler for known, _ in self.found):
            return self._replace(found=(*self.found, (scaler, one)))
        each = [(known, torch.maximum(flag, one) if known is scaler else flag) for known, flag in self.found]
        return self._replace(found=tuple(each))

    def over(self, ranks: Ranks, agreed: Agreed) -> Check:
        """As all ranks have found. The first time they tell the largest of their norms, in a message of its own."""
        norms = [one for _, one in self.norms]
        if norms and not self.is_agreed:
            norms = list(ranks.largest(torch.stack(norms)).unbind())
        return self._replace(
            found=tuple((scaler, one) for (scaler, _), one in zip(self.found, agreed.found, strict=True)),
            norms=tuple((scaler, one) for (scaler, _), one in zip(self.norms, norms, strict=True)),
            is_agreed=True,
            turn=self.turn + 1,
            origin=agreed.origin,
        )

    def found_anew(self, found: Tensor, last: LossScaler) -> Check:
        """What a further pass has found: for scalers that had found something; else for the ``last`` one.

        Where other ranks have heard of what was found before, that stays.
        """
        if self.is_agreed:
            return self
        if len(self.found) == 1:
            return self._replace(found=((self.found[0][0], found),))
        none_had = 1.0 - self.found_inf
        each = [(scaler, torch.maximum(flag, none_had) if scaler is last else flag) for scaler, flag in self.found]
        return self._replace(found=tuple((scaler, found * flag) for scaler, flag in each))


# -- the stages --------------------------------------------------------------------------------------------------------


def _is_own(stage: Any) -> bool:
    """Whether ``opt.backward(loss)`` or ``opt.scale_loss(loss)`` has made the present gradients."""
    return stage.scale is not None and stage.scale.by is ScaledBy.ENGINE


_ANSWERS = {
    **dict.fromkeys(("scale", "stamp", "true_stamp", "check", "left_over", "sums", "unreduced")),
    **dict.fromkeys(("holds_true", "is_checked", "is_closed", "is_sum", "is_to_fold"), False),
    "is_own": property(_is_own),
    "losses": (),
}


def answering(**known: object) -> Callable[[type[_Stage]], type[_Stage]]:
    """Have a stage answer for what it does not hold: as is ``known`` of it; else there is none, or it is not so."""

    def answer(stage: type[_Stage]) -> type[_Stage]:
        for name, given in {**_ANSWERS, **known}.items():
            if name not in stage.__dict__:
                setattr(stage, name, given)
        return stage

    return answer


@answering()
class Ready(NamedTuple):
    """Nothing of this step.

    Attributes:
        stamp: of gradients that a step has used, or that were made zeros of.
        are_zeros: the latter.
        holds_true: whether masters may still hold gradients of the step before, to be read.
        backwards: how many had begun by then, with any scaler.
    """

    stamp: GradientStamp | None = None
    are_zeros: bool = False
    holds_true: bool = True
    backwards: int = 0

    def has_zeros(self, grads: Grads) -> bool:
        """Whether gradients are zeros of ``zero_grad(set_to_none=False)``, untouched since."""
        return self.stamp is not None and self.are_zeros and not self.stamp.compare(grads)[0]

    def has_new(self, grads: Grads) -> bool:
        """Whether there are gradients that no step has used, and that are no zeros of ``zero_grad``."""
        return any_there(grads) if self.stamp is None else bool(self.stamp.compare(grads)[0])


@answering()
class Scaled(NamedTuple):
    """The model's gradients, as backwards left them. Masters have none, or sums to which these are to be added.

    Attributes:
        stamp: only after ``backward(loss)``; without it they are the user's, and edits count.
        losses: of the backwards, unscaled, where they are single numbers.
        left_over: stamp of gradients of an earlier step, over which the user scaled a loss: they must go.
        sums: the FP32 sums so far; None where there are none.
        may_be_cleared: what stands for sums lies in ``.grad``, as the user runs the backward, or has asked for its
            gradients: where it is gone then, the sum is given up.
        is_to_fold: whether the gradients are to be added to FP32 sums.
    """

    scale: BackwardScale
    stamp: GradientStamp | None = None
    losses: tuple[Tensor, ...] = ()
    left_over: GradientStamp | None = None
    sums: Unscaled | None = None
    may_be_cleared: bool = False
    is_to_fold: bool = False


@answering(is_checked=True)
class Checked(NamedTuple):
    """The model's gradients, with flags and norm known; a step takes them as its own look finds them.

    Attributes:
        factor: of a clip (float32, 0-dim); None where there was none.
        is_measured: whether the sums of squares that were found are those of the gradients with the factor.
    """

    scale: BackwardScale
    stamp: GradientStamp
    check: Check
    losses: tuple[Tensor, ...] = ()
    factor: Tensor | None = None
    is_measured: bool = True

    @property
    def is_closed(self) -> bool:
        """Whether a further backward would undo a clip."""
        return self.factor is not None


@answering(holds_true=True)
class Unscaled(NamedTuple):
    """Masters hold true gradients, or FP32 sums of them: these are what is stepped.

    Attributes:
        stamp: of the model's gradients, which are not read again; of what stands in the place of folded ones.
        true_stamp: of the masters' gradients.
        is_closed: whether they were clipped or edited, which a further backward would undo.
        is_measured: whether the sums of squares that were found are those of the gradients as they are.
        unreduced: of sums, the ids of scalers whose part was made under DDP's no_sync; None where these are no sums.
        is_asked: of sums, whether the user has asked what they are since the last was added: a check, as a clip is.
    """

    scale: BackwardScale
    stamp: GradientStamp
    true_stamp: GradientStamp
    check: Check
    losses: tuple[Tensor, ...] = ()
    is_closed: bool = False
    is_measured: bool = True
    unreduced: frozenset[int] | None = None
    is_asked: bool = False

    @property
    def is_sum(self) -> bool:
        """Whether masters hold sums, to which the next backward is added."""
        return self.unreduced is not None

    @property
    def is_checked(self) -> bool:
        """Whether the user has asked for the gradients: for sums by a clip, an edit or a read, else in any case."""
        return self.is_closed or self.is_asked or not self.is_sum


@answering()
class Interrupted(NamedTuple):
    """A backward raised: gradients are incomplete until they are cleared."""


def moved(stage: Any, came_from: Sequence[int | None], now: Grads) -> Any:
    """A stage whose gradients are those of parameters in another order: as :meth:`GradientStamp.moved`."""
    stamps = {name: getattr(stage, name) for name in ("stamp", "left_over")}
    return stage._replace(**{name: one.moved(came_from, now) for name, one in stamps.items() if one is not None})


def refusal_of_writes(stage: Any, names: str, grads: Grads, replicas: Replicas) -> Exception:
    """Why gradients of a stage may not be written.

    Args:
        names: whose were.
        grads: these.
    """
    has_moved = not replicas.are_told and any(grad is not None and grad._is_view() for grad in grads)
    if stage.is_sum:
        return errors.FOLDED(name=f": {names}")
    if stage.scale.by.is_grad_scaler:
        return errors.CLIPPED_THE_MODEL(names=names)
    return errors.WRITTEN(
        names=names,
        since="backward(loss) had made them" if type(stage) is Scaled else "they were checked",
        clip="" if stage.scale.by is ScaledBy.ENGINE else errors.CLIP_UNDER_A_GRAD_SCALER,
        moved=errors.DDP_MOVES_GRADIENTS if has_moved else "",
    )
