"""Steps that a GradScaler skips by not calling the wrapper: none of them may hold up the next ones."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from engine.checks import by_step
from torch.optim import SGD

from fp16opt import MixedPrecisionOptimizer
from grad_scaler.pairs import DRIVEN, Ours, Theirs, linear_loss

HALVES, WIDE = (torch.float16, torch.bfloat16), (torch.float32,)
SCALERS = pytest.mark.parametrize("cls", [Theirs, Ours], ids=["torch", "fp16opt"])
pytestmark = [DRIVEN, by_step]


def _clip(opt: MixedPrecisionOptimizer) -> None:
    opt.clip_master_grads(1.0)


def _clip_by_max(opt: MixedPrecisionOptimizer) -> None:
    opt.clip_master_grads(0.5, norm_type=math.inf)


def _update(opt: MixedPrecisionOptimizer) -> None:
    opt.update_master_grads()


def _run(
    cls: Any, dtypes: Any, between: Any, zero: str, bad: dict[int, int], asks: bool = False, lr: bool = False
) -> tuple[list[float], MixedPrecisionOptimizer, list[bool]]:
    """Steps with gradient 0.5 of two elements each; in step k parameter ``bad[k]`` overflows."""
    params = [torch.nn.Parameter(torch.zeros(2, dtype=dtype)) for dtype in dtypes]
    opt = MixedPrecisionOptimizer(SGD(params, lr=1.0))
    scaler, skipped = cls("cpu", init_scale=64.0), []
    for step in range(6):
        grads = [math.inf if bad.get(step) == i else 0.5 for i in range(len(params))]
        scaler.scale(linear_loss(params, grads)).backward()
        if lr:
            assert opt.param_groups[0]["lr"] == 1.0
        scaler.unscale_(opt)
        between(opt)
        if lr:
            assert opt.param_groups[0]["lr"] == 1.0
        scaler.step(opt)
        scaler.update()
        if asks:
            skipped.append(opt.step_was_skipped)
        if zero == "opt":
            opt.zero_grad()
        else:
            for p in params:
                p.grad = None
    return [m[0].item() for m in opt.master_params()], opt, skipped


@SCALERS
@pytest.mark.parametrize("between", [_clip, _clip_by_max, _update])
@pytest.mark.parametrize("zero", ["opt", "model"])
@pytest.mark.parametrize("dtypes", [HALVES, HALVES + WIDE, WIDE], ids=["halves", "mixed", "wide"])
@pytest.mark.parametrize(("asks", "lr"), [(False, False), (True, False), (False, True), (True, True)])
def test_steps_go_on_after_a_skip(cls: Any, between: Any, zero: str, dtypes: Any, asks: bool, lr: bool) -> None:
    norm = math.sqrt(0.5 * len(dtypes))
    factor = min(1.0, 1.0 / (norm + 1e-6)) if between is _clip else 1.0
    bad = {1: 0, 2: len(dtypes) - 1, 4: 0}
    masters, opt, skipped = _run(cls, dtypes, between, zero, bad, asks, lr)
    assert masters == pytest.approx([-3 * 0.5 * factor] * len(dtypes), rel=1e-5)
    assert opt.skipped_steps == 3
    assert skipped == ([False, True, True, False, True, False] if asks else [])


@SCALERS
def test_a_skip_in_the_last_step_is_counted_when_somebody_asks(cls: Any) -> None:
    _, opt, _ = _run(cls, HALVES, _clip, "model", {5: 0})
    assert opt.step_was_skipped
    assert opt.skipped_steps == 1


@pytest.mark.parametrize("dtypes", [HALVES, HALVES + WIDE, WIDE], ids=["halves", "mixed", "wide"])
def test_a_clip_of_gradients_from_a_plain_backward_survives_a_look_at_param_groups(dtypes: Any) -> None:
    params = [torch.nn.Parameter(torch.zeros(2, dtype=dtype)) for dtype in dtypes]
    opt = MixedPrecisionOptimizer(SGD(params, lr=1.0))
    linear_loss(params, [3.0] * len(params)).backward()
    opt.clip_master_grads(1.0)
    assert opt.param_groups[0]["lr"] == 1.0
    opt.step()
    want = -3.0 / (math.sqrt(9.0 * 2 * len(params)) + 1e-6)
    assert [m[0].item() for m in opt.master_params()] == pytest.approx([want] * len(params), rel=1e-6)


def test_an_own_backward_after_a_plain_one_keeps_its_clip() -> None:
    param = torch.nn.Parameter(torch.zeros(2).half())
    opt = MixedPrecisionOptimizer(SGD([param], lr=1.0))
    linear_loss([param], [1.0]).backward()
    opt.update_master_grads()
    opt.backward(linear_loss([param], [2.0]))
    opt.clip_master_grads(1.0)
    assert opt.param_groups[0]["lr"] == 1.0
    opt.step()
    (master,) = opt.master_params()
    assert master[0].item() == pytest.approx(-3.0 / (math.sqrt(18.0) + 1e-6), rel=1e-6)


def test_finite_gradients_that_nobody_steps_are_no_skip_after_a_clip() -> None:
    param = torch.nn.Parameter(torch.zeros(2).half())
    opt, scaler = MixedPrecisionOptimizer(SGD([param], lr=1.0)), Theirs("cpu", init_scale=64.0)
    for _ in range(2):
        scaler.scale(linear_loss([param], [0.5])).backward()
        scaler.unscale_(opt)
        opt.clip_master_grads(10.0)
        param.grad = None
        scaler.update()
    scaler.scale(linear_loss([param], [0.25])).backward()
    scaler.step(opt)
    assert opt.skipped_steps == 0
    assert param.tolist() == [-0.25] * 2
