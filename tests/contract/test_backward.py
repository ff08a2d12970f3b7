"""``backward(loss)``: what it leaves, what adds up, and when a further one is refused."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from engine.checks import assert_same, ones, snapshot
from specs import BAD_LOSSES
from torch import Tensor, nn
from torch.optim import SGD

from contract.reference import clipped
from contract.worlds import (
    ALL,
    FUSED,
    INF,
    MIXED_FUSED,
    MIXED_WRAPPED,
    NAN,
    SPLIT,
    WRAPPED,
    Mode,
    World,
    by,
    every_mode,
    every_mode_that_keeps_gradients,
    every_scale,
    every_way,
    instead,
    plus,
    sgd,
    times,
    values,
)
from fp16opt import MixedPrecisionOptimizer, StaticLossScaler

GRADS, MORE = values(0.5, 1.0, -0.5), values(1.0, -0.25, 2.0)
# -- what it leaves ----------------------------------------------------------------------------------------------------


def test_it_returns_none() -> None:
    world = World(WRAPPED)
    assert world.opt.backward(world.loss(GRADS)) is None


def test_fp32_sums_keep_what_16_bits_would_lose() -> None:
    """Of gradients of 1 a float16 sum stops at 2,048."""
    weight = nn.Parameter(torch.zeros(2, dtype=torch.float16))
    opt = MixedPrecisionOptimizer(SGD([weight], lr=1.0), grad_accumulation="fp32")
    for gradient in (2048.0, 1.0, 1.0, 1.0):
        opt.backward(weight.float().sum() * gradient)
    opt.step()
    assert next(opt.master_params()).tolist() == [-2051.0] * 2


@pytest.mark.parametrize(("make", "error", "match"), [pytest.param(*c[1:], id=c[0]) for c in BAD_LOSSES])
def test_what_is_no_loss_is_refused_and_changes_nothing(make: Any, error: type[Exception], match: str) -> None:
    world = World(WRAPPED)
    before = snapshot(world.opt, world.params, scaler=True)
    with pytest.raises(error, match=match):
        world.opt.backward(make(world.params[0]))
    assert_same(snapshot(world.opt, world.params, scaler=True), before)
    world.backward(GRADS)
    with pytest.raises(error, match=match):
        world.opt.backward(make(world.params[0]))
    world.expect_step(GRADS)


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)], ids=str)
def test_a_loss_of_one_element_may_have_any_shape(shape: tuple[int, ...]) -> None:
    world = World(WRAPPED)
    world.opt.backward(world.loss(GRADS).reshape(shape))
    world.expect_step(GRADS)


def test_inputs_limits_which_gradients_are_made() -> None:
    world = World(WRAPPED)
    world.backward(GRADS, inputs=[world.params[0]])
    world.expect_step(instead(instead(GRADS, 1, None), 2, None))


def test_retain_graph_and_create_graph_reach_autograd() -> None:
    p = ones(3, torch.float32)
    opt = MixedPrecisionOptimizer(SGD([p], lr=0.5), loss_scale=8.0)
    loss = p.square().sum()
    opt.backward(loss, retain_graph=True)
    opt.backward(loss)
    assert p.grad is not None
    assert p.grad.tolist() == [32.0] * 3
    with pytest.raises(RuntimeError, match="second time"):
        opt.backward(loss)
    opt.zero_grad()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of a graph that keeps itself, once a process
        opt.backward(p.square().sum(), create_graph=True)
    assert p.grad.requires_grad


@by([WRAPPED, FUSED, MIXED_WRAPPED, MIXED_FUSED])
@every_scale
def test_gradients_that_have_a_graph_are_stepped(mode: Mode, scale: str) -> None:
    world = World(mode, scale)
    world.backward(GRADS, create_graph=True)
    world.expect_step(GRADS)


@by([mode for mode in ALL if mode is not SPLIT])  # which refuses the step
@every_way
@pytest.mark.parametrize("then", ["step", "clip", "read"])
def test_sparse_gradients_are_summed_in_fp32(mode: Mode, how: str, then: str) -> None:
    """An embedding row looked up twice, a dense parameter beside it; torch's AdamW takes none, so SGD everywhere."""
    world = World(mode, "static", shapes=((5, 2), (2, 3), (5,)), make=sgd)
    rows, coefficients = torch.tensor([1, 3, 3]), torch.tensor([[0.5, 1.0], [2.0, -1.0], [1.0, 0.25]])
    first = torch.zeros(5, 2).index_add(0, rows, coefficients)
    grads: list[Tensor | None] = [first, GRADS[1], None]
    loss = (nn.functional.embedding(rows, world.params[0], sparse=True).float() * coefficients).sum()
    loss = loss + world.loss([None, GRADS[1], None])
    if how == "scale_loss":
        world.opt.scale_loss(loss).backward()
    else:
        world.opt.backward(loss, update_master_grads=how == "backward")
    if then == "clip":
        norm = world.expect_norm(world.opt.clip_master_grads(1.0), grads)
        grads = clipped(grads, norm, 1.0)
    if then == "read":
        shown = world.masters[0].grad
        assert shown is not None
        assert (shown.layout, shown.is_coalesced(), shown.dtype) == (torch.sparse_coo, True, torch.float32)
        assert shown.to_dense().tolist() == first.tolist()
    world.expect_step(grads)


def test_sparse_sums_keep_what_16_bits_would_lose() -> None:
    """4,097 times the same row with gradient 1: a float16 sum stops at 2,048."""
    table = nn.Parameter(torch.zeros(2, 1, dtype=torch.float16))
    opt = MixedPrecisionOptimizer(SGD([table], lr=1.0))
    opt.backward(nn.functional.embedding(torch.zeros(4097, dtype=torch.long), table, sparse=True).float().sum())
    opt.step()
    assert next(opt.master_params()).tolist() == [[-4097.0], [0.0]]


def test_a_loss_without_a_graph_is_torchs_error() -> None:
    world = World(WRAPPED)
    with pytest.raises(RuntimeError, match="grad"):
        world.opt.backward(torch.tensor(1.0))
    world.backward(GRADS)
    world.expect_step(GRADS)


# -- several of them ---------------------------------------------------------------------------------------------------


@every_mode_that_keeps_gradients
@pytest.mark.parametrize("value", [2.0, INF])
def test_after_a_step_that_was_refused_the_sum_is_checked_anew(mode: Mode, value: float) -> None:
    """The refused step has checked the first backward's gradients, and left them to be added to."""
    world = World(mode, "dynamic", arguments={"on_model_write": "error"})
    world.backward(GRADS)
    weight = world.params[world.half()]
    before = weight.detach().clone()
    with torch.no_grad():
        weight.add_(1.0)
    with pytest.raises(RuntimeError, match="weights were written"):
        world.opt.step()
    with torch.no_grad():
        weight.copy_(before)
    more = instead(MORE, world.half(), torch.full((4,), value))
    world.backward(more)
    if value == INF:
        world.expect_skip()
    else:
        world.expect_step(plus(GRADS, more))


# -- an abandoned batch ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["dense", "sparse"])
def test_fp32_sums_begin_at_zero_whatever_their_memory_held(kind: str) -> None:
    """With deterministic algorithms torch fills new memory with nan."""
    weight = nn.Parameter(torch.zeros(3, 2, dtype=torch.float16))
    opt = MixedPrecisionOptimizer(SGD([weight], lr=1.0), loss_scale=4.0, grad_accumulation="fp32")
    rows = torch.tensor([0, 1, 2])
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        for _ in range(2):
            opt.backward(nn.functional.embedding(rows, weight, sparse=kind == "sparse").float().sum())
        opt.step()
    finally:
        torch.use_deterministic_algorithms(before)
    assert not opt.step_was_skipped
    assert torch.equal(weight.detach(), torch.full_like(weight, -2.0))


# -- a scaler of its own -----------------------------------------------------------------------------------------------


@every_mode
def test_losses_with_a_scaler_each_are_summed_in_fp32(mode: Mode) -> None:
    world = World(mode)
    world.backward(GRADS)
    world.backward(MORE, scaler=StaticLossScaler(4.0))
    world.backward(GRADS)
    world.check_master_grads(plus(GRADS, MORE, GRADS))
    world.expect_step(plus(GRADS, MORE, GRADS))


@every_mode
@pytest.mark.parametrize("look", ["update_master_grads", "read"])
def test_one_may_join_after_a_look_at_the_first_backward(mode: Mode, look: str) -> None:
    world = World(mode)
    world.backward(GRADS)
    if look == "read":
        world.check_master_grads(GRADS)
    else:
        world.opt.update_master_grads()
    world.backward(MORE)
    world.backward(GRADS, scaler=StaticLossScaler(4.0))
    world.expect_step(plus(GRADS, MORE, GRADS))


@every_mode_that_keeps_gradients
@pytest.mark.parametrize("value", [8.0, NAN])
@pytest.mark.parametrize("look", ["nothing", "read"])
def test_a_dropped_gradient_is_gone_though_a_second_scaler_joins(mode: Mode, look: str, value: float) -> None:
    world = World(mode)
    world.backward(instead(GRADS, 0, torch.full_like(GRADS[0], value)))
    if look == "read":
        assert world.masters[world.half()].grad is not None
    world.params[0].grad = None
    world.backward(instead(GRADS, 0, None), scaler=StaticLossScaler(4.0))
    world.expect_step(times(instead(GRADS, 0, None), 2))


@pytest.mark.parametrize("value", [2.0, "dynamic", torch.tensor(2.0)], ids=repr)
def test_scaler_must_be_one(value: object) -> None:
    world = World(WRAPPED)
    with pytest.raises(TypeError, match="scaler"):
        world.backward(GRADS, scaler=value)
    world.backward(GRADS)
    world.expect_step(GRADS)
