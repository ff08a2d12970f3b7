"""StepState: where a step's gradients stand, and every transition from one stage to the next.

``stage`` is the only truth of where a step stands (:mod:`.stage`; docs/engine.md has the table and its rules). What
outlives a step lies beside it: the scaler, the ranks, how many backwards there were.
"""

from __future__ import annotations

import abc
import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..kernels import AwaitedFlag
from ..kernels.readings import Rows
from ..kernels.tensor_lists import any_there, counted_gradients, gradients
from ..scaling import LossScaler
from . import errors
from .diagnostics import describe
from .dtensors import any_raw_grad, local, raw_grad, raw_grads
from .folded import is_folded, unmark
from .gradients import Gradients, GradsToStep
from .params import DeviceParams, ParamTable
from .progress import Progress
from .ranks import Asked, Origin, Ranks, Replicas, refuse_torch_checkpointing
from .stage import (
    BackwardScale,
    Checked,
    Interrupted,
    OverflowCheck,
    Ready,
    Scaled,
    Stepping,
    Summed,
    UnitScales,
    Unscaled,
    Verdict,
    check_of,
)
from .stamps import GradientStamp

Grads = Sequence["Tensor | None"]


class StepState(abc.ABC):
    """READY -> SCALED (a loss was scaled) -> CHECKED or UNSCALED -> READY (step, zero_grad).

    Backwards with one scale add up in the model's gradients. Where a second scaler joins in, or ``sums`` asks for it,
    each backward is folded into FP32 sums with its own scale.

    Args:
        scaler: gives the optimizer's own scaler.
        device: where what was found is kept.
        sums: whether every backward is folded.

    Attributes:
        stage: one of the values of :mod:`.stage`.
        ranks: where the masters' other parts are, if any.
        replicas: which ranks share gradients with this one, if any.
        backwards: how many have begun.
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
        self.stage: Any = Ready()
        self._scaler = scaler
        self._units = UnitScales()
        self._seen: Any = None  # how gradients lay when they were last seen; None where that could not be read
        self._lay: Any = None  # how they lay when that was last read

    @property
    def standing(self) -> Any:
        """The stage; while a step writes, the one whose gradients it steps."""
        return self.stage.before if type(self.stage) is Stepping else self.stage

    @property
    def scale(self) -> BackwardScale | None:
        """Of the present gradients; of sums, of the last backward. None where there are none."""
        return getattr(self.standing, "scale", None)

    @property
    def losses(self) -> tuple[Tensor, ...]:
        """Of the present gradients' backwards, unscaled, where they are single numbers."""
        return getattr(self.standing, "losses", ())

    @property
    def origin(self) -> Origin | None:
        """Which ranks found something that is not finite; None where masters are all here. Syncs."""
        numbers = getattr(getattr(self.standing, "verdict", None), "origin", None)
        return None if numbers is None else self.ranks.origin(numbers)

    @property
    def are_true(self) -> bool:
        """Whether masters hold true gradients."""
        return isinstance(self.standing, (Unscaled, Summed))

    def scales_by_one(self) -> bool:
        """Whether the own scale is static and exactly 1, so that another may scale. Syncs once a static value."""
        return self._units.has(self._scaler())

    def steps_ahead(self) -> int:
        """How many steps parameters have taken that ``step`` is yet to count: none, but where backward steps them."""
        return 0

    def is_own(self) -> bool:
        """Whether ``opt.backward(loss)`` or ``opt.scale_loss(loss)`` has made the present gradients."""
        return self.scale is not None and not self.scale.is_plain

    # -- looking -----------------------------------------------------------------------------------------------------

    def _see(self) -> Rows:
        """The model's gradients, and all that is asked of each, in the order of the table."""
        stage = self.stage
        known = stage.stamp.references if type(stage) is Checked and stage.stamp.was_counted else None
        grads = gradients(self.params.models, self._lay if known is None else self._seen, known)
        self._seen = grads.reading
        if grads.reading is not None:
            self._lay = grads.reading
        return grads

    def look(self) -> Rows:
        """What became of gradients since the stamps; every call but a step's own begins with it.

        Returns:
            The model's gradients, in the order of the table, as they were seen.

        Raises:
            RuntimeError: they are incomplete, or one was written where that does not count.
        """
        grads = self._see()
        stage = self.stage
        if type(stage) is Ready:
            return grads
        if type(stage) is Summed:
            return self._look_at_sums(stage, grads)
        if self._are_cleared(grads):
            self.reset(keeps_true=False)
            return grads
        if type(stage) is Interrupted:
            if not are_zero(grads):
                raise errors.INTERRUPTED()
            self._take_zeros(grads)
            return grads
        if type(stage) is Scaled and stage.left_over is not None:
            self._check_left_over(stage, grads)
        if stage.stamp is None:
            return grads
        written, gone = stage.stamp.compare(grads)
        if gone:
            self._drop(gone)
        if written:
            if all(stage.stamp.is_of(i, grads[i]) for i in written) and are_zero(grads):
                self._take_zeros(grads)
                return grads
            self._refuse_writes(written, grads)
        if type(self.stage) is Unscaled:
            self._notice_edits(self.stage)
        return grads

    def _is_there(self, tensors: Sequence[Tensor]) -> bool:
        return any_raw_grad(tensors)

    def _any_there(self, grads: Grads) -> bool:
        if any_there(grads):
            return True
        return bool(self.params.elsewhere) and self._is_there(self.params.elsewhere)

    def _are_cleared(self, grads: Grads) -> bool:
        """Whether all gradients were set to None since."""
        if self._any_there(grads):
            return False
        stage = self.stage
        if type(stage) is Checked:
            return stage.verdict.has_grads  # else there were none: other ranks had some
        if type(stage) is Unscaled and (stage.stamp.is_empty or not stage.verdict.has_grads):
            return stage.verdict.has_grads and not self._is_there(self.params.masters)  # the user has set them there
        return True

    def _check_left_over(self, stage: Scaled, grads: Grads) -> None:
        """Raise where a loss was scaled over gradients of an earlier step, and one of them is still there."""
        if stage.left_over is None:
            return
        names, references = stage.left_over
        left = {id(grad) for reference in references if (grad := reference()) is not None}
        if any([id(grad) in left for grad in (*grads, *raw_grads(self.params.elsewhere))]):  # noqa: C419
            raise errors.NOT_CLEARED(names=describe(names))
        self.stage = stage._replace(left_over=None)

    def _drop(self, gone: list[int]) -> None:
        """Parameters at these positions, whose gradient was set to None, are left alone."""
        stage = self.stage
        if type(stage) is Scaled:
            self.stage = stage._replace(stamp=None if stage.stamp is None else stage.stamp.without(gone))
        elif type(stage) is Checked:
            waiting = self.gradients.drop(gone, stage.waiting) or []
            self.stage = stage._replace(stamp=stage.stamp.without(gone), waiting=waiting)
        elif isinstance(stage, (Unscaled, Summed)):
            self.gradients.drop(gone, None)
            stamps = stage.stamp.without(gone), stage.true_stamp.without(gone)  # which is no edit
            self.stage = stage._replace(stamp=stamps[0], true_stamp=stamps[1])

    def _drop_cleared(self, stage: Any, grads: Grads) -> None:
        """Parameters whose true gradient is there, and whose gradient was set to None since, are left alone."""
        knows_all = type(stage) is Unscaled or (type(stage) is Summed and not stage.pending)
        if knows_all and not stage.stamp.is_empty:
            self._drop(stage.stamp.compare(grads)[1])

    def _take_zeros(self, grads: Grads) -> None:
        """READY: ``zero_grad(set_to_none=False)`` of the model was called."""
        self.reset(keeps_true=False)
        self.stage = self.stage._replace(used=GradientStamp(grads, are_zeros=True))

    def _refuse_writes(self, written: list[int], grads: Grads) -> None:
        stage = self.stage
        names = describe([self.params.names[i] for i in written])
        if type(stage) is Summed:
            raise errors.WRITTEN_AFTER_THE_FOLD(names=names)
        if stage.scale.is_told or getattr(stage, "is_divided", False):
            raise errors.CLIPPED_THE_MODEL(names=names)
        moved = [grads[i] for i in written]
        has_moved = not self.replicas.are_told and any(grad is not None and grad._is_view() for grad in moved)
        refusal = errors.WRITTEN_AFTER_BACKWARD if type(stage) is Scaled else errors.WRITTEN_AFTER_THE_CHECK
        raise refusal(
            names=names,
            clip=errors.CLIP_UNDER_A_GRAD_SCALER if stage.scale.is_plain else "",
            moved=errors.DDP_MOVES_GRADIENTS if has_moved else "",
        )

    def _notice_edits(self, stage: Any) -> None:
        """Master gradients that were edited count: they are checked anew, like those that a GradScaler divides."""
        masters = raw_grads(self.params.masters)
        edited, gone = stage.true_stamp.compare(masters)
        was_divided = stage.is_divided and not (stage.is_measured or stage.is_closed)
        if not (edited or gone or was_divided):
            return
        self.gradients.recheck()
        found = self.gradients.found_inf(self.device).clone()
        verdict = stage.verdict._replace(found=_shared(stage, found), is_agreed=False)
        self.stage = stage._replace(
            true_stamp=GradientStamp(masters),
            is_closed=stage.is_closed or bool(edited or gone),
            is_measured=True,
            verdict=self._noting_norm(verdict, stage.scale.scaler),
        )
        if type(stage) is Summed:
            flags = tuple(one.clone() for one in self.gradients.flags())
            self.stage = self.stage._replace(flags=flags)

    # -- backwards ---------------------------------------------------------------------------------------------------

    def begin_backward(self, scaler: LossScaler, may_clear: bool = False, loss: Tensor | None = None) -> BackwardScale:
        """A backward with ``scaler``'s present scale is about to add to the model's gradients.

        Args:
            may_clear: the user runs it: gradients of an earlier step raise later, if they are still there.
            loss: unscaled, where it is a single number.

        Raises:
            RuntimeError: gradients are incomplete, were written, were clipped or edited, or are of another scale.
        """
        self._end_empty()
        grads = self.look()
        stage = self.stage
        if getattr(stage, "is_closed", False):
            raise errors.BACKWARD_AFTER_A_CLIP()
        if getattr(stage, "is_divided", False) or (type(stage) is not Ready and stage.scale.is_told):
            raise errors.BACKWARD_AFTER_UNSCALE()
        losses = () if type(stage) is Ready else stage.losses
        losses = losses if loss is None else (*losses, loss)
        if type(stage) is Ready:
            made = self._begin_step(stage, scaler, grads, may_clear)
        elif type(stage) is not Summed and not stage.scale.is_current(scaler):
            made = self._start_summing(stage, grads)
        else:
            made = stage
        scale = getattr(made, "scale", None)
        if scale is None or scale.is_plain or not scale.is_current(scaler):
            scale = BackwardScale.of(scaler)
        if type(made) is Summed:
            unmark(self.params.models)
            self.stage = made._replace(scale=scale, pending=True, losses=losses)
        else:
            if type(stage) is Unscaled:
                self.gradients.forget_true()
            self.stage = Scaled(scale, None, losses, made.left_over if type(made) is Scaled else None)
        self.backwards += 1
        return scale

    def _begin_step(self, stage: Ready, scaler: LossScaler, grads: Grads, may_clear: bool) -> Any:
        """The stage from which a first backward goes on."""
        left_over = None
        if not (self._units.has(scaler) or self._has_zeros(grads)):
            left = self._not_zero(grads)
            if left:
                if self.sums or not may_clear:
                    raise errors.NOT_CLEARED(names=describe(left))
                there = [*grads, *raw_grads(self.params.elsewhere)]
                left_over = left, [weakref.ref(grad) for grad in there if grad is not None]
        if stage.holds_true:
            self.gradients.forget_true()
        scale = BackwardScale.of(scaler)
        if self.sums:
            return self._new_sums(scale)
        return Scaled(scale, None, (), left_over)

    def end_backward(self, stamp: bool) -> None:
        """A backward is over.

        Args:
            stamp: remember its gradients, so that an edit is noticed, and fold them into sums where there are any.
                Without it they are the user's until the next call.
        """
        stage = self.stage
        if not stamp:
            return
        if type(stage) is Summed:
            if stage.pending:
                self._fold(stage)
        elif type(stage) is Scaled and not self.replicas.local:  # those of no_sync are reduced by a later backward
            self.stage = stage._replace(stamp=GradientStamp(counted_gradients(self.params.models)))

    def found_none(self) -> bool:
        """Whether the backward that has just ended has left no gradient at all."""
        stage = self.stage
        if type(stage) is Scaled and stage.stamp is not None and not stage.stamp.is_empty:
            return False
        if type(stage) is Summed and self._is_there(self.params.masters):
            return False
        return not any(map(self._is_there, (self.params.models, self.params.elsewhere)))

    def reopen(self) -> Verdict | None:
        """SCALED again where true gradients were made, and are as they were made: for faces that make them at once.

        What comes then is part of the step, and the next check finds anew what is in the gradients.

        Returns:
            What was found in them; None where the stage stays as it is.
        """
        if type(self.stage) is Unscaled:
            self.look()
        stage = self.stage
        if type(stage) is not Unscaled or stage.is_closed or stage.is_divided:
            return None
        self.gradients.forget_true()
        self.stage = Scaled(stage.scale, stage.stamp, stage.losses)
        return stage.verdict

    def interrupt(self) -> None:
        """A backward raised while gradients were being added up."""
        self.gradients.forget_true()
        self.stage = Interrupted()

    def waits_for_reduction(self) -> bool:
        """Whether gradients were made under DDP's no_sync, and are to be reduced by a later backward."""
        return self.replicas.local and not (self.sums or type(self.stage) is Summed)

    def waits_for_step(self) -> bool:
        """Whether gradients do. READY where they were cleared, in whatever way: an abandoned batch."""
        stage, grads = self.stage, raw_grads(self.params.models)
        if type(stage) is Summed:
            self._drop_cleared(stage, grads)
            left = [None if is_folded(grad) else grad for grad in grads]
            is_cleared = not (self._any_there(left) or self._is_there(self.params.masters))
        else:
            is_cleared = type(stage) not in (Ready, Stepping) and self._are_cleared(grads)
        if is_cleared:
            self.reset(keeps_true=False)
        return type(self.stage) is not Ready

    # -- gradients that came without backward(loss) ------------------------------------------------------------------

    def take_external(
        self,
        grads: Grads | None = None,
        inv_scale: Tensor | None = None,
        scaler: LossScaler | None = None,
        in_step: bool = False,
    ) -> bool:
        """In READY, take the gradients that are there as made by a plain backward.

        Args:
            grads: the model's, if they were just read.
            inv_scale: float32, 0-dim: what a GradScaler would multiply them by. None: 1 / the scale of ``scaler``.
            scaler: the user says that they were scaled by its present scale. None: by the own one, if that is 1.
            in_step: whether a GradScaler tells it in the step itself.

        Returns:
            Whether there are any.

        Raises:
            RuntimeError: they were not scaled, and the own scale is not 1.
        """
        grads = raw_grads(self.params.models) if grads is None else grads
        stage = self.stage
        if type(stage) is not Ready or not self._any_there(grads):
            return False
        is_known = scaler is not None or inv_scale is not None
        scaler = self._scaler() if scaler is None else scaler
        if not (is_known or self._units.has(scaler)) and (named := self._not_zero(grads)):
            raise errors.NOT_OF_THIS_STEP(scale=float(scaler.scale), names=describe(named))
        scale = BackwardScale.of(scaler, is_plain=True)
        if inv_scale is not None:
            scale = scale._replace(inv_scale=inv_scale.to(self.device), is_told=True, is_told_in_step=in_step)
        if stage.holds_true:
            self.gradients.forget_true()
        self.gradients.release()
        if self.sums:
            self.stage = self._new_sums(scale)._replace(pending=True)
            self._fold(self.stage)
        else:
            self.stage = Scaled(scale)
        return True

    def _not_zero(self, grads: Grads) -> list[str]:
        """Names of parameters whose gradient is there and not all zeros. Syncs once where there are gradients.

        Where masters are spread over ranks it is so on all of them alike: else some would raise, and the others wait.
        """
        if not (self.params.elsewhere or any_there(grads)):
            return []
        named = [*zip(self.params.names, grads, strict=True)]
        named += zip(self.params.called_elsewhere, raw_grads(self.params.elsewhere), strict=True)
        # What a wrapper that these weights had before has folded is gone with its sums.
        there = [(name, grad) for name, grad in named if grad is not None and not is_folded(grad)]
        if not there:
            return []
        flags = torch.stack([_any_not_zero(grad).to(self.device) for _, grad in there])
        found = [name for (name, _), flag in zip(there, flags.tolist(), strict=True) if flag]
        if self.params.has_dtensors and self.ranks.is_anywhere(flags.any()):
            return found or ["a parameter's piece on another rank, which names it"]
        return found

    def _has_zeros(self, grads: Grads) -> bool:
        """In READY: whether gradients are zeros of ``zero_grad(set_to_none=False)``, untouched since."""
        used = self.stage.used
        return used is not None and used.are_zeros and not used.compare(grads)[0]

    def has_new(self) -> bool:
        """In READY: whether the model has gradients that no step has used, and that are no zeros of ``zero_grad``."""
        if type(self.stage) is not Ready:
            return False
        grads = raw_grads(self.params.models)
        if self.stage.used is None:
            return any_there(grads)
        return bool(self.stage.used.compare(grads)[0])

    # -- the check ---------------------------------------------------------------------------------------------------

    def finalize(
        self,
        write: bool = False,
        norm_type: float | None = None,
        of: set[int] | None = None,
        max_norm: float | None = None,
    ) -> OverflowCheck | None:
        """Whether the gradients as they are now are finite; None where there are none. No host sync.

        Where masters are spread over ranks it costs one message, with the norm or without. FP32 sums that were made
        under DDP's ``no_sync`` are averaged over the ranks.

        Args:
            write: make true gradients of all; else a check is enough.
            norm_type: p of the norm that is wanted too.
            of: ids of the model's parameters whose norm it is; None: of all.
            max_norm: what gradients are to be clipped to, for other ranks to compare.

        Raises:
            RuntimeError: a backward was interrupted; or gradients were written where that does not count.
        """
        needs_true = norm_type is not None and (norm_type != 2.0 or of is not None)
        if not self._bring_up(write or needs_true):
            if not self.ranks.expects_all:
                return None
            self._check_empty(write or needs_true)
        if norm_type is not None and not self.stage.is_measured:  # after a clip
            self.unscale()
        return self._conclude(norm_type, of, max_norm)

    def _check_empty(self, write: bool) -> None:
        """Check that there are no gradients: other ranks may have some, and expect what this one has found."""
        grads = raw_grads(self.params.models)
        self.gradients.release()
        self._check(Scaled(BackwardScale.of(self._scaler())), grads, write, has_grads=False)

    def _end_empty(self) -> None:
        """READY where gradients are about to come after :meth:`_check_empty`: other ranks have begun anew too."""
        verdict = getattr(self.stage, "verdict", None)
        if verdict is not None and not verdict.has_grads:
            self.reset(keeps_true=False)

    def _bring_up(self, write: bool) -> bool:
        """Check the gradients as they are now, or make true ones; False where there are none. Raises as finalize."""
        grads = self.look()
        if type(self.stage) is Ready:
            if not self.take_external(grads):
                return False
        else:
            self._check_reduced()
        stage = self.stage
        if type(stage) is Scaled:
            self._check(stage, grads, write)
        if write:
            self.unscale()
        return True

    def _check(self, stage: Scaled, grads: Grads, write: bool, has_grads: bool = True) -> None:
        """SCALED to CHECKED or, where true gradients are wanted or some can't wait, to UNSCALED."""
        stamp = GradientStamp(grads) if stage.stamp is None else stage.stamp
        waiting = None
        if write:
            self.gradients.check_and_unscale(grads, stage.scale.inv_scale)
        else:
            waiting = self.gradients.check(grads, stage.scale.inv_scale)
        verdict = Verdict(((stage.scale.scaler, self.gradients.found_inf(self.device)),), has_grads=has_grads)
        if not self.replicas.local:
            verdict = self._noting_norm(verdict, stage.scale.scaler)
        if waiting is None:
            true_stamp = GradientStamp(raw_grads(self.params.masters))
            self.stage = Unscaled(stage.scale, stamp, true_stamp, verdict, losses=stage.losses)
        else:
            self.stage = Checked(stage.scale, stamp, verdict, waiting, losses=stage.losses)

    def unscale(self) -> None:
        """Make true gradients of those that were checked, with the factor of a clip."""
        stage = self.standing
        if type(stage) is not Checked:
            return
        with torch.no_grad():
            self.gradients.unscale(stage.waiting)
        true_stamp = GradientStamp(raw_grads(self.params.masters))
        kept = stage.is_closed, False, stage.is_measured, stage.losses
        made = Unscaled(stage.scale, stage.stamp, true_stamp, stage.verdict, *kept)
        self.stage = self.stage._replace(before=made) if type(self.stage) is Stepping else made

    def update(self) -> None:
        """The door: take the model's gradients as they are now, from any writer, and write true ones to masters."""
        self._end_empty()
        stage = self.stage
        if type(stage) is Ready:
            self.take_external(scaler=self._scaler())
        if type(self.stage) in (Ready, Interrupted, Summed):
            self.look()
            if type(self.stage) is Summed:
                self._refuse_after_unscaling(self.stage)
            self._check_reduced()
            return
        stage = self.stage
        grads = raw_grads(self.params.models)
        if type(stage) is not Scaled:
            self._refuse_after_unscaling(stage)
        if self._are_cleared(grads):
            self.reset(keeps_true=False)
            return
        if type(stage) is Scaled:
            self._check_left_over(stage, grads)
        self._check_reduced()
        scaled = Scaled(self.stage.scale, None, stage.losses)
        self._check(scaled, grads, True)

    def _refuse_after_unscaling(self, stage: Any) -> None:
        """Raise where a GradScaler has unscaled the gradients, which are not read again."""
        if stage.scale.is_told or getattr(stage, "is_divided", False):
            raise errors.UPDATED_AFTER_UNSCALE()

    def _check_reduced(self) -> None:
        if self.waits_for_reduction():
            raise errors.NO_SYNC()

    # -- a master's .grad --------------------------------------------------------------------------------------------

    def before_reading(self, position: int) -> None:
        """``.grad`` of a master is about to be read: true ones are made of all.

        Nothing is done while a step writes, and within autograd. A pre hook of the wrapped optimizer comes before that.

        Args:
            position: of its pair.
        """
        stage = self.stage
        if type(stage) is Stepping:
            if not stage.progress.parts:
                self.unscale()
            return
        if raw_grad(self.params.models[position]) is None:
            self._drop_cleared(stage, raw_grads(self.params.models))
        if type(stage) in (Ready, Scaled, Checked, Summed) and torch._C._current_graph_task_id() == -1:
            with torch.inference_mode(False):
                self._make_readable(self.stage)
        stage = self.stage
        if type(stage) in (Unscaled, Summed) and stage.scale.is_plain:
            reader = sys._getframe(2)
            if reader.f_code.co_name == "_unscale_grads_":  # torch's GradScaler is about to divide them
                self._hand_to_grad_scaler(stage, reader.f_back)

    def _hand_to_grad_scaler(self, stage: Any, asked_by: Any) -> None:
        """torch's GradScaler reads true gradients, to divide them where they lie.

        Raises:
            RuntimeError: a step that an exception has stopped has divided them already.
        """
        if stage.scale.is_told and asked_by is not None and asked_by.f_code.co_name == "unscale_":
            raise errors.UNSCALED_AFTER_A_STOP()
        if not stage.is_divided:
            self.stage = stage._replace(is_divided=True, is_measured=False)

    def _make_readable(self, stage: Any) -> None:
        """Make true gradients, of those that are there for the coming step."""
        if type(stage) is Ready:
            grads = raw_grads(self.params.models)
            is_new = self._units.has(self._scaler()) and (self.has_new() or self._has_zeros(grads))
            if not (is_new and self.take_external(grads)):
                return
        if type(self.stage) is Summed:
            if self.stage.pending or not self._is_there(self.params.masters):
                self.look()
                now: Any = self.stage
                if type(now) is Ready:  # nothing was folded
                    self._make_readable(now)
        elif not self.waits_for_reduction():
            self._bring_up(write=True)

    def before_setting(self, position: int, value: Tensor | None) -> None:
        """``.grad`` of a master is about to be set: the others are made true, so that the edit counts.

        Args:
            position: of its pair.
            value: what it is set to.

        Raises:
            RuntimeError: no gradients wait for a step, and the scale is not 1.
        """
        if torch._C._current_graph_task_id() != -1:
            return
        stage = self.stage
        if type(stage) is Ready:
            if value is None:
                return
            refuse_torch_checkpointing("optimizer state")
            scaler = self._scaler()
            if not self._units.has(scaler):
                raise errors.MASTER_GRADIENT_SET(scale=float(scaler.scale))
            is_new = self.has_new() or self._has_zeros(raw_grads(self.params.models))
            if not is_new or not self.take_external():
                self._take_none(scaler)
                return
        self.before_reading(position)

    def _take_none(self, scaler: LossScaler) -> None:
        """UNSCALED without any gradient: the user is about to give masters theirs."""
        self.gradients.release()
        self.gradients.forget_true()
        none = GradientStamp([None] * len(self.params))
        scale = BackwardScale.of(scaler, is_plain=True)
        verdict = Verdict(((scaler, torch.zeros((), dtype=torch.float32, device=self.device)),))
        self.stage = Unscaled(scale, none, none, verdict)

    # -- what DDP and the faces ask ----------------------------------------------------------------------------------

    def were_cleared(self) -> bool:
        """Whether gradients that were checked have been set to None or to zeros since. Changes nothing.

        Syncs where they were written.
        """
        if type(self.stage) not in (Checked, Unscaled):
            return False
        grads = raw_grads(self.params.models)
        return any(self.stage.stamp.compare(grads)) and are_zero(grads)

    def is_as_stamped(self) -> bool:
        """Whether the stamps tell of no gradient that was written, replaced or set to None since."""
        stage = self.standing
        stamped = (
            (getattr(stage, "stamp", None), self.params.models),
            (
                getattr(stage, "true_stamp", None),
                self.params.masters,
            ),
        )
        return all(stamp is None or not any(stamp.compare(raw_grads(tensors))) for stamp, tensors in stamped)

    def stamp_again(self) -> None:
        """DDP has moved gradients into its buckets: the stamps are of those that are there now, which are the same."""
        stage = self.stage
        now = GradientStamp(raw_grads(self.params.models))
        if type(stage) is Ready and stage.used is not None:
            self.stage = stage._replace(used=now)
        elif getattr(stage, "stamp", None) is not None:
            self.stage = stage._replace(stamp=now)

    def blame(self, scaler: LossScaler, found: Tensor) -> None:
        """Count ``found`` (float32, 0-dim) into what ``scaler``'s backwards gave: it was found in another optimizer."""
        stage = self.stage
        if hasattr(stage, "verdict"):
            mine = dict.fromkeys([one for one, _ in stage.verdict.found])
            known = {id(one): flag for one, flag in stage.verdict.found}
            earlier, found = known.get(id(scaler)), found.to(self.device)
            known[id(scaler)] = found if earlier is None else torch.maximum(earlier, found)
            mine[scaler] = None
            every = tuple((one, known[id(one)]) for one in mine)
            self.stage = stage._replace(verdict=stage.verdict._replace(found=every))

    def last_check(self) -> OverflowCheck | None:
        """What the last check of the coming step's gradients gave; None where there was none. Looks at nothing."""
        verdict = getattr(self.standing, "verdict", None)
        return None if verdict is None or not verdict.found else check_of(verdict)

    # -- clips and edits ---------------------------------------------------------------------------------------------

    def clip(self, factor: Tensor, of: set[int] | None, is_one: bool = False) -> None:
        """Multiply all gradients by ``factor`` (float32, 0-dim), or those of some parameters. No host sync.

        A second factor would be a third rounding, so gradients that wait are made true before one.

        Args:
            is_one: whether the factor is known to be 1: then no memory is touched.
        """
        stage = self.stage
        if type(stage) is Checked and (stage.is_closed or of is not None) and not is_one:
            self.unscale()
            stage = self.stage
        if type(stage) is Checked:
            waiting = stage.waiting
            if not is_one:
                pairs = zip(self.gradients.each, waiting, strict=True)
                waiting = [one.clipped(factor.to(each.one.device)) for each, one in pairs]
            is_measured = stage.is_measured and is_one
            self.stage = stage._replace(waiting=waiting, factor=factor, is_measured=is_measured)
            return
        if not is_one:
            self.gradients.clip_true(factor, of)
        self._close(is_measured=stage.is_measured and is_one)

    def clip_values(self, largest: float, found_inf: Tensor, of: set[int] | None) -> None:
        """Bring every element of true gradients to at most ``largest`` in size. No host sync."""
        self.gradients.clip_values(largest, found_inf, of)
        self._close(is_measured=False)

    def _close(self, is_measured: bool) -> None:
        """True gradients were clipped: no further backward is part of the step."""
        true_stamp = GradientStamp(raw_grads(self.params.masters))
        self.stage = self.stage._replace(is_closed=True, is_measured=is_measured, true_stamp=true_stamp)

    def unscale_external(self, inv_scale: Tensor, in_step: bool = False) -> None:
        """A GradScaler tells its scale: gradients that it has not unscaled are to be multiplied by ``inv_scale``.

        Args:
            inv_scale: float32, 0-dim, any device. Told again, it changes nothing.
            in_step: whether it does so in the step itself.
        """
        stage = self.stage
        if type(stage) is Ready:
            self.take_external(inv_scale=inv_scale, in_step=in_step)
            return
        self.look()
        stage = self.stage
        if type(stage) in (Ready, Interrupted) or stage.scale.is_told:
            return
        told = stage.scale._replace(inv_scale=inv_scale.to(self.device), is_told=True, is_told_in_step=in_step)
        if type(stage) is Scaled:
            self.stage = stage._replace(scale=told)
            return
        self.unscale()  # read before: taken as made at 1
        self.gradients.multiply_true(told.inv_scale)
        true_stamp = GradientStamp(raw_grads(self.params.masters))
        verdict = Verdict(((told.scaler, self.gradients.found_inf(self.device).clone()),))
        self.stage = self.stage._replace(scale=told, true_stamp=true_stamp, verdict=verdict, is_measured=True)
        if type(self.stage) is Summed:
            self.stage = self.stage._replace(flags=tuple(one.clone() for one in self.gradients.flags()))

    # -- FP32 sums: what :class:`.modes.sums.SummingState` does ------------------------------------------------------

    @abc.abstractmethod
    def _new_sums(self, scale: BackwardScale) -> Summed:
        """The stage of sums to which nothing was added yet."""

    @abc.abstractmethod
    def _start_summing(self, stage: Any, grads: Grads) -> Summed:
        """A second scaler joins in: what there is becomes the first sum."""

    @abc.abstractmethod
    def _fold(self, stage: Summed) -> Summed:
        """Add the model's gradients to the sums."""

    @abc.abstractmethod
    def _look_at_sums(self, stage: Summed, grads: Rows) -> Rows:
        """:meth:`look`: fold the last backward, with the user's edits; notice edits of the sums."""

    @abc.abstractmethod
    def _reduce_sums(self, stage: Summed) -> Summed:
        """Average over the ranks what was summed under ``no_sync``."""

    # -- what was found ----------------------------------------------------------------------------------------------

    def flags(self) -> list[Tensor]:
        """By device: int32 bits ``kernels.INF | kernels.NAN`` of each row, which the next pass overwrites. No sync."""
        stage = self.standing
        return list(stage.flags) if type(stage) is Summed else self.gradients.flags()

    def _noting_norm(self, verdict: Verdict, scaler: LossScaler) -> Verdict:
        if not scaler.follows_norms:
            return verdict
        norm = self.gradients.largest_norm(self.device).clone()
        return verdict._replace(untold=(*verdict.untold, (scaler, norm)))

    def _conclude(self, norm_type: float | None, of: set[int] | None, max_norm: float | None) -> OverflowCheck | None:
        """None where no rank has gradients."""
        stage = self.stage
        if type(stage) is Summed and stage.unreduced:
            stage = self._reduce_sums(stage)
        norm = None
        if not self.ranks.alone:
            has_grads, norm = self._agree(norm_type, of, max_norm)
            if not has_grads:
                self.reset(keeps_true=False)
                return None
        elif norm_type is not None:
            norm = self.gradients.norm(norm_type, self.device, stage.is_measured, of)
        self._tell_norms()
        return check_of(self.stage.verdict, norm)

    def _tell_norms(self) -> None:
        """Scalers hear of norms: where masters are spread over ranks, by one message. No host sync."""
        verdict = self.stage.verdict
        if not verdict.untold:
            return
        norms = torch.stack([norm for _, norm in verdict.untold])
        if not self.ranks.alone:
            norms = self.ranks.largest(norms)
        for (scaler, _), norm in zip(verdict.untold, norms.unbind(), strict=True):
            scaler.see(norm)
        self.params.doubt()  # a scaler may be of a class of the user's
        self.stage = self.stage._replace(verdict=verdict._replace(untold=()))

    def _agree(
        self, norm_type: float | None, of: set[int] | None, max_norm: float | None
    ) -> tuple[bool, Tensor | None]:
        """One message for what was found and the norm, at the first of clipping and stepping.

        Returns:
            (whether some rank has gradients, the norm).
        """
        verdict = self.stage.verdict
        if verdict.is_agreed and norm_type is None:
            return True, None
        power = None
        if norm_type is not None:
            counted = self.ranks.counted
            power = self.gradients.power_sum(
                norm_type,
                self.device,
                self.stage.is_measured,
                lambda param: (of is None or id(param) in of) and counted(param),
            )
        mine = [one for _, one in verdict.found]
        asked = Asked(norm_type, max_norm, verdict.turn)
        found, norm, has_grads, origin = self.ranks.agree(mine, asked, power, verdict.has_grads, self.losses)
        every = tuple((scaler, one) for (scaler, _), one in zip(verdict.found, found, strict=True))
        verdict = verdict._replace(found=every, is_agreed=True, turn=verdict.turn + 1, origin=origin)
        self.stage = self.stage._replace(verdict=verdict)
        return verdict.has_grads or bool(has_grads), norm

    # -- the step ----------------------------------------------------------------------------------------------------

    def to_step(self, device: DeviceParams) -> GradsToStep:
        """A device's gradients as a step takes them."""
        stage = self.standing
        found = self.gradients.to_step(device, stage.waiting if type(stage) is Checked else None)
        if not isinstance(found.grads, tuple):
            return found
        is_one = len(self.gradients.each) == 1  # what was seen is of these then, as the stamps told: see :meth:`look`
        return found._replace(grads=Rows(found.grads, self._seen if is_one else None))

    def begin_step(self, check: OverflowCheck, skipped: bool | Tensor, awaited: AwaitedFlag | None) -> Progress:
        """STEPPING: from here on something is written, and a master's ``.grad`` is the tensor that is there."""
        progress = Progress()
        progress.awaited = awaited
        self.stage = Stepping(self.stage, check, skipped, progress)
        return progress

    def due(self) -> list[int]:
        """Positions of the parameters that have a gradient in the step that is writing."""
        stage = self.standing
        if type(stage) is not Checked:
            return [at for at, grad in enumerate(raw_grads(self.params.masters)) if grad is not None]
        rows = zip(self.gradients.each, stage.waiting, strict=True)
        each = [zip(each.device.positions, one.grads, strict=True) for each, one in rows]
        return sorted(at for device in each for at, grad in device if grad is not None)

    def stop_step(self) -> None:
        """Nothing was written: the gradients wait as they did."""
        before = self.stage.before
        if before.scale.is_told_in_step and type(before) is not Summed and not before.is_closed:
            # The GradScaler will tell its scale again, or unscale them itself: they are as the backward left them.
            self.gradients.forget_true()
            self.stage = Scaled(BackwardScale.of(before.scale.scaler, is_plain=True), before.stamp, before.losses)
        else:
            self.stage = before

    # -- the end -----------------------------------------------------------------------------------------------------

    def holds_groups(self) -> bool:
        """Whether param_groups may not change now: between a check and its step, which the user has not given up."""
        stage = self.stage
        if type(stage) is Summed:
            edited = stage.true_stamp.compare(raw_grads(self.params.masters))
            return stage.is_closed or stage.is_divided or stage.scale.is_told or any(edited)
        return type(stage) in (Checked, Unscaled) and not self._are_cleared(raw_grads(self.params.models))

    def require_open(self, strictly: bool = False) -> None:
        """Raise ``RuntimeError`` where parameters are about to change between a check and its step.

        Args:
            strictly: also where the model's gradients were cleared since, as the user asks for the change now.
        """
        if self.holds_groups() or (strictly and type(self.stage) in (Checked, Unscaled)):
            raise errors.GROUPS_CHANGED()

    def follow_params(self, came_from: Sequence[int | None], is_thaw: bool = False) -> None:
        """Parameters or masters came or went.

        Args:
            came_from: by new position, the old one; None for a parameter that came, of which nothing is known.
            is_thaw: all are where they were: those that came have got their master.
        """
        self.gradients.follow_params(keeps=is_thaw)
        if type(self.stage) in (Checked, Unscaled):
            if is_thaw:  # what came later than the check is left alone until the next one
                stamp = self.stage.stamp.moved(came_from, raw_grads(self.params.models))
                self.stage = self.stage._replace(stamp=stamp)
                return
            self.reset(keeps_true=False)
        grads, stage = raw_grads(self.params.models), self.stage
        if type(stage) is Ready and stage.used is not None:
            self.stage = stage._replace(used=stage.used.moved(came_from, [None] * len(grads)))
        elif type(stage) is Scaled:
            stamp = None if stage.stamp is None else stage.stamp.moved(came_from, grads)
            self.stage = stage._replace(stamp=stamp)
        elif type(stage) is Summed:
            true = raw_grads(self.params.masters)
            if is_thaw:
                self.stage = stage._replace(stamp=stage.stamp.moved(came_from, grads))
                return
            flags = tuple(torch.zeros_like(each.stats.nonfinite) for each in self.gradients.each)
            self.stage = stage._replace(
                stamp=stage.stamp.moved(came_from, grads),
                true_stamp=stage.true_stamp.moved(came_from, true),
                flags=flags if stage.flags else (),
            )
            self.gradients.recheck()

    def reset(self, keeps_true: bool = True) -> None:
        """READY: a step has used the gradients, or they were cleared, or are given up.

        Args:
            keeps_true: leave master gradients to be read.
        """
        stage = self.standing
        are_true = type(stage) in (Unscaled, Summed)
        if type(stage) is Summed:
            unmark(self.params.models)
        self.gradients.release(frees=type(stage) is Checked)
        if not keeps_true and (are_true or type(stage) is Ready):
            self.gradients.forget_true()
        stamp = getattr(stage, "stamp", None)
        if stamp is None:
            stamp = GradientStamp(raw_grads(self.params.models))
        self.stage = Ready(stamp, holds_true=are_true and keeps_true)

    def forget(self) -> None:
        """READY: a checkpoint was loaded. Gradients that are incomplete stay so."""
        if type(self.stage) is not Interrupted:
            self.reset(keeps_true=False)

    def clear(self, set_to_none: bool) -> None:
        """Clear the model's and the masters' gradients, and forget what was found in them.

        While a step writes (a hook has called) its stage stays.
        """
        self.gradients.clear(set_to_none)
        if type(self.stage) is Stepping:
            return
        self.gradients.release()
        used = None if set_to_none else GradientStamp(raw_grads(self.params.models), are_zeros=True)
        self.stage = Ready(used, holds_true=False)


def _shared(stage: Any, found: Tensor) -> tuple[tuple[LossScaler, Tensor], ...]:
    """What was found anew in all gradients, for scalers that had found something; else for the last one."""
    last, before = stage.scale.scaler, stage.verdict.found
    if len(before) < 2:
        return ((before[0][0] if before else last, found),)
    none_had = 1.0 - torch.stack([flag for _, flag in before]).amax()
    return tuple(
        (scaler, found * (torch.maximum(flag, none_had) if scaler is last else flag)) for scaler, flag in before
    )


def _any_not_zero(grad: Tensor) -> Tensor:
    """bool, 0-dim: whether this rank's part of a gradient has an element that is not zero. No sync."""
    return _values_of(grad).detach().ne(0).any()


def are_zero(grads: Grads) -> bool:
    """Whether all gradients that are there are zeros. Syncs for each, up to the first that is not."""
    return not any(grad is not None and bool(_any_not_zero(grad)) for grad in grads)


def _values_of(grad: Tensor) -> Tensor:
    return grad._values() if grad.layout is torch.sparse_coo else local(grad)
