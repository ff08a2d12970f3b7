"""``zero_grad`` in both forms: both sides are cleared, what was found is forgotten, the step begins anew."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

from contract.worlds import KEEPS, Mode, World, by, every_mode, instead, values
from fp16opt import MixedPrecisionOptimizer

GRADS = values(0.5, 1.0, -0.5)
DECAY = {"weight_decay": 0.125}


def zeros() -> list[Tensor]:
    return [torch.zeros_like(g) for g in GRADS]


@by([mode for mode in KEEPS if mode.has_masters])
def test_at_a_scale_of_one_a_gradient_may_be_set_beside_the_zeros(mode: Mode) -> None:
    """The others take part in the step: weight decay moves them."""
    world = World(mode, "one", **DECAY)
    world.backward(GRADS)
    world.expect_step(GRADS)
    world.opt.zero_grad(set_to_none=False)
    i = world.half()
    world.masters[i].grad = GRADS[i].clone()
    world.expect_step(instead(zeros(), i, GRADS[i]))


@every_mode
def test_inference_mode_around_it_changes_nothing(mode: Mode) -> None:
    world = World(mode)
    world.backward(GRADS)
    with torch.inference_mode():
        world.opt.zero_grad(set_to_none=False)
    world.backward(GRADS)
    world.expect_step(GRADS)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_sparse_gradients_are_cleared(set_to_none: bool) -> None:
    table = nn.Parameter(torch.ones(5, 2, dtype=torch.float16))
    opt = MixedPrecisionOptimizer(SGD([table], lr=1.0), loss_scale=8.0)
    for _ in range(2):
        opt.zero_grad(set_to_none=set_to_none)
        rows = nn.functional.embedding(torch.tensor([1, 3]), table, sparse=True)
        opt.backward(rows.float().sum())
        opt.step()
    assert table[:, 0].tolist() == [1.0, -1.0, 1.0, -1.0, 1.0]


def test_a_gradient_that_the_user_gave_a_master_is_cleared() -> None:
    """Also where nothing else had made one since the last ``zero_grad``."""
    weight = nn.Parameter(torch.ones(4, dtype=torch.float16))
    opt = MixedPrecisionOptimizer(SGD([weight], lr=1.0))
    opt.zero_grad()
    master = next(opt.master_params())
    master.grad = torch.full((4,), 0.5)
    opt.step()
    opt.zero_grad()
    assert master.grad is None
    assert weight.tolist() == [0.5] * 4


def test_a_gradient_that_autograd_gave_a_master_is_cleared() -> None:
    """Of a penalty on masters: it reaches ``.grad`` without a call of the optimizer's."""
    weight = nn.Parameter(torch.ones(4, dtype=torch.float16))
    opt = MixedPrecisionOptimizer(SGD([weight], lr=1.0))
    opt.zero_grad()
    master = next(opt.master_params())
    (0.5 * master.square().sum()).backward()
    opt.zero_grad()
    assert master.grad is None
