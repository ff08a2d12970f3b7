"""``update_master_grads()``, the door: what is there now becomes the masters' gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from contract.worlds import HALF, INF, KEEPS, WRAPPED, Mode, by, sgd, values
from fp16opt import DynamicLossScaler, LossScaler, MixedPrecisionOptimizer

GRADS, MORE = values(0.5, 1.0, -0.5), values(1.0, -0.25, 2.0)


# -- two optimizers on one loss ----------------------------------------------------------------------------------------


def _two(modes: tuple[Mode, Mode], scalers: tuple[LossScaler, LossScaler]) -> tuple[list[nn.Parameter], list[Any]]:
    """A parameter and an optimizer each."""
    params = [nn.Parameter(torch.ones(4, dtype=HALF)) for _ in modes]
    opts = [
        MixedPrecisionOptimizer(sgd([param], lr=0.5), scaler=scaler, **mode.arguments)
        for param, mode, scaler in zip(params, modes, scalers, strict=True)
    ]
    return params, opts


def _loss(params: list[nn.Parameter]) -> torch.Tensor:
    first, second = params
    return first.float().sum() + 2.0 * second.float().sum()


@by(KEEPS)
@pytest.mark.parametrize("call", ["step", "clip"])
def test_with_scales_of_their_own_they_are_told_to_share_one(mode: Mode, call: str) -> None:
    params, (first, second) = _two((mode, mode), (DynamicLossScaler(8.0), DynamicLossScaler(8.0)))
    first.backward(_loss(params))
    first.step()
    with pytest.raises(RuntimeError, match="serves several optimizers, make them with the same scaler"):
        second.step() if call == "step" else second.clip_master_grads(1.0)
    assert params[1].tolist() == [1.0] * 4


@by(KEEPS)
def test_with_one_scaler_the_second_takes_what_the_backward_of_the_first_has_left(mode: Mode) -> None:
    """After a skip too, when the scale is another one."""
    scaler = DynamicLossScaler(16.0)
    params, opts = _two((WRAPPED, mode), (scaler, scaler))
    wanted, scales = [1.0, 1.0], []
    for factor in (1.0, INF, 1.0):
        for opt in opts:
            opt.zero_grad()
        opts[0].backward(_loss(params) * factor)
        opts[1].update_master_grads()
        scales.append(float(scaler.scale))
        for opt in opts:
            opt.step()
        if factor == 1.0:
            wanted = [wanted[0] - 0.5, wanted[1] - 1.0]
        assert [opt.step_was_skipped for opt in opts] == [factor == INF] * 2
        assert [param.tolist() for param in params] == [[want] * 4 for want in wanted]
    assert scales[2] < scales[0]
