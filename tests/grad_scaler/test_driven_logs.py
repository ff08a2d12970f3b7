"""What is logged of a step that a GradScaler skipped by not calling the wrapper."""

from __future__ import annotations

import logging
import math
from typing import Any

import pytest
import torch
from torch.optim import SGD

from fp16opt import MixedPrecisionOptimizer
from grad_scaler.pairs import DRIVEN, Ours, Theirs, linear_loss


def _records(cls: Any, clip: bool, caplog: pytest.LogCaptureFixture) -> list[tuple[int, str]]:
    """Of the wrapper: step 0 and step 2 overflow."""
    param = torch.nn.Parameter(torch.zeros(2).half())
    opt = MixedPrecisionOptimizer(SGD([param], lr=1.0), named_parameters=[("w", param)])
    scaler = cls("cpu", init_scale=64.0)
    with caplog.at_level(logging.DEBUG, logger="fp16opt"):
        for step in range(4):
            scaler.scale(linear_loss([param], [0.5 if step % 2 else math.inf])).backward()
            if clip:
                scaler.unscale_(opt)
                opt.clip_master_grads(1.0)
            scaler.step(opt)
            scaler.update()
            opt.zero_grad()
    assert opt.skipped_steps == 2
    assert not any("dynamic=True" in record.getMessage() for record in caplog.records)
    return [(r.levelno, r.getMessage()) for r in caplog.records if "by the GradScaler" in r.getMessage()]


@DRIVEN
@pytest.mark.parametrize("clip", [True, False])
@pytest.mark.parametrize(
    ("cls", "levels"), [(Theirs, [logging.INFO, logging.WARNING]), (Ours, [logging.DEBUG] * 2)], ids=["torch", "ours"]
)
def test_a_skip_of_the_scalers_is_called_that(
    cls: Any, levels: list[int], clip: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Louder after the first step that was taken; only for the curious where the GradScaler has logged it."""
    message = "step skipped by the GradScaler: non-finite gradients in w (inf)."
    assert _records(cls, clip, caplog) == [(level, message) for level in levels]


def test_a_skip_of_the_wrappers_own_still_advises(caplog: pytest.LogCaptureFixture) -> None:
    param = torch.nn.Parameter(torch.zeros(2).half())
    opt = MixedPrecisionOptimizer(SGD([param], lr=1.0))
    opt.backward((param.float() * 1e6).sum())
    opt.step()
    assert "Use a lower scale or dynamic=True" in caplog.text
