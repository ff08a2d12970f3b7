"""An optimizer that was made before the model was sharded says so at its fourth step, on every rank, by name."""

from __future__ import annotations

import logging
from collections import OrderedDict
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.optim import AdamW

from distributed.models import Net, Said, loss_of
from distributed.world import on_ranks
from fp16opt import MixedPrecisionOptimizer

PLAN: dict[str, Any] = {"a": ColwiseParallel(), "b": RowwiseParallel()}
NAMES = "a.weight, a.bias, b.weight, b.bias. Was it made before fully_shard"


def wrapped(net: nn.Module, **options: Any) -> MixedPrecisionOptimizer:
    named = net.named_parameters()
    return MixedPrecisionOptimizer(AdamW(net.parameters(), lr=1e-2), named_parameters=named, **options)


@on_ranks(2)
def test_made_before_the_model_was_sharded(rank: int, size: int) -> None:
    said, logger = Said(), logging.getLogger("fp16opt")
    logger.addHandler(said)
    mesh = init_device_mesh("cpu", (1, size), mesh_dim_names=("dp", "tp"))
    ways: dict[str, tuple[Any, Any]] = {  # what is done before the optimizer is made, and after it
        "fully_shard": (None, lambda net: fully_shard(net, mesh=mesh["tp"])),
        "parallelize_module": (None, lambda net: parallelize_module(net, mesh["tp"], PLAN)),
        "both": (lambda net: parallelize_module(net, mesh["tp"], PLAN), lambda net: fully_shard(net, mesh=mesh["dp"])),
    }
    modes: list[dict[str, Any]] = [{}, {"master_weights": "split"}, {"dynamic": True}]
    for (way, (before, after)), options in zip(ways.items(), modes, strict=True):
        net = nn.Sequential(OrderedDict(a=nn.Linear(16, 8), b=nn.Linear(8, 4))).half()
        if before is not None:
            before(net)
        opt = wrapped(net, **options)
        after(net)
        for step in range(5):
            opt.backward(net(torch.ones(2, 16).half()).float().square().mean())
            opt.step()
            assert sum(NAMES in line for line in said.lines) == (step >= 3), (options, way, said.lines)
        said.lines.clear()
    logger.removeHandler(said)
    net = fully_shard(Net(norm=False))  # in the right order
    opt = wrapped(net)
    opt.backward(loss_of(net, 0, rank))
    opt.step()
    assert opt.stats()["steps"] == 1
