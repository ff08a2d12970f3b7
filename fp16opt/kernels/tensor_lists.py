"""What is asked of whole lists of tensors: in one call of compiled code, or of Python item by item."""

from __future__ import annotations

import functools
import itertools
import operator
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from . import native
from .readings import PlainReader, Rows

_GRAD: Any = torch.Tensor.grad  # torch's own descriptors
_VERSION: Any = torch.Tensor._version
_read_version: Any = operator.attrgetter("_version")


@functools.cache
def _getter(name: str) -> Any:
    return native.module.Getter({"grad": _GRAD, "version": _VERSION}[name])


def grads_of(tensors: Iterable[Tensor]) -> list[Tensor | None]:
    """``.grad`` of each as torch holds it, whatever subclasses make of it."""
    with torch._C.DisableTorchFunctionSubclass():
        if native.module is None:
            return list(map(_GRAD.__get__, tensors))
        found: list[Tensor | None] = native.module.attributes_of(_getter("grad"), tensors)
        return found


def any_grad(tensors: Sequence[Tensor]) -> bool:
    """Whether one has a gradient: see :func:`grads_of`."""
    with torch._C.DisableTorchFunctionSubclass():
        if native.module is None:
            return any(map(operator.is_not, map(_GRAD.__get__, tensors), itertools.repeat(None)))
        return bool(native.module.has_attribute(_getter("grad"), tensors))


def set_grads(tensors: Sequence[Tensor], values: Sequence[Tensor | None] | None) -> None:
    """Set ``.grad`` of each to the value at its place, or of all to None, and nothing else."""
    if native.module is not None:
        native.module.set_attributes(_getter("grad"), tensors, values)
        return
    for tensor, value in zip(tensors, itertools.repeat(None) if values is None else values, strict=values is not None):
        _GRAD.__set__(tensor, value)


def set_classes(items: Sequence[Any], classes: Sequence[type]) -> None:
    """Have each be of the class at its place."""
    if native.module is not None:
        native.module.set_classes(items, classes)
        return
    for item, kind in zip(items, classes, strict=True):
        item.__class__ = kind


def versions_of(tensors: Sequence[Tensor | None]) -> list[int]:
    """How often each was written, as torch counts it; 0 for one that was made in inference mode, -1 for None."""
    with torch._C.DisableTorchFunctionSubclass():
        if native.module is not None:
            found: list[int] = native.module.versions_of(_getter("version"), tensors)
            return found
        try:
            return list(map(_read_version, tensors))
        except (AttributeError, RuntimeError):  # None has no version, and a tensor of inference mode counts none
            pass
        return [-1 if one is None else 0 if one.is_inference() else one._version for one in tensors]


_PLAIN_READER = PlainReader(grads_of, versions_of)


@functools.cache
def reader_of(module: Any) -> Any:
    """What reads how tensors lie in memory: the compiled module's reader, where torch has an exchange API (2.13 does).

    Args:
        module: :data:`.native.module`.
    """
    try:
        exchange: Any = Tensor.__dlpack_c_exchange_api__
        return module.Reader(exchange, Tensor.is_neg, _getter("grad"), _getter("version"))
    except (AttributeError, ValueError):
        return _PLAIN_READER


def are_items(items: Sequence[Any], of: Sequence[Any], start: int = 0) -> bool:
    """Whether ``items`` are the very objects that ``of`` holds from ``start`` on.

    Example:
        >>> a, b = torch.ones(1), torch.ones(1)
        >>> are_items([b], [a, b], 1), are_items([a], [a, b], 1), are_items([b, b], [a, b], 1)
        (True, False, False)
    """
    if native.module is not None:
        return bool(native.module.are_items(items, of, start))
    part = of[start : start + len(items)]
    return len(part) == len(items) and all(map(operator.is_, items, part))


def hold(columns: Iterable[tuple[Sequence[dict[str, Any]], str, Sequence[Any]]]) -> bool:
    """Of (dicts, a name, values) each: whether each dict holds, under the name, the very object at its place."""
    return all(itertools.starmap(_holds if native.module is None else native.module.hold, columns))


def _holds(dicts: Sequence[dict[str, Any]], name: str, values: Sequence[Any]) -> bool:
    return all(map(operator.is_, map(dict.get, dicts, itertools.repeat(name)), values))


def any_there(items: Sequence[Any]) -> bool:
    """Whether one is not None."""
    if native.module is not None:
        return bool(native.module.any_there(items))
    return any(map(operator.is_not, items, itertools.repeat(None)))


def all_there(items: Sequence[Any]) -> bool:
    """Whether none is None."""
    if native.module is not None:
        return bool(native.module.all_there(items))
    return all(map(operator.is_not, items, itertools.repeat(None)))


def types_of(items: Sequence[Any]) -> list[type]:
    """The classes of which there are items, each once."""
    if native.module is not None:
        found: list[type] = native.module.types_of(items)
        return found
    return list(dict.fromkeys(map(type, items)))


def references_to(items: Sequence[Any]) -> list[weakref.ref[Any] | None]:
    """A weak reference to each; None to None."""
    if native.module is not None:
        found: list[weakref.ref[Any] | None] = native.module.references_to(items)
        return found
    return [None if item is None else weakref.ref(item) for item in items]


def are_references_to(references: Sequence[weakref.ref[Any] | None], items: Sequence[Any]) -> bool:
    """Whether each refers to the item at its place."""
    if native.module is not None:
        return bool(native.module.are_references_to(references, items))
    pairs = zip(references, items, strict=True)
    return all(item is None if one is None else one() is item is not None for one, item in pairs)


# -- how tensors lie in memory -----------------------------------------------------------------------------------------


def gradients(
    tensors: Sequence[Tensor], like: Any = None, known: Sequence[weakref.ref[Any] | None] | None = None
) -> Rows:
    """:func:`grads_of`, with what :func:`read` reads of them, versions too: each is met once.

    Args:
        like: what was read of such a list before.
        known: the gradients that it was read of: of these :func:`read` says what goes unseen.
    """
    with torch._C.DisableTorchFunction():
        return Rows(*reader_of(native.module).gradients(tensors, like, known, False))


def counted_gradients(tensors: Sequence[Tensor]) -> Rows:
    """:func:`gradients`, with versions and classes alone."""
    with torch._C.DisableTorchFunction():
        return Rows(*reader_of(native.module).gradients(tensors, None, None, True))


def read(tensors: Sequence[Tensor | None], like: Any = None, same: bool = False, counts: bool = False) -> Any:
    """Addresses, classes, dtypes, devices, shapes and strides of a list.

    Args:
        like: what was read before, of a list that is probably of the same classes, dtypes, shapes and strides.
        same: whether that was of the very same tensors: those that lie where they lay are not asked again for whether
            their values are the negatives of what their memory holds. ``x.data = torch._neg_view(x.data)`` goes unseen.
        counts: whether versions are read too.

    Returns:
        A ``Reading`` of compiled code, or a :class:`.readings.PlainReading`. None where an entry is neither None nor a
        tensor that can be described, or is such a negative.
    """
    with torch._C.DisableTorchFunction():
        return reader_of(native.module).read(tensors, like, same, counts)
