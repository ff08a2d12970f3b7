"""``step()``: whole steps against the reference, what it takes, what it refuses, and what is left after it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from contract import reference
from contract.reference import clipped
from contract.worlds import (
    ALL,
    FUSED,
    INF,
    NAN,
    WRAPPED,
    Mode,
    World,
    by,
    every_mode,
    every_mode_that_keeps_gradients,
    every_scale,
    values,
)
from fp16opt import MixedPrecisionOptimizer

GRADS, MORE = values(0.5, 1.0, -0.5), values(1.0, -0.25, 2.0)


def test_the_reference_by_hand() -> None:
    """SGD at 0.5 from 1: a gradient of 2 clipped to 1, then an inf; growth after one clean step."""
    p = nn.Parameter(torch.ones(1, dtype=torch.float16))
    scale = reference.Scale(8.0, growth_interval=1)
    by_hand = reference.Reference.of([p], lambda params: torch.optim.SGD(params, lr=0.5), scale)
    grad = reference.unscaled(reference.scaled(torch.tensor([2.0]), 8.0, torch.float16), 8.0)
    assert grad.tolist() == [2.0]
    assert reference.total_norm([grad]) == 2.0
    (left,) = reference.clipped([grad], 2.0, 1.0)
    assert left is not None
    assert left.item() == pytest.approx(1.0, rel=1e-6)
    assert not by_hand.step([left])
    assert by_hand.masters[0].item() == pytest.approx(0.5, rel=1e-6)
    assert scale.value == 16.0
    before = by_hand.masters[0].item()
    assert by_hand.step([torch.tensor([INF])])
    assert (by_hand.masters[0].item(), scale.value, by_hand.skipped_steps) == (before, 8.0, 1)


def test_the_reference_rounds_and_overflows_as_the_formats_do() -> None:
    ties = torch.tensor([1.0 + 2.0**-11, 1.0 + 3 * 2.0**-11, 65519.996, 65520.0])
    assert reference.rounded(ties, torch.float16).tolist() == [1.0, 1.0 + 2.0**-9, 65504.0, INF]
    assert reference.scaled(torch.tensor([1024.0]), 64.0, torch.float16).item() == INF
    assert reference.total_norm([None]) == 0.0
    assert reference.clipped([torch.tensor([INF])], INF, 1.0)[0].item() == INF


@every_mode
@every_scale
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
            grads = clipped(grads, norm, 2.0)
        if k == 3:
            world.expect_skip()
        else:
            world.expect_step(grads)


# -- nothing to do -----------------------------------------------------------------------------------------------------


def plain(net: nn.Module, opt: MixedPrecisionOptimizer) -> None:
    net(torch.ones(2, 4).half()).float().sum().backward()
    opt.step()


def by_backward(net: nn.Module, opt: MixedPrecisionOptimizer) -> None:
    opt.backward(net(torch.ones(2, 4).half()).float().sum())
    opt.step()


def by_closure(net: nn.Module, opt: MixedPrecisionOptimizer) -> None:
    def closure() -> Tensor:
        loss = net(torch.ones(2, 4).half()).float().sum()
        opt.backward(loss)
        return loss

    opt.step(closure)


def by_grad_scaler(net: nn.Module, opt: MixedPrecisionOptimizer) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(net(torch.ones(2, 4).half()).float().sum()).backward()
    scaler.step(opt)


EMPTY: dict[str, tuple[Callable[..., None], Callable[..., Any], dict[str, Any]]] = {
    "loss.backward": (plain, torch.optim.AdamW, {}),
    "opt.backward": (by_backward, torch.optim.AdamW, {"dynamic": True}),
    "FP32 sums": (by_backward, torch.optim.AdamW, {"grad_accumulation": "fp32"}),
    "released": (by_backward, torch.optim.AdamW, {"gradient_release": True, "loss_scale": 8.0}),
    "split": (by_backward, torch.optim.AdamW, {"master_weights": "split"}),
    "reevaluated": (by_closure, torch.optim.LBFGS, {"loss_scale": 1.0}),
    "GradScaler": (by_grad_scaler, torch.optim.AdamW, {}),
}


@pytest.mark.parametrize("way", EMPTY)
def test_the_fourth_step_in_a_row_without_a_gradient_is_logged(way: str, caplog: pytest.LogCaptureFixture) -> None:
    """As of an optimizer that was made before the model got other parameters. A step with a gradient begins anew."""
    step, inner, options = EMPTY[way]
    net = nn.Sequential(nn.Linear(4, 3)).half()
    opt = MixedPrecisionOptimizer(inner(net.parameters(), lr=0.1), named_parameters=net.named_parameters(), **options)
    replaced = nn.Sequential(nn.Linear(4, 3)).half()
    counts = []
    for model in (replaced, replaced, replaced, net, *[replaced] * 6):
        opt.zero_grad()
        step(model, opt)
        counts.append(sum("four steps in a row" in line for line in caplog.messages))
    assert counts == [0] * 7 + [1] * 3
    assert opt.stats()["steps"] == 1
    (line,) = [line for line in caplog.messages if "four steps in a row" in line]
    assert "0.weight, 0.bias. Was it made before fully_shard, to_empty or a new layer?" in line


@every_mode
def test_a_backward_that_gives_no_gradient_is_no_step(mode: Mode) -> None:
    """Another model's loss: nothing is stepped or counted, and no clean step brings growth nearer."""
    world = World(mode, "dynamic", scaler_settings={"growth_interval": 2})
    world.opt.backward(torch.ones(2, requires_grad=True).sum())
    world.opt.step()
    assert world.opt.stats()["steps"] == 0
    assert not world.opt.step_was_skipped
    world.backward(values(0.5, -0.25, 1.0))
    world.opt.step()
    assert (world.opt.stats()["steps"], world.opt.loss_scale) == (1, world.scale)


# -- gradients that came without backward ------------------------------------------------------------------------------


def test_a_dynamic_scale_of_one_is_another_scale() -> None:
    """It would be something else after the next growth."""
    weight = nn.Parameter(torch.ones(2, dtype=torch.float16))
    opt = World.wrap(torch.optim.SGD([weight], lr=0.5), dynamic=True)
    opt.loss_scale = 1.0
    weight.float().sum().backward()
    with pytest.raises(RuntimeError, match=r"opt\.backward\(loss\)"):
        opt.step()


# -- the model's gradients, written after backward ---------------------------------------------------------------------


@by([mode for mode in ALL if mode.folds])
@every_scale
def test_a_plain_backward_after_fp32_sums_is_refused(mode: Mode, scale: str) -> None:
    """The model's 16-bit gradients were folded, so it leaves new ones."""
    world = World(mode, scale)
    world.backward(GRADS)
    world.loss(MORE).backward()
    with pytest.raises(RuntimeError, match=r"\.weight"):
        world.opt.step()
    world.check()
    world.opt.zero_grad()
    world.backward(GRADS)
    world.expect_step(GRADS)


# -- gradients that were dropped ---------------------------------------------------------------------------------------


@every_mode_that_keeps_gradients
def test_new_zeros_in_place_of_all_gradients_are_refused(mode: Mode) -> None:
    """Only tensors that were zeroed in place look like ``zero_grad``: these were assigned, which is an edit."""
    world = World(mode)
    world.backward(GRADS)
    for p in world.params:
        p.grad = torch.zeros_like(p)
    with pytest.raises(RuntimeError, match=r"update_master_grads\(\)"):
        world.opt.step()
    world.check_weights()


# -- the checks can fail -----------------------------------------------------------------------------------------------


class NeverSteps(World.wrap):  # type: ignore[misc]
    def step(self, closure: object = None) -> None:
        pass


class ClipsTheNormOnly(World.wrap):  # type: ignore[misc]
    def clip_master_grads(self, max_norm: float, *args: float) -> Tensor:
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


BROKEN = (NeverSteps, ClipsTheNormOnly, GrowsBeforeTheStep, LosesOneStep, LeavesTheModel)


@pytest.mark.parametrize("broken", BROKEN, ids=lambda cls: cls.__name__)
@by([WRAPPED, FUSED])
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
