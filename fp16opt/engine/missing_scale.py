"""FP16 weights that are stepped without a loss scale: the one warning of it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from . import errors
from .diagnostics import Lines, describe
from .params import ParamPair

_OWN_BACKWARD = "opt.backward(loss)"


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


def warn_missing_scale(lines: Lines, pairs: Sequence[ParamPair], way: WayToScale, is_plain: bool) -> None:
    """Warn, once, that FP16 weights are trained at a scale of 1 that the user has not written: mostly forgotten.

    Args:
        pairs: with FP16 weights.
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
        way_out=way.write,
        calls=calls,
        meant=way.meant,
    )
