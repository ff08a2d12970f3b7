"""One step of SGD, Adam, AdamW and Lion in numpy, each operation rounded to float32; written from torch's documentation
and from the paper.

Numbers of a step are computed in double and rounded once; a gradient is (stored * inv_scale) * clip, two roundings.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[np.float32]]
f = np.float32


@dataclass
class Element:
    """A parameter with its state, one-dimensional; None where torch has no such state."""

    p: Array
    m: Array | None = None
    v: Array | None = None
    largest: Array | None = None
    t: int = 0


def gradient(stored: Array, inv_scale: float, clip: float, maximize: bool) -> Array:
    g = (stored * f(inv_scale)) * f(clip)
    return -g if maximize else g


def lerp(start: Array, end: Array, weight: np.float32) -> Array:
    if weight < f(0.5):
        return start + weight * (end - start)
    return end - (end - start) * (f(1) - weight)


def adam(e: Element, stored: Array, inv_scale: float, clip: float, **o: Any) -> None:
    """``o``: lr, betas, eps, weight_decay, amsgrad, maximize, decoupled."""
    with np.errstate(all="ignore"):
        g = gradient(stored, inv_scale, clip, o["maximize"])
        e.t += 1
        (beta1, beta2), lr, decay = o["betas"], o["lr"], o["weight_decay"]
        if decay and not o["decoupled"]:
            g = g + e.p * f(decay)
        if o["decoupled"]:
            e.p = e.p * f(1 - lr * decay)
        e.m = lerp(e.m, g, f(1 - beta1))
        e.v = e.v * f(beta2) + (f(1 - beta2) * g) * g
        second = e.v
        if o["amsgrad"]:
            second = e.largest = np.maximum(e.largest, e.v)
        root = f((1 - beta2**e.t) ** 0.5)
        e.p = e.p + (f(-lr / (1 - beta1**e.t)) * e.m) / (np.sqrt(second) / root + f(o["eps"]))


def sgd(e: Element, stored: Array, inv_scale: float, clip: float, **o: Any) -> None:
    """``o``: lr, momentum, dampening, weight_decay, nesterov, maximize. ``e.m`` is the momentum buffer."""
    with np.errstate(all="ignore"):
        g = gradient(stored, inv_scale, clip, o["maximize"])
        if o["weight_decay"]:
            g = g + e.p * f(o["weight_decay"])
        if o["momentum"]:
            e.m = g if e.m is None else e.m * f(o["momentum"]) + g * f(1 - o["dampening"])
            g = g + e.m * f(o["momentum"]) if o["nesterov"] else e.m
        e.p = e.p + g * f(-o["lr"])


def lion(e: Element, stored: Array, inv_scale: float, clip: float, **o: Any) -> None:
    """``o``: lr, betas, weight_decay, maximize. ``e.m`` is the momentum."""
    with np.errstate(all="ignore"):
        g = gradient(stored, inv_scale, clip, o["maximize"])
        beta1, beta2 = o["betas"]
        update = np.nan_to_num(np.sign(e.m * f(beta1) + g * f(1 - beta1)), nan=0.0)
        e.p = e.p * f(1 - o["lr"] * o["weight_decay"]) + update * f(-o["lr"])
        e.m = e.m * f(beta2) + g * f(1 - beta2)
