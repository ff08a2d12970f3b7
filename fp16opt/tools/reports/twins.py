"""A copy of an optimizer that steps the same model: what a check trains with, so that the user's own is not touched."""

from __future__ import annotations

import copy
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ...engine.parts import inside, is_wrapper
from ...engine.wrapped_step import extras
from ...optimizer import MixedPrecisionOptimizer
from ...scaling import DynamicLossScaler


def held_by(optimizer: object) -> Optimizer | None:
    """The optimizer that a trainer's object holds, or the object itself; None of None.

    Raises:
        TypeError: It is no optimizer, or one of which there is no copy to train with.
    """
    if optimizer is None:
        return None
    held = inside(optimizer)
    within = None if is_wrapper(held) else getattr(held, "optimizer", None)
    if isinstance(held, Optimizer) and isinstance(within, Optimizer) and within.param_groups is held.param_groups:
        held = within  # of Accelerate's, around one that is not wrapped
    if not isinstance(held, Optimizer):
        raise TypeError(
            f"optimizer: expected a torch optimizer or a MixedPrecisionOptimizer, got {type(optimizer).__name__}. A "
            "GradScaler goes by scaler=."
        )
    if not is_wrapper(held) and hasattr(held, "amp"):
        raise TypeError(
            f"optimizer: amp.initialize has made this {type(held).__name__}, at a level without master weights, and "
            "its scale is amp's. Check model and optimizer before amp.initialize, or at O2."
        )
    if isinstance(held, MixedPrecisionOptimizer) and held.gradient_release:
        raise ValueError(
            "optimizer: gradient_release=True steps parameters in every backward, and leaves no gradient to look at. "
            "Check the same model with an optimizer that was made without it."
        )
    return held


def params_of(optimizer: Optimizer | None, model: nn.Module | None = None) -> list[Tensor]:
    """The parameters that are stepped: the model's own, and not masters. Of None: those of ``model`` that train."""
    if isinstance(optimizer, MixedPrecisionOptimizer):
        return list(optimizer.model_params())
    if optimizer is not None:
        return [param for group in optimizer.param_groups for param in group["params"]]
    return [] if model is None else [param for param in model.parameters() if param.requires_grad]


def twin_of(
    optimizer: Optimizer | None,
    model: nn.Module,
    scaler: torch.amp.GradScaler | None,
    lr: float,
) -> MixedPrecisionOptimizer:
    """A ``MixedPrecisionOptimizer`` over the same parameters, with copies of everything else.

    Args:
        optimizer: One that is not wrapped gets FP32 masters in the copy: what its 16-bit weights lose is seen there.
            None: AdamW.
        scaler: Of the loop, enabled: its scale becomes the copy's.
        lr: Of that AdamW.

    Raises:
        TypeError: A copy could not be made.
    """
    names = list(model.named_parameters())
    scale = None if scaler is None else _starting_at(float(scaler.get_scale()))
    if optimizer is None:
        plain = torch.optim.AdamW([param for _, param in names if param.requires_grad], lr=lr)
        return MixedPrecisionOptimizer(plain, scaler=scale, named_parameters=names)
    made = _copied(optimizer, [*model.parameters(), *params_of(optimizer, model)])
    if not isinstance(made, MixedPrecisionOptimizer):
        return MixedPrecisionOptimizer(made, scaler=scale, named_parameters=names)
    if scale is None and hasattr(made, "amp"):  # of apex's face the scale is amp's, and the wrapper's own is 1
        scale = _starting_at(float(made.amp.scalers[0].scale))
    if scale is not None:
        made.scaler = scale.to(made.device)
    return made


def _starting_at(scale: float) -> DynamicLossScaler:
    """A scale that another scaler has by now, as far as one of ours may have it."""
    ours = DynamicLossScaler()
    return DynamicLossScaler(init_scale=min(max(scale, ours.min_scale), ours.max_scale))


def _copied(optimizer: Optimizer, shared: Iterable[Tensor]) -> Optimizer:
    """A deep copy that steps the same parameters."""
    memo: dict[int, object] = {id(param): param for param in shared}
    try:
        made = copy.deepcopy(optimizer, memo)
        for name, value in {} if is_wrapper(optimizer) else extras(optimizer).items():
            made.__dict__.setdefault(name, copy.deepcopy(value, memo))
    except Exception as error:  # whatever a class keeps that can't be copied
        told = f"{type(error).__name__}: {error}"
        raise TypeError(
            f"optimizer: no copy of this {type(optimizer).__name__} could be made ({told}), and the check trains with "
            "a copy. Leave the optimizer out, and say lr=."
        ) from error
    return made
