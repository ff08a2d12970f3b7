"""Every mode on shards: the bits are those of one process that steps the same gradients."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import SGD, Adam, AdamW

from distributed.world import World
from fp16opt import DynamicLossScaler, MixedPrecisionOptimizer, distributed

MODES: dict[str, dict[str, Any]] = {
    "one pass": {"fused_step": True},
    "split": {"master_weights": "split"},
    "split24": {"master_weights": "split24"},
    "8-bit": {"optimizer_state": "8bit"},
    "split + 8-bit": {"master_weights": "split", "optimizer_state": "8bit"},
    "split24 + 8-bit": {"master_weights": "split24", "optimizer_state": "8bit"},
}
CLASSES: dict[str, Any] = {
    "AdamW": lambda p: AdamW(p, lr=1e-2, weight_decay=0.1),
    "Adam": lambda p: Adam(p, lr=1e-2, amsgrad=False),
    "SGD": lambda p: SGD(p, lr=0.1, momentum=0.9),
}


class Net(nn.Module):
    """Matrices of rows that are multiples of 128, and are not; a bias; a weight with fewer rows than ranks; FP32."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)

        def made(*shape: int, of: torch.dtype = dtype) -> nn.Parameter:
            return nn.Parameter(torch.randn(shape, generator=generator).mul_(0.1).to(of))

        self.even = made(48, 256)
        self.odd = made(45, 100)
        self.cube = made(10, 12, 40)
        self.few = made(1, 5000)
        self.bias = made(37)
        self.wide = nn.Module()
        self.wide.weight = made(64, 72, of=torch.float32)


def full(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.detach()


def wrap(net: nn.Module, cls: str, **options: Any) -> MixedPrecisionOptimizer:
    scaler = DynamicLossScaler(init_scale=2.0**8, growth_interval=3)
    inner = CLASSES[cls](net.parameters())
    return MixedPrecisionOptimizer(inner, named_parameters=net.named_parameters(), scaler=scaler, **options)


def gradients(net: nn.Module, number: int, scale: float) -> list[Tensor]:
    """Of the whole parameters, scaled, the same on every rank; every fourth step has an inf at the end of one."""
    generator = torch.Generator().manual_seed(100 + number)
    found = []
    for p in net.parameters():
        found.append((torch.randn(p.shape, generator=generator) * 0.01 * scale).to(p.dtype))
    if number % 4 == 2:
        found[0].view(-1)[-1] = math.inf
    return found


def give(net: nn.Module, opt: MixedPrecisionOptimizer, number: int) -> None:
    """Gradients as autograd leaves them under FSDP2."""
    opt.zero_grad()
    opt.scale_loss(torch.zeros(()))
    for p, grad in zip(net.parameters(), gradients(net, number, float(opt.scaler.scale)), strict=True):
        if isinstance(p, DTensor):
            grad = distribute_tensor(grad, p.device_mesh, p.placements, src_data_rank=None)
        p.grad = grad


def masters_of(opt: MixedPrecisionOptimizer) -> list[Tensor]:
    return [full(master) for master in opt.master_params()]


def assert_same(plain: nn.Module, one: MixedPrecisionOptimizer, net: nn.Module, many: MixedPrecisionOptimizer) -> None:
    for (name, a), b in zip(plain.named_parameters(), net.parameters(), strict=True):
        assert torch.equal(a, full(b)), name
    for place, (a, b) in enumerate(zip(masters_of(one), masters_of(many), strict=True)):
        assert torch.equal(a, b), place
    a, b = distributed.state_dict(plain, one), distributed.state_dict(net, many)
    for name, entry in a["state"].items():
        for key, value in entry.items():
            if isinstance(value, Tensor):
                assert torch.equal(value, full(b["state"][name][key])), (name, key)


def like_one_process(rank: int, size: int, mode: str, cls: str, dtype: torch.dtype) -> None:
    plain, net = Net(dtype), Net(dtype)
    fully_shard(net.wide)
    fully_shard(net)
    one, many = (wrap(m, cls, **MODES[mode]) for m in (plain, net))
    for number in range(6):
        for module, opt in ((plain, one), (net, many)):
            give(module, opt, number)
            if number % 2:
                opt.clip_master_grads(0.5)
            opt.step()
        assert one.step_was_skipped == many.step_was_skipped == (number % 4 == 2)
        assert_same(plain, one, net, many)
    assert "fused" in repr(many).split("step:")[1].splitlines()[0]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("mode", MODES)
def test_fsdp2_steps_have_the_bits_of_one_process(two: World, mode: str, dtype: torch.dtype) -> None:
    two.run(like_one_process, mode, "AdamW", dtype)
