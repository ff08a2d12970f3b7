"""How many kernels a step launches on a device besides the wrapped optimizer's own; pretended on the CPU.

In one pass, that of the kernel which steps is the optimizer's."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pretended
import pytest
import torch
from torch.nn import Parameter

from engine.checks import by_step, steps_in_one_pass
from fp16opt import DynamicLossScaler, LossScaler, MixedPrecisionOptimizer, StaticLossScaler

MOST = 8  # kernels; two of them look at samples of the model, before the step and after it
SHAPES = ((70,), (33, 65), (), (3, 0), (5,))
INNER: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.02, fused=True),
    "capturable AdamW": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.02), fused=True, capturable=True),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.02, fused=True),
}


def plain(opt: MixedPrecisionOptimizer) -> None:
    opt.update_master_grads()
    opt.step()


def clipped(opt: MixedPrecisionOptimizer) -> None:
    opt.update_master_grads()
    opt.clip_master_grads(0.1)
    opt.step()


def at_once(opt: MixedPrecisionOptimizer) -> None:
    opt.clip_master_grads(0.1)
    opt.step()


class Training:
    """An engine in the middle of a run, whose gradients come without autograd."""

    def __init__(self, make: Callable[..., torch.optim.Optimizer], dtypes: tuple[torch.dtype, ...], **settings: Any):
        self.params = [Parameter(torch.ones(shape, dtype=dtypes[k % len(dtypes)])) for k, shape in enumerate(SHAPES)]
        self.grads: list[torch.Tensor] = []
        settings.setdefault("scaler", DynamicLossScaler(init_scale=2.0**10, growth_interval=2))
        self.opt = MixedPrecisionOptimizer(make(self.params), **settings)

    def prepare(self, value: float) -> None:
        self.opt.zero_grad()
        self.opt.scale_loss(torch.zeros(()))
        before, self.grads = self.grads, [torch.full_like(param, value) for param in self.params]
        for param, grad in zip(self.params, self.grads, strict=True):
            param.grad = grad
        del before  # so that each step finds its gradients at other addresses

    def count(self, native: pretended.Counting, flow: Callable[..., None], value: float) -> Counter[str]:
        for _ in range(3):
            self.prepare(64.0)
            flow(self.opt)
        self.prepare(value)
        return pretended.launched(self.opt.optimizer, native, lambda: flow(self.opt))


@pytest.fixture
def native(emulated_cuda: ModuleType, monkeypatch: pytest.MonkeyPatch) -> pretended.Counting:
    pretended.pretend(emulated_cuda, monkeypatch)
    return pretended.counting(monkeypatch)


@by_step
@pytest.mark.parametrize("value", [64.0, float("inf")], ids=["step", "overflow"])
@pytest.mark.parametrize("policy", ["refresh", "ignore"])
@pytest.mark.parametrize("flow", [plain, clipped, at_once])
@pytest.mark.parametrize("inner", list(INNER))
def test_few_kernels_besides_the_optimizers(
    native: pretended.Counting, inner: str, flow: Callable[..., None], policy: str, value: float
) -> None:
    training = Training(INNER[inner], (torch.float16,), on_model_write=policy)
    in_one_pass = steps_in_one_pass(training.opt)
    ours = training.count(native, flow, value)
    assert ours["copy"] <= 1 + (flow is at_once and not in_one_pass), "addresses of gradients, where they are read"
    assert ours["sample"] in (0, 2), "of the model, before the step and after it"
    assert {launches for name, launches in ours.items() if name not in ("sample", "copy")} <= {0, 1}, ours
    steps = sum(ours[name] for name in ("adam", "amsgrad", "sgd", "momentum"))
    assert steps == in_one_pass
    assert 2 <= ours.total() - steps - ours["copy"] <= MOST
    assert training.opt.step_was_skipped is (value != 64.0)


@pytest.mark.parametrize("value", [64.0, float("inf")], ids=["step", "overflow"])
@pytest.mark.parametrize("scaler", [None, DynamicLossScaler(8.0), StaticLossScaler(8.0)], ids=["one", "own", "static"])
def test_as_few_with_fp32_parameters_among_them(
    native: pretended.Counting, scaler: LossScaler | None, value: float
) -> None:
    given = {} if scaler is None else {"scaler": scaler}
    training = Training(INNER["AdamW"], (torch.float16, torch.float32, torch.bfloat16), fused_step=False, **given)
    ours = training.count(native, clipped, value)
    assert ours.pop("copy") <= 2, "FP32 gradients are scaled until the check: they are looked at with the others"
    assert ours["unscale"] == 1
    assert ours.pop("sample") in (1, 2)
    assert 2 <= ours.total() <= MOST
    assert set(ours.values()) == {1}


@pytest.mark.parametrize("inner", ["AdamW", "SGD"])
@pytest.mark.parametrize("masters", ["full", "split"])
def test_kernels_that_mark_what_changes_are_launched_in_place_of_others(
    native: pretended.Counting, inner: str, masters: str
) -> None:
    """Not beside them, and with no copy of the weights."""
    found = []
    for tracks in (False, True):
        training = Training(INNER[inner], (torch.float16,), track_changes=tracks, master_weights=masters)
        found.append(training.count(native, clipped, 64.0))
    plainly, marking = found
    for each in found:
        assert each.pop("copy") <= 2, "addresses: how many lists have new ones is the allocator's choice"
    writers = {name for name in plainly if f"{name}_marking" in marking}
    assert len(writers) == 1
    assert marking == Counter({f"{name}_marking" if name in writers else name: n for name, n in plainly.items()})


def test_a_loss_is_scaled_and_gradients_cleared_with_two_more(native: pretended.Counting) -> None:
    training = Training(INNER["AdamW"], (torch.float16,))
    training.count(native, clipped, 64.0)
    loss = torch.zeros(())

    def begin() -> None:
        training.opt.zero_grad()
        training.opt.scale_loss(loss)

    ours = +pretended.launched(training.opt.optimizer, native, begin)
    assert ours.total() <= 2
    assert ours["mul"] == 1, "of the loss"


def test_the_counter_sees_what_is_launched(native: pretended.Counting) -> None:
    training = Training(INNER["AdamW"], (torch.float16,))
    training.prepare(1.0)

    def more() -> None:
        torch.ones(2).add_(1)
        plain(training.opt)

    assert pretended.launched(training.opt.optimizer, native, more)["add_"] == 1


class Slower(DynamicLossScaler):
    """A subclass that adds to the rule."""

    def update(self, found_inf: torch.Tensor) -> None:
        super().update(found_inf)
        self._scale.mul_(0.5)


@by_step
def test_a_scaler_with_a_rule_of_its_own_keeps_it(native: pretended.Counting) -> None:
    alone, scaler = Slower(), Slower()
    training = Training(INNER["SGD"], (torch.float16,), scaler=scaler)
    for value in (64.0, float("nan"), 64.0):
        training.prepare(value)
        plain(training.opt)
        alone.update(torch.tensor(float(value != 64.0)))
    assert scaler.scale.item() == alone.scale.item()
    assert training.opt.skipped_steps == 1


@by_step
def test_two_scalers_and_folded_gradients_are_closed_as_on_the_host(
    emulated_cuda: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run() -> tuple[Any, ...]:
        params = [Parameter(torch.ones(4).half()), Parameter(torch.ones(3).half())]
        first, second = DynamicLossScaler(64.0, growth_interval=1), DynamicLossScaler(16.0, growth_interval=1)
        opt = MixedPrecisionOptimizer(INNER["AdamW"](params), scaler=first)
        for bad in (0.0, float("inf"), 0.0):
            opt.zero_grad()
            opt.backward(params[0].float().sum())
            opt.backward((params[1].float() * (1.0 + bad)).sum(), scaler=second)
            opt.step()
        report = opt.overflow_report()
        return [p.detach().clone() for p in params], first.state_dict(), second.state_dict(), opt.skipped_steps, report

    wanted = run()
    pretended.pretend(emulated_cuda, monkeypatch)
    got = run()
    assert got[3:] == wanted[3:] == (1, [])
    assert got[1:3] == wanted[1:3]
    assert all(map(torch.equal, got[0], wanted[0]))


@by_step
def test_an_overflow_is_reported_once(native: pretended.Counting) -> None:
    training = Training(INNER["AdamW"], (torch.float16,))
    training.prepare(64.0)
    plain(training.opt)
    training.prepare(64.0)
    grad = training.params[1].grad
    assert grad is not None
    grad[3, 3] = float("nan")
    plain(training.opt)
    assert [str(overflow) for overflow in training.opt.overflow_report()] == ["group 0, param 1 (nan)"]
    training.prepare(64.0)
    plain(training.opt)
    assert training.opt.overflow_report() == []
