"""Gradients as tensors hold them, and as they were at one moment."""

from __future__ import annotations

import itertools
import operator
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..kernels import counters
from .dtensors import different_bits, local, version
from .pairs import HALF_DTYPES

GRAD: Any = Tensor.grad  # torch's own descriptor, which masters stand in front of


def stored(tensors: Sequence[Tensor]) -> list[Tensor | None]:
    """``.grad`` of each as it is, without making one."""
    return counters.gradients(tensors if isinstance(tensors, list) else list(tensors))


def are_there(grads: Sequence[Tensor | None]) -> bool:
    """Whether none is None."""
    return all(map(operator.is_not, grads, itertools.repeat(None)))


def count_there(grads: Sequence[Tensor | None]) -> int:
    """How many are not None. ``list.count`` would compare tensors."""
    return sum(map(operator.is_not, grads, itertools.repeat(None)))


def store(tensor: Tensor, grad: Tensor | None) -> None:
    """Set ``.grad``, and nothing else."""
    GRAD.__set__(tensor, grad)


def drop_grads(params: Sequence[Tensor], keep: bool = False) -> None:
    """Free their gradients, or leave zeros in their places."""
    for param in params:
        if not keep:
            GRAD.__set__(param, None)
        elif (grad := GRAD.__get__(param)) is not None:
            grad.zero_()


class Sight:
    """Gradients as they were at one moment: which tensors, in which versions.

    Args:
        grads: of all pairs, or of whatever list is looked at again later.
        versions: of these, where they were just read.

    Attributes:
        is_empty: whether there was none.
        versions: their counters.
    """

    def __init__(self, grads: list[Tensor | None], versions: list[int] | None = None) -> None:
        self.grads = grads
        self.is_empty = all(map(operator.is_, grads, itertools.repeat(None)))
        self.versions = versions_of(grads) if versions is None else versions

    def moved(self, now: list[Tensor | None]) -> list[int]:
        """Positions whose gradient is another one now, or none, or was written as far as version counters show."""
        versions = versions_of(now)
        if versions == self.versions and all(map(operator.is_, now, self.grads)):
            return []
        then = zip(self.grads, self.versions, strict=True)
        return [i for i, ((a, v), b, w) in enumerate(zip(then, now, versions, strict=True)) if a is not b or v != w]

    def forget(self, position: int) -> None:
        """There was no gradient there."""
        self.grads[position], self.versions[position] = None, -1
        self.is_empty = all(map(operator.is_, self.grads, itertools.repeat(None)))

    def is_of(self, tensors: list[Tensor]) -> bool:
        """Whether these hold the gradients that were seen, be they written since."""
        return all(map(operator.is_, counters.gradients(tensors), self.grads))

    def holds(self, tensors: list[Tensor]) -> bool:
        """Whether these hold the very gradients that were seen, unwritten. False where that is not known at once."""
        try:
            return counters.hold_gradients(tensors, self.grads, self.versions)
        except RuntimeError:  # some were made in inference mode, and count no versions
            return False

    def among(self, now: list[Tensor | None], places: Sequence[int]) -> Sight:
        """What was seen is at ``places`` in a longer list; others there are seen as they are ``now``."""
        longer = Sight(now)
        for place, grad, counted in zip(places, self.grads, self.versions, strict=True):
            longer.grads[place], longer.versions[place] = grad, counted
        longer.is_empty = all(map(operator.is_, longer.grads, itertools.repeat(None)))
        return longer

    def was_carried(self, position: int, now: Tensor) -> bool:
        """Whether ``now`` has the bits of what was seen there, in other memory. Syncs."""
        then = self.grads[position]
        if then is None or then is now or self.versions[position] != version(then):
            return False
        a, b = local(then), local(now)
        alike = a.layout is b.layout is torch.strided and a.dtype == b.dtype and a.shape == b.shape
        return alike and a.dtype in HALF_DTYPES and not bool(different_bits(a, b).any())


class FadedSight:
    """What was seen, as a rule keeping no gradient alive.

    Args:
        sight: what was seen.
        keeps: keep it alive. A thousand weak references are a thousand objects for Python's garbage collector to run
            after.
    """

    def __init__(self, sight: Sight, keeps: bool = False) -> None:
        self._kept = sight.grads if keeps else None
        self._refs: list[Callable[[], Tensor | None]] = []
        self._versions = sight.versions
        try:
            self._refs = [] if keeps else list(map(weakref.ref, sight.grads))
        except TypeError:  # there is no weak reference to None
            self._refs = [_nothing if grad is None else weakref.ref(grad) for grad in sight.grads]

    def holds(self, position: int, grad: Tensor) -> bool:
        """Whether ``grad`` is what was seen there, unwritten since."""
        if position >= len(self._versions):
            return False
        then = self._refs[position]() if self._kept is None else self._kept[position]
        return then is grad and self._versions[position] == version(grad)

    def had(self, position: int) -> bool:
        """Whether there was a gradient."""
        return position < len(self._versions) and self._versions[position] != -1


def _nothing() -> None:
    """In place of a weak reference to a gradient that is not there."""


def versions_of(grads: list[Tensor | None]) -> list[int]:
    """Version counters; -1 where there is no gradient, 0 for those made in inference mode, which count none."""
    try:
        found = counters.versions(grads)
        if found is None:  # pieces of DTensors count their own
            found = [-1 if g is None else version(g) for g in grads]
        return found
    except RuntimeError:
        return [-1 if g is None else 0 if g.is_inference() else g._version for g in grads]
