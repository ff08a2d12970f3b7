"""An optimizer over parameters that the model has no more raises at its first step; what is only unused does not."""

from __future__ import annotations

import copy
import gc
import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import LBFGS, SGD, AdamW

import fp16opt
from fp16opt import MixedPrecisionOptimizer

REPLACED = "the model has other parameters by now, with gradients, in the place of "


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    caplog.set_level(logging.CRITICAL, logger="fp16opt")
    monkeypatch.setattr(gc, "get_freeze_count", lambda: 0)  # conftest.py freezes what there was before these tests


def built(dtype: torch.dtype = torch.bfloat16) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).to(dtype)


def loss_of(net: nn.Module) -> Tensor:
    x = torch.ones(2, 6, dtype=next(net.parameters()).dtype)
    return net(x).float().square().mean()


def wrapped(net: nn.Module, inner: Callable[..., Any] = AdamW, **options: Any) -> MixedPrecisionOptimizer:
    params = list(net.parameters())
    named = net.named_parameters() if options.pop("named", True) else None
    return MixedPrecisionOptimizer(inner(params, lr=1e-2), named_parameters=named, **options)


@pytest.fixture
def overwriting() -> Iterator[None]:
    """Under this flag of torch ``module.to`` and the like make new parameters."""
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    yield
    torch.__future__.set_overwrite_module_params_on_conversion(False)


def to_empty(net: nn.Sequential) -> None:
    net.to_empty(device="cpu")
    with torch.no_grad():
        for p in net.parameters():
            p.fill_(0.1)


def moved(net: nn.Sequential) -> None:
    net.to(memory_format=torch.channels_last)


def rebuilt(net: nn.Sequential) -> None:
    other = built(next(net.parameters()).dtype)
    net[0], net[2] = other[0], other[2]


def plain(net: nn.Module, opt: MixedPrecisionOptimizer) -> None:
    loss_of(net).backward()
    opt.step()


def by_backward(net: nn.Module, opt: MixedPrecisionOptimizer) -> None:
    opt.backward(loss_of(net))
    opt.step()


def by_grad_scaler(net: nn.Module, opt: MixedPrecisionOptimizer) -> None:
    scaler = fp16opt.GradScaler("cpu", init_scale=8.0)
    scaler.scale(loss_of(net)).backward()
    scaler.step(opt)


@pytest.mark.parametrize("step", [plain, by_backward, by_grad_scaler])
@pytest.mark.parametrize("change", [to_empty, moved, rebuilt])
def test_replaced_parameters_raise_by_name(overwriting: None, step: Any, change: Any) -> None:
    net = built()
    opt = wrapped(net)
    change(net)
    message = f"{REPLACED}4 that this optimizer steps, which have none: 0.weight, 0.bias, 2.weight, 2.bias"
    for _ in range(2):  # until it is mended
        with pytest.raises(RuntimeError, match=message):
            step(net, opt)


@pytest.mark.parametrize(
    "options",
    [
        {"master_weights": "split"},
        {"master_weights": "none"},
        {"grad_accumulation": "fp32"},
        {"gradient_release": True},
        {"dynamic": True},
        {"named": False},
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_in_every_mode(options: dict[str, Any], dtype: torch.dtype) -> None:
    net = built(dtype)
    opt = wrapped(net, **options)
    rebuilt(net)
    with pytest.raises(RuntimeError, match=f"{REPLACED}4 .*(0.weight|group 0, param 0).*Make the optimizer after them"):
        by_backward(net, opt)


def test_one_of_several_layers() -> None:
    """The others have gradients, and one is not trained for a whole run."""
    net = built()
    opt = wrapped(net)
    net[2] = nn.Linear(5, 3, dtype=torch.bfloat16)
    before = [p.clone() for p in net.parameters()]
    with pytest.raises(RuntimeError, match=f"{REPLACED}2 .*: 2.weight, 2.bias"):
        by_backward(net, opt)
    assert all(torch.equal(p, q) for p, q in zip(before, net.parameters(), strict=True)), "nothing was stepped"


def test_with_a_closure() -> None:
    net = built(torch.float32)
    opt = wrapped(net, LBFGS)
    rebuilt(net)

    def closure() -> Tensor:
        loss = loss_of(net)
        opt.backward(loss)
        return loss

    with pytest.raises(RuntimeError, match=REPLACED):
        opt.step(closure)


def test_what_is_held_elsewhere_too_is_found_a_few_steps_later() -> None:
    net = built()
    opt = wrapped(net)
    kept = 2 * [*net.parameters()]
    rebuilt(net)
    for _ in range(3):
        by_backward(net, opt)
    with pytest.raises(RuntimeError, match=f"{REPLACED}4"):
        by_backward(net, opt)
    assert kept


def test_objects_that_are_frozen_may_hold_them(monkeypatch: pytest.MonkeyPatch) -> None:
    net = built()
    opt = wrapped(net)
    rebuilt(net)
    monkeypatch.setattr(gc, "get_freeze_count", lambda: 1)
    for _ in range(5):
        by_backward(net, opt)
    assert opt.stats()["steps"] == 0


def test_what_is_only_unused_is_no_error() -> None:
    """A twin that is trained alone, a head without a loss, parameters of no module, a step before any backward."""
    twins = built(), built()
    opts = [wrapped(net) for net in twins]
    for _ in range(5):
        opts[0].backward(loss_of(twins[0]))
        for opt in opts:
            opt.step()
        opts[0].zero_grad()
    with_head = nn.ModuleDict({"body": built(), "head": nn.Linear(6, 5, dtype=torch.bfloat16)})
    opt = wrapped(with_head)
    opt.step()
    by_backward(with_head["body"], opt)
    loose = [p.detach().clone().requires_grad_() for p in twins[0].parameters()]
    fast = MixedPrecisionOptimizer(SGD(loose, lr=0.1))
    del loose[1:]
    for _ in range(5):
        fast.step()
    cloned = copy.deepcopy((twins[0], opts[0]))
    rebuilt(cloned[0])
    cloned[1].step()
    assert fast.stats()["steps"] == 0


def test_what_was_stepped_and_freed_in_backward_is_not_lost() -> None:
    """Parameters of no module, of which something has let go since, beside a layer of the same shapes."""
    params = [nn.Parameter(torch.ones(3, 6).half()), nn.Parameter(torch.ones(3).half())]
    held = list(params)
    opt = MixedPrecisionOptimizer(SGD(params, lr=0.1), gradient_release=True)
    layer = nn.Linear(6, 3).half()
    layer(torch.ones(6).half()).sum().backward()
    del held
    opt.backward(sum((p.float().sum() for p in params), start=torch.zeros(())))
    opt.step()
    assert opt.stats()["steps"] == 1
