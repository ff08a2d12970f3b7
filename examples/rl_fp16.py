"""Reinforcement learning in 16 bits: a trainer, a sampler in another process, and deltas of weights between them.

    python examples/rl_fp16.py             # three seeds, under four minutes on two CPU cores
    python examples/rl_fp16.py --quick     # one seed, a few steps: does it work?

A transformer of 100,608 parameters learns to sort five digits. The sampler writes eight answers to each of sixteen
prompts; an answer is worth 1 if it is right and 0 if it is not; the trainer raises the log-probabilities of answers
that are worth more than the others to the same prompt (group-relative advantages), in one step for each batch. A short
supervised training in FP32 comes first, so that some answers are right. From these weights, rounded to 16 bits, each
of four ways begins:

- ``fp16 + masters``, ``bf16 + masters``: ``MixedPrecisionOptimizer`` around AdamW.
- ``fp16``, ``bf16``: the same, and after each step the masters are set to the rounded weights. Nothing else differs:
  the moments stay FP32, and the loss is scaled.

The sampler gets the weights once. After each step the trainer sends what ``take_delta`` gives, as bytes through a pipe;
the sampler writes its patches, as the loader of any sampler would, verifies what came of it, and answers with a SHA-256
digest of its weights, which must be that of the trainer's.

Every operation rounds its result to the weights' dtype. Matrices are multiplied as FP32 copies, made where they are
used: products are summed up in FP32 and rounded once, as on a GPU, and a CPU without 16-bit arithmetic is many times
as fast so. As in practice, the sampler's arithmetic is another one than the trainer's: it writes digit by digit,
keeps keys and values, and its attention rounds at the end alone, as fused kernels do. The trainer reads whole sequences
and rounds scores and weights of attention, too.
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import io
import logging
import math
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import common
import matplotlib
import torch
import torch.multiprocessing
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import AdamW
from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

from fp16opt import MixedPrecisionOptimizer, WeightDelta, WeightPatch

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.ticker import LogLocator, NullFormatter

WAYS = {
    "fp16 + masters": (torch.float16, True),
    "fp16": (torch.float16, False),
    "bf16 + masters": (torch.bfloat16, True),
    "bf16": (torch.bfloat16, False),
}
COLORS = {"fp16 + masters": "#00798c", "fp16": "#8fc1c9", "bf16 + masters": "#d1495b", "bf16": "#edae9a"}
STYLES = {"fp16 + masters": "-", "fp16": "-", "bf16 + masters": "--", "bf16": "--"}
DIGITS, SORT = 5, 10  # digits of a prompt, and the token that ends it
WIDTH, HEADS, LAYERS = 64, 4, 2
PROMPTS, GROUP = 16, 8  # prompts of a step, answers to each
BETAS = (0.9, 0.95)


# -- the model ---------------------------------------------------------------------------------------------------------


class Linear(nn.Linear):
    """``nn.Linear`` without a bias, as a GPU has it: 16-bit factors, summed up in FP32, rounded once."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, bias=False)
        nn.init.normal_(self.weight, std=0.5 / math.sqrt(WIDTH) if inputs > WIDTH else 1 / math.sqrt(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x.float(), self.weight.float()).to(x.dtype)


class Norm(nn.Module):
    """RMS norm, computed in FP32 and rounded once."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), (WIDTH,), self.weight.float(), 1e-5).to(x.dtype)


def attend(queries: Tensor, keys: Tensor, values: Tensor, fused: bool) -> Tensor:
    """Causal attention of the last positions to all. It rounds scores and weights, or, fused, only the result."""
    dtype = torch.float32 if fused else queries.dtype
    scores = (queries.float() @ keys.float().mT / math.sqrt(queries.shape[-1])).to(dtype)
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1 + scores.shape[-1] - scores.shape[-2])
    weights = scores.float().masked_fill(hidden, -math.inf).softmax(-1).to(dtype)
    return (weights.float() @ values.float()).to(queries.dtype)


class Block(nn.Module):
    """Attention and a multilayer perceptron, each behind a norm and added to what came in."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = Norm(), Norm()
        self.qkv, self.out = Linear(WIDTH, 3 * WIDTH), Linear(WIDTH, WIDTH)
        self.up, self.down = Linear(WIDTH, 4 * WIDTH), Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor, cache: list[Tensor] | None) -> Tensor:
        parts = self.qkv(self.norm1(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        queries, keys, values = parts.unbind()
        if cache is not None:
            if cache:
                keys, values = torch.cat([cache[0], keys], 2), torch.cat([cache[1], values], 2)
            cache[:] = [keys, values]
        x = x + self.out(attend(queries, keys, values, fused=cache is not None).transpose(1, 2).flatten(2))
        return x + self.down(F.relu(self.up(self.norm2(x))))


class Sorter(nn.Module):
    """Reads digits, ``SORT``, and digits of the answer; says which digit comes next."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(SORT + 1, WIDTH), nn.Embedding(2 * DIGITS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = Norm(), Linear(WIDTH, SORT)
        for embedding in (self.token, self.position):
            nn.init.normal_(embedding.weight, std=1 / math.sqrt(WIDTH))

    def forward(self, tokens: Tensor, caches: list[list[Tensor]] | None = None, start: int = 0) -> Tensor:
        """Log-probabilities of the next digit, FP32. With caches, of tokens from ``start`` on, as a sampler does it."""
        x = self.token(tokens) + self.position.weight[start : start + tokens.shape[1]]
        for number, block in enumerate(self.blocks):
            x = block(x, None if caches is None else caches[number])
        return self.head(self.norm(x)).float().log_softmax(-1)


def draw_prompts(count: int, generator: torch.Generator) -> Tensor:
    """Five random digits and ``SORT``, shape [count, 6]."""
    digits = torch.randint(0, 10, (count, DIGITS), generator=generator)
    return F.pad(digits, (0, 1), value=SORT)


def right_answers(prompts: Tensor) -> Tensor:
    return prompts[:, :DIGITS].sort(1).values


def log_probabilities(model: nn.Module, prompts: Tensor, answers: Tensor) -> Tensor:
    """What the model gives each digit of the answers, shape [count, 5], in one pass over whole sequences."""
    logs = model(torch.cat([prompts, answers[:, :-1]], 1))[:, DIGITS:]
    return logs.gather(2, answers.unsqueeze(2)).squeeze(2)


def digest(model: nn.Module) -> str:
    """SHA-256 of all weights."""
    found = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        found.update(name.encode() + tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


# -- the sampler, a process of its own ---------------------------------------------------------------------------------


@torch.inference_mode()
def write_answers(model: Sorter, prompts: Tensor, seed: int) -> tuple[Tensor, Tensor]:
    """An answer to each prompt, digit by digit, and the digits' log-probabilities."""
    generator = torch.Generator().manual_seed(seed)
    caches: list[list[Tensor]] = [[] for _ in model.blocks]
    tokens, start = prompts, 0
    answers, found = [], []
    for _ in range(DIGITS):
        logs = model(tokens, caches, start)[:, -1]
        start += tokens.shape[1]
        tokens = torch.multinomial(logs.exp(), 1, generator=generator)
        answers.append(tokens)
        found.append(logs.gather(1, tokens))
    return torch.cat(answers, 1), torch.cat(found, 1)


def load_patches(model: nn.Module, patches: Iterable[WeightPatch]) -> None:
    """Write new values where they go. A sampler with other names and layouts asks for ``patches(names=...)``."""
    state = model.state_dict()
    for patch in patches:
        where = slice(None) if patch.indices is None else patch.indices
        state[patch.name].view(-1)[where] = patch.values


def serve(pipe: Connection) -> None:
    """What the sampler's process does: it gets weights once for each run, then deltas, and writes answers."""
    torch.set_num_threads(1)
    model, previous = Sorter(), None
    while True:
        try:
            request, *rest = pipe.recv()
        except EOFError:  # the trainer has ended, with its own error
            return
        if request == "weights":
            state = torch.load(io.BytesIO(rest[0]), weights_only=True)
            model = Sorter().to(state["head.weight"].dtype)
            model.load_state_dict(state)
            previous = None
            pipe.send(digest(model))
        elif request == "delta":
            delta = WeightDelta.load(io.BytesIO(rest[0]))
            load_patches(model, delta.patches())
            delta.verify(model, previous)
            previous = delta
            pipe.send(digest(model))
        elif request == "answers":
            answers, logs = write_answers(model, torch.from_numpy(rest[0]), seed=rest[1])
            pipe.send((answers.numpy(), logs.numpy()))
        else:
            return


class Sampler:
    """The trainer's end of the pipe."""

    def __init__(self) -> None:
        context = torch.multiprocessing.get_context("spawn")
        self.pipe, other = context.Pipe()
        self.process = context.Process(target=serve, args=(other,), daemon=True)
        self.process.start()
        other.close()  # so that a sampler that has died ends the run

    def ask(self, *request: Any) -> Any:
        self.pipe.send(request)
        return self.pipe.recv()

    def send_weights(self, model: nn.Module) -> int:
        """The whole model. Returns the bytes that went through the pipe."""
        buffer = io.BytesIO()
        torch.save(model.state_dict(), buffer)
        require_equal(model, self.ask("weights", buffer.getvalue()))
        return len(buffer.getvalue())

    def send_delta(self, model: nn.Module, delta: WeightDelta) -> int:
        """What changed. Returns the bytes that went through the pipe."""
        buffer = io.BytesIO()
        delta.save(buffer)
        require_equal(model, self.ask("delta", buffer.getvalue()))
        return len(buffer.getvalue())

    def write_answers(self, prompts: Tensor, seed: int) -> tuple[Tensor, Tensor]:
        answers, logs = self.ask("answers", prompts.numpy(), seed)
        return torch.from_numpy(answers), torch.from_numpy(logs)

    def close(self) -> None:
        self.pipe.send(("end",))
        self.process.join()


def require_equal(model: nn.Module, theirs: str) -> None:
    """The sampler's weights are the trainer's to the bit, or the run ends here."""
    if digest(model) != theirs:
        raise SystemExit("The sampler's weights are not the trainer's.")


# -- the trainer -------------------------------------------------------------------------------------------------------


@dataclass
class Run:
    """One way with one seed: what is trained, and what was measured at each step."""

    way: str
    seed: int
    model: Sorter
    optimizer: MixedPrecisionOptimizer
    reward: list[float] = field(default_factory=list)
    changed: list[float] = field(default_factory=list)
    sent: list[int] = field(default_factory=list)
    gap: list[float] = field(default_factory=list)

    @property
    def gained(self) -> list[float]:
        """The expected reward beyond that of the start."""
        return [reward - self.reward[0] for reward in self.reward]

    @property
    def model_bytes(self) -> int:
        return common.total_bytes(self.model.parameters())


def warm_start(seed: int, steps: int) -> Sorter:
    """The supervised training that comes first, in FP32."""
    torch.manual_seed(seed)
    model, generator = Sorter(), torch.Generator().manual_seed(seed)
    optimizer = AdamW(model.parameters(), lr=1e-3, betas=BETAS)
    for _ in range(steps):
        prompts = draw_prompts(64, generator)
        optimizer.zero_grad()
        (-log_probabilities(model, prompts, right_answers(prompts)).mean()).backward()
        optimizer.step()
    return model


def make_run(way: str, seed: int, start: Sorter, rate: float) -> Run:
    dtype, _ = WAYS[way]
    model = copy.deepcopy(start).to(dtype)
    adamw = AdamW(model.parameters(), lr=rate, betas=BETAS, weight_decay=0.0)
    optimizer = MixedPrecisionOptimizer(
        adamw, dynamic=dtype == torch.float16, named_parameters=model.named_parameters(), track_changes=True
    )
    return Run(way, seed, model, optimizer)


@torch.inference_mode()
def expected_reward(model: Sorter) -> float:
    """The probability of a right answer, over 512 prompts that are the same for all runs."""
    prompts = draw_prompts(512, torch.Generator().manual_seed(2**40))
    return log_probabilities(model, prompts, right_answers(prompts)).sum(1).exp().mean().item()


def train_step(run: Run, sampler: Sampler, step: int) -> None:
    """Answers from the sampler, one step on them, and what it changed to the sampler."""
    seed = 100_000 * run.seed + step  # the same prompts in all ways
    prompts = draw_prompts(PROMPTS, torch.Generator().manual_seed(seed)).repeat_interleave(GROUP, 0)
    answers, theirs = sampler.write_answers(prompts, seed)
    rewards = (answers == right_answers(prompts)).all(1).float().view(PROMPTS, GROUP)
    advantages = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)
    run.optimizer.zero_grad()
    ours = log_probabilities(run.model, prompts, answers)
    run.optimizer.backward(-(advantages.view(-1, 1) * ours).mean())
    run.optimizer.clip_master_grads(1.0)
    run.optimizer.step()
    if not WAYS[run.way][1]:
        run.optimizer.refresh_masters()
    delta = run.optimizer.take_delta(run.model)
    run.sent.append(sampler.send_delta(run.model, delta))
    run.changed.append(delta.num_changed / sum(param.numel() for param in run.model.parameters()))
    run.gap.append((ours.detach() - theirs).abs().mean().item())


def train(run: Run, sampler: Sampler, args: argparse.Namespace) -> None:
    sampler.send_weights(run.model)
    run.reward.append(expected_reward(run.model))
    with tqdm(total=args.steps, desc=f"{run.way}, seed {run.seed}", unit="step") as bar:
        for step in range(args.steps):
            train_step(run, sampler, step)
            if (step + 1) % args.evaluate_every == 0:
                run.reward.append(expected_reward(run.model))
            bar.set_postfix(reward=f"{run.reward[-1]:.3f}", refresh=False)
            bar.update()


# -- what comes out ----------------------------------------------------------------------------------------------------


def mean(values: list[float] | list[int]) -> float:
    return sum(values) / len(values)


def make_table(runs: list[Run]) -> str:
    """One row a way; mean and standard deviation over the seeds."""
    header = ["", "reward before", "after", "changed a step, %", "sent a step, B", "of the model, %", "gap", "equal"]
    rows = []
    for way in WAYS:
        same = [run for run in runs if run.way == way]
        steps = sum(len(run.sent) for run in same)
        rows.append(
            [
                way,
                common.format_spread([run.reward[0] for run in same], 3),
                common.format_spread([run.reward[-1] for run in same], 3),
                common.format_spread([100 * mean(run.changed) for run in same], 1),
                f"{mean([mean(run.sent) for run in same]):,.0f}",
                f"{100 * mean([mean(run.sent) / run.model_bytes for run in same]):.0f}",
                f"{mean([mean(run.gap) for run in same]):.1e}",
                f"{steps} of {steps}",  # require_equal has ended the run otherwise
            ]
        )
    return common.format_table(header, rows)


def plot(runs: list[Run], evaluate_every: int, path: Path) -> None:
    """By step: a line for the mean of the seeds, a band from the lowest to the highest."""
    figure, panels = plt.subplots(1, 3, figsize=(13, 4.2), layout="constrained")
    shown = [("gained", 1.0, evaluate_every, 0), ("changed", 100.0, 1, 1), ("gap", 1.0, 1, 1)]
    for axes, (name, factor, every, first) in zip(panels, shown, strict=True):
        for way in WAYS:
            values = factor * torch.tensor([getattr(run, name) for run in runs if run.way == way])
            steps = [first + every * number for number in range(values.shape[1])]
            axes.plot(steps, values.mean(0), STYLES[way], color=COLORS[way], label=way, linewidth=2)
            axes.fill_between(steps, values.amin(0), values.amax(0), color=COLORS[way], alpha=0.2, linewidth=0)
        axes.set_xlabel("step")
        axes.grid(alpha=0.3)
    gained, changed, gap = panels
    gained.set(title="Reward gained", ylabel="probability of a right answer, beyond the start's")
    gained.legend(loc="upper left")
    changed.set(title="Weights that a step changed", ylabel="% of the model (log scale)", yscale="log")
    gap.set(title="Sampler against trainer", ylabel="distance of log-probabilities (log scale)", yscale="log")
    for axes in (changed, gap):
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter(NullFormatter())
    figure.savefig(path, dpi=150)


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Reinforcement learning in 16 bits, with and without masters.")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="each way is trained with each")
    parser.add_argument("--steps", type=int, default=100, help="of reinforcement learning")
    parser.add_argument("--warm-steps", type=int, default=60, help="of the supervised training before it")
    parser.add_argument("--rate", type=float, default=2e-5, help="learning rate of the reinforcement learning")
    parser.add_argument("--evaluate-every", type=int, default=20, help="steps between points of the reward")
    parser.add_argument("--output", type=Path, default=Path("rl-output"), help="folder for results")
    parser.add_argument("--quick", action="store_true", help="one seed, a few steps: does it work?")
    args = parser.parse_args()
    if args.quick:
        args.seeds, args.steps, args.evaluate_every = args.seeds[:1], 4, 2
    return args


def main() -> None:
    """Train every way with every seed, then print the table and draw the picture."""
    args = parse_arguments()
    logging.basicConfig(format="%(name)s: %(message)s", level=logging.INFO)
    torch.set_num_threads(1)  # the model is too small to gain from a second CPU thread
    args.output.mkdir(parents=True, exist_ok=True)
    began, runs = time.perf_counter(), []
    sampler = Sampler()
    with logging_redirect_tqdm():
        for seed in args.seeds:
            start = warm_start(seed, args.warm_steps)
            for way in WAYS:
                runs.append(make_run(way, seed, start, args.rate))
                train(runs[-1], sampler, args)
    sampler.close()
    table = make_table(runs)
    (args.output / "table.md").write_text(table + "\n")
    plot(runs, args.evaluate_every, args.output / "rl.png")
    print(f"\n{table}\n\nMeans over {args.steps} steps; the model has {runs[0].model_bytes:,} B. Gap: mean distance of")
    print("the sampler's log-probabilities from the trainer's. Equal: steps after which the sampler's weights were the")
    print(f"trainer's to the bit. Table and rl.png are in {args.output}/. {time.perf_counter() - began:.0f} seconds.")


if __name__ == "__main__":
    main()
