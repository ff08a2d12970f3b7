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
from integrations.byhand import HALF, OVERFLOWING, ByHand, adamw, batches, loss_of, network

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
    losses, skipped = [], []
    for batch in data:
        with accelerator.accumulate(net):
            loss = loss_of(net, batch, HALF)
            losses.append(loss.item())
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(net.parameters(), 0.5)
            optimizer.step()
            if accelerator.sync_gradients:
                skipped.append(accelerator.optimizer_step_was_skipped)
            optimizer.zero_grad()
    if losses != hand.losses or skipped != hand.skipped or not any(skipped):
        raise SystemExit(f"losses {losses}, wanted {hand.losses}; skips {skipped}, wanted {hand.skipped}")
    for number, (got, want) in enumerate(zip(optimizer.optimizer.master_params(), hand.masters, strict=True)):
        if not torch.equal(got.detach(), want.detach()):
            raise SystemExit(f"master {number} is off")
    accelerator.save_state(folder / "state")
    accelerator.wait_for_everyone()
    saved = {key: value.clone() for key, value in net.state_dict().items()}
    accelerator.load_state(folder / "state")
    if not all(torch.equal(saved[key], value) for key, value in net.state_dict().items()):
        raise SystemExit("a state that was saved and loaded is another one")
    print(f"rank {os.environ['RANK']}: all is well, {sum(skipped)} of {len(skipped)} steps were skipped")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    leave()
