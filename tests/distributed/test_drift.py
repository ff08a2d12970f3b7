"""Settings and calls that differ on one rank: every rank raises at the next message, with the rank and both values."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW

from distributed.models import Net, loss_of, one_step
from distributed.test_sharded import sharded
from distributed.world import World, on_ranks, raised
from fp16opt import MixedPrecisionOptimizer, distributed
from fp16opt.distributed.settings import Settings, shown

ORDER, DRIFT = "ranks called in another order: rank 0 has come to ", "settings drifted apart: rank 0 has "
CASES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "lr": (
        lambda opt: opt.param_groups[0].update(lr=1e-4),
        DRIFT + "group 0 with lr=0.01, rank 1 has group 0 with lr=0.0001. Nothing was clipped or stepped by this call.",
    ),
    "betas": (
        lambda opt: opt.param_groups[0].update(betas=(0.9, 0.99)),
        DRIFT + "group 0 with betas=(0.9, 0.999), rank 1 has group 0 with betas=(0.9, 0.99).",
    ),
    "a tensor": (
        lambda opt: opt.param_groups[0].update(lr=torch.tensor(1e-4)),
        DRIFT + "group 0 with lr=0.01, rank 1 has group 0 with lr=0.0001.",
    ),
    "a clip": (
        lambda opt: opt.clip_master_grads(1.0),
        ORDER + "step(), of step 3, rank 1 to clip_master_grads(1, norm_type=2), of step 3. Nothing was clipped",
    ),
    "a clip by the largest": (
        lambda opt: opt.clip_master_grads(0.5, math.inf),
        ", rank 1 to clip_master_grads(0.5, norm_type=inf), of step 3. Nothing",
    ),
}


def made(how: str) -> tuple[nn.Module, Any]:
    net = Net(norm=False)
    inner: Any = ZeroRedundancyOptimizer(net.parameters(), AdamW, lr=1e-2) if how == "zero" else None
    if inner is None:
        sharded(net)
        inner = AdamW(net.parameters(), lr=1e-2)
    opt = MixedPrecisionOptimizer(inner, loss_scale=8.0)
    return (DistributedDataParallel(net) if how == "zero" else net), opt


@pytest.mark.parametrize("how", ["fsdp2", "zero"])
@on_ranks(2)
def test_what_one_rank_does_otherwise_all_hear_of(rank: int, size: int, how: str) -> None:
    for name, (change, wanted) in CASES.items():
        net, opt = made(how)
        for number in range(3):
            opt.zero_grad()
            opt.backward(loss_of(net, number, rank))
            if number < 2:
                opt.step()
        ends = [p.detach().clone() for p in net.parameters()]

        def one_differs(opt: Any = opt, change: Any = change) -> None:
            if rank == 1:
                change(opt)
            opt.step()

        message = raised(RuntimeError, one_differs)
        assert wanted in message, (name, message)
        assert all(torch.equal(p, end) for p, end in zip(net.parameters(), ends, strict=True)), name
        opt.param_groups[0].update(lr=1e-2, betas=(0.9, 0.999))  # mended on both ranks, the step is made
        one_step(net, opt, 3, rank)
        assert not all(torch.equal(p, end) for p, end in zip(net.parameters(), ends, strict=True)), name


def leaves_out(rank: int, size: int) -> None:
    """Rank 1 gives its step up after the clip; its pieces would stay a step behind."""
    for gives_up in (False, True):
        net, opt = made("fsdp2")
        for number in range(2):
            opt.zero_grad()
            opt.backward(loss_of(net, number, rank))
            opt.clip_master_grads(1.0)
            if number == 0 or rank == 0:
                opt.step()
        if gives_up and rank == 1:
            opt.zero_grad()
        opt.zero_grad()
        opt.backward(loss_of(net, 2, rank))
        message = raised(RuntimeError, lambda opt=opt: opt.clip_master_grads(1.0))
        assert "clip_master_grads(1, norm_type=2), of step 3, rank 1 to " in message
        assert "clip_master_grads(1, norm_type=2), of step 2. Nothing" in message
        assert "load the last checkpoint" in message


def test_a_step_that_one_rank_leaves_out_is_told_by_all(two: World) -> None:
    """ZeRO's steps send weights themselves, so that one that is left out ends in a message that waits."""
    two.run(leaves_out)


@pytest.mark.parametrize("how", ["fsdp2", "zero", "meshes", "group"])
@on_ranks(2)
def test_a_rank_without_gradients_is_named_by_all(rank: int, size: int, how: str) -> None:
    """Rank 1 has cleared its gradients, and its pieces would stay a step behind; next to others' zeros as well."""
    meshes = [init_device_mesh("cpu", (size, 1), mesh_dim_names=("copies", "shards")), init_device_mesh("cpu", (size,))]
    net, opt = made(how) if how in ("fsdp2", "zero") else (Net(norm=False), None)
    if opt is None:
        fully_shard(net.a, mesh=meshes[how == "group"])
        fully_shard(net, mesh=meshes[1])
        named = net.named_parameters()
        opt = MixedPrecisionOptimizer(AdamW(net.parameters(), lr=1e-2), named_parameters=named, master_weights="split")
    if how == "group":
        distributed.attach(opt, net, process_group=torch.distributed.group.WORLD)

    def step(number: int, norm_type: float | None = None, clears: bool = False) -> None:
        opt.zero_grad()
        opt.backward(loss_of(net, number, rank))
        if clears and rank == 1:
            opt.zero_grad()
        if norm_type is not None:
            opt.clip_master_grads(1.0, norm_type)
        opt.step()

    step(0)
    ends = [p.detach().clone() for p in net.parameters()]
    for number, norm_type in enumerate((None, 2.0, math.inf)):
        call = "step()" if norm_type is None else f"clip_master_grads(1, norm_type={norm_type:g})"
        message = raised(RuntimeError, lambda t=norm_type, n=number: step(n, t, clears=True))
        assert message.startswith(f"rank 1 has come to {call}, of step 2, without gradients, and rank 0 has"), message
        assert "Nothing was clipped or stepped by this call" in message
        assert all(torch.equal(p, end) for p, end in zip(net.parameters(), ends, strict=True))
    step(3)  # once all have some
    opt.zero_grad()
    assert float(opt.clip_master_grads(1.0)) == 0.0
    opt.step()  # and where no rank has any there is nothing to do
    assert opt.stats()["steps"] == 2


@pytest.mark.parametrize("how", ["fsdp2", "zero"])
@on_ranks(2)
def test_what_may_differ_between_ranks(rank: int, size: int, how: str) -> None:
    """What may differ: how many micro-batches a rank adds up, and the last bits of a setting."""
    net, opt = made(how)
    for number in range(3):
        opt.zero_grad()
        for more in range(rank if how == "zero" else 0):
            with net.no_sync():  # type: ignore[operator]
                opt.backward(loss_of(net, more, rank))
        if rank == 1:
            opt.scale_loss(torch.zeros(()))  # for a line in a log, say
        opt.backward(loss_of(net, number, rank))
        opt.param_groups[0]["lr"] = math.nextafter(0.01, 1.0) if rank else 0.01
        opt.step()
    assert opt.stats()["steps_taken"] == 3


class Estimating(SGD):
    """Keeps an estimate in its groups, of the parameters that it has: so does Prodigy."""

    def __init__(self, params: Any, lr: float, d: float = 1.0) -> None:
        super().__init__(params, lr=lr)
        for group in self.param_groups:
            group.setdefault("d", d)

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["d"] += sum(float(p.grad.abs().sum()) for p in group["params"] if p.grad is not None)
        return super().step(closure)


@on_ranks(2)
def test_values_that_each_rank_keeps_in_its_groups(rank: int, size: int) -> None:
    """What steps write to groups is no setting; a setting that differs is told of all the same."""
    net = Net(norm=False)
    ddp = DistributedDataParallel(net)
    inner = ZeroRedundancyOptimizer(net.parameters(), Estimating, lr=1e-2, d=1.0)
    opt = MixedPrecisionOptimizer(inner, named_parameters=net.named_parameters(), loss_scale=8.0)
    distributed.attach(opt, ddp, verify_ranks_every=1)
    for number in range(4):
        one_step(ddp, opt, number, rank)
        if number == 2:
            distributed.attach(opt, ddp, verify_ranks_every=1)
    everyone: list[Any] = [None] * size
    torch.distributed.all_gather_object(everyone, inner.param_groups[0]["d"])
    assert len({*everyone}) == size, "each rank has its own"
    assert opt.stats()["steps_taken"] == 4
    opt.param_groups[0]["lr"] = (1e-2, 2e-2)[rank]
    opt.zero_grad()
    opt.backward(loss_of(ddp, 5, rank))
    assert DRIFT + "group 0 with lr=0.01, rank 1 has group 0 with lr=0.02" in raised(RuntimeError, opt.step)


def test_a_setting_in_words() -> None:
    assert shown(0.1) == shown(math.nextafter(0.1, 1.0)) == "0.1"
    assert shown(-0.0) == shown(0.0) == "0"
    assert shown([0.9, 0.999]) == shown((0.9, 0.999)) == "(0.9, 0.999)"
    assert shown(lambda: 0) == shown(lambda: 1) == "function"
    assert shown(True) == "True"
    assert shown(None) == "None"


@on_ranks(2)
def test_settings_under_ddp(rank: int, size: int) -> None:
    """DDP sends nothing for the optimizer: settings are compared where masters are."""
    net = Net()
    ddp, opt = DistributedDataParallel(net), MixedPrecisionOptimizer(SGD(net.parameters(), lr=0.1))
    distributed.attach(opt, ddp, verify_ranks_every=2)

    def steps(numbers: range) -> None:
        for number in numbers:
            one_step(ddp, opt, number, rank)

    steps(range(2))
    opt.param_groups[0]["lr"] = (0.1, 0.2)[rank]
    message = raised(RuntimeError, lambda: steps(range(2, 4)))
    assert DRIFT + "group 0 with lr=0.1, rank 1 has group 0 with lr=0.2. Weights may differ by now" in message, message


@on_ranks(3)
def test_a_rank_between_the_others(rank: int, size: int) -> None:
    """A number that is the mean of all would go unseen in a sum on its rank: squares are sent too."""
    net, opt = made("fsdp2")
    for number in range(2):
        opt.zero_grad()
        opt.backward(loss_of(net, number, rank))
        if number == 0:
            opt.step()
    opt.param_groups[0]["lr"] = (1e-2, 2e-2, 3e-2)[rank]
    original = Settings.number
    Settings.number = lambda *_: 100 + rank  # type: ignore[assignment, method-assign]
    try:
        message = raised(RuntimeError, opt.step)
    finally:
        Settings.number = original  # type: ignore[method-assign]
    assert DRIFT + "group 0 with lr=0.01, rank 1 has group 0 with lr=0.02" in message, message


@on_ranks(2)
def test_copies_of_pieces_that_drift_apart(rank: int, size: int) -> None:
    """Copies of pieces on two ranks: along a dimension that repeats them, or that their own mesh lacks."""
    for masters, way in itertools.product(("full", "split"), ("hsdp", "experts", "part of a mesh")):
        net, flat = Net(norm=False), init_device_mesh("cpu", (size,))
        copies = init_device_mesh("cpu", (size, 1), mesh_dim_names=("copies", "shards"))
        fully_shard(net.a, mesh={"hsdp": copies, "experts": copies, "part of a mesh": copies["shards"]}[way])
        fully_shard(net, mesh=copies if way == "hsdp" else flat)
        opt = MixedPrecisionOptimizer(
            AdamW(net.parameters(), lr=1e-2), named_parameters=net.named_parameters(), master_weights=masters
        )
        distributed.attach(opt, net, verify_ranks_every=1)

        def step(number: int, net: Any = net, opt: Any = opt) -> None:
            opt.zero_grad()
            opt.scale_loss(torch.zeros(()))
            for p in net.parameters():
                p.grad = p.detach() * 0.0 + 1.0
            opt.step()

        for number in range(3):
            step(number)
        with torch.no_grad():
            if rank == 1:
                net.a.weight.to_local()[0, 0] += 1.0
        message = raised(RuntimeError, lambda step=step: step(3))
        wanted = "ranks drifted apart: the master of 'a.weight' differs between rank 0 and rank 1 (1 differ in all)"
        assert wanted in message, (masters, way, message)
