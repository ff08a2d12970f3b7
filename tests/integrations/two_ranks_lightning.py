"""Ranks on gloo, started by torchrun: Lightning's strategies with the plugin, against a loop by hand.

Each rank checks what it has; one that fails ends the program with an error. On two ranks it trains, saves and resumes.
On another number of ranks it resumes from that, and exports.
"""

from __future__ import annotations

import inspect
import logging
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import lightning
import torch
from contract import reference
from distributed.world import leave
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import fp16opt.distributed
from fp16opt import DynamicLossScaler
from fp16opt.integrations.lightning import MasterWeightsModelParallel, MasterWeightsPrecision
from integrations.byhand import (
    HALF,
    LIGHTNING,
    OVERFLOWING,
    ByHand,
    adamw,
    batches,
    check_masters,
    loss_of,
    network,
    raised,
)

STEPS = 8
TOLD = LIGHTNING | {
    "devices": int(os.environ.get("WORLD_SIZE", "2")),
    "use_distributed_sampler": False,
    "gradient_clip_val": 0.5,
    "accumulate_grad_batches": 2,
}


class Module(lightning.LightningModule):
    """Both ranks see the same batches, so that averages over ranks are what each rank has."""

    def __init__(self, sharded: bool) -> None:
        super().__init__()
        self.net = network(HALF)
        self.sharded = sharded
        self.losses: list[float] = []

    def configure_model(self) -> None:
        if self.sharded and not isinstance(next(self.net.parameters()), DTensor):
            for layer in self.net:
                if any(True for _ in layer.parameters()):
                    fully_shard(layer, mesh=self.device_mesh["data_parallel"])
            fully_shard(self.net, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = loss_of(self.net, batch, HALF)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> Any:
        return adamw(self.parameters())


def plugin() -> MasterWeightsPrecision:
    scaler = DynamicLossScaler(OVERFLOWING, growth_interval=5)
    return MasterWeightsPrecision("16-true", fused_step=False, scaler=scaler)


def run(strategy: Any, sharded: bool, epochs: int, ckpt: Path | None = None, callback: Any = None) -> lightning.Trainer:
    calls = [] if callback is None else [callback]
    trainer = lightning.Trainer(strategy=strategy, plugins=plugin(), max_epochs=epochs, callbacks=calls, **TOLD)
    loader = torch.utils.data.DataLoader(batches(STEPS), batch_size=None)
    asks = "weights_only" in inspect.signature(trainer.fit).parameters  # from 2.6 on
    trainer.fit(Module(sharded), loader, ckpt_path=ckpt, **({"weights_only": True} if asks and ckpt else {}))
    return trainer


def check(what: str, trainer: lightning.Trainer, hand: ByHand, losses: list[float]) -> None:
    (optimizer,) = trainer.optimizers
    if trainer.lightning_module.losses != losses:
        raise SystemExit(f"{what}: losses {trainer.lightning_module.losses}, wanted {losses}")
    if optimizer.skipped_steps != sum(hand.skipped) or not optimizer.skipped_steps:
        raise SystemExit(f"{what}: {optimizer.skipped_steps} skipped, wanted {sum(hand.skipped)}")
    check_masters(what, optimizer.master_params(), hand.masters)
    check_masters(f"{what}: the model", trainer.lightning_module.parameters(), hand.models)


class AtBeginning(lightning.Callback):
    """Masters as a checkpoint has them, whole."""

    masters: dict[str, Tensor]

    def on_train_start(self, trainer: lightning.Trainer, module: Any) -> None:
        (optimizer,) = trainer.optimizers
        self.masters = fp16opt.distributed.fp32_state_dict(module, optimizer)


def resume_elsewhere(folder: Path) -> None:
    """On one rank and on three: the same masters, and on one the same end. Whole FP32 weights come out."""
    quiet()
    data, scale = batches(STEPS), reference.Scale(OVERFLOWING, 5)
    hand = ByHand(network(HALF), scale=scale, micro=2, clip=0.5).train(data * 2, HALF)
    half = [master.detach().clone() for master in hand.masters]
    size = int(os.environ["WORLD_SIZE"])
    strategy = ModelParallelStrategy(data_parallel_size=size, tensor_parallel_size=1, process_group_backend="gloo")
    seen = AtBeginning()
    rest = run(strategy, True, 4, folder / "half.ckpt", seen)
    for (name, got), want in zip(seen.masters.items(), half, strict=os.environ["RANK"] == "0"):
        if not torch.equal(got, want):
            raise SystemExit(f"on {size} ranks: the master of {name} is off")
    if size == 1:
        check("on one rank", rest, hand.train(data * 2, HALF), hand.losses[2 * STEPS :])
    print(f"rank {os.environ['RANK']}: all is well")


def quiet() -> None:
    for name in ("lightning.pytorch", "lightning.fabric", "lightning", "fp16opt"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.simplefilter("ignore")


def main(folder: Path) -> None:
    quiet()
    data = batches(STEPS)
    hand = ByHand(network(HALF), scale=reference.Scale(OVERFLOWING, 5), micro=2, clip=0.5).train(data * 4, HALF)
    check("DDP", run(DDPStrategy(process_group_backend="gloo"), False, 4), hand, hand.losses)

    def sharding() -> Any:
        return MasterWeightsModelParallel(data_parallel_size=2, tensor_parallel_size=1, process_group_backend="gloo")

    def lightnings() -> Any:  # the plugin makes it save masters
        return ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1, process_group_backend="gloo")

    check("FSDP2", run(sharding(), True, 4), hand, hand.losses)
    half = run(lightnings(), True, 2)
    half.save_checkpoint(folder / "half.ckpt")
    rest = run(lightnings(), True, 4, folder / "half.ckpt")
    (optimizer,) = rest.optimizers
    check_masters("FSDP2 resumed", optimizer.master_params(), hand.masters)
    if rest.lightning_module.losses != hand.losses[2 * STEPS :]:
        raise SystemExit("FSDP2 resumed: the losses are others")
    alone = sharding()
    alone._save_distributed_checkpoint = False
    words = "save_distributed_checkpoint=False: masters are saved in pieces"
    raised(RuntimeError, words, lambda: run(alone, True, 1).save_checkpoint(folder / "whole.ckpt"))
    if not isinstance(next(rest.lightning_module.parameters()), DTensor):
        raise SystemExit("FSDP2: nothing was sharded")
    print(f"rank {os.environ['RANK']}: all is well, {sum(hand.skipped)} of {len(hand.skipped)} steps were skipped")


if __name__ == "__main__":
    (main if os.environ["WORLD_SIZE"] == "2" else resume_elsewhere)(Path(sys.argv[1]))
    leave()
