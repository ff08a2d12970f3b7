"""The numbers of reports written plainly in torch, one tensor at a time: the specification, as in reference.py."""

from __future__ import annotations

import torch
from torch import Tensor

from .reference import (
    GROUP,
    by_groups,
    chunk_sums,
    flatten,
    group_sums,
    in_lanes,
    in_order_sum,
    lane_tree,
    memory_order,
    slabs,
    sum_of_squares,
)
from .stats import sum_dtype

MEASURED = ("sumsq", "largest", "zero", "subnormal", "near_overflow")
"""What :func:`measure` gives."""
COMPARED = ("master_sumsq", "distance_sumsq", "update_sumsq", "update", "ulp", "moved", "lost")
"""What :func:`compare` gives; from the third on of the snapshot's elements alone."""

WHOLE, STRIDE = 16384, 17
"""Of tensors up to so many elements a snapshot holds all, of longer ones one group of eight in so many."""

_MAGNITUDE = 0x7FFF  # of 16-bit numbers
_EXPONENT = 0x7F800000  # of float32
_STORED_BITS = {torch.float16: 10, torch.bfloat16: 7}
_LIMITS = {torch.float16: (0x0400, 0x77FF), torch.bfloat16: (0x0080, 0x7EFF)}  # least normal, half of the largest


def snapshot_size(numel: int) -> int:
    """Numbers in a snapshot: whole groups, the last of them padded where the tensor ends in it.

    Example:
        >>> snapshot_size(1), snapshot_size(16384), snapshot_size(16385)
        (8, 16384, 968)
    """
    groups = -(-numel // GROUP)
    return GROUP * (groups if numel <= WHOLE else -(-groups // STRIDE))


def snapshot_elements(numel: int) -> int:
    """How many of a tensor's elements its snapshot holds.

    Example:
        >>> snapshot_elements(5), snapshot_elements(17 * 1024 + 3)
        (5, 1027)
    """
    if numel <= WHOLE:
        return numel
    groups = -(-numel // GROUP)
    behind = groups * GROUP - numel if (groups - 1) % STRIDE == 0 else 0
    return snapshot_size(numel) - behind


def snapshot(tensor: Tensor, out: Tensor) -> None:
    """Take some of a tensor's elements, in memory order.

    Args:
        tensor: float16 to float64.
        out: float32 (float64 for float64), shape [``snapshot_size(tensor.numel())``]. Written, but for padding.
    """
    flat, numel = flatten(tensor, memory_order(tensor)).values, tensor.numel()
    if numel <= WHOLE:
        out[:numel].copy_(flat)
        return
    length = GROUP * STRIDE
    whole = numel // length
    out[: whole * GROUP].view(-1, GROUP).copy_(flat[: whole * length].view(-1, length)[:, :GROUP])
    rest = flat[whole * length :][:GROUP]
    out[whole * GROUP :][: rest.numel()].copy_(rest)


def measure(grad: Tensor) -> Tensor:
    """The numbers ``MEASURED`` of one gradient.

    Args:
        grad: float16 to float64.

    Returns:
        float64, shape [5] (float32 where there is no float64).
    """
    wide = sum_dtype(grad.device)
    flat = flatten(grad, memory_order(grad)).values
    counts = torch.zeros(3, dtype=torch.int64, device=grad.device)
    largest = torch.zeros((), dtype=wide, device=grad.device)
    for part in slabs(flat.numel()):
        largest = torch.maximum(largest, flat[part].abs().amax().to(wide))  # a nan wins
        if grad.dtype in _LIMITS:
            normal, large = _LIMITS[grad.dtype]
            bits = flat[part].contiguous().view(torch.int16) & _MAGNITUDE
            found = [(bits == 0).sum(), ((bits != 0) & (bits < normal)).sum(), (bits >= large).sum()]
            counts += torch.stack(found)
    return torch.cat([torch.stack([sum_of_squares(grad).to(wide), largest]), counts.to(wide)])


def compare(master: Tensor, weight: Tensor, before: Tensor) -> Tensor:
    """The numbers ``COMPARED`` of one parameter's step.

    Args:
        master: float32 after the step; or a parameter without one, float16 to float64.
        weight: its weight, float16 or bfloat16; or ``master`` itself.
        before: the master's :func:`snapshot` from before the step.

    Returns:
        float64, shape [7] (float32 where there is no float64).
    """
    order, wide = memory_order(master), sum_dtype(master.device)
    values, held = flatten(master, order).values, flatten(weight, order).values
    sums: list[list[Tensor]] = [[], [], [], [], []]
    counts = torch.zeros(2, dtype=torch.int64, device=master.device)
    for part in slabs(values.numel()):
        now = values[part].to(before.dtype)
        then, inside = _spread(before, values.numel(), part, now)
        change = torch.where(inside, now - then, torch.zeros_like(now))
        size = change.abs()
        moved, ulp = change != 0, _ulp(then, weight.dtype).masked_fill(~inside, 0.0)
        counts += torch.stack([moved.sum(), (moved & (size < ulp * 0.5)).sum()])
        found = [chunk_sums(now), chunk_sums(now - held[part].to(before.dtype))]
        found += [lane_tree(in_lanes(group_sums(by_groups(change), wide)))]
        found += [lane_tree(in_lanes(_added(by_groups(one).to(wide)))) for one in (size, ulp)]
        for one, more in zip(sums, found, strict=True):
            one.append(more)
    nothing = torch.zeros(1, dtype=wide, device=master.device)
    totals = [in_order_sum(torch.cat(one or [nothing])) for one in sums]
    return torch.cat([torch.stack(totals), counts.to(wide)])


def _spread(before: Tensor, numel: int, part: slice, like: Tensor) -> tuple[Tensor, Tensor]:
    """A snapshot's elements where they were in a slab, with zeros between them, and where these are."""
    stride = 1 if numel <= WHOLE else STRIDE
    place = torch.arange(part.start, part.stop, dtype=torch.int64, device=like.device)
    group = place // GROUP
    inside = group % stride == 0
    return torch.where(inside, before[group // stride * GROUP + place % GROUP], torch.zeros_like(like)), inside


def _added(groups: Tensor) -> Tensor:
    """The sum of each group, the last dimension, in a tree."""
    e = groups.unbind(-1)
    return ((e[0] + e[1]) + (e[2] + e[3])) + ((e[4] + e[5]) + (e[6] + e[7]))


def _ulp(value: Tensor, dtype: torch.dtype) -> Tensor:
    """From numbers to the next larger magnitudes of a 16-bit dtype; 0 where it has no 16 bits."""
    bits = _STORED_BITS.get(dtype)
    if bits is None:
        return torch.zeros_like(value)
    powers = value.contiguous().view(torch.int32).bitwise_and(_EXPONENT).view(torch.float32)
    return powers.clamp(min=torch.finfo(dtype).smallest_normal) * 2.0**-bits
