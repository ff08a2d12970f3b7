"""What a training's tensors take, by what they are for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from .engine.dtensors import local, raw_grad
from .kernels.host_memory import is_on_host

_PACKAGE = __name__.split(".")[0]
_ENDS = (str, bytes, int, float, bool, type(None), torch.dtype, torch.device)


@dataclass(frozen=True)
class Memory:
    """Bytes of tensors on this rank; memory that several share counts once, for the first of these.

    Attributes:
        parameters: how many elements the parameters have.
        weights: the model's parameters.
        masters: what is kept beside 16-bit weights to make them FP32.
        moments: optimizer state, step counters included.
        gradients: the model's, the masters' and what is kept of them.
        engine: statistics, samples and the loss scale.
        host: how much of all that lies in page-locked memory of the host, for a card.

    Example:
        >>> Memory(1000, weights=2000, masters=4000, moments=8000, gradients=2000).per_parameter()
        16.0
        >>> print(Memory(1000, weights=2000, masters=4000, moments=8000))
        14.00 bytes a parameter: weights 2.00, masters 4.00, moments 8.00, gradients 0.00, engine 0.00
    """

    parameters: int
    weights: int = 0
    masters: int = 0
    moments: int = 0
    gradients: int = 0
    engine: int = 0
    host: int = 0

    @property
    def total(self) -> int:
        """All of it, in bytes."""
        return sum(self.parts().values())

    def parts(self) -> dict[str, int]:
        """Bytes by kind."""
        names = [field.name for field in fields(self) if field.name not in ("parameters", "host")]
        return {name: getattr(self, name) for name in names}

    def per_parameter(self) -> float:
        """Bytes for each element of a parameter; 0 where there are none."""
        return self.total / self.parameters if self.parameters else 0.0

    def __str__(self) -> str:
        if not self.parameters:  # this rank's shards are empty
            return f"{self.total} bytes; no element of a parameter is on this rank"
        parts = ", ".join(f"{name} {value / self.parameters:.2f}" for name, value in self.parts().items())
        said = f"{self.per_parameter():.2f} bytes a parameter: {parts}"
        if not self.host:
            return said
        card, host = (self.total - self.host) / self.parameters, self.host / self.parameters
        return f"{said}; on the card {card:.2f}, on the host {host:.2f}"


def measure(parameters: Iterable[Tensor], kinds: Mapping[str, Any]) -> Memory:
    """Count what is there now. No sync.

    Args:
        parameters: the model's.
        kinds: by attribute of :class:`Memory`, in the order in which shared memory is counted: whatever holds tensors.
            Of objects those of this package are searched.
    """
    seen: set[tuple[str, int]] = set()
    found = {name: list(_memory(tensors_in(holder), seen)) for name, holder in kinds.items()}
    taken = {name: sum(piece.untyped_storage().nbytes() for piece in pieces) for name, pieces in found.items()}
    host = sum(p.untyped_storage().nbytes() for pieces in found.values() for p in pieces if is_on_host(p))
    return Memory(sum(local(parameter).numel() for parameter in parameters), **taken, host=host)


def _memory(tensors: Iterable[Tensor], seen: set[tuple[str, int]]) -> Iterator[Tensor]:
    """A tensor of each piece of memory that is not ``seen`` yet."""
    for tensor in tensors:
        piece = local(tensor)
        if piece.layout is not torch.strided:
            yield from _memory((piece._indices(), piece._values()), seen)
            continue
        storage = piece.untyped_storage()
        address = (str(piece.device), storage.data_ptr() or id(tensor))
        if storage.nbytes() and address not in seen:
            seen.add(address)
            yield piece


def tensors_in(holder: Any) -> Iterator[Tensor]:
    """Every tensor of :func:`found_in`.

    Example:
        >>> [tensor.numel() for tensor in tensors_in({"a": [torch.zeros(2)], "b": (1, torch.zeros(3))})]
        [2, 3]
    """
    return (item for item in found_in(holder) if isinstance(item, Tensor))


def apart_from(weights: Iterable[Tensor], found: Iterable[Any]) -> list[Tensor]:
    """This rank's pieces of tensors among ``found``, and what views are of, but weights, their gradients and views."""
    theirs = [one for weight in weights for one in (weight, raw_grad(weight)) if one is not None]
    mine = [local(item) for item in found if isinstance(item, Tensor) and item.layout is torch.strided]
    mine += [one._base for one in mine if one._base is not None]  # a view holds it, and by it the memory
    known = {local(one).untyped_storage().data_ptr() for one in theirs if one.layout is torch.strided}
    return [one for one in mine if one.untyped_storage().data_ptr() not in known]


def found_in(holder: Any) -> Iterator[Any]:
    """Every tensor that ``holder`` leads to through containers and objects of this package, and these objects."""
    known: set[int] = set()
    open_ = [holder]
    while open_:
        item = open_.pop()
        if isinstance(item, _ENDS) or id(item) in known:
            continue
        known.add(id(item))
        if isinstance(item, Tensor):
            yield item
        elif isinstance(item, Mapping):
            open_ += reversed(list(item.values()))
        elif isinstance(item, (list, tuple, set, frozenset)):
            open_ += reversed(list(item))
        elif type(item).__module__.split(".")[0] == _PACKAGE and not isinstance(item, type):
            yield item
            open_ += list(vars(item).values()) if hasattr(item, "__dict__") else []
            names = (name for cls in type(item).__mro__ for name in cls.__dict__.get("__slots__", ()))
            open_ += [getattr(item, name) for name in names if hasattr(item, name)]
