"""Masters whose gradients are made when they are read: classes of parameters that ask before."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from ..kernels import counters
from .pairs import Pairs
from .sights import GRAD

Asked = Callable[[Tensor, "Tensor | None"], None]
Edited = Callable[[Tensor, "Tensor | None"], bool]


class MasterClasses:
    """Subclasses of Parameter (and of DTensor) whose ``grad`` makes true gradients before it is read or set.

    Copies and pickles of such parameters are plain ones again.

    Args:
        read: called with the model's parameter, and what the master holds, before ``.grad`` is read; not where the
            two hold the same, as under a GradScaler: then it was made.
        edit: called likewise before ``.grad`` is set. Says whether model and masters share gradients.
        share: called with the model's parameter and what the master's ``.grad`` was set to, where they do.

    Attributes:
        adopted: (master, its class, the ordinary class) of those that have one of them.
    """

    def __init__(self, read: Asked, edit: Edited, share: Asked) -> None:
        self._asks = read, edit, share
        self._of: dict[type, type] = {}
        # By id of their masters, which live as long as this. Weak: classes are freed by the garbage collector only.
        self._models: dict[int, weakref.ref[Tensor]] = {}
        self.adopted: list[tuple[Tensor, type, type]] = []

    def made(self, cls: type) -> bool:
        """Whether ``cls`` is one of them."""
        return self._of.get(cls.__mro__[1]) is cls

    def adopt(self, pairs: Pairs) -> None:
        """Have every master ask before its gradient is read."""
        for pair in pairs.all:
            cls = type(pair.master)
            if pair.master is not pair.model and not self.made(cls):
                if cls not in self._of:
                    self._of[cls] = _subclass(cls, self._models, *self._asks)
                pair.master.__class__ = self._of[cls]
                self._models[id(pair.master)] = weakref.ref(pair.model)
                self.adopted.append((pair.master, self._of[cls], cls))

    @contextlib.contextmanager
    def plain(self) -> Iterator[None]:
        """For as long as it lasts, masters are ordinary parameters, for which torch chooses its faster loops."""
        for master, _, ordinary in self.adopted:
            master.__class__ = ordinary
        try:
            yield
        finally:
            for master, cls, _ in self.adopted:
                master.__class__ = cls


def _subclass(
    cls: Any,
    models: dict[int, weakref.ref[Tensor]],
    read: Asked,
    edit: Edited,
    share: Asked,
) -> type:
    class MasterParameter(cls):  # type: ignore[misc]
        """An FP32 master whose gradient is made of the model's when it is read."""

        if "__slots__" in cls.__dict__:
            __slots__ = ()

        def _set_grad(self, value: Tensor | None) -> None:
            reference = models.get(id(self))  # none of one that was made of this class by somebody else
            model = None if reference is None else reference()
            shares = model is not None and edit(model, GRAD.__get__(self))
            GRAD.__set__(self, value)
            if model is not None and shares:
                share(model, value)

        def _delete_grad(self) -> None:
            self._set_grad(None)

        # Compiled code, where there is some: who drives reads each of them many times.
        grad = property(functools.partial(counters.asked_gradient, models, read), _set_grad, _delete_grad)

        def __reduce_ex__(self, protocol: Any) -> Any:
            plain = self.detach()
            made = torch.nn.Parameter(plain, requires_grad=self.requires_grad)
            made.__dict__.update(self.__dict__)
            return made.__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

        def __deepcopy__(self, memo: dict[int, Any]) -> Any:
            if id(self) not in memo:
                memo[id(self)] = torch.nn.Parameter(self.detach().clone(), requires_grad=self.requires_grad)
            return memo[id(self)]

    return MasterParameter
