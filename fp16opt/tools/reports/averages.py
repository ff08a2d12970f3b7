"""Averages of 16-bit weights that a loop keeps in 16 bits, seen while they are made."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from types import FrameType
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from ...engine.dtensors import raw_grad
from ...engine.params import HALF_DTYPES

_SUMS, _DIFFERENCES = {"add", "radd", "iadd", "sub", "isub"}, {"sub", "rsub"}
_PRODUCTS = {"mul", "rmul", "imul", "div", "truediv", "itruediv"}
_WATCHED = {"lerp"} | _SUMS | _DIFFERENCES | _PRODUCTS


class Averages(TorchFunctionMode):
    """Sees where a 16-bit tensor that is no weight and no gradient is mixed with a weight of its shape.

    So are ``average.lerp_(weight, 0.1)``, ``average.mul_(0.9).add_(weight, alpha=0.1)``, ``0.9 * average + 0.1 *
    weight`` and ``average += (weight - average) / n``. What autograd follows is part of a forward.

    Args:
        params: the 16-bit weights.
        tell: gets the frame of each.
    """

    def __init__(self, params: Iterable[Tensor], tell: Callable[[FrameType], None]) -> None:
        super().__init__()
        self._params = {param.data_ptr(): param for param in params}
        self._tell = tell
        self._names: dict[Any, str] = {}
        self._shares = WeakTensorKeyDictionary()
        """Weights times a number, or less another tensor: what an average adds."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        made = func(*args, **kwargs)
        name = self._names.get(func)
        if name is None:
            name = self._names[func] = getattr(func, "__name__", "").strip("_").removeprefix("foreach_")
        if name in _WATCHED:
            for result, *operands in _together(args[0] if made is None else made, *args):
                self._look(name, result, operands, kwargs.get("alpha", 1))
        return made

    def _look(self, name: str, made: Any, operands: list[Any], alpha: Any) -> None:
        if not isinstance(made, Tensor) or made.dtype not in HALF_DTYPES or made.grad_fn is not None:
            return
        if self._is_held(made):
            return
        tensors = [one for one in operands[:2] if isinstance(one, Tensor) and one.shape == made.shape]
        weights = [one for one in tensors if one.data_ptr() in self._params]
        shares = [one for one in tensors if one in self._shares]
        has_other = len(tensors) > len(weights) + len(shares)
        if has_other and ((name == "lerp" and weights) or (name in _SUMS and (shares or (weights and alpha != 1)))):
            self._tell(sys._getframe(1))
        elif (name in _DIFFERENCES and weights) if has_other else (name in _PRODUCTS and (weights or shares)):
            self._shares[made] = True

    def _is_held(self, tensor: Tensor) -> bool:
        """Whether it is a weight or a gradient."""
        at = tensor.data_ptr()
        grads = (raw_grad(param) for param in self._params.values() if param.shape == tensor.shape)
        return at in self._params or any(grad is tensor for grad in grads)


def _together(*values: Any) -> Iterator[list[Any]]:
    """The values themselves, or those of lists at each place: a number goes with all."""
    if not isinstance(values[0], (list, tuple)):
        yield list(values)
        return
    for place in range(len(values[0])):
        yield [value[place] if isinstance(value, (list, tuple)) and place < len(value) else value for value in values]
