"""Steps on a device that nobody waits for, pretended on the CPU: what is looked at and counted, and when it is told.

The wrapped optimizer steps itself here; tests/fused/test_fused_device.py has the one-pass steps."""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pretended
import pytest
import torch
from torch.nn import Parameter

from engine.checks import Problem, assert_same, assert_same_bits, parameters, snapshot
from fp16opt import DynamicLossScaler, MixedPrecisionOptimizer, kernels

SHAPES = ((), (70,), (3, 0), (33, 65), (5,))
FUSED: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.02, fused=True),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.02, weight_decay=0.01, fused=True),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.02, fused=True),
}


class Run:
    """A small training run whose overflows are planned."""

    def __init__(
        self, make: Callable[..., torch.optim.Optimizer], dtypes: Any = torch.float16, **settings: Any
    ) -> None:
        self.params = parameters(SHAPES, dtypes)
        self.problem = Problem(self.params)
        self.scaler = DynamicLossScaler(init_scale=2.0**10, growth_interval=3, hysteresis=2)
        settings.setdefault("fused_step", False)
        self.opt = MixedPrecisionOptimizer(make(self.params), scaler=self.scaler, **settings)
        self.norms: list[torch.Tensor] = []

    def backward(self, factor: float = 1.0) -> None:
        self.opt.zero_grad()
        loss = self.problem.loss(self.params, factor)
        self.opt.scale_loss(loss).backward()

    def finish(self, max_norm: float = 0.5) -> None:
        self.opt.update_master_grads()
        self.norms.append(self.opt.clip_master_grads(max_norm).clone())
        self.opt.step()

    def train(self, steps: int = 8, overflows: tuple[int, ...] = (2, 3, 6)) -> Run:
        for k in range(steps):
            self.backward(float("inf") if k in overflows else 1.0)
            self.finish(0.5 if k % 2 else 1e6)
        return self


@pytest.mark.parametrize("dtypes", [torch.float16, (torch.bfloat16, torch.float16, torch.float32)])
@pytest.mark.parametrize("accumulation", ["model", "fp32"])
@pytest.mark.parametrize("make", list(FUSED.values()), ids=list(FUSED))
def test_same_bits_as_on_the_host(
    emulated_cuda: ModuleType, monkeypatch: pytest.MonkeyPatch, make: Any, accumulation: str, dtypes: Any
) -> None:
    wanted = Run(make, dtypes, grad_accumulation=accumulation).train()
    pretended.pretend(emulated_cuda, monkeypatch)
    got = Run(make, dtypes, grad_accumulation=accumulation).train()
    assert got.opt.skipped_steps == wanted.opt.skipped_steps == 3
    assert_same(snapshot(got.opt, got.params, scaler=True), snapshot(wanted.opt, wanted.params, scaler=True))
    for k, (a, b) in enumerate(zip(got.norms, wanted.norms, strict=True)):
        assert_same_bits(a, b, f"norm {k}")


def test_skips_are_counted_where_no_kernel_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pretended.who_waits(), "is_host", lambda device: False)
    monkeypatch.setattr(kernels.backends, "compiled_for", lambda device: None)
    run = Run(FUSED["AdamW"]).train()
    assert run.opt.skipped_steps == 3
    assert run.opt.step_was_skipped is False


@pytest.mark.parametrize("policy", ["refresh", "ignore"])
@pytest.mark.parametrize("overflow", [False, True])
@pytest.mark.parametrize("make", list(FUSED.values()), ids=list(FUSED))
def test_nobody_looks_at_the_device(
    emulated_cuda: ModuleType, monkeypatch: pytest.MonkeyPatch, make: Any, overflow: bool, policy: str
) -> None:
    pretended.pretend(emulated_cuda, monkeypatch)
    run = Run(make, on_model_write=policy).train(2, ())
    with pretended.watching(monkeypatch) as seen:
        for _ in range(3):
            run.backward(float("inf") if overflow else 1.0)
            run.finish(0.1)
    assert seen.looks == []
    assert run.opt.step_was_skipped is overflow
    with pretended.watching(monkeypatch) as seen:
        assert run.opt.loss_scale > 0
    assert seen.looks, "the harness sees looks"


def test_one_look_where_the_optimizer_cannot_skip(emulated_cuda: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    pretended.pretend(emulated_cuda, monkeypatch)
    run = Run(lambda p: torch.optim.SGD(p, lr=0.02, momentum=0.9, foreach=True)).train(2, ())
    run.backward()
    with pretended.watching(monkeypatch) as seen:
        run.finish()
    assert seen.looks == ["_local_scalar_dense"]


def test_own_parameters_accumulate_without_a_look(emulated_cuda: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    pretended.pretend(emulated_cuda, monkeypatch)
    run = Run(FUSED["AdamW"], (torch.float16, torch.float32)).train(1, ())

    def twice() -> None:
        run.opt.zero_grad()
        for _ in range(2):
            run.opt.scale_loss(run.problem.loss(run.params)).backward()
            run.opt.update_master_grads()
        run.finish()

    twice()
    with pretended.watching(monkeypatch) as seen:
        twice()
    assert seen.looks == []


WRITES: dict[str, Callable[[Parameter], Any]] = {
    "data": lambda p: p.data.view(-1)[7:9].fill_(3.0),
    "copy": lambda p: p.detach().view(-1)[7:9].copy_(torch.tensor([3.0, 3.0])),
}


ASKING: dict[str, Callable[[MixedPrecisionOptimizer], Any]] = {
    "step_was_skipped": lambda opt: opt.step_was_skipped,
    "overflow_report": lambda opt: opt.overflow_report(),
    "state_dict": lambda opt: opt.state_dict(),
}


@pytest.mark.parametrize("asks", list(ASKING))
@pytest.mark.parametrize("when", ["before backward", "before unscaling", "before step"])
@pytest.mark.parametrize("name", list(WRITES))
def test_a_written_model_is_taken_and_told_when_somebody_asks(
    emulated_cuda: ModuleType, monkeypatch: pytest.MonkeyPatch, caplog: Any, name: str, when: str, asks: str
) -> None:
    def written(run: Run) -> Run:
        if when == "before backward":
            WRITES[name](run.params[3])
        run.backward()
        if when == "before unscaling":
            WRITES[name](run.params[3])
        run.opt.update_master_grads()
        if when == "before step":
            WRITES[name](run.params[3])
        run.opt.step()
        return run

    wanted = written(Run(FUSED["AdamW"]).train(2, ()))
    caplog.clear()
    pretended.pretend(emulated_cuda, monkeypatch)
    run = Run(FUSED["AdamW"]).train(2, ())
    with pretended.watching(monkeypatch) as seen:
        written(run)
    assert seen.looks == ["lift_fresh"] * (name == "copy")  # the test's own
    assert_same(snapshot(run.opt, run.params), snapshot(wanted.opt, wanted.params))
    assert not [r for r in caplog.records if "written" in r.message], "nobody has looked yet"
    ASKING[asks](run.opt)
    run.train(3, ())
    ASKING[asks](run.opt)
    told = [r.message for r in caplog.records if "written" in r.message]
    assert len(told) == 1
    assert "group 0, param 3" in told[0]
    assert "param 1" not in told[0]


def test_what_is_taken_while_somebody_looks_is_told_to_the_next(
    emulated_cuda: ModuleType, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    """The look waits for the device; a step that is replayed on another stream may take a weight meanwhile."""
    pretended.pretend(emulated_cuda, monkeypatch)
    flags: list[torch.Tensor] = []
    take = kernels.multi_tensor_refresh_masters

    def noted(*args: Any, **kwargs: Any) -> None:
        flags.append(args[4])
        take(*args, **kwargs)

    monkeypatch.setattr(kernels, "multi_tensor_refresh_masters", noted)
    run = Run(FUSED["AdamW"]).train(2, ())
    WRITES["data"](run.params[3])
    run.train(1, ())
    tolist = torch.Tensor.tolist

    def waiting(self: torch.Tensor) -> Any:
        found = tolist(self)
        if self.shape == flags[-1].shape and self.dtype == torch.int32 and any(found):
            flags[-1][1] = 1
        return found

    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "tolist", waiting)
        run.opt.overflow_report()
    run.train(1, ())
    run.opt.overflow_report()
    told = [r.message for r in caplog.records if "written" in r.message]
    assert ["param 3" in message for message in told] == [True, False]
    assert ["param 1" in message for message in told] == [False, True]


def test_a_written_master_wins(emulated_cuda: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    pretended.pretend(emulated_cuda, monkeypatch)
    run = Run(FUSED["SGD"]).train(2, ())
    masters = list(run.opt.master_params())
    run.backward(0.0)
    with torch.no_grad():
        run.params[1].fill_(5.0)
        masters[1].fill_(2.0)
    run.opt.step()
    assert run.params[1].tolist() == [2.0] * 70


def test_error_policy_still_refuses(emulated_cuda: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    pretended.pretend(emulated_cuda, monkeypatch)
    run = Run(FUSED["AdamW"], on_model_write="error").train(2, ())
    run.backward()
    run.params[3].data.fill_(1.0)
    with pytest.raises(RuntimeError, match="written behind the optimizer: group 0, param 3"):
        run.opt.step()


def test_masters_that_do_not_fit_are_told_when_somebody_asks(
    emulated_cuda: ModuleType, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    pretended.pretend(emulated_cuda, monkeypatch)
    weight = Parameter(torch.full((3,), 65000.0).half())
    inner = torch.optim.SGD([weight], lr=1.0, fused=True)
    opt = MixedPrecisionOptimizer(inner, named_parameters=[("w", weight)], fused_step=False)
    with caplog.at_level(logging.WARNING, logger="fp16opt"):
        for _ in range(2):
            opt.zero_grad()
            opt.backward(weight.float().sum() * -1000.0)
            opt.step()
            assert not caplog.records
        assert not opt.step_was_skipped
    assert any("too large" in r.message and "w" in r.message for r in caplog.records)


def test_counts_and_masters_stay_where_they_are(emulated_cuda: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """A CUDA graph reads and writes the addresses of its capture."""
    pretended.pretend(emulated_cuda, monkeypatch)
    run = Run(FUSED["AdamW"]).train(3, (0,))
    opt, scaler = run.opt, run.scaler

    def places() -> list[int]:
        counted = [scaler.growth_tracker, scaler.consecutive_skips]
        return [tensor.data_ptr() for tensor in (*counted, *opt.master_params())]

    before = places()
    run.train(6, (1, 2))
    opt.loss_scale = 64.0
    assert places() == before
    assert opt.skipped_steps == 3


@pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="from torch 2.10 on")
@pytest.mark.parametrize("fused_step", ["auto", False])
@pytest.mark.parametrize("asks", [False, True])
def test_a_skip_that_was_asked_for_before_the_device_decides_it_is_counted_once(
    emulated_cuda: ModuleType, monkeypatch: pytest.MonkeyPatch, asks: bool, fused_step: bool | str
) -> None:
    pretended.pretend(emulated_cuda, monkeypatch)
    param = Parameter(torch.zeros(4, dtype=torch.float16))
    opt = MixedPrecisionOptimizer(torch.optim.AdamW([param], lr=0.5, fused=True), fused_step=fused_step)
    grad_scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for factor in (1.0, float("inf"), 1.0):
        opt.zero_grad()
        grad_scaler.scale((param.float() * factor).sum()).backward()
        grad_scaler.unscale_(opt)
        if asks:
            opt.stats()
        grad_scaler.step(opt)
        grad_scaler.update()
    assert opt.skipped_steps == 1
    assert opt.stats()["steps"] == 3
