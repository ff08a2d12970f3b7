"""Overflow: what a skipped step leaves alone, what it reports, and when it gives up."""

from __future__ import annotations

import logging

import pytest
import torch
from specs import OptimizerCase, one_per_class, params_of
from torch import nn
from torch.optim import SGD, AdamW

from engine import recipes
from engine.checks import (
    Problem,
    array,
    assert_model_is_rounded_masters,
    assert_same,
    assert_same_bits,
    by_step,
    linear_loss,
    one_step,
    ones,
    parameters,
    snapshot,
    train,
)
from fp16opt import DynamicLossScaler, LossScaleError, MixedPrecisionOptimizer, Overflow

INF, NAN = float("inf"), float("nan")
CHUNK = 65536  # the kernels' unit of work: an element just before and after a border must be seen
SIZES = [(5,), (CHUNK + 3,), (), (2, 33), (0,), (2 * CHUNK,)]
DTYPES = (torch.float16, torch.float16, torch.bfloat16, torch.float32, torch.float16, torch.bfloat16)


def _positions() -> list[tuple[int, int]]:
    out = []
    for i, shape in enumerate(SIZES):
        n = int(torch.Size(shape).numel())
        wanted = {0, n // 2, n - 1, CHUNK - 1, CHUNK, 2 * CHUNK - 1}
        out += [(i, k) for k in sorted(wanted) if 0 <= k < n]
    return out


@pytest.fixture(scope="module", params=["AdamW-fused", "AdamW-foreach", "SGD-momentum", "AdamW-one-pass"])
def trained(request: pytest.FixtureRequest) -> tuple[list[nn.Parameter], MixedPrecisionOptimizer]:
    """An optimizer with state after one clean step, shared: an overflow must leave it as it is."""
    params = parameters(SIZES, DTYPES)
    inner = {
        "AdamW-fused": lambda: AdamW(params, lr=0.1, weight_decay=0.1, fused=True),
        "AdamW-foreach": lambda: AdamW(params, lr=0.1, weight_decay=0.1, foreach=True),
        "SGD-momentum": lambda: SGD(params, lr=0.1, momentum=0.9, weight_decay=0.1),
        "AdamW-one-pass": lambda: AdamW(params, lr=0.1, weight_decay=0.1),
    }[request.param]()
    fused_step = "auto" if request.param == "AdamW-one-pass" else False
    opt = MixedPrecisionOptimizer(inner, loss_scale=4.0, fused_step=fused_step)
    one_step(opt, params, [0.5] * len(params))
    return params, opt


@pytest.mark.parametrize(("tensor", "position"), _positions(), ids=lambda v: str(v))
def test_overflow_skip_leaves_everything_untouched(trained: tuple, tensor: int, position: int) -> None:
    """Params, masters, optimizer state and step counts keep their bits, wherever the inf or nan is."""
    params, opt = trained
    before = snapshot(opt, params)
    skipped = int(opt.skipped_steps)
    for k, bad in enumerate((INF, NAN, -INF)):
        opt.zero_grad()
        opt.backward(linear_loss(params, [0.25] * len(params)), update_master_grads=False)
        params[tensor].grad.view(-1)[position] = bad
        opt.step()
        assert bool(opt.step_was_skipped), f"{bad} in tensor {tensor} at {position} went unnoticed"
        assert int(opt.skipped_steps) == skipped + k + 1
        report = opt.overflow_report()
        assert [(o.group, o.index, o.inf, o.nan) for o in report] == [(0, tensor, k != 1, k == 1)]
    assert_same(snapshot(opt, params), before)


@by_step
@pytest.mark.parametrize("case", params_of(one_per_class()))
def test_overflow_skip_leaves_everything_untouched_for_every_optimizer(case: OptimizerCase) -> None:
    params = parameters(case.shapes, (torch.float16, torch.bfloat16))
    problem = Problem(params, sparse=case.kind == "sparse")
    opt = MixedPrecisionOptimizer(case.make(params), loss_scale=4.0)
    for clean_first in (False, True):
        if clean_first:
            train(opt, params, problem, closure=case.kind == "closure")
        before = snapshot(opt, params)
        for bad in (INF, NAN):
            train(opt, params, problem, closure=case.kind == "closure", factor=bad)
            assert bool(opt.step_was_skipped)
        assert_same(snapshot(opt, params), before, f"{case.id} ")
    assert int(opt.skipped_steps) == 4
    train(opt, params, problem, closure=case.kind == "closure")
    assert not bool(opt.step_was_skipped)
    assert_model_is_rounded_masters(opt)


@by_step
def test_overflow_leaves_everything_untouched_on_the_first_step() -> None:
    recipes.check_overflow_leaves_everything_untouched(recipes.engine)
    p = ones()
    opt = MixedPrecisionOptimizer(SGD([p], lr=0.5, momentum=0.5, fused=True), loss_scale=8.0)
    one_step(opt, [p], [INF])  # torch's fused SGD leaves uninitialised memory in momentum_buffer here
    one_step(opt, [p], [0.5])
    assert_same_bits(p, array([0.75] * 4))
    (m,) = opt.master_params()
    assert_same_bits(opt.state[m]["momentum_buffer"], torch.full((4,), 0.5))


@by_step
def test_the_product_is_tested_not_the_gradient() -> None:
    """3e38 is finite; times 1/scale = 2 it is not (torch's own check misses this)."""
    p = ones(2, torch.float32)
    opt = MixedPrecisionOptimizer(SGD([p], lr=1.0), loss_scale=0.5)
    p.grad = torch.full((2,), 3e38)
    opt.update_master_grads()
    opt.step()
    assert bool(opt.step_was_skipped)
    assert_same_bits(p, torch.ones(2))


# ---- reports


@by_step
def test_overflow_report_names_params_and_tells_inf_from_nan() -> None:
    model = nn.ModuleDict({"a": nn.Linear(2, 2, dtype=torch.float16), "b": nn.Linear(2, 2, dtype=torch.float16)})
    groups = [{"params": list(model["a"].parameters())}, {"params": list(model["b"].parameters())}]
    opt = MixedPrecisionOptimizer(SGD(groups, lr=0.1), named_parameters=model.named_parameters())
    params = list(opt.model_params())
    both = array([INF, NAN], torch.float32)
    one_step(opt, params, [1.0, both, INF, NAN])
    assert opt.overflow_report() == [
        Overflow("a.bias", 0, 1, True, True),
        Overflow("b.weight", 1, 0, True, False),
        Overflow("b.bias", 1, 1, False, True),
    ]
    one_step(opt, params, [1.0] * 4)
    assert opt.overflow_report() == []


@by_step
def test_overflow_report_uses_torchs_named_param_groups() -> None:
    model = nn.Linear(2, 2, dtype=torch.float16)
    try:
        inner = SGD(model.named_parameters(), lr=0.1)
    except (TypeError, AttributeError):
        pytest.skip(f"torch {torch.__version__} has no named param groups")
    opt = MixedPrecisionOptimizer(inner)
    one_step(opt, list(opt.model_params()), [1.0, NAN])
    assert [o.name for o in opt.overflow_report()] == ["bias"]


@by_step
def test_overflow_report_of_an_unused_param_is_empty_and_stale_flags_do_not_linger() -> None:
    p, q = ones(), ones()
    opt = MixedPrecisionOptimizer(SGD([p, q], lr=0.5))
    one_step(opt, [p, q], [1.0, INF])
    one_step(opt, [p, q], [1.0, None])
    assert not bool(opt.step_was_skipped), "the flag of a param without a gradient was kept"
    assert opt.overflow_report() == []
    assert_same_bits(p, array([0.5] * 4))


@by_step
@pytest.mark.parametrize("mode", ["model", "fp32"])
def test_max_consecutive_skips_raises_an_error_that_names_the_params(mode: str) -> None:
    p, q = ones(), ones()
    opt = MixedPrecisionOptimizer(
        SGD([p, q], lr=0.5),
        scaler=DynamicLossScaler(1024.0, max_consecutive_skips=3),
        grad_accumulation=mode,
        named_parameters=[("good", p), ("culprit.weight", q)],
    )
    for _ in range(2):
        one_step(opt, [p, q], [1.0, INF])
    one_step(opt, [p, q], [1.0, 1.0])  # a clean step starts the count again
    before = snapshot(opt, [p, q])
    for _ in range(2):
        one_step(opt, [p, q], [1.0, NAN])
    with pytest.raises(LossScaleError, match=r"culprit\.weight") as err:
        one_step(opt, [p, q], [1.0, INF])
    assert "good" not in str(err.value)
    assert "3" in str(err.value)
    assert_same(snapshot(opt, [p, q]), before)


@by_step
def test_floor_is_logged_as_an_error_with_names_at_a_falling_rate(caplog: pytest.LogCaptureFixture) -> None:
    p = ones()
    opt = MixedPrecisionOptimizer(
        SGD([p], lr=0.5), scaler=DynamicLossScaler(4.0, min_scale=1.0), named_parameters=[("layer.weight", p)]
    )
    with caplog.at_level(logging.DEBUG, logger="fp16opt"):
        one_step(opt, [p], [INF])
        assert not [r for r in caplog.records if r.levelno >= logging.ERROR], "not at the floor yet"
        for _ in range(3):
            one_step(opt, [p], [INF])
        first = [r for r in caplog.records if r.levelno >= logging.ERROR]
        assert first
        assert all("layer.weight" in r.getMessage() for r in first)
        for _ in range(200):
            one_step(opt, [p], [INF])
    errors = [r for r in caplog.records if r.levelno >= logging.ERROR]
    assert 2 <= len(errors) <= 40, f"{len(errors)} errors for 203 skips at the floor"


@by_step
def test_first_skips_of_a_dynamic_scaler_are_logged_as_calibration(caplog: pytest.LogCaptureFixture) -> None:
    p = ones()
    opt = recipes.engine(SGD([p], lr=0.5), init_scale=2.0**16)
    with caplog.at_level(logging.DEBUG, logger="fp16opt"):
        one_step(opt, [p], [4.0])
    assert any("calibrat" in r.getMessage() for r in caplog.records)
    assert not [r for r in caplog.records if r.levelno >= logging.ERROR]


@by_step
def test_masters_that_do_not_fit_the_model_are_warned_about_by_name(caplog: pytest.LogCaptureFixture) -> None:
    p, q = ones(), ones()
    opt = MixedPrecisionOptimizer(SGD([p, q], lr=1.0), named_parameters=[("small", p), ("large", q)])
    masters = list(opt.master_params())
    with torch.no_grad():
        masters[1].fill_(65520.0)
    with caplog.at_level(logging.WARNING, logger="fp16opt"):
        one_step(opt, [p, q], [0.5, 0.0])
    text = " ".join(r.getMessage() for r in caplog.records)
    assert "large" in text
    assert "small" not in text
    assert_same_bits(q, array([INF] * 4))
    assert_same_bits(masters[1], torch.full((4,), 65520.0))


def test_an_overflow_of_an_earlier_micro_batch_is_named_in_fp32_sums() -> None:
    p, q = ones(2), ones(2)
    opt = MixedPrecisionOptimizer(SGD([p, q], lr=0.5), loss_scale=8.0, grad_accumulation="fp32")
    for grads in ([float("inf"), 1.0], [1.0, 1.0]):
        opt.backward(linear_loss([p, q], grads))
    opt.step()
    assert opt.step_was_skipped
    assert [overflow.index for overflow in opt.overflow_report()] == [0]


@pytest.mark.parametrize(("loss", "said"), [(float("nan"), "its loss was not finite"), (1.0, "its loss was finite")])
@pytest.mark.parametrize("given_up", [False, True], ids=["stepped", "given up"])
def test_a_scale_that_falls_below_one_is_told_once(
    loss: float, said: str, given_up: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, logger="fp16opt")
    weight = torch.nn.Parameter(torch.ones(4, dtype=torch.float16))
    opt = MixedPrecisionOptimizer(SGD([weight], lr=1.0), scaler=DynamicLossScaler(init_scale=2.0))
    opt.backward(weight.float().sum())
    opt.step()
    weight.register_hook(lambda grad: grad * float("inf"))
    for _ in range(12):
        opt.zero_grad()
        opt.backward(weight.float().sum() * loss)
        if given_up:
            opt.clip_master_grads(1.0)
        else:
            opt.step()
    lines = [r.getMessage() for r in caplog.records if "fallen below 1, to 0.5" in r.getMessage()]
    assert len(lines) == 1
    assert said in lines[0]
