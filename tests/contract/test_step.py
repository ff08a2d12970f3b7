"""Whole steps against the reference, and the reference against numbers worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from contract import oracle
from contract.worlds import (
    ALL,
    INF,
    NAN,
    ONE_PASS,
    WRAPPED,
    Mode,
    World,
    every_mode,
    every_scale,
    instead,
    plus,
    values,
)


def test_the_reference_by_hand() -> None:
    """SGD at 0.5 from 1: a gradient of 2 clipped to 1, then an inf; growth after one clean step."""
    p = nn.Parameter(torch.ones(1, dtype=torch.float16))
    scale = oracle.Scale(8.0, growth_interval=1)
    reference = oracle.Reference.of([p], lambda params: torch.optim.SGD(params, lr=0.5), scale)
    grad = oracle.unscaled(oracle.scaled(torch.tensor([2.0]), 8.0, torch.float16), 8.0)
    assert grad.tolist() == [2.0]
    assert oracle.total_norm([grad]) == 2.0
    (clipped,) = oracle.clipped([grad], 2.0, 1.0)
    assert clipped is not None
    assert clipped.item() == pytest.approx(1.0, rel=1e-6)
    assert not reference.step([clipped])
    assert reference.masters[0].item() == pytest.approx(0.5, rel=1e-6)
    assert scale.value == 16.0
    before = reference.masters[0].item()
    assert reference.step([torch.tensor([INF])])
    assert (reference.masters[0].item(), scale.value, reference.skipped_steps) == (before, 8.0, 1)


def test_the_reference_rounds_and_overflows_as_the_formats_do() -> None:
    ties = torch.tensor([1.0 + 2.0**-11, 1.0 + 3 * 2.0**-11, 65519.996, 65520.0])
    assert oracle.rounded(ties, torch.float16).tolist() == [1.0, 1.0 + 2.0**-9, 65504.0, INF]
    assert oracle.scaled(torch.tensor([1024.0]), 64.0, torch.float16).item() == INF
    assert oracle.total_norm([None]) == 0.0
    assert oracle.clipped([torch.tensor([INF])], INF, 1.0)[0].item() == INF


@every_scale
@every_mode
def test_steps_with_clips_overflows_and_growth(mode: Mode, scale: str) -> None:
    world = World(mode, scale)
    for k in range(8):
        grads = values(0.5, -0.25 * (k + 1), 1.0)
        if k == 3:
            grads[1] = grads[1].clone()
            grads[1].view(-1)[-1] = (INF, NAN)[k % 2]
        world.opt.zero_grad()
        world.backward(grads)
        if k % 2:
            norm = world.expect_norm(world.opt.clip_master_grads(2.0), grads)
            grads = oracle.clipped(grads, norm, 2.0)
        if k == 3:
            world.expect_skip()
        else:
            world.expect_step(grads)


@every_scale
@every_mode
@pytest.mark.parametrize("how", ["backward", "waiting", "scale_loss"])
def test_micro_batches_add_up(mode: Mode, scale: str, how: str) -> None:
    """A parameter that takes part in one of them only, and one that takes part in none."""
    world = World(mode, scale)
    parts = [instead(values(0.5, 1.0, 0.0), 2, None), instead(instead(values(0.25, 0.0, 0.0), 1, None), 2, None)]
    for part in parts:
        world.leave(how, part)
    world.expect_step(plus(*parts))


@every_mode
def test_both_values_of_update_master_grads_train_alike(mode: Mode) -> None:
    worlds = [World(mode, "dynamic") for _ in range(2)]
    for k in range(4):
        for world, update in zip(worlds, (True, False), strict=True):
            world.opt.zero_grad()
            world.backward(values(0.5, 1.0, -0.5 * k), update_master_grads=False)
            world.backward(values(0.25, 1.0, 2.0), update_master_grads=update)
            world.opt.clip_master_grads(3.0)
            world.opt.step()
    first, second = ([m.detach().tolist() for m in world.masters] for world in worlds)
    assert first == second


# -- the checks can fail -------------------------------------------------------------------------------------------


class NeverSteps(World.wrap):  # type: ignore[misc]
    def step(self, closure: object = None) -> None:
        pass


class NeverUnscales(World.wrap):  # type: ignore[misc]
    def backward(self, loss: torch.Tensor, **options: object) -> None:
        super().backward(loss * self.loss_scale, **options)


class NeverClips(World.wrap):  # type: ignore[misc]
    def clip_master_grads(self, max_norm: float, *args: float) -> torch.Tensor:
        return super().clip_master_grads(math.inf)


class ClipsTheNormOnly(World.wrap):  # type: ignore[misc]
    def clip_master_grads(self, max_norm: float, *args: float) -> torch.Tensor:
        return super().clip_master_grads(max_norm) * 0.5


class GrowsBeforeTheStep(World.wrap):  # type: ignore[misc]
    def step(self, closure: object = None) -> None:
        self.scaler.update(torch.zeros(()))
        super().step()


class LosesOneStep(World.wrap):  # type: ignore[misc]
    calls = 0

    def step(self, closure: object = None) -> None:
        self.calls += 1
        if self.calls == 2:
            self.zero_grad()
        super().step()


class LeavesTheModel(World.wrap):  # type: ignore[misc]
    def step(self, closure: object = None) -> None:
        before = [p.detach().clone() for p in self.model_params()]
        super().step()
        for p, old in zip(self.model_params(), before, strict=True):
            p.data.copy_(old)


BROKEN = (NeverSteps, NeverUnscales, NeverClips, ClipsTheNormOnly, GrowsBeforeTheStep, LosesOneStep, LeavesTheModel)


@pytest.mark.parametrize("broken", BROKEN, ids=lambda cls: cls.__name__)
@pytest.mark.parametrize("mode", [WRAPPED, ONE_PASS], ids=lambda mode: mode.name)
def test_a_broken_engine_is_told_from_a_whole_one(mode: Mode, broken: type, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(World, "wrap", broken)
    with pytest.raises(AssertionError):
        test_steps_with_clips_overflows_and_growth(mode, "dynamic")


def test_every_mode_is_what_its_name_says() -> None:
    for mode in ALL:
        world = World(mode)
        assert world.opt.grad_accumulation == ("fp32" if mode.folds else "model")
        assert world.opt.master_weights == ("full" if mode.has_masters else "split")
        assert (torch.float32 in [p.dtype for p in world.params]) == mode.is_mixed


@every_mode
def test_a_backward_that_gives_no_gradient_is_no_step(mode: Mode) -> None:
    """Another model's loss: nothing is stepped or counted, and no clean step brings growth nearer."""
    world = World(mode, "dynamic", scaler_settings={"growth_interval": 2})
    world.opt.backward(torch.ones(2, requires_grad=True).sum())
    world.opt.step()
    assert world.opt.stats()["steps"] == 0
    assert not world.opt.step_was_skipped
    world.opt.backward(world.loss(values(0.5, -0.25, 1.0)))
    world.opt.step()
    assert (world.opt.stats()["steps"], world.opt.loss_scale) == (1, world.scale)
