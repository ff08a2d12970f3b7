"""What an unscaling pass would find, of gradients that stay as they are."""

from __future__ import annotations

import torch
from torch import Tensor

from . import _check_grad_stats, _check_result, _compiled, _watched_call, reference
from .stats import GradStats
from .tables import CHECK, Entries, PointerTables, Watch, call_for

__all__ = ["multi_tensor_check"]


def multi_tensor_check(
    grads: Entries,
    inv_scale: Tensor,
    stats: GradStats,
    *,
    watch: Watch | None = None,
    tables: PointerTables | None = None,
) -> None:
    """What ``multi_tensor_unscale`` into float32 would find: flags and norm of ``grads[i] * inv_scale``.

    Args:
        grads: n tensors: float16, bfloat16 or float32. They stay as they are.
        inv_scale, stats, watch, tables: as for :func:`multi_tensor_unscale`.

    Raises:
        TypeError, ValueError: as :func:`multi_tensor_unscale`.

    Example:
        >>> stats = GradStats.allocate(1, "cpu")
        >>> multi_tensor_check([torch.full((2,), 6.0).half()], torch.tensor(0.5), stats)
        >>> stats.sumsq.item(), stats.found_inf.item()
        (18.0, 0.0)
    """
    with torch.no_grad():
        call = call_for(CHECK, (grads, grads), tables)
        device = call.plan.device or stats.norm.device
        _check_result(CHECK.name, "inv_scale", inv_scale, 1, torch.float32, device)
        _check_grad_stats(stats, call.plan.count, device)
        compiled = _compiled(device) if device.type == "cpu" else None
        watched = _watched_call(CHECK.name, watch, call.plan.count, device, compiled)
        for place, row in call.for_reference(compiled is not None):
            grad = call.columns[0][place]
            out = torch.empty_like(grad, dtype=torch.float32)
            reference.unscale(row, grad, out, inv_scale.view(()), False, False, stats)
        if compiled is not None:
            compiled.unscale(call, inv_scale, False, False, stats, watched, watch)
        else:
            reference.finish(stats)
