"""Bits that say which elements of 16-bit weights got other bits."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

Marks = tuple[Tensor | int, Tensor | int]
"""What kernels are given of bits: ``memory`` and ``offsets``, or zeros where nothing is marked."""


class ChangedBits:
    """Which elements of n tensors got other bits since the last :meth:`clear`: one bit an element, OR-ed by passes.

    A tensor's bits lie in memory order. Before them lies a word: the part of the tensor's guard (see :mod:`.digests`)
    that the marked elements had before they were marked. So what the other elements add to the guard is known, and a
    write by other code shows.

    Args:
        memory: int64, of one dimension: the rows one behind the other.
        starts: by position, where in ``memory`` the row of a tensor begins; -1 where there is none.
        numels: by position, how many elements.
        offsets: ``starts`` on the device, where they are there already.

    Attributes:
        offsets: ``starts`` on the device: int64, shape [n].

    Example:
        >>> changed = ChangedBits.allocate([torch.zeros(3, dtype=torch.float16)], "cpu")
        >>> changed.memory.numel(), changed.places(0)
        (2, tensor([], dtype=torch.int64))
    """

    def __init__(self, memory: Tensor, starts: list[int], numels: list[int], offsets: Tensor | None = None) -> None:
        self.memory, self.starts, self.numels = memory, starts, numels
        self.offsets = (
            offsets if offsets is not None else torch.tensor(starts, dtype=torch.int64, device="cpu").to(memory.device)
        )

    @classmethod
    def allocate(cls, tensors: Sequence[Tensor | None], device: torch.device | str) -> ChangedBits:
        """With nothing marked, for lists with these tensors on ``device``. Does not sync."""
        starts, numels, size = [], [], 0
        for tensor in tensors:
            numel = 0 if tensor is None else tensor.numel()
            starts.append(-1 if tensor is None else size)
            numels.append(numel)
            size += 0 if tensor is None else 1 + -(-numel // 64)
        return cls(torch.zeros(size, dtype=torch.int64, device=device), starts, numels)

    def select(self, rows: Sequence[int]) -> ChangedBits:
        """The same bits for a list of the tensors at ``rows`` alone."""
        return ChangedBits(self.memory, [self.starts[row] for row in rows], [self.numels[row] for row in rows])

    def of(self, row: int) -> Tensor:
        """int64: a tensor's sum, and its bits."""
        start = self.starts[row]
        return self.memory[start : start + 1 + -(-self.numels[row] // 64)]

    def places(self, row: int) -> Tensor:
        """Where marked elements lie in memory order: int64, from the least on. Syncs."""
        bits = self.of(row)[1:].view(torch.uint8)
        held = torch.nonzero(bits).view(-1)  # few bytes hold any
        inside = unpacked(bits[held], 8 * held.numel())
        within = torch.arange(8, dtype=torch.int64, device=bits.device)
        return (held.view(-1, 1) * 8 + within).view(-1)[inside]

    def clear(self) -> None:
        """Nothing is marked. Does not sync."""
        self.memory.zero_()


def packed(marks: Tensor) -> Tensor:
    """One bit for each element, from the lowest bit of a byte on.

    Args:
        marks: bool, of one dimension.

    Returns:
        uint8, with as many bytes as hold them.

    Example:
        >>> packed(torch.tensor([True, False, True] + [False] * 6))
        tensor([5, 0], dtype=torch.uint8)
    """
    rows = torch.nn.functional.pad(marks.to(torch.uint8), (0, -marks.numel() % 8)).view(-1, 8)
    return (rows << torch.arange(8, dtype=torch.uint8, device=marks.device)).sum(1, dtype=torch.uint8)


def unpacked(bits: Tensor, numel: int) -> Tensor:
    """The inverse of :func:`packed`: bool, of ``numel`` elements.

    Example:
        >>> unpacked(torch.tensor([5, 0], dtype=torch.uint8), 9).long()
        tensor([1, 0, 1, 0, 0, 0, 0, 0, 0])
    """
    shifts = torch.arange(8, dtype=torch.uint8, device=bits.device)
    return ((bits.view(-1, 1) >> shifts) & 1).view(-1)[:numel].to(torch.bool)
