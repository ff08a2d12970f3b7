"""Which losses the notice of a skipped step names."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from torch.nn import functional as F

from fp16opt import amp

from .nets import X, Y, net, sgd


def test_the_notice_names_only_losses_of_the_step_that_is_skipped(caplog: pytest.LogCaptureFixture) -> None:
    first, second = net(), net(3)
    optimizers = [sgd(first), sgd(second)]
    amp.initialize([first, second], optimizers, opt_level="O2", num_losses=3)

    def notice(optimizer: Any, model: Any, losses: dict[int, float]) -> list[str]:
        caplog.clear()
        for loss_id, factor in losses.items():
            with amp.scale_loss(F.cross_entropy(model(X), Y) * factor, optimizer, loss_id=loss_id) as scaled:
                scaled.backward()
        with caplog.at_level(logging.INFO):
            optimizer.step()
        optimizer.zero_grad()
        return [record.getMessage() for record in caplog.records if "overflow in loss" in record.getMessage()]

    bad, good = float("inf"), 1.0
    both = notice(optimizers[0], first, {0: bad, 1: bad})
    assert both == ["gradient overflow in loss 0, 1: skipping the step."]
    assert notice(optimizers[1], second, {2: bad}) == ["gradient overflow in loss 2: skipping the step."]
    assert notice(optimizers[0], first, {0: bad, 1: good}) == ["gradient overflow in loss 0: skipping the step."]


def test_the_notice_of_an_overflow_that_a_clean_backward_follows(caplog: pytest.LogCaptureFixture) -> None:
    model = net()
    optimizer = sgd(model)
    amp.initialize(model, optimizer, opt_level="O2")
    for factor in (float("inf"), 1.0):
        with amp.scale_loss(F.cross_entropy(model(X), Y) * factor, optimizer) as scaled:
            scaled.backward()
    with caplog.at_level(logging.INFO):
        optimizer.step()
    assert "gradient overflow in loss 0" in caplog.text
