"""Two ranks on gloo, started by torchrun: a page's lines for FSDP2, as they stand there."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

import torch
from distributed.world import leave
from torch.distributed.tensor import DTensor

from fp16opt.distributed import fp32_state_dict


def lines(page: Path) -> str:
    """The one block of the page's part on FSDP2."""
    (found,) = re.findall(r"^## FSDP2\n.*?^```python no-run\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
    return str(found)


def main(page: Path, folder: Path) -> None:
    if page.stem in ("accelerate", "transformers"):
        from integrations.sharding import as_on_accelerators

        as_on_accelerators()
    torch.manual_seed(0)
    os.chdir(folder)
    made: dict[str, Any] = {"__name__": "__page__"}
    exec(compile(lines(page), str(page), "exec"), made)
    trainer = made.get("trainer")
    if page.stem == "lightning":
        model, optimizer = trainer.lightning_module, trainer.optimizers[0]
    else:
        model, optimizer = (made["model"], made["optimizer"]) if trainer is None else (trainer.model, trainer.optimizer)
    if not all(isinstance(param, DTensor) for param in model.parameters()):
        raise SystemExit("nothing was sharded")
    shown = repr(getattr(optimizer, "optimizer", optimizer) if page.stem != "lightning" else optimizer)
    if "bfloat16 with split masters" not in shown or "'8bit'" not in shown:
        raise SystemExit(f"expected split masters and 8-bit state, got {shown}")
    whole = fp32_state_dict(model, optimizer)
    if any(value.dtype != torch.float32 for value in whole.values()):
        raise SystemExit("masters are not FP32")
    saved = {
        "accelerate": "step_20/masters_0",
        "lightning": "epoch_2.ckpt",
        "transformers": "finetune/checkpoint-8/masters_0",
    }
    if not (folder / saved[page.stem]).is_dir():
        raise SystemExit(f"{saved[page.stem]} was not saved")
    print(f"rank {os.environ['RANK']}: all is well")


if __name__ == "__main__":
    main(Path(sys.argv[2]), Path(sys.argv[1]))
    leave()
