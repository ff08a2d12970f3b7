"""Every kind of parameter and gradient: tied, frozen, unused, empty, 0-dim, channels-last, strided,
sparse."""

from __future__ import annotations

import pytest
import torch
from specs import CASES, OptimizerCase, params_by_class, params_of
from torch import nn
from torch.optim import SGD, AdamW

from engine import recipes
from engine.checks import (
    assert_model_is_rounded_masters,
    assert_same,
    assert_same_bits,
    by_step,
    normal,
    one_step,
    parameters,
)
from fp16opt import MixedPrecisionOptimizer

pytestmark = by_step

DENSE = [c for c in CASES if c.kind in ("dense", "matrix")]
FUSED = [c for c in CASES if c.id.endswith("-fused")]


@pytest.mark.parametrize("case", params_by_class(DENSE))
def test_grad_none_untouched_under_weight_decay(case: OptimizerCase) -> None:
    """A param whose grad is None is not touched: no decay, no momentum, no step count, no state."""
    params = parameters(case.shapes, torch.float16)
    unused = parameters(case.shapes[:1], torch.float16, seed=3)[0]
    opt = MixedPrecisionOptimizer(case.make([*params, unused]), loss_scale=8.0)
    for group in opt.param_groups:
        if "weight_decay" in group:
            group["weight_decay"] = 0.25
    master = list(opt.master_params())[-1]
    weight, high, state = unused.detach().clone(), master.detach().clone(), dict(opt.state.get(master, {}))
    for k in range(3):
        grads = [normal(p.shape, torch.float32, 10 * k + i) for i, p in enumerate(params)]
        one_step(opt, [*params, unused], [*grads, None])
    assert_same_bits(unused, weight)
    assert_same_bits(master, high)
    assert master.grad is None
    assert unused.grad is None
    assert_same(dict(opt.state.get(master, {})), state, "state of the unused param")
    assert any(not torch.equal(p, q) for p, q in zip(params, parameters(case.shapes, torch.float16), strict=True))


@pytest.mark.parametrize("case", params_of(FUSED))
def test_first_gradient_that_arrives_late(case: OptimizerCase) -> None:
    """torch's fused momentum SGD fails on this by itself (numerics.md section 7); it must work here."""
    p, late = parameters([(40,), (33,)])
    opt = MixedPrecisionOptimizer(case.make([p, late]), loss_scale=8.0)
    alone = parameters([(40,), (33,)])[1]
    only = MixedPrecisionOptimizer(case.make([alone]), loss_scale=8.0)
    g = [normal((40,), torch.float32, 1), normal((33,), torch.float32, 2)]
    one_step(opt, [p, late], [g[0], None])
    for k in range(3):
        one_step(opt, [p, late], [g[0], g[1] * (k + 1)])
        one_step(only, [alone], [g[1] * (k + 1)])
    assert_same_bits(late, alone)
    assert_same_bits(list(opt.master_params())[1], next(iter(only.master_params())))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_empty_and_zero_dim_params(dtype: torch.dtype) -> None:
    empty = nn.Parameter(torch.zeros((0, 3), dtype=dtype))
    scalar = nn.Parameter(torch.tensor(1.0, dtype=dtype))
    opt = MixedPrecisionOptimizer(SGD([empty, scalar], lr=0.5, momentum=0.5), loss_scale=8.0)
    one_step(opt, [empty, scalar], [1.0, 1.0])
    assert_same_bits(scalar, torch.tensor(0.5, dtype=dtype))
    assert empty.shape == (0, 3)
    assert not bool(opt.step_was_skipped)
    masters = list(opt.master_params())
    assert masters[0].shape == (0, 3)
    assert masters[1].shape == ()
    assert_model_is_rounded_masters(opt)


def test_only_empty_params() -> None:
    empty = nn.Parameter(torch.zeros(0, dtype=torch.float16))
    opt = MixedPrecisionOptimizer(SGD([empty], lr=0.5), dynamic=True)
    opt.backward(empty.float().sum())
    assert float(opt.clip_master_grads(1.0)) == 0.0
    opt.step()
    assert not bool(opt.step_was_skipped)
    opt.load_state_dict(opt.state_dict())


def _strided(kind: str) -> torch.Tensor:
    base = normal((2, 3, 4, 5), torch.float16, 4)
    return {
        "channels_last": base.to(memory_format=torch.channels_last),
        "transposed": base.reshape(6, 20).t(),
        "every_second": base.reshape(120)[::2],
        "permuted": base.permute(2, 0, 3, 1),
        "offset_view": base.reshape(120)[7:],
    }[kind]


@pytest.mark.parametrize("impl", ["foreach", "fused"])
@pytest.mark.parametrize("kind", ["channels_last", "transposed", "every_second", "permuted", "offset_view"])
def test_strided_params(kind: str, impl: str) -> None:
    """Masters keep shape, and strides where the param is dense; gradients of any layout land where they
    belong."""
    values = _strided(kind)
    p = nn.Parameter(values)
    assert p.stride() == values.stride()
    plain = nn.Parameter(values.detach().clone(memory_format=torch.contiguous_format).contiguous())
    opt = recipes.wrapped_step(AdamW([p], lr=0.1, **{impl: True}), loss_scale=8.0)
    reference = recipes.wrapped_step(AdamW([plain], lr=0.1, foreach=False), loss_scale=8.0)
    (m,) = opt.master_params()
    assert m.shape == p.shape
    if kind not in ("every_second",):
        assert m.stride() == p.stride()
    for k in range(3):
        g = normal(tuple(p.shape), torch.float32, 30 + k)
        one_step(opt, [p], [g])
        one_step(reference, [plain], [g])
        assert m.grad.stride() == m.stride(), "torch's fused steps are wrong where strides differ"
    (n,) = reference.master_params()
    if impl == "foreach":
        assert_same_bits(m, n)
    else:
        # numerics.md section 6: variants lie within 1.5e-5 * lr or 2 ulp of each other after 100 steps.

        assert float((m - n).detach().abs().max()) <= max(1.5e-6, 2 * 2.0**-23 * float(n.abs().max()))
    assert_model_is_rounded_masters(opt)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("make_grad", ["expanded", "transposed", "channels_last"])
def test_gradients_whose_strides_differ_from_the_params(make_grad: str, dtype: torch.dtype) -> None:
    """The user's own .grad, in any layout, is taken element by element."""
    values = normal((2, 4, 4, 8), torch.float32, 8)
    g = {
        "expanded": torch.tensor(0.5, dtype=dtype).expand(2, 4, 4, 8),
        "transposed": normal((2, 4, 8, 4), torch.float16, 9).transpose(2, 3),
        "channels_last": normal((2, 4, 4, 8), torch.float16, 9).to(memory_format=torch.channels_last),
    }[make_grad].to(dtype)
    assert g.stride() != values.stride()
    p = nn.Parameter(values.to(dtype))
    start = p.detach().float().clone()
    opt = MixedPrecisionOptimizer(SGD([p], lr=0.5, fused=True), loss_scale=4.0)
    p.grad = g
    opt.update_master_grads()
    opt.step()
    (m,) = opt.master_params()
    assert_same_bits(m, start - g.float() / 4 * 0.5)
    assert_same_bits(p, m.to(dtype))
