"""scale_loss: order, exceptions, overflows, clipping, refusals, and checkpoints."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from rooms import through_file
from torch import nn

from fp16opt import MixedPrecisionOptimizer, amp
from fp16opt.amp import _amp_state

from .nets import LEVELS, X, Y, backward, bits, made, net, same, sgd, train

ZEROINGS = [
    lambda model, optimizer: model.zero_grad(),
    lambda model, optimizer: model.zero_grad(set_to_none=False),
    lambda model, optimizer: optimizer.zero_grad(set_to_none=True),
    lambda model, optimizer: optimizer.zero_grad(set_to_none=False),
    lambda model, optimizer: [setattr(p, "grad", None) for p in model.parameters()],
]


@pytest.mark.parametrize("level", LEVELS)
def test_every_way_of_zeroing_trains_the_same(level: str) -> None:
    runs = []
    for zero in ZEROINGS:
        model, optimizer = made(level)
        train(model, optimizer, 5, zero)
        runs.append(bits(model, optimizer))
        _amp_state.casts.deactivate()
    assert all(same(runs[0], run) for run in runs[1:])


def test_o2_is_the_engine_by_hand_bit_for_bit() -> None:
    model, optimizer = made("O2")
    train(model, optimizer, 6)
    by_hand = net()
    for module in by_hand:
        if not isinstance(module, nn.BatchNorm1d):
            module.half()
    engine = MixedPrecisionOptimizer(sgd(by_hand), dynamic=True, fused_step=False)
    for _ in range(6):
        engine.zero_grad()
        engine.backward(F.cross_entropy(by_hand(X.half()).float(), Y))
        engine.step()
    masters = list(engine.master_params())
    expected = [*by_hand.parameters(), *masters, *(engine.state[m]["momentum_buffer"] for m in masters)]
    assert same(bits(model, optimizer), [t.detach() for t in expected])


@pytest.mark.parametrize("level", LEVELS)
def test_master_gradients_are_written_when_scale_loss_is_left(level: str) -> None:
    """Read past whatever a master's ``.grad`` may do when it is asked for."""
    model, optimizer = made(level)
    stored = torch.Tensor.grad.__get__

    scale = _amp_state.loss_scalers[0].loss_scale()
    backward(model, optimizer)
    first = [stored(master).clone() for master in amp.master_params(optimizer)]
    for param, master, grad in zip(model.parameters(), amp.master_params(optimizer), first, strict=True):
        assert (master is param) == (level != "O2")
        assert torch.equal(grad, stored(param).float() / (1.0 if master is param else scale))
    backward(model, optimizer)
    second = [stored(master) for master in amp.master_params(optimizer)]
    assert same(second, [2 * grad for grad in first])  # scales are powers of two


@pytest.mark.parametrize("by_model", [False, True])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_after_an_exception_inside_nothing_is_stepped_until_gradients_are_cleared(level: str, by_model: bool) -> None:
    """By the model only where it holds all that there is: what an earlier backward gave is summed in FP32 by then."""
    model, optimizer = made(level)
    before = [p.detach().clone() for p in (*model.parameters(), *amp.master_params(optimizer))]
    if not by_model:
        backward(model, optimizer)
    scale = _amp_state.loss_scalers[0].loss_scale()

    def fails() -> None:
        with amp.scale_loss(model(X).sum(), optimizer) as scaled:
            scaled.backward()
            raise KeyError("x")

    with pytest.raises(KeyError, match="x"):
        fails()
    scaler = _amp_state.loss_scalers[0]
    assert (scaler.loss_scale(), scaler._unskipped) == (scale, int(not by_model))
    assert torch.is_autocast_enabled("cpu") == (level == "O1")
    for call in (optimizer.step, fails):
        with pytest.raises(RuntimeError, match=r"interrupted .* Call zero_grad\(\)"):
            call()
    assert same([*model.parameters(), *amp.master_params(optimizer)], before)
    (model if by_model else optimizer).zero_grad()
    reference_model, reference = made(level)
    train(reference_model, reference, 1)
    backward(model, optimizer)
    optimizer.step()
    assert same(bits(model, optimizer), bits(reference_model, reference))
    assert optimizer.skipped_steps == 0


@pytest.mark.parametrize("level", LEVELS)
def test_each_inf_skips_one_step_and_names_the_parameter(level: str, caplog: pytest.LogCaptureFixture) -> None:
    model = net()
    optimizer = sgd(model)
    amp.initialize(model, optimizer, opt_level=level)
    train(model, optimizer, 10)  # skips before are calibration
    before = bits(model, optimizer)
    scale = _amp_state.loss_scalers[0].loss_scale()
    optimizer.zero_grad()
    backward(model, optimizer, bad={"3.bias": float("nan")})
    assert _amp_state.loss_scalers[0].loss_scale() == (scale / 2 if level in ("O1", "O2") else scale)
    with caplog.at_level(logging.WARNING):
        assert optimizer.step() is None
    assert "3.bias (nan)" in caplog.text
    assert same(bits(model, optimizer), before)
    train(model, optimizer, 1)
    assert not same(bits(model, optimizer), before)


@pytest.mark.parametrize("zero", [*ZEROINGS])
@pytest.mark.parametrize("level", LEVELS)
def test_an_overflow_that_is_never_stepped_does_not_cost_the_next_step(level: str, zero: Any) -> None:
    model, optimizer = made(level)
    backward(model, optimizer, bad={"0.weight": float("inf")})
    zero(model, optimizer)
    backward(model, optimizer)
    optimizer.step()
    assert not optimizer.step_was_skipped


def test_growth_and_the_counts_that_scripts_read_and_write() -> None:
    model, optimizer = made("O2", max_loss_scale=32.0)
    scaler = _amp_state.loss_scalers[0]
    scaler._loss_scale = 8.0
    scaler._scale_seq_len = 3
    assert (scaler.loss_scale(), scaler._scale_seq_len, scaler._max_loss_scale) == (8.0, 3, 32.0)
    scales, counts = [], []
    for _ in range(9):
        train(model, optimizer, 1)
        scales.append(scaler._loss_scale)
        counts.append(scaler._unskipped)
    assert scales == [8.0, 8.0, 16.0, 16.0, 16.0, 32.0, 32.0, 32.0, 32.0]
    assert counts == [1, 2, 0, 1, 2, 0, 1, 2, 0]
    scaler._loss_scale = 4.0
    scaler._unskipped = 50  # past the window: under apex it never grew again
    train(model, optimizer, 1)
    assert scaler._loss_scale == 8.0
    with pytest.raises(ValueError, match="scale must be from min_scale to max_scale"):
        scaler._loss_scale = 2.0**40
    assert not scaler._has_overflow
    scaler._has_overflow = True
    assert scaler.update_scale() is True
    scaler.clear_overflow_state()
    assert scaler.update_scale() is False
    assert "LossScaler" in repr(scaler)


def test_unscaling_by_hand() -> None:
    made("O2")
    scaler = _amp_state.loss_scalers[0]
    scaler._loss_scale = 4.0
    out = [torch.zeros(2), torch.zeros(1)]
    scaler.unscale([torch.full((2,), 8.0).half(), torch.ones(1)], out)
    assert [t.tolist() for t in out] == [[2.0, 2.0], [0.25]]
    assert not scaler._has_overflow
    scaler.unscale([torch.tensor([float("inf")])], [torch.zeros(1)])
    scaler.unscale([], [])
    assert scaler._has_overflow
    assert scaler.update_scale()
    assert scaler.loss_scale() == 2.0


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_delayed_overflow_check_is_not_forgotten(level: str) -> None:
    model, optimizer = made(level)
    before = [p.detach().clone() for p in model.parameters()]
    backward(model, optimizer, bad={"0.bias": float("inf")}, delay_overflow_check=True)
    assert _amp_state.loss_scalers[0].loss_scale() == 2.0**16
    optimizer.step()
    assert _amp_state.loss_scalers[0].loss_scale() == 2.0**15
    assert same([p.detach() for p in model.parameters()], before)
    optimizer.zero_grad()
    backward(model, optimizer, bad={"0.bias": float("inf")}, delay_overflow_check=True)
    backward(model, optimizer)
    assert _amp_state.loss_scalers[0].loss_scale() == 2.0**14
    optimizer.step()
    assert same([p.detach() for p in model.parameters()], before)


def test_what_is_yielded() -> None:
    model, optimizer = made("O2")
    loss = torch.ones(2, 3, dtype=torch.float16, requires_grad=True)
    with amp.scale_loss(loss, optimizer) as scaled:
        assert (scaled.dtype, scaled.shape) == (torch.float32, loss.shape)
        assert scaled[0, 0].item() == 2.0**16
    optimizer.zero_grad()
    with amp.scale_loss(loss, optimizer, model=model) as scaled:
        scaled.backward(torch.ones(2, 3))
    assert loss.grad is not None


def test_refused_calls() -> None:
    model = net()
    with pytest.raises(RuntimeError, match=r"before amp\.initialize"), amp.scale_loss(torch.ones(()), sgd(model)):
        pass
    model, optimizer = made("O2", num_losses=2)
    for bad in (2, -1, True, "0"):
        with (
            pytest.raises(ValueError, match="loss_id: expected a whole number from 0 to 1"),
            amp.scale_loss(model(X).sum(), optimizer, loss_id=bad),  # type: ignore[arg-type]
        ):
            pass
    with (
        pytest.raises(RuntimeError, match=r"optimizer 1 \(SGD\) was not passed to amp.initialize"),
        amp.scale_loss(model(X).sum(), [optimizer, sgd(net())]),
    ):
        pass
    with pytest.raises(TypeError, match="loss: expected a tensor"), amp.scale_loss(3.0, optimizer):
        pass
    with pytest.raises(RuntimeError, match=r"step\(closure\) does not go with master weights"):
        optimizer.step(lambda: None)
    train(model, optimizer, 1)
    assert not optimizer.step_was_skipped


@pytest.mark.parametrize("level", ["O0", "O1"])
def test_closures_without_masters(level: str) -> None:
    model = net()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=3)
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    losses = []

    def closure() -> Any:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(X), Y)
        with amp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        losses.append(loss.item())
        if len(losses) == 2 and level == "O1":
            model[0].bias.grad[0] = float("inf")  # evaluated again at a lower scale
        return loss

    for _ in range(3):
        optimizer.step(closure)
    assert losses[-1] < losses[0]


# -- checkpoints -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", [0, 1])
@pytest.mark.parametrize("level", LEVELS)
def test_resume_is_bit_exact(level: str, order: int) -> None:
    """Save half way, initialize fresh objects, load in the documented order or models first, go on."""
    model, optimizer = made(level)
    _amp_state.loss_scalers[0]._scale_seq_len = 4
    train(model, optimizer, 5)
    saved = through_file({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "amp": amp.state_dict()})
    train(model, optimizer, 5)
    expected = bits(model, optimizer)
    expected_scale = amp.state_dict()
    _amp_state.casts.deactivate()
    model = net(9)
    if order == 1:
        model.load_state_dict(saved["model"])
    optimizer = sgd(model)
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    _amp_state.loss_scalers[0]._scale_seq_len = 4
    if order == 0:
        model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    amp.load_state_dict(saved["amp"])
    train(model, optimizer, 5)
    assert same(bits(model, optimizer), expected)
    assert amp.state_dict() == expected_scale


def test_optimizer_checkpoints_go_both_ways() -> None:
    model, optimizer = made("O2")
    train(model, optimizer, 3)
    state = optimizer.state_dict()
    assert {"state", "param_groups"} < set(state)
    plain = net()
    torch_optimizer = sgd(plain)
    torch_optimizer.load_state_dict(state)  # an FP32 script
    assert torch_optimizer.state_dict()["param_groups"][0]["lr"] == 0.125
    model, optimizer = made("O0")
    optimizer.load_state_dict(state)
    assert same([optimizer.state[p]["momentum_buffer"] for p in amp.master_params(optimizer)],
                [torch_optimizer.state[p]["momentum_buffer"] for p in plain.parameters()])  # fmt: skip


def test_scalers_are_loaded_by_key(caplog: pytest.LogCaptureFixture) -> None:
    made("O2", num_losses=2)
    amp.load_state_dict({
        "loss_scaler1": {"loss_scale": 64.0, "unskipped": 7},
        "loss_scaler0": {"loss_scale": 32.0, "unskipped": 2500},
        "loss_scaler2": {"loss_scale": 16.0, "unskipped": 1},
    })  # fmt: skip
    assert "has 3 loss scalers and this run has 2" in caplog.text
    assert [s.loss_scale() for s in _amp_state.loss_scalers] == [32.0, 64.0]
    assert [s._unskipped for s in _amp_state.loss_scalers] == [1999, 7]
    before = amp.state_dict()
    for bad, error in (
        ({"loss_scaler0": {"loss_scale": 8.0, "unskipped": 1}, "model": {}}, "got 'model'"),
        ({"loss_scaler0": {"loss_scale": 8.0, "unskipped": 1}, "loss_scaler1": {"loss_scale": 8.0}}, "loss_scaler1"),
        ({"loss_scaler0": {"loss_scale": 0.0, "unskipped": 1}}, "loss_scaler0"),
    ):
        with pytest.raises(RuntimeError, match=error):
            amp.load_state_dict(bad)
    with pytest.raises(TypeError, match="state_dict: expected a dict, got list"):
        amp.load_state_dict([])  # type: ignore[arg-type]
    assert amp.state_dict() == before
