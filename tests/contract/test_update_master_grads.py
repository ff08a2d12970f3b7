"""``update_master_grads()``, the door: what is there now becomes the masters' gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_

from contract.worlds import (
    HALF,
    INF,
    KEEPS,
    WRAPPED,
    Mode,
    World,
    by,
    every_mode,
    every_mode_that_keeps_gradients,
    every_scale,
    every_setting,
    every_setting_that_keeps_gradients,
    every_way,
    instead,
    plus,
    sgd,
    times,
    values,
)
from fp16opt import DynamicLossScaler, LossScaler, MixedPrecisionOptimizer

GRADS, MORE = values(0.5, 1.0, -0.5), values(1.0, -0.25, 2.0)


def _halve(p: torch.Tensor) -> None:
    p.grad.mul_(0.5)


def _replace(p: torch.Tensor) -> None:
    p.grad = p.grad * 0.5


def _halve_data(p: torch.Tensor) -> None:
    p.grad.data.mul_(0.5)


EDITS: dict[str, Callable[[torch.Tensor], None]] = {"in place": _halve, "replaced": _replace, "data": _halve_data}
edits = pytest.mark.parametrize("edit", EDITS)


@every_setting_that_keeps_gradients
@every_way
@edits
def test_it_takes_what_was_written(mode: Mode, scale: str, how: str, edit: str) -> None:
    world = World(mode, scale)
    world.leave(how, GRADS)
    for p in world.params:
        EDITS[edit](p)
    world.opt.update_master_grads()
    world.check_master_grads(times(GRADS, 0.5))
    world.expect_step(times(GRADS, 0.5))


@every_setting_that_keeps_gradients
@pytest.mark.parametrize("call", ["step", "clip", "backward"])
def test_it_is_the_way_on_after_a_refusal(mode: Mode, scale: str, call: str) -> None:
    world = World(mode, scale)
    world.backward(GRADS)
    world.params[0].grad.mul_(0.5)
    calls = {
        "step": world.opt.step,
        "clip": lambda: world.opt.clip_master_grads(1.0),
        "backward": lambda: world.backward(MORE),
    }
    with pytest.raises(RuntimeError, match=r"first\.weight.*update_master_grads\(\)"):
        calls[call]()
    world.opt.update_master_grads()
    world.expect_step(instead(GRADS, 0, GRADS[0] * 0.5))


@every_setting_that_keeps_gradients
@pytest.mark.parametrize("look", ["clip", "update", "read"])
@pytest.mark.parametrize("i", [0, 1])
def test_after_the_check_it_takes_a_gradient_that_was_written(mode: Mode, scale: str, look: str, i: int) -> None:
    world = World(mode, scale)
    world.backward(GRADS)
    {
        "clip": lambda: world.opt.clip_master_grads(1e6),
        "update": world.opt.update_master_grads,
        "read": lambda: world.masters[0].grad,
    }[look]()
    world.params[i].grad.mul_(2.0)
    with pytest.raises(RuntimeError, match=world.names[i] + r".*update_master_grads\(\)"):
        world.opt.step()
    world.opt.update_master_grads()
    world.check_master_grads(instead(GRADS, i, GRADS[i] * 2))
    world.expect_step(instead(GRADS, i, GRADS[i] * 2))


@every_setting
def test_again_gives_the_same_bits(mode: Mode, scale: str) -> None:
    world = World(mode, scale)
    world.backward(GRADS)
    for _ in range(3):
        world.opt.update_master_grads()
        world.check_master_grads(GRADS)
    world.expect_step(GRADS)


@every_mode_that_keeps_gradients
@every_scale
@pytest.mark.parametrize("how", ["norm", "value", "torch", "edit"])
def test_it_undoes_a_clip_and_edits_of_master_gradients(mode: Mode, scale: str, how: str) -> None:
    if how in ("torch", "edit") and not mode.has_masters:
        pytest.skip("there are no masters to write")
    world = World(mode, scale)
    world.backward(GRADS)
    if how == "norm":
        world.opt.clip_master_grads(0.125)
    elif how == "value":
        world.opt.clip_master_values(0.125)
    elif how == "torch":
        clip_grad_norm_(world.masters, 0.125)
    else:
        world.masters[0].grad.mul_(0.125)
    world.opt.update_master_grads()
    world.check_master_grads(GRADS)
    world.expect_step(GRADS)


@every_mode_that_keeps_gradients
def test_after_it_has_undone_a_clip_backwards_go_on_adding_up(mode: Mode) -> None:
    world = World(mode)
    world.backward(GRADS)
    world.opt.clip_master_grads(0.125)
    world.opt.update_master_grads()
    world.backward(GRADS)
    world.expect_step(times(GRADS, 2.0))


@every_setting
def test_gradients_that_came_otherwise_are_taken_at_the_present_scale(mode: Mode, scale: str) -> None:
    """Scaled by hand, with autograd.grad and scale_loss, say."""
    world = World(mode, scale)
    for p, g in zip(world.params, GRADS, strict=True):
        p.grad = (g * world.scale).to(p.dtype)
    world.opt.update_master_grads()
    world.check_master_grads(GRADS)
    world.expect_step(GRADS)


@every_mode_that_keeps_gradients
def test_a_gradient_that_was_dropped_drops_its_master(mode: Mode) -> None:
    world = World(mode)
    world.backward(instead(GRADS, 0, torch.full((4,), INF)))
    world.opt.update_master_grads()
    world.params[0].grad = None
    world.opt.update_master_grads()
    world.check_master_grads(instead(GRADS, 0, None))
    world.expect_step(instead(GRADS, 0, None))


def test_without_gradients_it_is_nothing() -> None:
    world = World(WRAPPED, "dynamic")
    world.opt.update_master_grads()
    world.opt.step()
    world.check()


@every_mode
def test_both_values_of_the_argument_of_backward_train_alike(mode: Mode) -> None:
    worlds = [World(mode, "dynamic") for _ in range(2)]
    for k in range(4):
        for world, update in zip(worlds, (True, False), strict=True):
            world.opt.zero_grad()
            world.backward(values(0.5, 1.0, -0.5 * k), update_master_grads=False)
            world.backward(values(0.25, 1.0, 2.0), update_master_grads=update)
            world.opt.clip_master_grads(3.0)
            world.opt.step()
    first, second = ([m.detach().tolist() for m in world.masters] for world in worlds)
    assert first == second


@every_mode_that_keeps_gradients
def test_backwards_go_on_adding_up_after_it(mode: Mode) -> None:
    world = World(mode)
    world.backward(GRADS)
    for p in world.params:
        p.grad.mul_(0.5)
    world.opt.update_master_grads()
    world.backward(MORE)
    world.expect_step(plus(times(GRADS, 0.5), MORE))


def test_the_memory_of_master_gradients_is_used_again() -> None:
    world = World(WRAPPED)
    places = set()
    for _ in range(4):
        world.opt.zero_grad()
        assert world.masters[0].grad is None
        world.backward(GRADS)
        world.opt.update_master_grads()
        places.add(world.masters[0].grad.data_ptr())
        world.opt.step()
    assert len(places) == 1, "a new master gradient was allocated"


# -- two optimizers on one loss ----------------------------------------------------------------------------------------


def _two(modes: tuple[Mode, Mode], scalers: tuple[LossScaler, LossScaler]) -> tuple[list[nn.Parameter], list[Any]]:
    """A parameter and an optimizer each."""
    params = [nn.Parameter(torch.ones(4, dtype=HALF)) for _ in modes]
    opts = [
        MixedPrecisionOptimizer(sgd([param], lr=0.5), scaler=scaler, **mode.arguments)
        for param, mode, scaler in zip(params, modes, scalers, strict=True)
    ]
    return params, opts


def _loss(params: list[nn.Parameter]) -> torch.Tensor:
    first, second = params
    return first.float().sum() + 2.0 * second.float().sum()


@by(KEEPS)
@pytest.mark.parametrize("call", ["step", "clip"])
def test_with_scales_of_their_own_they_are_told_to_share_one(mode: Mode, call: str) -> None:
    params, (first, second) = _two((mode, mode), (DynamicLossScaler(8.0), DynamicLossScaler(8.0)))
    first.backward(_loss(params))
    first.step()
    with pytest.raises(RuntimeError, match="serves several optimizers, make them with the same scaler"):
        second.step() if call == "step" else second.clip_master_grads(1.0)
    assert params[1].tolist() == [1.0] * 4


@by(KEEPS)
def test_with_one_scaler_the_second_takes_what_the_backward_of_the_first_has_left(mode: Mode) -> None:
    """After a skip too, when the scale is another one."""
    scaler = DynamicLossScaler(16.0)
    params, opts = _two((WRAPPED, mode), (scaler, scaler))
    wanted, scales = [1.0, 1.0], []
    for factor in (1.0, INF, 1.0):
        for opt in opts:
            opt.zero_grad()
        opts[0].backward(_loss(params) * factor)
        opts[1].update_master_grads()
        scales.append(float(scaler.scale))
        for opt in opts:
            opt.step()
        if factor == 1.0:
            wanted = [wanted[0] - 0.5, wanted[1] - 1.0]
        assert [opt.step_was_skipped for opt in opts] == [factor == INF] * 2
        assert [param.tolist() for param in params] == [[want] * 4 for want in wanted]
    assert scales[2] < scales[0]
