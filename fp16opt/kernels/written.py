"""The operations on weights that were written since a sample of them was taken."""

from __future__ import annotations

from torch import Tensor

from . import cuda
from .calls import CallCache, Entries, Operation
from .launches import begin, by_torch, prove, run
from .table import REFRESH_MASTERS, RESET_REMAINDERS

__all__ = ["multi_tensor_refresh_masters", "multi_tensor_reset_remainders"]


def multi_tensor_refresh_masters(
    masters: Entries,
    params: Entries,
    now: Tensor,
    then: Tensor,
    taken: Tensor,
    *,
    cache: CallCache | None = None,
) -> None:
    """Masters take the values of params that were written since a sample was taken. Does not sync.

    Where ``now[i]`` is not ``then[i]``, ``masters[i]`` takes the elements of ``params[i]`` whose bits are not those of
    the rounded master; the other elements keep their low bits. Other masters are not read.

    Args:
        masters: n float32 tensors. Written.
        params: n float16 or bfloat16 tensors of the same shapes.
        now, then: int64, shape [n]. Digests of the params, as :func:`multi_tensor_sample` gives them.
        taken: int32, shape [n]. Set to 1 where an element was taken; never cleared.
        cache: the cache of this call site.

    Raises:
        TypeError, ValueError: as :func:`multi_tensor_unscale`.

    Example:
        >>> import torch
        >>> masters, params = [torch.tensor([1.0001, 2.0])], [torch.tensor([1.0, 3.0]).half()]
        >>> now, then, taken = torch.tensor([1]), torch.tensor([0]), torch.zeros(1, dtype=torch.int32)
        >>> multi_tensor_refresh_masters(masters, params, now, then, taken)
        >>> masters[0]
        tensor([1.0001, 3.0000])
    """
    _where_written(REFRESH_MASTERS, (masters, params), (now, then, taken), cache)


def multi_tensor_reset_remainders(
    params: Entries,
    remainders: Entries,
    now: Tensor,
    then: Tensor,
    taken: Tensor,
    *,
    cache: CallCache | None = None,
) -> None:
    """Weights that were written since a sample was taken stand for themselves. Does not sync.

    Where ``now[i]`` is not ``then[i]``, ``remainders[i]`` becomes what ``params[i]`` needs beside it to be its own
    value. Other tensors are not read.

    Args:
        params: n float16 or bfloat16 tensors.
        remainders: n int16 or int8 tensors of the same shapes. Written.
        now, then: int64, shape [n]. Digests of the params, as :func:`multi_tensor_sample` gives them.
        taken: int32, shape [n]. Set to 1 where remainders were made anew; never cleared.
        cache: the cache of this call site.

    Raises:
        TypeError, ValueError: as :func:`multi_tensor_unscale`.

    Example:
        >>> import torch
        >>> rest, taken = torch.tensor([8, 8], dtype=torch.int16), torch.zeros(1, dtype=torch.int32)
        >>> multi_tensor_reset_remainders(
        ...     [torch.ones(2).bfloat16()], [rest], torch.tensor([1]), torch.tensor([0]), taken
        ... )
        >>> rest
        tensor([0, 0], dtype=torch.int16)
    """
    _where_written(RESET_REMAINDERS, (params, remainders), (now, then, taken), cache)


def _where_written(
    operation: Operation,
    lists: tuple[Entries, Entries],
    digests: tuple[Tensor, Tensor, Tensor],
    cache: CallCache | None,
) -> None:
    """Do the operation to the rows whose digests differ. A GPU's kernel finds these; on the CPU torch operations do."""
    call = begin(operation, lists, cache, digests, getattr(digests[0], "device", None))
    if not call.is_proven:
        prove(call, digests, digests)
    run(call if call.plan.serving is cuda else by_torch(call), digests, digests)
