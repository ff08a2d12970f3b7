"""What masters are: FP32 copies of 16-bit weights, or parameters on the weights' own memory. (Split ones: split.py.)"""

from __future__ import annotations

import contextlib
import copy
import functools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from .. import kernels
from ..kernels.calls import Entries
from ..kernels.tensor_lists import set_classes
from .dtensors import different_bits, hold, local, raw_grad, set_raw_grad
from .params import DeviceParams, ParamPair, ParamTable


class Home:
    """Where masters and state of parameters lie: here on the parameters' own devices. A copy's begins empty.

    Attributes:
        saved_on: the device that checkpoints are made on; None: where masters are.
    """

    saved_on: torch.device | None = None

    def __reduce__(self) -> Any:
        return type(self), ()

    def prepare(self, spec: Any, masters: Masters, groups: list[dict[str, Any]]) -> None:
        """Ask for the memory that parameters of groups will take, before anything is changed.

        Args:
            spec: of the optimizer's class.
            groups: as they are to be: defaults filled in, and "params" are the model's.

        Raises:
            RuntimeError: there is too little memory, or a parameter lies where that can't be served.
        """

    def new_state(self, spec: Any, settings: dict[str, Any], model: Tensor) -> dict[str, Any]:
        """State of a parameter that has none, as its own spec makes it."""
        made: dict[str, Any] = {}
        spec.make_state(made, settings, model)
        return made

    def put(self, model: Tensor, name: str, value: Tensor) -> Tensor:
        """What is kept of a parameter under a name, with the bits of ``value``, where it is to lie."""
        return value

    def bring(self, state: dict[str, Any], model: Tensor) -> None:
        """:meth:`put` the tensors of a parameter's state, and have it hold those."""

    def bring_all(self, masters: Masters, pairs: Sequence[ParamPair], state: Mapping[Any, Any]) -> None:
        """Masters and state that came from elsewhere go where they are to lie."""

    def to_save(self, value: Tensor) -> Tensor:
        """``value``, detached, where it is to be saved from."""
        return value.detach()

    def state_to_save(self, entry: Any) -> Any:
        """A parameter's state, where it is to be saved from."""
        return entry


REST = "master"
"""The name under which :meth:`Home.put` takes what is kept of a master."""


class Masters:
    """How the masters of a training are kept: here as FP32 tensors of the parameters' shapes and strides.

    Attributes:
        home: where.
        dtype: of what is kept beside 16-bit weights.
        words: what ``repr`` calls them.
        are_apart: whether those of 16-bit parameters have memory of their own. All others lie on the weights'.
        keeps_gradients: whether the memory of FP32 gradients is kept from one step to the next.
        are_whole: whether masters are ordinary tensors that their optimizer, and the user, may read and write.
        needs_number: whether steps round them by the number of the step.
        mixed_in: what the class of masters with memory of their own is mixed with; None for nothing.
        ties: by id of a master, what a checkpoint has left that weights must be compared with on the host before they
            are taken for written. A step writes weights anew, and leaves none.
    """

    words = "with FP32 masters"
    are_apart = True
    keeps_gradients = True
    are_whole = True
    needs_number = False
    mixed_in: Any = None

    def __init__(self, home: Home) -> None:
        self.home, self.dtype = home, torch.float32
        self.ties: dict[int, Any] = {}

    def make(self, model: Tensor) -> Tensor:
        """The master of a 16-bit parameter, with its value: a leaf in memory of its own.

        It has the attributes that users set on the parameter (Muon variants read them).
        """
        data = model.detach().to(torch.float32, memory_format=torch.preserve_format, copy=True)
        master = torch.nn.Parameter(self.home.put(model, REST, data), requires_grad=True)
        master.__dict__.update(model.__dict__)
        return master

    def bring_home(self, pair: ParamPair) -> None:
        """What is kept of a copied master beside its weight goes where it is to lie."""
        hold(pair.master, self.home.put(pair.model, REST, local(pair.master.detach())))

    def operand(self, pair: ParamPair) -> Tensor:
        """What a one-pass step takes for the master, beside the model's parameter. It is laid out as masters are."""
        return pair.master

    def round_down(self, group: DeviceParams, rows: Sequence[int] | None = None) -> None:
        """Write masters, rounded to nearest even, into the model: all of a device, or some rows. No host sync."""
        if not group.apart:
            return
        masters: Entries = group.apart_masters
        if rows is not None:
            wanted = set(rows)
            masters = [master if row in wanted else None for row, master in enumerate(masters)]
        kernels.multi_tensor_cast(masters, group.apart_models, group.cast, cache=group.caches["cast"])

    def read(self, pairs: Sequence[ParamPair], see: Callable[[Tensor], Tensor] = Tensor.detach) -> list[Tensor]:
        """FP32 values of masters of one device: the masters themselves, detached.

        Args:
            see: gives what a tensor is read from, without gradients: :meth:`Home.to_save`.
        """
        return [see(pair.master) for pair in pairs]

    def to_save(self, pair: ParamPair) -> Tensor:
        """A master in FP32, where it is to be saved from."""
        return self.read([pair], self.home.to_save)[0]

    def write(self, pairs: Sequence[ParamPair], values: Sequence[Tensor]) -> None:
        """Masters of one device take FP32 values; the model follows with :meth:`round_down`."""
        with torch.no_grad():
            for pair, value in zip(pairs, values, strict=True):
                pair.master.copy_(value)

    def mend(self, pairs: Sequence[ParamPair]) -> None:
        """Of weights that were written: put back those that are only another rounding of the same masters.

        No-op: :func:`_written` takes none of these for a write.
        """

    def differs(self, pair: ParamPair, sample_moved: bool) -> bool:
        """Whether a weight, of which a version counter or a sample has moved, has other values than its master.

        By comparing the whole weight with its rounded master. Equal bits are no write. Syncs.
        """
        return bool(_written(pair).any())

    def take_up(self, pair: ParamPair) -> None:
        """The master takes the weight's values where they are not its own, rounded. No host sync.

        The other elements keep their low bits.
        """
        with torch.no_grad():
            model, master = local(pair.model.detach()), local(pair.master.detach())
            master.copy_(torch.where(_written(pair), model.float(), master))

    def take_up_on_device(
        self, group: DeviceParams, masters: Entries, now: Tensor, then: Tensor, taken: Tensor
    ) -> None:
        """:meth:`take_up` of the rows where ``now`` is not ``then`` and ``masters`` not None, on the device itself."""
        kernels.multi_tensor_refresh_masters(masters, group.apart_models, now, then, taken, cache=group.caches["take"])

    def refresh(self, pair: ParamPair) -> None:
        """The master takes the weight's value, in all elements. No host sync."""
        with torch.no_grad():
            pair.master.copy_(pair.model.detach())

    def shown(self, pairs: Sequence[ParamPair]) -> Iterator[Tensor]:
        """What users get for masters."""
        return iter([pair.master for pair in pairs])

    def lay_out(self, pairs: Sequence[ParamPair], state: Mapping[Any, Any]) -> None:
        """Give loaded optimizer state the strides that steps need.

        No-op: loading gives state those of its master.
        """


class NoMasters(Masters):
    """16-bit weights are stepped where they lie, and lose updates smaller than half a unit in the last place."""

    words = "without masters"
    are_apart = False


def rounded(pair: ParamPair) -> Tensor:
    """This rank's piece of a master, rounded to the model's dtype as steps round it."""
    master = local(pair.master.detach())
    made = torch.empty_like(master, dtype=pair.model.dtype)
    kernels.multi_tensor_cast([master], [made], kernels.CastStats.allocate(1, made.device))
    return made


def _written(pair: ParamPair) -> Tensor:
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


# -- masters with a gradient of their own ------------------------------------------------------------------------------


class GradientOwner(Protocol):
    """What makes the gradients of masters: the :class:`~fp16opt.engine.gradients.StepState` of their optimizer."""

    def before_reading(self, position: int) -> None:
        """``.grad`` of the master of the pair at ``position`` is about to be read."""

    def before_setting(self, position: int, value: Tensor | None) -> None:
        """``.grad`` of that master is about to be set to ``value``."""


_OWNER = "fp16opt_owner"
_WEIGHT = "fp16opt_weight"  # of a master without memory of its own: the model's parameter


def _owner_of(master: Tensor) -> tuple[GradientOwner | None, int]:
    reference, position = master.__dict__.get(_OWNER, (None, 0))
    return (None if reference is None else reference()), position


def _read(master: Tensor) -> Tensor | None:
    owner, position = _owner_of(master)
    if owner is not None:
        owner.before_reading(position)
    grad: Tensor | None = raw_grad(master)
    return grad


def _set(master: Tensor, value: Tensor | None) -> None:
    owner, position = _owner_of(master)
    if owner is not None:
        owner.before_setting(position, value)
    set_raw_grad(master, value)


def _delete(master: Tensor) -> None:
    _set(master, None)


def _marks(master: Tensor) -> dict[str, Any]:
    """What users have set on a master."""
    return {name: value for name, value in master.__dict__.items() if name not in (_OWNER, _WEIGHT)}


def _copied(master: Tensor, data: Tensor) -> torch.nn.Parameter:
    """An ordinary parameter with ``data`` and the marks that users set on ``master``."""
    made = torch.nn.Parameter(data, requires_grad=master.requires_grad)
    made.__dict__.update(_marks(master))
    return made


@functools.cache
def master_class(cls: Any, mixed_in: Any = None) -> Any:
    """The subclass of ``cls`` (Parameter, or DTensor) whose ``grad`` has true gradients made before it is read or set.

    Copies and pickles of such parameters are ordinary ones again; of those on a weight's memory they lie on the copied
    weight's.

    Args:
        mixed_in: a class whose methods come first; None for none.
    """
    bases = (cls,) if mixed_in is None else (mixed_in, cls)

    class Master(*bases):  # type: ignore[misc]
        if "__slots__" in cls.__dict__:
            __slots__ = ()

        grad = property(_read, _set, _delete)

        def __reduce_ex__(self, protocol: Any) -> Any:
            weight = self.__dict__.get(_WEIGHT)
            if weight is not None:
                return on_memory_of, (weight, _marks(self))
            return _copied(self, self.detach()).__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

        def __deepcopy__(self, memo: dict[int, Any]) -> Any:
            if id(self) not in memo:
                weight = self.__dict__.get(_WEIGHT)
                if weight is not None:
                    memo[id(self)] = on_memory_of(copy.deepcopy(weight, memo), _marks(self))
                else:
                    memo[id(self)] = _copied(self, self.detach().clone())
            return memo[id(self)]

    Master.__name__ = Master.__qualname__ = f"Master{cls.__name__}"
    _ORDINARY[Master] = cls
    return Master


_ORDINARY: dict[Any, Any] = {}
"""From a class of :func:`master_class` to the class that it was made of."""

MasterParameter: Any = master_class(torch.nn.Parameter)
"""A master, whose gradient is made of the model's when it is read."""


def on_memory_of(weight: Tensor, marks: Mapping[str, Any] | None = None) -> Tensor:
    """A master on the memory of ``weight``: no copy, no rounding, the version counter shared, a ``.grad`` of its own.

    Args:
        weight: a parameter of the model.
        marks: what users have set on the master; None: as on ``weight``.
    """
    master = torch.nn.Parameter(weight.detach(), requires_grad=not weight.is_inference())
    master.__dict__.update(weight.__dict__ if marks is None else marks)
    master.__dict__[_WEIGHT] = weight
    master.__class__ = master_class(type(master))
    return master


def own_masters(params: ParamTable, owner: GradientOwner, mixed_in: Any = None) -> None:
    """Have every master ask ``owner`` before ``.grad`` is read or set. Does not keep it alive.

    Args:
        mixed_in: see :func:`master_class`; of masters with memory of their own.
    """
    reference = weakref.ref(owner)
    for pair in params.all:
        if pair.has_master:
            if type(pair.master) not in _ORDINARY:
                pair.master.__class__ = master_class(type(pair.master), mixed_in if pair.is_apart else None)
            pair.master.__dict__[_OWNER] = reference, pair.position


@contextlib.contextmanager
def ordinary_parameters(params: ParamTable) -> Iterator[None]:
    """For as long as it lasts, masters are ordinary parameters, for which torch chooses its faster loops.

    The optimizer's own code finds on them what the user has set on the model's parameters by now.
    What the optimizer's own code has moved to other memory comes back at its end. Where an exception cuts its end,
    :func:`own_masters` puts that right.
    """
    params.follow_marks()
    masters = params.masters
    owned = list(map(type, masters))
    try:
        set_classes(masters, list(map(_ORDINARY.get, owned, owned)))
        yield
    finally:
        set_classes(masters, owned)
        params.keep_memory()
