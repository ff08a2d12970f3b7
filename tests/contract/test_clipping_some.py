"""Clipping some parameters' gradients only, and clipping by value: in every mode, and nothing hides an overflow."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from contract import oracle
from contract.worlds import HALF, INF, NAN, Mode, World, every_mode, every_scale, instead, plus, values

GRADS = (0.5, 1.0, -0.25)
FIRST_AND_THIRD = (0, 2)


def some(world: World, which: tuple[int, ...], masters: bool) -> list[Tensor]:
    of = world.masters if masters else world.params
    return [of[i] for i in which]


def clipped(grads: list[Tensor], which: tuple[int, ...], largest: float, norm: float) -> list[Tensor]:
    """What torch's rule leaves of ``grads`` where those at ``which`` are clipped, their norm being ``norm``."""
    factor = min(np.float32(1.0), np.float32(largest) / (np.float32(norm) + np.float32(1e-6)))  # torch's, in float32
    return [g * float(factor) if i in which else g for i, g in enumerate(grads)]


@every_scale
@every_mode
@pytest.mark.parametrize("as_masters", [False, True], ids=["model", "masters"])
@pytest.mark.parametrize("norm_type", [2.0, 1.0, INF], ids=str)
def test_the_norm_of_some_is_theirs_and_the_others_stay(
    mode: Mode, scale: str, as_masters: bool, norm_type: float
) -> None:
    if as_masters and not mode.has_masters:
        pytest.skip("there are no masters to name")
    world = World(mode, scale)
    grads = values(*GRADS)
    world.backward(grads)
    norm = world.opt.clip_master_grads(1.0, norm_type, params=iter(some(world, FIRST_AND_THIRD, as_masters)))
    chosen = [grads[i] for i in FIRST_AND_THIRD]
    if norm_type == 2.0:
        world.expect_norm(norm, chosen)
    else:
        flat = torch.cat([g.flatten() for g in chosen])
        assert float(norm) == float(flat.abs().sum() if norm_type == 1.0 else flat.abs().amax())
    want = clipped(grads, FIRST_AND_THIRD, 1.0, float(norm))
    world.check_master_grads(want)
    world.expect_step(want)


@every_mode
def test_one_after_another_each_with_its_own_norm(mode: Mode) -> None:
    """A second factor on top of a first one, and one after a clip of all, which waits for the step."""
    world = World(mode, "static")
    grads = values(*GRADS)
    world.backward(grads)
    want = list(grads)
    norm = float(world.opt.clip_master_grads(2.0))
    want = clipped(want, (0, 1, 2), 2.0, norm)
    for i, largest in ((1, 0.5), (2, 0.125)):
        norm = world.expect_norm(world.opt.clip_master_grads(largest, params=world.params[i]), [want[i]])
        want = clipped(want, (i,), largest, norm)
    world.expect_step(want)


@every_mode
def test_all_by_name_is_all(mode: Mode) -> None:
    one, other = World(mode, "dynamic"), World(mode, "dynamic")
    for world, options in ((one, {}), (other, {"params": [*other.params, nn.Parameter(torch.ones(2))]})):
        world.backward(values(*GRADS))
        world.opt.clip_master_grads(0.5, **options)
        world.opt.step()
    for a, b in zip(one.masters, other.masters, strict=True):
        assert torch.equal(a, b)


@every_mode
@pytest.mark.parametrize("where", [0, 1], ids=["among them", "in another one"])
@pytest.mark.parametrize("bad", [INF, NAN], ids=str)
def test_an_overflow_anywhere_skips(mode: Mode, where: int, bad: float) -> None:
    """In the others too: then their norm is a number, and gradients stay as they are."""
    world = World(mode, "dynamic")
    grads = values(*GRADS)
    world.backward(instead(grads, where, torch.full_like(grads[where], bad)))
    norm = world.opt.clip_master_grads(1e-3, params=[world.params[0]])
    if where == 0:
        assert not bool(norm.isfinite())
    else:
        world.expect_norm(norm, grads[:1])
    world.expect_skip()


@every_scale
@every_mode
def test_by_value_is_torchs_clamp_on_true_gradients(mode: Mode, scale: str) -> None:
    world = World(mode, scale)
    grads = values(*GRADS)
    world.backward(grads)
    world.opt.clip_master_values(0.75)
    want = [g.clamp(-0.75, 0.75) for g in grads]
    world.check_master_grads(want)
    world.expect_step(want)


@every_mode
def test_by_value_of_some_and_of_sums_of_two_backwards(mode: Mode) -> None:
    world = World(mode, "static")
    first, second = values(*GRADS), values(0.25, -2.0, 0.5)
    world.backward(first)
    world.backward(second)
    world.opt.clip_master_values(0.5, params=[world.params[1]])
    world.expect_step([g.clamp(-0.5, 0.5) if i == 1 else g for i, g in enumerate(plus(first, second))])


@every_mode
@pytest.mark.parametrize("bad", [INF, -INF, NAN], ids=str)
def test_by_value_makes_no_number_of_an_overflow(mode: Mode, bad: float) -> None:
    world = World(mode, "dynamic")
    grads = values(*GRADS)
    world.backward(instead(grads, 2, torch.full_like(grads[2], bad)))
    world.opt.clip_master_values(0.5)
    assert not bool(world.masters[2].grad.isfinite().any())
    world.expect_skip()
    world.opt.zero_grad()
    world.backward(grads)
    world.expect_step(grads)


@every_mode
def test_by_value_then_by_norm(mode: Mode) -> None:
    """The norm is that of what the first clip has left."""
    world = World(mode, "static")
    grads = values(*GRADS)
    world.backward(grads)
    world.opt.clip_master_values(0.75)
    want = [g.clamp(-0.75, 0.75) for g in grads]
    norm = world.expect_norm(world.opt.clip_master_grads(1.0), want)
    world.expect_step(clipped(want, (0, 1, 2), 1.0, norm))


def test_a_tensor_of_float64_is_clipped_at_the_number_itself() -> None:
    weight = nn.Parameter(torch.zeros(3, dtype=torch.float64))
    world = World(Mode("double", arguments={"fused_step": False}))
    opt = World.wrap(torch.optim.SGD([weight], lr=1.0))
    opt.backward((weight * torch.tensor([0.05, 0.5, -3.0], dtype=torch.float64)).sum())
    opt.clip_master_values(0.1)
    opt.step()
    assert weight.tolist() == [-0.05, -0.1, 0.1]
    assert world.params[0].dtype is HALF


def test_nothing_to_clip() -> None:
    world = World(Mode("plain"))
    world.opt.clip_master_values(0.5)
    assert float(world.opt.clip_master_grads(0.5, params=world.params[:1])) == 0.0
    world.opt.step()
    world.check_weights()


REFUSED: list[tuple[Any, type[Exception], str]] = [
    (3, TypeError, "params: expected the parameters whose gradients are clipped, got int"),
    (["a"], TypeError, "params: expected the parameters whose gradients are clipped, got list"),
]


@pytest.mark.parametrize("how", ["clip_master_grads", "clip_master_values"])
@pytest.mark.parametrize(("params", "error", "message"), REFUSED, ids=["number", "strings"])
def test_what_is_no_parameter_is_refused(how: str, params: Any, error: type[Exception], message: str) -> None:
    world = World(Mode("plain"))
    grads = values(*GRADS)
    world.backward(grads)
    with pytest.raises(error, match=message):
        getattr(world.opt, how)(0.5, params=params)
    world.expect_step(grads)


@pytest.mark.parametrize("how", ["clip_master_grads", "clip_master_values"])
def test_a_gradient_of_somebody_else_is_refused(how: str) -> None:
    world = World(Mode("plain"))
    grads = values(*GRADS)
    world.backward(grads)
    other = nn.Parameter(torch.ones(7))
    other.grad = torch.ones(7)
    with pytest.raises(ValueError, match=r"params: number 3, of shape \(7,\), has a gradient and is not in this opti"):
        getattr(world.opt, how)(0.5, params=[*world.params, other])
    assert oracle.total_norm([other.grad]) == pytest.approx(7**0.5)
    world.expect_step(grads)


@pytest.mark.parametrize(("value", "error"), [(-1.0, ValueError), (NAN, ValueError), ("a", TypeError)])
def test_the_largest_value_is_a_number(value: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="max_value: expected a number"):
        World(Mode("plain")).opt.clip_master_values(value)
