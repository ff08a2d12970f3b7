"""transformers' Trainer, as the tests of all trainers drive it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from fp16opt.integrations.transformers import Trainer
from integrations.byhand import STEPS, Trained, adamw, loss_of, network, scaled

WAITS = True
FORGOTTEN, ADVICE = {"dynamic": False}, 'Write Trainer(..., master_weights={"dynamic": True}), or leave "'


def schedule(optimizer: Any) -> Any:
    """As TrainingArguments(lr_scheduler_type="linear") makes it."""
    return transformers.get_scheduler("linear", optimizer, 0, STEPS)


class Regressor(nn.Module):
    """What the Trainer trains: a module whose forward returns its loss."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.net = network(dtype)
        self.losses: list[float] = []

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        loss = loss_of(self.net, (x, labels), next(self.net.parameters()).dtype)
        if self.training:
            self.losses.append(loss.item())
        return {"loss": loss, "logits": self.net(x.to(self.net[0].weight.dtype))}


def rows(data: Any) -> list[dict[str, Tensor]]:
    """Single samples, of which 4 are a micro-batch of ``data``."""
    return [{"x": a, "labels": b} for x, y in data for a, b in zip(x, y, strict=True)]


class InOrder:
    """Batches in the order in which they are given, on all ranks the same."""

    def get_train_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(
            self.train_dataset, self.args.per_device_train_batch_size, collate_fn=self.data_collator
        )


class Ordered(InOrder, Trainer):
    pass


class OrderedStock(InOrder, transformers.Trainer):
    pass


def arguments(folder: Path, **options: Any) -> Any:
    defaults: dict[str, Any] = {
        "output_dir": str(folder),
        "use_cpu": True,
        "report_to": [],
        "disable_tqdm": True,
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "max_steps": STEPS,
        "save_strategy": "no",
        "logging_steps": 1,
        "learning_rate": 2.0**-6,
        "lr_scheduler_type": "linear",
        "max_grad_norm": 0.5,
        "seed": 0,
    }
    return transformers.TrainingArguments(**{**defaults, **options})


def train(
    dtype: torch.dtype,
    data: Any,
    folder: Path,
    micro: int = 1,
    clip: float | None = None,
    kind: Any = Ordered,
    resume: Path | None = None,
    told: Any = None,
    **options: Any,
) -> Trained:
    """``told``: more of TrainingArguments. The norms are those that it logged of steps that were taken."""
    model = Regressor(dtype)
    args = arguments(folder, gradient_accumulation_steps=micro, max_grad_norm=clip or 0.0, **(told or {}))
    given = {"train_dataset": rows(data), "optimizers": (adamw(model.parameters()), None)}
    trainer = kind(model, args, **given, master_weights=options)
    trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
    skips, norms = 0, []
    for entry in logs(trainer):
        if entry["skipped_steps"] == skips:
            norms.append(entry.get("grad_norm"))
        skips = entry["skipped_steps"]
    told_norms = norms if clip or None not in norms else None  # older ones log none where nothing is clipped
    return Trained(model.losses, model, trainer.optimizer.optimizer, trainer, told_norms)


def logs(trainer: Any) -> list[dict[str, Any]]:
    """Of the steps."""
    return [entry for entry in trainer.state.log_history if "loss" in entry]


def in_halves(dtype: torch.dtype, data: Any, folder: Path, **told: Any) -> tuple[Trained, Trained]:
    """Twice over ``data``: (in one go, the second half from what that saved in the middle)."""

    def run(name: str, resume: Path | None = None) -> Trained:
        saving = {"save_strategy": "steps", "save_steps": STEPS // 2}
        return train(dtype, data * 2, folder / name, 2, 0.5, resume=resume, told=saving, **scaled(dtype, **told))

    return run("whole"), run("rest", folder / "whole" / f"checkpoint-{STEPS // 2}")
