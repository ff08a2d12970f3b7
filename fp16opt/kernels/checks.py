"""What the operations check of arguments that are no lists of tensors."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import torch
from torch import Tensor

from .stats import GradStats, sum_dtype
from .tables import AXPBY, UNSCALE


def check_result(
    operation: str, name: str, tensor: Tensor, numel: int, dtype: torch.dtype, device: torch.device | None
) -> None:
    """Raise unless ``tensor`` is contiguous with ``numel`` elements of ``dtype`` (None entries of a list count)."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{operation}: {name} must be a tensor, got {type(tensor).__name__}.")
    if tensor.dtype != dtype:
        raise TypeError(f"{operation}: {name} must be {str(dtype)[6:]}, got {str(tensor.dtype)[6:]}.")
    if tensor.device != device:
        raise ValueError(f"{operation}: {name} must be on {device} like the tensors of the call, got {tensor.device}.")
    if tensor.numel() != numel or not tensor.is_contiguous():
        raise ValueError(
            f"{operation}: {name} must be contiguous with {numel} element(s), got shape {tuple(tensor.shape)} and "
            f"strides {tensor.stride()}."
        )


def check_grad_stats(stats: GradStats, count: int, device: torch.device) -> None:
    """Raise unless ``stats`` is for lists of ``count`` tensors on ``device``."""
    wide, name = sum_dtype(device), UNSCALE.name
    check_result(name, "stats.nonfinite", stats.nonfinite, count, torch.int32, device)
    check_result(name, "stats.sumsq", stats.sumsq, count, wide, device)
    check_result(name, "stats.norm", stats.norm, 1, wide, device)
    check_result(name, "stats.found_inf", stats.found_inf, 1, torch.float32, device)


def accumulate_flags(accumulate: bool | Sequence[bool], rows: list[int], count: int) -> bool | list[bool]:
    """One flag for all, or one for each row in use."""
    if isinstance(accumulate, bool):
        return accumulate
    if len(accumulate) != count:
        raise ValueError(
            f"{UNSCALE.name}: accumulate has {len(accumulate)} entries, grads has {count}. Give one bool, or one each."
        )
    return [bool(accumulate[i]) for i in rows]


def as_single(name: str, value: float) -> float:
    """``value`` rounded to float32."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{AXPBY.name}: {name} must be a float, got {type(value).__name__}.")
    try:
        return float(struct.unpack("<f", struct.pack("<f", value))[0])
    except OverflowError:
        raise ValueError(f"{AXPBY.name}: {name} must fit into float32, got {value!r}.") from None
