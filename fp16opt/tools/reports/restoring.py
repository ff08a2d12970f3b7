"""A model with its optimizer, which others run for a while: afterwards both are as they were."""

from __future__ import annotations

import contextlib
import copy
import logging
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ...engine.dtensors import raw_grads, set_raw_grad
from ...engine.parts import is_wrapper
from ...engine.snapshot import Snapshot
from .probing import as_it_was, same_bits


@contextlib.contextmanager
def model_as_it_was(model: nn.Module, others: Iterable[Tensor] = ()) -> Iterator[None]:
    """Within, the model may be trained: afterwards all that a training changes has its bits of before.

    These are weights, buffers, gradients (within, there are none at first), train or eval mode of each module, and
    random number generators. Weights are copied, once.

    Args:
        others: parameters that are trained too and are not the model's.
    """
    others = list(others)
    weights = [(param, param.data, param.detach().clone()) for param in (*model.parameters(), *others)]
    grads = raw_grads(others)
    for param in others:
        set_raw_grad(param, None)
    modes = [(module, module.training) for module in model.modules()]
    trains = [(param, param.requires_grad) for param in model.parameters()]
    try:
        with as_it_was(model, with_gradients=True):
            yield
    finally:
        for module, mode in modes:
            module.training = mode
        for param, mode in trains:
            param.requires_grad_(mode)
        for param, grad in zip(others, grads, strict=True):
            set_raw_grad(param, grad)
        with torch.no_grad():
            for param, memory, values in weights:
                if param.data_ptr() != memory.data_ptr():
                    param.data = memory
                if not same_bits(param, values):
                    param.copy_(values)


@contextlib.contextmanager
def optimizer_as_it_was(optimizer: Optimizer) -> Iterator[None]:
    """Within, the optimizer may step: afterwards its state, settings and, of a wrapper, masters and scale are back."""
    if is_wrapper(optimizer):
        held = copy.deepcopy(optimizer.state_dict())
        try:
            yield
        finally:
            optimizer.zero_grad()
            optimizer.load_state_dict(held)
        return
    before = Snapshot(optimizer, copies_tensors=True)
    try:
        yield
    finally:
        for group in optimizer.param_groups:
            for param in group["params"]:
                set_raw_grad(param, None)
        before.restore()


class Loadable:
    """Objects with a ``state_dict``, each as it is when it is first seen, to go back to.

    Schedulers and GradScalers are such.
    """

    def __init__(self) -> None:
        self._seen: dict[int, tuple[Any, Any]] = {}

    def see(self, one: Any) -> None:
        """Remember it, unless it was seen before."""
        if id(one) not in self._seen:
            self._seen[id(one)] = one, copy.deepcopy(one.state_dict())

    def restore(self) -> None:
        """Put all of them back."""
        for one, state in self._seen.values():
            one.load_state_dict(state)


@contextlib.contextmanager
def quiet(name: str = "fp16opt") -> Iterator[None]:
    """Within, the logger of this name says nothing: trials are no part of a run."""
    logger = logging.getLogger(name)

    def drop(_: logging.LogRecord) -> bool:
        return False

    logger.addFilter(drop)
    try:
        yield
    finally:
        logger.removeFilter(drop)
