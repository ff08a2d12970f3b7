"""Random sequences of what may be called in a step: every mode ends where the general path ends."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from engine.checks import linear_loss, normal, parameters
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer

from fp16opt import DynamicLossScaler, MixedPrecisionOptimizer

SHAPES = [(3, 5), (), (130,), (2, 3, 2), (0,), (7,)]
MODES: list[dict[str, Any]] = [
    {"fused_step": False},
    {"fused_step": True},
    {"fused_step": True, "master_weights": "split"},
]
KINDS: list[tuple[type[Optimizer], dict[str, Any]]] = [
    (AdamW, {"lr": 0.02}),
    (SGD, {"lr": 0.02, "momentum": 0.9}),
    (SGD, {"lr": 0.02, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    (Adam, {"lr": 0.01, "amsgrad": True, "weight_decay": 0.1, "maximize": True}),
]


class Run:
    """One mode's optimizer, and what it is told."""

    def __init__(self, seed: int, mode: dict[str, Any]) -> None:
        cls, options = KINDS[seed % 4]
        dtypes = (torch.bfloat16, torch.bfloat16, torch.float32) if seed % 2 else torch.bfloat16
        self.params = parameters(SHAPES, dtypes, seed=seed)
        groups = [{"params": self.params[:3]}, {"params": self.params[3:], "lr": 0.03}]
        self.opt = MixedPrecisionOptimizer(
            cls(groups, **options), scaler=DynamicLossScaler(64.0, growth_interval=3),
            grad_accumulation="fp32" if seed % 5 == 4 else "model", **mode,
        )  # fmt: skip
        self.norms: list[float] = []

    def backward(self, number: int, draw: list[int]) -> None:
        grads: list[Tensor | None] = [normal(s, torch.float32, number + i) for i, s in enumerate(SHAPES)]
        for i in range(len(grads)):
            if (draw[0] + i + number) % 5 == 0:
                grads[i] = None
        if draw[1] == 0 and grads[2] is not None:
            grads[2] = grads[2] * float("inf")
        self.opt.backward(linear_loss(self.params, grads), update_master_grads=bool(draw[2] % 3))

    def clip(self, max_norm: float, norm_type: float = 2.0) -> None:
        self.norms.append(float(self.opt.clip_master_grads(max_norm, norm_type)))

    def between(self, what: int) -> bool:
        """What happens before the step; False where there is none."""
        opt, masters = self.opt, list(self.opt.master_params())
        if what in (1, 2, 3, 4):
            opt.update_master_grads()
        if what == 2 and masters[0].grad is not None:
            masters[0].grad.mul_(3.0)
        if what == 3:
            masters[2].grad = None
        if what == 4:
            masters[3].grad = torch.ones_like(masters[3])
            self.clip(0.7, norm_type=3.0)
        if what in (1, 2, 3, 5):
            self.clip(0.5)
        if what in (1, 5):
            self.clip(0.25)
        if what == 6:
            opt.load_state_dict(copy.deepcopy(opt.state_dict()))
            opt.zero_grad()
        if what == 7:
            opt.refresh_masters()
        return what != 6

    def step(self, number: int, draw: list[int]) -> None:
        self.opt.zero_grad(set_to_none=bool(draw[3] % 4))
        for n in range(1 + draw[4] // 8):
            self.backward(1000 * number + 10 * n, draw)
        if self.between(draw[5]):
            self.opt.step()


@pytest.mark.parametrize("seed", range(10))
def test_random_calls(seed: int) -> None:
    """Within the roundings of some dozen steps."""
    rng = np.random.default_rng(seed)
    runs = [Run(seed, mode) for mode in MODES]
    for number in range(15):
        draw = [int(x) for x in rng.integers(0, 12, 6)]
        for run in runs:
            run.step(number, draw)
        full, *others = runs
        for mode, run in zip(MODES[1:], others, strict=True):
            what = f"{mode} step {number} {draw}"
            assert run.norms == pytest.approx(full.norms, rel=1e-5, nan_ok=True), what
            assert (run.opt.skipped_steps, run.opt.loss_scale) == (full.opt.skipped_steps, full.opt.loss_scale), what
            for a, b in zip(run.opt.master_params(), full.opt.master_params(), strict=True):
                assert torch.allclose(a.detach(), b.detach(), rtol=1e-5, atol=1e-5), what
