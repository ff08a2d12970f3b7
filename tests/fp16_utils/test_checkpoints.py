"""state_dicts of FP16_Optimizer: resume bit for bit, and files that apex saved."""

from __future__ import annotations

import io
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from as_apex.runs import python
from engine.checks import assert_same, assert_same_bits, snapshot
from torch import nn
from torch.optim import SGD, AdamW

from fp16opt import DynamicLossScaler, MixedPrecisionOptimizer, StaticLossScaler
from fp16opt.fp16_utils import FP16_Optimizer, LossScaler, load_apex_file

from .runs import loss_of, network

KEYS = [
    *("loss_scaler", "dynamic_loss_scale", "overflow", "first_closure_call_this_step"),
    *("optimizer_state_dict", "fp32_from_fp16"),
]


def adamw(net: nn.Module) -> AdamW:
    params = list(net.parameters())
    return AdamW([{"params": params[:2]}, {"params": params[2:], "weight_decay": 0.0}], lr=0.01, foreach=False)


def run(net: nn.Module, optimizer: FP16_Optimizer, steps: range, poisoned: int | None = 1) -> None:
    for step in steps:
        optimizer.zero_grad()
        optimizer.backward(loss_of(net, step, float("inf") if step == poisoned else 1.0))
        optimizer.step()


def saved(state: Any, **how: Any) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(state, file, **how)
    file.seek(0)
    return file


@pytest.mark.parametrize("model_first", [True, False])
@pytest.mark.parametrize("dynamic", [True, False])
def test_resume_is_bit_exact_and_plain(dynamic: bool, model_first: bool) -> None:
    """N steps, a file read with weights_only=True, N steps: the bits of 2N. apex pickled live objects (quirk 39)."""
    args: dict[str, Any] = {"static_loss_scale": 64.0, "dynamic_loss_scale": dynamic}
    args["dynamic_loss_args"] = {"init_scale": 128.0, "scale_window": 3}
    net = network()
    optimizer = FP16_Optimizer(adamw(net), **args)
    run(net, optimizer, range(5))
    state = optimizer.state_dict()
    assert list(state) == KEYS
    assert [len(group) for group in state["fp32_from_fp16"]] == [2, 2]  # the batch norm's are their own
    assert all(m.dtype == torch.float32 for group in state["fp32_from_fp16"] for m in group)
    file = saved({"optimizer": state, "model": net.state_dict()})
    run(net, optimizer, range(5, 10), poisoned=7)
    checkpoint = torch.load(file, weights_only=True)
    fresh = network()
    with torch.no_grad():
        for param in fresh.parameters():
            param.mul_(0.5)
    resumed = FP16_Optimizer(adamw(fresh), **args)
    if model_first:
        fresh.load_state_dict(checkpoint["model"])
    resumed.load_state_dict(checkpoint["optimizer"])
    if not model_first:
        fresh.load_state_dict(checkpoint["model"])
    run(fresh, resumed, range(5, 10), poisoned=7)
    assert_same(snapshot(resumed, scaler=True), snapshot(optimizer, scaler=True), "resumed ")
    assert resumed.loss_scale == optimizer.loss_scale


def test_the_engines_own_state_dict_loads() -> None:
    net, other = network(), network()
    engine = MixedPrecisionOptimizer(adamw(net), loss_scale=8.0)
    engine.backward(loss_of(net, 0))
    engine.step()
    face = FP16_Optimizer(adamw(other))
    other.load_state_dict(net.state_dict())  # batch norms are FP32: their values are the model's
    face.load_state_dict(engine.state_dict())
    for ours, theirs in zip(face.master_params(), engine.master_params(), strict=True):
        assert_same_bits(ours, theirs, "master")
    assert face.loss_scale == 8.0


# -- files that apex saved -------------------------------------------------------------------------------------------


def amp_scaler() -> dict[str, Any]:
    return {
        "dynamic": True, "_loss_scale": 4096.0, "_max_loss_scale": 2.0**24, "_min_loss_scale": None,
        "_scale_seq_len": 2000, "_unskipped": 17, "_has_overflow": False, "_overflow_buf": torch.zeros(1).int(),
    }  # fmt: skip


def amp_static() -> dict[str, Any]:
    return {**amp_scaler(), "dynamic": False, "_loss_scale": 128.0}


def old_dynamic() -> dict[str, Any]:
    return {"cur_scale": 4096.0, "cur_iter": 30, "last_overflow_iter": 12, "scale_factor": 2.0, "scale_window": 1000}


def old_static() -> dict[str, Any]:
    return {"cur_scale": 128.0}


FILES: list[tuple[str, str, Callable[[], dict[str, Any]], tuple[Any, ...]]] = [
    ("apex.amp.scaler", "LossScaler", amp_scaler, (4096.0, 17, 2000, 2.0**-14, 2.0**24)),
    ("apex.amp.scaler", "LossScaler", amp_static, (128.0,)),
    ("apex.fp16_utils.loss_scaler", "DynamicLossScaler", old_dynamic, (4096.0, 17, 1000, 1.0, 2.0**127)),
    ("apex.fp16_utils.loss_scaler", "LossScaler", old_static, (128.0,)),
]


def apex_file(
    make: Callable[..., Any], module: str, name: str, fields: dict[str, Any], legacy: bool = False
) -> tuple[io.BytesIO, FP16_Optimizer, nn.Module]:
    """A file as apex wrote it, and the optimizer and network that its masters came from."""
    net = network()
    source = FP16_Optimizer(adamw(net), static_loss_scale=64.0)
    run(net, source, range(3), poisoned=None)
    scaler = make(module, name, **fields)
    state = {
        **source.state_dict(), "loss_scaler": scaler, "dynamic_loss_scale": "scale_window" in fields
        or fields.get("dynamic", False),
    }  # fmt: skip
    checkpoint = {"optimizer": state, "model": net.state_dict(), "epoch": 3}
    return saved(checkpoint, _use_new_zipfile_serialization=not legacy), source, net


@pytest.mark.parametrize("legacy", [False, True], ids=["zip", "legacy"])
@pytest.mark.parametrize(("module", "name", "fields", "expected"), FILES)
def test_a_file_of_apexs_is_read_and_goes_on(
    of_another_library: Any, module: str, name: str, fields: Any, expected: tuple[Any, ...], legacy: bool
) -> None:
    file, source, net = apex_file(of_another_library, module, name, fields(), legacy)
    with pytest.raises(pickle.UnpicklingError):
        torch.load(file, weights_only=True)
    file.seek(0)
    allowed = set(torch.serialization.get_safe_globals())
    checkpoint = load_apex_file(file)
    assert set(torch.serialization.get_safe_globals()) == allowed, "nothing stays admitted"
    assert checkpoint["epoch"] == 3
    assert repr(checkpoint["optimizer"]["loss_scaler"]).startswith(f"{module}.{name}(")
    other = network()
    resumed = FP16_Optimizer(adamw(other), dynamic_loss_scale=True, dynamic_loss_args={"init_scale": 2.0})
    other.load_state_dict(checkpoint["model"])
    resumed.load_state_dict(checkpoint["optimizer"])
    for ours, theirs in zip(resumed.master_params(), source.master_params(), strict=True):
        assert_same_bits(ours, theirs, "master")
    for ours, theirs in zip(other.parameters(), net.parameters(), strict=True):
        assert_same_bits(ours, theirs, "model")
    scaler = resumed.scaler
    if len(expected) > 1:
        assert isinstance(scaler, DynamicLossScaler)
        got = (
            float(scaler.scale),
            int(scaler.growth_tracker),
            scaler.growth_interval,
            scaler.min_scale,
            scaler.max_scale,
        )
        assert got == expected
    else:
        assert isinstance(scaler, StaticLossScaler)
        assert (resumed.loss_scale,) == expected
        assert not resumed.dynamic_loss_scale
    resumed.loss_scale = source.loss_scale  # so that 16-bit gradients round alike
    run(net, source, range(3, 6), poisoned=None)
    run(other, resumed, range(3, 6), poisoned=None)
    for ours, theirs in zip(resumed.master_params(), source.master_params(), strict=True):
        assert_same_bits(ours, theirs, "master after three more steps")


def test_the_restricted_unpickler_runs_nothing(tmp_path: Path) -> None:
    class Bad:
        def __reduce__(self) -> tuple[Any, ...]:
            return (os.mkdir, (str(tmp_path / "made"),))

    file = io.BytesIO()
    torch.save({"loss_scaler": Bad()}, file)
    file.seek(0)
    with pytest.raises(pickle.UnpicklingError):
        load_apex_file(file)
    assert not (tmp_path / "made").exists()
    file.seek(0)
    torch.load(file, weights_only=False)
    assert (tmp_path / "made").exists(), "the file was harmless: this test shows nothing"


def test_unpickled_as_live_objects_under_the_alias(tmp_path: Path, of_another_library: Any) -> None:
    """A script that keeps its torch.load(..., weights_only=False) finds this package's class under apex's name."""
    file, _, _ = apex_file(of_another_library, "apex.fp16_utils.loss_scaler", "DynamicLossScaler", old_dynamic())
    (tmp_path / "old.pt").write_bytes(file.getvalue())
    code = """
import fp16opt, torch
fp16opt.install_as_apex(replace=True)
state = torch.load("old.pt", weights_only=False)["optimizer"]
scaler = state["loss_scaler"]
print(type(scaler).__module__, scaler.cur_scale, scaler._unskipped, scaler.scale_window, scaler.scale_factor)
"""
    done = python(tmp_path, "-c", code)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["fp16opt.fp16_utils.loss_scalers", "4096.0", "17", "1000", "2.0"]


def test_a_live_scaler_object_in_the_dict_is_understood() -> None:
    net = network()
    optimizer = FP16_Optimizer(adamw(net))
    state = {**optimizer.state_dict(), "loss_scaler": LossScaler(32.0)}
    optimizer.load_state_dict(state)
    assert optimizer.loss_scale == 32.0
    del state["loss_scaler"]
    optimizer.loss_scale = 16.0
    optimizer.load_state_dict(state)
    assert optimizer.loss_scale == 16.0, "without the entry the scale stays"


# -- bad input -------------------------------------------------------------------------------------------------------


class Strange:
    pass


def zero_scale() -> Any:
    scaler = Strange()
    scaler.__dict__.update({**amp_scaler(), "_loss_scale": 0.0})
    return scaler


REFUSED: list[tuple[str, Callable[[dict[str, Any]], Any], type[Exception], str]] = [
    ("no dict", lambda sd: [1], TypeError, "state_dict must be a dict"),
    ("no masters", lambda sd: {k: v for k, v in sd.items() if k != "fp32_from_fp16"}, ValueError,
     "expected the keys optimizer_state_dict, fp32_from_fp16, fp32_from_fp16 missing"),
    ("flat", lambda sd: {"fp32_groups_flat": []}, ValueError, "got the flat ones of apex.optimizers.FP16_Optimizer"),
    ("other groups", lambda sd: {**sd, "fp32_from_fp16": [sd["fp32_from_fp16"][0]]}, ValueError,
     r"expected FP32 masters for \[2, 2\] parameters in the groups, got \[2\]"),
    ("fewer masters", lambda sd: {**sd, "fp32_from_fp16": [sd["fp32_from_fp16"][0], []]}, ValueError, r"got \[2, 0\]"),
    ("shape", lambda sd: {**sd, "fp32_from_fp16": [[m.flatten()[:1] for m in g] for g in sd["fp32_from_fp16"]]},
     ValueError, "shape"),
    ("no scaler", lambda sd: {**sd, "loss_scaler": Strange()}, TypeError,
     "loss_scaler: expected a loss scaler of apex's, got Strange. Read the file with load_apex_file"),
    ("scale 0", lambda sd: {**sd, "loss_scaler": zero_scale()}, ValueError,
     "loss_scaler: expected a positive, finite scale, got 0.0"),
    ("optimizer", lambda sd: {**sd, "optimizer_state_dict": 3}, TypeError, "optimizer must be a dict"),
    ("dynamic and wrong",
     lambda sd: {**sd, "loss_scaler": DynamicLossScaler().state_dict(), "optimizer_state_dict": {}},
     ValueError, "optimizer"),
]  # fmt: skip


@pytest.mark.parametrize(("edit", "error", "message"), [r[1:] for r in REFUSED], ids=[r[0] for r in REFUSED])
def test_what_does_not_fit_is_refused_and_changes_nothing(edit: Any, error: type[Exception], message: str) -> None:
    net = network()
    optimizer = FP16_Optimizer(adamw(net), static_loss_scale=4.0)
    run(net, optimizer, range(2))
    state = edit(optimizer.state_dict())
    before, scaler = snapshot(optimizer, scaler=True), optimizer.scaler
    with pytest.raises(error, match=message):
        optimizer.load_state_dict(state)
    assert_same(snapshot(optimizer, scaler=True), before, "after a refused load ")
    assert optimizer.scaler is scaler


def test_the_engine_takes_what_its_own_state_dict_gives_of_the_face() -> None:
    weight, other = nn.Parameter(torch.ones(1).half()), nn.Parameter(torch.ones(1).half())
    face = FP16_Optimizer(SGD([weight], lr=2.0**-13, momentum=0.5), static_loss_scale=4.0)
    face.backward(weight.float().sum())
    face.step()
    engine = MixedPrecisionOptimizer(SGD([other], lr=2.0**-13, momentum=0.5))
    with pytest.raises(ValueError, match=r"'fp32_from_fp16', .* lacks 'version', 'optimizer', 'masters', 'scaler'"):
        engine.load_state_dict(face.state_dict())
    engine.load_state_dict(MixedPrecisionOptimizer.state_dict(face))
    assert_same(snapshot(engine, scaler=True), snapshot(face, scaler=True), "carried over ")
