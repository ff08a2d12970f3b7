"""What does a step of small tensors cost, where time is not memory's but that of calls?

    python benchmarks/small.py [--quick] [--json PATH] [--rounds N]

A step with a clip on 1,000 tensors of 64 elements, 150 of 1,000 and 10 of 64, with AdamW and one thread: where idle
workers must be woken for each tensor, torch's own step takes several times as long, and every ratio flatters us.

What is timed, on each side, is all that a loop does for a step but autograd's own work: scaling the loss, what
``backward`` adds to autograd, unscaling, clipping, the step, weights down, the scale's update. Gradients are put in
place by the backward pass of a loss that computes nothing else; the same pass with nothing around it is timed in the
same rounds and subtracted. ``zero_grad`` is on neither side; a row for information has it on both. Ours is the one pass
(``fused_step="auto"``) and the general step (``fused_step=False``) around torch's fused AdamW and around its default
one, which on a CPU goes tensor by tensor. Against them stand ``torch.amp.GradScaler`` with ``clip_grad_norm_`` and a
plain step with nothing else, on FP32 parameters. All results are first compared with the numpy oracle of the tests.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"

import common  # before torch

# isort: split
import itertools
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import routes
import step
import torch
from routes import MAX_NORM, Problem
from torch import Tensor

from fp16opt import DynamicLossScaler, MixedPrecisionOptimizer

SCALE = 2.0**10  # gradients of 640 elements with a norm of 8, scaled, must be float16
PHASES = ("backward", "clip and step", "zero_grad")


class Route:
    """One way to train: parameters, gradients that arrive, and a step in three phases.

    Attributes:
        spent: of the last :meth:`run`, the seconds in each of ``PHASES``, as time and as processor time.
    """

    def __init__(self, name: str, problem: Problem, dtype: torch.dtype) -> None:
        self.name, self.problem = name, problem
        self.params = routes.leaves(problem.weights, dtype)
        self.ready = [grad.to(dtype, copy=True) for grad in problem.scaled]
        self.grads = [grad.clone() for grad in self.ready]
        self.norm = self.loss = torch.zeros(())
        self.spent: list[tuple[float, float]] = []

    def prepare(self) -> None:
        """Not timed: gradients ready to arrive, none in place."""
        torch._foreach_copy_(self.grads, self.ready)
        self.loss = routes.arriving(self.params, self.grads)

    def run(self) -> None:
        marks = [(time.perf_counter(), time.process_time())]
        for phase in (self.backward, self.step, self.zero_grad):
            phase()
            marks.append((time.perf_counter(), time.process_time()))
        self.spent = [(b[0] - a[0], b[1] - a[1]) for a, b in itertools.pairwise(marks)]

    def backward(self) -> None:
        self.loss.backward()

    def step(self) -> None:
        pass

    def zero_grad(self) -> None:
        for param in self.params:
            param.grad = None

    def masters(self) -> list[Tensor]:
        return self.params


class Wrapper(Route):
    """16-bit parameters under the wrapper. ``inside``: "one pass", or whose step is inside: "fused", "default"."""

    def __init__(self, problem: Problem, inside: str) -> None:
        super().__init__(inside if inside == "one pass" else f"general, {inside} AdamW", problem, torch.float16)
        self.opt = MixedPrecisionOptimizer(
            adamw(self.params, fused=inside == "fused"),
            scaler=DynamicLossScaler(init_scale=SCALE),
            fused_step="auto" if inside == "one pass" else False,
        )

    def backward(self) -> None:
        self.opt.backward(self.loss)

    def step(self) -> None:
        self.norm = self.opt.clip_master_grads(MAX_NORM)
        self.opt.step()

    def zero_grad(self) -> None:
        self.opt.zero_grad()

    def masters(self) -> list[Tensor]:
        return list(self.opt.master_params())


class Scaler(Route):
    """FP32 parameters, torch's GradScaler, ``clip_grad_norm_`` and AdamW."""

    def __init__(self, problem: Problem, fused: bool = True) -> None:
        super().__init__(f"GradScaler, {'fused' if fused else 'default'} AdamW", problem, torch.float32)
        self.opt = adamw(self.params, fused)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)

    def backward(self) -> None:
        self.scaler.scale(self.loss).backward()

    def step(self) -> None:
        self.scaler.unscale_(self.opt)
        self.norm = torch.nn.utils.clip_grad_norm_(self.params, MAX_NORM)
        self.scaler.step(self.opt)
        self.scaler.update()

    def zero_grad(self) -> None:
        self.opt.zero_grad()


class Plain(Route):
    """FP32 parameters and torch's fused AdamW: no scale, no check, no clip."""

    def __init__(self, problem: Problem) -> None:
        super().__init__("plain FP32, fused AdamW", problem, torch.float32)
        self.ready = [grad / SCALE for grad in self.ready]
        self.opt = adamw(self.params, fused=True)

    def step(self) -> None:
        self.opt.step()

    def zero_grad(self) -> None:
        self.opt.zero_grad()


def adamw(params: list[Tensor], fused: bool) -> torch.optim.AdamW:
    return (
        routes.adamw(params)
        if fused
        else torch.optim.AdamW(
            params, lr=routes.LR, betas=routes.BETAS, eps=routes.EPS, weight_decay=routes.WEIGHT_DECAY
        )
    )


AUTOGRAD = "autograd alone"


def contenders(problem: Problem) -> list[Route]:
    return [
        *(Wrapper(problem, inside) for inside in ("one pass", "fused", "default")),
        Scaler(problem),
        Scaler(problem, fused=False),
        Plain(problem),
        Route(AUTOGRAD, problem, torch.float32),
    ]


def check(problem: Problem, found: Sequence[Route], steps: int = 3) -> None:
    """Take a few steps with each and compare masters, norms and copies with the oracle; exits where one is wrong."""
    for route in found:
        if route.name == AUTOGRAD:
            continue
        clips = not isinstance(route, Plain)
        norm, wanted = step.expected(problem, steps, range(len(problem.weights)), clips)
        for _ in range(steps):
            route.prepare()
            route.run()
        masters = route.masters()
        for i, weights in enumerate(wanted):
            error = np.abs(masters[i].detach().numpy() - weights).max() / (routes.LR * steps)
            if not error < 1e-4:  # as in step.py
                sys.exit(f"{route.name}: tensor {i} is wrong: off by {error:.1e} of the update")
        if clips and not abs(float(route.norm) - norm) < 1e-5 * norm:
            sys.exit(f"{route.name}: the norm is {float(route.norm)}, expected {norm}")
        if isinstance(route, Wrapper):
            step.check_copied_down(route.name, masters, route.params)


def measure(problem: Problem, rounds: int, warmup: int = 10) -> dict[str, common.Timing]:
    """Time all contenders in turns, without autograd's own work; also each phase of each alone."""
    found = contenders(problem)
    check(problem, found)
    spent: dict[str, list[list[tuple[float, float]]]] = {route.name: [] for route in found}
    for number in range(warmup + rounds):
        first = number % len(found)
        for route in [*found[first:], *found[:first]]:
            route.prepare()
            route.run()
            if number >= warmup:
                spent[route.name].append(route.spent)
    empty = spent.pop(AUTOGRAD)
    autograd = [statistics.median(seconds[0][clock] for seconds in empty) for clock in (0, 1)]
    timings = {}

    def add(name: str, rounds: list[list[tuple[float, float]]], phases: tuple[int, ...]) -> None:
        less = autograd if 0 in phases else (0.0, 0.0)
        clocks = [[sum(seconds[p][clock] for p in phases) - less[clock] for seconds in rounds] for clock in (0, 1)]
        timings[name] = common.Timing(name, clocks[0], clocks[1])

    for name, seconds in spent.items():
        add(name, seconds, (0, 1))
        add(f"{name}, {PHASES[1]} alone", seconds, (1,))
        add(f"{name}, with zero_grad", seconds, (0, 1, 2))
    check_scales(found)
    return timings


def check_scales(found: Sequence[Route]) -> None:
    """No timed step may have been skipped."""
    for route in found:
        scale: Any = SCALE
        if isinstance(route, Wrapper):
            scale = route.opt.loss_scale
        elif isinstance(route, Scaler):
            scale = route.scaler.get_scale()
        if scale != SCALE:
            sys.exit(f"{route.name}: the loss scale moved to {scale}")


def rows_of(shape: str, t: dict[str, common.Timing], one_pass: float, general: float) -> list[common.Row]:
    row, scaler, plain = common.ratio_row, "GradScaler, fused AdamW", "plain FP32, fused AdamW"
    fused, default = "general, fused AdamW", "general, default AdamW"
    alone, zero = f", {PHASES[1]} alone", ", with zero_grad"
    return [
        row(f"{shape}: one pass / GradScaler + clip + fused AdamW", one_pass, t["one pass"], t[scaler]),
        row(f"{shape}: general step / the same", general, t[fused], t[scaler]),
        row(f"{shape}: one pass, clip and step alone / the same", None, t["one pass" + alone], t[scaler + alone]),
        row(f"{shape}: general, clip and step alone / the same", None, t[fused + alone], t[scaler + alone]),
        row(f"{shape}: one pass with zero_grad / the same", None, t["one pass" + zero], t[scaler + zero]),
        row(f"{shape}: general step with zero_grad / the same", None, t[fused + zero], t[scaler + zero]),
        row(
            f"{shape}: general, default AdamW / GradScaler + default AdamW",
            None,
            t[default],
            t["GradScaler, default AdamW"],
        ),
        row(f"{shape}: one pass / plain FP32 fused AdamW", None, t["one pass"], t[plain]),
        row(f"{shape}: general step / plain FP32 fused AdamW", None, t[fused], t[plain]),
    ]


SHAPES = [(1000, 64, 0.45, 1.00), (150, 1000, 0.60, 1.00), (10, 64, 0.90, 1.20)]


def main() -> None:
    arguments = common.parse_arguments(__doc__ or "", rounds=100, threads=1)
    common.print_versions()
    rows, listed = [], {}
    for number, size, one_pass, general in SHAPES:
        count = min(number, 20) if arguments.quick else number
        shape = f"{count:,} x {size:,}"
        problem = Problem.make([(size,)] * count, scale=SCALE)
        timings = measure(problem, 2 if arguments.quick else arguments.rounds)
        rows += rows_of(shape, timings, one_pass, general)
        listed[shape] = list(timings.values())
        print(f"\n{shape}, microseconds a tensor:")
        for timing in timings.values():
            print(f"  {timing.name:<50} {timing.median / count * 1e6:8.2f}   {timing.median * 1e6:10.1f} in all")
    print("every contender's result was equal to the oracle's within rounding before it was timed")
    if arguments.quick:
        for row in rows:
            row.bound = None
    common.print_rows(rows)
    common.write_json(arguments.json, rows=rows, timings=listed)


if __name__ == "__main__":
    main()
