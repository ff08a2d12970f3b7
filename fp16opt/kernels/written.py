"""The operations on weights that were written since a sample of them was taken."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from . import cuda, reference, reference_split
from .calls import Entries, Operation, PointerTables
from .stats import check_result
from .tables import RENEW, TAKE, call_for

__all__ = ["multi_tensor_renew", "multi_tensor_take"]


def multi_tensor_take(
    masters: Entries,
    params: Entries,
    now: Tensor,
    then: Tensor,
    taken: Tensor,
    *,
    tables: PointerTables | None = None,
) -> None:
    """Masters take the values of params that were written since a sample was taken, and nobody waits to know whether.

    Where ``now[i]`` is not ``then[i]``, ``masters[i]`` takes the elements of ``params[i]`` whose bits are not those of
    the rounded master; the other elements keep their low bits. Other masters are not read.

    Args:
        masters: n float32 tensors. Written.
        params: n float16 or bfloat16 tensors of the same shapes.
        now, then: int64, shape [n]. Digests of the params, as :func:`multi_tensor_sample` gives them.
        taken: int32, shape [n]. Set to 1 where an element was taken; never cleared.
        tables: the cache of this call site.

    Raises:
        TypeError, ValueError: as :func:`multi_tensor_unscale`.

    Example:
        >>> masters, digests = [torch.tensor([1.0001, 2.0])], torch.zeros(2, 1, dtype=torch.int64)
        >>> digests[0] = 1
        >>> multi_tensor_take(masters, [torch.tensor([1.0, 3.0]).half()], *digests, torch.zeros(1, dtype=torch.int32))
        >>> masters[0]
        tensor([1.0001, 3.0000])
    """
    _where_written(TAKE, "take", reference.take, (masters, params), now, then, taken, tables)


def multi_tensor_renew(
    params: Entries,
    remainders: Entries,
    now: Tensor,
    then: Tensor,
    taken: Tensor,
    *,
    tables: PointerTables | None = None,
) -> None:
    """Weights that were written since a sample was taken stand for themselves, and nobody waits to know whether.

    Where ``now[i]`` is not ``then[i]``, ``remainders[i]`` becomes what ``params[i]`` needs beside it to be its own
    value. Other tensors are not read.

    Args:
        params: n float16 or bfloat16 tensors.
        remainders: n int16 or int8 tensors of the same shapes. Written.
        now, then: int64, shape [n]. Digests of the params, as :func:`multi_tensor_sample` gives them.
        taken: int32, shape [n]. Set to 1 where remainders were made anew; never cleared.
        tables: the cache of this call site.

    Raises:
        TypeError, ValueError: as :func:`multi_tensor_unscale`.

    Example:
        >>> rest, digests = torch.tensor([8, 8], dtype=torch.int16), torch.zeros(2, 1, dtype=torch.int64)
        >>> digests[0] = 1
        >>> multi_tensor_renew([torch.ones(2).bfloat16()], [rest], *digests, torch.zeros(1, dtype=torch.int32))
        >>> rest
        tensor([0, 0], dtype=torch.int16)
    """
    _where_written(RENEW, "renew", reference_split.renew, (params, remainders), now, then, taken, tables)


def _where_written(
    operation: Operation,
    kernel: str,
    by_reference: Callable[[Tensor, Tensor, Tensor, Tensor], None],
    lists: tuple[Entries, Entries],
    now: Tensor,
    then: Tensor,
    taken: Tensor,
    tables: PointerTables | None,
) -> None:
    """Do the operation to the rows whose digests differ: on a GPU a kernel finds out which, and nobody waits."""
    with torch.no_grad():
        call = call_for(operation, lists, tables, getattr(now, "device", None))
        plan = call.plan
        for name, digests in (("now", now), ("then", then)):
            check_result(operation.name, name, digests, plan.count, torch.int64, plan.device)
        check_result(operation.name, "taken", taken, plan.count, torch.int32, plan.device)
        on_device = plan.serving is cuda  # on the CPU, where looking costs nothing, nobody asks
        for row in (row for _, row in plan.by_reference) if on_device else plan.rows:
            first, second = call.row(row)
            by_reference(first, second, now[row] != then[row], taken[row])
        if on_device:
            cuda.launch(call, kernel, now, then, taken, results=(taken,))
