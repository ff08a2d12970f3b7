"""Loss scalers against a plain Python oracle."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import oracle
import pretended
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scalers import ODD, tell, trackers

from fp16opt.scaling import DynamicLossScaler, LossScaler, StaticLossScaler

# -- the rule ------------------------------------------------------------------------------------------------

POWERS = st.integers(-126, 127).map(lambda e: 2.0**e)
SCALES = POWERS | st.floats(2.0**-126, 2.0**127, width=32)


@st.composite
def settings(draw: st.DrawFn) -> dict[str, Any]:
    floor, init, ceiling = sorted(draw(st.tuples(SCALES, SCALES, SCALES)))
    return {
        "init_scale": init,
        "growth_factor": draw(st.sampled_from([2.0, 4.0, 1.5, 1.0000002, 3e38])),
        "backoff_factor": draw(st.sampled_from([0.5, 0.25, 0.7, 0.9999999, 1e-30])),
        "growth_interval": draw(st.integers(1, 4)),
        "hysteresis": draw(st.integers(1, 4)),
        "min_scale": floor,
        "max_scale": ceiling,
    }


@given(settings(), st.lists(st.booleans(), max_size=60))
def test_update_is_the_oracle_s(chosen: dict[str, Any], overflows: list[bool]) -> None:
    numbers = [np.float32(value) if isinstance(value, float) else value for value in chosen.values()]
    scaler, rule = DynamicLossScaler(**chosen), oracle.DynamicScaler(*numbers)
    for overflow in overflows:
        before = scaler.scale
        kept = before.item()
        tell(scaler, overflow)
        with np.errstate(over="ignore"):
            rule.update(overflow)
        assert trackers(scaler) == (float(rule.scale), rule.clean, rule.bad)
        assert before.item() == kept, "a scale that was read must keep its value"


@pytest.mark.parametrize("overflow", [0, 1])
@pytest.mark.parametrize("limits", [(2.0**-126, 2.0**127), (2.0**-14, 2.0**24), (1.0, 1.0)])
@pytest.mark.parametrize("factors", [(2.0, 0.5), (1.7, 0.3), (3e38, 1e-38)])
def test_scale_never_zero_or_inf(overflow: int, limits: tuple[float, float], factors: tuple[float, float]) -> None:
    growth, backoff = factors
    scaler = DynamicLossScaler(1.0, growth, backoff, 1, 1, *limits)
    for _ in range(400):
        tell(scaler, overflow)
        assert limits[0] <= scaler.scale.item() <= limits[1]
        assert math.isfinite(1.0 / scaler.scale)
        assert 1.0 / scaler.scale.item() > 0
    assert scaler.scale.item() == limits[overflow == 0]
    tell(scaler, 1 - overflow, 1 - overflow)
    assert (scaler.scale.item() != limits[overflow == 0]) == (limits[0] != limits[1]), "it comes back"


def test_back_off_ignores_hysteresis_and_restarts_growth() -> None:
    scaler = DynamicLossScaler(init_scale=2.0, hysteresis=5, growth_interval=3, min_scale=0.75)
    tell(scaler, 0, 0)
    assert scaler.back_off() is True
    assert trackers(scaler) == (1.0, 0, 0)
    assert not scaler.at_floor()
    assert scaler.back_off() is True
    assert scaler.scale.item() == 0.75, "clamped to the floor"
    assert scaler.at_floor()
    assert scaler.back_off() is False
    assert scaler.scale.item() == 0.75


def test_set_scale_restarts_growth() -> None:
    scaler = DynamicLossScaler(growth_interval=3)
    tell(scaler, 0, 0)
    scaler.set_scale(8)
    tell(scaler, 0, 0)
    assert scaler.scale.item() == 8.0
    tell(scaler, 0)
    assert scaler.scale.item() == 16.0


def test_static_scale_stays_and_counts() -> None:
    scaler = StaticLossScaler(3.0)
    tell(scaler, 0, 1, 1)
    assert (scaler.scale.item(), int(scaler.consecutive_skips)) == (3.0, 2)
    tell(scaler, 0)
    assert int(scaler.consecutive_skips) == 0
    assert scaler.back_off() is False
    assert scaler.at_floor()
    scaler.set_scale(5.0)
    assert scaler.scale.item() == 5.0
    assert (scaler.dynamic, scaler.max_consecutive_skips) == (False, None)
    assert StaticLossScaler().scale.item() == 1.0


@pytest.mark.parametrize("make", [StaticLossScaler, DynamicLossScaler])
def test_every_change_raises_the_generation(make: type[LossScaler]) -> None:
    scaler = make()
    changes = [lambda: scaler.set_scale(4.0), lambda: scaler.load_state_dict(make().state_dict())]
    updates = [lambda: tell(scaler, 0), lambda: tell(scaler, 1)]
    if scaler.dynamic:
        changes += [*updates, scaler.back_off]
    else:  # a static scale stays what it is
        for update in updates:
            update()
            assert scaler.generation == 0
    for change in changes:
        before = scaler.generation
        change()
        assert scaler.generation == before + 1


@pytest.mark.parametrize("make", [StaticLossScaler, DynamicLossScaler])
def test_update_does_not_wait(make: type[LossScaler], monkeypatch: pytest.MonkeyPatch) -> None:
    scaler, found_inf = make(), torch.tensor(1.0)
    with pretended.watching(monkeypatch) as seen:
        scaler.update(found_inf)
    assert seen.looks == []


def test_tensors_are_what_the_interface_says() -> None:
    with torch.device("meta"):  # a default device or dtype of the user's does not get in
        scalers = [StaticLossScaler(), DynamicLossScaler()]
    for scaler in scalers:
        assert scaler.to("cpu") is scaler
        tell(scaler, 1)
        assert (scaler.scale.dtype, scaler.scale.shape, scaler.scale.device.type) == (
            torch.float32,
            (),
            "cpu",
        )
        skips = scaler.consecutive_skips
        assert (skips.dtype, skips.shape, int(skips)) == (torch.int32, (), 1)


@pytest.mark.card
@pytest.mark.gpu
def test_on_the_gpu_as_on_the_cpu() -> None:
    cpu, gpu = DynamicLossScaler(**ODD), DynamicLossScaler(**ODD).to("cuda")
    for overflow in [0, 0, 0, 0, 1, 1, 1, 1, 0, 1, 0, 0, 0, 0, 0]:
        tell(cpu, overflow)
        gpu.update(torch.tensor(float(overflow), device="cuda"))
        assert gpu.scale.is_cuda
        assert trackers(gpu) == trackers(cpu)
