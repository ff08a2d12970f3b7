"""Gradients on their way to a step, in every mode: what is read, set, written, added up or dropped."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from engine.checks import (
    assert_same_bits,
    linear_loss,
    normal,
    one_step,
    ones,
    stored_grad,
    tensor_bytes,
)
from engine.split_cases import bytes_kept
from torch import Tensor, nn
from torch.optim import SGD, RMSprop

from fp16opt import MixedPrecisionOptimizer
from fused.test_fused_steps import give_grads, made

LAZY: list[dict[str, Any]] = [
    {"fused_step": True},
    {"fused_step": False, "master_weights": "split"},
    {"fused_step": True, "master_weights": "split"},
]
"""Modes in which a step makes no FP32 gradient that nobody reads."""
by_mode = pytest.mark.parametrize("mode", [{"fused_step": False}, *LAZY], ids=str)


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
def test_edits_before_the_first_look_count_in_the_norm(mode: dict[str, Any]) -> None:
    """At a scale of 1, where a model's gradient is a true one."""
    p, q = ones(4), ones(4)
    opt = wrapped([p, q], mode)
    opt.backward(linear_loss([p, q], [1.5, 1.0]))
    p.grad.mul_(2.0)
    q.grad.mul_(4.0)
    assert float(opt.clip_master_grads(1e9)) == 10.0
    opt.zero_grad()
    opt.backward(linear_loss([p, q], [1.5, 1.0]))
    held(opt)[0].grad.mul_(2.0)
    held(opt)[1].grad.mul_(4.0)
    assert float(opt.clip_master_grads(1e9)) == 10.0


@by_mode
@pytest.mark.parametrize("clips", [1, 2])
@pytest.mark.parametrize("reads", [(), (0,), (0, 1)])
def test_what_is_written_after_a_clip_is_refused_until_it_is_taken(
    mode: dict[str, Any], reads: tuple[int, ...], clips: int
) -> None:
    """Clipped or not, nobody can tell. Whether somebody read gradients before makes no difference."""
    p, q = ones(4), ones(4)
    opt = wrapped([p, q], mode, named_parameters=[("first", p), ("second", q)])
    opt.backward(linear_loss([p, q], [3.0, 4.0]))
    for i in reads:
        assert held(opt)[i].grad is not None
    for k in range(clips):
        opt.clip_master_grads(5.0 / (k + 1))
    p.grad.mul_(2.0)
    with pytest.raises(RuntimeError, match=r"(?s)first.*update_master_grads"):
        opt.step()
    assert (p.tolist(), q.tolist()) == ([1.0] * 4, [1.0] * 4)
    opt.update_master_grads()
    opt.step()
    assert (p.tolist(), q.tolist()) == ([-5.0] * 4, [-3.0] * 4)


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
def test_after_a_step_its_gradient_can_be_read(mode: dict[str, Any]) -> None:
    p = ones(4)
    opt = wrapped([p], mode)
    (master,) = held(opt)
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
    assert stored_grad(new) is None
    assert new.grad.tolist() == [2.0] * 4


@by_mode
def test_a_frozen_16_bit_parameter_makes_no_fp32_gradients(mode: dict[str, Any]) -> None:
    frozen, p = ones(4), ones(4)
    frozen.requires_grad_(False)
    opt = wrapped([frozen, p], mode)
    opt.backward(linear_loss([p], [1.0]))
    assert float(opt.clip_master_grads(1.0)) == 2.0
    assert stored_grad(held(opt)[0]) is None
    if mode in LAZY:
        assert stored_grad(held(opt)[1]) is None
    opt.step()
    assert p.tolist() == [0.5] * 4


def test_the_memory_of_gradients_that_are_read_at_every_step_is_kept_and_others_is_not() -> None:
    before = tensor_bytes()
    p = nn.Parameter(torch.ones(100_000).half())
    opt = MixedPrecisionOptimizer(SGD([p], lr=0.5), fused_step=True, loss_scale=8.0)
    places = set()
    for _ in range(4):
        opt.zero_grad()
        opt.backward(linear_loss([p], [1.0]))
        places.add(next(opt.master_params()).grad.data_ptr())
        opt.step()
    assert len(places) == 1
    for _ in range(3):
        opt.zero_grad()
        opt.backward(linear_loss([p], [1.0]))
        opt.step()
    opt.zero_grad()
    assert 6.0 <= bytes_kept(opt, before) / p.numel() <= 6.25


def test_the_norm_has_the_same_bits_once_gradients_were_read() -> None:
    params, opt = made("sgd")
    give_grads(opt, params, 0)
    norm = opt.clip_master_grads(1e9)
    _ = [master.grad for master in opt.master_params()]
    assert_same_bits(opt.clip_master_grads(1e9), norm)


@by_mode
def test_an_optimizer_that_steps_itself_steps_ordinary_parameters(mode: dict[str, Any]) -> None:
    """torch chooses its faster loops for these only."""
    kinds: list[type] = []

    class Looks(RMSprop):
        def step(self, closure: Any = None) -> Any:
            kinds.extend(type(p) for group in self.param_groups for p in group["params"] if p.grad is not None)
            return super().step(closure)

    opt = MixedPrecisionOptimizer(Looks([ones(4), ones(4)], lr=0.1), **{**mode, "fused_step": "auto"})
    kinds.clear()  # of what was tried when it was wrapped
    one_step(opt, list(opt.model_params()), [1.0, 1.0])
    assert kinds == [nn.Parameter] * 2


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
