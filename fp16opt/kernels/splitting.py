"""The operations on split masters: a 16-bit weight and a 16-bit remainder in place of a float32."""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from .. import kernels
from . import cuda_steps, native, reference_split
from .checks import check_result
from .stats import CastStats
from .tables import BFLOAT, HALF, SINGLE, Call, Entries, Operation, PointerTables, call_for

__all__ = ["multi_tensor_join", "multi_tensor_renew", "multi_tensor_split"]


def _split_accepts(master: torch.dtype, param: torch.dtype, remainder: torch.dtype) -> bool:
    return master == SINGLE and param in (HALF, BFLOAT) and remainder == torch.int16


def _join_accepts(param: torch.dtype, remainder: torch.dtype, out: torch.dtype) -> bool:
    return _split_accepts(out, param, remainder)


SPLIT = Operation(
    "multi_tensor_split",
    ("masters", "params", "remainders"),
    _split_accepts,
    "float32 masters into float16 or bfloat16 params and int16 remainders",
    1,
)
JOIN = Operation(
    "multi_tensor_join",
    ("params", "remainders", "outs"),
    _join_accepts,
    "float16 or bfloat16 params and int16 remainders into float32",
    2,
)


RENEW = Operation(
    "multi_tensor_renew",
    ("params", "remainders"),
    lambda param, rest: _split_accepts(SINGLE, param, rest),
    "float16 or bfloat16 params and int16 remainders",
)


def _compiled(call: Call) -> ModuleType | None:
    """The room that calls the compiled kernels for these lists; None where torch operations serve."""
    which = "reference" if call.plan.device is None else kernels.backend(call.plan.device)
    return {"cpu": native, "cuda": cuda_steps}.get(which)


def _check_row(stats: CastStats, call: Call) -> None:
    for name, tensor, dtype in (
        ("overflow", stats.overflow, torch.int32),
        ("hashes", stats.hashes, torch.int64),
    ):
        if tensor.dtype != dtype or tensor.shape != (call.plan.count,) or not tensor.is_contiguous():
            raise ValueError(
                f"{SPLIT.name}: stats.{name} must be a contiguous {str(dtype)[6:]} vector of {call.plan.count}, got "
                f"{str(tensor.dtype)[6:]} of shape {tuple(tensor.shape)}."
            )
        if call.plan.device is not None and tensor.device != call.plan.device:
            raise ValueError(f"{SPLIT.name}: stats.{name} is on {tensor.device}, the tensors on {call.plan.device}.")


def multi_tensor_split(
    masters: Entries,
    params: Entries,
    remainders: Entries,
    stats: CastStats,
    *,
    tables: PointerTables | None = None,
) -> None:
    """Write ``masters[i]`` as the weight ``params[i]`` and the remainder ``remainders[i]``, with flags and a hash.

    bfloat16: exact for every float32; the weight is rounded to nearest, ties away from zero. float16: the weight is
    rounded to nearest, ties to even; exact for magnitudes from 2^-16 up to 65520, below within 2^-40. From 65520 on the
    weight is inf, and the master is kept to 9 bits.

    Args:
        masters: n float32 tensors.
        params: n float16 or bfloat16 tensors of the same shapes. Written.
        remainders: n int16 tensors of the same shapes. Written.
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
    with torch.no_grad():
        call = call_for(SPLIT, (masters, params, remainders), tables)
        _check_row(stats, call)
        compiled = _compiled(call)
        for place, row in call.for_reference(compiled is not None):
            master, param, remainder = (column[place] for column in call.columns)
            reference_split.split(row, master, param, remainder, stats)
        if compiled is not None:
            compiled.split(call, stats)


def multi_tensor_join(
    params: Entries, remainders: Entries, outs: Entries, *, tables: PointerTables | None = None
) -> None:
    """``outs[i]`` becomes the master that ``params[i]`` and ``remainders[i]`` stand for.

    Args:
        params: n float16 or bfloat16 tensors.
        remainders: n int16 tensors of the same shapes.
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
    with torch.no_grad():
        call = call_for(JOIN, (params, remainders, outs), tables)
        compiled = _compiled(call)
        for place, _ in call.for_reference(compiled is not None):
            param, remainder, out = (column[place] for column in call.columns)
            reference_split.join(param, remainder, out)
        if compiled is not None:
            compiled.join(call)


def multi_tensor_renew(
    params: Entries,
    remainders: Entries,
    now: Tensor,
    then: Tensor,
    taken: Tensor,
    *,
    samples: tuple[Tensor, Tensor] | None = None,
    tables: PointerTables | None = None,
) -> None:
    """Weights that were written since a hash was taken stand for themselves, and nobody waits to know whether.

    Where ``now[i]`` is not ``then[i]``, ``remainders[i]`` becomes what ``params[i]`` needs beside it to be its own
    value. Other tensors are not read.

    Args:
        params: n float16 or bfloat16 tensors.
        remainders: n int16 tensors of the same shapes. Written.
        now, then: int64, shape [n]. Hashes of the params, as :func:`multi_tensor_hash` gives them.
        taken: int32, shape [n]. Set to 1 where remainders were made anew; never cleared.
        samples: a second pair of hashes, of which a difference counts too.
        tables: the cache of this call site.

    Raises:
        TypeError, ValueError: as :func:`multi_tensor_unscale`.

    Example:
        >>> rest, hashes = torch.tensor([8, 8], dtype=torch.int16), torch.zeros(2, 1, dtype=torch.int64)
        >>> hashes[0] = 1
        >>> multi_tensor_renew([torch.ones(2).bfloat16()], [rest], *hashes, torch.zeros(1, dtype=torch.int32))
        >>> rest
        tensor([0, 0], dtype=torch.int16)
    """
    with torch.no_grad():
        call = call_for(RENEW, (params, remainders), tables)
        device, count = call.plan.device or now.device, call.plan.count
        pairs = [(now, then), *([] if samples is None else [samples])]
        for name, hashes in zip(
            ("now", "then", "samples[0]", "samples[1]"), (h for p in pairs for h in p), strict=False
        ):
            check_result(RENEW.name, name, hashes, count, torch.int64, device)
        check_result(RENEW.name, "taken", taken, count, torch.int32, device)
        compiled = (
            cuda_steps if _compiled(call) is cuda_steps else None
        )  # on the CPU, where looking is free, nobody asks
        for place, row in call.for_reference(compiled is not None):
            moved = torch.stack([a[row] != b[row] for a, b in pairs]).any()
            reference_split.renew(call.columns[0][place], call.columns[1][place], moved, taken[row])
        if compiled is not None:
            compiled.renew(call, now, then, samples, taken)
