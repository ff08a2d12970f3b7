"""What the numbers must be, in numpy and plain Python. Written apart from the library: imports nothing of it.

Each function rounds exactly where the contract rounds: a float32 result is one rounding of the named
operation.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

F32 = np.float32
F16 = np.float16
Array = NDArray[np.float32]


def round_half(x: Array) -> NDArray[np.float16]:
    """float32 to float16, nearest, ties to even; from 65520 on it is inf."""
    with np.errstate(over="ignore", invalid="ignore"):
        return np.asarray(x, F32).astype(F16)


def round_bfloat16(x: Array) -> Array:
    """float32 to the nearest bfloat16 (ties to even), kept in float32. Integer arithmetic; NaN stays NaN."""
    x = np.ascontiguousarray(x, F32)
    u = x.view(np.uint32).astype(np.uint64)
    rounded = ((u + 0x7FFF + ((u >> np.uint64(16)) & np.uint64(1))) >> np.uint64(16)) << np.uint64(16)
    out = (rounded & np.uint64(0xFFFFFFFF)).astype(np.uint32).view(F32)
    return np.where(np.isnan(x), x, out).astype(F32).reshape(x.shape)


def unscale(grad: NDArray[np.floating], scale: float) -> Array:
    """float32(grad) * float32(1 / scale), one rounding for each."""
    with np.errstate(all="ignore"):
        return np.asarray(grad).astype(F32) * (F32(1.0) / F32(scale))


def norm(grads: list[NDArray[np.floating] | None], norm_type: float = 2.0) -> float:
    """The total norm over all gradients, computed in double."""
    parts = [np.abs(np.asarray(g, np.float64)).ravel() for g in grads if g is not None]
    flat = np.concatenate(parts) if parts else np.zeros(0)
    if flat.size == 0:
        return 0.0
    if math.isinf(norm_type):
        return float(flat.max())
    if norm_type == 2.0:
        return math.sqrt(math.fsum((flat * flat).tolist()))
    if norm_type == 1.0:
        return math.fsum(flat.tolist())
    return math.fsum((flat**norm_type).tolist()) ** (1.0 / norm_type)


def clip_factor(total: float, max_norm: float) -> np.float32:
    """torch's factor, max_norm / (norm + 1e-6), at most 1, in float32 like ``torch.nn.utils.clip_grad_norm_``: a number
    divided by a tensor is the tensor's reciprocal times the number there."""
    single = F32(total)
    if not np.isfinite(single):
        return F32(min(1.0, max_norm / total))
    return np.minimum(F32(1.0), F32(1.0) / (single + F32(1e-6)) * F32(max_norm))


def clip(grads: list[Array | None], max_norm: float, norm_type: float = 2.0) -> tuple[float, list[Array | None]]:
    """(norm before clipping, clipped gradients). Non-finite gradients come back as they are."""
    total = norm(grads, norm_type)
    if any(g is not None and not np.isfinite(g).all() for g in grads):
        return total, grads
    factor = clip_factor(total, max_norm)
    return total, [None if g is None else g * factor for g in grads]


@dataclass
class SGD:
    """numerics.md section 6: float32, one rounding per operation, scalars rounded once."""

    lr: float
    momentum: float = 0.0
    dampening: float = 0.0
    weight_decay: float = 0.0
    nesterov: bool = False
    buffers: dict[int, Array] = field(default_factory=dict)

    def step(self, params: list[Array], grads: list[Array | None]) -> None:
        for i, (p, grad) in enumerate(zip(params, grads, strict=True)):
            if grad is None:
                continue
            g = grad
            if self.weight_decay:
                g = g + p * F32(self.weight_decay)
            if self.momentum:
                if i not in self.buffers:
                    self.buffers[i] = g.copy()
                else:
                    self.buffers[i] = self.buffers[i] * F32(self.momentum) + g * F32(1 - self.dampening)
                g = g + self.buffers[i] * F32(self.momentum) if self.nesterov else self.buffers[i]
            p += g * F32(-self.lr)


@dataclass
class Adam:
    """numerics.md section 6: the recipe that torch's fused CPU step follows when nothing is contracted."""

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    decoupled: bool = False
    t: dict[int, int] = field(default_factory=dict)
    m: dict[int, Array] = field(default_factory=dict)
    v: dict[int, Array] = field(default_factory=dict)

    def step(self, params: list[Array], grads: list[Array | None]) -> None:
        b1, b2 = self.betas
        for i, (p, grad) in enumerate(zip(params, grads, strict=True)):
            if grad is None:
                continue
            t = self.t[i] = self.t.get(i, 0) + 1
            g = grad
            if self.weight_decay and self.decoupled:
                p *= F32(1 - self.lr * self.weight_decay)
            elif self.weight_decay:
                g = g + p * F32(self.weight_decay)
            m, v = self.m.get(i, np.zeros_like(p)), self.v.get(i, np.zeros_like(p))
            w = 1 - b1
            m = m + F32(w) * (g - m) if w < 0.5 else g - (g - m) * F32(1 - F32(w))
            v = v * F32(b2) + (F32(1 - b2) * g) * g
            denominator = np.sqrt(v) / F32((1 - b2**t) ** 0.5) + F32(self.eps)
            p += (F32(-self.lr / (1 - b1**t)) * m) / denominator
            self.m[i], self.v[i] = m, v


@dataclass
class DynamicScaler:
    """The dynamic loss scaler as the contract words it, in plain Python."""

    scale: float = 2.0**16
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    hysteresis: int = 1
    min_scale: float = 2.0**-14
    max_scale: float = 2.0**24
    clean: int = 0  # finite steps in a row since the last change
    bad: int = 0  # non-finite steps in a row

    def update(self, overflow: bool) -> None:
        if overflow:
            self.clean = 0
            self.bad += 1
            if self.bad >= self.hysteresis:
                self.scale = max(self.scale * self.backoff_factor, self.min_scale)
            return
        self.bad = 0
        self.clean += 1
        if self.clean == self.growth_interval:
            self.clean = 0
            self.scale = min(self.scale * self.growth_factor, self.max_scale)
