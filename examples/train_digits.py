"""Train a small conv net on scikit-learn's digits in three ways, and compare them.

    python examples/train_digits.py                # one seed
    python examples/train_digits.py --seeds 3      # three seeds: the README's table
    python examples/train_digits.py --resume       # continue after an interruption, bit for bit
    python examples/train_digits.py --device cuda

The three ways differ in what holds the weights and in who steps them; data, initial weights, learning rate
and momentum are the same:

- ``fp32``: everything in FP32.
- ``fp16``: FP16 weights and FP16 momentum, stepped by SGD itself, with no masters. The loss is multiplied by
  a fixed 128 and the learning rate divided by it, which is exact, to keep small gradients from underflow.
  What this run loses, it loses where momentum and ``weight += update`` are rounded to FP16.
- ``fp16+masters``: FP16 weights, and the same SGD inside ``MixedPrecisionOptimizer(..., dynamic=True)``.

The learning rate is small, as it is in fine-tuning or at the end of a schedule: many updates are then smaller
than half the distance between an FP16 weight and its neighbour.
"""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import os
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import common
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from fp16opt import MixedPrecisionOptimizer

MODES = ("fp32", "fp16", "fp16+masters")
COLORS = {"fp32": "#444444", "fp16": "#d1495b", "fp16+masters": "#00798c"}
STYLES = {"fp32": {"linewidth": 5, "alpha": 0.4}, "fp16": {"linewidth": 2}, "fp16+masters": {"linewidth": 2}}
LEARNING_RATE, MOMENTUM = 2e-4, 0.9
BATCH_SIZE = 16
TEST_SIZE = 450
FP16_SCALE = 128.0  # for FP16 without masters; a power of two, so that scaling and unscaling are exact


@dataclass
class Run:
    """One training: the model, its optimizer, and what was measured so far."""

    mode: str
    seed: int
    model: nn.Module
    optimizer: Optimizer
    epoch: int = 0
    seconds: float = 0.0
    skipped: int = 0
    curves: dict[str, list[float]] = field(default_factory=lambda: {"loss": [], "accuracy": []})

    @property
    def loss_scale(self) -> float:
        """What the loss is multiplied by."""
        if isinstance(self.optimizer, MixedPrecisionOptimizer):
            return self.optimizer.loss_scale
        return FP16_SCALE if self.mode == "fp16" else 1.0


@dataclass(frozen=True)
class Data:
    """The digits, 8 x 8 pixels from 0 to 1, on the device."""

    train_x: Tensor
    train_y: Tensor
    test_x: Tensor
    test_y: Tensor


def load_data(device: torch.device) -> Data:
    """1,347 images to train with and 450 to test, always the same ones."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    test, train = order[:TEST_SIZE], order[TEST_SIZE:]
    return Data(*(part.to(device) for part in (images[train], labels[train], images[test], labels[test])))


def make_model(seed: int) -> nn.Module:
    """Three 3 x 3 convolutions with group norm, and a linear layer: 6,218 parameters."""
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1),
        nn.GroupNorm(4, 8),
        nn.ReLU(),
        nn.Conv2d(8, 16, 3, stride=2, padding=1),
        nn.GroupNorm(4, 16),
        nn.ReLU(),
        nn.Conv2d(16, 16, 3, padding=1),
        nn.GroupNorm(4, 16),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(16 * 4 * 4, 10),
    )
    for layer in model:
        if isinstance(layer, nn.Conv2d):
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
    return model


def make_run(mode: str, seed: int, device: torch.device) -> Run:
    """The same initial weights for each mode; the 16-bit modes round them."""
    model = make_model(seed).to(device)
    if mode == "fp32":
        return Run(mode, seed, model, SGD(model.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM))
    model.half()
    if mode == "fp16":
        sgd = SGD(model.parameters(), lr=LEARNING_RATE / FP16_SCALE, momentum=MOMENTUM)
        return Run(mode, seed, model, sgd)
    sgd = SGD(model.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM)
    optimizer = MixedPrecisionOptimizer(sgd, dynamic=True, named_parameters=model.named_parameters())
    return Run(mode, seed, model, optimizer)


def compute_loss(model: nn.Module, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """The mean loss and the number of right answers. The model sees its own dtype, the loss is FP32."""
    logits = model(images.to(next(model.parameters()).dtype)).float()
    return F.cross_entropy(logits, labels), (logits.argmax(dim=1) == labels).sum()


def backward(run: Run, loss: Tensor) -> None:
    """The gradients of the loss, each mode in its own way."""
    if isinstance(run.optimizer, MixedPrecisionOptimizer):
        run.optimizer.backward(loss)
    else:
        (loss * run.loss_scale).backward()


def train_epoch(run: Run, data: Data) -> None:
    """One pass over the training images. Seed and epoch alone give their order: no RNG to save."""
    generator = torch.Generator().manual_seed(1000 * run.seed + run.epoch)
    order = torch.randperm(len(data.train_x), generator=generator).to(data.train_x.device)
    for batch in order.split(BATCH_SIZE):
        run.optimizer.zero_grad()
        loss, _ = compute_loss(run.model, data.train_x[batch], data.train_y[batch])
        backward(run, loss)
        run.optimizer.step()


@torch.no_grad()
def evaluate(run: Run, data: Data) -> None:
    """Append the loss over all training images and the accuracy on the test images to the curves."""
    loss, _ = compute_loss(run.model, data.train_x, data.train_y)
    _, right = compute_loss(run.model, data.test_x, data.test_y)
    run.curves["loss"].append(loss.item())
    run.curves["accuracy"].append(right.item() / len(data.test_y))


def save(run: Run, path: Path, settings: dict[str, Any]) -> None:
    """Everything that the run needs to continue."""
    checkpoint = {
        "settings": settings,
        "model": run.model.state_dict(),
        "optimizer": run.optimizer.state_dict(),
        "epoch": run.epoch,
        "seconds": run.seconds,
        "skipped": run.skipped,
        "curves": run.curves,
    }
    common.save_checkpoint(path, checkpoint)


def where(run: Run, args: argparse.Namespace) -> tuple[Path, dict[str, Any]]:
    """The run's checkpoint, and what must be the same to go on from it."""
    path = args.output / f"{run.mode}-seed{run.seed}.pt"
    return path, {"mode": run.mode, "seed": run.seed, "device": args.device}


def restore(run: Run, path: Path, settings: dict[str, Any]) -> None:
    """Continue from a checkpoint, bit for bit."""
    checkpoint = common.load_checkpoint(path, settings)
    run.model.load_state_dict(checkpoint["model"])
    run.optimizer.load_state_dict(checkpoint["optimizer"])
    run.epoch, run.seconds, run.skipped = (checkpoint[name] for name in ("epoch", "seconds", "skipped"))
    run.curves = checkpoint["curves"]


def skipped_steps(run: Run) -> int:
    """Steps that the wrapper skipped since it was made (a resumed run makes a new one)."""
    return run.optimizer.skipped_steps if isinstance(run.optimizer, MixedPrecisionOptimizer) else 0


def train(run: Run, data: Data, args: argparse.Namespace) -> None:
    """Train up to ``args.epochs``, saving as it goes."""
    path, settings = where(run, args)
    if args.resume and path.exists():
        restore(run, path, settings)
    while run.epoch < args.epochs:
        start, skipped_before = time.perf_counter(), skipped_steps(run)
        train_epoch(run, data)
        evaluate(run, data)  # reads numbers back: the device is done when the clock is read
        run.epoch += 1
        run.seconds += time.perf_counter() - start
        run.skipped += skipped_steps(run) - skipped_before
        if run.epoch % args.save_every == 0 or run.epoch == args.epochs:
            save(run, path, settings)
        if run.epoch % 10 == 0 or run.epoch == args.epochs:
            loss, accuracy = (run.curves[name][-1] for name in ("loss", "accuracy"))
            words = f"epoch {run.epoch:2} of {args.epochs}, loss {loss:.4f}, accuracy {100 * accuracy:.2f} %"
            print(f"{run.mode:12}  seed {run.seed}  {words}", flush=True)


def train_alone(mode: str, seed: int, args: argparse.Namespace) -> None:
    """One run, which ends with its checkpoint. It may have a process of its own."""
    logging.basicConfig(format="%(name)s: %(message)s", level=logging.INFO)
    device = common.choose_device(args.device)
    torch.set_num_threads(1)  # the model is too small to gain from a second CPU thread
    train(make_run(mode, seed, device), load_data(device), args)


def train_all(args: argparse.Namespace) -> list[Run]:
    """Every mode with every seed, ``args.jobs`` at a time."""
    seeds = range(args.seeds)
    jobs = [(mode, seed, args) for seed in seeds for mode in reversed(MODES)]  # those that take longest first
    if args.jobs == 1:
        for job in jobs:
            train_alone(*job)
    else:
        with ProcessPoolExecutor(min(args.jobs, len(jobs)), multiprocessing.get_context("spawn")) as pool:
            for future in [pool.submit(train_alone, *job) for job in jobs]:
                future.result()
    runs = [make_run(mode, seed, torch.device(args.device)) for seed in seeds for mode in MODES]
    for run in runs:
        restore(run, *where(run, args))
    return runs


def measure_memory(run: Run, data: Data) -> tuple[float, float]:
    """Bytes a parameter, of the weights and of all that training keeps; after one backward, for gradients."""
    run.optimizer.zero_grad()
    backward(run, compute_loss(run.model, data.train_x[:BATCH_SIZE], data.train_y[:BATCH_SIZE])[0])
    return common.bytes_per_parameter(run.model, run.optimizer)


def make_table(runs: list[Run], data: Data) -> str:
    """One row a mode; mean and standard deviation over the seeds."""
    sizes = ["weights, B", "training, B"]
    header = ["", "test accuracy, %", "final loss", "skipped steps", "loss scale", *sizes, "seconds"]
    rows = []
    for mode in MODES:
        same = [run for run in runs if run.mode == mode]
        weights, training = measure_memory(same[0], data)
        rows.append(
            [
                mode,
                common.format_spread([100 * run.curves["accuracy"][-1] for run in same], 2),
                common.format_spread([run.curves["loss"][-1] for run in same], 4),
                " ".join(str(run.skipped) for run in same),
                " ".join(f"{run.loss_scale:g}" for run in same),
                f"{weights:.1f}",
                f"{training:.1f}",
                common.format_spread([run.seconds for run in same], 1),
            ]
        )
    return common.format_table(header, rows)


def plot(runs: list[Run], path: Path) -> None:
    """Loss and accuracy by epoch: a line for the mean of the seeds, a band from the lowest to the highest."""
    # Here, because processes that only train would wait for it as well.
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import LogLocator, NullFormatter

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    for axes, name, factor in ((left, "loss", 1.0), (right, "accuracy", 100.0)):
        for mode in MODES:
            values = factor * torch.tensor([run.curves[name] for run in runs if run.mode == mode])
            epochs = range(1, values.shape[1] + 1)
            color, low, high = COLORS[mode], values.amin(0), values.amax(0)
            axes.plot(epochs, values.mean(0), color=color, label=mode, **STYLES[mode])
            axes.fill_between(epochs, low, high, color=color, alpha=0.15, linewidth=0)
        axes.set_xlabel("epoch")
        axes.grid(alpha=0.3)
    left.set(yscale="log", title="Loss on the training images", ylabel="cross entropy (log scale)")
    left.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    left.yaxis.set_major_formatter("{x:g}")
    left.yaxis.set_minor_formatter(NullFormatter())
    bottom = min(70.0, 100 * min(run.curves["accuracy"][-1] for run in runs) - 5)
    right.set(title="Accuracy on the test images", ylabel="right answers, %", ylim=(bottom, 100))
    right.legend(loc="lower right")
    figure.savefig(path, dpi=150)


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="FP32, FP16, and FP16 with FP32 masters.")
    parser.add_argument("--seeds", type=int, default=1, metavar="N", help="each way is trained with seeds 0 to N - 1")
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument(
        "--jobs", type=int, metavar="N", help="runs at a time; on a CPU one a core, up to 3, elsewhere 1"
    )
    parser.add_argument("--device", default="cpu", help="cpu, cuda, cuda:1, ...")
    parser.add_argument("--output", type=Path, default=Path("digits-output"), help="folder for results")
    parser.add_argument("--save-every", type=int, default=5, help="epochs between checkpoints")
    parser.add_argument("--resume", action="store_true", help="continue from the checkpoints in --output")
    parser.add_argument("--short", action="store_true", help="one seed, two epochs: does it work?")
    args = parser.parse_args()
    if args.short:
        args.seeds, args.epochs = 1, 2
    if args.jobs is None:
        args.jobs = min(len(MODES), os.cpu_count() or 1) if args.device == "cpu" else 1
    for name in ("seeds", "epochs", "jobs"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} {getattr(args, name)}: expected 1 or more")
    return args


def main() -> None:
    """Train every mode with every seed, then print the table and draw the curves."""
    args = parse_arguments()
    args.output.mkdir(parents=True, exist_ok=True)
    runs = train_all(args)
    data = load_data(torch.device(args.device))
    table = make_table(runs, data)
    (args.output / "table.md").write_text(table + "\n")
    plot(runs, args.output / "curves.png")
    print(f"\n{table}\n\nB: bytes a parameter. Table, curves.png and checkpoints are in {args.output}/")


if __name__ == "__main__":
    main()
