"""A GradScaler, torch's own or ours, drives MixedPrecisionOptimizer around a 16-bit model, as trainers do."""

from __future__ import annotations

import copy
import math
import pickle
from typing import Any

import pytest
import torch
from engine.checks import by_step
from torch import Tensor
from torch.optim import LBFGS, SGD, AdamW

from fp16opt import DynamicLossScaler, MixedPrecisionOptimizer
from grad_scaler.pairs import DRIVEN, DRIVES, Ours, Theirs, assert_same_bits, linear_loss, values

pytestmark = by_step
SCALE = 2.0**12
SCALERS = pytest.mark.parametrize("cls", [Theirs, Ours], ids=["torch", "fp16opt"])
MIXED = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def _model(dtypes: tuple[torch.dtype, ...] = MIXED) -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(values((3, 2), i).to(dtype)) for i, dtype in enumerate(dtypes)]


def _coefficients(step: int) -> list[Tensor]:
    """Exact in every dtype, also when scaled."""
    return [(values((3, 2), 100 * step + i) * 8).round().float() / 8 for i in range(len(MIXED))]


def _driven(cls: Any, optimizer: Any = AdamW, **kwargs: Any) -> tuple:
    params = _model()
    opt = MixedPrecisionOptimizer(optimizer(params, lr=0.125, **kwargs))
    return params, opt, cls("cpu", init_scale=SCALE, growth_interval=3)


def _reference(steps: int, max_norm: float | None = None, skip: tuple[int, ...] = (), **kwargs: Any) -> list[Tensor]:
    """The engine, given each step's gradients unscaled."""
    params = _model()
    opt = MixedPrecisionOptimizer(AdamW(params, lr=0.125, **kwargs))
    for step in range(steps):
        if step not in skip:
            opt.zero_grad()
            opt.backward(linear_loss(params, _coefficients(step)))
            if max_norm is not None:
                opt.update_master_grads()
                torch.nn.utils.clip_grad_norm_(list(opt.master_params()), max_norm)
            opt.step()
    return [*params, *opt.master_params()]


def _all(params: list[Tensor], opt: MixedPrecisionOptimizer) -> list[Tensor]:
    return [*params, *opt.master_params()]


def _assert_same(results: list[Tensor], expected: list[Tensor]) -> None:
    for k, (a, b) in enumerate(zip(results, expected, strict=True)):
        assert_same_bits(a, b, f"tensor {k}")


# The loops: how each calls scaler and optimizer between backward and the next iteration.


def plain(scaler: Any, opt: Any, params: list[Tensor]) -> None:
    scaler.step(opt)
    scaler.update()


def unscale_first(scaler: Any, opt: Any, params: list[Tensor]) -> None:
    scaler.unscale_(opt)
    scaler.step(opt)
    scaler.update()


def lightning(scaler: Any, opt: Any, params: list[Tensor]) -> None:
    """Lightning's MixedPrecision plugin. It neither unscales nor clips where an optimizer says it unscales itself."""
    assert not getattr(opt, "_step_supports_amp_scaling", False)
    scaler.unscale_(opt)
    clip = [p for group in opt.param_groups for p in group["params"]]
    torch.nn.utils.clip_grad_norm_(clip, 1.0)
    scaler.step(opt)
    scaler.update()


def accelerate(scaler: Any, opt: Any, params: list[Tensor]) -> None:
    """Accelerate's AcceleratedOptimizer: it clips the model's parameters, and sees a skip by step not being called."""
    scaler.unscale_(opt)
    torch.nn.utils.clip_grad_norm_(params, 1.0)
    method, called = opt.step, []
    opt.step = lambda *args, **kwargs: (called.append(1), method(*args, **kwargs))[1]
    scale = scaler.get_scale()
    scaler.step(opt, None)
    scaler.update()
    del opt.step
    assert bool(called) == (scaler.get_scale() >= scale)


def _flagged(scaler: Any, opt: Any, params: list[Tensor]) -> None:
    """torch's found_inf protocol, which the wrapper honours where it is switched on."""
    opt._step_supports_amp_scaling = True
    plain(scaler, opt, params)


def _flagged_and_unscaled(scaler: Any, opt: Any, params: list[Tensor]) -> None:
    opt._step_supports_amp_scaling = True
    unscale_first(scaler, opt, params)


LOOPS = [
    (plain, None),
    (unscale_first, None),
    (lightning, 1.0),
    (accelerate, 1.0),
    (_flagged, None),
    (_flagged_and_unscaled, None),
]


@DRIVEN
@SCALERS
@pytest.mark.parametrize(("loop", "max_norm"), LOOPS)
@pytest.mark.parametrize("clear", ["none", "zeros", "model"])
@pytest.mark.parametrize("fused", [False, True])
def test_loops_unscale_once_and_skip_the_right_step(
    cls: Any, loop: Any, max_norm: float | None, clear: str, fused: bool
) -> None:
    params, opt, scaler = _driven(cls, fused=fused)
    skip, scales = (2, 5), []
    for step in range(7):
        if clear == "model":
            for p in params:
                p.grad = None
        else:
            opt.zero_grad(set_to_none=clear == "none")
        coefficients = _coefficients(step)
        if step in skip:
            coefficients[step % 2][0, 0] = math.inf if step == 2 else math.nan
        scaler.scale(linear_loss(params, coefficients)).backward()
        loop(scaler, opt, params)
        scales.append(scaler.get_scale())
        assert opt.step_was_skipped is (step in skip)
        names = [o.name for o in opt.overflow_report()]
        # Where one is nan torch's clip makes them all nan; torch's scaler has told nobody what was there before.
        if max_norm is not None and step == 5 and cls is Theirs:
            assert len(names) == len(params)
        else:
            assert names == ([f"group 0, param {step % 2}"] if step in skip else [])
    assert scales == [SCALE, SCALE, SCALE / 2, SCALE / 2, SCALE / 2, SCALE / 4, SCALE / 4]
    assert opt.skipped_steps == 2
    _assert_same(_all(params, opt), _reference(7, max_norm, skip, fused=fused))


@DRIVEN
@SCALERS
def test_accumulation_and_looking_at_param_groups_in_between(cls: Any) -> None:
    params, opt, scaler = _driven(cls)
    for step in range(3):
        opt.zero_grad()
        for _ in range(2):
            scaler.scale(linear_loss(params, _coefficients(step)) / 2).backward()
            assert opt.param_groups[0]["lr"] == 0.125
        plain(scaler, opt, params)
    _assert_same(_all(params, opt), _reference(3))


@DRIVEN
@SCALERS
def test_gradients_below_fp16_reach_the_masters(cls: Any) -> None:
    """1e-9 is 0 in FP16; scaled by 2**16 it is not, and it is unscaled in FP32."""
    param = torch.nn.Parameter(torch.ones(2).half())
    opt, scaler = MixedPrecisionOptimizer(SGD([param], lr=2.0**20)), cls("cpu")
    scaler.scale((param.float() * 2.0**-30).sum()).backward()
    scaler.unscale_(opt)
    (master,) = opt.master_params()
    assert master.grad.tolist() == [2.0**-30] * 2
    scaler.step(opt)
    assert master.tolist() == [1.0 - 2.0**-10] * 2 == param.tolist()


@DRIVEN
def test_after_unscaling_model_and_masters_share_gradients() -> None:
    params, opt, scaler = _driven(Theirs)
    scaler.scale(linear_loss(params, _coefficients(0))).backward()
    scaler.unscale_(opt)
    for param, master in zip(params, opt.master_params(), strict=True):
        assert param.grad is master.grad
    opt.zero_grad(set_to_none=False)
    assert [p.grad.dtype for p in params] == list(MIXED)
    opt.zero_grad()
    scaler.update()
    scaler.scale(linear_loss(params, _coefficients(0))).backward()
    assert [p.grad.dtype for p in params] == list(MIXED)


@DRIVEN
@SCALERS
def test_scaler_and_engine_may_take_turns(cls: Any) -> None:
    params, opt, scaler = _driven(cls)
    for step in range(4):
        opt.zero_grad()
        loss = linear_loss(params, _coefficients(step))
        if step % 2:
            opt.backward(loss)
            opt.step()
        else:
            scaler.scale(loss).backward()
            scaler.unscale_(opt)
            opt.clip_master_grads(1e9)
            scaler.step(opt)
            scaler.update()
    _assert_same(_all(params, opt), _reference(4))


@DRIVEN
@SCALERS
@pytest.mark.parametrize("scaling", [{"dynamic": True}, {"loss_scale": 128.0}, {"scaler": DynamicLossScaler()}])
@pytest.mark.parametrize("unscale", [True, False])
def test_two_scales_are_refused(cls: Any, scaling: dict[str, Any], unscale: bool) -> None:
    params = _model()
    opt, scaler = MixedPrecisionOptimizer(SGD(params, lr=1.0), **scaling), cls("cpu", init_scale=SCALE)
    scaler.scale(linear_loss(params, _coefficients(0))).backward()
    before = [p.detach().clone() for p in params]
    if unscale:
        scaler.unscale_(opt)
    with pytest.raises(RuntimeError, match="construct MixedPrecisionOptimizer without dynamic"):
        scaler.step(opt)
    _assert_same(params, before)


@DRIVEN
@SCALERS
def test_no_gradients_and_abandoned_gradients(cls: Any) -> None:
    params, opt, scaler = _driven(cls)
    scaler.scale(linear_loss(params, _coefficients(0))).backward()
    scaler.unscale_(opt)
    opt.zero_grad()  # finite gradients that nobody steps are no skip
    scaler.update()
    assert opt.skipped_steps == 0
    assert not opt.step_was_skipped
    scaler.scale(linear_loss(params, _coefficients(0))).backward()
    plain(scaler, opt, params)
    _assert_same(_all(params, opt), _reference(1))


@DRIVEN
@SCALERS
def test_asking_between_unscaling_and_the_step_changes_nothing(cls: Any) -> None:
    params, opt, scaler = _driven(cls)
    scaler.scale(linear_loss(params, _coefficients(0))).backward()
    scaler.unscale_(opt)
    assert not opt.step_was_skipped
    assert opt.overflow_report() == []
    scaler.step(opt)
    scaler.update()
    _assert_same(_all(params, opt), _reference(1))


@DRIVEN
@SCALERS
def test_a_skip_is_noticed_when_gradients_are_cleared(cls: Any) -> None:
    params, opt, scaler = _driven(cls)
    scaler.scale(linear_loss(params, [math.inf] * 4)).backward()
    plain(scaler, opt, params)
    opt.zero_grad()
    assert opt.step_was_skipped
    assert opt.skipped_steps == 1
    assert len(opt.overflow_report()) == 4


@pytest.mark.parametrize("found", [0.0, 1.0, 2.0])
def test_found_inf_of_the_protocol_is_obeyed(found: float) -> None:
    """Another rank, or another device, may have overflowed: what is found here is not all."""
    params, opt, _ = _driven(Ours)
    linear_loss(params, _coefficients(0)).backward()
    opt.grad_scale, opt.found_inf = None, torch.tensor(found)
    opt.step()
    del opt.grad_scale, opt.found_inf
    assert opt.step_was_skipped is bool(found)
    _assert_same(_all(params, opt), _reference(0 if found else 1))


def test_used_gradients_are_not_offered_again() -> None:
    params, opt, _ = _driven(Ours)
    opt.backward(linear_loss(params, _coefficients(0)))
    opt.step()
    assert opt.param_groups
    assert [p.grad.dtype for p in params] == list(MIXED)


@DRIVEN
def test_ours_clips_the_wrappers_masters() -> None:
    params, opt, scaler = _driven(Ours)
    for step in range(2):
        opt.zero_grad()
        scaler.scale(linear_loss(params, _coefficients(step))).backward()
        norm = scaler.clip_grad_norm_(opt, 1.0)
        exact = torch.cat([c.double().reshape(-1) for c in _coefficients(step)]).norm()
        assert float(norm) == pytest.approx(float(exact), rel=1e-6)
        assert float(torch.cat([m.grad.double().reshape(-1) for m in opt.master_params()]).norm()) == pytest.approx(1.0)
        scaler.step(opt)
        scaler.update()


@DRIVEN
@pytest.mark.parametrize("clips", [False, True])
def test_a_scale_that_follows_norms_is_that_of_fp32_parameters(clips: bool) -> None:
    scales: list[list[float]] = []
    for wraps in (False, True):
        params = _model() if wraps else [p.detach().float().requires_grad_() for p in _model()]
        opt: Any = SGD(params, lr=0.125)
        opt = MixedPrecisionOptimizer(opt) if wraps else opt
        scaler = Ours("cpu", init_scale=2.0**10, policy="headroom", growth_interval=2)
        scales.append([])
        for step in range(16):
            opt.zero_grad()
            scaler.scale(linear_loss(params, _coefficients(step))).backward()
            if clips:
                scaler.clip_grad_norm_(opt, 1.0)
            scaler.step(opt)
            scaler.update()
            scales[-1].append(scaler.get_scale())
    assert scales[0] == scales[1]
    assert 2.0**10 < scales[0][-1] == scales[0][-5] < 2.0**17, "without norms it grows eight times"


@DRIVEN
def test_ours_passes_closures_on() -> None:
    results = []
    for enabled in (True, False):
        params = _model((torch.float16, torch.float32))
        opt = MixedPrecisionOptimizer(LBFGS(params, lr=0.25, max_iter=3))
        scaler = Ours("cpu", init_scale=2.0**14, enabled=enabled)
        calls: list[float] = []

        def closure(params: Any = params, opt: Any = opt, scaler: Any = scaler, calls: Any = calls) -> Tensor:
            calls.append(scaler.get_scale())
            opt.zero_grad()
            loss = sum(((p.float() - 2.0) ** 2).sum() for p in params)
            scaler.scale(loss * (math.inf if calls[-1] > 2.0**11 else 1.0)).backward()
            return loss

        for _ in range(2):
            scaler.step(opt, closure)
            scaler.update()
        results.append(_all(params, opt))
    _assert_same(*results)


@DRIVEN
@SCALERS
def test_sparse_gradients_of_a_half_embedding(cls: Any) -> None:
    results = []
    for scaled in (True, False):
        table = torch.nn.Embedding(5, 2, sparse=True, dtype=torch.float16)
        with torch.no_grad():
            table.weight.copy_(values((5, 2), 3))
        opt = MixedPrecisionOptimizer(torch.optim.SparseAdam(table.parameters(), lr=0.125))
        scaler = cls("cpu", init_scale=256.0, enabled=scaled)
        for rows in ([1, 1, 2], [0, 4, 4]):
            opt.zero_grad()
            scaler.scale(table(torch.tensor(rows)).float().sum()).backward()
            scaler.step(opt)
            scaler.update()
        results.append([table.weight, *opt.master_params()])
    _assert_same(*results)


@DRIVEN
@pytest.mark.parametrize("way", [pickle, copy], ids=["pickle", "deepcopy"])
def test_copies_are_driven_too(way: Any) -> None:
    model = torch.nn.Linear(2, 1).half()
    opt, scaler = MixedPrecisionOptimizer(SGD(model.parameters(), lr=0.5)), Ours("cpu", init_scale=8.0)
    scaler.scale(model(torch.ones(1, 2).half()).sum()).backward()
    scaler.unscale_(opt)
    pair = (model, opt)
    model, opt = pickle.loads(pickle.dumps(pair)) if way is pickle else copy.deepcopy(pair)
    scaler.update()
    for p in model.parameters():
        p.grad = None
    before = [p.detach().clone() for p in model.parameters()]
    scaler.scale(model(torch.ones(1, 2).half()).sum()).backward()
    scaler.step(opt)
    _assert_same(list(model.parameters()), [(b.float() - 0.5).half() for b in before])


@DRIVEN
def test_schedulers_of_the_wrapped_optimizer_follow() -> None:
    params = _model()
    inner = SGD(params, lr=1.0)
    early = torch.optim.lr_scheduler.StepLR(inner, 1, gamma=0.5)
    opt, scaler = MixedPrecisionOptimizer(inner), Ours("cpu", init_scale=SCALE)
    late = torch.optim.lr_scheduler.StepLR(opt, 1, gamma=0.5)
    for grad, moved in ((math.nan, False), (1.0, True)):
        opt.zero_grad()
        scaler.scale(linear_loss(params, [grad] * 4)).backward()
        plain(scaler, opt, params)
        assert scaler.step_scheduler(early) is moved
        assert scaler.step_scheduler(late) is moved


@SCALERS
@pytest.mark.skipif(DRIVES, reason="before torch 2.10")
def test_an_older_torch_is_told_what_to_call(cls: Any) -> None:
    params, opt, scaler = _driven(cls)
    scaler.scale(linear_loss(params, _coefficients(0))).backward()
    with pytest.raises(RuntimeError, match=r"opt\.backward"):
        plain(scaler, opt, params)
