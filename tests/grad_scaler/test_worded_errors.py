"""Errors of GradScaler's load_state_dict and setters, and gradients that a disabled scaler lets go of."""

from __future__ import annotations

import gc
import math
import weakref
from typing import Any

import pytest
import torch

from grad_scaler.pairs import Ours, one


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"fp16opt": None}, TypeError, r"^state_dict: 'fp16opt' must be a dict, got NoneType\. Pass a GradScaler's"),
        ({"fp16opt": [1]}, TypeError, "^state_dict: 'fp16opt' must be a dict, got list"),
        ({"scale": "a"}, TypeError, "^state_dict: 'scale' must be a number, got str"),
        ({"scale": None}, TypeError, "^state_dict: 'scale' must be a number, got NoneType"),
        ({"scale": torch.ones(2)}, ValueError, r"^state_dict: 'scale' must be one number, got a tensor \[2\]"),
        ({"scale": True}, ValueError, "init_scale must be a number, got the bool True"),
        ({"_growth_tracker": "a"}, TypeError, "^scaler state: growth_tracker must be an integer, got str"),
        ({"_growth_tracker": None}, TypeError, "^scaler state: growth_tracker must be an integer, got NoneType"),
        ({"growth_factor": 0.5}, ValueError, "^scaler state: growth_factor must be over 1"),
        ({"scale": 0.0}, ValueError, "scale"),
        ({"scale": math.nan}, ValueError, "scale"),
        ({"growth_interval": 0}, ValueError, "growth_interval"),
        ({"_growth_tracker": -1}, ValueError, "growth_tracker"),
        ({"fp16opt": {"hysteresis": 0}}, ValueError, "hysteresis"),
    ],
)
@pytest.mark.parametrize("torchs", [True, False])
def test_a_state_dict_that_does_not_fit_is_refused_in_words(
    change: dict[str, Any], error: type[Exception], message: str, torchs: bool
) -> None:
    scaler = Ours("cpu", init_scale=8.0, hysteresis=3)
    before = scaler.state_dict()
    state = {key: value for key, value in before.items() if key != "fp16opt" or not torchs}
    with pytest.raises(error, match=message):
        scaler.load_state_dict({**state, **change})
    assert scaler.state_dict() == before


@pytest.mark.parametrize(
    ("state", "error", "message"),
    [({}, RuntimeError, "empty"), ({"growth_factor": 2.0}, KeyError, "scale"), ([1], TypeError, "expected a dict")],
    ids=["empty", "no scale", "a list"],
)
def test_what_is_no_state_dict_is_refused(state: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        Ours("cpu").load_state_dict(state)
    Ours("cpu", enabled=False).load_state_dict({})


def test_entries_of_ours_that_are_not_settings_are_ignored() -> None:
    scaler, other = Ours("cpu", init_scale=8.0, hysteresis=2), Ours("cpu")
    state = scaler.state_dict()
    state["fp16opt"] |= {"scale": 3.0, "growth_factor": 9.0, "type": "static"}
    other.load_state_dict(state)
    assert other.state_dict() == scaler.state_dict()


@pytest.mark.parametrize(
    ("setter", "value", "error", "message"),
    [
        ("set_growth_factor", 0.5, ValueError, "^growth_factor must be over 1"),
        ("set_growth_factor", "a", TypeError, "^growth_factor must be a number, got str"),
        ("set_backoff_factor", 1.5, ValueError, "^backoff_factor must be over 0 and under 1"),
        ("set_growth_interval", 0, ValueError, "^growth_interval must be from 1"),
        ("set_growth_interval", 1.5, TypeError, "^growth_interval must be an integer, got float"),
    ],
)
def test_setters_speak_of_their_setting(setter: str, value: object, error: type[Exception], message: str) -> None:
    scaler = Ours("cpu")
    before = scaler.state_dict()
    with pytest.raises(error, match=message):
        getattr(scaler, setter)(value)
    assert scaler.state_dict() == before


@pytest.mark.parametrize("raises", [False, True])
def test_a_disabled_scaler_does_not_hold_on_to_gradients(raises: bool) -> None:
    param, optimizer, scaler = one(grad=math.inf if raises else 3.0, scaler=Ours("cpu", enabled=False))
    gradient = weakref.ref(param.grad)
    if raises:
        with pytest.raises(RuntimeError, match="can't be clipped"):
            scaler.clip_grad_norm_(optimizer, 1.0, error_if_nonfinite=True)
    else:
        assert float(scaler.clip_grad_norm_(optimizer, 1.0)) == pytest.approx(math.sqrt(18.0))
        assert float(param.grad.norm()) == pytest.approx(1.0)
    param.grad = None
    gc.collect()
    assert gradient() is None
