"""``python -m fp16opt prove``: every CUDA kernel and every kind of step on the card at hand, against the CPU's bits."""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import json
import logging
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ... import __version__
from ...kernels import native
from ...kernels.cuda_rows import FIRST, KERNELS
from ...kernels.planted import expected, planted
from ...kernels.proof import prove
from .speed import LENGTHS, Speed
from .trials import ITERATIONS, Result, Trials
from .where import Card, NoCard, Pretended, Where

__all__ = ["add_arguments", "answer"]

Say = Callable[[str], None]
Task = tuple[str, Callable[[], Result]]
_WOULD = (
    f"It would prove {len(KERNELS)} kernels on planted numbers, time them beside a copy, and make {ITERATIONS} steps "
    "in every mode, in a CUDA graph and on two streams, and compare all bits with the CPU's."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Those of the command line."""
    parser.add_argument("--json", type=Path, metavar="PATH", help="write what was found there, to attach to an issue")
    parser.add_argument("--device", type=int, default=0, metavar="N", help="the number of the card")
    parser.add_argument("--iterations", type=int, default=ITERATIONS, help=f"steps of each mode: {ITERATIONS}")
    parser.add_argument(
        "--pretend", action="store_true", help="on the device that the tests emulate; needs the source tree"
    )


def answer(given: argparse.Namespace, say: Say) -> int:
    """Prove everything.

    Args:
        given: the parsed arguments.
        say: prints a line.

    Returns:
        0 where every bit is the CPU's; 1 where one is not, or something raised; 2 where there is no card.
    """
    try:
        where: Where = Pretended() if given.pretend else Card(given.device)
    except NoCard as error:
        say(f"fp16opt prove: {error}. {_WOULD}")
        return 2
    began, logger = time.perf_counter(), logging.getLogger("fp16opt")
    level = logger.level
    logger.setLevel(logging.ERROR)  # steps are skipped on purpose
    facts = {"fp16opt": __version__, "the CPU's side": native.status(), **where.facts()}
    try:
        with _progress(say) as progress:
            kernels, trials, speeds = _work(where, given.iterations, progress)
    finally:
        where.close()
        logger.setLevel(level)
    seconds = round(time.perf_counter() - began, 1)
    wrong = [result for result in (*kernels, *trials) if result.words]
    for line in _page(facts, kernels, trials, speeds, where.is_real):
        say(line)
    for result in wrong:
        say(f"WRONG  {result.name}: {result.words}")
    bits = sum(result.figures.get("bits", 0) for result in (*kernels, *trials))
    say(f"{len(kernels) + len(trials)} proofs, {bits:,} bits compared, {len(wrong)} wrong, {seconds} s")
    if given.json is not None:
        content = {
            "command": "python -m fp16opt prove" + (" --pretend" if given.pretend else ""),
            "facts": facts,
            "seconds": seconds,
            "wrong": len(wrong),
            "kernels": [_record(result) for result in kernels],
            "steps": [_record(result) for result in trials],
            **speeds,
        }
        given.json.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return 1 if wrong else 0


def _work(
    where: Where, iterations: int, progress: Callable[[list[Task]], Iterator[Task]]
) -> tuple[list[Result], list[Result], dict[str, Any]]:
    """Do everything, one task after the other: (kernels, steps, figures)."""
    speed = Speed(where)
    rates: dict[str, float] = {}
    host: dict[str, float] = {}
    first: dict[str, float] = {}

    def kernel(name: str) -> Result:
        with where.serving():
            found = prove((name,), where.device.index or 0, where.place())[name]
            where.note({name: found})
        figures: dict[str, Any] = {"bits": found.bits}
        if name in speed.timed() and not found.words:
            rates[name] = figures["GB/s"] = round(speed.kernel(name), 1)
        return Result(name, found.words, figures)

    def copy() -> Result:
        rates["copy"] = round(speed.copy(), 1)
        return Result("copy", "")

    def hosted(length: int) -> Result:
        host[str(length)] = round(speed.host(length), 1)
        return Result("host", "")

    def once_more() -> Result:
        """What the first use costs, apart from compiling."""
        for made in (planted, expected):
            made.cache_clear()
        began = time.perf_counter()
        with where.serving():
            prove(FIRST, where.device.index or 0, where.place())
        first["milliseconds"] = round(1e3 * (time.perf_counter() - began), 1)
        return Result("first use", "")

    for name in KERNELS:  # the CPU's side, where nothing is pretended yet
        expected(name)
    kernel_tasks: list[Task] = [(name, functools.partial(kernel, name)) for name in KERNELS]
    trial_tasks = Trials(where, iterations).all()
    others: list[Task] = [
        ("copy", copy),
        *([("first use", once_more)] if where.is_real else []),
        *((f"host time, {n}", functools.partial(hosted, n)) for n in LENGTHS),
    ]
    tasks = [*kernel_tasks, *trial_tasks, *others]
    found = [_tried(task) for task in progress(tasks)]
    kernels, trials = found[: len(kernel_tasks)], found[len(kernel_tasks) : len(kernel_tasks) + len(trial_tasks)]
    trials += [result for result in found[len(kernels) + len(trial_tasks) :] if result.words]
    figures = {"GB/s": rates, "host microseconds of a step, by tensors": host, "proof at AdamW's first use": first}
    return kernels, trials, figures


def _tried(task: Task) -> Result:
    name, run = task
    try:
        return run()
    except Exception as error:
        return Result(name, f"{type(error).__name__}: {' '.join(str(error).split())[:500]}")


@contextlib.contextmanager
def _progress(say: Say) -> Iterator[Callable[[list[Task]], Iterator[Task]]]:
    """What goes over the tasks: with a bar where tqdm is installed, else with a line for each tenth."""
    try:
        tqdm: Any = importlib.import_module("tqdm").tqdm
    except ImportError:
        tqdm = None

    def barred(tasks: list[Task]) -> Iterator[Task]:
        with tqdm(tasks, unit="proof", file=sys.stderr, leave=False) as bar:
            for task in bar:
                bar.set_description(task[0])
                yield task

    def plain(tasks: list[Task]) -> Iterator[Task]:
        for k, task in enumerate(tasks):
            if k % 10 == 0:
                say(f"{k} of {len(tasks)}: {task[0]}")
            yield task

    yield plain if tqdm is None else barred


def _record(result: Result) -> dict[str, Any]:
    return {"name": result.name, "wrong": result.words, **result.figures}


def _page(
    facts: dict[str, str], kernels: list[Result], trials: list[Result], speeds: dict[str, Any], timed: bool
) -> Iterator[str]:
    for name, value in facts.items():
        yield f"{name:<16}{value}"
    rates, copy = speeds["GB/s"], speeds["GB/s"].get("copy", 0.0)
    yield ""
    yield f"{'kernel':<20}{'bits compared':>14}  {'GB/s':>7}  {'of a copy':>9}"
    for result in kernels:
        rate = rates.get(result.name, 0.0)
        speed = f"{rate:>7.0f}  {rate / copy:>9.2f}" if timed and rate and copy else f"{'-':>7}  {'-':>9}"
        yield f"{result.name:<20}{result.figures.get('bits', 0):>14,}  {speed}  {'WRONG' if result.words else 'ok'}"
    if timed:
        yield f"{'copy':<20}{'':>14}  {copy:>7.0f}"
    yield ""
    for result in trials:
        bits = result.figures.get("bits", 0)
        yield f"{result.name:<44}{bits:>12,} bits  {'WRONG' if result.words else 'ok'}"
    yield ""
    if timed:
        for length, microseconds in speeds["host microseconds of a step, by tensors"].items():
            yield f"host time of clip and step, {length:>4} tensors  {microseconds:>8.0f} us"
        for milliseconds in speeds["proof at AdamW's first use"].values():
            yield f"proof at AdamW's first use, without compiling  {milliseconds:>6.1f} ms"
