"""The piece of a tensor that lies on this rank. Kernels, and version counters, are about pieces.

A DTensor (of FSDP2 or tensor parallelism) is a description around a plain tensor; every other tensor is its own piece.
Nothing here imports torch.distributed: a DTensor is known by what it carries.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

_GRAD: Any = Tensor.grad  # torch's own descriptor


def is_sharded(tensor: object) -> bool:
    """Whether this is a DTensor."""
    return hasattr(tensor, "_local_tensor")


def local(tensor: Tensor) -> Tensor:
    """The plain tensor that holds this rank's elements; they share memory. Waits for a collective under way.

    Example:
        >>> import torch
        >>> weight = torch.ones(2)
        >>> local(weight) is weight
        True
    """
    piece: Any = getattr(tensor, "_local_tensor", tensor)
    if type(piece).__name__ == "AsyncCollectiveTensor":
        piece = piece.wait()
    found: Tensor = piece
    return found


raw_grad: Any = _GRAD.__get__
"""``.grad`` as torch holds it: :class:`fp16opt.engine.masters.MasterParameter` makes no gradient for this read."""
set_raw_grad: Any = _GRAD.__set__
"""Set ``.grad``, and nothing else."""
_read_version: Any = operator.attrgetter("_version")


def raw_grads(tensors: Iterable[Tensor]) -> list[Tensor | None]:
    """:data:`raw_grad` of each; tensors of subclasses are read as plain ones."""
    with torch._C.DisableTorchFunctionSubclass():
        return list(map(raw_grad, tensors))


def versions(tensors: Sequence[Tensor | None]) -> list[int]:
    """:func:`version` of each; -1 where there is none."""
    kinds = set(map(type, tensors))
    if all(getattr(kind, "__torch_dispatch__", None) is Tensor.__torch_dispatch__ for kind in kinds):
        try:
            with torch._C.DisableTorchFunctionSubclass():
                return list(map(_read_version, tensors))
        except RuntimeError:
            pass  # one was made in inference mode, and counts none
    return [-1 if tensor is None else version(tensor) for tensor in tensors]


def version(tensor: Tensor) -> int:
    """Counts writes to the tensor and, for a DTensor, those to its piece: torch counts the two apart.

    0 for one that was made in inference mode, which counts none.
    """
    if tensor.is_inference():
        return 0
    piece = getattr(tensor, "_local_tensor", None)
    return tensor._version if piece is None else tensor._version + int(piece._version)


def aligned(grad: Tensor, param: Tensor) -> Tensor:
    """``grad`` laid out over ranks as its parameter is; where it is not (tensor parallelism), this communicates."""
    placements = getattr(param, "placements", None)
    if placements is None or getattr(grad, "placements", placements) == placements:
        return grad
    moved: Tensor = grad.redistribute(placements=placements)  # type: ignore[attr-defined]
    return moved


def check_whole(param: object, where: str) -> None:
    """Raise ``ValueError`` for a piece of FSDP1."""
    if hasattr(param, "_fsdp_flattened"):
        raise ValueError(
            f"{where}: FullyShardedDataParallel (FSDP1) leaves pieces that don't tell which part of a weight "
            "they are, so a norm or a verdict over ranks can't be had. Use fully_shard (FSDP2)."
        )


def is_expanded(tensor: Tensor) -> bool:
    """Whether elements of a tensor share memory, so that none can be written: placeholders of split masters."""
    return tensor.layout is torch.strided and 0 in tensor.stride() and tensor.numel() > 1


def different_bits(a: Tensor, b: Tensor) -> Tensor:
    """Element-wise: whether two 16-bit tensors of one dtype differ in their bits (so -0.0 differs from 0.0)."""
    return a.contiguous().view(torch.int16) != b.contiguous().view(torch.int16)
