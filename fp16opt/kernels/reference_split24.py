"""Masters in 24 bits written plainly in torch: the specification of ``csrc/functors/split24.h``. See :mod:`.reference`.

A 16-bit weight and an int8 remainder. float16: the weight is rounded to nearest, and the remainder counts 256ths of its
last place, to nearest. bfloat16: the upper 24 bits of the master, rounded by a dither that is a function of index and
step (in steps), or to nearest; the weight is their upper half rounded to nearest, ties away from zero.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .reference import flatten, memory_order, slabs, write_back
from .stats import NOT_FINITE, TOO_LARGE, CastStats

_COARSE_FROM, _COARSE_SHIFT = 0x477FF000, 22  # 65520
_INFINITY, _ROUNDER = 0x7F800000, 12582912.0
_INDEX_STRIDE, _STEP_STRIDE = 0x85EBCA77, 0x9E3779B1


def _bits(values: Tensor) -> Tensor:
    return values.contiguous().view(torch.int32).long() & 0xFFFFFFFF


def _singles(bits: Tensor) -> Tensor:
    return (((bits & 0xFFFFFFFF) ^ 0x80000000) - 0x80000000).to(torch.int32).view(torch.float32)


def _shorts(bits: Tensor) -> Tensor:
    return (((bits & 0xFFFF) ^ 0x8000) - 0x8000).to(torch.int16)


def _bytes(bits: Tensor) -> Tensor:
    return (((bits & 0xFF) ^ 0x80) - 0x80).to(torch.int8)


def _power(exponents: Tensor) -> Tensor:
    return (exponents << 23).to(torch.int32).view(torch.float32)


def _exponents(weights: Tensor) -> Tensor:
    return ((weights.view(torch.int16).long() >> 10) & 31).clamp(min=1)


def _dither(part: slice, number: int | None, bits: Tensor) -> Tensor:
    """What is added to the master's bits before the lower 8 are dropped."""
    if number is None:  # half, less one where the last bit that stays is even
        return 0x7F + ((bits >> 8) & 1)
    index = torch.arange(part.start, part.stop, dtype=torch.int64, device=bits.device)
    mixed = index * _INDEX_STRIDE + (number & 0xFFFFFFFF) * _STEP_STRIDE
    return (mixed & 0xFFFFFFFF) >> 24


def _split_bfloat16(master: Tensor, part: slice, number: int | None) -> tuple[Tensor, Tensor]:
    bits = _bits(master)
    rounded = bits + _dither(part, number, bits)
    leaves = ((bits & 0x7FFFFFFF) < _INFINITY) & ((rounded & 0x7FFFFFFF) >= _INFINITY)
    rounded = torch.where(leaves, bits, rounded)
    nan = (bits & 0x7FFFFFFF) > _INFINITY
    weights = torch.where(nan, (bits >> 16) | 0x40, (rounded + 0x8000) >> 16)
    return _shorts(weights).view(torch.bfloat16), _bytes(torch.where(nan, 0, rounded >> 8))


def _split_float16(master: Tensor, part: slice, number: int | None) -> tuple[Tensor, Tensor]:
    weights = master.to(torch.float16)
    exponents = _exponents(weights)
    finite = exponents < 31
    away = torch.where(finite, (master - weights.float()) * _power(160 - exponents), 0.0)
    counts = ((away + _ROUNDER) - _ROUNDER).clamp(-127.0, 127.0)
    magnitude = _bits(master) & 0x7FFFFFFF
    beyond = torch.where(magnitude == _INFINITY, 0xFF, (magnitude - _COARSE_FROM) >> _COARSE_SHIFT)
    beyond = torch.where(magnitude > _INFINITY, 0, beyond)
    return weights, _bytes(torch.where(finite, counts.long(), beyond))


def _join_bfloat16(weights: Tensor, remainders: Tensor) -> Tensor:
    return _singles((weights.view(torch.int16).long() << 16) + (remainders.long() << 8))


def _join_float16(weights: Tensor, remainders: Tensor) -> Tensor:
    wide, code, bits = weights.float(), remainders.long() & 0xFF, weights.view(torch.int16).long()
    counted = torch.where(remainders == 0, wide, wide + remainders.float() * _power(_exponents(weights) + 94))
    beyond = _singles(((bits & 0x8000) << 16) | (_COARSE_FROM + (code << _COARSE_SHIFT)))
    coarse = ((bits & 0x7FFF) == 0x7C00) & (code != 0xFF)
    return torch.where(coarse, beyond, torch.where(torch.isfinite(wide), counted, wide))


def split(
    i: int, master: Tensor, param: Tensor, remainder: Tensor, stats: CastStats, number: int | None = None
) -> None:
    """Write ``master`` as weight and remainder, and flags to row ``i``.

    Args:
        i: the row of ``stats`` that belongs to this tensor.
        master: float32.
        param: float16 or bfloat16, shape of ``master``. Written.
        remainder: int8, shape of ``master``. Written.
        stats: ``overflow[i]`` is overwritten.
        number: of the step, by which bfloat16 is rounded; None rounds to nearest.
    """
    order = memory_order(param)
    source, target, rest = flatten(master, order).values, flatten(param, order), flatten(remainder, order)
    half = param.dtype == torch.float16
    encode = _split_float16 if half else _split_bfloat16
    found = torch.zeros((), dtype=torch.int32, device=param.device)
    for part in slabs(source.numel()):
        weights, remainders = encode(source[part], part, number)
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
        remainder: int8, shape of ``param``.
        out: float32, shape of ``param``. Written.
    """
    order = memory_order(out)
    weights, rest, target = flatten(param, order).values, flatten(remainder, order).values, flatten(out, order)
    decode = _join_float16 if param.dtype == torch.float16 else _join_bfloat16
    for part in slabs(weights.numel()):
        target.values[part].copy_(decode(weights[part].contiguous(), rest[part]))
    write_back(target, out, order)
