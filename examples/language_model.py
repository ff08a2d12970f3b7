"""Train a small GPT, character by character, on the language reference that comes with Python.

    python examples/language_model.py                # FP32, FP16 and BF16 weights; minutes on two CPU cores
    python examples/language_model.py --dtype fp16 --steps 2000
    python examples/language_model.py --resume       # continue after an interruption, bit for bit
    python examples/language_model.py --device cuda
    python examples/language_model.py --monitor      # then: python -m fp16opt report language-model-output/fp16.jsonl

The model holds its weights in --dtype throughout. ``MixedPrecisionOptimizer`` keeps the FP32 masters that
AdamW steps; with FP32 weights it has none to keep, and the same loop is plain FP32 training. Each step adds
up the gradients of several micro-batches in FP32, clips them, and follows a cosine learning rate schedule.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import time
from dataclasses import dataclass, field
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import common
import matplotlib
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import CosineAnnealingLR
from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

from fp16opt import MixedPrecisionOptimizer, Monitor

matplotlib.use("Agg")
import matplotlib.pyplot as plt

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
COLORS = {"fp32": "#444444", "fp16": "#00798c", "bf16": "#edae49"}
STYLES = {"fp32": {"linewidth": 6, "alpha": 0.4}, "fp16": {"linewidth": 2}, "bf16": {"linestyle": ":"}}
LAYERS, HEADS, WIDTH, CONTEXT = 2, 4, 64, 64
MICRO_BATCH, ACCUMULATE = 4, 2
LEARNING_RATE, BETAS, WEIGHT_DECAY, MAX_NORM = 4.5e-3, (0.9, 0.99), 0.1, 1.0
VALIDATION_BATCHES = 100


class Block(nn.Module):
    """Causal self-attention and a two-layer perceptron, each behind a layer norm and beside a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_attention, self.norm_mlp = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.project = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        """``x``: batch x time x width."""
        parts = self.qkv(self.norm_attention(x)).chunk(3, dim=-1)
        query, key, value = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in parts)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.project(mixed.transpose(1, 2).flatten(-2))
        return x + self.mlp(self.norm_mlp(x))


class GPT(nn.Module):
    """Characters in, logits of the next character out. The embedding is also the output layer (tied)."""

    def __init__(self, characters: int) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(characters, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, characters, bias=False)
        for table in (self.token, self.position):
            nn.init.normal_(table.weight, std=0.1)
        self.head.weight = self.token.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """``tokens``: batch x time. FP32 logits: the loss is then FP32, and the loss scale may pass 2**15."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.token(tokens) + self.position(positions)
        return self.head(self.norm(self.blocks(x))).float()


@dataclass(frozen=True)
class Text:
    """The text as numbers, on the device: the last tenth is for validation."""

    characters: str
    train: Tensor
    validation: Tensor


@dataclass
class Run:
    """One training and what was measured so far."""

    dtype: str
    model: GPT
    optimizer: MixedPrecisionOptimizer
    schedule: CosineAnnealingLR
    step: int = 0
    seconds: float = 0.0
    skipped: int = 0
    losses: list[float] = field(default_factory=list)


def load_text(device: torch.device) -> Text:
    """Python's language reference, as the standard library carries it for ``help()``; without indentation."""
    lines = "\n".join(topics[name] for name in sorted(topics)).splitlines()
    text = "\n".join(" ".join(line.split()) for line in lines)
    characters = "".join(sorted(set(text)))
    index = {character: number for number, character in enumerate(characters)}
    tokens = torch.tensor([index[character] for character in text], device=device)
    split = len(tokens) * 9 // 10
    return Text(characters, tokens[:split], tokens[split:])


def draw_batch(tokens: Tensor, seed: int) -> Tensor:
    """Random stretches of the text, one character longer than the context. The seed alone decides which."""
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(tokens) - CONTEXT, (MICRO_BATCH, 1), generator=generator)
    return tokens[(starts + torch.arange(CONTEXT + 1)).to(tokens.device)]


def compute_loss(model: GPT, batch: Tensor) -> Tensor:
    """The mean cross entropy of each next character, FP32."""
    return F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


def make_run(dtype: str, characters: int, steps: int, device: torch.device) -> Run:
    """The same initial weights for each dtype, rounded to it."""
    torch.manual_seed(0)
    model = GPT(characters).to(device, DTYPES[dtype])
    adamw = AdamW(model.parameters(), lr=LEARNING_RATE, betas=BETAS, weight_decay=WEIGHT_DECAY)
    optimizer = MixedPrecisionOptimizer(
        adamw,
        dynamic=dtype == "fp16",  # BF16 and FP32 have the range to do without; inf and nan still skip the step
        grad_accumulation="fp32",
        named_parameters=model.named_parameters(),
    )
    schedule = CosineAnnealingLR(optimizer, T_max=steps, eta_min=LEARNING_RATE / 10)
    return Run(dtype, model, optimizer, schedule)


def train_step(run: Run, text: Text) -> None:
    """Add up the gradients of the micro-batches, clip, step."""
    run.optimizer.zero_grad()
    total = torch.zeros((), device=text.train.device)
    for micro_batch in range(ACCUMULATE):
        batch = draw_batch(text.train, seed=ACCUMULATE * run.step + micro_batch)
        loss = compute_loss(run.model, batch) / ACCUMULATE
        run.optimizer.backward(loss)
        total += loss.detach()
    run.optimizer.clip_master_grads(MAX_NORM)
    run.optimizer.step()
    if run.optimizer.step_was_skipped:
        run.skipped += 1
    else:
        run.schedule.step()
    run.step += 1
    run.losses.append(total.item())


@torch.no_grad()
def validate(model: GPT, text: Text) -> float:
    """The mean loss on the same validation stretches every time, in nats a character."""
    losses = [compute_loss(model, draw_batch(text.validation, seed)) for seed in range(VALIDATION_BATCHES)]
    return torch.stack(losses).mean().item()


@torch.no_grad()
def write_sample(model: GPT, text: Text, prompt: str, length: int = 240) -> str:
    """Let the model go on from the prompt, drawing each next character at temperature 0.6."""
    generator = torch.Generator().manual_seed(0)
    numbers = [text.characters.index(character) for character in prompt]
    tokens = torch.tensor([numbers], device=text.train.device)
    for _ in range(length):
        weights = (model(tokens[:, -CONTEXT:])[:, -1].cpu() / 0.6).softmax(-1)
        drawn = torch.multinomial(weights, 1, generator=generator)
        tokens = torch.cat([tokens, drawn.to(tokens.device)], dim=1)
    return "".join(text.characters[number] for number in tokens[0].tolist())


def save(run: Run, path: Path, settings: dict[str, Any]) -> None:
    """All that the run needs to continue. Masters, moments and loss scale are in the optimizer's state."""
    checkpoint = {
        "settings": settings,
        "model": run.model.state_dict(),
        "optimizer": run.optimizer.state_dict(),
        "schedule": run.schedule.state_dict(),
        "progress": {"step": run.step, "seconds": run.seconds, "skipped": run.skipped, "losses": run.losses},
    }
    common.save_checkpoint(path, checkpoint)


def restore(run: Run, path: Path, settings: dict[str, Any]) -> None:
    """Continue from a checkpoint, bit for bit."""
    checkpoint = common.load_checkpoint(path, settings)
    run.model.load_state_dict(checkpoint["model"])
    run.optimizer.load_state_dict(checkpoint["optimizer"])
    run.schedule.load_state_dict(checkpoint["schedule"])
    for name, value in checkpoint["progress"].items():
        setattr(run, name, value)


def train(run: Run, text: Text, args: argparse.Namespace) -> None:
    """Train up to ``args.steps``, or ``args.stop_after``; save on the way and at the end."""
    path = args.output / f"{run.dtype}.pt"
    settings = {"dtype": run.dtype, "steps": args.steps, "device": args.device}
    if args.resume and path.exists():
        restore(run, path, settings)
    end = min(args.steps, args.stop_after or args.steps)
    watched = contextlib.nullcontext()
    if args.monitor:
        watched = Monitor(run.optimizer, every=20, to=args.output / f"{run.dtype}.jsonl", start=run.step)
    with watched, tqdm(total=args.steps, initial=run.step, desc=run.dtype, unit="step") as bar:
        while run.step < end:
            start = time.perf_counter()
            train_step(run, text)
            run.seconds += time.perf_counter() - start
            if run.step % args.save_every == 0 or run.step == end:
                save(run, path, settings)
            scale = f"{run.optimizer.loss_scale:g}"
            bar.set_postfix(loss=f"{run.losses[-1]:.3f}", scale=scale, refresh=False)
            bar.update()


def make_row(run: Run, text: Text) -> list[str]:
    """The table's row for one run."""
    validation = validate(run.model, text)
    run.optimizer.zero_grad()
    run.optimizer.backward(compute_loss(run.model, draw_batch(text.train, seed=0)))  # gradients to be measured
    weight_bytes, training_bytes = common.bytes_per_parameter(run.model, run.optimizer)
    characters = run.step * ACCUMULATE * MICRO_BATCH * CONTEXT
    return [
        run.dtype,
        f"{sum(run.losses[-50:]) / len(run.losses[-50:]):.3f}",
        f"{validation:.3f}",
        str(run.skipped),
        f"{run.optimizer.loss_scale:g}",
        f"{weight_bytes:.1f}",
        f"{training_bytes:.1f}",
        f"{run.seconds:.0f}",
        f"{characters / run.seconds:,.0f}",
    ]


def plot(runs: list[Run], path: Path) -> None:
    """The training loss, averaged over 50 steps."""
    figure, axes = plt.subplots(figsize=(7, 4.2), layout="constrained")
    for run in runs:
        window = min(50, len(run.losses))
        smooth = torch.tensor(run.losses).unfold(0, window, 1).mean(-1)
        steps = range(window, len(run.losses) + 1)
        axes.plot(steps, smooth, color=COLORS[run.dtype], label=run.dtype, **STYLES[run.dtype])
    axes.set(xlabel="step", ylabel="nats a character", title="Training loss, mean of 50 steps")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=150)


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="A small GPT with 16-bit weights.")
    parser.add_argument("--dtype", nargs="+", choices=list(DTYPES), default=list(DTYPES), help="of the weights")
    parser.add_argument("--steps", type=int, default=1500, help="length of the schedule")
    parser.add_argument("--stop-after", type=int, help="save and stop at this step, as if interrupted")
    parser.add_argument("--device", default="cpu", help="cpu, cuda, cuda:1, ...")
    parser.add_argument("--output", type=Path, default=Path("language-model-output"), help="folder for results")
    parser.add_argument("--save-every", type=int, default=100, help="steps between checkpoints")
    parser.add_argument("--resume", action="store_true", help="continue from the checkpoints in --output")
    parser.add_argument("--monitor", action="store_true", help="write records for python -m fp16opt report to --output")
    parser.add_argument("--short", action="store_true", help="a few steps, to see that everything works")
    args = parser.parse_args()
    if args.short:
        args.steps = 8
    return args


def main() -> None:
    """Train with every dtype, then print the table and a sample, and draw the loss."""
    args = parse_arguments()
    logging.basicConfig(format="%(name)s: %(message)s", level=logging.INFO)
    device = common.choose_device(args.device)
    args.output.mkdir(parents=True, exist_ok=True)
    text = load_text(device)
    runs = [make_run(dtype, len(text.characters), args.steps, device) for dtype in args.dtype]
    parameters = sum(param.numel() for param in runs[0].model.parameters())
    print(f"{len(text.train):,} characters to train on, {parameters:,} parameters")
    with logging_redirect_tqdm():
        for run in runs:
            train(run, text, args)
    sizes = ["weights, B", "training, B"]
    header = ["", "last 50 losses", "validation loss", "skipped", "scale", *sizes, "seconds", "chars/s"]
    table = common.format_table(header, [make_row(run, text) for run in runs])
    plot(runs, args.output / "loss.png")
    print(f"\n{table}\n\nLosses in nats a character; B: bytes a parameter.")
    print(f"loss.png and checkpoints are in {args.output}/. A sample by the {runs[-1].dtype} model:\n")
    print(write_sample(runs[-1].model, text, prompt="The class statement "))


if __name__ == "__main__":
    main()
