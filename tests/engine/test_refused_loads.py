"""Damaged checkpoints: refused with a message that names what is wrong, and nothing is changed."""

from __future__ import annotations

import copy
import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.optim import SGD, AdamW

import fp16opt
from engine.checks import (
    Problem,
    assert_same,
    flatten,
    one_step,
    ones,
    parameters,
    snapshot,
    train,
)
from fp16opt import DynamicLossScaler, MixedPrecisionOptimizer

KINDS = (torch.float16, torch.float32, torch.bfloat16)


def _made(seed: int = 0, steps: int = 2) -> tuple[list[torch.nn.Parameter], MixedPrecisionOptimizer]:
    params = parameters([(5,), (2, 2), (3,)], KINDS, seed=seed)
    groups = [{"params": params[:2]}, {"params": params[2:], "lr": 0.2}]
    opt = MixedPrecisionOptimizer(AdamW(groups, lr=0.1), scaler=DynamicLossScaler(64.0, growth_interval=5))
    for _ in range(steps):
        train(opt, params, Problem(params))
    return params, opt


def _remove(*path: Any) -> Callable[[Any], None]:
    def damage(sd: Any) -> None:
        for key in path[:-1]:
            sd = sd[key]
        del sd[path[-1]]

    return damage


def _put(value: Any, *path: Any) -> Callable[[Any], None]:
    def damage(sd: Any) -> None:
        for key in path[:-1]:
            sd = sd[key]
        sd[path[-1]] = copy.deepcopy(value)

    return damage


DAMAGES: list[tuple[str, Callable[[Any], None], str]] = [
    *[(f"no_{k}", _remove(k), k) for k in ("version", "optimizer", "masters", "scaler")],
    ("version_unknown", _put(999, "version"), r"version.*999"),
    ("version_text", _put("one", "version"), r"version.*(one|str)"),
    ("version_none", _put(None, "version"), r"version"),
    ("masters_not_a_list", _put(3, "masters"), r"masters"),
    ("masters_too_few", _remove("masters", 2), r"masters.*(2|3)"),
    ("masters_too_many", lambda sd: sd["masters"].append(None), r"masters.*(3|4)"),
    ("master_shape", _put(torch.zeros(6), "masters", 0), r"(?s)(param 0|masters).*6"),
    ("master_dims", _put(torch.zeros(5, 1), "masters", 0), r"(?s)(param 0|masters).*5, ?1"),
    (
        "master_dtype",
        _put(torch.zeros(5, dtype=torch.float64), "masters", 0),
        r"(?s)(param 0|masters).*float64",
    ),
    (
        "master_integer",
        _put(torch.zeros(5, dtype=torch.int32), "masters", 0),
        r"(?s)(param 0|masters).*int32",
    ),
    (
        "master_16_bit",
        _put(torch.zeros(5, dtype=torch.float16), "masters", 0),
        r"(?s)(param 0|masters).*float16",
    ),
    ("master_missing", _put(None, "masters", 0), r"param 0|masters"),
    ("master_for_own", _put(torch.zeros(2, 2), "masters", 1), r"param 1|masters"),
    ("master_text", _put("x", "masters", 2), r"(param 0|masters).*"),
    ("optimizer_not_a_dict", _put([], "optimizer"), r"optimizer"),
    ("optimizer_no_state", _remove("optimizer", "state"), r"state"),
    ("optimizer_no_groups", _remove("optimizer", "param_groups"), r"param_groups"),
    ("group_missing", _remove("optimizer", "param_groups", 1), r"group"),
    ("group_params_missing", _remove("optimizer", "param_groups", 0, "params"), r"params"),
    ("group_params_fewer", _remove("optimizer", "param_groups", 0, "params", 0), r"(?i)group|param"),
    ("state_shape", _put(torch.zeros(7), "optimizer", "state", 0, "exp_avg"), r"(?s)exp_avg.*7|7.*exp_avg"),
    (
        "state_sparse",
        _put(torch.zeros(5).to_sparse(), "optimizer", "state", 0, "exp_avg"),
        r"exp_avg must be a dense floating tensor",
    ),
    ("state_not_a_dict", _put(4, "optimizer", "state", 0), r"state"),
    ("scaler_not_a_dict", _put(8.0, "scaler"), r"scaler"),
    ("scaler_static", _put({"type": "static", "scale": 8.0}, "scaler"), r"(?i)static"),
    ("scaler_empty", _put({}, "scaler"), r"scaler|type"),
]


@pytest.mark.parametrize(("damage", "match"), [pytest.param(d, m, id=i) for i, d, m in DAMAGES])
def test_damaged_checkpoint_is_refused_and_nothing_is_changed(damage: Callable[[Any], None], match: str) -> None:
    params, opt = _made()
    good = copy.deepcopy(opt.state_dict())
    bad = copy.deepcopy(_made(seed=3, steps=4)[1].state_dict())
    damage(bad)
    kept = flatten(bad)
    before = snapshot(opt, params, scaler=True)
    with pytest.raises((ValueError, TypeError), match=match):
        opt.load_state_dict(bad)
    assert_same(snapshot(opt, params, scaler=True), before)
    assert_same(bad, kept, "the refused checkpoint was edited")
    opt.load_state_dict(good)
    train(opt, params, Problem(params))
    assert not bool(opt.step_was_skipped)


@pytest.mark.parametrize("wrong", [None, 3, "sd", [], {}, {"state": {}}], ids=repr)
def test_something_that_is_no_checkpoint_is_refused(wrong: Any) -> None:
    params, opt = _made()
    before = snapshot(opt, params, scaler=True)
    with pytest.raises((ValueError, TypeError)):
        opt.load_state_dict(wrong)
    assert_same(snapshot(opt, params, scaler=True), before)


def test_refused_load_between_backward_and_step_keeps_the_gradients() -> None:
    p = ones()
    opt = MixedPrecisionOptimizer(SGD([p], lr=0.5), loss_scale=8.0)
    one_step(opt, [p], [0.5])
    opt.zero_grad()
    opt.backward(p.float().sum())
    bad = opt.state_dict()
    del bad["masters"]
    with pytest.raises(ValueError, match="masters"):
        opt.load_state_dict(bad)
    opt.step()
    assert float(p[0]) == 0.25


# ---- random damage


def _paths(obj: Any, here: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    out = [here] if here else []
    items = obj.items() if isinstance(obj, dict) else enumerate(obj) if isinstance(obj, (list, tuple)) else ()
    for key, value in items:
        out += _paths(value, (*here, key))
    return out


JUNK = st.sampled_from(
    [
        None,
        0,
        -1,
        2**70,
        1.5,
        float("nan"),
        float("inf"),
        "",
        "text",
        True,
        [],
        {},
        [1, 2],
        {"a": 1},
        (),
        b"x",
        1j,
        torch.zeros(()),
        torch.zeros(0),
        torch.zeros(5),
        torch.full((5,), float("nan")),
        torch.zeros(2, 2, dtype=torch.int64),
        torch.zeros(3, dtype=torch.float16),
        torch.zeros(5, dtype=torch.complex64),
        torch.ones(5).to_sparse(),
    ]
)


@functools.cache
def _samples() -> tuple[Any, Any, Problem]:
    """A good checkpoint, another one to damage, and the problem that they were trained on."""
    params, opt = _made()
    return (
        copy.deepcopy(opt.state_dict()),
        copy.deepcopy(_made(seed=3, steps=4)[1].state_dict()),
        Problem(params),
    )


@given(data=st.data())
def test_random_damage_either_loads_or_is_refused_whole(data: st.DataObject) -> None:
    params, opt = _made(steps=0)
    good, other, problem = _samples()
    opt.load_state_dict(copy.deepcopy(good))
    bad = copy.deepcopy(other)
    for _ in range(data.draw(st.integers(1, 3), label="damages")):
        path = data.draw(st.sampled_from(sorted(_paths(bad), key=str)), label="path")
        owner = bad
        for key in path[:-1]:
            owner = owner[key]
        if isinstance(owner, tuple):
            continue
        if data.draw(st.booleans(), label="remove"):
            del owner[path[-1]]
        else:
            owner[path[-1]] = copy.deepcopy(data.draw(JUNK, label="junk"))
        if not _paths(bad):
            break
    before = snapshot(opt, params, scaler=True)
    try:
        opt.load_state_dict(bad)
    except (ValueError, TypeError) as err:
        assert str(err), "an empty message"  # noqa: PT017
        assert_same(snapshot(opt, params, scaler=True), before)
    opt.load_state_dict(copy.deepcopy(good))
    assert_same(opt.state_dict(), good, "after a good load")
    train(opt, params, problem)
    assert not bool(opt.step_was_skipped)


@pytest.mark.parametrize(
    "modes",
    [{}, {"optimizer_state": "8bit"}, pytest.param({"master_weights": "split"}, marks=pytest.mark.all)],
    ids=["full", "8bit", "split"],
)
def test_exception_at_any_line_of_a_load_leaves_all_of_it_or_nothing(modes: dict[str, str]) -> None:
    def made(seed: int, steps: int) -> tuple[list[torch.nn.Parameter], MixedPrecisionOptimizer]:
        params = parameters([(64, 64), (3,)], KINDS[:1] * 2, seed=seed)
        opt = MixedPrecisionOptimizer(AdamW(params, lr=0.1), scaler=DynamicLossScaler(64.0), **modes)
        for _ in range(steps):
            train(opt, params, Problem(params))
        return params, opt

    def content(params: list[torch.nn.Parameter], opt: MixedPrecisionOptimizer) -> Any:
        return flatten(copy.deepcopy({"model": [p.detach() for p in params], **opt.state_dict(compact=True)}))

    def now_masters() -> list[torch.Tensor]:
        return [master.detach().clone() for master in opt.master_params()]

    saved = copy.deepcopy(made(3, 4)[1].state_dict())
    params, opt = made(0, 2)
    start, before = copy.deepcopy(opt.state_dict()), content(params, opt)
    opt.load_state_dict(saved)
    after, new_masters = content(params, opt), now_masters()
    opt.load_state_dict(start)
    assert_same(content(params, opt), before)
    package = str(Path(fp16opt.__file__).parent)
    stop_at, lines = 0, 0
    functions_on: Any = torch._C.DisableTorchFunction()
    with functions_on:  # its exit puts back what was on before
        pass

    def trace(frame: Any, event: str, _: Any) -> Any:
        nonlocal lines
        if not frame.f_code.co_filename.startswith(package):
            return None
        if event == "line":
            lines += 1
            if lines == stop_at:
                raise KeyboardInterrupt
        return trace

    def load() -> None:
        nonlocal lines
        lines = 0
        earlier = sys.gettrace()
        sys.settrace(trace)
        try:
            opt.load_state_dict(saved)
        finally:
            sys.settrace(earlier)
            torch.set_grad_enabled(True)  # a cut at the end of a ``with`` is one before its exit
            functions_on.__exit__(None, None, None)

    load()
    opt.load_state_dict(start)
    for stop_at in range(1, lines, 1 + lines // 60):
        try:
            load()
        except KeyboardInterrupt:
            now = content(params, opt)
            is_new = all(torch.equal(p, q) for p, q in zip(now_masters(), new_masters, strict=True))
            assert_same(now, after if is_new else before, f"cut at line {stop_at}")
        opt.load_state_dict(start)
