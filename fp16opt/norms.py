"""Norms of gradients, and what a clip makes of them."""

from __future__ import annotations

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
