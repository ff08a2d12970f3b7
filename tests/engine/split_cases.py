"""master_weights="split": what its tests share."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD

from engine.checks import (
    Problem,
    linear_loss,
    normal,
    one_step,
    parameters,
)
from fp16opt import MixedPrecisionOptimizer
from fp16opt.split import SplitParams

SIXTEEN = (torch.float16, torch.bfloat16)


by_dtype = pytest.mark.parametrize("dtype", SIXTEEN, ids=str)


def wrap(inner: torch.optim.Optimizer, mode: str = "split", **kwargs: Any) -> Any:
    settings = {"loss_scale": 64.0} if not kwargs.keys() & {"loss_scale", "scaler", "dynamic"} else {}
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


def through_file(value: Any) -> Any:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


def half_sgd(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return SGD([{"params": params[:1]}, {"params": params[1:], "momentum": 0.5}], lr=1.0)


def trained(mode: str, dtype: torch.dtype, steps: int = 6) -> tuple[Any, list[nn.Parameter]]:
    """Masters among which bfloat16's ties are common."""
    params = [nn.Parameter(torch.full((64,), 1.0).to(dtype)), *parameters([(5, 3)], dtype)]
    opt = wrap(half_sgd(params), mode, loss_scale=1.0)
    for k in range(steps):
        one_step(opt, params, [torch.arange(64) % 9 * -(2.0**-9), gradients(params, k, False)[1]])
    return opt, params


def tensors_of(opt: Any) -> int:
    """Bytes of the model's 16-bit weights and of all tensors that the engine keeps beside optimizer state."""
    params: SplitParams = opt._params
    storages = {}
    kept = [*params.model, *params.master, *params.remainders.values(), *opt._grads.buffers.values()]
    kept += [p.grad for p in [*params.model, *params.master] if p.grad is not None]
    for shard in params.shards:
        kept += [v for v in vars(shard).values() if isinstance(v, torch.Tensor)]
        kept += [
            v for s in (shard.stats, shard.cast, shard.watch) for v in vars(s).values() if isinstance(v, torch.Tensor)
        ]
    for tensor in kept:
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
    return sum(storages.values())
