"""Ranks on gloo, started by torchrun: Accelerate's FSDP2 with master_weights, against a loop by hand.

On two ranks it trains, saves and resumes. On another number of ranks it resumes from that, and exports.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
from accelerate.utils import FullyShardedDataParallelPlugin
from contract import reference
from distributed.world import leave
from torch.distributed.tensor import DTensor

import fp16opt.distributed
from fp16opt import DynamicLossScaler, MixedPrecisionOptimizer
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
    raised,
)
from integrations.sharding import as_on_accelerators

STEPS = 16


class Loop(AccelerateLoop):
    """One of a model that is sharded."""

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
        super().__init__()


def check(what: str, loop: Loop, hand: ByHand) -> None:
    check_masters(what, loop.optimizer.optimizer.master_params(), hand.masters)
    check_masters(f"{what}: the model", loop.net.parameters(), hand.models)


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
        rest.train(data[STEPS:], clip=0.5)
        check("on one rank", rest, hand.train(data[STEPS:], HALF))
    print(f"rank {os.environ['RANK']}: all is well")


def main(folder: Path) -> None:
    """Both ranks see the same batches, so that averages over ranks are what each rank has."""
    data = batches(2 * STEPS)
    hand = ByHand(network(HALF), scale=reference.Scale(OVERFLOWING, 5), micro=2, clip=0.5).train(data, HALF)
    loop = Loop().train(data, clip=0.5)
    check_run("whole", loop.losses, loop.skipped, hand)
    check("whole", loop, hand)
    half = Loop().train(data[:STEPS], clip=0.5)
    half.accelerator.save_state(str(folder / "half"))
    state = str(folder / "half")
    raised(FileExistsError, "masters were saved there before", lambda: half.accelerator.save_state(state))
    rest = Loop()
    rest.accelerator.load_state(str(folder / "half"))
    rest.train(data[STEPS:], clip=0.5)
    if rest.losses != hand.losses[STEPS:]:
        raise SystemExit(f"resumed: losses {rest.losses}, wanted {hand.losses[STEPS:]}")
    check("resumed", rest, hand)
    if rest.optimizer.optimizer.loss_scale != hand.scale.value:
        raise SystemExit(f"resumed: the scale is {rest.optimizer.optimizer.loss_scale}, wanted {hand.scale.value}")
    net = network(HALF)
    raised(
        ValueError,
        "it was wrapped before prepare shards the model, and its masters are whole",
        lambda: rest.accelerator.prepare(net, MixedPrecisionOptimizer(adamw(net.parameters()))),
    )
    print(f"rank {os.environ['RANK']}: all is well, {sum(loop.skipped)} of {len(loop.skipped)} steps were skipped")


if __name__ == "__main__":
    (main if os.environ["WORLD_SIZE"] == "2" else resume_elsewhere)(Path(sys.argv[1]))
    leave()
