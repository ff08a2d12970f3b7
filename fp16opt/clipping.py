"""clip_master_grads: by the norm that unscaling found, or, where nothing is unscaled yet, along with it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from . import late
from .accumulation import State
from .arguments import check_number
from .kernels import decisions

if TYPE_CHECKING:
    from .optimizer import MixedPrecisionOptimizer


def clip(engine: MixedPrecisionOptimizer, max_norm: float, norm_type: float, error_if_nonfinite: bool) -> Tensor:
    """What ``MixedPrecisionOptimizer.clip_master_grads`` does; its docstring says it."""
    max_norm = check_number("max_norm", max_norm)
    norm_type = check_number("norm_type", norm_type, above_zero=True)
    steps, grads, device = engine._steps, engine._grads, engine._device
    steps.ranks.check_norm_type(norm_type)
    if steps.state is State.SCALED and norm_type == 2.0 and not error_if_nonfinite and grads.makes_all_anew():
        steps.check_complete()
        engine._follow_changes()
        return steps.unscale_clipped(max_norm)
    if not engine._take_gradients():
        return torch.zeros((), device=device)
    norm = steps.norm(norm_type)
    if error_if_nonfinite and not bool(norm.isfinite()):
        raise RuntimeError(
            f"the total norm of order {norm_type} of the master gradients is {norm.item()}: it can't be clipped. "
            "Leave error_if_nonfinite=False to have step() skip, or see overflow_report() after it."
        )
    single, factor = decisions.decide_clip(norm, steps.found_inf(), max_norm)
    if not (late.is_host(device) and factor.item() == 1.0):  # elsewhere the kernel looks, so that nobody waits
        grads.scale(factor)
    return single
