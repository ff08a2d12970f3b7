"""StepState: where a step's gradients stand, and every transition from one stage to the next.

``stage`` is the only truth of where a step stands (:mod:`.stage`; docs/engine.md has the table and its rules). What
outlives a step lies beside it: the scaler, the ranks, how many backwards there were.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..kernels.reference_steps import Factors
from ..kernels.tensor_lists import any_there, counted_gradients, set_grads
from ..scaling import LossScaler
from . import errors
from .diagnostics import describe
from .dtensors import any_raw_grad, raw_grads
from .look import Look
from .params import ParamTable
from .passes import Gradients, GradsToStep, are_zero
from .ranks import Asked, Ranks, Replicas
from .stage import (
    BackwardScale,
    Check,
    Checked,
    GradientStamp,
    Grads,
    Interrupted,
    Ready,
    Scaled,
    ScaledBy,
    Unscaled,
    moved,
    refusal_of_writes,
)
from .step import Step


class StepState(abc.ABC):
    """READY -> SCALED (a loss was scaled) -> CHECKED or UNSCALED -> READY (step, zero_grad).

    Backwards with one scale add up in the model's gradients. Where a second scaler joins in, or ``sums`` asks for it,
    each backward is folded into FP32 sums with its own scale.

    Args:
        own_scaler: gives the optimizer's own scaler.
        device: where what was found is kept.
        sums: whether every backward is folded.

    Attributes:
        stage: one of the values of :mod:`.stage`.
        step: that is under way, or that an exception has stopped: the stage is the one whose gradients it steps. None
            between steps.
        ranks: where the masters' other parts are, if any.
        replicas: which ranks share gradients with this one, if any.
        backwards: how many have begun.
        steps: how many were taken or skipped since this was made, which all ranks do alike.
        ahead: how many steps parameters have taken that ``step`` is yet to count: none, but where backward steps them.
    """

    ahead = 0

    def __init__(
        self,
        params: ParamTable,
        gradients: Gradients,
        own_scaler: Callable[[], LossScaler],
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
        self.backwards = self.steps = 0
        self.stage: Any = Ready(backwards=LossScaler.backwards)
        self.step: Step | None = None
        self.own_scaler = own_scaler

    @property
    def is_stepping(self) -> bool:
        """Whether a step of this optimizer is under way, in any thread: a hook has called, or another thread has."""
        return self.step is not None and self.step.runs

    def is_one(self, scaler: LossScaler | None = None) -> bool:
        """Whether a scale, else the own one, is static and exactly 1. Syncs once for each value of a static scale."""
        return (scaler or self.own_scaler()).is_one()

    def counts_plain(self, scaler: LossScaler | None = None) -> bool:
        """Whether new gradients of a plain backward are stepped and read as true ones: at a static scale of 1.

        What a GradScaler divides or tells of, and what the user hands to :meth:`update`, counts at any scale.
        """
        return self.is_one(scaler)

    # -- looking -----------------------------------------------------------------------------------------------------

    def look(self, weights: tuple[Any, ...] | None = None) -> Look:
        """What gradients there are now: see :meth:`.Look.at`."""
        return Look.at(self.params, weights, self.stage.stamp)

    def see(self, look: Look) -> Look:
        """Go on from what became of gradients since their stamps; every call that needs them begins with it.

        Returns:
            What there is then.

        Raises:
            RuntimeError: they are incomplete, or one was written where that does not count.
        """
        stage, grads = self.stage, look.grads.tensors
        if type(stage) is Ready:
            return look
        written, gone = ((), ()) if stage.stamp is None else stage.stamp.compare(look.grads)
        is_untouched = stage.stamp is not None and not (written or gone or stage.stamp.is_empty)
        if not is_untouched and self._are_cleared(grads):
            self.reset(keeps_true=False)
            return look
        if type(stage) is Interrupted:
            if not are_zero(grads):
                raise errors.INTERRUPTED()
            self.reset(keeps_true=False, zeros=grads)
            return look
        if stage.left_over is not None:
            self._check_left_over(stage, grads)
        if stage.is_to_fold:
            self.fold(look)
            return self.look(look.weights)
        if gone:
            self.leave_alone(gone, look)
        # Zeros that DDP still reduces stand in the place of what was folded.
        if written and not (stage.is_sum and are_zero([grads[i] for i in written])):
            if stage.is_sum or not (stage.stamp.are_of(written, grads) and are_zero(grads)):
                raise refusal_of_writes(
                    stage, self.params.names_of(written), [grads[i] for i in written], self.replicas
                )
            self.reset(keeps_true=False, zeros=grads)
            return look
        if type(stage) is Unscaled:
            self._notice_edits(self.stage)
        return look

    def _any_there(self, grads: Grads) -> bool:
        return any_there(grads) or any_raw_grad(self.params.elsewhere)

    def _are_cleared(self, grads: Grads) -> bool:
        """Whether all gradients were set to None since."""
        stage = self.stage
        if self._any_there(grads) or (stage.check is not None and not stage.check.has_grads):
            return False  # in the second case there were none: other ranks had some
        is_set = type(stage) is Unscaled and stage.stamp.is_empty  # the user has, on masters
        return not (is_set and any_raw_grad(self.params.masters))

    def _check_left_over(self, stage: Any, grads: Grads) -> None:
        """Raise where a loss was scaled over gradients of an earlier step, and one of them is still there."""
        left = stage.left_over.among(grads)
        if left:
            raise errors.NOT_CLEARED(names=self.params.names_of(left))
        self.stage = stage._replace(left_over=None)

    def leave_alone(self, gone: list[int], look: Look) -> None:
        """Gradients that were set to None are not part of the step: the others are measured again."""
        stage = self.stage._replace(stamp=self.stage.stamp.without(gone))
        if type(stage) is Checked:
            self.gradients.check(look, stage.scale.inv_scale)
            stage = stage._replace(check=self._found_anew(stage), is_measured=stage.factor is None)
        elif type(stage) is Unscaled:
            set_grads([self.params.masters[at] for at in gone], None)
            self.gradients.measure()
            true_stamp = stage.true_stamp.without(gone)  # which is no edit
            stage = stage._replace(true_stamp=true_stamp, check=self._found_anew(stage), is_measured=True)
        self.stage = stage

    def _notice_edits(self, stage: Unscaled) -> None:
        """Master gradients that were edited count: they are checked anew, like those that a GradScaler divides."""
        masters = raw_grads(self.params.masters)
        is_edited = any(stage.true_stamp.compare(masters))
        was_divided = stage.scale.by is ScaledBy.DIVIDED and not (stage.is_measured or stage.is_closed)
        if not (is_edited or was_divided):
            return
        self.gradients.measure()
        check = self._found_anew(stage._replace(check=stage.check._replace(is_agreed=False)))
        self.stage = stage._replace(
            true_stamp=GradientStamp(masters),
            is_closed=stage.is_closed or is_edited,
            is_measured=True,
            check=self._with_norm(check, stage.scale.scaler),
        )

    def _found_anew(self, stage: Any) -> Check:
        """What the last pass over the gradients of a stage has found."""
        found = self.gradients.found_inf(self.device).clone()
        made: Check = stage.check.found_anew(found, stage.scale.scaler)
        return made

    # -- backwards ---------------------------------------------------------------------------------------------------

    def begin_backward(
        self, look: Look, scaler: LossScaler, may_clear: bool = False, losses: tuple[Tensor, ...] = ()
    ) -> BackwardScale:
        """A backward with ``scaler``'s present scale is about to add to the model's gradients.

        Args:
            may_clear: the user runs it: gradients of an earlier step raise later, if they are still there.
            losses: unscaled, where they are single numbers.

        Raises:
            RuntimeError: gradients are incomplete, were written, were clipped or edited, or are of another scale.
        """
        self._end_empty()
        look = self.see(look)
        stage = self.stage
        if stage.is_closed:
            raise errors.UNDONE(call="backward", what=errors.EDITED)
        if stage.scale is not None and stage.scale.by.is_grad_scaler:
            raise errors.UNDONE(call="backward", what=errors.UNSCALED)
        left_over, sums = stage.left_over, None
        if type(stage) is Ready:
            left_over = self._left_over(stage, look, scaler, may_clear)
        elif stage.is_sum or not stage.scale.is_current(scaler):
            sums = self.sum_up(look)
        scale: BackwardScale | None = self.stage.scale
        if scale is None or scale.by is not ScaledBy.ENGINE or not scale.is_current(scaler):
            scale = BackwardScale.of(scaler)
        if sums is None and stage.holds_true:
            self.gradients.forget_true()
        is_to_fold = self.sums or sums is not None
        self.stage = Scaled(scale, None, (*self.stage.losses, *losses), left_over, sums, may_clear, is_to_fold)
        self.backwards += 1
        scaler.begin_backward()
        return scale

    def _left_over(self, stage: Ready, look: Look, scaler: LossScaler, may_clear: bool) -> GradientStamp | None:
        """Rule 5: gradients that are there when the first backward of a step begins; None where they may stay."""
        if self.is_one(scaler) or stage.has_zeros(look.grads):
            return None
        left = self.gradients.not_zero(look.grads.tensors, self.ranks)
        if not left:
            return None
        if self.sums or not may_clear:
            raise errors.NOT_CLEARED(names=describe(left))
        return GradientStamp(look.grads)

    def end_backward(self, stamp: bool) -> None:
        """A backward is over.

        Args:
            stamp: remember its gradients, so that an edit is noticed, and fold them into sums where there are any.
                Without it they are the user's until the next call.
        """
        if self.stage.is_to_fold:
            if stamp:
                self.fold(self.look())
        elif stamp and type(self.stage) is Scaled and not self.replicas.local:  # else a later backward reduces them
            self.stage = self.stage._replace(stamp=GradientStamp(counted_gradients(self.params.models)))

    def reopen(self) -> Check | None:
        """SCALED again where true gradients were made, and are as they were made: for faces that make them at once.

        What comes then is part of the step, and the next check finds anew what is in the gradients.

        Returns:
            What was found in them; None where the stage stays as it is.
        """
        if type(self.stage) is Unscaled:
            self.see(self.look())
        stage = self.stage
        if type(stage) is not Unscaled or stage.is_sum or stage.is_closed or stage.scale.by is ScaledBy.DIVIDED:
            return None
        self.gradients.forget_true()
        self.stage = Scaled(stage.scale, stage.stamp, stage.losses, is_to_fold=self.sums)
        return stage.check

    def interrupt(self) -> None:
        """A backward raised while gradients were being added up."""
        self.gradients.forget_true()
        self.stage = Interrupted()

    def waits_for_reduction(self) -> bool:
        """Whether gradients were made under DDP's no_sync, and are to be reduced by a later backward."""
        return self.replicas.local and not (self.stage.is_to_fold or self.stage.is_sum)

    def waits_for_step(self) -> bool:
        """Whether gradients do. READY where they were cleared, in whatever way: an abandoned batch."""
        if type(self.stage) is not Ready and self._are_cleared(raw_grads(self.params.models)):
            self.reset(keeps_true=False)
        return type(self.stage) is not Ready

    # -- gradients that came without backward(loss) ------------------------------------------------------------------

    def take_external(
        self,
        look: Look,
        scaler: LossScaler | None = None,
        inv_scale: Tensor | None = None,
        by: ScaledBy = ScaledBy.USER,
    ) -> bool:
        """In READY, take the gradients that are there as made by a plain backward.

        Args:
            scaler: the user says that they were scaled by its present scale. None: by the own one, if that is 1.
            inv_scale: float32, 0-dim: what a GradScaler would multiply them by. None: 1 / the scale of ``scaler``.

        Returns:
            Whether there are any.

        Raises:
            RuntimeError: they were not scaled, and the own scale is not 1.
        """
        stage = self.stage
        if type(stage) is not Ready or not self._any_there(look.grads.tensors):
            return False
        is_known, scaler = scaler is not None or inv_scale is not None, scaler or self.own_scaler()
        counts = is_known or self.counts_plain(scaler)
        if not counts and (named := self.gradients.not_zero(look.grads.tensors, self.ranks)):
            raise errors.NOT_OF_THIS_STEP(scale=float(scaler.scale), names=describe(named))
        scale = BackwardScale.of(scaler, by)
        if inv_scale is not None:
            scale = scale._replace(inv_scale=inv_scale.to(self.device))
        if stage.holds_true:
            self.gradients.forget_true()
        self.gradients.release()
        self.stage = Scaled(scale, is_to_fold=self.sums)
        return True

    def has_new(self) -> bool:
        """In READY: whether the model has gradients that no step has used, and that are no zeros of ``zero_grad``."""
        return type(self.stage) is Ready and self.stage.has_new(raw_grads(self.params.models))

    def tell(self, look: Look, inv_scale: Tensor, by: ScaledBy) -> None:
        """A GradScaler tells its scale: gradients that it has not unscaled are to be multiplied by ``inv_scale``.

        Args:
            inv_scale: float32, 0-dim, any device. Told again, it changes nothing.
            by: TOLD, or TOLD_IN_STEP.
        """
        if self.take_external(look, inv_scale=inv_scale, by=by):
            return
        look = self.see(look)
        stage = self.stage
        if type(stage) in (Ready, Interrupted) or stage.scale.by.is_told:
            return
        told = stage.scale._replace(inv_scale=inv_scale.to(self.device), by=by)
        if type(stage) is Scaled:
            self.stage = stage._replace(scale=told)
            return
        self.unscale(look)  # read before: taken as made at 1
        self.gradients.measure(told.inv_scale)
        check = Check(((told.scaler, self.gradients.found_inf(self.device).clone()),))
        self.stage = self.stage._replace(
            scale=told, true_stamp=GradientStamp.of(self.params.masters), check=check, is_measured=True
        )

    # -- the check ---------------------------------------------------------------------------------------------------

    def finalize(
        self,
        look: Look,
        write: bool = False,
        norm_type: float | None = None,
        of: set[int] | None = None,
        max_norm: float | None = None,
    ) -> Check | None:
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
        write = write or (norm_type is not None and (norm_type != 2.0 or of is not None))
        if not self.bring_up(look, write):
            if self.ranks.alone:
                return None
            self.gradients.release()  # other ranks may have gradients, and expect what this one has found
            self._check(Scaled(BackwardScale.of(self.own_scaler())), look, write, has_grads=False)
        if norm_type is not None and not self.stage.is_measured:  # after a clip
            self.unscale(look)
        if self.stage.unreduced:
            self.reduce()
        if not self.ranks.alone:
            return self._agree(norm_type, of, max_norm)
        check: Check = self.stage.check
        if norm_type is None:
            return check
        return check._replace(norm=self.gradients.norm(norm_type, self.device, self.stage.is_measured, of))

    def bring_up(self, look: Look, write: bool) -> bool:
        """Check the gradients as they are now, or make true ones; False where there are none. Raises as finalize."""
        look = self.see(look)
        if type(self.stage) is Ready:
            if not self.take_external(look):
                return False
        elif self.waits_for_reduction():
            raise errors.NO_SYNC()
        if type(self.stage) is Scaled:
            self._check(self.stage, look, write)
        if write:
            self.unscale(look)
        return True

    def _check(self, stage: Scaled, look: Look, write: bool, has_grads: bool = True) -> None:
        """SCALED to CHECKED or, where true gradients are wanted or kernels can't step some, to UNSCALED."""
        if stage.is_to_fold:
            self.fold(look)
            return
        stamp = GradientStamp(look.grads) if stage.stamp is None else stage.stamp
        is_checked = not write and self.gradients.check(look, stage.scale.inv_scale)
        if not is_checked:
            self.gradients.write(look, stage.scale.inv_scale)
        check = Check(((stage.scale.scaler, self.gradients.found_inf(self.device)),), has_grads=has_grads)
        if not self.replicas.local:
            check = self._with_norm(check, stage.scale.scaler)
        if is_checked:
            self.stage = Checked(stage.scale, stamp, check, stage.losses)
        else:
            self.stage = Unscaled(stage.scale, stamp, GradientStamp.of(self.params.masters), check, stage.losses)

    def _with_norm(self, check: Check, scaler: LossScaler) -> Check:
        """With the largest norm of the last pass, where the scaler follows norms."""
        if not scaler.follows_norms:
            return check
        return check._replace(norms=(*check.norms, (scaler, self.gradients.largest_norm(self.device).clone())))

    def unscale(self, look: Look) -> None:
        """UNSCALED: make true gradients of those that were checked, with the factor of a clip."""
        stage = self.stage
        if type(stage) is not Checked:
            return
        self.gradients.write(look, stage.scale.inv_scale, stage.factor, checked=True)
        kept = stage.is_closed, stage.is_measured
        self.stage = Unscaled(
            stage.scale, stage.stamp, GradientStamp.of(self.params.masters), stage.check, stage.losses, *kept
        )

    def update(self, look: Look) -> None:
        """The door: take the model's gradients as they are now, from any writer, and write true ones to masters."""
        self._end_empty()
        scaler, stage = self.own_scaler(), self.stage
        # The user has, or another optimizer's backward with this scaler; one with another scaler tells no scale.
        # At a static scale of 1 it does not matter whose it was.
        is_known = type(stage) is Ready and (
            self.is_one() or scaler.last_backward > stage.backwards or LossScaler.backwards == stage.backwards
        )
        self.take_external(look, scaler if is_known else None)
        if type(self.stage) in (Ready, Interrupted) or self.stage.is_to_fold or self.stage.is_sum:
            self.see(look)
        if type(self.stage) in (Checked, Unscaled) and self.stage.scale.by.is_grad_scaler:
            raise errors.UNDONE(call="update_master_grads()", what=errors.UNSCALED)
        if self.waits_for_reduction():
            raise errors.NO_SYNC()
        if self.stage.is_sum:
            self.stage = self.stage._replace(is_asked=True)
            return
        if type(self.stage) is Ready:
            return
        if self._are_cleared(look.grads.tensors):
            self.reset(keeps_true=False)
            return
        if self.stage.left_over is not None:
            self._check_left_over(self.stage, look.grads.tensors)
        self._check(Scaled(self.stage.scale, None, self.stage.losses), look, write=True)

    def _end_empty(self) -> None:
        """READY where gradients are about to come and this rank had none: other ranks have begun anew too."""
        check = self.stage.check
        if check is not None and not check.has_grads:
            self.reset(keeps_true=False)

    def _agree(self, norm_type: float | None, of: set[int] | None, max_norm: float | None) -> Check | None:
        """One message for what was found and the norm, at the first of clipping and stepping; None: no rank has any."""
        check: Check = self.stage.check
        if check.is_agreed and norm_type is None:
            return check
        power = None
        if norm_type is not None:
            power = self.gradients.power_sum(norm_type, self.device, self.stage.is_measured, of, self.ranks)
        asked = Asked(norm_type, max_norm, check.turn, self.steps, check.has_grads)
        agreed = self.ranks.agree([one for _, one in check.found], asked, power, self.stage.losses)
        check = check.over(self.ranks, agreed)
        self.stage = self.stage._replace(check=check)
        if not (check.has_grads or bool(agreed.has_grads)):
            self.reset(keeps_true=False)
            return None
        return check._replace(norm=agreed.norm)

    # -- what DDP and the faces ask ----------------------------------------------------------------------------------

    def blame(self, scaler: LossScaler, found: Tensor) -> None:
        """Count ``found`` (float32, 0-dim) into what ``scaler``'s backwards gave: it was found in another optimizer."""
        check = self.stage.check
        if check is not None:
            self.stage = self.stage._replace(check=check.with_found(scaler, found.to(self.device)))

    # -- clips and edits ---------------------------------------------------------------------------------------------

    def clip(self, look: Look, factor: Tensor, of: set[int] | None, is_one: bool = False) -> None:
        """Multiply all gradients by ``factor`` (float32, 0-dim), or those of some parameters. No host sync.

        A second factor would be a third rounding, so gradients that wait are made true before one.

        Args:
            is_one: whether the factor is known to be 1: then no memory is touched.
        """
        stage = self.stage
        if type(stage) is Checked and stage.factor is None and of is None:
            self.stage = stage._replace(factor=factor, is_measured=is_one)
            return
        if not is_one:
            self.unscale(look)
            self.gradients.clip(factor, of)
        self.close(is_measured=self.stage.is_measured and is_one)

    def close(self, is_measured: bool) -> None:
        """Gradients were clipped: no further backward is part of the step."""
        if type(self.stage) is Unscaled:
            self.stage = self.stage._replace(
                is_closed=True, is_measured=is_measured, true_stamp=GradientStamp.of(self.params.masters)
            )

    # -- FP32 sums: what :class:`.modes.sums.SummingState` does ------------------------------------------------------

    @abc.abstractmethod
    def sum_up(self, look: Look) -> Unscaled:
        """A second scaler joins in, or a further backward: what there is, as sums."""

    @abc.abstractmethod
    def fold(self, look: Look) -> None:
        """UNSCALED: add the model's gradients to the sums."""

    @abc.abstractmethod
    def reduce(self) -> None:
        """Average over the ranks what was summed under ``no_sync``."""

    # -- the step ----------------------------------------------------------------------------------------------------

    def to_step(self, look: Look, place: int) -> GradsToStep:
        """What a step of the device at ``place`` takes: the look's gradients, still scaled, or the true ones."""
        stage, each = self.stage, self.gradients.each[place]
        if type(stage) is not Checked:
            return GradsToStep(each.true_values(), Factors(each.one, each.one), each.first_sparse())
        factor = each.one if stage.factor is None else stage.factor.to(each.one.device)
        return GradsToStep(look.rows[place], Factors(stage.scale.inv_scale.to(each.one.device), factor))

    def stop_step(self) -> None:
        """A step has written nothing: the gradients wait as they did.

        A GradScaler that has told its scale in that step will tell it again, or unscale them itself: they are as the
        backward left them, but for clipped and edited ones, and sums.
        """
        stage = self.stage
        is_told = stage.scale is not None and stage.scale.by is ScaledBy.TOLD_IN_STEP
        if is_told and not (stage.is_sum or stage.is_closed):
            self.gradients.forget_true()
            scale = BackwardScale.of(stage.scale.scaler, ScaledBy.USER)
            self.stage = Scaled(scale, stage.stamp, stage.losses, is_to_fold=self.sums)

    # -- the end -----------------------------------------------------------------------------------------------------

    def holds_groups(self) -> bool:
        """Whether param_groups may not change now: after a check or over FP32 sums that the user has not given up."""
        waits = type(self.stage) in (Checked, Unscaled) or self.stage.sums is not None
        return waits and not self._are_cleared(raw_grads(self.params.models))

    def require_open(self, strictly: bool = False) -> None:
        """Raise ``RuntimeError`` where parameters are about to change between a check and its step.

        Args:
            strictly: also where the model's gradients were cleared since, as the user asks for the change now.
        """
        is_checked = type(self.stage) in (Checked, Unscaled) and not self.stage.is_sum
        if self.holds_groups() or (strictly and is_checked):
            raise errors.GROUPS_CHANGED()

    def follow_params(self, came_from: Sequence[int | None], is_thaw: bool = False) -> None:
        """Parameters or masters came or went.

        Args:
            came_from: by new position, the old one; None for a parameter that came, of which nothing is known.
            is_thaw: all are where they were: those that came have got their master. What thaws between a check and its
                step waits for the next one.
        """
        self.gradients.follow_params(keeps=is_thaw)
        if type(self.stage) is Checked and is_thaw:
            self.unscale(self.look().without(self.params, [at for at, old in enumerate(came_from) if old is None]))
        stage = self.stage
        if type(stage) in (Checked, Unscaled) and not is_thaw:
            self.reset(keeps_true=False)
        else:
            now = [None] * len(self.params) if type(stage) is Ready else raw_grads(self.params.models)
            self.stage = moved(stage, came_from, now)

    def reset(self, keeps_true: bool = True, zeros: Grads | None = None) -> None:
        """READY: a step has used the gradients, or they were cleared, or are given up.

        Args:
            keeps_true: leave master gradients to be read.
            zeros: what the model's gradients are now, where they were cleared to zeros.
        """
        stage = self.stage
        self.gradients.release(frees=type(stage) is Checked)
        if not keeps_true:
            self.gradients.forget_true()
        stamp = stage.stamp if zeros is None else GradientStamp(zeros)
        if stamp is None:
            stamp = GradientStamp.of(self.params.models)
        holds_true = type(stage) is Unscaled and keeps_true
        self.stage = Ready(stamp, zeros is not None, holds_true, LossScaler.backwards)

    def given_up(self) -> Check | None:
        """What a call of the user's has found in gradients that are given up now.

        None where none has, the model has cleared them, a GradScaler decides, or not all ranks have heard of it.
        """
        stage = self.stage
        if not stage.is_checked or stage.scale.by.is_grad_scaler:
            return None
        look = self.look()
        written, gone = stage.stamp.compare(look.grads)
        if self._are_cleared(look.grads.tensors) or (written and are_zero(look.grads.tensors)):
            return None
        if gone:
            self.leave_alone(gone, look)
        if type(stage) is Unscaled:
            self._notice_edits(self.stage)
        check: Check = self.stage.check
        return check if self.ranks.alone or check.is_agreed else None

    def forget(self) -> None:
        """READY: a checkpoint was loaded, by all ranks. Gradients that are incomplete stay so."""
        self.steps = 0
        if type(self.stage) is not Interrupted:
            self.reset(keeps_true=False)
            if self.is_one():  # what is left adds up with the next ones there, so it is as new
                self.stage = self.stage._replace(stamp=None)

    def clear(self, set_to_none: bool) -> None:
        """Clear the model's and the masters' gradients, and forget what was found in them.

        In a step (a hook has called) its stage stays.
        """
        self.gradients.clear(set_to_none)
        if self.step is not None:
            return
        self.gradients.release()
        zeros = None if set_to_none else GradientStamp.of(self.params.models)
        self.stage = Ready(zeros, zeros is not None, False, LossScaler.backwards)
