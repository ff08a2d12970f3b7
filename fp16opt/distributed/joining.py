"""Uneven inputs: ``Join([ddp, opt])``. Ranks that run out of data get what the last one holds in the end."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import JoinHook

from .modules import wrapper_of
from .replicas import DdpReplicas


def process_group(opt: Any) -> Any:
    """The group of the DDP module that ``opt`` is attached to.

    Raises:
        RuntimeError: it is attached to none.
    """
    replicas = wrapper_of(opt).step_state.replicas
    if not isinstance(replicas, DdpReplicas):
        raise RuntimeError(
            "Join needs to know whose gradients are shared: call fp16opt.distributed.attach(opt, ddp_model) first."
        )
    return replicas.group


def hook(opt: Any) -> JoinHook:
    """What ``Join`` calls for ``opt``.

    Raises:
        RuntimeError: the optimizer is attached to no DDP module; or it sends messages of its own, which a rank without
            data could not answer; or DDP has a PowerSGD hook.
    """
    process_group(opt)
    wrapper = wrapper_of(opt)
    if not wrapper.step_state.ranks.alone:
        raise RuntimeError("Join can't serve masters that are spread over ranks (ZeRO, FSDP2). Even out the inputs.")
    if wrapper.config.grad_accumulation == "fp32":
        raise RuntimeError(
            "Join can't serve grad_accumulation=\"fp32\": a rank without data can't tell when FP32 sums are averaged. "
            'Use grad_accumulation="model", or even out the inputs.'
        )
    if wrapper.step_state.replicas.needs_decision:
        raise RuntimeError(
            "Join can't serve PowerSGD: a rank without data goes on compressing, and does not hear of the skips after "
            "which the hook's memory must be cleared. Even out the inputs, or use fp16_compress_hook."
        )
    return _Hook(opt)


class _Hook(JoinHook):
    def __init__(self, opt: Any) -> None:
        self.opt = opt

    def main_hook(self) -> None:
        """The others step. Their gradients need no message of ours; their comparison of the ranks may."""
        replicas = wrapper_of(self.opt).step_state.replicas
        if isinstance(replicas, DdpReplicas):
            replicas.shadow_step()

    def post_hook(self, is_last_joiner: bool) -> None:
        """All ranks get masters, optimizer state and scaler of one that trained to the end."""
        opt = self.opt
        group = process_group(opt)
        mine = dist.get_rank() if is_last_joiner else -1
        source = torch.tensor([mine], dtype=torch.int64, device=opt.join_device)
        dist.all_reduce(source, dist.ReduceOp.MAX, group=group)
        box = [opt.state_dict() if mine == int(source) else None]
        dist.broadcast_object_list(box, src=int(source), group=group)
        if mine != int(source):
            opt.load_state_dict(box[0])
