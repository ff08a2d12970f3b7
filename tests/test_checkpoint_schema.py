"""The state_dict's schema: built, saved, loaded; on wrapped optimizers, without the engine."""

from __future__ import annotations

import copy
from collections import deque, namedtuple
from typing import Any

import pytest
import torch
from engine.checks import assert_same, flatten
from rooms import (
    BY_ID,
    Room,
    refused,
    tensors,
    through_file,
)
from specs import OptimizerCase, one_per_class, params_of
from torch.nn import Parameter

import fp16opt
from fp16opt.engine import checkpoint
from fp16opt.scaling import DynamicLossScaler

# -- what is built, and back ---------------------------------------------------------------------------------


# -- dtypes, devices, strides --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["Adam-default-foreach", "AdamW-default-fused", "Adafactor-default-foreach"])
def test_float64_state_of_a_torch_class_takes_the_parameter_s_dtype(name: str) -> None:
    case = BY_ID[name]
    if case.missing():
        pytest.skip(case.missing() or "")
    source = Room(case)
    for group in source.optimizer.param_groups:
        group["params"][:] = [Parameter(p.detach().double()) for p in group["params"]]
    source.params = [p for g in source.optimizer.param_groups for p in g["params"]]
    source.train(2)
    room = Room(case).load(source.optimizer.state_dict())
    for q in room.params:
        for key, value in room.optimizer.state[q].items():
            assert value.dtype == torch.float32 or key == "step"
    room.train(1)


def test_state_takes_the_parameter_s_strides() -> None:
    def room(memory_format: torch.memory_format) -> Room:
        made = Room()
        weight = torch.randn(2, 3, 4, 5, generator=torch.Generator().manual_seed(0))
        made.params = [Parameter(weight.to(memory_format=memory_format))]
        made.optimizer = torch.optim.AdamW(made.params, lr=0.1, fused=True)
        made.masters, made.names = list(made.params), ["conv.weight"]
        return made

    source, other = room(torch.contiguous_format).train(2), room(torch.channels_last)
    other.load(through_file(source.build()))
    assert other.optimizer.state[other.params[0]]["exp_avg"].stride() == other.params[0].stride()
    source.train(1)
    other.params[0].grad = None
    rng = torch.Generator().manual_seed(1000)
    other.params[0].grad = torch.randn(2, 3, 4, 5, generator=rng).to(memory_format=torch.channels_last)
    other.optimizer.step()
    assert_same(other.params[0], source.params[0])


def test_step_keeps_torch_s_rule() -> None:
    source = Room(BY_ID["AdamW-default-forloop"]).train(2)
    sd = copy.deepcopy(source.build())
    entry = sd["optimizer"]["state"][0]
    entry["step"] = torch.tensor(2, dtype=torch.int64)
    room = Room(source.case).load(sd)
    step = room.optimizer.state[room.params[0]]["step"]
    assert step.dtype == torch.int64
    assert step.data_ptr() != entry["step"].data_ptr()
    for group in sd["optimizer"]["param_groups"]:
        group["fused"], group["foreach"] = True, None
    room.load(sd)
    assert room.optimizer.state[room.params[0]]["step"].dtype == torch.float32
    entry["step"] = 2  # as torch saved it once
    room.load(sd)
    assert room.optimizer.state[room.params[0]]["step"].item() == 2.0


# -- hooks and overrides of the wrapped optimizer ------------------------------------------------------------


def test_pre_hook_may_adapt_a_dict_of_another_form() -> None:
    source, room = Room(seed=1).train(2), Room(seed=2)
    sd = source.optimizer.state_dict()
    sd["param_groups"] = [dict(sd["param_groups"][0], params=[0, 1, 2, 3, 4, 5])]

    def split(opt: Any, sd: Any) -> Any:
        first = sd["param_groups"][0]
        return {**sd, "param_groups": [{**first, "params": [0, 1, 2]}, {**first, "params": [3, 4, 5]}]}

    refused(room, sd, ValueError, "must have 2 param_groups, got 1")
    handle = room.optimizer.register_load_state_dict_pre_hook(split)
    room.load(sd)
    assert_same(room.optimizer.state_dict()["state"], sd["state"])
    handle.remove()
    kept = copy.deepcopy(sd["state"])  # a hook may hand out tensors that it needs again
    handle = room.optimizer.register_load_state_dict_pre_hook(lambda opt, given: {**split(opt, sd), "state": kept})
    room.load(sd).train(1)
    assert_same(kept, sd["state"])
    handle.remove()
    before = room.everything()
    room.optimizer.register_load_state_dict_pre_hook(lambda opt, sd: {**sd, "state": {99: {}}})
    with pytest.raises(ValueError, match="state has the key 99, but no parameter with that id"):
        room.load(source.build())
    assert_same(room.everything(), before)
    with pytest.raises(TypeError, match=r"^optimizer must be a dict, got list"):
        room.load({**source.build(), "optimizer": []})


class Boom(Exception):
    pass


def spoil(room: Room) -> None:
    """What a hook may do before it raises."""
    for p in room.params:
        p.data.add_(1)
        room.optimizer.state[p]["exp_avg"].mul_(2)
    room.optimizer.param_groups[0]["lr"] = 5.0
    room.optimizer.param_groups[0]["params"].pop()
    room.optimizer.defaults["lr"] = 7
    room.optimizer.defaults = {"lr": 8}
    room.optimizer.state.clear()
    room.params[0].data = torch.zeros(3)
    first, second, third = room.optimizer.history
    first.append(3.0)
    second["seen"].add(3)
    third[0].zero_()
    third[1].append(5)
    room.optimizer.history = []
    room.optimizer.new = {}  # type: ignore[attr-defined]


@pytest.mark.parametrize("where", ["pre", "post", "instance", "override", "scaler"])
@pytest.mark.parametrize("error", [Boom, KeyboardInterrupt])
def test_error_while_loading_leaves_everything(where: str, error: type[BaseException]) -> None:
    source, room = Room(seed=1).train(3), Room(seed=2).train(2)
    state, groups, inner = (
        room.optimizer.state,
        room.optimizer.param_groups,
        room.optimizer.state[room.params[0]],
    )

    def fail(*_: Any) -> None:
        spoil(room)
        raise error("from the hook")

    class Overridden(torch.optim.Adam):
        def load_state_dict(self, state_dict: Any) -> None:
            super().load_state_dict(state_dict)
            fail()

    if where == "pre":
        room.optimizer.register_load_state_dict_pre_hook(fail)
    elif where == "post":
        room.optimizer.register_load_state_dict_post_hook(fail)
    elif where == "instance":
        room.optimizer.load_state_dict = fail  # type: ignore[method-assign]
    elif where == "override":
        room.optimizer.__class__ = Overridden
    else:
        room.optimizer.register_load_state_dict_post_hook(lambda opt: spoil(room))
        room.scaler.__class__ = type("Picky", (DynamicLossScaler,), {"load_state_dict": _refuse_once(error)})
    room.optimizer.history = [deque([1.0, 2.0], maxlen=4), {"seen": {1, 2}}, (torch.ones(3), [4])]
    before, attributes = flatten([room.everything(), room.optimizer.history]), dict(vars(room.optimizer))
    memory = [p.data_ptr() for p in room.params]
    sd = source.build()
    room.check(sd)
    with pytest.raises(error, match="from the"):
        room.apply(sd)
    assert_same(flatten([room.everything(), room.optimizer.history]), before, f"after an error in {where}")
    assert room.optimizer.history is attributes["history"]
    assert [p.data_ptr() for p in room.params] == memory
    assert room.optimizer.state is state
    assert room.optimizer.param_groups is groups
    assert room.optimizer.state[room.params[0]] is inner
    assert vars(room.optimizer).keys() == attributes.keys()
    assert room.optimizer.param_groups[0]["params"][2] is room.params[2]
    assert not [h for h in room.optimizer._optimizer_load_state_dict_pre_hooks.values() if h is not fail]


def test_a_class_that_loses_parameters_is_refused() -> None:
    class Losing(torch.optim.Adam):
        def load_state_dict(self, state_dict: Any) -> None:
            super().load_state_dict(state_dict)
            self.param_groups.pop()

    source, room = Room(seed=1).train(2), Room(seed=2).train(1)
    room.optimizer.__class__ = Losing
    before = room.everything()
    sd = source.build()
    room.check(sd)
    message = r"Losing\.load_state_dict left groups of \[3\] params where \[3, 3\] were"
    with pytest.raises(ValueError, match=message):
        room.apply(sd)
    assert_same(room.everything(), before)


# -- for a plain optimizer -----------------------------------------------------------------------------------


@pytest.mark.parametrize("case", params_of(one_per_class()))
def test_optimizer_state_goes_on_in_a_plain_optimizer(case: OptimizerCase) -> None:
    source = Room(case, seed=1).train(2)
    plain = Room(case, seed=2)
    sd = through_file(source.build())
    plain.optimizer.load_state_dict(fp16opt.optimizer_state(sd))
    with torch.no_grad():
        for mine, its in zip(plain.params, source.params, strict=True):
            mine.copy_(its)
    assert_same(plain.optimizer.state_dict(), source.optimizer.state_dict())
    assert_same(plain.train(2, first=2).params, source.train(2, first=2).params)


def test_optimizer_state_takes_ours_and_plain_ones_only() -> None:
    sd = Room().train(1).build()
    assert fp16opt.optimizer_state(sd) is sd["optimizer"]
    assert fp16opt.optimizer_state(sd["optimizer"]) is sd["optimizer"]
    own_form = {**sd, "optimizer": {"slow_state": [], "fast_state": {}}}
    assert fp16opt.optimizer_state(own_form) is own_form["optimizer"]
    wrong: list[tuple[Any, type[Exception], str]] = [
        (None, TypeError, "^state_dict must be a dict, got NoneType"),
        ([sd], TypeError, "^state_dict must be a dict, got list"),
        ({}, ValueError, "lacks 'version', 'optimizer', 'masters', 'scaler'"),
        ({"model": {}, "optimizer": sd, "epoch": 3}, ValueError, "of a saved checkpoint, the entry that holds it"),
        ({**sd, "version": 3}, ValueError, "version must be one of 1, 2, got 3"),
        ({**sd, "version": "1"}, TypeError, "version must be an int, got str"),
        ({key: sd[key] for key in sd if key != "masters"}, ValueError, "lacks 'masters'"),
        ({**sd, "optimizer": []}, TypeError, "^optimizer must be a dict, got list"),
        ({**sd, "optimizer": {}}, ValueError, "^optimizer lacks 'state', 'param_groups'"),
        ({**sd, "optimizer": {"state": {}}}, ValueError, "^optimizer lacks 'param_groups'"),
        ({"state": {}, "param_groups": {}}, TypeError, "param_groups must be a list, got dict"),
        ({"state": {}, "param_groups": [{"lr": 1.0}]}, TypeError, "group 0: params must be a list of ids"),
        (
            {"scale": 1.0, "_growth_tracker": 0},
            ValueError,
            r"\(with the keys '_growth_tracker', 'scale'\) lacks 'version'",
        ),
    ]
    for value, error, message in wrong:
        with pytest.raises(error, match=message):
            fp16opt.optimizer_state(value)


def _refuse_once(error: type[BaseException]) -> Any:
    calls: list[int] = []

    def load_state_dict(self: DynamicLossScaler, state_dict: Any) -> None:
        DynamicLossScaler.load_state_dict(self, state_dict)
        calls.append(1)
        if len(calls) == 1:
            raise error("from the scaler")

    return load_state_dict


# -- state of an optimizer that was used before --------------------------------------------------------------

Pair = namedtuple("Pair", "a b")


def test_carry_state_moves_copies_to_the_new_tensor() -> None:
    old, new, marker = Parameter(torch.ones(2, 3).half()), Parameter(torch.ones(2, 3)), object()
    optimizer = torch.optim.SGD([old], lr=0.1)
    state = {
        "buffer": torch.full((3, 2), 1.5, dtype=torch.float16).t(),
        "codes": torch.ones(4, dtype=torch.int16),
        "double": torch.ones(2, dtype=torch.float64),
        "list": [torch.ones(2).bfloat16(), (torch.ones(1), None)],
        "pair": Pair(torch.ones(1).half(), 3),
        "dict": {"x": torch.zeros(2)},
        "marker": marker,
        "text": "abc",
    }
    kept = flatten(state)
    optimizer.state[old] = state
    checkpoint.carry_state(optimizer, old, new)
    assert old not in optimizer.state
    got = optimizer.state[new]
    assert got["buffer"].dtype == torch.float32
    assert got["buffer"].stride() == (1, 2)
    assert (got["codes"].dtype, got["double"].dtype) == (torch.int16, torch.float64)
    assert got["list"][0].dtype == torch.float32
    assert isinstance(got["list"][1], tuple)
    assert isinstance(got["pair"], Pair)
    assert got["pair"].a.dtype == torch.float32
    assert got["marker"] is marker
    assert got["text"] == "abc"
    assert not {t.data_ptr() for t in tensors(got)} & {t.data_ptr() for t in tensors(state)}
    for t in tensors(got):
        t.zero_()
    got["dict"].clear()
    assert_same(state, kept, "the old state")
