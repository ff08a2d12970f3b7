"""A step's Python does not grow with the number of parameters: lists of tensors go through whole."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import fp16opt
from fp16opt import DynamicLossScaler, MixedPrecisionOptimizer, kernels

pytestmark = pytest.mark.skipif(kernels.backend("cpu") == "reference", reason="torch operations go one by one")

INSIDE = str(Path(fp16opt.__file__).resolve().parent)
HALF, SINGLE = (torch.float16,), (torch.float32,)
MIXED = (torch.float16, torch.float32)
PARTS: dict[str, tuple[tuple[torch.dtype, ...], dict[str, Any]]] = {
    "16 bits": (HALF, {}),
    "32 bits": (SINGLE, {}),
    "mixed": (MIXED, {}),
    "sums": (HALF, {"grad_accumulation": "fp32"}),
    "mixed sums": (MIXED, {"grad_accumulation": "fp32"}),
    "split": (HALF, {"master_weights": "split"}),
    "split sums": (HALF, {"master_weights": "split", "grad_accumulation": "fp32"}),
    "no masters": (HALF, {"master_weights": "none"}),
    "no masters, sums": (HALF, {"master_weights": "none", "grad_accumulation": "fp32"}),
}


def calls_of_a_step(
    count: int,
    dtypes: tuple[torch.dtype, ...],
    driven: bool,
    options: dict[str, Any],
    backwards: int = 1,
    model_clears: bool = False,
    clips_model: bool = False,
) -> int:
    """Calls of the package's functions in the fourth step of ``count`` parameters.

    Args:
        driven: by torch's GradScaler.
        backwards: of the step, where it is not driven.
        model_clears: gradients are cleared by ``model.zero_grad()``, so that those of the step before were never told.
        clips_model: where it is driven, torch's clip of the model's parameters stands between unscaling and the step.
    """
    params = [torch.nn.Parameter(torch.ones(4, dtype=dtypes[i % len(dtypes)])) for i in range(count)]
    own = {} if driven else {"scaler": DynamicLossScaler(init_scale=2.0**10)}
    opt = MixedPrecisionOptimizer(torch.optim.AdamW(params, lr=2.0**-4), **own, **options)
    grad_scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    found = 0

    def look(frame: FrameType, event: str, argument: object) -> None:
        nonlocal found
        found += event == "call" and frame.f_code.co_filename.startswith(INSIDE)

    for _ in range(4):
        found = 0
        if model_clears:
            for param in params:
                param.grad = None
        else:
            opt.zero_grad()
        losses = [torch.stack([param.float().sum() for param in params]).sum() for _ in range(backwards)]
        sys.setprofile(look)
        try:
            if driven:
                grad_scaler.scale(losses[0]).backward()
                if clips_model:
                    grad_scaler.unscale_(opt)
                    torch.nn.utils.clip_grad_norm_(params, 1.0)
                grad_scaler.step(opt)
                grad_scaler.update()
            else:
                for loss in losses:
                    opt.backward(loss)
                opt.clip_master_grads(1.0)
                opt.step()
        finally:
            sys.setprofile(None)
    return found


@pytest.mark.parametrize("fused_step", [False, "auto"])
@pytest.mark.parametrize("parts", PARTS)
def test_one_more_parameter_adds_one_call_at_most(parts: str, fused_step: Any) -> None:
    dtypes, options = PARTS[parts]
    few, many = (calls_of_a_step(n, dtypes, False, {**options, "fused_step": fused_step}) for n in (4, 24))
    assert 0 < few <= many <= few + 20


@pytest.mark.parametrize("fused_step", [False, "auto"])
@pytest.mark.parametrize("parts", PARTS)
def test_lists_are_recognised_where_a_step_has_two_backwards(parts: str, fused_step: Any) -> None:
    """FP32 gradients are set aside and added one by one, seven calls each; checking them anew would take forty more."""
    dtypes, options = PARTS[parts]
    few, many = (calls_of_a_step(n, dtypes, False, {**options, "fused_step": fused_step}, 2) for n in (4, 24))
    assert 0 < few <= many <= few + 20 * 7


@pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="from torch 2.10 on")
@pytest.mark.parametrize("fused_step", [False, "auto"])
@pytest.mark.parametrize("master_weights", ["full", "split"])
@pytest.mark.parametrize("dtypes", [HALF, SINGLE, MIXED], ids=["16 bits", "32 bits", "mixed"])
@pytest.mark.parametrize("model_clears", [False, True])
@pytest.mark.parametrize("clips_model", [False, True])
def test_under_a_grad_scaler_reads_of_gradients_are_no_calls(
    fused_step: Any, master_weights: str, dtypes: tuple[torch.dtype, ...], model_clears: bool, clips_model: bool
) -> None:
    """torch's reads ``.grad`` of each parameter four times: by compiled code, of masters too."""
    options = {"fused_step": fused_step, "master_weights": master_weights}
    few, many = (calls_of_a_step(n, dtypes, True, options, 1, model_clears, clips_model) for n in (4, 24))
    assert 0 < few == many
