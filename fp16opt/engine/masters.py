"""What masters are made of: FP32 copies of 16-bit weights, or none. (Split ones: split.py.)"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from .. import kernels
from ..kernels import counters
from ..kernels.calls import Entries
from ..kernels.counters import GRAD
from .dtensors import different_bits, local
from .pairs import DeviceGroup, Pair, Pairs


class Masters(Protocol):
    """How the masters of a training are kept.

    Attributes:
        words: what ``repr`` calls them.
        are_apart: whether 16-bit parameters get any.
        keeps_gradients: whether the memory of FP32 gradients is kept from one step to the next.
        are_whole: whether masters are ordinary tensors that their optimizer, and the user, may read and write.
        needs_number: whether steps round them by the number of the step.
        ties: by id of a master, what a checkpoint has left that weights must be compared with on the host before they
            are taken for written. A step writes weights anew, and leaves none.
    """

    words: str
    are_apart: bool
    keeps_gradients: bool
    are_whole: bool
    needs_number: bool
    ties: dict[int, Any]

    def make(self, model: Tensor) -> Tensor:
        """The master of a 16-bit parameter, with its value."""

    def operand(self, pair: Pair) -> Tensor:
        """What a one-pass step takes for the master, beside the model's parameter. It is laid out as masters are."""

    def round_down(self, group: DeviceGroup, rows: Sequence[int] | None = None) -> None:
        """Write masters, rounded to nearest even, into the model: all of a device, or some rows. No host sync."""

    def read(self, pairs: Sequence[Pair]) -> list[Tensor]:
        """FP32 values of masters of one device."""

    def write(self, pairs: Sequence[Pair], values: Sequence[Tensor]) -> None:
        """Masters of one device take FP32 values; the model follows with :meth:`round_down`."""

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

    def __init__(self) -> None:
        self.ties: dict[int, Any] = {}

    def make(self, model: Tensor) -> Tensor:
        """See :class:`Masters`. Leaves, with the marks that users set on parameters (Muon variants read them)."""
        data = model.detach().to(torch.float32, memory_format=torch.preserve_format, copy=True)
        master = torch.nn.Parameter(data, requires_grad=True)
        master.__dict__.update(model.__dict__)
        return master

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


# -- asking before gradients are read ----------------------------------------------------------------------------------


Asked = Callable[[Tensor, "Tensor | None"], None]
Edited = Callable[[Tensor, "Tensor | None"], bool]


class MasterClasses:
    """Subclasses of Parameter (and of DTensor) whose ``grad`` makes true gradients before it is read or set.

    Copies and pickles of such parameters are plain ones again.

    Args:
        read: called with the model's parameter, and what the master holds, before ``.grad`` is read; not where the
            two hold the same, as under a GradScaler: then it was made.
        edit: called likewise before ``.grad`` is set. Says whether model and masters share gradients.
        share: called with the model's parameter and what the master's ``.grad`` was set to, where they do.

    Attributes:
        adopted: (master, its class, the ordinary class) of those that have one of them.
    """

    def __init__(self, read: Asked, edit: Edited, share: Asked) -> None:
        self._asks = read, edit, share
        self._of: dict[type, type] = {}
        # By id of their masters, which live as long as this. Weak: classes are freed by the garbage collector only.
        self._models: dict[int, weakref.ref[Tensor]] = {}
        self.adopted: list[tuple[Tensor, type, type]] = []

    def made(self, cls: type) -> bool:
        """Whether ``cls`` is one of them."""
        return self._of.get(cls.__mro__[1]) is cls

    def adopt(self, pairs: Pairs) -> None:
        """Have every master ask before its gradient is read."""
        for pair in pairs.all:
            cls = type(pair.master)
            if pair.master is not pair.model and not self.made(cls):
                if cls not in self._of:
                    self._of[cls] = _subclass(cls, self._models, *self._asks)
                pair.master.__class__ = self._of[cls]
                self._models[id(pair.master)] = weakref.ref(pair.model)
                self.adopted.append((pair.master, self._of[cls], cls))

    @contextlib.contextmanager
    def plain(self) -> Iterator[None]:
        """For as long as it lasts, masters are ordinary parameters, for which torch chooses its faster loops."""
        for master, _, ordinary in self.adopted:
            master.__class__ = ordinary
        try:
            yield
        finally:
            for master, cls, _ in self.adopted:
                master.__class__ = cls


def _subclass(
    cls: Any,
    models: dict[int, weakref.ref[Tensor]],
    read: Asked,
    edit: Edited,
    share: Asked,
) -> type:
    class MasterParameter(cls):  # type: ignore[misc]
        """An FP32 master whose gradient is made of the model's when it is read."""

        if "__slots__" in cls.__dict__:
            __slots__ = ()

        def _set_grad(self, value: Tensor | None) -> None:
            reference = models.get(id(self))  # none of one that was made of this class by somebody else
            model = None if reference is None else reference()
            shares = model is not None and edit(model, GRAD.__get__(self))
            GRAD.__set__(self, value)
            if model is not None and shares:
                share(model, value)

        def _delete_grad(self) -> None:
            self._set_grad(None)

        # Compiled code, where there is some: who drives reads each of them many times.
        grad = property(functools.partial(counters.asked_gradient, models, read), _set_grad, _delete_grad)

        def __reduce_ex__(self, protocol: Any) -> Any:
            plain = self.detach()
            made = torch.nn.Parameter(plain, requires_grad=self.requires_grad)
            made.__dict__.update(self.__dict__)
            return made.__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

        def __deepcopy__(self, memo: dict[int, Any]) -> Any:
            if id(self) not in memo:
                memo[id(self)] = torch.nn.Parameter(self.detach().clone(), requires_grad=self.requires_grad)
            return memo[id(self)]

    return MasterParameter
