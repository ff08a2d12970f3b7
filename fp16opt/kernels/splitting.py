"""The operations on split masters: a 16-bit weight and a 16-bit remainder in place of a float32."""

from __future__ import annotations

import torch

from . import native, reference_split
from .stats import CastStats
from .tables import BFLOAT, HALF, SINGLE, Call, Entries, Operation, PointerTables, call_for

__all__ = ["multi_tensor_join", "multi_tensor_split"]


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


def _is_compiled(call: Call) -> bool:
    on_cpu = call.plan.device is not None and call.plan.device.type == "cpu"
    return on_cpu and hasattr(native._cpu, SPLIT.name.removeprefix("multi_tensor_"))


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
        compiled = _is_compiled(call)
        for place, row in call.for_reference(compiled):
            master, param, remainder = (column[place] for column in call.columns)
            reference_split.split(row, master, param, remainder, stats)
        if compiled:
            native.split(call, stats)


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
        compiled = _is_compiled(call)
        for place, _ in call.for_reference(compiled):
            param, remainder, out = (column[place] for column in call.columns)
            reference_split.join(param, remainder, out)
        if compiled:
            native.join(call)
