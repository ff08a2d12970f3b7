"""Which part of a whole tensor lies on a rank, for deltas."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..dtensors import is_sharded, local


class Region(NamedTuple):
    """The part of a whole tensor that lies on one rank: a block of it, in row-major order.

    Attributes:
        shape: of the whole.
        starts, sizes: of the part, by dimension.

    Example:
        >>> import torch
        >>> region = Region((2, 4), (0, 2), (2, 2))
        >>> region.is_whole, region.indices(torch.arange(4)).tolist(), region.places(torch.tensor([1, 3])).tolist()
        (False, [2, 3, 6, 7], [-1, 1])
    """

    shape: tuple[int, ...]
    starts: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def is_whole(self) -> bool:
        """Whether it is all of the tensor."""
        return self.sizes == self.shape

    @property
    def numel(self) -> int:
        """How many elements it has."""
        return math.prod(self.sizes)

    @property
    def first(self) -> int | None:
        """The index in the whole of the part's first element, where all others follow it there; else None.

        Example:
            >>> Region((4, 3), (2, 0), (2, 3)).first, Region((4, 3), (0, 1), (4, 2)).first
            (6, None)
        """
        outer = next((dim for dim, size in enumerate(self.sizes) if size != 1), len(self.sizes))
        if self.sizes[outer + 1 :] != self.shape[outer + 1 :]:
            return None
        found = 0
        for size, start in zip(self.shape, self.starts, strict=False):
            found = found * size + start
        return found

    def indices(self, places: Tensor) -> Tensor:
        """int64: where elements at ``places`` of the part lie in the whole, both in row-major order."""
        return places if self.is_whole else _renumbered(places, self.sizes, self.shape, self.starts)

    def places(self, indices: Tensor) -> Tensor:
        """int64: the inverse of :meth:`indices`; -1 for elements that are not in the part."""
        if self.is_whole:
            return indices
        inside = torch.ones_like(indices, dtype=torch.bool)
        rest = indices
        for size, start, length in zip(reversed(self.shape), reversed(self.starts), reversed(self.sizes), strict=True):
            at = rest % size - start
            inside &= (at >= 0) & (at < length)
            rest = rest // size
        back = tuple(-start for start in self.starts)
        return torch.where(inside, _renumbered(indices, self.shape, self.sizes, back), -1)


def _renumbered(numbers: Tensor, of: tuple[int, ...], into: tuple[int, ...], shift: tuple[int, ...]) -> Tensor:
    """Row-major numbers of elements of a block of sizes ``of`` as those in one of sizes ``into``, ``shift`` further."""
    found, step, rest = torch.zeros_like(numbers), 1, numbers
    for size, other, by in zip(reversed(of), reversed(into), reversed(shift), strict=True):
        found = found + (rest % max(size, 1) + by) * step
        rest, step = rest // max(size, 1), step * other
    return found


def region_of(tensor: Tensor) -> Region | None:
    """Which part of the whole this rank's piece is; None where torch can't say.

    Example:
        >>> import torch
        >>> region_of(torch.ones(2, 3))
        Region(shape=(2, 3), starts=(0, 0), sizes=(2, 3))
    """
    shape = tuple(tensor.shape)
    if not is_sharded(tensor):
        return Region(shape, (0,) * len(shape), shape)
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    whole: Any = tensor
    try:
        sizes, starts = compute_local_shape_and_global_offset(shape, whole.device_mesh, whole.placements)
    except (NotImplementedError, RuntimeError):
        return None
    found = Region(shape, tuple(starts), tuple(sizes))
    return found if found.sizes == tuple(local(tensor).shape) else None
