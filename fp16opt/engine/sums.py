"""FP32 sums of gradients: every backward is folded into its masters' ``.grad``, by its own scale, and freed.

``grad_accumulation="fp32"`` asks for it, and so do several loss scales in one step.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from .. import kernels
from ..kernels import reference
from .dtensors import local, raw_grad, raw_grads, set_raw_grad
from .gradients import DeviceGradients, Gradients, NamingChanges, drop_gradients, judge, round_to, sparse_like
from .params import DeviceParams
from .stage import BackwardScale, Verdict
from .stamps import GradientStamp


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
        is_closed, is_divided, is_measured, losses: as of :class:`.stage.Unscaled`.
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
        for each in () if keep else self._gradients.each:
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
    waiting = each.collect(raw_grads(each.models), inv_scale)
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


def refuse_ranks() -> None:
    """Raise where gradients are about to be folded into FP32 sums that DDP might never reduce."""
    dist = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return
    raise RuntimeError(
        'gradients are to be folded into FP32 (grad_accumulation="fp32", or several loss scales in one step) in a '
        f"process group of {dist.get_world_size()} ranks: under DDP's no_sync the ranks would drift apart. Call "
        "fp16opt.distributed.attach(opt, ddp_model); or attach(opt, None), if ranks don't share gradients."
    )
