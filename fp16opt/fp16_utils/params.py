"""Master parameters kept by hand: apex.fp16_utils' helpers for scripts that had no FP16_Optimizer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_ as clip_grad_norm

__all__ = [
    "clip_grad_norm",
    "master_params_to_model_params",
    "model_grads_to_master_grads",
    "prep_param_lists",
    "to_python_float",
]


def prep_param_lists(model: nn.Module, flat_master: bool = False) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """FP32 copies of a model's trainable parameters.

    Args:
        model: Any module; not changed.
        flat_master: One copy of all parameters laid end to end, with ``.grad`` of zeros, instead of one copy each.

    Returns:
        (the parameters that require gradients, their FP32 masters), on the parameters' devices. No sync.

    Raises:
        ValueError: No parameter requires gradients.

    Example:
        >>> model_params, masters = prep_param_lists(nn.Linear(2, 1).half(), flat_master=True)
        >>> len(model_params), masters[0].shape, masters[0].dtype
        (2, torch.Size([3]), torch.float32)
    """
    model_params = [param for param in model.parameters() if param.requires_grad]
    if not model_params:
        raise ValueError("model: expected parameters that require gradients, got none. Unfreeze those to be trained.")
    copies = [param.detach().to(torch.float32, copy=True) for param in model_params]
    if not flat_master:
        return model_params, [nn.Parameter(copy) for copy in copies]
    flat = nn.Parameter(torch.cat([copy.reshape(-1) for copy in copies]))
    flat.grad = torch.zeros_like(flat)
    return model_params, [flat]


def _pairs(
    model_params: Sequence[Tensor], masters: Sequence[Tensor], flat: Tensor | None
) -> Iterator[tuple[Tensor, Tensor]]:
    """(parameter, what belongs to it: a master, or its stretch of ``flat``)."""
    if flat is None:
        if len(model_params) != len(masters):
            raise ValueError(
                f"expected as many master_params as model_params ({len(model_params)}), got {len(masters)}. "
                "Pass the two lists that prep_param_lists returned, and flat_master as it was there."
            )
        yield from zip(model_params, masters, strict=True)
        return
    sizes = [param.numel() for param in model_params]
    if len(masters) != 1 or flat.numel() != sum(sizes):
        raise ValueError(
            f"expected one flat master of {sum(sizes)} elements, got {len(masters)} with {flat.numel()} in the first. "
            "Pass the two lists that prep_param_lists returned, and flat_master as it was there."
        )
    for param, part in zip(model_params, torch.split(flat.detach(), sizes), strict=True):
        yield param, part.view(param.shape)


def model_grads_to_master_grads(
    model_params: Sequence[Tensor], master_params: Sequence[Tensor], flat_master: bool = False
) -> None:
    """Copy the model's gradients to the masters, in FP32.

    A parameter without a gradient clears its master's; in a flat master its stretch becomes zeros.

    Raises:
        ValueError: The lists do not belong together.
    """
    with torch.no_grad():
        if flat_master:
            flat = master_params[0]
            if flat.grad is None:
                flat.grad = torch.zeros_like(flat)
            for param, part in _pairs(model_params, master_params, flat.grad):
                part.zero_() if param.grad is None else part.copy_(param.grad)
            return
        for param, master in _pairs(model_params, master_params, None):
            if param.grad is None:
                master.grad = None
            else:
                if master.grad is None:
                    master.grad = torch.empty_like(master)
                master.grad.copy_(param.grad)


def master_params_to_model_params(
    model_params: Sequence[Tensor], master_params: Sequence[Tensor], flat_master: bool = False
) -> None:
    """Copy the masters down to the model, rounded to nearest even.

    Raises:
        ValueError: The lists do not belong together.
    """
    with torch.no_grad():
        for param, master in _pairs(model_params, master_params, master_params[0] if flat_master else None):
            param.copy_(master)


def to_python_float(t: Any) -> float:
    """``t.item()``, or ``t[0]`` for what has no ``item``. Syncs with the device.

    Example:
        >>> to_python_float(torch.ones(1)), to_python_float([2.0])
        (1.0, 2.0)
    """
    return float(t.item() if hasattr(t, "item") else t[0])
