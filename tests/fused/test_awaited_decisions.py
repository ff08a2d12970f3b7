"""Steps whose decision the host has to know, on a device that runs behind it: they are queued before the host waits."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pretended
import pytest
import torch
from engine.checks import Problem, assert_same, parameters, snapshot

from fp16opt import DynamicLossScaler, LossScaleError, MixedPrecisionOptimizer, kernels
from fp16opt.engine.one_pass import KernelCall

SHAPES = ((), (300,), (3, 0), (33, 65))
KINDS: dict[str, dict[str, Any]] = {
    "8bit": {"optimizer_state": "8bit"},
    "split24": {"master_weights": "split24"},
    "split24 and 8bit": {"master_weights": "split24", "optimizer_state": "8bit"},
    "limited skips": {},
    "limited skips, torch's step": {"fused_step": False},
}


class Run:
    """A small training run whose overflows are planned, with a write to the model between its steps."""

    def __init__(self, kind: str) -> None:
        self.params = parameters(SHAPES, torch.float16)
        self.problem = Problem(self.params)
        limit = 3 if kind.startswith("limited") else None
        self.scaler = DynamicLossScaler(init_scale=2.0**10, growth_interval=3, max_consecutive_skips=limit)
        inner = torch.optim.AdamW(self.params, lr=0.02, fused=True)
        self.opt = MixedPrecisionOptimizer(inner, scaler=self.scaler, **KINDS[kind])

    def backward(self, overflow: bool = False) -> None:
        self.opt.zero_grad()
        self.opt.backward(self.problem.loss(self.params, float("inf") if overflow else 1.0))
        self.opt.clip_master_grads(0.5)

    def train(self, overflows: tuple[int, ...] = (2, 3, 6)) -> Run:
        for k in range(8):
            if k in (2, 5):
                self.params[3].data.view(-1)[7:9] = 3.0
            self.backward(k in overflows)
            self.opt.step()
        return self


@pytest.mark.parametrize("kind", list(KINDS))
def test_same_bits_and_counts_as_on_the_host(
    emulated_cuda: ModuleType, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    wanted = Run(kind).train()
    pretended.pretend(emulated_cuda, monkeypatch)
    got = Run(kind).train()
    assert (
        (got.opt.skipped_steps, got.opt.outcome.steps_taken)
        == (wanted.opt.skipped_steps, wanted.opt.outcome.steps_taken)
        == (3, 5)
    )
    assert_same(snapshot(got.opt, got.params, scaler=True), snapshot(wanted.opt, wanted.params, scaler=True))


@pytest.mark.parametrize("overflow", [False, True])
@pytest.mark.parametrize("kind", ["8bit", "split24", "limited skips"])
def test_the_host_waits_once_behind_the_launch(
    emulated_cuda: ModuleType, monkeypatch: pytest.MonkeyPatch, kind: str, overflow: bool
) -> None:
    pretended.pretend(emulated_cuda, monkeypatch)
    run = Run(kind)
    for _ in range(2):
        run.backward()
        run.opt.step()
    run.backward(overflow)
    native, launched = pretended.counting(monkeypatch), []
    read = kernels.AwaitedFlag.read
    monkeypatch.setattr(kernels.AwaitedFlag, "read", lambda flag: launched.append(set(native.launches)) or read(flag))
    with pretended.watching(monkeypatch) as seen:
        run.opt.step()
    assert seen.looks[0] == "_local_scalar_dense"
    assert len(seen.looks) == 1 or overflow, "a skip is told in the log, with names"
    assert len(launched) == 1
    assert any("adam" in name for name in launched[0]), launched
    assert run.opt.step_was_skipped is overflow


@pytest.mark.parametrize("overflow", [False, True])
@pytest.mark.parametrize("kind", list(KINDS))
def test_a_step_that_is_stopped_while_it_waits_is_closed(
    emulated_cuda: ModuleType, monkeypatch: pytest.MonkeyPatch, kind: str, overflow: bool
) -> None:
    wanted = Run(kind).train((2, 3, 6) if overflow else (3, 6))
    pretended.pretend(emulated_cuda, monkeypatch)
    run, read, calls = Run(kind), kernels.AwaitedFlag.read, []

    def stopped(flag: kernels.AwaitedFlag) -> bool:
        calls.append(flag)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return read(flag)

    monkeypatch.setattr(kernels.AwaitedFlag, "read", stopped)
    step = run.opt.step

    def goes_on() -> None:
        try:
            step()
        except KeyboardInterrupt:
            assert run.opt.outcome.steps_taken + run.opt.skipped_steps == 2, "the step counts"

    run.opt.step = goes_on  # type: ignore[method-assign,assignment]
    run.train((2, 3, 6) if overflow else (3, 6))
    assert len(calls) > 2
    assert_same(snapshot(run.opt, run.params, scaler=True), snapshot(wanted.opt, wanted.params, scaler=True))


def test_a_skip_that_is_stopped_between_two_kernels_is_not_told_as_a_step(
    emulated_cuda: ModuleType, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pretended.pretend(emulated_cuda, monkeypatch)
    params = [torch.nn.Parameter(torch.ones(3).half()), torch.nn.Parameter(torch.ones(3))]
    scaler = DynamicLossScaler(1024.0, max_consecutive_skips=9)
    opt = MixedPrecisionOptimizer(torch.optim.AdamW(params, lr=0.1), scaler=scaler)
    opt.backward(sum((param.float().sum() for param in params), start=torch.zeros(())) * float("inf"))
    call, calls = KernelCall.run, []

    def stopped(*given: Any) -> None:
        calls.append(given)
        if len(calls) == 2:
            raise KeyboardInterrupt
        call(*given)

    monkeypatch.setattr(KernelCall, "run", stopped)
    with pytest.raises(KeyboardInterrupt):
        opt.step()
    assert (opt.skipped_steps, opt.outcome.steps_taken, opt.loss_scale) == (1, 0, 512.0)
    assert [param.tolist() for param in params] == [[1.0] * 3] * 2
    assert "in the middle" not in caplog.text


def test_a_written_model_is_no_error_in_a_step_that_is_skipped(
    emulated_cuda: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretended.pretend(emulated_cuda, monkeypatch)
    weight = torch.nn.Parameter(torch.ones(64, 64).half())
    opt = MixedPrecisionOptimizer(
        torch.optim.AdamW([weight]), loss_scale=2.0, optimizer_state="8bit", on_model_write="error"
    )
    for factor in (1.0, float("inf")):
        opt.zero_grad()
        opt.backward(weight.float().sum() * factor)
        if factor > 1.0:
            weight.data[0] = 2.0
        opt.step()
    assert opt.skipped_steps == 1


@pytest.mark.parametrize("settings", [{"optimizer_state": "8bit"}, {"master_weights": "split24"}], ids=str)
def test_momentum_is_awaited_from_its_first_step_on(
    emulated_cuda: ModuleType, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]
) -> None:
    pretended.pretend(emulated_cuda, monkeypatch)
    weight = torch.nn.Parameter(torch.ones(64, 64).half())
    opt = MixedPrecisionOptimizer(torch.optim.SGD([weight], lr=0.1, momentum=0.9), loss_scale=2.0, **settings)
    read, reads, found = kernels.AwaitedFlag.read, [], []
    monkeypatch.setattr(kernels.AwaitedFlag, "read", lambda flag: reads.append(flag) or read(flag))
    for _ in range(3):
        opt.zero_grad()
        opt.backward(weight.float().mean())
        opt.step()
        found.append(len(reads))
    assert found == [1, 2, 3]


def test_too_many_skips_raise_at_the_step_that_is_one_too_many(
    emulated_cuda: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretended.pretend(emulated_cuda, monkeypatch)
    run = Run("limited skips")
    before = [param.detach().clone() for param in run.params]
    for _ in range(2):
        run.backward(True)
        run.opt.step()
    run.backward(True)
    with pytest.raises(LossScaleError, match="3 steps in a row"):
        run.opt.step()
    assert all(torch.equal(param, was) for param, was in zip(run.params, before, strict=True))
