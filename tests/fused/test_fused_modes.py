"""When a step is fused and when it is not: refusals, changes on the way, hooks, schedulers, copies, checkpoints."""

from __future__ import annotations

import copy
import io
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from engine.checks import assert_same, steps_in_one_pass
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer

from fp16opt import MixedPrecisionOptimizer
from fused.test_fused_steps import MAKERS, give_grads, made, parameters, wrap


class OurAdam(Adam):
    """A subclass may step as it likes."""


def half(*shape: int, dtype: torch.dtype = torch.float16) -> Tensor:
    return torch.nn.Parameter(torch.ones(shape, dtype=dtype))


def replaced_step() -> Optimizer:
    opt = SGD([half(2)], lr=0.1)
    opt.step = lambda closure=None: None  # type: ignore[method-assign]
    return opt


CANNOT: dict[str, tuple[Callable[[], Optimizer], str]] = {
    "class": (lambda: torch.optim.Adagrad([half(2)]), "Adagrad is not exactly SGD, Adam or AdamW of torch.optim"),
    "subclass": (lambda: OurAdam([half(2)]), "OurAdam is not exactly SGD"),
    "float64": (lambda: AdamW([half(2), half(2, dtype=torch.float64)]), "parameter 'group 0, param 1' is float64"),
    "capturable": (lambda: AdamW([{"params": [half(2)]}, {"params": [half(2)], "capturable": True}]),
                   "group 1 has capturable=True"),
    "differentiable": (lambda: SGD([half(2)], lr=0.1, differentiable=True), "group 0 has differentiable=True"),
    "lr": (lambda: AdamW([half(2)], lr=torch.tensor(0.1, requires_grad=True)), "group 0 has an lr that is a tensor"),
    "not dense": (lambda: SGD([torch.nn.Parameter(torch.ones(4, 4).half()[:, :2])], lr=0.1),
                  "the memory of parameter 'group 0, param 0' is not dense"),
    "replaced step": (replaced_step, "the step of this SGD was replaced"),
}  # fmt: skip


@pytest.mark.parametrize("case", CANNOT)
def test_true_refuses_what_it_cannot_serve_and_auto_steps_it_generally(case: str) -> None:
    make, reason = CANNOT[case]
    inner = make()
    before = [id(p) for g in inner.param_groups for p in g["params"]]
    with pytest.raises(
        ValueError,
        match=f"fused_step=True needs the one-pass step, .*: {reason}.*'auto'|{reason}.*\"auto\"",
    ):
        MixedPrecisionOptimizer(inner, fused_step=True)
    assert [id(p) for g in inner.param_groups for p in g["params"]] == before
    opt = MixedPrecisionOptimizer(inner, fused_step="auto")
    assert f"step: general ({reason}" in repr(opt)


@pytest.mark.parametrize("wanted", [1, 0, None, "yes", "True", 1.0])
def test_other_values_are_refused(wanted: Any) -> None:
    with pytest.raises(ValueError, match="fused_step: expected one of False, True, 'auto', got"):
        MixedPrecisionOptimizer(SGD([half(2)], lr=0.1), fused_step=wanted)


def test_without_masters_nothing_is_fused() -> None:
    with pytest.raises(ValueError, match=r"fused_step=True needs the one-pass step, .*: there are no FP32 masters"):
        MixedPrecisionOptimizer(SGD([half(2)], lr=0.1), fused_step=True, master_weights="none")
    opt = MixedPrecisionOptimizer(SGD([half(2)], lr=0.1), fused_step="auto", master_weights="none")
    assert "step: general (there are no FP32 masters" in repr(opt)


@pytest.mark.parametrize("inner", [{"foreach": True}, {"foreach": False}, {"fused": True}, {}], ids=str)
@pytest.mark.parametrize("cls", [SGD, Adam, AdamW])
def test_the_default_takes_one_pass_and_false_the_wrapped_optimizers_own_step(cls: Any, inner: dict[str, bool]) -> None:
    """Whatever its flags: our kernels step in place of torch's loops."""
    assert steps_in_one_pass(MixedPrecisionOptimizer(cls([half(2)], lr=0.1, **inner)))
    opt = MixedPrecisionOptimizer(cls([half(2)], lr=0.1, **inner), fused_step=False)
    assert "step: general (fused_step=False)" in repr(opt)


def general_twin(name: str, opt: MixedPrecisionOptimizer) -> tuple[list[Tensor], MixedPrecisionOptimizer]:
    params = parameters(dtypes=(torch.float16,))
    twin = wrap(name, params, False)
    twin.load_state_dict(copy.deepcopy(opt.state_dict()))
    return params, twin


def train(opt: MixedPrecisionOptimizer, params: list[Tensor], *steps: int) -> None:
    for step in steps:
        give_grads(opt, params, step)
        opt.clip_master_grads(0.5)
        opt.step()


@pytest.mark.parametrize("fused", [True, "auto"])
def test_an_option_that_appears_later_goes_the_general_way_with_one_warning(
    fused: Any, caplog: pytest.LogCaptureFixture
) -> None:
    params, opt = made("sgd", fused)
    for group in opt.param_groups:
        group["momentum"] = 0.9
    train(opt, params, 0, 1)
    others, twin = general_twin("sgd", opt)
    with caplog.at_level(logging.WARNING, logger="fp16opt"):
        opt.param_groups[1]["differentiable"] = True
        train(opt, params, 2, 3)
    said = [r.getMessage() for r in caplog.records]
    assert len(said) == 1
    assert "the wrapped optimizer steps itself from here on" in said[0]
    assert "group 1 has differentiable=True" in said[0]
    assert "step: general (group 1 has differentiable=True)" in repr(opt)
    for group, mine in zip(twin.param_groups, opt.param_groups, strict=True):
        group.update({k: v for k, v in mine.items() if k != "params"})
    train(twin, others, 2, 3)
    assert_same(opt.state_dict(), twin.state_dict())
    opt.param_groups[1]["differentiable"] = False
    train(opt, params, 4)
    assert steps_in_one_pass(opt)


def test_an_option_that_a_pre_hook_sets_goes_the_general_way() -> None:
    params, opt = made("sgd")
    give_grads(opt, params, 0)
    opt.optimizer.register_step_pre_hook(lambda o, *_: o.param_groups[0].update(differentiable=True))
    want = [m.detach() - 0.0 for m in opt.master_params()]
    opt.step()
    assert not any(torch.equal(a, b) for a, b in zip(want, opt.master_params(), strict=True) if a.numel())


def test_state_of_another_kind_goes_the_general_way(caplog: pytest.LogCaptureFixture) -> None:
    params, opt = made("adamw")
    train(opt, params, 0)
    for state in opt.state.values():
        state["step"] = state["step"].double()
    with caplog.at_level(logging.WARNING, logger="fp16opt"):
        train(opt, params, 1, 2)
    assert [r for r in caplog.records if "state 'step' is float64" in r.getMessage()]
    assert {float(s["step"]) for s in opt.state.values()} == {3.0}
    params, opt = made("adamw")
    train(opt, params, 0)
    opt.param_groups[0]["amsgrad"] = True
    with pytest.raises(KeyError, match="max_exp_avg_sq"):  # what torch says
        train(opt, params, 1)


@pytest.mark.parametrize("name", MAKERS)
def test_checkpoints_move_between_fused_general_and_torch(name: str) -> None:
    """Saved by one and loaded by another, all is there bit for bit; and each goes on as it would have."""
    params, opt = made(name)
    train(opt, params, 0, 1)
    others, general = general_twin(name, opt)
    assert_same(opt.state_dict(), general.state_dict())
    cls, options = MAKERS[name]
    masters = [torch.nn.Parameter(m.detach().clone()) for m in opt.master_params()]
    torch_opt = cls([{"params": masters[:2]}, {"params": masters[2:], "lr": 0.03}], **options)
    torch_opt.load_state_dict(copy.deepcopy(opt.optimizer.state_dict()))
    assert_same(torch_opt.state_dict()["state"], opt.optimizer.state_dict()["state"])
    train(general, others, 2)
    back_params, back = made(name)
    file = io.BytesIO()
    torch.save(general.state_dict(), file)
    file.seek(0)
    back.load_state_dict(torch.load(file, weights_only=True))
    assert_same(back.state_dict(), general.state_dict())
    train(back, back_params, 3)
