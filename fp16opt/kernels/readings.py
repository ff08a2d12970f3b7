"""What is read of a list of tensors, and the reader that serves where no compiled one does."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, overload

import torch
from torch import Tensor

_data_ptr, _stride, _is_neg = Tensor.data_ptr, Tensor.stride, Tensor.is_neg
_plain_dispatch: Any = Tensor.__torch_dispatch__


class Rows(Sequence["Tensor | None"]):
    """A list that was just read: a kernel takes that as it is, and reads nothing again.

    So it must not outlive the call that has read it, nor any code of the user's: memory that moved since would be read
    and written where it was.

    Attributes:
        tensors: the list.
        reading: of these; None where they can't be read, or are to be read by who gets them.

    Example:
        >>> rows = Rows((torch.ones(1), None), None)
        >>> len(rows), rows[1]
        (2, None)
    """

    __slots__ = ("__weakref__", "reading", "tensors")

    def __init__(self, tensors: tuple[Tensor | None, ...], reading: Any) -> None:
        self.tensors = tensors
        self.reading = reading

    def __len__(self) -> int:
        return len(self.tensors)

    @overload
    def __getitem__(self, at: int) -> Tensor | None: ...
    @overload
    def __getitem__(self, at: slice) -> tuple[Tensor | None, ...]: ...
    def __getitem__(self, at: int | slice) -> Tensor | tuple[Tensor | None, ...] | None:
        return self.tensors[at]

    def __iter__(self) -> Iterator[Tensor | None]:
        return iter(self.tensors)


class Forms(NamedTuple):
    """Classes of all entries, and of those that are there dtypes, devices, shapes and strides.

    A list of each takes less time than a tuple for each tensor.
    """

    types: list[type]
    dtypes: list[torch.dtype]
    devices: list[torch.device]
    shapes: list[torch.Size]
    strides: list[tuple[int, ...]]


class PlainReading:
    """How the entries of one list lay in memory when they were read, as the compiled ``Reading``. It keeps none alive.

    Attributes:
        addresses: of each; 0 of None.
    """

    __slots__ = ("_counts", "_forms", "addresses")

    def __init__(self, addresses: list[int], forms: Forms, counts: list[int] | None) -> None:
        self.addresses = addresses
        self._forms = forms
        self._counts = counts

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PlainReading) and self.addresses == other.addresses and self.lies_as(other)

    __hash__ = object.__hash__

    def lies_as(self, other: PlainReading) -> bool:
        """Whether two lists are of the same forms."""
        return self._forms is other._forms or self._forms == other._forms

    def has_dtypes_of(self, other: PlainReading) -> bool:
        """Whether dtypes are the same wherever both have a tensor."""
        mine, others = self._dtypes_by_place(), other._dtypes_by_place()
        pairs = zip(mine, others, strict=False)
        return len(mine) == len(others) and all(None in pair or pair[0] == pair[1] for pair in pairs)

    def _dtypes_by_place(self) -> list[torch.dtype | None]:
        dtypes = iter(self._forms.dtypes)
        return [None if kind is type(None) else next(dtypes) for kind in self._forms.types]

    @property
    def counts(self) -> list[int]:
        """How often each was written; -1 for None."""
        if self._counts is None:
            raise RuntimeError("versions were not read")
        return self._counts

    def has_counts_of(self, other: PlainReading) -> bool:
        """Whether all were written as often."""
        return self.counts == other.counts

    @property
    def types(self) -> list[type]:
        """The classes of the tensors, each once."""
        return [kind for kind in dict.fromkeys(self._forms.types) if kind is not type(None)]


class PlainReader:
    """The compiled ``Reader`` in Python.

    Args:
        grads_of: gives gradients of tensors.
        versions_of: gives their versions.
    """

    def __init__(
        self,
        grads_of: Callable[[Sequence[Tensor]], list[Tensor | None]],
        versions_of: Callable[[Sequence[Tensor | None]], list[int]],
    ) -> None:
        self._grads_of, self._versions_of = grads_of, versions_of

    def read(
        self, tensors: Sequence[Tensor | None], like: PlainReading | None, same: bool, counts: bool
    ) -> PlainReading | None:
        """What there is to read of a list; None where one can't be described, or is the negative of its memory.

        Args:
            like: what was read before.
            same: whether that was of the very same tensors. At the same addresses these are taken to have kept dtype,
                shape and strides. An address of 0, of empty tensors, tells nothing.
            counts: whether versions are read too.
        """
        there: Sequence[Any] = [tensor for tensor in tensors if tensor is not None]
        try:
            found = list(map(_data_ptr, there))
            types = list(map(type, tensors))
            addresses = found
            if len(there) < len(types):
                each = iter(found)
                addresses = [0 if tensor is None else next(each) for tensor in tensors]
            if same and like is not None and addresses == like.addresses and 0 not in found:
                forms = like._forms
            elif any(map(_is_neg, there)) or not all(map(_is_plain, set(types))):
                return None
            else:
                if 0 in found and not all(map(has_memory, there)):
                    return None
                columns = [one.dtype for one in there], [one.device for one in there], [one.shape for one in there]
                forms = Forms(types, *columns, list(map(_stride, there)))
        except (AttributeError, RuntimeError, TypeError):  # no tensor, or one without an address or strides
            return None
        return PlainReading(addresses, forms, self._versions_of(tensors) if counts else None)

    def gradients(
        self,
        tensors: Sequence[Tensor],
        like: PlainReading | None,
        known: Sequence[weakref.ref[Any] | None] | None,
        counts_alone: bool,
    ) -> tuple[tuple[Tensor | None, ...], PlainReading | None]:
        """The gradients of tensors, and what is read of them, with versions."""
        grads = tuple(self._grads_of(tensors))
        if counts_alone:
            return grads, PlainReading([], Forms(list(map(type, grads)), [], [], [], []), self._versions_of(grads))
        return grads, self.read(grads, like, False, True)


def has_memory(tensor: Tensor) -> bool:
    """Whether a tensor's elements, if it has any, lie somewhere: those of torch's zero tensor do not."""
    return tensor.data_ptr() != 0 or tensor.numel() == 0


def _is_plain(kind: type) -> bool:
    """Whether the address of such a tensor is where its values are."""
    return kind is type(None) or getattr(kind, "__torch_dispatch__", None) is _plain_dispatch
