"""Experts on a mesh of their own, as torchtitan lays them out, and its way to clip: a norm a mesh, added up."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim import AdamW

from distributed.models import full, messages
from distributed.world import World, raised
from fp16opt import DynamicLossScaler, MixedPrecisionOptimizer, distributed

MAX_NORM = 0.05
STEPS, SKIPPED = range(3), 1
MODES: dict[str, dict[str, Any]] = {
    "wrapped": {"fused_step": False},
    "one pass": {},
    "split + 8-bit": {"master_weights": "split", "optimizer_state": "8bit"},
    "FP32 sums": {"grad_accumulation": "fp32"},
}
QUICK = [("one pass", 2.0), ("split + 8-bit", 2.0)]
SLOW = [("one pass", math.inf), ("wrapped", 2.0), ("FP32 sums", 2.0)]


class Experts(nn.Module):
    """Four of them, in one tensor."""

    def __init__(self) -> None:
        super().__init__()
        values = torch.randn(4, 64, 16, generator=torch.Generator().manual_seed(3))
        self.weight = nn.Parameter((values * 0.1).bfloat16())


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.dense = nn.Linear(16, 33, dtype=torch.bfloat16)
        self.experts = Experts()


def laid_out(block: Block, of_one_root: bool) -> Block:
    """Experts on (efsdp, ep), 2 x 2; the rest on all four ranks."""
    if of_one_root:
        both = init_device_mesh("cpu", (2, 2), mesh_dim_names=("efsdp", "ep"))
        line = both["efsdp", "ep"]._flatten("fsdp")
    else:
        both = init_device_mesh("cpu", (2, 2), mesh_dim_names=("efsdp", "ep"))
        line = init_device_mesh("cpu", (4,), mesh_dim_names=("fsdp",))
    cut = distribute_tensor(block.experts.weight.detach(), both["ep"], [Shard(0)], src_data_rank=None)
    block.experts.weight = nn.Parameter(cut)
    fully_shard(block.experts, mesh=both["efsdp"])
    return fully_shard(block, mesh=line)


def clip_by_meshes(params: Iterable[Any], max_norm: float, norm_type: float) -> Tensor:
    """What torchtitan does where experts are parallel: it takes parameters with an "ep" in their mesh's names apart."""
    kinds: dict[bool, list[Any]] = {True: [], False: []}
    for p in params:
        if p.grad is not None:
            kinds["ep" in p.device_mesh.mesh_dim_names].append(p)
    norms = [get_total_norm([p.grad for p in kind], norm_type).full_tensor() for kind in kinds.values()]
    apart = torch.stack(norms)
    total = apart.amax() if norm_type == math.inf else apart.pow(norm_type).sum().pow(1.0 / norm_type)
    for kind in kinds.values():
        clip_grads_with_norm_(kind, max_norm, total)
    return total


def wrapped(block: nn.Module, mode: str) -> MixedPrecisionOptimizer:
    scaler = DynamicLossScaler(init_scale=2.0**4, growth_interval=2)
    named = list(block.named_parameters())
    inner = AdamW([p for _, p in named], lr=1e-2)
    opt = MixedPrecisionOptimizer(inner, named_parameters=named, scaler=scaler, **MODES[mode])
    if not opt.params.has_dtensors:
        distributed.attach(opt, None)  # there is no DDP
    return opt


def give(block: nn.Module, opt: MixedPrecisionOptimizer, number: int) -> None:
    """The same gradients of whole parameters on every rank, cut as parameters are; an overflow in an expert's."""
    opt.zero_grad()
    scale = float(opt.scaler.scale)
    opt.scale_loss(torch.zeros(()))
    generator = torch.Generator().manual_seed(number)
    for name, p in block.named_parameters():
        grad = (torch.randn(p.shape, generator=generator) * 0.1 * scale).bfloat16()
        if number == SKIPPED and name == "experts.weight":
            grad[-1, -1, -1] = math.inf
        if isinstance(p, DTensor):
            placements = [Shard(0)] * p.device_mesh.ndim
            mesh = p.device_mesh
            if len(placements) == 2:  # cut by ep first, then by efsdp
                part = distribute_tensor(grad, mesh["ep"], [Shard(0)], src_data_rank=None).to_local()
                local = part.chunk(mesh.size(0))[mesh.get_coordinate()[0]].contiguous()
                grad = DTensor.from_local(local, mesh, p.placements, shape=p.shape, stride=p.stride(), run_check=False)
            else:
                grad = distribute_tensor(grad, mesh, placements, src_data_rank=None)
        p.grad = grad


def clips(rank: int, size: int, of_one_root: bool, cases: list[tuple[str, float]]) -> None:
    for mode, norm_type in cases:
        blocks = Block(), laid_out(Block(), of_one_root), laid_out(Block(), of_one_root)
        opts = [wrapped(block, mode) for block in blocks]
        for number in STEPS:
            for block, opt in zip(blocks, opts, strict=True):
                give(block, opt, number)
            found = [float(opt.clip_master_grads(MAX_NORM, norm_type)) for opt in opts[:2]]
            found.append(float(clip_by_meshes(opts[2].master_params(), MAX_NORM, norm_type)))
            with messages() as sent:
                for opt in opts:
                    opt.step()
            assert not number or sent == [("all_reduce", 32)], (mode, sent)  # of the one that was clipped by hand
            assert [opt.step_was_skipped for opt in opts] == [number == SKIPPED] * 3, (mode, number)
            if number != SKIPPED:
                assert found == pytest.approx([found[0]] * 3, rel=1e-6), (mode, norm_type, found)
                assert found[0] > MAX_NORM
        for a, b, c in zip(*[opt.master_params() for opt in opts], strict=True):
            torch.testing.assert_close(full(b), full(a), rtol=1e-5, atol=1e-7)
            torch.testing.assert_close(full(c), full(a), rtol=1e-5, atol=1e-7)
        if mode != "FP32 sums":  # in which the model's gradients are gone
            give(blocks[1], opts[1], 7)
            opts[1].clip_master_grads(MAX_NORM)
            clip_by_meshes(blocks[1].parameters(), MAX_NORM, 2.0)  # the habit
            message = raised(RuntimeError, opts[1].step)
            assert "call clip_master_grads(max_norm) in place of" in message, message


def test_experts_on_a_mesh_of_their_own_clipped_in_either_way(four: World) -> None:
    four.run(clips, False, QUICK)


@pytest.mark.slow
def test_in_other_modes_and_on_meshes_of_one_root(four: World) -> None:
    four.run(clips, False, SLOW)
    four.run(clips, True, QUICK)
