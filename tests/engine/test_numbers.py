"""The numbers: masters follow plain FP32 stepping bit for bit, at every scale and through its changes."""

from __future__ import annotations

import math

import numpy as np
import oracle
import pytest
import torch
from specs import CASES, OptimizerCase, one_per_class, params_of
from torch import nn
from torch.optim import SGD

from engine import recipes
from engine.checks import (
    array,
    assert_same_bits,
    by_step,
    linear_loss,
    normal,
    one_step,
    ones,
    parameters,
)
from fp16opt import DynamicLossScaler, MixedPrecisionOptimizer

MIXED = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@by_step
def test_updates_exact_through_scale_growth() -> None:
    recipes.check_updates_exact_through_scale_growth(recipes.engine)


@by_step
@pytest.mark.parametrize("clip", [False, True], ids=["plain", "clipped"])
def test_updates_exact_through_scale_growth_and_backoff(clip: bool) -> None:
    """The same with an overflow now and then, and with clipping calls that have nothing to clip."""
    p = nn.Parameter(torch.zeros(3, dtype=torch.float16))
    opt = recipes.engine(SGD([p], lr=1.0), init_scale=8.0, growth_interval=3)
    scaler = oracle.DynamicScaler(scale=8.0, growth_interval=3)
    steps = 0
    for k in range(40):
        bad = k in (0, 7, 8, 20)
        opt.zero_grad()
        opt.backward(linear_loss([p], [float("inf") if bad else 1.0]))
        if clip:
            opt.clip_master_grads(100.0)
        opt.step()
        scaler.update(bad)
        steps += not bad
        assert bool(opt.step_was_skipped) == bad
        assert_same_bits(p, array([-steps] * 3))
        assert float(opt.loss_scale) == scaler.scale
    assert int(opt.skipped_steps) == 4


@pytest.mark.parametrize("scale", [1.0, 1024.0], ids=["scale1", "scale1024"])
@pytest.mark.parametrize("case", params_of(CASES))
def test_masters_equal_plain_fp32_stepping(case: OptimizerCase, scale: float) -> None:
    recipes.check_masters_equal_plain_fp32_stepping(recipes.wrapped_step, case, scale)


@pytest.mark.parametrize("case", params_of(one_per_class()))
def test_masters_equal_plain_fp32_stepping_with_mixed_dtypes(case: OptimizerCase) -> None:
    dtypes = (torch.float16, torch.bfloat16, torch.float32) if case.kind == "closure" else MIXED
    recipes.check_masters_equal_plain_fp32_stepping(recipes.wrapped_step, case, 256.0, dtypes=dtypes)


@pytest.mark.parametrize("case", params_of(one_per_class()))
def test_masters_equal_plain_fp32_stepping_for_bfloat16(case: OptimizerCase) -> None:
    recipes.check_masters_equal_plain_fp32_stepping(recipes.wrapped_step, case, 1.0, dtypes=torch.bfloat16)


@by_step
@pytest.mark.parametrize("scale", [3.0, 1000.0, 0.1], ids=str)
def test_masters_equal_the_oracle_at_scales_that_are_no_power_of_two(scale: float) -> None:
    """Multiplying by float32(1/scale), not dividing. SGD constants are powers of two: numpy and torch
    agree."""
    p = nn.Parameter(normal((300,), torch.float16, 1))
    masters = [p.detach().float().numpy().copy()]
    opt = MixedPrecisionOptimizer(SGD([p], lr=0.25, momentum=0.5), loss_scale=scale)
    sgd = oracle.SGD(0.25, momentum=0.5)
    for k in range(4):
        g = normal((300,), torch.float32, 20 + k)
        one_step(opt, [p], [g])
        scaled = oracle.round_half(g.numpy() * np.float32(scale))
        sgd.step(masters, [oracle.unscale(scaled, scale)])
        (m,) = opt.master_params()
        assert_same_bits(m, torch.from_numpy(masters[0]), f"master after step {k}")
    assert_same_bits(p, torch.from_numpy(oracle.round_half(masters[0])))


@by_step
def test_weight_decay_is_decoupled() -> None:
    recipes.check_weight_decay_is_decoupled(recipes.engine)


@by_step
@pytest.mark.parametrize("power", range(15))
def test_true_norm_2_at_scales_2_0_to_2_14(power: int) -> None:
    p, q = ones(3), ones(1, torch.float32)
    opt = MixedPrecisionOptimizer(SGD([p, q], lr=1.0), loss_scale=2.0**power)
    opt.backward(linear_loss([p, q], [1.0, 1.0]))
    norm = opt.clip_master_grads(100.0)
    assert float(norm) == 2.0
    for m in opt.master_params():
        assert_same_bits(m.grad, torch.ones_like(m))


def test_hysteresis_honoured() -> None:
    """The scale backs off at the H-th non-finite step in a row and at each one after it; a clean step
    refills."""
    p = ones()
    opt = recipes.engine(SGD([p], lr=0.0), init_scale=1024.0, hysteresis=3)
    scaler = oracle.DynamicScaler(scale=1024.0, hysteresis=3)
    seen = []
    for overflow in [True, True, False, True, True, True, True, False, True, True, True]:
        one_step(opt, [p], [float("nan") if overflow else 1.0])
        scaler.update(overflow)
        seen.append(float(opt.loss_scale))
        assert seen[-1] == scaler.scale
        assert bool(opt.step_was_skipped) == overflow
    assert seen == [1024, 1024, 1024, 1024, 1024, 512, 256, 256, 256, 256, 128]


def test_scale_never_zero_or_inf_going_down() -> None:
    p = ones()
    opt = recipes.engine(SGD([p], lr=0.5), init_scale=2.0**16)
    for _ in range(200):
        one_step(opt, [p], [float("inf")])
        scale = float(opt.loss_scale)
        assert scale >= 2.0**-14
        assert math.isfinite(1 / scale)
    assert scale == 2.0**-14
    assert_same_bits(p, array([1.0] * 4))
    one_step(opt, [p], [1.0])
    assert_same_bits(p, array([0.5] * 4))


def test_scale_never_zero_or_inf_going_up() -> None:
    p = ones()
    opt = recipes.engine(SGD([p], lr=0.0), init_scale=1.0, growth_interval=1)
    for _ in range(60):
        one_step(opt, [p], [2.0**-12])
        assert float(opt.loss_scale) <= 2.0**24
    assert float(opt.loss_scale) == 2.0**24
    assert not bool(opt.step_was_skipped)


def test_scale_never_zero_or_inf_at_the_widest_limits() -> None:
    p = ones(2, torch.float32)
    down = recipes.engine(SGD([p], lr=0.0), init_scale=1.0, min_scale=2.0**-126, max_scale=2.0**127)
    for _ in range(300):
        one_step(down, [p], [float("inf")])
        assert float(down.loss_scale) > 0.0
        assert math.isfinite(float(1 / down.scaler.scale))
    up = recipes.engine(SGD([p], lr=0.0), init_scale=1.0, growth_interval=1, max_scale=2.0**127)
    for _ in range(200):
        one_step(up, [p], [0.0])
        assert math.isfinite(float(up.loss_scale))
        assert float(1 / up.scaler.scale) > 0.0


@by_step
def test_masters_keep_updates_that_16_bit_weights_lose() -> None:
    p = ones(4)
    opt = MixedPrecisionOptimizer(SGD([p], lr=2.0**-14), loss_scale=16.0)
    for _ in range(32):
        one_step(opt, [p], [1.0])
    (m,) = opt.master_params()
    assert_same_bits(m, array([1 - 2.0**-9] * 4, torch.float32))
    assert_same_bits(p, array([1 - 2.0**-9] * 4))


@by_step
@pytest.mark.parametrize(
    ("master", "want"),
    [
        (1 + 2.0**-11, 1.0),
        (1 + 3 * 2.0**-11, 1 + 2.0**-9),
        (1 + 2.0**-11 + 2.0**-20, 1 + 2.0**-10),
        (65519.0, 65504.0),
        (2.0**-25, 0.0),
        (3 * 2.0**-25, 2.0**-23),
    ],
    ids=["tie_down", "tie_up", "above_tie", "largest", "underflow_tie", "subnormal_tie"],
)
def test_masters_are_rounded_to_nearest_even(master: float, want: float) -> None:
    p = ones(3)
    opt = MixedPrecisionOptimizer(SGD([p], lr=1.0))
    (m,) = opt.master_params()
    with torch.no_grad():
        m.copy_(torch.full((3,), master))
    one_step(opt, [p], [0.0])
    assert_same_bits(p, array([want] * 3))


@by_step
def test_fp32_and_fp64_params_keep_their_precision() -> None:
    p, q = ones(2, torch.float32), ones(2, torch.float64)
    opt = MixedPrecisionOptimizer(SGD([p, q], lr=1.0), loss_scale=8.0)
    one_step(opt, [p, q], [torch.full((2,), 2.0**-20), torch.full((2,), 2.0**-50, dtype=torch.float64)])
    assert_same_bits(p, torch.full((2,), 1 - 2.0**-20))
    assert_same_bits(q, torch.full((2,), 1 - 2.0**-50, dtype=torch.float64))


@by_step
def test_optimizer_state_is_fp32_for_16_bit_params() -> None:
    for case in one_per_class():
        if case.kind == "closure":
            continue
        params = parameters(case.shapes, (torch.float16, torch.bfloat16))
        opt = MixedPrecisionOptimizer(case.make(params), loss_scale=8.0)
        problem = recipes.Problem(params, sparse=case.kind == "sparse")
        recipes.train(opt, params, problem)
        for m in opt.master_params():
            for key, value in opt.state[m].items():
                if isinstance(value, torch.Tensor) and value.is_floating_point():
                    assert value.dtype == torch.float32, f"{case.id} {key} is {value.dtype}"


def test_a_scaler_subclass_of_the_user_is_obeyed() -> None:
    class Halving(DynamicLossScaler):
        """Starts at 64 and grows by four: any subclass must be driven through the interface."""

    p = ones()
    opt = MixedPrecisionOptimizer(SGD([p], lr=1.0), scaler=Halving(64.0, growth_factor=4.0, growth_interval=1))
    one_step(opt, [p], [1.0])
    assert float(opt.loss_scale) == 256.0
    assert_same_bits(p, array([0.0] * 4))
