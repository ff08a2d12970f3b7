"""Whole steps as CUDA graphs, pretended on the CPU: a replay does what an eager step does, overflows included."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pretended
import pytest
import torch
from replaying import record
from torch.nn import Parameter

from engine.checks import assert_same_bits, normal
from fp16opt import DynamicLossScaler, GradScaler, MixedPrecisionOptimizer

SHAPES = ((), (70,), (3, 0), (33, 65))
PLAN = [1.0, 0.5, float("inf"), 0.25, 1.0, float("nan"), float("inf"), 2.0, 1.0]


def adamw(params: list[Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=torch.tensor(0.02), fused=True, capturable=True)


class Loop:
    """A training step over inputs that stay in their place."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.params = [Parameter(normal(shape, torch.float32, k).to(dtype)) for k, shape in enumerate(SHAPES)]
        self.targets = [normal(shape, torch.float32, 40 + k) for k, shape in enumerate(SHAPES)]
        self.factor = torch.ones(())
        self.norm = torch.zeros(())

    def loss(self) -> torch.Tensor:
        pairs = zip(self.params, self.targets, strict=True)
        return sum((((p.float() * t).sum() * self.factor) for p, t in pairs), torch.zeros(()))

    def tensors(self) -> list[torch.Tensor]:
        raise NotImplementedError


class Engine(Loop):
    """fp16opt.MixedPrecisionOptimizer around FP16 weights."""

    fused_step: bool | str = "auto"

    def __init__(self) -> None:
        super().__init__(torch.float16)
        self.scaler = DynamicLossScaler(init_scale=2.0**10, growth_interval=2, hysteresis=2)
        self.opt = MixedPrecisionOptimizer(adamw(self.params), scaler=self.scaler, fused_step=self.fused_step)

    def step(self) -> None:
        self.opt.zero_grad()
        self.opt.scale_loss(self.loss()).backward()
        self.opt.update_master_grads()
        self.norm = self.opt.clip_master_grads(0.5)
        self.opt.step()

    def tensors(self) -> list[torch.Tensor]:
        inner = [v for state in self.opt.state.values() for v in state.values() if isinstance(v, torch.Tensor)]
        trackers = [self.scaler.growth_tracker, self.scaler.consecutive_skips]
        return [*self.params, *self.opt.master_params(), *inner, self.scaler.scale, *trackers, self.norm]

    def outcome(self) -> Any:
        return self.opt.step_was_skipped, self.opt.skipped_steps, self.opt.overflow_report(), self.opt.loss_scale


class Wrapped(Engine):
    """The same with torch's own fused step, told on the device to skip."""

    fused_step = False


class Face(Loop):
    """fp16opt.GradScaler and FP32 weights."""

    def __init__(self) -> None:
        super().__init__(torch.float32)
        self.scaler = GradScaler("cpu", init_scale=2.0**10, growth_interval=2, hysteresis=2)
        self.opt = adamw(self.params)

    def step(self) -> None:
        self.opt.zero_grad()
        self.scaler.scale(self.loss()).backward()
        self.scaler.unscale_(self.opt)
        self.norm = self.scaler.clip_grad_norm_(self.opt, 0.5)
        self.scaler.step(self.opt)
        self.scaler.update()

    def tensors(self) -> list[torch.Tensor]:
        inner = [v for state in self.opt.state.values() for v in state.values() if isinstance(v, torch.Tensor)]
        scale, tracker = self.scaler._scale, self.scaler._growth_tracker
        assert scale is not None
        assert tracker is not None
        return [*self.params, *inner, scale, tracker, self.norm]

    def outcome(self) -> Any:
        mine = self.scaler
        return mine.step_was_skipped(self.opt), mine.skipped_steps, mine.overflow_report(self.opt), mine.get_scale()


class AtOnce(Face):
    """The same without a call of its own to unscale."""

    def step(self) -> None:
        self.opt.zero_grad()
        self.scaler.scale(self.loss()).backward()
        self.norm = self.scaler.clip_grad_norm_(self.opt, 0.5)
        self.scaler.step(self.opt)
        self.scaler.update()


@pytest.mark.parametrize("takes_turns", [False, True], ids=["alone", "in turn with eager steps"])
@pytest.mark.parametrize("kind", [Engine, Wrapped, Face, AtOnce])
def test_replays_do_what_eager_steps_do(
    emulated_cuda: ModuleType, monkeypatch: pytest.MonkeyPatch, kind: Any, takes_turns: bool
) -> None:
    pretended.pretend(emulated_cuda, monkeypatch)
    eager, captured = kind(), kind()
    for _ in range(3):
        eager.step()
        captured.step()
    eager.step()
    with record(monkeypatch) as graph:
        captured.step()  # which is done here, as nothing is by CUDA while it captures
    skips = eager.outcome()[1]
    for k, factor in enumerate(PLAN):
        for loop, step in (eager, eager.step), (captured, graph.replay):
            loop.factor.fill_(factor)
            step()
            if takes_turns:
                loop.step()
        for n, (a, b) in enumerate(zip(captured.tensors(), eager.tensors(), strict=True)):
            assert_same_bits(a, b, f"step {k}, tensor {n}")
        assert captured.outcome() == eager.outcome(), f"step {k}"
    assert eager.outcome()[1] - skips == 3 * (1 + takes_turns)


def test_a_replay_reads_settings_that_were_loaded_later(
    emulated_cuda: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretended.pretend(emulated_cuda, monkeypatch)
    loop = Engine()
    loop.step()
    with record(monkeypatch) as graph:
        loop.step()
    other = DynamicLossScaler(init_scale=2.0**5, growth_factor=4.0, growth_interval=1)
    loop.scaler.load_state_dict(other.state_dict())
    graph.replay()
    assert loop.opt.loss_scale == 2.0**7


def test_the_recorder_replays_and_refuses_looks(emulated_cuda: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    pretended.pretend(emulated_cuda, monkeypatch)
    x = torch.ones(3)
    with record(monkeypatch) as graph:
        y = x * 2
        y.add_(1)
        z = y.view(3, 1)[1:].sum()
    x.fill_(5.0)
    graph.replay()
    assert (y.tolist(), z.item()) == ([11.0] * 3, 22.0)
    with pytest.raises(AssertionError, match="_local_scalar_dense waits"), record(monkeypatch):
        bool(z)
