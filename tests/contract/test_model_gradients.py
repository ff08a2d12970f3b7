"""The model's own gradients, edited between backward and step: whose they are, and until when."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

from contract import oracle
from contract.worlds import (
    ALL,
    INF,
    NAN,
    SCALES,
    Mode,
    World,
    by,
    every_mode,
    every_mode_that_keeps_gradients,
    every_scale,
    every_scale_but_one,
    instead,
    plus,
    times,
    values,
)
from fp16opt import MixedPrecisionOptimizer

WAITS = pytest.mark.parametrize("how", ["waiting", "scale_loss"])
WHAT_TO_CALL = r"update_master_grads|clip_master_grads|opt\.backward|backward\(loss|scale_loss|master_params"


def _halve(p: Tensor) -> None:
    p.grad.mul_(0.5)


def _replace(p: Tensor) -> None:
    p.grad = p.grad * 0.5


def _replace_unwritten(p: Tensor) -> None:
    """Another tensor that was written as often as the one it replaces."""
    old, new = p.grad, (p.grad * 0.5).detach()
    while new._version < old._version:
        new.mul_(1.0)
    p.grad = new


def _halve_unseen(p: Tensor) -> None:
    p.grad.data.mul_(0.5)


SHOWN = {"in place": _halve, "another tensor": _replace, "another with its version": _replace_unwritten}
EDITS = {**SHOWN, "data": _halve_unseen}


# -- they are the user's -------------------------------------------------------------------------------------------


@every_scale
@every_mode
@WAITS
@pytest.mark.parametrize("edit", EDITS)
def test_edits_count_until_somebody_looks(mode: Mode, scale: str, how: str, edit: str) -> None:
    """As a manual all_reduce writes them, those of FP32 parameters too."""
    world = World(mode, scale)
    grads = values(0.5, 1.0, -0.5)
    world.leave(how, grads)
    for p in world.params:
        EDITS[edit](p)
    world.expect_step(times(grads, 0.5))


@every_mode
@WAITS
@pytest.mark.parametrize("look", ["update", "clip", "read"])
def test_the_look_sees_the_edits(mode: Mode, how: str, look: str) -> None:
    world = World(mode)
    grads = values(0.5, 1.0, -0.5)
    world.leave(how, grads)
    for p in world.params:
        p.grad.mul_(2.0)
    grads = times(grads, 2.0)
    if look == "update":
        world.opt.update_master_grads()
    if look == "clip":
        norm = world.expect_norm(world.opt.clip_master_grads(2.0), grads)
        grads = oracle.clipped(grads, norm, 2.0)
    if look != "clip":
        world.check_master_grads(grads)
    world.expect_step(grads)


@every_mode
@WAITS
@pytest.mark.parametrize("value", [INF, NAN])
def test_an_edit_to_inf_skips_and_one_that_takes_it_away_does_not(mode: Mode, how: str, value: float) -> None:
    world = World(mode, "dynamic")
    grads = values(0.5, 1.0, -0.5)
    world.leave(how, grads)
    world.params[0].grad.view(-1)[0] = value
    world.expect_skip()
    world.opt.zero_grad()
    bad = instead(grads, 0, torch.full_like(grads[0], value))
    world.leave(how, bad)
    world.params[0].grad.zero_()
    world.expect_step(instead(grads, 0, torch.zeros_like(grads[0])))


@every_mode
@WAITS
def test_backwards_go_on_adding_to_edited_ones(mode: Mode, how: str) -> None:
    world = World(mode)
    grads = values(0.5, 1.0, -0.5)
    world.leave(how, grads)
    if not mode.folds:  # there the first backward's may be in the FP32 sums when the second begins
        for p in world.params:
            p.grad.mul_(0.5)
        grads = times(grads, 0.5)
    more = values(1.0, -0.25, 2.0)
    world.leave(how, more)
    world.expect_step(plus(grads, more))


# -- after backward(loss) ------------------------------------------------------------------------------------------


@every_mode_that_keeps_gradients
@pytest.mark.parametrize("edit", EDITS)
def test_at_a_scale_of_one_edits_count(mode: Mode, edit: str) -> None:
    world = World(mode, "one")
    grads = values(0.5, 1.0, -0.5)
    world.backward(grads)
    for p in world.params:
        EDITS[edit](p)
    norm = world.expect_norm(world.opt.clip_master_grads(2.0), times(grads, 0.5))
    world.expect_step(oracle.clipped(times(grads, 0.5), norm, 2.0))


@every_mode_that_keeps_gradients
def test_at_a_scale_of_one_a_clip_left_over_the_models_parameters_clips(mode: Mode) -> None:
    """It rounds the model's 16-bit gradients, and these are what is stepped."""
    world = World(mode, "one")
    world.backward(values(0.5, 1.0, -0.5))
    clip_grad_norm_(world.params, 2.0)
    world.expect_step([p.grad.float() for p in world.params])
    assert oracle.total_norm([p.grad for p in world.params]) == pytest.approx(2.0, rel=1e-3)


@every_mode
def test_at_a_scale_of_one_a_plain_backward_after_ours_counts(mode: Mode) -> None:
    world = World(mode, "one")
    grads, more = values(0.5, 1.0, -0.5), values(1.0, -0.25, 2.0)
    world.backward(grads)
    world.loss(more).backward()
    world.expect_step(plus(grads, more))


CALLS: dict[str, Callable[[World], object]] = {
    "backward": lambda world: world.backward(values(1.0, 1.0, 1.0)),
    "clip_master_grads": lambda world: world.opt.clip_master_grads(1.0),
    "step": lambda world: world.opt.step(),
    "step(closure)": lambda world: world.opt.step(lambda: torch.zeros(())),
}


def _expect_refusal(world: World, call: str, i: int) -> None:
    """By name, with what to call; weights, counts and scale are as they were; zero_grad gets on."""
    with pytest.raises(RuntimeError, match=WHAT_TO_CALL) as raised:
        CALLS[call](world)
    assert world.names[i] in str(raised.value)
    world.check()
    world.opt.zero_grad()
    grads = values(0.5, 1.0, -0.5)
    world.backward(grads)
    world.expect_step(grads)


@every_mode_that_keeps_gradients
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize(
    ("edit", "scale"),
    [
        ("in place", "static"),
        ("in place", "dynamic"),
        ("another tensor", "static"),
        ("another with its version", "dynamic"),
    ],
)
def test_at_another_scale_a_shown_write_is_refused(mode: Mode, scale: str, edit: str, call: str) -> None:
    world = World(mode, scale)
    world.backward(values(0.5, 1.0, -0.5))
    i = world.sixteen()
    SHOWN[edit](world.params[i])
    _expect_refusal(world, call, i)


@every_scale_but_one
@every_mode_that_keeps_gradients
@pytest.mark.parametrize("call", CALLS)
def test_at_another_scale_a_clip_left_over_the_models_parameters_is_refused(mode: Mode, scale: str, call: str) -> None:
    world = World(mode, scale)
    world.backward(values(0.5, 1.0, -0.5))
    clip_grad_norm_(world.params, 1.0)
    _expect_refusal(world, call, world.sixteen())


@every_scale_but_one
@every_mode
@pytest.mark.parametrize("call", CALLS)
def test_at_another_scale_a_plain_backward_after_ours_is_refused(mode: Mode, scale: str, call: str) -> None:
    """Where gradients are folded the model has none, so the plain backward leaves new ones."""
    world = World(mode, scale)
    world.backward(values(0.5, 1.0, -0.5))
    world.loss(values(1.0, -0.25, 2.0)).backward()
    _expect_refusal(world, call, world.sixteen())


@every_scale_but_one
@by([mode for mode in ALL if mode.folds])
@pytest.mark.parametrize("call", CALLS)
def test_at_another_scale_a_gradient_given_after_folding_is_refused(mode: Mode, scale: str, call: str) -> None:
    world = World(mode, scale)
    world.backward(values(0.5, 1.0, -0.5))
    i = world.sixteen()
    world.params[i].grad = torch.ones_like(world.params[i])
    _expect_refusal(world, call, i)


@every_scale_but_one
@every_mode_that_keeps_gradients
@pytest.mark.parametrize("edit", SHOWN)
def test_update_master_grads_takes_what_is_there_now(mode: Mode, scale: str, edit: str) -> None:
    """Also after the refusal; gradients of FP32 parameters were true and stay."""
    for refused in (False, True):
        world = World(mode, scale)
        grads = values(0.5, 1.0, -0.5)
        world.backward(grads)
        i = world.sixteen()
        SHOWN[edit](world.params[i])
        if refused:
            with pytest.raises(RuntimeError):
                world.opt.step()
        world.opt.update_master_grads()
        world.expect_step(instead(grads, i, grads[i] * 0.5))


@every_scale
@every_mode_that_keeps_gradients
def test_writes_past_the_counter_count_before_the_first_look(mode: Mode, scale: str) -> None:
    """After it nothing is promised: a step may read them again or not."""
    world = World(mode, scale)
    grads = values(0.5, 1.0, -0.5)
    world.backward(grads)
    for i, p in enumerate(world.params):
        if p.dtype is torch.float16:
            p.grad.data.mul_(0.5)
            grads = instead(grads, i, grads[i] * 0.5)
    norm = world.expect_norm(world.opt.clip_master_grads(2.0), grads)
    world.expect_step(oracle.clipped(grads, norm, 2.0))


@every_mode_that_keeps_gradients
@every_scale_but_one
@pytest.mark.parametrize("bad", [INF, NAN])
def test_an_overflow_that_comes_past_the_counter_before_the_first_look_skips(
    mode: Mode, scale: str, bad: float
) -> None:
    world = World(mode, scale)
    world.backward(values(0.5, 1.0, -0.5))
    world.params[0].grad.data[-1] = bad
    world.expect_skip()


# -- after a look --------------------------------------------------------------------------------------------------


@every_mode_that_keeps_gradients
@pytest.mark.parametrize(("edit", "scale"), list(zip(SHOWN, SCALES, strict=True)))
@pytest.mark.parametrize("look", ["clip", "small clip", "update"])
@pytest.mark.parametrize("call", ["backward", "clip_master_grads", "step"])
def test_after_a_look_a_shown_write_is_refused_at_any_scale(
    mode: Mode, scale: str, edit: str, look: str, call: str
) -> None:
    world = World(mode, scale)
    world.backward(values(0.5, 1.0, -0.5), update_master_grads=scale != "dynamic")
    _look(world, look)
    i = world.sixteen()
    SHOWN[edit](world.params[i])
    _expect_refusal(world, call, i)


def _look(world: World, look: str) -> None:
    if look == "update":
        world.opt.update_master_grads()
    else:
        world.opt.clip_master_grads(1e6 if look == "clip" else 0.5)


@every_scale
@every_mode_that_keeps_gradients
@pytest.mark.parametrize("look", ["clip", "small clip", "update"])
def test_after_a_look_update_master_grads_takes_the_write(mode: Mode, scale: str, look: str) -> None:
    """And undoes a clip of 16-bit ones; those of FP32 parameters are unscaled once and stay clipped."""
    if mode.is_mixed and look == "small clip":
        pytest.skip("the clip of FP32 parameters' gradients stays")
    world = World(mode, scale)
    grads = values(0.5, 1.0, -0.5)
    world.backward(grads)
    _look(world, look)
    i = world.sixteen()
    world.params[i].grad.mul_(2.0)
    world.opt.update_master_grads()
    grads = instead(grads, i, grads[i] * 2)
    world.check_master_grads(grads)
    world.expect_step(grads)


@pytest.mark.parametrize("beside", [torch.float16, torch.float32])
@pytest.mark.parametrize("call", ["backward", "clip", "step"])
def test_a_plain_backward_after_ours_is_noticed_though_a_master_was_read(call: str, beside: torch.dtype) -> None:
    """Reading makes master gradients of what is there, and does not make it ours."""
    half, other = torch.nn.Parameter(torch.ones(3).half()), torch.nn.Parameter(torch.ones(2, dtype=beside))
    opt = MixedPrecisionOptimizer(torch.optim.SGD([half, other], lr=0.25), loss_scale=64.0)

    def loss() -> Tensor:
        return half.float().sum() + other.float().sum()

    opt.backward(loss())
    loss().backward()
    assert next(opt.master_params()).grad is not None
    calls = {"backward": lambda: opt.backward(loss()), "clip": lambda: opt.clip_master_grads(1.0), "step": opt.step}
    with pytest.raises(RuntimeError, match=r"the model's gradients were written after backward\(loss\) had made them"):
        calls[call]()
    assert bool((half == 1.0).all())
    assert bool((other == 1.0).all())
