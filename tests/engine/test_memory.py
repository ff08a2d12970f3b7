"""opt.memory(): bytes by kind, against arithmetic, against all tensors that are alive, and against the plan."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW

from engine.checks import tensor_bytes
from fp16opt import DynamicLossScaler, Memory, MixedPrecisionOptimizer
from fp16opt.tools.plan import Plan

WIDTH, LAYERS = 128, 4
COUNT = WIDTH * WIDTH * LAYERS


def made(cls: Any = AdamW, dtype: torch.dtype = torch.float16, **more: Any) -> Any:
    net = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False, dtype=dtype) for _ in range(LAYERS)))
    options = {"lr": 1e-3} if cls is AdamW else {"lr": 1e-3, "momentum": 0.9}
    return net, MixedPrecisionOptimizer(cls(net.parameters(), **options), loss_scale=8.0, **more)


def backward(net: nn.Module, opt: MixedPrecisionOptimizer) -> None:
    opt.zero_grad()
    opt.backward(net(torch.ones(2, WIDTH, dtype=next(net.parameters()).dtype)).float().square().mean())


# (arguments, the plan's, bytes a parameter: weights, masters, moments, gradients)
MODES: dict[str, tuple[dict[str, Any], dict[str, Any], tuple[float, float, float, float]]] = {
    "one pass": ({"fused_step": True}, {}, (2, 4, 8, 2)),
    "general": ({"fused_step": False}, {"fused_step": False}, (2, 4, 8, 6)),
    "split": ({"master_weights": "split"}, {"masters": "split"}, (2, 2, 8, 2)),
    "released": ({"gradient_release": True}, {"release": True}, (2, 4, 8, 0)),
    "split, released": (
        {"gradient_release": True, "master_weights": "split"}, {"masters": "split", "release": True}, (2, 2, 8, 0)),
    "split, 8 bits": (
        {"master_weights": "split", "optimizer_state": "8bit"}, {"masters": "split", "state": "8bit"},
        (2, 2, 2 + 4 / 128, 2)),
    "split24, 8 bits, released": (
        {"master_weights": "split24", "optimizer_state": "8bit", "gradient_release": True},
        {"masters": "split24", "state": "8bit", "release": True}, (2, 1, 2 + 4 / 128, 0)),
}  # fmt: skip


@pytest.mark.parametrize("mode", MODES)
def test_each_kind_is_counted_and_the_plan_agrees(mode: str) -> None:
    given, asked, wanted = MODES[mode]
    net, opt = made(**given)
    for _ in range(2):
        backward(net, opt)
        if mode == "general":
            opt.update_master_grads()
        found = opt.memory()
        opt.step()
    assert found.parameters == COUNT
    each = [value / COUNT for value in (found.weights, found.masters, found.moments, found.gradients)]
    assert each == pytest.approx(wanted, rel=1e-3, abs=1e-3)
    assert found.engine / COUNT < 0.02
    assert found.total == sum(found.parts().values())
    assert Plan(params=COUNT, **asked).memory_total() == pytest.approx(found.total, rel=0.02)


def test_what_is_shared_counts_once_and_what_is_gone_does_not() -> None:
    net, opt = made(SGD, torch.float32, fused_step=True)  # which makes no true gradients
    assert opt.memory() == Memory(COUNT, weights=4 * COUNT, engine=opt.memory().engine)
    backward(net, opt)
    assert opt.memory().gradients == 4 * COUNT
    opt.step()
    assert opt.memory().moments == 4 * COUNT
    opt.zero_grad()
    assert opt.memory().gradients == 0
    flat = torch.zeros(2 * COUNT, dtype=torch.float16)
    views = [nn.Parameter(flat[:COUNT]), nn.Parameter(flat[COUNT:])]
    assert MixedPrecisionOptimizer(SGD(views, lr=0.1)).memory().weights == 4 * COUNT


def test_split_masters_keep_no_memory_for_true_gradients() -> None:
    net, opt = made(master_weights="split")
    backward(net, opt)
    opt.update_master_grads()
    assert opt.memory().gradients == 6 * COUNT
    opt.step()
    opt.zero_grad()
    assert opt.memory().gradients == 0


def test_gradients_that_others_keep_and_sparse_ones_are_counted() -> None:
    table = nn.Embedding(1000, 4, sparse=True)
    opt = MixedPrecisionOptimizer(SGD(table.parameters(), lr=0.1))
    opt.backward(table(torch.tensor([1, 2, 3])).sum())
    assert opt.memory().gradients == 3 * (4 * 4 + 8)


def test_sums_are_gradients_too() -> None:
    net, opt = made(grad_accumulation="fp32")
    backward(net, opt)
    assert opt.memory().gradients == 4 * COUNT


def test_repr_where_nothing_is_on_this_rank() -> None:
    """As where more ranks share a weight than it has rows."""
    empty = nn.Parameter(torch.empty(0, 4, dtype=torch.float16))
    opt = MixedPrecisionOptimizer(SGD([empty], lr=0.1), dynamic=True)
    assert f"memory: {opt.memory().total} bytes; no element of a parameter is on this rank" in repr(opt)
    assert "a parameter:" not in repr(opt)


def test_repr_and_str_say_it() -> None:
    net, opt = made()
    wanted = "memory: 6.00 bytes a parameter: weights 2.00, masters 4.00, moments 0.00, gradients 0.00, engine 0.0"
    assert wanted in repr(opt)
    backward(net, opt)
    assert str(opt.memory()).startswith("8.0")
    assert Memory(0).per_parameter() == 0.0


def test_nothing_that_lasts_is_missed() -> None:
    """All tensors that wrapping and stepping have made, counted by what Python still holds."""
    before = tensor_bytes()
    net, opt = made(master_weights="split")
    backward(net, opt)
    opt.clip_master_grads(1.0)
    opt.step()
    assert tensor_bytes() - before == pytest.approx(opt.memory().total, rel=1e-3)


def test_a_step_of_sums_holds_no_gradient_that_was_freed() -> None:
    """16-bit gradients are freed when they were added to FP32 sums, and not at the end of the step."""
    gone: list[bool] = []

    class Asking(DynamicLossScaler):
        def update(self, found_inf: torch.Tensor) -> None:
            gone.append(gradient() is None)
            super().update(found_inf)

    param = torch.nn.Parameter(torch.ones(3).half())
    opt = MixedPrecisionOptimizer(SGD([param], lr=0.1), scaler=Asking(8.0), grad_accumulation="fp32")
    for _ in range(3):
        opt.zero_grad()
        opt.scale_loss(param.float().sum()).backward()
        gradient = weakref.ref(param.grad)
        opt.step()
    assert gone == [True] * 3


@pytest.mark.parametrize("fused_step", ["auto", False])
def test_who_clears_gradients_elsewhere_has_them_freed_at_once(fused_step: bool | str) -> None:
    """After a step nothing keeps a gradient alive that the last ``zero_grad`` of ours did not get to see."""
    param = torch.nn.Parameter(torch.ones(3).half())
    opt = MixedPrecisionOptimizer(SGD([param], lr=0.1), loss_scale=8.0, fused_step=fused_step)

    def step() -> weakref.ref[torch.Tensor]:
        opt.backward(param.float().sum())
        opt.step()
        assert param.grad is not None
        return weakref.ref(param.grad)

    for _ in range(3):
        gradient = step()
        param.grad = None
        assert gradient() is None
        opt.zero_grad()  # which finds nothing
    step()
    opt.zero_grad()
    gradient = step()
    assert weakref.getweakrefcount(param.grad) == 1, "the test's own: no object for the garbage collector"
    param.grad = None
    step()
    assert gradient() is None, "kept till the next backward at most"
    gradient = weakref.ref(param.grad)
    param.grad = None
    assert gradient() is None, "nobody came to clear the last ones"
