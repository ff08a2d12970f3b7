"""What does a fused mixed-precision step cost, beside a plain FP32 step with nothing else?

    python benchmarks/fused.py [--quick] [--json PATH] [--rounds N] [--threads N]

One step is what a training loop does between ``backward`` and ``zero_grad``: unscale, check, clip, step, copy down,
update the scale; ``backward(loss)`` itself is timed with it, over a graph in which autograd has nothing to do.
``fused_step="auto"`` does it in one pass that looks at the 16-bit gradients and one that steps. All other settings are
the defaults. Noticing what others wrote to the model is timed alone too: the look at the model's weights. Against it
stand torch's fused optimizers on FP32 parameters and gradients, alone, and with GradScaler and ``clip_grad_norm_``.
Every contender's result is compared with the numpy recipe of the tests before it is timed: the fused steps bit for
bit.
"""

from __future__ import annotations

import common  # first: it quiets the worker threads before torch is loaded

# isort: split
import gc
import importlib.util
import sys
from collections.abc import Callable, Sequence
from typing import Any

import memory
import numpy as np
import routes
import torch
from routes import LR, MAX_NORM, SCALE, Problem, ScalerRoute
from torch import Tensor
from torch.optim import SGD, Optimizer

from fp16opt import DynamicLossScaler, MixedPrecisionOptimizer, kernels

MOMENTUM = 0.9
# Bytes read and written per parameter. Fused: 2 to look at gradients, then gradient 2, master 8, state 16 (SGD 8),
# model 2. Looking for foreign writes to the model samples it: next to nothing.
BYTES = {
    "fused AdamW": 30,
    "fused AdamW, with a closure": 30,
    "fused AdamW, writes ignored": 30,
    "fused AdamW, the pass that looks": 2,
    "fused AdamW, the pass that steps": 28,
    "plain FP32 AdamW": 28,
    "GradScaler, fused": 48,
    "fused SGD": 22,
    "fused SGD, writes ignored": 22,
    "plain FP32 SGD": 20,
    "memory copy": 8,
}


def sgd(params: list[Tensor]) -> Optimizer:
    return SGD(params, lr=LR, momentum=MOMENTUM, fused=True)


KINDS: dict[str, Callable[[list[Tensor]], Optimizer]] = {"AdamW": routes.adamw, "SGD": sgd}


class Fused:
    """16-bit weights, stepped in one pass. ``part`` times one of the two passes alone."""

    def __init__(
        self,
        problem: Problem,
        kind: str,
        on_model_write: str = "refresh",
        part: str = "",
        closure: bool = False,
    ) -> None:
        ignored = ", writes ignored" if on_model_write == "ignore" else ""
        self.name = f"fused {kind}{ignored}{', with a closure' if closure else ''}"
        self.name += f", the pass that {part}" if part else ""
        self.problem, self.part, self.closure = problem, part, closure
        self.model = routes.leaves(problem.weights, torch.float16)
        self.grads = [grad.clone() for grad in problem.scaled]
        self.opt = MixedPrecisionOptimizer(
            KINDS[kind](self.model),
            scaler=DynamicLossScaler(init_scale=problem.scale),
            on_model_write=on_model_write,
            fused_step="auto",
        )
        self.norm = self.loss = torch.zeros(())

    def prepare(self) -> None:
        self.loss = routes.prepare_backward(self.opt, self.model, self.grads, self.problem)
        if self.part == "steps":
            self._evaluate()

    def run(self) -> None:
        if self.closure:
            self.opt.step(self._evaluate)
            return
        if self.part != "steps":
            self._evaluate()
        if self.part != "looks":
            self.opt.step()

    def _evaluate(self) -> Tensor:
        self.opt.backward(self.loss)
        self.norm = self.opt.clip_master_grads(MAX_NORM)
        return self.loss

    def masters(self) -> list[Tensor]:
        return list(self.opt.master_params())


class Look:
    """What noticing model writes reads in every step: the sample of all 16-bit weights."""

    name = "the look at the model"

    def __init__(self, problem: Problem) -> None:
        self.model = [weight.clone() for weight in problem.weights]
        self.samples = torch.zeros(len(self.model), dtype=torch.int64)
        self.cache = kernels.CallCache()

    def prepare(self) -> None:
        pass

    def run(self) -> None:
        kernels.multi_tensor_sample(self.model, self.samples, cache=self.cache)


class Plain:
    """FP32 weights and torch's fused optimizer with nothing else: no scale, no check, no clip."""

    def __init__(self, problem: Problem, kind: str) -> None:
        self.name = f"plain FP32 {kind}"
        self.params = routes.leaves(problem.weights, torch.float32)
        for param, grad in zip(self.params, problem.scaled, strict=True):
            param.grad = grad.float() / SCALE
        self.opt = KINDS[kind](self.params)

    def prepare(self) -> None:
        pass

    def run(self) -> None:
        self.opt.step()

    def masters(self) -> list[Tensor]:
        return self.params


def load_recipe() -> Any:
    """The tests' op-by-op recipe in numpy."""
    path = common.ROOT / "tests" / "fused" / "oracle_fused.py"
    spec = importlib.util.spec_from_file_location("oracle_fused", path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} can't be loaded")
    module = importlib.util.module_from_spec(spec)
    sys.modules["oracle_fused"] = module
    spec.loader.exec_module(module)
    return module


def check(problem: Problem, contender: Any, kind: str, clips: bool, exact: bool) -> None:
    """Compare one step of a fresh contender with the recipe, bit for bit where it promises that."""
    recipe = load_recipe()
    contender.prepare()
    contender.run()
    clip = 1.0
    if clips:
        norm = np.float32(contender.norm)
        clip = float(min(np.float32(1.0), np.float32(MAX_NORM) / (norm + np.float32(1e-6))))
    for weight, scaled, master in zip(problem.weights, problem.scaled, contender.masters(), strict=True):
        e = recipe.Element(weight.float().numpy())
        stored = scaled.float().numpy()
        if kind == "AdamW":
            e.m, e.v = np.zeros_like(e.p), np.zeros_like(e.p)
            options = {"betas": routes.BETAS, "eps": routes.EPS, "weight_decay": routes.WEIGHT_DECAY}
            recipe.adam(e, stored, 1 / SCALE, clip, lr=LR, amsgrad=False, maximize=False, decoupled=True, **options)
        else:
            options = {"momentum": MOMENTUM, "dampening": 0.0, "weight_decay": 0.0, "nesterov": False}
            recipe.sgd(e, stored, 1 / SCALE, clip, lr=LR, maximize=False, **options)
        got = master.detach().numpy()
        if exact and not np.array_equal(got, e.p):
            sys.exit(f"{contender.name}: not the recipe's bits")
        if not np.allclose(got, e.p, rtol=0, atol=4 * float(np.spacing(np.float32(np.abs(e.p).max())))):
            sys.exit(f"{contender.name}: off the recipe by {np.abs(got - e.p).max():g}")


def contenders_of(problem: Problem, kind: str) -> list[Any]:
    fused = [Fused(problem, kind), Fused(problem, kind, "ignore")]
    fused += [Fused(problem, kind, closure=True)] if kind == "AdamW" else []
    for contender in fused:
        check(problem, contender, kind, clips=True, exact=True)
    plain = Plain(problem, kind)
    check(problem, plain, kind, clips=False, exact=False)
    return [*fused, plain]


def time_all(problem: Problem, rounds: int) -> dict[str, common.Timing]:
    """AdamW and SGD, each with its plain step in the same rounds."""
    copies = common.MemoryCopy(4 * problem.elements)
    parts = [Fused(problem, "AdamW", part=part) for part in ("looks", "steps")]
    scaler = ScalerRoute(problem)
    check(problem, scaler, "AdamW", clips=True, exact=False)
    others = [*parts, Look(problem), scaler, copies]
    timings = common.alternate([*contenders_of(problem, "AdamW"), *others], rounds)
    del parts, scaler, others
    gc.collect()
    return {**timings, **common.alternate(contenders_of(problem, "SGD"), rounds)}


def peak_bytes(problem: Problem) -> float:
    """The most that torch's allocator has given out, in bytes a parameter: from weights and gradients to step 3."""

    def train() -> None:
        route = Fused(problem, "AdamW")
        for _ in range(3):
            route.prepare()
            route.run()

    return memory.allocator_peak(train) / problem.elements


def rows_of(timings: dict[str, common.Timing], peak: float) -> list[common.Row]:
    row, t = common.ratio_row, timings
    plain, scaler = t["plain FP32 AdamW"], t["GradScaler, fused"]
    adamw, ignored = t["fused AdamW"], t["fused AdamW, writes ignored"]
    closure, look = t["fused AdamW, with a closure"], t["the look at the model"]
    return [
        row("fused AdamW with clip, defaults / plain FP32 fused AdamW, nothing else", 1.05, adamw, plain),
        row("the same, not looking for model writes", 1.05, ignored, plain),
        row("fused AdamW with clip, defaults / GradScaler + clip + fused AdamW", 0.60, adamw, scaler),
        row("the same, not looking for model writes", 0.60, ignored, scaler),
        row("fused SGD momentum with clip / plain FP32 fused SGD", 1.05, t["fused SGD"], t["plain FP32 SGD"]),
        row("the same, not looking for writes", 1.05, t["fused SGD, writes ignored"], t["plain FP32 SGD"]),
        row("noticing model writes, the look alone / fused AdamW with clip", 0.02, look, adamw),
        row("fused AdamW, step with a closure / without", 1.02, closure, adamw),
        common.Row("peak memory, FP16 weights and gradients, bytes a parameter", 16.01, peak, peak, peak),
        row("the pass that looks / plain step", None, t["fused AdamW, the pass that looks"], plain),
        row("the pass that steps / plain step", None, t["fused AdamW, the pass that steps"], plain),
    ]


def report(problem: Problem, timings: dict[str, common.Timing]) -> None:
    """All timings, with bytes moved against what a copy reaches: where the time goes."""
    bandwidth = 8 * problem.elements / timings["memory copy"].median
    print(f"memory copy: {bandwidth / 1e9:.1f} GB/s, read and written")
    listed: Sequence[common.Timing] = list(timings.values())
    common.print_timings(listed, problem.elements, BYTES, bandwidth)


def main() -> None:
    arguments = common.parse_arguments(__doc__ or "")
    common.print_versions()
    quick = arguments.quick
    problem = Problem.make(routes.gpt_shapes(2, 64, 500, 64) if quick else routes.gpt_shapes(12, 512, 24000, 1024))
    print(f"{len(problem.weights)} tensors, {problem.elements / 1e6:.1f} million parameters")
    timings = time_all(problem, 2 if quick else arguments.rounds)
    peak = peak_bytes(problem)
    print("every contender's first step was checked against the recipe; the fused ones have its bits")
    report(problem, timings)
    rows = rows_of(timings, peak)
    if quick:
        for row in rows:
            row.bound = None
    common.print_rows(rows)
    common.write_json(
        arguments.json, rows=rows, timings=list(timings.values()), elements=problem.elements, bytes_per_parameter=BYTES
    )


if __name__ == "__main__":
    main()
