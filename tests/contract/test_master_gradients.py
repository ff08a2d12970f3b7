"""Masters handed out, their gradients read and edited between backward and step: the same in every mode."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

from contract import oracle
from contract.worlds import (
    ALL,
    INF,
    KEEPS,
    NAN,
    SCALES,
    Mode,
    World,
    by,
    every_mixed_mode,
    every_mode,
    every_mode_that_keeps_gradients,
    every_scale,
    every_scale_but_one,
    instead,
    plus,
    times,
    values,
)
from fp16opt import MixedPrecisionOptimizer

WAYS = pytest.mark.parametrize("how", ["backward", "waiting", "scale_loss"])


HANDED_OUT = {
    "master_params": lambda opt: list(opt.master_params()),
    "param_groups": lambda opt: [list(group["params"]) for group in opt.param_groups],
    "repr": repr,
}


@every_scale
@every_mode
@pytest.mark.parametrize("how", ["waiting", "scale_loss"])
@pytest.mark.parametrize("handed", HANDED_OUT)
def test_handing_out_masters_computes_nothing(mode: Mode, scale: str, how: str, handed: str) -> None:
    """Nothing was read, or the write past the version counter would come too late."""
    world = World(mode, scale)
    grads = values(0.5, 1.0, -0.5)
    world.leave(how, grads)
    HANDED_OUT[handed](world.opt)
    for p in world.params:
        p.grad.data.mul_(0.5)
    world.expect_step(times(grads, 0.5))


@every_scale
@every_mode_that_keeps_gradients
@pytest.mark.parametrize("handed", HANDED_OUT)
def test_handing_out_masters_computes_nothing_after_backward(mode: Mode, scale: str, handed: str) -> None:
    world = World(mode, scale)
    grads = values(0.5, 1.0, -0.5)
    world.backward(grads)
    HANDED_OUT[handed](world.opt)
    for p in world.params:
        p.grad.data.mul_(0.5)
    world.expect_step(times(grads, 0.5))


@every_scale
@every_mode
@WAYS
@pytest.mark.parametrize("held", [False, True], ids=["fresh", "held"])
def test_reading_one_gradient_makes_all_true(mode: Mode, scale: str, how: str, held: bool) -> None:
    """Read through a list from before the backward too; then the others' memory is looked at without a read."""
    world = World(mode, scale)
    before = world.masters
    grads = values(0.5, 1.0, -0.5)
    world.leave(how, grads)
    masters = before if held else world.masters
    assert masters[world.sixteen()].grad is not None
    for p, want in zip(world.params, grads, strict=True):
        if p.dtype is torch.float32:
            assert p.grad.tolist() == want.tolist()
    for master, want in zip(masters, grads, strict=True):
        assert master.grad.dtype is torch.float32
        assert master.grad.tolist() == want.tolist()
    world.expect_step(grads)


@every_scale
@every_mixed_mode
def test_gradients_of_fp32_parameters_are_true_when_backward_returns(mode: Mode, scale: str) -> None:
    world = World(mode, scale)
    total = None
    for k in range(1, 4):
        grads = values(0.5, 1.0 * k, -0.5)
        total = grads if total is None else plus(total, grads)
        world.backward(grads)
        assert world.params[world.own()].grad.tolist() == total[world.own()].tolist()
    world.expect_step(total)


@every_scale
@every_mixed_mode
def test_gradients_of_fp32_parameters_are_left_scaled_where_the_user_says_so(mode: Mode, scale: str) -> None:
    world = World(mode, scale)
    grads = values(0.5, 1.0, -0.5)
    world.backward(grads, update_master_grads=False)
    assert world.params[world.own()].grad.tolist() == (grads[world.own()] * world.scale).tolist()
    world.expect_step(grads)


@every_scale
@every_mode
@WAYS
@pytest.mark.parametrize("held", [False, True], ids=["fresh", "held"])
def test_clip_grad_norm_over_masters_clips(mode: Mode, scale: str, how: str, held: bool) -> None:
    world = World(mode, scale)
    before = world.masters
    grads = values(0.5, 1.0, -0.5)
    world.leave(how, grads)
    norm = clip_grad_norm_(before if held else world.masters, 2.0)
    # torch sums squares in FP32, over 15 elements here: within 15 roundings.
    assert float(norm) == pytest.approx(oracle.total_norm(grads), rel=15 * 2.0**-24)
    world.expect_step(oracle.clipped(grads, float(norm), 2.0))


@every_mode
@WAYS
def test_a_read_ends_nothing(mode: Mode, how: str) -> None:
    """More backwards after reads, and reads after them: each shows the sum up to now."""
    world = World(mode)
    total: list[Tensor | None] = [None, None, None]
    for k in range(1, 4):
        grads = values(0.5, -0.25 * k, 1.0)
        world.leave(how, grads)
        total = plus(total, grads)
        world.check_master_grads(total)
    world.expect_step(total)


@by(KEEPS)
def test_a_read_does_not_take_the_models_gradients_away_from_the_user(mode: Mode) -> None:
    world = World(mode)
    grads = values(0.5, 1.0, -0.5)
    world.backward(grads, update_master_grads=False)
    world.check_master_grads(grads)
    i = world.sixteen()
    world.params[i].grad.mul_(2.0)
    world.expect_step(instead(grads, i, grads[i] * 2))


@every_mode
def test_reading_inside_autograd_looks_at_nothing(mode: Mode) -> None:
    """A hook on a parameter that reads a master's gradient: what it sees is its own affair, the step is right."""
    world = World(mode)
    seen: list[Any] = []
    hooks = [p.register_post_accumulate_grad_hook(lambda p: seen.extend(m.grad for m in world.masters))
             for p in world.params]  # fmt: skip
    grads = values(0.5, 1.0, -0.5)
    for part in (grads, grads):
        world.backward(part)
    for hook in hooks:
        hook.remove()
    assert seen
    world.check_master_grads(times(grads, 2.0))
    world.expect_step(times(grads, 2.0))


# -- edits ---------------------------------------------------------------------------------------------------------


def _halve(master: Tensor) -> None:
    master.grad.mul_(0.5)


def _replace(master: Tensor) -> None:
    master.grad = master.grad * 0.5


def _halve_an_element(master: Tensor) -> None:
    master.grad.view(-1)[1] *= 0.5


EDITS = {"in place": _halve, "another tensor": _replace, "an element": _halve_an_element}


def _edited(grads: Any, i: int, edit: str) -> list[Tensor | None]:
    new = grads[i].clone()
    if edit == "an element":
        new.view(-1)[1] *= 0.5
    else:
        new *= 0.5
    return instead(grads, i, new)


@every_mode
@WAYS
@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize(("which", "scale"), [(0, "static"), (1, "dynamic"), (0, "one")])
def test_an_edited_master_gradient_counts(mode: Mode, scale: str, how: str, edit: str, which: int) -> None:
    """``which`` 1 is the FP32 parameter of mixed models; there a first read makes it true."""
    world = World(mode, scale)
    grads = values(0.5, 1.0, -0.5)
    world.leave(how, grads)
    assert world.masters[0].grad is not None
    EDITS[edit](world.masters[which])
    grads = _edited(grads, which, edit)
    world.check_master_grads(grads)
    world.expect_step(grads)


@every_mode
@pytest.mark.parametrize(("edit", "scale"), list(zip(EDITS, SCALES, strict=True)))
@pytest.mark.parametrize("looked", ["nothing", "update", "clip"])
def test_a_clip_uses_the_norm_as_it_is_now(mode: Mode, scale: str, edit: str, looked: str) -> None:
    world = World(mode, scale)
    grads = values(0.5, 1.0, -0.5)
    world.backward(grads)
    if looked == "update":
        world.opt.update_master_grads()
    if looked == "clip":
        world.expect_norm(world.opt.clip_master_grads(1e6), grads)
    EDITS[edit](world.masters[0])
    grads = _edited(grads, 0, edit)
    norm = world.expect_norm(world.opt.clip_master_grads(2.0), grads)
    world.expect_step(oracle.clipped(grads, norm, 2.0))


@every_mode
@pytest.mark.parametrize(("value", "scale"), [(INF, "dynamic"), (-INF, "one"), (NAN, "static")])
@pytest.mark.parametrize("clip", ["none", "before", "after"])
@pytest.mark.parametrize("which", [0, 1])
def test_an_edit_that_is_not_finite_skips(mode: Mode, scale: str, value: float, clip: str, which: int) -> None:
    """It is never clipped to nan and stepped; and the next step is whole."""
    world = World(mode, scale)
    grads = values(0.5, 1.0, -0.5)
    world.backward(grads)
    if clip == "before":
        world.opt.clip_master_grads(2.0)
    world.masters[which].grad.view(-1)[-1] = value
    if clip == "after":
        assert not torch.isfinite(world.opt.clip_master_grads(2.0))
        other = 1 - which
        assert world.masters[other].grad.tolist() == grads[other].tolist()
    world.expect_skip()
    world.opt.zero_grad()
    world.backward(grads)
    world.expect_step(grads)


@every_mode
def test_an_overflow_that_is_edited_away_does_not_skip(mode: Mode) -> None:
    world = World(mode)
    grads = values(0.5, 1.0, -0.5)
    bad = instead(grads, 0, torch.full_like(grads[0], INF))
    world.backward(bad)
    world.masters[0].grad.copy_(grads[0])
    world.expect_step(grads)


@every_mode
@WAYS
def test_a_master_gradient_set_to_none_is_left_alone(mode: Mode, how: str) -> None:
    world = World(mode)
    grads = values(0.5, 1.0, -0.5)
    world.leave(how, grads)
    master = world.masters[0]
    assert master.grad is not None
    master.grad = None
    grads = instead(grads, 0, None)
    world.expect_norm(world.opt.clip_master_grads(1e6), grads)
    world.expect_step(grads)


@every_mode
def test_a_master_gradient_given_where_there_was_none_counts(mode: Mode) -> None:
    world = World(mode)
    grads = instead(values(0.5, 1.0, -0.5), 0, None)
    world.backward(grads)
    given = values(2.0)[0]
    world.masters[0].grad = given.clone()
    grads = instead(grads, 0, given)
    norm = world.expect_norm(world.opt.clip_master_grads(2.0), grads)
    world.expect_step(oracle.clipped(grads, norm, 2.0))


@every_mode_that_keeps_gradients
@pytest.mark.parametrize(("edit", "scale"), list(zip(EDITS, SCALES, strict=True)))
@pytest.mark.parametrize("update", [True, False])
def test_a_further_backward_after_an_edit_raises(mode: Mode, scale: str, edit: str, update: bool) -> None:
    """It would be lost; the weights are as they were, and zero_grad gets on."""
    world = World(mode, scale)
    grads = values(0.5, 1.0, -0.5)
    world.backward(grads)
    i = world.sixteen()
    EDITS[edit](world.masters[i])
    with pytest.raises(RuntimeError, match=f"{world.names[i]}.*after the last backward of a step"):
        world.backward(grads, update_master_grads=update)
    world.check_weights()
    world.opt.zero_grad()
    world.backward(grads)
    world.expect_step(grads)


@every_scale
@by([mode for mode in ALL if mode.folds])
@pytest.mark.parametrize("edit", EDITS)
def test_an_edit_of_an_fp32_sum_is_added_to(mode: Mode, scale: str, edit: str) -> None:
    world = World(mode, scale)
    grads = values(0.5, 1.0, -0.5)
    world.backward(grads)
    EDITS[edit](world.masters[0])
    world.backward(grads)
    world.expect_step(plus(_edited(grads, 0, edit), grads))


@every_scale_but_one
@every_mode
def test_update_master_grads_undoes_a_clip_and_gives_the_same_bits(mode: Mode, scale: str) -> None:
    if mode.folds or mode.is_mixed:
        pytest.skip("sums and gradients of FP32 parameters are unscaled once and stay as they are")
    world = World(mode, scale)
    grads = values(0.5, 1.0, -0.5)
    world.backward(grads)
    for _ in range(2):
        world.opt.clip_master_grads(0.5)
        world.opt.update_master_grads()
        world.check_master_grads(grads)
    world.expect_step(grads)


@every_scale
@by([mode for mode in ALL if mode.folds])
@pytest.mark.parametrize("comes", [0, 1, 2])
def test_sums_that_get_nothing_more_keep_their_clip_in_the_next_norm(mode: Mode, scale: str, comes: int) -> None:
    world = World(mode, scale)
    grads = values(0.5, 1.0, -0.5)
    world.backward(grads)
    sums = oracle.clipped(grads, world.expect_norm(world.opt.clip_master_grads(0.5), grads), 0.5)
    more = [grad if i == comes else None for i, grad in enumerate(grads)]
    world.backward(more)
    sums = plus(sums, more)
    sums = oracle.clipped(sums, world.expect_norm(world.opt.clip_master_grads(1.0), sums), 1.0)
    world.check_master_grads(sums)
    world.expect_step(sums)


@every_scale
@by([mode for mode in KEEPS if not mode.is_mixed])
@pytest.mark.parametrize("clips", [False, True])
def test_update_master_grads_undoes_an_edit_and_a_further_backward_may_follow(
    mode: Mode, scale: str, clips: bool
) -> None:
    world = World(mode, scale)
    grads = values(0.5, 1.0, -0.5)
    world.backward(grads)
    world.masters[0].grad.mul_(2.0)
    if clips:
        world.opt.clip_master_grads(1e6)
    world.opt.update_master_grads()
    world.check_master_grads(grads)
    world.backward(grads)
    world.expect_step(plus(grads, grads))


@every_scale
@every_mode_that_keeps_gradients
@pytest.mark.parametrize("first", ["read", "clip"])
def test_a_gradient_dropped_after_a_clip_is_gone_from_its_master_at_once(mode: Mode, scale: str, first: str) -> None:
    world = World(mode, scale)
    i, grads = world.sixteen(), values(0.5, 1.0, -0.5)
    world.backward(grads)
    world.opt.clip_master_grads(1e6)
    world.params[i].grad = None
    grads = instead(grads, i, None)
    if first == "read":
        assert world.masters[i].grad is None
    else:
        assert float(clip_grad_norm_(world.masters, 1e6)) == pytest.approx(oracle.total_norm(grads))
    world.check_master_grads(grads)
    world.expect_step(grads)


@every_mode_that_keeps_gradients
def test_a_gradient_that_came_without_us_dropped_after_a_clip_is_gone_from_its_master(mode: Mode) -> None:
    """At a scale of one plain backwards count, and so does what is dropped of them."""
    world = World(mode, "one")
    grads = values(0.5, 1.0, -0.5)
    world.loss(grads).backward()
    world.opt.clip_master_grads(1e6)
    world.params[2].grad = None
    grads = instead(grads, 2, None)
    world.check_master_grads(grads)
    assert float(clip_grad_norm_(world.masters, 1e6)) == pytest.approx(oracle.total_norm(grads))
    world.expect_step(grads)


@pytest.mark.parametrize("scale", [1.0, 64.0])
@pytest.mark.parametrize("fused_step", ["auto", False])
@pytest.mark.parametrize("last", [1.0, INF])
def test_a_gradient_dropped_beside_an_edited_one_is_out_of_the_step(
    scale: float, fused_step: bool | str, last: float
) -> None:
    params = [torch.nn.Parameter(torch.zeros(2).half()) for _ in range(3)]
    opt = MixedPrecisionOptimizer(torch.optim.SGD(params, lr=0.125), loss_scale=scale, fused_step=fused_step)
    opt.backward(sum((p.float() * c).sum() for p, c in zip(params, (1.0, 1.0, last), strict=True)))  # type: ignore[arg-type]
    first = next(opt.master_params())
    first.grad = torch.full_like(first, 2.0)
    params[2].grad = None
    assert float(opt.clip_master_grads(1e9)) == pytest.approx(10.0**0.5)
    opt.step()
    assert [p[0].item() for p in params] == [-0.25, -0.125, 0.0]
    assert opt.skipped_steps == 0


@every_scale
@every_mode
@pytest.mark.parametrize("clears", ["drop", "write"])
@pytest.mark.parametrize("reads", [True, False])
def test_a_gradient_that_a_step_has_used_goes_from_its_master_with_the_models(
    mode: Mode, scale: str, reads: bool, clears: str
) -> None:
    """Else who reads it, a norm over all masters for one, finds an earlier step's. FP32 sums are of masters alone."""
    world = World(mode, scale)
    grads = values(0.5, 1.0, -0.5)
    world.backward(grads)
    world.expect_step(grads)
    if reads:
        world.check_master_grads(grads)
    if clears == "write" and (scale == "one" or mode.folds):
        pytest.skip("such a write is a gradient of the next step, or there is none to write")
    i = world.sixteen()
    if clears == "drop":
        world.params[i].grad = None
    else:
        world.params[i].grad.mul_(2.0)
    world.check_master_grads(grads if mode.folds else instead(grads, i, None))
    given = values(2.0, 2.0, 2.0)[i]
    world.masters[i].grad = given
    assert world.masters[i].grad is given


COMES = {
    "a group": lambda world, param: world.opt.add_param_group({"params": [param]}),
    "a group of the wrapped optimizer's": lambda world, param: world.opt.optimizer.add_param_group({"params": [param]}),
    "unfrozen": lambda world, param: world.params[2].requires_grad_(),
}
BEFORE = {
    "backward": lambda world: None,
    "clip": lambda world: world.opt.clip_master_grads(1e6),
    "read": lambda world: [master.grad for master in world.masters],
    "update": lambda world: world.opt.update_master_grads(),
}


class WithOneFrozen(World):
    """Its last parameter has no master yet."""

    @staticmethod
    def wrap(optimizer: torch.optim.Optimizer, **arguments: Any) -> MixedPrecisionOptimizer:
        optimizer.param_groups[0]["params"][-1].requires_grad_(False)
        return MixedPrecisionOptimizer(optimizer, **arguments)


@every_mode
@pytest.mark.parametrize("before", BEFORE)
@pytest.mark.parametrize("comes", COMES)
@pytest.mark.parametrize("then", ["step", "clip", "drop", "edit"])
def test_parameters_that_come_before_the_step_take_nothing_from_it(
    mode: Mode, before: str, comes: str, then: str
) -> None:
    """What was found of the others' gradients stays known: norm, clip, and what is edited or dropped afterwards."""
    world = WithOneFrozen(mode)
    grads = instead(values(0.5, 1.0, -0.5), 2, None)
    world.backward(grads)
    BEFORE[before](world)
    COMES[comes](world, torch.nn.Parameter(torch.ones(3, dtype=torch.float16)))
    if then == "clip":
        grads = oracle.clipped(grads, world.expect_norm(world.opt.clip_master_grads(1.0), grads), 1.0)
    elif then == "drop" and not mode.folds:
        world.params[0].grad = None
        grads = instead(grads, 0, None)
    elif then == "edit":
        master = next(iter(world.opt.master_params()))
        master.grad.mul_(0.5)
        grads = instead(grads, 0, grads[0] * 0.5)
    world.opt.step()
    world.reference.step(grads)
    for i, (got, want) in enumerate(zip(world.opt.master_params(), world.reference.masters, strict=False)):
        assert (got.detach() - want.detach()).abs().max().item() <= world.bound(i)


@every_mode_that_keeps_gradients
def test_a_gradient_of_the_step_before_the_last_is_not_shown(mode: Mode) -> None:
    """It was read then, and its parameter had none in the last."""
    world = World(mode)
    i = world.sixteen()
    for grads in (values(0.5, 1.0, -0.5), instead(values(0.5, 1.0, -0.5), i, None)):
        world.model_zero_grad()
        world.backward(grads)
        if grads[i] is not None:
            world.check_master_grads(grads)
        world.expect_step(grads)
    world.check_master_grads(grads)


@pytest.mark.parametrize("arguments", [{"fused_step": False}, {}, {"grad_accumulation": "fp32"}], ids=str)
@pytest.mark.parametrize("how", ["waiting", "scale_loss"])
def test_clip_grad_norm_sums_up_fp32_gradients_before_it_measures_them(arguments: dict[str, Any], how: str) -> None:
    """It lists the FP32 parameter's first, scaled and with a part of it set aside, and then reads the 16-bit one's."""
    params = [torch.nn.Parameter(torch.ones(1, dtype=dtype)) for dtype in (torch.float32, torch.float16)]
    opt = MixedPrecisionOptimizer(torch.optim.SGD(params, lr=1.0), loss_scale=64.0, **arguments)
    for k in range(2):
        loss = params[0].sum() * 3 + params[1].float().sum() * 4
        if k and how == "scale_loss":
            opt.scale_loss(loss).backward()
        else:
            opt.backward(loss, update_master_grads=not k)
    assert float(clip_grad_norm_(opt.master_params(), 1.0)) == 10.0
    opt.step()
    assert [p.item() for p in params] == pytest.approx([0.4, 0.2], abs=1e-3)
