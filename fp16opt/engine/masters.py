"""What masters are made of: FP32 copies of 16-bit weights, or none. (Split ones: split.py.)"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from .. import kernels
from ..kernels.calls import Entries
from .dtensors import different_bits, local
from .pairs import DeviceGroup, Pair


class Masters(Protocol):
    """How the masters of a training are kept.

    Attributes:
        words: what ``repr`` calls them.
        are_apart: whether 16-bit parameters get any.
        keeps_gradients: whether the memory of FP32 gradients is kept from one step to the next.
        are_whole: whether masters are ordinary tensors that their optimizer, and the user, may read and write.
        needs_number: whether steps round them by the number of the step.
        has_ties: whether weights must be compared on the host before they are taken for written.
    """

    words: str
    are_apart: bool
    keeps_gradients: bool
    are_whole: bool
    needs_number: bool

    @property
    def has_ties(self) -> bool:
        """See the class."""
        ...

    def make(self, model: Tensor) -> Tensor:
        """The master of a 16-bit parameter, with its value."""

    def like(self, pairs: Iterable[Pair]) -> list[Tensor]:
        """New FP32 memory in the shapes and strides of masters."""

    def operand(self, pair: Pair) -> Tensor:
        """What a one-pass step takes for the master, beside the model's parameter."""

    def round_down(self, group: DeviceGroup, rows: Sequence[int] | None = None) -> None:
        """Write masters, rounded to nearest even, into the model: all of a device, or some rows. No host sync."""

    def read(self, pairs: Sequence[Pair]) -> list[Tensor]:
        """FP32 values of masters of one device."""

    def write(self, pairs: Sequence[Pair], values: Sequence[Tensor]) -> None:
        """Masters of one device take FP32 values; the model follows with :meth:`round_down`."""

    def stepped(self) -> None:
        """A step wrote masters and model."""

    def mend(self, pairs: Sequence[Pair]) -> bool:
        """Undo, in weights that were written, what is no more than another rounding of the same masters."""

    def differs(self, pair: Pair, sample_moved: bool) -> bool:
        """Whether a weight, of which a version counter or a sample has moved, has other values than its master."""

    def take_up(self, pair: Pair) -> None:
        """The master takes the weight's values where they are not its own, rounded. No host sync."""

    def take_up_on_device(self, group: DeviceGroup, masters: Entries, now: Tensor, then: Tensor, taken: Tensor) -> None:
        """:meth:`take_up` of the rows where ``now`` is not ``then`` and ``masters`` not None, on the device itself."""

    def refresh(self, pair: Pair) -> None:
        """The master takes the weight's value, in all elements. No host sync."""

    def shown(self, pairs: Sequence[Pair]) -> Iterator[Tensor]:
        """What users get for masters."""

    def lay_out(self, pairs: Sequence[Pair], state: Mapping[Any, Any]) -> None:
        """Give loaded optimizer state the strides that steps need."""


class FullMasters:
    """FP32 tensors of the parameters' shapes and strides."""

    words = "with FP32 masters"
    are_apart = True
    keeps_gradients = True
    are_whole = True
    needs_number = False
    has_ties = False

    def make(self, model: Tensor) -> Tensor:
        """See :class:`Masters`. Leaves, with the marks that users set on parameters (Muon variants read them)."""
        data = model.detach().to(torch.float32, memory_format=torch.preserve_format, copy=True)
        master = torch.nn.Parameter(data, requires_grad=True)
        master.__dict__.update(model.__dict__)
        return master

    def like(self, pairs: Iterable[Pair]) -> list[Tensor]:
        """See :class:`Masters`."""
        made: list[Tensor] = []
        for pair in pairs:
            made.append(torch.empty_like(pair.master, dtype=torch.float32, requires_grad=False))
        return made

    def operand(self, pair: Pair) -> Tensor:
        """The master itself."""
        return pair.master

    def round_down(self, group: DeviceGroup, rows: Sequence[int] | None = None) -> None:
        """See :class:`Masters`."""
        if not group.copied:
            return
        masters = group.copied_masters
        if rows is not None:
            wanted = set(rows)
            masters = [master if row in wanted else None for row, master in enumerate(masters)]
        kernels.multi_tensor_cast(masters, group.copied_models, group.cast, tables=group.tables["cast"])

    def read(self, pairs: Sequence[Pair]) -> list[Tensor]:
        """The masters themselves, detached."""
        return [pair.master.detach() for pair in pairs]

    def write(self, pairs: Sequence[Pair], values: Sequence[Tensor]) -> None:
        """See :class:`Masters`."""
        with torch.no_grad():
            for pair, value in zip(pairs, values, strict=True):
                pair.master.copy_(value)

    def stepped(self) -> None:
        """Nothing is kept beside masters and model."""

    def mend(self, pairs: Sequence[Pair]) -> bool:
        """There is no other rounding: see :meth:`_written`."""
        return False

    def differs(self, pair: Pair, sample_moved: bool) -> bool:
        """By comparing the whole weight with its rounded master. Equal bits are no write. Syncs."""
        return bool(_written(pair).any())

    def take_up(self, pair: Pair) -> None:
        """See :class:`Masters`. The other elements keep their low bits."""
        with torch.no_grad():
            model, master = local(pair.model.detach()), local(pair.master.detach())
            master.copy_(torch.where(_written(pair), model.float(), master))

    def take_up_on_device(self, group: DeviceGroup, masters: Entries, now: Tensor, then: Tensor, taken: Tensor) -> None:
        """See :class:`Masters`."""
        kernels.multi_tensor_take(masters, group.copied_models, now, then, taken, tables=group.tables["take"])

    def refresh(self, pair: Pair) -> None:
        """See :class:`Masters`."""
        with torch.no_grad():
            pair.master.copy_(pair.model.detach())

    def shown(self, pairs: Sequence[Pair]) -> Iterator[Tensor]:
        """The masters themselves."""
        return iter([pair.master for pair in pairs])

    def lay_out(self, pairs: Sequence[Pair], state: Mapping[Any, Any]) -> None:
        """Masters show the strides that their state needs."""


class NoMasters(FullMasters):
    """16-bit parameters are stepped themselves, and lose updates smaller than half a unit in the last place."""

    words = "without masters"
    are_apart = False


def rounded(pair: Pair) -> Tensor:
    """This rank's piece of a master, rounded to the model's dtype as steps round it."""
    master = local(pair.master.detach())
    made = torch.empty_like(master, dtype=pair.model.dtype)
    kernels.multi_tensor_cast([master], [made], kernels.CastStats.allocate(1, made.device))
    return made


def _written(pair: Pair) -> Tensor:
    """Element-wise: whether a weight has other bits than its rounded master.

    A model that was trained with split masters rounds ties of bfloat16 away from zero: loading it is no write.
    """
    model = local(pair.model.detach())
    where = different_bits(rounded(pair), model)
    if model.dtype == torch.bfloat16 and bool(where.any()):
        away, rest = torch.empty_like(model), torch.empty_like(model, dtype=torch.int16)
        scratch = kernels.CastStats.allocate(1, model.device)
        kernels.multi_tensor_split([local(pair.master.detach())], [away], [rest], scratch)
        where &= different_bits(away, model)
    return where.view(model.shape)
