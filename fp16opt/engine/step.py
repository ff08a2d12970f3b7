"""One step from its beginning to its end, with three marks that say what an exception that stops it has left.

Each mark is a plain store to an attribute, made before what it tells of: an exception can arrive between any two lines.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from .. import kernels
from .stage import Check


def _nothing() -> None:
    """Nothing is to be put back."""


class Step:
    """A step that is under way, or that an exception has stopped: then the next call finishes it.

    Attributes:
        counts: of :class:`.outcome.Outcome`, before it has counted this step; None until it does.
        runs: False from the moment that an exception has come out of it.
        about_to_write: Masters, the model or the state may have been written since.
        all_written: Nothing is left to write; what follows only rounds masters down and counts.
        is_counted: Counts are set, and scalers have followed or were about to: they do so once at most.
        check: What was found in the gradients; None until it is decided what becomes of the step.
        skipped: The decision: known, or the device's flag (float32, 0-dim).
        awaited: That decision, where kernels skip by the device's flag and the host has to know of it; else None.
        undo: Puts back what was changed for the step's duration. It may run twice.
    """

    def __init__(self) -> None:
        self.counts: tuple[int, int, int] | None = None
        self.runs = True
        self.about_to_write = self.all_written = self.is_counted = False
        self.check: Check | None = None
        self.skipped: bool | Tensor = False
        self.awaited: kernels.AwaitedFlag | None = None
        self.undo: Callable[[], None] = _nothing
