"""Deltas on a GPU: they stay there, and their bits are those that a copy on the CPU gets."""

from __future__ import annotations

import copy
from typing import Any

import card
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import fp16opt
from fp16opt import MixedPrecisionOptimizer


def trainer(device: torch.device, **options: Any) -> tuple[nn.Module, MixedPrecisionOptimizer, nn.Module]:
    """A model on the device, what trains it, and a copy on the CPU."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 128), nn.LayerNorm(128), nn.Linear(128, 64))
    net[0].bfloat16(), net[2].bfloat16()
    sampler = copy.deepcopy(net)
    net.to(device)
    opt = MixedPrecisionOptimizer(torch.optim.AdamW(net.parameters(), lr=1e-4), track_changes=True, **options)
    return net, opt, sampler


def step(net: nn.Module, opt: MixedPrecisionOptimizer, number: int) -> None:
    generator = torch.Generator().manual_seed(number)
    for param in net.parameters():
        param.grad = torch.randn(param.shape, generator=generator).to(param.device, param.dtype)
    opt.step()
    opt.zero_grad()


@pytest.mark.parametrize(
    "options",
    [{"fused_step": True}, {"fused_step": False}, {"master_weights": "split24", "optimizer_state": "8bit"}],
    ids=["one pass", "wrapped", "split24, 8-bit"],
)
def test_patches_stay_on_the_device_and_load_anywhere(device: torch.device, options: dict[str, Any]) -> None:
    net, opt, sampler = trainer(device, **options)
    beside = copy.deepcopy(net)
    previous = None
    for number in range(3):
        step(net, opt, number)
        delta = opt.take_delta(net)
        patches = list(delta.patches(chunk_bytes=6000))
        assert {patch.values.device.type for patch in patches} == {device.type}
        for model, chosen in ((beside, patches), (sampler, delta.patches(device="cpu"))):
            for patch in chosen:
                flat = model.state_dict()[patch.name].view(-1)
                flat[slice(None) if patch.indices is None else patch.indices] = patch.values
            delta.verify(model, previous)
        assert fp16opt.digests(sampler) == fp16opt.digests(beside) == fp16opt.digests(net)
        previous = delta


class Copies(TorchDispatchMode):
    """Counts bytes that operations bring from a device to the host."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        given = [one for one in args if isinstance(one, torch.Tensor)]
        if isinstance(made, torch.Tensor) and made.device.type == "cpu" and any(one.is_cuda for one in given):
            self.nbytes += made.numel() * made.element_size()
        return made


def test_no_value_is_copied_to_the_host(device: torch.device) -> None:
    """What goes there are two numbers a tensor; with a request all of it, which is seen. Pretended, nothing is."""
    net, opt, _ = trainer(device, fused_step=True)
    step(net, opt, 0)
    with Copies() as copies:
        delta = opt.take_delta(net)
        assert sum(patch.values.numel() for patch in delta.patches()) == delta.num_changed > 2_000
    assert copies.nbytes <= 16 * len(delta.changes)
    with Copies() as copies:
        list(delta.patches(device="cpu"))
    assert copies.nbytes > 2 * delta.num_changed or not card.IS_THERE
