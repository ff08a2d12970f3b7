"""What is known of older parameters survives when parameters or masters come later."""

from __future__ import annotations

import pytest
import torch

from engine.checks import assert_same_bits, by_step
from fp16opt import MixedPrecisionOptimizer

pytestmark = by_step


def _param(value: float, *, requires_grad: bool = True) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.full((4,), value, dtype=torch.float16), requires_grad=requires_grad)


@pytest.mark.parametrize("how", ["add_param_group", "through_the_wrapped_optimizer", "unfrozen"])
def test_model_write_not_reverted_when_parameters_come_before_the_step(how: str) -> None:
    first, frozen, late = _param(1.0), _param(1.0, requires_grad=False), _param(1.0)
    opt = MixedPrecisionOptimizer(torch.optim.SGD([first, frozen], lr=0.0))
    first.data[2] = 3.0
    if how == "add_param_group":
        opt.add_param_group({"params": [late]})
    elif how == "through_the_wrapped_optimizer":
        opt.optimizer.add_param_group({"params": [late]})
    else:
        frozen.requires_grad_(True)
    opt.backward((first.float() + frozen.float() + late.float()).sum())
    opt.step()
    assert_same_bits(first.detach(), torch.tensor([1.0, 1.0, 3.0, 1.0], dtype=torch.float16))


def test_a_master_written_by_the_user_wins_when_a_group_comes_before_the_step() -> None:
    first, late = _param(1.0), _param(1.0)
    opt = MixedPrecisionOptimizer(torch.optim.SGD([first], lr=0.0))
    with torch.no_grad():
        next(opt.master_params()).fill_(5.0)
        first.fill_(7.0)
    opt.add_param_group({"params": [late]})
    opt.backward(first.float().sum())
    opt.step()
    assert_same_bits(first.detach(), torch.full((4,), 5.0, dtype=torch.float16))


@pytest.mark.parametrize("folding", ["model", "fp32"])
def test_a_group_that_comes_between_backward_and_step_keeps_flags_and_sums(folding: str) -> None:
    first, late = _param(1.0), _param(1.0)
    opt = MixedPrecisionOptimizer(torch.optim.SGD([first], lr=1.0), loss_scale=2.0, grad_accumulation=folding)
    opt.backward(first.float().sum())
    opt.add_param_group({"params": [late]})
    opt.backward((first.float() + late.float() * float("inf")).sum())
    opt.step()
    assert opt.step_was_skipped
    assert [o.name for o in opt.overflow_report()] == ["group 1, param 0"]
    opt.zero_grad()
    opt.backward(first.float().sum())
    opt.add_param_group({"params": [_param(2.0)]})
    opt.step()
    assert_same_bits(first.detach(), torch.zeros(4, dtype=torch.float16))
