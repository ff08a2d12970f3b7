"""What torch's GradScaler does not do: empty iterations, bounds and limits, reports, schedulers."""

from __future__ import annotations

import logging
import math
import warnings
from typing import Any

import pytest
import torch
from torch.optim import SGD, AdamW

from fp16opt import LossScaleError
from grad_scaler.pairs import (
    Ours,
    Theirs,
    iteration,
    linear_loss,
    one,
    parameters,
)

# -- iterations without gradients -------------------------------------------------------------------------------------


def test_no_gradients_is_a_no_op_with_one_warning() -> None:
    param = torch.nn.Parameter(torch.ones(2))
    optimizer, scaler = AdamW([param], lr=0.5, weight_decay=0.5), Ours("cpu", growth_interval=1)
    with pytest.warns(UserWarning, match="no parameter of AdamW has a gradient") as caught:  # noqa: PT031
        for _ in range(3):
            scaler.scale(torch.ones(()))
            scaler.unscale_(optimizer)
            assert float(scaler.clip_grad_norm_(optimizer, 1.0)) == 0.0
            assert scaler.step(optimizer) is None
            scaler.update()
    assert len(caught) == 1
    assert param.tolist() == [1.0, 1.0]
    assert not optimizer.state
    assert scaler.get_scale() == 2.0**16
    assert scaler.skipped_steps == 0
    assert not scaler.step_was_skipped(optimizer)


@pytest.mark.filterwarnings("ignore:no parameter of")
def test_one_optimizer_without_gradients_beside_one_with() -> None:
    _param, optimizer, scaler = one(grad=math.inf)
    other = SGD(parameters([(1,)]), lr=1.0)
    scaler.step(other)
    scaler.step(optimizer)
    with pytest.raises(RuntimeError, match="already been called"):
        scaler.step(other)
    scaler.update()
    assert scaler.get_scale() == 512.0


# -- reports and schedulers -------------------------------------------------------------------------------------------


def test_skips_are_counted_and_reported_by_optimizer_and_name() -> None:
    named = {"weight": torch.nn.Parameter(torch.ones(2)), "bias": torch.nn.Parameter(torch.ones(1))}
    first = SGD([{"params": list(named.values()), "param_names": list(named)}], lr=1.0)
    second, scaler = SGD(parameters([(2,), (1,)]), lr=1.0), Ours("cpu", init_scale=8.0)
    params = [*named.values(), *second.param_groups[0]["params"]]
    scaler.scale(linear_loss(params, [[math.inf, math.nan], 1.0, 1.0, 1.0])).backward()
    assert scaler.overflow_report(first) == []
    assert not scaler.step_was_skipped(first)
    for optimizer in (first, second):
        scaler.step(optimizer)
    scaler.update()
    assert [scaler.step_was_skipped(o) for o in (first, second)] == [True, False]
    assert scaler.overflow_report(first) == [("weight", 0, 0, True, True)]
    assert scaler.overflow_report(second) == []
    assert scaler.skipped_steps == 1
    for optimizer in (first, second):
        optimizer.zero_grad()
    scaler.scale(linear_loss(params, [1.0] * 4)).backward()
    scaler.step(first)
    assert not scaler.step_was_skipped(first)
    assert scaler.overflow_report(first) == []
    assert scaler.skipped_steps == 1


def test_fused_optimizers_are_not_called_on_a_skip() -> None:
    """torch calls them, and its fused SGD then makes a momentum buffer of uninitialised memory."""
    param, optimizer, scaler = one(math.nan, cls=SGD, momentum=0.5, fused=True)
    calls: list[int] = []
    optimizer.register_step_post_hook(lambda *_: calls.append(1))
    scaler.step(optimizer)
    scaler.update()
    assert calls == []
    assert param.tolist() == [1.0, 1.0]
    iteration(scaler, optimizer, param)
    iteration(scaler, optimizer, param)
    assert calls == [1, 1]
    assert param.tolist() == [1.0 - 0.5 - 0.5 * 1.5] * 2


@pytest.mark.parametrize("wanted", [None, *range(2)])
def test_schedulers_move_only_on_steps_that_were_taken(wanted: int | None) -> None:
    param = torch.nn.Parameter(torch.ones(2))
    optimizer, scaler = SGD([param], lr=1.0), Ours("cpu", init_scale=8.0)
    make = torch.optim.lr_scheduler
    scheduler = make.ReduceLROnPlateau(optimizer, patience=0) if wanted == 1 else make.StepLR(optimizer, 1, gamma=0.5)
    with pytest.raises(RuntimeError, match=r"StepLR|ReduceLROnPlateau"):
        scaler.step_scheduler(scheduler)
    moved = []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for grad in (math.inf, math.inf, 1.0, math.nan, 1.0):
            iteration(scaler, optimizer, param, grad)
            moved.append(scaler.step_scheduler(scheduler, *([1.0] if wanted == 1 else [])))
    assert moved == [False, False, True, False, True]
    assert scheduler.last_epoch == 2
    if wanted != 1:
        assert optimizer.param_groups[0]["lr"] == 0.25


def test_disabled_moves_the_scheduler_always() -> None:
    _param, optimizer, scaler = one(scaler=Ours("cpu", enabled=False))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    scaler.step(optimizer)
    assert scaler.step_scheduler(scheduler)
    assert optimizer.param_groups[0]["lr"] == 0.25
    assert not scaler.step_was_skipped(optimizer)
    assert scaler.skipped_steps == 0


def test_skips_are_logged_with_names(caplog: pytest.LogCaptureFixture) -> None:
    param, optimizer, scaler = one()
    with caplog.at_level(logging.INFO, "fp16opt"):
        iteration(scaler, optimizer, param, 1e37)  # finite, and not so when scaled
        assert "calibrating" in caplog.text
        for _ in range(10):
            iteration(scaler, optimizer, param)
        iteration(scaler, optimizer, param, 1e37)
    assert "loss scale 512 -> 256: a rare overflow, non-finite gradients in group 0, param 0 (inf)" in caplog.text


# -- bounds and limits ------------------------------------------------------------------------------------------------


def test_the_scale_never_reaches_zero_and_torchs_does() -> None:
    scales = []
    for cls in (Theirs, Ours):
        scaler = cls("cpu")
        param, optimizer, _ = one(scaler=scaler)
        for _ in range(200):
            iteration(scaler, optimizer, param, math.inf)
        scales.append(scaler.get_scale())
    assert scales == [0.0, 2.0**-126]
    iteration(scaler, optimizer, param)
    assert not scaler.step_was_skipped(optimizer)


def test_bounds() -> None:
    scaler = Ours("cpu", init_scale=64.0, min_scale=32.0, max_scale=128.0, growth_interval=1)
    param, optimizer, _ = one(scaler=scaler)
    for grad, expected in ((math.inf, 32.0), (math.inf, 32.0), (1.0, 64.0), (1.0, 128.0), (1.0, 128.0)):
        iteration(scaler, optimizer, param, grad)
        assert scaler.get_scale() == expected
    with pytest.raises(ValueError, match="scale must be from min_scale to max_scale"):
        scaler.update(256.0)
    scaler.update(64)  # an int too
    assert scaler.get_scale() == 64.0


def test_max_consecutive_skips() -> None:
    scaler = Ours("cpu", max_consecutive_skips=2)
    param, optimizer, _ = one(scaler=scaler)
    for grad in (math.inf, 1.0, math.nan):
        iteration(scaler, optimizer, param, grad)
    with pytest.raises(LossScaleError, match=r"2 steps in a row.*group 0, param 0 \(nan\)"):
        iteration(scaler, optimizer, param, math.nan)
    iteration(scaler, optimizer, param)  # the iteration is over all the same
    assert not scaler.step_was_skipped(optimizer)


@pytest.mark.parametrize(
    ("kwargs", "error", "match"),
    [
        ({"growth_factor": 1.0}, AssertionError, "growth factor"),
        ({"backoff_factor": 1.0}, AssertionError, "backoff factor"),
        ({"growth_factor": math.inf}, ValueError, "growth_factor"),
        ({"backoff_factor": 0.0}, ValueError, "backoff_factor"),
        ({"backoff_factor": math.nan}, (ValueError, AssertionError), "backoff.factor"),
        ({"growth_interval": 2.5}, TypeError, "growth_interval"),
        ({"init_scale": 0.0}, ValueError, "init_scale"),
        ({"init_scale": True}, ValueError, "init_scale"),
        ({"min_scale": 2.0**-127}, ValueError, "min_scale"),
        ({"max_consecutive_skips": 0}, ValueError, "max_consecutive_skips"),
    ],
    ids=str,
)
def test_arguments_are_checked(kwargs: dict[str, Any], error: type, match: str) -> None:
    with pytest.raises(error, match=match):
        Ours("cpu", **kwargs)
    Ours("cpu", enabled=False, **kwargs)  # as torch: nothing is looked at


def test_without_a_gpu_the_default_warns_and_disables_as_in_torch() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    with pytest.warns(UserWarning, match="CUDA is not available"):
        scaler = Ours()
    assert not scaler.is_enabled()
    assert scaler.state_dict() == {}
    assert scaler.get_scale() == 1.0
    param, optimizer, _ = one(scaler=scaler)
    scaler.unscale_(optimizer)
    assert float(scaler.clip_grad_norm_(optimizer, 1e9)) == pytest.approx(math.sqrt(2.0))
    scaler.step(optimizer)
    scaler.update()
    assert param.tolist() == [0.5, 0.5]
    assert repr(scaler) == "GradScaler(enabled=False)"
    optimizer.zero_grad()
    assert float(scaler.clip_grad_norm_(optimizer, 1.0)) == 0.0
