"""``clip_master_grads``: torch's rule over all masters, on what is there, and nothing hides an overflow."""

from __future__ import annotations

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

from contract.reference import clipped
from contract.worlds import INF, NAN, WRAPPED, Mode, World, every_mode, instead, values
from fp16opt import MixedPrecisionOptimizer

GRADS = values(0.5, 1.0, -0.5)
SHAPES = [(70,), (8, 9), (), (0,), (3, 5, 2)]
KINDS = (torch.float16, torch.float32, torch.bfloat16, torch.float16, torch.float16)
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


# -- what is not finite ------------------------------------------------------------------------------------------------


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
def test_a_finite_norm_beyond_fp32_clips_to_max_norm(fused_step: bool | str) -> None:
    """Norm 2 * 3e38 is inf in float32, and every gradient is finite."""
    p = ones(4, torch.float32)
    opt = MixedPrecisionOptimizer(SGD([p], lr=1.0), fused_step=fused_step)
    opt.backward(linear_loss([p], [torch.full((4,), 3e38)]))
    opt.clip_master_grads(1.0)
    opt.step()
    assert not opt.step_was_skipped
    assert p.tolist() == pytest.approx([0.5] * 4, rel=1e-5)


def test_fp64_gradients_are_clipped_in_fp64() -> None:
    p = ones(3, torch.float64)
    opt = MixedPrecisionOptimizer(SGD([p], lr=1.0))
    opt.backward(linear_loss([p], [torch.tensor([0.1, 0.2, 0.3], dtype=torch.float64)]))
    norm = float(opt.clip_master_grads(0.1))
    opt.step()
    factor = float(torch.tensor(0.1) / (torch.tensor(norm) + 1e-6))
    assert p.tolist() == pytest.approx([1 - x * factor for x in (0.1, 0.2, 0.3)], rel=1e-7)


# -- some of them ------------------------------------------------------------------------------------------------------


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
