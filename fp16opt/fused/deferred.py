"""Master gradients that exist only if someone reads them.

A fused step takes the 16-bit gradients as they are, so an FP32 gradient is made when ``master.grad`` is read. From then
on it is an ordinary tensor, and what is written to it counts in the step.
"""

from __future__ import annotations

import contextlib
import operator
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .. import kernels
from ..kernels.reference_steps import Factors
from ..kernels.tables import Seen, same_walk

if TYPE_CHECKING:
    from ..masters import MasterParams
    from ..shard import Shard

_GRAD: Any = Tensor.grad  # torch's own descriptor, which the class below stands in front of


def stored_grad(master: Tensor) -> Tensor | None:
    """``master.grad`` as it is, without making one."""
    grad: Tensor | None = _GRAD.__get__(master)
    return grad


def stored_grads(masters: Sequence[Tensor]) -> list[Tensor | None]:
    """:func:`stored_grad` of each."""
    return list(map(_GRAD.__get__, masters))


def has_grad(master: Tensor) -> bool:
    """Whether ``master.grad`` would not be None, without making it."""
    waits = getattr(master, "_grad_waits", None)
    return stored_grad(master) is not None or (waits is not None and bool(waits()))


def _nothing() -> None:
    """In place of a weak reference to a gradient that is not there."""


class _Sight:
    """Gradients as they were at one moment: which tensors, in which versions. Keeps none alive.

    Args:
        params: whose gradients they are.
        index: the positions of ``params``.
    """

    def __init__(self, params: list[Tensor], index: list[int]) -> None:
        grads = [param.grad for param in params]
        self._params, self._index = params, index
        self._refs: list[Callable[[], Tensor | None]] = [_nothing if g is None else weakref.ref(g) for g in grads]
        # -1: a weak reference to a gradient that is gone looks like none, too.
        self._versions = [-1 if g is None else g._version for g in grads]
        self._place: dict[int, int] | None = None

    def moved(self) -> list[int]:
        """Positions whose gradient is another one now, or was written."""
        grads = [param.grad for param in self._params]
        versions = [-1 if g is None else g._version for g in grads]
        if versions == self._versions and all(map(operator.is_, [ref() for ref in self._refs], grads)):
            return []
        same = map(operator.is_, [ref() for ref in self._refs], grads)
        return [
            i for i, is_it, a, b in zip(self._index, same, versions, self._versions, strict=True) if not is_it or a != b
        ]

    def is_as_seen(self, i: int, grad: Tensor) -> bool:
        """Whether ``grad``, of position ``i``, is what was seen."""
        if self._place is None:
            self._place = {i: k for k, i in enumerate(self._index)}
        k = self._place.get(i)
        return k is not None and self._refs[k]() is grad and self._versions[k] == grad._version


class DeferredGrads:
    """Which masters' gradients wait in 16 bits, and what makes FP32 ones of them.

    Args:
        params: the engine's parameters. Their masters become instances of a subclass of Parameter whose ``grad`` asks
            here; copies and pickles of them are plain parameters again.
        buffer: gives the memory for the FP32 gradient of a position.
        made: called with (position, gradient) for each that is made for the step to come.

    Attributes:
        waiting: positions whose FP32 gradient does not exist.
        clipped: whether a clip was put into the factors.
        dropped: whether a gradient that waited was set, unread, to something else since the pass that measured it.
        live: whether the gradients are those of a step that is still to come.
    """

    def __init__(
        self, params: MasterParams, buffer: Callable[[int], Tensor], made: Callable[[int, Tensor], None]
    ) -> None:
        self.params = params
        self._buffer = buffer
        self._made = made
        self.waiting: set[int] = set()
        self.clipped = False
        self.dropped = False
        self.live = False
        self._takes = False
        self._plain = False
        self._taken: dict[int, Tensor] = {}
        self._kept: set[int] = set()
        self._read: set[int] = set()
        self._read_before: set[int] = set()
        self._sight = _Sight([], [])
        self._usual: dict[torch.device, tuple[Shard, Seen]] = {}
        self._factors: dict[torch.device, Factors] = {}
        self._position: dict[int, int] = {}
        self._class = _class_for(self)
        self.promote()

    def promote(self) -> None:
        """Have every master ask here for its gradient; to be called when masters come."""
        for i in self.params.copied:
            master = self.params.master[i]
            if type(master).__torch_dispatch__ is Tensor.__torch_dispatch__:  # a DTensor never waits
                master.__class__ = self._class
        self._position = {id(self.params.master[i]): i for i in self.params.copied}

    # -- while gradients are unscaled --------------------------------------------------------------------------------

    def begin(self, inv_scale: Tensor, allowed: bool, again: bool) -> None:
        """A pass over the gradients begins.

        Args:
            inv_scale: float32, 0-dim: what it multiplies by.
            allowed: whether gradients may wait at all.
            again: of a second pass over the same gradients: a clip stays, and so does all that was not written since.
        """
        moved = set(self.moved()) if again else set()
        if again:
            self._kept = set(self.params.copied) - self.waiting - moved
            self._clear_rows(moved)
        else:
            self._kept = set()
            self.drop()
            self.clipped = self.dropped = False
            one = torch.ones_like(inv_scale)
            self._factors = {
                shard.device: Factors(inv_scale.to(shard.device), one.to(shard.device)) for shard in self.params.shards
            }
        self.waiting = set()  # so that nothing is made in the middle of the pass
        self._taken = {}
        self._takes = allowed and not self._plain
        self.live = allowed or again

    def _clear_rows(self, positions: set[int]) -> None:
        """What was found in gradients that may be gone does not count."""
        for shard in self.params.shards:
            for k, i in enumerate(shard.index):
                if i in positions:
                    shard.stats.nonfinite[k] = 0
                    shard.stats.sumsq[k] = 0.0

    def keeps(self, i: int) -> bool:
        """Whether the FP32 gradient of position ``i`` stays as it is in this pass."""
        return i in self._kept

    def was_read(self, i: int) -> bool:
        """Whether the FP32 gradient of position ``i`` was made in the last step or this one: it keeps its memory."""
        return i in self._read or i in self._read_before

    def take(self, i: int, grad: Tensor | None) -> bool:
        """Whether ``grad`` of position ``i`` is to wait as it is."""
        if not self._takes or grad is None or i in self._kept or not self._accepts(i, grad):
            return False
        _GRAD.__set__(self.params.master[i], None)
        self._taken[i] = grad.detach() if grad.requires_grad else grad
        return True

    def take_usual(self, shard: Shard) -> bool:
        """Whether all gradients of the shard are to wait as all did in an earlier pass: then they are taken here."""
        shard_then, seen = self._usual.get(shard.device, (None, None))
        if shard_then is not shard or seen is None or not self._takes or self._kept:
            return False
        grads: list[Any] = [self.params.model[i].grad for i in shard.index]
        if not seen.again(grads) or any([grad.requires_grad for grad in grads]):  # noqa: C419
            return False
        masters = [self.params.master[i] for i in shard.index]
        for master, grad in zip(masters, stored_grads(masters), strict=True):
            if grad is not None:
                _GRAD.__set__(master, None)
        self._taken.update(zip(shard.index, grads, strict=True))
        return True

    def note_usual(self, shard: Shard) -> None:
        """Remember what the gradients of the shard look like, where all of them were taken."""
        grads = [self._taken[i] for i in shard.index if i in self._taken]
        if grads and len(grads) == len(shard.index):
            self._usual[shard.device] = (shard, Seen(grads))

    def taken(self, shard: Shard) -> list[Tensor | None] | None:
        """For each position of the shard the gradient that is to wait; None where there is no such."""
        grads = [self._taken.get(i) for i in shard.index]
        return grads if any(grad is not None for grad in grads) else None

    def _accepts(self, i: int, grad: Tensor) -> bool:
        master, model = self.params.master[i], self.params.model[i]
        return (
            master is not model
            and grad.dtype == model.dtype
            and grad.layout is torch.strided
            and same_walk(grad, model)
            and type(grad).__torch_dispatch__ is Tensor.__torch_dispatch__
        )

    def end(self) -> None:
        """The pass is done: remember what it has seen."""
        self.waiting, self._taken, self._takes = set(self._taken), {}, False
        copied = self.params.copied if self.live else []
        self._sight = _Sight([self.params.model[i] for i in copied], list(copied))

    def moved(self) -> list[int]:
        """Positions whose 16-bit gradient was written, replaced, set or removed since the pass."""
        return self._sight.moved() if self.live else []

    # -- what the step takes -----------------------------------------------------------------------------------------

    def factors(self, device: torch.device, waiting: bool) -> Factors:
        """What gradients that wait are multiplied by, on ``device``; or ones, for gradients that are made."""
        if waiting:
            return self._factors[device]
        one = torch.ones((), device=device)
        return Factors(one, one)

    def clip(self, factor: Tensor) -> None:
        """Multiply the gradients that wait by ``factor`` (float32, 0-dim), and those that are still to be looked at.

        A second factor is a third rounding, so gradients that wait are made before one.
        """
        if self.clipped:
            self.make()
        factor = factor.reshape(())
        self._factors = {d: Factors(f.inv_scale, f.coefficient * factor.to(d)) for d, f in self._factors.items()}
        self.clipped = True

    # -- reading them ------------------------------------------------------------------------------------------------

    def drop(self) -> None:
        """Nothing waits any more: unread gradients are gone."""
        self.waiting.clear()

    def rest(self) -> None:
        """The step is over. What waits can still be read while the 16-bit gradients stay as they are."""
        if self.live:
            self._read, self._read_before = set(), self._read
        self.live = False

    def ask(self, master: Tensor) -> None:
        """``master.grad`` is about to be read."""
        i = self._position.get(id(master))
        if i is not None and i in self.waiting:
            self.make([i])

    def is_waiting(self, master: Tensor) -> bool:
        """Whether ``master.grad`` would be made by reading it."""
        i = self._position.get(id(master), -1)
        return i in self.waiting and self._source(i) is not None

    def forget(self, master: Tensor) -> None:
        """``master.grad`` is about to be set."""
        i = self._position.get(id(master), -1)
        if i in self.waiting:
            self.waiting.discard(i)
            self.dropped = True

    def make(self, positions: Iterable[int] | None = None) -> None:
        """Make the FP32 gradients of ``positions``, or of all that wait, in the bits that the step would use."""
        wanted = set(self.waiting if positions is None else positions)
        self.waiting -= wanted
        self._read |= wanted
        if not wanted:
            return
        by_device: dict[torch.device, list[int]] = {}
        for i in sorted(wanted):
            by_device.setdefault(self.params.master[i].device, []).append(i)
        with torch.no_grad():
            for device, index in by_device.items():
                grads = [self._source(i) for i in index]
                outs = [None if grad is None else self._buffer(i) for i, grad in zip(index, grads, strict=True)]
                kernels.multi_tensor_unscale_clipped(grads, outs, *self._factors[device])
                for i, out in zip(index, outs, strict=True):
                    if out is not None:
                        _GRAD.__set__(self.params.master[i], out)
                        if self.live:
                            self._made(i, out)

    @contextlib.contextmanager
    def plain(self) -> Iterator[None]:
        """For as long as it lasts, masters are ordinary parameters, for which torch chooses its faster loops.

        None may wait when it begins, and none will meanwhile.
        """
        self._plain = True
        masters = [master for i in self.params.copied if type(master := self.params.master[i]) is self._class]
        for master in masters:
            master.__class__ = torch.nn.Parameter
        try:
            yield
        finally:
            for master in masters:
                master.__class__ = self._class
            self._plain = False

    @contextlib.contextmanager
    def hidden(self) -> Iterator[None]:
        """For as long as it lasts, gradients that wait are not made by reading them: they look like None."""
        waiting, self.waiting = self.waiting, set()
        try:
            yield
        finally:
            self.waiting = waiting

    def _source(self, i: int) -> Tensor | None:
        grad = self.params.model[i].grad
        if grad is None or not (self.live or self._sight.is_as_seen(i, grad)):
            return None  # of a step that is over, and overwritten since
        return grad.detach() if grad.requires_grad else grad


def _class_for(deferred: DeferredGrads) -> type[torch.nn.Parameter]:
    """A Parameter whose gradient is made when it is read. One class an engine: parameters need no mark of their own."""
    owner: Callable[[], DeferredGrads | None] = weakref.ref(deferred)

    class MasterParameter(torch.nn.Parameter):
        """An FP32 master whose gradient waits in the model's dtype until it is read."""

        @property
        def grad(self) -> Tensor | None:
            found = owner()
            if found is not None and found.waiting:
                found.ask(self)
            return stored_grad(self)

        @grad.setter
        def grad(self, value: Tensor | None) -> None:
            found = owner()
            if found is not None:
                found.forget(self)
            _GRAD.__set__(self, value)

        @grad.deleter
        def grad(self) -> None:
            self.grad = None

        def _grad_waits(self) -> bool:
            found = owner()
            return found is not None and found.is_waiting(self)

    return MasterParameter
