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
            part = values[start : start + 65536]
            chunk = np.zeros(65536, dtype=values.dtype)
            chunk[: part.size] = part
            wide = chunk.astype(np.float64).reshape(-1, 8)
            sums = added(added(added(wide * wide)))[:, 0]
            if values.dtype != np.float64:
                single = chunk.astype(np.float32).reshape(-1, 8)
                fours = added(added(single * single))
                eights = added(fours)[:, 0]
                near = eights if stored in ("half", "bfloat16") else added(fours.astype(np.float64))[:, 0]
                sums = np.where((eights >= 2.0**-100) & np.isfinite(eights), near, sums)
            lanes = np.zeros(256)
            for row in sums.reshape(32, 256):
                lanes += row
            lanes *= np.float64(factor) * np.float64(factor)
            while lanes.size > 1:
                lanes = lanes[: lanes.size // 2] + lanes[lanes.size // 2 :]
            total += float(lanes[0])
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
