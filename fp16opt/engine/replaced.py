"""Parameters in whose place the model has others: it was sharded, moved or built anew after the optimizer was made."""

from __future__ import annotations

import gc
import sys
from collections.abc import Sequence

from torch import nn

from . import errors
from .diagnostics import describe
from .dtensors import raw_grad
from .params import ParamPair, numbered

_PATIENCE = 4  # steps without a gradient, after which it is looked for in any case


class ReplacedParams:
    """Looks for them until a step has gradients, and in that step.

    Args:
        pairs: of a new optimizer; none for one that isn't.

    Attributes:
        is_over: whether there is nothing more to look for.
    """

    def __init__(self, pairs: Sequence[ParamPair] = ()) -> None:
        self.is_over = not pairs
        self._without = 0
        self._references = {id(pair.model): sys.getrefcount(pair.model) for pair in pairs}

    def look(self, pairs: Sequence[ParamPair], has_grads: bool) -> None:
        """A step is about to be made, or to find that it has no gradients.

        Where a module has let go of a parameter, fewer objects hold it than before: only then is it looked for.

        Raises:
            RuntimeError: the model has other parameters in the place of some.
        """
        if self.is_over:
            return
        self._without += 1
        lost = [pair for pair in pairs if _is_trained(pair) and not _has_grad(pair)]
        fewer = [p for p in lost if sys.getrefcount(p.model) < self._references.get(id(p.model), 0)]
        if fewer or (lost and self._without == _PATIENCE):
            names = replaced(lost)
            if names:
                self._without = _PATIENCE - 1  # as long as that is so, it is looked for and raised
                raise errors.OTHER_PARAMETERS(count=len(names), names=describe(names))
        self.is_over = has_grads


def replaced(pairs: Sequence[ParamPair]) -> list[str]:
    """Names of parameters that no module of this process has any more, and in whose place one has another.

    That is one of the same shape, and of the same name where that is known, with a gradient. Parameters that were in no
    module from the start are let be.

    Costs a look at every object that Python's garbage collector knows, some 0.1 s a million.
    """
    if gc.get_freeze_count():  # what is frozen isn't listed
        return []
    lost = {id(pair.model): pair for pair in pairs}
    others: set[tuple[str, tuple[int, ...]]] = set()
    for module in gc.get_objects():
        if not issubclass(type(module), nn.Module):
            continue
        own = module.__dict__.get("_parameters")
        for name, param in own.items() if type(own) is dict else ():
            if param is not None and lost.pop(id(param), None) is None and raw_grad(param) is not None:
                others.update(((name, param.shape), ("", param.shape)))
    return [pair.name for pair in lost.values() if (_own_name(pair), pair.model.shape) in others]


def _is_trained(pair: ParamPair) -> bool:
    """Plain tensors are in no module."""
    return isinstance(pair.model, nn.Parameter) and pair.model.requires_grad


def _has_grad(pair: ParamPair) -> bool:
    """FP32 sums are the master's."""
    return raw_grad(pair.model) is not None or raw_grad(pair.master) is not None


def _own_name(pair: ParamPair) -> str:
    """What its module calls it; "" where that is not known."""
    return "" if pair.name == numbered(pair.group, pair.index) else pair.name.rpartition(".")[2]
