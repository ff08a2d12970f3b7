"""pickle and deepcopy of model and optimizer together; fp32_state_dict."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from specs import OptimizerCase, one_per_class, params_of
from torch import nn
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import StepLR

from engine import recipes
from engine.checks import (
    Problem,
    array,
    assert_model_is_rounded_masters,
    assert_same,
    assert_same_bits,
    by_step,
    linear_loss,
    one_step,
    ones,
    parameters,
    snapshot,
    train,
)
from fp16opt import MixedPrecisionOptimizer

pytestmark = by_step


def _by_torch_save(obj: Any) -> Any:
    buffer = io.BytesIO()
    torch.save(obj, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


COPIES: list[Callable[[Any], Any]] = [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o)), _by_torch_save]
by_copy = pytest.mark.parametrize("copying", COPIES, ids=["deepcopy", "pickle", "torch_save"])
HELD = nn.ParameterList


@by_copy
@pytest.mark.parametrize("case", params_of(one_per_class()))
def test_copies_of_model_and_optimizer_continue_alike_and_apart(case: OptimizerCase, copying: Callable) -> None:
    model = HELD(parameters(case.shapes, recipes.MIXED))
    problem = Problem(list(model), sparse=case.kind == "sparse")
    closure = case.kind == "closure"
    opt = recipes.engine(case.make(list(model)), init_scale=64.0, growth_interval=2)
    for _ in range(2):
        train(opt, list(model), problem, closure=closure)
    model2, opt2 = copying((model, opt))
    assert [id(p) for p in opt2.model_params()] == [id(p) for p in model2], "the copy steps other params"
    before = snapshot(opt, list(model), scaler=True)
    assert_same(snapshot(opt2, list(model2), scaler=True), before)
    for _ in range(3):
        train(opt2, list(model2), problem, closure=closure)
    assert_same(snapshot(opt, list(model), scaler=True), before, "the original moved with its copy ")
    for _ in range(3):
        train(opt, list(model), problem, closure=closure)
    assert_same(snapshot(opt2, list(model2), scaler=True), snapshot(opt, list(model), scaler=True))
    assert int(opt2.skipped_steps) == int(opt.skipped_steps)


@by_copy
@pytest.mark.parametrize("when", ["before_wrapping", "on_the_wrapper"])
def test_copies_after_a_scheduler_patched_step(when: str, copying: Callable) -> None:
    model = HELD([ones()])
    inner = SGD(model, lr=0.5)
    if when == "before_wrapping":
        StepLR(inner, 1)
    opt = MixedPrecisionOptimizer(inner, loss_scale=8.0)
    if when == "on_the_wrapper":
        StepLR(opt, 1)
    one_step(opt, list(model), [0.5])
    model2, opt2 = copying((model, opt))
    one_step(opt2, list(model2), [0.5])
    assert_same_bits(model2[0], array([0.5] * 4))
    assert_same_bits(model[0], array([0.75] * 4))
    one_step(opt, list(model), [0.5])
    assert_same_bits(model[0], array([0.5] * 4))


@by_copy
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("order", ["model first", "optimizer first"])
def test_masters_of_a_copy_lie_on_the_copied_weights_memory(copying: Callable, dtype: torch.dtype, order: str) -> None:
    """With one version counter, and apart from the original's."""
    model = HELD([ones(4, dtype), ones(4, torch.float16)])
    opt = MixedPrecisionOptimizer(SGD(model, lr=0.5, momentum=0.5), loss_scale=8.0)
    one_step(opt, list(model), [0.5, 0.5])
    if order == "model first":
        model2, opt2 = copying((model, opt))
    else:
        opt2, model2 = copying((opt, model))
    for weights, one in ((model, opt), (model2, opt2)):
        wide, half = one.master_params()
        assert wide is not weights[0]
        assert wide.data_ptr() == weights[0].data_ptr()
        assert half.data_ptr() != weights[1].data_ptr()
        assert one.state[weights[0]] is one.state[wide]
        with torch.no_grad():
            weights[0].add_(1.0)
            assert wide._version == weights[0]._version
            assert_same_bits(wide, weights[0])
            wide.sub_(1.0)
            assert wide._version == weights[0]._version
    assert model[0].data_ptr() != model2[0].data_ptr()
    one_step(opt2, list(model2), [0.5, 0.5])
    assert_same_bits(model2[0], array([0.375] * 4, dtype))
    assert_same_bits(model[0], array([0.75] * 4, dtype))


@by_copy
def test_copies_with_hooks(copying: Callable) -> None:
    model = HELD([ones()])
    opt = MixedPrecisionOptimizer(SGD(model, lr=0.5), loss_scale=8.0)
    fired: list[int] = []
    opt.register_step_pre_hook(lambda *_: fired.append(1))
    opt.optimizer.register_step_post_hook(lambda *_: fired.append(2))
    model2, opt2 = copying((model, opt))
    one_step(opt2, list(model2), [0.5])
    assert_same_bits(model2[0], array([0.75] * 4))
    fired.clear()
    one_step(opt, list(model), [0.5])
    assert fired == [1, 2]


@by_copy
def test_copies_keep_settings(copying: Callable) -> None:
    model = HELD([ones()])
    settings = {"grad_accumulation": "fp32", "on_model_write": "error", "named_parameters": [("a", model[0])]}
    opt = recipes.engine(AdamW(model, lr=0.5), init_scale=8.0, **settings)
    opt.backward(linear_loss(model, [0.5]))
    model, opt = copying((model, opt))
    assert (opt.grad_accumulation, opt.loss_scale, model[0].grad) == ("fp32", 8.0, None)
    model[0].data.fill_(3.0)
    with pytest.raises(RuntimeError, match=r"\ba\b"):
        opt.state_dict()


@by_copy
def test_copies_keep_the_overflow_report_and_counts(copying: Callable) -> None:
    model = HELD([ones()])
    opt = recipes.engine(SGD(model, lr=0.5), init_scale=8.0, named_parameters=[("w", model[0])])
    one_step(opt, list(model), [float("nan")])
    _, opt2 = copying((model, opt))
    assert bool(opt2.step_was_skipped)
    assert int(opt2.skipped_steps) == 1
    assert opt2.overflow_report() == opt.overflow_report()
    assert opt2.overflow_report()[0].name == "w"


# ---- fp32_state_dict


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(3, 2, bias=False, dtype=torch.float16)
        self.head = nn.Linear(3, 2, dtype=torch.bfloat16)
        self.head.weight = self.embed.weight
        self.norm = nn.LayerNorm(2)
        self.register_buffer("running", torch.full((2,), 0.5, dtype=torch.float16))
        self.register_buffer("count", torch.tensor(7))


def test_fp32_state_dict_has_masters_under_every_tied_name_and_buffers_as_they_are() -> None:
    model = Tied()
    with torch.no_grad():
        model.embed.weight.fill_(1.0)
    opt = MixedPrecisionOptimizer(SGD(model.parameters(), lr=2.0**-13), loss_scale=8.0)
    params = list(model.parameters())
    one_step(opt, params, [1.0] * len(params))
    out = opt.fp32_state_dict(model)
    assert list(out) == list(model.state_dict())
    low = torch.full((2, 3), 1 - 2.0**-13)
    assert_same_bits(out["embed.weight"], low)
    assert_same_bits(out["head.weight"], low)
    masters = dict(zip([id(p) for p in opt.model_params()], opt.master_params(), strict=True))
    assert_same_bits(out["head.bias"], masters[id(model.head.bias)].detach())
    assert_same_bits(out["norm.weight"], model.norm.weight)
    assert_same_bits(out["running"], model.running)
    assert_same_bits(out["count"], model.count)
    wide = Tied().float()
    wide.load_state_dict(out)
    assert_same_bits(wide.head.weight, low)
    assert_same_bits(model.embed.weight, low.half())


def test_fp32_state_dict_of_params_that_are_not_in_the_optimizer() -> None:
    model = nn.ModuleDict({"in": nn.Linear(2, 1, dtype=torch.float16), "out": nn.Linear(2, 1, dtype=torch.float16)})
    opt = MixedPrecisionOptimizer(SGD(model["in"].parameters(), lr=0.5))
    out = opt.fp32_state_dict(model)
    assert out["in.weight"].dtype == torch.float32
    assert_same_bits(out["out.weight"].float(), model["out"].weight.detach().float())


def test_fp32_state_dict_changes_nothing_and_needs_a_module() -> None:
    p = ones()
    model = nn.Module()
    model.p = p
    opt = MixedPrecisionOptimizer(AdamW([p], lr=0.1), loss_scale=8.0)
    one_step(opt, [p], [1.0])
    before = snapshot(opt, [p], scaler=True)
    opt.fp32_state_dict(model)
    assert_same(snapshot(opt, [p], scaler=True), before)
    with pytest.raises(TypeError, match=r"(?i)module"):
        opt.fp32_state_dict({"p": p})
    assert_model_is_rounded_masters(opt)
