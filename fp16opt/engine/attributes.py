"""Tensors that an optimizer class keeps in attributes of its own: FP32 where its parameters have FP32 masters.

Lookahead's slow weights are such: copies of the parameters that are made with the optimizer, outside of ``state``. Left
in 16 bits they would round the masters each time they are written back.
"""

from __future__ import annotations

import logging
from collections import deque
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from . import errors
from .diagnostics import Lines, describe
from .dtensors import local
from .params import HALF_DTYPES, ParamTable

_PLAIN = (Tensor, torch.nn.Parameter)


def convert_attributes(optimizer: Optimizer, params: ParamTable, lines: Lines) -> None:
    """Give an optimizer's attributes what they would hold had it been made over the masters.

    A model parameter gives place to its master, as an item and as a key of a dict. A 16-bit tensor of the shape and
    dtype of a parameter with a master becomes FP32. Lists, dicts and objects are changed in place, optimizers inside
    too, but no modules. Other 16-bit tensors may be parts of a buffer: they stay, and a warning names them.

    Args:
        optimizer: its ``param_groups`` hold the masters of ``params``, and its ``state`` was carried over.
        lines: where a warning goes, once.
    """
    left = _Conversion(optimizer, params).run()
    if left:
        lines.tell(errors.HALVES_OUTSIDE_OF_STATE, once=True, optimizer=type(optimizer).__name__, names=describe(left))


class _Conversion:
    def __init__(self, optimizer: Optimizer, params: ParamTable) -> None:
        self._optimizer = optimizer
        self._masters = {id(pair.model): pair.master for pair in params.all if pair.has_master}
        apart = [pair for pair in params.all if pair.is_apart]
        self._kinds = {(pair.model.dtype, pair.model.shape) for pair in apart}
        self._made: dict[int, tuple[Tensor, Tensor]] = {}  # with the tensor that it was made of, which so keeps its id
        self._left: list[str] = []
        self._seen = {id(optimizer.state), id(optimizer.param_groups), id(optimizer)}

    def run(self) -> list[str]:
        """Convert. Returns where 16-bit tensors were left as they were."""
        if self._masters:
            for number, group in enumerate(self._optimizer.param_groups):
                self._seen.add(id(group["params"]))
                self._convert_dict(group, f"param_groups[{number}]")
            self._convert_dict(vars(self._optimizer), "")
        return self._left

    def _converted(self, value: Any, where: str) -> Any:
        """``value``, or what takes its place."""
        if isinstance(value, Tensor):
            return self._tensor(value, where)
        is_container = isinstance(value, dict | list | deque | tuple)
        if id(value) in self._seen or not (is_container or _is_of_the_optimizer(value)):
            return value
        self._seen.add(id(value))
        if not is_container:
            self._convert_dict(vars(value), where)
        elif isinstance(value, dict):
            self._convert_dict(value, where)
        elif isinstance(value, list | deque):
            for index, item in enumerate(list(value)):
                value[index] = self._converted(item, f"{where}[{index}]")
        else:
            items = [self._converted(item, f"{where}[{index}]") for index, item in enumerate(value)]
            if any(new is not old for new, old in zip(items, value, strict=True)):
                return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
        return value

    def _convert_dict(self, held: dict[Any, Any], where: str) -> None:
        before = list(held.items())
        after = [(self._masters.get(id(key), key), self._converted(value, _below(where, key))) for key, value in before]
        if any(new is not old for (new, _), (old, _) in zip(after, before, strict=True)):
            held.clear()
        held.update(after)

    def _tensor(self, value: Tensor, where: str) -> Tensor:
        if id(value) in self._masters:
            return self._masters[id(value)]
        if value.dtype not in HALF_DTYPES:
            return value
        if (value.dtype, value.shape) not in self._kinds or not _has_own_memory(local(value)):
            if value.numel() > 1:
                self._left.append(where)
            return value
        if id(value) not in self._made:
            made = value.detach().float().requires_grad_(value.requires_grad)
            self._made[id(value)] = value, made
        return self._made[id(value)][1]


def _is_of_the_optimizer(value: Any) -> bool:
    """Whether an object's attributes are converted: an optimizer, a block of parameters; no module of the model.

    What can be called, loggers, and a wrapper, which has the table of parameters, lead to what is others'.
    """
    if not hasattr(value, "__dict__") or isinstance(vars(value).get("params"), ParamTable):
        return False
    return isinstance(value, Optimizer) or not (callable(value) or isinstance(value, ModuleType | logging.Filterer))


def _has_own_memory(piece: Tensor) -> bool:
    return type(piece) in _PLAIN and piece.untyped_storage().nbytes() == piece.numel() * piece.element_size()


def _below(where: str, key: Any) -> str:
    if not where and isinstance(key, str):
        return key
    return f"{where}[{key!r}]" if isinstance(key, (str, int)) else f"{where}[...]"
