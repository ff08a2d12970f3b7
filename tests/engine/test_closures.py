"""LBFGS on masters against plain LBFGS in FP32, through overflows; what a failing closure leaves behind."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.optim import LBFGS, SGD

from engine import recipes
from engine.checks import (
    Problem,
    Twin,
    assert_model_is_rounded_masters,
    assert_same,
    assert_same_bits,
    by_step,
    linear_loss,
    ones,
    parameters,
    snapshot,
)
from fp16opt import DynamicLossScaler, MixedPrecisionOptimizer

pytestmark = by_step


def _closure(opt: MixedPrecisionOptimizer, loss: Callable[[int], Tensor]) -> tuple[Callable[[], Tensor], list[float]]:
    """A closure as the contract words it; `loss` gets the number of the evaluation. Also the scales it
    saw."""
    scales: list[float] = []

    def closure() -> Tensor:
        opt.zero_grad()
        value = loss(len(scales))
        scales.append(float(opt.loss_scale))
        opt.backward(value)
        return value.detach()

    return closure, scales


def _lbfgs(params: list[nn.Parameter]) -> LBFGS:
    return LBFGS(params, lr=0.5, max_iter=6, history_size=4)


def test_back_off_inside_a_closure_does_not_wait_for_hysteresis() -> None:
    p = ones()
    opt = recipes.engine(_lbfgs([p]), init_scale=2.0**17, hysteresis=4)
    closure, scales = _closure(opt, lambda _: linear_loss([p], [1.0]))
    opt.step(closure)
    assert scales[:3] == [2.0**17, 2.0**16, 2.0**15]


def test_lbfgs_through_an_overflow() -> None:
    """The scale backs off from 2^24 inside the first step; the run equals plain LBFGS with FP32 copies."""
    params = parameters([(20,), (3, 4)])
    problem = Problem(params)
    opt = recipes.engine(_lbfgs(params), init_scale=2.0**24, growth_interval=1000)
    twin: Twin | None = None
    start = parameters([(20,), (3, 4)])
    for k in range(4):
        closure, scales = _closure(opt, lambda _: problem.loss(params))
        opt.step(closure)
        if twin is None:
            assert len(scales) > 5
            assert scales[0] == 2.0**24
            twin = Twin(start, _lbfgs, problem, float(opt.loss_scale))
        twin.step()
        assert float(opt.loss_scale) == twin.scale, "a second back-off: the comparison needs a constant scale"
        for i, (m, t) in enumerate(zip(opt.master_params(), twin.masters, strict=True)):
            assert_same_bits(m, t, f"step {k} master {i}")
        assert_model_is_rounded_masters(opt)
    assert int(opt.skipped_steps) == 0


@pytest.mark.parametrize("optimizer", ["SGD", "LBFGS"])
@pytest.mark.parametrize("at", [0, 1, 3], ids=["first", "second", "fourth"])
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt], ids=lambda e: e.__name__)
def test_closure_that_raises_leaves_everything_as_it_was(optimizer: str, at: int, error: type[BaseException]) -> None:
    if optimizer == "SGD" and at:
        pytest.skip("SGD evaluates once")
    params = parameters([(20,), (3,)], (torch.float16, torch.float32))
    problem = Problem(params)
    inner = _lbfgs(params) if optimizer == "LBFGS" else SGD(params, lr=0.1, momentum=0.9)
    opt = recipes.engine(inner, init_scale=8.0, growth_interval=2)
    good, _ = _closure(opt, lambda _: problem.loss(params))
    opt.step(good)
    before = snapshot(opt, params, scaler=True)

    def loss(k: int) -> Tensor:
        if k == at:
            raise error("from the closure")
        return problem.loss(params)

    bad, _ = _closure(opt, loss)
    with pytest.raises(error, match="from the closure"):
        opt.step(bad)
    assert_same(snapshot(opt, params, scaler=True), before)
    assert_model_is_rounded_masters(opt)
    assert int(opt.skipped_steps) == 0
    opt.zero_grad()
    opt.step(good)
    assert not bool(opt.step_was_skipped)


def test_closure_is_counted_once_by_the_scaler() -> None:
    p = ones()
    opt = MixedPrecisionOptimizer(_lbfgs([p]), scaler=DynamicLossScaler(8.0, growth_interval=2))
    problem = Problem([p])
    closure, scales = _closure(opt, lambda _: problem.loss([p]))
    opt.step(closure)
    assert len(scales) > 2
    assert float(opt.loss_scale) == 8.0, "evaluations were counted as steps"
    opt.step(closure)
    assert float(opt.loss_scale) == 16.0
