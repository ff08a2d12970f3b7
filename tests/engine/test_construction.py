"""Construction: what is accepted, what is refused by name, and that nothing is stepped or shared."""

from __future__ import annotations

import pytest
import torch
from specs import CASES, ENGINE_ERRORS, REFUSED_DTYPES, ErrorCase, OptimizerCase, one_per_class, params_of
from torch import nn
from torch.optim import SGD, AdamW

from engine.checks import (
    array,
    assert_model_is_rounded_masters,
    assert_same,
    assert_same_bits,
    flatten,
    normal,
    one_step,
    ones,
    parameters,
)
from fp16opt import DynamicLossScaler, MixedPrecisionOptimizer, StaticLossScaler


@pytest.mark.parametrize("case", params_of(CASES))
def test_no_step_at_construction(case: OptimizerCase) -> None:
    params = parameters(case.shapes, torch.float16)
    before = [p.detach().clone() for p in params]
    opt = MixedPrecisionOptimizer(case.make(params), loss_scale=8.0)
    for p, m, was in zip(params, opt.master_params(), before, strict=True):
        assert_same_bits(p, was)
        assert_same_bits(m, was.float())
        assert p.grad is None
        assert m.grad is None
    fresh = case.make([nn.Parameter(b.float()) for b in before])
    assert_same(
        [dict(opt.state[m]) for m in opt.master_params() if m in opt.state],
        [dict(fresh.state[p]) for g in fresh.param_groups for p in g["params"] if p in fresh.state],
        "state after construction",
    )


@pytest.mark.parametrize("case", [pytest.param(c, id=c.id) for c in ENGINE_ERRORS])
def test_wrong_argument_is_refused_by_name(case: ErrorCase) -> None:
    p = ones()
    inner = SGD([p], lr=0.1)
    before = flatten(inner.state_dict())
    with pytest.raises(case.error, match=case.match):
        MixedPrecisionOptimizer(inner, **case.kwargs)
    assert inner.param_groups[0]["params"][0] is p, "a refused construction replaced the params"
    assert_same(inner.state_dict(), before)


@pytest.mark.parametrize("pair", ["dynamic+scaler", "loss_scale+scaler", "dynamic+loss_scale"])
def test_two_of_three_scaler_arguments_are_refused_and_both_are_named(pair: str) -> None:
    values = {"dynamic": True, "loss_scale": 4.0, "scaler": DynamicLossScaler()}
    names = pair.split("+")
    with pytest.raises(ValueError, match=names[0]) as err:
        MixedPrecisionOptimizer(SGD([ones()], lr=0.1), **{n: values[n] for n in names})
    assert all(n in str(err.value) for n in names)


@pytest.mark.parametrize("wrong", [None, 3, [ones()], nn.Linear(1, 1)], ids=["none", "int", "params", "module"])
def test_wrapping_something_that_is_no_optimizer_is_a_type_error(wrong: object) -> None:
    with pytest.raises(TypeError, match=r"(?i)optimizer"):
        MixedPrecisionOptimizer(wrong)


def test_loss_scaler_kinds() -> None:
    plain = MixedPrecisionOptimizer(SGD([ones()], lr=0.1))
    assert isinstance(plain.scaler, StaticLossScaler)
    assert float(plain.loss_scale) == 1.0
    static = MixedPrecisionOptimizer(SGD([ones()], lr=0.1), loss_scale=32)
    assert isinstance(static.scaler, StaticLossScaler)
    assert float(static.loss_scale) == 32.0
    dynamic = MixedPrecisionOptimizer(SGD([ones()], lr=0.1), dynamic=True)
    assert isinstance(dynamic.scaler, DynamicLossScaler)
    assert float(dynamic.loss_scale) == 2.0**16
    own = DynamicLossScaler(init_scale=4.0)
    assert MixedPrecisionOptimizer(SGD([ones()], lr=0.1), scaler=own).scaler is own


@pytest.mark.parametrize("dtype", REFUSED_DTYPES, ids=str)
@pytest.mark.parametrize("named", [False, True], ids=["unnamed", "named"])
def test_unsupported_param_dtype_is_refused_by_name(dtype: torch.dtype, named: bool) -> None:
    bad = nn.Parameter(torch.zeros(2).to(dtype), requires_grad=dtype.is_complex)
    good = ones()
    inner = SGD([{"params": [good]}, {"params": [ones(), bad]}], lr=0.1)
    names = [("fine", good), ("layer.weight", bad)] if named else None
    with pytest.raises((TypeError, ValueError)) as err:
        MixedPrecisionOptimizer(inner, named_parameters=names)
    text = str(err.value)
    assert f"parameter {'layer.weight' if named else 'group 1, param 1'!r}: expected" in text
    assert str(dtype).removeprefix("torch.") in text
    assert inner.param_groups[0]["params"][0] is good, "the first group was already replaced"


@pytest.mark.parametrize("case", params_of(one_per_class()))
def test_state_of_a_used_optimizer_is_carried_over_in_fp32(case: OptimizerCase) -> None:
    if case.kind == "closure":
        pytest.skip("LBFGS keeps flat vectors of all parameters; its own test is below")
    params = parameters(case.shapes, torch.bfloat16)
    inner = case.make(params)
    for k in range(2):
        for i, p in enumerate(params):
            g = normal(p.shape, torch.bfloat16, 10 * k + i)
            p.grad = g.to_sparse(1) if case.kind == "sparse" else g
        inner.step()
    was = [{k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in inner.state[p].items()} for p in params]
    opt = MixedPrecisionOptimizer(inner, loss_scale=4.0)
    assert not any(p in inner.state for p in params), "state is still kept for the 16-bit params"
    for m, old in zip(opt.master_params(), was, strict=True):
        new = opt.state.get(m, {})
        assert new.keys() == old.keys()
        for key, value in old.items():
            if isinstance(value, torch.Tensor) and key != "step":
                assert_same_bits(new[key], value.float(), f"{case.id} {key}")
            else:
                assert float(new[key]) == float(value)


def test_state_of_a_used_lbfgs_is_carried_over_in_fp32() -> None:
    p = nn.Parameter(array([1.0, 2.0, 3.0]))
    inner = torch.optim.LBFGS([p], lr=0.25, max_iter=2)
    target = array([0.5, 0.5, 0.5], torch.float32)

    def closure() -> torch.Tensor:
        inner.zero_grad()
        loss = ((p.float() - target) ** 2).sum()
        loss.backward()
        return loss

    inner.step(closure)
    opt = MixedPrecisionOptimizer(inner, loss_scale=4.0)
    (m,) = opt.master_params()
    flat = [t for t in flatten(dict(opt.state[m])).values() if isinstance(t, tuple)]
    assert flat
    assert all(dtype != "torch.float16" for dtype, _, _ in flat)

    def wrapped() -> torch.Tensor:
        opt.zero_grad()
        loss = ((p.float() - target) ** 2).sum()
        opt.backward(loss)
        return loss

    far = float((m - target).abs().max())
    for _ in range(10):
        opt.step(wrapped)
    assert float((m - target).detach().abs().max()) < far / 4
    assert_model_is_rounded_masters(opt)


@pytest.mark.parametrize("kind", [torch.float16, torch.float32], ids=str)
def test_construction_copies_state_so_that_training_never_edits_a_loaded_checkpoint(kind: torch.dtype) -> None:
    """torch keeps tensors whose dtype already fits: they alias the checkpoint."""
    q = ones(4, kind)
    inner = AdamW([q], lr=0.1)
    moments = {"step": torch.tensor(3.0), "exp_avg": torch.full_like(q, 0.5), "exp_avg_sq": torch.full_like(q, 0.25)}
    loaded = {**inner.state_dict(), "state": {0: moments}}
    before = flatten(loaded)
    inner.load_state_dict(loaded)
    one_step(MixedPrecisionOptimizer(inner, loss_scale=8.0), [q], [0.5])
    assert_same(loaded, before)


def test_construction_does_not_touch_the_models_weights_or_grads() -> None:
    params = parameters([(5,), (2, 3)], (torch.float16, torch.float32))
    for p in params:
        p.grad = torch.full_like(p, 0.5)
    before = [p.detach().clone() for p in params]
    pointers = [p.data_ptr() for p in params]
    MixedPrecisionOptimizer(SGD(params, lr=0.1), dynamic=True)
    for p, was, pointer in zip(params, before, pointers, strict=True):
        assert_same_bits(p, was)
        assert p.data_ptr() == pointer
        assert_same_bits(p.grad, torch.full_like(p, 0.5))
