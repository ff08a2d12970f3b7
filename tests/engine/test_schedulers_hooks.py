"""LR schedulers and step hooks: as on any torch optimizer."""

from __future__ import annotations

import contextlib
import functools
import warnings
from typing import Any

import pytest
import torch
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, LinearLR, OneCycleLR, SequentialLR, StepLR
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from engine.checks import array, assert_same_bits, by_step, linear_loss, one_step, ones
from fp16opt import MixedPrecisionOptimizer
from fp16opt.engine import wrapped_step

pytestmark = by_step

INF = float("inf")
SCHEDULERS = {
    "StepLR": lambda o: StepLR(o, 1, gamma=0.5),
    "LambdaLR": lambda o: LambdaLR(o, lambda k: 0.5**k),
    "CosineAnnealingLR": lambda o: CosineAnnealingLR(o, 4),
    "OneCycleLR": lambda o: OneCycleLR(o, max_lr=1.0, total_steps=5),
    "SequentialLR": lambda o: SequentialLR(o, [LinearLR(o, 0.5, total_iters=2), StepLR(o, 1, 0.5)], [2]),
}


@pytest.mark.parametrize("first_skipped", [False, True], ids=["clean", "first_step_skipped"])
@pytest.mark.parametrize("when", ["before_wrapping", "on_the_wrapper"])
@pytest.mark.parametrize("kind", SCHEDULERS)
def test_schedulers_work_without_false_warnings(kind: str, when: str, first_skipped: bool) -> None:
    p, plain = ones(), ones(4, torch.float32)
    reference = SGD([plain], lr=0.5, momentum=0.5)
    inner = SGD([p], lr=0.5, momentum=0.5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", message="The epoch parameter")  # older SequentialLR warns by itself
        want = SCHEDULERS[kind](reference)
        if when == "before_wrapping":
            got = SCHEDULERS[kind](inner)
            opt = MixedPrecisionOptimizer(inner, loss_scale=8.0)
        else:
            opt = MixedPrecisionOptimizer(inner, loss_scale=8.0)
            got = SCHEDULERS[kind](opt)
        for k in range(4):
            one_step(opt, [p], [INF if first_skipped and k == 0 else 0.25])
            got.step()
            reference.step()
            want.step()
            assert opt.param_groups[0]["lr"] == reference.param_groups[0]["lr"]
            assert got.get_last_lr() == want.get_last_lr()
    assert bool(torch.isfinite(p).all())
    assert not torch.equal(p.detach(), array([1.0] * 4))


@pytest.mark.parametrize("when", ["before_wrapping", "on_the_wrapper"])
def test_scheduler_continues_after_load_state_dict(when: str) -> None:
    p = ones()
    inner = SGD([p], lr=0.5)
    early = StepLR(inner, 1, gamma=0.5) if when == "before_wrapping" else None
    opt = MixedPrecisionOptimizer(inner, loss_scale=8.0)
    scheduler = early or StepLR(opt, 1, gamma=0.5)
    one_step(opt, [p], [0.0])
    scheduler.step()
    opt.load_state_dict(opt.state_dict())
    one_step(opt, [p], [0.0])
    scheduler.step()
    assert opt.param_groups[0]["lr"] == 0.125


def _record(log: list[str], word: str) -> Any:
    def hook(optimizer: Any, args: Any, kwargs: Any) -> None:
        log.append(word)

    return hook


@pytest.mark.parametrize("fused", [False, True], ids=["foreach", "fused"])
def test_wrapper_hooks_fire_on_every_call_and_wrapped_hooks_only_when_it_steps(fused: bool) -> None:
    p = ones()
    log: list[str] = []
    opt = MixedPrecisionOptimizer(AdamW([p], lr=0.5, fused=fused), loss_scale=8.0)
    opt.register_step_pre_hook(_record(log, "outer pre"))
    opt.register_step_post_hook(_record(log, "outer post"))
    opt.optimizer.register_step_pre_hook(_record(log, "inner pre"))
    opt.optimizer.register_step_post_hook(_record(log, "inner post"))
    opt.step()
    assert log == ["outer pre", "outer post"], "nothing to do"
    log.clear()
    one_step(opt, [p], [1.0])
    assert log == ["outer pre", "inner pre", "inner post", "outer post"]
    log.clear()
    one_step(opt, [p], [INF])
    assert log == ["outer pre", "outer post"], "skipped"


def test_hooks_get_their_optimizer_and_see_what_is_there() -> None:
    """The wrapper's may change the rate before the step, and sees the stepped model after it; the wrapped
    optimizer's sees true gradients."""
    p = ones()
    seen: list[Any] = []
    opt = MixedPrecisionOptimizer(SGD([p], lr=0.25), loss_scale=64.0)
    opt.register_step_pre_hook(lambda o, a, k: seen.append(o) or o.param_groups[0].update(lr=0.5))
    opt.optimizer.register_step_pre_hook(lambda o, a, k: seen.extend([o, o.param_groups[0]["params"][0].grad.tolist()]))
    opt.register_step_post_hook(lambda o, a, k: seen.append(p.tolist()))
    one_step(opt, [p], [0.5])
    assert seen == [opt, opt.optimizer, [0.5] * 4, [0.75] * 4]


@pytest.mark.parametrize("kind", ["pre", "post", "every pre", "every post"])
@pytest.mark.parametrize("fused", [False, True])
def test_a_hook_may_give_a_weight_other_memory(kind: str, fused: bool) -> None:
    """Addresses that were read before a hook do not count after it."""
    p, plain = ones(), ones()
    moved: list[torch.Tensor] = []

    def move(*_: Any) -> None:
        moved.append(p.data)  # whoever writes there is found out, and harms nothing
        p.data = p.data.clone()

    opts = [MixedPrecisionOptimizer(SGD([one], lr=0.5), loss_scale=8.0, fused_step=fused) for one in (p, plain)]
    register = {
        "pre": opts[0].optimizer.register_step_pre_hook,
        "post": opts[0].optimizer.register_step_post_hook,
        "every pre": register_optimizer_step_pre_hook,
        "every post": register_optimizer_step_post_hook,
    }
    for k in range(3):
        handle = register[kind](move)
        one_step(opts[0], [p], [0.25])
        handle.remove()
        one_step(opts[1], [plain], [0.25])
        assert_same_bits(p, plain, f"step {k}")


@pytest.mark.parametrize("watched", ["not at all", "by a profiler", "by a hook"])
@pytest.mark.parametrize("fused", [True, False], ids=["one pass", "wrapped step"])
def test_a_step_has_the_profilers_frame_where_somebody_watches(
    fused: bool, watched: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The wrapper's, and that of the optimizer within."""
    frames: list[str] = []
    true_frame = torch.autograd.profiler.record_function

    def noted(name: str, *arguments: Any) -> Any:
        frames.append(name)
        return true_frame(name, *arguments)

    p = ones()
    opt = MixedPrecisionOptimizer(SGD([p], lr=0.5), fused_step=fused)
    one_step(opt, [p], [0.25])
    monkeypatch.setattr(torch.autograd.profiler, "record_function", noted)
    if watched == "by a hook":
        opt.register_step_post_hook(lambda *_: None)
        opt.optimizer.register_step_post_hook(lambda *_: None)
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities) if watched == "by a profiler" else contextlib.nullcontext():
        one_step(opt, [p], [0.25])
    is_watched = watched != "not at all"
    assert frames.count("Optimizer.step#MixedPrecisionOptimizer.step") == is_watched
    assert fused or frames.count("Optimizer.step#SGD.step") == is_watched
    assert p.tolist() == [1.0 - 2 * 0.125] * len(p)


def test_an_own_step_of_a_subclass_has_torchs_hooks() -> None:
    class Counting(MixedPrecisionOptimizer):
        def step(self, closure: Any = None) -> Any:
            calls.append("step")
            return super().step(closure)

    calls: list[str] = []
    p = ones()
    opt = Counting(SGD([p], lr=0.5))
    opt.register_step_pre_hook(lambda *_: calls.append("before"))
    opt.register_step_post_hook(lambda *_: calls.append("after"))
    one_step(opt, [p], [0.25])
    assert calls.count("step") == 1
    assert calls[0] == "before"
    assert calls[-1] == "after"
    assert p[0].item() == 0.875


def test_a_hook_that_comes_during_a_step_is_called_from_the_next_one_on() -> None:
    calls: list[Any] = []
    p = ones()
    opt = MixedPrecisionOptimizer(SGD([p], lr=0.5))

    def evaluate() -> torch.Tensor:
        opt.zero_grad()
        loss = linear_loss([p], [0.25])
        opt.backward(loss)
        opt.register_step_post_hook(lambda *_: calls.append("after"))
        return loss

    opt.step(evaluate)
    assert calls == []
    opt.step(lambda: None)
    assert calls == ["after"]


@pytest.mark.parametrize("settings", [{"lr": 0.0}, {"lr": 0.25}, {"maximize": True}, {"weight_decay": 0.5}])
def test_what_a_pre_hook_sets_counts_also_where_it_removes_itself(settings: dict[str, Any]) -> None:
    p, plain = ones(), ones(4, torch.float32)
    inner, reference = SGD([p], lr=0.5), SGD([plain], lr=0.5)
    opt = MixedPrecisionOptimizer(inner)
    one_step(opt, [p], [0.25])
    plain.grad = torch.full((4,), 0.25)
    reference.step()
    handle = inner.register_step_pre_hook(lambda of, *_: (handle.remove(), of.param_groups[0].update(settings))[0])
    one_step(opt, [p], [0.25])
    reference.param_groups[0].update(settings)
    plain.grad = torch.full((4,), 0.25)
    reference.step()
    assert torch.equal(next(opt.master_params()), plain)


@pytest.mark.parametrize("where", ["class", "optimizer"])
def test_code_that_is_put_around_a_wrapped_step_is_called(where: str) -> None:
    """With ``functools.wraps``, as libraries do: torch's own mark of a step that has its frame is copied along."""

    class Watched(SGD):
        pass

    p = ones()
    opt = MixedPrecisionOptimizer(Watched([p], lr=0.5), fused_step=False)
    calls: list[str] = []
    inner = Watched.step

    @functools.wraps(inner)
    def around(self: Any, *arguments: Any, **settings: Any) -> Any:
        calls.append("around")
        return inner(self, *arguments, **settings)

    if where == "class":
        Watched.step = around  # type: ignore[method-assign]
    else:
        p = ones()
        wrapped = Watched([p], lr=0.5)
        wrapped.step = functools.partial(around, wrapped)  # type: ignore[method-assign]
        opt = MixedPrecisionOptimizer(wrapped, fused_step=False)
    one_step(opt, [p], [0.25])
    assert calls == ["around"]
    assert p.tolist() == [1.0 - 0.125] * len(p)


def test_code_in_the_place_of_torchs_frame_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a tracing library may put it there, before this library or after it."""
    calls: list[str] = []

    def around(step: Any) -> Any:
        @functools.wraps(step)
        def call(self: Any, *arguments: Any, **settings: Any) -> Any:
            calls.append("around")
            return step(self, *arguments, **settings)

        return call

    class Traced(SGD):
        def step(self, closure: Any = None) -> Any:
            return super().step(closure)

    monkeypatch.setattr(Optimizer, "profile_hook_step", staticmethod(around))
    monkeypatch.setattr(wrapped_step, "_FRAME", wrapped_step._frame())
    p = ones()
    opt = MixedPrecisionOptimizer(Traced([p], lr=0.5), fused_step=False)
    one_step(opt, [p], [0.25])
    assert calls[:1] == ["around"]
    assert p.tolist() == [1.0 - 0.125] * len(p)
