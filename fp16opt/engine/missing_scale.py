"""FP16 weights that are stepped without a loss scale: the one warning of it, with what this step's gradients lost."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .. import kernels
from . import errors
from .diagnostics import Lines, describe
from .dtensors import local, raw_grad
from .params import ParamPair

_TINY = torch.finfo(torch.float16).tiny
_ZERO, _SUBNORMAL = kernels.MEASURED.index("zero"), kernels.MEASURED.index("subnormal")
_OWN_BACKWARD = "opt.backward(loss)"


class Underflow(NamedTuple):
    """How many elements of gradients FP16 has lost, of all.

    Attributes:
        zero: are 0.
        subnormal: are not, and have fewer digits than FP16 else has.
    """

    elements: int
    zero: int
    subnormal: int


class WayToScale(NamedTuple):
    """The words that a face has for the lines that give FP16 weights a loss scale.

    Attributes:
        write: the line that gives a scale.
        meant: the argument that says that none is wanted.
        backward: what stands in place of a plain ``loss.backward()``.
    """

    write: str
    meant: str = "loss_scale=1.0"
    backward: str = _OWN_BACKWARD


def without_scale(pairs: Iterable[ParamPair]) -> list[ParamPair]:
    """Those with FP16 weights that train."""
    return [pair for pair in pairs if pair.model.dtype == torch.float16 and pair.model.requires_grad]


def underflow(pairs: Sequence[ParamPair], are_summed: bool) -> Underflow | None:
    """What FP16 has lost of this step's gradients, made at a scale of 1. Of one on several ranks: of this one's piece.

    Args:
        are_summed: whether FP16 gradients were folded into FP32 sums, of which it is told then.

    Returns:
        None where there are none, or a CUDA graph is being captured. Else it syncs.
    """
    grads = [raw_grad(pair.master if are_summed else pair.model) for pair in pairs]
    found = [_elements_of(grad) for grad in grads if grad is not None]
    found = [grad for grad in found if grad.numel()]
    if not found or any(grad.is_cuda and torch.cuda.is_current_stream_capturing() for grad in found):
        return None
    zero = subnormal = 0
    with torch.no_grad():
        for device in {grad.device for grad in found}:
            here = [grad for grad in found if grad.device == device and grad.dtype == torch.float16]
            if here:
                sums = kernels.multi_tensor_measure(here).sum(dim=0).tolist()
                zero, subnormal = zero + int(sums[_ZERO]), subnormal + int(sums[_SUBNORMAL])
        for grad in found:
            if grad.dtype != torch.float16:
                none = int((grad == 0).sum())
                zero, subnormal = zero + none, subnormal + int((grad.abs() < _TINY).sum()) - none
    return Underflow(sum(grad.numel() for grad in found), zero, subnormal)


def _elements_of(grad: Tensor) -> Tensor:
    piece = local(grad._values() if grad.layout is torch.sparse_coo else grad).detach().resolve_neg()
    return piece if piece.dtype in (torch.float16, torch.float32) else piece.float()


def warn_missing_scale(
    lines: Lines, pairs: Sequence[ParamPair], lost: Underflow | None, way: WayToScale, is_plain: bool
) -> None:
    """Warn, once, that FP16 weights are trained at a scale of 1 that the user has not written: mostly forgotten.

    Args:
        pairs: with FP16 weights.
        lost: of their gradients; None where it is not known.
        way: in the words of the face that the user has.
        is_plain: whether the user, or a trainer, runs backward without the optimizer, which could not scale.
    """
    calls = ""
    if is_plain:
        calls = errors.BACKWARD_BY.format(call=way.backward)
        if way.backward == _OWN_BACKWARD:
            calls += errors.TRAINERS_HAVE_MODULES
    lines.tell(
        errors.NO_SCALE,
        once=True,
        names=describe([pair.name for pair in pairs]),
        lost="" if lost is None else errors.GRADIENTS_LOST.format(tiny=_TINY, **lost._asdict()),
        way_out=way.write,
        calls=calls,
        meant=way.meant,
    )
