"""A fused step uses the plan of the step before only where nothing that it was made of has changed."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer

from fp16opt import MixedPrecisionOptimizer

Change = Callable[[MixedPrecisionOptimizer, list[nn.Parameter]], None]
MAKERS: dict[str, Callable[[list[nn.Parameter]], Optimizer]] = {
    "AdamW": lambda params: AdamW(params, lr=0.01),
    "SGD": lambda params: SGD(params, lr=0.01, momentum=0.9),
}


def make(kind: str, fused: bool) -> tuple[MixedPrecisionOptimizer, list[nn.Parameter]]:
    generator = torch.Generator().manual_seed(0)
    params = [nn.Parameter(torch.randn(5, 3, generator=generator).half()) for _ in range(4)]
    params.append(nn.Parameter(torch.randn(7, generator=generator)))  # its own master
    return MixedPrecisionOptimizer(MAKERS[kind](params), loss_scale=8.0, fused_step=fused), params


def step(opt: MixedPrecisionOptimizer, params: list[nn.Parameter], number: int, without: int = -1) -> None:
    generator = torch.Generator().manual_seed(100 + number)
    opt.zero_grad()
    opt.scale_loss(torch.zeros(()))
    for i, param in enumerate(params):
        grad = torch.randn(param.shape, generator=generator).to(param.dtype)
        param.grad = None if i == without else grad * 8.0
    opt.step()


def replace_state(opt: MixedPrecisionOptimizer, params: list[nn.Parameter]) -> None:
    for state in opt.state.values():
        for name, value in state.items():
            state[name] = value.clone() * 0.5 if name != "step" else value.clone()


def reload(opt: MixedPrecisionOptimizer, params: list[nn.Parameter]) -> None:
    opt.load_state_dict(opt.state_dict())


def reload_inner(opt: MixedPrecisionOptimizer, params: list[nn.Parameter]) -> None:
    opt.optimizer.load_state_dict(opt.optimizer.state_dict())


def clear_state(opt: MixedPrecisionOptimizer, params: list[nn.Parameter]) -> None:
    opt.state.clear()


def reorder_state(opt: MixedPrecisionOptimizer, params: list[nn.Parameter]) -> None:
    items = list(opt.state.items())[::-1]
    opt.state.clear()
    opt.state.update(items)


def add_group(opt: MixedPrecisionOptimizer, params: list[nn.Parameter]) -> None:
    params.append(nn.Parameter(torch.ones(3).half()))
    opt.add_param_group({"params": [params[-1]]})


def other_lr(opt: MixedPrecisionOptimizer, params: list[nn.Parameter]) -> None:
    opt.param_groups[0]["lr"] = 0.3


def amsgrad(opt: MixedPrecisionOptimizer, params: list[nn.Parameter]) -> None:
    if "amsgrad" in opt.param_groups[0]:
        for state in opt.state.values():
            state["max_exp_avg_sq"] = torch.ones_like(state["exp_avg_sq"])
        opt.param_groups[0]["amsgrad"] = True


def no_momentum(opt: MixedPrecisionOptimizer, params: list[nn.Parameter]) -> None:
    if "momentum" in opt.param_groups[0]:
        opt.param_groups[0]["momentum"] = 0.0


def two_settings(opt: MixedPrecisionOptimizer, params: list[nn.Parameter]) -> None:
    group = opt.param_groups[0]
    group["maximize"], group["weight_decay"] = True, 0.25  # as many settings as before, in the same order


def another_group(opt: MixedPrecisionOptimizer, params: list[nn.Parameter]) -> None:
    opt.param_groups[0] = {**opt.param_groups[0], "lr": 0.125}


CHANGES: list[Change] = [
    *(replace_state, reload, reload_inner, clear_state, reorder_state, add_group, other_lr, amsgrad, no_momentum),
    *(two_settings, another_group),
]


def compare(kind: str, change: Change | None = None, withouts: tuple[int, ...] = (-1,) * 6, **settings: object) -> None:
    """Against a wrapper whose step makes its plan anew each time."""
    results = []
    for forgets in (False, True):
        opt, params = make(kind, fused=True)
        opt.param_groups[0].update(copy.deepcopy(settings))
        for number, without in enumerate(withouts):
            if number == 3 and change is not None:
                change(opt, params)
            if forgets:  # a copy has no plan
                opt, params = copy.deepcopy((opt, params))
            step(opt, params, number, without)
        assert "fused" in repr(opt).split("step:")[1].split("\n")[0]
        results.append([*params, *opt.master_params(), *[v for s in opt.state.values() for v in s.values()]])
    assert len(results[0]) == len(results[1])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
@pytest.mark.parametrize("kind", MAKERS)
def test_a_change_between_steps_counts(kind: str, change: Change) -> None:
    compare(kind, change)


IN_PLACE: dict[str, tuple[object, Change]] = {
    "lr": (torch.tensor(0.01), lambda opt, _: opt.param_groups[0]["lr"].fill_(0.5)),
    "betas": ([0.9, 0.99], lambda opt, _: opt.param_groups[0]["betas"].__setitem__(0, 0.5)),
}


@pytest.mark.parametrize("key", IN_PLACE)
def test_a_setting_that_is_written_in_place_counts(key: str) -> None:
    value, change = IN_PLACE[key]
    compare("AdamW", change, **{key: value})


@pytest.mark.parametrize("kind", MAKERS)
def test_parameters_may_miss_gradients_in_some_steps(kind: str) -> None:
    compare(kind, withouts=(0, 0, 0, -1, -1, 4, -1, 2, 2, -1, 0, -1))
