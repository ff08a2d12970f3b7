"""GradScaler.step(closure): an evaluation that overflows lowers the scale and is made again."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch.optim import LBFGS, SGD, Adam

from fp16opt import MixedPrecisionOptimizer
from grad_scaler.pairs import Ours, assert_same_bits, one, parameters


def _closure(scaler: Any, optimizer: Any, params: list[torch.Tensor], limit: float = 1e30, clip: bool = False) -> Any:
    """A quadratic's closure, whose gradients overflow above a scale of ``limit``."""
    calls = []

    def closure() -> torch.Tensor:
        calls.append(scaler.get_scale())
        optimizer.zero_grad()
        loss = sum(((p - 3.0) ** 2).sum() for p in params)
        scaled = scaler.scale(loss)
        (scaled * (math.inf if calls[-1] > limit else 1.0)).backward()
        if clip:
            scaler.unscale_(optimizer)
            scaler.clip_grad_norm_(optimizer, 0.5)
        return loss

    closure.calls = calls  # type: ignore[attr-defined]
    return closure


@pytest.mark.parametrize("cls", [SGD, LBFGS, Adam], ids=lambda cls: cls.__name__)
@pytest.mark.parametrize("by", ["position", "keyword"])
def test_closures_give_the_parameters_of_unscaled_training(cls: type, by: str) -> None:
    results = []
    for enabled in (False, True):
        params = parameters([(3,), (2, 2)])
        optimizer, scaler = cls(params, lr=0.25), Ours("cpu", init_scale=2.0**20, enabled=enabled)
        closure = _closure(scaler, optimizer, params, limit=2.0**17)
        for _ in range(3):
            loss = scaler.step(optimizer, closure) if by == "position" else scaler.step(optimizer, closure=closure)
            scaler.update()
        results.append((*params, loss))
        if enabled:
            assert closure.calls[:4] == [2.0**20, 2.0**19, 2.0**18, 2.0**17]
            assert scaler.get_scale() == 2.0**17
            assert scaler.skipped_steps == 0
    for a, b in zip(*results, strict=True):
        assert_same_bits(a, b)


def test_a_closure_that_overflows_at_the_floor_puts_all_back_and_counts_one_skip() -> None:
    params = parameters([(3,)])
    optimizer = SGD(params, lr=0.5, momentum=0.5)
    scaler = Ours("cpu", init_scale=1024.0, min_scale=256.0)
    scaler.step(optimizer, _closure(scaler, optimizer, params))
    scaler.update()
    before, state = params[0].detach().clone(), copy.deepcopy(optimizer.state_dict())
    closure = _closure(scaler, optimizer, params, limit=0.0)
    assert scaler.step(optimizer, closure) is not None
    scaler.update()
    assert closure.calls == [1024.0, 512.0, 256.0]
    assert scaler.step_was_skipped(optimizer)
    assert scaler.skipped_steps == 1
    assert scaler.overflow_report(optimizer)[0].name == "group 0, param 0"
    assert_same_bits(params[0], before)
    buffer = optimizer.state_dict()["state"][0]["momentum_buffer"]
    assert_same_bits(buffer, state["state"][0]["momentum_buffer"])


def test_a_closure_that_overflows_half_way_through_a_step_puts_all_back() -> None:
    params = parameters([(3,)])
    optimizer, scaler = LBFGS(params, lr=0.25), Ours("cpu", init_scale=4.0, min_scale=2.0, backoff_factor=0.7)
    good = _closure(scaler, optimizer, params)
    before = params[0].detach().clone()

    def closure() -> torch.Tensor:
        loss = good()
        if len(good.calls) > 2:
            params[0].grad[0] = math.nan
        return loss

    scaler.step(optimizer, closure)
    assert good.calls == [4.0, 4.0, 4.0, torch.tensor(2.8).item(), 2.0]
    assert scaler.step_was_skipped(optimizer)
    assert_same_bits(params[0], before)
    assert not optimizer.state_dict()["state"]
    assert scaler._scale.dtype is torch.float32


def test_a_closure_that_raises_half_way_puts_all_back() -> None:
    params = parameters([(3,)])
    optimizer, scaler = LBFGS(params, lr=0.25), Ours("cpu")
    good = _closure(scaler, optimizer, params)
    before = params[0].detach().clone()

    def closure() -> torch.Tensor:
        if len(good.calls) == 2:
            raise KeyError("data")
        return good()

    with pytest.raises(KeyError, match="data"):
        scaler.step(optimizer, closure)
    assert_same_bits(params[0], before)
    scaler.step(optimizer, _closure(scaler, optimizer, params))  # as if the failed step had not been


def test_none_as_closure_is_no_closure() -> None:
    for args, kwargs in (((None,), {}), ((), {"closure": None})):
        param, optimizer, scaler = one()
        scaler.step(optimizer, *args, **kwargs)
        assert param.tolist() == [0.5, 0.5]


def test_a_closure_that_makes_no_gradients_leaves_the_scale_to_update() -> None:
    """What it leaves was made before the step, so a lower scale and another evaluation would not change it."""
    param, optimizer, scaler = one(math.inf)
    calls: list[int] = []
    assert scaler.step(optimizer, lambda: calls.append(1)) is None
    assert len(calls) == 1
    assert scaler.step_was_skipped(optimizer)
    assert param.tolist() == [1.0, 1.0]
    scaler.update()
    assert scaler.get_scale() == 512.0


@pytest.mark.parametrize("unscale", [True, False])
def test_a_closure_that_makes_no_gradients_steps_those_that_are_there_once_unscaled(unscale: bool) -> None:
    param, optimizer, scaler = one(2.0)
    if unscale:
        scaler.unscale_(optimizer)
    scaler.step(optimizer, lambda: None)
    assert param.tolist() == [0.0, 0.0]


# -- of a wrapped optimizer --------------------------------------------------------------------------------------------

MIXED = (torch.float16, torch.float32)
DTYPES = pytest.mark.parametrize(
    "dtypes", [(torch.float16, torch.bfloat16), MIXED, (torch.float32,)], ids=["halves", "mixed", "wide"]
)


@DTYPES
@pytest.mark.parametrize("optimizer", [SGD, LBFGS])
@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize("hopeless", [True, False])
def test_a_wrapped_optimizer_counts_one_skip_where_no_scale_is_low_enough(
    dtypes: Any, optimizer: Any, clips: bool, hopeless: bool
) -> None:
    params = [torch.nn.Parameter(torch.zeros(2, dtype=dtype)) for dtype in dtypes]
    opt = MixedPrecisionOptimizer(optimizer(params, lr=0.5))
    scaler = Ours("cpu", init_scale=64.0, min_scale=8.0)

    def closure() -> torch.Tensor:
        opt.zero_grad()
        loss = sum(((p.float() - 1.0) ** 2).sum() for p in params)
        scaler.scale(loss * (math.inf if hopeless or scaler.get_scale() > 16.0 else 1.0)).backward()
        if clips:
            scaler.clip_grad_norm_(opt, 100.0)
        return loss

    for step in range(2):
        scaler.step(opt, closure)
        scaler.update()
        assert opt.skipped_steps == scaler.skipped_steps == (step + 1 if hopeless else 0)
        assert opt.step_was_skipped is scaler.step_was_skipped(opt) is hopeless
        assert len(scaler.overflow_report(opt)) == (len(params) if hopeless else 0)
    assert all((p == 0.0).all() for p in params) is hopeless
    assert scaler.get_scale() == (8.0 if hopeless else 16.0)
