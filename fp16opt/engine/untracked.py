"""Gradients that no backward of this optimizer has made: which mistake that is, the likely one first."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import FrameType

from . import errors
from .diagnostics import describe

_TRAINERS = {
    "transformers": ("transformers", "transformers", ""),
    "lightning": ("Lightning", "lightning", "self.manual_backward(loss)"),
    "pytorch_lightning": ("Lightning", "lightning", "self.manual_backward(loss)"),
    "accelerate": ("Accelerate", "accelerate", "accelerator.backward(loss)"),
}
"""By top-level package: what it is called, its module of ``fp16opt.integrations``, what scales once that is used."""


def untracked(names: Sequence[str], scale: float, others: Sequence[str] | None) -> Exception:
    """Gradients of an unknown scale.

    Args:
        names: of their parameters.
        scale: this optimizer's.
        others: names of another optimizer's parameters, where the last backward of this process was that one's.
    """
    known = {"scale": scale, "names": describe(names)}
    called_by = _trainer()
    if called_by is not None:
        trainer, module, call = _TRAINERS[called_by]
        scales = errors.SCALES_THERE.format(call=call) if call else ""
        return errors.A_TRAINER(trainer=trainer, module=module, scales=scales, **known)
    if others is not None:
        return errors.ANOTHER_OPTIMIZER(others=describe(others, limit=1), **known)
    return errors.PLAIN_BACKWARD(**known)


def _trainer() -> str | None:
    """The package of the trainer that has called, outermost; None where the user's own loop has."""
    found: str | None = None
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        module = str(frame.f_globals.get("__name__", ""))
        package = module.partition(".")[0]
        if package in _TRAINERS and "launch" not in module:  # a launcher runs the user's loop
            found = package
        frame = frame.f_back
    return found
