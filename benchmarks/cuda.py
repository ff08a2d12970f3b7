"""How fast are the CUDA kernels, and whole steps with them, on the card at hand?

    python benchmarks/cuda.py [--quick] [--json PATH] [--rounds N] [--models 350M 1.3B small]

Rows: unscale with check and norm, and masters to FP16, as shares of the card's own copy bandwidth; whole steps (clip
and step) against GradScaler with clip_grad_norm_(foreach=True) and torch's fused AdamW on FP32 parameters: by torch's
fused AdamW on the masters, in one pass, and in one pass with split masters and 8 bits of state; kernels launched in a
step besides the wrapped optimizer's; host time of a step with 1,000 tensors; a step whose state lies on the host as a
share of copies over the link, both ways at once.
Results are checked before they are timed. Times are those of CUDA events behind work that keeps the device busy, as a
backward does, until the host has queued what it can; host times those of the call alone, with a device that has nothing
else to do. Contenders take turns, ratios are taken within a round. The JSON says card, driver, versions and command.
Without a CUDA device it says so and does nothing.
"""

from __future__ import annotations

import common  # first: it quiets the worker threads before torch is loaded

# isort: split
import argparse
import gc
import itertools
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import routes
import torch
from torch import Tensor

from fp16opt import DynamicLossScaler, MixedPrecisionOptimizer, kernels
from fp16opt.kernels import CallCache, CastStats, GradStats, cuda_devices

MODELS = {
    "350M": routes.gpt_shapes(24, 1024, 50257, 1024),
    "1.3B": routes.gpt_shapes(24, 2048, 50257, 1024),
    "small": [(64,)] * 1000,
}
QUICK = {"350M": routes.gpt_shapes(2, 64, 500, 64), "small": [(64,)] * 50}
DEVICE = torch.device("cuda")


class Problem:
    """FP16 weights and scaled gradients, made on the device."""

    def __init__(self, shapes: Sequence[tuple[int, ...]]) -> None:
        generator = torch.Generator(DEVICE).manual_seed(0)
        self.elements = sum(torch.Size(shape).numel() for shape in shapes)
        spread = 8.0 * routes.MAX_NORM / self.elements**0.5 * routes.SCALE

        def normal(shape: tuple[int, ...], by: float) -> Tensor:
            return (torch.randn(shape, device=DEVICE, generator=generator) * by).half()

        self.weights = [normal(shape, 0.02) for shape in shapes]
        self.scaled = [normal(shape, spread) for shape in shapes]


class Engine:
    """FP16 weights with masters: stepped by torch's fused AdamW unless ``settings`` say otherwise."""

    def __init__(self, problem: Problem, name: str, **settings: Any) -> None:
        self.problem, self.name = problem, name
        self.model = [torch.nn.Parameter(weight.clone()) for weight in problem.weights]
        self.inner = routes.adamw(self.model)
        scaler = DynamicLossScaler(init_scale=routes.SCALE)
        self.opt = MixedPrecisionOptimizer(self.inner, scaler=scaler, **{"fused_step": False, **settings})
        self.loss = torch.zeros((), device=DEVICE)
        self.norm = self.loss

    def prepare(self) -> None:
        self.opt.zero_grad()
        self.opt.scale_loss(self.loss)
        for param, grad in zip(self.model, self.problem.scaled, strict=True):
            param.grad = grad

    def run(self) -> None:
        self.norm = self.opt.clip_master_grads(routes.MAX_NORM)
        self.opt.step()

    def weights(self) -> list[Tensor]:
        return list(self.opt.master_params())


class Scaler:
    """FP32 weights, torch.amp.GradScaler."""

    name = "GradScaler"

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.params = [torch.nn.Parameter(weight.float()) for weight in problem.weights]
        self.grads = [torch.empty_like(param) for param in self.params]
        self.opt = routes.adamw(self.params)
        self.scaler = torch.amp.GradScaler("cuda", init_scale=routes.SCALE)
        self.loss = torch.zeros((), device=DEVICE)
        self.norm = self.loss

    def prepare(self) -> None:
        self.opt.zero_grad()
        self.scaler.scale(self.loss)
        torch._foreach_copy_(self.grads, self.problem.scaled)
        for param, grad in zip(self.params, self.grads, strict=True):
            param.grad = grad

    def run(self) -> None:
        self.scaler.unscale_(self.opt)
        self.norm = torch.nn.utils.clip_grad_norm_(self.params, routes.MAX_NORM, foreach=True)
        self.scaler.step(self.opt)
        self.scaler.update()

    def weights(self) -> list[Tensor]:
        return list(self.params)


class Call:
    """A contender made of one function."""

    def __init__(self, name: str, run: Callable[[], object]) -> None:
        self.name, self.run = name, run

    def prepare(self) -> None:
        """Nothing to bring back."""


CYCLES = 8e9  # to sleep for each second of the host's: at 2 GHz, four times as long


def timed(contender: Any, cycles: int) -> tuple[float, float]:
    """(seconds on the device, seconds of the host's call), behind a device that sleeps first.

    So a training loop meets it, whose backward the device is still at. The step is queued meanwhile, and the host's
    time does not count as the device's, unless the host waits for the device in the middle of the step.
    """
    contender.prepare()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    if cycles:
        torch.cuda._sleep(cycles)
    begin.record()
    start = time.perf_counter()
    contender.run()
    host = time.perf_counter() - start
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / 1e3, host


def on_device(contenders: Sequence[Any], rounds: int, warmup: int = 5) -> dict[str, tuple[list[float], list[float]]]:
    """By contender and round: seconds on a device that was busy before; seconds of the host's call with one that was
    not."""
    times: dict[str, tuple[list[float], list[float]]] = {c.name: ([], []) for c in contenders}
    for number in range(warmup + rounds):
        first = number % len(contenders)
        for contender in [*contenders[first:], *contenders[:first]]:
            _, host = timed(contender, 0)
            device, _ = timed(contender, int(CYCLES * host))
            if number >= warmup:
                times[contender.name][0].append(device)
                times[contender.name][1].append(host)
    return times


def row(what: str, bound: float | None, values: Sequence[float], at_least: bool = False) -> common.Row:
    """The median over rounds, and the quartiles."""
    return common.Row(what, bound, statistics.median(values), *common.quartiles(values), at_least=at_least)


def check_kernels(problem: Problem, outs: list[Tensor], stats: GradStats, params: list[Tensor]) -> None:
    """Exits unless the kernels gave what torch's operations give."""
    exact = all(torch.equal(o, g.float() / routes.SCALE) for o, g in zip(outs, problem.scaled, strict=True))
    square = sum(out.double().square().sum() for out in outs)
    # Squares of FP16 values are summed by eights in float32: seven additions, each within half a unit of 2**-23.
    near = abs(float(stats.norm) ** 2 / float(square) - 1.0) < 7 * 2.0**-24
    rounded = all(torch.equal(p, o.half()) for p, o in zip(params, outs, strict=True))
    if not (exact and near and rounded and float(stats.found_inf) == 0.0):
        raise SystemExit(f"the kernels are wrong: exact {exact}, norm {near}, rounded {rounded}")


def kernel_rows(name: str, problem: Problem, rounds: int) -> list[common.Row]:
    """Both passes as shares of the speed at which the card copies as many bytes."""
    outs = [torch.empty_like(grad, dtype=torch.float32) for grad in problem.scaled]
    params = [torch.empty_like(grad) for grad in problem.scaled]
    stats = GradStats.allocate(len(outs), DEVICE)
    cast = CastStats.allocate(len(outs), DEVICE)
    up, down = CallCache(), CallCache()
    inverse = torch.tensor(1.0 / routes.SCALE, device=DEVICE)
    copied = torch.empty(2, 3 * problem.elements, dtype=torch.uint8, device=DEVICE)  # 3 read, 3 written
    contenders = [
        Call("copy", lambda: copied[1].copy_(copied[0])),
        Call("unscale", lambda: kernels.multi_tensor_unscale(problem.scaled, outs, inverse, stats, cache=up)),
        Call("cast", lambda: kernels.multi_tensor_cast(outs, params, cast, cache=down)),
    ]
    for contender in contenders:
        contender.run()
    check_kernels(problem, outs, stats, params)
    times = on_device(contenders, rounds)
    rows = []
    for what, words in (("unscale", "unscale, check and norm"), ("cast", "masters to FP16")):
        shares = [a / b for a, b in zip(times["copy"][0], times[what][0], strict=True)]
        rows.append(row(f"{name}: {words}, share of copy bandwidth", 0.9, shares, at_least=True))
    return rows


def launched(run: Callable[[], object]) -> int:
    """Kernels that ``run`` puts on the device; copies and fills by the driver are not kernels."""
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run()
        torch.cuda.synchronize()
    events = [e for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    names = [e.name for e in events if not getattr(e, "is_user_annotation", False) and "#" not in e.name]
    kernels_run = sum(not name.startswith(("Memcpy", "Memset")) for name in names)
    if not kernels_run:
        raise SystemExit("the profiler reports no kernels: it needs CUPTI, and no other profiler at the time")
    return kernels_run


def step_alone(inner: torch.optim.Optimizer, found_inf: Tensor) -> None:
    """The wrapped optimizer's step as the engine calls it: handed the flag, it launches more than without."""
    holder: Any = inner
    holder.grad_scale, holder.found_inf = None, found_inf
    try:
        type(inner).step(inner)  # a wrapped optimizer's own attribute raises
    finally:
        del holder.grad_scale, holder.found_inf


def launched_besides(engine: Engine) -> float:
    """Kernels of the engine's step besides those of the wrapped optimizer's."""
    engine.prepare()
    all_of_it = launched(engine.run)
    found = torch.zeros((), device=DEVICE)
    return float(all_of_it - launched(lambda: step_alone(engine.inner, found)))


def free_memory() -> None:
    """Gives back what nothing holds any more: an engine's hooks refer back to it, and it holds gigabytes."""
    gc.collect()
    torch.cuda.empty_cache()


ENGINES: dict[str, dict[str, Any]] = {
    "torch's AdamW": {},
    "one pass": {"fused_step": True},
    "one pass, split masters": {"fused_step": True, "master_weights": "split"},
    "one pass, split masters, 8-bit state": {
        "fused_step": True,
        "master_weights": "split",
        "optimizer_state": "8bit",
    },
}


def check_routes(engine: Engine, scaler: Scaler) -> None:
    """Exits unless both routes hold the same weights and saw the same norm.

    Weights may be a hundredth of a learning rate apart; with 8 bits of state, which round the moments, a tenth of one
    in the mean of each tensor.
    """
    rounded = "8-bit" in engine.name
    pairs = zip(engine.weights(), scaler.weights(), strict=True)
    apart = max(float(d.mean() if rounded else d.max()) for d in ((a - b).detach().abs() for a, b in pairs))
    parted = abs(float(engine.norm) / float(scaler.norm) - 1) > 1e-3
    if parted or not apart <= (0.1 if rounded else 0.01) * routes.LR or engine.opt.skipped_steps:
        norms = f"norms {float(engine.norm)}, {float(scaler.norm)}"
        raise SystemExit(f"{engine.name}: the two routes part: weights by {apart:g}, {norms}")


def step_rows(name: str, problem: Problem, rounds: int) -> list[common.Row]:
    """Whole steps, of each engine beside the GradScaler route alone, as memory has it: time on the device, and for many
    small tensors the host's time, and the launches."""
    which, bound, words = (1, 1.0, "host time of a step") if name == "small" else (0, 0.85, "whole step")
    rows, milliseconds = [], []
    for what, settings in ENGINES.items():
        scaler, engine = Scaler(problem), Engine(problem, what, **settings)
        for contender, _ in itertools.product((scaler, engine), range(3)):
            contender.prepare()
            contender.run()
        check_routes(engine, scaler)
        times = on_device([scaler, engine], rounds)
        ratios = [a / b for a, b in zip(times[what][which], times[Scaler.name][which], strict=True)]
        milliseconds += [1e3 * seconds for seconds in times[Scaler.name][0]]
        rows.append(row(f"{name}: {words}, {what} / GradScaler, clip, fused AdamW", bound, ratios))
        if not settings:
            rows.append(row(f"{name}: kernels in a step besides AdamW's", 8, [launched_besides(engine)]))
        del scaler, engine, contender
        free_memory()
    if name != "small":
        rows.append(row(f"{name}: GradScaler's step, ms", None, milliseconds))
    return rows


class Link:
    """As many bytes as a step with state on the host moves, copied both ways at once."""

    name = "the link, both ways"

    def __init__(self, size: int) -> None:
        self.up, self.down = (torch.empty(size, dtype=torch.uint8, device=DEVICE) for _ in range(2))
        self.hosts = [torch.empty(size, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        self.streams = [torch.cuda.Stream() for _ in range(2)]

    def prepare(self) -> None:
        """Nothing to bring back."""

    def run(self) -> None:
        now = torch.cuda.current_stream()
        for stream in self.streams:
            stream.wait_stream(now)
        with torch.cuda.stream(self.streams[0]):
            self.up.copy_(self.hosts[0], non_blocking=True)
        with torch.cuda.stream(self.streams[1]):
            self.hosts[1].copy_(self.down, non_blocking=True)
        for stream in self.streams:
            now.wait_stream(stream)


def offload_rows(name: str, problem: Problem, rounds: int) -> list[common.Row]:
    """A step whose state lies on the host, beside copies of as many bytes; and beside the same step on the card."""
    settings: dict[str, Any] = {"fused_step": True, "master_weights": "split24", "optimizer_state": "8bit"}
    there = Engine(problem, "state on the host", offload="cpu", **settings)
    here = Engine(problem, "state on the card", **settings)
    for contender, _ in itertools.product((there, here), range(3)):
        contender.prepare()
        contender.run()
    if not all(map(torch.equal, there.model, here.model)):
        raise SystemExit(f"{name}: weights of a step with state on the host are others")
    link = Link(there.opt.memory().host)
    times = on_device([link, there, here], rounds)
    seconds = {which: times[which][0] for which in times}
    shares = [a / b for a, b in zip(seconds[link.name], seconds[there.name], strict=True)]
    slower = [a / b for a, b in zip(seconds[there.name], seconds[here.name], strict=True)]
    what = f"{name}: step with state on the host, split24 and 8 bits"
    return [
        row(f"{what}, share of the link's speed both ways", 0.85, shares, at_least=True),
        row(f"{what} / the same on the card", None, slower),
        row(f"{what}, ms", None, [1e3 * each for each in seconds[there.name]]),
    ]


def driver() -> str:
    """The version of NVIDIA's driver, as its own tool says it."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    except (OSError, subprocess.SubprocessError):
        return "unknown: nvidia-smi gives no answer"
    return done.stdout.split("\n")[0].strip()


def card() -> dict[str, str]:
    """What the figures depend on besides the versions."""
    properties = torch.cuda.get_device_properties(DEVICE)
    return {
        "card": properties.name,
        "compute capability": f"{properties.major}.{properties.minor}",
        "memory, GiB": f"{properties.total_memory / 2**30:.1f}",
        "driver": driver(),
        "CUDA of torch": str(torch.version.cuda),
        "kernels": cuda_devices.served(0).words,
    }


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS), help="sizes (default: all)")


def main() -> None:
    """Check, measure, print."""
    arguments = common.parse_arguments(__doc__ or "", add_options)
    if not torch.cuda.is_available():
        print("no CUDA device: nothing to measure")
        return
    if kernels.backend(DEVICE) != "cuda":
        raise SystemExit("the compiled CUDA kernels do not serve this device: see python -m fp16opt")
    rows = []
    for name in arguments.models:
        shapes = QUICK.get(name) if arguments.quick else MODELS[name]
        if shapes is None:
            continue
        problem = Problem(shapes)
        if name != "small":
            rows += kernel_rows(name, problem, arguments.rounds)
        rows += step_rows(name, problem, arguments.rounds)
        if name != "small":
            rows += offload_rows(name, problem, arguments.rounds)
            free_memory()
        del problem
        free_memory()
    print("  ".join(f"{key} {value}" for key, value in card().items()))
    common.print_versions()
    common.print_rows(rows)
    command = shlex.join(["python", *sys.argv])
    common.write_json(arguments.json, command=command, card=card(), rows=rows)


if __name__ == "__main__":
    main()
