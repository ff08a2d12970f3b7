"""Digests of all elements of a tensor, which add up over pieces, and guards of one rank's piece.

A digest is the sum, modulo 2^64, of one term for each 16-bit word: a mix of the word's index in the whole tensor with
its bits. So pieces of a tensor add up, on any number of ranks, and the order of a sum means nothing. A guard is such a
sum modulo 2^32, of words times odd factors of their places in memory. Passes that mark words keep it of what they
marked, so it is made to be cheap. It lets one arbitrary write in 2^32 through, and one in 2^16 where each word changes
in its highest bit alone, as when other code negates a weight. That shows in the digest, and the delta is refused where
it is applied.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .reference import slabs

_LOW = 0xFFFFFFFF
_GUARDED = 64  # words that have a factor in common
_INDEX, _FIRST, _SECOND = 0x9E3779B1, 0x85EBCA6B, 0xC2B2AE35  # odd: products with them lose nothing


def terms(index: Tensor, words: Tensor) -> Tensor:
    """What each word adds to a digest.

    With h = low 32 bits of index * 0x9E3779B1, h ^= h >> 16, h = (h ^ word) * 0x85EBCA6B, h ^= h >> 15,
    h *= 0xC2B2AE35, h ^= h >> 16, all modulo 2^32, it is h squared. Another word at the same index has another term.

    Args:
        index: int64, in the whole tensor.
        words: int16, of the same shape.

    Returns:
        int64, modulo 2^64. No sync.

    Example:
        >>> terms(torch.tensor([0, 1]), torch.tensor([0, 0], dtype=torch.int16)).tolist()[0]
        0
    """
    mixed = (index * _INDEX) & _LOW
    mixed = mixed ^ (mixed >> 16)
    mixed = ((mixed ^ (words.long() & 0xFFFF)) * _FIRST) & _LOW
    mixed = mixed ^ (mixed >> 15)
    mixed = (mixed * _SECOND) & _LOW
    mixed = mixed ^ (mixed >> 16)
    return mixed * mixed


def digest(words: Tensor, first: int = 0) -> Tensor:
    """The sum of the terms of words that follow one another in the whole.

    Args:
        words: int16, contiguous, of one dimension.
        first: the index of the first.

    Returns:
        int64, shape []. No sync.

    Example:
        >>> words = torch.arange(5, dtype=torch.int16)
        >>> bool(digest(words) == digest(words[:2]) + digest(words[2:], 2))
        True
    """
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    for part in slabs(words.numel()):
        index = torch.arange(first + part.start, first + part.stop, dtype=torch.int64, device=words.device)
        total += terms(index, words[part]).sum()
    return total


def guard_terms(places: Tensor, words: Tensor) -> Tensor:
    """What each word adds to a guard, modulo 2^32.

    With k = place % 64 it is word * ((2k + 1) * 0x6487 & 0x7fff), times h of place // 64: h = that * 0x9E3779B1,
    h ^= h >> 15, h *= 0x85EBCA6B, h ^= h >> 13, h |= 1, all modulo 2^32.

    Args:
        places: int64, in memory order.
        words: int16, of the same shape.

    Returns:
        int64, from 0 to 2^32 - 1. No sync.

    Example:
        >>> guard_terms(torch.tensor([0]), torch.tensor([1], dtype=torch.int16))
        tensor([25735])
    """
    keys = ((places % _GUARDED * 2 + 1) * 0x6487) & 0x7FFF
    factor = ((places // _GUARDED & _LOW) * _INDEX) & _LOW
    factor = ((factor ^ (factor >> 15)) * _FIRST) & _LOW
    factor = (factor ^ (factor >> 13)) | 1
    return ((words.long() * keys & _LOW) * factor) & _LOW


def guard(words: Tensor) -> Tensor:
    """The guard of a piece.

    Args:
        words: int16, contiguous, of one dimension: its words in memory order.

    Returns:
        int64, shape [], from 0 to 2^32 - 1. No sync.
    """
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    for part in slabs(words.numel()):
        places = torch.arange(part.start, part.stop, dtype=torch.int64, device=words.device)
        total += guard_terms(places, words[part]).sum()
    return total & _LOW


def digest_at(words: Tensor, index: Tensor) -> Tensor:
    """The sum of the terms of words that lie anywhere in the whole.

    Args:
        words: int16, of one dimension.
        index: int64, of each.

    Returns:
        int64, shape []. No sync.
    """
    return terms(index, words).sum()


def words_of(tensor: Tensor) -> Tensor:
    """A tensor's bits in logical order: int16, of one dimension; one word for each byte of a dtype of one byte.

    Example:
        >>> words_of(torch.ones(2)), words_of(torch.ones((), dtype=torch.bfloat16))
        (tensor([    0, 16256,     0, 16256], dtype=torch.int16), tensor([16256], dtype=torch.int16))
    """
    flat = tensor.detach().contiguous().view(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).view(-1)
    if flat.element_size() == 1:
        return flat.view(torch.uint8).to(torch.int16)
    return flat.view(torch.int16)


def words_each(dtype: torch.dtype) -> int:
    """How many words :func:`words_of` gives for each element."""
    return max(1, dtype.itemsize // 2)
