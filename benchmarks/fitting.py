"""What a training takes in each mode: bytes by kind, the plan's forecast, and the peak of torch's allocator.

    python benchmarks/fitting.py [--quick] [--json PATH] [--only NAMES] [--picture PATH] [--cards]

A small GPT with AdamW, FP16 weights but for the first row. Each mode trains three steps from nothing: the peak counts
every allocation and release of torch's CPU allocator from before the model is made, activations included. Bytes by kind
are those of ``opt.memory()`` between backward and step of the third; the plan is that of ``python -m fp16opt plan``.
The script fails where the two are more than 2% apart.
"""

from __future__ import annotations

import common  # first: it quiets the worker threads before torch is loaded

# isort: split
import argparse
from dataclasses import dataclass
from typing import Any

import torch
from memory import allocator_peak
from torch import Tensor, nn
from traps import GPT, loss_of, read_text

from fp16opt import Memory, MixedPrecisionOptimizer, plan
from fp16opt.tools.plan import FILLED, Plan

KINDS = ("weights", "gradients", "masters", "moments")
COLORS = ("#444444", "#00798c", "#edae49", "#d1495b")
HALF_STATE = {"optimizer_state": "8bit"}


@dataclass
class Mode:
    """A way to train.

    Attributes:
        arguments: of ``MixedPrecisionOptimizer``; None is plain FP32 training.
        plan: of ``Plan``; None where there is nothing to plan.
    """

    name: str
    arguments: dict[str, Any] | None
    plan: dict[str, Any] | None


MODES = [
    Mode("FP32, torch.optim.AdamW", None, None),
    Mode("FP16, the wrapped optimizer's own step", {"fused_step": False}, {"fused_step": False}),
    Mode("FP16, one pass", {}, {}),
    Mode("split", {"master_weights": "split"}, {"masters": "split"}),
    Mode(
        "split, released", {"master_weights": "split", "gradient_release": True}, {"masters": "split", "release": True}
    ),
    Mode("split, 8-bit state", {"master_weights": "split", **HALF_STATE}, {"masters": "split", "state": "8bit"}),
    Mode("split24, 8-bit state", {"master_weights": "split24", **HALF_STATE}, {"masters": "split24", "state": "8bit"}),
    Mode(
        "split24, 8-bit state, released",
        {"master_weights": "split24", "gradient_release": True, **HALF_STATE},
        {"masters": "split24", "state": "8bit", "release": True},
    ),
]


@dataclass
class Row:
    """What one mode takes; bytes."""

    name: str
    memory: Memory
    planned: float | None
    peak: int
    loss: float


def train(mode: Mode, width: int, layers: int) -> Row:
    """Three steps, counted."""
    characters, tokens = read_text()
    found: list[Memory] = []
    losses: list[float] = []

    def work() -> None:
        torch.manual_seed(0)
        model: nn.Module = GPT(characters, width, layers)
        if mode.arguments is None:
            _plain(model, tokens, found, losses)
            return
        model.half()
        opt = MixedPrecisionOptimizer(
            torch.optim.AdamW(model.parameters(), lr=1e-3), loss_scale=128.0, **mode.arguments
        )
        for step in range(3):
            opt.zero_grad()
            loss = loss_of(model, tokens, step, 1)
            opt.backward(loss)
            losses.append(float(loss.detach()))
            del loss
            if not mode.arguments.get("fused_step", True):
                opt.update_master_grads()
            if step == 2:
                found.append(opt.memory())
            opt.step()

    peak = allocator_peak(work)
    given: dict[str, Any] | None = mode.plan
    planned = None if given is None else Plan(params=found[0].parameters, **given).memory_total()
    return Row(mode.name, found[0], planned, peak, losses[-1])


def _plain(model: nn.Module, tokens: Tensor, found: list[Memory], losses: list[float]) -> None:
    params = list(model.parameters())
    optimizer = torch.optim.AdamW(params, lr=1e-3, fused=True)
    for step in range(3):
        optimizer.zero_grad()
        loss = loss_of(model, tokens, step, 1)
        loss.backward()
        losses.append(float(loss.detach()))
        del loss
        if step == 2:
            count = sum(param.numel() for param in params)
            moments = sum(value.nbytes for state in optimizer.state.values() for value in state.values())
            found.append(Memory(count, weights=4 * count, moments=moments, gradients=4 * count))
        optimizer.step()


# -- what fits where ---------------------------------------------------------------------------------------------------


def print_cards() -> None:
    """Billions of parameters that fit each card by mode, and GiB of the host with them; by the plan's arithmetic."""
    least = ("split24", "8bit")
    ways = [way for way in plan(1e9, "1GiB").all if not way.release or (way.masters, way.state) == least]
    ways.sort(key=lambda way: way.offload is not None)
    header = []
    for way in ways:
        words = [way.masters, *(["8-bit"] * (way.state == "8bit")), *(["released"] * way.release)]
        card, host = f"{way.memory_total() / 1e9:.3g}", f" + {way.host_total() / 1e9:.3g}" if way.offload else ""
        header.append(f"{', '.join(words)}: {card}{host}")
    print(f"| memory | {' | '.join(header)} |\n|---|{'---:|' * len(ways)}")
    for memory in (8, 16, 24, 48, 80):
        cells = []
        for way in ways:
            billions = FILLED * memory * 2**30 / way.memory_total()
            host = f" ({billions * way.host_total() / 2**30:.0f})" if way.offload else ""
            cells.append(f"{billions:.1f}{host}")
        print(f"| {memory} GiB | {' | '.join(cells)} |")


# -- the picture -------------------------------------------------------------------------------------------------------

# By system: bytes a parameter of weights, gradients, masters, moments; see docs/fitting-into-memory.md.
SYSTEMS = {
    "masters by hand": (2, 2 + 4, 4, 8),
    "FP32; GradScaler": (4, 4, 0, 8),
    "fp16opt, one pass": (2, 2, 4, 8),
    "fp16opt, split": (2, 2, 2, 8),
    "split + 8-bit state": (2, 2, 2, 2 + 4 / 128),
    "split24 + 8-bit state": (2, 2, 1, 2 + 4 / 128),
    "the same, gradients released": (2, 0, 1, 2 + 4 / 128),
    "8-bit state, no masters": (2, 2, 0, 2 + 2 * 4 / 256),
}


def draw(path: str) -> None:
    """Bytes a parameter by system, by arithmetic."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7.5, 3.6))
    names = list(SYSTEMS)[::-1]
    left = [0.0] * len(names)
    for number, (kind, color) in enumerate(zip(KINDS, COLORS, strict=True)):
        values = [float(SYSTEMS[name][number]) for name in names]
        axes.barh(names, values, left=left, color=color, label=kind, height=0.7)
        left = [a + b for a, b in zip(left, values, strict=True)]
    for place, total in enumerate(left):
        axes.text(total + 0.2, place, f"{total:.2f}".rstrip("0").rstrip("."), va="center", fontsize=9)
    axes.set_xlabel("bytes a parameter, AdamW")
    axes.set_xlim(0, 22)
    axes.legend(frameon=False, loc="lower right")
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", default="", help="modes by name, separated by semicolons")
    parser.add_argument("--cards", action="store_true", help="print what fits which card, and do nothing else")
    parser.add_argument("--picture", metavar="PATH", help="draw bytes a parameter by system there, and do nothing else")


def main() -> None:
    """Measure and print the table."""
    arguments = common.parse_arguments(__doc__ or "", _options)
    if arguments.cards:
        print_cards()
        return
    if arguments.picture:
        draw(arguments.picture)
        return
    wanted = [name.strip() for name in arguments.only.split(";") if name.strip()] or [mode.name for mode in MODES]
    modes = [mode for mode in MODES if mode.name in wanted]
    if len(modes) < len(wanted):
        raise SystemExit(f"--only: choose among {'; '.join(mode.name for mode in MODES)}.")
    width, layers = (128, 2) if arguments.quick else (512, 6)
    rows = [train(mode, width, layers) for mode in modes]
    count = rows[0].memory.parameters
    common.print_versions()
    print(f"\n{count:,} parameters; bytes a parameter\n")
    print(f"| mode | {' | '.join(KINDS)} | engine | all | plan | peak, with activations |")
    print("|---|" + "---:|" * (len(KINDS) + 4))
    for row in rows:
        parts = [row.memory.parts()[kind] / count for kind in (*KINDS, "engine")]
        planned = "" if row.planned is None else f"{row.planned / count:.2f}"
        shown = " | ".join(f"{part:.2f}" for part in parts)
        print(f"| {row.name} | {shown} | {row.memory.per_parameter():.2f} | {planned} | {row.peak / count:.2f} |")
    common.write_json(arguments.json, rows=[{**vars(row), "memory": row.memory.parts()} for row in rows])
    apart = [row for row in rows if row.planned is not None and abs(row.memory.total / row.planned - 1) > 0.02]
    if apart and not arguments.quick:
        raise SystemExit(f"{apart[0].name}: the plan is more than 2% off")


if __name__ == "__main__":
    main()
