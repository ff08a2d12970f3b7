"""Gradients that wait in 16 bits: what is read, set, written, added up or dropped on the way to a fused step."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from engine.checks import assert_same_bits, linear_loss, normal, one_step, ones
from torch import Tensor, nn
from torch.optim import SGD, AdamW, RMSprop

from fp16opt import MixedPrecisionOptimizer, kernels
from fp16opt.fused import has_grad, stored_grad
from fused.test_fused_steps import give_grads, made

MODES = [{"fused_step": True}, {"master_weights": "split"}, {"fused_step": True, "master_weights": "split"}]
by_mode = pytest.mark.parametrize("mode", MODES, ids=str)


def wrapped(params: list[Tensor], mode: dict[str, Any], lr: float = 1.0, **more: Any) -> MixedPrecisionOptimizer:
    return MixedPrecisionOptimizer(SGD(params, lr=lr), **mode, **more)


def held(opt: MixedPrecisionOptimizer) -> list[Tensor]:
    """What keeps the gradients: the masters, or what stands for them."""
    return [p for group in opt.param_groups for p in group["params"]]


@by_mode
def test_a_gradient_that_is_dropped_is_not_in_the_norm(mode: dict[str, Any]) -> None:
    p, q = ones(4), ones(4)
    opt = wrapped([p, q], mode)
    opt.backward(linear_loss([p, q], [3.0, 4.0]))
    held(opt)[0].grad = None
    assert float(opt.clip_master_grads(4.0)) == 8.0
    opt.step()
    assert p.tolist() == [1.0] * 4
    assert torch.allclose(q.float(), torch.full((4,), -1.0))
    opt.zero_grad()
    opt.backward(linear_loss([p, q], [3.0, 4.0]))
    assert float(opt.clip_master_grads(1e9)) == 10.0


@by_mode
def test_an_edit_counts_in_the_norm_though_another_gradient_is_looked_at_again(mode: dict[str, Any]) -> None:
    p, q = ones(4), ones(4)
    opt = wrapped([p, q], mode)
    opt.backward(linear_loss([p, q], [1.5, 1.0]))
    held(opt)[0].grad.mul_(2.0)
    q.grad.mul_(4.0)
    assert float(opt.clip_master_grads(1e9)) == 10.0


@by_mode
@pytest.mark.parametrize("reads", [(), (0,), (0, 1)])
def test_a_clip_stays_for_what_is_written_after_it(mode: dict[str, Any], reads: tuple[int, ...]) -> None:
    """Whether somebody read gradients before makes no difference."""
    p, q = ones(4), ones(4)
    opt = wrapped([p, q], mode)
    opt.backward(linear_loss([p, q], [3.0, 4.0]))
    for i in reads:
        assert held(opt)[i].grad is not None
    opt.clip_master_grads(5.0)
    p.grad.mul_(2.0)
    opt.step()
    assert torch.allclose(p.float(), torch.full((4,), -2.0))
    assert torch.allclose(q.float(), torch.full((4,), -1.0))


@by_mode
def test_two_clips_stay_for_what_is_written_after_them(mode: dict[str, Any]) -> None:
    p, q = ones(4), ones(4)
    opt = wrapped([p, q], mode)
    opt.backward(linear_loss([p, q], [3.0, 4.0]))
    opt.clip_master_grads(5.0)
    opt.clip_master_grads(2.5)
    p.grad.mul_(2.0)
    opt.step()
    assert torch.allclose(p.float(), torch.full((4,), -0.5), atol=1e-3)
    assert torch.allclose(q.float(), torch.zeros(4), atol=1e-3)


@by_mode
def test_an_overflow_that_is_taken_away_does_not_skip(mode: dict[str, Any]) -> None:
    p, q = ones(4), ones(4)
    opt = wrapped([p, q], mode)
    opt.backward(linear_loss([p, q], [float("inf"), 1.0]))
    p.grad = None
    opt.step()
    assert not opt.step_was_skipped
    assert (p.tolist(), q.tolist()) == ([1.0] * 4, [0.0] * 4)


@by_mode
@pytest.mark.parametrize("value", [2.0, float("inf")])
def test_a_gradient_in_place_of_another_counts_and_is_checked(mode: dict[str, Any], value: float) -> None:
    """Also where both were written as often."""
    p = ones(4)
    opt = wrapped([p], mode)
    opt.backward(linear_loss([p], [1.0]))
    kept, other = p.grad, torch.tensor([value] * 4).half()
    while other._version < kept._version:
        other.add_(0.0)
    p.grad = other
    assert kept._version == other._version
    opt.step()
    assert opt.step_was_skipped == (value != 2.0)
    assert p.tolist() == [-1.0 if value == 2.0 else 1.0] * 4


@by_mode
def test_what_waited_is_gone_once_the_model_is_at_the_next_step(mode: dict[str, Any]) -> None:
    p = ones(4)
    opt = wrapped([p], mode)
    (master,) = held(opt)
    opt.backward(linear_loss([p], [1.0]))
    opt.step()
    p.grad.mul_(2.0)
    assert master.grad is None
    opt.zero_grad()
    opt.backward(linear_loss([p], [1.0]))
    opt.step()
    assert master.grad.tolist() == [1.0] * 4, "as it was when the step used it"


@by_mode
def test_parameters_in_fp32_add_up_over_backwards_beside_16_bits(mode: dict[str, Any]) -> None:
    p, own = ones(4), ones(4, torch.float32)
    opt = wrapped([p, own], mode, loss_scale=8.0)
    for grads in ([1.0, 0.5], [0.5, 0.25], [None, 0.125]):
        opt.backward(linear_loss([p, own], grads))
    assert own.grad.tolist() == [0.875] * 4
    opt.step()
    assert (p.tolist(), own.tolist()) == ([-0.5] * 4, [0.125] * 4)


@by_mode
def test_gradients_of_parameters_that_come_later_are_made_when_read(mode: dict[str, Any]) -> None:
    p, q = ones(4), ones(4)
    opt = wrapped([p], mode, lr=0.5)
    one_step(opt, [p], [1.0])
    opt.add_param_group({"params": [q]})
    opt.zero_grad()
    opt.backward(linear_loss([p, q], [1.0, 2.0]))
    new = held(opt)[1]
    assert has_grad(new)
    assert stored_grad(new) is None
    assert new.grad.tolist() == [2.0] * 4


@by_mode
def test_a_frozen_16_bit_parameter_makes_no_fp32_gradients(mode: dict[str, Any]) -> None:
    frozen, p = ones(4), ones(4)
    frozen.requires_grad_(False)
    opt = wrapped([frozen, p], mode)
    opt.backward(linear_loss([p], [1.0]))
    assert float(opt.clip_master_grads(1.0)) == 2.0
    assert [stored_grad(m) for m in held(opt)] == [None, None]
    opt.step()
    assert p.tolist() == [0.5] * 4


def test_the_memory_of_gradients_that_are_read_at_every_step_is_kept_and_others_is_not() -> None:
    params, opt = made("sgd")
    places = set()
    for step in range(4):
        give_grads(opt, params, step)
        opt.update_master_grads()
        places.add(list(opt.master_params())[2].grad.data_ptr())
        opt.step()
    assert len(places) == 1
    for step in range(4, 7):
        give_grads(opt, params, step)
        opt.step()
    assert opt._grads.buffers == {}


def test_the_norm_is_not_read_again_because_gradients_were_made(monkeypatch: pytest.MonkeyPatch) -> None:
    params, opt = made("sgd")
    give_grads(opt, params, 0)
    norm = opt.clip_master_grads(1e9)
    _ = [master.grad for master in opt.master_params()]
    monkeypatch.setattr(kernels, "multi_tensor_l2norm", None)
    assert_same_bits(opt.clip_master_grads(1e9), norm)


def test_the_model_is_hashed_by_the_pass_and_not_again(monkeypatch: pytest.MonkeyPatch) -> None:
    params, opt = made("sgd")
    give_grads(opt, params, 0)
    opt.update_master_grads()
    hashes = kernels.multi_tensor_hash
    samples: list[bool] = []

    def counted(*args: Any, sample: bool = False, **kwargs: Any) -> None:
        samples.append(sample)
        hashes(*args, sample=sample, **kwargs)

    monkeypatch.setattr(kernels, "multi_tensor_hash", counted)
    opt.step()
    assert samples == [True]


def test_an_optimizer_that_steps_itself_steps_ordinary_parameters() -> None:
    """torch chooses its faster loops for these only."""
    kinds: list[type] = []
    inner = AdamW([ones(4)], lr=0.1)
    opt = MixedPrecisionOptimizer(inner, fused_step=True)
    inner.register_step_pre_hook(lambda o, *_: kinds.extend(type(p) for p in o.param_groups[0]["params"]))
    one_step(opt, list(opt.model_params()), [1.0])
    assert kinds.pop() is not nn.Parameter
    inner.param_groups[0]["differentiable"] = True
    one_step(opt, list(opt.model_params()), [1.0])
    assert kinds.pop() is nn.Parameter
    assert type(next(opt.master_params())) is not nn.Parameter
    other = MixedPrecisionOptimizer(RMSprop([ones(4)]), fused_step="auto")
    assert type(next(other.master_params())) is nn.Parameter


def test_gradients_do_not_wait_for_a_step_that_has_begun() -> None:
    """The option is gone by the time that the closure runs, but the optimizer steps itself all the same."""
    p = ones(4)
    inner = SGD([p], lr=1.0)
    opt = MixedPrecisionOptimizer(inner, fused_step=True)
    inner.param_groups[0]["differentiable"] = True
    inner.register_step_pre_hook(lambda o, *_: o.param_groups[0].update(differentiable=False))

    def closure() -> Tensor:
        opt.zero_grad()
        loss = linear_loss([p], [0.5])
        opt.backward(loss)
        return loss.detach()

    opt.step(closure)
    assert p.tolist() == [0.5] * 4


def test_what_a_pre_hook_sets_is_said(caplog: pytest.LogCaptureFixture) -> None:
    params, opt = made("sgd")
    give_grads(opt, params, 0)
    opt.optimizer.register_step_pre_hook(lambda o, *_: o.param_groups[0].update(differentiable=True))
    with caplog.at_level(logging.WARNING, logger="fp16opt"):
        opt.step()
    assert "group 0 has differentiable=True" in caplog.text


@by_mode
def test_gradients_in_other_strides(mode: dict[str, Any]) -> None:
    values = normal((6, 4), torch.float16, 1)
    p = nn.Parameter(torch.zeros(6, 4).half())
    opt = wrapped([p], mode)
    opt.scale_loss(torch.zeros(()))
    p.grad = values.t().contiguous().t()
    opt.clip_master_grads(1e9)
    opt.step()
    assert_same_bits(p, -values)
