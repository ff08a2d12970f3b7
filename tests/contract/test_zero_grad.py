"""``zero_grad`` in both forms, before, between and after: zeros take part in the next step, as in torch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from contract.worlds import (
    INF,
    Mode,
    World,
    every_mode,
    every_mode_that_keeps_gradients,
    every_scale,
    instead,
    values,
)

WAYS = pytest.mark.parametrize("how", ["backward", "waiting", "scale_loss"])
DECAY = {"weight_decay": 0.125}


def zeros(world: World) -> list[Tensor]:
    return [torch.zeros(p.shape) for p in world.params]


@every_scale
@every_mode
@WAYS
@pytest.mark.parametrize("look", ["nothing", "update", "clip", "read"])
def test_zeros_in_the_middle_of_a_step_take_part(mode: Mode, scale: str, how: str, look: str) -> None:
    """Weight decay is applied though nothing came after."""
    if scale == "one" and look != "nothing":
        pytest.skip("once is enough")
    world = World(mode, scale, **DECAY)
    world.leave(how, values(0.5, 1.0, -0.5))
    if look == "update":
        world.opt.update_master_grads()
    if look == "clip":
        world.opt.clip_master_grads(2.0)
    if look == "read":
        world.check_master_grads(values(0.5, 1.0, -0.5))
    world.opt.zero_grad(set_to_none=False)
    world.opt.step()
    world.reference.step(zeros(world))
    world.check_weights()


@every_scale
@every_mode
def test_zeros_show_as_zeros(mode: Mode, scale: str) -> None:
    world = World(mode, scale)
    world.backward(values(0.5, 1.0, -0.5))
    world.opt.zero_grad(set_to_none=False)
    world.check_master_grads(zeros(world))
    for p in world.params:
        assert p.grad is None or not p.grad.any()
        assert mode.folds or p.grad is not None


@every_scale
@every_mode
def test_zeros_of_an_overflow_are_finite(mode: Mode, scale: str) -> None:
    world = World(mode, scale, **DECAY)
    world.backward([INF, INF, INF])
    world.opt.zero_grad(set_to_none=False)
    world.opt.step()
    world.reference.step(zeros(world))
    world.check_weights()
    assert not world.opt.step_was_skipped


@every_scale
@every_mode
@WAYS
def test_a_backward_after_zeros_adds_to_them(mode: Mode, scale: str, how: str) -> None:
    """A parameter that only the first batch used has a zero, so it decays; one that none used has not."""
    world = World(mode, scale, **DECAY)
    first = instead(values(0.5, 1.0, -0.5), 2, None)
    world.leave(how, first)
    world.opt.zero_grad(set_to_none=False)
    second = instead(instead(values(1.0, 2.0, 0.0), 0, None), 2, None)
    world.leave(how, second)
    world.expect_step([zeros(world)[0], second[1], None])


@every_mode_that_keeps_gradients
@pytest.mark.parametrize("scale", ["one", "static", "dynamic"])
def test_zeros_after_a_step_take_part_in_the_next(mode: Mode, scale: str) -> None:
    """As torch's zero_grad(set_to_none=False) then step: no backward came without us, so nothing is refused."""
    world = World(mode, scale, **DECAY)
    grads = values(0.5, 1.0, -0.5)
    world.backward(grads)
    world.expect_step(grads)
    world.opt.zero_grad(set_to_none=False)
    world.opt.step()
    world.reference.step(zeros(world))
    world.check_weights()


@every_mode
def test_zeros_where_there_was_no_gradient_are_none(mode: Mode) -> None:
    world = World(mode, **DECAY)
    world.opt.zero_grad(set_to_none=False)
    assert [p.grad for p in world.params] == [None] * 3
    assert [m.grad for m in world.masters] == [None] * 3
    world.opt.step()
    world.check()


@every_scale
@every_mode
@WAYS
@pytest.mark.parametrize("look", ["nothing", "update", "clip", "read"])
def test_none_discards_everything(mode: Mode, scale: str, how: str, look: str) -> None:
    if scale == "one" and look != "nothing":
        pytest.skip("once is enough")
    world = World(mode, scale, **DECAY)
    world.leave(how, [INF, 1.0, INF])
    if look == "update":
        world.opt.update_master_grads()
    if look == "clip":
        world.opt.clip_master_grads(2.0)
    if look == "read":
        assert world.masters[0].grad is not None
    world.opt.zero_grad()
    assert [p.grad for p in world.params] == [None] * 3
    assert [m.grad for m in world.masters] == [None] * 3
    world.opt.step()
    world.check()
    grads = values(0.5, 1.0, -0.5)
    world.leave(how, grads)
    world.expect_step(grads)


@every_mode
def test_none_keeps_the_memory_of_master_gradients(mode: Mode) -> None:
    world = World(mode)
    places = set()
    for k in range(4):
        world.opt.zero_grad()
        world.backward(values(0.5, 1.0, k))
        if mode.folds or mode.exact:
            places.add(world.masters[0].grad.data_ptr())
        world.opt.step()
    assert len(places) <= 1
