"""Numbers about gradients, masters and weights of one tensor each, by torch operations on stretches that stay in cache.

Sums are float64. Nothing here waits for a device: what is found stays there until it is read with all the others.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from .. import kernels
from ..kernels import stats
from ..kernels.tables import is_dense

STRETCH = 2**16
"""Elements looked at together on the CPU: their copies stay in its caches. Elsewhere a tensor is one stretch."""

GRADIENT = ("count", "sumsq", "largest", "zero", "subnormal", "near_overflow")
"""What :func:`of_gradient` gives. The last three are counts, of 16-bit gradients alone."""

UPDATE = ("count", "master_sumsq", "update_sumsq", "distance_sumsq", "update", "ulp", "moved", "lost")
"""What :func:`of_update` gives: element counts, sums of squares, sums of magnitudes, and counts."""

_EXPONENT = 0x7F800000  # of float32
_STORED_BITS = {torch.float16: 10, torch.bfloat16: 7}


def _stretches(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Parts of tensors of one shape, element by element the same."""
    alike = all(one.stride() == tensors[0].stride() for one in tensors)
    dense = alike and all(map(is_dense, tensors))
    flat = [one.as_strided((one.numel(),), (1,)) if dense else one.reshape(-1) for one in tensors]
    length = STRETCH if kernels.is_host(flat[0].device) else max(1, flat[0].numel())
    yield from zip(*(torch.split(one, length) for one in flat), strict=True)


def _total(parts: Sequence[Tensor], like: Tensor, width: int) -> Tensor:
    wide = stats.sum_dtype(like.device)
    return torch.stack(list(parts)).sum(0) if parts else torch.zeros(width, dtype=wide, device=like.device)


def of_gradient(grad: Tensor) -> Tensor:
    """The numbers of one gradient as it is, scaled or not.

    Args:
        grad: dense, float16 to float64, any device.

    Returns:
        float64, shape [6], in the order of ``GRADIENT``. "near_overflow" are those within a factor of 2 of the largest
        finite number, or beyond. No sync.

    Example:
        >>> of_gradient(torch.tensor([0.0, 2.0**-20, 3.0, 4e4], dtype=torch.float16)).tolist()[2:]
        [40000.0, 1.0, 1.0, 1.0]
    """
    wide = stats.sum_dtype(grad.device)
    half = grad.dtype in kernels.HALF_DTYPES
    parts = []
    for (part,) in _stretches(grad.detach()):
        if part.numel() == 0:
            continue
        value = part.to(wide) if part.dtype == torch.float64 else part.float()
        found = [torch.full_like(value[0], part.numel(), dtype=wide), _sumsq(value), value.abs().amax().to(wide)]
        if half:
            normal, large = _limits(part.dtype)
            bits = part.view(torch.int16) & 0x7FFF
            zero = part.numel() - torch.count_nonzero(bits)
            found += [zero, (bits < normal).sum() - zero, (bits >= large).sum()]
        else:
            found += [torch.zeros_like(found[0])] * 3
        parts.append(torch.stack([number.to(wide) for number in found]))
    total = _total(parts, grad, len(GRADIENT))
    if len(parts) > 1:
        total[2] = torch.stack(parts)[:, 2].amax()
    return total


def _sumsq(value: Tensor) -> Tensor:
    """The sum of squares of a stretch, in float64: a norm could leave the range of float32."""
    wide = value.to(stats.sum_dtype(value.device))
    return torch.dot(wide, wide)


def _limits(dtype: torch.dtype) -> tuple[int, int]:
    """The bits of the smallest normal number, and of half of the largest one."""
    return (0x0400, 0x77FF) if dtype == torch.float16 else (0x0080, 0x7EFF)


def of_update(before: Tensor, after: Tensor, weight: Tensor) -> Tensor:
    """The numbers of one parameter's step.

    Args:
        before, after: its master, FP32 (or the weight itself, where that is stepped), any device.
        weight: the model's parameter after the step: 16 bits, or ``after`` itself.

    Returns:
        float64, shape [8], in the order of ``UPDATE``. "ulp" sums up the distances from each weight before to the next
        larger one of its 16-bit dtype; "moved" counts updates that are not zero, "lost" those of them under half an
        ulp. Both are 0 where the weight has no 16 bits. No sync.

    Example:
        >>> master, weight = torch.ones(2), torch.ones(2, dtype=torch.float16)
        >>> moved = master + torch.tensor([2.0**-12, 2.0**-10])  # an ulp at 1 is 2**-10
        >>> dict(zip(UPDATE, of_update(master, moved, weight).tolist()))["lost"]
        1.0
    """
    wide = stats.sum_dtype(after.device)
    bits = _STORED_BITS.get(weight.dtype)
    parts = []
    for old, new, held in _stretches(before.detach(), after.detach(), weight.detach()):
        if old.numel() == 0:
            continue
        old, new = old.to(torch.promote_types(old.dtype, torch.float32)), new.to(
            torch.promote_types(new.dtype, torch.float32)
        )
        update = new - old
        size = update.abs()
        found = [torch.full_like(size[0], old.numel(), dtype=wide), _sumsq(new), _sumsq(update), _sumsq(new - held)]
        found.append(size.sum(dtype=wide))
        if bits is None:
            found += [torch.zeros_like(found[0])] * 3
        else:
            ulp = _ulp(old, weight.dtype, bits)
            moved = torch.count_nonzero(size)
            found += [ulp.sum(dtype=wide), moved, (size < ulp * 0.5).sum() - (size.numel() - moved)]
        parts.append(torch.stack([number.to(wide) for number in found]))
    return _total(parts, after, len(UPDATE))


def _ulp(value: Tensor, dtype: torch.dtype, bits: int) -> Tensor:
    """From numbers, FP32, to the next larger magnitudes of a 16-bit dtype."""
    powers = value.float().contiguous().view(torch.int32).bitwise_and(_EXPONENT).view(torch.float32)
    return powers.clamp(min=torch.finfo(dtype).smallest_normal) * 2.0**-bits
