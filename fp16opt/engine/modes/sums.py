"""FP32 sums of gradients: every backward is folded into its masters' ``.grad``, by its own scale, and freed.

``grad_accumulation="fp32"`` asks for it, and so do several loss scales in one step. Sums are the stage Unscaled; what
waits to be added to them is Scaled.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ... import kernels
from ...kernels import reference
from ...kernels.tensor_lists import any_grad, any_there
from ...scaling import LossScaler
from .. import errors
from ..dtensors import raw_grad, raw_grads, set_raw_grad
from ..folded import FoldedGradient, is_folded, takes_place, unmark
from ..gradients import StepState
from ..look import Look
from ..params import HALF_DTYPES, DeviceParams
from ..passes import DeviceGradients, NamingChanges
from ..stage import BackwardScale, Check, GradientStamp, Grads, Scaled, Unscaled


class SummingState(StepState):
    """The engine's :class:`~fp16opt.engine.gradients.StepState`, with what folds gradients into FP32 sums."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._marks: dict[int, FoldedGradient] = {}  # by id of the pair: what stands in .grad of its model

    def begin_backward(
        self, look: Look, scaler: LossScaler, may_clear: bool = False, losses: tuple[Tensor, ...] = ()
    ) -> BackwardScale:
        """See :meth:`.StepState.begin_backward`. What stands for sums makes way where the engine itself runs it."""
        if self.sums:
            self._check_can_sum()
        scale = super().begin_backward(look, scaler, may_clear, losses)
        if self.stage.is_to_fold and not may_clear:
            unmark(self.params.models)
            for mark in self._marks.values():
                mark.made_way = True
        return scale

    def end_backward(self, stamp: bool) -> None:
        """See :meth:`.StepState.end_backward`. Without a stamp what stands for sums comes back, to be cleared."""
        super().end_backward(stamp)
        if self.stage.is_to_fold and self.stage.sums is not None and not stamp:
            self._mark([grad is None for grad in raw_grads(self.params.models)])
            self.stage = self.stage._replace(may_be_cleared=True)

    def _check_can_sum(self) -> None:
        if self.params.halves_stepped:
            raise RuntimeError(
                "a further loss scale in one step: gradients of several scales add up in FP32, and "
                'master_weights="none" has no FP32 masters. Use master_weights="full", or one scaler.'
            )
        if not (self.replicas.are_told or self.params.has_dtensors):  # FSDP2 shows gradients that are reduced
            refuse_ranks()

    def _are_cleared(self, grads: Grads) -> bool:
        """Among several ranks, where DDP moves gradients by itself, what is gone says nothing of sums."""
        if self.stage.is_to_fold and self.stage.sums is not None and _count_of_ranks() > 1:
            return not (self._any_there(grads) or any_grad(self.params.masters))
        return super()._are_cleared(grads)

    def leave_alone(self, gone: list[int], look: Look) -> None:
        """As ever; but of sums among several ranks."""
        if not self.stage.is_sum or _count_of_ranks() == 1:
            super().leave_alone(gone, look)

    def sum_up(self, look: Look) -> Unscaled:
        """What there is, as sums."""
        stage: Any = self.stage
        if not self.stage.is_sum:
            self._check_can_sum()
            if any(pair.has_master and pair.master.dtype in HALF_DTYPES for pair in self.params.all):
                raise RuntimeError(
                    'several loss scales in one step are added up in FP32, and master_weights="none" has no place for '
                    "it. Use one scaler a step, or masters."
                )
        if type(stage) is Unscaled and not stage.is_sum:
            if self.waits_for_reduction():
                raise errors.NO_SYNC()
            self._free()
            check = stage.check._replace(found=tuple((one, flag.clone()) for one, flag in stage.check.found))
            stamp = GradientStamp.of(self.params.models)
            check = check._replace(is_agreed=False)
            self.stage = stage._replace(stamp=stamp, check=check, unreduced=frozenset())
        elif type(stage) is not Unscaled:
            self.stage = Scaled(stage.scale, None, stage.losses, is_to_fold=True)
            self.fold(look)
        summed: Unscaled = self.stage
        return summed

    def fold(self, look: Look) -> None:
        """UNSCALED: add the model's gradients to the sums."""
        if self.replicas.local and self.params.elsewhere:
            raise RuntimeError(
                "FP32 sums under DDP's no_sync need every master on every rank; ZeroRedundancyOptimizer spreads them. "
                'Use grad_accumulation="model", or leave no_sync.'
            )
        stage: Scaled = self.stage
        sums, scaler = stage.sums, stage.scale.scaler
        if sums is not None and sums.unreduced and not self.replicas.local:
            self.stage = sums
            self.reduce()
            sums = self.stage
        grads = [None if is_folded(grad) else grad for grad in look.grads.tensors]
        if stage.may_be_cleared and sums is not None:
            sums = self._without_given_up(sums, look)
        with NamingChanges(self.params), torch.inference_mode(False), torch.no_grad():
            if sums is None:
                self.gradients.forget_true()
                for each in self.gradients.each:
                    each.stats.reset()
            for each in self.gradients.each:
                _fold(each, [grads[at] for at in each.device.positions], stage.scale.inv_scale.to(each.one.device))
        self._free()
        found = self.gradients.found_inf(self.device).clone()
        check = Check(((scaler, found),)) if sums is None else sums.check.with_found(scaler, found)
        check = check._replace(is_agreed=False)
        unreduced = frozenset() if sums is None or sums.unreduced is None else sums.unreduced
        if self.replicas.local:  # other ranks hear of it when the sums are averaged
            unreduced |= {id(scaler)}
        else:
            check = self._with_norm(check, scaler)
        stamps = GradientStamp.of(self.params.models), GradientStamp.of(self.params.masters)
        self.stage = Unscaled(stage.scale, *stamps, check, stage.losses, unreduced=unreduced)

    def _without_given_up(self, sums: Unscaled, look: Look) -> Unscaled:
        """Sums without those of which the user has cleared what stood in their place, before the backward or after."""
        gone = []
        for at, (pair, grad) in enumerate(zip(self.params.all, look.grads.tensors, strict=True)):
            mark = self._marks.get(id(pair))
            if mark is not None and not is_folded(grad) and (grad is None or not mark.made_way):
                gone.append(at)
        if gone:
            self.stage = sums
            self.leave_alone(gone, look)
            sums = self.stage
        return sums

    def _free(self) -> None:
        """The model's gradients are in the sums, so that 16-bit ones are freed."""
        keeps = self.replicas.keeps
        for tensor in (*self.params.models, *self.params.elsewhere):
            grad = raw_grad(tensor)
            if grad is not None and keeps and not is_folded(grad):
                grad.zero_()  # DDP still reduces it
            else:
                set_raw_grad(tensor, None)
        if not keeps and _count_of_ranks() == 1:  # DDP's reducer moves gradients by itself
            self._mark([True] * len(self.params))

    def _mark(self, at: list[bool]) -> None:
        """At these positions what stands in the place of a sum's gradients refuses to be used."""
        for pair, sum_, is_due in zip(self.params.all, raw_grads(self.params.masters), at, strict=True):
            if is_due and pair.has_master and sum_ is not None and takes_place(pair.model):
                if id(pair) not in self._marks:
                    self._marks[id(pair)] = FoldedGradient(pair.model, pair.name)
                self._marks[id(pair)].made_way = False
                set_raw_grad(pair.model, self._marks[id(pair)])

    def reduce(self) -> None:
        """Average over the ranks what was summed under ``no_sync``."""
        stage: Unscaled = self.stage
        found = list(stage.check.found)
        mine = [place for place, (scaler, _) in enumerate(found) if id(scaler) in (stage.unreduced or ())]
        flags = self.replicas.reduce(self, [found[place][1] for place in mine])  # in one order on all ranks
        check = stage.check
        for place, one in zip(mine, flags, strict=True):
            scaler, earlier = found[place]
            found[place] = scaler, torch.maximum(earlier, one.to(earlier.device))
            check = self._with_norm(check, scaler)
        true_stamp = GradientStamp.of(self.params.masters)
        self.stage = stage._replace(
            true_stamp=true_stamp, check=check._replace(found=tuple(found)), unreduced=frozenset()
        )

    def reset(self, keeps_true: bool = True, zeros: Grads | None = None) -> None:
        """READY: what stands for sums is taken away."""
        if self.stage.is_sum or self.stage.is_to_fold:
            unmark(self.params.models)
        self._marks.clear()
        super().reset(keeps_true, zeros)

    def clear(self, set_to_none: bool) -> None:
        """As ever; what stood for sums refers to parameters, which torch could not swap."""
        super().clear(set_to_none)
        self._marks.clear()

    # -- what ranks average: :class:`.ranks.Sums` --------------------------------------------------------------------

    def sums_by_device(self) -> Iterator[tuple[DeviceParams, list[Tensor | None]]]:
        """By device: the sums so far, by row. Raises TypeError where one is sparse."""
        for each in self.gradients.each:
            values = raw_grads(each.masters)
            for pair, value in zip(each.pairs, values, strict=True):
                if value is not None and value.layout is not torch.strided:
                    raise TypeError(
                        f"parameter {pair.name!r}: expected a dense gradient, got {value.layout}: sparse gradients "
                        "made under no_sync can't be averaged over ranks. Leave no_sync, or use sparse=False."
                    )
            yield each.device, values

    def put_sum(self, device: DeviceParams, row: int, value: Tensor) -> Tensor:
        """Overwrite the sum of a row, or begin one; returns the tensor that holds it."""
        each = self._of(device)
        there = raw_grad(each.masters[row])
        if there is None:
            there = each.room(row)
            set_raw_grad(each.masters[row], there)
        return there.copy_(value)  # type: ignore[no-any-return]

    def averaged(self, device: DeviceParams, stats: kernels.GradStats) -> None:
        """The sums of a device are averages over ranks now, in which a pass has found ``stats``."""
        mine = self._of(device).stats
        mine.nonfinite |= stats.nonfinite
        mine.sumsq.copy_(stats.sumsq)
        reference.finish(mine)

    def _of(self, device: DeviceParams) -> DeviceGradients:
        return next(each for each in self.gradients.each if each.device is device)


def _fold(each: DeviceGradients, grads: Grads, inv_scale: Tensor) -> None:
    """Add one device's gradients to the sums that its masters hold; ``found_inf`` is then of these alone."""
    stats, before = each.stats, raw_grads(each.masters)
    earlier = stats.nonfinite.clone()
    stats.nonfinite.zero_()
    stats.found_inf.zero_()
    stats.touched = True
    laid = each.lay_out(grads, before)
    adds = [place is not None and place is sum_ for place, sum_ in zip(laid.places, before, strict=True)]
    if any_there(laid.ins):
        kernels.multi_tensor_unscale(laid.ins, laid.outs, inv_scale, stats, accumulate=adds if any(adds) else False)
    measures_anew = False
    for master, made, sum_ in zip(each.masters, each.placed(laid), before, strict=True):
        if made is not None:
            if sum_ is not None and made is not sum_:
                made, measures_anew = sum_ + made, True
            set_raw_grad(master, made)
    if measures_anew:
        flags, found = stats.nonfinite.clone(), stats.found_inf.clone()
        each.measure()
        stats.nonfinite.copy_(flags)
        stats.found_inf.copy_(found)
    stats.nonfinite |= earlier


def _count_of_ranks() -> int:
    """Of the process group; 1 where there is none."""
    dist = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available() or not dist.is_initialized():
        return 1
    return int(dist.get_world_size())


def refuse_ranks() -> None:
    """Raise where gradients are about to be folded into FP32 sums that DDP might never reduce."""
    ranks = _count_of_ranks()
    if ranks > 1:
        raise errors.SUMS_IN_A_GROUP(ranks=ranks)
