"""One-pass steps on a device that nobody waits for, pretended on the CPU with the emulated CUDA kernels."""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pretended
import pytest
import torch
from engine.checks import assert_same, assert_same_bits, snapshot, steps_in_one_pass
from engine.test_device_steps import Run
from torch.optim import SGD, Adam, AdamW, Optimizer

from fp16opt import MixedPrecisionOptimizer

MAKERS: dict[str, Callable[..., Optimizer]] = {
    "AdamW": lambda p: AdamW(p, lr=0.02),
    "amsgrad": lambda p: Adam(p, lr=0.02, weight_decay=0.01, amsgrad=True, fused=True),
    "lr on the device": lambda p: AdamW(p, lr=torch.tensor(0.02), maximize=True, foreach=False),
    "SGD": lambda p: SGD(p, lr=0.02, weight_decay=0.01),
    "momentum": lambda p: SGD(p, lr=0.02, momentum=0.9, nesterov=True),
    "groups": lambda p: AdamW([{"params": p[:2], "lr": 0.1}, {"params": p[2:], "betas": (0.3, 0.9)}], lr=0.02),
}
MIXED = (torch.bfloat16, torch.float16, torch.float32)
by_maker = pytest.mark.parametrize("make", list(MAKERS.values()), ids=list(MAKERS))
by_masters = pytest.mark.parametrize("masters", ["full", "split"])


@pytest.mark.parametrize("dtypes", [torch.float16, MIXED], ids=["float16", "mixed"])
@by_masters
@by_maker
def test_same_bits_as_on_the_host(
    emulated_cuda: ModuleType, monkeypatch: pytest.MonkeyPatch, make: Any, masters: str, dtypes: Any
) -> None:
    wanted = Run(make, dtypes, fused_step=True, master_weights=masters).train(8, (0, 3, 4, 6))
    pretended.pretend(emulated_cuda, monkeypatch)
    count = pretended.counting(monkeypatch)
    got = Run(make, dtypes, fused_step=True, master_weights=masters).train(8, (0, 3, 4, 6))
    steps = sum(count.launches[name] for name in ("adam", "amsgrad", "sgd", "momentum"))
    assert steps >= 4, "the kernels stepped"
    assert got.opt.skipped_steps == wanted.opt.skipped_steps == 4
    assert_same(snapshot(got.opt, got.params, scaler=True), snapshot(wanted.opt, wanted.params, scaler=True))
    for k, (a, b) in enumerate(zip(got.norms, wanted.norms, strict=True)):
        assert_same_bits(a, b, f"norm {k}")


@pytest.mark.parametrize("overflow", [False, True])
@by_masters
@by_maker
def test_nobody_looks_at_the_device(
    emulated_cuda: ModuleType, monkeypatch: pytest.MonkeyPatch, make: Any, masters: str, overflow: bool
) -> None:
    pretended.pretend(emulated_cuda, monkeypatch)
    run = Run(make, fused_step=True, master_weights=masters).train(2, ())
    with pretended.watching(monkeypatch) as seen:
        for _ in range(3):
            run.backward(float("inf") if overflow else 1.0)
            run.finish(0.1)
    assert seen.looks == []
    assert run.opt.step_was_skipped is overflow


def test_one_look_where_a_momentum_buffer_is_new(emulated_cuda: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    pretended.pretend(emulated_cuda, monkeypatch)
    run = Run(MAKERS["momentum"], fused_step=True)
    for factor, looks in ((float("inf"), 1), (1.0, 1), (1.0, 0)):
        run.backward(factor)
        with pretended.watching(monkeypatch) as seen:
            run.finish()
        assert len([look for look in seen.looks if look == "_local_scalar_dense"]) >= looks
        assert bool(seen.looks) is bool(looks)


def test_a_momentum_buffer_that_a_skipped_step_did_not_fill_is_not_kept(
    emulated_cuda: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the step is told on the device to skip."""
    pretended.pretend(emulated_cuda, monkeypatch)
    run = Run(MAKERS["momentum"], fused_step=True)
    for factor in (float("inf"), 1.0):
        run.backward(factor)
        run.finish()
        kept = ["momentum_buffer" in run.opt.state.get(m, {}) for m in run.opt.master_params()]
        assert kept == [factor == 1.0] * len(run.params)


def test_capturable_groups_are_served_where_the_kernels_are(
    emulated_cuda: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = [torch.nn.Parameter(torch.ones(3).half())]
    refused = "group 0 has capturable=True"
    with pytest.raises(ValueError, match=refused):
        MixedPrecisionOptimizer(AdamW(params, capturable=True), fused_step=True)
    pretended.pretend(emulated_cuda, monkeypatch)
    assert steps_in_one_pass(MixedPrecisionOptimizer(AdamW(params, capturable=True), fused_step=True))


def test_betas_that_torch_would_refuse_go_the_general_way(caplog: Any) -> None:
    run = Run(MAKERS["AdamW"], fused_step=True).train(2, ())
    run.opt.param_groups[0]["betas"] = (0.9, 1.0)
    assert "step: general (group 0 has betas of (0.9, 1.0))" in repr(run.opt)


@pytest.mark.parametrize("factor", [1.0, float("inf")])
def test_what_can_not_be_served_at_the_last_moment_is_decided_first(
    emulated_cuda: ModuleType, monkeypatch: pytest.MonkeyPatch, caplog: Any, factor: float
) -> None:
    """A counter of another dtype is found when the lists are made: torch steps, unless it must not."""

    def run() -> Run:
        one = Run(MAKERS["AdamW"], fused_step=True).train(2, ())
        master = next(iter(one.opt.optimizer.state))
        one.opt.optimizer.state[master]["step"] = one.opt.optimizer.state[master]["step"].double()
        one.opt.param_groups[0]["foreach"] = False
        one.backward(factor)
        one.finish()
        return one

    wanted = run()
    pretended.pretend(emulated_cuda, monkeypatch)
    with caplog.at_level(logging.WARNING, logger="fp16opt"):
        got = run()
    assert [r for r in caplog.records if "state 'step' is float64" in r.getMessage()]
    assert got.opt.step_was_skipped is wanted.opt.step_was_skipped is (factor != 1.0)
    assert_same(snapshot(got.opt, got.params), snapshot(wanted.opt, wanted.params))


@pytest.mark.parametrize("overflow", [False, True])
@by_masters
def test_a_written_model_is_taken_without_a_look(
    emulated_cuda: ModuleType, monkeypatch: pytest.MonkeyPatch, caplog: Any, masters: str, overflow: bool
) -> None:
    def written(run: Run) -> Run:
        run.params[1].data[7:8].fill_(3.0)
        run.backward(float("inf") if overflow else 1.0)
        run.finish()
        return run

    wanted = written(Run(MAKERS["AdamW"], fused_step=True, master_weights=masters).train(2, ())).train(2, ())
    caplog.clear()
    pretended.pretend(emulated_cuda, monkeypatch)
    run = Run(MAKERS["AdamW"], fused_step=True, master_weights=masters).train(2, ())
    with pretended.watching(monkeypatch) as seen:
        written(run)
    assert seen.looks == []
    run.train(2, ())
    assert not [r for r in caplog.records if "written" in r.getMessage()], "nobody has looked yet"
    assert_same(snapshot(run.opt, run.params), snapshot(wanted.opt, wanted.params))
    assert not run.opt.step_was_skipped
    assert [r for r in caplog.records if "written" in r.getMessage()], "told when somebody asks"
