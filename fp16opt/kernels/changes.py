"""Digests, guards and what was marked, by compiled kernels where these serve."""

from __future__ import annotations

import torch
from torch import Tensor

from . import digests, native
from .backends import compiled_for
from .changed import ChangedBits


def digest(words: Tensor, first: int = 0) -> Tensor:
    """The sum of the terms of words that follow one another in the whole: see :mod:`.digests`.

    Args:
        words: int16, contiguous, of one dimension.
        first: the index of the first.

    Returns:
        int64, shape [], on the device. No sync.

    Example:
        >>> words = torch.arange(5, dtype=torch.int16)
        >>> bool(digest(words) == digest(words[:2]) + digest(words[2:], 2))
        True
    """
    if compiled_for(words.device) is native:
        return torch.tensor(native.digest(words, first), dtype=torch.int64, device="cpu")
    return digests.digest(words, first)


def guard(words: Tensor) -> Tensor:
    """The guard of a piece: see :mod:`.digests`.

    Args:
        words: int16, contiguous, of one dimension: its words in memory order.

    Returns:
        int64, shape [], on the device, from 0 to 2^32 - 1. No sync.

    Example:
        >>> int(guard(torch.ones(2, dtype=torch.int16)))
        37404
    """
    if compiled_for(words.device) is native:
        return torch.tensor(native.guard(words), dtype=torch.int64, device="cpu")
    return digests.guard(words)


def guard_and_digest(words: Tensor, first: int = 0) -> tuple[Tensor, Tensor]:
    """:func:`guard` and :func:`digest` of a piece whose words lie in memory as they follow one another in the whole.

    Args:
        words: int16, contiguous, of one dimension.
        first: the index of the first.

    Returns:
        (int64, shape []; int64, shape []) on the device. No sync. The CPU's kernel reads the memory once.

    Example:
        >>> words = torch.arange(5, dtype=torch.int16)
        >>> guard_and_digest(words, 7) == (guard(words), digest(words, 7))
        True
    """
    if compiled_for(words.device) is native:
        mine, whole = native.guard_and_digest(words, first)
        return torch.tensor(mine, dtype=torch.int64, device="cpu"), torch.tensor(whole, dtype=torch.int64, device="cpu")
    return digests.guard(words), digests.digest(words, first)


def take(changed: ChangedBits, row: int, words: Tensor) -> tuple[Tensor, Tensor, int]:
    """What was marked of one tensor. Syncs.

    Args:
        words: int16, contiguous, of one dimension: the tensor in memory order.

    Returns:
        places in memory, int32 where they fit, from the least on; the words there, int16; and by how much the guard
        would be less if these words were what they were before they were marked, modulo 2^32.
    """
    bits = changed.of(row)
    if compiled_for(words.device) is native:
        places, taken, now = native.take_marked(bits[1:], words)
    else:
        found = changed.places(row)
        taken = words[found]
        now = int(digests.guard_terms(found, taken).sum())
        places = found.to(torch.int32) if words.numel() <= 2**31 else found
    return places, taken, (now - int(bits[0])) % 2**32
