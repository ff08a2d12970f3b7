"""How long does a whole optimizer step take, against torch's own ways to do the same?

    python benchmarks/step.py [--quick] [--json PATH] [--rounds N] [--threads N] [--small-rounds N]

A step is what a training loop does between ``backward`` and ``zero_grad``: unscale, check, clip (there is
something to clip), AdamW, weights down, scale update. The contenders are in routes.py. Ours follows
``backward(loss, update_master_grads=False)``, so that unscaling and clipping are one write; or a plain
``backward(loss)``, whose own unscaling is then timed with it. 148 tensors shaped
like a small GPT's with 51 million elements, and 1,000 tensors of 64 elements. Every contender's result is
first checked against the numpy oracle of the tests. Contenders take turns in one run; ratios are taken within
a round; the figure is their median.
"""

from __future__ import annotations

import common  # first: it quiets the worker threads before torch is loaded

# isort: split
import argparse
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
    grads = [oracle.unscale(grad.numpy(), routes.SCALE) for grad in problem.scaled]
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
        if isinstance(contender, Engine):
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
    if not (same and engine.opt.step_was_skipped and engine.opt.loss_scale == routes.SCALE / 2):
        sys.exit(f"{engine.name}: an overflow was not skipped")
    engine.opt.zero_grad()
    engine.opt.loss_scale = routes.SCALE


def check_scales(contenders: Sequence[Any]) -> None:
    """No timed step may have been skipped, and the scale must be what the gradients were made for."""
    for contender in contenders:
        if isinstance(contender, Engine) and contender.opt.loss_scale != routes.SCALE:
            sys.exit(f"{contender.name}: the loss scale moved to {contender.opt.loss_scale}")
        if isinstance(contender, ScalerRoute) and contender.scaler.get_scale() != routes.SCALE:
            sys.exit(f"{contender.name}: the loss scale moved to {contender.scaler.get_scale()}")


EARLY = "fp16opt, unscaled by backward"

Timings = dict[str, common.Timing]


def time_main(problem: Problem, rounds: int) -> Timings:
    """The contenders that have bounds, a plain fused step, and a plain copy of memory."""
    contenders = [
        Engine(problem),
        Engine(problem, "ignore"),
        Engine(problem, early=True),
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


def time_small(problem: Problem, rounds: int) -> Timings:
    """1,000 small tensors; also with the calls that surround a step in a loop."""
    contenders = [
        Engine(problem),
        Engine(problem, "ignore"),
        Engine(problem, early=True),
        ScalerRoute(problem),
        ThreePasses(problem),
        PlainStep(problem),
    ]
    check(problem, contenders)
    ours, theirs = Engine(problem), ScalerRoute(problem)
    zero = torch.zeros(())
    around = [
        routes.Whole(ours, lambda: ours.opt.scale_loss(zero)),
        routes.Whole(theirs, lambda: theirs.scaler.scale(zero)),
    ]
    timings = common.alternate([*contenders, *around], rounds, warmup=10)
    check_scales([*contenders, ours, theirs])
    return timings


def rows_of(main: Timings, others: Timings, clip: Timings, small: Timings, peak: memory.Peak) -> list[common.Row]:
    """The bounds of the project's plan, and ratios for information."""
    ours, row = main["fp16opt"], common.ratio_row
    tiny, around = small["fp16opt"], ", with scale_loss and zero_grad"
    return [
        row(
            "step with clip / GradScaler + clip_grad_norm_ + fused AdamW",
            0.95,
            ours,
            main["GradScaler, fused"],
        ),
        row("step with clip / three passes in torch calls", 0.70, ours, main["three passes"]),
        row("1,000 tensors of 64: step / GradScaler route", 1.0, tiny, small["GradScaler, fused"]),
        row(
            "clip with nothing to clip / clip that clips",
            0.05,
            clip["clip with nothing to clip"],
            clip["clip that clips"],
        ),
        common.Row("peak extra memory of a step, bytes per parameter", 0.0, peak.slope, peak.slope, peak.slope),
        row("looking for model writes adds to a step", 0.05, ours, main["fp16opt, writes ignored"], minus=1.0),
        row("the same, unscaled by backward / GradScaler", None, main[EARLY], main["GradScaler, fused"]),
        row("the same, unscaled by backward / three passes", None, main[EARLY], main["three passes"]),
        row("1,000 of 64: unscaled by backward / GradScaler", None, small[EARLY], small["GradScaler, fused"]),
        row("step / plain FP32 fused AdamW, nothing else", None, ours, main["plain FP32, fused"]),
        row(
            "GradScaler route / plain FP32 fused AdamW",
            None,
            main["GradScaler, fused"],
            main["plain FP32, fused"],
        ),
        row("step / GradScaler + foreach AdamW", None, others["fp16opt"], others["GradScaler, foreach"]),
        row("step / GradScaler + plain AdamW", None, others["fp16opt"], others["GradScaler, plain"]),
        row("step / plain FP32 foreach AdamW", None, others["fp16opt"], others["plain FP32, foreach"]),
        row("step / plain FP32 plain AdamW", None, others["fp16opt"], others["plain FP32, plain"]),
        row("1,000 of 64: step / three passes", None, tiny, small["three passes"]),
        row("1,000 of 64: step / plain FP32 fused AdamW", None, tiny, small["plain FP32, fused"]),
        row(
            "1,000 of 64: with scale_loss and zero_grad / GradScaler",
            None,
            small["fp16opt" + around],
            small["GradScaler, fused" + around],
        ),
        row(
            "1,000 of 64: looking for model writes adds",
            None,
            tiny,
            small["fp16opt, writes ignored"],
            minus=1.0,
        ),
    ]


def more_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--small-rounds",
        type=int,
        default=100,
        help="rounds with the 1,000 small tensors (default: %(default)s)",
    )


def main() -> None:
    arguments = common.parse_arguments(__doc__ or "", more_options)
    common.print_versions()
    quick = arguments.quick
    shapes = routes.gpt_shapes(2, 64, 500, 64) if quick else routes.gpt_shapes(12, 512, 24000, 1024)
    rounds, small_rounds = (2, 2) if quick else (arguments.rounds, arguments.small_rounds)
    problem = Problem.make(shapes)
    small = Problem.make([(64,)] * (100 if quick else 1000))
    print(f"{len(shapes)} tensors, {problem.elements / 1e6:.1f} million parameters, {rounds} rounds")
    results = (
        time_main(problem, rounds),
        time_others(problem, max(2, rounds // 3)),
        time_clip(problem, rounds),
    )
    small_timings = time_small(small, small_rounds)
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
    print(f"\n{len(small.weights)} tensors of 64 elements:", end="")
    common.print_timings(list(small_timings.values()), 0, {}, bandwidth)
    memory.print_peak(peak)
    rows = rows_of(*results, small_timings, peak)
    if quick:
        for row in rows:
            row.bound = None
    common.print_rows(rows)
    timings = {"main": results[0], "others": results[1], "clip": results[2], "small": small_timings}
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
