"""What must be the same on every rank: as lines to compare before the first message, and as values to hash later."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ..local import is_sharded

if TYPE_CHECKING:
    from ..optimizer import MixedPrecisionOptimizer


def facts(engine: MixedPrecisionOptimizer) -> list[str]:
    """What must be the same on every rank, one line each, in an order in which the first difference tells most."""
    params = engine._params
    groups = engine.optimizer.param_groups
    lines = [f"the wrapped optimizer {type(engine.optimizer).__name__}", f"{len(groups)} param_groups"]
    lines += [f"{len(group['params'])} parameters in group {number}" for number, group in enumerate(groups)]
    everywhere = _is_zero(engine)
    models = [p for group in groups for p in group["params"]] if everywhere else params.model
    for i, param in enumerate(models):
        name = f"parameter {i}" if everywhere else repr(params.names[i])
        layout = f" {getattr(param, 'placements', '')}".rstrip()
        lines.append(f"{name} as {param.dtype} {list(param.shape)}{layout}, requires_grad={param.requires_grad}")
    for number, group in enumerate(groups):
        settings = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        lines += [f"group {number} with {key}={_shown(value)}" for key, value in sorted(settings.items())]
    lines.append(f"grad_accumulation={engine.grad_accumulation!r}")
    lines.append(f"master_weights={engine.master_weights!r}, fused_step={engine._fused.wanted!r}")
    scaler = engine.scaler.state_dict()
    return lines + [f"a scaler with {key}={_shown(value)}" for key, value in scaler.items()]


def digest(engine: MixedPrecisionOptimizer) -> tuple[list[str], list[torch.Tensor], str]:
    """Names and values of what ranks that share gradients hold alike, and the scaler."""
    params = engine._params
    scaler = repr({key: _shown(value) for key, value in engine.scaler.state_dict().items()})
    if _is_zero(engine):
        models = [p for group in engine.optimizer.param_groups for p in group["params"]]
        return [f"parameter {i}" for i in range(len(models))], models, scaler
    names: list[str] = []
    values: list[torch.Tensor] = []
    for i in range(len(params)):
        if is_sharded(params.model[i]):
            continue
        operand = params.operand(i)
        is_split = operand is not params.master[i]  # then weight and remainder are the master
        parts = [params.model[i], operand] if is_split else [operand]
        names += [f"the master of {params.names[i]!r}"] * len(parts)
        values += parts
    return names, values, scaler


def _shown(value: object) -> str:
    return str(value.tolist()) if isinstance(value, torch.Tensor) else repr(value)


def _is_zero(engine: MixedPrecisionOptimizer) -> bool:
    return engine._holder is not engine.optimizer
