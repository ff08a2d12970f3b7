"""Writes the DeepSpeed checkpoints in ``files/`` with DeepSpeed's own code; the tests, which read them, need none.

    pip install deepspeed==0.19.8
    torchrun --nproc-per-node=2 tests/foreign/write_deepspeed.py {fp16,bf16} {1,2} FOLDER

Beside the checkpoint it writes ``wanted.pt``: full masters by name, as DeepSpeed's ``zero_to_fp32`` puts them together.
The moments are set to functions of the masters before saving, twice the value and its square: each has its place.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint


def net() -> torch.nn.Module:
    """Odd sizes, so that partitions cut through parameters; a frozen one."""
    torch.manual_seed(5)
    made = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 3), torch.nn.Linear(3, 3))
    made[3].bias.requires_grad_(False)
    return made


def main() -> None:
    kind, stage, folder = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
    if kind == "fp16":  # a CPU's kernels have it, but DeepSpeed asks for faster ones
        get_accelerator().is_fp16_supported = lambda: True
        get_accelerator().supported_dtypes = lambda: [torch.float, torch.half, torch.bfloat16]
    model = net()
    decay = [p for n, p in model.named_parameters() if p.requires_grad and "bias" not in n]
    plain = [p for n, p in model.named_parameters() if p.requires_grad and "bias" in n]
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}]
    settings = {
        "train_micro_batch_size_per_gpu": 4,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        kind: {"enabled": True, **({"initial_scale_power": 8, "loss_scale_window": 3} if kind == "fp16" else {})},
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=torch.optim.AdamW(groups, lr=0.01), config=settings)
    dtype = torch.float16 if kind == "fp16" else torch.bfloat16
    for step in range(4):
        x = torch.randn(4, 5, generator=torch.Generator().manual_seed(step)).to(dtype)
        loss = (engine(x).float() - 1.0).square().mean()
        engine.backward(loss)
        engine.step()
    for flat, held in engine.optimizer.optimizer.state.items():
        held["exp_avg"].copy_(2.0 * flat.detach())
        held["exp_avg_sq"].copy_(flat.detach().square())
    engine.save_checkpoint(str(folder), tag="step4")
    if int(os.environ["RANK"]) == 0:
        scale = float(engine.optimizer.cur_scale) if kind == "fp16" else None
        masters = get_fp32_state_dict_from_zero_checkpoint(str(folder), exclude_frozen_parameters=True)
        torch.save(
            {"masters": {name: value.clone() for name, value in masters.items()}, "scale": scale}, folder / "wanted.pt"
        )


if __name__ == "__main__":
    main()
