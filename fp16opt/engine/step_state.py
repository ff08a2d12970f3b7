"""StepState: where a step's gradients stand, the scale of the backwards that made them, and whether they are finite.

``stage`` is the only truth of where a step stands (docs/engine.md has the table and its rules).
"""

from __future__ import annotations

import enum
import itertools
import operator
import sys
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .. import kernels
from ..kernels import backends
from ..scaling import LossScaler
from .diagnostics import describe
from .dtensors import is_sharded, local, raw_grad, raw_grads, versions
from .gradients import Gradients
from .params import HALF_DTYPES, ParamTable
from .ranks import Ranks, Replicas, refuse_torch_checkpointing


class Stage(enum.Enum):
    """What ``.grad`` holds, and what is known of it.

    READY: nothing that the engine knows of. SCALED: the model's gradients, as backwards left them. CHECKED: the same;
    flags, norm and a clip's factor are known. UNSCALED: masters hold true FP32 ones. INTERRUPTED: a backward raised, so
    gradients are incomplete until they are cleared.
    """

    READY = "ready"
    SCALED = "scaled"
    CHECKED = "checked"
    UNSCALED = "unscaled"
    INTERRUPTED = "interrupted"


@dataclass
class BackwardScale:
    """The scale that the present gradients were made with. It stays theirs whatever the scaler does.

    Attributes:
        scale, inv_scale: float32, 0-dim.
        unit: whether the scale is known to be 1 without asking the device.
        external: whether a GradScaler or a plain backward made them: torch's GradScaler may divide them at any time,
            without moving a version counter.
    """

    scaler: LossScaler
    generation: int
    scale: Tensor
    inv_scale: Tensor
    unit: bool
    external: bool = False

    @classmethod
    def of(cls, scaler: LossScaler, unit: bool) -> BackwardScale:
        """``scaler``'s present scale. No sync."""
        memory = scaler.memory
        scale, inv_scale = backends.capture_scale(scaler.scale if memory is None else memory.scale)
        return cls(scaler, scaler.generation, scale, inv_scale, unit)

    def is_current(self, scaler: LossScaler) -> bool:
        """Whether a backward with ``scaler`` would use this scale."""
        return self.scaler is scaler and self.generation == scaler.generation


@dataclass
class OverflowCheck:
    """Whether the gradients that are about to be stepped are finite, over all ranks.

    Attributes:
        found_inf: float32, 0-dim, on the engine's device: 1.0 where one is not.
        of: each scaler that took part, with what its own backwards gave.
        norm: float64, 0-dim: over all gradients, on all ranks, where it was asked for.
    """

    found_inf: Tensor
    of: list[tuple[LossScaler, Tensor]]
    norm: Tensor | None = None


class GradientStamp:
    """Which gradients there were at one moment, in which versions. It keeps none of them alive.

    torch counts no version where a foreach operation writes a DTensor, as ``clip_grad_norm_`` does: of these a sample
    of the bits is compared too, which syncs.

    Args:
        grads: of all parameters, in the order of the table.
        are_zeros: whether they are known to be zeros.

    Attributes:
        is_empty: whether there was none.
    """

    def __init__(self, grads: Sequence[Tensor | None], are_zeros: bool = False) -> None:
        self.are_zeros = are_zeros
        self._versions = versions(grads)
        self._digests = _digests(grads)
        try:
            self._refs: list[Callable[[], Tensor | None]] = list(map(weakref.ref, grads))
            self.is_empty = not grads
        except TypeError:  # there is no weak reference to None
            self._refs = [_no_gradient if grad is None else weakref.ref(grad) for grad in grads]
            self.is_empty = all([grad is None for grad in grads])  # noqa: C419

    def compare(self, now: Sequence[Tensor | None]) -> tuple[list[int], list[int]]:
        """(positions with another gradient, or a written one; positions where it was set to None)."""
        if len(now) != len(self._refs):  # parameters came: of those that were there nothing is known
            return [], []
        then, counted = list(map(_CALL, self._refs)), versions(now)
        digests = _digests(now, self._digests) if self._digests else {}
        if counted == self._versions and digests == self._digests and all(map(operator.is_, then, now)):
            return [], []
        each = enumerate(zip(then, self._versions, now, counted, strict=True))
        moved = [
            position
            for position, (a, v, b, w) in each
            if a is not b or v != w or digests.get(position) != self._digests.get(position)
        ]
        gone = [position for position in moved if now[position] is None]
        return [position for position in moved if now[position] is not None], gone

    def is_of(self, position: int, grad: Tensor | None) -> bool:
        """Whether this is the tensor that was there, in whatever version."""
        return grad is not None and self._refs[position]() is grad

    def forget(self, position: int) -> None:
        """There was no gradient there."""
        self._refs[position], self._versions[position] = _no_gradient, -1
        self._digests.pop(position, None)


_CALL = operator.methodcaller("__call__")

_SAMPLED = 32
"""About how many DTensors' gradients of a step are sampled."""


def _digests(grads: Sequence[Tensor | None], positions: Iterable[int] | None = None) -> dict[int, int]:
    """By position: digests of sampled bits of this rank's pieces of some DTensors. Syncs where they are on a device.

    Of some, as what torch does not count are foreach operations, and a clip by these writes all gradients.

    Args:
        positions: of which; None: of about ``_SAMPLED`` of all.
    """
    if positions is None:
        if set(map(type, grads)) <= {Tensor, type(None)}:
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


def _no_gradient() -> None:
    """In place of a weak reference to a gradient that is not there."""


class StepState:
    """READY -> SCALED (a loss was scaled) -> CHECKED or UNSCALED -> READY (step, zero_grad).

    Backwards with one scale add up in the model's gradients. Where a second scaler joins in, or ``sums`` asks for it,
    each backward is folded into FP32 sums with its own scale: READY to UNSCALED directly.

    Args:
        scaler: gives the optimizer's own scaler.
        device: where what was found is kept.
        sums: whether every backward is folded.

    Attributes:
        stage: see :class:`Stage`.
        scale: of the present gradients; of sums, of the last backward.
        ranks: where the masters' other parts are, if any.
        replicas: which ranks share gradients with this one, if any.
        backwards: how many have begun.
        last_scale: of the gradients before the present ones.
        losses: of the present gradients, unscaled, where they are single numbers.
    """

    def __init__(
        self,
        params: ParamTable,
        gradients: Gradients,
        scaler: Callable[[], LossScaler],
        device: torch.device,
        sums: bool,
        ranks: Ranks,
    ) -> None:
        self.params = params
        self.gradients = gradients
        self.device = device
        self.sums = sums
        self.ranks = ranks
        self.replicas = Replicas()
        self.backwards = 0
        self.last_scale: BackwardScale | None = None
        self.stage = Stage.READY
        self._scaler = scaler
        self._known_scale: tuple[LossScaler | None, int, bool] = (None, 0, False)
        self._stamp: GradientStamp | None = None  # of the model's gradients; in READY, of those that a step has used
        self._start()

    def _start(self) -> None:
        self.scale: BackwardScale | None = None
        self.losses: list[Tensor] = []
        self._true_stamp: GradientStamp | None = None  # of the masters' gradients
        # Names of parameters, and all gradients, that were there when the user scaled a loss.
        self._left_over: tuple[list[str], GradientStamp] | None = None
        self._found: dict[int, tuple[LossScaler, Tensor]] = {}
        self._is_closed = False  # by a clip or an edit, which a further backward would undo
        self._agreed = False  # over ranks, in ``_found``
        self._turn = 0  # messages to the ranks since these gradients were taken
        self._has_none = False  # while a check stands that was made for other ranks, which may have gradients
        self._unreduced: set[int] = set()  # ids of scalers whose sums were made under DDP's no_sync
        self._norms: list[tuple[LossScaler, Tensor]] = []  # of scalers that follow them, and were not told yet

    def _is_one(self, scaler: LossScaler) -> bool:
        """Whether a scaler is static and its scale exactly 1. Syncs once for each value of a static scale."""
        if scaler.dynamic:
            return False
        known, generation, is_one = self._known_scale
        if known is not scaler or generation != scaler.generation:
            is_one = float(scaler.scale) == 1.0
            self._known_scale = (scaler, scaler.generation, is_one)
        return is_one

    def scales_by_one(self) -> bool:
        """Whether the own scale is static and exactly 1, so that another may do the scaling. Syncs as above."""
        return self._is_one(self._scaler())

    # -- backwards ---------------------------------------------------------------------------------------------------

    def begin_backward(self, scaler: LossScaler, may_clear: bool = False) -> BackwardScale:
        """A backward with ``scaler``'s present scale is about to add to the model's gradients.

        Args:
            may_clear: the user runs it: gradients of an earlier step raise later, if they are still there.

        Raises:
            RuntimeError: gradients are incomplete, were written, were clipped or edited, or are of another scale.
        """
        self._end_empty()
        grads = raw_grads(self.params.models)
        self._notice_cleared(grads)
        self._check_complete()
        self._check_left_over(grads)
        if self.stage is not Stage.READY:
            self._compare(grads)  # finds zeros that the user wrote: READY
        if self.stage is Stage.READY:
            self._begin_step(scaler, grads, may_clear)
        else:
            self._continue_step(scaler)
        if self.scale is None or not self.scale.is_current(scaler):
            self.scale = BackwardScale.of(scaler, self._is_one(scaler))
        self.scale.external = False
        if self.gradients.summing:
            self.gradients.set_aside(self.replicas.keeps)
        self.backwards += 1
        self.stage, self._stamp = Stage.SCALED, None
        return self.scale

    def _begin_step(self, scaler: LossScaler, grads: list[Tensor | None], may_clear: bool) -> None:
        if not (self._is_one(scaler) or self._has_zeros(grads)):
            left = self._not_zero(grads)
            if left:
                if self.sums or not may_clear:
                    raise _left_over(left)
                self._left_over = left, GradientStamp([*grads, *raw_grads(self.params.elsewhere)])
        self.gradients.forget_true()
        if self.sums:
            self._start_summing()

    def _check_left_over(self, grads: list[Tensor | None]) -> None:
        """Raise where a loss was scaled over gradients of an earlier step, and one of them is still there."""
        if self._left_over is not None:
            names, stamp = self._left_over
            now = enumerate([*grads, *raw_grads(self.params.elsewhere)])
            if any([stamp.is_of(position, grad) for position, grad in now]):  # noqa: C419
                raise _left_over(names)
            self._left_over = None

    def _continue_step(self, scaler: LossScaler) -> None:
        if self._is_closed:
            raise RuntimeError(
                "backward was called after master gradients were clipped or edited, which it would undo. Clip and edit "
                "after the last backward of a step; or call step() or zero_grad() first."
            )
        scale = self.scale
        if scale is None:
            return
        if not scale.is_current(scaler):
            if not self.gradients.summing:
                self._start_summing()
            if self.stage is not Stage.UNSCALED:
                self._fold(scale)
        elif self.stage is Stage.UNSCALED and not self.gradients.summing:
            if self.params.has_own and not scale.unit:
                self.gradients.scale_back(scale.scale)
            self.gradients.are_true = False

    def end_backward(self, stamp: bool) -> None:
        """A backward is over.

        Args:
            stamp: remember its gradients, so that an edit is noticed, and fold them into sums where there are any.
                Without it they are the user's until the check.
        """
        if self.stage is not Stage.SCALED or self.scale is None or not stamp:
            return
        if self.gradients.summing:
            self._fold(self.scale)
            self._become_unscaled()
        elif not self.replicas.local:  # those of no_sync are reduced by a later backward
            self._stamp = GradientStamp(raw_grads(self.params.models))

    def found_none(self) -> bool:
        """Whether the backward that has just ended has left no gradient at all."""
        if self._stamp is not None and not self._stamp.is_empty:
            return False
        return not self._any_there(raw_grads(self.params.models))

    def interrupt(self) -> None:
        """A backward raised while gradients were being added up."""
        self.stage = Stage.INTERRUPTED

    def _check_complete(self) -> None:
        if self.stage is Stage.INTERRUPTED:
            raise RuntimeError(
                "a backward was interrupted while gradients were being added up, so they are incomplete. "
                "Call zero_grad() and do the step's backwards again."
            )

    # -- what became of gradients meanwhile ----------------------------------------------------------------------------

    def _any_there(self, grads: list[Tensor | None]) -> bool:
        if any(map(operator.is_not, grads, itertools.repeat(None))):
            return True
        if self.gradients.are_true or self.gradients.summing:
            return any(map(operator.is_not, raw_grads(self.params.masters), itertools.repeat(None)))
        return any(map(operator.is_not, raw_grads(self.params.elsewhere), itertools.repeat(None)))

    def waits_for_reduction(self) -> bool:
        """Whether gradients were made under DDP's no_sync, and are to be reduced by a later backward."""
        return self.replicas.local and not (self.gradients.summing or self.sums)

    def waits_for_step(self) -> bool:
        """Whether gradients do. READY where they were cleared, in whatever way: an abandoned batch."""
        grads = raw_grads(self.params.models)
        self._notice_cleared(grads)
        return self.stage is not Stage.READY

    def _notice_cleared(self, grads: list[Tensor | None]) -> None:
        """READY where all gradients were set to None since."""
        if self.stage is Stage.READY or self._has_none or any(map(operator.is_not, grads, itertools.repeat(None))):
            return
        if self._stamp is not None and self.stage is Stage.UNSCALED and not self.gradients.summing:
            self._drop(self._stamp.compare(grads)[1])
        if not self._any_there(grads):
            self.reset(keeps_true=False)

    def _drop(self, gone: list[int]) -> None:
        """Parameters at these positions, whose gradient was set to None, are left alone."""
        if gone:
            self.gradients.drop(gone)
        for position in gone:
            for stamp in (self._stamp, self._true_stamp):  # which is no edit
                if stamp is not None:
                    stamp.forget(position)

    def _compare(self, grads: list[Tensor | None]) -> None:
        """Take in what became of gradients since they were last looked at. READY where the user has zeroed all of them.

        Raises:
            RuntimeError: one was written where that does not count.
        """
        written, gone = ([], []) if self._stamp is None else self._stamp.compare(grads)
        self._drop(gone)
        if self.stage is Stage.UNSCALED:
            written = [i for i in written if not self.params.master_is_model[i]]
        if written and not self.gradients.summing and self._are_same(written, grads) and _are_zero(grads):
            self._take_zeros(grads)
        elif written:
            self._refuse_writes(written, grads)
        elif self.stage is Stage.UNSCALED:
            self._notice_edits()

    def _are_same(self, positions: list[int], grads: list[Tensor | None]) -> bool:
        """Whether gradients at these positions are the tensors that were stamped, in other versions."""
        return self._stamp is not None and all(self._stamp.is_of(i, grads[i]) for i in positions)

    def _take_zeros(self, grads: list[Tensor | None]) -> None:
        """READY: ``zero_grad(set_to_none=False)`` of the model was called."""
        self.reset(keeps_true=False)
        self._stamp = GradientStamp(grads, are_zeros=True)

    def _refuse_writes(self, written: list[int], grads: list[Tensor | None]) -> None:
        names = [self.params.names[i] for i in written]
        when = "backward(loss) had made them" if self.stage is Stage.SCALED else "they were checked"
        first, more = "", ""
        if self.scale is not None and self.scale.external:
            first = (
                "Under a GradScaler clip opt.master_params(), after unscale_. Trainers that clip the model's own: "
                "Lightning, Accelerate, transformers, timm have a module in fp16opt.integrations. "
            )
        moved = [grads[i] for i in written]
        if not self.replicas.are_told and any(grad is not None and grad._is_view() for grad in moved):
            more += (
                " DDP with gradient_as_bucket_view=True moves gradients once, after its first reduction: call "
                "fp16opt.distributed.attach(opt, ddp_model)."
            )
        raise RuntimeError(
            f"the model's gradients were written after {when}: {describe(names)}. {first}To have them count, "
            "call update_master_grads(). To clip, call clip_master_grads(max_norm) in place of "
            "clip_grad_norm_(model.parameters()). To add up micro-batches, call backward(loss) of this optimizer each "
            f"time. To give the step up, call zero_grad().{more}"
        )

    def _notice_edits(self) -> None:
        """Master gradients that were edited count: they are checked anew."""
        masters = raw_grads(self.params.masters)
        edited, gone = ([], []) if self._true_stamp is None else self._true_stamp.compare(masters)
        external = self.scale is not None and self.scale.external
        if not (edited or gone or (external and not self._agreed)):  # other ranks expect no further message
            return
        if edited and not (self.params.has_apart or self.gradients.summing) and _are_zero(masters):
            self._take_zeros(masters)
            return
        before = {key: found.clone() for key, (_, found) in self._found.items()}
        self.gradients.recheck()
        self._true_stamp = GradientStamp(masters)
        self._is_closed = self._is_closed or bool(edited or gone)
        self._take_recheck(before)

    def _take_recheck(self, before: dict[int, Tensor]) -> None:
        """What is stepped is what was found now. It counts for scalers that had found something; else for the last."""
        if self.scale is None:
            return
        found = self.gradients.found_inf(self.device).clone()
        if len(self._found) > 1:
            none_had = 1.0 - torch.stack(list(before.values())).amax()
            last = id(self.scale.scaler)
            for key, (scaler, _) in self._found.items():
                had = torch.maximum(before[key], none_had) if key == last else before[key]
                self._found[key] = (scaler, found * had)
        else:
            self._found = {id(self.scale.scaler): (self.scale.scaler, found)}
        self._agreed = False
        self._note_norm(self.scale.scaler)

    # -- gradients that came without backward(loss) ------------------------------------------------------------------

    def take_external(self, inv_scale: Tensor | None = None, scaler: LossScaler | None = None) -> bool:
        """In READY, take the gradients that are there as made by a plain backward.

        Args:
            inv_scale: float32, 0-dim: what a GradScaler would multiply them by. None: 1 / the scale of ``scaler``.
            scaler: the user says that they were scaled by its present scale. None: by the own one, if that is 1.

        Returns:
            Whether there are any.

        Raises:
            RuntimeError: they were not scaled, and the own scale is not 1.
        """
        grads = raw_grads(self.params.models)
        if not self._any_there(grads):
            return False
        is_known = scaler is not None or inv_scale is not None
        scaler = self._scaler() if scaler is None else scaler
        if not (is_known or self._is_one(scaler)) and self._not_zero(grads):
            raise RuntimeError(
                "gradients were found that neither opt.backward(loss) nor opt.scale_loss(loss) made since the last "
                f"step, and the loss scale is {float(scaler.scale):g}: they would be unscaled wrongly. Use "
                "opt.backward(loss), clip before step(), and call zero_grad() after it. Where another optimizer's "
                "backward has made them, give both one scaler (scaler=), and call update_master_grads() of this one "
                "first. For a GradScaler to do the scaling, construct MixedPrecisionOptimizer without dynamic, "
                "loss_scale, scaler. Trainers that call backward themselves: Lightning, Accelerate, transformers, timm "
                "have a module in fp16opt.integrations."
            )
        self.scale = BackwardScale.of(scaler, self._is_one(scaler))
        self.scale.external = True
        if inv_scale is not None:
            self.scale.inv_scale, self.scale.unit = inv_scale.to(self.device), False
        self.gradients.release()
        self.stage, self._stamp = Stage.SCALED, None
        return True

    def _not_zero(self, grads: list[Tensor | None]) -> list[str]:
        """Names of parameters whose gradient is there and not all zeros. Syncs once where there are gradients.

        Where masters are spread over ranks it is so on all of them alike: else some would raise, and the others wait.
        """
        if not (self.params.elsewhere or any(map(operator.is_not, grads, itertools.repeat(None)))):
            return []
        named = [*zip(self.params.names, grads, strict=True)]
        named += zip(self.params.called_elsewhere, raw_grads(self.params.elsewhere), strict=True)
        there = [(name, grad) for name, grad in named if grad is not None]
        if not there:
            return []
        flags = torch.stack([_any_not_zero(grad).to(self.device) for _, grad in there])
        found = [name for (name, _), flag in zip(there, flags.tolist(), strict=True) if flag]
        if self.params.has_dtensors and self.ranks.is_anywhere(flags.any()):
            return found or ["a parameter's piece on another rank, which names it"]
        return found

    def _has_zeros(self, grads: list[Tensor | None]) -> bool:
        """In READY: whether gradients are zeros of ``zero_grad(set_to_none=False)``, untouched since."""
        return self._stamp is not None and self._stamp.are_zeros and not self._stamp.compare(grads)[0]

    # -- the check ---------------------------------------------------------------------------------------------------

    def finalize(
        self, write: bool = False, norm_type: float | None = None, of: set[int] | None = None
    ) -> OverflowCheck | None:
        """Whether the gradients as they are now are finite; None where there are none. No host sync.

        Where masters are spread over ranks it costs one message, with the norm or without. FP32 sums that were made
        under DDP's ``no_sync`` are averaged over the ranks.

        Args:
            write: make true FP32 gradients of all; else a check is enough.
            norm_type: p of the norm that is wanted too.
            of: ids of the model's parameters whose norm it is; None: of all.

        Raises:
            RuntimeError: a backward was interrupted; or gradients were written where that does not count.
        """
        needs_true = norm_type is not None and (norm_type != 2.0 or of is not None)
        if not self._bring_up(write or needs_true):
            if not self.ranks.expects_all:
                return None
            self._check_empty(write or needs_true)
        if norm_type is not None and not self.gradients.is_measured:  # after a clip
            self.unscale()
        return self._conclude(norm_type, of)

    def _check_empty(self, write: bool) -> None:
        """Check that there are no gradients: other ranks may have some, and expect what this one has found."""
        scaler = self._scaler()
        self.scale = BackwardScale.of(scaler, self._is_one(scaler))
        self.gradients.release()
        self._stamp, self._has_none = None, True
        self._check(self.scale, raw_grads(self.params.models), write, self.scale.unit)

    def _end_empty(self) -> None:
        """READY where gradients are about to come after :meth:`_check_empty`: other ranks have begun anew too."""
        if self._has_none:
            self.reset(keeps_true=False)

    def _bring_up(self, write: bool) -> bool:
        """Check the gradients as they are now, or make true ones; False where there are none. Raises as finalize."""
        grads = raw_grads(self.params.models)
        self._notice_cleared(grads)
        self._check_complete()
        self._check_left_over(grads)
        if self.stage is not Stage.READY:
            self._check_reduced()
            self._compare(grads)
        if self.stage is Stage.READY:
            self.take_external()
        if self.stage is Stage.READY or self.scale is None:
            return False
        if self.stage is Stage.SCALED:
            self._check(self.scale, grads, write, self.scale.unit)
        if write:
            self.unscale()
        return True

    def _check(self, scale: BackwardScale, grads: list[Tensor | None], write: bool, unit: bool) -> None:
        if self.gradients.summing:
            self._fold(scale)
        else:
            with torch.no_grad():
                if write:
                    self.gradients.check_and_unscale(grads, scale.inv_scale, unit)
                else:
                    self.gradients.check(grads, scale.inv_scale, unit)
            self._note_found(scale)
        if self._stamp is None:
            self._stamp = GradientStamp(grads)
        if self.gradients.are_true:
            self._become_unscaled()
        else:
            self.stage = Stage.CHECKED

    def unscale(self) -> None:
        """Make true FP32 gradients of those that were checked, with the factor of a clip."""
        if self.stage is Stage.CHECKED:
            with torch.no_grad():
                self.gradients.unscale()
            self._become_unscaled()

    def _become_unscaled(self) -> None:
        self.stage = Stage.UNSCALED
        if self.gradients.summing or self._stamp is None:
            self._stamp = GradientStamp(raw_grads(self.params.models))
        self._true_stamp = GradientStamp(raw_grads(self.params.masters))

    def update(self) -> None:
        """The door: take the model's gradients as they are now, from any writer, and write true ones to masters."""
        self._end_empty()
        self._turn = 0
        if self.stage is Stage.READY:
            self.take_external(scaler=self._scaler())
        grads = raw_grads(self.params.models)
        self._notice_cleared(grads)
        self._check_complete()
        self._check_left_over(grads)
        if self.stage is Stage.READY or self.scale is None:
            return
        self._check_reduced()
        if self.gradients.summing:
            if self.stage is Stage.SCALED:
                self._check(self.scale, grads, True, self.scale.unit)
            return
        own_are_true = self.stage is Stage.UNSCALED  # they were unscaled in place, edits included
        self.stage, self._stamp, self._is_closed = Stage.SCALED, None, False
        self._check(self.scale, grads, True, self.scale.unit or own_are_true)

    def before_reading(self, position: int) -> None:
        """``.grad`` of a master is about to be read: true ones are made of all. Within autograd nothing is done.

        Args:
            position: of its pair.
        """
        if self.stage is Stage.UNSCALED and not self.gradients.summing:
            if self._stamp is not None and raw_grad(self.params.models[position]) is None:
                self._drop(self._stamp.compare(raw_grads(self.params.models))[1])
            return
        if self.stage in (Stage.UNSCALED, Stage.INTERRUPTED) or torch._C._current_graph_task_id() != -1:
            return
        if self.stage is Stage.READY:
            grads = raw_grads(self.params.models)
            is_new = self._is_one(self._scaler()) and (self.has_new() or self._has_zeros(grads))
            if not (is_new and self.take_external()):
                return
        if self.waits_for_reduction():
            return
        with torch.inference_mode(False):
            self._bring_up(write=True)

    def before_setting(self, position: int, value: Tensor | None) -> None:
        """``.grad`` of a master is about to be set: the others are made true, so that the edit counts.

        Args:
            position: of its pair.
            value: what it is set to.

        Raises:
            RuntimeError: no gradients wait for a step, and the scale is not 1.
        """
        self.gradients.may_be_made = True
        if torch._C._current_graph_task_id() != -1:
            return
        if self.stage is Stage.READY and value is not None:
            refuse_torch_checkpointing("optimizer state")
            scaler = self._scaler()
            if not self._is_one(scaler):
                raise RuntimeError(
                    "a master's gradient was set while none wait for a step, and the loss scale is "
                    f"{float(scaler.scale):g}. To compute gradients yourself, run torch.autograd.grad on "
                    "opt.scale_loss(loss), set the model's gradients, and call update_master_grads(); then edit."
                )
            is_new = self.has_new() or self._has_zeros(raw_grads(self.params.models))
            if not is_new or not self.take_external():
                self._take_none(scaler)
                return
        self.before_reading(position)

    def _take_none(self, scaler: LossScaler) -> None:
        """UNSCALED without any gradient: the user is about to give masters theirs."""
        self.scale = BackwardScale.of(scaler, self._is_one(scaler))
        self.scale.external = True
        self.gradients.release()
        self.gradients.forget_true()
        self._stamp = GradientStamp([None] * len(self.params))
        self.gradients.are_true = self.gradients.may_be_made = True
        self._become_unscaled()

    def were_cleared(self) -> bool:
        """Whether gradients that were checked have been set to None or to zeros since. Changes nothing.

        Syncs where they were written.
        """
        if self._stamp is None or self.stage not in (Stage.CHECKED, Stage.UNSCALED) or self.gradients.summing:
            return False
        grads = raw_grads(self.params.models)
        return any(self._stamp.compare(grads)) and _are_zero(grads)

    def is_as_stamped(self) -> bool:
        """Whether the stamps tell of no gradient that was written, replaced or set to None since."""
        stamped = (self._stamp, self.params.models), (self._true_stamp, self.params.masters)
        return all(stamp is None or not any(stamp.compare(raw_grads(tensors))) for stamp, tensors in stamped)

    def stamp_again(self) -> None:
        """DDP has moved gradients into its buckets: the stamps are of those that are there now, which are the same."""
        if self._stamp is not None:
            self._stamp = GradientStamp(raw_grads(self.params.models))
        if self._true_stamp is not None:
            self._true_stamp = GradientStamp(raw_grads(self.params.masters))

    def has_new(self) -> bool:
        """In READY: whether the model has gradients that no step has used, and that are no zeros of ``zero_grad``."""
        grads = raw_grads(self.params.models)
        if self._stamp is None:
            return any(map(operator.is_not, grads, itertools.repeat(None)))
        return bool(self._stamp.compare(grads)[0])

    def _check_reduced(self) -> None:
        if self.waits_for_reduction():
            raise RuntimeError(
                "the gradients were made under DDP's no_sync and are this rank's own. Run the last backward of a step "
                'outside of no_sync, or use grad_accumulation="fp32", which averages what is left.'
            )

    # -- clips and edits ---------------------------------------------------------------------------------------------

    def clip(self, factor: Tensor, of: set[int] | None) -> None:
        """Multiply all gradients by ``factor`` (float32, 0-dim), or those of some parameters. No host sync.

        A second factor would be a third rounding, so gradients that wait are made true before one.
        """
        if self.stage is Stage.CHECKED and (self._is_closed or of is not None):
            self.unscale()
        self.gradients.clip(factor, of)
        self.close()

    def clip_values(self, largest: float, found_inf: Tensor, of: set[int] | None) -> None:
        """Bring every element of true gradients to at most ``largest`` in size. No host sync."""
        self.gradients.clip_values(largest, found_inf, of)
        self.close()

    def close(self) -> None:
        """The step's gradients were clipped or edited: no further backward is part of it."""
        self._is_closed = True
        if self.stage is Stage.UNSCALED:
            self._true_stamp = GradientStamp(raw_grads(self.params.masters))

    def unscale_external(self, inv_scale: Tensor) -> None:
        """A GradScaler tells its scale: gradients that it has not unscaled are to be multiplied by ``inv_scale``.

        Args:
            inv_scale: float32, 0-dim, any device. Told again, it changes nothing.
        """
        if self.stage is Stage.READY:
            self.take_external(inv_scale)
            return
        if self.scale is None or not self.scale.unit:
            return
        self.scale.inv_scale, self.scale.unit = inv_scale.to(self.device), False
        self.unscale()
        if self.stage is Stage.UNSCALED:  # read before: taken as made at 1
            self.gradients.scale_again(self.scale.inv_scale)
            self._found = {}
            self._note_found(self.scale)
            self._true_stamp = GradientStamp(raw_grads(self.params.masters))

    # -- FP32 sums ---------------------------------------------------------------------------------------------------

    def _start_summing(self) -> None:
        if not (self.replicas.are_told or self.params.has_dtensors):  # FSDP2 shows gradients that are reduced
            _refuse_ranks()
        for key, (scaler, found) in self._found.items():  # the kernel's own buffer, which the next pass overwrites
            self._found[key] = (scaler, found.clone())
        self.gradients.start_summing()

    def _fold(self, scale: BackwardScale) -> None:
        """Add the model's gradients to the sums."""
        if self.replicas.local and self.params.elsewhere:
            raise RuntimeError(
                "FP32 sums under DDP's no_sync need every master on every rank; ZeroRedundancyOptimizer spreads them. "
                'Use grad_accumulation="model", or leave no_sync.'
            )
        if self._unreduced and not self.replicas.local:
            self._reduce_sums()
        with torch.inference_mode(False), torch.no_grad():
            self.gradients.fold(scale.inv_scale, self.replicas.keeps)
        self._note_found(scale)
        if self.replicas.local:  # other ranks hear of it when the sums are averaged
            self._unreduced.add(id(scale.scaler))

    def _reduce_sums(self) -> None:
        """Average over the ranks what was summed under ``no_sync``."""
        keys = [key for key in self._found if key in self._unreduced]  # in one order on all ranks
        found = self.replicas.reduce(self.gradients, [self._found[key][1] for key in keys])
        for key, one in zip(keys, found, strict=True):
            scaler, earlier = self._found[key]
            self._found[key] = (scaler, torch.maximum(earlier, one.to(earlier.device)))
            self._note_norm(scaler)
        self._unreduced = set()

    # -- what was found ----------------------------------------------------------------------------------------------

    def _note_found(self, scale: BackwardScale) -> None:
        found, key = self.gradients.found_inf(self.device), id(scale.scaler)
        if self.gradients.summing:
            earlier = self._found.get(key)
            found = found.clone() if earlier is None else torch.maximum(earlier[1], found)
        self._found[key] = (scale.scaler, found)
        self._agreed = False
        if not self.replicas.local:
            self._note_norm(scale.scaler)

    def _note_norm(self, scaler: LossScaler) -> None:
        if scaler.follows_norms:
            self._norms.append((scaler, self.gradients.largest_norm(self.device).clone()))

    def blame(self, scaler: LossScaler, found: Tensor) -> None:
        """Count ``found`` (float32, 0-dim) into what ``scaler``'s backwards gave: it was found in another optimizer."""
        earlier = self._found.get(id(scaler))
        found = found.to(self.device)
        self._found[id(scaler)] = (scaler, found if earlier is None else torch.maximum(earlier[1], found))

    def last_check(self) -> OverflowCheck | None:
        """What the last check of the coming step's gradients gave; None where there was none. Looks at nothing."""
        return None if not self._found else self._checked(None)

    def _conclude(self, norm_type: float | None, of: set[int] | None) -> OverflowCheck | None:
        """None where no rank has gradients."""
        if self._unreduced:
            self._reduce_sums()
        norm = None
        if not self.ranks.alone:
            has_grads, norm = self._agree(norm_type, of)
            if not has_grads:
                self.reset(keeps_true=False)
                return None
        elif norm_type is not None:
            norm = self.gradients.norm(norm_type, self.device, of)
        self._tell_norms()
        return self._checked(norm)

    def _checked(self, norm: Tensor | None) -> OverflowCheck:
        each = list(self._found.values())
        found = each[0][1] if len(each) == 1 else torch.stack([one for _, one in each]).amax()
        return OverflowCheck(found, each, norm)

    def _tell_norms(self) -> None:
        """Scalers hear of norms: where masters are spread over ranks, by one message. No host sync."""
        if not self._norms:
            return
        norms = torch.stack([norm for _, norm in self._norms])
        if not self.ranks.alone:
            norms = self.ranks.largest(norms)
        for (scaler, _), norm in zip(self._norms, norms.unbind(), strict=True):
            scaler.see(norm)
        self._norms = []

    def _agree(self, norm_type: float | None, of: set[int] | None) -> tuple[bool, Tensor | None]:
        """One message for what was found and the norm, at the first of clipping and stepping.

        Returns:
            (whether some rank has gradients, the norm).
        """
        if self._agreed and norm_type is None:
            return True, None
        power = None
        if norm_type is not None:
            counted = self.ranks.counted
            power = self.gradients.power_sum(
                norm_type, self.device, lambda param: (of is None or id(param) in of) and counted(param)
            )
        mine = [one for _, one in self._found.values()]
        found, norm, has_grads = self.ranks.agree(mine, norm_type, power, self._turn, not self._has_none)
        self._turn += 1
        for (key, (scaler, _)), one in zip(list(self._found.items()), found, strict=True):
            self._found[key] = (scaler, one)
        self._agreed = True
        return not self._has_none or bool(has_grads), norm

    # -- the end -----------------------------------------------------------------------------------------------------

    def require_open(self) -> None:
        """Raise ``RuntimeError`` where the step's gradients were clipped or edited: parameters are about to change."""
        stamp = self._true_stamp
        if self._is_closed or (stamp is not None and any(stamp.compare(raw_grads(self.params.masters)))):
            raise RuntimeError(
                "param_groups were changed between a clip, or an edit of master gradients, and the step. Change them "
                "before the first backward of a step, or after the step."
            )

    def follow_params(self) -> None:
        """Parameters or masters came or went. What was found is found anew, of those that were unfrozen too."""
        scale = self.scale
        if scale is not None and not self.gradients.summing and self.stage in (Stage.CHECKED, Stage.UNSCALED):
            if self.stage is Stage.UNSCALED and not scale.unit:
                self.gradients.scale_back(scale.scale)
            self.gradients.are_true, self._true_stamp = False, None
            self.stage = Stage.SCALED
        self.gradients.follow_params()
        if self._stamp is not None and self.stage is not Stage.READY:
            self._stamp = GradientStamp(raw_grads(self.params.models))
        if self._true_stamp is not None:
            self._true_stamp = GradientStamp(raw_grads(self.params.masters))

    def reset(self, keeps_true: bool = True) -> None:
        """READY: a step has used the gradients, or they were cleared, or are given up.

        Args:
            keeps_true: leave master gradients to be read.
        """
        self.gradients.release(frees=self.stage is Stage.CHECKED)
        if not (self.stage is Stage.UNSCALED and keeps_true):
            self.gradients.forget_true()
        is_stamped = self.stage is Stage.CHECKED or (self.stage is Stage.UNSCALED and not self.params.has_own)
        if not is_stamped:  # optimizers may write the gradients that they step
            self._stamp = GradientStamp(raw_grads(self.params.models))
        self.last_scale = self.scale
        self.stage = Stage.READY
        self._start()

    def forget(self) -> None:
        """READY: a checkpoint was loaded. Gradients that are incomplete stay so."""
        if self.stage is not Stage.INTERRUPTED:
            self.reset(keeps_true=False)

    def clear(self, set_to_none: bool) -> None:
        """Clear the model's and the masters' gradients, and forget what was found in them."""
        self.gradients.clear(set_to_none)
        self.stage = Stage.READY
        self._stamp = None if set_to_none else GradientStamp(raw_grads(self.params.models), are_zeros=True)
        self._start()


def _left_over(names: list[str]) -> RuntimeError:
    return RuntimeError(
        f"gradients are there that this backward would add to, and they were made at another scale: {describe(names)}. "
        "Call zero_grad() after each step, also after a skipped one. Where another optimizer's backward left them, "
        "clear them; or, where both have one scaler, call update_master_grads() of this one after that backward."
    )


def _any_not_zero(grad: Tensor) -> Tensor:
    """bool, 0-dim: whether this rank's part of a gradient has an element that is not zero. No sync."""
    return _values_of(grad).detach().ne(0).any()


def _are_zero(grads: Sequence[Tensor | None]) -> bool:
    """Whether all gradients that are there are zeros. Syncs for each, up to the first that is not."""
    return not any(grad is not None and bool(_any_not_zero(grad)) for grad in grads)


def _values_of(grad: Tensor) -> Tensor:
    return grad._values() if grad.layout is torch.sparse_coo else local(grad)


def _refuse_ranks() -> None:
    """Raise where gradients are about to be folded into FP32 sums that DDP might never reduce."""
    dist = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return
    raise RuntimeError(
        'gradients are to be folded into FP32 (grad_accumulation="fp32", or several loss scales in one step) in a '
        f"process group of {dist.get_world_size()} ranks: under DDP's no_sync the ranks would drift apart. Call "
        "fp16opt.distributed.attach(opt, ddp_model); or attach(opt, None), if ranks don't share gradients."
    )
