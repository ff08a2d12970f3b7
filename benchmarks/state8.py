"""What does optimizer state in 8 bits cost or save, in time and in memory?

    python benchmarks/state8.py [--quick] [--json PATH] [--rounds N] [--threads N]

A step with a clip, as in step.py, of AdamW on 51 million weights of float16, then of bfloat16: split and 24-bit
masters, each with FP32 and with 8-bit moments, in one pass; against torch's fused AdamW on FP32 weights, alone and
under a GradScaler with clip_grad_norm_. Before anything is timed the masters of three steps with FP32 moments are
checked against the numpy oracle, and those with 8-bit moments against these. Bytes kept are weights, gradients,
remainders and state between steps; the peak of a step is what the allocator gave out beyond them.
"""

from __future__ import annotations

import common  # first: it quiets the worker threads before torch is loaded

# isort: split
import sys
from collections.abc import Iterator
from typing import Any

import memory
import routes
import step
import torch
from routes import PlainStep, Problem, ScalerRoute
from torch import Tensor

from fp16opt import DynamicLossScaler, MixedPrecisionOptimizer

MODES = {
    "split": ("split", "fp32"),
    "split + 8bit": ("split", "8bit"),
    "split24": ("split24", "fp32"),
    "split24 + 8bit": ("split24", "8bit"),
}
BYTES = {
    "split": 2 + 26,
    "split + 8bit": 2 + 14.06,  # look at gradients; gradient 2, weight 4, remainder 4, codes 4 and scales
    "split24": 2 + 24,
    "split24 + 8bit": 2 + 12.06,
    "plain FP32, fused": 28,
    "GradScaler, fused": 48,
    "memory copy": 8,
}
KEPT = {"split + 8bit": 8.1, "split24 + 8bit": 7.1}
AGAINST_TORCH = {torch.float16: 0.80, torch.bfloat16: 0.70}


class Route:
    """AdamW on weights of 16 bits, and a clip that clips."""

    def __init__(self, name: str, problem: Problem, dtype: torch.dtype) -> None:
        self.name = name
        self.problem = problem
        self.model = [torch.nn.Parameter(weight.to(dtype, copy=True)) for weight in problem.weights]
        self.grads = [grad.to(dtype, copy=True) for grad in problem.scaled]
        masters, state = MODES[name]
        self.opt = MixedPrecisionOptimizer(
            routes.adamw(self.model),
            scaler=DynamicLossScaler(init_scale=routes.SCALE),
            master_weights=masters,
            optimizer_state=state,
            fused_step=True,
        )
        self.norm = torch.zeros(())

    def prepare(self) -> None:
        routes.leave_gradients(self.opt, self.model, self.grads, self.problem)

    def run(self) -> None:
        self.norm = self.opt.clip_master_grads(routes.MAX_NORM)
        self.opt.step()

    def masters(self) -> list[Tensor]:
        return list(self.opt.master_params())


def check(problem: Problem, found: list[Route], dtype: torch.dtype, steps: int = 3) -> None:
    """Exit where FP32 moments don't give the oracle's masters, or 8-bit ones other steps than these."""
    sample = sorted({0, 1, len(problem.weights) - 1})
    results = {}
    for route in found:
        for _ in range(steps):
            route.prepare()
            route.run()
        results[route.name] = [route.masters()[i].detach().clone() for i in sample]
    if dtype == torch.float16:
        _, wanted = step.expected(problem, steps, sample, clips=True)
        for got, values in zip(results["split"], wanted, strict=True):
            if not torch.allclose(got, torch.from_numpy(values), rtol=0, atol=1e-4 * steps * routes.LR):
                raise SystemExit("split: a master is not the oracle's")
    for name, masters in results.items():
        for got, want in zip(masters, results["split"], strict=True):
            if float((got - want).abs().max()) > steps * (routes.LR / 2 + 2.0**-15 * float(want.abs().max())):
                raise SystemExit(f"{name}: masters are not those of FP32 moments")


def tensors_of(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_of(item)


def kept(route: Route) -> float:
    """Bytes a parameter between backward and step: weights, gradients, what masters need beside weights, and state."""
    operands = [route.opt.masters.operand(pair) for pair in route.opt.params.all]
    all_of = [*route.model, *route.grads, *operands, *tensors_of(dict(route.opt.state))]
    memory_of = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in all_of}
    return sum(memory_of.values()) / route.problem.elements


def timed(problem: Problem, dtype: torch.dtype, quick: bool, rounds: int) -> tuple[list[common.Row], list[Any]]:
    name = str(dtype).removeprefix("torch.")
    found = [Route(mode, problem, dtype) for mode in MODES]
    check(problem, found, dtype)
    plain, scaler = PlainStep(problem, "fused"), ScalerRoute(problem, "fused")
    copy = common.MemoryCopy(4 * problem.elements)
    timings = common.alternate([*found, plain, scaler, copy], 2 if quick else rounds)
    bandwidth = 8 * problem.elements / timings["memory copy"].median
    print(f"\n{name}:")
    common.print_timings(list(timings.values()), problem.elements, BYTES, bandwidth)

    def ratio(ours: str, theirs: str, bound: float | None) -> common.Row:
        words = f"{name}: {ours} / {theirs}"
        return common.ratio_row(words, None if quick else bound, timings[ours], timings[theirs])

    rows = [
        ratio("split", plain.name, None),
        ratio("split + 8bit", plain.name, AGAINST_TORCH[dtype]),
        ratio("split24 + 8bit", plain.name, None),
        ratio("split + 8bit", scaler.name, 0.45 if dtype == torch.float16 else None),
        ratio("split24", "split", 1.05),
        ratio("split24 + 8bit", "split + 8bit", 1.05),
    ]
    for route in found:
        value = kept(route)
        rows.append(common.Row(f"{name}: bytes kept: {route.name}", _bound(quick, KEPT.get(route.name)), *[value] * 3))
        value = memory.step_peak(route) / problem.elements
        rows.append(common.Row(f"{name}: bytes more in a step: {route.name}", _bound(quick, 0.01), *[value] * 3))
    return rows, list(timings.values())


def _bound(quick: bool, bound: float | None) -> float | None:
    return None if quick else bound


def main() -> None:
    arguments = common.parse_arguments(__doc__ or "")
    common.print_versions()
    quick = arguments.quick
    shapes = routes.gpt_shapes(2, 64, 500, 64) if quick else routes.gpt_shapes(12, 512, 24000, 1024)
    problem = Problem.make(shapes)
    print(f"{len(shapes)} tensors, {problem.elements / 1e6:.1f} million parameters")
    rows, timings = [], []
    for dtype in AGAINST_TORCH:
        more, times = timed(problem, dtype, quick, arguments.rounds)
        rows += more
        timings += times
    common.print_rows(rows)
    common.write_json(arguments.json, rows=rows, timings=timings)
    sys.exit(any(row.verdict == "MISSED" for row in rows))


if __name__ == "__main__":
    main()
