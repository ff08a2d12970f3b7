"""Optimizers of well-known packages, unchanged, inside the wrapper: bit-equal to plain FP32 stepping,
resumable.

The packages are pinned in the project's test requirements; where one is missing the test is skipped with a
reason,
and `test_at_least_two_packages_are_there` fails where FP16OPT_REQUIRE_THIRD_PARTY=1 says that they must be
there.
"""

from __future__ import annotations

import copy
import importlib.util
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from engine import recipes
from engine.checks import (
    Problem,
    assert_model_is_rounded_masters,
    assert_same,
    linear_loss,
    one_step,
    parameters,
    snapshot,
    train,
)

from fp16opt import MixedPrecisionOptimizer

SHAPES = [(8, 9), (16,), (4, 3, 3, 3)]


@dataclass(frozen=True)
class Package:
    """One optimizer class of a package, with the arguments that `specs.OptimizerCase` has, so that recipes
    take it."""

    id: str
    module: str
    cls: str
    kwargs: dict[str, Any] = field(default_factory=dict, hash=False, compare=False)
    train_mode: bool = False  # schedule-free optimizers want train() before the first step
    kind: str = "dense"
    shapes: list[tuple[int, ...]] = field(default_factory=lambda: list(SHAPES), hash=False, compare=False)

    def make(self, params: Any) -> torch.optim.Optimizer:
        opt = getattr(importlib.import_module(self.module), self.cls)(params, **self.kwargs)
        if self.train_mode:
            opt.train()
        return opt


PACKAGES = [
    Package("lion_pytorch-Lion", "lion_pytorch", "Lion", {"lr": 1e-2, "weight_decay": 0.1}),
    Package(
        "schedulefree-AdamWScheduleFree",
        "schedulefree",
        "AdamWScheduleFree",
        {"lr": 1e-2, "weight_decay": 0.1, "foreach": False},
        train_mode=True,
    ),
    Package("schedulefree-SGDScheduleFree", "schedulefree", "SGDScheduleFree", {"lr": 1e-2}, train_mode=True),
    Package("schedulefree-RAdamScheduleFree", "schedulefree", "RAdamScheduleFree", {"lr": 1e-2}, train_mode=True),
    Package("prodigyopt-Prodigy", "prodigyopt", "Prodigy", {"lr": 1.0}),
    Package("optimi-StableAdamW", "optimi", "StableAdamW", {"lr": 1e-2, "triton": False}),
    Package("optimi-Lion", "optimi", "Lion", {"lr": 1e-2, "triton": False}),
    Package("pytorch_optimizer-Lamb", "pytorch_optimizer", "Lamb", {"lr": 1e-2}),
    Package("pytorch_optimizer-AdaBelief", "pytorch_optimizer", "AdaBelief", {"lr": 1e-2}),
    Package("pytorch_optimizer-Adan", "pytorch_optimizer", "Adan", {"lr": 1e-2}),
]


def _missing(package: Package) -> bool:
    return importlib.util.find_spec(package.module) is None


def _parameters() -> list[Any]:
    return [
        pytest.param(p, id=p.id, marks=pytest.mark.skipif(_missing(p), reason=f"{p.module} is not installed"))
        for p in PACKAGES
    ]


by_package = pytest.mark.parametrize("package", _parameters())


def test_at_least_two_packages_are_there() -> None:
    found = {p.module for p in PACKAGES if not _missing(p)}
    if os.environ.get("FP16OPT_REQUIRE_THIRD_PARTY") != "1" and len(found) < 2:
        pytest.skip(f"only {sorted(found)} installed; set FP16OPT_REQUIRE_THIRD_PARTY=1 to demand two")
    assert len(found) >= 2


@by_package
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_masters_equal_plain_fp32_stepping(package: Package, dtype: torch.dtype) -> None:
    recipes.check_masters_equal_plain_fp32_stepping(recipes.engine, package, 64.0, dtypes=dtype)


@by_package
@pytest.mark.parametrize(
    "settings", [{"loss_scale": 64.0}, {"init_scale": 64.0, "growth_interval": 2}], ids=["static", "dynamic"]
)
def test_resume_bit_exact(package: Package, settings: dict[str, Any]) -> None:
    recipes.check_resume_bit_exact(recipes.engine, package, settings, model_first=True, dtypes=torch.float16)


@by_package
def test_overflow_leaves_everything_untouched(package: Package) -> None:
    params = parameters(SHAPES)
    opt = MixedPrecisionOptimizer(package.make(params), loss_scale=8.0)
    train(opt, params, Problem(params))
    before = snapshot(opt, params)
    one_step(opt, params, [1.0, float("nan"), 1.0])
    assert bool(opt.step_was_skipped)
    assert_same(snapshot(opt, params), before)


@by_package
def test_grad_none_is_left_alone(package: Package) -> None:
    params = parameters(SHAPES)
    opt = MixedPrecisionOptimizer(package.make(params), loss_scale=8.0)
    weight = params[1].detach().clone()
    for _ in range(7):  # RAdam's first five steps move nothing
        one_step(opt, params, [0.5, None, 0.25])
    assert torch.equal(params[1].detach(), weight)
    assert not torch.equal(params[0].detach(), parameters(SHAPES)[0].detach())
    assert_model_is_rounded_masters(opt)


@by_package
def test_deepcopy_continues_alike(package: Package) -> None:
    params = torch.nn.ParameterList(parameters(SHAPES))
    problem = Problem(list(params))
    opt = MixedPrecisionOptimizer(package.make(list(params)), loss_scale=8.0)
    train(opt, list(params), problem)
    params2, opt2 = copy.deepcopy((params, opt))
    train(opt2, list(params2), problem)
    train(opt, list(params), problem)
    assert_same(snapshot(opt2, list(params2)), snapshot(opt, list(params)))


@pytest.mark.skipif(importlib.util.find_spec("schedulefree") is None, reason="schedulefree is not installed")
def test_schedule_free_train_and_eval_reach_the_model() -> None:
    """Calling the wrapped optimizer's eval() writes the masters: the master wins and is copied down at the
    next use."""
    schedulefree = importlib.import_module("schedulefree")
    params = parameters([(16,)])
    inner = schedulefree.SGDScheduleFree(params, lr=0.1)
    inner.train()
    opt = MixedPrecisionOptimizer(inner, loss_scale=8.0)
    for _ in range(3):
        opt.zero_grad()
        opt.backward(linear_loss(params, [1.0]))
        opt.step()
    trained = next(iter(opt.master_params())).detach().clone()
    inner.eval()
    (m,) = opt.master_params()
    assert not torch.equal(m.detach(), trained)
    inner.train()
    train(opt, params, Problem(params))
    assert_model_is_rounded_masters(opt)


def _make_type_check(make: Callable[[Any], torch.optim.Optimizer]) -> bool:
    return isinstance(make(parameters(SHAPES)), torch.optim.Optimizer)


@by_package
def test_the_wrapped_class_is_an_optimizer_and_unpatched(package: Package) -> None:
    assert _make_type_check(package.make)
    params = parameters(SHAPES)
    inner = package.make(params)
    attributes = set(vars(inner))
    opt = MixedPrecisionOptimizer(inner, loss_scale=8.0)
    train(opt, params, Problem(params))
    assert "step" not in set(vars(inner)) - attributes, "the user's optimizer was patched"
