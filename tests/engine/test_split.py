"""master_weights="split": the masters, state and skips of full masters, in 4 bytes a parameter."""

from __future__ import annotations

import copy
import io
import logging
import pickle
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from specs import CASES, OptimizerCase, one_per_class, params_of
from torch import nn
from torch.optim import SGD, AdamW

from engine import recipes
from engine.checks import (
    Problem,
    array,
    assert_same,
    assert_same_bits,
    groups_params,
    linear_loss,
    normal,
    one_step,
    ones,
    parameters,
    train,
)
from fp16opt import DynamicLossScaler, MixedPrecisionOptimizer, streaming
from fp16opt.split import SplitParams

SIXTEEN = (torch.float16, torch.bfloat16)
SPLIT = [case for case in CASES if case.kind != "closure"]
by_dtype = pytest.mark.parametrize("dtype", SIXTEEN, ids=str)
TIE = 1 + 2.0**-8  # halfway between bfloat16's 1 (even) and 1 + 2^-7


def wrap(inner: torch.optim.Optimizer, mode: str = "split", **kwargs: Any) -> Any:
    settings = {"loss_scale": 64.0} if not kwargs.keys() & {"loss_scale", "scaler", "dynamic"} else {}
    return MixedPrecisionOptimizer(inner, master_weights=mode, **settings, **kwargs)


def masters(opt: Any) -> list[torch.Tensor]:
    return [m.detach().clone() for m in opt.master_params()]


def state_of(opt: Any) -> Any:
    return opt.state_dict()["optimizer"]


def pair(case: Any, dtypes: Any, **kwargs: Any) -> tuple[list[Any], list[list[nn.Parameter]]]:
    """The same optimizer on the same parameters, full and split."""
    models = [parameters(case.shapes, dtypes) for _ in range(2)]
    return [wrap(case.make(p), mode, **kwargs) for p, mode in zip(models, ("full", "split"), strict=True)], models


def gradients(params: list[Any], step: int, sparse: bool) -> list[torch.Tensor]:
    """The same for both, so that differences are the optimizer's."""
    return [normal(p.shape, torch.float32, 100 * step + i).mul_(0.5) for i, p in enumerate(params)]


def step_both(opts: list[Any], models: list[Any], k: int, kind: str = "dense", clip: float | None = None) -> None:
    for opt, params in zip(opts, models, strict=True):
        opt.zero_grad()
        if kind == "sparse":
            opt.backward(Problem(params, sparse=True).loss(params))
        else:
            opt.backward(linear_loss(params, gradients(params, k, False)))
        if clip is not None:
            opt.clip_master_grads(clip)
        opt.step()


# -- the same masters as full ones ---------------------------------------------------------------------------------


@pytest.mark.parametrize("case", params_of(SPLIT))
def test_masters_and_state_equal_full_ones_in_bfloat16(case: OptimizerCase) -> None:
    opts, models = pair(case, torch.bfloat16)
    start = masters(opts[1])
    for k in range(5):
        step_both(opts, models, k, case.kind)
        for full, split in zip(masters(opts[0]), masters(opts[1]), strict=True):
            assert_same_bits(split, full, f"{case.id} step {k}")
    assert_same(state_of(opts[1]), state_of(opts[0]), "optimizer state")
    assert any(not torch.equal(a, b) for a, b in zip(start, masters(opts[1]), strict=True))


@pytest.mark.parametrize("case", params_of(one_per_class()))
def test_masters_equal_full_ones_in_mixed_dtypes_with_clip(case: OptimizerCase) -> None:
    if case.kind == "closure":
        pytest.skip("refused: see test_refusals")
    opts, models = pair(case, recipes.MIXED)
    for k in range(4):
        step_both(opts, models, k, case.kind, clip=0.5)
        for full, split in zip(masters(opts[0]), masters(opts[1]), strict=True):
            # float16: a step of 2^-40 is what the remainder resolves below 2^-16; weights of N(0, 1) drift by that
            assert torch.allclose(split, full, rtol=1e-6, atol=2.0**-38)


def test_half_masters_are_exact_in_range() -> None:
    values = torch.tensor([2.0**-16, -(2.0**-16), 0.1, 1.0, -3.3, 1000.0, 65000.0])
    opts, models = [], []
    for mode in ("full", "split"):
        params = [nn.Parameter(values.half())]
        opts.append(wrap(SGD(params, lr=2.0**-13), mode))
        models.append(params)
    for k in range(20):
        step_both(opts, models, k)
        assert_same_bits(masters(opts[1])[0][2:], masters(opts[0])[0][2:], f"step {k}")
    assert not torch.equal(masters(opts[1])[0].half().float(), masters(opts[1])[0])


@by_dtype
def test_many_buckets_of_several_groups_equal_full_masters(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming, "BUCKET", 128)
    shapes = [(3, 5), (130,), (40,), (40,), (2, 3, 2), (60,), (), (129,), (64,), (64,)]
    opts, models = [], []
    for mode in ("full", "split"):
        params = parameters(shapes, dtype)
        wide = parameters([(7,), (200,)], torch.float32, seed=3)
        groups = [
            {"params": params[:5] + wide[:1], "lr": 0.1},
            {"params": params[5:], "lr": 0.02, "weight_decay": 0.2},
            {"params": wide[1:], "lr": 0.3},
        ]
        opts.append(wrap(AdamW(groups), mode))
        models.append(params + wide)
    for k in range(3):
        step_both(opts, models, k)
    for full, split in zip(masters(opts[0]), masters(opts[1]), strict=True):
        if dtype == torch.bfloat16:
            assert_same_bits(split, full)
        assert torch.allclose(split, full, rtol=1e-6, atol=2.0**-38)
    plan = opts[1]._streamed._planned[2]
    assert [sum(b.group == g for b in plan) for g in range(3)] == [3, 3, 1]
    for bucket in plan:
        assert bucket.size <= 128 or len(bucket.split) == 1
    assert sorted(i for b in plan for i in b.split + b.own) == list(range(12))


@by_dtype
def test_strides_are_kept(dtype: torch.dtype) -> None:
    values = normal((2, 3, 4, 5), torch.float32, 1)
    for layout in (
        values.to(memory_format=torch.channels_last),
        values.permute(3, 1, 0, 2),
        torch.cat([values, values], dim=3)[..., ::2],
    ):
        opts, models = [], []
        for mode in ("full", "split"):
            param = nn.Parameter(layout.to(dtype))
            opts.append(wrap(AdamW([param], lr=0.1, fused=True), mode))
            models.append([param])
        for k in range(3):
            step_both(opts, models, k, clip=1.0)
        full, split = (next(opt.master_params()) for opt in opts)
        assert split.stride() == full.stride()
        assert torch.allclose(split, full, rtol=1e-6, atol=2.0**-38)
        key = groups_params(opts[1])[0]
        assert opts[1].state[key]["exp_avg"].stride() == full.stride()


def test_weights_are_rounded_away_on_ties_and_masters_are_not() -> None:
    opts, models = [], []
    for mode in ("full", "split"):
        params = [nn.Parameter(torch.ones(3).bfloat16())]
        opts.append(wrap(SGD(params, lr=1.0), mode))
        models.append(params)
        one_step(opts[-1], params, [array([-(2.0**-8), -(2.0**-9), 2.0**-8], torch.float32)])
    assert_same_bits(masters(opts[1])[0], masters(opts[0])[0])
    assert models[0][0].tolist() == [1.0, 1.0, 1 - 2.0**-8]
    assert models[1][0].tolist() == [1 + 2.0**-7, 1.0, 1 - 2.0**-8]


def test_small_updates_add_up_where_16_bits_lose_them() -> None:
    p = ones(2)
    opt = wrap(SGD([p], lr=2.0**-13), loss_scale=1.0)
    for _ in range(8):
        one_step(opt, [p], [1.0])
    assert_same_bits(next(opt.master_params()), array([1 - 2.0**-10] * 2, torch.float32))
    assert_same_bits(p, array([1 - 2.0**-10] * 2))


# -- gradients -----------------------------------------------------------------------------------------------------


def test_gradients_are_made_when_read_and_edits_count() -> None:
    p, q = ones(3), ones(2)
    opt = wrap(SGD([p, q], lr=0.5))
    opt.backward(linear_loss([p, q], [2.0, 4.0]))
    assert len(opt._grads.deferred.waiting) == 2
    first, second = opt.master_params()
    assert len(opt._grads.deferred.waiting) == 2
    assert_same_bits(first.grad, array([2.0] * 3, torch.float32))
    assert len(opt._grads.deferred.waiting) == 1
    first.grad.mul_(0.25)
    next(opt.master_params()).grad.add_(0.5)
    opt.step()
    assert p.tolist() == [0.5] * 3
    assert q.tolist() == [-1.0] * 2
    second.grad = None
    opt.zero_grad()
    assert first.grad is None


def test_a_gradient_that_is_set_counts() -> None:
    p = ones(2)
    opt = wrap(SGD([p], lr=0.5))
    opt.backward(linear_loss([p], [2.0]))
    for m in opt.master_params():
        m.grad = torch.full((2,), 0.5)
    opt.step()
    assert p.tolist() == [0.75] * 2


@pytest.mark.parametrize("through", ["master_params", "param_groups"])
def test_torchs_own_clip_works_on_masters(through: str) -> None:
    p, q = ones(3), ones(1)
    opt = wrap(SGD([p, q], lr=1.0))
    opt.backward(linear_loss([p, q], [2.0, 2.0]))
    clipped = list(opt.master_params()) if through == "master_params" else groups_params(opt)
    assert float(nn.utils.clip_grad_norm_(clipped, 2.0)) == 4.0
    opt.step()
    assert torch.allclose(q.float(), torch.zeros(1), atol=1e-3)


def test_clip_gives_the_norm_and_the_bits_of_full_masters() -> None:
    opts, models = pair(OptimizerCase("", "SGD", {"lr": 0.5, "momentum": 0.9}), recipes.MIXED)
    for k, clips in enumerate(([1.0], [0.5, 2.0], [1e9], [0.25, 0.125, 1.0], [3.0])):
        norms = []
        for opt, params in zip(opts, models, strict=True):
            opt.zero_grad()
            opt.backward(linear_loss(params, gradients(params, k, False)))
            norms.append([float(opt.clip_master_grads(c, norm_type=1.0 if k == 4 else 2.0)) for c in clips])
        assert norms[0] == pytest.approx(norms[1], rel=1e-7)
        grads = [[m.grad for m in opt.master_params()] for opt in opts] if k == 3 else [[], []]
        for a, b in zip(*grads, strict=True):
            assert_same_bits(b, a)
        for opt in opts:
            opt.step()
    for full, split in zip(masters(opts[0]), masters(opts[1]), strict=True):
        assert torch.allclose(split, full, rtol=1e-6, atol=2.0**-38)


def test_update_again_undoes_a_clip_and_reads_gradients_anew() -> None:
    p = ones(2)
    opt = wrap(SGD([p], lr=1.0))
    opt.backward(linear_loss([p], [4.0]))
    opt.clip_master_grads(0.5)
    next(opt.master_params()).grad.zero_()
    opt.update_master_grads()
    assert_same_bits(next(opt.master_params()).grad, array([4.0] * 2, torch.float32))


def test_a_gradient_written_after_the_update_counts_and_is_checked() -> None:
    p = ones(2)
    opt = wrap(SGD([p], lr=0.5), loss_scale=8.0)
    opt.backward(linear_loss([p], [1.0]))
    p.grad.mul_(2.0)
    opt.step()
    assert p.tolist() == [0.0, 0.0]
    opt.zero_grad()
    opt.backward(linear_loss([p], [1.0]))
    with torch.no_grad():
        p.grad[1] = float("inf")
    opt.step()
    assert opt.step_was_skipped
    assert p.tolist() == [0.0, 0.0]


def test_accumulation_in_fp32_and_with_two_scalers() -> None:
    p = ones(2)
    opt = wrap(SGD([p], lr=1.0), loss_scale=4.0, grad_accumulation="fp32")
    opt.backward(linear_loss([p], [1.0]))
    for _ in range(100):
        opt.backward(p.float().sum() * 2.0**-13)
    assert p.grad is None
    opt.step()
    assert_same_bits(next(opt.master_params()), array([-100 * 2.0**-13] * 2, torch.float32))
    opt.zero_grad()
    other = DynamicLossScaler(2.0)
    opt.backward(linear_loss([p], [1.0]))
    opt.backward(linear_loss([p], [0.5]), scaler=other)
    opt.step()
    assert_same_bits(next(opt.master_params()), array([-1.5 - 100 * 2.0**-13] * 2, torch.float32))
    opt.zero_grad()
    assert not opt._grads.buffers, "FP32 gradients stay in memory"


def test_a_parameter_without_gradient_is_left_alone() -> None:
    p, q = ones(2), ones(2)
    opt = wrap(AdamW([{"params": [p]}, {"params": [q]}], lr=0.5, weight_decay=0.5))
    one_step(opt, [p, q], [1.0, None])
    assert q.tolist() == [1.0, 1.0]
    assert len(opt.state) == 1
    one_step(opt, [p, q], [1.0, 1.0])
    one_step(opt, [p, q], [None, 1.0])
    assert [int(opt.state[m]["step"]) for m in groups_params(opt)] == [2, 2]


def test_a_plain_backward_and_a_grad_scaler() -> None:
    p = ones(2)
    opt = wrap(SGD([p], lr=0.5), loss_scale=1.0)
    linear_loss([p], [1.0]).backward()
    opt.step()
    assert p.tolist() == [0.5, 0.5]
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for bad in (False, True):
        opt.zero_grad()
        scaler.scale(linear_loss([p], [float("inf") if bad else 1.0])).backward()
        scaler.unscale_(opt)
        scaler.step(opt)
        scaler.update()
        assert p.tolist() == [0.0, 0.0]


# -- skips, closures, errors ---------------------------------------------------------------------------------------


def test_overflow_leaves_everything_untouched() -> None:
    recipes.check_overflow_leaves_everything_untouched(
        lambda inner, **kwargs: wrap(inner, scaler=DynamicLossScaler(**kwargs))
    )


def test_a_closure_is_evaluated_again_after_an_overflow() -> None:
    p = ones(2)
    opt = wrap(SGD([p], lr=0.5), scaler=DynamicLossScaler(2.0**18))
    calls = []

    def closure() -> torch.Tensor:
        calls.append(p.tolist())
        opt.zero_grad()
        loss = linear_loss([p], [1.0])
        opt.backward(loss)
        return loss.detach()

    assert float(opt.step(closure)) == 2.0
    assert len(calls) > 1
    assert {tuple(c) for c in calls} == {(1.0, 1.0)}
    assert p.tolist() == [0.5, 0.5]
    stuck = wrap(SGD([q := ones(2)], lr=0.5), loss_scale=2.0**18)

    def overflowing() -> torch.Tensor:
        stuck.zero_grad()
        loss = linear_loss([q], [1.0])
        stuck.backward(loss)
        return loss.detach()

    stuck.step(overflowing)
    assert (q.tolist(), stuck.skipped_steps) == ([1.0, 1.0], 1)


class Fails(SGD):
    """Raises at its third call, when it is told to."""

    armed = False
    calls = 0

    def step(self, closure: Any = None) -> Any:
        self.calls += self.armed
        if self.armed and self.calls == 3:
            raise ArithmeticError("enough")
        return super().step(closure)


def test_a_step_that_fails_half_way_leaves_whole_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming, "BUCKET", 16)
    params = [ones(10) for _ in range(4)]
    opt = wrap(Fails(params, lr=0.5), scaler=DynamicLossScaler(8.0, growth_interval=1))
    opt.optimizer.armed = True
    opt.zero_grad()
    opt.backward(linear_loss(params, [1.0] * 4))
    with pytest.raises(ArithmeticError, match="enough"):
        opt.step()
    assert [p[0].item() for p in params] == [0.5, 0.5, 1.0, 1.0]
    assert opt.loss_scale == 16.0  # two buckets were stepped, so the gradients are used up
    assert all(torch.isnan(m).all() for m in groups_params(opt))
    opt.optimizer.armed = False
    one_step(opt, params, [1.0] * 4)
    assert [p[0].item() for p in params] == [0.0, 0.0, 0.5, 0.5]


def test_hooks_of_the_wrapped_optimizer_fire_once_and_see_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming, "BUCKET", 16)
    params = [ones(10) for _ in range(4)]
    inner = SGD(params, lr=0.5)
    fired: list[str] = []
    inner.register_step_pre_hook(lambda opt, args, kwargs: fired.append("pre"))
    inner.register_step_post_hook(lambda opt, args, kwargs: fired.append("post"))

    def halves(opt: Any, args: Any, kwargs: Any) -> None:
        for group in opt.param_groups:
            for m in group["params"]:
                m.grad.mul_(0.5)

    inner.register_step_pre_hook(halves)
    opt = wrap(inner)
    opt.register_step_post_hook(lambda opt, args, kwargs: fired.append("outer"))
    one_step(opt, params, [1.0] * 4)
    assert fired == ["pre", "post", "outer"]
    assert [p[0].item() for p in params] == [0.75] * 4


def test_a_scheduler_gives_no_warning_and_its_lr_is_used() -> None:
    p = ones(2)
    inner = SGD([p], lr=0.5)
    scheduler = torch.optim.lr_scheduler.StepLR(inner, 1, 0.5)
    opt = wrap(inner)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            one_step(opt, [p], [1.0])
            scheduler.step()
    assert p.tolist() == [0.25, 0.25]
    assert opt.param_groups[0]["lr"] == 0.125


@by_dtype
def test_masters_beyond_the_range_are_named_and_stay_finite(
    dtype: torch.dtype, caplog: pytest.LogCaptureFixture
) -> None:
    top = 65504.0 if dtype == torch.float16 else 3.3895e38
    p = nn.Parameter(torch.tensor([top, 1.0]).to(dtype))
    opt = wrap(SGD([p], lr=1.0), loss_scale=1.0, named_parameters=[("head.weight", p)])
    update = -40000.0 if dtype == torch.float16 else -1e36
    with caplog.at_level(logging.WARNING):
        one_step(opt, [p], [torch.tensor([update, 0.0])])
    assert "too large" in caplog.text
    assert "head.weight" in caplog.text
    assert torch.isinf(p[0])
    master = next(opt.master_params())
    assert torch.isfinite(master).all()
    assert float(master[0]) == pytest.approx(float(np.float32(top)) - update, rel=2.0**-8)
    one_step(opt, [p], [torch.tensor([-update, 0.0]) * 1.5])
    assert torch.isfinite(p).all()


# -- writes to the model -------------------------------------------------------------------------------------------


@by_dtype
def test_a_write_to_the_model_is_a_refresh(dtype: torch.dtype, caplog: pytest.LogCaptureFixture) -> None:
    p, q = ones(3, dtype), ones(3, dtype)
    opt = wrap(SGD([p, q], lr=2.0**-13), named_parameters=[("p", p), ("q", q)])
    one_step(opt, [p, q], [1.0, 1.0])
    p.data[1] = 4.0
    with caplog.at_level(logging.WARNING):
        one_step(opt, [p, q], [1.0, 1.0])
    assert "p" in caplog.text.split(":")[-1].split(".")[0]
    low = 2.0**-13
    assert masters(opt)[0].tolist() == [1 - low, 4.0 - low, 1 - low]
    assert masters(opt)[1].tolist() == [1 - 2 * low] * 3


def test_error_policy_and_refresh_masters() -> None:
    p = ones(2)
    opt = wrap(SGD([p], lr=2.0**-13), on_model_write="error")
    one_step(opt, [p], [1.0])
    p.data.fill_(2.0)
    opt.zero_grad()
    opt.backward(linear_loss([p], [1.0]))
    with pytest.raises(RuntimeError, match="written behind the optimizer"):
        opt.step()
    opt.refresh_masters()
    assert masters(opt)[0].tolist() == [2.0, 2.0]
    opt.step()
    assert masters(opt)[0].tolist() == [2 - 2.0**-13] * 2


@by_dtype
@pytest.mark.parametrize("value", [float("inf"), -float("inf"), float("nan"), -0.0, 65504.0])
def test_special_values_written_into_the_model(dtype: torch.dtype, value: float) -> None:
    p = ones(2, dtype)
    opt = wrap(SGD([p], lr=2.0**-13))
    one_step(opt, [p], [1.0])
    p.data[0] = value
    opt.refresh_masters()
    got, want = next(opt.master_params())[0], p.detach()[0].float()
    assert_same_bits(torch.nan_to_num(got, nan=7.0), torch.nan_to_num(want, nan=7.0))
    assert torch.isnan(got) == torch.isnan(want)


def test_an_infinite_half_at_construction_is_an_infinite_master() -> None:
    p = nn.Parameter(torch.tensor([float("inf"), -float("inf"), 1.0]).half())
    assert next(wrap(SGD([p], lr=1.0)).master_params()).tolist() == [float("inf"), -float("inf"), 1.0]


# -- checkpoints ---------------------------------------------------------------------------------------------------


def through_file(value: Any) -> Any:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


@pytest.mark.parametrize("case", params_of(one_per_class()))
@pytest.mark.parametrize("model_first", [True, False, None])
def test_resume_bit_exact(case: OptimizerCase, model_first: bool | None) -> None:
    if case.kind == "closure":
        pytest.skip("refused: see test_refusals")
    recipes.check_resume_bit_exact(
        lambda inner, **kwargs: wrap(inner, scaler=DynamicLossScaler(**kwargs)),
        case,
        {"init_scale": 64.0, "growth_interval": 3},
        model_first,
    )


def half_sgd(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return SGD([{"params": params[:1]}, {"params": params[1:], "momentum": 0.5}], lr=1.0)


def trained(mode: str, dtype: torch.dtype, steps: int = 6) -> tuple[Any, list[nn.Parameter]]:
    """Masters among which bfloat16's ties are common."""
    params = [nn.Parameter(torch.full((64,), 1.0).to(dtype)), *parameters([(5, 3)], dtype)]
    opt = wrap(half_sgd(params), mode, loss_scale=1.0)
    for k in range(steps):
        one_step(opt, params, [torch.arange(64) % 9 * -(2.0**-9), gradients(params, k, False)[1]])
    return opt, params


@by_dtype
@pytest.mark.parametrize("model_first", [True, False])
@pytest.mark.parametrize(("source", "target"), [("full", "split"), ("split", "full"), ("split", "split")])
def test_full_and_split_load_each_others_files(
    source: str, target: str, model_first: bool, dtype: torch.dtype, caplog: pytest.LogCaptureFixture
) -> None:
    opt, params = trained(source, dtype)
    saved = through_file({"opt": opt.state_dict(), "model": [p.detach() for p in params]})
    wanted = masters(opt)
    assert all(m.dtype == torch.float32 for m in saved["opt"]["masters"])
    ties = (wanted[0].view(torch.int32) & 0x1FFFF) == 0x8000
    assert dtype == torch.float16 or ties.any(), "without ties this tests little"

    fresh = [nn.Parameter(torch.zeros_like(p)) for p in params]
    loaded = wrap(half_sgd(fresh), target, loss_scale=1.0)

    def load_model() -> None:
        with torch.no_grad():
            for p, value in zip(fresh, saved["model"], strict=True):
                p.copy_(value)

    if model_first:
        load_model()
    loaded.load_state_dict(saved["opt"])
    if not model_first:
        load_model()
    with caplog.at_level(logging.WARNING):
        assert_same(loaded.state_dict(), opt.state_dict(), "after the load")
        for o, ps in ((opt, params), (loaded, fresh)):
            one_step(o, ps, gradients(ps, 50, False))
    assert "written" not in caplog.text
    for got, want in zip(masters(loaded), masters(opt), strict=True):
        assert torch.allclose(got, want, rtol=0, atol=2.0**-40) if dtype == torch.float16 else torch.equal(got, want)


def test_a_write_after_a_load_is_still_noticed(caplog: pytest.LogCaptureFixture) -> None:
    opt, params = trained("full", torch.bfloat16)
    fresh = [nn.Parameter(torch.zeros_like(p)) for p in params]
    loaded = wrap(half_sgd(fresh), loss_scale=1.0)
    loaded.load_state_dict(opt.state_dict())
    with torch.no_grad():
        for p, value in zip(fresh, params, strict=True):
            p.copy_(value)
        fresh[0][3] = 9.0
    with caplog.at_level(logging.WARNING):
        loaded.state_dict()
    assert "written" in caplog.text
    assert masters(loaded)[0][3] == 9.0


def test_a_refused_load_leaves_it_as_it_was() -> None:
    opt, params = trained("split", torch.bfloat16)
    before = masters(opt), [p.clone() for p in params]
    bad = copy.deepcopy(opt.state_dict())
    bad["masters"][1] = torch.zeros(7)
    with pytest.raises(ValueError, match="shape"):
        opt.load_state_dict(bad)
    assert_same((masters(opt), [p.clone() for p in params]), before)


def test_loading_goes_on_after_a_hook_that_raises() -> None:
    """A strange optimizer's load is undone tensor by tensor; placeholders hold nothing to undo."""
    opt, _ = trained("split", torch.bfloat16)
    saved = copy.deepcopy(opt.state_dict())
    wanted = masters(opt)

    def raises(_: Any) -> None:
        raise KeyError("stop")

    handle = opt.optimizer.register_load_state_dict_post_hook(raises)
    with pytest.raises(KeyError, match="stop"):
        opt.load_state_dict(saved)
    handle.remove()
    assert_same(masters(opt), wanted)
    opt.load_state_dict(saved)
    assert_same(masters(opt), wanted)


def test_fp32_state_dict_with_tied_weights() -> None:
    torch.manual_seed(0)  # some first weights leave the ReLU dead, and no gradient
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.ReLU(), nn.Linear(4, 4, bias=False)).bfloat16()
    model[2].weight = model[0].weight
    opt = wrap(SGD(model.parameters(), lr=2.0**-10))
    for _ in range(3):
        opt.zero_grad()
        opt.backward(model(torch.ones(2, 4).bfloat16()).float().sum())
        opt.step()
    state = opt.fp32_state_dict(model)
    assert state["0.weight"] is state["2.weight"]
    assert_same_bits(state["0.weight"], next(opt.master_params()).detach())
    assert not torch.equal(state["0.weight"], model[0].weight.float())


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_copies_continue_alike_and_apart(how: str) -> None:
    opt, params = trained("split", torch.float16)
    both = (opt, params)
    other, others = copy.deepcopy(both) if how == "deepcopy" else pickle.loads(pickle.dumps(both))
    for m in groups_params(other):
        assert m.untyped_storage().nbytes() <= 4, "a placeholder has memory"
    for o, ps in ((opt, params), (other, others)):
        one_step(o, ps, gradients(ps, 9, False))
    assert_same(masters(other), masters(opt))
    one_step(other, others, gradients(others, 10, False))
    assert not torch.equal(masters(other)[1], masters(opt)[1])


def test_add_param_group_and_thaw() -> None:
    p, q, r = ones(3), ones(2), ones(2)
    r.requires_grad_(False)
    opt = wrap(SGD([p, r], lr=2.0**-13))
    one_step(opt, [p], [1.0])
    opt.add_param_group({"params": [q], "lr": 2.0**-12})
    r.requires_grad_(True)
    for _ in range(2):
        one_step(opt, [p, q, r], [1.0, 1.0, 1.0])
    low = 2.0**-13
    got = {id(model): m.tolist() for model, m in zip(opt.model_params(), opt.master_params(), strict=True)}
    assert got[id(p)] == [1 - 3 * low] * 3
    assert got[id(q)] == [1 - 4 * low] * 2
    assert got[id(r)] == [1 - 2 * low] * 2


# -- memory, repr, refusals ----------------------------------------------------------------------------------------


def tensors_of(opt: Any) -> int:
    """Bytes of the model's 16-bit weights and of all tensors that the engine keeps beside optimizer state."""
    params: SplitParams = opt._params
    storages = {}
    kept = [*params.model, *params.master, *params.remainders.values(), *opt._grads.buffers.values()]
    kept += [p.grad for p in [*params.model, *params.master] if p.grad is not None]
    for shard in params.shards:
        kept += [v for v in vars(shard).values() if isinstance(v, torch.Tensor)]
        kept += [
            v for s in (shard.stats, shard.cast, shard.watch) for v in vars(s).values() if isinstance(v, torch.Tensor)
        ]
    for tensor in kept:
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
    return sum(storages.values())


def test_memory_kept_between_steps() -> None:
    params = [nn.Parameter(torch.ones(300_000).half()) for _ in range(8)]
    opt = wrap(AdamW(params, lr=0.1))
    for _ in range(2):
        one_step(opt, params, [1.0] * 8)
        opt.clip_master_grads(1.0)
    opt.zero_grad()
    per_parameter = tensors_of(opt) / (8 * 300_000)
    assert 4.0 <= per_parameter <= 4.25, per_parameter


def test_only_one_bucket_exists_in_fp32_during_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming, "BUCKET", 4096)
    params = [nn.Parameter(torch.ones(1000).half()) for _ in range(40)]
    seen = []

    class Looks(SGD):
        def step(self, closure: Any = None) -> Any:
            alive = [m for m in everything if m.untyped_storage().nbytes() > 4]
            seen.append((sum(m.numel() for m in alive), len({m.untyped_storage().data_ptr() for m in alive})))
            assert all(type(m) is nn.Parameter for m in self.param_groups[0]["params"])
            return super().step(closure)

    everything: list[Any] = []
    opt = wrap(Looks(params, lr=0.5))
    everything += groups_params(opt)
    seen.clear()
    one_step(opt, params, [1.0] * 40)
    assert [count for _, count in seen] == [1] * len(seen)
    assert len(seen) == 10
    assert max(numel for numel, _ in seen) <= 4096


def test_repr_says_it() -> None:
    text = repr(wrap(SGD([ones(2)], lr=0.1)))
    assert "master_weights: 'split'" in text
    assert "1 float16 with split masters" in text


class OneStepSize(SGD):
    """Scales by the norm of all gradients, as some optimizers do."""

    def step(self, closure: Any = None) -> Any:
        nn.utils.clip_grad_norm_([p for g in self.param_groups for p in g["params"]], 0.5)
        return super().step(closure)


@pytest.mark.parametrize(
    ("make", "kwargs", "match"),
    [
        (lambda p: torch.optim.LBFGS(p), {}, r'master_weights="split": torch.optim.lbfgs.LBFGS .* needs a closure'),
        (lambda p: OneStepSize(p, lr=0.1), {}, r"OneStepSize can't be stepped a bucket at a time: .*parameter"),
        (lambda p: SGD(p, lr=0.1), {"on_model_write": "ignore"}, r'on_model_write="ignore" does not go with'),
        (lambda p: SGD(p, lr=0.1), {"master_weights": "half"}, r"master_weights.*'half'"),
    ],
)
def test_refusals(make: Any, kwargs: dict[str, Any], match: str) -> None:
    p = ones(3)
    inner = make([p])
    with pytest.raises(ValueError, match=match):
        MixedPrecisionOptimizer(inner, **{"master_weights": "split", **kwargs})
    assert inner.param_groups[0]["params"][0] is p


class Wrapped(torch.Tensor):
    """A tensor whose memory is not its own business."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError


def test_tensor_subclasses_are_refused_by_name() -> None:
    odd = torch.Tensor._make_wrapper_subclass(Wrapped, (3,), dtype=torch.float16, requires_grad=True)
    inner = SGD([ones(2)], lr=0.1)
    inner.param_groups[0]["params"].append(odd)
    with pytest.raises(
        ValueError, match=r'group 0, param 1.*: master_weights="split" takes plain tensors, got Wrapped'
    ):
        wrap(inner)


def test_training_random_calls_equal_full_masters() -> None:
    """A random sequence of everything that may be called in a step."""
    rng = np.random.default_rng(3)
    opts, models = pair(OptimizerCase("", "AdamW", {"lr": 0.02}), torch.bfloat16)
    for k in range(60):
        draw = rng.integers(0, 8, 4)
        for opt, params in zip(opts, models, strict=True):
            if draw[0]:
                opt.zero_grad(set_to_none=bool(draw[0] % 2))
            for n in range(1 + draw[1] // 4):
                grads = gradients(params, 1000 * k + n, False)
                opt.backward(linear_loss(params, grads), update_master_grads=bool(draw[2]))
            if draw[3] == 1:
                list(opt.master_params())[1].grad.mul_(0.5)
            if draw[3] in (2, 3):
                opt.clip_master_grads(0.5)
            if draw[3] == 3:
                opt.clip_master_grads(0.25)
            if draw[3] == 4:
                opt.update_master_grads()
            if draw[3] == 5:
                opt.load_state_dict(copy.deepcopy(opt.state_dict()))
                opt.zero_grad()
            if draw[3] == 6:
                train(opt, params, Problem(params), factor=float("inf"))
                continue
            opt.step()
        for full, split in zip(masters(opts[0]), masters(opts[1]), strict=True):
            assert_same_bits(split, full, f"call {k}")
    assert_same(state_of(opts[1]), state_of(opts[0]), "state")


# -- with fused steps ----------------------------------------------------------------------------------------------

FUSED = [
    OptimizerCase("AdamW", "AdamW", {"lr": 0.02, "weight_decay": 0.1}),
    OptimizerCase("Adam-amsgrad", "Adam", {"lr": 0.02, "amsgrad": True, "maximize": True, "weight_decay": 0.1}),
    OptimizerCase("SGD", "SGD", {"lr": 0.1}),
    OptimizerCase("SGD-nesterov", "SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    OptimizerCase("SGD-dampening", "SGD", {"lr": 0.1, "momentum": 0.9, "dampening": 0.5, "weight_decay": 0.1}),
]
by_fused_case = pytest.mark.parametrize("case", [pytest.param(case, id=case.id) for case in FUSED])


@by_fused_case
@by_dtype
@pytest.mark.parametrize("clip", [None, 0.5])
def test_fused_steps_on_split_masters_equal_those_on_full_ones(
    case: OptimizerCase, dtype: torch.dtype, clip: float | None
) -> None:
    """Bit for bit in bfloat16; float16 within what its remainders resolve below 2^-16."""
    kinds = (dtype, dtype, dtype, torch.float32)
    opts, models = pair(case, kinds, fused_step=True)
    assert "step: fused" in repr(opts[1])
    for k in range(5):
        step_both(opts, models, k, clip=clip)
        for full, split in zip(masters(opts[0]), masters(opts[1]), strict=True):
            if dtype == torch.bfloat16:
                assert_same_bits(split, full, f"{case.id} step {k}")
            assert torch.allclose(split, full, rtol=1e-6, atol=2.0**-38)
    if dtype == torch.bfloat16:
        assert_same(state_of(opts[1]), state_of(opts[0]), "optimizer state")


@by_dtype
def test_fused_steps_keep_strides_and_read_gradients(dtype: torch.dtype) -> None:
    values = normal((2, 3, 4, 5), torch.float32, 1)
    for layout in (values.to(memory_format=torch.channels_last), values.permute(3, 1, 0, 2)):
        opts, models = [], []
        for mode in ("full", "split"):
            param = nn.Parameter(layout.to(dtype))
            opts.append(wrap(AdamW([param], lr=0.1), mode, fused_step=True))
            models.append([param])
        for k in range(3):
            for opt, params in zip(opts, models, strict=True):
                opt.zero_grad()
                opt.backward(linear_loss(params, gradients(params, k, False)))
                if k == 1:
                    for m in opt.master_params():
                        m.grad.mul_(0.5)
                opt.step()
        full, split = (next(opt.master_params()) for opt in opts)
        assert split.stride() == full.stride()
        assert torch.allclose(split, full, rtol=1e-6, atol=2.0**-38)
        key = groups_params(opts[1])[0]
        assert opts[1].state[key]["exp_avg"].stride() == full.stride()


def test_a_fused_step_that_can_not_serve_falls_back_to_buckets(caplog: pytest.LogCaptureFixture) -> None:
    opts, models = pair(FUSED[0], torch.bfloat16, fused_step=True)
    step_both(opts, models, 0)
    with caplog.at_level(logging.WARNING):
        for opt in opts:
            opt.param_groups[0]["differentiable"] = True
            opt.param_groups[0]["differentiable"] = False
            opt.param_groups[0]["lr"] = torch.tensor(0.02)
            for state in opt.state.values():
                state["exp_avg"] = state["exp_avg"].double().float()
        step_both(opts, models, 1)
        for opt in opts:
            state = next(iter(opt.state.values()))
            state["exp_avg"] = state["exp_avg"].to_sparse().to_dense()
            opt.param_groups[0]["differentiable"] = True
        step_both(opts, models, 2)
    assert "steps itself from here on" in caplog.text
    assert "step: general" in repr(opts[1])
    for full, split in zip(masters(opts[0]), masters(opts[1]), strict=True):
        assert_same_bits(split, full)


def test_a_sparse_gradient_in_a_fused_run_is_stepped_in_buckets() -> None:
    opts, models = [], []
    for mode in ("full", "split"):
        table = nn.Parameter(torch.ones(5, 3).bfloat16())
        opts.append(wrap(SGD([table], lr=0.5), mode, fused_step=True))
        models.append(table)
    fired: list[int] = []
    opts[1].optimizer.register_step_post_hook(lambda *_: fired.append(1))
    rows = torch.tensor([1, 3, 1])
    for _ in range(2):
        for opt, table in zip(opts, models, strict=True):
            opt.zero_grad()
            opt.backward(nn.functional.embedding(rows, table, sparse=True).float().sum())
            opt.step()
    assert_same(masters(opts[1]), masters(opts[0]))
    assert fired == [1, 1]


def test_fused_split_memory_skip_and_resume() -> None:
    params = [nn.Parameter(torch.ones(200_000).bfloat16()) for _ in range(4)]
    opt = wrap(AdamW(params, lr=0.1), scaler=DynamicLossScaler(8.0), fused_step=True)
    one_step(opt, params, [1.0] * 4)
    before = masters(opt)
    one_step(opt, params, [1.0, 1.0, float("nan"), 1.0])
    assert opt.step_was_skipped
    assert_same(masters(opt), before)
    opt.zero_grad()
    assert 4.0 <= tensors_of(opt) / 800_000 <= 4.25
    saved = through_file(opt.state_dict())
    fresh = [nn.Parameter(torch.zeros_like(p)) for p in params]
    other = wrap(AdamW(fresh, lr=0.1), scaler=DynamicLossScaler(8.0))  # streamed
    other.load_state_dict(saved)
    for o, ps in ((opt, params), (other, fresh)):
        one_step(o, ps, [0.5] * 4)
    for a, b in zip(masters(opt), masters(other), strict=True):
        assert torch.allclose(a, b, rtol=1e-6, atol=1e-6)


def test_writes_to_the_model_are_noticed_with_fused_steps() -> None:
    p = ones(3, torch.bfloat16)
    opt = wrap(SGD([p], lr=2.0**-13), fused_step=True)
    one_step(opt, [p], [1.0])
    p.data[1] = 4.0
    one_step(opt, [p], [1.0])
    assert masters(opt)[0].tolist() == [1 - 2.0**-13, 4 - 2.0**-13, 1 - 2.0**-13]


@pytest.mark.parametrize("mode", ["full", "split"])
def test_loading_the_other_modes_weights_is_no_write_with_fused_steps(
    mode: str, caplog: pytest.LogCaptureFixture
) -> None:
    opt, params = trained("full" if mode == "split" else "split", torch.bfloat16)
    fresh = [nn.Parameter(torch.zeros_like(p)) for p in params]
    loaded = wrap(half_sgd(fresh), mode, loss_scale=1.0, fused_step=True)
    loaded.load_state_dict(opt.state_dict())
    with torch.no_grad():
        for p, value in zip(fresh, params, strict=True):
            p.copy_(value)
    with caplog.at_level(logging.WARNING):
        for o, ps in ((opt, params), (loaded, fresh)):
            one_step(o, ps, gradients(ps, 50, False))
    assert "written" not in caplog.text
    assert_same(masters(loaded)[0], masters(opt)[0])
