"""What the benchmark scripts share: quiet threads, timing of alternating contenders, bounds, tables, JSON.

Import it before torch: OpenMP reads its settings once, when it is loaded.
"""

from __future__ import annotations

import os
import sys

if "torch" in sys.modules:
    raise ImportError("import benchmarks/common.py before torch: OpenMP reads GOMP_SPINCOUNT when it is loaded")
# Worker threads that spin while they wait take the core from the contender that is timed next. Where small tensors are
# timed it is worse to wake them for each: small.py has one thread, says so before it imports this, and leaves OpenMP as
# it is.
if os.environ.get("OMP_NUM_THREADS") != "1":
    os.environ["GOMP_SPINCOUNT"] = "0"
    os.environ["KMP_BLOCKTIME"] = "0"
os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else torch's profiler writes lines of its own between the tables

import argparse
import concurrent.futures
import ctypes
import itertools
import json
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy
import torch

import fp16opt
from fp16opt import kernels

ROOT = Path(__file__).resolve().parents[1]


class Contender(Protocol):
    """One way to do the work that is timed.

    Attributes:
        name: for the tables.
    """

    name: str

    def prepare(self) -> None:
        """Bring everything to the state in which ``run`` starts. Not timed."""

    def run(self) -> object:
        """The work. Timed."""


@dataclass
class Timing:
    """Seconds of one contender, one entry a round.

    Attributes:
        name: of the contender.
        seconds: one entry a round; entry k of all contenders of a call was measured in the same round.
        processor: seconds of processor time in the same rounds, all threads together. Other processes on the
            same cores stretch ``seconds``, and these much less.
    """

    name: str
    seconds: list[float]
    processor: list[float]

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def quartiles(self) -> tuple[float, float]:
        return quartiles(self.seconds)

    @property
    def cores(self) -> float:
        """Processor time / time: how many cores the work had."""
        return statistics.median(a / b for a, b in zip(self.processor, self.seconds, strict=True))


def quartiles(values: Sequence[float]) -> tuple[float, float]:
    """First and third quartile; the value itself where there is only one."""
    if len(values) < 2:
        return values[0], values[0]
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, high


def alternate(contenders: Sequence[Contender], rounds: int, warmup: int = 2) -> dict[str, Timing]:
    """Time the contenders in turns, each round beginning with another one: all meet the same disturbances.

    Args:
        contenders: each is prepared (not timed) and run (timed) once a round.
        rounds: rounds that count.
        warmup: rounds before them that do not.

    Returns:
        Timings by name.
    """
    timings = {contender.name: Timing(contender.name, [], []) for contender in contenders}
    for number in range(warmup + rounds):
        first = number % len(contenders)
        for contender in [*contenders[first:], *contenders[:first]]:
            contender.prepare()
            processor, start = time.process_time(), time.perf_counter()
            contender.run()
            taken, spent = time.perf_counter() - start, time.process_time() - processor
            if number >= warmup:
                timings[contender.name].seconds.append(taken)
                timings[contender.name].processor.append(spent)
    return timings


@dataclass
class Row:
    """One line of the result: a measured figure and the bound that it is held against.

    Attributes:
        what: what was compared with what.
        bound: the figure must not be above it; None where it is given for information.
        value: the figure, usually a ratio of times: the median over rounds of (ours / theirs) within a round.
        low, high: first and third quartile over the rounds.
        processor: the same figure from processor time, for judging how much other processes disturbed it.
        at_least: the figure must not be below the bound instead.
        within: nor may a negative one be further from zero.
    """

    what: str
    bound: float | None
    value: float
    low: float
    high: float
    processor: float | None = None
    at_least: bool = False
    within: bool = False

    @property
    def verdict(self) -> str:
        if self.bound is None:
            return "-"
        value = abs(self.value) if self.within else self.value
        met = value >= self.bound if self.at_least else value <= self.bound
        return "met" if met else "MISSED"


def ratio_row(what: str, bound: float | None, ours: Timing, theirs: Timing, minus: float = 0.0) -> Row:
    """Compare two contenders round by round: a disturbance that lasts longer than a round cancels out.

    Args:
        what: the row's words.
        bound: at most this; None for information.
        ours, theirs: of one :func:`alternate` call.
        minus: subtracted from every ratio; 1.0 gives what ours adds to theirs.
    """
    ratios = [a / b - minus for a, b in zip(ours.seconds, theirs.seconds, strict=True)]
    spent = statistics.median(ours.processor) / statistics.median(theirs.processor) - minus
    return Row(what, bound, statistics.median(ratios), *quartiles(ratios), spent)


class MemoryCopy:
    """A plain copy of one buffer to another, to see what the machine's memory gives to these threads.

    ``memmove`` of one stretch for each thread: it streams past the caches, which ``Tensor.copy_`` does not.

    Args:
        size: bytes of each buffer; should be far larger than the caches.
    """

    name = "memory copy"

    def __init__(self, size: int) -> None:
        self.source = torch.ones(size, dtype=torch.uint8)
        self.target = torch.zeros(size, dtype=torch.uint8)
        count = torch.get_num_threads()
        borders = [size * i // count // 4096 * 4096 for i in range(count)] + [size]
        self.parts = list(itertools.pairwise(borders))
        self.pool = concurrent.futures.ThreadPoolExecutor(count)

    def prepare(self) -> None:
        pass

    def run(self) -> None:
        list(self.pool.map(self._move, self.parts))

    def _move(self, part: tuple[int, int]) -> None:
        first, end = part
        ctypes.memmove(self.target.data_ptr() + first, self.source.data_ptr() + first, end - first)


def print_rows(rows: Sequence[Row]) -> None:
    """The result as a table: figure, spread (quartiles), the same from processor time, bound, verdict."""
    width = max(len(row.what) for row in rows)
    print(f"\n{'row':<{width}}  {'measured':>8}  {'quartiles':>15}  {'cpu time':>8}  {'bound':>7}  verdict")
    for row in rows:
        sign = ">=" if row.at_least else "+-" if row.within else "<="
        bound = "-" if row.bound is None else f"{sign} {row.bound:g}"
        spread = f"{row.low:.3f} - {row.high:.3f}"
        spent = "-" if row.processor is None else f"{row.processor:.3f}"
        print(f"{row.what:<{width}}  {row.value:>8.3f}  {spread:>15}  {spent:>8}  {bound:>7}  {row.verdict}")


def print_timings(timings: Sequence[Timing], elements: int, moved: dict[str, float], bandwidth: float) -> None:
    """Every contender's time, bytes moved per parameter (counted) and share of the copy bandwidth.

    "cores" is processor time / time. Far below the number of threads in large passes, it says that other processes
    had the cores: repeat the run when the machine is quiet.
    """
    width = max(len(timing.name) for timing in timings)
    head = f"{'median ms':>10}  {'quartiles':>17}  {'cores':>5}  {'bytes/param':>11}  {'of copy bandwidth':>17}"
    print(f"\n{'contender':<{width}}  {head}")
    for timing in timings:
        low, high = timing.quartiles
        spread = f"{low * 1e3:.2f} - {high * 1e3:.2f}"
        count, share = "-", "-"
        if timing.name in moved:
            count = f"{moved[timing.name]:g}"
            share = f"{moved[timing.name] * elements / timing.median / bandwidth:.0%}"
        times = f"{timing.median * 1e3:>10.2f}  {spread:>17}  {timing.cores:>5.2f}"
        print(f"{timing.name:<{width}}  {times}  {count:>11}  {share:>17}")


def versions() -> dict[str, str]:
    """What the figures depend on: versions, processor, threads, the kernels in use."""
    return {
        "fp16opt": fp16opt.__version__,
        "kernels": kernels.backend(torch.device("cpu")),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "python": platform.python_version(),
        "processor": _processor(),
        "cores": str(os.cpu_count()),
        "threads": str(torch.get_num_threads()),
        "GOMP_SPINCOUNT": os.environ.get("GOMP_SPINCOUNT", "-"),
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def print_versions() -> None:
    print("  ".join(f"{name} {value}" for name, value in versions().items()))


def write_json(path: str | None, **parts: Any) -> None:
    """Write the versions and ``parts`` to ``path``; nothing where that is None. Dataclasses become dicts."""
    if path is None:
        return
    text = json.dumps({"versions": versions(), **parts}, indent=2, default=_plain)
    Path(path).write_text(text + "\n", encoding="utf-8")


def _plain(value: Any) -> Any:
    if isinstance(value, Row):
        return {**asdict(value), "verdict": value.verdict}
    if isinstance(value, Timing):
        return {**asdict(value), "median": value.median, "quartiles": value.quartiles}
    raise TypeError(f"can't write {type(value).__name__} as JSON")


def parse_arguments(
    description: str, add: Callable[[argparse.ArgumentParser], None] | None = None, rounds: int = 15, threads: int = 2
) -> argparse.Namespace:
    """The options that all benchmark scripts have, and those of ``add``. Sets the number of threads."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small sizes, checks only, no bounds: for CI")
    parser.add_argument("--json", metavar="PATH", help="write the figures there")
    parser.add_argument("--rounds", type=int, default=rounds, help="timed rounds (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=threads, help="torch threads (default: %(default)s)")
    if add is not None:
        add(parser)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    return arguments


def load_oracle() -> Any:
    """The tests' numpy oracle, which shares no code with the library."""
    sys.path.insert(0, str(ROOT / "tests"))
    import oracle

    return oracle
