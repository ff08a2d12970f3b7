"""Gradients that no backward of this optimizer has made: which mistake that is, the likely one first."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import FrameType

from .diagnostics import describe

_TRAINERS = {
    "transformers": ("transformers", "transformers", ""),
    "lightning": ("Lightning", "lightning", "; where it is in use, self.manual_backward(loss) scales"),
    "pytorch_lightning": ("Lightning", "lightning", "; where it is in use, self.manual_backward(loss) scales"),
    "accelerate": ("Accelerate", "accelerate", "; where it is in use, accelerator.backward(loss) scales"),
}
"""By top-level package: what it is called, its module of ``fp16opt.integrations``, what scales once that is used."""


def used_before(names: Sequence[str]) -> RuntimeError:
    """A second step, or a clip, of gradients that the last step has used."""
    return RuntimeError(
        f"the step is over, and the gradients that it has used are still there: {describe(names)}. Call zero_grad() "
        "after each step, and then backward(loss). Clip before step()."
    )


def untracked(names: Sequence[str], scale: float, others: Sequence[str] | None) -> RuntimeError:
    """Gradients of an unknown scale.

    Args:
        names: of their parameters.
        scale: this optimizer's.
        others: names of another optimizer's parameters, where the last backward of this process was that one's.
    """
    found = f"this optimizer did not make, and its loss scale is {scale:g}: {describe(names)}"
    called_by = _trainer()
    if called_by is not None:
        called, module, scales = _TRAINERS[called_by]
        return RuntimeError(
            f"gradients were found that a backward of {found}. The step was called by {called}, whose own backward "
            f"does not scale the loss. Use fp16opt.integrations.{module}{scales}."
        )
    if others is not None:
        return RuntimeError(
            f"gradients were found that a backward of {found}. The last backward was that of another optimizer, over "
            f"{describe(others, limit=1)}. Where one loss serves both, give both one scaler, scaler=fp16opt."
            "DynamicLossScaler(), and call update_master_grads() of this one after that backward. Where a plain "
            "loss.backward() has made them, call opt.backward(loss)."
        )
    return RuntimeError(
        f"gradients were found that opt.backward(loss) of {found}. A plain loss.backward() does not scale: call "
        "opt.backward(loss) in its place. After opt.scale_loss(loss) a zero_grad() forgets the scale: call it before. "
        "For a GradScaler to do the scaling, construct MixedPrecisionOptimizer without dynamic, loss_scale, scaler."
    )


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
