"""Lightning's strategies with the plugin, for two_ranks.py."""

from __future__ import annotations

import logging
import os
import warnings
from pathlib import Path
from typing import Any

import lightning
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from fp16opt.integrations.lightning import MasterWeightsModelParallel, MasterWeightsPrecision
from integrations.by_lightning import Module, fit, optimizer_of
from integrations.byhand import HALF, Trained, adamw, exported, network, raised, scaled

WAYS = ("DDP", "FSDP2")
make, schedule, in_order = adamw, None, list

for _name in ("lightning.pytorch", "lightning.fabric", "lightning", "fp16opt"):
    logging.getLogger(_name).setLevel(logging.ERROR)
warnings.simplefilter("ignore")


class Sharded(Module):
    """In the mesh, where the strategy has one."""

    def __init__(self) -> None:
        super().__init__()
        self.net = network(HALF)

    def configure_model(self) -> None:
        if isinstance(self.trainer.strategy, ModelParallelStrategy) and not isinstance(self.net[0].weight, DTensor):
            for layer in (*self.net, self.net):
                if any(True for _ in layer.parameters()):
                    fully_shard(layer, mesh=self.device_mesh["data_parallel"])


class AtBeginning(lightning.Callback):
    """Masters as a checkpoint has them."""

    seen: Any

    def on_train_start(self, trainer: lightning.Trainer, module: Any) -> None:
        self.seen = exported(module, optimizer_of(trainer))


def strategy_of(kind: Any) -> Any:
    sizes = {"data_parallel_size": int(os.environ["WORLD_SIZE"]), "tensor_parallel_size": 1}
    return kind(process_group_backend="gloo", **(sizes if issubclass(kind, ModelParallelStrategy) else {}))


def run(strategy: Any, folder: Path, data: Any, epochs: int, ckpt: Path | None = None) -> Trained:
    module, beginning = Sharded(), AtBeginning()
    told = {"devices": int(os.environ["WORLD_SIZE"]), "use_distributed_sampler": False, "callbacks": [beginning]}
    told |= {"gradient_clip_val": 0.5, "accumulate_grad_batches": 2, "max_epochs": epochs}
    plugin = MasterWeightsPrecision("16-true", **scaled(HALF, fused_step=False))
    made = fit(module, plugin, folder, data, ckpt, -1, strategy=strategy, **told)
    return Trained(module.losses, module, optimizer_of(made), beginning.seen)


def whole(way: str, folder: Path, data: Any) -> Trained:
    return run(strategy_of(DDPStrategy if way == "DDP" else MasterWeightsModelParallel), folder, data, 2)


def resumed(way: str, folder: Path, data: Any) -> Trained:
    """By Lightning's own strategy, which the plugin makes save masters; on two ranks also the first half."""
    kind, file = DDPStrategy if way == "DDP" else ModelParallelStrategy, folder / f"{way}.ckpt"
    if os.environ["WORLD_SIZE"] == "2":
        run(strategy_of(kind), folder, data, 1).model.trainer.save_checkpoint(file)
    return run(strategy_of(kind), folder, data, 2, file)


def more(folder: Path, data: Any, half: list[Tensor]) -> None:
    alone = strategy_of(MasterWeightsModelParallel)
    alone._save_distributed_checkpoint = False
    trainer = run(alone, folder, data, 1).model.trainer
    words = "save_distributed_checkpoint=False: masters are saved in pieces"
    raised(RuntimeError, words, lambda: trainer.save_checkpoint(folder / "whole.ckpt"))
