"""Loss scalers: what their arguments may be, and their state."""

from __future__ import annotations

import copy
import math
import pickle
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from rooms import through_file
from scalers import ODD, tell

from fp16opt.scaling import DynamicLossScaler, LossScaler, StaticLossScaler

TOO_BIG_INT = 10**400
NOT_A_SCALE = [
    (0, ValueError, "must be over 0"),
    (0.0, ValueError, "must be over 0"),
    (-1.0, ValueError, "must be over 0"),
    (2.0**-127, ValueError, r"must be over 0, from 2\*\*-126"),
    (3e38, ValueError, r"must be over 0, .* to 2\*\*127"),
    (math.nan, ValueError, "must be a finite number, got nan"),
    (math.inf, ValueError, "must be a finite number, got inf"),
    (-math.inf, ValueError, "must be a finite number, got -inf"),
    (TOO_BIG_INT, ValueError, "must be a finite number"),
    (True, ValueError, "must be a number, got the bool True"),
    (False, ValueError, "must be a number, got the bool False"),
    ("8", TypeError, "must be a number, got str"),
    (None, TypeError, "must be a number, got NoneType"),
    (1j, TypeError, "must be a number, got complex"),
    (torch.tensor(1.0), TypeError, "must be a number, got Tensor"),
]
NOT_A_COUNT = [
    (0, ValueError, r"must be from 1 to 2\*\*31 - 1, got 0"),
    (-3, ValueError, r"must be from 1 to 2\*\*31 - 1, got -3"),
    (2**31, ValueError, r"must be from 1 to 2\*\*31 - 1"),
    (True, ValueError, "must be an integer.*, got the bool True"),
    (False, ValueError, "must be an integer.*, got the bool False"),
    (2.0, TypeError, "must be an integer.*, got float"),
    (math.nan, TypeError, "must be an integer.*, got float"),
    (math.inf, TypeError, "must be an integer.*, got float"),
    ("2", TypeError, "must be an integer.*, got str"),
]
NOT_A_FACTOR = [case for case in NOT_A_SCALE if case[1] is TypeError or "finite" in case[2] or "bool" in case[2]]
BAD = [
    *[(name, *case) for name in ("init_scale", "min_scale", "max_scale") for case in NOT_A_SCALE],
    *[(name, *case) for name in ("growth_factor", "backoff_factor") for case in NOT_A_FACTOR],
    *[("growth_factor", v, ValueError, "must be over 1 and under inf") for v in (0, -2.0, 0.5, 1.0, 1 + 1e-9, 1e39)],
    *[("backoff_factor", v, ValueError, "must be over 0 and under 1") for v in (0, -0.5, 1, 1 - 1e-9, 2.0, 1e-50)],
    *[(n, *c) for n in ("growth_interval", "hysteresis", "max_consecutive_skips") for c in NOT_A_COUNT],
    ("growth_interval", None, TypeError, "must be an integer, got NoneType"),
    ("hysteresis", None, TypeError, "must be an integer, got NoneType"),
    ("init_scale", 2.0**25, ValueError, "must be from min_scale to max_scale .*got 33554432.0.*limits"),
    ("init_scale", 2.0**-15, ValueError, "must be from min_scale to max_scale"),
]


@pytest.mark.parametrize(("name", "value", "error", "message"), BAD)
def test_dynamic_arguments_are_checked(name: str, value: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"^{name} {message}") as raised:
        DynamicLossScaler(**{name: value})
    assert type(raised.value) is error


@pytest.mark.parametrize(("value", "error", "message"), NOT_A_SCALE)
def test_static_scale_is_checked(value: Any, error: type[Exception], message: str) -> None:
    scaler = StaticLossScaler(2.0)
    for act in (StaticLossScaler, scaler.set_scale, DynamicLossScaler().set_scale):
        with pytest.raises(error, match=f"^loss_scale {message}"):
            act(value)
    assert scaler.scale.item() == 2.0
    assert scaler.generation == 0


def test_order_of_limits_is_checked() -> None:
    with pytest.raises(ValueError, match=r"^min_scale must be at most max_scale, got 4.0 and 2.0\."):
        DynamicLossScaler(init_scale=3.0, min_scale=4.0, max_scale=2.0)


def test_set_scale_stays_within_the_limits() -> None:
    scaler = DynamicLossScaler()
    for value in (2.0**-15, 2.0**25):
        with pytest.raises(ValueError, match=r"^loss_scale must be from min_scale to max_scale"):
            scaler.set_scale(value)
    assert scaler.scale.item() == 2.0**16
    assert scaler.generation == 0


def test_all_kinds_of_numbers_are_taken() -> None:
    scaler = DynamicLossScaler(np.float32(8), Fraction(3, 2), np.float64(0.5), np.int64(3), 2, Fraction(1, 2), 16)
    assert [scaler.init_scale, scaler.growth_factor, scaler.growth_interval] == [8.0, 1.5, 3]
    assert type(scaler.init_scale) is float
    assert type(scaler.growth_interval) is int
    assert DynamicLossScaler(0.1, min_scale=0.1, max_scale=0.1).scale.item() == pytest.approx(0.1)


# -- state ---------------------------------------------------------------------------------------------------


def odd_dynamic() -> DynamicLossScaler:
    scaler = DynamicLossScaler(**ODD)
    scaler.set_scale(96.0)
    tell(scaler, 0, 0, 1, 1)
    scaler._trackers[0] = 3  # a growth tracker and a skip count at once, so that neither field can be lost
    return scaler


def odd_static() -> StaticLossScaler:
    scaler = StaticLossScaler(7.0)
    tell(scaler, 1, 1)
    return scaler


def plain(state: dict[str, Any]) -> dict[str, Any]:
    return {k: v.item() if isinstance(v, torch.Tensor) else v for k, v in state.items()}


@pytest.mark.parametrize("make", [odd_dynamic, odd_static])
def test_every_field_makes_the_round_trip(make: Any) -> None:
    scaler = make()
    wanted = plain(scaler.state_dict())
    fresh = type(scaler)()
    base = plain(fresh.state_dict())
    assert all(wanted[k] != base[k] for k in wanted if k != "type"), "a field at its default proves nothing"
    fresh.load_state_dict(through_file(scaler.state_dict()))
    assert plain(fresh.state_dict()) == wanted
    for overflows in ([0] * 5, [1] * 5, [0, 1, 1, 0, 0, 0, 0]):
        tell(scaler, *overflows)
        tell(fresh, *overflows)
        assert plain(fresh.state_dict()) == plain(scaler.state_dict())


def test_state_holds_every_setting_by_value() -> None:
    assert plain(odd_dynamic().state_dict()) == {
        "type": "dynamic", **ODD, "scale": 96.0, "growth_tracker": 3, "consecutive_skips": 2,
    }  # fmt: skip
    assert plain(odd_static().state_dict()) == {"type": "static", "scale": 7.0, "consecutive_skips": 2}


@pytest.mark.parametrize("make", [odd_dynamic, odd_static])
def test_state_shares_nothing_with_the_scaler(make: Any) -> None:
    scaler, other = make(), make()
    state = scaler.state_dict()
    kept = plain(state)
    tell(scaler, 0)
    scaler.set_scale(8.0)
    assert plain(state) == kept
    other.load_state_dict(state)
    tell(other, 0, 0, 0, 0)
    other.set_scale(16.0)
    assert plain(state) == kept, "training must not edit the caller's checkpoint"
    live = plain(other.state_dict())
    for taken in (state, other.state_dict()):
        for value in taken.values():
            if isinstance(value, torch.Tensor):
                value.fill_(99)
    assert plain(other.state_dict()) == live, "nor the caller the scaler"


@pytest.mark.parametrize("make", [odd_dynamic, odd_static])
@pytest.mark.parametrize("how", [copy.deepcopy, lambda s: pickle.loads(pickle.dumps(s)), copy.copy])
def test_copies(make: Any, how: Any) -> None:
    scaler = make()
    twin = how(scaler)
    assert plain(twin.state_dict()) == plain(scaler.state_dict())
    assert twin.generation == scaler.generation
    if how is copy.copy:
        return
    tell(scaler, 1)
    assert int(twin.consecutive_skips) == 2
    tell(twin, 1)
    assert plain(twin.state_dict()) == plain(scaler.state_dict())


def test_repr_shows_settings_and_scale() -> None:
    assert repr(odd_static()) == "StaticLossScaler(scale=7.0)"
    text = repr(odd_dynamic())
    assert all(f"{name}={value!r}" in text for name, value in ODD.items())
    assert "scale now 96.0" in text


def refused(scaler: LossScaler, state: Any, error: type[Exception], message: str) -> None:
    before, generation = plain(scaler.state_dict()), scaler.generation
    for act in (scaler.check_state_dict, scaler.load_state_dict):
        with pytest.raises(error, match=message):
            act(state)
    assert plain(scaler.state_dict()) == before
    assert scaler.generation == generation


def test_the_other_kind_is_refused() -> None:
    refused(odd_static(), odd_dynamic().state_dict(), ValueError,
            r"is of a dynamic scaler, but this scaler is static.*scaler=DynamicLossScaler\(\)")  # fmt: skip
    refused(odd_dynamic(), odd_static().state_dict(), ValueError,
            r"is of a static scaler, but this scaler is dynamic.*scaler=StaticLossScaler\(\)")  # fmt: skip


@pytest.mark.parametrize("make", [odd_dynamic, odd_static])
def test_damaged_state_is_refused(make: Any) -> None:
    state = make().state_dict()
    refused(make(), [state], TypeError, "^scaler state must be a dict, got list")
    for name in state:
        lacking = {k: v for k, v in state.items() if k != name}
        refused(make(), lacking, ValueError, f"^scaler state lacks the key '{name}'")
    refused(make(), {**state, "type": "fixed"}, ValueError, "type must be 'dynamic' or 'static', got 'fixed'")
    refused(make(), {**state, "type": ["static"]}, ValueError, "type must be 'dynamic' or 'static'")
    for value, error, message in NOT_A_SCALE[:-1]:
        refused(make(), {**state, "scale": value}, error, f"^scaler state: scale {message}")
    many = torch.ones(3)
    refused(make(), {**state, "scale": many}, ValueError, r"scale must be one number, got a tensor \[3\]")
    refused(make(), {**state, "scale": torch.ones((), device="meta")}, ValueError, "scale must be one number")
    for value, error, message in NOT_A_COUNT[1:]:
        message = f"state: consecutive_skips {message}".replace("from 1", "from 0")
        refused(make(), {**state, "consecutive_skips": value}, error, message)


def test_damaged_dynamic_state_is_refused() -> None:
    state = odd_dynamic().state_dict()
    for name, value, error, message in BAD:
        limited = name == "init_scale" and "from min_scale" in message  # the limits of ODD differ
        if not limited and not isinstance(value, torch.Tensor):  # a one-element tensor is a number here
            refused(odd_dynamic(), {**state, name: value}, error, f"^scaler state: {name} {message}")
    refused(odd_dynamic(), {**state, "scale": 2.0**20}, ValueError, "^scaler state: scale must be from min_scale")
    refused(
        odd_dynamic(),
        {**state, "growth_tracker": 4},
        ValueError,
        "growth_tracker must be under growth_interval, got 4",
    )
    for value, error, message in NOT_A_COUNT[1:]:
        message = f"state: growth_tracker {message}".replace("from 1", "from 0")
        refused(odd_dynamic(), {**state, "growth_tracker": value}, error, message)
