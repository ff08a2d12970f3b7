"""Counts of ranks, and which rank it is where it is one, as digits of the few numbers that a step's message has."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from .settings import number_limit

_EXACT = 2**53  # float64 counts up to here without gaps


class Digits:
    """How several numbers travel as digits of few, so that their sums over the ranks need few slots.

    float64 holds whole numbers exactly below 2**53. There are two slots, or more where those that are needed don't fit.

    Args:
        needed: radices; sums over the ranks are below them.
        spare: of numbers that are left out where the two slots have no room for them.
    """

    def __init__(self, needed: Sequence[float], spare: Sequence[float], device: torch.device) -> None:
        full = [1.0, 1.0]
        rows: list[tuple[int, float, float, float]] = []  # slot, weight, radix, and 1 where it is left out
        for number, radix in enumerate((*needed, *spare)):
            slot = next((k for k, weight in enumerate(full) if weight * radix <= _EXACT), len(full))
            if slot == len(full):
                if number >= len(needed):
                    rows.append((0, 1.0, 1.0, 1.0))
                    continue
                full.append(1.0)
            rows.append((slot, full[slot], radix, 0.0))
            full[slot] *= radix
        matrix = [[0.0 if out or slot != k else weight for slot, weight, _, out in rows] for k in range(len(full))]
        self._matrix = torch.tensor(matrix, dtype=torch.float64, device=device)
        slots, *others = (torch.tensor(each, dtype=torch.float64, device=device) for each in zip(*rows, strict=True))
        self._slots = slots.long()
        self._weights, self._radices, self._left_out = others

    def packed(self, numbers: Tensor) -> Tensor:
        """The slots, of a number for each radix."""
        return (self._matrix * numbers).sum(1)

    def unpacked(self, slots: Tensor) -> Tensor:
        """The numbers that were added up; -1 for what was left out."""
        return torch.floor(slots[self._slots] / self._weights) % self._radices - self._left_out


@functools.lru_cache(maxsize=16)
def digits_of(verdicts: int, size: int, device: torch.device) -> Digits:
    """Of a message between ``size`` ranks: see :meth:`GroupRanks.agree`."""
    index = size * (size - 1) / 2 + 1
    needed = [float(size + 1)] * (1 + verdicts) + [float(size * number_limit(size) + 1)]
    return Digits(needed, [index, float(size + 1), index], device)
