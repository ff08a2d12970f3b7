"""The operations on gradients that are held in 8 bits until a step."""

from __future__ import annotations

import torch
from torch import Tensor

from . import reference_state8
from .calls import Entries, Operation, PointerTables
from .reference_state8 import HELD_BLOCK
from .tables import BFLOAT, HALF, SINGLE, call_for

__all__ = ["HELD_BLOCK", "multi_tensor_decode", "multi_tensor_encode"]


def _encode_accepts(grad: torch.dtype, codes: torch.dtype) -> bool:
    return grad in (HALF, BFLOAT, SINGLE) and codes == torch.int8


def _decode_accepts(codes: torch.dtype, out: torch.dtype) -> bool:
    return _encode_accepts(out, codes)


_ENCODE = Operation(
    "multi_tensor_encode",
    ("grads", "codes"),
    _encode_accepts,
    "float16, bfloat16 or float32 gradients into int8 codes",
    written=(1,),
    shape_of=1,
    scales="scales",
    block=HELD_BLOCK,
    coded=("cpu", "cuda"),
)
_DECODE = Operation(
    "multi_tensor_decode",
    ("codes", "outs"),
    _decode_accepts,
    "int8 codes into float16, bfloat16 or float32",
    written=(1,),
    shape_of=1,
    scales="scales",
    block=HELD_BLOCK,
    coded=("cpu", "cuda"),
)


def multi_tensor_encode(
    grads: Entries, codes: Entries, scales: list[Tensor], *, tables: PointerTables | None = None
) -> None:
    """Write gradients as codes of 8 bits, with a scale for each 256 elements.

    |decoded - g| <= (|g| + S / 247) / 16, where S is the largest magnitude of the 256; right on average over places and
    scales. The formula is in kernels/reference_state8.py.

    Args:
        grads: n tensors, float16, bfloat16 or float32. What is not finite has any code.
        codes: n int8 tensors of the same shapes. Written.
        scales: n float32 tensors, contiguous, with one element for each 256 of the gradient. Written.
        tables: the cache of this call site.

    Raises:
        TypeError, ValueError: as :func:`multi_tensor_unscale`.

    Example:
        >>> codes, scales = torch.zeros(3, dtype=torch.int8), torch.zeros(1)
        >>> multi_tensor_encode([torch.tensor([0.0, 0.5, -1.0])], [codes], [scales])
        >>> codes[0].item(), codes[2].item(), scales.item()
        (0, -127, 1.0)
    """
    if tables is not None and tables.repeats("encode", (grads, codes, scales), (), True):
        return
    with torch.no_grad():
        call = call_for(_ENCODE, (grads, codes, scales), tables, None)
        for _, row in call.plan.by_reference:
            reference_state8.encode_gradient(*call.row(row))
        if call.plan.serving is not None:
            call.plan.serving.launch(call, "encode")


def multi_tensor_decode(
    codes: Entries, outs: Entries, scales: list[Tensor], *, tables: PointerTables | None = None
) -> None:
    """Write what codes of :func:`multi_tensor_encode` stand for.

    Args:
        codes: n int8 tensors.
        outs: n tensors of the same shapes, float16, bfloat16 or float32. Written.
        scales: n float32 tensors, as that function wrote them.
        tables: the cache of this call site.

    Raises:
        TypeError, ValueError: as :func:`multi_tensor_unscale`.

    Example:
        >>> out = torch.zeros(2)
        >>> multi_tensor_decode([torch.tensor([0, -127], dtype=torch.int8)], [out], [torch.tensor([2.0])])
        >>> out.tolist()
        [0.0, -2.0]
    """
    if tables is not None and tables.repeats("decode", (codes, outs, scales), (), True):
        return
    with torch.no_grad():
        call = call_for(_DECODE, (codes, outs, scales), tables, None)
        for _, row in call.plan.by_reference:
            reference_state8.decode_gradient(*call.row(row))
        if call.plan.serving is not None:
            call.plan.serving.launch(call, "decode")
