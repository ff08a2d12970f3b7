"""Exceptions from backward, from the wrapped optimizer and from hooks: everything stays as it was."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

from engine import recipes
from engine.checks import (
    array,
    assert_model_is_rounded_masters,
    assert_same,
    assert_same_bits,
    by_step,
    linear_loss,
    one_step,
    ones,
    snapshot,
)
from fp16opt import MixedPrecisionOptimizer

pytestmark = by_step

ERRORS = [KeyboardInterrupt, ValueError]


class _Trap(torch.autograd.Function):
    """Identity whose backward raises the given error while it is armed."""

    armed: type[BaseException] | None = None

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        if _Trap.armed is not None:
            raise _Trap.armed("in backward")
        return grad


@pytest.fixture(autouse=True)
def _disarm() -> Any:
    yield
    _Trap.armed = None


def _trap_loss(p: Tensor, q: Tensor) -> Tensor:
    """p's gradient is accumulated, then the trap on the way to q goes off (autograd runs later nodes
    first)."""
    trapped = _Trap.apply(q.float())
    return trapped.sum() * 0.5 + (p.float() * 0.5).sum()


@pytest.mark.parametrize("mode", ["model", "fp32"])
@pytest.mark.parametrize("error", ERRORS, ids=lambda e: e.__name__)
def test_interrupted_backward_changes_nothing_and_zero_grad_recovers(error: type[BaseException], mode: str) -> None:
    p, q = ones(), ones(2, torch.float32)
    opt = recipes.engine(SGD([p, q], lr=0.5, momentum=0.5), init_scale=8.0, grad_accumulation=mode)
    one_step(opt, [p, q], [0.25, 0.25])
    opt.zero_grad()
    before = snapshot(opt, [p, q], scaler=True)
    _Trap.armed = error
    with pytest.raises(error, match="in backward"):
        opt.backward(_trap_loss(p, q))
    _Trap.armed = None
    assert_same(snapshot(opt, [p, q], scaler=True), before)
    opt.zero_grad()
    opt.step()
    assert_same(snapshot(opt, [p, q], scaler=True), before)
    p2, q2 = ones(), ones(2, torch.float32)
    clean = recipes.engine(SGD([p2, q2], lr=0.5, momentum=0.5), init_scale=8.0, grad_accumulation=mode)
    one_step(clean, [p2, q2], [0.25, 0.25])
    one_step(opt, [p, q], [0.5, 0.5])
    one_step(clean, [p2, q2], [0.5, 0.5])
    assert_same(snapshot(opt, [p, q], scaler=True), snapshot(clean, [p2, q2], scaler=True))


@pytest.mark.parametrize("call", ["step", "update_master_grads"])
@pytest.mark.parametrize("error", ERRORS, ids=lambda e: e.__name__)
def test_gradients_half_accumulated_by_an_interrupted_backward_are_never_stepped(
    error: type[BaseException], call: str
) -> None:
    p, q = ones(), ones(2, torch.float32)
    opt = recipes.engine(SGD([p, q], lr=0.5), init_scale=8.0)
    before = snapshot(opt, [p, q], scaler=True)
    opt.backward(_trap_loss(p, q))
    _Trap.armed = error
    with pytest.raises(error, match="in backward"):
        opt.backward(_trap_loss(p, q))
    _Trap.armed = None
    for _ in range(2):
        with pytest.raises(RuntimeError, match="zero_grad"):
            getattr(opt, call)()
    assert_same(snapshot(opt, [p, q], scaler=True), before)
    one_step(opt, [p, q], [1.0, 1.0])
    assert_same_bits(p, array([0.5] * 4))
    assert_same_bits(q, array([0.5] * 2, torch.float32))


@pytest.mark.parametrize("mode", ["model", "fp32"])
@pytest.mark.parametrize("call", ["step", "update_master_grads", "clip_master_grads", "backward"])
def test_an_interrupted_first_backward_is_refused_until_zero_grad(call: str, mode: str) -> None:
    p, q = ones(), ones(2, torch.float32)
    opt = recipes.engine(SGD([p, q], lr=0.5), init_scale=8.0, grad_accumulation=mode)
    before = snapshot(opt, [p, q], scaler=True)
    _Trap.armed = ValueError
    with pytest.raises(ValueError, match="in backward"):
        opt.backward(_trap_loss(p, q))
    _Trap.armed = None
    arguments = {"backward": (linear_loss([p, q], [1.0, 1.0]),), "clip_master_grads": (1.0,)}.get(call, ())
    with pytest.raises(RuntimeError, match="zero_grad"):
        getattr(opt, call)(*arguments)
    assert_same(snapshot(opt, [p, q], scaler=True), before)
    one_step(opt, [p, q], [1.0, 1.0])
    assert_same_bits(p, array([0.5] * 4))
    assert_same_bits(q, array([0.5] * 2, torch.float32))


@pytest.mark.parametrize("error", ERRORS, ids=lambda e: e.__name__)
def test_fp32_folding_is_refused_after_an_interruption(error: type[BaseException]) -> None:
    """The step is refused until zero_grad."""
    p, q = ones(), ones(2, torch.float32)
    opt = recipes.engine(SGD([p, q], lr=0.5), init_scale=8.0, grad_accumulation="fp32")
    opt.backward(_trap_loss(p, q))
    _Trap.armed = error
    with pytest.raises(error, match="in backward"):
        opt.backward(_trap_loss(p, q))
    _Trap.armed = None
    with pytest.raises(RuntimeError, match="zero_grad"):
        opt.step()
    assert_same_bits(p, array([1.0] * 4))
    assert_same_bits(q, array([1.0] * 2, torch.float32))
    one_step(opt, [p, q], [0.5, 0.5])
    assert_same_bits(p, array([0.75] * 4))
    assert_same_bits(q, array([0.75] * 2, torch.float32))


class _Fragile(SGD):
    """Raises where told: before it changes anything, or after the first group."""

    fails: str | None = None

    def step(self, closure: Any = None) -> Any:
        if self.fails == "before":
            raise ValueError("wrapped optimizer failed")
        if self.fails == "midway":
            with torch.no_grad():
                self.param_groups[0]["params"][0].add_(1.0)
            raise ValueError("wrapped optimizer failed")
        return super().step(closure)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_wrapped_step_that_raises_leaves_everything_and_may_be_repeated(dtype: torch.dtype) -> None:
    p, q = ones(4, dtype), ones(4, dtype)
    inner = _Fragile([p, q], lr=0.5, momentum=0.5)
    opt = recipes.engine(inner, init_scale=8.0, growth_interval=1)
    one_step(opt, [p, q], [0.5, 0.5])
    opt.zero_grad()
    opt.backward(linear_loss([p, q], [0.25, 0.25]))
    before = snapshot(opt, [p, q], scaler=True)
    inner.fails = "before"
    for _ in range(2):
        with pytest.raises(ValueError, match="wrapped optimizer failed"):
            opt.step()
        assert_same(snapshot(opt, [p, q], scaler=True), before)
    inner.fails = None
    opt.step()
    assert_same_bits(p, array([0.5] * 4, dtype))  # 0.75 - 0.5 * (0.5 * 0.5 + 0.25)
    assert float(opt.loss_scale) == 32.0


def test_wrapped_step_that_raises_midway_leaves_model_and_masters_in_agreement_at_the_next_step() -> None:
    p, q = ones(), ones()
    inner = _Fragile([p, q], lr=0.5)
    opt = recipes.engine(inner, init_scale=8.0)
    opt.backward(linear_loss([p, q], [0.5, 0.5]))
    inner.fails = "midway"
    with pytest.raises(ValueError, match="wrapped optimizer failed"):
        opt.step()
    assert float(opt.loss_scale) == 8.0
    assert int(opt.skipped_steps) == 0
    inner.fails = None
    one_step(opt, [p, q], [0.5, 0.5])
    assert_model_is_rounded_masters(opt)
    assert_same_bits(q, array([0.75] * 4))


@pytest.mark.parametrize("where", ["wrapper_pre", "wrapped_pre"])
def test_pre_hook_that_raises_leaves_everything_and_step_may_be_repeated(where: str) -> None:
    p, wide = ones(), ones(2, torch.float32)
    opt = recipes.engine(SGD([p, wide], lr=0.5, momentum=0.5), init_scale=8.0, growth_interval=1)
    opt.backward(linear_loss([p, wide], [0.5, 0.5]))
    before = snapshot(opt, [p, wide], scaler=True)

    def hook(*_: Any) -> None:
        raise ValueError("hook failed")

    target = opt if where == "wrapper_pre" else opt.optimizer
    handle = target.register_step_pre_hook(hook)
    with pytest.raises(ValueError, match="hook failed"):
        opt.step()
    assert_same(snapshot(opt, [p, wide], scaler=True), before)
    handle.remove()
    opt.step()
    assert_same_bits(p, array([0.75] * 4))
    assert_same_bits(wide, array([0.75] * 2, torch.float32))
    assert float(opt.loss_scale) == 16.0


@pytest.mark.parametrize("where", ["wrapper_post", "wrapped_post"])
def test_post_hook_that_raises_leaves_a_whole_step_behind(where: str) -> None:
    """A post hook runs after the update: like torch, the update stays; model and masters must agree."""
    p = ones()
    opt = recipes.engine(SGD([p], lr=0.5), init_scale=8.0)

    def hook(*_: Any) -> None:
        raise ValueError("hook failed")

    target = opt if where == "wrapper_post" else opt.optimizer
    handle = target.register_step_post_hook(hook)
    opt.backward(linear_loss([p], [0.5]))
    with pytest.raises(ValueError, match="hook failed"):
        opt.step()
    handle.remove()
    before = [m.detach().clone() for m in opt.master_params()]
    assert_same(before, [torch.full((4,), 0.75)])
    one_step(opt, [p], [0.5])
    assert_same_bits(p, array([0.5] * 4))
    assert_model_is_rounded_masters(opt)


def test_backward_on_a_loss_without_graph_raises_torchs_error_and_changes_nothing() -> None:
    p = ones()
    opt = MixedPrecisionOptimizer(SGD([p], lr=0.5), loss_scale=8.0)
    with pytest.raises(RuntimeError, match="grad"):
        opt.backward(torch.tensor(1.0))
    opt.zero_grad()
    one_step(opt, [p], [1.0])
    assert_same_bits(p, array([0.5] * 4))


def test_gradient_hook_that_raises_is_an_interrupted_backward() -> None:
    p = nn.Parameter(torch.ones(4, dtype=torch.float16))
    opt = MixedPrecisionOptimizer(SGD([p], lr=0.5), loss_scale=8.0)

    def hook(_: Tensor) -> None:
        raise ValueError("gradient hook")

    handle = p.register_hook(hook)
    with pytest.raises(ValueError, match="gradient hook"):
        opt.backward(linear_loss([p], [1.0]))
    handle.remove()
    assert_same_bits(p, array([1.0] * 4))
    one_step(opt, [p], [1.0])
    assert_same_bits(p, array([0.5] * 4))
