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


def calls_of_a_step(count: int, dtypes: tuple[torch.dtype, ...], driven: bool, options: dict[str, Any]) -> int:
    """Calls of the package's functions in the fourth step of ``count`` parameters."""
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
        opt.zero_grad()
        loss = torch.stack([param.float().sum() for param in params]).sum()
        sys.setprofile(look)
        try:
            if driven:
                grad_scaler.scale(loss).backward()
                grad_scaler.step(opt)
                grad_scaler.update()
            else:
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


@pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="from torch 2.10 on")
@pytest.mark.parametrize("fused_step", [False, "auto"])
def test_under_a_grad_scaler_reads_of_gradients_are_no_calls(fused_step: Any) -> None:
    """torch's reads ``.grad`` of each parameter four times: by compiled code, of masters too."""
    few, many = (calls_of_a_step(n, HALF, True, {"fused_step": fused_step}) for n in (4, 24))
    assert 0 < few == many
