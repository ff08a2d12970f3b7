"""``clip_master_values``: every element of the true gradients is brought to at most a value; no overflow is hidden."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD

from contract.worlds import NAN, WRAPPED, Mode, World, every_mode, plus, values
from fp16opt import MixedPrecisionOptimizer

GRADS = values(0.5, 1.0, -0.25)


@every_mode
def test_some_of_them_and_sums_of_two_backwards(mode: Mode) -> None:
    world = World(mode, "static")
    first, second = GRADS, values(0.25, -2.0, 0.5)
    world.backward(first)
    world.backward(second)
    world.opt.clip_master_values(0.5, params=[world.params[1]])
    world.expect_step([g.clamp(-0.5, 0.5) if i == 1 else g for i, g in enumerate(plus(first, second))])


def test_a_tensor_of_float64_is_clipped_at_the_number_itself() -> None:
    weight = nn.Parameter(torch.zeros(3, dtype=torch.float64))
    opt = MixedPrecisionOptimizer(SGD([weight], lr=1.0))
    opt.backward((weight * torch.tensor([0.05, 0.5, -3.0], dtype=torch.float64)).sum())
    opt.clip_master_values(0.1)
    opt.step()
    assert weight.tolist() == [-0.05, -0.1, 0.1]


@pytest.mark.parametrize(("value", "error"), [(-1.0, ValueError), (NAN, ValueError), ("a", TypeError)])
def test_the_largest_value_is_a_number(value: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="max_value: expected a number"):
        World(WRAPPED).opt.clip_master_values(value)
