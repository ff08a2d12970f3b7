"""LAMB, NovoGrad, Adam and LARC in numpy, in double: what the classes must give. Written apart from them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def lamb_step(params: list[Array], grads: list[Array], state: dict[str, Any], **s: Any) -> list[Array]:
    """One step over all parameters; ``state`` holds t, m and v."""
    state["t"] = t = state.get("t", 0) + 1
    beta1, beta2 = s["betas"]
    norm = math.sqrt(sum(float((g * g).sum()) for g in grads))
    clip = norm / s["max_grad_norm"] if s["max_grad_norm"] and norm > s["max_grad_norm"] else 1.0
    out = []
    for i, (p, g) in enumerate(zip(params, grads, strict=True)):
        g = g / clip
        if not s["adam_w_mode"]:
            g = g + s["weight_decay"] * p
        m = state.get(("m", i), np.zeros_like(p)) * beta1 + g * (1 - beta1 if s["grad_averaging"] else 1)
        v = state.get(("v", i), np.zeros_like(p)) * beta2 + g * g * (1 - beta2)
        state["m", i], state["v", i] = m, v
        if s["bias_correction"]:
            m, v = m / (1 - beta1**t), v / (1 - beta2**t)
        update = m / (np.sqrt(v) + s["eps"])
        if s["adam_w_mode"]:
            update = update + s["weight_decay"] * p
        rate = s["lr"]
        if s["weight_decay"] != 0 or s["use_nvlamb"]:
            top, bottom = math.sqrt(float((p * p).sum())), math.sqrt(float((update * update).sum()))
            if top and bottom:
                rate *= top / bottom
        out.append(p - rate * update)
    return out


def novograd_step(params: list[Array], grads: list[Array], state: dict[str, Any], **s: Any) -> list[Array]:
    """One step over all parameters; ``state`` holds t, m and the running norms n."""
    state["t"] = t = state.get("t", 0) + 1
    beta1, beta2 = s["betas"]
    out = []
    for i, (p, g) in enumerate(zip(params, grads, strict=True)):
        largest = s["norm_type"] == 0
        now = (float(np.abs(g).max()) if g.size else 0.0) if largest else math.sqrt(float((g * g).sum()))
        before = state.get(("n", i), 0.0 if s["init_zero"] else now)
        if largest:
            norm = beta2 * before + (1 - beta2) * now
        else:
            norm = math.sqrt(beta2 * before**2 + (1 - beta2) * now**2)
        state["n", i] = norm
        correct1 = 1 - beta1**t if s["bias_correction"] else 1.0
        correct2 = math.sqrt(1 - beta2**t) if s["bias_correction"] else 1.0
        bottom = norm / correct2 + s["eps"]
        weight = 1 - beta1 if s["grad_averaging"] else 1.0
        first = state.get(("m", i), np.zeros_like(p))
        if s["reg_inside_moment"]:
            first = beta1 * first + weight * (g / bottom + s["weight_decay"] * p)
            update = first / correct1
        else:
            first = beta1 * first + weight * g
            update = first / correct1 / bottom + s["weight_decay"] * p
        state["m", i] = first
        out.append(p - s["lr"] * update)
    return out


def adam_step(params: list[Array], grads: list[Array], state: dict[str, Any], **s: Any) -> list[Array]:
    """Adam or AdamW with and without bias correction."""
    state["t"] = t = state.get("t", 0) + 1
    beta1, beta2 = s["betas"]
    out = []
    for i, (p, g) in enumerate(zip(params, grads, strict=True)):
        if s["adam_w_mode"]:
            p = p * (1 - s["lr"] * s["weight_decay"])
        else:
            g = g + s["weight_decay"] * p
        m = state.get(("m", i), np.zeros_like(p)) * beta1 + g * (1 - beta1)
        v = state.get(("v", i), np.zeros_like(p)) * beta2 + g * g * (1 - beta2)
        state["m", i], state["v", i] = m, v
        if s["bias_correction"]:
            m, v = m / (1 - beta1**t), v / (1 - beta2**t)
        out.append(p - s["lr"] * m / (np.sqrt(v) + s["eps"]))
    return out


def larc_grads(
    params: list[Array], grads: list[Array], lr: float, decay: float, trust: float, clip: bool, eps: float
) -> list[Array]:
    """The gradients that the wrapped optimizer steps with, without weight decay."""
    out = []
    for p, g in zip(params, grads, strict=True):
        top, bottom = math.sqrt(float((p * p).sum())), math.sqrt(float((g * g).sum()))
        if top == 0 or bottom == 0:
            out.append(g)
            continue
        rate = trust * top / (bottom + decay * top + eps)
        if clip:
            rate = min(rate / lr, 1.0)
        out.append((g + decay * p) * rate)
    return out
