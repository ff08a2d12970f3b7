"""FP16 weights that nothing scales the loss for: one warning, at the first step, that names the line to change."""

from __future__ import annotations

import copy
import logging
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import LBFGS, SGD

import fp16opt.optim
from fp16opt import DynamicLossScaler, GradScaler, MixedPrecisionOptimizer, StaticLossScaler, amp
from fp16opt.engine.missing_scale import WayToScale
from fp16opt.fp16_utils import FP16_Optimizer
from fp16opt.integrations.optimizer_group import OptimizerGroup

pytestmark = pytest.mark.missing_scale


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.DEBUG, logger="fp16opt")
    return caplog


def said(log: pytest.LogCaptureFixture) -> list[str]:
    """What was warned of since the last call."""
    lines = [record.getMessage() for record in log.records if record.levelno >= logging.WARNING]
    log.clear()
    return lines


def weights(*dtypes: torch.dtype) -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(4, dtype=dtype)) for dtype in dtypes or (torch.float16, torch.float32)]


def loss_of(params: list[nn.Parameter]) -> Tensor:
    return torch.stack([param.float().sum() for param in params]).sum()


def train(opt: Any, params: list[nn.Parameter], steps: int = 3, plain: bool = False) -> None:
    for _ in range(steps):
        opt.zero_grad()
        if plain:
            loss_of(params).backward()
        else:
            opt.backward(loss_of(params))
        opt.step()


RELEASED = {"gradient_release": True}
RELEASE = r"Write MixedPrecisionOptimizer\(optimizer, gradient_release=True, loss_scale=1024\.0\)"
WRAPPED = r"Write MixedPrecisionOptimizer\(optimizer, dynamic=True\)"


@pytest.mark.parametrize("plain", [False, True], ids=["opt.backward", "loss.backward"])
@pytest.mark.parametrize(
    "options", [{}, {"master_weights": "split"}, {"master_weights": "none"}, {"fused_step": False}], ids=str
)
def test_one_warning_at_the_first_step(options: dict[str, Any], plain: bool, log: pytest.LogCaptureFixture) -> None:
    params = weights()
    opt = MixedPrecisionOptimizer(SGD(params, lr=0.5), named_parameters=zip("ab", params, strict=True), **options)
    if plain:
        loss_of(params).backward()
    else:
        opt.backward(loss_of(params))
    assert said(log) == []
    opt.step()
    (line,) = said(log)
    assert re.search(rf"^FP16 weights are trained without loss scaling: a\. Small .*\. {WRAPPED}", line)
    assert ("opt.backward(loss) in place of loss.backward()" in line) == plain
    assert "loss_scale=1.0" in line
    train(opt, params, plain=plain)
    train(*copy.deepcopy((opt, params)), plain=plain)
    assert said(log) == []


def test_the_class_path_and_apexs_face_name_their_own_line(log: pytest.LogCaptureFixture) -> None:
    params = weights()
    train(fp16opt.optim.SGD(params, lr=0.5), params, plain=True)
    (line,) = said(log)
    assert re.search(r"Write fp16opt\.optim\.SGD\(\.\.\., dynamic=True\), and opt\.backward", line)
    params = weights()
    train(FP16_Optimizer(SGD(params, lr=0.5)), params)
    (line,) = said(log)
    assert re.search(r"dynamic_loss_scale=True\); or static_loss_scale=1\.0 to say", line)
    params = weights()
    train(FP16_Optimizer(SGD(params, lr=0.5), static_loss_scale=1.0), params)
    assert said(log) == []


def test_amp_names_its_own_line_and_knows_what_the_script_has_written(log: pytest.LogCaptureFixture) -> None:
    """O2 is dynamic by itself, O3 has a scale of 1 by itself."""
    cases: list[tuple[dict[str, Any], bool, int]] = [
        ({"opt_level": "O2"}, False, 0),
        ({"opt_level": "O2", "loss_scale": 1.0}, False, 0),
        ({"opt_level": "O2", "loss_scale": "1"}, False, 0),
        ({"opt_level": "O2", "loss_scale": 64.0}, False, 0),
        ({"opt_level": "O3", "master_weights": True, "loss_scale": 1}, False, 0),
        ({"opt_level": "O3", "master_weights": True}, False, 1),
        ({"opt_level": "O2", "loss_scale": "dynamic"}, True, 1),
    ]
    for options, plain, lines in cases:
        model = nn.Linear(4, 4)
        model, opt = amp.initialize(model, SGD(model.parameters(), lr=0.5), verbosity=0, **options)
        for _ in range(3):
            opt.zero_grad()
            loss = model(torch.ones(1, 4)).float().sum()
            if plain:
                loss.backward()
            else:
                with amp.scale_loss(loss, opt) as scaled:
                    scaled.backward()
            opt.step()
        amp._amp_state.handle._deactivate()
        heard = said(log)
        assert len(heard) == lines, options
        for line in heard:
            assert 'Write amp.initialize(..., loss_scale="dynamic")' in line
            assert "; or loss_scale=1.0 to say" in line
            assert (
                "and `with amp.scale_loss(loss, optimizer) as scaled: scaled.backward()` in place of" in line
            ) == plain


def test_a_trainer_s_words_are_said_of_what_it_wraps(log: pytest.LogCaptureFixture) -> None:
    words = WayToScale("Trainer(scales=True)", "Trainer(scales=False)", "trainer.backward(loss)")
    for options, wanted in (
        ({}, r"Write Trainer\(scales=True\); or Trainer\(scales=False\) to say"),
        (RELEASED, RELEASE),
    ):
        params = weights()
        (opt,) = OptimizerGroup([SGD(params, lr=0.5)], options=options, way_to_scale=words).optimizers
        train(*copy.deepcopy((opt, params)))
        (line,) = said(log)
        assert re.search(wanted, line)
        assert options == {} or "dynamic" not in line
    params = weights()
    (opt,) = OptimizerGroup([SGD(params, lr=0.5)], way_to_scale=words).optimizers
    train(opt, params, plain=True)
    (line,) = said(log)
    assert "scales=True), and trainer.backward(loss) in place of loss.backward(); or" in line


@pytest.mark.parametrize("closes", ["once", "reevaluate"])
def test_closures(closes: str, log: pytest.LogCaptureFixture) -> None:
    params = weights()
    inner = SGD(params, lr=0.5) if closes == "once" else LBFGS(params, lr=0.5)
    opt = MixedPrecisionOptimizer(inner, closure=closes)

    def closure() -> Tensor:
        opt.zero_grad()
        loss = loss_of(params)
        opt.backward(loss)
        return loss

    opt.step(closure)
    (line,) = said(log)
    assert re.search(WRAPPED, line)


def test_several_optimizers_of_a_trainer_that_share_the_default(log: pytest.LogCaptureFixture) -> None:
    params = weights(torch.float16, torch.float16)
    for options, lines in (({}, 2), ({"loss_scale": 1.0}, 0)):
        both = OptimizerGroup([SGD([param], lr=0.5) for param in params], options=options)
        with both.backward(loss_of(params)) as scaled:
            scaled.backward()
        for opt in both.optimizers:
            opt.step()
            opt.zero_grad()
        assert len(said(log)) == lines
        params = weights(torch.float16, torch.float16)


def test_weights_that_train_later(log: pytest.LogCaptureFixture) -> None:
    body, _ = params = weights(torch.float16, torch.float32)
    body.requires_grad_(False)
    opt = MixedPrecisionOptimizer(SGD(params, lr=0.5))
    train(opt, params)
    assert said(log) == []
    body.requires_grad_(True)
    train(opt, params)
    assert len(said(log)) == 1


SILENT: dict[str, tuple[torch.dtype, Callable[[], dict[str, Any]]]] = {
    "dynamic": (torch.float16, lambda: {"dynamic": True}),
    "loss_scale=1.0": (torch.float16, lambda: {"loss_scale": 1.0}),
    "loss_scale": (torch.float16, lambda: {"loss_scale": 64.0}),
    "a scaler of 1": (torch.float16, lambda: {"scaler": StaticLossScaler(1.0)}),
    "a dynamic scaler": (torch.float16, lambda: {"scaler": DynamicLossScaler(init_scale=1.0)}),
    "BF16": (torch.bfloat16, dict),
    "FP32": (torch.float32, dict),
}


@pytest.mark.parametrize("key", SILENT)
def test_silent_where_a_scale_was_given_or_none_is_needed(key: str, log: pytest.LogCaptureFixture) -> None:
    dtype, options = SILENT[key]
    params = weights(dtype, torch.float32)
    plain = dtype != torch.float16
    train(MixedPrecisionOptimizer(SGD(params, lr=0.5), **options()), params, plain=plain)
    assert said(log) == []


def test_silent_where_the_scale_was_set_later_or_loaded(log: pytest.LogCaptureFixture) -> None:
    params = weights()
    opt = MixedPrecisionOptimizer(SGD(params, lr=0.5))
    opt.loss_scale = 8.0
    saved = opt.state_dict()
    train(opt, params)
    other = MixedPrecisionOptimizer(SGD(params, lr=0.5))
    other.load_state_dict(saved)
    train(other, params)
    assert said(log) == []


@pytest.mark.parametrize("unscales", [False, True], ids=["step", "unscale_"])
@pytest.mark.parametrize("kind", [torch.amp.GradScaler, GradScaler], ids=["torch's", "ours"])
def test_silent_under_a_grad_scaler(kind: Any, unscales: bool, log: pytest.LogCaptureFixture) -> None:
    params = weights()
    opt, scaler = MixedPrecisionOptimizer(SGD(params, lr=0.5)), kind("cpu", init_scale=8.0)
    for _ in range(2):
        opt.zero_grad()
        scaler.scale(loss_of(params)).backward()
        if unscales:
            scaler.unscale_(opt)
        scaler.step(opt)
        scaler.update()
    assert said(log) == []


def test_a_step_that_is_skipped_warns_too(log: pytest.LogCaptureFixture) -> None:
    params = weights()
    opt = MixedPrecisionOptimizer(SGD(params, lr=0.5))
    opt.backward(loss_of(params) * float("inf"))
    opt.step()
    assert opt.step_was_skipped
    assert sum("without loss scaling" in line for line in said(log)) == 1
