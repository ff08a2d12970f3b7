"""``loss_scale``: read at any time, written between steps only; the rule by which it moves."""

from __future__ import annotations

import pytest
import torch

from contract.worlds import INF, WRAPPED, Mode, World, every_mode, every_mode_that_keeps_gradients, every_way, values

GRADS = values(0.5, 1.0, -0.5)


@every_mode
@pytest.mark.parametrize("look", ["nothing", "clip", "read", "update"])
@every_way
def test_it_may_not_be_written_between_backward_and_step(mode: Mode, look: str, how: str) -> None:
    world = World(mode)
    world.leave(how, GRADS)
    if look == "clip":
        world.opt.clip_master_grads(1e6)
    if look == "read":
        assert world.masters[world.half()].grad is not None
    if look == "update":
        world.opt.update_master_grads()
    with pytest.raises(RuntimeError, match="loss_scale"):
        world.opt.loss_scale = 2.0
    assert world.opt.loss_scale == 64.0
    world.expect_step(GRADS)


@every_mode
@pytest.mark.parametrize("after", ["construction", "step", "zero_grad"])
def test_it_may_be_written_in_between_steps(mode: Mode, after: str) -> None:
    world = World(mode)
    if after != "construction":
        world.backward(GRADS)
        if after == "step":
            world.expect_step(GRADS)
        world.opt.zero_grad()
    world.opt.loss_scale = 2.0
    world.reference.scale.write(2.0)
    assert world.opt.loss_scale == 2.0
    world.opt.scale_loss(world.loss(GRADS)).backward()
    assert torch.equal(world.params[0].grad, (GRADS[0] * 2).half())
    world.expect_step(GRADS)


@every_mode_that_keeps_gradients
def test_it_may_be_written_once_all_gradients_are_gone(mode: Mode) -> None:
    world = World(mode)
    world.backward(GRADS)
    world.model_zero_grad()
    world.opt.loss_scale = 32.0
    world.reference.scale.write(32.0)
    world.backward(GRADS)
    world.expect_step(GRADS)


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf"), "8", None, True], ids=repr)
def test_what_is_no_scale_is_refused_and_the_old_one_stays(value: object) -> None:
    world = World(WRAPPED)
    with pytest.raises((TypeError, ValueError), match="scale"):
        world.opt.loss_scale = value
    assert world.opt.loss_scale == 64.0


def test_one_that_is_written_to_one_takes_plain_backwards() -> None:
    world = World(WRAPPED)
    world.opt.loss_scale = 1.0
    world.reference.scale.write(1.0)
    world.loss(GRADS).backward()
    world.expect_step(GRADS)


@every_mode
def test_it_grows_after_clean_steps_and_backs_off_after_an_overflow(mode: Mode) -> None:
    world = World(mode, "dynamic")
    seen = []
    for k in range(12):
        world.opt.zero_grad()
        if k in (4, 5):
            world.backward([INF, 1.0, 1.0])
            world.expect_skip()
        else:
            world.backward(GRADS)
            world.expect_step(GRADS)
        seen.append(world.opt.loss_scale)
    assert seen == [64.0, 64.0, 128.0, 128.0, 64.0, 32.0, 32.0, 32.0, 64.0, 64.0, 64.0, 128.0]


@every_mode
def test_a_step_without_gradients_does_not_move_it(mode: Mode) -> None:
    world = World(mode, "dynamic", scaler_settings={"growth_interval": 1})
    for _ in range(3):
        world.opt.step()
    assert world.opt.loss_scale == 64.0


def test_a_scale_that_is_no_power_of_two_unscales_by_one_multiplication() -> None:
    """Times FP32 1/scale, which differs from a division by an ulp now and then."""
    weight = torch.nn.Parameter(torch.zeros(1000, dtype=torch.float16))
    opt = World.wrap(torch.optim.SGD([weight], lr=1.0), loss_scale=3.0)
    weight.grad = torch.arange(1000).half()
    opt.update_master_grads()
    inv_scale = torch.ones(()) / torch.tensor(3.0)
    assert torch.equal(next(opt.master_params()).grad, torch.arange(1000.0) * inv_scale)


def test_an_fp16_loss_limits_it_to_2_to_the_15() -> None:
    """Its own scaled gradient is float16, so 2^16 always overflows there; calibration absorbs it."""
    weight = torch.nn.Parameter(torch.ones(4, dtype=torch.float16))
    opt = World.wrap(torch.optim.SGD([weight], lr=0.5), dynamic=True)
    for skipped in (True, False):
        opt.zero_grad()
        opt.backward((weight * 0.25).sum())
        opt.step()
        assert bool(opt.step_was_skipped) == skipped
    assert opt.loss_scale == 2.0**15
    assert weight.tolist() == [0.875] * 4
