"""Checkpoints of other choices: split and missing masters, compiled models, extra state; errors that all ranks hear."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import SGD, AdamW

from distributed.models import Net, train
from distributed.world import on_ranks, raised
from fp16opt import DynamicLossScaler, MixedPrecisionOptimizer, distributed

SPLIT = {"master_weights": "split"}
NONE = {"master_weights": "none"}


def make(how: str, net: nn.Module | None = None, inner: Any = AdamW, **options: Any) -> tuple[nn.Module, Any]:
    """(what to call, the wrapper)."""
    net = net or Net(torch.bfloat16 if how.endswith("bf16") else torch.float16)
    if how.startswith("fsdp2"):
        for layer in (net.a, net.norm, net.b, net):
            fully_shard(layer)
    scaler = DynamicLossScaler(init_scale=2.0**6, growth_interval=3)
    optimizer = inner(net.parameters(), lr=1e-2)
    if options.get("master_weights") != "split":  # which has one step
        options = {"fused_step": False, **options}
    opt = MixedPrecisionOptimizer(optimizer, scaler=scaler, named_parameters=net.named_parameters(), **options)
    return (DDP(net) if how.startswith("ddp") else net), opt


def masters(opt: Any) -> list[Tensor]:
    return [(p.full_tensor() if isinstance(p, DTensor) else p).detach().clone() for p in opt.master_params()]


def alike(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(x.float(), y.float()) for x, y in zip(a, b, strict=True))


@on_ranks(2)
def test_16_bit_parameters_without_masters(rank: int, size: int, tmp_path: Path) -> None:
    for number, (how, other) in enumerate((("ddp", "fsdp2"), ("fsdp2", "ddp"))):
        model, opt = make(how, inner=SGD, **NONE)
        train(model, opt, range(4))
        distributed.save(f"{tmp_path}/{number}", model, opt)
        again, fresh = make(other, inner=SGD, **NONE)
        distributed.load(f"{tmp_path}/{number}", again, fresh)
        assert alike(masters(fresh), masters(opt))


@pytest.mark.parametrize("options", [SPLIT, {"optimizer_state": "8bit", "fused_step": True}])
@on_ranks(2)
def test_what_is_frozen_when_a_checkpoint_is_loaded(
    rank: int, size: int, tmp_path: Path, options: dict[str, Any]
) -> None:
    """What is frozen when a checkpoint is loaded goes on with all bits and its moments when it thaws."""
    model, opt = make("fsdp2 bf16", **options)
    train(model, opt, range(4))
    distributed.save(f"{tmp_path}/file", model, opt)
    again, fresh = make("fsdp2 bf16", (net := Net(torch.bfloat16)).requires_grad_(False), **options)
    net.b.requires_grad_(True)
    distributed.load(f"{tmp_path}/file", again, fresh)
    assert alike(masters(fresh), masters(opt))
    net.requires_grad_(True)
    for each, wrapper in ((model, opt), (again, fresh)):
        train(each, wrapper, range(4, 7))
    assert alike(masters(fresh), masters(opt))


class Extra(Net):
    """A buffer, and state that is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(3))
        self.words: dict[str, Any] = {"at": 0, "seen": torch.zeros(2)}

    def get_extra_state(self) -> dict[str, Any]:
        return self.words

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.words = state


@on_ranks(2)
def test_compiled_models_and_extra_state(rank: int, size: int, tmp_path: Path) -> None:
    """torch.compile adds to names; a checkpoint goes from a compiled model into a plain one, and back."""

    def wrapped(number: int) -> tuple[Extra, Any, Any]:
        net = Extra()
        _, opt = make("none", net)
        around = (torch.compile(net, backend="eager"), net, torch.compile(DDP(net), backend="eager"))
        return net, around[number], opt

    for number, following in ((0, 1), (1, 2), (2, 0)):
        net, model, opt = wrapped(number)
        net.count.fill_(5.0)
        net.words = {"at": 7, "seen": torch.ones(2)}
        distributed.save(f"{tmp_path}/{number}", model, opt)
        other, around, fresh = wrapped(following)
        distributed.load(f"{tmp_path}/{number}", around, fresh)
        assert bool((other.count == 5.0).all())
        assert other.words["at"] == 7
        assert bool((other.words["seen"] == 1.0).all())


@on_ranks(2)
def test_what_one_rank_refuses_all_refuse(rank: int, size: int) -> None:
    """What does not fit on one rank is refused on all, before anything is sent or changed."""
    for how in ("zero", "fsdp2"):
        net = Net(norm=False)
        if how == "fsdp2":
            for layer in (net.a, net.b, net):
                fully_shard(layer)
        zero = ZeroRedundancyOptimizer(net.parameters(), AdamW, lr=1e-2) if how == "zero" else None
        opt = MixedPrecisionOptimizer(zero or AdamW(net.parameters(), lr=1e-2), loss_scale=8.0)
        train(net, opt, range(2))
        before = masters(opt)
        good = distributed.state_dict(net, opt)
        shorter = {name: value[:1] for name, value in good["masters"].items()}
        for part, message in (({"masters": shorter}, "master must be floating"), ({"scaler": {}}, "scaler")):
            sd = {**good, **part} if rank == 1 else good
            text = raised(ValueError, lambda s=sd, n=net, o=opt: distributed.load_state_dict(n, o, s))
            assert message in text
            assert ("rank 1 failed" in text) == (rank == 0)
        assert alike(masters(opt), before)
        distributed.load_state_dict(net, opt, good)


@on_ranks(2)
def test_a_folder_without_its_name_is_passed_over_and_goes_at_the_next_save(
    rank: int, size: int, tmp_path: Path
) -> None:
    """A rank may die when the manifest is there and the folder has not got its name yet."""
    model, opt = make("ddp")
    for step in ("step1", "step2"):
        distributed.save(tmp_path / step, model, opt)
    if rank == 0:
        (tmp_path / "step2").rename(tmp_path / f".step2.{'0123abcd' * 4}.partial")
        (tmp_path / ".mine.partial").mkdir()
    dist.barrier()
    assert distributed.latest(tmp_path) == tmp_path / "step1"
    pending = [distributed.save_async(tmp_path / f"step{k}", model, opt) for k in (3, 4)]
    distributed.save(tmp_path / "step5", model, opt)
    for one in pending:
        one.result(30)
    dist.barrier()
    assert {path.name for path in tmp_path.iterdir()} == {".mine.partial", "step1", "step3", "step4", "step5"}
