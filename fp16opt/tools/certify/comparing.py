"""What runs of an optimizer left, compared bit by bit."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer


def settings_of(group: dict[str, Any]) -> dict[str, Any]:
    """What a param group holds besides its parameters and their names."""
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def same_bits(a: Any, b: Any) -> bool:
    """Whether two nested structures hold the same bits. Objects of kinds unknown here are taken as the same."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        if a.layout is not torch.strided or b.layout is not torch.strided:
            return a.layout is b.layout and same_bits(a.to_dense(), b.to_dense())
        if (a.dtype, a.shape) != (b.dtype, b.shape):
            return False
        return torch.equal(*(t.detach().cpu().contiguous().reshape(-1).view(torch.uint8) for t in (a, b)))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same_bits(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(map(same_bits, a, b))
    if isinstance(a, float) and isinstance(b, float) and a != a:
        return b != b
    known = bool | int | float | complex | str | None
    return type(a) is type(b) and (a == b if isinstance(a, known) else True)


def states_of(params: list[Parameter], optimizer: Optimizer) -> list[Any]:
    """The state of each parameter, as it is; None where there is none."""
    return [optimizer.state.get(param) for param in params]


def everything(params: list[Parameter], optimizer: Optimizer) -> tuple[Any, ...]:
    """What two runs are compared by: parameters, their state, and the groups' settings."""
    return params, states_of(params, optimizer), [settings_of(group) for group in optimizer.param_groups]


def difference(one: tuple[Any, ...], other: tuple[Any, ...]) -> str:
    """What differs first, or nothing."""
    for word, a, b in zip(("parameter", "state of parameter", "settings of group"), one, other, strict=True):
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            if not same_bits(x, y):
                return f"{word} {i}"
    return ""


def tensors_of(value: Any) -> Iterator[tuple[str, Tensor]]:
    """(key, tensor) of all tensors in a parameter's state."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list | tuple) else ()
    for key, item in items:
        if isinstance(item, Tensor):
            yield str(key), item
        else:
            yield from ((f"{key}.{inner}", tensor) for inner, tensor in tensors_of(item))
