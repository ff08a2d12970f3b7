"""Split masters written plainly in torch: the specification of ``csrc/functors/split.h`` and ``split24.h``.

See :mod:`.reference`. A 16-bit weight, and a remainder of 16 bits (int16) or 8 (int8). float16: the weight is rounded
to nearest, and the remainder counts steps of 2^-16 or 2^-8 of its last place, to nearest. bfloat16: the upper 32
or 24 bits of the master, of which the weight is the upper half rounded to nearest, ties away from zero; the rest is
rounded by a dither that is a function of index and step (in steps), or to nearest.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .pieces import WHOLE, Piece
from .reference import flatten, memory_order, slabs, write_back
from .stats import NOT_FINITE, TOO_LARGE, CastStats

_COARSE_FROM = 0x477FF000  # 65520
_INFINITY = 0x7F800000
_ROUNDER = 12582912.0  # 1.5 * 2^23: adding and subtracting it rounds to a whole number
_INDEX_STRIDE, _STEP_STRIDE = 0x85EBCA77, 0x9E3779B1
_WIDTHS = {torch.int16: 16, torch.int8: 8}
"""Bits of a remainder."""


def _bits(values: Tensor) -> Tensor:
    """The bits of float32 as int64 from 0 to 2^32 - 1."""
    return values.contiguous().view(torch.int32).long() & 0xFFFFFFFF


def _low(bits: Tensor, width: int) -> Tensor:
    """The low bits of int64 as int16 or int8."""
    mask, sign = (1 << width) - 1, 1 << (width - 1)
    return (((bits & mask) ^ sign) - sign).to(torch.int16 if width == 16 else torch.int8)


def _singles(bits: Tensor) -> Tensor:
    """float32 from bits from 0 to 2^32 - 1."""
    return (((bits & 0xFFFFFFFF) ^ 0x80000000) - 0x80000000).to(torch.int32).view(torch.float32)


def _rounded(bits: Tensor, part: slice, number: int | None, piece: Piece) -> Tensor:
    """The bits of masters, with their lower 8 to be dropped; what is finite stays so."""
    if number is None:  # to nearest: half of what the last bit stands for, less one where that bit is even
        added = 0x7F + ((bits >> 8) & 1)
    else:
        index = piece.indices(torch.arange(part.start, part.stop, dtype=torch.int64, device=bits.device))
        added = ((index * _INDEX_STRIDE + (number & 0xFFFFFFFF) * _STEP_STRIDE) & 0xFFFFFFFF) >> 24
    leaves = ((bits & 0x7FFFFFFF) < _INFINITY) & (((bits + added) & 0x7FFFFFFF) >= _INFINITY)
    return torch.where(leaves, bits, bits + added)


def _split_bfloat16(master: Tensor, width: int, part: slice, number: int | None, piece: Piece) -> tuple[Tensor, Tensor]:
    bits = _bits(master)
    nan = (bits & 0x7FFFFFFF) > _INFINITY
    kept = bits if width == 16 else _rounded(bits, part, number, piece)
    weights = torch.where(nan, (bits >> 16) | 0x40, (kept + 0x8000) >> 16)
    return _low(weights, 16).view(torch.bfloat16), _low(torch.where(nan, 0, kept >> (16 - width)), width)


def _master_of(sums: Tensor, weights: Tensor) -> Tensor:
    """Both float32: what weights and remainders add up to, or the weight where that has another sign: a zero beside
    which the remainder of another weight was left. So each master rounds to the weight that is there."""
    return torch.where(torch.signbit(sums) == torch.signbit(weights), sums, weights)


def _join_bfloat16(weights: Tensor, remainders: Tensor, width: int) -> Tensor:
    bits = weights.view(torch.int16).long() << 16
    return _master_of(_singles(bits + (remainders.long() << (16 - width))), _singles(bits))


def _power(exponents: Tensor) -> Tensor:
    """2^(e - 127) for biased exponents."""
    return (exponents << 23).to(torch.int32).view(torch.float32)


def _half_exponents(weights: Tensor) -> Tensor:
    return ((weights.view(torch.int16).long() >> 10) & 31).clamp(min=1)


def _split_float16(master: Tensor, width: int, *_: object) -> tuple[Tensor, Tensor]:
    weights = master.to(torch.float16)
    exponents = _half_exponents(weights)
    finite, most = exponents < 31, float((1 << (width - 1)) - 1)
    away = torch.where(finite, (master - weights.float()) * _power(152 + width - exponents), 0.0)
    steps = ((away + _ROUNDER) - _ROUNDER).clamp(-most, most)
    magnitude = _bits(master) & 0x7FFFFFFF
    beyond = torch.where(magnitude == _INFINITY, (1 << width) - 1, (magnitude - _COARSE_FROM) >> (30 - width))
    beyond = torch.where(magnitude > _INFINITY, 0, beyond)
    return weights, _low(torch.where(finite, steps.long(), beyond), width)


def _join_float16(weights: Tensor, remainders: Tensor, width: int) -> Tensor:
    wide = weights.float()
    step = _power(_half_exponents(weights) + 102 - width)
    finite = _master_of(wide + remainders.float() * step, wide)
    bits, last = weights.view(torch.int16).long(), (1 << width) - 1
    code = remainders.long() & last
    beyond = _singles(((bits & 0x8000) << 16) | (_COARSE_FROM + (code << (30 - width))))
    coarse = ((bits & 0x7FFF) == 0x7C00) & (code != last)
    return torch.where(coarse, beyond, torch.where(torch.isfinite(wide), finite, wide))


def split(
    i: int,
    master: Tensor,
    param: Tensor,
    remainder: Tensor,
    stats: CastStats,
    number: int | None = None,
    piece: Piece = WHOLE,
) -> None:
    """Write ``master`` as weight and remainder, and flags to row ``i``.

    Args:
        i: the row of ``stats`` that belongs to this tensor.
        master: float32.
        param: float16 or bfloat16, shape of ``master``. Written.
        remainder: int16 or int8, shape of ``master``. Written.
        stats: ``overflow[i]`` is overwritten.
        number: of the step, by which bfloat16 with int8 remainders is rounded; None rounds to nearest.
        piece: by whose indices it is.
    """
    order = memory_order(param)
    source, target, rest = flatten(master, order).values, flatten(param, order), flatten(remainder, order)
    half, width = param.dtype == torch.float16, _WIDTHS[remainder.dtype]
    encode = _split_float16 if half else _split_bfloat16
    found = torch.zeros((), dtype=torch.int32, device=param.device)
    for part in slabs(source.numel()):
        weights, remainders = encode(source[part], width, part, number, piece)
        finite = torch.isfinite(source[part])
        magnitude = _bits(source[part]) & 0x7FFFFFFF
        too_large = (magnitude >= (_COARSE_FROM if half else 0x7F7F8000)) & finite
        found = found | (too_large.any().to(torch.int32) * TOO_LARGE + (~finite).any().to(torch.int32) * NOT_FINITE)
        target.values[part].copy_(weights)
        rest.values[part].copy_(remainders)
    write_back(target, param, order)
    write_back(rest, remainder, order)
    stats.overflow[i] = found


def join(param: Tensor, remainder: Tensor, out: Tensor) -> None:
    """Write the master that ``param`` and ``remainder`` stand for.

    Args:
        param: float16 or bfloat16.
        remainder: int16 or int8, shape of ``param``.
        out: float32, shape of ``param``. Written.
    """
    order = memory_order(out)
    weights, rest, target = flatten(param, order).values, flatten(remainder, order).values, flatten(out, order)
    decode, width = (_join_float16 if param.dtype == torch.float16 else _join_bfloat16), _WIDTHS[remainder.dtype]
    for part in slabs(weights.numel()):
        target.values[part].copy_(decode(weights[part].contiguous(), rest[part], width))
    write_back(target, out, order)


def reset_remainder(param: Tensor, remainder: Tensor, moved: Tensor, taken: Tensor) -> None:
    """``remainder`` becomes what ``param`` needs beside it to stand for itself, if ``moved``.

    Args:
        param: float16 or bfloat16.
        remainder: int16 or int8, shape of ``param``. Written.
        moved: bool, shape []. Where it is False nothing changes.
        taken: int32, shape []. Set to 1 if ``moved``, else left.
    """
    plain = torch.zeros_like(remainder)
    if param.dtype == torch.float16:  # with a remainder of 0 an infinite weight would stand for 65520
        plain.masked_fill_(torch.isinf(param), -1)
    remainder.copy_(torch.where(moved, plain, remainder))
    taken.masked_fill_(moved & bool(param.numel()), 1)
