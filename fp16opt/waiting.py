"""WaitingGrads: master gradients that stay in 16 bits for a fused step, unless somebody reads them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from . import kernels
from .fused import DeferredGrads, FusedStep
from .fused.deferred import stored_grads
from .gradients import MasterGrads, _Lists
from .masters import MasterParams
from .shard import Shard

if TYPE_CHECKING:
    from .accumulation import Accumulation
    from .optimizer import MixedPrecisionOptimizer
    from .streaming import StreamedStep


class WaitingGrads(MasterGrads):
    """:class:`MasterGrads` whose pass looks at the gradients of 16-bit parameters and writes nothing, where it may.

    Memory: the FP32 buffer of a parameter exists while its gradient is read in every step.

    Args:
        params: The engine's parameters.
        serves: Says whether the next step is a fused one, which takes gradients as they are.
    """

    def __init__(self, params: MasterParams, serves: Callable[[], bool]) -> None:
        self.deferred = DeferredGrads(params, self._buffer, self._note_made)
        self._serves = serves
        self._again = False
        super().__init__(params)

    def reset(self) -> None:
        super().reset()
        self.deferred.rest()

    # -- the pass ----------------------------------------------------------------------------------------------------

    def unscale(self, inv_scale: Tensor, keep: bool = False) -> None:
        """As in :class:`MasterGrads`; gradients that may wait are checked and measured, and nothing is written."""
        allowed = self.folded is None and self._serves()
        self.deferred.begin(inv_scale, allowed, self._again)
        super().unscale(inv_scale, keep)
        self.deferred.end()
        self._measurable &= not self._again

    def moved(self) -> bool:
        """Whether gradients of the model were written since the pass that looked at them for the step to come."""
        return bool(self.deferred.moved())

    def look_again(self, steps: Accumulation) -> None:
        """Take in what was written to the model's gradients since. A clip, and edits of other gradients, stay."""
        self._again = True
        try:
            steps.unscale()
        finally:
            self._again = False

    def makes_all_anew(self) -> bool:
        """Never where gradients wait: a clip is a factor then, and not a pass."""
        return super().makes_all_anew() and not self._serves()

    def unscale_clipped(self, inv_scale: Tensor, max_norm: float, judge: Callable[[], tuple[Tensor, Tensor]]) -> Tensor:
        """As in :class:`MasterGrads`: only where nothing waits."""
        self.deferred.begin(inv_scale, allowed=False, again=False)
        return super().unscale_clipped(inv_scale, max_norm, judge)

    def _lists(self, shard: Shard, fold: bool) -> _Lists:
        """Those that wait or stay are left out."""
        deferred, count = self.deferred, len(shard.index)
        if deferred.take_usual(shard):
            self._free_unread(shard.index)
            return _Lists([None] * count, [None] * count, [False] * count, [])
        out = {i for i in shard.index if deferred.take(i, self.params.model[i].grad) or deferred.keeps(i)}
        if not out:
            return super()._lists(shard, fold)
        self._free_unread(out)
        if len(out) == count:
            deferred.note_usual(shard)
        left = [k for k, i in enumerate(shard.index) if i not in out]
        rows = torch.tensor(left, dtype=torch.int64)  # any: says that not every parameter takes part
        part = super()._lists(replace(shard, index=[shard.index[k] for k in left], rows=rows), fold)
        lists = _Lists([None] * count, [None] * count, [False] * count, part.later)
        for k, place in enumerate(left):
            lists.sources[place], lists.outs[place] = part.sources[k], part.outs[k]
            lists.adds[place] = bool(part.adds) and part.adds[k]
        return lists

    def _free_unread(self, positions: Iterable[int]) -> None:
        """The FP32 buffer of a gradient that is not read is given back."""
        for i in positions if self.buffers else ():
            if not self.deferred.was_read(i):
                self.buffers.pop(i, None)

    def _pass(self, shard: Shard, lists: _Lists, inv_scale: Tensor) -> None:
        """One call that looks at what waits, and one for all else where there is any."""
        grads = self.deferred.taken(shard)
        if grads is None:
            return super()._pass(shard, lists, inv_scale)
        watch = self.params.watch(shard)
        kernels.multi_tensor_check(grads, inv_scale, shard.stats, watch=watch, tables=shard.waiting_tables)
        shard.passed = watch is not None
        if any(source is not None for source in lists.sources):
            adds = lists.adds if any(lists.adds) else False
            tables = shard.unscale_tables
            kernels.multi_tensor_unscale(
                lists.sources, lists.outs, inv_scale, shard.stats, accumulate=adds, tables=tables
            )
        return None

    # -- what others do with them ------------------------------------------------------------------------------------

    def _note_made(self, i: int, grad: Tensor) -> None:
        """A gradient that waited was made: what was measured holds for it."""
        if self._measured is not None and i < len(self._measured):
            self._measured[i], self._versions[i] = grad, grad._version

    def _stored(self) -> list[Tensor | None]:
        return stored_grads(self.params.master)

    def _is_measured(self) -> bool:
        return not self.deferred.dropped and super()._is_measured()

    def values(self, shard: Shard) -> list[Tensor | None]:
        self.deferred.make()
        return super().values(shard)

    def scale(self, factor: Tensor) -> None:
        """Gradients that wait get a factor, once; what is there is multiplied."""
        if self.deferred.waiting:
            self._measurable = False
        self.deferred.clip(factor)
        if any(grad is not None for grad in self._stored()):
            with self.deferred.hidden():
                super().scale(factor)

    def start_folding(self) -> None:
        self.deferred.make()
        super().start_folding()

    def grow(self) -> None:
        super().grow()
        self.deferred.promote()

    def zero(self, set_to_none: bool) -> None:
        if set_to_none:
            self.deferred.drop()
        else:
            self.deferred.make()
        super().zero(set_to_none)
        if set_to_none and not self.params.keeps_gradients:
            self.buffers.clear()


def make_grads(params: MasterParams, fused: FusedStep, streamed: StreamedStep | None) -> MasterGrads:
    """The gradients of ``params``: such as may wait, where fused steps are wanted, or steps of a bucket at a time."""
    if streamed is not None:
        return WaitingGrads(params, streamed.serves)
    return WaitingGrads(params, fused.serves) if fused.may_serve() else MasterGrads(params)


def look_again(grads: MasterGrads, steps: Accumulation) -> None:
    """Before they are used: take in what was written to the model's gradients since they were looked at."""
    if isinstance(grads, WaitingGrads) and grads.moved():
        grads.look_again(steps)


def fused_step(engine: MixedPrecisionOptimizer, found_inf: Tensor | None) -> Callable[..., Any] | None:
    """What steps in place of the wrapped optimizer, or None; see :meth:`FusedStep.stand_in`."""
    grads = engine._grads
    return engine._fused.stand_in(grads.deferred, found_inf) if isinstance(grads, WaitingGrads) else None
