"""Many tensors' gradients as torch holds them, and how often each tensor was written."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable
from typing import Any
from weakref import ReferenceType

import torch
from torch import Tensor

from . import native

__all__ = [
    "GRAD",
    "Reader",
    "asked_gradient",
    "count_there",
    "gradients",
    "have_gradients",
    "have_versions",
    "hold_gradients",
    "see",
    "set_gradients",
    "store",
    "versions",
]

GRAD: Any = Tensor.grad  # torch's own descriptor, in front of which subclasses may put another
_VERSION: Any = Tensor._version
_NONE = type(None)


def _count_their_own(tensors: list[Tensor | None]) -> bool:
    """Whether none may leave it to a tensor inside, as DTensor does: all have torch's own dispatch."""
    kinds = set(map(type, tensors)) - {Tensor, _NONE}
    if not all(issubclass(kind, Tensor) for kind in kinds):
        raise TypeError("a list holds something that is not a tensor")
    return all(getattr(kind, "__torch_dispatch__", None) is Tensor.__torch_dispatch__ for kind in kinds)


class Reader:
    """The functions of this file in Python, which serve where there is no compiled module.

    Tensors of subclasses are read as plain ones: neither a ``grad`` of the subclass nor its ``__torch_function__`` is
    called. Nothing syncs. TypeError is raised where a list holds something else than tensors, and None where it may be.
    """

    def gradients(self, tensors: list[Any]) -> list[Tensor | None]:
        """``.grad`` of each tensor.

        Example:
            >>> gradients([torch.zeros(1)])
            [None]
        """
        with torch._C.DisableTorchFunctionSubclass():
            return list(map(GRAD.__get__, tensors))

    def see(self, tensors: list[Any]) -> tuple[list[Tensor | None], list[int] | None]:
        """``.grad`` of each tensor, and as :meth:`versions` of these; None also where one counts none.

        Example:
            >>> x = torch.zeros(1)
            >>> x.grad = torch.ones(1).mul_(2.0)
            >>> see([x])
            ([tensor([2.])], [1])
        """
        grads = self.gradients(tensors)
        try:
            return grads, self.versions(grads)
        except RuntimeError:  # made in inference mode
            return grads, None

    def count_there(self, tensors: list[Any]) -> int:
        """How many are not None. ``list.count`` would compare tensors.

        Example:
            >>> count_there([None, torch.zeros(1)])
            1
        """
        return sum(map(operator.is_not, tensors, itertools.repeat(None)))

    def set_gradients(self, tensors: list[Any], grads: list[Any]) -> None:
        """Set ``.grad`` of each tensor, whatever a subclass puts before it.

        Raises:
            TypeError, RuntimeError: torch refuses one; those before it are set.
            ValueError: the lists differ in length.

        Example:
            >>> x, y = torch.zeros(1), torch.ones(1)
            >>> set_gradients([x], [y])
            >>> x.grad is y
            True
        """
        if len(tensors) != len(grads):
            raise ValueError("there must be one gradient for each tensor")
        with torch._C.DisableTorchFunctionSubclass():
            for tensor, grad in zip(tensors, grads, strict=True):
                GRAD.__set__(tensor, grad)

    def have_gradients(self, tensors: list[Any]) -> bool:
        """Whether ``.grad`` of one of them is not None.

        Example:
            >>> have_gradients([torch.zeros(1)])
            False
        """
        return any(map(operator.is_not, self.gradients(tensors), itertools.repeat(None)))

    def asked_gradient(
        self,
        partners: dict[int, ReferenceType[Tensor]],
        ask: Callable[[Tensor, Tensor | None], None],
        tensor: Tensor,
    ) -> Tensor | None:
        """``.grad`` of one tensor, for which somebody is asked first, unless its partner holds the very same.

        Args:
            partners: by id of a tensor, its partner; one that has none, or whose partner is gone, is read as it is.
            ask: called with the partner, and with what the tensor holds so far; it may change both.

        Example:
            >>> import weakref
            >>> x, y = torch.zeros(1), torch.ones(1)
            >>> partners = {id(x): weakref.ref(y)}
            >>> asked_gradient(partners, lambda partner, held: setattr(x, "grad", partner * 2.0), x)
            tensor([2.])
        """
        found: Tensor | None = GRAD.__get__(tensor)
        reference = partners.get(id(tensor))
        partner = None if reference is None else reference()
        if partner is not None and (found is None or found is not GRAD.__get__(partner)):
            ask(partner, found)
            found = GRAD.__get__(tensor)
        return found

    def versions(self, tensors: list[Any]) -> list[int] | None:
        """The version counter of each tensor, -1 for None.

        Returns:
            None where one may leave counting to a tensor inside, as DTensor does.

        Raises:
            RuntimeError: one was made in inference mode, and counts none.

        Example:
            >>> versions([torch.zeros(1).add_(1.0), None])
            [1, -1]
        """
        if not _count_their_own(tensors):
            return None
        with torch._C.DisableTorchFunctionSubclass():
            return [-1 if tensor is None else _VERSION.__get__(tensor) for tensor in tensors]

    def have_versions(self, tensors: list[Any], then: list[int]) -> bool:
        """Whether ``versions(tensors) == then``.

        Raises:
            RuntimeError: as :meth:`versions`.

        Example:
            >>> x = torch.zeros(1)
            >>> have_versions([x], [0]), have_versions([x.add_(1.0)], [0])
            (True, False)
        """
        return self.versions(tensors) == then

    def hold_gradients(self, tensors: list[Any], grads: list[Tensor | None], then: list[int]) -> bool:
        """Whether ``.grad`` of each is the very tensor in ``grads``, in the version that stands in ``then``.

        False where that is not known at once: where one was made in inference mode, and counts no versions.

        Example:
            >>> x = torch.zeros(1)
            >>> x.grad = torch.zeros(1)
            >>> hold_gradients([x], [x.grad], [0]), hold_gradients([x], [torch.zeros(1)], [0])
            (True, False)
        """
        now = self.gradients(tensors)
        alike = len(now) == len(grads) and all(map(operator.is_, now, grads))
        try:
            return alike and self.have_versions(now, then)
        except RuntimeError:
            return False


_reader = native.tensor_reader(GRAD, _VERSION) or Reader()
asked_gradient = _reader.asked_gradient
count_there = _reader.count_there
gradients = _reader.gradients
see = _reader.see
set_gradients = _reader.set_gradients
have_gradients = _reader.have_gradients
versions = _reader.versions
have_versions = _reader.have_versions
hold_gradients = _reader.hold_gradients


def store(tensor: Tensor, grad: Tensor | None) -> None:
    """Set ``.grad``, and nothing else."""
    GRAD.__set__(tensor, grad)
