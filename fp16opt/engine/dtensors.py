"""The piece of a tensor that lies on this rank. Kernels, and version counters, are about pieces.

A DTensor (of FSDP2 or tensor parallelism) is a description around a plain tensor; every other tensor is its own piece.
Nothing here imports torch.distributed: a DTensor is known by what it carries.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..kernels.pieces import WHOLE, Piece
from ..kernels.tensor_lists import any_grad, grads_of, types_of, versions_of

_GRAD: Any = Tensor.grad  # torch's own descriptor


def is_sharded(tensor: object) -> bool:
    """Whether this is a DTensor, or a class of these."""
    return hasattr(tensor, "_local_tensor")


@functools.lru_cache(maxsize=256)
def _is_sharded_class(kind: type) -> bool:
    """:func:`is_sharded` of a class: where it is none, Python makes a message that says so, each time it is asked."""
    return is_sharded(kind)


def any_sharded(tensors: Sequence[Any]) -> bool:
    """Whether one of them is a DTensor."""
    return any(map(_is_sharded_class, types_of(tensors)))


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


def hold(tensor: Tensor, piece: Tensor) -> None:
    """This rank's elements of ``tensor`` are those of ``piece`` from here on, in its memory."""
    if is_sharded(tensor):
        tensor._local_tensor = piece  # type: ignore[attr-defined]
    else:
        tensor.data = piece


def pieces(tensors: Sequence[Any]) -> list[Tensor]:
    """:func:`local` of each, in fewer calls."""
    if not any_sharded(tensors):
        return list(tensors)
    found = [getattr(tensor, "_local_tensor", tensor) for tensor in tensors]
    return found if set(map(type, found)) <= _PLAIN else list(map(local, tensors))


_PLAIN = {Tensor, torch.nn.Parameter}

raw_grad: Any = _GRAD.__get__
"""``.grad`` as torch holds it: :class:`fp16opt.engine.masters.MasterParameter` makes no gradient for this read."""
set_raw_grad: Any = _GRAD.__set__
"""Set ``.grad``, and nothing else."""
raw_grads = grads_of
""":data:`raw_grad` of each; tensors of subclasses are read as plain ones."""
any_raw_grad = any_grad
"""Whether one of them is not None."""


def versions(tensors: Sequence[Tensor | None]) -> list[int]:
    """:func:`version` of each; -1 where there is none."""
    counted = versions_of(tensors)
    if not any_sharded(tensors):
        return counted
    found = pieces(tensors)
    inner = zip(counted, versions_of(found), tensors, found, strict=True)
    return [a if piece is tensor else a + b for a, b, tensor, piece in inner]


def version(tensor: Tensor) -> int:
    """Counts writes to the tensor and, for a DTensor, those to its piece: torch counts the two apart.

    0 for one that was made in inference mode, which counts none.
    """
    if tensor.is_inference():
        return 0
    piece = getattr(tensor, "_local_tensor", None)
    return tensor._version if piece is None else tensor._version + int(piece._version)


def as_piece_of(piece: Tensor, whole: Tensor) -> Tensor:
    """``piece`` as this rank's piece of a DTensor laid out over ranks as ``whole`` is; itself beside a plain one.

    They share memory. Sends nothing.
    """
    if not is_sharded(whole):
        return piece
    kind: Any = next(base for base in type(whole).__mro__ if base.__name__ == "DTensor")
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    mesh, placements = whole.device_mesh, whole.placements  # type: ignore[attr-defined]
    meta = TensorMeta(whole.shape, whole.stride(), piece.dtype)
    # from_local would bring a piece that lies on the host, as of a checkpoint, to the mesh's device.
    made: Tensor = kind(piece.detach(), DTensorSpec(mesh, placements, tensor_meta=meta), requires_grad=False)
    return made


def piece_of(tensor: Tensor) -> Piece | None:
    """Where this rank's piece lies in the whole tensor, by whose indices values of few bits are rounded.

    None where that can't be said: the piece is cut along two dimensions behind the first, or its shards are strided
    ones that torch can't place.

    Example:
        >>> import torch
        >>> piece_of(torch.ones(2, 3))
        Piece(offset=0, unit=0, stride=0)
    """
    if not is_sharded(tensor):
        return WHOLE
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    whole: Any = tensor
    piece, shape = local(tensor), tuple(tensor.shape)
    try:
        sizes, begins = compute_local_shape_and_global_offset(shape, whole.device_mesh, whole.placements)
    except (NotImplementedError, RuntimeError):
        return None
    if not piece.numel() or tuple(sizes) == shape:
        return WHOLE
    behind = [dim for dim, size in enumerate(sizes) if size != shape[dim] and dim]
    if tuple(sizes) != tuple(piece.shape) or len(behind) > 1 or not piece.is_contiguous():
        return None
    steps = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    offset = sum(begin * step for begin, step in zip(begins, steps, strict=True))
    if not behind:
        return Piece(offset)
    return Piece(offset, math.prod(sizes[behind[0] :]), math.prod(shape[behind[0] :]))


def cuts_of(tensor: Tensor) -> dict[int, int]:
    """Into how many parts each dimension of a DTensor is cut, the same on every rank; of those that are."""
    found: dict[int, int] = {}
    mesh: Any = getattr(tensor, "device_mesh", None)
    for axis, placement in enumerate(getattr(tensor, "placements", ())):
        dim = getattr(placement, "dim", None)
        if dim is not None and mesh.size(axis) > 1:
            found[dim % tensor.dim()] = found.get(dim % tensor.dim(), 1) * mesh.size(axis)
    return found


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
