"""Ranks on gloo, started by torchrun: Accelerate's FSDP2 with master_weights, against a loop by hand.

On two ranks it trains, saves and resumes. On another number of ranks it resumes from that, and exports.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import FullyShardedDataParallelPlugin
from contract import reference
from distributed.world import leave
from torch.distributed.tensor import DTensor

import fp16opt.distributed
from fp16opt import DynamicLossScaler, MixedPrecisionOptimizer
from fp16opt.integrations.accelerate import Accelerator
from integrations.byhand import HALF, OVERFLOWING, ByHand, adamw, batches, loss_of, network, whole
from integrations.sharding import as_on_accelerators

STEPS = 16


class Loop:
    """A training as Accelerate's documentation writes it."""

    def __init__(self) -> None:
        as_on_accelerators()
        sharding = FullyShardedDataParallelPlugin(
            fsdp_version=2, auto_wrap_policy="size_based_wrap", min_num_params=1, cpu_ram_efficient_loading=False
        )
        options = {"scaler": DynamicLossScaler(OVERFLOWING, growth_interval=5), "fused_step": False}
        self.accelerator = Accelerator(
            cpu=True, fsdp_plugin=sharding, gradient_accumulation_steps=2, master_weights=options
        )
        net = network(HALF)
        self.net, self.optimizer = self.accelerator.prepare(net, adamw(net.parameters()))
        if not all(isinstance(param, DTensor) for param in self.net.parameters()):
            raise SystemExit("nothing was sharded")
        self.losses: list[float] = []
        self.skipped: list[bool] = []

    def train(self, data: Any) -> Loop:
        for batch in data:
            with self.accelerator.accumulate(self.net):
                loss = loss_of(self.net, batch, HALF)
                self.losses.append(loss.item())
                self.accelerator.backward(loss)
                if self.accelerator.sync_gradients:
                    self.accelerator.clip_grad_norm_(self.net.parameters(), 0.5)
                self.optimizer.step()
                if self.accelerator.sync_gradients:
                    self.skipped.append(self.accelerator.optimizer_step_was_skipped)
                self.optimizer.zero_grad()
        return self


def check(what: str, loop: Loop, hand: ByHand) -> None:
    for number, (got, want) in enumerate(zip(loop.optimizer.optimizer.master_params(), hand.masters, strict=True)):
        if not whole(got).equal(want.detach()):
            raise SystemExit(f"{what}: master {number} is off by {(whole(got) - want.detach()).abs().max()}")
    for got, want in zip(loop.net.parameters(), hand.models, strict=True):
        if not whole(got).equal(want.detach()):
            raise SystemExit(f"{what}: the model is not its masters")


def resume_elsewhere(folder: Path) -> None:
    """On one rank and on three: the same masters, and on one the same end. Whole FP32 weights come out."""
    data, scale = batches(2 * STEPS), reference.Scale(OVERFLOWING, 5)
    hand = ByHand(network(HALF), scale=scale, micro=2, clip=0.5).train(data[:STEPS], HALF)
    rest = Loop()
    rest.accelerator.load_state(str(folder / "half"))
    check("of other ranks", rest, hand)
    exported = fp16opt.distributed.fp32_state_dict(rest.net, rest.optimizer)
    if os.environ["RANK"] == "0":
        for name, master in zip(dict(rest.net.named_parameters()), hand.masters, strict=True):
            if not torch.equal(exported[name], master.detach()):
                raise SystemExit(f"exported: {name} is not its master")
    if os.environ["WORLD_SIZE"] == "1":
        rest.train(data[STEPS:])
        check("on one rank", rest, hand.train(data[STEPS:], HALF))
    print(f"rank {os.environ['RANK']}: all is well")


def main(folder: Path) -> None:
    """Both ranks see the same batches, so that averages over ranks are what each rank has."""
    data = batches(2 * STEPS)
    hand = ByHand(network(HALF), scale=reference.Scale(OVERFLOWING, 5), micro=2, clip=0.5).train(data, HALF)
    loop = Loop().train(data)
    if loop.losses != hand.losses or loop.skipped != hand.skipped or not any(loop.skipped):
        raise SystemExit(f"losses {loop.losses}, wanted {hand.losses}; skips {loop.skipped}, wanted {hand.skipped}")
    check("whole", loop, hand)
    half = Loop().train(data[:STEPS])
    half.accelerator.save_state(str(folder / "half"))
    try:
        half.accelerator.save_state(str(folder / "half"))
    except FileExistsError as error:
        if "masters were saved there before" not in str(error):
            raise
    else:
        raise SystemExit("a second state in the same folder was not refused")
    rest = Loop()
    rest.accelerator.load_state(str(folder / "half"))
    rest.train(data[STEPS:])
    if rest.losses != hand.losses[STEPS:]:
        raise SystemExit(f"resumed: losses {rest.losses}, wanted {hand.losses[STEPS:]}")
    check("resumed", rest, hand)
    if rest.optimizer.optimizer.loss_scale != hand.scale.value:
        raise SystemExit(f"resumed: the scale is {rest.optimizer.optimizer.loss_scale}, wanted {hand.scale.value}")
    net = network(HALF)
    try:
        rest.accelerator.prepare(net, MixedPrecisionOptimizer(adamw(net.parameters())))
    except ValueError as error:
        if "it was wrapped before prepare shards the model, and its masters are whole" not in str(error):
            raise
    else:
        raise SystemExit("an optimizer that was wrapped too early was not refused")
    print(f"rank {os.environ['RANK']}: all is well, {sum(loop.skipped)} of {len(loop.skipped)} steps were skipped")


if __name__ == "__main__":
    (main if os.environ["WORLD_SIZE"] == "2" else resume_elsewhere)(Path(sys.argv[1]))
    leave()
