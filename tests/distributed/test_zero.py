"""ZeRO-1: masters and state of this rank's part, every new weight on every rank."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import OneCycleLR, StepLR

import fp16opt.optim
from distributed.models import Net, assert_alike, loss_of, messages
from distributed.world import World, on_ranks, raised
from fp16opt import DynamicLossScaler, MixedPrecisionOptimizer, distributed, kernels
from fp16opt.engine.one_pass import OnePassStep


def zero(params: Any, **options: Any) -> ZeroRedundancyOptimizer:
    return ZeroRedundancyOptimizer(params, AdamW, lr=1e-2, **options)


def groups(net: nn.Module) -> list[dict[str, Any]]:
    named = list(net.named_parameters())
    return [
        {"params": [p for n, p in named if "bias" not in n], "weight_decay": 0.1},
        {"params": [p for n, p in named if "bias" in n], "weight_decay": 0.0},
    ]


def train(opt: Any, ddp: nn.Module, rank: int, steps: range, poison: Any = (), schedule: Any = None) -> list[float]:
    norms = []
    for step in steps:
        opt.zero_grad()
        opt.backward(loss_of(ddp, step, rank, (step, rank) in poison))
        norms.append(float(opt.clip_master_grads(1e9)))
        opt.step()
        assert opt.step_was_skipped == any(step == at for at, _ in poison)
        if schedule is not None:
            schedule.step()
    return norms


def like_ddp(rank: int, size: int, dtype: torch.dtype, options: dict[str, Any]) -> None:
    """The same bits as DDP with whole masters on every rank."""
    poison = {(2, size - 1), (5, 0)}
    made = []
    for sharded in (True, False):
        net = Net(dtype, norm=False)  # ZeRO wants one dtype
        ddp = DDP(net)
        inner = zero(groups(net), **options) if sharded else AdamW(groups(net), lr=1e-2)
        scaler = DynamicLossScaler(init_scale=2.0**8, growth_interval=3)
        opt = MixedPrecisionOptimizer(inner, scaler=scaler, named_parameters=net.named_parameters())
        distributed.attach(opt, ddp, verify_ranks_every=2)
        norms = train(opt, ddp, rank, range(8), poison, StepLR(opt, 3, gamma=0.5))
        made.append((net, opt, norms))
    (net, opt, norms), (other, whole, wanted) = made
    assert [n for n in norms if math.isfinite(n)] == pytest.approx([n for n in wanted if math.isfinite(n)], rel=1e-6)
    for a, b in zip(net.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)
    assert_alike(list(net.parameters()))
    assert float(opt.scaler.scale) == float(whole.scaler.scale) != 2.0**8
    assert opt.param_groups[0]["lr"] == whole.param_groups[0]["lr"] == 1e-2 * 0.25
    masters = list(opt.master_params())
    assert len(masters) < 4
    assert all(m.dtype == torch.float32 for m in masters)
    assert set(opt.state) == set(masters)
    assert all(v.dtype == torch.float32 for entry in opt.state.values() for v in entry.values())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("view", [False, True])
def test_trains_like_whole_masters(two: World, dtype: torch.dtype, view: bool) -> None:
    two.run(like_ddp, dtype, {"parameters_as_bucket_view": view})


@on_ranks(2)
def test_schedulers_that_cycle_momentum(rank: int, size: int) -> None:
    """A scheduler that looks for betas among the optimizer's defaults, and changes them."""
    ends = []
    for sharded in (True, False):
        net = Net(norm=False)
        opt = MixedPrecisionOptimizer(zero(net.parameters()) if sharded else AdamW(net.parameters(), lr=1e-2))
        train(opt, DDP(net), rank, range(4), schedule=OneCycleLR(opt, 0.05, total_steps=6))
        ends.append((list(net.parameters()), opt.param_groups[0]["betas"]))
    (weights, betas), (wanted, same) = ends
    assert betas == same != (0.9, 0.999)
    assert all(torch.equal(a, b) for a, b in zip(weights, wanted, strict=True))


class One(nn.Module):
    """One parameter for four ranks: three have an empty part."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.a = nn.Linear(16, 3, bias=False, dtype=torch.float16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.a(x.half()).float()


@on_ranks(4)
def test_ranks_with_nothing_to_step_take_part(rank: int, size: int) -> None:
    net = One()
    ddp = DDP(net)
    opt = MixedPrecisionOptimizer(zero(net.parameters()), scaler=DynamicLossScaler(init_scale=2.0**8))
    distributed.attach(opt, ddp)
    start = net.a.weight.detach().clone()
    train(opt, ddp, rank, range(1))  # the first step compares the ranks
    for step in range(1, 5):
        with messages() as sent:
            train(opt, ddp, rank, range(step, step + 1), {(2, 3)})
        ours = [message for message in sent if message[0] != "broadcast"]
        assert ours == [("all_reduce", 32)], ours
        assert (len(sent) == 1) == (step == 2), "ZeRO broadcasts weights when it steps"
    assert_alike([net.a.weight, opt.scaler.scale])
    assert not torch.equal(net.a.weight, start)
    opt.zero_grad()
    assert net.a.weight.grad is None
    # A plain backward, at scale 1: a rank without masters must take part too.
    plain = MixedPrecisionOptimizer(zero(net.parameters()))
    for step in range(3):
        loss_of(ddp, step, rank, poison=step == 1 and rank == 3).backward()
        plain.step()
        assert plain.step_was_skipped == (step == 1)
        plain.zero_grad()
        plain.step()  # nothing to do
        assert not plain.step_was_skipped
    assert_alike([net.a.weight])


@on_ranks(2)
def test_gradients_that_are_left_over(rank: int, size: int) -> None:
    """Gradients of the last step are refused on every rank, also on those without masters."""
    net = One()
    opt = MixedPrecisionOptimizer(zero(net.parameters()), scaler=DynamicLossScaler(init_scale=2.0**8))
    ddp = DDP(net)
    train(opt, ddp, rank, range(1))
    assert "Call zero_grad() after each step" in raised(RuntimeError, lambda: opt.backward(loss_of(ddp, 1, rank)))


@on_ranks(2)
def test_folding(rank: int, size: int) -> None:
    net = Net(norm=False)
    ddp = DDP(net)
    opt = MixedPrecisionOptimizer(zero(net.parameters()), loss_scale=64.0, grad_accumulation="fp32")
    assert "attach(opt, ddp_model)" in raised(RuntimeError, lambda: opt.backward(loss_of(ddp, 0, rank)))
    opt.zero_grad()
    distributed.attach(opt, ddp)
    for step in range(3):
        opt.zero_grad()
        for k in range(2):
            opt.backward(loss_of(ddp, 10 * step + k, rank))
            assert all(p.grad is None for p in net.parameters()), "16-bit gradients are freed on every rank"
        opt.step()
    assert_alike(list(net.parameters()))
    with ddp.no_sync():
        assert "leave no_sync" in raised(RuntimeError, lambda: opt.backward(loss_of(ddp, 9, rank)))


@on_ranks(2)
def test_refusals(rank: int, size: int) -> None:
    net = Net(norm=False)
    for options in ({}, {"lr": 0.1}):
        message = raised(
            TypeError, lambda o=options: ZeroRedundancyOptimizer(net.parameters(), MixedPrecisionOptimizer, **o)
        )
        assert "MixedPrecisionOptimizer(ZeroRedundancyOptimizer(params, AdamW, ...))" in message
        message = raised(
            TypeError, lambda o=options: ZeroRedundancyOptimizer(net.parameters(), fp16opt.optim.AdamW, **o)
        )
        assert "optimizer_class: expected a class of torch.optim, got fp16opt.optim.AdamW" in message
        assert "MixedPrecisionOptimizer(ZeroRedundancyOptimizer(params, torch.optim.AdamW, ...))" in message
    opt = MixedPrecisionOptimizer(zero(net.parameters()), dynamic=True)
    extra = nn.Parameter(torch.ones(2).half())
    calls = {
        "state_dict: masters and optimizer state are spread": opt.state_dict,
        "load_state_dict: masters": lambda: opt.load_state_dict({}),
        "fp32_state_dict: this rank has a part": lambda: opt.fp32_state_dict(net),
        "add_param_group can't be done": lambda: opt.add_param_group({"params": [extra]}),
        "step(closure) can't be done": lambda: opt.step(lambda: None),
    }
    for wanted, call in calls.items():
        assert wanted in raised(RuntimeError, call), wanted
    lazy = ZeroRedundancyOptimizer(net.parameters(), AdamW, overlap_with_ddp=True, lr=0.1)
    assert "overlap_with_ddp=True" in raised(ValueError, lambda: MixedPrecisionOptimizer(lazy))
    opt = MixedPrecisionOptimizer(zero(net.parameters()), scaler=DynamicLossScaler(growth_interval=10 + rank))
    before = [p.detach().clone() for p in net.parameters()]
    opt.backward(loss_of(net, 0, rank))
    assert "growth_interval=10, rank 1 has" in raised(ValueError, opt.step)
    assert all(torch.equal(a, b) for a, b in zip(before, net.parameters(), strict=True))
    assert math.isfinite(opt.loss_scale)
    assert "fully_shard" not in raised(TypeError, lambda: MixedPrecisionOptimizer([SGD(net.parameters(), lr=0.1)]))


@on_ranks(2)
def test_a_skip_is_decided_in_one_way_on_all_ranks(rank: int, size: int) -> None:
    """Where a device could skip by itself, but has all state on one rank only: ZeRO's own step sends messages."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "is_host", lambda device: False)
        patch.setattr(OnePassStep, "skips_on_device", lambda stepper: rank == 0)
        params = [nn.Parameter(torch.ones(64, 2).half()), nn.Parameter(torch.ones(64).half())]
        inner = ZeroRedundancyOptimizer(params, SGD, lr=0.1, momentum=0.9)
        opt = MixedPrecisionOptimizer(inner, scaler=DynamicLossScaler(1024.0))
        for factor in (1.0, math.inf, 1.0):
            opt.zero_grad()
            opt.backward(sum((param.float().sum() for param in params), start=torch.zeros(())) * factor)
            opt.step()
        assert (opt.skipped_steps, opt.loss_scale) == (1, 512.0)
        assert_alike([param.detach() for param in params])
