"""torch.compile of the step, of the whole iteration and of the model: the engine runs as it is, with the same bits."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fp16opt import MixedPrecisionOptimizer


@pytest.fixture(autouse=True)
def _nothing_compiled() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Run:
    """A model of BF16 weights with an FP32 norm, its optimizer, and one iteration of the loop."""

    def __init__(self, settings: dict[str, Any]) -> None:
        torch.manual_seed(0)
        self.model: Any = nn.Sequential(nn.Linear(4, 8).bfloat16(), nn.Tanh(), nn.Linear(8, 2).bfloat16())
        self.opt = MixedPrecisionOptimizer(
            torch.optim.AdamW(self.model.parameters(), lr=0.125), loss_scale=8.0, **settings
        )
        self.forward: Callable[[Tensor], Tensor] = self.model
        self.step: Callable[[], Any] = self.opt.step

    def iterate(self, rows: Tensor) -> None:
        self.opt.zero_grad()
        self.opt.backward(self.forward(rows).float().square().mean())
        self.opt.clip_master_grads(0.5)
        self.step()

    def masters(self) -> list[Tensor]:
        return [master.detach().clone() for master in self.opt.master_params()]


def compiled(run: Run, what: str) -> Callable[[Tensor], None]:
    if what == "step":
        run.step = torch.compile(run.opt.step, backend="eager")
    if what == "model":
        run.forward = torch.compile(run.model, backend="eager")
    if what == "iteration":
        return torch.compile(run.iterate, backend="eager")
    return run.iterate


@pytest.mark.parametrize("settings", [{}, {"fused_step": False}, {"master_weights": "split"}], ids=str)
@pytest.mark.parametrize("what", ["step", "iteration", "model"])
def test_what_is_compiled_trains_to_the_same_bits(what: str, settings: dict[str, Any]) -> None:
    plain, other = Run(settings), Run(settings)
    iterate = compiled(other, what)
    for k in range(4):
        rows = torch.randn(3, 4, generator=torch.Generator().manual_seed(k)).bfloat16()
        plain.iterate(rows)
        with contextlib.redirect_stderr(io.StringIO()):
            iterate(rows)
    assert other.opt.stats()["steps_taken"] == 4
    for a, b in zip(other.masters(), plain.masters(), strict=True):
        assert torch.equal(a, b)
