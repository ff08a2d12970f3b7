"""A model with its optimizer, which others run for a while: afterwards both are as they were."""

from __future__ import annotations

import contextlib
import copy
import logging
import warnings
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim import Optimizer

from ...engine.dtensors import raw_grads, set_raw_grad
from ...engine.parts import is_wrapper
from ...engine.snapshot import Snapshot
from .probing import as_it_was, buffers_as_they_were, same_bits
from .twins import params_of


@contextlib.contextmanager
def model_as_it_was(model: nn.Module, others: Iterable[Tensor] = ()) -> Iterator[None]:
    """Within, the model may be trained: afterwards all that a training changes has its bits of before.

    These are weights, buffers, gradients (within, there are none at first), train or eval mode of each module, and
    random number generators. Weights are copied, once.

    Args:
        others: parameters that are trained too and are not the model's.
    """
    others = list(others)
    grads = raw_grads(others)
    for param in others:
        set_raw_grad(param, None)
    modes = [(module, module.training) for module in model.modules()]
    trains = [(param, param.requires_grad) for param in model.parameters()]
    try:
        with weights_as_they_were([*model.parameters(), *others]), as_it_was(model, with_gradients=True):
            yield
    finally:
        for module, mode in modes:
            module.training = mode
        for param, mode in trains:
            param.requires_grad_(mode)
        for param, grad in zip(others, grads, strict=True):
            set_raw_grad(param, grad)


@contextlib.contextmanager
def weights_as_they_were(params: Iterable[Tensor]) -> Iterator[None]:
    """Afterwards these parameters have the bits of before, in the memory of before."""
    weights = [(param, param.data, param.detach().clone()) for param in params]
    try:
        yield
    finally:
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


class Others(contextlib.ExitStack):
    """What a loop moves besides a model and its optimizer: afterwards each is as it was when it was first seen.

    Schedulers, GradScalers and other optimizers with what they step, which it is told of; buffers of other modules,
    which it sees called.

    Args:
        known: who is put back elsewhere.
    """

    def __init__(self, known: Iterable[object]) -> None:
        super().__init__()
        self._seen: dict[int, object] = {}
        for one in known:
            self._know(one)
        self.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", "Using .torch.compile.module.. when there are global hooks", UserWarning)
        hook = register_module_forward_pre_hook(lambda module, _: self.see(module))
        self.callback(hook.remove)

    def _know(self, one: Any) -> None:
        parts = (one.optimizer, one.inner) if is_wrapper(one) else ()
        self._seen |= {id(each): each for each in (one, *parts)}

    def see(self, one: Any) -> None:
        """Remember it, unless it was seen before. An optimizer is seen before it clears gradients or steps."""
        if id(one) in self._seen:
            return
        self._know(one)
        if isinstance(one, nn.Module):
            self.enter_context(buffers_as_they_were([one]))
        elif isinstance(one, Optimizer):
            self.enter_context(weights_as_they_were(params_of(one)))
            self.enter_context(optimizer_as_it_was(one))
        else:
            self.callback(one.load_state_dict, copy.deepcopy(one.state_dict()))


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
