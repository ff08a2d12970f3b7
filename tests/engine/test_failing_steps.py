"""Exceptions from the wrapped optimizer and from step hooks: everything stays as it was, or a whole step is taken."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.optim import SGD

from engine import recipes
from engine.checks import (
    array,
    assert_model_is_rounded_masters,
    assert_same_bits,
    by_step,
    linear_loss,
    one_step,
    ones,
)

pytestmark = by_step


class _Fragile(SGD):
    """Raises where told: before it changes anything, or after the first group."""

    fails: str | None = None

    def step(self, closure: Any = None) -> Any:
        if self.fails == "before":
            raise ValueError("wrapped optimizer failed")
        if self.fails == "midway":
            with torch.no_grad():
                self.param_groups[0]["params"][0].add_(1.0)
            raise ValueError("wrapped optimizer failed")
        return super().step(closure)


@pytest.mark.parametrize("fails", ["before", "midway"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_a_wrapped_step_that_raises_counts_as_taken_with_one_line(
    dtype: torch.dtype, fails: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The engine can't see what a class has written, so one that raises in its first line counts too."""
    p, q = ones(4, dtype), ones(4, dtype)
    inner = _Fragile([p, q], lr=0.5)
    opt = recipes.engine(inner, init_scale=8.0, growth_interval=1)
    opt.backward(linear_loss([p, q], [0.25, 0.25]))
    inner.fails = fails
    with pytest.raises(ValueError, match="wrapped optimizer failed"):
        opt.step()
    said = [record.getMessage() for record in caplog.records if "stopped a step in the middle" in record.getMessage()]
    assert len(said) == 1
    assert "load the last checkpoint" in said[0]
    assert (opt.stats()["steps_taken"], opt.skipped_steps, float(opt.loss_scale)) == (1, 0, 16.0)
    assert_model_is_rounded_masters(opt)
    assert_same_bits(p, array([1.0 if fails == "before" else 2.0] * 4, dtype))
    inner.fails = None
    opt.zero_grad()
    one_step(opt, [p, q], [0.5, 0.5])
    assert_model_is_rounded_masters(opt)
    assert_same_bits(q, array([0.75] * 4, dtype))
    assert len(caplog.records) == 1
