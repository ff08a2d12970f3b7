"""What the operations check of arguments that are no lists of tensors."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .calls import Plan
from .stats import CastStats, GradStats
from .tables import AXPBY


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


def check_given(
    name: str,
    plan: Plan,
    numbers: dict[str, Tensor | None],
    stats: GradStats | CastStats | None = None,
    each: dict[str, bool | Sequence[int] | None] | None = None,
    options: Sequence[Any] | None = None,
) -> None:
    """Raise unless what is given beside the lists of a call fits to them.

    Args:
        name: of the operation.
        numbers: by name: float32, one element, on the device of the call. None is passed over.
        stats: for as many tensors, on that device. What else must hold they check themselves, when they are made.
        each: by name: one value for each entry. One for all, and None, are passed over.
        options: of the groups that ``group_of`` in ``each`` chooses from. Their betas must have powers.
    """
    for key, number in numbers.items():
        if number is not None and (
            not isinstance(number, Tensor)
            or number.dtype != torch.float32
            or number.device != plan.device
            or number.numel() != 1
        ):
            check_result(name, key, number, 1, torch.float32, plan.device)
    if stats is not None:
        which = "overflow" if isinstance(stats, CastStats) else "nonfinite"
        rows: Tensor = getattr(stats, which)
        if rows.numel() != plan.count or rows.device != plan.device:
            check_result(name, f"stats.{which}", rows, plan.count, torch.int32, plan.device)
    for key, values in (each or {}).items():
        if values is None or isinstance(values, bool):
            continue
        if len(values) != plan.count:
            raise ValueError(f"{name}: {key} has {len(values)} entries, grads has {plan.count}. Give one each.")
        if options is not None and key == "group_of" and values and not 0 <= min(values) <= max(values) < len(options):
            raise ValueError(
                f"{name}: group_of reaches from {min(values)} to {max(values)}, there are {len(options)} options."
            )
    for k, given in enumerate(options or ()):
        for beta in ("beta1", "beta2"):
            value = getattr(given, beta, 0.0)
            if not 0.0 <= value < 1.0:
                raise ValueError(f"{name}: options[{k}].{beta} must be at least 0 and less than 1, got {value}.")


def as_single(name: str, value: float) -> float:
    """``value`` rounded to float32."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{AXPBY.name}: {name} must be a float, got {type(value).__name__}.")
    try:
        return float(struct.unpack("<f", struct.pack("<f", value))[0])
    except OverflowError:
        raise ValueError(f"{AXPBY.name}: {name} must fit into float32, got {value!r}.") from None
