"""Where the elements of a tensor lie in the whole tensor of which it is one rank's piece."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from torch import Tensor

CHUNK = 65536
"""Elements that are worked on together: as csrc/launch/chunk.h."""
BLOCK = 128
"""Consecutive elements with one scale, where state has 8 bits."""


class Piece(NamedTuple):
    """Element i of the piece, in memory order, has in the whole the index ``offset + i // unit * stride + i % unit``.

    By that index 8-bit values are rounded; and at each unit blocks with one scale begin anew.

    Attributes:
        offset: of the first element.
        unit: elements that follow one another in the whole; of rows that blocks are not to cross, the elements of one.
            0: all, and ``stride`` means nothing.
        stride: from the first element of a unit to that of the next, in the whole.

    Example:
        >>> import torch
        >>> Piece(40, 3, 10).indices(torch.arange(5)).tolist()
        [40, 41, 42, 50, 51]
    """

    offset: int = 0
    unit: int = 0
    stride: int = 0

    def indices(self, places: Tensor) -> Tensor:
        """The indices in the whole of elements at ``places`` (int64) of the piece."""
        if not self.unit:
            return places + self.offset
        return places // self.unit * self.stride + places % self.unit + self.offset

    def block_count(self, numel: int, block: int = BLOCK) -> int:
        """How many scales a piece of ``numel`` elements has, one for each ``block`` of them.

        Example:
            >>> Piece().block_count(300), Piece(0, 100, 100).block_count(300)
            (3, 3)
        """
        unit = self.unit or max(numel, 1)
        return numel // unit * -(-unit // block)

    def chunks(self, numel: int) -> Iterator[tuple[int, int, int, int]]:
        """(start, elements, index of the first in the whole, its block) of each chunk."""
        unit = self.unit or numel
        for number, first in enumerate(range(0, numel, max(unit, 1))):
            for at in range(0, unit, CHUNK):
                index = self.offset + number * self.stride + at
                yield first + at, min(unit - at, CHUNK), index, number * -(-unit // BLOCK) + at // BLOCK


WHOLE = Piece()
"""A tensor that is no piece of another."""


def check_count(name: str, pieces: Sequence[Piece], count: int) -> None:
    """Raise ``ValueError`` unless there are ``count``."""
    if len(pieces) != count:
        raise ValueError(f"{name}: pieces has {len(pieces)} entries, grads has {count}. Give one each.")


def check_piece(name: str, place: int, piece: Piece, numel: int) -> None:
    """Raise ``ValueError`` unless ``numel`` elements can be that piece."""
    if min(piece) < 0:
        raise ValueError(f"{name}: pieces[{place}] must have no negative number, got {piece}.")
    if piece.unit and numel % piece.unit:
        raise ValueError(f"{name}: pieces[{place}] has units of {piece.unit} elements, the tensor has {numel}.")
