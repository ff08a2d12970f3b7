"""clip_master_grads: torch's rule on exact norms, no memory touched for nothing, non-finite left for step."""

from __future__ import annotations

import math

import numpy as np
import oracle
import pytest
import torch
from specs import CLIP_ERRORS, ErrorCase
from torch.optim import SGD

from engine.checks import (
    array,
    assert_same,
    assert_same_bits,
    by_step,
    linear_loss,
    normal,
    ones,
    parameters,
)
from fp16opt import MixedPrecisionOptimizer
from fp16opt.kernels.backends import decide_clip

pytestmark = by_step

INF, NAN = float("inf"), float("nan")
SHAPES = [(70,), (8, 9), (), (0,), (3, 5, 2)]
KINDS = (torch.float16, torch.float32, torch.bfloat16, torch.float16, torch.float16)


def _grid(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Multiples of 2^-6 up to 1 in size: squares and sums of them are exact in double in any order."""
    x = np.random.default_rng(seed).integers(-64, 65, shape)
    return torch.from_numpy(np.asarray(x / 64.0, np.float32))


def _prepared(scale: float = 16.0) -> tuple[MixedPrecisionOptimizer, list[np.ndarray]]:
    params = parameters(SHAPES, KINDS)
    opt = MixedPrecisionOptimizer(SGD(params, lr=1.0), loss_scale=scale)
    grads = [_grid(s, i) for i, s in enumerate(SHAPES)]
    opt.backward(linear_loss(params, grads))
    return opt, [g.numpy() for g in grads]


@pytest.mark.parametrize("max_norm", [0.5, 3.0, 1e-3, 0.0], ids=str)
@pytest.mark.parametrize("norm_type", [2.0, 1.0, INF, 2, 3.0], ids=str)
def test_norm_before_clipping_and_clipped_gradients_follow_torchs_rule(norm_type: float, max_norm: float) -> None:
    opt, grads = _prepared()
    got = opt.clip_master_grads(max_norm, norm_type)
    total, clipped = oracle.clip(list(grads), max_norm, norm_type)
    assert got.shape == ()
    assert got.dtype == torch.float32
    if norm_type == 3.0:
        # Cubes and a cube root in whatever precision of at least float32: a few float32 ulps.
        assert float(got) == pytest.approx(total, rel=8 * 2.0**-24)
        for m, c in zip(opt.master_params(), clipped, strict=True):
            np.testing.assert_allclose(m.grad.numpy(), c, rtol=8 * 2.0**-24)
        return
    assert float(got) == float(np.float32(total))
    for i, (m, c) in enumerate(zip(opt.master_params(), clipped, strict=True)):
        assert_same_bits(m.grad, torch.from_numpy(np.asarray(c)), f"clipped gradient {i}")


def test_norm_type_may_be_given_as_torch_gives_it() -> None:
    for spelled in ("inf", INF, math.inf):
        opt, grads = _prepared()
        try:
            got = opt.clip_master_grads(1e9, norm_type=spelled)
        except (TypeError, ValueError) as err:
            assert isinstance(spelled, str)
            assert "norm_type" in str(err)  # noqa: PT017
            continue
        assert float(got) == oracle.norm(list(grads), INF)


def test_clip_agrees_with_torchs_clip_grad_norm() -> None:
    opt, _ = _prepared()
    opt.update_master_grads()
    copies = [torch.nn.Parameter(m.detach().clone()) for m in opt.master_params()]
    for c, m in zip(copies, opt.master_params(), strict=True):
        c.grad = m.grad.clone()
    theirs = torch.nn.utils.clip_grad_norm_(copies, 0.5)
    ours = opt.clip_master_grads(0.5)
    # Theirs sums in float32 over 175 elements: relative error below 175 * 2^-24.
    assert float(ours) == pytest.approx(float(theirs), rel=175 * 2.0**-24)
    for c, m in zip(copies, opt.master_params(), strict=True):
        np.testing.assert_allclose(m.grad.numpy(), c.grad.numpy(), rtol=180 * 2.0**-24)


def test_nothing_to_clip_touches_no_gradient_memory() -> None:
    opt, grads = _prepared()
    opt.update_master_grads()
    before = [(m.grad.data_ptr(), m.grad._version, m.grad.clone()) for m in opt.master_params()]
    norm = float(opt.clip_master_grads(1e6))
    assert norm == float(np.float32(oracle.norm(list(grads))))
    for m, (pointer, version, value) in zip(opt.master_params(), before, strict=True):
        assert (m.grad.data_ptr(), m.grad._version) == (pointer, version)
        assert_same_bits(m.grad, value)


def test_clipping_moves_the_version_counter_of_what_it_writes() -> None:
    opt, _ = _prepared()
    opt.update_master_grads()
    first = next(iter(opt.master_params()))
    version = first.grad._version
    opt.clip_master_grads(0.5)
    assert first.grad._version > version


@pytest.mark.parametrize("max_norm", [1.0, 0.3, 1e-30, 7.0], ids=str)
@pytest.mark.parametrize("norm", [1.0, 3.0, 2.0**-14, 2.0**14], ids=str)
def test_the_factor_has_torchs_bits(norm: float, max_norm: float) -> None:
    p, theirs = ones(1, torch.float32), ones(1, torch.float32)
    opt = MixedPrecisionOptimizer(SGD([p], lr=1.0))
    opt.backward(linear_loss([p], [norm]))
    theirs.grad = torch.full((1,), norm)
    assert float(opt.clip_master_grads(max_norm)) == norm
    torch.nn.utils.clip_grad_norm_([theirs], max_norm)
    assert_same_bits(p.grad, theirs.grad)


def test_the_factor_on_the_host_has_the_bits_of_torch_operations() -> None:
    generator = torch.Generator().manual_seed(0)
    exponents = torch.rand(4000, generator=generator, dtype=torch.float64) * 76 - 38
    norms = [0.0, 1.0, 1e-6, 2.0**-149, 3.4e38, *(10.0**exponents).tolist()]
    limits = [1.0, 0.1, 1e-3, 5.0, 1e30, 0.0, *(10.0 ** exponents[:50] / 7).tolist()]
    for k, norm in enumerate(norms):
        max_norm = limits[k % len(limits)]
        wide = torch.tensor(norm, dtype=torch.float64)
        torchs = (max_norm / (wide.float() + 1e-6)).clamp(max=1.0)
        assert_same_bits(decide_clip(wide, None, max_norm)[1], torchs)
        assert_same_bits(decide_clip(wide, torch.tensor(0.0), max_norm)[1], torchs)
        assert float(decide_clip(wide, torch.tensor(1.0), max_norm)[1]) == 1.0


@pytest.mark.parametrize(("norm", "factor"), [(NAN, NAN), (INF, 0.0), (1e39, 1e-39), (1e300, 1e-300)], ids=str)
def test_the_factor_of_norms_beyond_float32(norm: float, factor: float) -> None:
    _, found = decide_clip(torch.tensor(norm, dtype=torch.float64), None, 1.0)
    assert_same_bits(found, torch.tensor(factor, dtype=torch.float64).float())


@pytest.mark.parametrize("bad", [None, INF, NAN], ids=str)
@pytest.mark.parametrize("max_norm", [0.5, 1e6, 0.0], ids=str)
@pytest.mark.parametrize("scale", [16.0, 3.0], ids=str)
def test_a_clip_before_unscaling_gives_the_bits_of_one_after(scale: float, max_norm: float, bad: float | None) -> None:
    results, after = [], []
    for update in (True, False):
        params = parameters(SHAPES, KINDS)
        opt = MixedPrecisionOptimizer(SGD(params, lr=1.0), loss_scale=scale)
        grads = [_grid(s, i) for i, s in enumerate(SHAPES)]
        if bad is not None:
            grads[1][7, 8] = bad
        opt.backward(linear_loss(params, grads), update_master_grads=update)
        norm = opt.clip_master_grads(max_norm)
        clipped = [m.grad.clone() for m in opt.master_params()]
        after.append(float(opt.clip_master_grads(1e6)))
        report = [(o.name, o.has_inf, o.has_nan) for o in opt.overflow_report()]
        opt.step()
        results.append([norm, *clipped, *params, *opt.master_params(), opt.step_was_skipped, report])
    assert_same(results[1], results[0])
    # One is what the pass over FP16 gradients found, the other was read from FP32 ones. Products are rounded, groups of
    # eight squares are in the former, and both to float32 in the end: less than 4 roundings of 2^-24.
    assert after == pytest.approx([after[0]] * 2, rel=2.0**-22, nan_ok=True)


def test_update_undoes_a_clip_before_unscaling() -> None:
    p = ones(4)
    opt = MixedPrecisionOptimizer(SGD([p], lr=1.0), loss_scale=8.0)
    opt.backward(linear_loss([p], [1.0]), update_master_grads=False)
    assert float(opt.clip_master_grads(1.0)) == 2.0
    (m,) = opt.master_params()
    assert float(m.grad[0]) == float(oracle.clip_factor(2.0, 1.0))
    opt.update_master_grads()
    assert_same_bits(m.grad, torch.ones(4))


def test_a_clip_before_unscaling_adds_to_what_was_folded() -> None:
    for update in (True, False):
        p = ones(4)
        opt = MixedPrecisionOptimizer(SGD([p], lr=1.0), loss_scale=8.0, grad_accumulation="fp32")
        opt.backward(linear_loss([p], [1.0]))
        opt.backward(linear_loss([p], [2.0]), update_master_grads=update)
        assert float(opt.clip_master_grads(1e6)) == 6.0
        (m,) = opt.master_params()
        assert_same_bits(m.grad, torch.full((4,), 3.0))


@pytest.mark.parametrize("scale", [1.0, 2.0**14], ids=str)
def test_step_uses_the_clipped_gradients(scale: float) -> None:
    p = ones(4)
    opt = MixedPrecisionOptimizer(SGD([p], lr=1.0), loss_scale=scale)
    opt.backward(linear_loss([p], [1.0]))
    assert float(opt.clip_master_grads(1.0)) == 2.0
    opt.step()
    (m,) = opt.master_params()
    factor = torch.from_numpy(np.asarray([oracle.clip_factor(2.0, 1.0)] * 4))
    assert_same_bits(m, 1.0 - factor)


def test_clip_twice_measures_what_is_there() -> None:
    opt, grads = _prepared()
    first = float(opt.clip_master_grads(0.5))
    _, clipped = oracle.clip(list(grads), 0.5)
    second = float(opt.clip_master_grads(0.25))
    assert first == float(np.float32(oracle.norm(list(grads))))
    assert second == pytest.approx(oracle.norm(clipped), rel=2.0**-23)
    assert second < 0.51


@pytest.mark.parametrize("edit", ["mul_", "copy_", "data", "new_tensor"])
def test_gradients_edited_after_the_pass_are_measured_again(edit: str) -> None:
    p = ones(4)
    opt = MixedPrecisionOptimizer(SGD([p], lr=1.0), loss_scale=8.0)
    opt.backward(linear_loss([p], [1.0]))
    opt.update_master_grads()
    (m,) = opt.master_params()
    if edit == "mul_":
        m.grad.mul_(3.0)
    elif edit == "copy_":
        m.grad.copy_(torch.full((4,), 3.0))
    elif edit == "new_tensor":
        m.grad = torch.full((4,), 3.0)
    else:
        m.grad.data.mul_(3.0)
        m.grad.add_(0.0)  # a write through .data alone moves no counter: the contract excludes it
    assert float(opt.clip_master_grads(100.0)) == 6.0


@pytest.mark.parametrize("bad", [INF, -INF, NAN], ids=str)
@pytest.mark.parametrize("norm_type", [2.0, 1.0, INF], ids=str)
def test_non_finite_gradients_stay_as_they_are_and_step_skips(norm_type: float, bad: float) -> None:
    p, q = ones(3), ones(2)
    opt = MixedPrecisionOptimizer(SGD([p, q], lr=1.0), loss_scale=8.0)
    opt.backward(linear_loss([p, q], [array([1.0, bad, 2.0], torch.float32), 3.0]))
    norm = opt.clip_master_grads(0.5, norm_type)
    assert not math.isfinite(float(norm))
    first, second = opt.master_params()
    assert float(first.grad[0]) == 1.0
    assert float(first.grad[2]) == 2.0
    assert_same_bits(second.grad, torch.full((2,), 3.0))
    opt.step()
    assert bool(opt.step_was_skipped)
    assert_same_bits(p, array([1.0] * 3))


@pytest.mark.parametrize("bad", [INF, NAN], ids=str)
def test_error_if_nonfinite_raises_and_leaves_the_gradients(bad: float) -> None:
    p, q = ones(3), ones(2)
    opt = MixedPrecisionOptimizer(SGD([p, q], lr=1.0), loss_scale=8.0)
    opt.backward(linear_loss([p, q], [bad, 3.0]))
    opt.update_master_grads()
    before = [m.grad.clone() for m in opt.master_params()]
    with pytest.raises(RuntimeError, match=r"(?i)non-?finite"):
        opt.clip_master_grads(0.5, error_if_nonfinite=True)
    assert_same([m.grad for m in opt.master_params()], before)
    opt.step()
    assert bool(opt.step_was_skipped)


def test_error_if_nonfinite_says_nothing_about_finite_gradients() -> None:
    opt, grads = _prepared()
    assert float(opt.clip_master_grads(0.5, error_if_nonfinite=True)) == float(np.float32(oracle.norm(list(grads))))


def test_zero_gradients_stay_zero() -> None:
    p = ones(3)
    opt = MixedPrecisionOptimizer(SGD([p], lr=1.0), loss_scale=8.0)
    opt.backward(linear_loss([p], [0.0]))
    assert float(opt.clip_master_grads(1.0)) == 0.0
    (m,) = opt.master_params()
    assert_same_bits(m.grad, torch.zeros(3))


def test_ready_without_gradients_returns_zero() -> None:
    p = ones(3)
    opt = MixedPrecisionOptimizer(SGD([p], lr=1.0), loss_scale=8.0)
    norm = opt.clip_master_grads(1.0)
    assert norm.shape == ()
    assert norm.dtype == torch.float32
    assert float(norm) == 0.0
    opt.step()
    assert_same_bits(p, array([1.0] * 3))


def test_norms_do_not_overflow_or_vanish() -> None:
    for size in (1e30, 1e-30):
        p = ones(4, torch.float32)
        opt = MixedPrecisionOptimizer(SGD([p], lr=0.0))
        opt.backward(linear_loss([p], [torch.full((4,), size)]))
        assert float(opt.clip_master_grads(1e38)) == float(np.float32(2 * float(np.float32(size))))


def test_a_finite_norm_beyond_fp32_is_clipped_not_zeroed() -> None:
    """Norm 2 * 3e38 is inf in float32; every gradient is finite, so clipping must bring it to max_norm."""
    p = ones(4, torch.float32)
    opt = MixedPrecisionOptimizer(SGD([p], lr=0.0))
    opt.backward(linear_loss([p], [torch.full((4,), 3e38)]))
    opt.clip_master_grads(1.0)
    assert float(p.grad.double().norm()) == pytest.approx(1.0, rel=1e-5)
    opt.step()
    assert not bool(opt.step_was_skipped)


def test_norm_of_many_equal_gradients_is_exact() -> None:
    """2^20 gradients of 0.25: norm 256 exactly, where a float32 running sum is off."""
    p = torch.nn.Parameter(torch.zeros(2**20, dtype=torch.float16))
    opt = MixedPrecisionOptimizer(SGD([p], lr=0.0), loss_scale=64.0)
    opt.backward(linear_loss([p], [0.25]))
    assert float(opt.clip_master_grads(1e9)) == 256.0


def test_fp64_gradients_are_clipped_in_fp64() -> None:
    p = ones(4, torch.float64)
    opt = MixedPrecisionOptimizer(SGD([p], lr=1.0), loss_scale=8.0)
    g = torch.tensor([1.0, 2.0, 3.0, 1 + 2.0**-40], dtype=torch.float64)
    opt.backward(linear_loss([p], [g]))
    total = math.sqrt(math.fsum((g * g).tolist()))
    assert float(opt.clip_master_grads(1.0)) == float(np.float32(total))
    assert_same_bits(p.grad, g * float(oracle.clip_factor(total, 1.0)))


def test_accumulated_in_fp32_then_clipped() -> None:
    p = ones(4)
    opt = MixedPrecisionOptimizer(SGD([p], lr=1.0), loss_scale=8.0, grad_accumulation="fp32")
    opt.backward(linear_loss([p], [0.5]))
    opt.backward(linear_loss([p], [0.5]))
    assert float(opt.clip_master_grads(1.0)) == 2.0
    (m,) = opt.master_params()
    assert_same_bits(m.grad, torch.from_numpy(np.asarray([oracle.clip_factor(2.0, 1.0)] * 4)))


@pytest.mark.parametrize("case", [pytest.param(c, id=c.id) for c in CLIP_ERRORS])
def test_wrong_argument_is_refused_and_changes_nothing(case: ErrorCase) -> None:
    p = ones(4)
    opt = MixedPrecisionOptimizer(SGD([p], lr=0.5), loss_scale=8.0)
    opt.backward(linear_loss([p], [normal((4,), torch.float16, 3)]))
    opt.update_master_grads()
    (m,) = opt.master_params()
    before = m.grad.clone()
    with pytest.raises(case.error, match=case.match):
        opt.clip_master_grads(**case.kwargs)
    assert_same_bits(m.grad, before)
