"""apex's optimizers and LARC under amp, at every level: a script that takes all of it from apex."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from engine.checks import assert_same_bits
from torch import nn

from fp16opt import install_as_apex

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("fp16opt.amp") is None, reason="fp16opt.amp is not in this tree"
)
LEVELS = ("O0", "O1", "O2", "O3")


@pytest.fixture
def apex() -> Iterator[Any]:
    with install_as_apex():
        module = importlib.import_module("apex")
        yield module
        module.amp._amp_state.handle and module.amp._amp_state.handle._deactivate()


def network() -> nn.Module:
    rng = np.random.default_rng(5)
    net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
    with torch.no_grad():
        for layer in (net[0], net[3]):
            for p in layer.parameters():
                p.copy_(torch.from_numpy(rng.normal(size=tuple(p.shape), scale=0.4).astype(np.float32)))
    return net


def train(apex: Any, make: Any, level: str, poisoned: int | None, steps: int = 5) -> tuple[nn.Module, Any, list[float]]:
    net = network()
    optimizer = make(net.parameters())
    net, optimizer = apex.amp.initialize(net, optimizer, opt_level=level, verbosity=0, loss_scale=128.0)
    losses = []
    for step in range(steps):
        x = torch.from_numpy(np.random.default_rng(1).normal(size=(8, 6)).astype(np.float32))
        optimizer.zero_grad()
        loss = (net(x).float() - x[:, :3]).square().mean()
        losses.append(loss.item())
        with apex.amp.scale_loss(loss * (float("inf") if step == poisoned else 1.0), optimizer) as scaled:
            scaled.backward()
        optimizer.step()
    return net, optimizer, losses


@pytest.mark.parametrize("materialize", [True, False])
@pytest.mark.parametrize("level", LEVELS)
def test_fused_sgd_trains_as_torchs_sgd(apex: Any, level: str, materialize: bool) -> None:
    """With an overflow in one step, where the level checks for it; at O3 torch's SGD has 16-bit momentum."""
    settings = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}
    poisoned = 2 if level in ("O1", "O2") else None

    def fused(params: Any) -> Any:
        return apex.optimizers.FusedSGD(params, materialize_master_grads=materialize, **settings)

    mine, _, _ = train(apex, fused, level, poisoned)
    apex.amp._amp_state.handle and apex.amp._amp_state.handle._deactivate()
    theirs, _, _ = train(apex, lambda p: torch.optim.SGD(p, foreach=True, **settings), level, poisoned)
    for (name, p), q in zip(mine.named_parameters(), theirs.parameters(), strict=True):
        assert torch.isfinite(p).all(), name
        if level == "O3":
            torch.testing.assert_close(p, q, rtol=2e-2, atol=2e-3)
        else:
            assert_same_bits(p, q.detach(), name)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", ["LARC", "FusedAdam", "FusedLAMB", "FusedNovoGrad"])
def test_larc_and_the_others_train_at_every_level(apex: Any, name: str, level: str) -> None:
    def make(params: Any) -> Any:
        if name == "LARC":
            return apex.parallel.LARC(torch.optim.SGD(params, lr=0.5, momentum=0.9), trust_coefficient=0.1)
        return getattr(apex.optimizers, name)(params, lr=0.02)

    net, optimizer, losses = train(apex, make, level, None, steps=30)
    assert losses[-1] < 0.95 * losses[0]
    assert all(torch.isfinite(p).all() for p in net.parameters())
    assert isinstance(optimizer, torch.optim.Optimizer)
    if level == "O2":
        for p, master in zip(net.parameters(), apex.amp.master_params(optimizer), strict=True):
            assert master.dtype == torch.float32
            assert_same_bits(p, master.detach().to(p.dtype), "model is the rounded master")
