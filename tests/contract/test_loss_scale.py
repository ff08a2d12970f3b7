"""``loss_scale``: read at any time, written between steps only; the rule by which it moves."""

from __future__ import annotations

import torch

from contract.worlds import WRAPPED, World, values

GRADS = values(0.5, 1.0, -0.5)


def test_one_that_is_written_to_one_takes_plain_backwards() -> None:
    world = World(WRAPPED)
    world.opt.loss_scale = 1.0
    world.reference.scale.write(1.0)
    world.loss(GRADS).backward()
    world.expect_step(GRADS)


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
