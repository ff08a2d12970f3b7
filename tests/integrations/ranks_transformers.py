"""The Trainer under FSDP2, for two_ranks.py."""

from __future__ import annotations

import functools
import os
import shutil
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

import fp16opt.optim
from integrations.by_transformers import Ordered, Regressor, arguments, rows
from integrations.byhand import HALF, Trained, check_masters, exported, raised, scaled
from integrations.sharding import as_on_accelerators

WAYS = ("SHARDED_STATE_DICT", "FULL_STATE_DICT")
STEPS = 16
ADAMW = torch.optim.AdamW, {"lr": 2.0**-6, "foreach": False}  # the Trainer's groups say how weights decay: not at all
make = functools.partial(torch.optim.AdamW, weight_decay=0.0, **ADAMW[1])


def schedule(optimizer: Any) -> Any:
    return transformers.get_scheduler("linear", optimizer, 0, STEPS)


def in_order(params: Any) -> list[Tensor]:
    """Of the Trainer's groups: weights of layers first, then norms and biases."""
    return sorted(params, key=lambda param: param.dim() < 2)


class AtBeginning(transformers.TrainerCallback):
    """Masters as a checkpoint has them, and the steps that its optimizer had counted."""

    def on_train_begin(self, *args: Any, model: Any, optimizer: Any, **kwargs: Any) -> None:
        self.seen = exported(model, optimizer)


def run(folder: Path, way: str, data: Any, resume: Path | None = None, made_by: Any = ADAMW, **options: Any) -> Trained:
    """Two epochs of ``data``; a checkpoint after each."""
    as_on_accelerators()
    sharding = {
        "fsdp_version": 2,
        "auto_wrap_policy": "SIZE_BASED_WRAP",
        "min_num_params": 1,
        "state_dict_type": way,
        "cpu_ram_efficient_loading": False,
    }
    told = {"max_steps": STEPS, "logging_strategy": "no", "save_strategy": "steps", "save_steps": STEPS // 2}
    beginning = AtBeginning()
    trainer = Ordered(
        Regressor(HALF),
        arguments(folder, fsdp=True, fsdp_config=sharding, **told),
        train_dataset=rows(data * 2),
        optimizer_cls_and_kwargs=made_by,
        master_weights=scaled(HALF, fused_step=False) | options if made_by is ADAMW else options,
        callbacks=[beginning],
    )
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
    return Trained(trainer.model.losses, trainer.model, trainer.optimizer.optimizer, beginning.seen)


def half_of(folder: Path) -> Path:
    return folder / f"checkpoint-{STEPS // 2}"


def whole(way: str, folder: Path, data: Any) -> Trained:
    return run(folder / way, way, data)


def resumed(way: str, folder: Path, data: Any) -> Trained:
    """On two ranks into the same folder, so that its last checkpoint is written over the one that is there."""
    into = way if os.environ["WORLD_SIZE"] == "2" else f"{way} on {os.environ['WORLD_SIZE']}"
    return run(folder / into, way, data, half_of(folder / way))


def more(folder: Path, data: Any, half: list[Tensor]) -> None:
    """Every mode ends in its own bits, and begins where another one has stopped; what is refused."""
    sharded, full = WAYS
    options = {"fused_step": "auto", "master_weights": "split", "optimizer_state": "8bit"}
    split = run(folder / "split", sharded, data, **options)
    rest = run(folder / "rest", sharded, data, half_of(folder / "split"), **options)
    check_masters("split", split.optimizer.master_params(), rest.optimizer.master_params())
    if split.losses[STEPS:] != rest.losses:
        raise SystemExit("split: resumed, the losses are others")
    masters, _ = run(folder / "into", sharded, data, half_of(folder / sharded), **options).made
    if masters:
        check_masters("from full into split", [m.half() for m in masters], [m.detach().half() for m in half])
    raised(
        ValueError,
        "AdamW of AdamW: it was wrapped before prepare shards the model, and its masters are whole",
        lambda: run(folder / "early", full, data, made_by=(fp16opt.optim.AdamW, {"lr": 2.0**-6})),
    )
    if os.environ["RANK"] == "0":
        shutil.copytree(half_of(folder / full), folder / "torn", ignore=shutil.ignore_patterns("masters_0"))
    torch.distributed.barrier()
    words = "expected a folder 'masters_0'"
    raised(FileNotFoundError, words, lambda: run(folder / "more", full, data, folder / "torn"))
