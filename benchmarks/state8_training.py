"""Does a training with 8-bit optimizer state or 24-bit masters end where one without ends?

    python benchmarks/state8_training.py [--quick] [--task digits|gpt] [--steps N] [--seeds N] [--json PATH]

Two models with float16 weights and split masters, AdamW, a dynamic loss scale and a clip, on what needs no download:
a convolutional network on scikit-learn's digits, and a small GPT over the characters of Python's own documentation
(pydoc_data.topics). The GPT takes its products in float32, of 16-bit weights and with 16-bit gradients: those that a
CPU takes in float16 would take days. The rate falls to zero along a cosine, as is usual: at a constant one chance
decides where the last steps end, and hides what the formats do. A seed decides weights and batches alike in all modes,
so differences are the formats' and those of chance. How large these are is told by the same training with the last bit
of one weight changed at its beginning. Reported are the training loss (mean over the last tenth of the steps), the
validation loss, both as differences to FP32 state, and the largest update over the rate of its step, after a tenth of
the steps. Bounds: means over seeds within .001 and .002 on digits, .003 and .004 on the GPT; largest update at most 1.5
times FP32's. bfloat16 and the momentum of SGD run with --dtype and --sgd.
"""

from __future__ import annotations

import common  # first: it quiets the worker threads before torch is loaded

# isort: split
import argparse
import math
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fp16opt import MixedPrecisionOptimizer

NUDGED = "fp32, one bit changed"
MODES: dict[str, dict[str, Any]] = {
    "fp32": {"master_weights": "split"},
    NUDGED: {"master_weights": "split"},
    "8bit": {"master_weights": "split", "optimizer_state": "8bit"},
    "split24 + 8bit": {"master_weights": "split24", "optimizer_state": "8bit"},
}
INFORM = (NUDGED,)  # modes without bounds
BOUNDS = {"digits": (0.001, 0.002), "gpt": (0.003, 0.004)}


@dataclass
class Task:
    """A model to be made, and losses: of a batch of the training part, and of the whole validation part."""

    make: Callable[[], nn.Module]
    loss: Callable[[nn.Module, torch.Generator], Tensor]
    validation: Callable[[nn.Module], float]
    steps: int
    lr: float


class Digits(nn.Module):
    """Convolutions over 8 by 8 images."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Flatten(), nn.Linear(1024, 128), nn.ReLU(), nn.Linear(128, 10),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x).float()


def digits(dtype: torch.dtype, quick: bool) -> Task:
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    x = torch.from_numpy(images / 16.0).reshape(-1, 1, 8, 8).to(dtype)[order]
    y = torch.from_numpy(labels)[order]
    held = len(x) // 5

    def loss(model: nn.Module, generator: torch.Generator) -> Tensor:
        batch = torch.randint(held, len(x), (64,), generator=generator)
        return nn.functional.cross_entropy(model(x[batch]), y[batch])

    def validation(model: nn.Module) -> float:
        return float(nn.functional.cross_entropy(model(x[:held]), y[:held]))

    return Task(lambda: Digits().to(dtype), loss, validation, 40 if quick else 600, 1e-3)


class Block(nn.Module):
    """Attention and an MLP, each after a norm and around a skip."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.into, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        parts = self.into(self.norm1(x)).view(b, t, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(*parts, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(b, t, c))
        return x + self.mlp(self.norm2(x))


class Gpt(nn.Module):
    """A small GPT over characters."""

    def __init__(self, vocabulary: int, context: int, width: int = 128, layers: int = 4, heads: int = 4) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*[Block(width, heads) for _ in range(layers)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1]))
        return self.head(self.norm(self.blocks(x))).float()


def gpt(dtype: torch.dtype, quick: bool) -> Task:
    from pydoc_data.topics import topics

    text = "\n".join(topics[key] for key in sorted(topics))
    alphabet = sorted(set(text))
    place = {letter: i for i, letter in enumerate(alphabet)}
    ids = torch.tensor([place[letter] for letter in text])
    train, held, context = ids[: -len(ids) // 10], ids[-len(ids) // 10 :], 64

    shell = Gpt(len(alphabet), context)

    def cross_entropy(model: nn.Module, of: Tensor, starts: Tensor) -> Tensor:
        windows = of[starts[:, None] + torch.arange(context + 1)]
        wide = {name: param.float() for name, param in model.named_parameters()}
        out = torch.func.functional_call(shell, wide, (windows[:, :-1],))
        return nn.functional.cross_entropy(out.reshape(-1, out.shape[-1]), windows[:, 1:].reshape(-1))

    def loss(model: nn.Module, generator: torch.Generator) -> Tensor:
        return cross_entropy(model, train, torch.randint(len(train) - context, (8,), generator=generator))

    def validation(model: nn.Module) -> float:
        starts = torch.arange(0, len(held) - context - 1, context)
        parts = starts.split(200)
        return sum([float(cross_entropy(model, held, part)) * len(part) for part in parts]) / len(starts)

    return Task(lambda: Gpt(len(alphabet), context).to(dtype), loss, validation, 20 if quick else 2000, 1e-3)


@dataclass
class Result:
    """Of one training."""

    train: float
    validation: float
    largest_update: float


def train(task: Task, mode: str, seed: int, steps: int, is_sgd: bool) -> Result:
    torch.manual_seed(seed)
    model = task.make()
    if mode == NUDGED:
        next(model.parameters()).detach().view(torch.int16).view(-1)[0] ^= 1
    inner: torch.optim.Optimizer
    if is_sgd:
        inner = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    else:
        inner = torch.optim.AdamW(model.parameters(), lr=task.lr, weight_decay=0.01)
    opt = MixedPrecisionOptimizer(inner, dynamic=True, **MODES[mode])
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(opt, steps)
    generator, losses, largest = torch.Generator().manual_seed(seed), [], 0.0
    for step in range(steps):
        rate = opt.param_groups[0]["lr"]
        opt.zero_grad()
        loss = task.loss(model, generator)
        opt.backward(loss)
        opt.clip_master_grads(1.0)
        looks = step >= steps // 10 and step % 20 == 0
        before = [master.detach().clone() for master in opt.master_params()] if looks else []
        opt.step()
        schedule.step()
        for old, new in zip(before, opt.master_params() if looks else (), strict=True):
            largest = max(largest, float((new.detach() - old).abs().max()) / rate)
        losses.append(float(loss.detach()))
    with torch.no_grad():
        return Result(statistics.fmean(losses[-max(1, steps // 10) :]), task.validation(model), largest)


def rows_of(name: str, results: dict[str, list[Result]], quick: bool) -> list[common.Row]:
    rows = []
    base = results["fp32"]
    for mode, found in results.items():
        for what, bound in zip(("train", "validation"), BOUNDS[name], strict=True):
            values = [getattr(r, what) for r in found]
            if mode == "fp32":
                mean = statistics.fmean(values)
                rows.append(common.Row(f"{name}: {what} loss, fp32", None, mean, min(values), max(values)))
                continue
            apart = [value - getattr(r, what) for value, r in zip(values, base, strict=True)]
            words = f"{name}: {what} loss, {mode} - fp32, mean"
            bounded = not quick and mode not in INFORM
            bound = bound if bounded else None
            rows.append(common.Row(words, bound, statistics.fmean(apart), min(apart), max(apart), within=True))
        largest = [r.largest_update for r in found]
        bound = 1.5 * max(r.largest_update for r in base) if mode not in ("fp32", *INFORM) and not quick else None
        words = f"{name}: largest update / lr, {mode}"
        rows.append(common.Row(words, bound, max(largest), min(largest), max(largest)))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a few steps, one seed, no bounds")
    parser.add_argument("--task", choices=["digits", "gpt"], help="one of the two")
    parser.add_argument("--steps", type=int, help="in place of 600 and 2,000")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--dtype", choices=["float16", "bfloat16"], default="float16")
    parser.add_argument("--sgd", action="store_true", help="SGD with momentum in place of AdamW")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--json", help="where to write all results")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    common.print_versions()
    dtype, rows, kept = getattr(torch, arguments.dtype), [], {}
    for name, make in (("digits", digits), ("gpt", gpt)):
        if arguments.task not in (None, name):
            continue
        task = make(dtype, arguments.quick)
        steps = arguments.steps or task.steps
        results: dict[str, list[Result]] = {mode: [] for mode in MODES}
        for seed in range(1 if arguments.quick else arguments.seeds):
            for mode, found in results.items():
                found.append(train(task, mode, seed, steps, arguments.sgd))
                print(f"{name}, seed {seed}, {mode}: {found[-1]}", flush=True)
                if not math.isfinite(found[-1].validation):
                    sys.exit("a loss is not finite")
        rows += rows_of(name, results, arguments.quick)
        kept[name] = {mode: [vars(r) for r in found] for mode, found in results.items()}
    common.print_rows(rows)
    common.write_json(arguments.json, rows=rows, results=kept)
    sys.exit(any(row.verdict == "MISSED" for row in rows))


if __name__ == "__main__":
    main()
