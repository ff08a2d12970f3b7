"""What does fp16opt.GradScaler cost beside torch's, in the same loop with torch's fused AdamW on FP32 parameters?

    python benchmarks/grad_scaler.py                      # 50 M parameters, two threads, about a minute
    python benchmarks/grad_scaler.py --json grad_scaler.json
    python benchmarks/grad_scaler.py --quick              # small, checks only: for CI

There is no forward and no backward pass: scaled gradients are put in place in ``prepare``, which is not timed. Timed is
what a loop does between ``backward`` and ``zero_grad``. Each route is checked first: parameters and scale are those of
torch's GradScaler bit for bit (clipped with the exact norm, which torch's is not), and an inf skips the step.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import common  # before torch
import torch
from routes import adamw, gpt_shapes
from torch import Tensor

from fp16opt.grad_scaler import GradScaler

SCALE, MAX_NORM = 2.0**16, 1.0
# Bytes read and written per parameter: unscale 8, torch's norm 4, clip 8, fused AdamW 28.
BYTES = {"plain": 8 + 28, "torch's clip": 8 + 4 + 8 + 28, "scaler's clip": 4 + 8 + 28}


class Training:
    """Parameters, gradients and torch's fused AdamW. Contenders share them: where memory lies matters to the time."""

    def __init__(self, weights: list[Tensor], scaled: list[Tensor]) -> None:
        self.scaled = scaled
        self.params = [torch.nn.Parameter(weight.clone()) for weight in weights]
        self.grads = [grad.clone() for grad in scaled]
        self.opt = adamw(self.params)


class Route:
    """One scaler in one loop.

    Args:
        name: for the tables.
        scaler: torch's or ours.
        clip: "" for none, "torch" for torch.nn.utils.clip_grad_norm_, "scaler" for scaler.clip_grad_norm_.
        training: what it trains.
    """

    def __init__(self, name: str, scaler: torch.amp.GradScaler, clip: str, training: Training) -> None:
        self.name, self.scaler, self.clip, self.scaled = name, scaler, clip, training.scaled
        self.params, self.grads, self.opt = training.params, training.grads, training.opt
        self.norm = torch.zeros(())

    def prepare(self) -> None:
        self.scaler.scale(torch.zeros(()))
        torch._foreach_copy_(self.grads, self.scaled)
        for param, grad in zip(self.params, self.grads, strict=True):
            param.grad = grad

    def run(self) -> None:
        if self.clip != "scaler":  # scaler.clip_grad_norm_ unscales by itself
            self.scaler.unscale_(self.opt)
        if self.clip == "torch":
            self.norm = torch.nn.utils.clip_grad_norm_(self.params, MAX_NORM)
        elif isinstance(self.scaler, GradScaler) and self.clip == "scaler":
            self.norm = self.scaler.clip_grad_norm_(self.opt, MAX_NORM)
        self.scaler.step(self.opt)
        self.scaler.update()


def torchs() -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=SCALE)


def ours() -> GradScaler:
    return GradScaler("cpu", init_scale=SCALE)


def problem(shapes: Sequence[tuple[int, ...]]) -> tuple[list[Tensor], list[Tensor]]:
    """FP32 weights, and gradients with a norm of about 8 times MAX_NORM, scaled."""
    generator = torch.Generator().manual_seed(0)
    elements = sum(torch.Size(shape).numel() for shape in shapes)
    spread = 8.0 * MAX_NORM / elements**0.5 * SCALE
    weights = [torch.randn(shape, generator=generator) * 0.02 for shape in shapes]
    return weights, [torch.randn(shape, generator=generator) * spread for shape in shapes]


def check(weights: list[Tensor], scaled: list[Tensor]) -> None:
    """Raise unless ours does what torch's does: on real gradients, with and without a clip, and with an inf."""
    theirs = Route("torch", torchs(), "", Training(weights, scaled))
    mine = Route("ours", ours(), "", Training(weights, scaled))
    clipped = Route("ours, clipped", ours(), "scaler", Training(weights, scaled))
    oracle = torch.stack([(grad.double() / SCALE).square().sum() for grad in scaled]).sum().sqrt().float()
    for route in (theirs, mine, clipped):
        route.prepare()
    theirs.run()
    mine.run()
    _same("step", theirs.params, mine.params)
    clipped.run()
    if abs(float(clipped.norm / oracle) - 1.0) > 2e-7:
        raise SystemExit(f"norm: expected {float(oracle)}, got {float(clipped.norm)}")
    # torch's own norm on the CPU is up to 0.4 % off, so torch's side clips by torch's formula with the exact norm.
    reference = Route("torch, exact clip", torchs(), "", Training(weights, scaled))
    reference.prepare()
    reference.scaler.unscale_(reference.opt)
    torch._foreach_mul_(reference.grads, (MAX_NORM / (clipped.norm + 1e-6)).clamp(max=1.0))
    reference.scaler.step(reference.opt)
    _same("clipped step", reference.params, clipped.params)
    for route in (theirs, mine):
        route.prepare()
        route.grads[-1].view(-1)[-1] = torch.inf
        before = [param.detach().clone() for param in route.params]
        route.run()
        _same("skipped step", before, route.params)
        if route.scaler.get_scale() != SCALE / 2:
            raise SystemExit(f"{route.name}: expected the scale to be halved, got {route.scaler.get_scale()}")
    print("checked: same bits as torch's GradScaler, exact norm, skipped step")


def _same(what: str, theirs: Sequence[Tensor], mine: Sequence[Tensor]) -> None:
    for place, (a, b) in enumerate(zip(theirs, mine, strict=True)):
        if not torch.equal(a, b):
            raise SystemExit(f"{what}: parameter {place} differs from torch's")


def measure(weights: list[Tensor], scaled: list[Tensor], rounds: int) -> tuple[list[common.Row], list[common.Timing]]:
    """The three rows."""
    cases = [
        ("unscale_ + step + update", 1.00, "", ""),
        ("with clipping: scaler.clip_grad_norm_ : torch's", 0.80, "torch", "scaler"),
        ("with clipping: torch's clip in both", 0.95, "torch", "torch"),
    ]
    rows, timings, training = [], [], Training(weights, scaled)
    for what, bound, clip, own_clip in cases:
        theirs = Route(f"torch.amp, {clip or 'no'} clip", torchs(), clip, training)
        mine = Route(f"fp16opt, {own_clip or 'no'} clip", ours(), own_clip, training)
        found = common.alternate([theirs, mine], rounds)
        rows.append(common.ratio_row(what, bound, found[mine.name], found[theirs.name]))
        timings += found.values()
    return rows, timings


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--elements", type=float, default=50e6, help="about as many parameters (default: %(default)g)")


def main() -> None:
    arguments = common.parse_arguments(__doc__ or "", add_arguments)
    common.print_versions()
    elements = 2e5 if arguments.quick else arguments.elements
    layers = 2 if arguments.quick else 12
    width = max(16, int((elements / (12 * layers + 24)) ** 0.5) // 16 * 16)  # the embedding has 24 * width rows
    shapes = gpt_shapes(layers, width, 24 * width, 64)
    weights, scaled = problem(shapes)
    total = sum(weight.numel() for weight in weights)
    print(f"{total:,} parameters in {len(shapes)} tensors")
    check(weights, scaled)
    if arguments.quick:
        return
    rows, timings = measure(weights, scaled, arguments.rounds)
    copy = common.MemoryCopy(4 * total)
    bandwidth = 8 * total / common.alternate([copy], 5)[copy.name].median
    clips = {"no clip": "plain", "torch clip": "torch's clip", "scaler clip": "scaler's clip"}
    moved = {timing.name: float(BYTES[clips[timing.name.partition(", ")[2]]]) for timing in timings}
    common.print_timings(timings, total, moved, bandwidth)
    common.print_rows(rows)
    common.write_json(arguments.json, elements=total, rows=rows, timings=timings, copy_bytes_per_second=bandwidth)


if __name__ == "__main__":
    main()
