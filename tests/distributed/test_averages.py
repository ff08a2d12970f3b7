"""AveragedMasters on several ranks: DDP, FSDP2 with DTensors for averages, and ZeRO, which is refused."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from distributed.models import Net, assert_alike, batch, full, one_step
from distributed.test_sharded import wrap
from distributed.world import on_ranks, raised
from fp16opt import AveragedMasters, distributed, ema

STEPS = range(4)


def alone(norm: bool) -> tuple[Net, AveragedMasters]:
    """The same training in one process."""
    plain = Net(norm=norm)
    opt = wrap(plain)
    distributed.attach(opt, None)
    averaged = AveragedMasters(plain, opt, ema(0.75))
    for number in STEPS:
        one_step(plain, opt, number, 0)
        averaged.update()
    return plain, averaged


@on_ranks(2)
def test_ddp(rank: int, size: int) -> None:
    plain, wanted = alone(norm=True)
    net = Net()
    ddp = DistributedDataParallel(net)
    opt = wrap(net)
    averaged = AveragedMasters(ddp, opt, ema(0.75))
    for number in STEPS:
        one_step(ddp, opt, number, 0)
        averaged.update()
    found = averaged.fp32_state_dict()
    assert found.keys() == plain.state_dict().keys()
    for name, value in wanted.fp32_state_dict().items():
        assert torch.equal(found[name], value), name
    assert_alike(list(found.values()))
    before = [param.detach().clone() for param in net.parameters()]
    with averaged.swap():
        assert_alike(list(net.parameters()))
        assert torch.equal(net.a.weight.detach(), found["a.weight"].half())
    assert all(torch.equal(a, b) for a, b in zip(net.parameters(), before, strict=True))
    one_step(ddp, opt, 9, rank)
    assert_alike(list(net.parameters()))


@on_ranks(2)
def test_fsdp2(rank: int, size: int, tmp_path: Path) -> None:
    plain, wanted = alone(norm=False)  # FSDP2 wants one dtype in a group
    net = fully_shard(Net(norm=False))  # stays gathered after evaluation
    opt = wrap(net)
    averaged = AveragedMasters(net, opt, ema(0.75))
    for number in STEPS:
        one_step(net, opt, number, 0)
        averaged.update()
        with torch.no_grad():
            net(batch(number, 0))  # leaves gathered weights in the outermost module
    found = averaged.fp32_state_dict()
    for name, value in wanted.fp32_state_dict().items():
        assert isinstance(found[name], DTensor), name
        assert torch.equal(full(found[name]), value), name
    weights = [full(param) for param in net.parameters()]
    assert all(isinstance(param, DTensor) for param in net.parameters())
    with torch.no_grad():
        before = net(batch(7, 0))
        with averaged.swap(), wanted.swap():
            inside = net(batch(7, 0))
            assert torch.equal(inside, plain(batch(7, 0)))  # it is the averages that are gathered
        assert not torch.equal(inside, before)
        assert torch.equal(net(batch(7, 0)), before)
    assert not isinstance(net.a.weight, DTensor)
    net.reshard()
    assert all(torch.equal(full(a), b) for a, b in zip(net.parameters(), weights, strict=True))
    # through torch's own sharded files, and from a whole state_dict
    dcp.save(averaged.state_dict(), checkpoint_id=tmp_path)
    other = AveragedMasters(net, opt, ema(0.75))
    state = {name: torch.empty_like(value) for name, value in other.state_dict().items()}
    dcp.load(state, checkpoint_id=tmp_path)
    whole = AveragedMasters(net, opt, ema(0.75))
    for loaded, source in ((other, state), (whole, wanted.state_dict())):
        loaded.load_state_dict(source)
        assert loaded.updates == len(STEPS)
        for name, value in found.items():
            assert torch.equal(full(loaded.fp32_state_dict()[name]), full(value)), name
    assert "module.a.weight: spread over ranks" in raised(ValueError, lambda: wanted.load_state_dict(found_as(state)))
    one_step(net, opt, 8, 0)
    averaged.update()


def found_as(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Sharded, but for the count."""
    return {name: value for name, value in state.items() if name == "n_averaged" or isinstance(value, DTensor)}
