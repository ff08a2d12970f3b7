"""``clip_master_values``: every element of the true gradients is brought to at most a value; no overflow is hidden."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD

from contract.reference import clipped
from contract.worlds import INF, NAN, WRAPPED, Mode, World, every_mode, every_setting, every_way, instead, plus, values
from fp16opt import MixedPrecisionOptimizer

GRADS = values(0.5, 1.0, -0.25)


@every_setting
@every_way
def test_it_is_torchs_clamp_on_true_gradients(mode: Mode, scale: str, how: str) -> None:
    world = World(mode, scale)
    world.leave(how, GRADS)
    world.opt.clip_master_values(0.75)
    want = [g.clamp(-0.75, 0.75) for g in GRADS]
    world.check_master_grads(want)
    world.expect_step(want)


@every_mode
def test_some_of_them_and_sums_of_two_backwards(mode: Mode) -> None:
    world = World(mode, "static")
    first, second = GRADS, values(0.25, -2.0, 0.5)
    world.backward(first)
    world.backward(second)
    world.opt.clip_master_values(0.5, params=[world.params[1]])
    world.expect_step([g.clamp(-0.5, 0.5) if i == 1 else g for i, g in enumerate(plus(first, second))])


@every_mode
@pytest.mark.parametrize("bad", [INF, -INF, NAN], ids=str)
def test_it_makes_no_number_of_an_overflow(mode: Mode, bad: float) -> None:
    world = World(mode, "dynamic")
    world.backward(instead(GRADS, 2, torch.full_like(GRADS[2], bad)))
    world.opt.clip_master_values(0.5)
    assert not bool(world.masters[2].grad.isfinite().any())
    world.expect_skip()
    world.opt.zero_grad()
    world.backward(GRADS)
    world.expect_step(GRADS)


@every_mode
def test_a_clip_by_norm_after_it_measures_what_is_left(mode: Mode) -> None:
    world = World(mode, "static")
    world.backward(GRADS)
    world.opt.clip_master_values(0.75)
    want = [g.clamp(-0.75, 0.75) for g in GRADS]
    norm = world.expect_norm(world.opt.clip_master_grads(1.0), want)
    world.expect_step(clipped(want, norm, 1.0))


@every_mode
def test_a_clip_by_norm_before_it_counts(mode: Mode) -> None:
    world = World(mode, "static")
    world.backward(GRADS)
    norm = world.expect_norm(world.opt.clip_master_grads(2.0), GRADS)
    world.opt.clip_master_values(0.5)
    world.expect_step([g.clamp(-0.5, 0.5) for g in clipped(GRADS, norm, 2.0)])


def test_a_tensor_of_float64_is_clipped_at_the_number_itself() -> None:
    weight = nn.Parameter(torch.zeros(3, dtype=torch.float64))
    opt = MixedPrecisionOptimizer(SGD([weight], lr=1.0))
    opt.backward((weight * torch.tensor([0.05, 0.5, -3.0], dtype=torch.float64)).sum())
    opt.clip_master_values(0.1)
    opt.step()
    assert weight.tolist() == [-0.05, -0.1, 0.1]


def test_without_gradients_it_is_nothing() -> None:
    world = World(WRAPPED)
    world.opt.clip_master_values(0.5)
    world.backward(GRADS)
    world.expect_step(GRADS)


@pytest.mark.parametrize(("value", "error"), [(-1.0, ValueError), (NAN, ValueError), ("a", TypeError)])
def test_the_largest_value_is_a_number(value: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="max_value: expected a number"):
        World(WRAPPED).opt.clip_master_values(value)
