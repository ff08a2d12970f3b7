"""How much memory does a step need beyond masters, master gradients and optimizer state?

    python benchmarks/memory.py [--quick] [--json PATH] [--threads N]

Three counts, because each sees what the others miss:

- *tensors*: every allocation and release of torch's CPU allocator, as torch's profiler reports them
  (``[memory]`` events), added up in order; the peak of the sum. Exact to the byte.
- *Python objects*: the peak of ``tracemalloc``.
- *the process*: the system's high-water mark of resident memory (``VmHWM``), reset just before the step. It
  also sees what compiled code allocates, in pages. Linux only.

"Beyond" is measured from before wrapping: masters (4 bytes a parameter), master gradients (4) and
AdamW's state (8, and one step counter a tensor) are subtracted from the most that the allocator had given out
between then and the end of the third step. Bookkeeping per tensor remains. Doing it for two sizes with
equally many tensors tells it from memory that grows with the parameters: the slope between the two is the
extra memory per parameter, and should be 0.

A step with a closure should need no more than one without: the slope of the difference between their peaks, for
torch's own step and for the one pass.
"""

from __future__ import annotations

import common  # first: it quiets the worker threads before torch is loaded

# isort: split
import gc
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import routes
from routes import Engine, Problem, ScalerRoute, ThreePasses
from torch.profiler import ProfilerActivity, profile

PER_PARAMETER = 4 + 4 + 8  # master, master gradient, two moments
PER_TENSOR = 4  # AdamW's step counter


@dataclass
class Peak:
    """What steps need at their peak, in bytes.

    Attributes:
        tensors: number of parameter tensors, the same in both sizes.
        elements: of the larger size.
        beyond: from before wrapping to the end of the third step, less masters, master gradients and state.
        step: a later step alone.
        python: Python objects during a step.
        process: growth of resident memory during a step; None where the system does not tell.
        slope: bytes of ``beyond`` and of ``step`` per parameter, the larger; from the two sizes.
    """

    tensors: int
    elements: int
    beyond: int
    step: int
    python: int
    process: int | None
    slope: float


def allocator_peak(work: Callable[[], object]) -> int:
    """The most bytes that torch's CPU allocator had given out during ``work``, counted from its start."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        work()
    results: Any = profiler.profiler
    events = [event for event in results.kineto_results.events() if event.name() == "[memory]"]
    highest = now = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        highest = max(highest, now)
    return highest


def python_peak(work: Callable[[], object]) -> int:
    """The most bytes that Python objects took during ``work``, counted from its start."""
    gc.collect()
    tracemalloc.start()
    try:
        start, _ = tracemalloc.get_traced_memory()
        work()
        return tracemalloc.get_traced_memory()[1] - start
    finally:
        tracemalloc.stop()


def process_peak(work: Callable[[], object]) -> int | None:
    """How far resident memory rose during ``work``, in bytes; None where the system doesn't tell."""
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # resets VmHWM to what is resident now
        before = _status("VmHWM")
        work()
        return _status("VmHWM") - before
    except OSError:
        work()
        return None


def _status(key: str) -> int:
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    value = next(line for line in lines if line.startswith(key + ":"))
    return 1024 * int(value.split()[1])


def step_peak(route: Any) -> int:
    """Bytes of tensors that one step needs, once two steps before it have made everything that lasts."""
    for _ in range(2):
        route.prepare()
        route.run()
    route.prepare()
    return allocator_peak(route.run)


def beyond_what_lasts(problem: Problem) -> int:
    """The allocator's peak from wrapping to the third step, less masters, master gradients and state."""
    made: list[Engine] = []

    def from_the_start() -> None:
        made.append(Engine(problem))
        for _ in range(3):
            made[0].prepare()
            made[0].run()

    total = allocator_peak(from_the_start)
    given = sum(t.numel() * t.element_size() for t in [*made[0].model, *made[0].grads])
    return total - given - PER_PARAMETER * problem.elements - PER_TENSOR * len(problem.weights)


def measure(quick: bool) -> Peak:
    """Measure fp16opt with two sizes that have equally many tensors."""
    widths = (32, 64) if quick else (256, 512)
    small, large = (Problem.make(routes.gpt_shapes(12, width, 10000, 1024)) for width in widths)
    beyond, step = zip(*((beyond_what_lasts(p), step_peak(Engine(p))) for p in (small, large)), strict=True)
    more = large.elements - small.elements
    engine = Engine(large)
    step_peak(engine)
    engine.prepare()
    process = process_peak(engine.run)
    engine.prepare()
    python = python_peak(engine.run)
    slope = max(beyond[1] - beyond[0], step[1] - step[0]) / more
    return Peak(len(large.weights), large.elements, beyond[1], step[1], python, process, slope)


def closure_slope(quick: bool, fused_step: bool | str) -> float:
    """Bytes a parameter that a step with a closure needs beyond one without, from two sizes."""
    widths = (32, 64) if quick else (256, 512)
    problems = [Problem.make(routes.gpt_shapes(12, width, 10000, 1024)) for width in widths]
    more = []
    for problem in problems:
        with_closure = step_peak(Engine(problem, after="closure", fused_step=fused_step))
        more.append(with_closure - step_peak(Engine(problem, after="backward", fused_step=fused_step)))
    return (more[1] - more[0]) / (problems[1].elements - problems[0].elements)


def print_peak(peak: Peak) -> None:
    """The figures in words, with the bookkeeping per tensor."""
    process = "not told by this system" if peak.process is None else f"{peak.process:,} bytes"
    print(f"\nmemory, {peak.tensors} tensors with {peak.elements / 1e6:.1f} million parameters:")
    for what, count in [
        ("beyond masters, master gradients and state, from wrapping to the third step", peak.beyond),
        ("torch's allocator during one step", peak.step),
        ("Python objects during one step", peak.python),
    ]:
        print(f"  {what}: {count:,} bytes ({count / peak.tensors:.0f} a tensor)")
    print(f"  resident memory during one step: {process}")
    print(f"  extra bytes per parameter, from two sizes with equally many tensors: {peak.slope:g}")


def main() -> None:
    arguments = common.parse_arguments(__doc__ or "")
    common.print_versions()
    peak = measure(arguments.quick)
    print_peak(peak)
    problem = Problem.make(routes.gpt_shapes(12, 64 if arguments.quick else 512, 10000, 1024))
    others = [ScalerRoute(problem), ScalerRoute(problem, "foreach"), ThreePasses(problem)]
    peaks = {route.name: step_peak(route) for route in others}
    print("torch's allocator during one step of other routes:")
    for name, value in peaks.items():
        print(f"  {name}: {value:,} bytes ({value / problem.elements:.3f} a parameter)")
    row = common.Row("peak extra memory of a step, bytes per parameter", 0.0, peak.slope, peak.slope, peak.slope)
    rows = [row]
    for fused_step, words in ((False, "general step"), ("auto", "one-pass step")):
        slope = closure_slope(arguments.quick, fused_step)
        rows.append(common.Row(f"{words} with a closure, extra bytes per parameter", 0.001, slope, slope, slope))
    if arguments.quick:
        for row in rows:
            row.bound = None
    common.print_rows(rows)
    common.write_json(arguments.json, peak=vars(peak), others=peaks, rows=rows)


if __name__ == "__main__":
    main()
