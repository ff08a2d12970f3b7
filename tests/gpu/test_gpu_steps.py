"""Whole steps on the GPU: nothing waits, graphs replay them, several devices agree, the CPU gives the same.

Most step by the wrapped optimizer's own step; test_gpu_fused.py has the one-pass steps."""

from __future__ import annotations

import copy
import gc
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from engine.checks import assert_same_bits, normal
from torch import Tensor, nn

import fp16opt.optim
from fp16opt import DynamicLossScaler, GradScaler, MixedPrecisionOptimizer
from fp16opt.kernels import cuda_devices

pytestmark = pytest.mark.gpu
FUSED: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.02, fused=True),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.02, fused=True),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.02, fused=True),
}
OTHERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "foreach SGD": lambda p: torch.optim.SGD(p, lr=0.02, momentum=0.9, foreach=True),
    "plain RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.02, foreach=False),
}
SHAPES = ((), (70,), (3, 0), (33, 65), (300, 500))


def targets_of(params: list[nn.Parameter]) -> list[Tensor]:
    """Made ahead: a copy to the device waits for it, and can't be captured."""
    return [normal(param.shape, torch.float32, 40 + k).to(param.device) for k, param in enumerate(params)]


def linear_problem(params: list[nn.Parameter], targets: list[Tensor], factors: Tensor) -> Tensor:
    """Gradients that are the same bits on every device: no sums of products."""
    total = torch.zeros((), device=factors.device)
    for param, target in zip(params, targets, strict=True):
        total = total + (param.float() * target).flatten().mul(factors).sum().to(factors.device)
    return total


def scaler() -> DynamicLossScaler:
    """One whose first scale is low enough for every finite loss here."""
    return DynamicLossScaler(init_scale=2.0**10, growth_interval=2)


def train(device: torch.device, make: Any, steps: int = 6, bad: tuple[int, ...] = (2, 3), **settings: Any) -> Any:
    params = [nn.Parameter(normal(shape, torch.float16, k).to(device)) for k, shape in enumerate(SHAPES)]
    targets = targets_of(params)
    opt = MixedPrecisionOptimizer(make(params), scaler=scaler(), fused_step=False, **settings)
    for k in range(steps):
        opt.zero_grad()
        factor = torch.tensor(float("inf") if k in bad else 1.0 / (k + 1), device=device)
        opt.backward(linear_problem(params, targets, factor))
        opt.clip_master_grads(0.5)
        opt.step()
    return params, opt


@pytest.mark.parametrize("make", [*FUSED.values(), *OTHERS.values()], ids=[*FUSED, *OTHERS])
def test_gradients_scale_and_skips_are_those_of_the_cpu(device: torch.device, make: Any) -> None:
    params, opt = train(device, make)
    _, there = train(torch.device("cpu"), make)
    assert opt.skipped_steps == there.skipped_steps == 2
    assert opt.loss_scale == there.loss_scale
    for k, (a, b) in enumerate(zip(opt.master_params(), there.master_params(), strict=True)):
        # torch's own steps use other formulas on the two; gradients, which are ours, are equal in bits.
        torch.testing.assert_close(a.detach().cpu(), b.detach(), rtol=1e-5, atol=1e-6)
        if b.grad is not None:
            assert_same_bits(a.grad.cpu(), b.grad, f"master gradient {k}")
    for param, master in zip(params, opt.master_params(), strict=True):
        assert torch.equal(param, master.half())


@pytest.mark.parametrize("accumulation", ["model", "fp32"])
@pytest.mark.parametrize("make", list(FUSED.values()), ids=list(FUSED))
def test_nothing_waits(device: torch.device, make: Any, accumulation: str) -> None:
    params = [nn.Parameter(normal(shape, torch.float16, k).to(device)) for k, shape in enumerate(SHAPES)]
    targets = targets_of(params)
    opt = MixedPrecisionOptimizer(make(params), scaler=scaler(), grad_accumulation=accumulation, fused_step=False)
    weights = [torch.full((), value, device=device) for value in (1.0, float("inf"), 0.5, 1.0, 2.0)]
    for k, weight in enumerate(weights):
        opt.zero_grad()
        loss = linear_problem(params, targets, weight)
        torch.cuda.set_sync_debug_mode("error" if k else "default")
        try:
            opt.scale_loss(loss).backward()
            opt.update_master_grads()
            opt.clip_master_grads(0.1)
            opt.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert opt.skipped_steps == 1


@pytest.mark.parametrize("make", list(OTHERS.values()), ids=list(OTHERS))
def test_one_wait_where_the_optimizer_cannot_skip(device: torch.device, make: Any) -> None:
    params = [nn.Parameter(normal(shape, torch.float16, k).to(device)) for k, shape in enumerate(SHAPES)]
    targets = targets_of(params)
    opt = MixedPrecisionOptimizer(make(params), scaler=scaler(), fused_step=False)
    one = torch.ones((), device=device)
    for k in range(3):
        opt.zero_grad()
        opt.backward(linear_problem(params, targets, one))
        opt.clip_master_grads(0.1)
        torch.cuda.set_sync_debug_mode("warn" if k else "default")
        try:
            with warnings.catch_warnings(record=True) as noted:
                warnings.simplefilter("always")
                opt.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        if k:
            assert len([w for w in noted if "synchronizing" in str(w.message)]) == 1


class Loop:
    """One training step over static inputs, as CUDA graphs want it."""

    dtype = torch.float16

    def __init__(self, device: torch.device) -> None:
        torch.manual_seed(0)
        self.params = [nn.Parameter(normal(shape, torch.float16, k).to(device)) for k, shape in enumerate(SHAPES)]
        self.params = [nn.Parameter(param.detach().to(self.dtype)) for param in self.params]
        self.targets = targets_of(self.params)
        self.inner = torch.optim.AdamW(self.params, lr=torch.tensor(0.02), fused=True, capturable=True)
        self.factor = torch.ones((), device=device)
        self.wrap()

    def wrap(self) -> None:
        self.scaler = DynamicLossScaler(init_scale=2.0**10, growth_interval=2, hysteresis=1)
        self.opt = MixedPrecisionOptimizer(self.inner, scaler=self.scaler, fused_step=False)

    def step(self) -> None:
        self.opt.zero_grad(set_to_none=True)
        self.opt.scale_loss(linear_problem(self.params, self.targets, self.factor)).backward()
        self.opt.update_master_grads()
        self.opt.clip_master_grads(0.5)
        self.opt.step()

    def state(self) -> list[Tensor]:
        inner = [value for state in self.opt.state.values() for value in state.values() if isinstance(value, Tensor)]
        tensors = [*self.params, *self.opt.master_params(), *inner, self.scaler.scale, self.scaler.growth_tracker]
        return [tensor.detach().clone() for tensor in tensors]

    def outcome(self) -> tuple[Any, ...]:
        return self.opt.step_was_skipped, self.opt.skipped_steps, self.opt.overflow_report()


class Face(Loop):
    """The same with fp16opt.GradScaler and FP32 weights."""

    dtype = torch.float32

    def wrap(self) -> None:
        self.face = GradScaler(self.factor.device.type, init_scale=2.0**10, growth_interval=2)

    def step(self) -> None:
        self.inner.zero_grad(set_to_none=True)
        self.face.scale(linear_problem(self.params, self.targets, self.factor)).backward()
        self.face.unscale_(self.inner)
        self.face.clip_grad_norm_(self.inner, 0.5)
        self.face.step(self.inner)
        self.face.update()

    def state(self) -> list[Tensor]:
        inner = [value for state in self.inner.state.values() for value in state.values() if isinstance(value, Tensor)]
        scale, tracker = self.face._scale, self.face._growth_tracker
        assert scale is not None
        assert tracker is not None
        return [tensor.detach().clone() for tensor in (*self.params, *inner, scale, tracker)]

    def outcome(self) -> tuple[Any, ...]:
        face = self.face
        return face.step_was_skipped(self.inner), face.skipped_steps, face.overflow_report(self.inner)


@pytest.mark.parametrize("kind", [Loop, Face])
def test_no_step_waits(device: torch.device, kind: type[Loop]) -> None:
    loop = kind(device)
    for k in range(4):
        loop.factor.fill_(float("inf") if k == 2 else 1.0)
        torch.cuda.set_sync_debug_mode("error" if k else "default")
        try:
            loop.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert loop.outcome()[:2] == (False, 1)


def graph_of_a_step(device: torch.device, loop: Any) -> torch.cuda.CUDAGraph:
    """After three steps on a side stream, as torch wants them before a capture, the graph of the fourth."""
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        for _ in range(3):
            loop.step()
    torch.cuda.current_stream(device).wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loop.step()
    return graph


@pytest.mark.parametrize("kind", [Loop, Face])
def test_a_captured_step_replays_what_eager_steps_do(device: torch.device, kind: type[Loop]) -> None:
    eager, captured = kind(device), kind(device)
    plan = [1.0, 0.5, float("inf"), 0.25, 1.0, float("nan"), float("inf"), 2.0, 1.0]
    for _ in range(3):
        eager.step()
    graph = graph_of_a_step(device, captured)
    for k, factor in enumerate(plan):
        eager.factor.fill_(factor)
        captured.factor.fill_(factor)
        eager.step()
        graph.replay()
        for n, (a, b) in enumerate(zip(captured.state(), eager.state(), strict=True)):
            assert_same_bits(a.cpu(), b.cpu(), f"step {k}, tensor {n}")
        assert captured.outcome() == eager.outcome(), f"step {k}"
    assert eager.outcome()[1] == 3


@pytest.mark.parametrize("kind", [Loop, Face])
def test_eager_steps_go_on_after_a_capture(device: torch.device, kind: type[Loop]) -> None:
    eager, captured = kind(device), kind(device)
    for loop in (eager, captured):
        for _ in range(3):
            loop.step()
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured.step()
    for _ in range(4):
        graph.replay()
        eager.step()
        captured.step()
        eager.step()
    for n, (a, b) in enumerate(zip(captured.state(), eager.state(), strict=True)):
        assert_same_bits(a.cpu(), b.cpu(), f"tensor {n}")


def test_tables_of_a_capture_are_given_back(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    module, kept = cuda_devices.kernels_on(0), set()
    assert module is not None
    keep, give_back = module.keep, module.give_back

    def noted(content: bytes, size: int) -> int:
        kept.add(address := keep(content, size))
        return address

    def given_back(address: int) -> None:
        kept.discard(address)
        give_back(address)

    monkeypatch.setattr(module, "keep", noted)
    monkeypatch.setattr(module, "give_back", given_back)
    loop = Loop(device)
    for _ in range(3):
        loop.step()
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loop.step()
    assert kept, "the graph reads them"
    graph.replay()
    torch.cuda.synchronize(device)
    del graph, loop
    gc.collect()
    assert not kept


@pytest.mark.card
def test_few_kernels_are_launched(device: torch.device) -> None:
    """The count that the pretended device gives, on the real one."""
    loop = Loop(device)
    loop.inner = loop.opt.optimizer  # what steps the masters
    for _ in range(3):
        loop.step()
    loop.opt.zero_grad()
    loop.opt.scale_loss(linear_problem(loop.params, loop.targets, loop.factor)).backward()
    kernels = launches(lambda: (loop.opt.update_master_grads(), loop.opt.clip_master_grads(0.5), loop.opt.step()))
    loop.inner.grad_scale, loop.inner.found_inf = None, torch.zeros((), device=device)  # type: ignore[attr-defined]
    theirs = launches(lambda: type(loop.inner).step(loop.inner))  # its instance's own raises: it is wrapped
    assert theirs, "the profiler sees kernels"
    assert len(kernels) - len(theirs) <= 8, kernels


def launches(run: Callable[[], object]) -> list[str]:
    """The kernels that ``run`` puts on the device."""
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run()
        torch.cuda.synchronize()
    events = [e for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    names = [e.name for e in events if not getattr(e, "is_user_annotation", False)]
    return [name for name in names if "#" not in name and not name.startswith(("Memcpy", "Memset"))]


def test_a_written_model_is_taken_and_told_when_somebody_asks(device: torch.device, caplog: Any) -> None:
    params = [nn.Parameter(torch.ones(1000, device=device).half()) for _ in range(3)]
    opt = MixedPrecisionOptimizer(torch.optim.SGD(params, lr=0.0, fused=True), loss_scale=8.0)
    targets, zero = targets_of(params), torch.zeros((), device=device)
    for k in range(4):
        opt.zero_grad()
        if k == 1:
            params[1].data[5] = 3.0
        opt.backward(linear_problem(params, targets, zero))
        opt.step()
    assert params[1][5].item() == 3.0
    assert not opt.step_was_skipped
    assert [r for r in caplog.records if "written" in r.message and "param 1" in r.message]


@pytest.mark.card
@pytest.mark.parametrize("others", ["cpu", "cuda:1"])
@pytest.mark.parametrize("overflowing", [0, 1])
@pytest.mark.parametrize("fused_step", [False, "auto"])
def test_devices_agree(overflowing: int, others: str, fused_step: bool | str) -> None:
    """An overflow on any of them skips the step on all, and the norm is that of all."""
    if others == "cuda:1" and torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    params = [nn.Parameter(torch.ones(300, device=where).half()) for where in ("cuda:0", others)]
    inner = torch.optim.AdamW(params, lr=0.1, fused=True)
    opt = MixedPrecisionOptimizer(inner, dynamic=True, fused_step=fused_step)
    before = [copy.deepcopy(param.detach()) for param in params]
    for factor in (1.0, float("inf"), 1.0):
        opt.zero_grad()
        losses = [(p.float() * (factor if k == overflowing else 1.0)).sum() * 2.0**-8 for k, p in enumerate(params)]
        opt.backward(losses[0] + losses[1].to("cuda:0"))
        norm = float(opt.clip_master_grads(1.0))
        opt.step()
        same = [torch.equal(param, old) for param, old in zip(params, before, strict=True)]
        assert same == [factor != 1.0] * 2
        assert opt.step_was_skipped is (factor != 1.0)
        if factor != 1.0:
            assert [o.index for o in opt.overflow_report()] == [overflowing]
        else:
            assert norm == pytest.approx(2.0**-8 * 600**0.5, rel=1e-6)
        before = [copy.deepcopy(param.detach()) for param in params]
    assert opt.skipped_steps == 1
    assert torch.cuda.current_device() == 0


@pytest.mark.card
@pytest.mark.skipif(shutil.which("compute-sanitizer") is None, reason="compute-sanitizer is not installed")
@pytest.mark.parametrize("tool", ["memcheck", "racecheck", "synccheck"])
def test_under_the_sanitizer(tool: str) -> None:
    here = Path(__file__).parent
    command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "9", sys.executable, "-m", "pytest", "-q"]
    command += ["-p", "no:cacheprovider", str(here / "test_gpu_kernels.py"), "-k", "same_bits and (1- or 2-)"]
    done = subprocess.run(command, cwd=here.parents[1], capture_output=True, text=True, check=False, timeout=540)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


@pytest.mark.parametrize("masters", ["full", "split"])
def test_an_optimizer_by_class_follows_a_model_that_is_moved(device: torch.device, masters: str) -> None:
    """Made on the CPU, before the model is on its device, as kohya's scripts and Lightning's CLI make it."""
    runs = []
    for early in (True, False):
        params = [nn.Parameter(normal(shape, torch.float16, k)) for k, shape in enumerate(SHAPES)]
        opt: MixedPrecisionOptimizer | None = None
        if early:
            opt = fp16opt.optim.AdamW(params, lr=0.02, dynamic=True, master_weights=masters)
        for param in params:
            param.data = param.data.to(device)
        if opt is None:
            opt = MixedPrecisionOptimizer(torch.optim.AdamW(params, lr=0.02), dynamic=True, master_weights=masters)
        targets = targets_of(params)
        for _ in range(3):
            opt.zero_grad()
            opt.backward(sum((p.float() - t).square().sum() for p, t in zip(params, targets, strict=True)))  # type: ignore[arg-type]
            opt.step()
        assert {master.device for master in opt.master_params()} == {params[0].device}
        runs.append([param.detach() for param in params])
    for one, other in zip(*runs, strict=True):
        assert_same_bits(one, other, "weight")
