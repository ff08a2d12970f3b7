"""Clipping with the norm that unscaling measured; checkpoints, pickles and copies."""

from __future__ import annotations

import copy
import math
import pickle
from typing import Any

import pytest
import torch
from torch.optim import SGD

from grad_scaler.pairs import (
    Ours,
    Theirs,
    assert_norm,
    assert_same_bits,
    exact_norm,
    iteration,
    one,
    parameters,
    values,
)

# -- clipping ---------------------------------------------------------------------------------------------------------


def _clipped(norm_type: float = 2.0, max_norm: float = 1.0, dtype: torch.dtype = torch.float32) -> tuple:
    params = parameters([(50, 3), (7,), (0,)], dtype)
    grads = [values(p.shape, 9 + i, dtype) for i, p in enumerate(params)]
    optimizer, scaler = SGD(params, lr=1.0), Ours("cpu", init_scale=1024.0)
    scaler.scale(torch.ones(()))
    for p, g in zip(params, grads, strict=True):
        p.grad = g * 1024.0
    return params, grads, optimizer, scaler, scaler.clip_grad_norm_(optimizer, max_norm, norm_type)


@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, math.inf])
def test_clip_is_torchs_with_an_exact_norm(norm_type: float) -> None:
    params, grads, _, _, norm = _clipped(norm_type)
    exact = torch.cat([g.reshape(-1).double() for g in grads]).norm(norm_type)
    assert norm.dtype is torch.float32
    assert norm.shape == ()
    assert_norm(norm, exact.float())
    factor = 1.0 / (norm + 1e-6)
    for p, g in zip(params, grads, strict=True):
        assert_same_bits(p.grad, g * factor)


@pytest.mark.parametrize("change", ["in_place", "replaced", "removed"])
def test_a_changed_gradient_is_measured_again(change: str) -> None:
    params, _, optimizer, scaler, _ = _clipped(max_norm=1e9)
    if change == "in_place":
        params[0].grad.mul_(3.0)
    else:
        params[0].grad = params[0].grad * 3.0 if change == "replaced" else None
    grads = [p.grad for p in params if p.grad is not None]
    for _ in range(2):
        before = exact_norm(grads)
        assert_norm(scaler.clip_grad_norm_(optimizer, 0.5), before)
        assert float(exact_norm(grads)) == pytest.approx(0.5, rel=1e-4)


def test_norms_beyond_float32_clip_all_the_same() -> None:
    """torch's norm is inf there, and all gradients become 0."""
    param, optimizer, scaler = one(scaler=Ours("cpu", init_scale=1.0))
    param.grad = torch.tensor([3e38, 3e38])
    assert scaler.clip_grad_norm_(optimizer, 1.0).isinf()
    assert param.grad.tolist() == pytest.approx([math.sqrt(0.5)] * 2, rel=1e-5)


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_non_finite_gradients_are_left_alone_and_the_step_skips(bad: float) -> None:
    param, optimizer, scaler = one([bad, 3.0])
    assert not scaler.clip_grad_norm_(optimizer, 1.0).isfinite()
    assert param.grad[1] == 3.0
    with pytest.raises(RuntimeError, match="can't be clipped"):
        scaler.clip_grad_norm_(optimizer, 1.0, error_if_nonfinite=True)
    scaler.step(optimizer)
    assert scaler.step_was_skipped(optimizer)


def test_clip_order_and_arguments() -> None:
    _param, optimizer, scaler = one()
    with pytest.raises(ValueError, match="max_norm"):
        scaler.clip_grad_norm_(optimizer, -1.0)
    with pytest.raises(ValueError, match="norm_type"):
        scaler.clip_grad_norm_(optimizer, 1.0, 0.0)
    with pytest.raises(AssertionError, match="clip_grad_norm_"):
        Ours("cpu").clip_grad_norm_(optimizer, 1.0)
    scaler.step(optimizer)
    with pytest.raises(RuntimeError, match="after step"):
        scaler.clip_grad_norm_(optimizer, 1.0)


# -- checkpoints and copies -------------------------------------------------------------------------------------------

ODD = {
    "init_scale": 48.0,
    "growth_factor": 3.3,
    "backoff_factor": 0.3,
    "growth_interval": 4,
    "min_scale": 0.5,
    "max_scale": 4096.0,
    "hysteresis": 3,
    "max_consecutive_skips": 17,
}


def _used() -> Any:
    scaler = Ours("cpu", **ODD)
    param, optimizer, _ = one(scaler=scaler)
    for grad in (1.0, math.inf, 1.0, 1.0, math.inf):
        iteration(scaler, optimizer, param, grad)
    scaler.update(100.5)
    return scaler


def _continue(scaler: Any) -> list[float]:
    param, optimizer, _ = one(scaler=scaler)
    scales = []
    for grad in (math.inf, math.inf, math.inf, 1.0, 1.0, 1.0, 1.0, 1.0):
        iteration(scaler, optimizer, param, grad)
        scales.append(scaler.get_scale())
    return scales


def test_a_scale_that_is_set_leaves_the_count_of_clean_steps_as_torchs_does() -> None:
    heard = []
    for cls in (Ours, Theirs):
        param, optimizer, scaler = one(scaler=cls("cpu", init_scale=64.0, growth_interval=4))
        scales = []
        for number in range(4):
            iteration(scaler, optimizer, param)
            if number == 1:
                scaler.update(16.0)
            scales.append(scaler.get_scale())
        heard.append(scales)
    assert heard == [[64.0, 16.0, 16.0, 32.0]] * 2


@pytest.mark.parametrize("way", ["fresh", "started", "pickle", "deepcopy", "unstarted pickle"])
def test_copies_go_on_as_the_original(way: str) -> None:
    original = _used()
    expected = {**original.state_dict(), "fp16opt": {**original.state_dict()["fp16opt"]}}
    if "pickle" in way:
        other = pickle.loads(pickle.dumps(original))
        other = pickle.loads(pickle.dumps(other)) if way == "unstarted pickle" else other
        assert other.skipped_steps == original.skipped_steps == 2
    elif way == "deepcopy":
        other = copy.deepcopy(original)
    else:
        other = Ours("cpu")
        if way == "started":
            other.scale(torch.ones(()))
        other.load_state_dict(original.state_dict())
    assert other.state_dict() == expected
    assert _continue(other) == _continue(original)


def test_the_state_is_torchs_and_more() -> None:
    original = _used()
    theirs = Theirs("cpu")
    theirs.load_state_dict(original.state_dict())
    mine = original.state_dict()
    extras = mine.pop("fp16opt")
    assert theirs.state_dict() == mine
    assert extras == {name: ODD[name] for name in list(ODD)[-4:]} | {"consecutive_skips": 1}
    other = Ours("cpu", hysteresis=5)
    other.load_state_dict(theirs.state_dict())
    assert other.state_dict() == {**mine, "fp16opt": {**Ours("cpu", hysteresis=5).state_dict()["fp16opt"]}}


def test_torchs_scale_outside_the_bounds_is_moved_to_the_nearerone() -> None:
    scaler = Ours("cpu", max_scale=1024.0, init_scale=64.0)
    with pytest.warns(UserWarning, match="outside"):
        scaler.load_state_dict(Theirs("cpu").state_dict())
    assert scaler.get_scale() == 1024.0


def test_repr_shows_settings_and_scale() -> None:
    assert "hysteresis=3" in repr(_used())
    assert "scale now 100.5" in repr(_used())


def test_custom_optimizers_that_take_the_scaler_are_called_as_by_torch() -> None:
    class Custom(SGD):
        _step_supports_amp_scaling = True

        def step(self, closure: Any = None, grad_scaler: Any = None) -> str:  # type: ignore[override]
            grad_scaler.unscale_(self)
            return "stepped"

    param, optimizer, scaler = one(cls=Custom)
    with pytest.warns(FutureWarning, match="going to stop"):
        assert scaler.step(optimizer) == "stepped"
    assert param.grad.tolist() == [1.0, 1.0]
    scaler.update()
