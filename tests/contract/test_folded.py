"""What stands in ``.grad`` once FP32 sums have taken a gradient: clearing it is no harm, all else raises."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

from fp16opt import DynamicLossScaler, MixedPrecisionOptimizer

REFUSED = "the model's gradients were folded into FP32 sums"


def summed(**settings: object) -> tuple[nn.Module, MixedPrecisionOptimizer]:
    """A model after a backward that was folded."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)).half()
    opt = MixedPrecisionOptimizer(SGD(model.parameters(), lr=0.1), grad_accumulation="fp32", loss_scale=8.0, **settings)  # type: ignore[arg-type]
    opt.backward(loss_of(model))
    return model, opt


def loss_of(model: nn.Module) -> torch.Tensor:
    return model(torch.ones(5, 4).half()).float().square().mean()


USES = {
    "converted": lambda model: model.float(),
    "emptied": lambda model: model.to_empty(device="cpu"),
    "copied": lambda model: copy.deepcopy(model[0].weight.grad),
    "printed": lambda model: repr(model[0].weight.grad),
    "shared": lambda model: torch.from_dlpack(model[0].weight.grad),
    "in a list": lambda model: SGD(model.parameters(), lr=0.1, foreach=True).zero_grad(set_to_none=False),
    "read": lambda model: model[0].weight.grad.norm(),
}


@pytest.mark.parametrize("use", USES)
def test_all_but_clearing_is_refused(use: str) -> None:
    model, opt = summed()
    with pytest.raises(RuntimeError, match=REFUSED):
        USES[use](model)
    opt.zero_grad()
    assert all(p.grad is None for p in model.parameters())


def test_weights_can_be_swapped_after_the_step() -> None:
    model, opt = summed()
    opt.step()
    opt.zero_grad()
    weight = model[0].weight  # type: ignore[index]
    torch.utils.swap_tensors(weight, nn.Parameter(torch.ones(3, 4).half()))
    assert weight.tolist() == [[1.0] * 4] * 3


def test_a_copy_of_the_model_has_no_gradients() -> None:
    model, _ = summed()
    assert all(p.grad is None for p in copy.deepcopy(model).parameters())


def test_a_new_optimizer_takes_the_weights_over() -> None:
    model, opt = summed()
    del opt
    made = MixedPrecisionOptimizer(SGD(model.parameters(), lr=0.1), dynamic=True)
    made.backward(loss_of(model))
    before = [p.detach().clone() for p in model.parameters()]
    made.step()
    assert any(not torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))


def test_several_scales_without_a_scale_of_its_own() -> None:
    """The look for a forgotten scale reads the sums."""
    torch.manual_seed(0)
    model = nn.Linear(4, 2).half()
    opt = MixedPrecisionOptimizer(SGD(model.parameters(), lr=0.1))
    opt.backward(loss_of(model), scaler=DynamicLossScaler(init_scale=8.0))
    opt.backward(loss_of(model))
    before = model.weight.detach().clone()
    opt.step()
    assert not torch.equal(model.weight, before)


CLEARS = {
    "model.zero_grad()": lambda model: model.zero_grad(),
    "model.zero_grad(set_to_none=False)": lambda model: model.zero_grad(set_to_none=False),
    "another optimizer's": lambda model: SGD(model.parameters(), lr=0.1).zero_grad(set_to_none=False),
    "p.grad = None": lambda model: [setattr(p, "grad", None) for p in model.parameters()],
}


@pytest.mark.parametrize("clear", CLEARS)
@pytest.mark.parametrize(
    "kind", [{}, {"master_weights": "split"}, {"dtype": torch.float32}, {"fused_step": False}], ids=str
)
def test_cleared_gradients_give_the_sums_up(clear: str, kind: dict[str, object]) -> None:
    """A batch that is left out, as where a loss is not worth it: what was summed before is no part of the next step."""
    settings = dict(kind)
    dtype = settings.pop("dtype", torch.float16)
    weights = []
    for gives_up in (False, True):
        torch.manual_seed(0)
        model = nn.Linear(4, 2).to(dtype)  # type: ignore[arg-type]
        opt = MixedPrecisionOptimizer(
            SGD(model.parameters(), lr=0.1), grad_accumulation="fp32", loss_scale=8.0, **settings
        )  # type: ignore[arg-type]
        if gives_up:
            opt.backward(100.0 * model(torch.ones(5, 4).to(dtype)).float().sum())  # type: ignore[arg-type]
            CLEARS[clear](model)
        for _ in range(2):
            opt.backward(model(torch.ones(5, 4).to(dtype)).float().square().mean())  # type: ignore[arg-type]
        norm = opt.clip_master_grads(1.0)
        opt.step()
        weights.append([*(p.detach().clone() for p in model.parameters()), norm])
    assert all(map(torch.equal, *weights))


def test_a_plain_backward_after_cleared_gradients_raises() -> None:
    model, opt = summed()
    model.zero_grad()
    loss_of(model).backward()
    with pytest.raises(RuntimeError, match=r"neither read nor written.*To give the step up, call opt\.zero_grad"):
        opt.step()


@pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="torch gained grad_dtype later")
@pytest.mark.parametrize("settings", [{}, {"grad_accumulation": "fp32"}, {"master_weights": "split"}], ids=str)
def test_gradients_that_torch_keeps_in_fp32_add_up_unrounded(settings: dict[str, str]) -> None:
    weight = nn.Parameter(torch.ones(8, dtype=torch.bfloat16))
    weight.grad_dtype = torch.float32
    opt = MixedPrecisionOptimizer(SGD([weight], lr=1.0), loss_scale=8.0, **settings)  # type: ignore[arg-type]
    for _ in range(2):
        opt.zero_grad()
        for factor in (1.0, 2.0**-12):
            opt.backward((weight * factor).float().sum())
        assert next(opt.master_params()).grad.tolist() == [1 + 2.0**-12] * 8  # type: ignore[union-attr]
        opt.step()
    assert next(opt.master_params()).tolist() == [1 - 2 * (1 + 2.0**-12)] * 8


def cleared_in_a_backward(opt: Any, bad: Tensor, good: Tensor) -> None:
    loss = opt.scale_loss(good.float().sum())
    bad.grad = None
    loss.backward()


def cleared_before_its_backward(opt: Any, bad: Tensor, good: Tensor) -> None:
    loss = opt.scale_loss(0.0 * bad.float().sum() + good.float().sum())
    bad.grad = None
    loss.backward()


def cleared_before_a_fold(opt: Any, bad: Tensor, good: Tensor) -> None:
    opt.backward(bad.float().sum(), update_master_grads=False)
    bad.grad = None
    opt.backward(good.float().sum())


GIVE_UP = [cleared_in_a_backward, cleared_before_its_backward, cleared_before_a_fold]


@pytest.mark.parametrize("is_stepped", [True, False], ids=["step", "zero_grad"])
@pytest.mark.parametrize("give_up", GIVE_UP)
def test_a_sum_that_is_given_up_takes_its_inf_along(give_up: Callable[..., None], is_stepped: bool) -> None:
    bad, good = (torch.nn.Parameter(torch.ones(4, dtype=torch.float16)) for _ in range(2))
    inner = torch.optim.SGD([{"params": [bad]}, {"params": [good]}], lr=0.125)
    opt = MixedPrecisionOptimizer(inner, loss_scale=8.0, grad_accumulation="fp32")
    opt.backward(float("inf") * bad.float().sum() + good.float().sum())
    give_up(opt, bad, good)
    assert opt.clip_master_grads(100.0).item() == 4.0
    opt.step() if is_stepped else opt.zero_grad()
    assert (opt.skipped_steps, good.tolist(), bad.tolist()) == (0, [0.75 if is_stepped else 1.0] * 4, [1.0] * 4)


def test_gradients_that_a_load_has_left_are_to_be_read_where_they_count() -> None:
    weight = torch.nn.Parameter(torch.ones(4, dtype=torch.float16))
    opt = MixedPrecisionOptimizer(torch.optim.SGD([weight], lr=0.5), loss_scale=1.0)
    opt.backward(2 * weight.float().sum())
    opt.load_state_dict(opt.state_dict())
    assert torch.nn.utils.clip_grad_norm_(opt.master_params(), 1.0).item() == 4.0
    opt.step()
    assert weight.tolist() == [0.75] * 4


def appended(opt: Any, late: Tensor) -> None:
    opt.param_groups.append({**opt.param_groups[0], "params": [late]})


def popped(opt: Any, late: Tensor) -> None:
    opt.param_groups[0]["params"].pop(0)


@pytest.mark.parametrize("waits", [True, False], ids=["a backward waits", "all is summed"])
@pytest.mark.parametrize("change", [appended, popped])
def test_groups_stay_while_sums_wait(change: Callable[..., None], waits: bool) -> None:
    """Back as they were the step goes on; given up by zero_grad, they are as they are then."""
    first, second, late = (torch.nn.Parameter(torch.ones(4, dtype=torch.float16)) for _ in range(3))
    opt = MixedPrecisionOptimizer(SGD([first, second], lr=0.25), grad_accumulation="fp32")
    loss = first.float().sum() + second.float().sum() + late.float().sum()
    opt.backward(loss, retain_graph=True)
    opt.backward(loss, update_master_grads=not waits)
    before = [dict(group, params=list(group["params"])) for group in opt.param_groups]
    change(opt, late)
    for call in (opt.step, lambda: opt.clip_master_grads(1.0), lambda: opt.add_param_group({"params": [late]})):
        with pytest.raises(RuntimeError, match="param_groups were changed"):
            call()
    opt.optimizer.param_groups[:] = before
    opt.step()
    assert [p[0].item() for p in (first, second, late)] == [0.5, 0.5, 1.0]
    opt.zero_grad()
    opt.backward(first.float().sum())
    change(opt, late)
    opt.zero_grad()
    opt.step()
    assert [p[0].item() for p in (first, second, late)] == [0.5, 0.5, 1.0]
