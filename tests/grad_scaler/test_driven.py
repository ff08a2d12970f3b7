"""A GradScaler, torch's own or ours, drives MixedPrecisionOptimizer around a 16-bit model by torch's protocol."""

from __future__ import annotations

import logging
import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_
from torch.optim import SGD

from fp16opt import MixedPrecisionOptimizer
from grad_scaler.pairs import Ours, Theirs, linear_loss, values

SCALE = 64.0
SCALERS = pytest.mark.parametrize("cls", [Theirs, Ours], ids=["torch", "fp16opt"])
HALVES, MIXED, WIDE = (torch.float16, torch.bfloat16), (torch.float16, torch.float32), (torch.float32,) * 2
DTYPES = pytest.mark.parametrize("dtypes", [HALVES, MIXED, WIDE], ids=["halves", "mixed", "wide"])
MODES = pytest.mark.parametrize(
    "options",
    [{}, {"fused_step": False}, {"grad_accumulation": "fp32"}, {"master_weights": "split"}],
    ids=["one pass", "wrapped", "sums", "split"],
)
EVERY = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class Driven:
    """Two parameters of ones, the wrapper around SGD with momentum, a GradScaler; without ``options`` no wrapper."""

    def __init__(self, dtypes: tuple[torch.dtype, ...], cls: Any, options: dict[str, Any] | None) -> None:
        self.params = [torch.nn.Parameter(torch.ones(3, dtype=dtype)) for dtype in dtypes]
        self.opt: Any = SGD(self.params, lr=0.125, momentum=0.5)
        if options is not None:
            self.opt = MixedPrecisionOptimizer(self.opt, **options)
        self.scaler = cls("cpu", init_scale=SCALE, growth_interval=1000)

    @property
    def is_wrapped(self) -> bool:
        return isinstance(self.opt, MixedPrecisionOptimizer)

    @property
    def masters(self) -> list[Tensor]:
        return list(self.opt.master_params()) if self.is_wrapped else list(self.params)

    def backward(self, first: float | None, second: float | None) -> None:
        terms = zip(self.params, (first, second), strict=True)
        self.scaler.scale(torch.stack([(p.float() * c).sum() for p, c in terms if c is not None]).sum()).backward()

    def step(self) -> None:
        self.scaler.step(self.opt)
        self.scaler.update()

    def values(self) -> list[float]:
        return [p[0].item() for p in self.params]


# -- whole loops, against the engine with unscaled gradients -----------------------------------------------------------


def _model() -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(values((3, 2), i).to(dtype)) for i, dtype in enumerate(EVERY)]


def _coefficients(step: int) -> list[Tensor]:
    """Exact in every dtype, also when scaled."""
    return [(values((3, 2), 100 * step + i) * 8).round().float() / 8 for i in range(len(EVERY))]


def _step_alone(scaler: Any, opt: Any) -> None:
    scaler.step(opt)
    scaler.update()


@pytest.mark.parametrize("dtypes", [HALVES, MIXED], ids=["halves", "mixed"])
@MODES
def test_our_unscale_makes_no_fp32_gradients(dtypes: Any, options: Any) -> None:
    side = Driven(dtypes, Ours, options)
    side.backward(1.0, 2.0)
    gradients = [(p.grad, p.grad.clone()) for p in side.params]
    side.scaler.unscale_(side.opt)
    if options.get("grad_accumulation") != "fp32":
        assert side.opt.memory().gradients == sum(p.grad.nbytes for p in side.params)
        for param, (grad, before) in zip(side.params, gradients, strict=True):
            assert param.grad is grad
            assert torch.equal(grad, before)
    side.step()
    assert side.values() == [0.875, 0.75]


# -- clips and edits ---------------------------------------------------------------------------------------------------


@SCALERS
@DTYPES
@MODES
def test_master_gradients_that_are_read_before_unscaling_are_unscaled_with_the_others(
    cls: Any, dtypes: Any, options: Any
) -> None:
    def play(side: Driven) -> list[list[float]]:
        side.backward(0.5, 2.0)
        read = [m.grad.tolist() for m in side.masters]
        side.scaler.unscale_(side.opt)
        read += [m.grad.tolist() for m in side.masters]
        clip_grad_norm_(side.masters, 1.0)
        side.step()
        return read

    plain, mine = Driven(WIDE, Theirs, None), Driven(dtypes, cls, options)
    assert play(mine) == play(plain)
    assert [m.tolist() for m in mine.masters] == [p.tolist() for p in plain.params]


@pytest.mark.parametrize("norm_type", [2.0, math.inf])
@DTYPES
def test_ours_clips_the_wrapper_s_masters(dtypes: Any, norm_type: float) -> None:
    side = Driven(dtypes, Ours, {})
    for k in range(2):
        side.backward(3.0, 4.0)
        wanted = 4.0 if norm_type == math.inf else 5.0 * math.sqrt(3.0)
        assert float(side.scaler.clip_grad_norm_(side.opt, wanted / 2, norm_type)) == pytest.approx(wanted, rel=1e-6)
        assert [m.grad[0].item() for m in side.masters] == pytest.approx([1.5, 2.0], rel=1e-5)
        side.step()
        assert float(side.opt.optimizer.state[side.masters[0]]["momentum_buffer"][0]) == pytest.approx(1.5 + 0.75 * k)
        side.opt.zero_grad()


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
