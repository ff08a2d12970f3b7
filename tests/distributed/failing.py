"""A training script for torchrun that loses a rank: in the middle of a step, of saving, or before a restart."""

from __future__ import annotations

import datetime
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.optim import AdamW

from distributed.world import leave
from fp16opt import DynamicLossScaler, MixedPrecisionOptimizer, distributed

STEPS = 6


def main(folder: str, trouble: str) -> None:
    """Save after every step; rank 1 dies in step 3 of the first life, where ``trouble`` says."""
    life = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    store = f"file://{folder}/store{life}"
    dist.init_process_group(
        "gloo", init_method=store, rank=rank, world_size=size, timeout=datetime.timedelta(seconds=15)
    )
    torch.manual_seed(0)
    net = nn.Linear(8, 5, dtype=torch.float16)
    fully_shard(net)
    opt = MixedPrecisionOptimizer(AdamW(net.parameters(), lr=1e-2), scaler=DynamicLossScaler(init_scale=64.0))
    checkpoints = Path(folder) / "checkpoints"
    first = 0
    newest = distributed.latest(checkpoints)
    if newest is not None:
        distributed.load(newest, net, opt)
        first = int(newest.name.removeprefix("step")) + 1
    for step in range(first, STEPS):
        dies = life == 0 and rank == 1 and step == 3
        opt.zero_grad()
        data = torch.randn(4, 8, generator=torch.Generator().manual_seed(step)).half()
        opt.backward(net(data).float().square().mean())
        if dies and trouble == "step":
            os._exit(7)
        opt.step()
        if dies and trouble == "save":
            distributed.files.FileSystemWriter.write_data = lambda *a, **k: os._exit(7)  # with its files half written
        distributed.save(checkpoints / f"step{step}", net, opt)
    weights = distributed.fp32_state_dict(net, opt)
    if rank == 0:
        torch.save((first, weights), f"{folder}/result.pt")


if __name__ == "__main__":
    main(*sys.argv[1:])
    leave()
