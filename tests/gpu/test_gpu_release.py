"""Released and held gradients on a GPU: the ordinary step's bits, and no wait while backward runs."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from fp16opt import MixedPrecisionOptimizer
from fp16opt.kernels import multi_tensor_decode, multi_tensor_encode

pytestmark = pytest.mark.card


def trained(release: Any, width: int, spoil: bool = False) -> tuple[nn.Module, MixedPrecisionOptimizer]:
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


@pytest.mark.parametrize("release", [True, "held"])
def test_released_gradients_give_the_ordinary_steps_bits(release: Any) -> None:
    """Held ones under 4,096 elements are held as they are."""
    net, opt = trained(release, 32)
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


def test_codes_have_the_bits_of_the_cpu() -> None:
    grad = (torch.randn(100_001) * torch.randn(100_001).exp()).half()
    found = []
    for given in (grad, grad.cuda()):
        codes, scales = torch.zeros_like(given, dtype=torch.int8), torch.zeros(391, device=given.device)
        multi_tensor_encode([given], [codes], [scales])
        out = torch.zeros_like(given)
        multi_tensor_decode([codes], [out], [scales])
        found.append([codes.cpu(), scales.cpu(), out.cpu()])
    assert all(map(torch.equal, *found))


def test_held_gradients_train() -> None:
    net, opt = trained("held", 128)
    assert opt.memory().gradients == 0
    twin = copy.deepcopy(net)
    assert not any(torch.equal(p, torch.zeros_like(p)) for p in twin.parameters())
