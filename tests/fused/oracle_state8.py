"""Optimizer state in 8 bits in numpy: codes of Adam's moments ("ratio8") and of SGD's momentum ("block8").

Written from the description of the formats, and not from the package's code. Arrays are one-dimensional, in memory
order.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from fused import oracle_fused

Array = np.ndarray[Any, Any]
f = np.float32
BLOCK = 128


def limit_of(beta1: float, beta2: float) -> float:
    if beta1**2 >= beta2:
        return 64.0
    bound = (1 - beta1) / math.sqrt((1 - beta2) * (1 - beta1**2 / beta2))
    limit = 2.0**-30
    while limit < bound:
        limit *= 2
    return limit


def dither(index: Array, step: int) -> Array:
    return (index.astype(np.uint64) * np.uint64(0x9E3779B1) + np.uint64(step * 0x85EBCA77 % 2**32)).astype(np.uint32)


def rows(values: Array) -> Array:
    """A block in each row, zeros behind the last element."""
    padded = np.zeros((-(-values.size // BLOCK), BLOCK), values.dtype)
    padded.reshape(-1)[: values.size] = values
    return padded


def flat(values: Array, n: int) -> Array:
    return values.reshape(-1)[:n].copy()


def signed_value(code: Array, unit: np.float32, per: Any) -> Array:
    bits = (np.abs(code.astype(np.int32)).astype(np.uint32) << np.uint32(19)) + np.uint32(0x3F800000)
    return np.sign(code).astype(f) * (((bits.view(f) - f(1)) * unit) * per)


def signed_code(value: Array, per: Any, units: np.float32, low: Any) -> Array:
    """A nan has the code of infinity, whatever its sign."""
    with np.errstate(all="ignore"):
        value = np.where(np.isnan(value), f(np.inf), value)
        share = np.where(per > 0, np.abs(value) / per, f(0)).astype(f)
        bits = (f(1) + share * units).astype(f).view(np.uint32).astype(np.int64)
    code = np.minimum(127, (bits + low - 0x3F800000) >> 19)
    return (np.where(np.signbit(value), -1, 1) * code).astype(np.int8)


@dataclass
class Moments:
    """Adam's codes of one tensor."""

    m: Array
    v: Array
    scales: Array
    limit: float = 8.0

    @classmethod
    def zeros(cls, n: int) -> Moments:
        return cls(np.zeros(n, np.int8), np.zeros(n, np.uint8), np.zeros(-(-n // BLOCK), f))

    def decode(self) -> tuple[Array, Array]:
        n = self.m.size
        y = rows(self.v).astype(f) * (f(1) / f(255))
        r = self.scales[:, None] * (y * y)
        return flat(signed_value(rows(self.m), f(self.limit) * (f(1) / f(247)), r), n), flat(r * r, n)

    def encode(self, m: Array, v: Array, step: int | None) -> None:
        """``step``: None rounds to nearest."""
        n, units = m.size, f(247) * (f(1) / f(self.limit))
        with np.errstate(all="ignore"):
            r = np.fmin(np.sqrt(rows(v)), f(2.0**62)).astype(f)
            largest = r.max(1, initial=0)
            kept = largest >= f(2.0**-46)
            y = np.sqrt(r * (f(1) / largest)[:, None]) * f(float.fromhex("0x1.fe0004p7"))
        y[~kept] = 0
        if step is None:
            low: Any = 2**18
            code = np.rint(y).astype(np.int64)
        else:
            h = rows(dither(np.arange(n), step))
            low = (h & np.uint32(0x7FFFF)).astype(np.int64)
            code = (y + (h >> np.uint32(16)).astype(f) * f(2.0**-16)).astype(np.int64)
        code = np.minimum(255, code)
        code = np.where(r > 0, np.maximum(code, 1), code)
        ratios = signed_code(rows(m), r, units, low)
        self.v, self.m = flat(np.where(kept[:, None], code, 0), n).astype(np.uint8), flat(ratios * kept[:, None], n)
        self.scales = np.where(kept, largest, f(0)).astype(f)


@dataclass
class Momentum:
    """SGD's codes of one tensor."""

    codes: Array
    scales: Array

    @classmethod
    def zeros(cls, n: int) -> Momentum:
        return cls(np.zeros(n, np.int8), np.zeros(-(-n // BLOCK), f))

    def decode(self) -> Array:
        return flat(signed_value(rows(self.codes), f(1) / f(247), self.scales[:, None]), self.codes.size)

    def encode(self, values: Array, step: int | None) -> None:
        n = values.size
        largest = np.fmin(np.abs(rows(values)), f(2.0**126)).max(1, initial=0)
        self.scales = np.where(largest >= f(2.0**-100), largest, f(0)).astype(f)
        low: Any = 2**18
        if step is not None:
            low = (rows(dither(np.arange(n), step)) & np.uint32(0x7FFFF)).astype(np.int64)
        self.codes = flat(signed_code(rows(values), self.scales[:, None], f(247), low), n)


@dataclass
class Element:
    """A parameter with its state in 8 bits."""

    p: Array
    state: Any
    t: int = 0


def adam(e: Element, stored: Array, inv_scale: float, clip: float, step: int, **o: Any) -> None:
    e.state.limit = limit_of(*o["betas"])
    m, v = e.state.decode()
    whole = oracle_fused.Element(e.p, m, v, None, e.t)
    oracle_fused.adam(whole, stored, inv_scale, clip, **{"amsgrad": False, **o})
    e.p, e.t = whole.p, whole.t
    e.state.encode(whole.m, whole.v, step)


def sgd(e: Element, stored: Array, inv_scale: float, clip: float, step: int, first: bool, **o: Any) -> None:
    whole = oracle_fused.Element(e.p, None if first else e.state.decode())
    oracle_fused.sgd(whole, stored, inv_scale, clip, **o)
    e.p = whole.p
    e.state.encode(whole.m, step)
