"""master_weights="split": skips, closures, hooks, memory, and who is refused."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import SGD

import fp16opt
from engine.checks import linear_loss, one_step, ones
from engine.split_cases import by_dtype, wrap
from fp16opt import MixedPrecisionOptimizer


def test_hooks_of_the_wrapped_optimizer_fire_once_and_see_gradients() -> None:
    params = [ones(5) for _ in range(4)]
    inner = SGD(params, lr=0.5)
    fired: list[str] = []
    inner.register_step_pre_hook(lambda opt, args, kwargs: fired.append("pre"))
    inner.register_step_post_hook(lambda opt, args, kwargs: fired.append("post"))

    def halves(opt: Any, args: Any, kwargs: Any) -> None:
        for group in opt.param_groups:
            for m in group["params"]:
                m.grad.mul_(0.5)

    inner.register_step_pre_hook(halves)
    opt = wrap(inner)
    opt.register_step_post_hook(lambda opt, args, kwargs: fired.append("outer"))
    one_step(opt, params, [1.0] * 4)
    assert fired == ["pre", "post", "outer"]
    assert [p[0].item() for p in params] == [0.75] * 4


@by_dtype
def test_masters_beyond_the_range_are_named_and_stay_finite(
    dtype: torch.dtype, caplog: pytest.LogCaptureFixture
) -> None:
    top = 65504.0 if dtype == torch.float16 else 3.3895e38
    p = nn.Parameter(torch.tensor([top, 1.0]).to(dtype))
    opt = wrap(SGD([p], lr=1.0), loss_scale=1.0, named_parameters=[("head.weight", p)])
    update = -40000.0 if dtype == torch.float16 else -1e36
    with caplog.at_level(logging.WARNING):
        one_step(opt, [p], [torch.tensor([update, 0.0])])
    assert "too large" in caplog.text
    assert "head.weight" in caplog.text
    assert torch.isinf(p[0])
    master = next(opt.master_params())
    assert torch.isfinite(master).all()
    assert float(master[0]) == pytest.approx(float(np.float32(top)) - update, rel=2.0**-8)
    one_step(opt, [p], [torch.tensor([-update, 0.0]) * 1.5])
    assert torch.isfinite(p).all()


class OneStepSize(SGD):
    """Scales by the norm of all gradients, as some optimizers do."""

    def step(self, closure: Any = None) -> Any:
        nn.utils.clip_grad_norm_([p for g in self.param_groups for p in g["params"]], 0.5)
        return super().step(closure)


def patched(params: list[nn.Parameter]) -> SGD:
    inner = SGD(params, lr=0.1)
    inner.step = lambda closure=None: None  # type: ignore[method-assign, assignment]
    return inner


@pytest.mark.parametrize(
    ("make", "kwargs", "match"),
    [
        (lambda p: torch.optim.LBFGS(p), {}, r"LBFGS is not exactly SGD, .*a registered class. Use .*\"full\""),
        (
            lambda p: SGD(p, lr=0.1),
            {"closure": "reevaluate"},
            r'with closure="reevaluate" .* itself. Use .*"full"',
        ),
        (lambda p: OneStepSize(p, lr=0.1), {}, r"OneStepSize is not exactly SGD, .*a registered class. Use .*\"full\""),
        (lambda p: SGD(p, lr=0.1), {"fused_step": False}, r'the one-pass step, .*: fused_step=False. Use .*"full"'),
        (lambda p: SGD(p, lr=0.1, differentiable=True), {}, "group 0 has differentiable=True"),
        (lambda p: SGD(p, lr=torch.tensor(0.1, requires_grad=True)), {}, "an lr that is .* requires grad"),
        (lambda p: SGD([*p, ones(2, torch.float64)]), {}, "parameter 'group 0, param 1' is float64"),
        (lambda p: SGD([*p, nn.Parameter(torch.ones(4, 4).half()[:, :2])]), {}, "param 1' is not dense"),
        (patched, {}, "the step of this SGD was replaced"),
        (lambda p: SGD(p, lr=0.1), {"on_model_write": "ignore"}, r'on_model_write="ignore" does not go with'),
        (lambda p: SGD(p, lr=0.1), {"master_weights": "half"}, r"master_weights.*'half'"),
    ],
)
def test_refusals(make: Any, kwargs: dict[str, Any], match: str) -> None:
    p = ones(3)
    inner = make([p])
    with pytest.raises(ValueError, match=match):
        MixedPrecisionOptimizer(inner, **{"master_weights": "split", **kwargs})
    assert inner.param_groups[0]["params"][0] is p


@pytest.mark.parametrize("mode", ["full", "split"])
def test_what_a_pre_hook_returns_is_looked_at(mode: str) -> None:
    p = ones(2)
    inner = SGD([p], lr=0.5)
    handle = inner.register_step_pre_hook(lambda opt, args, kwargs: 3)
    opt = wrap(inner, mode)
    opt.backward(linear_loss([p], [1.0]))
    with pytest.raises(RuntimeError, match="must return None or a tuple"):
        opt.step()
    assert p.tolist() == [1.0, 1.0]
    handle.remove()
    opt.step()
    assert p.tolist() == [0.5, 0.5]


def test_a_closure_that_raises_under_a_grad_scaler_comes_through() -> None:
    """A GradScaler keeps what a step may change; placeholders hold nothing to keep."""
    p = ones(3)
    opt = wrap(SGD([p], lr=0.5), loss_scale=1.0)
    scaler = fp16opt.GradScaler("cpu", init_scale=8.0)

    def raises() -> torch.Tensor:
        raise LookupError("no batch")

    with pytest.raises(LookupError, match="no batch"):
        scaler.step(opt, raises)
    opt.zero_grad()
    scaler.scale(linear_loss([p], [1.0])).backward()
    scaler.step(opt)
    assert p.tolist() == [0.5] * 3


def test_a_sparse_gradient_is_refused_before_a_write() -> None:
    table = nn.Parameter(torch.ones(5, 3).bfloat16())
    opt = wrap(SGD([table], lr=0.5), named_parameters=[("table", table)])
    opt.backward(nn.functional.embedding(torch.tensor([1, 3, 1]), table, sparse=True).float().sum())
    with pytest.raises(RuntimeError, match=r"the gradient of 'table' is sparse. With master_weights=\"split\""):
        opt.step()
    assert table.tolist() == [[1.0] * 3] * 5
    opt.zero_grad()
    one_step(opt, [table], [1.0])
    assert table[0, 0].item() == 0.5
