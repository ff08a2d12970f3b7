"""How long does a whole optimizer step take, against torch's own ways to do the same?

    python benchmarks/step.py [--quick] [--json PATH] [--rounds N] [--threads N]

A step is what a training loop does between ``backward`` and ``zero_grad``: unscale, check, clip (there is
something to clip), AdamW, weights down, scale update. The contenders are in routes.py. Ours is the general step,
``fused_step=False``, with torch's fused AdamW inside. It follows ``backward(loss, update_master_grads=False)``; or a
plain ``backward(loss)``, and what that adds to autograd is then timed with it; or all of it is the closure's. 148
tensors shaped like a small GPT's with 51 million elements; small tensors are in small.py. Every contender's result is
first checked against the numpy oracle of the tests. Contenders take turns in one run; ratios are taken within
a round; the figure is their median.
"""

from __future__ import annotations

import common  # first: it quiets the worker threads before torch is loaded

# isort: split
import logging
import sys
from collections.abc import Sequence
from typing import Any

import memory
import numpy as np
import routes
import torch
from routes import Engine, PlainStep, Problem, ScalerRoute, ThreePasses
from torch import Tensor

oracle = common.load_oracle()


def expected(problem: Problem, steps: int, sample: Sequence[int], clips: bool) -> tuple[float, list[Any]]:
    """(norm before clipping, FP32 weights of the tensors ``sample`` after ``steps`` steps), by the oracle."""
    grads = [oracle.unscale(grad.numpy(), problem.scale) for grad in problem.scaled]
    norm = float(np.sqrt(sum(float(np.square(grad, dtype=np.float64).sum()) for grad in grads)))
    factor = oracle.clip_factor(norm, routes.MAX_NORM) if clips else np.float32(1.0)
    if clips and not factor < 0.5:
        raise SystemExit(f"the gradients' norm is {norm}: there is nothing to clip")
    adam = oracle.Adam(routes.LR, routes.BETAS, routes.EPS, routes.WEIGHT_DECAY, decoupled=True)
    weights = [problem.weights[i].float().numpy().copy() for i in sample]
    for _ in range(steps):
        adam.step(weights, [grads[i] * factor for i in sample])
    return norm, weights


def check(problem: Problem, contenders: Sequence[Any], steps: int = 3) -> None:
    """Run every contender and compare with the oracle; exits where one is wrong. They go on from there.

    torch's fused step contracts multiplications and additions and so differs from the oracle in last bits: an
    update (about 1e-4 on weights of about 0.02) is allowed a relative error of 1e-4.
    """
    largest = max(range(len(problem.weights)), key=lambda i: problem.weights[i].numel())
    sample = sorted({0, 1, largest, len(problem.weights) // 2, len(problem.weights) - 1})
    for contender in contenders:
        clips = not isinstance(contender, PlainStep)
        norm, wanted = expected(problem, steps, sample, clips)
        for _ in range(steps):
            contender.prepare()
            contender.run()
        masters = contender.masters()
        for i, weights in zip(sample, wanted, strict=True):
            error = np.abs(masters[i].detach().numpy() - weights).max() / (routes.LR * steps)
            moved = np.abs(weights - problem.weights[i].float().numpy()).max() / (routes.LR * steps)
            if not (error < 1e-4 and moved > 0.5):
                sys.exit(f"{contender.name}: tensor {i} is wrong: off by {error:.1e} of the update")
        # torch adds up the squares of millions of elements in FP32 and is off by 1e-4 here.
        tolerance = 2e-7 if isinstance(contender, Engine) else 1e-3
        if clips and not abs(float(contender.norm) - norm) < tolerance * norm:
            sys.exit(f"{contender.name}: the norm is {float(contender.norm)}, expected {norm}")
        if isinstance(contender, (Engine, ThreePasses)):
            check_copied_down(contender.name, masters, contender.model)
        if isinstance(contender, Engine) and contender.after != "closure":
            check_skip(problem, contender)


def check_copied_down(name: str, masters: Sequence[Tensor], model: Sequence[Tensor]) -> None:
    """The model must be the masters rounded to nearest even, bit for bit."""
    for i, (master, param) in enumerate(zip(masters, model, strict=True)):
        wanted = oracle.round_half(master.detach().numpy()).view(np.uint16)
        if not (param.detach().numpy().view(np.uint16) == wanted).all():
            sys.exit(f"{name}: model parameter {i} is not its master rounded")


def check_skip(problem: Problem, engine: Engine) -> None:
    """One infinity anywhere must leave everything as it was and halve the scale."""
    logging.getLogger("fp16opt").setLevel(logging.ERROR)  # it would tell of the overflow that is provoked here
    before = [param.detach().clone() for param in engine.masters()]
    engine.prepare()
    engine.grads[-1][-1] = float("inf")
    engine.run()
    same = all(torch.equal(a, b) for a, b in zip(before, engine.masters(), strict=True))
    if not (same and engine.opt.step_was_skipped and engine.opt.loss_scale == problem.scale / 2):
        sys.exit(f"{engine.name}: an overflow was not skipped")
    engine.opt.zero_grad()
    engine.opt.loss_scale = problem.scale


def check_scales(contenders: Sequence[Any]) -> None:
    """No timed step may have been skipped, and the scale must be what the gradients were made for."""
    for contender in contenders:
        if isinstance(contender, Engine) and contender.opt.loss_scale != routes.SCALE:
            sys.exit(f"{contender.name}: the loss scale moved to {contender.opt.loss_scale}")
        if isinstance(contender, ScalerRoute) and contender.scaler.get_scale() != routes.SCALE:
            sys.exit(f"{contender.name}: the loss scale moved to {contender.scaler.get_scale()}")


BACKWARD, CLOSURE = "fp16opt, after a plain backward", "fp16opt, with a closure"

Timings = dict[str, common.Timing]


def time_main(problem: Problem, rounds: int) -> Timings:
    """The contenders that have bounds, a plain fused step, and a plain copy of memory."""
    contenders = [
        Engine(problem),
        Engine(problem, "ignore"),
        Engine(problem, after="backward"),
        Engine(problem, after="closure"),
        ScalerRoute(problem),
        ThreePasses(problem),
        PlainStep(problem),
    ]
    check(problem, contenders)
    copies = [common.MemoryCopy(4 * problem.elements)]
    timings = common.alternate([*contenders, *copies], rounds)
    check_scales(contenders)
    return timings


def time_others(problem: Problem, rounds: int) -> Timings:
    """Slower ways to do it, for information: torch's foreach and plain AdamW."""
    contenders = [
        Engine(problem),
        *(ScalerRoute(problem, variant) for variant in ("foreach", "plain")),
        *(PlainStep(problem, variant) for variant in ("foreach", "plain")),
    ]
    check(problem, contenders[1:])
    timings = common.alternate(contenders, rounds)
    check_scales(contenders)
    return timings


def time_clip(problem: Problem, rounds: int) -> Timings:
    """``clip_master_grads`` that finds nothing to clip, and one that clips."""
    engine = Engine(problem)
    engine.prepare()
    engine.run()
    nothing = routes.Clip(engine, "clip with nothing to clip", 1e6)
    clips = routes.Clip(engine, "clip that clips", routes.MAX_NORM)
    return common.alternate([nothing, clips], rounds)


def rows_of(main: Timings, others: Timings, clip: Timings, peak: memory.Peak) -> list[common.Row]:
    """The bounds of the project's plan, and ratios for information."""
    ours, row = main["fp16opt"], common.ratio_row
    scaler, three = main["GradScaler, fused"], main["three passes"]
    plain = main["plain FP32, fused"]
    nothing, clips = clip["clip with nothing to clip"], clip["clip that clips"]
    return [
        row("step with clip / GradScaler + clip_grad_norm_ + fused AdamW", 0.95, ours, scaler),
        row("after a plain backward, what it adds included / GradScaler route", 0.95, main[BACKWARD], scaler),
        row("step with a closure / without", 1.02, main[CLOSURE], main[BACKWARD]),
        row("step with clip / three passes in torch calls", 0.70, ours, three),
        row("clip with nothing to clip / clip that clips", 0.05, nothing, clips),
        common.Row("peak extra memory of a step, bytes per parameter", 0.0, peak.slope, peak.slope, peak.slope),
        row("noticing model writes adds to a step", None, ours, main["fp16opt, writes ignored"], minus=1.0),
        row("after a plain backward / three passes", None, main[BACKWARD], three),
        row("step / plain FP32 fused AdamW, nothing else", None, ours, plain),
        row("GradScaler route / plain FP32 fused AdamW", None, scaler, plain),
        row("step / GradScaler + foreach AdamW", None, others["fp16opt"], others["GradScaler, foreach"]),
        row("step / GradScaler + plain AdamW", None, others["fp16opt"], others["GradScaler, plain"]),
        row("step / plain FP32 foreach AdamW", None, others["fp16opt"], others["plain FP32, foreach"]),
        row("step / plain FP32 plain AdamW", None, others["fp16opt"], others["plain FP32, plain"]),
    ]


def main() -> None:
    arguments = common.parse_arguments(__doc__ or "")
    common.print_versions()
    quick = arguments.quick
    shapes = routes.gpt_shapes(2, 64, 500, 64) if quick else routes.gpt_shapes(12, 512, 24000, 1024)
    rounds = 2 if quick else arguments.rounds
    problem = Problem.make(shapes)
    print(f"{len(shapes)} tensors, {problem.elements / 1e6:.1f} million parameters, {rounds} rounds")
    results = (
        time_main(problem, rounds),
        time_others(problem, max(2, rounds // 3)),
        time_clip(problem, rounds),
    )
    peak = memory.measure(quick)
    print("every contender's result was equal to the oracle's within rounding before it was timed")

    main_timings = results[0]
    bandwidth = 8 * problem.elements / main_timings["memory copy"].median
    print(f"memory copy: {bandwidth / 1e9:.1f} GB/s, read and written")
    for timings, elements in [
        (main_timings, problem.elements),
        (results[1], problem.elements),
        (results[2], 0),
    ]:
        common.print_timings(list(timings.values()), elements, routes.BYTES if elements else {}, bandwidth)
    memory.print_peak(peak)
    rows = rows_of(*results, peak)
    if quick:
        for row in rows:
            row.bound = None
    common.print_rows(rows)
    timings = {"main": results[0], "others": results[1], "clip": results[2]}
    listed = {name: list(part.values()) for name, part in timings.items()}
    common.write_json(
        arguments.json,
        rows=rows,
        timings=listed,
        peak=vars(peak),
        elements=problem.elements,
        bytes_per_parameter=routes.BYTES,
        copy_bandwidth=bandwidth,
    )


if __name__ == "__main__":
    main()
