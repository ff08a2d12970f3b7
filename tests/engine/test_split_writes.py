"""master_weights="split": writes to the model, and parameters that come later."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW

from engine.checks import assert_same_bits, normal, one_step, ones
from engine.split_cases import by_dtype, half_sgd, masters, trained, wrap


@by_dtype
def test_a_write_to_the_model_is_a_refresh(dtype: torch.dtype, caplog: pytest.LogCaptureFixture) -> None:
    p, q = ones(3, dtype), ones(3, dtype)
    opt = wrap(SGD([p, q], lr=2.0**-13), named_parameters=[("p", p), ("q", q)])
    one_step(opt, [p, q], [1.0, 1.0])
    p.data[1] = 4.0
    with caplog.at_level(logging.WARNING):
        one_step(opt, [p, q], [1.0, 1.0])
    assert "p" in caplog.text.split(":")[-1].split(".")[0]
    low = 2.0**-13
    assert masters(opt)[0].tolist() == [1 - low, 4.0 - low, 1 - low]
    assert masters(opt)[1].tolist() == [1 - 2 * low] * 3


@by_dtype
@pytest.mark.parametrize("value", [float("inf"), -float("inf"), float("nan"), -0.0, 65504.0])
def test_special_values_written_into_the_model(dtype: torch.dtype, value: float) -> None:
    p = ones(2, dtype)
    opt = wrap(SGD([p], lr=2.0**-13))
    one_step(opt, [p], [1.0])
    p.data[0] = value
    opt.refresh_masters()
    got, want = next(opt.master_params())[0], p.detach()[0].float()
    assert_same_bits(torch.nan_to_num(got, nan=7.0), torch.nan_to_num(want, nan=7.0))
    assert torch.isnan(got) == torch.isnan(want)


def test_an_infinite_half_at_construction_is_an_infinite_master() -> None:
    p = nn.Parameter(torch.tensor([float("inf"), -float("inf"), 1.0]).half())
    assert next(wrap(SGD([p], lr=1.0)).master_params()).tolist() == [float("inf"), -float("inf"), 1.0]


@by_dtype
@pytest.mark.parametrize("inner", [{"fused": True}, {}], ids=str)
def test_weights_that_are_laid_out_anew(
    inner: dict[str, Any], dtype: torch.dtype, caplog: pytest.LogCaptureFixture
) -> None:
    """Not a write; and state, gradients and masters keep one layout, without which torch's fused steps are wrong."""
    results = []
    for change in (False, True):
        model = nn.Conv2d(4, 8, 3, bias=False).to(dtype)
        with torch.no_grad():
            model.weight.copy_(normal((8, 4, 3, 3), dtype, 3))
        opt = wrap(AdamW(model.parameters(), lr=0.1, **inner))
        with caplog.at_level(logging.WARNING):
            for k in range(5):
                if change and k in (2, 4):
                    model.to(memory_format=torch.channels_last if k == 2 else torch.contiguous_format)
                one_step(opt, [model.weight], [normal((8, 4, 3, 3), torch.float32, k)])
        results.append(masters(opt)[0])
    assert "written" not in caplog.text
    assert_same_bits(results[1], results[0])


@by_dtype
def test_a_write_that_comes_with_another_layout_is_noticed(
    dtype: torch.dtype, caplog: pytest.LogCaptureFixture
) -> None:
    model = nn.Conv2d(4, 8, 3, bias=False).to(dtype)
    opt = wrap(SGD(model.parameters(), lr=2.0**-13), named_parameters=model.named_parameters())
    one_step(opt, [model.weight], [1.0])
    model.to(memory_format=torch.channels_last)
    model.weight.data[1, 2, 0, 0] = 9.0
    with caplog.at_level(logging.WARNING):
        opt.state_dict()
    assert "written by something else" in caplog.text
    assert masters(opt)[0][1, 2, 0, 0] == 9.0


def stepped_after_loading_ties() -> tuple[Any, nn.Parameter, torch.Tensor]:
    """A split wrapper that loaded the masters of a full one, ties among them; and the model that went with them."""
    source, (p, _) = trained("full", torch.bfloat16)
    fresh = [nn.Parameter(torch.zeros_like(q)) for q in source.model_params()]
    opt = wrap(half_sgd(fresh), loss_scale=1.0)
    opt.load_state_dict(source.state_dict())
    assert not torch.equal(fresh[0], p), "without ties this tests little"
    return opt, fresh[0], p.detach().clone()


def test_going_back_to_a_loaded_models_weights_is_a_write() -> None:
    """After a step the masters are others, so the weights that went with the loaded ones are news."""
    opt, param, weights = stepped_after_loading_ties()
    one_step(opt, list(opt.model_params()), [2.0**-4, None])
    with torch.no_grad():
        param.copy_(weights)
    opt.state_dict()
    assert_same_bits(masters(opt)[0], weights.float())
