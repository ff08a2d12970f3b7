"""Train an image classifier at an opt level: the script that apex's users know, with its import line changed.

    python examples/apex/main_amp.py --opt-level O2                   # scikit-learn's digits, under a minute on a CPU
    python examples/apex/main_amp.py --opt-level O1 --resume runs/checkpoint.pt
    python examples/apex/main_amp.py --opt-level O2 --loss-scale 128.0 --keep-batchnorm-fp32 False
    python examples/apex/main_amp.py --data /path/with/train/and/val --size 64 --device cuda
    python examples/apex/main_amp.py --compare                        # O0 to O3, three seeds: accuracy and speed

A run that is interrupted and resumed ends in the same bits as a whole one: the checkpoint holds the model in FP32, the
optimizer with its FP32 masters, and the loss scaler. On a CPU without FP16 arithmetic FP16 is the slower one.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import common  # examples/common.py, before torch
import torch
import torch.nn.functional as F
from data import Images, Prefetcher, load
from torch import Tensor, nn
from tqdm import tqdm

from fp16opt import amp

LEVELS = ("O0", "O1", "O2", "O3")


class Block(nn.Module):
    """Two convolutions with batch norm, and a way around them."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.around = nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(out)) + self.around(x))


class Net(nn.Module):
    """A small residual network for images of any size."""

    def __init__(self, channels: int, classes: int, width: int = 16) -> None:
        super().__init__()
        self.stem = nn.Conv2d(channels, width, 3, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(width)
        self.blocks = nn.Sequential(Block(width, width, 1), Block(width, 2 * width, 2))
        self.fc = nn.Linear(2 * width, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(F.relu(self.bn(self.stem(x))))
        return self.fc(x.mean(dim=(2, 3)))


class Trainer:
    """A model, its optimizer and a schedule, at one opt level.

    Args:
        arguments: of the command line.
        train, val: the images.
    """

    def __init__(self, arguments: argparse.Namespace, train: Images, val: Images) -> None:
        self.arguments, self.train_set, self.val_set = arguments, train, val
        self.device = torch.device(arguments.device)
        pixels = train.images.float()
        self.mean, self.std = pixels.mean(dim=(0, 2, 3)), pixels.std(dim=(0, 2, 3)) + 1e-3
        torch.manual_seed(arguments.seed)
        model = Net(train.images.shape[1], len(train.classes)).to(self.device)
        optimizer = torch.optim.SGD(model.parameters(), arguments.lr, momentum=0.9, weight_decay=1e-4, nesterov=True)
        self.model, self.optimizer = amp.initialize(
            model,
            optimizer,
            opt_level=arguments.opt_level,
            keep_batchnorm_fp32=arguments.keep_batchnorm_fp32,
            loss_scale=arguments.loss_scale,
        )
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, arguments.epochs)
        self.epoch, self.best = 0, 0.0

    def fetch(self, images: Images, order: Tensor | None = None) -> Prefetcher:
        return Prefetcher(images.batches(self.arguments.batch_size, order), self.device, self.mean, self.std)

    def train_epoch(self) -> tuple[float, float]:
        """One pass over the training set. Returns its mean loss and images a second."""
        self.model.train()
        torch.manual_seed(self.arguments.seed * 1000 + self.epoch)
        order = torch.randperm(len(self.train_set))
        total, seen, start = torch.zeros((), device=self.device), 0, time.perf_counter()
        count = -(-len(order) // self.arguments.batch_size)
        progress = tqdm(self.fetch(self.train_set, order), total=count, leave=False, disable=self.arguments.quiet)
        for images, labels in progress:
            loss = F.cross_entropy(self.model(images), labels)
            self.optimizer.zero_grad()
            with amp.scale_loss(loss, self.optimizer) as scaled_loss:
                scaled_loss.backward()
            self.optimizer.step()
            total += loss.detach() * len(labels)
            seen += len(labels)
            progress.set_description(f"epoch {self.epoch}: {seen / (time.perf_counter() - start):.0f} images/s")
        self.scheduler.step()
        self.epoch += 1
        return float(total) / seen, seen / (time.perf_counter() - start)

    def validate(self) -> tuple[float, float]:
        """Top-1 and top-5 accuracy on the validation set, in percent."""
        self.model.eval()
        hits = torch.zeros(2)
        with torch.no_grad():
            for images, labels in self.fetch(self.val_set):
                best = self.model(images).topk(min(5, len(self.val_set.classes)), dim=1).indices
                right = best.eq(labels[:, None]).cpu()
                hits += torch.tensor([right[:, :1].sum(), right.sum()])
        top1, top5 = (100.0 * hits / len(self.val_set)).tolist()
        return top1, top5

    def save(self, path: Path) -> None:
        checkpoint = {
            "epoch": self.epoch,
            "best": self.best,
            "opt_level": self.arguments.opt_level,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "amp": amp.state_dict(),
        }
        common.save_checkpoint(path, checkpoint)

    def resume(self, path: Path) -> None:
        checkpoint: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
        if checkpoint["opt_level"] != self.arguments.opt_level:
            raise SystemExit(f"{path} is of opt level {checkpoint['opt_level']}: pass --opt-level to match.")
        self.epoch, self.best = checkpoint["epoch"], checkpoint["best"]
        self.model.load_state_dict(checkpoint["model"])
        self.optimizer.load_state_dict(checkpoint["optimizer"])
        self.scheduler.load_state_dict(checkpoint["scheduler"])
        amp.load_state_dict(checkpoint["amp"])

    def close(self) -> None:
        """Leave torch as it was: O1 has functions cast their inputs until then."""
        amp._amp_state.handle._deactivate()


def train(arguments: argparse.Namespace, images: tuple[Images, Images]) -> dict[str, float]:
    """A whole training. Returns its last figures."""
    trainer = Trainer(arguments, *images)
    if arguments.resume is not None:
        trainer.resume(arguments.resume)
    arguments.output.mkdir(parents=True, exist_ok=True)
    figures: dict[str, float] = {}
    speeds = []
    try:
        while trainer.epoch < (arguments.stop_after or arguments.epochs):
            loss, speed = trainer.train_epoch()
            top1, top5 = trainer.validate()
            speeds.append(speed)
            trainer.best = max(trainer.best, top1)
            skipped = trainer.optimizer.skipped_steps
            figures = {"loss": loss, "top1": top1, "top5": top5, "skipped": skipped}
            if not arguments.compare:
                print(
                    f"epoch {trainer.epoch:3}  loss {loss:.4f}  top-1 {top1:6.2f}  top-5 {top5:6.2f}  "
                    f"{speed:6.0f} images/s  loss scale {amp.state_dict()['loss_scaler0']['loss_scale']:g}"
                )
            trainer.save(arguments.output / "checkpoint.pt")
    finally:
        trainer.close()
    return {**figures, "speed": sorted(speeds)[len(speeds) // 2] if speeds else 0.0}


def compare(arguments: argparse.Namespace, images: tuple[Images, Images]) -> None:
    """Every opt level with several seeds: the table."""
    runs: dict[str, list[dict[str, float]]] = {level: [] for level in LEVELS}
    for seed in range(arguments.seeds):
        for level in LEVELS:
            own = {"opt_level": level, "seed": seed, "output": arguments.output / f"{level}-{seed}"}
            runs[level].append(train(argparse.Namespace(**{**vars(arguments), **own}), images))
    rows = []
    for level, found in runs.items():
        columns = [common.format_spread([run[key] for run in found], digits) for key, digits in COLUMNS]
        speed = sum(run["speed"] for run in found) / sum(run["speed"] for run in runs["O0"])
        rows.append([level, *columns, f"{speed:.2f}"])
    header = ["opt level", "top-1, %", "top-5, %", "final training loss", "skipped steps", "images/s : O0"]
    print(common.format_table(header, rows))


COLUMNS = (("top1", 2), ("top5", 2), ("loss", 4), ("skipped", 1))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="a directory with train/CLASS/*.png and val/CLASS/*.png")
    parser.add_argument("--size", type=int, default=32, help="images of --data are scaled to this")
    parser.add_argument("--opt-level", default="O1", choices=LEVELS)
    parser.add_argument("--loss-scale", help="a number or 'dynamic'; default: the level's")
    parser.add_argument("--keep-batchnorm-fp32", help="True or False; default: the level's")
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--stop-after", type=int, help="stop after this many epochs, to resume later")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--resume", type=Path, metavar="CHECKPOINT")
    parser.add_argument("--compare", action="store_true", help="train every opt level with --seeds seeds")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--output", type=Path, default=Path("apex-classifier-output"))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--short", action="store_true", help="a few epochs on part of the digits, for CI")
    parser.add_argument("--quiet", action="store_true", help="no progress bars")
    return parser.parse_args()


def main() -> None:
    arguments = parse()
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    common.choose_device(arguments.device)
    images = load(arguments.data, arguments.size)
    if arguments.short:
        arguments.epochs, arguments.seeds = min(arguments.epochs, 4), 1
        images = (Images(images[0].images[:512], images[0].labels[:512], images[0].classes), images[1])
    arguments.quiet = arguments.quiet or not os.isatty(2)
    if arguments.compare:
        compare(arguments, images)
    else:
        train(arguments, images)


if __name__ == "__main__":
    main()
