"""Progress: what a step has written so far, so that one that an exception has stopped is finished, or known not to be.

An exception can arrive between any two lines: Ctrl-C, a timer, a hook's error. So every entry is made before what it
tells of, everything that is put back can be put back twice, and whether a kernel has run is noted by the very call of
compiled code that runs it (:attr:`fp16opt.kernels.CallCache.returned`).
"""

from __future__ import annotations

import contextlib
import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer

from .. import kernels
from ..kernels.tensor_lists import all_there, versions_of
from .dtensors import version, versions
from .schema import is_torch_class

_chain = itertools.chain.from_iterable


class Part(Protocol):
    """Parameters that are stepped together.

    Attributes:
        positions: of their pairs.
    """

    positions: Sequence[int]

    def has_run(self) -> bool | None:
        """True: all were stepped. False: none was. None: the step of these was cut."""

    def stepped(self) -> Iterable[int]:
        """The positions of those that were."""

    def finish(self) -> None:
        """Do what is left to do after them, where they were stepped. May be called twice."""


class KernelPart:
    """Parameters that one kernel call steps.

    Args:
        cache: of the call site.
        then: what is left to do after the call.
    """

    def __init__(self, positions: Sequence[int], cache: kernels.CallCache, then: Callable[[], None]) -> None:
        self.positions = positions
        self.finish = then
        self._returned = cache.returned
        self._returned.clear()

    def has_run(self) -> bool | None:
        """What the call site's cache has noted."""
        if not self._returned:
            return False
        return None if self._returned[-1] is kernels.BEGUN else True

    def stepped(self) -> Iterable[int]:
        """All or none."""
        return self.positions if self.has_run() else []


class OwnPart:
    """Parameters that the wrapped optimizer's own code steps, one operation after another.

    Args:
        positions: of their pairs.
        masters: of the same.
        optimizer: its state is looked at too.

    Attributes:
        returned: filled when its code has come to its end.
    """

    def __init__(self, positions: Sequence[int], masters: Sequence[Tensor], optimizer: Optimizer) -> None:
        self.positions = positions
        self.returned: deque[Any] = deque(maxlen=1)
        self._masters = masters
        self._optimizer = optimizer
        self._is_torchs = is_torch_class(optimizer)
        self._then = versions(masters)
        self._state_then = self._versions_of_state()

    def _versions_of_state(self) -> list[int]:
        entries = list(self._optimizer.state.values())
        try:
            if self._is_torchs:  # whose steps write the counter of an entry first, where there is one
                counters = [entry.get("step") for entry in entries]
                if not all_there(counters):
                    counters = [entry.get("step", next(iter(entry.values()), None)) for entry in entries]
                return versions_of(counters)
            return versions_of(list(_chain(map(dict.values, entries))))
        except (AttributeError, TypeError, RuntimeError):  # not all are plain tensors that count versions
            return [version(value) for entry in entries if isinstance(entry, dict) for value in _tensors(entry)]

    def has_run(self) -> bool | None:
        """Cut where it has not come to its end and a master, or the state, has moved."""
        if self.returned:
            return True
        return None if self._has_moved() else False

    def _has_moved(self) -> bool:
        return versions(self._masters) != self._then or self._versions_of_state() != self._state_then

    def stepped(self) -> Iterable[int]:
        """Those that were written: where torch counts that, by the versions of their masters."""
        # torch's fused steps count no versions of what they write.
        is_uncounted = any(group.get("fused") for group in self._optimizer.param_groups)
        if self.returned or (is_uncounted and self._has_moved()):
            return self.positions
        now = versions(self._masters)
        return [at for at, a, b in zip(self.positions, self._then, now, strict=True) if a != b]

    def finish(self) -> None:
        """Nothing is left to do."""


def _tensors(entry: dict[Any, Any]) -> Iterator[Tensor]:
    return (value for value in entry.values() if isinstance(value, Tensor))


class Progress:
    """What one step has done so far.

    Attributes:
        parts: those whose step has begun, or is about to.
        is_whole: whether the step has come to its end.
        closing: what the end of the step has settled already: see :class:`.outcome.Closing`.
        awaited: the decision, where kernels skip by the device's flag and the host has to know of it; else None.
    """

    def __init__(self) -> None:
        self.parts: list[Part] = []
        self.is_whole = False
        self.closing: Any = None
        self.awaited: kernels.AwaitedFlag | None = None
        self._undo: list[Callable[[], None]] = []
        self._is_put_back = False

    @contextlib.contextmanager
    def putting_back(self, undo: Callable[[], None]) -> Iterator[None]:
        """Call ``undo`` at the end, or when the next call finds that the end was never reached. It may run twice."""
        self._undo.append(undo)
        try:
            yield
        finally:
            if not self._is_put_back:  # else what was left of this frame is being freed, perhaps in another step
                undo()

    def put_back(self) -> None:
        """Put back what the step has changed for its own duration, for good."""
        self._is_put_back = True
        for undo in reversed(self._undo):
            undo()

    def stepped(self) -> list[int]:
        """Positions of parameters that were stepped, as far as that can be told."""
        return [at for part in self.parts for at in part.stepped()]

    def has_begun(self) -> bool:
        """Whether anything was written."""
        return self.is_whole or any(part.has_run() is not False for part in self.parts)

    def was_cut(self) -> bool:
        """Whether the wrapped optimizer's own code was stopped in the middle."""
        return not self.is_whole and any(part.has_run() is None for part in self.parts)

    def finish(self) -> None:
        """Do what is left to do after parts that were stepped."""
        with torch.no_grad():
            for part in self.parts:
                if part.has_run():
                    part.finish()
