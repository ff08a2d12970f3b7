"""A GradScaler, torch's or ours, drives the wrapper around a 16-bit model: skips, stale gradients, clips."""

from __future__ import annotations

import copy
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.utils import clip_grad_norm_

import fp16opt
from contract import oracle
from contract.worlds import (
    INF,
    NAN,
    Mode,
    World,
    every_mixed_mode,
    every_mode,
    instead,
    plus,
    values,
)
from fp16opt.kernels import native

pytestmark = pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="from torch 2.10 on")

SCALERS = pytest.mark.parametrize("cls", [torch.amp.GradScaler, fp16opt.GradScaler], ids=["torch", "fp16opt"])
GRADS = values(0.5, 1.0, -0.5)
CLEARS: dict[str, Callable[[World], object]] = {
    "model.zero_grad": lambda world: world.model_zero_grad(),
    "opt.zero_grad": lambda world: world.opt.zero_grad(),
    "zeros": lambda world: world.opt.zero_grad(set_to_none=False),
}
clears = pytest.mark.parametrize("clear", list(CLEARS)[:2])
UNSCALES = pytest.mark.parametrize("unscales", [False, True], ids=["step alone", "unscale_"])


class Driven(World):
    """The wrapper's own scale is a static 1; the GradScaler has 64. The reference holds the wrapper's side."""

    def __init__(self, mode: Mode, cls: Any, **options: Any) -> None:
        super().__init__(mode, "one", **options)
        self.grad_scaler = cls("cpu", init_scale=64.0, growth_interval=1000)

    def drive(self, grads: Any, unscales: bool = False, between: Callable[[], object] = lambda: None) -> None:
        self.grad_scaler.scale(self.loss(grads)).backward()
        if unscales:
            self.grad_scaler.unscale_(self.opt)
        between()
        self.grad_scaler.step(self.opt)
        self.grad_scaler.update()


ASKS: dict[str, Callable[[World], object]] = {
    "skipped_steps": lambda world: world.opt.skipped_steps == 1,
    "step_was_skipped": lambda world: bool(world.opt.step_was_skipped),
    "overflow_report": lambda world: [o.name for o in world.opt.overflow_report()] == [world.names[0]],
    "state_dict": lambda world: world.opt.state_dict()["skipped_steps"] == 1,
    "deepcopy": lambda world: copy.deepcopy(world.opt).skipped_steps == 1,
}


@SCALERS
@every_mode
@UNSCALES
@pytest.mark.parametrize("ask", ASKS)
@pytest.mark.parametrize("cleared", [None, "model.zero_grad", "opt.zero_grad"])
def test_a_skip_is_counted_as_soon_as_anybody_asks(
    cls: Any, mode: Mode, unscales: bool, ask: str, cleared: str | None
) -> None:
    """Whoever cleared the gradients meanwhile; and once, however often it is asked."""
    world = Driven(mode, cls)
    world.drive(GRADS)
    world.expect_stepped(GRADS)
    CLEARS["model.zero_grad"](world)
    world.drive(instead(GRADS, 0, torch.full((4,), INF)), unscales)
    if cleared:
        CLEARS[cleared](world)
    assert ASKS[ask](world)
    assert ASKS[ask](world)
    world.reference.step([torch.full((4,), INF)])
    world.check()
    assert world.grad_scaler.get_scale() == 32.0


@SCALERS
@every_mode
@pytest.mark.parametrize("ask", ["skipped_steps", "deepcopy"])
@pytest.mark.parametrize("then", ["step", "drop", *CLEARS])
def test_a_question_before_the_grad_scaler_has_come_counts_nothing(cls: Any, mode: Mode, ask: str, then: str) -> None:
    """Master gradients were read, an inf is there, and somebody asks: the iteration goes on as if he had not.

    A GradScaler that then finds the inf skips once; none that is dropped is a skip, and the others are stepped.
    """
    world = Driven(mode, cls)
    world.grad_scaler.scale(world.loss(instead(GRADS, 0, torch.full((4,), INF)))).backward()
    assert not bool(torch.isfinite(world.masters[0].grad).all())
    assert not ASKS[ask](world)
    if then == "drop":
        world.params[0].grad = None
    elif then in CLEARS:
        CLEARS[then](world)
        world.grad_scaler.scale(world.loss(GRADS)).backward()
    world.grad_scaler.step(world.opt)
    world.grad_scaler.update()
    if then == "step":
        world.expect_skipped()
    else:
        world.expect_stepped(instead(GRADS, 0, None) if then == "drop" else GRADS)


@SCALERS
@every_mode
@pytest.mark.parametrize("ask", ["stats", "skipped_steps", "deepcopy"])
@pytest.mark.parametrize("then", ["clip of the model", "clip of masters", "mended"])
def test_a_question_after_unscaling_counts_the_skip_once_and_ends_nothing(
    cls: Any, mode: Mode, ask: str, then: str
) -> None:
    """A logger that asks in the midst of the iteration changes nothing of what follows in it, nor of the next."""
    world = Driven(mode, cls)
    world.drive(GRADS)
    world.expect_stepped(GRADS)
    CLEARS["model.zero_grad"](world)
    world.grad_scaler.scale(world.loss(instead(GRADS, 0, torch.full((4,), INF)))).backward()
    world.grad_scaler.unscale_(world.opt)
    assert world.opt.stats()["skipped_steps"] == 1 if ask == "stats" else ASKS[ask](world)
    if then == "mended":
        world.params[0].grad.nan_to_num_(0.0, 0.0, 0.0)
        world.opt.clip_master_grads(1e6)
    else:
        clip_grad_norm_(world.params if then == "clip of the model" else world.masters, 1.0)
    world.grad_scaler.step(world.opt)
    assert world.opt.param_groups
    world.grad_scaler.update()
    world.expect_skipped()
    for clear in ("model.zero_grad", "opt.zero_grad"):
        CLEARS[clear](world)
        world.drive(GRADS)
        world.expect_stepped(GRADS)
    CLEARS["model.zero_grad"](world)
    world.drive(instead(GRADS, 0, torch.full((4,), INF)))
    world.expect_skipped()


@SCALERS
@every_mode
@UNSCALES
@pytest.mark.parametrize("asks", ["after unscale_", "after update"])
@pytest.mark.parametrize("clear", ["zero_", "model.zero_grad", "load"])
def test_skips_in_a_row_are_counted_each_where_somebody_asks(
    cls: Any, mode: Mode, unscales: bool, asks: str, clear: str
) -> None:
    """Also where gradients are cleared in place, so that the next are the same tensors."""
    world = Driven(mode, cls)
    bad = instead(GRADS, 0, torch.full((4,), INF))
    for count, grads in enumerate((bad, bad, bad)):
        world.grad_scaler.scale(world.loss(grads)).backward()
        if clear == "load":
            world.opt.load_state_dict(world.opt.state_dict())
        if unscales:
            world.grad_scaler.unscale_(world.opt)
            if asks == "after unscale_":
                assert world.opt.skipped_steps == count + 1
        world.grad_scaler.step(world.opt)
        world.grad_scaler.update()
        if asks == "after update" or not unscales:
            assert world.opt.skipped_steps == count + 1
        world.expect_skipped()
        for param in world.params:
            if clear == "zero_" and param.grad is not None:
                param.grad.zero_()
            else:
                param.grad = None
    world.drive(GRADS)
    world.expect_stepped(GRADS)


@SCALERS
@every_mode
@UNSCALES
def test_skips_in_a_row_are_counted_each_where_checkpoints_are_loaded_on_the_way(
    cls: Any, mode: Mode, unscales: bool
) -> None:
    """A load asks, of the iteration before too."""
    world = Driven(mode, cls)
    for _ in range(4):
        CLEARS["model.zero_grad"](world)
        world.grad_scaler.scale(world.loss(instead(GRADS, 0, torch.full((4,), INF)))).backward()
        world.opt.load_state_dict(world.opt.state_dict())
        if unscales:
            world.grad_scaler.unscale_(world.opt)
        world.grad_scaler.step(world.opt)
        world.grad_scaler.update()
    assert world.opt.skipped_steps == 4


@SCALERS
@every_mode
@pytest.mark.parametrize("which", [0, 1])
def test_a_gradient_given_before_a_skip_is_of_the_step_that_is_skipped(cls: Any, mode: Mode, which: int) -> None:
    """Not the next one's, whoever reads ``param_groups`` after it."""
    world = Driven(mode, cls)
    for _ in range(2):
        CLEARS["model.zero_grad"](world)
        world.grad_scaler.scale(world.loss(instead(GRADS, 2, torch.full((5,), INF)))).backward()
        world.grad_scaler.unscale_(world.opt)
        world.masters[which].grad = torch.ones_like(world.masters[which])
        world.grad_scaler.step(world.opt)
        assert world.opt.param_groups
        world.grad_scaler.update()
        world.expect_skipped()
    CLEARS["opt.zero_grad"](world)
    world.drive(GRADS)
    world.expect_stepped(GRADS)


@SCALERS
@every_mode
@UNSCALES
@pytest.mark.parametrize("clear", CLEARS)
def test_a_skip_is_counted_when_the_next_gradients_come(cls: Any, mode: Mode, unscales: bool, clear: str) -> None:
    """Nobody asks between; the step after it is whole."""
    world = Driven(mode, cls)
    for k in range(6):
        CLEARS[clear](world)
        if k % 3 == 1:
            world.drive([NAN, 1.0, 1.0], unscales)
            world.reference.step([torch.full((4,), NAN)])
        else:
            world.drive(GRADS, unscales)
            world.reference.step(GRADS)
    assert int(world.opt.skipped_steps) == 2
    world.check()


@SCALERS
@UNSCALES
def test_zeros_of_cleared_fp32_sums_take_nothing_from_the_model(cls: Any, unscales: bool) -> None:
    """The first parameter has no gradient in the second step, and is read first."""
    weights = [torch.nn.Parameter(torch.ones(4, dtype=torch.float16)) for _ in range(2)]
    opt = fp16opt.MixedPrecisionOptimizer(torch.optim.SGD(weights, lr=1.0), grad_accumulation="fp32")
    opt.backward(torch.stack(weights).float().sum())
    opt.zero_grad(set_to_none=False)
    grad_scaler = cls("cpu", init_scale=64.0)
    grad_scaler.scale(weights[1].float().sum()).backward()
    if unscales:
        grad_scaler.unscale_(opt)
        assert float(clip_grad_norm_(weights, 1.0)) == 2.0
    grad_scaler.step(opt)
    moved = [1.0 - master[0].item() for master in opt.master_params()]
    assert moved == pytest.approx([0.0, 0.5 if unscales else 1.0], rel=1e-5)


@SCALERS
@every_mode
@pytest.mark.parametrize("which", [0, 1, 2])
@clears
def test_an_overflow_in_one_parameter_alone_is_counted(cls: Any, mode: Mode, which: int, clear: str) -> None:
    """1 is the FP32 parameter of mixed models; no other one has a gradient."""
    world = Driven(mode, cls)
    alone: list[Any] = [None, None, None]
    world.drive(instead(alone, which, torch.full(GRADS[which].shape, INF)))
    assert int(world.opt.skipped_steps) == 1
    assert bool(world.opt.step_was_skipped)
    CLEARS[clear](world)
    world.reference.step([torch.full((4,), INF)])
    world.drive(GRADS)
    world.expect_stepped(GRADS)
    assert int(world.opt.skipped_steps) == 1


@SCALERS
@every_mixed_mode
@UNSCALES
@clears
@pytest.mark.parametrize("before", [1.0, INF], ids=["after a step", "after a skip"])
@pytest.mark.parametrize("bad", [False, True], ids=["clean", "overflow"])
def test_no_master_gradient_is_stale_where_only_fp32_parameters_got_one(
    cls: Any, mode: Mode, unscales: bool, clear: str, before: float, bad: bool
) -> None:
    world = Driven(mode, cls)
    first = [GRADS[0] * before, GRADS[1], GRADS[2]]
    first[0][0] = before
    world.drive(first, unscales)
    world.reference.step(first)
    CLEARS[clear](world)
    alone = instead([None, None, None], 1, GRADS[1] * (INF if bad else 1.0))
    norms: list[Any] = []
    stepped = [p for group in world.opt.param_groups for p in group["params"]]

    def clip() -> None:
        if unscales:
            norms.append(clip_grad_norm_(stepped, 1e6))

    world.drive(alone, unscales, clip)
    world.reference.step(alone)
    world.check()
    if norms and not bad:
        assert float(norms[0]) == pytest.approx(oracle.total_norm(alone), rel=1e-6)


@SCALERS
@every_mode
@pytest.mark.parametrize("over", ["model", "masters", "param_groups", "clip_master_grads"])
def test_a_clip_after_unscale_is_the_same_whatever_it_goes_over(cls: Any, mode: Mode, over: str) -> None:
    world = Driven(mode, cls)
    for k in range(3):
        grads = values(0.5, 1.0 + k, -0.5)
        norms: list[Any] = []

        def clip(norms: list[Any] = norms) -> None:
            if over == "clip_master_grads":
                norms.append(world.opt.clip_master_grads(2.0))
                return
            params = {
                "model": lambda: world.params,
                "masters": lambda: world.masters,
                "param_groups": lambda: [p for group in world.opt.param_groups for p in group["params"]],
            }[over]()
            norms.append(clip_grad_norm_(params, 2.0))

        CLEARS["opt.zero_grad" if k % 2 else "model.zero_grad"](world)
        world.drive(grads, True, clip)
        # torch sums squares in FP32, over 15 elements: within 15 roundings.
        assert float(norms[0]) == pytest.approx(oracle.total_norm(grads), rel=15 * 2.0**-24)
        world.expect_stepped(oracle.clipped(grads, float(norms[0]), 2.0))


@SCALERS
@every_mode
@UNSCALES
def test_micro_batches_add_up(cls: Any, mode: Mode, unscales: bool) -> None:
    world = Driven(mode, cls)
    for k in range(3):
        CLEARS["opt.zero_grad"](world)
        part = values(0.25, 0.5 * k, 1.0)
        world.grad_scaler.scale(world.loss(part)).backward()
        world.drive(GRADS, unscales)
        world.expect_stepped(plus(part, GRADS))


@SCALERS
@every_mode
@clears
def test_a_batch_that_is_abandoned_after_unscale_counts_nothing_more(cls: Any, mode: Mode, clear: str) -> None:
    """A loop that looks for an inf itself, then neither steps nor counts; the next iteration is whole."""
    world = Driven(mode, cls)
    world.drive(GRADS)
    world.expect_stepped(GRADS)
    CLEARS[clear](world)
    world.drive(GRADS, True)
    world.expect_stepped(GRADS)
    assert int(world.opt.skipped_steps) == 0


@SCALERS
@UNSCALES
@pytest.mark.parametrize("scale", [{"dynamic": True}, {"loss_scale": 128.0}, {}], ids=["dynamic", "static", "later"])
def test_gradients_of_a_scale_of_its_own_are_not_unscaled_again(
    cls: Any, unscales: bool, scale: dict[str, Any]
) -> None:
    """A GradScaler that has scaled another loss divided them by its scale, and nobody said so."""
    weight = torch.nn.Parameter(torch.ones(4, dtype=torch.float16))
    opt = fp16opt.MixedPrecisionOptimizer(torch.optim.SGD([weight], lr=0.5), **scale)
    if not scale:
        opt.loss_scale = 128.0
    grad_scaler = cls("cpu", init_scale=64.0)
    grad_scaler.scale(torch.ones(()))
    opt.backward((weight.float() * 0.125).sum())
    call = grad_scaler.unscale_ if unscales and cls is fp16opt.GradScaler else grad_scaler.step
    if unscales and cls is torch.amp.GradScaler:  # which asks nobody
        grad_scaler.unscale_(opt)
    with pytest.raises(RuntimeError, match=r"at this optimizer's loss scale .* a GradScaler came"):
        call(opt)
    assert weight.tolist() == [1.0] * 4
    opt.zero_grad()
    opt.backward((weight.float() * 0.125).sum())
    opt.step()
    assert weight.tolist() == [1.0 - 0.5 * 0.125] * 4


@SCALERS
def test_reading_master_gradients_takes_time_that_grows_with_their_number(cls: Any) -> None:
    """Each read once looked at all of the model's gradients: 1,600 parameters took 250 times as long as 100."""
    times = []
    for count in (100, 800):
        params = [torch.nn.Parameter(torch.ones(2, dtype=torch.float16)) for _ in range(count)]
        opt = fp16opt.MixedPrecisionOptimizer(torch.optim.SGD(params, lr=0.5))
        grad_scaler = cls("cpu", init_scale=64.0)
        best = math.inf
        for _ in range(5):
            opt.zero_grad()
            grad_scaler.scale(torch.stack([param.float().sum() for param in params]).sum()).backward()
            began = time.process_time()
            grad_scaler.unscale_(opt)
            clip_grad_norm_(list(opt.master_params()), 1.0)
            grad_scaler.step(opt)
            best = min(best, time.process_time() - began)
            grad_scaler.update()
        times.append(best)
    assert times[1] / times[0] < 20.0  # 8 where it grows with the number, 64 with its square


@SCALERS
@every_mode
def test_an_inf_that_came_after_unscaling_is_the_wrappers_to_skip(cls: Any, mode: Mode) -> None:
    """The GradScaler has found nothing, and its scale stays, whatever was judged meanwhile."""
    world = Driven(mode, cls)

    def spoil() -> None:
        world.masters[0].grad.fill_(INF)
        world.opt.clip_master_grads(1.0)

    before = [master.detach().clone() for master in world.masters]
    world.drive(GRADS, True, spoil)
    assert all(map(torch.equal, before, world.masters))
    assert (world.opt.skipped_steps, world.grad_scaler.get_scale()) == (1, 64.0)


@pytest.mark.parametrize(("cls", "counted"), [(torch.amp.GradScaler, 0), (fp16opt.GradScaler, 1)])
@every_mode
def test_a_skip_behind_a_clip_by_value_is_counted_where_the_grad_scaler_tells(
    cls: Any, counted: int, mode: Mode
) -> None:
    world = Driven(mode, cls)
    bad = instead(GRADS, 0, torch.full((4,), INF))
    world.drive(bad, True, lambda: torch.nn.utils.clip_grad_value_(world.params, 1.0))
    assert (world.opt.skipped_steps, world.grad_scaler.get_scale()) == (counted, 32.0)
    if counted:
        world.reference.step([torch.full((4,), INF)])
    CLEARS["model.zero_grad"](world)
    world.drive(GRADS)
    world.expect_stepped(GRADS)


@every_mode
def test_a_parameter_that_was_unfrozen_has_a_master_when_ours_unscales(mode: Mode) -> None:
    frozen, other = (torch.nn.Parameter(torch.ones(4, dtype=torch.float16)) for _ in range(2))
    opt = fp16opt.MixedPrecisionOptimizer(mode.make([frozen.requires_grad_(False), other], lr=0.5), **mode.arguments)
    frozen.requires_grad_(True)
    grad_scaler = fp16opt.GradScaler("cpu", init_scale=64.0)
    grad_scaler.scale((frozen.float() + other.float()).sum()).backward()
    grad_scaler.unscale_(opt)
    assert [master.grad.tolist() for master in opt.master_params()] == [[1.0] * 4] * 2
    grad_scaler.step(opt)
    assert frozen.tolist() == other.tolist() != [1.0] * 4


@SCALERS
@pytest.mark.skipif(not native.available(), reason="no compiled module")
def test_reading_unscaled_gradients_again_calls_nothing(cls: Any) -> None:
    """torch's GradScaler and its clip read each of them eight times."""
    params = [torch.nn.Parameter(torch.ones(2, dtype=torch.float16)) for _ in range(3)]
    opt = fp16opt.MixedPrecisionOptimizer(torch.optim.SGD(params, lr=0.5))
    masters, grad_scaler, calls = list(opt.master_params()), cls("cpu", init_scale=64.0), []

    def look(frame: Any, event: str, argument: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(inside):
            calls.append(frame.f_code.co_name)

    def reads() -> list[str]:
        calls.clear()
        sys.setprofile(look)
        try:
            grads = [param.grad for param in masters]
        finally:
            sys.setprofile(None)
        assert [grad.tolist() for grad in grads if grad is not None] == [[1.0, 1.0]] * 3
        return list(calls)

    inside = str(Path(fp16opt.__file__).parent)
    for _ in range(2):
        opt.zero_grad()
        grad_scaler.scale(torch.stack(params).float().sum()).backward()
        grad_scaler.unscale_(opt)
        assert reads() == []
        grad_scaler.step(opt)
        grad_scaler.update()
        opt.zero_grad()
        opt.backward(torch.stack(params).float().sum())
        assert reads() != [], "the first makes them"


def test_reading_master_gradients_after_a_step_takes_time_that_grows_with_their_number() -> None:
    """As a logger does, at a scale of 1."""
    times = []
    for count in (100, 800):
        params = [torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16)) for _ in range(count)]
        opt = fp16opt.MixedPrecisionOptimizer(torch.optim.SGD(params, lr=0.5))
        best = math.inf
        for _ in range(5):
            opt.zero_grad()
            opt.backward(torch.stack([param.float().sum() for param in params]).sum())
            opt.step()
            began = time.process_time()
            grads = [param.grad for param in opt.master_params()]
            best = min(best, time.process_time() - began)
        assert all(grad is not None and grad.tolist() == [1.0, 1.0] for grad in grads)
        times.append(best)
    assert times[1] / times[0] < 20.0  # as above


def test_a_refused_grad_scaler_leaves_nothing_behind() -> None:
    """torch's hands over a verdict before the step, and takes it back only where that returns."""
    weight = torch.nn.Parameter(torch.ones(4, dtype=torch.float16))
    opt = fp16opt.MixedPrecisionOptimizer(torch.optim.SGD([weight], lr=0.5), loss_scale=128.0)
    grad_scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    grad_scaler.scale((weight.float() * 0.125).sum()).backward()
    with pytest.raises(RuntimeError, match=r"neither opt\.backward"):
        grad_scaler.step(opt)
    opt.zero_grad()
    opt.backward((weight.float() * 0.125).sum())
    opt.step()
    assert weight.tolist() == [1.0 - 0.5 * 0.125] * 4


def test_a_scaler_that_comes_later_is_asked_anew() -> None:
    """Whose scale is not 1, after one of 1: gradients of a plain backward would be unscaled wrongly."""
    p = torch.nn.Parameter(torch.ones(2, dtype=torch.float16))
    opt = fp16opt.MixedPrecisionOptimizer(torch.optim.SGD([p], lr=0.5))
    opt.scaler = fp16opt.StaticLossScaler(64.0)
    p.float().sum().backward()
    with pytest.raises(RuntimeError, match=r"neither opt\.backward.* made, and the loss scale is 64"):
        opt.step()
    assert p.tolist() == [1.0, 1.0]


def test_sums_that_a_grad_scaler_leaves_without_effect_are_told_of_once(caplog: pytest.LogCaptureFixture) -> None:
    p = torch.nn.Parameter(torch.ones(2, dtype=torch.float16))
    opt = fp16opt.MixedPrecisionOptimizer(torch.optim.SGD([p], lr=0.5), grad_accumulation="fp32")
    scaler = fp16opt.GradScaler("cpu", init_scale=64.0)
    for _ in range(2):
        opt.zero_grad()
        scaler.scale(p.float().sum()).backward()
        scaler.step(opt)
        scaler.update()
        assert [r.message[:40] for r in caplog.records] == ['grad_accumulation="fp32" has no effect: ']


def test_parameters_that_come_between_a_plain_backward_and_a_question() -> None:
    """They were not shown to anybody: whoever asks for skips, or clears, is answered."""
    p, q = (torch.nn.Parameter(torch.ones(2, dtype=torch.float16)) for _ in range(2))
    opt = fp16opt.MixedPrecisionOptimizer(torch.optim.SGD([p], lr=0.5))
    p.float().sum().backward()
    assert len(opt.param_groups) == 1  # a GradScaler reads them
    opt.add_param_group({"params": [q]})
    assert opt.skipped_steps == 0
    opt.step()
    assert (p.tolist(), q.tolist()) == ([0.5, 0.5], [1.0, 1.0])


@pytest.mark.parametrize("cls", [torch.amp.GradScaler, fp16opt.GradScaler, None])
def test_a_load_leaves_gradients_that_came_without_us_to_their_step(cls: Any) -> None:
    """As torch's optimizers do. Counted as used, one was stepped as it was, still scaled, beside one in FP32."""
    half, single = torch.nn.Parameter(torch.ones(1).half()), torch.nn.Parameter(torch.ones(1))
    opt = fp16opt.MixedPrecisionOptimizer(torch.optim.SGD([half, single], lr=0.5))
    loss = half.float().sum() * 0.25 + single.sum() * 0.5
    scaler = None if cls is None else cls("cpu", init_scale=1024.0)
    (loss if scaler is None else scaler.scale(loss)).backward()
    opt.load_state_dict(opt.state_dict())
    if scaler is None:
        opt.step()
    else:
        scaler.step(opt)
        scaler.update()
    assert (half.item(), single.item()) == (0.875, 0.75)


@SCALERS
@pytest.mark.parametrize("fused_step", ["auto", False])
def test_a_parameter_that_comes_between_micro_batches_is_unscaled_with_the_others(
    cls: Any, fused_step: str | bool
) -> None:
    """Master gradients were read before it came."""
    first, second = (torch.nn.Parameter(torch.zeros(2, dtype=torch.float16)) for _ in range(2))
    opt = fp16opt.MixedPrecisionOptimizer(torch.optim.SGD([first], lr=1.0), fused_step=fused_step)
    grad_scaler = cls("cpu", init_scale=16.0)
    grad_scaler.scale(first.float().sum()).backward()
    assert next(opt.master_params()).grad is not None
    opt.add_param_group({"params": [second]})
    grad_scaler.scale(first.float().sum() + second.float().sum()).backward()
    grad_scaler.step(opt)
    assert [p.tolist() for p in (first, second)] == [[-2.0, -2.0], [-1.0, -1.0]]
