"""The multi-tensor operations in numpy, one tensor at a time: what every backend must give, bit for bit.

Written from the definitions in the documentation of fp16opt.kernels and not from its code. Tensors come as
one-dimensional numpy arrays in memory order; 16-bit ones as uint16 with the name of their type.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.generic]
INF, NAN = 1, 2
TOO_LARGE, NOT_FINITE = 1, 2


def decode(values: Array, kind: str) -> Array:
    """Stored values as float32 (float64 for "double")."""
    if kind == "half":
        return values.view(np.float16).astype(np.float32)
    if kind == "bfloat16":
        return (values.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return values


def encode(values: Array, kind: str) -> Array:
    """float32 rounded to the nearest stored value, ties to even."""
    with np.errstate(over="ignore"):
        if kind == "half":
            return values.astype(np.float16).view(np.uint16)
        if kind == "bfloat16":
            bits = values.view(np.uint32)
            last = (bits >> np.uint32(16)) & np.uint32(1)
            rounded = ((bits + np.uint32(0x7FFF) + last) >> np.uint32(16)).astype(np.uint16)
            return np.where(np.isnan(values), np.uint16(0x7FC0), rounded)
    return values


def added(values: Array) -> Array:
    """Neighbours along the last dimension."""
    result: Array = values[:, 0::2] + values[:, 1::2]
    return result


def sum_of_squares(values: Array, stored: str = "", factor: float = 1.0) -> float:
    """Chunks of 65536; groups of 8 in a tree; group g to lane g mod 256; a tree over the lanes; chunks in order.

    In float32: squares, and sums of four of them; of values that are ``stored`` in 16 bits of eight. All else is
    float64, as are whole groups whose float32 sum is less than 2^-100 or not finite. Each lane is multiplied by the
    square of ``factor``.
    """
    total = 0.0
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        for start in range(0, values.size, 65536):
            chunk = in_whole_rows(values[start : start + 65536])
            wide = chunk.astype(np.float64).reshape(-1, 8)
            sums = added(added(added(wide * wide)))[:, 0]
            if values.dtype != np.float64:
                single = chunk.astype(np.float32).reshape(-1, 8)
                fours = added(added(single * single))
                eights = added(fours)[:, 0]
                near = eights if stored in ("half", "bfloat16") else added(fours.astype(np.float64))[:, 0]
                sums = np.where((eights >= 2.0**-100) & np.isfinite(eights), near, sums)
            total += in_lanes(sums, np.float64(factor) * np.float64(factor))
    return total


def in_whole_rows(part: Array) -> Array:
    """With zeros behind, so that each of the 256 lanes has as many groups of 8: whole chunks would add more zeros."""
    rows = np.zeros(-(-part.size // 2048) * 2048, dtype=part.dtype)
    rows[: part.size] = part
    return rows


def in_lanes(groups: NDArray[np.float64], factor: float = 1.0) -> float:
    """The sum of a chunk's groups: group g to lane g mod 256, each lane times ``factor``, a tree over the lanes."""
    lanes = np.zeros(256)
    for row in groups.reshape(-1, 256):
        lanes += row
    lanes *= factor
    while lanes.size > 1:
        lanes = lanes[: lanes.size // 2] + lanes[lanes.size // 2 :]
    return float(lanes[0])


def plain_sum(values: NDArray[np.float64]) -> float:
    """In the order of :func:`sum_of_squares`, all in float64."""
    total = 0.0
    with np.errstate(over="ignore", invalid="ignore"):
        for start in range(0, values.size, 65536):
            chunk = in_whole_rows(values[start : start + 65536])
            total += in_lanes(added(added(added(chunk.reshape(-1, 8))))[:, 0])
    return total


def norm(sums: list[float]) -> float:
    """The square root of sums that are added from first to last."""
    total = 0.0
    for value in sums:
        total += value
    return math.sqrt(total)


class Unscaled(NamedTuple):
    out: Array
    nonfinite: int
    sumsq: float


def unscale(grad: Array, kind: str, inv_scale: np.float32, before: Array | None = None) -> Unscaled:
    """``before`` is what is added to; None overwrites."""
    wide = decode(grad, kind)
    with np.errstate(all="ignore"):
        product = wide * wide.dtype.type(inv_scale)
        out = product if before is None else before + product
    bits = INF * bool(np.isinf(product).any()) | NAN * bool(np.isnan(product).any())
    if before is not None and bool((~np.isfinite(out) & np.isfinite(before) & np.isfinite(product)).any()):
        bits |= INF
    if kind in ("half", "bfloat16") and before is None:
        return Unscaled(out, bits, sum_of_squares(wide, kind, float(inv_scale)))
    return Unscaled(out, bits, sum_of_squares(out))


def scale(values: Array, kind: str, factor: np.float32) -> Array:
    wide = decode(values, kind)
    with np.errstate(all="ignore"):
        return encode(wide * wide.dtype.type(factor), kind)


def axpby(a: float, x: Array, b: float, y: Array, kind: str) -> Array:
    """``x`` and ``y`` decoded; the result in the type ``kind``."""
    with np.errstate(all="ignore"):
        return encode(np.float32(a) * x + np.float32(b) * y, kind)


def lerp(average: Array, value: Array, kind: str, weight: float) -> Array:
    """``average`` in float32 or float64; ``value`` stored as ``kind``. From the nearer end, each operation rounded."""
    wide = decode(value, kind)
    number = average.dtype.type
    with np.errstate(all="ignore"):
        if weight < 0.5:
            return average + number(weight) * (wide - average)
        return wide + number(1.0 - weight) * (average - wide)


class Cast(NamedTuple):
    out: Array
    overflow: int


def cast(master: Array, kind: str) -> Cast:
    out = encode(master, kind)
    finite = np.isfinite(master)
    became_inf = np.isinf(decode(out, kind)) & finite
    return Cast(out, TOO_LARGE * bool(became_inf.any()) | NOT_FINITE * bool((~finite).any()))


def lattice_stride(numel: int) -> int:
    """1 where all elements are looked at."""
    if numel <= 16384:
        return 1
    stride = 1009
    while math.gcd(stride, numel) != 1:
        stride += 1
    return stride


def sample(bits: Array) -> int:
    """The digest of uint16 values, as a signed 64-bit number."""
    stride = lattice_stride(bits.size)
    if stride == 1:
        padded = np.zeros(-(-bits.size // 4) * 4, dtype="<u2")
        padded[: bits.size] = bits
        words = padded.view("<u8")
    else:
        words = bits[::stride].astype(np.uint64)
    places = np.arange(words.size, dtype=np.uint64) * np.uint64(stride)
    mixed = words ^ ((places + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15))
    terms = (mixed & np.uint64(0xFFFFFFFF)) * (mixed >> np.uint64(32)) + words
    total = int(np.add.reduce(terms, dtype=np.uint64)) if words.size else 0
    return total - (1 << 64) if total >= 1 << 63 else total


# Of 16-bit types: their smallest normal number, the largest one, the bits of a mantissa.
TYPES = {"half": (2.0**-14, 65504.0, 10), "bfloat16": (2.0**-126, 2.0**127 * (2 - 2.0**-7), 7)}


def measured(grad: Array, kind: str) -> list[float]:
    """Sum of squares, largest magnitude; of 16-bit values how many are zero, subnormal, near the end of the range."""
    wide = decode(grad, kind)
    size = np.abs(wide)
    numbers = [sum_of_squares(wide, kind), float(size.max(initial=0.0)), 0.0, 0.0, 0.0]
    if kind in TYPES:
        least, most, _ = TYPES[kind]
        near = (size >= most / 2) | np.isnan(size)
        numbers[2:] = [float(np.sum(size == 0)), float(np.sum((size > 0) & (size < least))), float(np.sum(near))]
    return numbers


def compared(now: Array, then: Array, held: Array, kind: str) -> list[float]:
    """Decoded values of a master after and before a step, and of its weight, which is stored as ``kind``.

    Of long tensors the step is measured in one group of eight in 17, and scaled up.
    """
    place = np.arange(now.size)
    inside = np.ones(now.size, dtype=bool) if now.size <= 16384 else place // 8 % 17 == 0
    with np.errstate(all="ignore"):
        change = np.where(inside, now - then, now.dtype.type(0.0))
        away = now - held
        size = np.abs(change)
        moved, gap, lost = inside & (size != 0), np.zeros(now.size), 0.0
        if kind in TYPES:
            least, _, bits = TYPES[kind]
            exponent = np.frexp(np.where(then == 0, least, np.abs(then)))[1] - 1.0
            power = np.where(np.isfinite(then), np.exp2(exponent), np.inf)
            gap = np.where(inside, np.maximum(power, least) * 2.0**-bits, 0.0)
            lost = float(np.sum(moved & (size < gap / 2)))
        each = now.size / max(1, int(inside.sum()))
        some = [sum_of_squares(change), plain_sum(size.astype(np.float64)), plain_sum(gap), float(moved.sum()), lost]
        return [sum_of_squares(now), sum_of_squares(away), *(number * each for number in some)]
