"""FP16_Optimizer: apex's calls give what plain FP32 stepping gives, and apex's faults are gone."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest
import torch
from engine.checks import assert_same, assert_same_bits
from torch import nn
from torch.optim import SGD, AdamW

from fp16opt import MixedPrecisionOptimizer
from fp16opt.fp16_utils import FP16_Optimizer

from .runs import loss_of, network


def sgd(params: Any) -> SGD:
    return SGD(params, lr=0.05, momentum=0.9, weight_decay=1e-3)


def adamw(params: Any) -> AdamW:
    return AdamW(params, lr=0.01, foreach=False)


def halves(*values: float) -> nn.Parameter:
    return nn.Parameter(torch.tensor(values).half())


# -- the same bits ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [sgd, adamw])
def test_same_bits_as_the_engine(make: Any) -> None:
    """An O2-like run: half network, FP32 batch norms, a scale, clipping. One step overflows in both wrapped runs."""
    face_net, engine_net = network(), network()
    face = FP16_Optimizer(make(face_net.parameters()), dynamic_loss_scale=True, dynamic_loss_args={"init_scale": 1024})
    engine = MixedPrecisionOptimizer(make(engine_net.parameters()), dynamic=True, fused_step=False)
    engine.loss_scale = 1024.0
    before = [p.detach().clone() for p in face_net.parameters()]
    for step in range(12):
        poison = float("inf") if step == 5 else 1.0
        face.zero_grad()
        face.backward(loss_of(face_net, step, poison))
        clipped = face.clip_master_grads(0.5)
        face.step()
        engine.zero_grad()
        engine.backward(loss_of(engine_net, step, poison))
        norm = engine.clip_master_grads(0.5)
        engine.step()
        assert face.overflow is engine.step_was_skipped is (step == 5)
        if step == 5:
            assert clipped == -1
        else:
            assert_same_bits(clipped, norm, f"norm in step {step}")
    for ours, theirs in zip(face.master_params(), engine.master_params(), strict=True):
        assert_same_bits(ours, theirs, "master")
    assert_same(face.optimizer.state_dict(), engine.optimizer.state_dict(), "optimizer state ")
    for (name, ours), theirs in zip(face_net.state_dict().items(), engine_net.state_dict().values(), strict=True):
        assert_same_bits(ours, theirs, name)
    assert face.loss_scale == engine.loss_scale == 512.0
    assert any(not torch.equal(a, b) for a, b in zip(before, face_net.parameters(), strict=True))


def test_master_gradients_are_written_when_backward_returns() -> None:
    """Read past whatever a master's ``.grad`` may do when it is asked for."""
    net = network()
    optimizer = FP16_Optimizer(sgd(net.parameters()), static_loss_scale=64.0)
    stored = torch.Tensor.grad.__get__
    optimizer.backward(loss_of(net, 0), update_master_grads=False)
    assert all(stored(master) is None for group in optimizer.fp32_from_fp16_groups for master in group)
    optimizer.zero_grad()
    for _ in range(2):
        optimizer.backward(loss_of(net, 0))
        for halves, masters in zip(optimizer.fp16_groups, optimizer.fp32_from_fp16_groups, strict=True):
            for param, master in zip(halves, masters, strict=True):
                assert_same_bits(stored(master), stored(param).float() / 64.0, "master gradient")


def test_several_losses_update_master_grads_once() -> None:
    """backward(..., update_master_grads=False) for each, then update_master_grads(): apex's way."""
    weight, own = halves(1.0, 2.0), nn.Parameter(torch.ones(2))
    optimizer = FP16_Optimizer(SGD([weight, own], lr=1.0), static_loss_scale=64.0)
    optimizer.zero_grad()
    loss = (weight.float() * own).sum()
    optimizer.backward(loss, update_master_grads=False, retain_graph=True)
    optimizer.backward(loss * 2, False)
    optimizer.update_master_grads()
    data = optimizer.inspect_master_grad_data()
    assert data is not None
    assert [[g.tolist() for g in group] for group in data] == [[[3.0, 3.0], [3.0, 6.0]]]
    assert all(g.dtype == torch.float32 for group in data for g in group)
    optimizer.step()
    assert weight.tolist() == [-2.0, -1.0]
    assert own.tolist() == [-2.0, -5.0]


# -- overflows -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("clear", ["optimizer", "optimizer-none", "model", "model-zeros"])
def test_an_overflow_that_the_script_skips_by_itself_lowers_the_scale(clear: str) -> None:
    """`if optimizer.overflow: zero_grad(); continue` was a way to skip: the scale must go down all the same."""
    model = nn.Linear(2, 1).half()
    optimizer = FP16_Optimizer(SGD(model.parameters(), lr=0.1), dynamic_loss_scale=True)
    for times in range(1, 4):
        optimizer.backward(model(torch.ones(1, 2).half()).float().sum() * float("inf"))
        assert optimizer.overflow
        if clear.startswith("model"):
            model.zero_grad(set_to_none=clear == "model")
        else:
            optimizer.zero_grad(set_grads_to_None=clear == "optimizer-none")
            assert optimizer.loss_scale == 2.0 ** (16 - times)
    optimizer.backward(model(torch.ones(1, 2).half()).float().sum() * 2.0**-4)
    assert optimizer.loss_scale == 2.0**13
    optimizer.step()
    assert optimizer.skipped_steps == 3
    assert not optimizer.overflow


def test_clip_returns_minus_one_after_an_overflow_and_leaves_gradients() -> None:
    weight = halves(3.0, 4.0)
    optimizer = FP16_Optimizer(SGD([weight], lr=1.0))
    assert optimizer.clip_master_grads(1.0) == 0.0  # no gradients yet
    optimizer.backward((weight.float() ** 2).sum() / 2)
    assert optimizer.clip_master_grads(1.0) == 5.0
    optimizer.update_master_grads()
    assert optimizer.clip_master_grads(1.0, norm_type=float("inf")) == 4.0
    optimizer.zero_grad()
    optimizer.backward(weight.float().sum() * float("nan"))
    norm = optimizer.clip_master_grads(1.0)
    assert norm == -1
    assert norm.item() == -1.0
    assert optimizer.inspect_master_grad_data() is None
    optimizer.step()
    assert weight.tolist() == [3.0, 4.0]


def test_scale_grows_after_the_window_up_to_the_limit() -> None:
    weight = halves(0.0)
    args = {"init_scale": 8.0, "scale_factor": 4.0, "scale_window": 3, "max_loss_scale": 64.0, "min_loss_scale": 2.0}
    optimizer = FP16_Optimizer(SGD([weight], lr=0.0), dynamic_loss_scale=True, dynamic_loss_args=args)
    seen = []
    for step in range(12):
        optimizer.zero_grad()
        optimizer.backward(weight.float().sum() * (float("inf") if step in (7, 8, 9, 10) else 1.0))
        optimizer.step()
        seen.append(optimizer.loss_scale)
    assert seen == [8, 8, 32, 32, 32, 64, 64, 16, 4, 2, 2, 2]


# -- the optimizer's face --------------------------------------------------------------------------------------------


def test_groups_of_halves_masters_and_floats() -> None:
    weight, own, frozen = halves(1.0), nn.Parameter(torch.ones(1)), halves(1.0)
    frozen.requires_grad_(False)
    second = halves(2.0)
    optimizer = FP16_Optimizer(SGD([{"params": [weight, own]}, {"params": [second, frozen]}], lr=1.0))
    assert [[p is q for p, q in zip(g, w, strict=True)] for g, w in
            zip(optimizer.fp16_groups, [[weight], [second]], strict=True)] == [[True], [True]]  # fmt: skip
    assert [[m.item() for m in g] for g in optimizer.fp32_from_fp16_groups] == [[1.0], [2.0]]
    assert [len(g) for g in optimizer.fp32_from_fp32_groups] == [1, 1]
    stepped = optimizer.fp32_from_fp32_groups[0][0]
    assert (stepped is optimizer.param_groups[0]["params"][1], stepped.data_ptr()) == (True, own.data_ptr())
    optimizer.loss_scale = 8.0
    optimizer.backward(own.sum())
    assert (own.grad.item(), stepped.grad.item()) == (8.0, 1.0)


def test_param_groups_and_state_can_be_set() -> None:
    weight = halves(1.0)
    optimizer = FP16_Optimizer(SGD([weight], lr=1.0, momentum=0.5))
    groups = [{**group, "lr": 0.25} for group in optimizer.param_groups]
    optimizer.param_groups = groups
    assert optimizer.optimizer.param_groups[0]["lr"] == 0.25
    optimizer.backward(weight.float().sum())
    optimizer.step()
    assert weight.item() == 0.75
    with pytest.raises(
        ValueError, match=r"param_groups: expected groups with the same parameters.*Use add_param_group"
    ):
        optimizer.param_groups = [{"params": [weight], "lr": 1.0}]
    state = optimizer.state
    optimizer.state = state
    assert optimizer.optimizer.state is state


def test_loss_scale_and_loss_scaler_under_the_old_names() -> None:
    weight = halves(1.0)
    optimizer = FP16_Optimizer(SGD([weight], lr=1.0), dynamic_loss_scale=True)
    scaler = optimizer.loss_scaler
    assert (scaler.cur_scale, scaler.loss_scale, scaler.loss_scale(), scaler._loss_scale) == (65536.0,) * 4
    assert scaler.dynamic
    assert optimizer.dynamic_loss_scale
    scaler.cur_scale = 512.0
    assert optimizer.loss_scale == 512.0
    optimizer.loss_scale = 64.0
    assert scaler.loss_scale == 64.0
    for _ in range(3):
        optimizer.zero_grad()
        optimizer.backward(weight.float().sum())
        optimizer.step()
    assert optimizer.loss_scaler._unskipped == 3


def test_verbose_false_is_silent(caplog: pytest.LogCaptureFixture) -> None:
    for verbose in (False, True):
        weight = halves(1.0)
        optimizer = FP16_Optimizer(SGD([weight], lr=1.0), static_loss_scale=2.0, verbose=verbose)
        with caplog.at_level(logging.INFO, "fp16opt"):
            optimizer.backward(weight.float().sum() * float("inf"))
            optimizer.step()
        assert bool(caplog.records) is verbose


# -- closures --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dynamic", [True, False])
def test_closure_that_always_overflows_ends(dynamic: bool) -> None:
    """apex evaluated it for ever (quirk 40)."""
    weight = halves(1.0)
    optimizer = FP16_Optimizer(SGD([weight], lr=0.5), dynamic_loss_scale=dynamic)
    calls = []

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = weight.float().sum() * float("inf")
        optimizer.backward(loss)
        calls.append(optimizer.loss_scale)
        return loss

    optimizer.step(closure)
    assert len(calls) == (31 if dynamic else 1)  # 2**16 down to 2**-14
    assert calls == sorted(set(calls), reverse=True), "each evaluation lowered the scale once"
    assert weight.item() == 1.0
    assert optimizer.overflow
    assert optimizer.skipped_steps == 1


# -- bad input -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kwargs", "error", "message"),
    [
        ({"static_loss_scale": 0.0}, ValueError, "scale must be over 0"),
        ({"static_loss_scale": "dynamic"}, TypeError, "scale must be a number, got str"),
        (
            {"dynamic_loss_scale": True, "dynamic_loss_args": {"scale": 2}},
            ValueError,
            r"dynamic_loss_args: expected keys among init_scale, .* got scale\. Leave it out",
        ),
        (
            {"dynamic_loss_scale": True, "dynamic_loss_args": [1]},
            TypeError,
            "dynamic_loss_args: expected a dict or None, got list",
        ),
        (
            {"dynamic_loss_scale": True, "dynamic_loss_args": {"init_scale": "big"}},
            TypeError,
            "init_scale: expected a number, got str",
        ),
        (
            {"dynamic_loss_scale": True, "dynamic_loss_args": {"scale_factor": 0}},
            ValueError,
            "scale_factor: expected a number over 0, got 0",
        ),
        ({"dynamic_loss_scale": True, "dynamic_loss_args": {"scale_window": 0}}, ValueError, "growth_interval"),
    ],
)
def test_bad_arguments_are_refused_and_change_nothing(kwargs: Any, error: type[Exception], message: str) -> None:
    weight = halves(1.0)
    inner = SGD([weight], lr=1.0)
    with pytest.raises(error, match=message):
        FP16_Optimizer(inner, **kwargs)
    assert inner.param_groups[0]["params"][0] is weight


def test_dynamic_args_limits_of_none_mean_none() -> None:
    """apex raised a TypeError for max_loss_scale=None (quirk 23)."""
    args = {"init_scale": 2.0**40, "max_loss_scale": None, "min_loss_scale": None}
    optimizer = FP16_Optimizer(SGD([halves(1.0)], lr=1.0), dynamic_loss_scale=True, dynamic_loss_args=args)
    assert optimizer.loss_scale == 2.0**40
    capped = FP16_Optimizer(
        SGD([halves(1.0)], lr=1.0), dynamic_loss_scale=True, dynamic_loss_args={"init_scale": 2**32}
    )
    assert capped.loss_scale == 2.0**24
    assert np.isfinite(capped.loss_scale)


def test_wrapping_what_is_no_optimizer_or_wrapped() -> None:
    with pytest.raises(TypeError, match=r"expected a torch.optim.Optimizer, got list"):
        FP16_Optimizer([])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="this FP16_Optimizer is wrapped already"):
        FP16_Optimizer(FP16_Optimizer(SGD([halves(1.0)], lr=1.0)))
