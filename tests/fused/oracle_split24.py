"""Masters in 24 bits in numpy: a 16-bit weight and an 8-bit remainder. Written from the description of the formats."""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


def dither(index: Array, step: int) -> Array:
    """0 to 255 for each element."""
    mixed = index.astype(np.uint64) * np.uint64(0x85EBCA77) + np.uint64(step * 0x9E3779B1 % 2**32)
    return ((mixed & np.uint64(0xFFFFFFFF)) >> np.uint64(24)).astype(np.int64)


def split_bfloat16(master: Array, step: int | None) -> tuple[Array, Array]:
    """Weights as uint16 and remainders as int8."""
    u = master.view(np.uint32).astype(np.int64)
    magnitude = u & 0x7FFFFFFF
    if step is None:
        up = np.rint(magnitude / 256.0).astype(np.int64) * 256 - magnitude
        kept = u + up
    else:
        kept = ((u + dither(np.arange(u.size), step)) >> 8) << 8
    out_of_range = (magnitude < 0x7F800000) & ((kept & 0x7FFFFFFF) >= 0x7F800000)
    kept = np.where(out_of_range, (u >> 8) << 8, kept)
    weight, rest = (kept + 0x8000) >> 16, (kept >> 8) & 0xFF
    nan = magnitude > 0x7F800000
    weight, rest = np.where(nan, (u >> 16) | 0x40, weight), np.where(nan, 0, rest)
    return weight.astype(np.uint16), rest.astype(np.uint8).view(np.int8)


def join_bfloat16(weight: Array, rest: Array) -> Array:
    alone = weight.astype(np.int64) << 16
    bits = (alone + (rest.astype(np.int64) << 8)) & 0xFFFFFFFF
    return np.where(bits >> 31 == alone >> 31, bits, alone).astype(np.uint32).view(np.float32)


def last_place(weight: Array) -> Array:
    """Of float16 weights as float64: what the last bit is worth; for 0, inf and nan that of subnormals."""
    _, exponent = np.frexp(np.where(np.isfinite(weight) & (weight != 0), weight, 2.0**-24))
    return 2.0 ** (np.maximum(exponent - 1, -14) - 10.0)


def split_float16(master: Array, step: int | None) -> tuple[Array, Array]:
    with np.errstate(all="ignore"):
        weight = master.astype(np.float16)
        wide = weight.astype(np.float64)
        count = np.clip(np.rint((master.astype(np.float64) - wide) / last_place(wide) * 256), -127, 127)
        magnitude = master.view(np.uint32).astype(np.int64) & 0x7FFFFFFF
        beyond = np.where(magnitude == 0x7F800000, 0xFF, (magnitude - 0x477FF000) >> 22)
        beyond = np.where(magnitude > 0x7F800000, 0, beyond)
        rest = np.where(np.isfinite(wide), count, beyond).astype(np.int64)
    return weight.view(np.uint16), (rest & 0xFF).astype(np.uint8).view(np.int8)


def join_float16(weight: Array, rest: Array) -> Array:
    half = weight.view(np.float16)
    with np.errstate(all="ignore"):
        wide = half.astype(np.float64)
        near = (wide + rest * last_place(wide) / 256).astype(np.float32)
    near = np.where(np.signbit(near) == np.signbit(half), near, half.astype(np.float32))
    code = rest.view(np.uint8).astype(np.int64)
    sign = (weight.astype(np.int64) & 0x8000) << 16
    coarse = (sign | (0x477FF000 + (code << 22))).astype(np.uint32).view(np.float32)
    return np.where(np.isinf(half) & (code != 0xFF), coarse, np.where(np.isnan(half), np.float32("nan"), near))


SPLIT = {"half": split_float16, "bfloat16": split_bfloat16}
JOIN = {"half": join_float16, "bfloat16": join_bfloat16}
