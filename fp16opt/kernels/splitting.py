"""The operations on split masters: a 16-bit weight and a 16-bit remainder in place of a float32."""

from __future__ import annotations

import torch

from . import reference_split
from .calls import Entries, PointerTables
from .stats import CastStats, check_given
from .tables import JOIN, SPLIT, call_for

__all__ = ["multi_tensor_join", "multi_tensor_split"]


def multi_tensor_split(
    masters: Entries,
    params: Entries,
    remainders: Entries,
    stats: CastStats,
    *,
    tables: PointerTables | None = None,
) -> None:
    """Write ``masters[i]`` as the weight ``params[i]`` and the remainder ``remainders[i]``, with flags.

    bfloat16: exact for every float32; the weight is rounded to nearest, ties away from zero. float16: the weight is
    rounded to nearest, ties to even; exact for magnitudes from 2^-16 up to 65520, below within 2^-40. From 65520 on the
    weight is inf, and the master is kept to 9 bits. With int8 remainders masters have 24 bits, rounded to nearest: see
    :mod:`fp16opt.kernels.reference_split`.

    Args:
        masters: n float32 tensors.
        params: n float16 or bfloat16 tensors of the same shapes. Written.
        remainders: n int16 or int8 tensors of the same shapes. Written.
        stats: for n tensors, as :func:`multi_tensor_cast` fills them.
        tables: the cache of this call site.

    Raises:
        TypeError, ValueError: as :func:`multi_tensor_unscale`.

    Example:
        >>> master, weight, rest = torch.tensor([1 + 2**-20]), torch.zeros(1).bfloat16(), torch.zeros(1).short()
        >>> multi_tensor_split([master], [weight], [rest], CastStats.allocate(1, "cpu"))
        >>> weight.item(), rest.item()
        (1.0, 8)
    """
    lists = (masters, params, remainders)
    if tables is not None and tables.repeats("split", lists, (stats.overflow,), True):
        return
    with torch.no_grad():
        call = call_for(SPLIT, lists, tables, stats.overflow.device)
        plan = call.plan
        check_given(SPLIT.name, plan, {}, stats)
        for _, row in plan.by_reference:
            master, param, remainder = call.row(row)
            reference_split.split(row, master, param, remainder, stats)
        if plan.serving is not None:
            plan.serving.launch(call, "split", stats.overflow, results=(stats.overflow,))


def multi_tensor_join(
    params: Entries, remainders: Entries, outs: Entries, *, tables: PointerTables | None = None
) -> None:
    """``outs[i]`` becomes the master that ``params[i]`` and ``remainders[i]`` stand for.

    Args:
        params: n float16 or bfloat16 tensors.
        remainders: n int16 or int8 tensors of the same shapes.
        outs: n float32 tensors of the same shapes. Written.
        tables: the cache of this call site.

    Raises:
        TypeError, ValueError: as :func:`multi_tensor_unscale`.

    Example:
        >>> out = torch.zeros(1)
        >>> multi_tensor_join([torch.ones(1).bfloat16()], [torch.tensor([8], dtype=torch.int16)], [out])
        >>> out.item() == 1 + 2**-20
        True
    """
    if tables is not None and tables.repeats("join", (params, remainders, outs), (), True):
        return
    with torch.no_grad():
        call = call_for(JOIN, (params, remainders, outs), tables, None)
        for _, row in call.plan.by_reference:
            param, remainder, out = call.row(row)
            reference_split.join(param, remainder, out)
        if call.plan.serving is not None:
            call.plan.serving.launch(call, "join")
