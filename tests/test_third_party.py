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
from collections import defaultdict
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
    parameters,
    snapshot,
    train,
)

from fp16opt import MixedPrecisionOptimizer, optimizer_state

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
    recipes.check_masters_equal_plain_fp32_stepping(recipes.wrapped_step, package, 64.0, dtypes=dtype)


@by_package
@pytest.mark.parametrize(
    "settings", [{"loss_scale": 64.0}, {"init_scale": 64.0, "growth_interval": 2}], ids=["static", "dynamic"]
)
def test_resume_bit_exact(package: Package, settings: dict[str, Any]) -> None:
    recipes.check_resume_bit_exact(recipes.engine, package, settings, model_first=True, dtypes=torch.float16)


@pytest.mark.skipif(importlib.util.find_spec("schedulefree") is None, reason="schedulefree is not installed")
def test_schedule_free_train_and_eval_reach_the_model() -> None:
    """They write masters, and masters are copied down; the wrapped optimizer's own are refused."""
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
    with pytest.raises(RuntimeError, match=r"SGDScheduleFree.eval\(\) was called .* Call opt.eval\(\)"):
        inner.eval()
    opt.eval()
    (m,) = opt.master_params()
    assert not torch.equal(m.detach(), trained)
    assert_model_is_rounded_masters(opt)
    opt.train()
    train(opt, params, Problem(params))
    assert_model_is_rounded_masters(opt)


# -- forms of state_dict that other packages have ----------------------------------------------------------------------


class Lookahead(torch.optim.Optimizer):
    """As several packages have it: an optimizer around another, which never calls ``Optimizer.__init__``."""

    def __init__(self, base: torch.optim.Optimizer, k: int = 3, alpha: float = 0.5) -> None:
        self.optimizer, self.k, self.alpha = base, k, alpha
        self.defaults = {"lookahead_k": k, **base.defaults}
        self.state = defaultdict(dict)
        for group in self.param_groups:
            group["counter"] = 0
            for p in group["params"]:
                self.state[p]["slow"] = p.detach().clone()

    @property
    def param_groups(self) -> Any:
        return self.optimizer.param_groups

    def _params(self) -> list[torch.Tensor]:
        return [p for group in self.param_groups for p in group["params"]]

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = self.optimizer.step(closure)
        for group in self.param_groups:
            group["counter"] += 1
            if group["counter"] % self.k == 0:
                for p in group["params"]:
                    slow = self.state[p]["slow"]
                    slow.add_(p - slow, alpha=self.alpha)
                    p.copy_(slow)
        return loss

    def state_dict(self) -> dict[str, Any]:
        slow = {i: {"slow": self.state[p]["slow"]} for i, p in enumerate(self._params())}
        return {"fast_state": self.optimizer.state_dict(), "slow_state": slow, "k": self.k}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.k = state_dict["k"]
        self.optimizer.load_state_dict(state_dict["fast_state"])
        if state_dict["slow_state"].keys() != set(range(len(self._params()))):
            raise ValueError("slow_state is of other parameters")
        for i, p in enumerate(self._params()):
            self.state[p]["slow"] = state_dict["slow_state"][i]["slow"].to(p)


class Extras(torch.optim.Optimizer):
    """As heavyball has it: numbered state, an entry of its own put in and read by hooks, settings left out of files."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr, "_made_by": "Extras"})
        self.memory: dict[str, Any] = {"ticks": 0, "last": [0.0]}
        self.register_state_dict_post_hook(Extras._put)
        self.register_load_state_dict_pre_hook(Extras._read)

    def _put(self, state_dict: dict[str, Any]) -> None:
        state_dict["extras"] = {"memory": copy.deepcopy(self.memory)}

    def _read(self, state_dict: dict[str, Any]) -> None:
        for key, value in state_dict.get("extras", {}).items():
            setattr(self, key, value)

    def state_dict(self) -> dict[str, Any]:
        found = super().state_dict()
        for group in found["param_groups"]:
            group.pop("_made_by", None)
        return found

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.memory["ticks"] += 1
        for group in self.param_groups:
            group.setdefault("_made_by", "Extras")
            for p in group["params"]:
                if p.grad is not None:
                    entry = self.state[p].setdefault(
                        0, {"exp_avg": torch.zeros(p.numel()), "codes": torch.ones(3).byte()}
                    )
                    entry["exp_avg"].lerp_(p.grad.flatten(), 0.25)
                    p.sub_(entry["exp_avg"].view_as(p) * (group["lr"] / (1 + self.memory["ticks"])))


@dataclass(frozen=True)
class Made(Package):
    """One that a function makes."""

    make_it: Callable[[Any], torch.optim.Optimizer] = field(default=Extras, hash=False, compare=False)

    def make(self, params: Any) -> torch.optim.Optimizer:
        return self.make_it(params)


def _packaged_lookahead(params: Any) -> torch.optim.Optimizer:
    base = torch.optim.SGD(params, lr=1e-2, momentum=0.9)
    return importlib.import_module("pytorch_optimizer").Lookahead(base, k=3, pullback_momentum="pullback")


FORMS = [
    Made("Lookahead-SGD", "", "", make_it=lambda p: Lookahead(torch.optim.SGD(p, lr=0.01, momentum=0.9))),
    Made("Lookahead-AdamW", "", "", make_it=lambda p: Lookahead(torch.optim.AdamW(p, lr=0.01))),
    Made("Extras", "", "", make_it=Extras),
]
by_form = pytest.mark.parametrize("form", FORMS, ids=lambda form: form.id)


@by_form
@pytest.mark.parametrize("dtypes", [torch.float16, (torch.float16, torch.float32, torch.bfloat16)], ids=str)
def test_resume_of_another_form(form: Made, dtypes: Any) -> None:
    for settings in ({"loss_scale": 64.0}, {"init_scale": 64.0, "growth_interval": 2}):
        recipes.check_resume_bit_exact(recipes.engine, form, settings, model_first=True, dtypes=dtypes)


@pytest.mark.skipif(importlib.util.find_spec("pytorch_optimizer") is None, reason="pytorch_optimizer is not installed")
def test_resume_of_the_packaged_lookahead() -> None:
    form = Made("pytorch_optimizer-Lookahead", "pytorch_optimizer", "Lookahead", make_it=_packaged_lookahead)
    params = parameters(SHAPES)
    opt = MixedPrecisionOptimizer(form.make(params), loss_scale=8.0)
    train(opt, params, Problem(params))
    saved = copy.deepcopy(opt.state_dict())  # its keys are tuples, which torch.load(weights_only=True) takes too
    other = parameters(SHAPES, seed=3)
    resumed = MixedPrecisionOptimizer(form.make(other), loss_scale=8.0)
    resumed.load_state_dict(saved)
    for _ in range(4):
        train(opt, params, Problem(params))
        train(resumed, other, Problem(params))
    assert_same(list(resumed.master_params()), list(opt.master_params()))


@by_form
def test_a_plain_checkpoint_of_another_form(form: Made) -> None:
    plain = [torch.nn.Parameter(p.detach().float()) for p in parameters(SHAPES)]
    source = form.make(plain)
    for p in plain:
        p.grad = torch.full_like(p, 0.5)
    source.step()
    saved = copy.deepcopy(source.state_dict())
    params = parameters(SHAPES)
    opt = MixedPrecisionOptimizer(form.make(params), loss_scale=8.0)
    opt.load_state_dict(saved)
    assert_same(opt.optimizer.state_dict(), saved)
    train(opt, params, Problem(params))
    assert_same(optimizer_state(opt.state_dict()), opt.optimizer.state_dict())
    source.load_state_dict(optimizer_state(opt.state_dict()))
    source.step()


@by_form
def test_a_refused_checkpoint_of_another_form_changes_nothing(form: Made) -> None:
    def wrapped(seed: int) -> tuple[list[torch.nn.Parameter], MixedPrecisionOptimizer]:
        params = parameters(SHAPES, seed=seed)
        opt = MixedPrecisionOptimizer(form.make(params), loss_scale=8.0)
        train(opt, params, Problem(params))
        return params, opt

    params, opt = wrapped(0)
    good = copy.deepcopy(wrapped(1)[1].state_dict())
    before = snapshot(opt, params, scaler=True)
    inner = copy.deepcopy(opt.optimizer.state_dict())
    fast = ("fast_state",) if "fast_state" in good["optimizer"] else ()
    damages: list[tuple[tuple[Any, ...], Any]] = [
        (("masters", 0), torch.zeros(3)),
        (("scaler",), {}),
        (("optimizer", *fast, "param_groups"), []),
        (("optimizer", *fast, "param_groups", 0, "params"), [0, 1]),
        (("optimizer", *fast, "state"), None),
        (("optimizer",), {}),
        *([(("optimizer", "slow_state"), {}), (("optimizer", "slow_state", 1), {})] if fast else []),
    ]
    for path, value in damages:
        bad = copy.deepcopy(good)
        at: Any = bad
        for key in path[:-1]:
            at = at[key]
        at[path[-1]] = value
        with pytest.raises(Exception):  # noqa: B017, PT011  # whatever the class raises
            opt.load_state_dict(bad)
        assert_same(snapshot(opt, params, scaler=True), before, f"after a refused {path}")
        assert_same(opt.optimizer.state_dict(), inner, f"after a refused {path}")
    opt.load_state_dict(good)
    train(opt, params, Problem(params))
