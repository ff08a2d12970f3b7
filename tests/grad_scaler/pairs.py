"""torch's GradScaler and ours side by side, on copies of the same parameters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.optim import SGD

import fp16opt.grad_scaler

Ours = fp16opt.grad_scaler.GradScaler
Theirs = torch.amp.GradScaler


def values(shape: tuple[int, ...], seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Normal values from numpy, so that they do not depend on torch's generator."""
    return torch.from_numpy(np.random.default_rng(seed).normal(size=shape)).to(dtype)


def parameters(shapes: Sequence[tuple[int, ...]], dtype: torch.dtype = torch.float32) -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(values(shape, seed, dtype)) for seed, shape in enumerate(shapes)]


def linear_loss(params: Sequence[Tensor], coefficients: Sequence[Any]) -> Tensor:
    """A loss with these gradients, before scaling."""
    return sum(
        (p * torch.as_tensor(c, dtype=p.dtype).expand(p.shape)).sum().float()
        for p, c in zip(params, coefficients, strict=True)
    )


def outcome(call: Callable[[], Any]) -> tuple[type | None, Any]:
    """(the error's type or None, the result or None)."""
    try:
        return None, call()
    except Exception as error:
        return type(error), None


def assert_same_bits(a: Tensor | None, b: Tensor | None, what: str = "") -> None:
    """Equal dtype, shape and bits; nan equals nan."""
    assert (a is None) == (b is None), f"{what}: one is None"
    if a is None or b is None:
        return
    assert (a.dtype, a.shape) == (b.dtype, b.shape), what
    x, y = a.detach(), b.detach()
    x, y = (x.to_dense(), y.to_dense()) if x.layout is torch.sparse_coo else (x, y)
    x, y = (torch.view_as_real(x), torch.view_as_real(y)) if x.is_complex() else (x, y)
    same = (x == y) & (torch.signbit(x) == torch.signbit(y)) | (x.isnan() & y.isnan())
    assert bool(same.all()), f"{what}: {a} and {b}"


def exact_norm(grads: Sequence[Tensor | None]) -> Tensor:
    """The 2-norm by definition, in float64, rounded once to float32. torch's own CPU norm is off by up to 0.4 %."""
    total = 0.0
    for grad in grads:
        if grad is not None:
            dense = grad.to_dense() if grad.layout is torch.sparse_coo else grad
            total += float((np.abs(dense.detach().to(torch.complex128).numpy()) ** 2).sum())
    return torch.tensor(np.sqrt(total), dtype=torch.float32)


def assert_norm(found: Tensor, exact: Tensor) -> None:
    """``found`` is what the kernels promise of ``exact``, an :func:`exact_norm`.

    Three roundings to float32 in a sum of squares (tests/kernels/test_kernel_bits.py), of which the root halves the
    error, and one in each of the two numbers here.
    """
    assert (found.dtype, found.shape) == (exact.dtype, exact.shape)
    assert float(found) == pytest.approx(float(exact), rel=3.5 * 2.0**-24, abs=0.0)


def one(grad: float = 1.0, scaler: Any = None, lr: float = 0.5, cls: Any = SGD, **kwargs: Any) -> tuple:
    """One parameter with a scaled gradient, its optimizer and its scaler."""
    param = torch.nn.Parameter(torch.ones(2))
    optimizer = cls([param], lr=lr, **kwargs)
    scaler = scaler or Ours("cpu", init_scale=1024.0)
    scaler.scale(linear_loss([param], [grad])).backward()
    return param, optimizer, scaler


def iteration(scaler: Any, optimizer: Any, param: torch.Tensor, grad: float = 1.0) -> None:
    optimizer.zero_grad()
    scaler.scale(linear_loss([param], [grad])).backward()
    scaler.step(optimizer)
    scaler.update()
