"""Names that the user gave, in messages on shards: by ``named_parameters=``, or by the module that is attached."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import AdamW

from distributed.models import Net, Said, loss_of, one_step
from distributed.world import World, on_ranks, raised
from fp16opt import MixedPrecisionOptimizer, distributed
from fp16opt.engine.diagnostics import logger

NAMES = {"a.weight", "a.bias", "b.weight", "b.bias"}


def named(text: str) -> set[str]:
    return set(re.findall(r"[ab]\.(?:weight|bias)", text))


def messages_of(rank: int, size: int, kind: str, how: str) -> list[str]:
    """A skip, an edit, gradients that were not cleared, a model that lacks them: what each says on this rank."""
    net: Any = Net(norm=False)
    model = DDP(net) if kind == "zero" else fully_shard(net)
    if kind == "zero":
        inner: Any = ZeroRedundancyOptimizer(net.parameters(), AdamW, lr=1e-2)
    else:
        inner = AdamW(net.parameters(), lr=1e-2)
    options = {"named_parameters": net.named_parameters()} if how == "named_parameters" else {}
    opt = MixedPrecisionOptimizer(inner, loss_scale=8.0, **options)
    if how == "attach":
        distributed.attach(opt, model)
    said = Said()
    logger.addHandler(said)
    try:
        opt.backward(loss_of(model, 0, rank, poison=True))
        opt.step()
    finally:
        logger.removeHandler(said)
    opt.zero_grad()
    opt.backward(loss_of(model, 1, rank))
    with torch.no_grad():
        for param in net.parameters():
            param.grad.mul_(2.0)
    edited = raised(RuntimeError, opt.step)
    one_step(model, opt, 1, rank)
    left = raised(RuntimeError, lambda: opt.backward(loss_of(model, 1, rank)))
    lacks = raised(ValueError, lambda: distributed.state_dict(Net(norm=False), opt))
    assert len(said.lines) == 1, said.lines
    return [said.lines[0], edited, left, lacks]


@pytest.mark.parametrize("how", ["named_parameters", "attach"])
@pytest.mark.parametrize("kind", ["zero", "fsdp2"])
def test_every_message_that_names_parameters_has_the_user_s_names(two: World, kind: str, how: str) -> None:
    ranks = two.run(messages_of, kind, how)
    for skipped, edited, left, lacks in ranks:
        for text in (skipped, edited, left, lacks):
            assert named(text), text
            assert "group 0" not in text
            assert "another rank" not in text
        assert named(left) == NAMES
    assert named(ranks[0][1]) | named(ranks[1][1]) == NAMES


WRAPPINGS = ("module.{}", "_orig_mod.module.{}", "module._orig_mod.{}", "_fsdp_wrapped_module.{}")


@on_ranks(2)
def test_names_of_wrappers_are_those_of_the_module(rank: int, size: int) -> list[str]:
    """Names as DDP, torch.compile, checkpoint wrappers and FSDP1 give them, of all parameters or of some."""
    found = []
    for shape in (*WRAPPINGS, "{}._checkpoint_wrapped_module.{}", "in_a_larger_one.{}", "some"):
        net: Any = Net(norm=False)
        ddp = DDP(net)
        pairs = list(net.named_parameters())
        if shape == "some":
            pairs = pairs[1:2]
        elif "checkpoint" in shape:
            pairs = [(shape.format(*name.split(".")), param) for name, param in pairs]
        else:
            pairs = [(shape.format(name), param) for name, param in pairs]
        inner: Any = ZeroRedundancyOptimizer(net.parameters(), AdamW, lr=1e-2)
        opt = MixedPrecisionOptimizer(inner, loss_scale=8.0, named_parameters=pairs)
        distributed.attach(opt, ddp)
        opt.backward(loss_of(ddp, 0, rank))
        opt.step()
        names = [*opt.params.names, *opt.params.called_elsewhere]
        assert {name.removeprefix("in_a_larger_one.") for name in names} == NAMES, (shape, names)
        assert shape[:2] != "in" or all(name.startswith("in_a_larger_one.") for name in names)
        found += names
    return found
