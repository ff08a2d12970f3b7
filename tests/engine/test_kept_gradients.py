"""Gradients that nobody clears after a step: they add up, as they do in torch; FP32 sums are used up by the step."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD

from engine.checks import assert_same_bits, by_step, linear_loss
from fp16opt import DynamicLossScaler, MixedPrecisionOptimizer

pytestmark = by_step

MODES = pytest.mark.parametrize("mode", ["model", "fp32"])
SCALING: dict[str, Callable[[], dict[str, Any]]] = {
    "static": lambda: {"loss_scale": 4.0},
    "dynamic": lambda: {"scaler": DynamicLossScaler(4.0)},
    "growing": lambda: {"scaler": DynamicLossScaler(4.0, growth_interval=1)},
}
SCALED = pytest.mark.parametrize("scaling", SCALING)
KINDS = {
    "half": (torch.float16,),
    "halves": (torch.float16, torch.bfloat16),
    "mixed": (torch.float16, torch.float32),
    "wide": (torch.float32, torch.float64),
}
TYPES = pytest.mark.parametrize("dtypes", KINDS.values(), ids=KINDS)
SIXTEEN_BIT = pytest.mark.parametrize("dtypes", [KINDS["half"], KINDS["halves"]], ids=["half", "halves"])


def _model(dtypes: tuple[torch.dtype, ...]) -> nn.ParameterList:
    return nn.ParameterList([nn.Parameter(torch.zeros(3, dtype=dtype)) for dtype in dtypes])


def _wrap(model: nn.ParameterList, mode: str, scaling: str, **kwargs: Any) -> MixedPrecisionOptimizer:
    masters = kwargs.pop("master_weights", "full")
    return MixedPrecisionOptimizer(
        SGD(model.parameters(), **kwargs), grad_accumulation=mode, master_weights=masters, **SCALING[scaling]()
    )


def _clear(way: str, model: nn.ParameterList, opt: Any) -> None:
    if way.startswith("model"):
        model.zero_grad(set_to_none=way == "model")
    elif way.startswith("opt"):
        opt.zero_grad(set_to_none=way == "opt")


def _values(opt: Any) -> list[float]:
    masters = opt.master_params() if hasattr(opt, "master_params") else opt.param_groups[0]["params"]
    return [m[0].item() for m in masters]


def _torch(dtypes: tuple[torch.dtype, ...]) -> tuple[nn.ParameterList, SGD]:
    model = _model(tuple(torch.float64 for _ in dtypes))
    return model, SGD(model.parameters(), lr=1.0)


@SCALED
@TYPES
@pytest.mark.parametrize("micro", [1, 2])
@pytest.mark.parametrize("way", ["none", "model", "opt", "model_zeros", "opt_zeros", "every_second"])
def test_steps_are_torchs_however_gradients_are_cleared(
    scaling: str, dtypes: tuple[torch.dtype, ...], micro: int, way: str
) -> None:
    model = _model(dtypes)
    opt = _wrap(model, "model", scaling, lr=1.0)
    plain, reference = _torch(dtypes)
    for step in range(5):
        cleared = ("model" if step % 2 else "none") if way == "every_second" else way
        _clear(cleared, model, opt)
        _clear(cleared, plain, reference)
        for _ in range(micro):
            opt.backward(linear_loss(model, [1.0] * len(dtypes)))
            linear_loss(plain, [1.0] * len(dtypes)).backward()
        opt.step()
        reference.step()
        assert _values(opt) == _values(reference), f"step {step}"
    if way == "none" and micro == 1:
        assert _values(opt) == [-15.0] * len(dtypes)


@SCALED
@TYPES
@pytest.mark.parametrize("micro", [1, 2])
@pytest.mark.parametrize("way", ["model", "opt", "model_zeros", "opt_zeros"])
def test_folded_steps_are_torchs_where_gradients_are_cleared(
    scaling: str, dtypes: tuple[torch.dtype, ...], micro: int, way: str
) -> None:
    model = _model(dtypes)
    opt = _wrap(model, "fp32", scaling, lr=1.0)
    for step in range(4):
        _clear(way, model, opt)
        for _ in range(micro):
            opt.backward(linear_loss(model, [1.0] * len(dtypes)))
        opt.step()
        assert _values(opt) == [-1.0 * micro * (step + 1)] * len(dtypes)


@SCALED
@SIXTEEN_BIT
@pytest.mark.parametrize("micro", [1, 2])
@pytest.mark.parametrize("way", ["none", "every_second"])
@pytest.mark.parametrize("master_weights", ["full", "split"])
def test_folded_sums_are_used_up_by_a_step(
    scaling: str, dtypes: tuple[torch.dtype, ...], micro: int, way: str, master_weights: str
) -> None:
    """Nothing is left of them, so that there is nothing to clear: no 16-bit gradient, and no part of the next norm."""
    model = _model(dtypes)
    opt = _wrap(model, "fp32", scaling, lr=1.0, master_weights=master_weights)
    for step in range(5):
        _clear("model" if step % 2 and way == "every_second" else "none", model, opt)
        for _ in range(micro):
            opt.backward(linear_loss(model, [1.0] * len(dtypes)))
            assert [p.grad for p in model] == [None] * len(dtypes)
        assert float(opt.clip_master_grads(1e4)) == pytest.approx(micro * math.sqrt(3 * len(dtypes)))
        opt.step()
        assert [p.grad for p in model] == [None] * len(dtypes)
        opt.step()  # nothing to do
        assert _values(opt) == [-1.0 * micro * (step + 1)] * len(dtypes)


@MODES
@SCALED
@pytest.mark.parametrize("clip", [True, False])
def test_a_parameter_without_gradient_steps_with_the_zeros_that_it_was_given(
    mode: str, scaling: str, clip: bool
) -> None:
    """Weight decay moves it then, in torch as well."""
    dtypes = KINDS["mixed"] * 2
    model = _model(dtypes)
    plain = _model((torch.float64,) * 4)
    for param in (*model, *plain):
        nn.init.ones_(param)
    opt = _wrap(model, mode, scaling, lr=0.5, weight_decay=0.5)
    reference = SGD(plain.parameters(), lr=0.5, weight_decay=0.5)
    for step in range(4):
        opt.zero_grad(set_to_none=step == 3)
        reference.zero_grad(set_to_none=step == 3)
        some = [1.0, 1.0, None, None] if step else [1.0] * 4
        opt.backward(linear_loss(model, some))
        linear_loss(plain, some).backward()
        if clip:
            norm = opt.clip_master_grads(100.0)
            assert float(norm) == pytest.approx(math.sqrt(3 * sum(g is not None for g in some)))
        opt.step()
        reference.step()
        assert _values(opt) == _values(reference), f"step {step}"


@SCALED
def test_the_norm_counts_gradients_that_were_kept(scaling: str) -> None:
    model = _model(KINDS["mixed"] * 2)
    opt = _wrap(model, "model", scaling, lr=1.0)
    for some in ([1.0] * 4, [1.0] * 4, [1.0, 1.0, None, None]):
        opt.backward(linear_loss(model, some))
        norm = opt.clip_master_grads(1e4)
        opt.step()
    assert float(norm) == pytest.approx(math.sqrt(3 * (9 + 9 + 4 + 4)))


@SCALED
@TYPES
def test_an_overflow_that_nobody_clears_goes_on_skipping(scaling: str, dtypes: tuple[torch.dtype, ...]) -> None:
    """inf and something is inf. Stepping it would destroy the weights."""
    for bad in range(len(dtypes)):
        model = _model(dtypes)
        opt = _wrap(model, "model", scaling, lr=1.0)
        for step in range(5):
            if step == 4:
                model.zero_grad()
            grads = [math.inf if i == bad and step == 1 else 0.5 for i in range(len(dtypes))]
            opt.backward(linear_loss(model, grads))
            opt.step()
            assert opt.step_was_skipped is (step in (1, 2, 3))
            if step in (1, 2, 3):
                assert [o.index for o in opt.overflow_report()] == [bad]
        assert _values(opt) == [-1.0] * len(dtypes)


@SCALED
@SIXTEEN_BIT
def test_an_overflow_in_a_folded_sum_skips_one_step(scaling: str, dtypes: tuple[torch.dtype, ...]) -> None:
    model = _model(dtypes)
    opt = _wrap(model, "fp32", scaling, lr=1.0)
    for step in range(4):
        opt.backward(linear_loss(model, [math.inf if step == 1 else 0.5] * len(dtypes)))
        opt.step()
        assert opt.step_was_skipped is (step == 1)
    assert _values(opt) == [-1.5] * len(dtypes)


@pytest.mark.parametrize("master_weights", ["full", "none"])
@MODES
def test_a_gradient_of_the_users_own_that_is_not_finite_is_noticed(mode: str, master_weights: str) -> None:
    dtype = torch.float32 if master_weights == "full" else torch.float16
    param = nn.Parameter(torch.zeros(3, dtype=dtype))
    opt = MixedPrecisionOptimizer(
        SGD([param], lr=1.0), loss_scale=4.0, grad_accumulation=mode, master_weights=master_weights
    )
    param.grad = torch.tensor([0.0, math.nan, 0.0], dtype=dtype)
    opt.backward(linear_loss([param], [1.0]))
    opt.step()
    assert opt.step_was_skipped
    assert_same_bits(param.detach(), torch.zeros(3, dtype=dtype))


def test_an_overflow_that_was_cleared_by_the_model_leaves_nothing_behind() -> None:
    model = _model(KINDS["mixed"])
    opt = _wrap(model, "fp32", "static", lr=1.0)
    for grad in (math.inf, 1.0):
        model.zero_grad()
        opt.backward(linear_loss(model, [grad, grad]))
        opt.step()
    assert _values(opt) == [-1.0, -1.0]


def test_several_scalers_start_anew_after_a_step() -> None:
    """Their sums are FP32."""
    model = _model(KINDS["halves"])
    first, second = DynamicLossScaler(8.0), DynamicLossScaler(32.0)
    opt = MixedPrecisionOptimizer(SGD(model.parameters(), lr=1.0), scaler=first)
    for step in range(3):
        opt.backward(linear_loss(model, [1.0, 1.0]))
        opt.backward(linear_loss(model, [1.0, 1.0]), scaler=second)
        opt.step()
        assert _values(opt) == [-2.0 * (step + 1)] * 2


@SCALED
@pytest.mark.parametrize("clear", [True, False])
def test_split_masters_keep_gradients_alike(scaling: str, clear: bool) -> None:
    model = _model(KINDS["mixed"])
    opt = _wrap(model, "model", scaling, lr=1.0, master_weights="split")
    for step in range(4):
        if clear and step == 2:
            model.zero_grad()
        opt.backward(linear_loss(model, [1.0, 1.0]))
        opt.step()
    assert [p[0].item() for p in model] == [-6.0 if clear else -10.0] * 2
