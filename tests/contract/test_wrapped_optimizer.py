"""The wrapped optimizer used behind the wrapper's back: refused, and the object to call is named."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import StepLR

from fp16opt import MixedPrecisionOptimizer


def made(**arguments: Any) -> tuple[nn.Parameter, AdamW, MixedPrecisionOptimizer]:
    weight = nn.Parameter(torch.ones(4, dtype=torch.float16))
    inner = AdamW([weight], lr=0.5)
    return weight, inner, MixedPrecisionOptimizer(inner, loss_scale=8.0, **arguments)


def train(opt: MixedPrecisionOptimizer, weight: nn.Parameter) -> None:
    opt.zero_grad()
    opt.backward(weight.float().sum())
    opt.step()


@pytest.mark.parametrize("how", ["the same", "the wrapper"])
def test_wrapping_twice_is_refused(how: str) -> None:
    """The cell of a notebook is run a second time."""
    weight, inner, opt = made()
    with pytest.raises((TypeError, ValueError, RuntimeError), match=r"wrapped already|MixedPrecisionOptimizer"):
        MixedPrecisionOptimizer(inner if how == "the same" else opt, dynamic=True)
    train(opt, weight)
    assert not opt.step_was_skipped
    assert weight.tolist() == pytest.approx([0.495] * 4, abs=0.01)


def test_an_optimizer_whose_wrapping_was_refused_is_as_it_was() -> None:
    weight = nn.Parameter(torch.ones(4, dtype=torch.float16))
    inner = SGD([weight], lr=0.5)
    with pytest.raises(ValueError, match="loss_scale"):
        MixedPrecisionOptimizer(inner, loss_scale=-1.0)
    weight.grad = torch.ones_like(weight)
    inner.step()
    inner.zero_grad()
    assert weight.tolist() == [0.5] * 4
    opt = MixedPrecisionOptimizer(inner)
    train(opt, weight)
    assert weight.tolist() == [0.0] * 4


def test_another_optimizer_of_the_same_class_is_free() -> None:
    weight, _, opt = made()
    other = nn.Parameter(torch.ones(2))
    plain = AdamW([other], lr=0.5)
    other.sum().backward()
    plain.step()
    plain.zero_grad()
    assert other.tolist() == pytest.approx([0.495] * 2, abs=0.01)
    train(opt, weight)


class TwoPhases(SGD):
    """As SAM's, whose scripts call ``first_step`` and ``second_step``."""

    rho = 0.05

    def first_step(self) -> None:
        pass


def test_a_method_that_only_the_wrapped_optimizer_has_is_said_to_be_there() -> None:
    opt = MixedPrecisionOptimizer(TwoPhases([nn.Parameter(torch.ones(4, dtype=torch.float16))], lr=0.5))
    said = (
        r"no attribute 'first_step'\. The wrapped TwoPhases has: opt\.optimizer\.first_step\. .*write_masters\(\).*SAM"
    )
    with pytest.raises(AttributeError, match=said):
        opt.first_step()
    with pytest.raises(AttributeError, match=r"'rho'\. The wrapped TwoPhases has: opt\.optimizer\.rho\.$"):
        _ = opt.rho
    with pytest.raises(AttributeError, match=r"no attribute 'third_step'$"):
        opt.third_step()
    assert not hasattr(opt, "first_step")


def test_a_scheduler_stepped_before_the_first_step_is_warned_about_as_ever() -> None:
    _, inner, _ = made()
    weight, other, opt = made()
    scheduler = StepLR(other, 1)
    with pytest.warns(UserWarning, match="lr_scheduler.step"):
        scheduler.step()
    train(opt, weight)
    assert inner is not other
