"""State_dicts that do not fit: each is refused by a message that names the place, and changes nothing."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from engine.checks import assert_same
from hypothesis import given
from hypothesis import strategies as st
from rooms import (
    ADAM,
    BY_ID,
    IDS,
    LR,
    STATE0,
    Odd,
    Room,
    edit,
    frozen,
    odd_room,
    refused,
    shapes_of,
)
from specs import OptimizerCase, one_per_class, params_of
from torch import Tensor
from torch.nn import Parameter

from fp16opt.scaling import StaticLossScaler

PLACES: list[tuple[tuple[Any, ...], Any, type[Exception], str]] = [
    (("version",), 3, ValueError, r"^version must be one of 1, 2, got 3\. Load it with the fp16opt release that wrote"),
    (("version",), True, TypeError, "^version must be an int, got bool"),
    (("optimizer",), [], TypeError, "^optimizer must be a dict, got list"),
    (("optimizer",), {}, ValueError, "^optimizer lacks 'state', 'param_groups'"),
    (("optimizer", "state"), [], TypeError, "^optimizer: state must be a dict, got list"),
    (("optimizer", "state", 6), {}, ValueError, "state has the key 6, but no parameter with that id"),
    (("optimizer", "param_groups"), {}, TypeError, "^optimizer: param_groups must be a list, got dict"),
    (("optimizer", "param_groups"), [], ValueError, "^optimizer must have 2 param_groups, got 0. Construct"),
    (("optimizer", "param_groups", 1), 3, TypeError, "^optimizer, group 1 must be a dict, got int"),
    (IDS, None, TypeError, "^optimizer, group 0: params must be a list of ids, got NoneType"),
    (IDS, [0, 1], ValueError, "^optimizer, group 0 must have 3 params, got 2. Construct"),
    (IDS, [0, 1, 1], ValueError, "^optimizer, group 0: params has the id 1 twice"),
    (IDS, [0, 1, 3], ValueError, "^optimizer, group 1: params has the id 3 twice"),
    (IDS, [0, 1, []], TypeError, "^optimizer, group 0: params must hold numbers or names, got list"),
    (LR, "fast", ValueError, "^optimizer, group 0: lr must be of the kind of 0.01, got 'fast'"),
    (LR, True, ValueError, "lr must be of the kind of 0.01, got True"),
    (LR, None, ValueError, "lr must be of the kind of 0.01, got None"),
    (LR, float("nan"), ValueError, "lr must be of the kind of 0.01, got nan"),
    (LR, torch.ones(2), ValueError, "lr must be of the kind of 0.01"),
    ((*LR[:3], "betas"), (0.9,), ValueError, r"betas must be of the kind of \(0.9, 0.999\)"),
    ((*LR[:3], "betas"), (0.9, "x"), ValueError, "betas must be of the kind of"),
    ((*LR[:3], "maximize"), "no", ValueError, "maximize must be of the kind of False"),
    (LR, float("inf"), ValueError, "lr must be of the kind of 0.01, got inf"),
    (LR, torch.tensor(float("nan")), ValueError, r"lr must be of the kind of 0.01, got tensor\(nan\)"),
    (LR, -1.0, ValueError, "^optimizer, group 0: Adam refuses what it was set to: Invalid learning rate: -1.0"),
    ((*LR[:3], "betas"), [1, 2], ValueError, "^optimizer, group 0: Adam refuses .*: Invalid beta parameter"),
    ((*LR[:3], "betas"), (0.9, float("nan")), ValueError, "betas must be of the kind of"),
    ((*LR[:3], "eps"), -1e-8, ValueError, "eps must be of the kind of 1e-08, got -1e-08"),
    ((*LR[:3], "weight_decay"), -0.1, ValueError, "Adam refuses .*: Invalid weight_decay value: -0.1"),
    ((*LR[:3], "amsgrad"), 2, ValueError, "amsgrad must be of the kind of False, got 2"),
    ((*LR[:3], "fused"), 0.5, ValueError, "fused must be of the kind of .*, got 0.5"),
    ((*STATE0, "step"), -1, ValueError, "step must be one finite number from 0, got -1"),
    ((*STATE0, "step"), torch.tensor(float("nan")), ValueError, r"one finite number from 0, got tensor\(nan\)"),
    (STATE0, [], TypeError, r"^layer0\.weight: state must be a dict, got list"),
    ((*STATE0, "exp_avg"), torch.ones(3), ValueError,
     r"^layer0\.weight: exp_avg must have shape \[70\], got \[3\]. Build the model"),
    ((*STATE0, "exp_avg"), None, TypeError, "exp_avg must be a tensor, got NoneType"),
    ((*STATE0, "exp_avg"), torch.ones(70, dtype=torch.int32), ValueError, "dense floating tensor, got torch.int32"),
    ((*STATE0, "step"), "two", ValueError, "step must be one finite number from 0, got 'two'"),
    ((*STATE0, "step"), torch.ones(2), ValueError, r"step must be one finite number from 0, got tensor\(\[1., 1.\]\)"),
    (("masters",), None, TypeError, "^masters must be a list, got NoneType"),
    (("masters",), [None], ValueError, "^masters must have 6 entries, .*, got 1. Construct"),
    (("masters", 0), None, ValueError, r"^layer0\.weight: masters has None, but .* 16-bit"),
    (("masters", 1), torch.ones(8, 9), ValueError, r"^layer1\.weight: masters has a tensor, but"),
    (("masters", 0), [1.0] * 70, TypeError, "master must be a tensor, got list"),
    (("masters", 2), torch.ones(5, 3, 2), ValueError, r"must have shape \[3, 5, 2\], got \[5, 3, 2\]"),
    (("masters", 0), torch.ones(70).double(), ValueError, "a dense float32 tensor, got torch.float64"),
    (("masters", 0), torch.ones(70).to_sparse(), ValueError, "dense float32 tensor, got .*sparse"),
    (("masters", 0), torch.ones(70, device="meta"), ValueError, "dense float32 tensor, got .* on meta"),
    (("scaler",), None, TypeError, "^scaler state must be a dict, got NoneType"),
    (("scaler", "hysteresis"), 0, ValueError, "^scaler state: hysteresis must be from 1"),
    (("scaler",), StaticLossScaler(2.0).state_dict(), ValueError, "of a static scaler, but this"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "value", "error", "message"), PLACES)
def test_one_damaged_place_is_refused(path: Any, value: Any, error: type[Exception], message: str) -> None:
    room = Room(seed=2).train(1)
    refused(room, edit(Room(seed=1).train(2).build(), *path, value=value), error, message)


def test_what_is_lacking_is_named() -> None:
    sd = Room(seed=1).train(2).build()
    room = Room()
    for key in ("version", "optimizer", "masters", "scaler"):
        refused(room, edit(sd, key, drop=True), ValueError, f"^state_dict .* lacks '{key}'")
    refused(room, edit(sd, *LR, drop=True), ValueError, "^optimizer, group 0 lacks 'lr'")
    refused(room, edit(sd, "optimizer", "state", 1, "exp_avg_sq", drop=True), ValueError,
            r"^layer1\.weight: state lacks 'exp_avg_sq'")  # fmt: skip
    refused(room, {}, ValueError, r"^state_dict \(with the keys none\) lacks 'version', 'optimizer'")
    refused(room, {f"w{i}": i for i in range(20)}, ValueError, "'w15' and 12 more")
    refused(room, [sd], TypeError, "^state_dict must be a dict, got list")
    whole = {"model": {}, "optimizer": sd, "epoch": 3}
    refused(room, whole, ValueError, "lacks 'version', 'masters', 'scaler'.*of a saved checkpoint, the entry")


def test_settings_of_older_torch_may_be_lacking() -> None:
    sd = edit(Room().train(2).build(), *LR[:3], "amsgrad", drop=True)
    room = Room().load(edit(sd, *LR[:3], "fused", drop=True))
    assert room.optimizer.param_groups[0]["amsgrad"] is False
    room.train(1)


SETTINGS: list[tuple[str, str, Any, str]] = [
    ("SGD-momentum-forloop", "momentum", -0.1, "SGD refuses .*: Invalid momentum value: -0.1"),
    ("SGD-momentum-forloop", "nesterov", float("nan"), "nesterov must be"),
    ("Adafactor-default-foreach", "eps", (None, None), "eps must be"),
    ("Adafactor-default-foreach", "d", 0.5, "Adafactor refuses .*"),
]


@pytest.mark.parametrize(("case", "key", "value", "message"), SETTINGS)
def test_settings_out_of_their_range_are_refused(case: str, key: str, value: Any, message: str) -> None:
    room = Room(BY_ID[case], seed=2)
    sd = edit(Room(BY_ID[case], seed=1).train(1).build(), *LR[:3], key, value=value)
    refused(room, sd, ValueError, f"^optimizer, group 0: {message}")
    refused(room, sd["optimizer"], ValueError, f"^optimizer, group 0: {message}")


LEGAL: list[tuple[str, str, Any]] = [
    ("Adam-default-forloop", "lr", torch.tensor(0.5)),
    ("Adam-default-forloop", "lr", torch.tensor([0.5], dtype=torch.float64)),
    ("Adam-default-forloop", "betas", [0.0, 0.99]),
    ("Adam-default-forloop", "betas", (torch.tensor(0.5), torch.tensor(0.75))),
    ("Adam-default-forloop", "maximize", True),
    ("Adam-default-forloop", "weight_decay", np.float64(0.25)),
    ("Adam-default-forloop", "a_setting_of_the_user", float("nan")),
    ("Adafactor-default-foreach", "eps", [None, 1e-3]),
    ("Adafactor-default-foreach", "d", float("inf")),
    ("LBFGS-plain", "line_search_fn", "strong_wolfe"),
]


@pytest.mark.parametrize(("case", "key", "value"), LEGAL)
def test_settings_that_torch_steps_with_load(case: str, key: str, value: Any) -> None:
    room = Room(BY_ID[case], seed=2)
    sd = edit(Room(BY_ID[case], seed=1).train(1).build(), *LR[:3], key, value=value)
    room.load(sd)
    assert_same(room.optimizer.param_groups[0][key], value)
    room.train(1)


class Mine(torch.optim.Adam):
    """Not torch's own class: what it loads is its own affair."""


def mine() -> Room:
    room = Room()
    room.params = [Parameter(torch.ones(8, 9)), Parameter(torch.ones(4, 2)), Parameter(torch.ones(3))]
    room.masters, room.names = [None, room.params[1], None], ["a", "b", "c"]
    room.optimizer = Mine(room.params, lr=0.1)
    return room


def test_another_class_may_keep_what_it_likes() -> None:
    room = mine()
    sd = mine().train(1).build()
    for key, value in (("exp_avg", torch.ones(2, 9)), ("exp_avg", None), ("codes", torch.ones(3))):
        room.load(edit(sd, *STATE0, key, value=value))
        assert_same(room.optimizer.state[room.params[0]][key], value)
    room.load(edit(sd, "optimizer", "state", 1, "exp_avg", drop=True))
    for key, value in (("lr", float("inf")), ("betas", None), ("capturable", "x"), ("more", 1j)):
        room.load(edit(sd, *LR[:3], key, value=value))
        assert room.optimizer.param_groups[0][key] == value
    room.load(edit(sd, *LR[:3], "eps", drop=True))
    assert "eps" not in room.optimizer.param_groups[0]


def test_what_the_engine_needs_is_asked_of_every_class() -> None:
    sd = mine().train(1).build()
    for path, value, message in (
        (("masters",), [None] * 3, "^b: masters has None"),
        (("masters", 1), torch.ones(2, 4), r"must have shape \[4, 2\]"),
        (IDS, [0, 1], "must have 3 params, got 2"),
        (("optimizer", "param_groups"), [], "must have 1 param_groups, got 0"),
    ):
        refused(mine().train(2), edit(sd, *path, value=value), ValueError, message)
    refused(mine(), {"model": {}}, ValueError, "lacks 'version'")


def test_another_class_may_use_a_known_name_for_a_shape_of_its_own() -> None:
    source, room = mine(), mine()
    for one, rank in ((source, 2), (room, 4)):  # a projected moment, say, whose rank has changed meanwhile
        one.optimizer.state[one.params[0]] = {"step": torch.tensor(1.0), "exp_avg": torch.ones(rank, 9)}
    room.load(source.build())
    assert_same(room.build(), source.build())


@pytest.mark.parametrize("case", params_of(one_per_class()))
def test_state_of_another_class_is_refused(case: OptimizerCase) -> None:
    for other in one_per_class():
        same_state = {"Adam", "AdamW", "RAdam", "NAdam"} if case.cls != "NAdam" else set()
        if shapes_of(other) != shapes_of(case) or case.kind != other.kind or other.cls == "SGD":
            continue
        if other.cls == case.cls or {other.cls, case.cls} <= same_state:
            continue
        room, sd = Room(case), Room(other).train(1).build()
        refused(room, sd, ValueError, "lacks|must be")


def test_lbfgs_history_has_the_size_of_all_parameters() -> None:
    case = BY_ID["LBFGS-plain"]
    sd = Room(case).train(3).build()
    for path in ((*STATE0, "d"), (*STATE0, "old_dirs", 0)):
        wrong = edit(sd, *path, value=torch.ones(3))
        refused(Room(case), wrong, ValueError, rf"{path[3]} must have shape \[\d+\], got \[3\]")
    refused(Room(case), edit(sd, *STATE0, "n_iter", value="x"), ValueError, "n_iter must be one finite number")
    Room(case).load(edit(sd, *STATE0, value={"func_evals": 1, "n_iter": 0})).train(1)


def test_adagrad_needs_state_for_every_parameter() -> None:
    case = BY_ID["Adagrad-default-forloop"]
    sd = edit(Room(case).build(), "optimizer", "state", 4, drop=True)
    refused(Room(case), sd, ValueError, r"^layer4\.weight: state lacks 'step', 'sum'")
    sd = edit(Room(case).build(), "optimizer", "state", 4, value={})
    refused(Room(case), sd, ValueError, "state lacks 'step', 'sum'")


def test_adafactor_needs_what_goes_with_the_number_of_dimensions() -> None:
    case = BY_ID["Adafactor-default-foreach"]
    sd = Room(case).train(1).build()
    state = sd["optimizer"]["state"]
    for key in ("variance", "row_var"):
        at = next(i for i, entry in state.items() if key in entry)
        wrong = edit(sd, "optimizer", "state", at, key, drop=True)
        refused(Room(case), wrong, ValueError, f"state lacks '{key}'")


def test_a_tensor_without_data_is_torch_s_error_and_changes_nothing() -> None:
    room, sd = Room(seed=2).train(1), Room(seed=1).train(2).build()
    before = room.everything()
    with pytest.raises(NotImplementedError, match="no data"):
        room.load(edit(sd, *STATE0, "exp_avg", value=torch.ones(70, device="meta")))
    assert_same(room.everything(), before)


def test_sgd_takes_none_for_a_buffer_not_begun() -> None:
    case = BY_ID["SGD-momentum-forloop"]
    sd = edit(Room(case).train(1).build(), *STATE0, "momentum_buffer")
    room = Room(case).load(sd).train(1)
    assert isinstance(room.optimizer.state[room.params[0]]["momentum_buffer"], Tensor)


def test_settings_that_need_more_state() -> None:
    sd = Room(BY_ID["Adam-amsgrad-forloop"]).train(1).build()
    refused(Room(), edit(sd, *STATE0, "max_exp_avg_sq", drop=True), ValueError, "state lacks 'max_exp_avg_sq'")
    sd = Room(BY_ID["RMSprop-centered-forloop"]).train(1).build()
    room = Room(BY_ID["RMSprop-centered-forloop"])
    refused(room, edit(sd, *STATE0, "grad_avg", drop=True), ValueError, "state lacks 'grad_avg'")


def test_global_state_under_a_str_is_kept() -> None:
    source, room = odd_room(1), odd_room(2)
    for one in (source, room):
        one.optimizer = Odd([{"params": one.params[:3]}, {"params": one.params[3:]}])
    source.optimizer.state["shared"] = {"d": torch.ones(2)}  # type: ignore[index]
    room.load(source.build())
    assert_same(room.optimizer.state["shared"], {"d": torch.ones(2)})  # type: ignore[index]
    standard, named = Room(), Room().build()
    named["optimizer"]["state"]["shared"] = {}
    standard.load(named)
    sd = edit(named, "optimizer", "param_groups", 0, "params", value=["a", "b", "c"])
    refused(standard, sd, ValueError, "state has the key 'shared', but no parameter")


# -- damage at random ----------------------------------------------------------------------------------------

JUNK: list[Any] = [
    None, True, 0, -1, 10**30, 0.5, float("nan"), float("inf"), "", "lr", b"x", [], [None], {}, (), object(),
    torch.tensor(1.0), torch.ones(70), torch.ones(8, 9), torch.zeros(0), torch.ones(2, dtype=torch.int64),
    torch.ones(70, dtype=torch.float64), torch.ones(70, dtype=torch.complex64), torch.ones(70).to_sparse(),
    Parameter(torch.ones(3)),
    *(torch.tensor(value) for value in (-1.0, 0.5, float("nan"), float("inf"), True, 1j)),
    (0.5, torch.tensor(0.75)), [torch.tensor(0.5), float("nan")], (1, 2),
]  # fmt: skip


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    items: Any = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path] * bool(path) + [at for key, item in items for at in places(item, (*path, key))]


DAMAGED = [ADAM, BY_ID["SGD-momentum-forloop"], BY_ID["Adagrad-all-foreach"],
           BY_ID["RMSprop-centered-foreach"], BY_ID["ASGD-averaging-forloop"]]  # fmt: skip


# Asking for a kernel that the CPU lacks, or a search that LBFGS lacks, is no damage: torch says so itself.
UNDAMAGED = ("capturable", "differentiable", "line_search_fn")


@given(st.data())
def test_damaged_checkpoint_is_refused_or_works(data: st.DataObject) -> None:
    case = data.draw(st.sampled_from(DAMAGED))
    sd, room = Room(case, seed=1).train(2).build(), Room(case, seed=2).train(1)
    sd = copy.deepcopy(sd)
    for _ in range(data.draw(st.integers(1, 3))):
        path = data.draw(st.sampled_from([at for at in places(sd) if at[-1] not in UNDAMAGED]))
        how = data.draw(st.sampled_from(["drop", "junk", "add", "swap"]))
        if how == "drop":
            sd = edit(sd, *path, drop=True)
        elif how == "swap":
            other = data.draw(st.sampled_from(places(sd)))
            at: Any = sd
            for key in other:
                at = at[key]
            sd = edit(sd, *path, value=copy.deepcopy(at))
        else:
            key = data.draw(st.sampled_from(["extra", 7, None])) if how == "add" else path[-1]
            try:
                sd = edit(sd, *path[:-1], key, value=data.draw(st.sampled_from(JUNK)))
            except (IndexError, TypeError):
                continue  # a list takes no such key
        if not places(sd):
            break
    before, given = room.everything(), frozen(sd)
    try:
        room.check(sd)
    except (TypeError, ValueError):
        assert_same(room.everything(), before, "after a refused load")
    else:
        room.apply(sd)
        assert all(g["params"] for g in room.optimizer.param_groups)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                room.train(1)
            except Exception as error:
                raise AssertionError(f"accepted, but cannot step: {error!r}") from error
    assert_same(frozen(sd), given, "the caller's dict")
