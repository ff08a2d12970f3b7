"""``clip_master_grads``: torch's rule over all masters, on what is there, and nothing hides an overflow."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import oracle as arrays
import pytest
import torch
from engine.checks import array, assert_same, assert_same_bits, linear_loss, ones, parameters
from specs import CLIP_ERRORS, ErrorCase
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import SGD

from contract.reference import clipped, total_norm
from contract.worlds import (
    ALL,
    INF,
    NAN,
    WRAPPED,
    Mode,
    World,
    by,
    every_mode,
    every_mode_that_keeps_gradients,
    every_scale_but_one,
    every_setting,
    every_setting_that_keeps_gradients,
    every_way,
    instead,
    times,
    values,
)
from fp16opt import MixedPrecisionOptimizer

GRADS = values(0.5, 1.0, -0.5)
SHAPES = [(70,), (8, 9), (), (0,), (3, 5, 2)]
KINDS = (torch.float16, torch.float32, torch.bfloat16, torch.float16, torch.float16)
FIRST_AND_THIRD = (0, 2)
steps = pytest.mark.parametrize("fused_step", ["auto", False])


def grid(shape: tuple[int, ...], seed: int) -> Tensor:
    """Multiples of 2^-6 up to 1 in size: squares and sums of them are exact in double in any order."""
    x = np.random.default_rng(seed).integers(-64, 65, shape)
    return torch.from_numpy(np.asarray(x / 64.0, np.float32))


def prepared(fused_step: bool | str) -> tuple[MixedPrecisionOptimizer, list[np.ndarray]]:
    params = parameters(SHAPES, KINDS)
    opt = MixedPrecisionOptimizer(SGD(params, lr=1.0), loss_scale=16.0, fused_step=fused_step)
    grads = [grid(s, i) for i, s in enumerate(SHAPES)]
    opt.backward(linear_loss(params, grads))
    return opt, [g.numpy() for g in grads]


# -- norm and factor ---------------------------------------------------------------------------------------------------


@steps
@pytest.mark.parametrize("max_norm", [0.5, 3.0, 1e-3, 0.0], ids=str)
@pytest.mark.parametrize("norm_type", [2.0, 1.0, INF, 2, 3.0], ids=str)
def test_norm_and_gradients_follow_torchs_rule(norm_type: float, max_norm: float, fused_step: bool | str) -> None:
    opt, grads = prepared(fused_step)
    got = opt.clip_master_grads(max_norm, norm_type)
    total, want = arrays.clip(list(grads), max_norm, norm_type)
    assert got.shape == ()
    assert got.dtype == torch.float32
    exact = norm_type != 3.0  # cubes and a cube root: a few float32 ulps
    assert float(got) == (float(np.float32(total)) if exact else pytest.approx(total, rel=8 * 2.0**-24))
    for i, (m, c) in enumerate(zip(opt.master_params(), want, strict=True)):
        if exact:
            assert_same_bits(m.grad, torch.from_numpy(np.asarray(c)), f"clipped gradient {i}")
        else:
            np.testing.assert_allclose(m.grad.numpy(), c, rtol=8 * 2.0**-24)


@steps
def test_it_agrees_with_torchs_function(fused_step: bool | str) -> None:
    opt, _ = prepared(fused_step)
    opt.update_master_grads()
    copies = [nn.Parameter(m.detach().clone()) for m in opt.master_params()]
    for c, m in zip(copies, opt.master_params(), strict=True):
        c.grad = m.grad.clone()
    theirs = clip_grad_norm_(copies, 0.5)
    # Theirs sums in float32 over 175 elements: relative error below 175 * 2^-24.
    assert float(opt.clip_master_grads(0.5)) == pytest.approx(float(theirs), rel=175 * 2.0**-24)
    for c, m in zip(copies, opt.master_params(), strict=True):
        np.testing.assert_allclose(m.grad.numpy(), c.grad.numpy(), rtol=180 * 2.0**-24)


@pytest.mark.parametrize("spelled", ["inf", INF, math.inf])
def test_the_largest_norm_may_be_spelled_as_torch_has_it(spelled: Any) -> None:
    opt, grads = prepared("auto")
    try:
        got = opt.clip_master_grads(1e9, norm_type=spelled)
    except (TypeError, ValueError) as error:
        assert isinstance(spelled, str)
        assert "norm_type" in str(error)  # noqa: PT017
        return
    assert float(got) == arrays.norm(list(grads), INF)


@pytest.mark.parametrize("max_norm", [1.0, 0.3, 1e-30, 7.0], ids=str)
@pytest.mark.parametrize("norm", [1.0, 3.0, 2.0**-14, 2.0**14], ids=str)
def test_the_factor_has_torchs_bits(norm: float, max_norm: float) -> None:
    p, theirs = ones(1, torch.float32), ones(1, torch.float32)
    opt = MixedPrecisionOptimizer(SGD([p], lr=1.0))
    opt.backward(linear_loss([p], [norm]))
    theirs.grad = torch.full((1,), norm)
    assert float(opt.clip_master_grads(max_norm)) == norm
    clip_grad_norm_([theirs], max_norm)
    opt.step()
    assert_same_bits(p, (1.0 - theirs.grad).detach())


@every_setting
@every_way
def test_the_step_takes_clipped_gradients(mode: Mode, scale: str, how: str) -> None:
    world = World(mode, scale)
    for max_norm in (2.0, 1e6, 0.125):
        world.leave(how, GRADS)
        norm = world.expect_norm(world.opt.clip_master_grads(max_norm), GRADS)
        world.expect_step(clipped(GRADS, norm, max_norm))
        world.opt.zero_grad()


@every_mode
def test_masters_show_clipped_gradients(mode: Mode) -> None:
    world = World(mode)
    world.backward(GRADS)
    norm = world.expect_norm(world.opt.clip_master_grads(0.5), GRADS)
    world.check_master_grads(clipped(GRADS, norm, 0.5))
    world.expect_step(clipped(GRADS, norm, 0.5))


@every_mode_that_keeps_gradients
def test_the_models_gradients_stay_as_they_are(mode: Mode) -> None:
    """Scaled and unclipped, those of FP32 parameters too, until something needs the true ones."""
    world = World(mode)
    world.backward(GRADS)
    before = [p.grad.clone() for p in world.params]
    world.opt.clip_master_grads(0.5)
    for p, was in zip(world.params, before, strict=True):
        assert torch.equal(p.grad, was)


@steps
def test_nothing_to_clip_touches_no_gradient_memory(fused_step: bool | str) -> None:
    opt, grads = prepared(fused_step)
    opt.update_master_grads()
    before = [(m.grad.data_ptr(), m.grad._version, m.grad.clone()) for m in opt.master_params()]
    assert float(opt.clip_master_grads(1e6)) == float(np.float32(arrays.norm(list(grads))))
    for m, (pointer, version, value) in zip(opt.master_params(), before, strict=True):
        assert (m.grad.data_ptr(), m.grad._version) == (pointer, version)
        assert_same_bits(m.grad, value)


@every_mode
def test_a_second_clip_measures_what_the_first_has_left(mode: Mode) -> None:
    world = World(mode)
    world.backward(GRADS)
    norm = world.expect_norm(world.opt.clip_master_grads(2.0), GRADS)
    left = clipped(GRADS, norm, 2.0)
    assert float(world.opt.clip_master_grads(1e6)) == pytest.approx(total_norm(left), rel=2.0**-22)
    assert float(world.opt.clip_master_grads(0.5)) == pytest.approx(total_norm(left), rel=2.0**-22)
    assert float(world.opt.clip_master_grads(1e6)) == pytest.approx(0.5, rel=2.0**-19)  # of the 1e-6 in the factor


@every_mode
def test_sums_of_several_backwards_are_clipped(mode: Mode) -> None:
    world = World(mode)
    for _ in range(3):
        world.backward(GRADS)
    norm = world.expect_norm(world.opt.clip_master_grads(1.0), times(GRADS, 3))
    world.expect_step(clipped(times(GRADS, 3), norm, 1.0))


# -- edits -------------------------------------------------------------------------------------------------------------

EDITS: dict[str, Callable[[Tensor], object]] = {
    "in place": lambda master: master.grad.mul_(3.0),
    "replaced": lambda master: setattr(master, "grad", master.grad * 3.0),
}


@by([mode for mode in ALL if mode.has_masters])
@pytest.mark.parametrize("edit", EDITS)
def test_edited_master_gradients_are_measured_anew(mode: Mode, edit: str) -> None:
    world = World(mode)
    world.backward(GRADS)
    i = world.half()
    EDITS[edit](world.masters[i])
    edited = instead(GRADS, i, GRADS[i] * 3.0)
    norm = world.expect_norm(world.opt.clip_master_grads(1.0), edited)
    world.expect_step(clipped(edited, norm, 1.0))


@every_setting_that_keeps_gradients
def test_a_model_gradient_that_was_written_after_backward_is_refused(mode: Mode, scale: str) -> None:
    world = World(mode, scale)
    world.backward(GRADS)
    world.params[1].grad.mul_(0.5)
    for call in (lambda: world.opt.clip_master_grads(1.0), lambda: world.opt.clip_master_values(1.0)):
        with pytest.raises(RuntimeError, match=r"second\.weight.*update_master_grads\(\)"):
            call()
    world.opt.update_master_grads()
    grads = instead(GRADS, 1, GRADS[1] * 0.5)
    norm = world.expect_norm(world.opt.clip_master_grads(1.0), grads)
    world.expect_step(clipped(grads, norm, 1.0))


@every_mode_that_keeps_gradients
@pytest.mark.parametrize("look", ["nothing", "clip", "update", "read"])
@pytest.mark.parametrize("which", [0, 1])
def test_a_dropped_gradient_goes_with_its_flag_and_its_part_of_the_norm(mode: Mode, look: str, which: int) -> None:
    world = World(mode, "dynamic")
    world.backward(instead(GRADS, which, torch.full_like(GRADS[which], NAN)))
    if look == "clip":
        world.opt.clip_master_grads(2.0)
    if look == "update":
        world.opt.update_master_grads()
    if look == "read":
        assert world.masters[world.half()].grad is not None
    world.params[which].grad = None
    grads = instead(GRADS, which, None)
    norm = world.expect_norm(world.opt.clip_master_grads(2.0), grads)
    assert world.masters[which].grad is None
    world.expect_step(clipped(grads, norm, 2.0))


@every_mode_that_keeps_gradients
def test_a_gradient_that_is_dropped_after_a_clip_leaves_the_others_clipped(mode: Mode) -> None:
    """As with torch's clip_grad_norm_."""
    world = World(mode)
    world.backward(GRADS)
    norm = world.expect_norm(world.opt.clip_master_grads(2.0), GRADS)
    world.params[0].grad = None
    world.expect_step(instead(clipped(GRADS, norm, 2.0), 0, None))


# -- what came without backward ----------------------------------------------------------------------------------------


@every_mode
def test_at_a_scale_of_one_a_plain_backward_is_clipped(mode: Mode) -> None:
    world = World(mode, "one")
    world.loss(GRADS).backward()
    norm = world.expect_norm(world.opt.clip_master_grads(1.0), GRADS)
    world.expect_step(clipped(GRADS, norm, 1.0))


@every_mode
@every_scale_but_one
def test_at_another_scale_a_plain_backward_is_refused(mode: Mode, scale: str) -> None:
    world = World(mode, scale)
    world.loss(GRADS).backward()
    for call in (lambda: world.opt.clip_master_grads(1.0), lambda: world.opt.clip_master_values(1.0)):
        with pytest.raises(RuntimeError, match=r"opt\.backward\(loss\)"):
            call()
    world.check()


@every_mode
@every_scale_but_one
def test_after_a_step_left_gradients_are_refused(mode: Mode, scale: str) -> None:
    world = World(mode, scale)
    world.backward(GRADS)
    world.expect_step(GRADS)
    if all(param.grad is None for param in world.params):
        assert float(world.opt.clip_master_grads(1.0)) == 0.0, "FP32 sums were used up"
        return
    with pytest.raises(RuntimeError, match=r"did not make for this step, .*Call zero_grad\(\) after each step"):
        world.opt.clip_master_grads(1.0)
    world.opt.zero_grad()
    assert float(world.opt.clip_master_grads(1.0)) == 0.0


@every_setting
def test_without_gradients_the_norm_is_zero_and_nothing_is_closed(mode: Mode, scale: str) -> None:
    world = World(mode, scale)
    assert float(world.opt.clip_master_grads(1.0)) == 0.0
    world.backward(GRADS)
    world.expect_step(GRADS)


@every_mode
def test_zeros_stay_zeros(mode: Mode) -> None:
    world = World(mode)
    world.backward([0.0, 0.0, 0.0])
    assert float(world.opt.clip_master_grads(1.0)) == 0.0
    world.expect_step([torch.zeros_like(g) for g in GRADS])


# -- what is not finite ------------------------------------------------------------------------------------------------


@every_mode
@pytest.mark.parametrize("norm_type", [2.0, 1.0, INF], ids=str)
@pytest.mark.parametrize("bad", [INF, NAN], ids=str)
def test_gradients_that_are_not_finite_stay_and_the_step_skips(mode: Mode, norm_type: float, bad: float) -> None:
    world = World(mode, "dynamic")
    grads = instead(GRADS, 1, torch.full((2, 3), bad))
    world.backward(grads)
    assert not bool(world.opt.clip_master_grads(0.5, norm_type).isfinite())
    got = world.masters[world.half()].grad
    assert torch.equal(got, grads[world.half()])
    world.expect_skip()


@every_mode
@pytest.mark.parametrize("bad", [INF, NAN], ids=str)
def test_error_if_nonfinite_raises_and_leaves_gradients(mode: Mode, bad: float) -> None:
    world = World(mode, "dynamic")
    world.backward(instead(GRADS, 1, torch.full((2, 3), bad)))
    with pytest.raises(RuntimeError, match=r"(?i)non-?finite"):
        world.opt.clip_master_grads(0.5, error_if_nonfinite=True)
    world.expect_skip()
    world.opt.zero_grad()
    world.backward(GRADS)
    norm = world.expect_norm(world.opt.clip_master_grads(0.5, error_if_nonfinite=True), GRADS)
    world.expect_step(clipped(GRADS, norm, 0.5))


@steps
def test_norms_neither_overflow_nor_vanish(fused_step: bool | str) -> None:
    for size in (1e30, 1e-30):
        p = ones(2, torch.float32)
        opt = MixedPrecisionOptimizer(SGD([p], lr=1.0), fused_step=fused_step)
        opt.backward(linear_loss([p], [size]))
        assert float(opt.clip_master_grads(1e38)) == pytest.approx(2**0.5 * size, rel=1e-6)


@steps
def test_a_finite_norm_beyond_fp32_clips_to_max_norm(fused_step: bool | str) -> None:
    """Norm 2 * 3e38 is inf in float32, and every gradient is finite."""
    p = ones(4, torch.float32)
    opt = MixedPrecisionOptimizer(SGD([p], lr=1.0), fused_step=fused_step)
    opt.backward(linear_loss([p], [torch.full((4,), 3e38)]))
    opt.clip_master_grads(1.0)
    opt.step()
    assert not opt.step_was_skipped
    assert p.tolist() == pytest.approx([0.5] * 4, rel=1e-5)


@steps
def test_the_norm_of_many_equal_gradients_is_exact(fused_step: bool | str) -> None:
    """2^20 gradients of 0.25: norm 256 exactly, where a float32 running sum is off."""
    p = nn.Parameter(torch.zeros(2**20, dtype=torch.float16))
    opt = MixedPrecisionOptimizer(SGD([p], lr=1.0), loss_scale=8.0, fused_step=fused_step)
    opt.backward(p.float().sum() * 0.25)
    assert float(opt.clip_master_grads(1e9)) == 256.0


def test_fp64_gradients_are_clipped_in_fp64() -> None:
    p = ones(3, torch.float64)
    opt = MixedPrecisionOptimizer(SGD([p], lr=1.0))
    opt.backward(linear_loss([p], [torch.tensor([0.1, 0.2, 0.3], dtype=torch.float64)]))
    norm = float(opt.clip_master_grads(0.1))
    opt.step()
    factor = float(torch.tensor(0.1) / (torch.tensor(norm) + 1e-6))
    assert p.tolist() == pytest.approx([1 - x * factor for x in (0.1, 0.2, 0.3)], rel=1e-7)


# -- some of them ------------------------------------------------------------------------------------------------------


def some(world: World, which: tuple[int, ...], masters: bool) -> list[Tensor]:
    of = world.masters if masters else world.params
    return [of[i] for i in which]


def clip_some(grads: Any, which: tuple[int, ...], largest: float, norm: float) -> list[Tensor]:
    """What torch's rule leaves of ``grads`` where those at ``which`` are clipped, their norm being ``norm``."""
    factor = min(np.float32(1.0), np.float32(largest) / (np.float32(norm) + np.float32(1e-6)))
    return [g * float(factor) if i in which else g for i, g in enumerate(grads)]


@every_setting
@pytest.mark.parametrize("as_masters", [False, True], ids=["model", "masters"])
@pytest.mark.parametrize("norm_type", [2.0, 1.0, INF], ids=str)
def test_the_norm_of_some_is_theirs_and_the_others_stay(
    mode: Mode, scale: str, as_masters: bool, norm_type: float
) -> None:
    if as_masters and not mode.has_masters:
        pytest.skip("there are no masters to name")
    world = World(mode, scale)
    world.backward(GRADS)
    norm = world.opt.clip_master_grads(1.0, norm_type, params=iter(some(world, FIRST_AND_THIRD, as_masters)))
    assert float(norm) == pytest.approx(total_norm([GRADS[i] for i in FIRST_AND_THIRD], norm_type), rel=2.0**-22)
    want = clip_some(GRADS, FIRST_AND_THIRD, 1.0, float(norm))
    world.check_master_grads(want)
    world.expect_step(want)


@every_mode
def test_one_after_another_each_with_its_own_norm(mode: Mode) -> None:
    """A second factor on top of a first one, after a clip of all, which waits for the step."""
    world = World(mode, "static")
    world.backward(GRADS)
    norm = float(world.opt.clip_master_grads(2.0))
    want = clip_some(GRADS, (0, 1, 2), 2.0, norm)
    for i, largest in ((1, 0.5), (2, 0.125)):
        norm = world.expect_norm(world.opt.clip_master_grads(largest, params=world.params[i]), [want[i]])
        want = clip_some(want, (i,), largest, norm)
    world.expect_step(want)


@every_mode
def test_all_by_name_is_all(mode: Mode) -> None:
    """A parameter of another optimizer, without a gradient, may be among them."""
    one, other = World(mode, "dynamic"), World(mode, "dynamic")
    for world, options in ((one, {}), (other, {"params": [*other.params, nn.Parameter(torch.ones(2))]})):
        world.backward(GRADS)
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
    grads = instead(GRADS, where, torch.full_like(GRADS[where], bad))
    world.backward(grads)
    norm = world.opt.clip_master_grads(1e-3, params=[world.params[0]])
    if where == 0:
        assert not bool(norm.isfinite())
    else:
        world.expect_norm(norm, grads[:1])
    world.expect_skip()


PARAMS_REFUSED: list[tuple[Any, type[Exception], str]] = [
    (3, TypeError, "params: expected the parameters whose gradients are clipped, got int"),
    (["a"], TypeError, "params: expected the parameters whose gradients are clipped, got list"),
]


@pytest.mark.parametrize("how", ["clip_master_grads", "clip_master_values"])
@pytest.mark.parametrize(("params", "error", "message"), PARAMS_REFUSED, ids=["number", "strings"])
def test_what_is_no_parameter_is_refused(how: str, params: Any, error: type[Exception], message: str) -> None:
    world = World(WRAPPED)
    world.backward(GRADS)
    with pytest.raises(error, match=message):
        getattr(world.opt, how)(0.5, params=params)
    world.expect_step(GRADS)


@pytest.mark.parametrize("how", ["clip_master_grads", "clip_master_values"])
def test_a_gradient_of_another_optimizers_parameter_is_refused(how: str) -> None:
    world = World(WRAPPED)
    world.backward(GRADS)
    other = nn.Parameter(torch.ones(7))
    other.grad = torch.ones(7)
    with pytest.raises(ValueError, match=r"params: number 3, of shape \(7,\), has a gradient and is not in this opti"):
        getattr(world.opt, how)(0.5, params=[*world.params, other])
    assert other.grad.tolist() == [1.0] * 7
    world.expect_step(GRADS)


@pytest.mark.parametrize("case", CLIP_ERRORS, ids=lambda case: case.id)
def test_a_wrong_argument_is_refused_and_changes_nothing(case: ErrorCase) -> None:
    p = ones()
    opt = MixedPrecisionOptimizer(SGD([p], lr=0.5), loss_scale=8.0)
    opt.backward(linear_loss([p], [1.0]))
    with pytest.raises(case.error, match=case.match):
        opt.clip_master_grads(**case.kwargs)
    opt.backward(linear_loss([p], [1.0]))
    opt.step()
    assert_same_bits(p, array([0.0] * 4))
    assert_same(opt.skipped_steps, 0)
