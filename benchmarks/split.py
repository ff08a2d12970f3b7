"""What do split masters cost in time, and save in memory?

    python benchmarks/split.py [--quick] [--json PATH] [--rounds N] [--threads N]

A step with a clip, as in step.py, of AdamW on 51 million float16 weights: full and split masters in one pass
(``fused_step=True``), and full ones around torch's own fused AdamW. Results are first checked against the numpy oracle
of the tests. Memory is the allocator's peak from the model's creation to the end of the second step: weights,
gradients, masters, moments and whatever a step needs.
"""

from __future__ import annotations

import common  # first: it quiets the worker threads before torch is loaded

# isort: split
import gc
import sys
from collections.abc import Callable
from typing import Any

import memory
import routes
import step
import torch
from routes import Problem
from torch import Tensor

from fp16opt import DynamicLossScaler, MixedPrecisionOptimizer

BYTES = {
    "full, one pass": 2
    + 30,  # look at gradients; gradient 2, master 8, moments 16, weight 2, and its line read first 2
    "split, one pass": 2 + 26,  # gradient 2, weight 4, remainder 4, moments 16
    "full, torch's step": routes.BYTES["fp16opt"],
    "memory copy": 8,
}


class Route:
    """One of the three: float16 weights and a clip that clips."""

    def __init__(self, name: str, problem: Problem, master_weights: str, fused_step: bool) -> None:
        self.name = name
        self.problem = problem
        self.model = [torch.nn.Parameter(weight.clone()) for weight in problem.weights]
        self.grads = [grad.clone() for grad in problem.scaled]
        self.opt = MixedPrecisionOptimizer(
            routes.adamw(self.model),
            scaler=DynamicLossScaler(init_scale=routes.SCALE),
            master_weights=master_weights,
            fused_step=fused_step,
        )
        self.norm = torch.zeros(())

    def prepare(self) -> None:
        routes.leave_gradients(self.opt, self.model, self.grads, self.problem)

    def run(self) -> None:
        self.norm = self.opt.clip_master_grads(routes.MAX_NORM)
        self.opt.step()

    def masters(self) -> list[Tensor]:
        return list(self.opt.master_params())


def contenders(problem: Problem) -> list[Route]:
    return [
        Route("full, one pass", problem, "full", True),
        Route("split, one pass", problem, "split", True),
        Route("full, torch's step", problem, "full", False),
    ]


def check(problem: Problem, routes_: list[Route], steps: int = 3) -> None:
    """Exit where a contender's masters are not the oracle's, or split ones not those of full masters."""
    sample = sorted({0, 1, len(problem.weights) - 1})
    norm, wanted = step.expected(problem, steps, sample, clips=True)
    results = []
    for route in routes_:
        for _ in range(steps):
            route.prepare()
            route.run()
        if abs(float(route.norm) - norm) > 1e-5 * norm:
            raise SystemExit(f"{route.name}: norm {float(route.norm)}, should be {norm}")
        masters = route.masters()
        for i, values in zip(sample, wanted, strict=True):
            if not torch.allclose(masters[i].detach(), torch.from_numpy(values), rtol=0, atol=1e-4 * steps * routes.LR):
                raise SystemExit(f"{route.name}: tensor {i} is not the oracle's")
        results.append(masters)
    full, split = 0, 1
    for a, b in zip(results[full], results[split], strict=True):
        if not torch.allclose(a, b, rtol=1e-6, atol=2.0**-38):
            raise SystemExit(f"{routes_[split].name} gives other masters than {routes_[full].name}")


def peak(problem: Problem, name: str, master_weights: str, fused_step: bool) -> float:
    """Bytes a parameter at the worst moment of two steps, the problem's own tensors not counted."""

    def work() -> None:
        route = Route(name, problem, master_weights, fused_step)
        for _ in range(2):
            route.prepare()
            route.run()

    gc.collect()  # else what earlier routes have left would be given back in the midst of this one
    return memory.allocator_peak(work) / problem.elements


def kept(route: Route) -> float:
    """Bytes a parameter between steps, after ``zero_grad``: weights and all that the engine keeps beside moments."""
    route.opt.zero_grad()
    found: dict[int, int] = {}

    def collect(value: Any) -> None:
        if isinstance(value, Tensor):
            for tensor in (value, Tensor.grad.__get__(value) if value.is_leaf else None):  # type: ignore[attr-defined]
                if tensor is not None:
                    found[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        elif isinstance(value, (list, tuple)):
            for item in value:
                collect(item)
        elif isinstance(value, dict):
            collect(list(value.values()))
        elif type(value).__module__.startswith("fp16opt.") and id(value) not in seen:
            seen.add(id(value))
            collect(dict(vars(value)) if hasattr(value, "__dict__") else [])

    seen: set[int] = set()
    opt = route.opt
    for part in (opt.params, opt.masters, opt.model_writes, opt.gradients, opt.step_state):
        collect(part)
    return sum(found.values()) / route.problem.elements


def memory_rows(problem: Problem, routes_: list[Route], quick: bool) -> list[common.Row]:
    bounds: dict[str, tuple[float | None, float | None]] = {
        "full, one pass": (6.25, 16.25),
        "split, one pass": (4.25, 14.25),
        "full, torch's step": (None, None),
    }
    rows = []
    for route in routes_:
        at_rest, at_peak = bounds[route.name]
        value = kept(route)
        rows.append(
            common.Row(f"bytes a parameter kept: {route.name}", None if quick else at_rest, value, value, value)
        )
        split, fused = route.opt.master_weights, "one pass" in route.name
        value = peak(problem, route.name, split, fused)
        rows.append(
            common.Row(f"bytes a parameter, peak: {route.name}", None if quick else at_peak, value, value, value)
        )
    return rows


def main() -> None:
    arguments = common.parse_arguments(__doc__ or "")
    common.print_versions()
    quick = arguments.quick
    shapes = routes.gpt_shapes(2, 64, 500, 64) if quick else routes.gpt_shapes(12, 512, 24000, 1024)
    problem = Problem.make(shapes)
    found = contenders(problem)
    check(problem, found)
    print(f"{len(shapes)} tensors, {problem.elements / 1e6:.1f} million parameters; all equal to the oracle's")
    copy = common.MemoryCopy(4 * problem.elements)
    timings = common.alternate([*found, copy], 2 if quick else arguments.rounds)
    bandwidth = 8 * problem.elements / timings["memory copy"].median
    common.print_timings(list(timings.values()), problem.elements, BYTES, bandwidth)
    ratio: Callable[..., common.Row] = common.ratio_row
    rows = [
        ratio(
            "split against full, one pass",
            None if quick else 1.15,
            timings["split, one pass"],
            timings["full, one pass"],
        ),
        *memory_rows(problem, found, quick),
    ]
    common.print_rows(rows)
    common.write_json(arguments.json, rows=rows, timings=list(timings.values()))
    sys.exit(any(row.verdict == "MISSED" for row in rows))


if __name__ == "__main__":
    main()
