"""A GradScaler drives the wrapper by torch's own protocol: who unscales, who skips, who counts, and where to clip."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

import fp16opt
from contract.reference import clipped
from contract.worlds import (
    FOLDING,
    FUSED,
    INF,
    KEEPS,
    MIXED_WRAPPED,
    WRAPPED,
    Mode,
    World,
    by,
    every_mode,
    every_mode_that_keeps_gradients,
    values,
)
from fp16opt import DynamicLossScaler, MixedPrecisionOptimizer

SCALERS = pytest.mark.parametrize("cls", [torch.amp.GradScaler, fp16opt.GradScaler], ids=["torch", "fp16opt"])
UNSCALES = pytest.mark.parametrize("unscales", [False, True], ids=["step alone", "unscale_"])
GRADS, MORE = values(0.5, 1.0, -0.5), values(1.0, -0.25, 2.0)


class Driven(World):
    """The wrapper's own scale is a static 1; the GradScaler has 64. The reference holds the wrapper's side."""

    def __init__(self, mode: Mode, cls: Any, **options: Any) -> None:
        super().__init__(mode, "one", **options)
        self.grad_scaler = cls("cpu", init_scale=64.0, growth_interval=1000)

    def plain_backward(self, grads: Any) -> None:
        self.grad_scaler.scale(self.loss(grads)).backward()

    def drive(self, grads: Any, unscales: bool = False, between: Callable[[], object] = lambda: None) -> None:
        self.plain_backward(grads)
        if unscales:
            self.grad_scaler.unscale_(self.opt)
        between()
        self.finish()

    def finish(self) -> None:
        self.grad_scaler.step(self.opt)
        self.grad_scaler.update()


def test_the_wrapper_says_that_its_step_takes_scale_and_verdict() -> None:
    assert World(WRAPPED, "one").opt._step_supports_amp_scaling is True


@pytest.mark.parametrize("found", [0.0, 1.0, 2.0])
def test_a_verdict_from_outside_is_obeyed(found: float) -> None:
    """Another rank, or another device, may have overflowed. Without ``grad_scale`` gradients are true already."""
    world = World(WRAPPED, "one")
    world.loss(GRADS).backward()
    world.opt.grad_scale, world.opt.found_inf = None, torch.tensor(found)
    world.opt.step()
    del world.opt.grad_scale, world.opt.found_inf
    if found:
        world.expect_skipped()
    else:
        world.expect_stepped(GRADS)


@SCALERS
@every_mode
@UNSCALES
def test_gradients_below_fp16_reach_the_masters(cls: Any, mode: Mode, unscales: bool) -> None:
    """2^-28 is 0 in FP16; scaled by 64 it is not, and it is unscaled in FP32."""
    world = Driven(mode, cls)
    tiny = [torch.full_like(g, 2.0**-28) for g in GRADS]
    world.drive(tiny, unscales)
    world.expect_stepped(tiny)


@SCALERS
@UNSCALES
@pytest.mark.parametrize(
    "scaling", [{"dynamic": True}, {"loss_scale": 128.0}, {"scaler": DynamicLossScaler()}], ids=lambda s: next(iter(s))
)
def test_two_scales_are_refused_with_both_ways_out(cls: Any, unscales: bool, scaling: dict[str, Any]) -> None:
    weight = nn.Parameter(torch.ones(4, dtype=torch.float16))
    opt = MixedPrecisionOptimizer(SGD([weight], lr=0.5), **scaling)
    scaler = cls("cpu", init_scale=64.0)
    scaler.scale(weight.float().sum()).backward()

    def finish() -> None:
        if unscales:
            scaler.unscale_(opt)
        scaler.step(opt)

    with pytest.raises(
        RuntimeError, match=r"(?s)(GradScaler.*MixedPrecisionOptimizer|MixedPrecisionOptimizer.*GradSc)"
    ):
        finish()
    assert weight.tolist() == [1.0] * 4


@SCALERS
@every_mode_that_keeps_gradients
def test_a_batch_that_is_abandoned_after_unscale_counts_nothing(cls: Any, mode: Mode) -> None:
    """A loop that looks for an inf itself, then neither steps nor counts; the next iteration is whole."""
    world = Driven(mode, cls)
    world.plain_backward([INF, 1.0, 1.0])
    world.grad_scaler.unscale_(world.opt)
    world.opt.zero_grad()
    world.grad_scaler.update()
    world.check()
    world.drive(GRADS, True)
    world.expect_stepped(GRADS)


@SCALERS
@by([WRAPPED, FUSED])
def test_a_step_by_grad_scaler_and_one_of_the_wrappers_own_may_take_turns(cls: Any, mode: Mode) -> None:
    world = Driven(mode, cls)
    for k in range(4):
        world.opt.zero_grad()
        if k % 2:
            world.backward(GRADS)
            world.expect_step(GRADS)
        else:
            world.drive(GRADS, k == 2)
            world.expect_stepped(GRADS)


@SCALERS
@by([*KEEPS, MIXED_WRAPPED])
@UNSCALES
def test_a_step_that_was_refused_and_is_called_again_divides_once(cls: Any, mode: Mode, unscales: bool) -> None:
    """Here a weight was written, which ``on_model_write="error"`` refuses; the user puts it back."""
    world = Driven(mode, cls, arguments={"on_model_write": "error"})
    weight = world.params[world.half()]
    for _ in range(2):
        before = weight.detach().clone()
        with pytest.raises(RuntimeError, match="written behind the optimizer"):
            world.drive(GRADS, unscales, lambda: weight.data.add_(1.0))
        weight.data.copy_(before)
        world.finish()
        world.expect_stepped(GRADS)
        world.opt.zero_grad()


@SCALERS
def test_a_copy_is_driven_too(cls: Any) -> None:
    world = Driven(FUSED, cls)
    world.drive(GRADS)
    world.expect_stepped(GRADS)
    world.opt.zero_grad()
    world.params, world.opt = copy.deepcopy((world.params, world.opt))
    world.drive(GRADS, True)
    world.expect_stepped(GRADS)


@SCALERS
@UNSCALES
@pytest.mark.parametrize("fused_step", ["auto", False])
def test_sparse_gradients_are_unscaled_once(cls: Any, unscales: bool, fused_step: Any) -> None:
    table, weight = nn.Parameter(torch.ones(5, 2, dtype=torch.float16)), nn.Parameter(torch.ones(2).half())
    opt = MixedPrecisionOptimizer(SGD([table, weight], lr=0.5), fused_step=fused_step)
    scaler = cls("cpu", init_scale=8.0)
    rows = nn.functional.embedding(torch.tensor([1, 3, 1]), table, sparse=True)
    scaler.scale(rows.float().sum() + weight.float().sum()).backward()
    if unscales:
        scaler.unscale_(opt)
    scaler.step(opt)
    assert table[:, 0].tolist() == [1.0, 0.0, 1.0, 0.5, 1.0]
    assert weight.tolist() == [0.5] * 2


def test_ours_clips_the_wrappers_masters() -> None:
    world = Driven(FUSED, fp16opt.GradScaler)
    norms: list[Any] = []
    world.drive(GRADS, False, lambda: norms.append(world.grad_scaler.clip_grad_norm_(world.opt, 1.0)))
    norm = world.expect_norm(norms[0], GRADS)
    world.expect_stepped(clipped(GRADS, norm, 1.0))


# -- between unscale_ and the step -------------------------------------------------------------------------------------


@SCALERS
@every_mode
def test_after_unscale_the_door_is_closed(cls: Any, mode: Mode) -> None:
    """It would take scaled gradients in the place of those that were divided, or undo a clip."""
    world = Driven(mode, cls)

    def knock() -> None:
        for _ in range(2):
            with pytest.raises(RuntimeError, match=r"unscaled .*clip opt\.master_params\(\).*opt\.zero_grad\(\)"):
                world.opt.update_master_grads()

    world.drive(GRADS, True, knock)
    world.expect_stepped(GRADS)
    world.opt.zero_grad()
    world.plain_backward(GRADS)
    world.grad_scaler.unscale_(world.opt)
    world.opt.zero_grad()
    world.grad_scaler.update()
    world.opt.update_master_grads()
    assert [m.grad for m in world.masters] == [None] * 3


@SCALERS
@every_mode
def test_after_unscale_a_further_backward_is_refused(cls: Any, mode: Mode) -> None:
    world = Driven(mode, cls)

    def go_on() -> None:
        with pytest.raises(RuntimeError, match=r"(?s)unscale.*opt\.zero_grad\(\)"):
            world.backward(MORE)

    world.drive(GRADS, True, go_on)
    world.expect_stepped(GRADS)


# -- what a GradScaler leaves on the wrapper ---------------------------------------------------------------------------

HOOKS: dict[str, Callable[[Any], Callable[[Any], Any]]] = {
    "pre": lambda opt: opt.register_step_pre_hook,
    "post": lambda opt: opt.register_step_post_hook,
    "pre of the wrapped": lambda opt: opt.optimizer.register_step_pre_hook,
    "post of the wrapped": lambda opt: opt.optimizer.register_step_post_hook,
    "pre of all": lambda opt: register_optimizer_step_pre_hook,
    "post of all": lambda opt: register_optimizer_step_post_hook,
}


@SCALERS
@by([WRAPPED, FUSED, FOLDING])
@UNSCALES
@pytest.mark.parametrize("hook", HOOKS)
def test_an_exception_in_a_hook_leaves_nothing_of_the_grad_scalers(
    cls: Any, mode: Mode, unscales: bool, hook: str
) -> None:
    """Its scale and verdict would be taken for the next step's: a found inf would skip it, a scale divide it."""
    world = Driven(mode, cls)

    def fail(*_: Any) -> None:
        raise ValueError("the hook failed")

    handle = HOOKS[hook](world.opt)(fail)
    try:
        with pytest.raises(ValueError, match="the hook failed"):
            world.drive(GRADS, unscales)
    finally:
        handle.remove()
    assert not {"grad_scale", "found_inf"} & set(vars(world.opt))
    if hook.startswith("post"):
        world.expect_stepped(GRADS)
    else:
        world.check()
    world.opt.zero_grad()
    world.backward(MORE)
    world.expect_step(MORE)


@by([WRAPPED, FUSED, FOLDING])
def test_an_exception_on_a_skip_leaves_no_verdict_behind(mode: Mode) -> None:
    world = Driven(mode, torch.amp.GradScaler)

    def fail(*_: Any) -> None:
        raise ValueError("the hook failed")

    handle = world.opt.register_step_post_hook(fail)
    with pytest.raises(ValueError, match="the hook failed"):
        world.drive([INF, 1.0, 1.0])
    handle.remove()
    world.expect_skipped()
    world.opt.zero_grad()
    world.backward(GRADS)
    world.expect_step(GRADS)
