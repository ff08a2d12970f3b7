"""Which losses the notice of a skipped step names, and arguments that would be misread in silence."""

from __future__ import annotations

import logging
import re
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from fp16opt import amp

from .nets import X, Y, backward, net, sgd


def test_the_notice_names_only_losses_of_the_step_that_is_skipped(caplog: pytest.LogCaptureFixture) -> None:
    first, second = net(), net(3)
    optimizers = [sgd(first), sgd(second)]
    amp.initialize([first, second], optimizers, opt_level="O2", num_losses=3)

    def notice(optimizer: Any, model: Any, losses: dict[int, float]) -> list[str]:
        caplog.clear()
        for loss_id, factor in losses.items():
            backward(model, optimizer, factor, loss_id=loss_id)
        with caplog.at_level(logging.INFO):
            optimizer.step()
        optimizer.zero_grad()
        assert len(caplog.records) == 1, "one line a skip"
        return re.findall(r"of loss [0-9, ]+", caplog.text)

    bad, good = float("inf"), 1.0
    both = notice(optimizers[0], first, {0: bad, 1: bad})
    assert both == ["of loss 0, 1"]
    assert notice(optimizers[1], second, {2: bad}) == ["of loss 2"]
    assert notice(optimizers[0], first, {0: bad, 1: good}) == ["of loss 0"]


def test_the_notice_of_an_overflow_that_a_clean_backward_follows(caplog: pytest.LogCaptureFixture) -> None:
    model = net()
    optimizer = sgd(model)
    amp.initialize(model, optimizer, opt_level="O2")
    for factor in (float("inf"), 1.0):
        backward(model, optimizer, factor)
    with caplog.at_level(logging.INFO):
        optimizer.step()
    assert len(caplog.records) == 1
    assert "non-finite gradients in " in caplog.text


def test_a_loss_for_no_optimizer_is_refused() -> None:
    model = net()
    optimizer = sgd(model)
    amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    loss = F.cross_entropy(model(X), Y)
    refused = pytest.raises(amp.AmpError, match="optimizers: expected one or several, got an empty list")
    with refused, amp.scale_loss(loss, []):
        pass


@pytest.mark.parametrize(("enabled", "is_half"), [("False", False), ("True", True), (0, False), (1, True)])
def test_enabled_may_come_from_a_command_line(enabled: Any, is_half: bool) -> None:
    model = net()
    amp.initialize(model, sgd(model), enabled=enabled, opt_level="O3", verbosity=0)
    assert all((p.dtype == torch.float16) == is_half for p in model.parameters())


def test_enabled_must_be_a_bool_if_it_is_a_string() -> None:
    model = net()
    with pytest.raises(amp.AmpError, match="enabled: expected True, False, 'True' or 'False', got 'no'"):
        amp.initialize(model, sgd(model), enabled="no")
