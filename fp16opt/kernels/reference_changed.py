"""Marking which elements got other bits, written plainly in torch: the specification, as in reference.py."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from .changed import ChangedBits, packed, unpacked
from .digests import guard_terms
from .reference import flatten, memory_order, slabs


def mark(words: Tensor, before: Tensor, after: Tensor) -> None:
    """Note which 16-bit words differ. No sync.

    Args:
        words: int64, of a row of :class:`.changed.ChangedBits`. Written.
        before, after: int16, of one dimension, in memory order.
    """
    bits = words[1:].view(torch.uint8)
    for part in slabs(before.numel()):
        differ = before[part] != after[part]
        there = bits[part.start // 8 : -(-part.stop // 8)]
        fresh = differ & ~unpacked(there, differ.numel())
        index = torch.arange(part.start, part.stop, dtype=torch.int64, device=words.device)
        left = torch.where(fresh, guard_terms(index, before[part]), 0).sum()
        words[0].copy_((words[0] + left) & 0xFFFFFFFF)
        there |= packed(differ)


@contextlib.contextmanager
def marking(changed: ChangedBits | None, models: Sequence[Tensor | None], rows: Sequence[int]) -> Iterator[None]:
    """Within, 16-bit tensors are written; after it, their elements that got other bits are marked. No sync.

    Args:
        changed: for lists of as many tensors; None marks nothing.
        models: a list, of which those at ``rows`` are written.
    """
    before: list[tuple[int, Tensor, list[int], Tensor]] = []
    for row in rows if changed is not None else ():
        model = models[row]
        if model is not None:
            order = memory_order(model)
            before.append((row, model, order, _words(model, order).clone()))
    yield
    for row, model, order, words in before:
        if changed is not None:
            mark(changed.of(row), words, _words(model, order))


def _words(model: Tensor, order: list[int]) -> Tensor:
    """The bits of a 16-bit tensor in memory order."""
    return flatten(model.detach(), order).values.view(torch.int16)
