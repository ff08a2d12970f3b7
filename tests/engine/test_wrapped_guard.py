"""The guard on a wrapped optimizer: used from elsewhere it raises; schedulers and copies go on as before."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import SGD

from fp16opt.engine.wrapped_step import (
    WrappedOptimizerGuard,
    has_own_step,
    is_guarded,
)


def made() -> tuple[Tensor, SGD]:
    weight = torch.nn.Parameter(torch.ones(2))
    weight.grad = torch.ones(2)
    return weight, SGD([weight], lr=0.5)


def test_there_is_no_reference_cycle() -> None:
    _, inner = made()
    WrappedOptimizerGuard(inner)
    step, gone = inner.step, weakref.ref(inner)
    gc.disable()
    try:
        del inner
        assert gone() is None
    finally:
        gc.enable()
    with pytest.raises(ReferenceError, match="of an optimizer that was freed"):
        step()


class Whole(SGD):
    """Its state is all of it, the guard too."""

    def __getstate__(self) -> dict[str, Any]:
        return dict(self.__dict__)


def test_a_copy_that_took_the_guard_along_says_so_until_it_is_guarded_itself() -> None:
    weight, _ = made()
    inner = Whole([weight], lr=0.5)
    WrappedOptimizerGuard(inner)
    copied = copy.deepcopy(inner)
    assert not is_guarded(copied)
    with pytest.raises(RuntimeError, match="of a copied optimizer was called"):
        copied.step()
    with WrappedOptimizerGuard(copied).open():
        copied.step()


def test_a_step_that_was_replaced_is_known_and_called() -> None:
    _, inner = made()
    called: list[int] = []
    inner.step = lambda: called.append(1)  # type: ignore[method-assign, assignment, misc, return-value]
    assert has_own_step(inner)
    guard = WrappedOptimizerGuard(inner)
    assert has_own_step(inner)
    with guard.open():
        inner.step()
    assert called == [1]
