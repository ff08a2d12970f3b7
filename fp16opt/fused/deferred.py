"""Master gradients that exist only if someone reads them.

A fused step takes the 16-bit gradients as they are, so an FP32 gradient is made when ``master.grad`` is read. From then
on it is an ordinary tensor, and what is written to it counts in the step.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .. import kernels
from ..kernels.reference_steps import Factors

if TYPE_CHECKING:
    from ..masters import MasterParams, Shard

_HALVES = (torch.float16, torch.bfloat16)
_read = Tensor.grad.__get__  # type: ignore[attr-defined]
_write = Tensor.grad.__set__  # type: ignore[attr-defined]

Seen = tuple["weakref.ref[Tensor] | None", int]


def stored_grad(master: Tensor) -> Tensor | None:
    """``master.grad`` as it is, without making one."""
    grad: Tensor | None = _read(master)
    return grad


def _seen(grad: Tensor | None) -> Seen:
    return (None, 0) if grad is None else (weakref.ref(grad), grad._version)


def _is_as_seen(grad: Tensor | None, seen: Seen) -> bool:
    if grad is None or seen[0] is None:
        return grad is None and seen[0] is None
    return seen[0]() is grad and seen[1] == grad._version


class DeferredGrads:
    """Which masters' gradients wait in 16 bits, and what makes FP32 ones of them.

    Args:
        params: the engine's parameters. Their masters become instances of a subclass of Parameter whose ``grad`` asks
            here; copies and pickles of them are plain parameters again.

    Attributes:
        waiting: positions whose FP32 gradient does not exist.
        clipped: whether a clip was put into the factors.
        live: whether the gradients are those of a step that is still to come.
    """

    def __init__(self, params: MasterParams) -> None:
        self.params = params
        self.waiting: set[int] = set()
        self.clipped = False
        self.live = False
        self._seen: dict[int, Seen] = {}
        self._factors: dict[torch.device, Factors] = {}
        self._position: dict[int, int] = {}
        self._class = _class_for(self)
        self.promote()

    def promote(self) -> None:
        """Have every master ask here for its gradient; to be called when masters come."""
        for i in self.params.copied:
            self.params.master[i].__class__ = self._class
        self._position = {id(self.params.master[i]): i for i in self.params.copied}

    # -- while gradients are unscaled --------------------------------------------------------------------------------

    def begin(self, inv_scale: Tensor, again: bool) -> None:
        """A pass over the gradients begins. ``again``: the clip, and what waits, stay."""
        if not again:
            self.drop()
            self.clipped = False
            one = torch.ones_like(inv_scale)
            self._factors = {
                shard.device: Factors(inv_scale.to(shard.device), one.to(shard.device)) for shard in self.params.shards
            }
        self.live = True

    def accepts(self, i: int, grad: Tensor) -> bool:
        """Whether the gradient of position ``i`` can wait as it is."""
        master, model = self.params.master[i], self.params.model[i]
        return (
            master is not model
            and grad.dtype == model.dtype
            and grad.layout is torch.strided
            and grad.stride() == master.stride()
            and type(grad).__torch_dispatch__ is Tensor.__torch_dispatch__
        )

    def defer(self, i: int) -> None:
        """Position ``i`` waits."""
        master = self.params.master[i]
        if stored_grad(master) is not None:
            _write(master, None)
        self.waiting.add(i)

    def end(self) -> None:
        """The pass is done: remember what it has seen."""
        self._seen = {i: _seen(self.params.model[i].grad) for i in self.params.copied}

    def moved(self) -> list[int]:
        """Positions whose 16-bit gradient was written, replaced, set or removed since the pass."""
        if not self.live:
            return []
        model = self.params.model
        return [i for i, seen in self._seen.items() if not _is_as_seen(model[i].grad, seen)]

    def check(self, shard: Shard, waiting: Iterable[int], inv_scale: Tensor) -> None:
        """Flags and sums of squares of the gradients that wait, into the shard's statistics. No host sync."""
        which = set(waiting)
        grads = [self.params.model[i].grad if i in which else None for i in shard.index]
        kernels.steps.multi_tensor_check(grads, inv_scale, shard.stats, tables=shard.check_tables)

    # -- what the step takes -----------------------------------------------------------------------------------------

    def factors(self, device: torch.device) -> Factors:
        """What gradients that wait are multiplied by, on ``device``."""
        return self._factors[device]

    def clip(self, factor: Tensor) -> None:
        """Multiply the gradients that wait by ``factor`` (float32, 0-dim), and all others stay. Once a pass."""
        self._factors = {d: Factors(f.inv_scale, factor.to(d).reshape(())) for d, f in self._factors.items()}
        self.clipped = True

    # -- reading them ------------------------------------------------------------------------------------------------

    def drop(self) -> None:
        """Nothing waits any more: unread gradients are gone."""
        self.waiting.clear()

    def rest(self) -> None:
        """The step is over. What waits can still be read while the 16-bit gradients stay as they are."""
        self.live = False

    def ask(self, master: Tensor) -> None:
        """``master.grad`` is about to be read."""
        i = self._position.get(id(master))
        if i is not None and i in self.waiting:
            self.make([i])

    def forget(self, master: Tensor) -> None:
        """``master.grad`` is about to be set."""
        self.waiting.discard(self._position.get(id(master), -1))

    def make(self, positions: Iterable[int] | None = None) -> None:
        """Make the FP32 gradients of ``positions``, or of all that wait, in the bits that the step would use."""
        wanted = set(self.waiting if positions is None else positions)
        self.waiting -= wanted
        with torch.no_grad():
            for shard in self.params.shards:
                grads = [self._source(i) if i in wanted else None for i in shard.index]
                outs = [
                    None if grad is None else torch.empty_like(self.params.master[i], requires_grad=False)
                    for i, grad in zip(shard.index, grads, strict=True)
                ]
                scratch = kernels.GradStats.allocate(len(outs), shard.device)
                factors = self._factors[shard.device]
                kernels.multi_tensor_unscale(grads, outs, factors.inv_scale, scratch)
                if self.clipped:
                    kernels.multi_tensor_scale(outs, factors.coefficient)
                for i, out in zip(shard.index, outs, strict=True):
                    if out is not None:
                        _write(self.params.master[i], out)

    def _source(self, i: int) -> Tensor | None:
        grad = self.params.model[i].grad
        if grad is None or not (self.live or _is_as_seen(grad, self._seen[i])):
            return None  # of a step that is over, and overwritten since
        return grad.detach() if grad.requires_grad else grad


def _class_for(deferred: DeferredGrads) -> type[torch.nn.Parameter]:
    """A Parameter whose gradient is made when it is read. One class an engine: parameters need no mark of their own."""
    owner: Callable[[], DeferredGrads | None] = weakref.ref(deferred)

    class MasterParameter(torch.nn.Parameter):
        """An FP32 master whose gradient waits in the model's dtype until it is read."""

        @property
        def grad(self) -> Tensor | None:  # type: ignore[override]
            found = owner()
            if found is not None and found.waiting:
                found.ask(self)
            return stored_grad(self)

        @grad.setter
        def grad(self, value: Tensor | None) -> None:
            found = owner()
            if found is not None:
                found.forget(self)
            _write(self, value)

        @grad.deleter
        def grad(self) -> None:
            self.grad = None

    return MasterParameter
