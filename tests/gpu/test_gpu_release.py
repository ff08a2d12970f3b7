"""Released gradients on a GPU: the ordinary step's bits, and no wait while backward runs."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fp16opt import MixedPrecisionOptimizer

pytestmark = pytest.mark.card


def trained(release: bool, width: int, spoil: bool = False) -> tuple[nn.Module, MixedPrecisionOptimizer]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width)).half().cuda()
    opt = MixedPrecisionOptimizer(torch.optim.AdamW(net.parameters()), loss_scale=64.0, gradient_release=release)
    for step in range(3):
        x = torch.randn(4, width, generator=torch.Generator().manual_seed(step)).half().cuda()
        handle = net[0].weight.register_hook(lambda grad: grad * float("inf")) if spoil and step == 1 else None
        opt.zero_grad()
        opt.backward(net(x).float().square().mean())
        opt.step()
        if handle is not None:
            handle.remove()
    return net, opt


def test_released_gradients_give_the_ordinary_steps_bits() -> None:
    net, opt = trained(True, 32)
    other, plain = trained(False, 32)
    assert all(p.grad is None for p in net.parameters())
    for p, q in zip(net.parameters(), other.parameters(), strict=True):
        assert torch.equal(p, q)
    assert opt.skipped_steps == plain.skipped_steps == 0


def test_what_is_not_finite_is_left_alone_and_counted_without_a_wait() -> None:
    net, opt = trained(True, 32, spoil=True)
    assert opt.skipped_steps == 1
    assert all(bool(p.isfinite().all()) for p in net.parameters())
    x = torch.ones(4, 32).half().cuda()
    opt.zero_grad()
    loss = net(x).float().square().mean()
    torch.cuda.set_sync_debug_mode("error")
    try:
        opt.backward(loss)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    opt.step()
