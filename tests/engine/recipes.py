"""The main differential checks, as functions of `make`, so that the harness can run them on broken fakes too.

`make(inner, **kwargs)` wraps a torch optimizer; kwargs are either `loss_scale=` (static) or arguments of the
dynamic scaler.
"""

from __future__ import annotations

import inspect
import io
from collections.abc import Callable
from typing import Any

import oracle
import torch
from specs import OptimizerCase

from engine.checks import (
    Problem,
    Twin,
    array,
    assert_model_is_rounded_masters,
    assert_same,
    assert_same_bits,
    flatten,
    one_step,
    ones,
    parameters,
    snapshot,
    train,
)

Make = Callable[..., Any]
MIXED = (torch.float16, torch.bfloat16, torch.float16, torch.float32)


def engine(inner: torch.optim.Optimizer, **kwargs: Any) -> Any:
    """The real thing as a `make`: engine arguments pass through, the others go to the dynamic scaler."""
    import fp16opt

    known = inspect.signature(fp16opt.MixedPrecisionOptimizer).parameters
    own = {k: kwargs.pop(k) for k in list(kwargs) if k in known}
    if kwargs:
        own["scaler"] = fp16opt.DynamicLossScaler(**kwargs)
    return fp16opt.MixedPrecisionOptimizer(inner, **own)


def wrapped_step(inner: torch.optim.Optimizer, **kwargs: Any) -> Any:
    """The real thing with the wrapped optimizer's own step: for comparisons with torch's bits."""
    return engine(inner, fused_step=False, **kwargs)


def check_updates_exact_through_scale_growth(make: Make) -> None:
    p = torch.nn.Parameter(torch.zeros(3, dtype=torch.float16))
    opt = make(torch.optim.SGD([p], lr=1.0), init_scale=8.0, growth_interval=3)
    scaler = oracle.DynamicScaler(scale=8.0, growth_interval=3)
    for k in range(1, 31):
        one_step(opt, [p], [1.0])
        scaler.update(False)
        assert_same_bits(p, array([-k, -k, -k]), f"weight after step {k}")
        if float(opt.loss_scale) != scaler.scale:
            raise AssertionError(f"scale after step {k}: {float(opt.loss_scale)}, wanted {scaler.scale}")
    if scaler.scale != 8.0 * 2**10:
        raise AssertionError("the scale did not grow ten times")


def check_masters_equal_plain_fp32_stepping(
    make: Make, case: OptimizerCase, scale: float, steps: int = 6, dtypes: Any = torch.float16
) -> None:
    params = parameters(case.shapes, dtypes)
    problem = Problem(params, sparse=case.kind == "sparse")
    twin = Twin(params, case.make, problem, scale)
    start = [p.detach().clone() for p in params]
    opt = make(case.make(params), loss_scale=scale)
    for k in range(steps):
        train(opt, params, problem, closure=case.kind == "closure")
        twin.step()
        for i, (m, t) in enumerate(zip(opt.master_params(), twin.masters, strict=True)):
            assert_same_bits(m, t, f"{case.id} step {k} master {i}")
            if m.numel() and not torch.isfinite(m).all():
                raise AssertionError(f"{case.id} step {k}: the problem diverged, nothing is compared")
        assert_model_is_rounded_masters(opt)
    if all(torch.equal(a, b) for a, b in zip(start, params, strict=True)):
        raise AssertionError(f"{case.id}: the weights never moved")


def _run(
    opt: Any,
    params: list[Any],
    problem: Problem,
    case: OptimizerCase,
    first: int,
    last: int,
    overflow_at: int | None,
) -> None:
    for k in range(first, last):
        bad = k == overflow_at and case.kind != "closure"
        train(opt, params, problem, closure=case.kind == "closure", factor=float("inf") if bad else 1.0)


def check_resume_bit_exact(
    make: Make,
    case: OptimizerCase,
    settings: dict[str, Any],
    model_first: bool | None,
    steps: int = 4,
    dtypes: Any = MIXED,
) -> None:
    """N steps, save, load into fresh objects, N steps: the same bits as 2N steps. One step overflows where
    the
    scaler is dynamic. model_first: load the model before or after the optimizer; None: do not load it at
    all."""
    overflow_at = 2 if "init_scale" in settings else None
    params = parameters(case.shapes, dtypes)
    problem = Problem(params, sparse=case.kind == "sparse")
    start = [p.detach().clone() for p in params]
    opt = make(case.make(params), **settings)
    _run(opt, params, problem, case, 0, steps, overflow_at)
    buffer = io.BytesIO()
    torch.save({"opt": opt.state_dict(), "model": [p.detach() for p in params]}, buffer)
    _run(opt, params, problem, case, steps, 2 * steps, overflow_at)

    buffer.seek(0)
    saved = torch.load(buffer, weights_only=True)
    before = flatten(saved)
    fresh = parameters(case.shapes, dtypes, seed=5)
    resumed = make(case.make(fresh), **settings)

    def load_model() -> None:
        with torch.no_grad():
            for p, value in zip(fresh, saved["model"], strict=True):
                p.copy_(value)

    if model_first is True or (model_first is None and dtypes != torch.float16):
        load_model()
    resumed.load_state_dict(saved["opt"])
    if model_first is False:
        load_model()
    _run(resumed, fresh, problem, case, steps, 2 * steps, overflow_at)
    if all(torch.equal(a, b) for a, b in zip(start, params, strict=True)):
        raise AssertionError(f"{case.id}: the weights never moved, nothing is compared")
    for i, (got, want) in enumerate(zip(fresh, params, strict=True)):
        assert_same_bits(got, want, f"{case.id} resumed param {i}")
    assert_same(snapshot(resumed, fresh, scaler=True), snapshot(opt, params, scaler=True), f"{case.id} resumed ")
    assert_same(saved, before, "the loaded checkpoint was edited by training")


def check_weight_decay_is_decoupled(make: Make) -> None:
    """AdamW on a zero gradient shrinks the weight by exactly lr * wd and leaves the moments at zero."""
    p = ones(3)
    opt = make(torch.optim.AdamW([p], lr=0.5, weight_decay=0.5), loss_scale=8.0)
    one_step(opt, [p], [0.0])
    assert_same_bits(p, array([0.75] * 3), "decayed weight")
    assert_same_bits(next(iter(opt.master_params())), array([0.75] * 3, torch.float32), "decayed master")


def check_overflow_leaves_everything_untouched(make: Make) -> None:
    p, q = ones(3), ones(2)
    opt = make(torch.optim.SGD([p, q], lr=0.5, momentum=0.5), init_scale=8.0)
    one_step(opt, [p, q], [1.0, 2.0])
    before = snapshot(opt, [p, q])
    one_step(opt, [p, q], [array([1.0, float("nan"), 1.0], torch.float32), 1.0])
    assert_same(snapshot(opt, [p, q]), before, "after the skipped step ")
    if not bool(opt.step_was_skipped) or float(opt.loss_scale) != 4.0:
        raise AssertionError("the skip was not reported, or the scale did not back off")
