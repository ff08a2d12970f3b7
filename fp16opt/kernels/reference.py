"""Each operation written plainly in torch, one tensor at a time.

This is the specification: the compiled backends give the same bits (NaN payloads aside), and it serves every device
and every memory layout for which there is no compiled kernel. Only torch operations that round once and never
contract are used: no ``add(alpha=)``, ``lerp``, ``addcmul`` or ``sqrt`` in float32 (torch rounds those differently
from one CPU to another). Nothing here waits for a device other than the CPU.

Long tensors are worked through in slabs of whole chunks, so that temporaries stay small.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from .pieces import CHUNK
from .stats import INF, NAN, NOT_FINITE, TOO_LARGE, CastStats, GradStats, sum_dtype

"""Elements in a chunk, the unit of parallel work and of the fixed summation order."""
LANES = 256
"""Running sums in a chunk."""
GROUP = 8
"""Consecutive elements that are added in a small tree before they enter a lane."""
SLAB = 64 * CHUNK
_SIXTEEN_BITS = (torch.float16, torch.bfloat16)
_ROW = LANES * GROUP
_LEAST_SUM = 2.0**-100  # below it what squares lose at float32's lower end might count
_WORD = 4  # 16-bit elements in a 64-bit word of a sample
SAMPLED_WHOLE, _LEAST_STRIDE = 16384, 1009  # elements
_KEY = 0x9E3779B97F4A7C15 - (1 << 64)  # an odd constant of many bits, as the int64 with the same bits


class _Flat(NamedTuple):
    """A tensor as one dimension, in memory order."""

    values: Tensor
    is_view: bool


def memory_order(tensor: Tensor) -> list[int]:
    """The dimensions of ``tensor`` from the slowest to the fastest in memory.

    Args:
        tensor: any strided tensor.

    Returns:
        A permutation of its dimensions; dimensions of equal stride keep their order.

    Example:
        >>> memory_order(torch.empty(2, 3, 4, 5).to(memory_format=torch.channels_last))
        [0, 2, 3, 1]
    """
    strides = tensor.stride()
    return sorted((d for d in range(tensor.dim())), key=lambda d: -strides[d])


def flatten(tensor: Tensor, order: list[int]) -> _Flat:
    """``tensor`` flattened with its dimensions in ``order``: a view where the memory allows it, else a copy."""
    permuted = tensor.permute(order)
    try:
        return _Flat(permuted.view(-1), True)
    except RuntimeError:
        return _Flat(permuted.reshape(-1), False)


def write_back(flat: _Flat, tensor: Tensor, order: list[int]) -> None:
    """Copy a flattened copy into the tensor that it was made of."""
    if not flat.is_view:
        permuted = tensor.permute(order)
        permuted.copy_(flat.values.view(permuted.shape))


def slabs(numel: int) -> Iterator[slice]:
    """Slices of at most ``SLAB`` elements that cover ``numel`` elements."""
    for start in range(0, numel, SLAB):
        yield slice(start, min(start + SLAB, numel))


def _padded(flat: Tensor, multiple: int) -> Tensor:
    """``flat`` with zeros behind it, up to the next multiple of ``multiple``."""
    missing = -flat.numel() % multiple
    return torch.nn.functional.pad(flat, (0, missing)) if missing else flat


def _halves_of_groups(values: Tensor) -> tuple[Tensor, Tensor]:
    """The sums of squares of the first four elements of each group, the last dimension, and of the last four."""
    e = (values * values).unbind(-1)
    return (e[0] + e[1]) + (e[2] + e[3]), (e[4] + e[5]) + (e[6] + e[7])


def group_sums(values: Tensor, sums: torch.dtype) -> Tensor:
    """The terms that groups add to their lanes, in ``sums``, the dtype of the lanes."""
    if values.dtype == torch.float64 or sums == torch.float32:
        front, back = _halves_of_groups(values.to(sums))
        return front + back
    front, back = _halves_of_groups(values.float())
    total = front + back
    groups = total.to(sums) if values.dtype in _SIXTEEN_BITS else front.to(sums) + back.to(sums)
    if values.dtype == torch.float16:  # 2^-48 to 2^35
        return groups
    in_range = (total >= _LEAST_SUM) & torch.isfinite(total)
    if values.device.type == "cpu" and bool(in_range.all()):  # elsewhere a look would wait
        return groups
    front, back = _halves_of_groups(values.to(sums))
    return torch.where(in_range, groups, front + back)


def summed_as_stored(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the squares of gradients are taken of them as they are stored, and multiplied by the factor's later.

    Args:
        dtype: of the gradients.
        device: where they live. Where sums are float32 the squares of scaled bfloat16 might leave its range.

    Example:
        >>> summed_as_stored(torch.bfloat16, torch.device("cpu")), summed_as_stored(torch.float32, torch.device("cpu"))
        (True, False)
    """
    return dtype == torch.float16 or (dtype == torch.bfloat16 and sum_dtype(device) == torch.float64)


def chunk_sums(flat: Tensor, factor: Tensor | None = None) -> Tensor:
    """Sum of squares of each chunk of ``flat`` (at most a slab), in the fixed order that every backend follows.

    Squares and the sums of four are float32, and so are the sums of eight where the values are 16-bit, whose squares
    are exact there; from there on, and from the beginning in groups whose float32 sum is not in [2^-100, 2^128), all
    is float64, as for float64 values. ``factor`` is squared and multiplied to what the lanes hold.
    """
    lanes = in_lanes(group_sums(by_groups(flat), sum_dtype(flat.device)))
    if factor is not None:
        lanes = lanes * factor.to(lanes.dtype).square()
    return lane_tree(lanes)


def by_groups(flat: Tensor) -> Tensor:
    """A slab at most, with zeros behind it, as [chunks, rows of lanes, lanes, elements of a group]."""
    rows_of = CHUNK if flat.numel() > CHUNK else _ROW  # whole rows of zeros change no bit of a sum of squares
    padded = _padded(flat, rows_of)
    rows = rows_of // _ROW if flat.numel() > CHUNK else padded.numel() // _ROW
    return padded.view(-1, rows, LANES, GROUP)


def in_lanes(groups: Tensor) -> Tensor:
    """What groups add to their lanes, [chunks, rows, lanes], added up row by row."""
    lanes = groups[:, 0]
    for row in range(1, groups.shape[1]):
        lanes = lanes + groups[:, row]
    return lanes


def lane_tree(lanes: Tensor) -> Tensor:
    """The sum of each chunk from [chunks, lanes], in the fixed tree."""
    width = LANES // 2
    while width:
        lanes = lanes[:, :width] + lanes[:, width : 2 * width]
        width //= 2
    return lanes[:, 0]


def in_order_sum(values: Tensor) -> Tensor:
    """The sum of a vector, added one by one from the first to the last on the CPU."""
    if values.numel() == 0:
        return values.new_zeros(())
    if values.device.type != "cpu" and values.numel() <= 64:  # elsewhere cumsum adds in an order of its own
        return functools.reduce(torch.add, values.unbind())
    return torch.cumsum(values, 0)[-1]  # torch's sum() adds in another order; cumsum on the CPU is sequential


def _sqrt(values: Tensor) -> Tensor:
    """The correctly rounded square root, elementwise."""
    if values.device.type != "cpu":
        return torch.sqrt(values)
    roots = [math.sqrt(value) for value in values.reshape(-1).tolist()]
    return torch.tensor(roots, dtype=values.dtype, device="cpu").view(values.shape)


def _nonfinite_bits(product: Tensor) -> Tensor:
    """int32 []: the flag bits of a part of a tensor."""
    inf = torch.isinf(product).any().to(torch.int32)
    nan = torch.isnan(product).any().to(torch.int32)
    return inf * INF + nan * NAN


@torch.no_grad()
def unscale(
    i: int, grad: Tensor, out: Tensor, inv_scale: Tensor, accumulate: bool, write: bool, stats: GradStats
) -> None:
    """``out = grad * inv_scale``, or ``out += grad * inv_scale``; write flags and sum of squares to row ``i``.

    Args:
        i: the row of ``stats`` that belongs to this tensor.
        grad: float16, bfloat16, float32 or float64; may be ``out`` itself.
        out: float32 (float64 for a float64 ``grad``), shape of ``grad``. Written.
        inv_scale: float32, shape [].
        accumulate: add to ``out`` instead of overwriting it.
        write: False leaves ``out`` as it is, and the rest is as if it were written.
        stats: ``nonfinite[i]`` and ``sumsq[i]`` are overwritten; call :func:`finish` after the last tensor.
    """
    order = memory_order(out)
    source, target = flatten(grad, order).values, flatten(out, order)
    factor = inv_scale.to(out.dtype)
    bits = torch.zeros((), dtype=torch.int32, device=out.device)
    sums = []
    for part in slabs(source.numel()):
        product = source[part].to(out.dtype) * factor
        written = target.values[part]
        bits = bits | _nonfinite_bits(product)
        if accumulate:
            total = written + product
            bits = bits | (torch.isinf(total) & torch.isfinite(written)).any().to(torch.int32) * INF
            product = total
        if write:
            written.copy_(product)
        stored = summed_as_stored(grad.dtype, grad.device) and not accumulate
        sums.append(chunk_sums(source[part], factor) if stored else chunk_sums(product))
    if write:
        write_back(target, out, order)
    stats.nonfinite[i] = bits
    stats.sumsq[i] = in_order_sum(torch.cat(sums)) if sums else 0.0


@torch.no_grad()
def unscale_clipped(grad: Tensor, out: Tensor, inv_scale: Tensor, factor: Tensor) -> None:
    """``out = (grad * inv_scale) * factor`` in ``out``'s dtype, rounded twice. Arguments as for :func:`unscale`."""
    order = memory_order(out)
    source, target = flatten(grad, order).values, flatten(out, order)
    for part in slabs(source.numel()):
        target.values[part].copy_(source[part].to(out.dtype) * inv_scale.to(out.dtype) * factor.to(out.dtype))
    write_back(target, out, order)


@torch.no_grad()
def finish(stats: GradStats) -> None:
    """Derive ``norm`` and ``found_inf`` from the rows of ``stats``."""
    stats.norm.copy_(_sqrt(in_order_sum(stats.sumsq)))
    stats.found_inf.copy_((stats.nonfinite != 0).any())


@torch.no_grad()
def sum_of_squares(tensor: Tensor) -> Tensor:
    """The sum of squares of one tensor, in the fixed order.

    Args:
        tensor: any floating dtype up to 64 bits.

    Returns:
        float64, shape [] (float32 on a device without float64).

    Example:
        >>> sum_of_squares(torch.tensor([3.0, 4.0])).item()
        25.0
    """
    flat = flatten(tensor, memory_order(tensor)).values
    sums = [chunk_sums(flat[part]) for part in slabs(flat.numel())]
    return in_order_sum(torch.cat(sums) if sums else flat.new_zeros(0, dtype=sum_dtype(flat.device)))


@torch.no_grad()
def norms(sumsq: Tensor) -> tuple[Tensor, Tensor]:
    """The total norm and the norm of each tensor, from their sums of squares.

    Args:
        sumsq: float64, shape [n].

    Returns:
        (total, shape []; each, shape [n]).

    Example:
        >>> norms(torch.tensor([9.0, 16.0], dtype=torch.float64))
        (tensor(5., dtype=torch.float64), tensor([3., 4.], dtype=torch.float64))
    """
    return _sqrt(in_order_sum(sumsq)), _sqrt(sumsq)


@torch.no_grad()
def scale(tensor: Tensor, factor: Tensor) -> None:
    """``tensor *= factor``: one multiplication in float32 (float64 for float64), rounded to the tensor's dtype."""
    if tensor.dtype == torch.float64:
        tensor.mul_(factor.double())
    else:
        tensor.copy_(tensor.float() * factor)


@torch.no_grad()
def axpby(a: float, x: Tensor, b: float, y: Tensor, out: Tensor, found_inf: Tensor | None, check: str) -> None:
    """``out = a*x + b*y`` in float32, rounded to the dtype of ``out``.

    Args:
        a: factor of ``x``, a number that float32 holds exactly.
        x: float16, bfloat16 or float32.
        b: factor of ``y``.
        y: as ``x``, in a dtype of its own.
        out: as ``x``, in a dtype of its own; may be ``x`` or ``y``. Written.
        found_inf: float32, shape []; set to 1.0 where a checked input is not finite, else left.
        check: "both", "x" or "y".
    """
    order = memory_order(out)
    xs, ys, target = flatten(x, order).values, flatten(y, order).values, flatten(out, order)
    for part in slabs(xs.numel()):
        xf, yf = xs[part].float(), ys[part].float()
        if found_inf is not None:
            checked = {"x": [xf], "y": [yf], "both": [xf, yf]}[check]
            for values in checked:
                found_inf.masked_fill_(~torch.isfinite(values).all(), 1.0)
        target.values[part].copy_(xf * a + yf * b)
    write_back(target, out, order)


def lerp(average: Tensor, value: Tensor, part: float, from_average: bool) -> None:
    """``average`` goes ``part`` of the way to ``value``; or ends that part of the way back from it.

    Args:
        average: float32 or float64. Written.
        value: float16, bfloat16 or float32; float64 for a float64 ``average``.
        part: 0 to 1, rounded to the dtype of ``average``.
        from_average: Which end the part is counted from.
    """
    order = memory_order(average)
    values, target = flatten(value, order).values, flatten(average, order)
    for slab in slabs(values.numel()):
        far, near = values[slab].to(average.dtype), target.values[slab]
        if from_average:
            near.copy_(near + (far - near) * part)
        else:
            near.copy_(far + (near - far) * part)
    write_back(target, average, order)


@torch.no_grad()
def cast(i: int, master: Tensor, param: Tensor, stats: CastStats) -> None:
    """Round ``master`` to the nearest 16-bit value, ties to even, and write flags to row ``i``.

    Args:
        i: the row of ``stats`` that belongs to this tensor.
        master: float32.
        param: float16 or bfloat16, shape of ``master``. Written.
        stats: ``overflow[i]`` is overwritten.
    """
    order = memory_order(param)
    source, target = flatten(master, order).values, flatten(param, order)
    bits = torch.zeros((), dtype=torch.int32, device=param.device)
    for part in slabs(source.numel()):
        narrow = source[part].to(param.dtype)
        finite = torch.isfinite(source[part])
        too_large = (torch.isinf(narrow) & finite).any().to(torch.int32)
        bits = bits | (too_large * TOO_LARGE + (~finite).any().to(torch.int32) * NOT_FINITE)
        target.values[part].copy_(narrow)
    write_back(target, param, order)
    stats.overflow[i] = bits


def sample_stride(numel: int) -> int:
    """How many elements after one element of a long tensor's sample, in memory order, the next one is.

    Args:
        numel: of the tensor.

    Returns:
        The least number from 1,009 on that has no divisor in common with ``numel``, and so none with the length of any
        dimension: columns, filters and other regular parts of a tensor are all hit alike.

    Example:
        >>> sample_stride(1 << 20), sample_stride(1009 * 1024)
        (1009, 1011)
    """
    return next(stride for stride in range(_LEAST_STRIDE, 2 * numel) if math.gcd(stride, numel) == 1)


@torch.no_grad()
def sample(tensor: Tensor) -> Tensor:
    """A digest of a 16-bit tensor's sample, in memory order.

    Of up to 16,384 elements four make one little-endian 64-bit word w_i (the last one padded with zeros). Of a longer
    tensor every :func:`sample_stride`-th element, from the first, is a word of its own, and i its place. With x = w_i ^
    ((i + 1) * 0x9E3779B97F4A7C15) the digest is the sum of lo32(x) * hi32(x) + w_i, modulo 2^64. A sum may be split
    among threads in any way, and gives the same value.

    Args:
        tensor: float16 or bfloat16.

    Returns:
        int64, shape []; 0 for an empty tensor. Does not sync.

    Example:
        >>> sample(torch.empty(0, dtype=torch.float16)).item()
        0
    """
    numel, order = tensor.numel(), memory_order(tensor)
    if numel <= SAMPLED_WHOLE:
        words = _padded(flatten(tensor, order).values.view(torch.int16), _WORD)
        words, stride = words.clone(memory_format=torch.contiguous_format).view(torch.int64), 1
    else:
        stride = sample_stride(numel)
        words = flatten(tensor, order).values[::stride].contiguous().view(torch.int16).long() & 0xFFFF
    places = torch.arange(words.numel(), dtype=torch.int64, device=tensor.device) * stride
    x = words ^ ((places + 1) * _KEY)
    return ((x & 0xFFFFFFFF) * ((x >> 32) & 0xFFFFFFFF) + words).sum()


def refresh_master(master: Tensor, param: Tensor, moved: Tensor, taken: Tensor) -> None:
    """``master`` takes the value of ``param`` where its rounded self has other bits, if ``moved``.

    Args:
        master: float32. Written.
        param: float16 or bfloat16, shape of ``master``.
        moved: bool, shape []. Where it is False nothing changes.
        taken: int32, shape []. Set to 1 where an element was taken, else left.
    """
    rounded = master.to(param.dtype).contiguous().view(torch.int16)
    differs = (rounded != param.contiguous().view(torch.int16)) & moved
    master.copy_(torch.where(differs, param.float(), master))
    taken.masked_fill_(differs.any(), 1)
