"""Steps that a GradScaler leaves out, and gradients that stay behind: what the wrapper counts and what it steps."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import LBFGS, SGD

from fp16opt import MixedPrecisionOptimizer
from grad_scaler.pairs import Ours, Theirs, linear_loss, one

SCALERS = pytest.mark.parametrize("cls", [Theirs, Ours], ids=["torch", "fp16opt"])
KINDS = {
    "halves": (torch.float16, torch.bfloat16),
    "mixed": (torch.float16, torch.float32),
    "wide": (torch.float32,),
}
DTYPES = pytest.mark.parametrize("dtypes", KINDS.values(), ids=KINDS.keys())
FUSED = pytest.mark.parametrize("fused", [False, "auto"], ids=["wrapped", "auto"])


def _wrapped(dtypes: Any, fused: Any = "auto", **kwargs: Any) -> tuple[list[Tensor], MixedPrecisionOptimizer]:
    params = [torch.nn.Parameter(torch.zeros(2, dtype=dtype)) for dtype in dtypes]
    return params, MixedPrecisionOptimizer(SGD(params, lr=1.0), fused_step=fused, **kwargs)


def _clear_model(params: list[Tensor], opt: MixedPrecisionOptimizer) -> None:
    for p in params:
        p.grad = None


def _clear_opt(params: list[Tensor], opt: MixedPrecisionOptimizer) -> None:
    opt.zero_grad()


CLEARS = pytest.mark.parametrize("clear", [_clear_model, _clear_opt], ids=["model", "opt"])


@DTYPES
def test_ours_tells_the_wrapper_at_once_and_once(dtypes: Any) -> None:
    params, opt = _wrapped(dtypes)
    scaler = Ours("cpu", init_scale=64.0)
    for count in (1, 2):
        scaler.scale(linear_loss(params, [math.inf] * len(params))).backward()
        scaler.step(opt)
        for _ in range(2):
            assert opt.param_groups[0]["lr"] == 1.0
            assert opt.skipped_steps == count
        assert opt.step_was_skipped
        assert len(opt.overflow_report()) == len(params)
        scaler.update()
        assert opt.skipped_steps == count
        opt.zero_grad()


@SCALERS
@DTYPES
@CLEARS
@FUSED
@pytest.mark.parametrize("last_alone", [True, False])
def test_a_skip_is_counted_when_the_next_gradients_come(
    cls: Any, dtypes: Any, clear: Callable[..., None], fused: Any, last_alone: bool
) -> None:
    """With ``last_alone`` the overflow is in the last parameter only: an FP32 one, where there is one."""
    params, opt = _wrapped(dtypes, fused)
    scaler = cls("cpu", init_scale=64.0)
    for step in range(4):
        grads = [0.5] * len(params)
        if step in (1, 2):
            grads[-1 if last_alone else 0] = math.inf
        scaler.scale(linear_loss(params, grads)).backward()
        scaler.step(opt)
        scaler.update()
        clear(params, opt)
    assert opt.skipped_steps == 2
    assert not opt.step_was_skipped
    assert [p.tolist() for p in params] == [[-1.0, -1.0]] * len(params)


@SCALERS
@FUSED
@pytest.mark.parametrize("unscale", [True, False])
def test_master_gradients_of_an_earlier_iteration_are_gone(cls: Any, fused: Any, unscale: bool) -> None:
    """The FP16 parameter overflows, and then has no gradient: neither it nor its old gradient is part of the step."""
    params, opt = _wrapped(KINDS["mixed"], fused)
    scaler = cls("cpu", init_scale=64.0)
    scaler.scale(linear_loss(params, [math.inf, 0.5])).backward()
    scaler.step(opt)
    scaler.update()
    for _ in range(2):
        _clear_model(params, opt)
        scaler.scale(linear_loss(params[1:], [3.0])).backward()
        if unscale:
            scaler.unscale_(opt)
            assert next(opt.master_params()).grad is None
            assert float(opt.clip_master_grads(math.inf)) == pytest.approx(math.sqrt(18.0))
        scaler.step(opt)
        scaler.update()
        assert not opt.step_was_skipped
    assert opt.skipped_steps == 1
    assert [p.tolist() for p in params] == [[0.0, 0.0], [-6.0, -6.0]]


@FUSED
@pytest.mark.parametrize("way", ["model", "fp32"])
def test_masters_without_a_gradient_are_not_stepped_with_an_old_one(fused: Any, way: str) -> None:
    params, opt = _wrapped(KINDS["halves"], fused, grad_accumulation=way)
    opt.backward(linear_loss(params, [1.0, 1.0]))
    opt.step()
    _clear_model(params, opt)
    opt.backward(linear_loss(params[:1], [1.0]))
    opt.step()
    assert [p.tolist() for p in params] == [[-2.0, -2.0], [-1.0, -1.0]]
    assert [m.grad is None for m in opt.master_params()] == [False, True]


@DTYPES
@pytest.mark.parametrize("clip", [True, False])
def test_gradients_that_are_zeroed_in_place_are_new_after_the_next_backward(dtypes: Any, clip: bool) -> None:
    params, opt = _wrapped(dtypes)
    for _ in range(3):
        linear_loss(params, [1.0] * len(params)).backward()
        if clip:
            opt.clip_master_grads(100.0)
        opt.step()
        for p in params:
            p.grad.zero_()
    assert [p.tolist() for p in params] == [[-3.0, -3.0]] * len(params)


@SCALERS
@DTYPES
def test_clipping_the_model_is_clipping_the_masters(cls: Any, dtypes: Any) -> None:
    results = []
    for clips_model in (True, False):
        params, opt = _wrapped(dtypes)
        scaler = cls("cpu", init_scale=64.0)
        for step in range(3):
            scaler.scale(linear_loss(params, [3.0 + step] * len(params))).backward()
            scaler.unscale_(opt)
            norm = torch.nn.utils.clip_grad_norm_(params if clips_model else list(opt.master_params()), 1.0)
            assert float(norm) == pytest.approx((3.0 + step) * math.sqrt(2.0 * len(params)), rel=1e-6)
            scaler.step(opt)
            scaler.update()
            opt.zero_grad()
        results.append([m.tolist() for m in opt.master_params()])
    assert results[0] == results[1]


@SCALERS
@DTYPES
def test_asking_before_the_clip_changes_neither_norm_nor_step(cls: Any, dtypes: Any) -> None:
    params, opt = _wrapped(dtypes)
    scaler = cls("cpu", init_scale=64.0)
    scaler.scale(linear_loss(params, [3.0] * len(params))).backward()
    assert [m.grad is None for m in opt.master_params()] == [False] * len(params)  # as a logger of norms reads them
    assert opt.skipped_steps == 0
    scaler.unscale_(opt)
    assert not opt.step_was_skipped
    norm = opt.clip_master_grads(1.0)
    assert not opt.step_was_skipped
    scaler.step(opt)
    want = 3.0 * math.sqrt(2.0 * len(params))
    assert float(norm) == pytest.approx(want, rel=1e-6)
    for master in opt.master_params():
        assert master.tolist() == pytest.approx([-3.0 / want] * 2, rel=1e-6)


@DTYPES
@pytest.mark.parametrize("bad", [True, False])
def test_asking_between_a_clip_and_the_step_of_a_plain_backward(dtypes: Any, bad: bool) -> None:
    params, opt = _wrapped(dtypes)
    linear_loss(params, [math.inf if bad else 3.0] * len(params)).backward()
    assert opt.param_groups[0]["lr"] == 1.0
    opt.clip_master_grads(1.0)
    assert opt.step_was_skipped is bad
    opt.step()
    want = 0.0 if bad else -3.0 / math.sqrt(18.0 * len(params))
    assert [p[0].item() for p in opt.master_params()] == pytest.approx([want] * len(params), rel=1e-6)
    assert opt.skipped_steps == bad


@SCALERS
@FUSED
def test_fp32_accumulation_under_a_grad_scaler(cls: Any, fused: Any) -> None:
    params, opt = _wrapped(KINDS["mixed"], fused, grad_accumulation="fp32")
    scaler = cls("cpu", init_scale=64.0)
    for step in range(3):
        for _ in range(2):
            scaler.scale(linear_loss(params, [math.inf if step == 1 else 1.5] * 2)).backward()
        scaler.unscale_(opt)
        norm = opt.clip_master_grads(1.0)
        assert step == 1 or float(norm) == pytest.approx(6.0, rel=1e-6)
        scaler.step(opt)
        scaler.update()
        _clear_model(params, opt)
    assert opt.skipped_steps == 1
    assert [m[0].item() for m in opt.master_params()] == pytest.approx([-1.0, -1.0], rel=1e-5)


def test_the_wrapper_leaves_the_log_to_our_scaler(caplog: pytest.LogCaptureFixture) -> None:
    params, opt = _wrapped(KINDS["mixed"])
    scaler = Ours("cpu", init_scale=64.0)
    with caplog.at_level(logging.INFO, logger="fp16opt"):
        for grad in (0.5, 3e4, 0.5):  # 3e4 is finite, and 64 times that is not, in FP16
            scaler.scale(torch.stack([(param.float() * grad).sum() for param in params]).sum()).backward()
            scaler.step(opt)
            scaler.update()
            opt.zero_grad()
    assert [record.getMessage()[:32] for record in caplog.records] == ["step skipped, loss scale 64 -> 3"]


# Closures


def test_a_closure_that_makes_no_gradients_leaves_the_scale_to_update() -> None:
    """What it leaves was made before the step, so a lower scale and another evaluation would not change it."""
    param, optimizer, scaler = one(math.inf)
    calls: list[int] = []
    assert scaler.step(optimizer, lambda: calls.append(1)) is None
    assert len(calls) == 1
    assert scaler.step_was_skipped(optimizer)
    assert param.tolist() == [1.0, 1.0]
    scaler.update()
    assert scaler.get_scale() == 512.0


@pytest.mark.parametrize("unscale", [True, False])
def test_a_closure_that_makes_no_gradients_steps_those_that_are_there_once_unscaled(unscale: bool) -> None:
    param, optimizer, scaler = one(2.0)
    if unscale:
        scaler.unscale_(optimizer)
    scaler.step(optimizer, lambda: None)
    assert param.tolist() == [0.0, 0.0]


@DTYPES
@pytest.mark.parametrize("optimizer", [SGD, LBFGS])
@pytest.mark.parametrize("hopeless", [True, False])
def test_only_the_step_counts_when_a_closure_overflows(dtypes: Any, optimizer: Any, hopeless: bool) -> None:
    params = [torch.nn.Parameter(torch.zeros(2, dtype=dtype)) for dtype in dtypes]
    opt = MixedPrecisionOptimizer(optimizer(params, lr=0.5))
    scaler = Ours("cpu", init_scale=64.0, min_scale=8.0)

    def closure() -> Tensor:
        opt.zero_grad()
        loss = sum(((p.float() - 1.0) ** 2).sum() for p in params)
        scaler.scale(loss * (math.inf if hopeless or scaler.get_scale() > 16.0 else 1.0)).backward()
        return loss

    for step in range(2):
        scaler.step(opt, closure)
        scaler.update()
        assert opt.skipped_steps == (step + 1 if hopeless else 0)
        assert opt.step_was_skipped is hopeless
    assert all((p == 0.0).all() for p in params) is hopeless
