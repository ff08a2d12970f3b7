"""Numbers about gradients, masters and weights of one tensor each, by torch operations on stretches that stay in cache.

Norms and largest magnitudes are of all elements. Shares and mean sizes are of all elements of tensors up to 16,384, and
of one in 17 of larger ones, scaled up. Nothing here waits for a device: what is found stays there until it is read with
all the others.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from .. import kernels
from ..kernels import stats
from ..kernels.tables import is_dense

WHOLE, LATTICE = 2**14, 17
"""Of tensors up to the first size shares are of all elements, of larger ones of one in the second."""

STRETCH = LATTICE * 2**14
"""Elements looked at together on the CPU: their copies stay in its caches. Elsewhere a tensor is one stretch."""

GRADIENT = ("count", "sumsq", "largest", "zero", "subnormal", "near_overflow")
"""What :func:`of_gradient` gives. The last three are counts, of 16-bit gradients alone."""

UPDATE = ("count", "master_sumsq", "update_sumsq", "distance_sumsq", "update", "ulp", "moved", "lost")
"""What :func:`of_update` gives: element counts, sums of squares, sums of magnitudes, and counts."""

_MAGNITUDE = 0x7FFF  # of 16-bit numbers
_EXPONENT = 0x7F800000  # of float32
_STORED_BITS = {torch.float16: 10, torch.bfloat16: 7}


def _flat(*tensors: Tensor) -> list[Tensor]:
    """Tensors of one shape with one dimension, element by element the same; views of them where that can be."""
    tensors = tuple(one.detach() for one in tensors)
    alike = all(one.stride() == tensors[0].stride() for one in tensors)
    if alike and all(map(is_dense, tensors)):
        return [one.as_strided((one.numel(),), (1,)) for one in tensors]
    return [one.reshape(-1) for one in tensors]


def _stretches(flat: list[Tensor]) -> Iterator[tuple[Tensor, ...]]:
    length = STRETCH if kernels.is_host(flat[0].device) else max(1, flat[0].numel())
    return zip(*(torch.split(one, length) for one in flat), strict=True)


class _Some:
    """The elements from which shares are taken, gathered while they are in the caches.

    Attributes:
        each: how many elements each of them stands for.
    """

    def __init__(self, count: int) -> None:
        self._all = count <= WHOLE
        self.each = 1.0 if self._all else count / -(-count // LATTICE)
        self._parts: list[tuple[Tensor, ...]] = []

    def add(self, *part: Tensor) -> None:
        """A stretch of each tensor."""
        self._parts.append(part if self._all else tuple(one[::LATTICE].contiguous() for one in part))

    def gathered(self) -> list[Tensor]:
        """Of each tensor."""
        return [torch.cat(parts) if len(parts) > 1 else parts[0] for parts in zip(*self._parts, strict=True)]


def of_gradient(grad: Tensor, with_norm: bool = True) -> Tensor:
    """The numbers of one gradient as it is, scaled or not.

    Args:
        grad: dense, float16 to float64, any device.
        with_norm: False leaves "sumsq" 0: it is known from elsewhere.

    Returns:
        float64, shape [6], in the order of ``GRADIENT``. "near_overflow" are those within a factor of 2 of the largest
        finite number, or beyond. No sync.

    Example:
        >>> of_gradient(torch.tensor([0.0, 2.0**-20, 3.0, 4e4], dtype=torch.float16)).tolist()[2:]
        [40000.0, 1.0, 1.0, 1.0]
    """
    wide = stats.sum_dtype(grad.device)
    flat = _flat(grad)
    found = torch.zeros(len(GRADIENT), dtype=wide, device=grad.device)
    if flat[0].numel() == 0:
        return found
    found[0] = flat[0].numel()
    half = grad.dtype in kernels.HALF_DTYPES
    largest, some = [], _Some(flat[0].numel())
    for (part,) in _stretches(flat):
        some.add(part)
        if half and not with_norm:
            largest.append((part.view(torch.int16) & _MAGNITUDE).amax().view(part.dtype))
            continue
        value = part.float() if half else part
        if with_norm:  # the squares of FP16 numbers, added up, are in the range of float32
            exact = value if part.dtype == torch.float16 else value.to(wide)
            found[1] += torch.dot(exact, exact)
        least, most = value.aminmax()
        largest.append(torch.maximum(-least, most))
    found[2] = torch.stack(largest).to(wide).amax()
    if half:
        normal, large = _limits(grad.dtype)
        bits = some.gathered()[0].view(torch.int16) & _MAGNITUDE
        zero = bits.numel() - torch.count_nonzero(bits)
        counts = [zero, torch.count_nonzero(bits < normal) - zero, torch.count_nonzero(bits >= large)]
        found[3:] = torch.stack(counts).to(wide) * some.each
        near = ~(found[2] < torch.finfo(grad.dtype).max / 2)  # at least one, whether the lattice has met it or not
        found[5] = torch.maximum(found[5], near.to(wide))
    return found


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
        ulp. All three are 0 where the weight has no 16 bits. No sync.

    Example:
        >>> master, weight = torch.ones(2), torch.ones(2, dtype=torch.float16)
        >>> moved = master + torch.tensor([2.0**-12, 2.0**-10])  # an ulp at 1 is 2**-10
        >>> dict(zip(UPDATE, of_update(master, moved, weight).tolist()))["lost"]
        1.0
    """
    wide = stats.sum_dtype(after.device)
    flat = _flat(before, after, weight)
    found = torch.zeros(len(UPDATE), dtype=wide, device=after.device)
    if flat[0].numel() == 0:
        return found
    found[0] = flat[0].numel()
    some = _Some(flat[0].numel())
    for old, new, held in _stretches(flat):
        some.add(old, new, held)
        new = _single(new)
        update = new - _single(old)
        found[1] += torch.dot(new, new)
        found[2] += torch.dot(update, update)
    old, new, held = some.gathered()
    old, new = _single(old), _single(new)
    size, away = (new - old).abs(), new - held
    numbers = [torch.dot(away, away), size.sum()]
    bits = _STORED_BITS.get(weight.dtype)
    if bits is not None:
        ulp, moved = _ulp(old, weight.dtype, bits), torch.count_nonzero(size)
        lost = torch.count_nonzero(size < ulp * 0.5) - (size.numel() - moved)
        numbers += [ulp.sum(), moved, lost]
    found[3 : 3 + len(numbers)] = torch.stack([number.to(wide) for number in numbers]) * some.each
    return found


def _single(value: Tensor) -> Tensor:
    return value.float() if value.dtype in kernels.HALF_DTYPES else value


def _ulp(value: Tensor, dtype: torch.dtype, bits: int) -> Tensor:
    """From numbers, FP32, to the next larger magnitudes of a 16-bit dtype."""
    powers = value.float().contiguous().view(torch.int32).bitwise_and(_EXPONENT).view(torch.float32)
    return powers.clamp(min=torch.finfo(dtype).smallest_normal) * 2.0**-bits
