"""Several backwards for one step, several losses, several wrappers."""

from __future__ import annotations

import numpy as np
import oracle
import pytest
import torch
from torch import nn
from torch.optim import SGD

from engine import recipes
from engine.checks import (
    array,
    assert_same,
    assert_same_bits,
    by_step,
    linear_loss,
    normal,
    ones,
    parameters,
    snapshot,
)
from fp16opt import DynamicLossScaler, MixedPrecisionOptimizer, StaticLossScaler

pytestmark = by_step


def _grads(k: int, params: list[nn.Parameter]) -> list[torch.Tensor]:
    return [normal(tuple(p.shape), torch.float16, 100 * k + i).float() for i, p in enumerate(params)]


def test_two_backwards_add_up() -> None:
    recipes.check_accumulation(recipes.engine)


@pytest.mark.parametrize("update", ["each", "last", "explicit"])
def test_accumulation_in_the_model_sums_in_the_models_dtype(update: str) -> None:
    """Three micro-batches; passes on the way must not change the sum, nor divide it twice."""
    params = parameters([(9,), (2, 3)])
    opt = MixedPrecisionOptimizer(SGD(params, lr=0.0), loss_scale=4.0)
    want = [np.zeros(tuple(p.shape), np.float16) for p in params]
    for k in range(3):
        grads = _grads(k, params)
        opt.backward(linear_loss(params, grads), update_master_grads=update == "each" or (update == "last" and k == 2))
        want = [w + oracle.round_half(g.numpy() * np.float32(4.0)) for w, g in zip(want, grads, strict=True)]
    if update == "explicit":
        opt.update_master_grads()
    for m, w in zip(opt.master_params(), want, strict=True):
        assert_same_bits(m.grad, torch.from_numpy(oracle.unscale(w, 4.0)))


@pytest.mark.parametrize("update", [True, False], ids=["default", "update_master_grads=False"])
def test_accumulation_in_fp32_folds_each_backward_and_frees_the_16_bit_gradient(update: bool) -> None:
    params = parameters([(9,), (2, 3)], (torch.float16, torch.bfloat16))
    opt = MixedPrecisionOptimizer(SGD(params, lr=0.0), loss_scale=4.0, grad_accumulation="fp32")
    want = [torch.zeros(tuple(p.shape)) for p in params]
    for k in range(3):
        grads = _grads(k, params)
        opt.backward(linear_loss(params, grads), update_master_grads=update)
        if update:
            assert all(p.grad is None for p in params), "the 16-bit gradients were kept"
        want = [w + (g * 4.0).to(p.dtype).float() / 4.0 for w, g, p in zip(want, grads, params, strict=True)]
        if not update:
            break
    opt.update_master_grads()
    for m, w in zip(opt.master_params(), want, strict=True):
        assert_same_bits(m.grad, w)


def test_fp32_accumulation_starts_again_after_zero_grad_and_after_step() -> None:
    p = ones()
    opt = MixedPrecisionOptimizer(SGD([p], lr=1.0), loss_scale=4.0, grad_accumulation="fp32")
    opt.backward(linear_loss([p], [8.0]))
    opt.zero_grad()
    opt.backward(linear_loss([p], [0.25]))
    opt.backward(linear_loss([p], [0.25]))
    opt.step()
    assert_same_bits(p, array([0.5] * 4))
    opt.zero_grad()
    opt.backward(linear_loss([p], [0.25]))
    opt.step()
    assert_same_bits(p, array([0.25] * 4))


@pytest.mark.parametrize("mode", ["model", "fp32"])
@pytest.mark.parametrize("where", [0, 1, 2], ids=["first", "middle", "last"])
def test_overflow_in_any_micro_batch_skips_the_whole_step(mode: str, where: int) -> None:
    params = parameters([(5,), (3,)], (torch.float16, torch.float32))
    opt = recipes.engine(SGD(params, lr=1.0, momentum=0.5), init_scale=8.0, grad_accumulation=mode)
    before = snapshot(opt, params)
    for k in range(3):
        opt.backward(linear_loss(params, [float("inf") if k == where else 1.0, 1.0]))
    opt.step()
    assert bool(opt.step_was_skipped)
    assert float(opt.loss_scale) == 4.0
    assert_same(snapshot(opt, params), before)
    opt.zero_grad()
    opt.backward(linear_loss(params, [1.0, 1.0]))
    opt.step()
    assert not bool(opt.step_was_skipped)


def test_the_scale_does_not_change_between_the_backwards_of_one_step() -> None:
    p = ones()
    opt = recipes.engine(SGD([p], lr=1.0), init_scale=8.0, growth_interval=1)
    for _ in range(4):
        opt.backward(linear_loss([p], [0.125]))
        assert float(opt.loss_scale) == 8.0
    opt.step()
    assert float(opt.loss_scale) == 16.0
    assert_same_bits(p, array([0.5] * 4))


def test_infs_of_opposite_sign_that_cancel_to_nan_are_noticed() -> None:
    p = ones()
    opt = MixedPrecisionOptimizer(SGD([p], lr=1.0), loss_scale=8.0, grad_accumulation="fp32")
    opt.backward(linear_loss([p], [float("inf")]))
    opt.backward(linear_loss([p], [float("-inf")]))
    opt.step()
    assert bool(opt.step_was_skipped)
    assert_same_bits(p, array([1.0] * 4))


# ---- params that are their own masters


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_own_master_is_unscaled_once_for_each_backward(dtype: torch.dtype) -> None:
    p = ones(3, dtype)
    opt = MixedPrecisionOptimizer(SGD([p], lr=1.0), loss_scale=64.0)
    for k in range(1, 4):
        opt.backward(linear_loss([p], [0.25]))
        opt.update_master_grads()
        opt.update_master_grads()
        assert_same_bits(p.grad, torch.full((3,), 0.25 * k, dtype=dtype))
    opt.step()
    assert_same_bits(p, torch.full((3,), 0.25, dtype=dtype))


def test_own_master_without_updates_between_is_unscaled_once() -> None:
    p = ones(3, torch.float32)
    opt = MixedPrecisionOptimizer(SGD([p], lr=1.0), loss_scale=64.0)
    opt.backward(linear_loss([p], [0.25]), update_master_grads=False)
    opt.backward(linear_loss([p], [0.25]), update_master_grads=False)
    opt.update_master_grads()
    assert_same_bits(p.grad, torch.full((3,), 0.5))


@pytest.mark.parametrize("mode", ["model", "fp32"])
def test_what_an_own_master_held_before_is_set_aside_and_added(mode: str) -> None:
    p = ones(3, torch.float32)
    opt = MixedPrecisionOptimizer(SGD([p], lr=1.0), loss_scale=64.0, grad_accumulation=mode)
    p.grad = torch.full((3,), 2.0)  # unscaled, by the user
    opt.backward(linear_loss([p], [0.25]))
    opt.update_master_grads()
    assert_same_bits(p.grad, torch.full((3,), 2.25))
    opt.step()
    assert_same_bits(p, torch.full((3,), -1.25))


def test_own_master_beside_a_16_bit_param_over_a_growing_scale() -> None:
    p, wide = ones(3), ones(3, torch.float32)
    opt = recipes.engine(SGD([p, wide], lr=0.125), init_scale=8.0, growth_interval=1)
    for k in range(1, 7):
        opt.zero_grad()
        opt.backward(linear_loss([p, wide], [0.5, 0.5]))
        opt.backward(linear_loss([p, wide], [0.5, 0.5]))
        opt.step()
        assert_same_bits(p, array([1 - 0.125 * k] * 3))
        assert_same_bits(wide, array([1 - 0.125 * k] * 3, torch.float32))


# ---- several losses, several scalers, several wrappers


def test_several_scalers_each_scale_and_each_update() -> None:
    p, wide = ones(3), ones(2, torch.float32)
    first = DynamicLossScaler(8.0, growth_interval=1)
    second = DynamicLossScaler(1024.0, growth_interval=2)
    opt = MixedPrecisionOptimizer(SGD([p, wide], lr=1.0), scaler=first)
    opt.backward(linear_loss([p, wide], [0.25, 0.5]))
    opt.backward(linear_loss([p, wide], [0.125, 0.25]), scaler=second)
    opt.step()
    assert_same_bits(p, array([0.625] * 3))
    assert_same_bits(wide, array([0.25] * 2, torch.float32))
    assert float(first.scale) == 16.0
    assert float(second.scale) == 1024.0
    opt.zero_grad()
    opt.backward(linear_loss([p, wide], [0.125, 0.0]), scaler=second)
    opt.step()
    assert_same_bits(p, array([0.5] * 3))
    assert float(second.scale) == 2048.0, "the second scaler did not count its two clean steps"
    assert float(first.scale) == 16.0, "the first scaler took no part and must not move"


@pytest.mark.parametrize("bad", [0, 1], ids=["first_overflows", "second_overflows"])
def test_several_scalers_overflow_of_one_skips_the_step_and_backs_off_that_one(bad: int) -> None:
    params = parameters([(5,), (2,)], (torch.float16, torch.float32))
    scalers = [DynamicLossScaler(8.0, growth_interval=1), DynamicLossScaler(64.0, growth_interval=1)]
    opt = MixedPrecisionOptimizer(SGD(params, lr=1.0), scaler=scalers[0])
    before = snapshot(opt, params)
    for k in range(2):
        opt.backward(linear_loss(params, [float("inf") if k == bad else 1.0, 1.0]), scaler=scalers[k])
    opt.step()
    assert bool(opt.step_was_skipped)
    assert_same(snapshot(opt, params), before)
    want = [16.0, 128.0]
    want[bad] = [4.0, 32.0][bad]
    assert [float(s.scale) for s in scalers] == want


def test_scaler_argument_of_backward_must_be_a_scaler() -> None:
    p = ones()
    opt = MixedPrecisionOptimizer(SGD([p], lr=1.0), loss_scale=4.0)
    with pytest.raises(TypeError, match="scaler"):
        opt.backward(linear_loss([p], [1.0]), scaler=8.0)
    opt.step()
    assert_same_bits(p, array([1.0] * 4))


def test_one_scaler_in_two_wrappers_each_unscales_with_what_its_backward_used() -> None:
    p, q = ones(), ones()
    shared = DynamicLossScaler(8.0)
    a = MixedPrecisionOptimizer(SGD([p], lr=0.5), scaler=shared)
    b = MixedPrecisionOptimizer(SGD([q], lr=0.5), scaler=shared)
    a.backward(linear_loss([p], [float("inf")]))
    b.backward(linear_loss([q], [1.0]))
    a.step()
    assert float(shared.scale) == 4.0
    assert bool(a.step_was_skipped)
    b.step()
    assert not bool(b.step_was_skipped)
    assert_same_bits(q, array([0.5] * 4))
    assert_same_bits(p, array([1.0] * 4))


def test_one_loss_with_params_of_two_wrappers() -> None:
    """A GAN's shape: the loss is scaled by one wrapper; the other takes its gradients by the shared
    scaler."""
    p, q = ones(), ones()
    shared = StaticLossScaler(16.0)
    a = MixedPrecisionOptimizer(SGD([p], lr=0.5), scaler=shared)
    b = MixedPrecisionOptimizer(SGD([q], lr=0.5), scaler=shared)
    a.backward(linear_loss([p, q], [1.0, 0.5]))
    b.update_master_grads()  # in READY: gradients count as scaled by the current scale
    a.step()
    b.step()
    assert_same_bits(p, array([0.5] * 4))
    assert_same_bits(q, array([0.75] * 4))


@pytest.mark.parametrize("bad", [0, 1], ids=["half", "wide"])
@pytest.mark.parametrize("reads", [False, True], ids=["", "read between"])
def test_an_overflow_that_was_found_before_a_second_scale_came_skips_the_step(bad: int, reads: bool) -> None:
    """Gradients of the FP32 parameter are looked at by ``backward``, and all by a reader, before sums begin."""
    params = [ones(), ones(4, torch.float32)]
    first, second = DynamicLossScaler(init_scale=32.0), DynamicLossScaler(init_scale=64.0)
    opt = MixedPrecisionOptimizer(SGD(params, lr=0.5), scaler=first)
    opt.backward(linear_loss(params, [float("inf") if k == bad else 1.0 for k in range(2)]), scaler=second)
    if reads:
        assert [bool(m.grad.isfinite().all()) for m in opt.master_params()] == [bad != 0, bad != 1]
    opt.backward(linear_loss(params, [1.0, 1.0]))
    opt.step()
    assert opt.step_was_skipped
    assert (float(first.scale), float(second.scale)) == (32.0, 32.0)
    assert all(bool((p == 1).all()) for p in params)


def test_an_overflow_that_the_user_has_mended_before_a_second_scale_came_is_none() -> None:
    wide = ones(4, torch.float32)
    first, second = DynamicLossScaler(init_scale=32.0), DynamicLossScaler(init_scale=64.0)
    opt = MixedPrecisionOptimizer(SGD([wide], lr=0.5), scaler=first)
    opt.backward(linear_loss([wide], [float("inf")]), scaler=second)
    wide.grad.nan_to_num_(posinf=0.5)
    opt.backward(linear_loss([wide], [0.5]))
    opt.step()
    assert_same_bits(wide, torch.full((4,), 0.5))
    assert (float(first.scale), float(second.scale)) == (32.0, 64.0)


def test_inputs_argument_limits_which_grads_are_made() -> None:
    p, q = ones(), ones()
    opt = MixedPrecisionOptimizer(SGD([p, q], lr=0.5), loss_scale=8.0)
    opt.backward(linear_loss([p, q], [1.0, 1.0]), inputs=[p])
    opt.step()
    assert_same_bits(p, array([0.5] * 4))
    assert_same_bits(q, array([1.0] * 4))


def test_retain_graph_and_create_graph_reach_autograd() -> None:
    p = ones()
    opt = MixedPrecisionOptimizer(SGD([p], lr=0.25), loss_scale=8.0)
    loss = linear_loss([p], [1.0])
    opt.backward(loss, retain_graph=True)
    opt.backward(loss)
    opt.step()
    assert_same_bits(p, array([0.5] * 4))
    with pytest.raises(RuntimeError, match=r"second time|freed"):
        opt.backward(loss)
    opt.zero_grad()
    opt.backward((p.float() ** 2).sum(), create_graph=True)
    assert p.grad.requires_grad
    opt.step()
    (m,) = opt.master_params()
    assert not m.grad.requires_grad
    assert_same_bits(p, array([0.25] * 4))


def test_gradients_of_an_earlier_step_do_not_come_back_where_all_were_dropped() -> None:
    weight = torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    opt = MixedPrecisionOptimizer(SGD([weight], lr=0.5), dynamic=True, master_weights="split")
    opt.backward(weight.float().sum())
    assert next(opt.master_params()).grad is not None
    opt.clip_master_grads(1e9)
    opt.step()
    weight.grad = None
    opt.backward(weight.float().sum())
    weight.grad = None
    assert float(opt.clip_master_grads(1.0, params=[weight])) == 0.0
    assert next(opt.master_params()).grad is None
