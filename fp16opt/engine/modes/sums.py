"""FP32 sums of gradients: every backward is folded into its masters' ``.grad``, by its own scale, and freed.

``grad_accumulation="fp32"`` asks for it, and so do several loss scales in one step.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ... import kernels
from ...kernels import reference
from ...kernels.readings import Rows
from ...scaling import LossScaler
from .. import errors
from ..dtensors import local, raw_grad, raw_grads, set_raw_grad
from ..folded import is_folded
from ..gradients import DeviceGradients, Gradients, NamingChanges, drop_gradients, judge, round_to, sparse_like
from ..params import DeviceParams
from ..stage import BackwardScale, Summed, Unscaled
from ..stamps import GradientStamp
from ..step_state import Grads, StepState, are_zero


class SummingState(StepState):
    """The engine's :class:`~fp16opt.engine.step_state.StepState`, with what folds gradients into FP32 sums."""

    def _new_sums(self, scale: BackwardScale) -> Summed:
        """The stage of sums to which nothing was added yet."""
        self._check_can_sum()
        for each in self.gradients.each:
            each.stats.reset()
        none = GradientStamp([None] * len(self.params))
        return Summed(scale, none, none, pending=False)

    def _check_can_sum(self) -> None:
        if not (self.replicas.are_told or self.params.has_dtensors):  # FSDP2 shows gradients that are reduced
            refuse_ranks()

    def _start_summing(self, stage: Any, grads: Grads) -> Summed:
        """A second scaler joins in: what there is becomes the first sum."""
        self._check_can_sum()
        if type(stage) is Unscaled:
            self._check_reduced()
            found = tuple((scaler, one.clone()) for scaler, one in stage.verdict.found)
            flags = tuple(one.clone() for one in self.gradients.flags())
            drop_gradients([*self.params.models, *self.params.elsewhere])
            stamp = GradientStamp(raw_grads(self.params.models))
            verdict = stage.verdict._replace(found=found, is_agreed=False)
            made = Summed(stage.scale, stamp, stage.true_stamp, False, verdict, flags, losses=stage.losses)
            self.stage = made
            return made
        self.stage = self._new_sums(stage.scale)._replace(pending=True, losses=stage.losses)
        return self._fold(self.stage)

    def _fold(self, stage: Summed) -> Summed:
        """Add the model's gradients to the sums."""
        if self.replicas.local and self.params.elsewhere:
            raise RuntimeError(
                "FP32 sums under DDP's no_sync need every master on every rank; ZeroRedundancyOptimizer spreads them. "
                'Use grad_accumulation="model", or leave no_sync.'
            )
        if stage.unreduced and not self.replicas.local:
            stage = self._reduce_sums(stage)
        sums = Sums(self.gradients, stage.flags)
        sums.fold(stage.scale.inv_scale, self.replicas.keeps)
        found, scaler = self.gradients.found_inf(self.device).clone(), stage.scale.scaler
        verdict = stage.verdict._replace(found=_with(stage.verdict.found, scaler, found), is_agreed=False)
        unreduced = stage.unreduced
        if self.replicas.local:  # other ranks hear of it when the sums are averaged
            unreduced |= {id(scaler)}
        else:
            verdict = self._noting_norm(verdict, scaler)
        self.stage = stage._replace(
            stamp=GradientStamp(raw_grads(self.params.models)),
            true_stamp=GradientStamp(raw_grads(self.params.masters)),
            pending=False,
            verdict=verdict,
            flags=sums.flags,
            unreduced=unreduced,
            is_measured=True,
        )
        made: Summed = self.stage
        return made

    def _look_at_sums(self, stage: Summed, grads: Rows) -> Rows:
        """:meth:`look`: fold the last backward, with the user's edits; notice edits of the sums."""
        if stage.pending:
            if self._any_there(grads) or self._is_there(self.params.masters):
                self._fold(stage)
            else:
                self.reset(keeps_true=False)
            return self._see()
        written, gone = stage.stamp.compare(grads)
        if gone:  # what stood for a sum was set to None
            self._drop(gone)
        written = [at for at in written if not is_folded(grads[at])]
        if written and not are_zero([grads[i] for i in written]):
            self._refuse_writes(written, grads)
        if not self._is_there(self.params.masters):
            if not self.ranks.expects_all:
                self.reset(keeps_true=False)
            return grads
        self._notice_edits(self.stage)
        return grads

    def _drop(self, gone: list[int]) -> None:
        """As ever; but among several ranks, where DDP moves gradients by itself, what is gone says nothing of sums."""
        if type(self.stage) is not Summed or _count_of_ranks() == 1:
            super()._drop(gone)

    def _reduce_sums(self, stage: Summed) -> Summed:
        """Average over the ranks what was summed under ``no_sync``."""
        sums = Sums(self.gradients, stage.flags)
        mine = [(place, one) for place, one in enumerate(stage.verdict.found) if id(one[0]) in stage.unreduced]
        found = self.replicas.reduce(sums, [flag for _, (_, flag) in mine])  # in one order on all ranks
        every, verdict = list(stage.verdict.found), stage.verdict
        for (place, (scaler, earlier)), one in zip(mine, found, strict=True):
            every[place] = scaler, torch.maximum(earlier, one.to(earlier.device))
            verdict = self._noting_norm(verdict, scaler)
        made = stage._replace(
            true_stamp=GradientStamp(raw_grads(self.params.masters)),
            verdict=verdict._replace(found=tuple(every)),
            flags=sums.flags,
            unreduced=frozenset(),
        )
        self.stage = made
        return made


def _with(
    found: tuple[tuple[LossScaler, Tensor], ...], scaler: LossScaler, one: Tensor
) -> tuple[tuple[LossScaler, Tensor], ...]:
    """What was found, with what a further backward of ``scaler`` gave."""
    if not any(known is scaler for known, _ in found):
        return (*found, (scaler, one))
    return tuple((known, torch.maximum(flag, one) if known is scaler else flag) for known, flag in found)


class Sums:
    """The FP32 sums that masters hold, by device.

    Args:
        flags: by device, int32 bits of all that went into them; () where there are none yet.
    """

    def __init__(self, gradients: Gradients, flags: tuple[Tensor, ...] = ()) -> None:
        self._gradients = gradients
        self.flags = flags

    def fold(self, inv_scale: Tensor, keep: bool) -> None:
        """Add the model's gradients times ``inv_scale`` (float32, 0-dim) to the sums, and free them. No host sync.

        The statistics' ``found_inf`` says of those alone whether one was not finite.

        Args:
            keep: leave zeros where gradients would be freed.
        """
        params = self._gradients.params
        with NamingChanges(params), torch.inference_mode(False), torch.no_grad():
            for each in self._gradients.each:
                _fold(each, inv_scale.to(each.one.device))
        drop_gradients(params.models, keep)
        drop_gradients(params.elsewhere, keep)
        if not keep and _count_of_ranks() == 1:  # DDP's reducer moves gradients by itself
            for each in self._gradients.each:
                each.mark_folded()
        self._take_flags([each.stats for each in self._gradients.each])

    def _take_flags(self, stats: list[kernels.GradStats]) -> None:
        found = [one.nonfinite for one in stats]
        before = self.flags or tuple(map(torch.zeros_like, found))
        self.flags = tuple(old | new for old, new in zip(before, found, strict=True))

    def sums(self) -> Iterator[tuple[DeviceParams, list[Tensor | None]]]:
        """By device: the sums so far, by row. Raises TypeError where one is sparse."""
        for each in self._gradients.each:
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
        each = next(each for each in self._gradients.each if each.device is device)
        there = raw_grad(each.masters[row])
        if there is None:
            there = each.room(row)
            set_raw_grad(each.masters[row], there)
        return there.copy_(value)  # type: ignore[no-any-return]

    def averaged(self, device: DeviceParams, stats: kernels.GradStats) -> None:
        """The sums of a device are averages over ranks now, in which a pass has found ``stats``."""
        flags = list(self.flags)
        for place, each in enumerate(self._gradients.each):
            if each.device is device:
                flags[place] = flags[place] | stats.nonfinite
                each.stats.sumsq.copy_(stats.sumsq)
                reference.finish(each.stats)
        self.flags = tuple(flags)


def _fold(each: DeviceGradients, inv_scale: Tensor) -> None:
    """Add one device's gradients to the sums that its masters hold."""
    each.stats.nonfinite.zero_()  # of earlier ones, which are in the flags of sums
    each.stats.found_inf.zero_()
    each.stats.touched = True
    waiting, _ = each.collect(raw_grads(each.models), inv_scale)
    before = raw_grads(each.masters)
    ins, count = list(waiting.grads), len(before)
    places: list[Tensor | None] = [None] * count  # what goes into .grad
    outs: list[Tensor | None] = [None] * count
    for row, grad in enumerate(ins):
        if grad is None:
            continue
        sum_ = before[row]
        if row in each.halves:
            outs[row] = torch.empty_like(grad, dtype=torch.float32)
        else:
            places[row] = sum_ if sum_ is not None and sum_.layout is torch.strided else each.room(row)
            outs[row] = local(places[row])  # type: ignore[arg-type]
    for row, grad in waiting.sparse.items():
        ins[row] = grad._values()
        outs[row] = torch.empty_like(grad._values(), dtype=each.wide_dtype(row))
    adds = [place is not None and place is before[row] for row, place in enumerate(places)]
    if any([grad is not None for grad in ins]):  # noqa: C419
        kernels.multi_tensor_unscale(ins, outs, inv_scale, each.stats, accumulate=adds if any(adds) else False)
    if _store(each, waiting.sparse, ins, outs, places, before):
        flags = each.stats.nonfinite.clone()
        judge(each.true_ones()[0], each.stats, each.one)
        each.stats.nonfinite.copy_(flags)
        reference.finish(each.stats)


def _store(
    each: DeviceGradients,
    sparse: dict[int, Tensor],
    ins: list[Tensor | None],
    outs: list[Tensor | None],
    places: list[Tensor | None],
    before: list[Tensor | None],
) -> bool:
    """Put the sums into the masters; whether their sums of squares are to be measured anew."""
    measures_anew = False
    for row, master in enumerate(each.masters):
        made, sum_, out = places[row], before[row], outs[row]
        if row in sparse and out is not None:
            made = sparse_like(sparse[row], out.to(master.dtype))
        elif row in each.halves and ins[row] is not None:
            made = torch.empty_like(each.masters[row], requires_grad=False)
            wide: list[Tensor | None] = [outs[row] if k == row else None for k in range(len(outs))]
            round_to(wide, [made if k == row else None for k in range(len(outs))], each.stats)
        if made is None:
            continue
        if sum_ is not None and made is not sum_:
            made, measures_anew = sum_ + made, True
        set_raw_grad(master, made)
    return measures_anew


def _count_of_ranks() -> int:
    """Of the process group; 1 where there is none."""
    dist = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available() or not dist.is_initialized():
        return 1
    return int(dist.get_world_size())


def refuse_ranks() -> None:
    """Raise where gradients are about to be folded into FP32 sums that DDP might never reduce."""
    ranks = _count_of_ranks()
    if ranks == 1:
        return
    raise errors.SUMS_IN_A_GROUP(ranks=ranks)
