"""diagnose, records and loss scales on several ranks: all say the same, and what belongs to a rank is its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from distributed.models import HALF, Net, batch, full, loss_of, messages
from distributed.world import World
from fp16opt import DynamicLossScaler, MixedPrecisionOptimizer, Monitor, diagnose, distributed


def spread(net: nn.Module, how: str) -> nn.Module:
    if how == "alone":
        return net
    if how == "ddp":
        return DistributedDataParallel(net)
    for layer in (net.a, net.b):
        fully_shard(layer)
    return fully_shard(net)


def diagnosed(rank: int, size: int, how: str) -> None:
    net = Net(HALF)
    model = spread(net, how)
    opt = MixedPrecisionOptimizer(
        torch.optim.AdamW(model.parameters(), lr=1e-2), scaler=DynamicLossScaler(init_scale=2.0**8), fused_step=False
    )
    opt.backward(loss_of(model, 0, rank))
    before = [full(param.grad) for param in model.parameters()]
    weights = [full(param) for param in model.parameters()]

    def ask(factor: float = 1.0) -> Any:
        return diagnose(model, lambda: loss_of(model, 0, rank) * factor, opt)

    fine = ask()
    assert fine.kind in ("none", "underflow"), fine
    over = ask(2.0**20)
    assert over.kind == "overflow"
    assert over.largest_scale is not None
    assert not opt.step_was_skipped
    other = ask(float("inf") if rank == 1 else 1.0)
    assert other.kind == ("loss" if rank == 1 else "elsewhere")
    spoilt = diagnose(model, lambda: model(batch(0, rank) * (float("nan") if rank == 0 else 1.0)).square().mean(), opt)
    assert spoilt.kind == ("input" if rank == 0 else "elsewhere")
    for param, weight, grad in zip(model.parameters(), weights, before, strict=True):
        assert torch.equal(full(param), weight)
        assert torch.equal(full(param.grad), grad)
    opt.step()
    assert opt.skipped_steps == 0
    return fine.largest_scale, over.largest_scale  # type: ignore[return-value]


@pytest.mark.parametrize("how", ["ddp", "fsdp2"])
def test_diagnose_says_the_same_scale_on_every_rank(two: World, how: str) -> None:
    first, second = two.run(diagnosed, how)
    assert first == second
    assert first[0] > first[1]


def headroom(rank: int, size: int, how: str, seed: int) -> list[float]:
    zero = how == "zero"
    net = Net(HALF, norm=not zero)
    model = DistributedDataParallel(net) if how in ("ddp", "no_sync", "zero") else spread(net, how)
    scaler = DynamicLossScaler(2.0**24, policy="headroom", growth_interval=20)
    sgd: Any = torch.optim.SGD
    inner = (ZeroRedundancyOptimizer(model.parameters(), sgd, lr=1e-2)) if zero else sgd(model.parameters(), lr=1e-2)
    folds = {"grad_accumulation": "fp32"} if how == "no_sync" else {}
    opt = MixedPrecisionOptimizer(inner, scaler=scaler, fused_step=False, **folds)
    if how in ("ddp", "no_sync"):
        distributed.attach(opt, model)
    scales = []
    for number in range(30):
        opt.zero_grad()
        if how == "no_sync":
            with model.no_sync():
                opt.backward(loss_of(model, number + 100, rank) * (rank + 1.0))
        factor = 1e4 if number == 15 and rank == 1 else 1.0
        opt.backward(loss_of(model, number, rank) * factor)
        opt.clip_master_grads(0.01)
        opt.step()
        scales.append(opt.loss_scale)
    state = scaler.state_dict()
    assert opt.skipped_steps < 8
    return [*scales, *state["headroom"].tolist(), float(state["growth_tracker"])]


@pytest.mark.parametrize("how", [pytest.param("ddp", marks=pytest.mark.all), "no_sync", "fsdp2", "zero"])
def test_headroom_is_the_same_on_every_rank(two: World, how: str) -> None:
    first, second = two.run(headroom, how, 0)
    assert first == second
    assert max(first[:30]) > 2.0**10, "and it rises"
    assert first[31] > 0.0, "norms were seen"


def monitored(rank: int, size: int, how: str) -> list[dict[str, Any]]:
    """Records of a run, and beside them the same of one process that has every rank's part."""
    model = spread(Net(HALF, norm=False), how)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    names = [(name.removeprefix("module."), param) for name, param in model.named_parameters()]
    opt = MixedPrecisionOptimizer(inner, loss_scale=2.0**8, fused_step=False, named_parameters=names)
    records: list[dict[str, Any]] = []
    with Monitor(opt, every=2, to=records.append) as monitor, messages() as sent:
        for number in range(3):
            opt.zero_grad()
            opt.backward(loss_of(model, number, 0))  # the same batch on every rank
            opt.clip_master_grads(0.05)
            before = len(sent)
            opt.step()
            if how == "fsdp2" and number == 1:
                assert len(sent) == before, "no message in a step that is not sampled"
        assert monitor.steps == 3
    return records


@pytest.mark.parametrize("how", ["ddp", "fsdp2"])
def test_rank_0_writes_numbers_of_all_ranks(two: World, how: str) -> None:
    first, second = two.run(monitored, how)
    assert second == [], "rank 0 alone writes"
    alone = monitored(0, 1, "alone")
    assert [record["kind"] for record in first] == [record["kind"] for record in alone]
    ours, theirs = first[-1]["rows"], alone[-1]["rows"]
    assert sorted(ours) == sorted(theirs)
    for name, row in theirs.items():
        for what, value in row.items():
            assert ours[name][what] == pytest.approx(value, rel=1e-3, abs=1e-6), (name, what)
