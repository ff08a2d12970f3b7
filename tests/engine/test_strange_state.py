"""state_dict after somebody read ``state`` by the model's parameter; and resuming over a change of requires_grad."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Adam

from engine.checks import assert_same, by_step, linear_loss, one_step, ones
from fp16opt import MixedPrecisionOptimizer

pytestmark = by_step


def test_reading_state_by_the_models_parameter_leaves_nothing_to_save() -> None:
    params = [ones(), ones(3, torch.float32), ones()]
    opt = MixedPrecisionOptimizer(Adam(params))
    one_step(opt, params[:2] + params[2:], [1.0, 1.0, None])
    want = copy.deepcopy(opt.state_dict())
    unused = list(opt.master_params())[2]
    for param in params:
        opt.state[param]
    opt.state[unused]  # of a master: stays, as in torch
    got = opt.state_dict()
    assert got["optimizer"]["state"].pop(2) == {}
    assert_same(got, want)
    assert unused in opt.state
    other = MixedPrecisionOptimizer(Adam([nn.Parameter(p.detach().clone()) for p in params]))
    other.load_state_dict(want)


def _two(frozen: bool) -> tuple[list[nn.Parameter], MixedPrecisionOptimizer]:
    params = [ones(), ones()]
    params[0].requires_grad_(not frozen)
    return params, MixedPrecisionOptimizer(Adam(params))


def _step(params: list[Any], opt: MixedPrecisionOptimizer) -> None:
    opt.zero_grad()
    opt.backward(linear_loss(params, [1.0 if p.requires_grad else None for p in params]))
    opt.step()


def test_resuming_in_frozen_parameters_what_was_saved_after_unfreezing_goes_on() -> None:
    """The checkpoint's masters decide, not today's requires_grad."""
    params, opt = _two(frozen=True)
    _step(params, opt)
    params[0].requires_grad_(True)
    _step(params, opt)
    saved = copy.deepcopy(opt.state_dict())
    fresh, other = _two(frozen=True)
    other.load_state_dict(saved)
    assert_same(other.state_dict(), saved)
    fresh[0].requires_grad_(True)
    _step(params, opt)
    _step(fresh, other)
    assert_same(other.state_dict(), opt.state_dict())


def test_resuming_in_unfrozen_parameters_what_was_saved_before_says_how() -> None:
    params, opt = _two(frozen=True)
    _step(params, opt)
    saved = copy.deepcopy(opt.state_dict())
    _, other = _two(frozen=False)
    with pytest.raises(ValueError, match=r"needs a master.*was frozen.*set requires_grad=False before wrapping"):
        other.load_state_dict(saved)
    fresh, other = _two(frozen=True)
    other.load_state_dict(saved)
    for some in (params, fresh):
        some[0].requires_grad_(True)
    _step(params, opt)
    _step(fresh, other)
    assert_same(other.state_dict(), opt.state_dict())
