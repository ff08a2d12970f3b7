"""Look: what one public call has seen. It is an argument of all that the call does, and is kept by nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ..kernels.readings import Rows
from ..kernels.tensor_lists import any_grad, any_there, gradients, read
from .params import DeviceParams, ParamTable
from .stage import GradientStamp


class Look(NamedTuple):
    """The gradients of a model, and its weights, as one call has found them.

    Where code of the user's has run since, the call takes a new one.

    Attributes:
        grads: of the model's parameters, in the order of the table.
        rows: the same by device, in rows as kernels take them: of DTensors this rank's pieces.
        weights: by device, the model's weights as they were read; None where the call neither compares nor writes them.
    """

    grads: Rows
    rows: tuple[Rows, ...]
    weights: tuple[Rows, ...] | None = None

    @classmethod
    def at(cls, params: ParamTable, weights: tuple[Rows, ...] | None = None, like: GradientStamp | None = None) -> Look:
        """Of the gradients that there are now. No sync.

        Args:
            weights: as :meth:`.ParamTable.verify_moved` has just read them.
            like: a stamp of gradients that are probably the same.
        """
        if like is None or like.reading is None:
            grads = gradients(params.models, params.read_of_grads)
        else:
            grads = gradients(params.models, like.reading, like.references)
        if grads.reading is not None:
            params.read_of_grads = grads.reading
        rows: tuple[Rows, ...] = (grads,)
        if len(params.devices) != 1 or params.has_dtensors:
            rows = tuple([_rows(grads, device) for device in params.devices])
        look = cls(grads, rows, weights)
        if params.unmastered and any_grad([pair.model for pair in params.unmastered]):
            return look.without(params, [pair.position for pair in params.unmastered])
        return look

    @property
    def any(self) -> bool:
        """Whether there is a gradient."""
        return any_there(self.grads.tensors)

    def without(self, params: ParamTable, positions: Sequence[int]) -> Look:
        """The same, but that kernels leave parameters at these positions alone."""
        gone, made = set(positions), []
        for rows, device in zip(self.rows, params.devices, strict=True):
            at = zip(device.positions, rows.tensors, strict=True)
            left = tuple([None if position in gone else grad for position, grad in at])
            made.append(Rows(left, read(left, rows.reading)))
        return self._replace(rows=tuple(made))


def _rows(grads: Rows, device: DeviceParams) -> Rows:
    """Those of one device."""
    mine = device.pieces_of([grads.tensors[position] for position in device.positions])
    return Rows(mine, read(mine))
