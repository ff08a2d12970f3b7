"""What do the CUDA kernels cost the host: compiling them at first use, and launching a fused step? No card is needed.

    python benchmarks/cuda_host.py [--quick] [--json PATH] [--rounds N]

Rows: compiling, for one card, the kernels that AdamW launches, with each NVRTC that is there (packages
nvidia-cuda-nvrtc-cu12 and nvidia-cuda-nvrtc), once, and taking them from the disk; host time of one `step()` of AdamW
over FP16 weights of 64 elements on a pretended device, whose driver takes launches, runs nothing and, while the clock
runs, notes nothing, and of the kernel's call alone. Times are medians over the rounds.
"""

from __future__ import annotations

import common  # first: it quiets the worker threads before torch is loaded

# isort: split
import functools
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(common.ROOT / "tests"))

import cards

from fp16opt import DynamicLossScaler, MixedPrecisionOptimizer, kernels
from fp16opt.kernels import cubin_cache, cuda_devices, cuda_rows, nvrtc

SIZES = {150: 0.5, 1000: 2.0}  # tensors, and the most milliseconds for a step
CARD = 90


def row(what: str, bound: float | None, values: list[tuple[float, float]]) -> common.Row:
    """The median of wall times, and of processor times, over the rounds."""
    wall, processor = [value[0] for value in values], [value[1] for value in values]
    return common.Row(what, bound, statistics.median(wall), *common.quartiles(wall), statistics.median(processor))


def timed(run: Callable[[], object], scale: float = 1.0) -> tuple[float, float]:
    """(wall time, processor time) of one call, multiplied by ``scale``."""
    began, spent = time.perf_counter(), time.process_time()
    run()
    return (time.perf_counter() - began) * scale, (time.process_time() - spent) * scale


def compile_first(compiler: nvrtc.Nvrtc, to: list[cubin_cache.Cubins]) -> None:
    """Compile what a card's first use does."""
    to.append(cuda_devices.compile_kernels(compiler, CARD, cuda_rows.FIRST))


def compile_rows(rounds: int) -> list[common.Row]:
    """Compiling and loading of the kernels for one card, in seconds."""
    rows = []
    for major in (12, 13):
        try:
            compiler = nvrtc.find([major])
        except nvrtc.NvrtcError as error:
            print(f"not measured: {error}")
            continue
        name = f"NVRTC {compiler.version[0]}.{compiler.version[1]}, sm_{CARD}"
        made: list[cubin_cache.Cubins] = []
        spent = timed(functools.partial(compile_first, compiler, made))
        cubin_cache.store(cuda_rows.digest(), CARD, made[0])
        load = functools.partial(cubin_cache.load, cuda_rows.digest(), CARD, compiler.version)
        cached = [timed(load) for _ in range(rounds)]
        rows.append(row(f"{name}: compiling {len(cuda_rows.FIRST)} kernels, s", 4.0, [spent]))
        rows.append(row(f"{name}: from the disk, s", 0.01, cached))
    return rows


class Training:
    """FP16 weights, their gradients made anew for each step at other addresses."""

    def __init__(self, count: int) -> None:
        self.params = [torch.nn.Parameter(torch.ones(64).half()) for _ in range(count)]
        inner = torch.optim.AdamW(self.params)
        self.opt = MixedPrecisionOptimizer(inner, scaler=DynamicLossScaler(init_scale=2.0**10), fused_step=True)
        self.loss, self.kept = torch.zeros(()), [[torch.ones(64).half() for _ in self.params] for _ in range(2)]

    def prepare(self) -> None:
        """A backward without autograd."""
        self.opt.zero_grad()
        self.opt.scale_loss(self.loss)
        self.kept.reverse()
        for param, grad in zip(self.params, self.kept[0], strict=True):
            param.grad = grad


def step_rows(driver: cards.Driver, count: int, bound: float | None, rounds: int) -> list[common.Row]:
    """A whole step, and the call of its kernel alone, in milliseconds."""
    training, steps, calls = Training(count), [], []
    own = [torch.ones(64) for _ in range(3 * count)]
    lists, counters = (own[::3], [own[1::3], own[2::3]]), [torch.zeros(()) for _ in range(count)]
    options = [kernels.operations.AdamOptions(1e-3, 0.9, 0.999, 1e-8, 0.01, True, False)]
    factors, groups = kernels.operations.Factors(torch.ones(()), torch.ones(())), [0] * count
    cache, stats = kernels.CallCache(), kernels.CastStats.allocate(count, "cpu")

    def call() -> None:
        models = [param.data for param in training.params]
        began[:] = [time.perf_counter(), time.process_time()]
        given = {"steps": counters, "models": models, "stats": stats, "cache": cache}
        kernels.operations.multi_tensor_step("adam", training.kept[0], *lists, options, groups, factors, **given)

    began, launched = [0.0, 0.0], list[str]()
    for number in range(rounds + 3):
        timing = number >= 3
        driver.mute(timing)
        training.prepare()
        driver.noted()
        found = timed(training.opt.step, 1e3)
        launched = launched if timing else driver.noted("cuLaunchKernel")
        call()
        alone = (time.perf_counter() - began[0]) * 1e3, (time.process_time() - began[1]) * 1e3
        if timing:
            steps.append(found)
            calls.append(alone)
        elif not any("fp16opt_adam" in line for line in launched) or len(driver.noted("cuLaunchKernel")) != 1:
            raise SystemExit(f"the step launched something else: {launched}")
    words = f"{count} tensors"
    return [
        row(f"{words}: a fused step, host, ms ({len(launched)} launches)", bound, steps),
        row(f"{words}: of that the kernel's call alone, ms", None, calls),
    ]


def main() -> None:
    """Check, measure, print."""
    arguments = common.parse_arguments(__doc__ or "", rounds=31)
    rounds = 2 if arguments.quick else arguments.rounds
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        os.environ["FP16OPT_CACHE"] = str(Path(folder) / "cache")
        rows = [] if arguments.quick else compile_rows(rounds)
        driver = cards.pretend(cards.build(Path(folder)), patch)
        driver.context(0)
        cards.serve_host_tensors(patch)
        patch.setattr(kernels, "is_host", lambda device: False)
        for count, bound in SIZES.items():
            rows += step_rows(driver, count, None if arguments.quick else bound, rounds)
    common.print_versions()
    common.print_rows(rows)
    common.write_json(arguments.json, rows=rows)


if __name__ == "__main__":
    main()
