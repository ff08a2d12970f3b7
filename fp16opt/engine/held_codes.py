"""Codes of 8 bits for gradients that wait for the verdict: a byte an element, and an FP32 scale for each 256.

A code has a sign and 7 bits, which step like a float's exponent and 4 bits of its mantissa, moved so that 0 has one::

    encode  S = the largest |g| of the block; u = |g| / S; x = 1 + 247 u; a = min(127, (bits(x) + h - bits(1)) >> 19)
    decode  g = sign * (float_from_bits((a << 19) + bits(1)) - 1) * (S / 247)

x lies in 1 .. 248, and 248 is code 127 exactly, so the largest of a block is kept to a rounding of S / 247. Codes of an
octave of x are evenly spaced, by x / 16 at most: |decoded - g| <= (|g| + S / 247) / 16, up to roundings of FP32, which
are 2^-20 of it. Which of the two neighbours is taken is left to a dither h < 2^19 that depends on the element's place
and on S, and on nothing else: the mean over dithers is g, and the same gradient has the same code, so that a resumed
training needs no memory of it. To nearest, whatever is below S / 7,904 would be zero always, and Adam would never step
it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

BLOCK = 256
_SLABS = {"cpu": 2**8}  # blocks that are coded at a time: temporaries of FP32 and int64 stay small, and in caches
_SLAB = 2**12  # elsewhere, where a launch costs more than memory
_TOP, _ONE, _DROPPED = 247.0, 0x3F800000, 19
_PLACE, _SCALE = 0x9E3779B1, 0x85EBCA77  # odd: golden ratio, and a constant of MurmurHash3's finalizer


class Codes(NamedTuple):
    """A gradient in 8 bits.

    Attributes:
        codes: int8, one for each element in memory order.
        scales: float32, the largest magnitude of each block of 256.
    """

    codes: Tensor
    scales: Tensor


def in_memory_order(tensor: Tensor) -> Tensor:
    """A dense tensor as one dimension, in the order in which it lies in memory."""
    return tensor.as_strided((tensor.numel(),), (1,))


def encode(grad: Tensor) -> Codes:
    """Codes of a gradient. No host sync.

    Args:
        grad: dense, float16, bfloat16 or float32. What is not finite has any code.

    Example:
        >>> codes = encode(torch.tensor([0.0, 0.5, -1.0]))
        >>> codes.codes[0].item(), codes.codes[2].item(), codes.scales.item()
        (0, -127, 1.0)
    """
    flat = in_memory_order(grad.detach())
    blocks = -(-flat.numel() // BLOCK)
    codes = torch.empty_like(flat, dtype=torch.int8)
    scales = torch.empty(blocks, dtype=torch.float32, device=flat.device)
    slab = _SLABS.get(flat.device.type, _SLAB)
    for first in range(0, blocks, slab):
        part = flat[first * BLOCK : (first + slab) * BLOCK]
        count = -(-part.numel() // BLOCK)
        values = torch.zeros(count * BLOCK, dtype=torch.float32, device=flat.device)
        values[: part.numel()] = part
        values = values.view(count, BLOCK)
        size = values.abs()
        scale = size.amax(1, keepdim=True)
        scales[first : first + count] = scale.view(-1)
        size.div_(scale.masked_fill(scale == 0, 1.0)).mul_(_TOP).add_(1.0)
        steps = size.view(torch.int32).add_(_dither(scale, first)).sub_(_ONE).bitwise_right_shift_(_DROPPED)
        signed = torch.where(values < 0, -steps.clamp_(0, 127), steps)
        codes[first * BLOCK : (first + count) * BLOCK] = signed.view(-1)[: part.numel()]
    return Codes(codes, scales)


def _dither(scale: Tensor, first: int) -> Tensor:
    """int32 below 2**19 for each element of blocks from number ``first`` on."""
    start = first * BLOCK
    place = torch.arange(start, start + scale.numel() * BLOCK, dtype=torch.int64, device=scale.device)
    of_scale = (scale.view(torch.int32).to(torch.int64) >> 13) * _SCALE  # 16-bit gradients have no bits below
    mixed = (place.view(-1, BLOCK) * _PLACE + of_scale) & (2**_DROPPED - 1)
    dither: Tensor = mixed.to(torch.int32)
    return dither


def decode(held: Codes, out: Tensor) -> Tensor:
    """Write what the codes stand for into ``out``: dense, of the gradient's shape, any floating dtype. No host sync.

    Example:
        >>> decode(encode(torch.tensor([0.0, 0.5, -1.0])), torch.empty(3)).tolist()[::2]
        [0.0, -1.0]
    """
    flat = in_memory_order(out)
    slab = _SLABS.get(flat.device.type, _SLAB)
    for first in range(0, held.scales.numel(), slab):
        part = held.codes[first * BLOCK : (first + slab) * BLOCK]
        steps = part.to(torch.int32)
        values = (steps.abs() << _DROPPED).add_(_ONE).view(torch.float32).sub_(1.0)
        unit = held.scales[first : first + slab] / _TOP
        values.mul_(unit.repeat_interleave(BLOCK)[: part.numel()])
        flat[first * BLOCK : (first + slab) * BLOCK] = torch.where(steps < 0, -values, values)
    return out
