"""What do amp's names cost? O2 beside the engine used by hand, O1 beside torch.autocast with torch's GradScaler.

    python benchmarks/amp.py                      # the digits network, about half a minute
    python benchmarks/amp.py --json amp.json
    python benchmarks/amp.py --quick              # checks only: for CI

Timed is a whole training step: forward, backward, optimizer. Each pair is checked first: O2 and the engine by hand end
in the same bits, and so do O1 and autocast with GradScaler where the two cast the same functions. On the CPU autocast
leaves group norm in FP16, apex's lists have it in FP32: the row that says so times that as well.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import common  # before torch
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fp16opt import MixedPrecisionOptimizer, amp
from fp16opt.amp import _amp_state

SCALE = 2.0**10


def digits_network(norm: Callable[[int], nn.Module]) -> nn.Sequential:
    """The network of examples/train_digits.py, with a choice of what stands behind the convolutions."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for channels, stride in (((1, 8), 1), ((8, 16), 2), ((16, 16), 1)):
        layers += [nn.Conv2d(*channels, 3, stride=stride, padding=1), norm(channels[1]), nn.ReLU()]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(16 * 4 * 4, 10))


def group_norm(channels: int) -> nn.Module:
    return nn.GroupNorm(4, channels)


def batch_norm(channels: int) -> nn.Module:
    return nn.BatchNorm2d(channels)


class Route:
    """A model, its optimizer, and steps ahead of timing.

    Args:
        name: for the tables.
        norm: what the network normalises with.
        steps: training steps a timed run.
        batch: images a step.
    """

    name = ""

    def __init__(self, norm: Callable[[int], nn.Module], steps: int, batch: int = 64) -> None:
        self.steps = steps
        self.inputs = torch.rand(batch, 1, 8, 8, generator=torch.Generator().manual_seed(0))
        self.labels = torch.randint(0, 10, (batch,), generator=torch.Generator().manual_seed(1))
        self.model: Any = digits_network(norm)
        self.optimizer: Any = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9)
        self.set_up()

    def set_up(self) -> None:
        """Turn the FP32 network into what this route trains."""

    def prepare(self) -> None:
        """Function casts are on for O1 alone."""
        _amp_state.casts.deactivate()

    def step(self) -> None:
        raise NotImplementedError

    def run(self) -> None:
        for _ in range(self.steps):
            self.step()


class ByHand(Route):
    """The engine, and the casts that O2 makes, written out."""

    name = "engine by hand"

    def set_up(self) -> None:
        for module in self.model.modules():
            if not isinstance(module, nn.modules.batchnorm._BatchNorm) and not list(module.children()):
                module.half()
        self.optimizer = MixedPrecisionOptimizer(self.optimizer, dynamic=True, fused_step=False)
        self.optimizer.loss_scale = SCALE

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.optimizer.backward(F.cross_entropy(self.model(self.inputs.half()).float(), self.labels))
        self.optimizer.step()


class Amp(Route):
    """The script of old."""

    level = ""

    def set_up(self) -> None:
        amp.initialize(self.model, self.optimizer, opt_level=self.level, verbosity=0)
        _amp_state.loss_scalers[0]._loss_scale = SCALE
        _amp_state.casts.deactivate()

    def step(self) -> None:
        self.optimizer.zero_grad()
        loss = F.cross_entropy(self.model(self.inputs), self.labels)
        with amp.scale_loss(loss, self.optimizer) as scaled:
            scaled.backward()
        self.optimizer.step()


class O2(Amp):
    name, level = "amp, O2", "O2"


class O1(Amp):
    name, level = "amp, O1", "O1"

    def prepare(self) -> None:
        _amp_state.casts.activate()


class Autocast(Route):
    """torch's own mixed precision."""

    name = "autocast and GradScaler"

    def set_up(self) -> None:
        self.scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)

    def step(self) -> None:
        self.optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = F.cross_entropy(self.model(self.inputs), self.labels)
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()


class AutocastLikeO1(Autocast):
    """The same, with group norm in FP32 as apex's lists have it: hooks cast what goes in."""

    name = "autocast with FP32 group norm"

    def set_up(self) -> None:
        super().set_up()
        for module in self.model:
            if isinstance(module, nn.GroupNorm):
                module.register_forward_pre_hook(_widen)


def _widen(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(arg.float() for arg in args)


def check() -> None:
    """Raise unless each pair ends in the same bits after some steps."""
    for ours, theirs, norm in ((O2, ByHand, group_norm), (O2, ByHand, batch_norm), (O1, AutocastLikeO1, group_norm)):
        pair = [route(norm, 8) for route in (ours, theirs)]
        for route in pair:
            route.prepare()
            route.run()
        params = [list(route.model.parameters()) for route in pair]
        if not all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(*params, strict=True)):
            raise SystemExit(f"{ours.name} and {theirs.name} differ")
    print("checked: the same bits after 8 steps")


def measure(steps: int, rounds: int) -> tuple[list[common.Row], list[common.Timing]]:
    cases: list[tuple[str, float | None, type[Route], type[Route], Callable[[int], nn.Module], int]] = [
        ("O2 : engine by hand", 1.03, O2, ByHand, group_norm, 64),
        ("O2 : engine by hand, batch of 16", 1.03, O2, ByHand, group_norm, 16),
        ("O1 : autocast, batch norm", 1.05, O1, Autocast, batch_norm, 64),
        ("O1 : autocast with FP32 group norm", 1.05, O1, AutocastLikeO1, group_norm, 64),
        ("O1 : autocast, batch norm, batch of 16", 1.05, O1, Autocast, batch_norm, 16),
        ("O1 : autocast (FP16 group norm)", None, O1, Autocast, group_norm, 64),
    ]
    rows, timings = [], []
    for what, bound, ours, theirs, norm, batch in cases:
        found = common.alternate([ours(norm, steps, batch), theirs(norm, steps, batch)], rounds)
        rows.append(common.ratio_row(what, bound, found[ours.name], found[theirs.name]))
        for timing in found.values():
            timing.seconds[:] = [seconds / steps for seconds in timing.seconds]
            timing.processor[:] = [seconds / steps for seconds in timing.processor]
            timings.append(timing)
    return rows, timings


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--steps", type=int, default=20, help="training steps a timed run (default: %(default)s)")


def main() -> None:
    arguments = common.parse_arguments(__doc__ or "", add_arguments)
    common.print_versions()
    check()
    if arguments.quick:
        return
    rows, timings = measure(arguments.steps, arguments.rounds)
    for timing in timings:
        print(f"{timing.name:32} {timing.median * 1e6:9.1f} us a step")
    common.print_rows(rows)
    common.write_json(arguments.json, rows=rows, timings=timings)


if __name__ == "__main__":
    main()
