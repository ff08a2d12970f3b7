"""Models and a training loop that the tests of amp share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fp16opt import amp

LEVELS = ("O0", "O1", "O2", "O3")
X = torch.randn(32, 8, generator=torch.Generator().manual_seed(1))
Y = torch.randint(0, 3, (32,), generator=torch.Generator().manual_seed(2))


def net(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))


def sgd(model: nn.Module, **kwargs: Any) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), **{"lr": 0.125, "momentum": 0.875, **kwargs})


def made(level: str, **kwargs: Any) -> tuple[Any, Any]:
    model = net()
    return amp.initialize(model, sgd(model), opt_level=level, verbosity=0, **kwargs)


def backward(
    model: Any, optimizer: Any, factor: float = 1.0, bad: Mapping[str, float] | None = None, **options: Any
) -> None:
    """Of a loss; gradients that ``bad`` names get such an element before the context is left."""
    with amp.scale_loss(F.cross_entropy(model(X).float(), Y) * factor, optimizer, **options) as scaled:
        scaled.backward()
        for name, value in (bad or {}).items():
            model.get_parameter(name).grad.view(-1)[0] = value


def train(model: Any, optimizer: Any, steps: int, zero: Callable[[Any, Any], None] | None = None) -> list[float]:
    losses = []
    for _ in range(steps):
        if zero is None:
            optimizer.zero_grad()
        else:
            zero(model, optimizer)
        loss = F.cross_entropy(model(X).float(), Y)
        with amp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def bits(model: nn.Module, optimizer: Any) -> list[Tensor]:
    params = [p.detach().clone() for p in model.parameters()]
    masters = [p.detach().clone() for p in amp.master_params(optimizer)]
    momenta = [optimizer.state[p]["momentum_buffer"].clone() for p in amp.master_params(optimizer)]
    return params + masters + momenta


def same(a: Sequence[Tensor], b: Sequence[Tensor]) -> bool:
    return len(a) == len(b) and all(x.dtype == y.dtype and torch.equal(x, y) for x, y in zip(a, b, strict=True))
