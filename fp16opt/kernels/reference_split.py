"""Split masters written plainly in torch: the specification of ``csrc/functors/split.h``. See :mod:`.reference`."""

from __future__ import annotations

import torch
from torch import Tensor

from .reference import flatten, memory_order, slabs, write_back
from .stats import NOT_FINITE, TOO_LARGE, CastStats

_COARSE_FROM = 0x477FF000  # 65520
_COARSE_SHIFT = 14
_INFINITY = 0x7F800000
_ROUNDER = 12582912.0  # 1.5 * 2^23: adding and subtracting it rounds to a whole number


def _bits(values: Tensor) -> Tensor:
    """The bits of float32 as int64 from 0 to 2^32 - 1."""
    return values.contiguous().view(torch.int32).long() & 0xFFFFFFFF


def _shorts(bits: Tensor) -> Tensor:
    """The low 16 bits of int64 as int16."""
    return (((bits & 0xFFFF) ^ 0x8000) - 0x8000).to(torch.int16)


def _singles(bits: Tensor) -> Tensor:
    """float32 from bits from 0 to 2^32 - 1."""
    return (((bits & 0xFFFFFFFF) ^ 0x80000000) - 0x80000000).to(torch.int32).view(torch.float32)


def _split_bfloat16(master: Tensor) -> tuple[Tensor, Tensor]:
    bits = _bits(master)
    nan = (bits & 0x7FFFFFFF) > _INFINITY
    weights = torch.where(nan, (bits >> 16) | 0x40, (bits + 0x8000) >> 16)
    return _shorts(weights).view(torch.bfloat16), _shorts(torch.where(nan, 0, bits))


def _join_bfloat16(weights: Tensor, remainders: Tensor) -> Tensor:
    upper = weights.view(torch.int16).long() << 16
    return _singles(upper + remainders.long())


def _power(exponents: Tensor) -> Tensor:
    """2^(e - 127) for biased exponents."""
    return (exponents << 23).to(torch.int32).view(torch.float32)


def _half_exponents(weights: Tensor) -> Tensor:
    return ((weights.view(torch.int16).long() >> 10) & 31).clamp(min=1)


def _split_float16(master: Tensor) -> tuple[Tensor, Tensor]:
    weights = master.to(torch.float16)
    exponents = _half_exponents(weights)
    finite = exponents < 31
    away = torch.where(finite, (master - weights.float()) * _power(168 - exponents), 0.0)
    steps = ((away + _ROUNDER) - _ROUNDER).clamp(-32767.0, 32767.0)
    magnitude = _bits(master) & 0x7FFFFFFF
    beyond = torch.where(magnitude == _INFINITY, 0xFFFF, (magnitude - _COARSE_FROM) >> _COARSE_SHIFT)
    beyond = torch.where(magnitude > _INFINITY, 0, beyond)
    return weights, _shorts(torch.where(finite, steps.long(), beyond))


def _join_float16(weights: Tensor, remainders: Tensor) -> Tensor:
    wide = weights.float()
    step = _power(_half_exponents(weights) + 86)
    finite = torch.where(remainders == 0, wide, wide + remainders.float() * step)
    bits = weights.view(torch.int16).long()
    code = remainders.long() & 0xFFFF
    beyond = _singles(((bits & 0x8000) << 16) | (_COARSE_FROM + (code << _COARSE_SHIFT)))
    coarse = ((bits & 0x7FFF) == 0x7C00) & (code != 0xFFFF)
    return torch.where(coarse, beyond, torch.where(torch.isfinite(wide), finite, wide))


def split(i: int, master: Tensor, param: Tensor, remainder: Tensor, stats: CastStats) -> None:
    """Write ``master`` as weight and remainder, and flags to row ``i``.

    Args:
        i: the row of ``stats`` that belongs to this tensor.
        master: float32.
        param: float16 or bfloat16, shape of ``master``. Written.
        remainder: int16, shape of ``master``. Written.
        stats: ``overflow[i]`` is overwritten.
    """
    order = memory_order(param)
    source, target, rest = flatten(master, order).values, flatten(param, order), flatten(remainder, order)
    encode = _split_float16 if param.dtype == torch.float16 else _split_bfloat16
    found = torch.zeros((), dtype=torch.int32, device=param.device)
    for part in slabs(source.numel()):
        weights, remainders = encode(source[part])
        finite = torch.isfinite(source[part])
        too_large = (torch.isinf(weights) & finite).any().to(torch.int32)
        found = found | (too_large * TOO_LARGE + (~finite).any().to(torch.int32) * NOT_FINITE)
        target.values[part].copy_(weights)
        rest.values[part].copy_(remainders)
    write_back(target, param, order)
    write_back(rest, remainder, order)
    stats.overflow[i] = found


def join(param: Tensor, remainder: Tensor, out: Tensor) -> None:
    """Write the master that ``param`` and ``remainder`` stand for.

    Args:
        param: float16 or bfloat16.
        remainder: int16, shape of ``param``.
        out: float32, shape of ``param``. Written.
    """
    order = memory_order(out)
    weights, rest, target = flatten(param, order).values, flatten(remainder, order).values, flatten(out, order)
    decode = _join_float16 if param.dtype == torch.float16 else _join_bfloat16
    for part in slabs(weights.numel()):
        target.values[part].copy_(decode(weights[part].contiguous(), rest[part]))
    write_back(target, out, order)


def renew(param: Tensor, remainder: Tensor, moved: Tensor, taken: Tensor) -> None:
    """``remainder`` becomes what ``param`` needs beside it to stand for itself, if ``moved``.

    Args:
        param: float16 or bfloat16.
        remainder: int16, shape of ``param``. Written.
        moved: bool, shape []. Where it is False nothing changes.
        taken: int32, shape []. Set to 1 if ``moved``, else left.
    """
    plain = torch.zeros_like(remainder)
    if param.dtype == torch.float16:  # with a remainder of 0 an infinite weight would stand for 65520
        plain.masked_fill_(torch.isinf(param), -1)
    remainder.copy_(torch.where(moved, plain, remainder))
    taken.masked_fill_(moved & bool(param.numel()), 1)
