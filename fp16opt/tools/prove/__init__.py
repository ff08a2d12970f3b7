"""``python -m fp16opt prove``: every CUDA kernel and every kind of step on the card at hand, against the CPU's bits."""

from __future__ import annotations

import argparse
import functools
import json
import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ... import __version__
from ...kernels import native
from ...kernels.cuda_rows import KERNELS
from ...kernels.planted import expected
from ...kernels.proof import prove
from .trials import ITERATIONS, Result, Trials
from .where import Card, NoCard

__all__ = ["add_arguments", "answer"]

Say = Callable[[str], None]
Task = tuple[str, Callable[[], Result]]
_WOULD = (
    f"It would prove {len(KERNELS)} kernels on planted numbers, and make {ITERATIONS} steps in every mode, in a CUDA "
    "graph and on two streams, and compare all bits with the CPU's."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Those of the command line."""
    parser.add_argument("--json", type=Path, metavar="PATH", help="write what was found there, to attach to an issue")
    parser.add_argument("--device", type=int, default=0, metavar="N", help="the number of the card")
    parser.add_argument("--iterations", type=int, default=ITERATIONS, help=f"steps of each mode: {ITERATIONS}")


def answer(given: argparse.Namespace, say: Say) -> int:
    """Prove everything.

    Args:
        given: the parsed arguments.
        say: prints a line.

    Returns:
        0 where every bit is the CPU's; 1 where one is not, or something raised; 2 where there is no card.
    """
    try:
        where = Card(given.device)
    except NoCard as error:
        say(f"fp16opt prove: {error}. {_WOULD}")
        return 2
    began, logger = time.perf_counter(), logging.getLogger("fp16opt")
    level = logger.level
    logger.setLevel(logging.ERROR)  # steps are skipped on purpose
    facts = {"fp16opt": __version__, "the CPU's side": native.status(), **where.facts()}
    try:
        kernels, trials = _work(where, given.iterations, say)
    finally:
        logger.setLevel(level)
    seconds = round(time.perf_counter() - began, 1)
    wrong = [result for result in (*kernels, *trials) if result.words]
    for line in _page(facts, kernels, trials):
        say(line)
    for result in wrong:
        say(f"WRONG  {result.name}: {result.words}")
    bits = sum(result.figures.get("bits", 0) for result in (*kernels, *trials))
    say(f"{len(kernels) + len(trials)} proofs, {bits:,} bits compared, {len(wrong)} wrong, {seconds} s")
    if given.json is not None:
        content = {
            "command": "python -m fp16opt prove",
            "facts": facts,
            "seconds": seconds,
            "wrong": len(wrong),
            "kernels": [_record(result) for result in kernels],
            "steps": [_record(result) for result in trials],
        }
        given.json.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return 1 if wrong else 0


def _work(where: Card, iterations: int, say: Say) -> tuple[list[Result], list[Result]]:
    """Do everything, one task after the other, with a line for each ten: (kernels, steps)."""

    def kernel(name: str) -> Result:
        with where.serving():
            found = prove((name,), where.device.index or 0, where.place())[name]
            where.note({name: found})
        return Result(name, found.words, {"bits": found.bits})

    for name in KERNELS:  # the CPU's side, where nothing is pretended yet
        expected(name)
    kernels: list[Task] = [(name, functools.partial(kernel, name)) for name in KERNELS]
    tasks, found = [*kernels, *Trials(where, iterations).all()], []
    for k, task in enumerate(tasks):
        if k % 10 == 0:
            say(f"{k} of {len(tasks)}: {task[0]}")
        found.append(_tried(task))
    return found[: len(kernels)], found[len(kernels) :]


def _tried(task: Task) -> Result:
    name, run = task
    try:
        return run()
    except Exception as error:
        return Result(name, f"{type(error).__name__}: {' '.join(str(error).split())[:500]}")


def _record(result: Result) -> dict[str, Any]:
    return {"name": result.name, "wrong": result.words, **result.figures}


def _page(facts: dict[str, str], kernels: list[Result], trials: list[Result]) -> Iterator[str]:
    for name, value in facts.items():
        yield f"{name:<16}{value}"
    for what, results in (("kernel", kernels), ("steps", trials)):
        yield ""
        yield f"{what:<44}{'bits compared':>14}"
        for result in results:
            yield f"{result.name:<44}{result.figures.get('bits', 0):>14,}  {'WRONG' if result.words else 'ok'}"
    yield ""
