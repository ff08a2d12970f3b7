"""A small half-precision network, its data, and plain FP32 stepping to compare FP16_Optimizer with."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn


def data(step: int, rows: int = 8) -> tuple[Tensor, Tensor]:
    """The same numbers on every machine."""
    rng = np.random.default_rng(step)
    x = torch.from_numpy(rng.normal(size=(rows, 6)).astype(np.float32))
    return x, torch.from_numpy(rng.normal(size=(rows, 2)).astype(np.float32))


def network(dtype: torch.dtype = torch.float16) -> nn.Sequential:
    """Two linear layers in ``dtype``, with an affine batch norm between them that stays FP32."""
    from fp16opt.fp16_utils import convert_network

    net = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 2))
    rng = np.random.default_rng(99)
    with torch.no_grad():
        for param in net.parameters():
            param.copy_(torch.from_numpy(rng.normal(size=tuple(param.shape), scale=0.4).astype(np.float32)))
    return convert_network(net, dtype) if dtype != torch.float32 else net


def loss_of(net: nn.Module, step: int, poison: float = 1.0) -> Tensor:
    x, y = data(step)
    dtype = next(net.parameters()).dtype
    return (net(x.to(dtype)).float() - y).square().mean() * poison
