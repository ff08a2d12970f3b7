"""Copies of tensors of any class, and a snapshot of an optimizer, to go back to when something raises half-way."""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from .dtensors import is_expanded, local

_PLAIN = (Tensor, torch.nn.Parameter)


def copied(tensor: Tensor) -> Tensor:
    """``tensor`` in memory of its own, of the same class.

    Classes of other libraries that keep their numbers in inner tensors (torchao's 8-bit state) often lack ``clone``.
    torch's protocol for such classes takes them apart, and puts copies of the inner tensors together.

    Example:
        >>> values = torch.ones(2)
        >>> copied(values).add_(1), values
        (tensor([2., 2.]), tensor([1., 1.]))
    """
    if type(tensor) is Tensor and not tensor.requires_grad:
        return tensor.clone()
    if type(tensor) in _PLAIN or type(local(tensor)) in _PLAIN or not hasattr(tensor, "__tensor_flatten__"):
        return tensor.detach().clone()
    kind: Any = type(tensor)
    with torch.no_grad():
        names, context = tensor.__tensor_flatten__()
        parts = {name: copied(getattr(tensor, name)) for name in names}
        made: Tensor = kind.__tensor_unflatten__(parts, context, tensor.shape, tensor.stride())
    return made


class Snapshot:
    """An optimizer, and those that it has inside, as they are now: every attribute, container and tensor.

    Args:
        copies_tensors: Whether tensors are copied too: where code may run that writes them in place before it is done.
            Costs as much memory as parameters and state. Placeholders of split masters hold nothing.
    """

    def __init__(self, optimizer: Optimizer, copies_tensors: bool) -> None:
        self._copies_tensors = copies_tensors
        self._seen: set[int] = set()
        self._containers: list[tuple[Any, list[Any]]] = []
        self._tensors: list[tuple[Tensor, Tensor, Tensor]] = []
        self._keep(optimizer)

    def _keep(self, value: Any) -> None:
        if isinstance(value, Optimizer):
            value = vars(value)
            if not self._copies_tensors:  # torch's own loading puts others in their place, and writes none of them
                self._seen |= {id(value["state"]), id(value["param_groups"])}
        if not isinstance(value, Tensor | dict | list | set | deque | tuple) or id(value) in self._seen:
            return
        self._seen.add(id(value))
        if isinstance(value, Tensor):
            if self._copies_tensors and not is_expanded(value):
                is_plain = type(value) in _PLAIN
                self._tensors.append((value, value.detach() if is_plain else value, copied(value)))
            return
        content = list(value.items()) if isinstance(value, dict) else list(value)
        if not isinstance(value, tuple):
            self._containers.append((value, content))
        for item in content:
            self._keep(item)

    def restore(self) -> None:
        """Put everything back, into the same objects."""
        for container, content in self._containers:
            container.clear()
            if isinstance(container, dict | set):
                container.update(content)
            else:
                container.extend(content)
        with torch.no_grad():
            for tensor, before, values in self._tensors:
                if type(tensor) in _PLAIN and not _same_memory(tensor, before):
                    tensor.data = before
                tensor.copy_(values)


def _same_memory(a: Tensor, b: Tensor) -> bool:
    if a.layout != torch.strided or b.layout != torch.strided:
        return a.layout == b.layout
    return a.data_ptr() == b.data_ptr() and (a.dtype, a.shape, a.stride()) == (b.dtype, b.shape, b.stride())
