"""Norms of gradients, and what a clip makes of them."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from . import kernels

if TYPE_CHECKING:
    from .gradients import MasterGrads
    from .shard import Shard


def total_norm(parts: list[Tensor], norm_type: float, device: torch.device) -> Tensor:
    """The norm over tensors whose norms are ``parts``: float64, 0-dim, on ``device``."""
    if len(parts) == 1:
        return parts[0].to(device)
    if not parts:
        return torch.zeros((), dtype=torch.float64, device=device)
    return vector_norm(torch.stack([part.to(device) for part in parts]), norm_type)


def vector_norm(value: Tensor, norm_type: float) -> Tensor:
    """The norm of one dense tensor: float64, 0-dim. No host sync."""
    dtype = torch.complex128 if value.is_complex() else torch.float64
    norm: Tensor = torch.linalg.vector_norm(value, norm_type, dtype=dtype)
    return norm


def clip_factor(norm: Tensor, max_norm: float, found_inf: Tensor | None = None) -> Tensor:
    """What gradients of this norm (float64, 0-dim) are multiplied by: float32, at most 1. No host sync.

    The formula and the bits of ``torch.nn.utils.clip_grad_norm_``, which works in the norm's float32. Where the norm is
    finite but too large for float32 the factor is taken in float64.

    Args:
        norm: On any device.
        max_norm: To clip at.
        found_inf: float32, 0-dim: not zero where gradients are to stay as they are.

    Example:
        >>> clip_factor(torch.tensor(4.0, dtype=torch.float64), 1.0)
        tensor(0.2500)
    """
    if norm.device.type == "cpu" and (found_inf is None or found_inf.device.type == "cpu"):
        keeps = found_inf is not None and found_inf.item() > 0
        return torch.full((), 1.0 if keeps else _host_factor(norm.item(), max_norm), dtype=torch.float32, device="cpu")
    single = norm.float()
    factor = torch.where(single.isfinite(), max_norm / (single + 1e-6), (max_norm / norm).float()).clamp(max=1.0)
    return factor if found_inf is None else torch.where(found_inf.to(factor.device) > 0, 1.0, factor)


def _host_factor(norm: float, max_norm: float) -> float:
    """The same, one operation after the other: ten small torch calls wait for the memory that their code is in.

    A sum, product or quotient of float32 numbers that is rounded to a double and then to float32 has the bits of one
    rounding. A number divided by a tensor is the tensor's reciprocal times the number in torch.
    """
    single = as_float32(norm)
    if math.isfinite(single):
        factor = as_float32(as_float32(1.0 / as_float32(single + as_float32(1e-6))) * as_float32(max_norm))
    else:
        factor = as_float32(1.0 / norm * max_norm)
    return 1.0 if factor > 1.0 else factor


def as_float32(value: float) -> float:
    """``value`` rounded to float32; infinite where it is too large.

    Example:
        >>> as_float32(0.1), as_float32(1e39)
        (0.10000000149011612, inf)
    """
    return ctypes.c_float(value).value


def power_sum(grads: MasterGrads, norm_type: float, device: torch.device, counted: Callable[[Tensor], bool]) -> Tensor:
    """float64, 0-dim: the sum of |g|**p over the elements that this rank counts (p = inf: the largest |g|)."""
    total = torch.zeros((), dtype=torch.float64, device=device)
    with torch.no_grad():
        for shard in grads.params.shards:
            mask = [counted(grads.params.model[i]) for i in shard.index]
            part = _power_sum_of(grads, shard, norm_type, mask).to(total)
            total = torch.maximum(total, part) if norm_type == math.inf else total + part
    return total


def _power_sum_of(grads: MasterGrads, shard: Shard, norm_type: float, mask: list[bool]) -> Tensor:
    if norm_type == 2.0:
        if grads._is_measured():
            squares = shard.stats.sumsq
        else:
            squares = kernels.multi_tensor_l2norm(grads.values(shard), tables=shard.norm_tables)[1].square()
        return squares.mul(torch.tensor(mask, device=shard.device)).sum()
    each = [value for value, mine in zip(grads.values(shard), mask, strict=True) if mine and value is not None]
    parts = [vector_norm(value, norm_type) for value in each if value.numel()]
    if not parts:
        return torch.zeros((), dtype=torch.float64, device=shard.device)
    return torch.stack(parts).amax() if norm_type == math.inf else torch.stack(parts).pow(norm_type).sum()
