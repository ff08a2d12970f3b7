"""Several models, losses, optimizers and scalers, inf at each place: against plain FP32 SGD that skips such a step."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fp16opt import amp
from fp16opt.amp import _amp_state

ITERATIONS = 4


class Mixed(nn.Module):
    """One FP32 and one FP16 weight. Values are such that scaled FP16 gradients neither overflow nor underflow."""

    def __init__(self, unique: float) -> None:
        super().__init__()
        self.w32 = nn.Parameter(torch.arange(1, 3, dtype=torch.float32) * unique / 4)
        self.w16 = nn.Parameter((torch.arange(1, 3, dtype=torch.float32) * unique / 8).half())

    def forward(self, x: Tensor) -> Tensor:
        return ((x * self.w32) * self.w16.float()).sum()


# (models, which of them each loss uses, which parameters (by model) each optimizer has)
LAYOUTS = {
    "2 models, 1 optimizer": (2, ((0,), (1,)), ((0, 1),)),
    "2 models, 2 optimizers": (2, ((0,), (1,)), ((0,), (1,))),
    "3 models, 1 optimizer, shared": (3, ((0, 2), (1, 2)), ((0, 1, 2),)),
    "3 models, 2 optimizers, shared": (3, ((0, 2), (1, 2)), ((0, 2), (1,))),
}
PLACES = [None, *itertools.product(range(ITERATIONS - 1), range(2), ("w32", "w16"))]
LR = 0.25


def used_by(layout: Any, loss: int) -> list[int]:
    """Optimizers that own a parameter of a loss's models."""
    _, losses, owners = layout
    return [i for i, models in enumerate(owners) if set(models) & set(losses[loss])]


def run_amp(
    layout: Any, scalers: int, place: Any, master: bool, order: int, make: Any = torch.optim.SGD
) -> tuple[list[Tensor], Any, Any]:
    count, losses, owners = layout
    models = [Mixed(1.0 + i) for i in range(count)]
    optimizers: Any = [
        make([p for m in members for p in models[m].parameters()], lr=LR * (1 + i), momentum=0.5 * (i + 1))
        for i, members in enumerate(owners)
    ]
    _amp_state.allow_incoming_model_not_fp32 = True
    models, optimizers = amp.initialize(
        models, optimizers, opt_level="O2", cast_model_type=False, keep_batchnorm_fp32=False, num_losses=scalers,
        master_weights=master, verbosity=0,
    )  # fmt: skip
    for scaler in _amp_state.loss_scalers:
        scaler._loss_scale = 8.0
    x = torch.ones(2)
    zeroing = (
        lambda: [o.zero_grad() for o in optimizers],
        lambda: [m.zero_grad(set_to_none=False) for m in models],
        lambda: [setattr(p, "grad", None) for m in models for p in m.parameters()],
    )[order]
    for i in range(ITERATIONS):
        zeroing()
        for k, members in enumerate(losses):
            loss = sum(models[m](x) for m in members)
            involved = [optimizers[o] for o in used_by(layout, k)]
            with amp.scale_loss(
                loss, tuple(involved) if len(involved) > 1 else involved[0], loss_id=k % scalers
            ) as scaled:
                scaled.backward()
                if place is not None and (i, k) == place[:2]:
                    getattr(models[members[0]], place[2]).grad[0] = float("inf")
        for optimizer in optimizers:
            optimizer.step()
    state = amp.state_dict()
    params = [p.detach().clone() for m in models for p in m.parameters()]
    by_model = {id(p): q for o in optimizers for group in o.pairs() for p, q in group}
    masters = [by_model[id(p)].detach().clone() for m in models for p in m.parameters()]
    return params + masters, state, optimizers


def run_reference(layout: Any, scalers: int, place: Any, master: bool = True) -> tuple[list[Tensor], list[float]]:
    """FP32 weights under torch's SGD; FP16 gradients are rounded once, summed in FP32; bad steps don't happen.

    Without masters the weights themselves, and sums in their dtype.
    """
    count, losses, owners = layout
    models = [Mixed(1.0 + i) for i in range(count)]
    masters = {id(p): nn.Parameter(p.detach().float()) if master else p for m in models for p in m.parameters()}
    optimizers = [
        torch.optim.SGD(
            [masters[id(p)] for m in members for p in models[m].parameters()], lr=LR * (1 + i), momentum=0.5 * (i + 1)
        )
        for i, members in enumerate(owners)
    ]
    scales = [8.0] * scalers
    for i in range(ITERATIONS):
        skip: set[int] = set()
        for stepped in masters.values():
            stepped.grad = None
        for k, members in enumerate(losses):
            params = [p for m in members for p in models[m].parameters()]
            grads = torch.autograd.grad(sum(models[m](torch.ones(2)) for m in members), params)
            for p, g in zip(params, grads, strict=True):
                stepped = masters[id(p)]
                true = g.to(stepped.dtype)
                stepped.grad = true if stepped.grad is None else stepped.grad + true
            if place is not None and (i, k) == place[:2]:
                skip |= set(used_by(layout, k))
                scales[k % scalers] /= 2
        for o, optimizer in enumerate(optimizers):
            if o not in skip:
                optimizer.step()
        for m in models:
            for p in m.parameters():
                p.data.copy_(masters[id(p)].data)
    params = [p.detach().clone() for m in models for p in m.parameters()]
    return params + [masters[id(p)].detach().clone() for m in models for p in m.parameters()], scales


@pytest.mark.parametrize("place", PLACES, ids=str)
@pytest.mark.parametrize("scalers", [1, 2])
@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("master", [True, False], ids=["masters", "plain"])
def test_weights_masters_and_scales(name: str, scalers: int, place: Any, master: bool) -> None:
    layout = LAYOUTS[name]
    expected, scales = run_reference(layout, scalers, place, master)
    for order in range(3):
        got, state, _ = run_amp(layout, scalers, place, master, order)
        for a, b in zip(got, expected, strict=True):
            assert a.dtype == b.dtype
            assert torch.equal(a, b), (order, a, b)
        assert [state[f"loss_scaler{k}"]["loss_scale"] for k in range(scalers)] == scales
    half = [p for p in expected if p.dtype == torch.float16]
    assert half
    assert all(bool(p.isfinite().all()) for p in expected)


@pytest.mark.parametrize("materialize", [True, False])
@pytest.mark.parametrize("place", [None, (1, 0, "w16"), (1, 1, "w32"), (0, 1, "w16"), (2, 0, "w32")], ids=str)
@pytest.mark.parametrize("name", LAYOUTS)
def test_fused_sgd_of_the_aliases(name: str, place: Any, materialize: bool) -> None:
    from fp16opt.optimizers import FusedSGD

    layout = LAYOUTS[name]
    make = functools.partial(FusedSGD, materialize_master_grads=materialize)
    expected, scales = run_reference(layout, 2, place)
    got, state, _ = run_amp(layout, 2, place, True, 0, make)
    assert all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    assert [state[f"loss_scaler{k}"]["loss_scale"] for k in range(2)] == scales


@pytest.mark.parametrize("delayed", [0, 1, 2])
@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
def test_delay_unscale_sums_the_backwards(level: str, delayed: int) -> None:
    def weights(delays: int, with_amp: bool) -> Tensor:
        model = nn.Linear(2, 1, bias=False)
        model.weight.data.fill_(0.5)
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.5)
        if with_amp:
            amp.initialize(model, optimizer, opt_level=level, verbosity=0)
            for scaler in _amp_state.loss_scalers:
                scaler._loss_scale = 1.0 if level in ("O0", "O3") else 16.0
        for _ in range(3):
            for k in range(delays + 1):
                loss = (model(torch.ones(4, 2)) * 0.125).sum()
                if with_amp:
                    with amp.scale_loss(loss, optimizer, delay_unscale=k < delays) as scaled:
                        scaled.backward()
                else:
                    loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        _amp_state.casts.deactivate()
        return model.weight.detach().float()

    assert torch.equal(weights(delayed, True), weights(delayed, False))


def test_delayed_backwards_with_no_last_one_are_unscaled_by_step() -> None:
    model = Mixed(1.0)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.5)
    _amp_state.allow_incoming_model_not_fp32 = True
    amp.initialize(model, optimizer, opt_level="O2", cast_model_type=False, verbosity=0, num_losses=2)
    expected = [p.detach().float() - 0.5 * 2 * q.detach().float() for p, q in
                ((model.w32, model.w16), (model.w16, model.w32))]  # fmt: skip
    for loss_id, scale in ((0, 8.0), (1, 32.0)):  # two scales, neither lost
        _amp_state.loss_scalers[loss_id]._loss_scale = scale
        with amp.scale_loss(model(torch.ones(2)), optimizer, loss_id=loss_id, delay_unscale=True) as scaled:
            scaled.backward()
    optimizer.step()
    assert torch.equal(model.w32, expected[0])
    assert torch.equal(model.w16, expected[1].half())


@pytest.mark.parametrize("master", [True, False])
def test_a_group_that_comes_between_scale_loss_and_step(master: bool) -> None:
    """Gradients that wait are stepped with it; an overflow of another optimizer stays known."""
    for bad in (False, True):
        models = [Mixed(1.0), Mixed(2.0)]
        optimizers: Any = [torch.optim.SGD([m.w32], lr=0.5) for m in models]
        _amp_state.allow_incoming_model_not_fp32 = True
        amp.initialize(
            models, optimizers, opt_level="O2", cast_model_type=False, master_weights=master, loss_scale=8.0,
            verbosity=0,
        )  # fmt: skip
        before = [[p.detach().clone() for p in (m.w32, m.w16)] for m in models]
        with amp.scale_loss(models[0](torch.ones(2)) + models[1](torch.ones(2)), optimizers) as scaled:
            scaled.backward()
            if bad:
                models[1].w32.grad[0] = float("inf")
        if not master:
            models[0].w16.grad = None  # it was in no optimizer: nothing has unscaled it
        optimizers[0].add_param_group({"params": [models[0].w16], "lr": 0.25})
        with pytest.raises(ValueError, match=r"more than one|are one, in the optimizer twice"):
            optimizers[0].add_param_group({"params": [models[0].w16]})
        for optimizer in optimizers:
            optimizer.step()
        assert [o.step_was_skipped for o in optimizers] == [bad, bad]
        w32, w16 = before[0]
        expected = (w32, w16) if bad else (w32 - 0.5 * w16.float(), (w16 - 0.25 * w32 * master).half())
        assert torch.equal(models[0].w32, expected[0])
        assert torch.equal(models[0].w16, expected[1])
