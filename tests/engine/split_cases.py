"""master_weights="split": what its tests share."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from specs import CASES
from torch import nn
from torch.optim import SGD

from engine.checks import (
    Problem,
    groups_params,
    linear_loss,
    normal,
    one_step,
    parameters,
    stored_grad,
    tensor_bytes,
)
from fp16opt import MixedPrecisionOptimizer

SIXTEEN = (torch.float16, torch.bfloat16)
ONE_PASS = [
    case for case in CASES if case.id.split("-")[0] in ("SGD", "Adam", "AdamW") and "differentiable" not in case.id
]
"""What kernels step: split masters take no other."""

by_dtype = pytest.mark.parametrize("dtype", SIXTEEN, ids=str)


def wrap(inner: torch.optim.Optimizer, mode: str = "split", **kwargs: Any) -> Any:
    settings = {"loss_scale": 64.0} if not kwargs.keys() & {"loss_scale", "scaler", "dynamic"} else {}
    kwargs.setdefault("fused_step", True)  # split masters have it, also where nothing is compiled and "auto" would not
    return MixedPrecisionOptimizer(inner, master_weights=mode, **settings, **kwargs)


def masters(opt: Any) -> list[torch.Tensor]:
    return [m.detach().clone() for m in opt.master_params()]


def state_of(opt: Any) -> Any:
    return opt.state_dict()["optimizer"]


def pair(case: Any, dtypes: Any, **kwargs: Any) -> tuple[list[Any], list[list[nn.Parameter]]]:
    """The same optimizer on the same parameters, full and split."""
    models = [parameters(case.shapes, dtypes) for _ in range(2)]
    return [wrap(case.make(p), mode, **kwargs) for p, mode in zip(models, ("full", "split"), strict=True)], models


def gradients(params: list[Any], step: int, sparse: bool) -> list[torch.Tensor]:
    """The same for both, so that differences are the optimizer's."""
    return [normal(p.shape, torch.float32, 100 * step + i).mul_(0.5) for i, p in enumerate(params)]


def step_both(opts: list[Any], models: list[Any], k: int, kind: str = "dense", clip: float | None = None) -> None:
    for opt, params in zip(opts, models, strict=True):
        opt.zero_grad()
        if kind == "sparse":
            opt.backward(Problem(params, sparse=True).loss(params))
        else:
            opt.backward(linear_loss(params, gradients(params, k, False)))
        if clip is not None:
            opt.clip_master_grads(clip)
        opt.step()


def half_sgd(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return SGD([{"params": params[:1]}, {"params": params[1:], "momentum": 0.5}], lr=1.0)


def trained(mode: str, dtype: torch.dtype, steps: int = 6) -> tuple[Any, list[nn.Parameter]]:
    """Masters among which bfloat16's ties are common."""
    params = [nn.Parameter(torch.full((64,), 1.0).to(dtype)), *parameters([(5, 3)], dtype)]
    opt = wrap(half_sgd(params), mode, loss_scale=1.0)
    for k in range(steps):
        one_step(opt, params, [torch.arange(64) % 9 * -(2.0**-9), gradients(params, k, False)[1]])
    return opt, params


def bytes_kept(opt: Any, before: int) -> int:
    """Bytes of all tensors made since ``before`` of them were alive, optimizer state aside.

    Those are the model's weights, and what the engine keeps beside them.
    """
    state = {t.untyped_storage().data_ptr(): t for s in opt.state.values() for t in s.values() if torch.is_tensor(t)}
    grads = [p.grad for p in opt.model_params()] + [stored_grad(m) for m in groups_params(opt)]
    return tensor_bytes(*grads) - before - sum(t.untyped_storage().nbytes() for t in state.values())
