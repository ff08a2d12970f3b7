"""Stamps: which gradients there were at one moment, in which versions."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from .. import kernels
from ..kernels.readings import Rows
from ..kernels.tensor_lists import any_there, are_references_to, references_to, types_of
from .dtensors import is_sharded, local, versions
from .params import HALF_DTYPES

_SAMPLED = 32
"""About how many DTensors' gradients of a step are sampled."""


class GradientStamp:
    """Which gradients there were at one moment, in which versions. It keeps none of them alive, and never changes.

    torch counts no version where a foreach operation writes a DTensor, as ``clip_grad_norm_`` does: of these a sample
    of the bits is compared too, which syncs.

    Args:
        grads: of all parameters, in the order of the table.
        are_zeros: whether they are known to be zeros.

    Attributes:
        references: weak ones, to each gradient.
        is_empty: whether there was none.
    """

    def __init__(self, grads: Sequence[Tensor | None], are_zeros: bool = False) -> None:
        self.are_zeros = are_zeros
        self._counted = _counted(grads)
        grads = grads.tensors if isinstance(grads, Rows) else grads
        self._versions = versions(grads) if self._counted is None else None
        self._digests = _digests(grads) if self._counted is None else {}
        self.references = references_to(grads)
        self.is_empty = not any_there(grads)

    @property
    def was_counted(self) -> bool:
        """Whether the versions of these gradients were read along with how they lie."""
        return self._counted is not None

    def compare(self, now: Sequence[Tensor | None]) -> tuple[list[int], list[int]]:
        """(positions with another gradient, or a written one; positions where it was set to None)."""
        if len(now) != len(self.references):  # of others nothing is known
            return [], []
        count, then = _counted(now), self._counted
        now = now.tensors if isinstance(now, Rows) else now
        is_same = count is not None and then is not None and count.has_counts_of(then)
        if is_same and are_references_to(self.references, now):
            return [], []
        counted = versions(now) if count is None else count.counts
        digests = _digests(now, self._digests) if self._digests else {}
        known = self._counts()
        if counted == known and digests == self._digests and are_references_to(self.references, now):
            return [], []
        each = enumerate(zip(self.references, known, now, counted, strict=True))
        moved = [
            position
            for position, (a, v, b, w) in each
            if not are_references_to([a], [b]) or v != w or digests.get(position) != self._digests.get(position)
        ]
        gone = [position for position in moved if now[position] is None]
        return [position for position in moved if now[position] is not None], gone

    def is_of(self, position: int, grad: Tensor | None) -> bool:
        """Whether this is the tensor that was there, in whatever version."""
        return grad is not None and are_references_to([self.references[position]], [grad])

    def without(self, positions: Iterable[int]) -> GradientStamp:
        """The same, but that there was no gradient at these positions."""
        gone = set(positions)
        return self._with(
            [None if at in gone else ref for at, ref in enumerate(self.references)],
            [-1 if at in gone else counted for at, counted in enumerate(self._counts())],
            {at: digest for at, digest in self._digests.items() if at not in gone},
        )

    def moved(self, came_from: Sequence[int | None], now: Sequence[Tensor | None]) -> GradientStamp:
        """The same for parameters in another order: what was known of those that stay is known on.

        Args:
            came_from: by new position, the old one; None for a parameter that came.
            now: by new position, what counts as known of those that came.
        """
        come = references_to(now)
        refs = [come[at] if old is None else self.references[old] for at, old in enumerate(came_from)]
        counted, known = versions(now), self._counts()
        mine = [counted[at] if old is None else known[old] for at, old in enumerate(came_from)]
        places = {old: at for at, old in enumerate(came_from) if old is not None}
        digests = {places[old]: digest for old, digest in self._digests.items() if old in places}
        made = self._with(refs, mine, digests)
        made.is_empty = self.is_empty and all([now[at] is None for at, old in enumerate(came_from) if old is None])  # noqa: C419
        return made

    def _with(self, refs: list[weakref.ref[Any] | None], counted: list[int], digests: dict[int, int]) -> GradientStamp:
        made = copy.copy(self)
        made.__dict__.update(references=refs, _counted=None, _versions=counted, _digests=digests)
        return made

    def _counts(self) -> list[int]:
        found: list[int] = self._counted.counts if self._versions is None else self._versions
        return found


def _counted(grads: Sequence[Tensor | None]) -> Any:
    """What was read of gradients, their versions too; None where one is of a class that torch may not count."""
    reading = grads.reading if isinstance(grads, Rows) else None
    return reading if reading is not None and reading.types in ([], [Tensor]) else None


def _digests(grads: Sequence[Tensor | None], positions: Iterable[int] | None = None) -> dict[int, int]:
    """By position: digests of sampled bits of this rank's pieces of some DTensors. Syncs where they are on a device.

    Of some, as what torch does not count are foreach operations, and a clip by these writes all gradients.

    Args:
        positions: of which; None: of about ``_SAMPLED`` of all.
    """
    if positions is None:
        if set(types_of(grads)) <= {Tensor, type(None)}:
            return {}
        there = [i for i, grad in enumerate(grads) if grad is not None and is_sharded(grad)]
        positions = there[:: len(there) // _SAMPLED | 1]  # an odd step, as layers come in pairs
    with torch.no_grad():
        chosen = {i: local(grad).detach() for i in positions if (grad := grads[i]) is not None}
        found: dict[int, int] = {}
        for device in {piece.device for piece in chosen.values()}:
            here = [i for i, piece in chosen.items() if piece.device == device]
            samples = torch.zeros(len(here), dtype=torch.int64, device=device)
            kernels.multi_tensor_sample([_as_halves(chosen[i]) for i in here], samples)
            found.update(zip(here, samples.tolist(), strict=True))
    return found


def _as_halves(piece: Tensor) -> Tensor:
    return piece if piece.dtype in HALF_DTYPES else piece.reshape(-1).view(torch.float16)
