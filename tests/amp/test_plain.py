"""Optimizers without master weights (O0, O1, O3): the model's ``.grad`` is true as soon as ``scale_loss`` is left.

Reference: torch's own optimizer on the same model without loss scaling. Scales are powers of two, so the bits agree.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

from fp16opt import amp
from fp16opt.amp import _amp_state

from .nets import X, Y, backward, made, net, same, sgd, train


def weights_of(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def grads_of(model: nn.Module) -> list[Tensor | None]:
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


def at_scale(scale: float, **kwargs: Any) -> tuple[Any, Any]:
    """O1 with casts off, so that a plain FP32 training has the same bits."""
    model, optimizer = made("O1", loss_scale=scale, **kwargs)
    _amp_state.casts.deactivate()
    return model, optimizer


@pytest.mark.parametrize("scale", [1.0, 1024.0])
@pytest.mark.parametrize("of_model", [True, False])
def test_clipping_the_model_or_the_master_params_trains_as_plain_torch(of_model: bool, scale: float) -> None:
    model, optimizer = at_scale(scale)
    plain = net()
    reference = sgd(plain)
    for _ in range(5):
        for zeroed in (optimizer, reference):
            zeroed.zero_grad()
        for _ in range(2):
            backward(model, optimizer, 0.5)
            (F.cross_entropy(plain(X), Y) * 0.5).backward()
        assert same(grads_of(model), grads_of(plain))
        norms = [clip_grad_norm_(model.parameters() if of_model else amp.master_params(optimizer), 0.125)]
        norms += [clip_grad_norm_(plain.parameters(), 0.125)]
        assert torch.equal(*norms)
        optimizer.step()
        reference.step()
        assert same(weights_of(model), weights_of(plain))
    assert [id(p) for p in amp.master_params(optimizer)] == [id(p) for p in model.parameters()]
    assert optimizer.state_dict().keys() == reference.state_dict().keys()
    reference.load_state_dict(optimizer.state_dict())


def test_edits_and_plain_backwards_between_contexts_count() -> None:
    model, optimizer = at_scale(256.0)
    plain = net()
    F.cross_entropy(model(X), Y).backward()
    F.cross_entropy(plain(X), Y).backward()
    for factor in (0.5, 2.0):
        backward(model, optimizer)
        F.cross_entropy(plain(X), Y).backward()
        for one in (model, plain):
            for p in one.parameters():
                p.grad.mul_(factor)
    assert same(grads_of(model), grads_of(plain))
    model[0].weight.grad = None  # is left alone
    before = model[0].weight.detach().clone()
    optimizer.step()
    assert torch.equal(model[0].weight, before)
    assert not optimizer.step_was_skipped


@pytest.mark.parametrize(
    ("options", "heard"), [({}, [3, 1]), ({"delay_unscale": True}, [1, 1]), ({"delay_overflow_check": True}, [1, 1])]
)
def test_each_backward_is_unscaled_by_its_own_scale(options: dict[str, bool], heard: list[int]) -> None:
    model, optimizer = at_scale("dynamic", num_losses=2)  # type: ignore[arg-type]
    plain = net()
    for loss_id, scale in enumerate((64.0, 4096.0)):
        _amp_state.loss_scalers[loss_id]._loss_scale = scale
    for loss_id in (0, 0, 1, 0):
        backward(model, optimizer, loss_id=loss_id, **options)
        F.cross_entropy(plain(X), Y).backward()
    reference = sgd(plain)
    optimizer.step()
    reference.step()
    assert same(weights_of(model), weights_of(plain))
    assert [scaler._unskipped for scaler in _amp_state.loss_scalers] == heard


def test_contexts_within_each_other() -> None:
    model, optimizer = at_scale(64.0, num_losses=2)
    _amp_state.loss_scalers[1]._loss_scale = 16.0
    plain = net()
    for loss_id in (0, 1):
        with amp.scale_loss(F.cross_entropy(model(X), Y), optimizer) as outer:
            backward(model, optimizer, 0.5, loss_id=loss_id)
            outer.backward()
        (F.cross_entropy(plain(X), Y) * 0.5).backward()
        F.cross_entropy(plain(X), Y).backward()
    for a, b in zip(grads_of(model), grads_of(plain), strict=True):
        assert torch.allclose(a, b, rtol=1e-6)


@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_gradients_may_be_cleared_inside_of_the_context(level: str, to_none: bool) -> None:
    model, optimizer = made(level, loss_scale=1024.0)
    twin, reference = copy.deepcopy((model, optimizer))
    with amp.scale_loss(F.cross_entropy(model(X).float(), Y), optimizer) as scaled:
        optimizer.zero_grad(set_to_none=to_none)
        scaled.backward()
    optimizer.step()
    train(twin, reference, 1)
    assert same(weights_of(model), weights_of(twin))


def test_what_a_delayed_loss_does_not_reach_keeps_its_gradients() -> None:
    models = [net(), net(1)]
    optimizers: Any = [sgd(m) for m in models]
    amp.initialize(models, optimizers, opt_level="O1", loss_scale=64.0, verbosity=0)
    backward(models[1], optimizers)
    before = grads_of(models[1])
    backward(models[0], optimizers, delay_unscale=True)
    assert same(grads_of(models[1]), before)
    for optimizer in optimizers:
        optimizer.step()
    assert same(grads_of(models[1]), before)


def test_an_inf_that_a_skipped_step_has_left_skips_until_it_is_cleared() -> None:
    model, optimizer = at_scale("dynamic")  # type: ignore[arg-type]
    before = weights_of(model)
    backward(model, optimizer, float("inf"))
    optimizer.step()
    for _ in range(2):
        backward(model, optimizer)
        optimizer.step()
        assert optimizer.step_was_skipped
    assert same(weights_of(model), before)
    assert optimizer.skipped_steps == 3
    assert _amp_state.loss_scalers[0].loss_scale() == 2.0**15  # it was of one backward alone
    optimizer.zero_grad()
    backward(model, optimizer)
    optimizer.step()
    assert not optimizer.step_was_skipped
    assert optimizer.overflow_report() == []


def test_the_report_has_what_overflowed_in_any_backward() -> None:
    model, optimizer = made("O1")
    for name, value in (("0.bias", "inf"), ("3.weight", "nan"), ("0.bias", "nan")):
        backward(model, optimizer, bad={name: float(value)})
    optimizer.step()
    assert [str(one) for one in optimizer.overflow_report()] == ["0.bias (inf and nan)", "3.weight (nan)"]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sums_of_16_bit_gradients_that_do_not_fit_skip(dtype: torch.dtype) -> None:
    weight = nn.Parameter(torch.ones(1))
    model = nn.Module()
    model.weight = weight  # type: ignore[assignment]
    optimizer: Any = torch.optim.SGD([weight], lr=1.0)
    amp.initialize(model, optimizer, opt_level="O3", cast_model_type=dtype, loss_scale=0.5, verbosity=0)
    big = torch.finfo(dtype).max * 1.5
    for _ in range(2):
        with amp.scale_loss(weight.float() * (big / 2), optimizer) as scaled:
            scaled.backward()
        assert weight.grad is not None
        assert weight.grad.dtype == dtype
    optimizer.step()
    assert optimizer.step_was_skipped
    assert weight.item() == 1.0


# -- steps -----------------------------------------------------------------------------------------------------------


def test_hooks_and_a_step_that_was_put_on_the_object_run_where_the_step_is_taken() -> None:
    model = net()
    optimizer: Any = sgd(model)
    called: list[str] = []
    own = optimizer.step

    def step(*args: Any) -> Any:
        called.append("own")
        return own(*args)

    optimizer.step = step
    optimizer.register_step_pre_hook(lambda *_: called.append("pre"))
    optimizer.register_step_post_hook(lambda *_: called.append("post"))
    amp.initialize(model, optimizer, opt_level="O1", verbosity=0)
    before = weights_of(model)
    for factor, expected in ((float("inf"), []), (1.0, ["own", "pre", "post"])):
        optimizer.zero_grad()
        called.clear()
        backward(model, optimizer, factor)
        assert optimizer.step() is None
        assert called == expected
        assert same(weights_of(model), before) == (not expected)


def test_a_script_may_make_another_optimizer_of_the_class() -> None:
    model, optimizer = made("O1")
    other = net(1)
    plain = type(optimizer)(other.parameters(), lr=0.5)
    before = weights_of(other)
    F.cross_entropy(other(X).float(), Y).backward()
    plain.step()
    plain.zero_grad()
    assert not same(weights_of(other), before)
    assert type(copy.deepcopy(plain)) is type(optimizer)
    train(model, optimizer, 1)


@pytest.mark.parametrize("level", ["O0", "O1"])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam])
def test_closures_that_overflow_at_every_scale_put_all_back(kind: Any, level: str) -> None:
    model = net()
    optimizer = kind(model.parameters(), lr=0.125)
    amp.initialize(model, optimizer, opt_level=level, verbosity=0, loss_scale=64.0)
    factor = 1.0

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(X), Y) * factor
        with amp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        return loss

    first = optimizer.step(closure)
    assert first is not None
    before, state = weights_of(model), copy.deepcopy(optimizer.state_dict()["state"])
    factor = float("inf")
    optimizer.step(closure)
    assert optimizer.step_was_skipped
    assert same(weights_of(model), before)
    for key, entries in optimizer.state_dict()["state"].items():
        for name, value in entries.items():
            assert value is None or torch.equal(torch.as_tensor(value), torch.as_tensor(state[key][name]))
    factor = 1.0
    assert optimizer.step(closure=closure).item() < first.item()


def test_casts_are_on_in_a_closure_and_off_in_the_step_around_it() -> None:
    seen: list[tuple[str, bool]] = []

    class Watching(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:
            seen.append(("step", torch.is_autocast_enabled("cpu")))
            return super().step(closure)

    model = net()
    optimizer = Watching(model.parameters(), lr=0.125)
    amp.initialize(model, optimizer, opt_level="O1", verbosity=0)

    def closure() -> Tensor:
        seen.append(("closure", torch.is_autocast_enabled("cpu")))
        optimizer.zero_grad()
        loss = F.cross_entropy(model(X), Y)
        with amp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        return loss

    optimizer.step(closure)
    assert seen == [("step", False), ("closure", True)]
    assert torch.is_autocast_enabled("cpu")
