"""State on the host of shards: pretended cards on the ranks, with the emulated kernels; bits, files, phases."""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import emulated
import pretended
import pytest
import torch
from torch import Tensor
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from distributed.test_modes import CLASSES, MODES, Net, give, spread, wrap
from distributed.world import World
from fp16opt import DynamicLossScaler, MixedPrecisionOptimizer, distributed
from fp16opt.engine.dtensors import is_sharded, local
from fp16opt.kernels import host_memory
from fp16opt.memory import tensors_in

WHOLE = ("ddp", "zero")


def train(net: Net, opt: MixedPrecisionOptimizer, steps: Sequence[int]) -> None:
    for number in steps:
        give(net, opt, number)
        opt.clip_master_grads(0.05)
        opt.step()
    opt.zero_grad()


def alike(one: Any, other: Any) -> bool:
    """Whether two state_dicts have the same keys, numbers and bits on this rank."""
    if isinstance(one, dict):
        return list(one) == list(other) and all(alike(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(alike, one, other))
    return torch.equal(local(one), local(other)) if isinstance(one, Tensor) else bool(one == other)


def move(net: Net) -> None:
    """As ``model.to`` does, to the host and back: the same bits in other memory."""
    for weight in net.parameters():
        if is_sharded(weight):
            weight._local_tensor = weight._local_tensor.clone()  # type: ignore[attr-defined]
        else:
            weight.data = weight.data.clone()
    net._apply(lambda weight: weight)  # FSDP2 finds the new pieces


def wrapped(cls: str, layout: str, net: Net, **options: Any) -> MixedPrecisionOptimizer:
    """Also in DDP, and around ZeRO: whole weights on every rank."""
    if layout not in WHOLE:
        return wrap(net, cls, **options)
    inner: Any = CLASSES[cls](net.parameters())
    if layout == "zero":
        given = {name: inner.defaults[name] for name in ("lr", "weight_decay", "momentum") if name in inner.defaults}
        inner = ZeroRedundancyOptimizer(net.parameters(), type(inner), **given)
    scaler = DynamicLossScaler(init_scale=2.0**8, growth_interval=3)
    opt = MixedPrecisionOptimizer(inner, named_parameters=net.named_parameters(), scaler=scaler, **options)
    distributed.attach(opt, DistributedDataParallel(net))
    return opt


def on_ranks(rank: int, size: int, kernels: list[Path], mode: str, cls: str, layout: str, folder: str) -> None:
    settings = {**MODES[mode]}
    with pytest.MonkeyPatch.context() as patch:
        pretended.pretend(emulated.Emulated(kernels), patch)
        nets = [Net(torch.float16, torch.float16 if layout == "zero" else torch.float32) for _ in range(4)]
        for net in nets:
            if layout not in WHOLE:
                spread(net, layout, size)
        wrap = functools.partial(wrapped, cls, layout)
        here, there = wrap(nets[0], **settings), wrap(nets[1], offload="cpu", **settings)
        fresh = distributed.state_dict(nets[1], there)
        assert alike(fresh, distributed.state_dict(nets[0], here)), "the template of the first state"
        for net, opt in zip(nets, (here, there), strict=False):
            train(net, opt, range(4))
        assert alike(list(nets[0].parameters()), list(nets[1].parameters()))
        assert here.skipped_steps == there.skipped_steps == 1
        assert there.memory().host > 0.9 * (there.memory().masters + there.memory().moments)
        saved = distributed.state_dict(nets[1], there)
        assert alike(saved, distributed.state_dict(nets[0], here))
        assert alike(distributed.fp32_state_dict(nets[1], there), distributed.fp32_state_dict(nets[0], here))
        distributed.save(f"{folder}/file", nets[1], there)
        saved = copy.deepcopy(saved)
        onto = wrap(nets[2], offload="cpu", **settings)
        distributed.load(f"{folder}/file", nets[2], onto)
        plain = wrap(nets[3], **settings)
        distributed.load_state_dict(nets[3], plain, saved)
        here.offload()
        assert here.memory().host == here.memory().total - here.memory().weights
        here.zero_grad()
        move(nets[0])
        assert "on the host" in repr(here)
        here.onload()
        assert here.memory().host == 0
        for net, opt in zip(nets, (here, there, onto, plain), strict=True):
            train(net, opt, range(4, 8))
        for net, opt in zip(nets[1:], (there, onto, plain), strict=True):
            assert alike(list(nets[0].parameters()), list(net.parameters()))
            assert alike(distributed.state_dict(net, opt), distributed.state_dict(nets[0], here))
        moments = [v for e in there.inner.state.values() for k, v in e.items() if k in ("exp_avg", "momentum_buffer")]
        assert all(host_memory.is_on_host(local(moment)) for moment in moments if local(moment).numel())
        here.offload()
        weights = [local(weight).detach() for weight in nets[0].parameters()]
        move(nets[0])
        kept = {local(tensor).untyped_storage().data_ptr() for tensor in tensors_in(here)}
        gone = [one.untyped_storage().data_ptr() for one in weights if one.numel()]
        assert kept.isdisjoint(gone), "no weight stays on the card"


@pytest.mark.cells("each")
@pytest.mark.parametrize("layout", ["fsdp2", "columns", "tensor parallel", *WHOLE])
@pytest.mark.parametrize("cls", ["AdamW", "SGD"])
@pytest.mark.parametrize("mode", ["one pass", "split", "split24 + 8-bit"])
def test_shards_whose_state_is_on_the_host(
    two: World, emulated_cuda: Any, mode: str, cls: str, layout: str, tmp_path: Path
) -> None:
    two.run(on_ranks, emulated_cuda.paths, mode, cls, layout, str(tmp_path))
