"""An optimizer's state as columns: what is found, and when nothing is."""

from __future__ import annotations

from collections import OrderedDict, UserDict, defaultdict
from typing import Any

import pytest
import torch
from torch import Tensor

from fp16opt.kernels import native

NAMES = ("step", "exp_avg")


@pytest.fixture(params=["compiled", "python"])
def columns(request: pytest.FixtureRequest) -> Any:
    if request.param == "python":
        return native.state_columns_in_python
    if native.module is None:
        pytest.skip("no compiled module")
    return native.module.state_columns


def state_of(count: int) -> dict[Tensor, Any]:
    return {torch.zeros(1): {"step": k, "exp_avg": torch.full((1,), float(k)), "other": None} for k in range(count)}


def test_entries_are_the_very_objects_in_the_order_of_the_places(columns: Any) -> None:
    state = defaultdict(dict, state_of(4))
    keys, entries = list(state), list(state.values())
    steps, averages = columns(state, keys, None, NAMES)
    assert steps == [0, 1, 2, 3]
    assert all(a is entry["exp_avg"] for a, entry in zip(averages, entries, strict=True))
    (averages,) = columns(state, keys, [2, 0, 2], ("exp_avg",))
    assert [a is entries[place]["exp_avg"] for a, place in zip(averages, [2, 0, 2], strict=True)] == [True] * 3
    entries[1]["exp_avg"] = torch.ones(1)
    assert columns(state, keys, [1], ("exp_avg",))[0][0] is entries[1]["exp_avg"]


def test_without_names_or_parameters_only_the_keys_are_compared(columns: Any) -> None:
    state = state_of(2)
    assert columns(state, list(state), [], ()) == []
    assert columns({}, [], None, NAMES) == [[], []]
    assert columns(state, [], None, ()) is None


@pytest.mark.parametrize("change", ["more", "fewer", "another", "order", "equal"])
def test_other_keys_are_noticed(columns: Any, change: str) -> None:
    state = state_of(3)
    keys = list(state)
    if change == "more":
        state[torch.zeros(1)] = {"step": 0, "exp_avg": 0}
    elif change == "fewer":
        del state[keys[2]]
    elif change == "another":
        state[torch.zeros(1)] = state.pop(keys[2])
    elif change == "order":
        state[keys[0]] = state.pop(keys[0])
    else:
        keys[1] = keys[1].detach()
    assert columns(state, keys, None, NAMES) is None
    assert columns(state, keys, [], ()) is None


@pytest.mark.parametrize("entry", [{"step": 1}, {"step": 1, "exp_avg": None}, {}])
def test_what_is_missing_is_noticed_where_it_is_asked_for(columns: Any, entry: dict[str, Any]) -> None:
    state = state_of(3)
    keys = list(state)
    state[keys[1]] = entry
    assert columns(state, keys, None, NAMES) is None
    assert columns(state, keys, [1], NAMES) is None
    assert columns(state, keys, [0, 2], NAMES) is not None


def test_dictionaries_of_other_classes(columns: Any) -> None:
    state = state_of(2)
    keys = list(state)
    state[keys[0]] = OrderedDict(step=5, exp_avg=6)
    assert columns(state, keys, [0], NAMES) == [[5], [6]]
    state[keys[0]] = defaultdict(int, step=5)
    assert columns(state, keys, [0], NAMES) is None
    assert "exp_avg" not in state[keys[0]]


@pytest.mark.skipif(native.module is None, reason="no compiled module")
def test_compiled_code_leaves_what_is_no_dictionary_to_a_new_plan() -> None:
    state = state_of(2)
    keys = list(state)
    state[keys[0]] = UserDict(step=5, exp_avg=6)
    assert native.state_columns(state, keys, None, NAMES) is None


@pytest.mark.skipif(native.module is None, reason="no compiled module")
def test_a_place_outside_raises() -> None:
    state = state_of(2)
    with pytest.raises(IndexError):
        native.state_columns(state, list(state), [2], NAMES)
