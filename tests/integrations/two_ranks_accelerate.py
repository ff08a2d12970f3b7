"""Two ranks on gloo, started by torchrun: Accelerate's DDP with master_weights, against a loop by hand."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
from contract import reference
from distributed.world import leave
from torch.nn.parallel import DistributedDataParallel

from fp16opt import DynamicLossScaler
from fp16opt.integrations.accelerate import Accelerator
from integrations.byhand import (
    HALF,
    OVERFLOWING,
    AccelerateLoop,
    ByHand,
    adamw,
    batches,
    check_masters,
    check_run,
    network,
)

STEPS = 16


def main(folder: Path) -> None:
    """Both ranks see the same batches, so that averages over ranks are what each rank has."""
    data = batches(2 * STEPS)
    hand = ByHand(network(HALF), scale=reference.Scale(OVERFLOWING, 5), micro=2, clip=0.5).train(data, HALF)
    options = {"scaler": DynamicLossScaler(OVERFLOWING, growth_interval=5), "fused_step": False}
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, master_weights=options)
    net = network(HALF)
    net, optimizer = accelerator.prepare(net, adamw(net.parameters()))
    if not isinstance(net, DistributedDataParallel):
        raise SystemExit(f"expected DDP, got {type(net).__name__}")
    loop = AccelerateLoop()
    loop.accelerator, loop.net, loop.optimizer = accelerator, net, optimizer
    loop.train(data, clip=0.5)
    check_run("DDP", loop.losses, loop.skipped, hand)
    check_masters("DDP", optimizer.optimizer.master_params(), hand.masters)
    accelerator.save_state(folder / "state")
    accelerator.wait_for_everyone()
    saved = {key: value.clone() for key, value in net.state_dict().items()}
    accelerator.load_state(folder / "state")
    if not all(torch.equal(saved[key], value) for key, value in net.state_dict().items()):
        raise SystemExit("a state that was saved and loaded is another one")
    print(f"rank {os.environ['RANK']}: all is well, {sum(loop.skipped)} of {len(loop.skipped)} steps were skipped")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    leave()
