"""Casts of floating tensors in nested containers: what models are called with and what they return."""

from __future__ import annotations

import collections.abc
import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

_LEFT_ALONE = (str, bytes, nn.Module, torch.Size, torch.dtype, torch.device)


def cast_nested(value: Any, dtype: torch.dtype, keep: tuple[torch.dtype, ...] = ()) -> Any:
    """``value`` with every floating tensor in it cast; the containers are rebuilt, never written.

    Lists, tuples, named tuples and mappings are walked. Anything else with a method ``to`` (batch classes of the
    user's) is asked for ``value.to(dtype)``. Integer tensors, strings, arrays, modules and other objects stay.

    Args:
        value: Anything.
        dtype: What floating tensors become.
        keep: Dtypes that stay as they are.

    Example:
        >>> cast_nested({"x": torch.zeros(1), "ids": [torch.tensor(3)]}, torch.float16)
        {'x': tensor([0.], dtype=torch.float16), 'ids': [tensor(3)]}
    """
    if isinstance(value, Tensor):
        if not value.is_floating_point() or value.dtype in keep or value.dtype == dtype:
            return value
        return value.to(dtype)
    if value is None or isinstance(value, _LEFT_ALONE):
        return value
    if isinstance(value, collections.abc.Mapping):
        return _cast_mapping(value, dtype, keep)
    if callable(getattr(value, "to", None)):
        return value.to(dtype)
    if isinstance(value, (list, tuple)):
        return rebuilt(value, [cast_nested(item, dtype, keep) for item in value])
    return value


def _cast_mapping(value: Any, dtype: torch.dtype, keep: tuple[torch.dtype, ...]) -> Any:
    items = {key: cast_nested(item, dtype, keep) for key, item in value.items()}
    if type(value) is dict or all(items[key] is value[key] for key in items):
        return items if type(value) is dict else value
    if isinstance(value, collections.abc.MutableMapping):
        result = copy.copy(value)  # keeps what the class holds besides its items: default factories, attributes
        for key, item in items.items():
            result[key] = item
        return result
    return type(value)(items)


def rebuilt(like: Any, items: list[Any]) -> Any:
    """``items`` in a list, tuple or named tuple like ``like``."""
    return type(like)(*items) if hasattr(like, "_fields") else type(like)(items)


def map_tensors(value: Any, function: Callable[[Tensor], Any]) -> Any:
    """``value`` with ``function`` of each tensor in it; lists, tuples and dicts are walked."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, (list, tuple)) and not isinstance(value, torch.Size):
        items = [map_tensors(item, function) for item in value]
        return value if all(a is b for a, b in zip(items, value, strict=True)) else rebuilt(value, items)
    if type(value) is dict:
        return {key: map_tensors(item, function) for key, item in value.items()}
    return value
