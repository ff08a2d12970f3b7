"""Train a small conv net on scikit-learn's digits in Lightning's Trainer, in three precisions, and compare them.

    python examples/lightning_digits.py              # three trainings, under two minutes on two CPU cores
    python examples/lightning_digits.py --short      # one epoch of each

What differs is the Trainer's precision alone; module, data, initial weights, learning rate and momentum are the same:

- ``32-true``: everything in FP32.
- ``16-true``: Lightning's own. FP16 weights, stepped by SGD itself; the loss is not scaled.
- ``16-true + masters``: ``plugins=MasterWeightsPrecision("16-true")``.

The learning rate is small, as it is in fine-tuning or at the end of a schedule: many updates are then smaller than half
the distance between an FP16 weight and its neighbour, and many gradients smaller than what FP16 holds.
"""

from __future__ import annotations

import argparse
import logging
import time
import warnings
from pathlib import Path
from typing import Any

import common
import lightning
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from fp16opt.integrations.lightning import MasterWeightsPrecision

PRECISIONS: dict[str, Any] = {
    "32-true": lambda: {"precision": "32-true"},
    "16-true": lambda: {"precision": "16-true"},
    "16-true + masters": lambda: {"plugins": MasterWeightsPrecision("16-true")},
}
LEARNING_RATE, MOMENTUM, BATCH_SIZE, TEST_SIZE = 2e-4, 0.9, 16, 450


class Digits(lightning.LightningModule):
    """Two convolutions with group norm, and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1),
            nn.GroupNorm(4, 8),
            nn.ReLU(),
            nn.Conv2d(8, 16, 3, stride=2, padding=1),
            nn.GroupNorm(4, 16),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(16 * 4 * 4, 10),
        )

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        images, labels = batch
        loss = F.cross_entropy(self.net(images).float(), labels)
        self.log("loss", loss, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        images, labels = batch
        self.log("accuracy", (self.net(images).argmax(dim=1) == labels).float().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM)


def load_data() -> tuple[DataLoader[Any], DataLoader[Any]]:
    """1,347 images to train with and 450 to test, always the same ones in the same order."""
    digits = load_digits()
    images, labels = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16, torch.tensor(digits.target)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    parts = [TensorDataset(images[part], labels[part]) for part in (order[TEST_SIZE:], order[:TEST_SIZE])]
    shuffled = torch.Generator().manual_seed(1)
    train = DataLoader(parts[0], BATCH_SIZE, shuffle=True, generator=shuffled)
    return train, DataLoader(parts[1], TEST_SIZE)


def train(name: str, epochs: int, output: Path) -> list[str]:
    """One training; the row of the table."""
    module, (training, testing) = Digits(), load_data()
    trainer = lightning.Trainer(
        **PRECISIONS[name](),
        accelerator="cpu",
        devices=1,
        max_epochs=epochs,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=output,
    )
    began = time.perf_counter()
    trainer.fit(module, training, testing)
    seconds = time.perf_counter() - began
    optimizer: Any = trainer.optimizers[0]
    skipped = f"{optimizer.skipped_steps}" if hasattr(optimizer, "skipped_steps") else "-"
    found = trainer.callback_metrics
    weights = str(next(module.parameters()).dtype).removeprefix("torch.")
    accuracy = f"{100 * float(found['accuracy']):.1f} %"
    return [name, weights, f"{float(found['loss']):.4f}", accuracy, skipped, f"{seconds:.0f}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--short", action="store_true", help="one epoch")
    parser.add_argument("--output", type=Path, default=Path("lightning-digits-output"))
    given = parser.parse_args()
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")
    given.output.mkdir(parents=True, exist_ok=True)
    epochs = 1 if given.short else given.epochs
    header = ["precision", "weights", "training loss", "test accuracy", "skipped steps", "seconds"]
    table = common.format_table(header, [train(name, epochs, given.output) for name in PRECISIONS])
    (given.output / "table.md").write_text(table)
    print(table)


if __name__ == "__main__":
    main()
