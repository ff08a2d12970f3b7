"""Ranks on gloo, started by torchrun: the Trainer under FSDP2, against a loop by hand.

On two ranks it trains, saves and resumes, and leaves its checkpoints. On another number of ranks it resumes from these.
"""

from __future__ import annotations

import functools
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from contract import reference
from distributed.world import leave
from torch import Tensor
from torch.distributed.tensor import DTensor

import fp16opt.optim
from fp16opt import DynamicLossScaler
from fp16opt.integrations.transformers import Trainer
from integrations.byhand import (
    HALF,
    OVERFLOWING,
    ByHand,
    Regressor,
    batches,
    check_masters,
    network,
    raised,
    rows,
    whole,
)
from integrations.sharding import as_on_accelerators

STEPS = 16
ADAMW = torch.optim.AdamW, {"lr": 2.0**-6, "foreach": False}  # the Trainer's groups say how weights decay: not at all


class Ordered(Trainer):
    """All ranks see the same batches, so that averages over ranks are what each rank has."""

    def get_train_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(self.train_dataset, 4, collate_fn=self.data_collator)


class AtBeginning(transformers.TrainerCallback):
    """Masters as a checkpoint has them, and the steps that its optimizer had counted."""

    masters: list[Tensor]
    steps: int

    def on_train_begin(self, *args: Any, optimizer: Any, **kwargs: Any) -> None:
        self.masters = [whole(master).clone() for master in optimizer.optimizer.master_params()]
        self.steps = optimizer.optimizer.steps_counted()


def trainer_of(folder: Path, kind: str, options: Any = None, made_by: Any = ADAMW, **told: Any) -> Any:
    as_on_accelerators()
    sharding = {
        "fsdp_version": 2,
        "auto_wrap_policy": "SIZE_BASED_WRAP",
        "min_num_params": 1,
        "state_dict_type": kind,
        "cpu_ram_efficient_loading": False,
    }
    settings: dict[str, Any] = {"use_cpu": True, "report_to": [], "disable_tqdm": True, "logging_strategy": "no"}
    settings |= {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "max_steps": STEPS, "seed": 0}
    settings |= {"max_grad_norm": 0.5, "learning_rate": 2.0**-6, "save_strategy": "steps", "save_steps": STEPS // 2}
    args = transformers.TrainingArguments(str(folder), fsdp=True, fsdp_config=sharding, **{**settings, **told})
    scaler = {"scaler": DynamicLossScaler(OVERFLOWING, growth_interval=5)} if made_by is ADAMW else {}
    trainer = Ordered(
        Regressor(HALF),
        args,
        train_dataset=rows(2 * STEPS),
        optimizer_cls_and_kwargs=made_by,
        master_weights={"fused_step": False, **scaler, **(options or {})},
        callbacks=[AtBeginning()],
    )
    trainer.remove_callback(transformers.PrinterCallback)
    return trainer


def run(folder: Path, kind: str, resume: Path | None = None, options: Any = None, **told: Any) -> Any:
    trainer = trainer_of(folder, kind, options, **told)
    trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
    if not all(isinstance(param, DTensor) for param in trainer.model.parameters()):
        raise SystemExit("nothing was sharded")
    return trainer


def linear(optimizer: Any) -> Any:
    return transformers.get_scheduler("linear", optimizer, 0, STEPS)


def by_hand(count: int = STEPS) -> ByHand:
    scale = reference.Scale(OVERFLOWING, 5)
    adamw = functools.partial(torch.optim.AdamW, weight_decay=0.0, **ADAMW[1])
    made = ByHand(network(HALF), adamw, scale=scale, micro=2, clip=0.5, schedule=linear, waits=True)
    return made.train(batches(2 * count), HALF)


def in_groups(params: Any) -> list[Tensor]:
    """In the order of the Trainer's groups: weights of layers first, then norms and biases."""
    return sorted(params, key=lambda param: param.dim() < 2)


def check(what: str, trainer: Any, hand: ByHand, losses: list[float]) -> None:
    optimizer = trainer.optimizer.optimizer
    if trainer.model.losses != losses:
        raise SystemExit(f"{what}: losses {trainer.model.losses}, wanted {losses}")
    check_masters(what, optimizer.master_params(), in_groups(hand.masters))
    check_masters(f"{what}: the model", trainer.model.parameters(), hand.models)
    if (optimizer.loss_scale, optimizer.skipped_steps) != (hand.scale.value, sum(hand.skipped)):
        raise SystemExit(f"{what}: scale {optimizer.loss_scale}, {optimizer.skipped_steps} skips, wanted others")


def beginning(trainer: Any) -> AtBeginning:
    return next(one for one in trainer.callback_handler.callbacks if isinstance(one, AtBeginning))


def train_and_resume(folder: Path) -> None:
    hand = by_hand()
    if not 2 <= sum(hand.skipped) < STEPS - 2:
        raise SystemExit("the scale is no test")
    for kind in ("SHARDED_STATE_DICT", "FULL_STATE_DICT"):
        check(f"{kind}, whole", run(folder / kind, kind), hand, hand.losses)
        # Into the same folder, so that its last checkpoint is written over the one that is there.
        rest = run(folder / kind, kind, folder / kind / f"checkpoint-{STEPS // 2}")
        check(f"{kind}, resumed", rest, hand, hand.losses[STEPS:])
    in_modes(folder)
    refused(folder)


def in_modes(folder: Path) -> None:
    """Every mode ends in its own bits, and begins where another one has stopped."""
    kind = "SHARDED_STATE_DICT"
    options = {"fused_step": "auto", "master_weights": "split", "optimizer_state": "8bit"}
    runs = [run(folder / "split", kind, None, options)]
    runs.append(run(folder / "rest", kind, folder / "split" / f"checkpoint-{STEPS // 2}", options))
    check_masters("split", runs[0].optimizer.optimizer.master_params(), runs[1].optimizer.optimizer.master_params())
    if runs[0].model.losses[STEPS:] != runs[1].model.losses:
        raise SystemExit("split: resumed, the losses are others")
    into = beginning(run(folder / "into", kind, folder / kind / f"checkpoint-{STEPS // 2}", options))
    half = in_groups(by_hand(STEPS // 2).masters)
    check_masters("from full into split", [m.half() for m in into.masters], [m.detach().half() for m in half])


def refused(folder: Path) -> None:
    kind = "FULL_STATE_DICT"
    made_by = fp16opt.optim.AdamW, {"lr": 2.0**-6}
    raised(
        ValueError,
        "AdamW of AdamW: it was wrapped before prepare shards the model, and its masters are whole",
        lambda: trainer_of(folder / "early", kind, made_by=made_by).train(),
    )
    half = folder / kind / f"checkpoint-{STEPS // 2}"
    if os.environ["RANK"] == "0":
        shutil.copytree(half, folder / "torn", ignore=shutil.ignore_patterns("masters_0"))
    torch.distributed.barrier()
    raised(FileNotFoundError, "expected a folder 'masters_0'", lambda: run(folder / "more", kind, folder / "torn"))


def resume_elsewhere(folder: Path) -> None:
    """On another number of ranks the checkpoints are the same; on one, gradients are too."""
    hand, half = by_hand(), by_hand(STEPS // 2)
    for kind in ("SHARDED_STATE_DICT", "FULL_STATE_DICT"):
        rest = run(folder / f"elsewhere {kind}", kind, folder / kind / f"checkpoint-{STEPS // 2}", save_strategy="no")
        check_masters(f"{kind}, of other ranks", beginning(rest).masters, in_groups(half.masters))
        if beginning(rest).steps != half.skipped.count(False):
            raise SystemExit(f"{kind}: {beginning(rest).steps} steps were counted")
        if os.environ["WORLD_SIZE"] == "1":
            check(f"{kind}, on one rank", rest, hand, hand.losses[STEPS:])


if __name__ == "__main__":
    two = os.environ["WORLD_SIZE"] == "2"
    (train_and_resume if two else resume_elsewhere)(Path(sys.argv[1]))
    print(f"rank {os.environ['RANK']}: all is well")
    leave()
