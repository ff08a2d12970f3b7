"""Five traps for 8-bit optimizer state, run against every AdamW that is installed; prints a Markdown table.

    python benchmarks/traps.py [--quick] [--json PATH] [--only NAMES] [--without-model]

The first four look at one tensor of 16,384 elements whose gradients are known, and at the FP32 movement of its weights:

- *drop*: after 1,500 steps of gradients of size 1 all but every 32nd become ten times smaller. 4,000 steps later the
  second moment of those, as the optimizer holds it, is divided by what it should be, 0.01. (FP32 itself has not
  forgotten all.)
- *tiny*: the mean size of an update at gradients of 1e-6 to 1e-9, divided by FP32's.
- *spike*: after 300 steps every 256th element meets one gradient of 1e3, or 1e5. The largest update of the others in
  the next 200 steps, divided by lr.
- *spread*: sizes of gradients within the tensor are spread lognormally, sigma 1 and 2. The error of the updates of
  steps 151 to 200, rms, divided by FP32's rms.
- *model*: a small GPT reads characters for 1,200 steps, its loss multiplied by 0.01: validation loss, and the largest
  update of any weight in every tenth step, divided by lr.

This library steps BF16 weights with split masters, which is what its 8-bit state is for; the others FP32 weights.
Gradients are the same numbers, rounded to BF16, for all but the model.
"""

from __future__ import annotations

import common  # first: it quiets the worker threads before torch is loaded

# isort: split
import argparse
import importlib.metadata
import importlib.util
import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pydoc_data.topics import topics
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fp16opt import MixedPrecisionOptimizer

COUNT, LR = 16_384, 1e-3
ADAMW: dict[str, Any] = {"lr": LR, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}


# -- contenders --------------------------------------------------------------------------------------------------------


@dataclass
class Contender:
    """An AdamW over some parameters.

    Attributes:
        optimizer: what has ``step`` and ``zero_grad``.
        values: the FP32 weights.
        second: the second moment of the first parameter, in FP32.
    """

    optimizer: Any
    params: list[Tensor]
    values: Callable[[], list[Tensor]]
    second: Callable[[], Tensor]

    def step(self, grads: list[Tensor]) -> None:
        """One step with these gradients."""
        for param, grad in zip(self.params, grads, strict=True):
            param.grad = grad.to(param.dtype)
        self.optimizer.step()
        self.optimizer.zero_grad()


Maker = Callable[[list[nn.Parameter]], Contender]


def _plain(params: list[nn.Parameter], optimizer: Any, second: Callable[[Any], Tensor]) -> Contender:
    def values() -> list[Tensor]:
        return [param.detach().clone() for param in params]

    return Contender(optimizer, list(params), values, lambda: second(optimizer.state[params[0]]))


def _torch(params: list[nn.Parameter]) -> Contender:
    return _plain(params, torch.optim.AdamW(params, **ADAMW), lambda state: state["exp_avg_sq"])


def _bitsandbytes(params: list[nn.Parameter]) -> Contender:
    import bitsandbytes
    from bitsandbytes.functional import dequantize_blockwise

    def second(state: Any) -> Tensor:
        found: Tensor = dequantize_blockwise(
            state["state2"], absmax=state["absmax2"], code=state["qmap2"], blocksize=256
        )
        return found

    return _plain(params, bitsandbytes.optim.AdamW8bit(params, **ADAMW), second)


def _torchao(params: list[nn.Parameter]) -> Contender:
    from torchao.optim import AdamW8bit

    return _plain(params, AdamW8bit(params, **ADAMW), lambda state: state["exp_avg_sq"].dequantize())


def _ours(state: str) -> Maker:
    def make(params: list[nn.Parameter]) -> Contender:
        for param in params:
            param.data = param.data.bfloat16()
        options = {} if state == "fp32" else {"optimizer_state": state}
        opt = MixedPrecisionOptimizer(
            torch.optim.AdamW(params, **ADAMW), master_weights="split", fused_step=True, **options
        )

        def values() -> list[Tensor]:
            return [value.detach().clone() for value in opt.master_params()]

        def second() -> Tensor:
            found: Tensor = opt.state_dict()["optimizer"]["state"][0]["exp_avg_sq"]
            return found

        return Contender(opt, list(params), values, second)

    return make


CONTENDERS: dict[str, tuple[str, Maker]] = {  # name, package, how it is made
    "torch FP32": ("torch", _torch),
    "fp16opt, FP32 state": ("fp16opt", _ours("fp32")),
    "fp16opt, 8-bit state": ("fp16opt", _ours("8bit")),
    "bitsandbytes AdamW8bit": ("bitsandbytes", _bitsandbytes),
    "torchao AdamW8bit": ("torchao", _torchao),
}


# -- one tensor --------------------------------------------------------------------------------------------------------


def _weight() -> list[nn.Parameter]:
    return [nn.Parameter(torch.zeros(COUNT))]


def _draw(step: int) -> Tensor:
    return torch.randn(COUNT, generator=torch.Generator().manual_seed(step))


def _updates(made: Contender, grads: Iterator[Tensor], first: int) -> Iterator[Tensor]:
    """What steps from number ``first`` on move the weights by, divided by lr."""
    for step, grad in enumerate(grads):
        before = made.values()[0] if step >= first else None
        made.step([grad.bfloat16().float()])
        if before is not None:
            yield (made.values()[0] - before) / LR


def drop(make: Maker, quick: bool) -> dict[str, float]:
    """See the module."""
    made = make(_weight())
    size = torch.full((COUNT,), 0.1)
    size[::32] = 1.0
    warm, after = (150, 400) if quick else (1500, 4000)
    for step in range(warm + after):
        grad = _draw(step)
        made.step([(grad if step < warm else grad * size).bfloat16().float()])
    return {"v after a drop": float(made.second().view(-1)[size == 0.1].mean() / 0.01)}


def tiny(make: Maker, quick: bool) -> dict[str, float]:
    """See the module; sizes of updates, which :func:`relate` divides by FP32's."""
    found = {}
    for size in (1e-6, 1e-7, 1e-8, 1e-9):
        made = make(_weight())
        steps = 20 if quick else 100
        moves = [move.abs().mean() for move in _updates(made, (_draw(k) * size for k in range(steps)), steps // 2)]
        found[f"update at {size:g}"] = float(torch.stack(moves).mean())
    return found


def spike(make: Maker, quick: bool) -> dict[str, float]:
    """See the module."""
    spiked = torch.zeros(COUNT, dtype=torch.bool)
    spiked[::256] = True
    warm, after = (30, 20) if quick else (300, 200)

    def grads(size: float) -> Iterator[Tensor]:
        for step in range(warm + after):
            grad = _draw(step)
            yield torch.where(spiked, size, grad) if step == warm else grad

    return {
        f"spike of {size:g}": max(
            float(move[~spiked].abs().max()) for move in _updates(make(_weight()), grads(size), warm)
        )
        for size in (1e3, 1e5)
    }


def spread(make: Maker, quick: bool) -> dict[str, Any]:
    """See the module; the updates, which :func:`relate` compares with FP32's."""
    found: dict[str, Any] = {}
    for sigma in (1.0, 2.0):
        made = make(_weight())
        size = torch.exp(sigma * _draw(-1 & 0xFFFF))
        steps = 20 if quick else 200
        moves = list(_updates(made, (_draw(k) * size for k in range(steps)), 3 * steps // 4))
        found[f"spread, sigma {sigma:g}"] = torch.stack(moves)
    return found


# -- a small model -----------------------------------------------------------------------------------------------------

WIDTH, HEADS, CONTEXT, BATCH = 64, 4, 64, 8


class Block(nn.Module):
    """Attention and a perceptron, each behind a norm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.qkv, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """``x``: batch x time x width."""
        split = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.qkv(self.norms[0](x)).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(*split, is_causal=True)
        x = x + self.project(mixed.transpose(1, 2).flatten(-2))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


class GPT(nn.Module):
    """Characters in, logits out."""

    def __init__(self, characters: int, width: int = WIDTH, layers: int = 2) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(characters, width), nn.Embedding(CONTEXT, width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, characters)

    def forward(self, tokens: Tensor) -> Tensor:
        """FP32 logits."""
        x = self.token(tokens) + self.position(torch.arange(tokens.shape[1]))
        return self.head(self.norm(self.blocks(x))).float()


def read_text() -> tuple[int, Tensor]:
    """How many characters Python's language reference has, and it as their numbers."""
    text = "\n".join(topics[name] for name in sorted(topics))
    index = {character: number for number, character in enumerate(sorted(set(text)))}
    return len(index), torch.tensor([index[character] for character in text])


def loss_of(model: nn.Module, tokens: Tensor, seed: int, batch: int = BATCH) -> Tensor:
    """The cross entropy of the next characters, in stretches that the seed chooses."""
    starts = torch.randint(len(tokens) - CONTEXT - 1, (batch, 1), generator=torch.Generator().manual_seed(seed))
    drawn = tokens[starts + torch.arange(CONTEXT + 1)]
    return F.cross_entropy(model(drawn[:, :-1]).flatten(0, 1), drawn[:, 1:].flatten())


def model(make: Maker, quick: bool) -> dict[str, float]:
    """See the module."""
    characters, tokens = read_text()
    split = len(tokens) * 9 // 10
    torch.manual_seed(0)
    net = GPT(characters)
    made = make(list(net.parameters()))
    largest = 0.0
    for step in range(10 if quick else 1200):
        (0.01 * loss_of(net, tokens[:split], step)).backward()
        before = made.values() if step % 10 == 0 else None
        made.optimizer.step()
        made.optimizer.zero_grad()
        if before is not None:
            moves = [(a - b).abs().max() / LR for a, b in zip(made.values(), before, strict=True)]
            largest = max(largest, float(torch.stack(moves).max()))
    with torch.no_grad():
        losses = [loss_of(net, tokens[split:], 10_000 + k, 32) for k in range(2 if quick else 30)]
    return {"model, validation loss": float(torch.stack(losses).mean()), "model, largest update": largest}


# -- the table ---------------------------------------------------------------------------------------------------------

TRAPS: list[Callable[[Maker, bool], dict[str, Any]]] = [drop, tiny, spike, spread, model]


@dataclass
class Result:
    """What one contender gave."""

    name: str
    version: str
    figures: dict[str, Any] = field(default_factory=dict)


def relate(result: Result, fp32: Result) -> dict[str, float]:
    """The figures, those of updates as ratios to FP32's."""
    found = {}
    for name, value in result.figures.items():
        theirs = fp32.figures[name]
        if name.startswith("spread"):
            found[name] = float((value - theirs).square().mean().sqrt() / theirs.square().mean().sqrt())
        else:
            found[name] = value / theirs if name.startswith("update at") else value
    return found


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", default="", help="contenders by name, separated by semicolons, beside FP32")
    parser.add_argument("--without-model", action="store_true", help="leave the trap out that trains a model")


def main() -> None:
    """Run the traps and print the table."""
    arguments = common.parse_arguments(__doc__ or "", _options)
    wanted = [name.strip() for name in arguments.only.split(";") if name.strip()] or list(CONTENDERS)
    unknown = [name for name in wanted if name not in CONTENDERS]
    if unknown:
        raise SystemExit(f"--only: there is no {unknown[0]!r}, but {'; '.join(CONTENDERS)}.")
    traps = [trap for trap in TRAPS if not (trap is model and arguments.without_model)]
    results: list[Result] = []
    for name, (package, make) in CONTENDERS.items():
        if name != "torch FP32" and name not in wanted:
            continue
        if importlib.util.find_spec(package) is None:
            print(f"{package} is not installed")
            continue
        version = common.versions().get(package) or importlib.metadata.version(package)
        result = Result(name, version)
        for trap in traps:
            result.figures |= trap(make, arguments.quick)
        results.append(result)
    rows = {result.name: relate(result, results[0]) for result in results}
    if not all(math.isfinite(value) for value in rows["torch FP32"].values()):
        raise SystemExit("a figure of FP32 itself is not finite: the traps are wrong")
    common.print_versions()
    print("\n| trap |" + "".join(f" {result.name} {result.version} |" for result in results))
    print("|---|" + "---:|" * len(results))
    for trap_name in rows["torch FP32"]:
        print(f"| {trap_name} |" + "".join(f" {rows[result.name][trap_name]:.3g} |" for result in results))
    common.write_json(
        arguments.json, traps=[{**asdict(Result(r.name, r.version)), "figures": rows[r.name]} for r in results]
    )


if __name__ == "__main__":
    main()
