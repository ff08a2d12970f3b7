"""Deltas of models that several ranks share: parts brought to one rank, applied on any placement."""

from __future__ import annotations

import copy
import itertools
import math
import os
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from test_deltas import sent
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW

from distributed.models import Net, full, loss_of, one_step
from distributed.world import World, on_ranks, raised
from fp16opt import MixedPrecisionOptimizer, WeightDelta, digests, distributed
from fp16opt.engine.dtensors import local
from fp16opt.engine.modes.regions import Region

SYNCS = int(os.environ.get("FP16OPT_DELTA_SYNCS", "6"))
"""Of each random walk."""
OPTIONS = ({"fused_step": True}, {"fused_step": False}, {"master_weights": "split24", "optimizer_state": "8bit"})


def by_way(test: Any) -> Any:
    """Each way to lay a model out, with each choice in some of them."""
    test = pytest.mark.parametrize("options", OPTIONS, ids=["fused", "wrapped", "split24 + 8-bit"])(test)
    ways = pytest.mark.parametrize("way", ["ddp", "zero", "fsdp2", "hsdp", "tensor parallel"])
    return pytest.mark.cells("each")(ways(test))


STEPS = 3


def placed(way: str, net: nn.Module, size: int) -> nn.Module:
    """A model laid out over the ranks."""
    if way in ("fsdp2", "hsdp"):
        shape = (size,) if way == "fsdp2" else (size // 2, 2)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
        for layer in (net.a, net.b, net):
            fully_shard(layer, mesh=mesh)
    elif way == "tensor parallel":
        parallelize_module(net, init_device_mesh("cpu", (size,)), {"a": ColwiseParallel(), "b": RowwiseParallel()})
    return net


def net_for(way: str) -> Net:
    """ZeRO takes parameters of one dtype, and tensor parallelism shards the hidden ones, evenly."""
    net = Net(norm=way not in ("zero", "tensor parallel"))
    if way == "tensor parallel":
        net.a, net.b = nn.Linear(16, 8, dtype=torch.float16), nn.Linear(8, 3, dtype=torch.float16)
    return net


def tracked(way: str, options: dict[str, Any], size: int) -> tuple[nn.Module, Any, MixedPrecisionOptimizer]:
    """(a model laid out over the ranks, what to call, its optimizer)."""
    torch.manual_seed(0)
    net = placed(way, net_for(way), size)
    optimizer: Any = (
        ZeroRedundancyOptimizer(net.parameters(), AdamW, lr=1e-3) if way == "zero" else AdamW(net.parameters(), lr=1e-3)
    )
    opt = MixedPrecisionOptimizer(optimizer, track_changes=True, loss_scale=128.0, **options)
    model: Any = net
    if way in ("ddp", "zero"):
        model = DistributedDataParallel(net)
        distributed.attach(opt, model)
    return net, model, opt


def train(rank: int, size: int, way: str, options: dict[str, Any], folder: str) -> list[list[str]]:
    """Steps, with an overflow among them; each one's delta, gathered, goes into a file, and the whole weights too."""
    net, model, opt = tracked(way, options, size)
    names = []
    for number in range(STEPS):
        opt.zero_grad()
        seen = 0 if way == "tensor parallel" else rank
        opt.backward(loss_of(model, number, seen, poison=number == 1))
        opt.step()
        part = opt.take_delta(net)
        assert part.is_complete == (way == "ddp"), way
        if not part.is_complete:
            assert "delta.gather()" in raised(RuntimeError, lambda part=part: part.apply_(net))
        delta = part.gather()
        assert (delta is None) == (rank != 0)
        whole = {name: full(value) for name, value in net.state_dict().items()}
        if delta is not None:
            assert delta.is_complete
            delta.save(f"{folder}/{number}.safetensors")
            torch.save(whole, f"{folder}/{number}.pt")
            names.append(delta.names())
    return names


def sample(rank: int, size: int, way: str, trained: str, folder: str) -> None:
    """A model on other ranks, laid out in another way, gets one delta after the other."""
    torch.manual_seed(0)
    net = placed(way, net_for(trained), size)
    for number in range(STEPS):
        delta = WeightDelta.load(f"{folder}/{number}.safetensors")
        if number == 2:
            before = {name: full(value) for name, value in net.state_dict().items()}
            wrong = WeightDelta.load(f"{folder}/0.safetensors")
            assert "Apply deltas in order" in raised(ValueError, lambda wrong=wrong: wrong.apply_(net))
            for name, value in net.state_dict().items():
                assert torch.equal(full(value), before[name])
        delta.apply_(net)
        expected = torch.load(f"{folder}/{number}.pt")
        for name, value in net.state_dict().items():
            assert torch.equal(full(value).view(-1).view(torch.uint8), expected[name].view(-1).view(torch.uint8)), name
        delta.verify(net)
        assert digests(net) == digests(expected), "on any placement"
        if number == 0:
            empty = WeightDelta.load(f"{folder}/1.safetensors")
            for name, value in net.named_parameters():
                if name == "a.weight" and local(value).numel():
                    local(value.detach()).view(-1)[0] += 1
            assert "applied to other weights" in raised(ValueError, lambda empty=empty: empty.verify(net))
            net.load_state_dict(whole_into(net, expected))


def whole_into(net: nn.Module, state: dict[str, torch.Tensor]) -> dict[str, Any]:
    """A plain state as one of this net's placements."""
    return {
        name: distribute_tensor(state[name], value.device_mesh, value.placements)
        if hasattr(value, "placements")
        else state[name]
        for name, value in net.state_dict().items()
    }


@by_way
def test_two_ranks_to_three_to_one(
    way: str, options: dict[str, Any], two: World, three: World, four: World, tmp_path: Path
) -> None:
    names = (four if way == "hsdp" else two).run(train, way, options, str(tmp_path))[0]
    assert {"a.weight", "b.bias"} <= set(names[0])
    assert not names[1], "the step was skipped"
    three.run(sample, "fsdp2", way, str(tmp_path))
    three.run(sample, "plain", way, str(tmp_path))
    torch.manual_seed(0)
    sampler = net_for(way)
    for number in range(STEPS):
        WeightDelta.load(tmp_path / f"{number}.safetensors").apply_(sampler)
        for name, value in torch.load(tmp_path / f"{number}.pt").items():
            assert torch.equal(sampler.state_dict()[name].view(-1).view(torch.uint8), value.view(-1).view(torch.uint8))


@on_ranks(2)
def test_parts_are_merged(rank: int, size: int) -> None:
    """Parts are merged before they are brought together, and ranks with different numbers are refused."""
    torch.manual_seed(0)
    net = placed("fsdp2", Net(), size)
    sampler = Net()
    opt = MixedPrecisionOptimizer(AdamW(net.parameters(), lr=1e-3), track_changes=True)
    parts = []
    for number in range(3):
        one_step(net, opt, number, rank)
        parts.append(opt.take_delta(net))
    merged = sent(WeightDelta.merge(parts)).gather(dst=1)
    whole = {name: full(value) for name, value in net.state_dict().items()}
    if merged is not None:
        merged.apply_(sampler)
        assert all(torch.equal(sampler.state_dict()[name], value) for name, value in whole.items())
    if rank == 0:
        assert "ranks have deltas with the numbers" in raised(ValueError, lambda: parts[rank].gather())
        dist.barrier()
    else:
        parts[rank].gather()
        dist.barrier()
    if rank == 0:
        assert "are not all of it" in raised(ValueError, lambda: lonely(parts[0]))


def lonely(part: WeightDelta) -> None:
    """What the destination sees where the other ranks' parts are lacking."""
    from fp16opt.deltas import joined

    joined([part.changes])


@on_ranks(2)
def test_local_indices_in_place_of_global_ones_are_noticed(rank: int, size: int) -> None:
    """A break on purpose: places in the piece for indices in the whole. The delta is refused, nothing is lost."""
    torch.manual_seed(0)
    net = placed("fsdp2", Net(), size)
    before = {name: full(value) for name, value in net.state_dict().items()}
    sampler = Net()
    sampler.load_state_dict(before)
    indices = Region.indices
    Region.indices = lambda self, places: places  # type: ignore[method-assign]
    try:
        opt = MixedPrecisionOptimizer(AdamW(net.parameters(), lr=1e-3), track_changes=True)
        opt.backward(loss_of(net, 0, rank))
        opt.step()
        delta = opt.take_delta(net).gather()
    finally:
        Region.indices = indices  # type: ignore[method-assign]
    if delta is not None:  # digests, which know the first index of a run of rows, are right
        assert "would not get the values of the trained model" in raised(ValueError, lambda: delta.apply_(sampler))
        assert all(torch.equal(sampler.state_dict()[name], value) for name, value in before.items())


# -- patches: each rank gives those of its pieces ----------------------------------------------------------------------


def their_names(name: str, shape: tuple[int, ...]) -> Any:
    """A tensor divided by rows, one stacked apart, two joined, the rest renamed."""
    if name == "a.weight":
        return [("a.q", 0, (3, 16)), ("a.k", 3, (shape[0] - 3, 16))]
    if name == "b.weight":
        return [(f"experts.{row}", row, shape[1:]) for row in range(3)]
    if name in ("a.bias", "b.bias"):
        return [("biases", 0 if name == "a.bias" else 8, (11,))]
    return f"model.{name}"


def theirs_of(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What a sampler with these names has when it has the model's weights, made without the library."""
    state = dict(state)
    weight, experts = state.pop("a.weight"), state.pop("b.weight")
    made = {"a.q": weight[:3], "a.k": weight[3:], "biases": torch.zeros(11, dtype=weight.dtype)}
    made["biases"][: weight.shape[0]], made["biases"][8:] = state.pop("a.bias"), state.pop("b.bias")
    made |= {f"experts.{row}": expert for row, expert in enumerate(experts)}
    return {name: value.clone() for name, value in (made | {f"model.{n}": v for n, v in state.items()}).items()}


def walk(rank: int, size: int, way: str, options: dict[str, Any], seed: int, syncs: int) -> int:
    """Random syncs: steps, overflows, writes, loads and resumes; all ranks' patches together make a sampler equal."""
    rng = random.Random(seed)  # the same on all ranks
    net, model, opt = tracked(way, options, size)
    theirs, number = theirs_of({name: full(value) for name, value in net.state_dict().items()}), itertools.count()
    saved: list[Any] = []
    for _ in range(syncs):
        waiting = []
        for _ in range(rng.randint(1, 5)):
            opt.zero_grad()
            seen = 0 if way == "tensor parallel" else rank
            opt.backward(loss_of(model, next(number), seen, poison=rng.random() < 0.2))
            opt.step()
            if rng.random() < 0.3:
                piece = local(rng.choice(list(net.parameters())).detach())
                piece.view(-1)[: rng.randint(1, 3)] = 0.25  # past all counters
            if rng.random() < 0.1:
                net.load_state_dict({name: value * 0.5 for name, value in net.state_dict().items()})
            if rng.random() < 0.1 and saved:
                distributed.load_state_dict(net, opt, saved.pop())
            elif rng.random() < 0.1:
                saved.append(copy.deepcopy(distributed.state_dict(net, opt)))
            if rng.random() < 0.3:
                waiting.append(opt.take_delta(net))
        delta = WeightDelta.merge([*waiting, opt.take_delta(net)]).distinct()
        written = {name: torch.zeros_like(value, dtype=torch.int64) for name, value in theirs.items()}
        everyone: list[Any] = [None] * size
        patches = list(delta.patches(chunk_bytes=rng.choice([1, 1 << 20]), names=their_names))
        dist.all_gather_object(everyone, patches)
        for patch in itertools.chain(*everyone):
            where = slice(None) if patch.indices is None else patch.indices.long()
            assert patch.shape == theirs[patch.name].shape
            written[patch.name].view(-1)[where] += 1
            theirs[patch.name].view(-1)[where] = patch.values
        expected = theirs_of({name: full(value) for name, value in net.state_dict().items()})
        for name, value in expected.items():
            assert torch.equal(value.view(-1).view(torch.uint8), theirs[name].view(-1).view(torch.uint8)), name
            assert int(written[name].amax()) <= 1, f"{name}: each element once"
    return syncs


@by_way
def test_random_syncs_by_patches_of_all_ranks(way: str, options: dict[str, Any], two: World, four: World) -> None:
    world, each = four if way == "hsdp" else two, 6
    done = [world.run(walk, way, options, seed, each)[0] for seed in range(math.ceil(SYNCS / each))]
    assert sum(done) >= SYNCS


@on_ranks(2)
def test_other_numbers_on_other_ranks_are_refused(rank: int, size: int) -> None:
    net = placed("fsdp2", Net(), size)
    opt = MixedPrecisionOptimizer(AdamW(net.parameters(), lr=1e-3), track_changes=True)
    deltas = [opt.take_delta(net) for _ in range(2)]
    match = "distinct: ranks have deltas with the numbers [1, 2]. Take them at the same steps"
    assert match in raised(ValueError, lambda: deltas[rank].distinct())
