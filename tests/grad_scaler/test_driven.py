"""A GradScaler, torch's own or ours, drives MixedPrecisionOptimizer around a 16-bit model by torch's protocol."""

from __future__ import annotations

import logging
import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import SGD

from fp16opt import MixedPrecisionOptimizer
from grad_scaler.pairs import Ours, Theirs, linear_loss, values

SCALE = 64.0
SCALERS = pytest.mark.parametrize("cls", [Theirs, Ours], ids=["torch", "fp16opt"])
EVERY = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


# -- whole loops, against the engine with unscaled gradients -----------------------------------------------------------


def _model() -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(values((3, 2), i).to(dtype)) for i, dtype in enumerate(EVERY)]


def _coefficients(step: int) -> list[Tensor]:
    """Exact in every dtype, also when scaled."""
    return [(values((3, 2), 100 * step + i) * 8).round().float() / 8 for i in range(len(EVERY))]


def _step_alone(scaler: Any, opt: Any) -> None:
    scaler.step(opt)
    scaler.update()


@pytest.mark.parametrize("other", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(
    "options",
    [{}, {"fused_step": False}, {"grad_accumulation": "fp32"}, {"master_weights": "split"}],
    ids=["one pass", "wrapped", "sums", "split"],
)
def test_our_unscale_makes_no_fp32_gradients(other: torch.dtype, options: Any) -> None:
    params = [torch.nn.Parameter(torch.ones(3, dtype=dtype)) for dtype in (torch.float16, other)]
    opt, scaler = MixedPrecisionOptimizer(SGD(params, lr=0.125), **options), Ours("cpu", init_scale=SCALE)
    scaler.scale(linear_loss(params, [1.0, 2.0])).backward()
    gradients = [(p.grad, p.grad.clone()) for p in params]
    scaler.unscale_(opt)
    if options.get("grad_accumulation") != "fp32":
        assert opt.memory().gradients == sum(p.grad.nbytes for p in params)
        for param, (grad, before) in zip(params, gradients, strict=True):
            assert param.grad is grad
            assert torch.equal(grad, before)
    _step_alone(scaler, opt)
    assert [p[0].item() for p in params] == [0.875, 0.75]


# -- skips -------------------------------------------------------------------------------------------------------------


def _logged(cls: Any, clips: bool, caplog: pytest.LogCaptureFixture) -> list[tuple[int, str]]:
    """Of the wrapper: step 0 and step 11 overflow."""
    param = torch.nn.Parameter(torch.zeros(2).half())
    opt = MixedPrecisionOptimizer(SGD([param], lr=1.0), named_parameters=[("w", param)])
    scaler = cls("cpu", init_scale=64.0)
    with caplog.at_level(logging.DEBUG, logger="fp16opt"):
        for step in range(12):
            scaler.scale(linear_loss([param], [math.inf if step in (0, 11) else 0.5])).backward()
            if clips:
                scaler.unscale_(opt)
                opt.clip_master_grads(1.0)
            _step_alone(scaler, opt)
            opt.zero_grad()
    assert not any("dynamic=True" in record.getMessage() for record in caplog.records)
    return [(r.levelno, r.getMessage()) for r in caplog.records if "by the GradScaler" in r.getMessage()]


@pytest.mark.parametrize("clips", [True, False])
@pytest.mark.parametrize(
    ("cls", "levels"), [(Theirs, [logging.INFO, logging.WARNING]), (Ours, [logging.DEBUG] * 2)], ids=["torch", "ours"]
)
def test_a_skip_is_logged_as_the_scaler_s(
    cls: Any, levels: list[int], clips: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Louder after ten steps that were taken; a debug line where the GradScaler has logged it itself."""
    message = "step skipped by the GradScaler: non-finite gradients in w (inf)."
    assert _logged(cls, clips, caplog) == [(level, message) for level in levels]


@SCALERS
def test_schedulers_follow_and_are_not_warned_of(cls: Any, recwarn: pytest.WarningsRecorder) -> None:
    """torch warns of a scheduler that is stepped before its optimizer; ``step`` is called for a skip too."""
    inner = SGD([torch.nn.Parameter(torch.ones(3).half())], lr=1.0)
    early = torch.optim.lr_scheduler.StepLR(inner, 1, gamma=0.5)
    (param,) = inner.param_groups[0]["params"]
    opt, scaler = MixedPrecisionOptimizer(inner), cls("cpu", init_scale=SCALE)
    late = torch.optim.lr_scheduler.StepLR(opt, 1, gamma=0.5)
    for grad, moves in ((math.nan, False), (1.0, True)):
        opt.zero_grad()
        scaler.scale(linear_loss([param], [grad])).backward()
        _step_alone(scaler, opt)
        if cls is Ours:
            assert [scaler.step_scheduler(one) for one in (early, late)] == [moves] * 2
        else:
            early.step()
    assert [str(one.message) for one in recwarn if "lr_scheduler" in str(one.message)] == []


# -- two scales --------------------------------------------------------------------------------------------------------


@SCALERS
def test_released_gradients_are_refused(cls: Any) -> None:
    param = torch.nn.Parameter(torch.ones(3).half())
    opt = MixedPrecisionOptimizer(SGD([param], lr=0.5), gradient_release=True)
    scaler = cls("cpu", init_scale=SCALE)

    def drive() -> None:
        scaler.scale(linear_loss([param], [1.0])).backward()
        scaler.step(opt)

    with pytest.raises((RuntimeError, ValueError), match="gradient_release"):
        drive()
    opt.zero_grad()
    opt.backward(linear_loss([param], [1.0]))
    with pytest.raises((RuntimeError, ValueError), match=r"a GradScaler (can't drive|came to unscale)"):
        scaler.step(opt)
    opt.step()
    assert opt.stats()["steps"] == 1


# -- parameters, state, copies -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("clips", [False, True])
def test_a_scale_that_follows_norms_is_that_of_fp32_parameters(clips: bool) -> None:
    scales: list[list[float]] = []
    for wraps in (False, True):
        params = _model() if wraps else [p.detach().float().requires_grad_() for p in _model()]
        opt: Any = SGD(params, lr=0.125)
        opt = MixedPrecisionOptimizer(opt) if wraps else opt
        scaler = Ours("cpu", init_scale=2.0**10, policy="headroom", growth_interval=2)
        scales.append([])
        for step in range(16):
            opt.zero_grad()
            scaler.scale(linear_loss(params, _coefficients(step))).backward()
            if clips:
                scaler.clip_grad_norm_(opt, 1.0)
            _step_alone(scaler, opt)
            scales[-1].append(scaler.get_scale())
    assert scales[0] == scales[1]
    assert 2.0**10 < scales[0][-1] == scales[0][-5] < 2.0**17, "without norms it grows eight times"
