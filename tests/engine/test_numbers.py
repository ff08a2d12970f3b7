"""The numbers: masters follow plain FP32 stepping bit for bit, at every scale and through its changes."""

from __future__ import annotations

from typing import Any

import numpy as np
import oracle
import pytest
import torch
from specs import CASES, OptimizerCase, params_by_class
from torch import nn
from torch.optim import SGD

from engine import recipes
from engine.checks import assert_same_bits, by_step, normal, one_step
from fp16opt import MixedPrecisionOptimizer

MIXED = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@by_step
def test_updates_exact_through_scale_growth() -> None:
    recipes.check_updates_exact_through_scale_growth(recipes.engine)


@pytest.mark.parametrize(
    ("scale", "dtypes"),
    [(1.0, torch.float16), (1024.0, torch.float16), (256.0, MIXED), (1.0, torch.bfloat16)],
    ids=["scale1", "scale1024", "mixed", "bfloat16"],
)
@pytest.mark.parametrize("case", params_by_class(CASES))
def test_masters_equal_plain_fp32_stepping(case: OptimizerCase, scale: float, dtypes: Any) -> None:
    dtypes = MIXED[:3] if dtypes is MIXED and case.kind == "closure" else dtypes
    recipes.check_masters_equal_plain_fp32_stepping(recipes.wrapped_step, case, scale, dtypes=dtypes)


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
