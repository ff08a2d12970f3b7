"""Parameters: which are trained, by identity and order, which master belongs to each, and where both lie.

Every parameter of the wrapped optimizer is one :class:`ParamPair`, and one row of its :class:`DeviceParams`: the same
row in every list and every statistic of that device. A master is never the model's own object; of an FP32 or FP64
parameter it lies on the weight's own memory. What the wrapped optimizer's ``param_groups`` hold is the truth:
:meth:`ParamTable.sync` follows it.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .. import kernels
from ..kernels import backends
from ..kernels.lists import is_dense
from ..kernels.readings import Rows, has_memory
from ..kernels.tensor_lists import are_items, read, versions_of
from . import errors
from .diagnostics import describe
from .dtensors import check_whole, hold, is_sharded, local, pieces, raw_grad, versions

HALF_DTYPES = kernels.HALF_DTYPES
OWN_DTYPES = (torch.float32, torch.float64)

ELSEWHERE = "a parameter of another rank"
"""What a parameter of another rank is called that has no name."""

MASTER_OF = "fp16opt_master"
"""Of a split master as users see it, made anew when it is asked for: the one that the optimizer steps."""

Adopt = Callable[[Tensor], "tuple[Tensor, bool]"]
"""Makes the master of a parameter, optimizer state included; and says whether it has memory of its own."""


class DeviceParams:
    """The parameters of one device, in rows, as kernels take them: of DTensors this rank's pieces.

    Attributes:
        positions: of each row among all pairs.
        pairs: of each row.
        models, masters: of each row.
        apart: rows whose master has memory of its own, and is rounded to the model.
        apart_models, apart_masters: as ``models`` and ``masters``, None in all other rows.
        is_host: whether they can be read at once, without waiting for work that was queued.
        cast: what the last rounding of masters to the model found.
        caches: the kernels' caches for lists of these rows, by call site.
    """

    def __init__(self, device: torch.device, positions: list[int], pairs: list[ParamPair]) -> None:
        self.device = device
        self.is_host = kernels.is_host(device)
        self.positions = positions
        self.pairs = pairs
        self.apart = [row for row, pair in enumerate(pairs) if pair.is_apart]
        self._spread = [getattr(pair.model, "placements", None) for pair in pairs]
        self._shared = [pair for pair in pairs if pair.has_master and not pair.is_apart]
        self.cast = kernels.CastStats.allocate(len(pairs), device)
        self.caches: defaultdict[str, kernels.CallCache] = defaultdict(kernels.CallCache)
        self.models: tuple[Tensor, ...] = ()
        self.masters: tuple[Tensor, ...] = ()
        self._read: Any = None
        self._addresses: list[int] | None = None
        self.find_pieces()

    def __len__(self) -> int:
        return len(self.positions)

    def read_models(self) -> Rows:
        """The models as they are now, with versions. Does not sync."""
        return Rows(self.models, read(self.models, self._read, same=True, counts=True))

    def lies_as(self, weights: Rows) -> bool:
        """Whether no parameter of the model has moved since :meth:`found`, by what was just read of them."""
        if weights.reading is not None:
            return bool(weights.reading == self._read)
        return self._addresses == [model.data_ptr() for model in self.models]

    def found(self, weights: Rows) -> None:
        """The parameters lie as was just read of them, and are what they were. A refusal thus comes again."""
        self._read = weights.reading
        self._addresses = [model.data_ptr() for model in self.models] if weights.reading is None else None

    def pieces_of(self, grads: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
        """This rank's pieces of gradients; one that isn't laid out over ranks as its parameter is stays as it is."""
        pairs = zip(grads, self._spread, strict=True)
        return tuple(
            [g if g is None or p is None or getattr(g, "placements", None) != p else local(g) for g, p in pairs]
        )

    def apart_of(self, weights: Rows | None) -> Sequence[Tensor | None]:
        """``apart_models``, as the models were just read where these are the same."""
        return self.apart_models if weights is None or len(self.apart) < len(self.models) else weights

    def find_pieces(self) -> None:
        """Take models and masters as they are now: FSDP2 makes new pieces where a model is moved or loaded.

        Lists of the same pieces stay the same tuples, by which plans and the kernels' caches know them.
        """
        models = pieces([pair.model for pair in self.pairs])
        for pair in self._shared:
            pair.follow_memory()
        if len(self.models) != len(models) or not are_items(models, self.models):
            self.models, self._read = tuple(models), None
            self.apart_models = tuple(
                [m if pair.is_apart else None for pair, m in zip(self.pairs, models, strict=True)]
            )
        masters = pieces([pair.master for pair in self.pairs])
        if len(self.masters) != len(masters) or not are_items(masters, self.masters):
            self.masters = tuple(masters)
            self.apart_masters = tuple(
                [m if pair.is_apart else None for pair, m in zip(self.pairs, masters, strict=True)]
            )

    def leave_pieces(self, are_new: bool) -> None:
        """Know no addresses, and of DTensors no pieces, which would keep their memory, until :meth:`find_pieces`."""
        self._read = self._addresses = None
        if are_new:
            self.models = self.masters = self.apart_models = self.apart_masters = ()


@dataclass(eq=False, slots=True)
class ParamPair:
    """A parameter of the model and what the optimizer steps for it.

    Attributes:
        master: what the wrapped optimizer's groups hold; ``model`` itself only until it trains or has a gradient.
        group, index: where the wrapped optimizer's ``param_groups`` hold it.
        known: the model parameter's dtype, shape and device when it came.
        position: among all pairs.
        row: among the parameters of its device.
        is_apart: whether the master has memory of its own; else it lies on the weight's.
        cast: what the last rounding of that device's masters to the model found, by row.
        marks: attributes that the user had set on the model's parameter when the master last got them.
    """

    model: Tensor
    master: Tensor
    name: str
    group: int
    index: int
    known: tuple[torch.dtype, torch.Size, torch.device]
    position: int = 0
    row: int = 0
    is_apart: bool = False
    cast: Any = None
    marks: dict[str, Any] = field(default_factory=dict)

    @property
    def has_master(self) -> bool:
        """Whether it has one by now."""
        return self.master is not self.model

    def follow_memory(self) -> None:
        """A master on the weight's memory moves where the weight has moved: ``p.data = ...``, FSDP2's new pieces."""
        if self.is_apart or not self.has_master:
            return
        here, there = local(self.master), local(self.model)
        if here.data_ptr() != there.data_ptr() or here.stride() != there.stride():
            hold(self.master, there.detach())

    def follow_marks(self) -> None:
        """The master gets attributes that were set on the model's parameter since; what else stands on it stays."""
        now, before = self.model.__dict__, self.marks
        if now or before:
            for name in before.keys() - now.keys():
                self.master.__dict__.pop(name, None)
            new = {name: value for name, value in now.items() if name not in before or before[name] is not value}
            self.master.__dict__.update(new)
            self.marks = dict(now)

    def keep_memory(self) -> None:
        """Where a step has given that master memory of its own, the weight takes its values, and it lies there again.

        To be called when the code of the step has run: any other move is the weight's, and :meth:`follow_memory`'s.
        """
        if local(self.master).data_ptr() != local(self.model).data_ptr():
            with torch.no_grad():
                self.model.copy_(self.master)
            self.follow_memory()


class ParamTable:
    """All pairs, in the order of the wrapped optimizer's param_groups.

    Args:
        groups: the wrapped optimizer's ``param_groups``. Their ``params`` lists are changed in place.
        names: from ``id(parameter)`` to its name; may be empty.
        adopt: makes masters.

    Raises:
        TypeError, ValueError: a parameter can't be served; nothing has been changed then.

    Attributes:
        generation: grows with every change of parameters, masters or optimizer state that is not a step. A plan holds
            while it stands.
        layout: grows where parameters were laid out in other strides or memory of other kinds.
        read_of_grads: what was last read of the model's gradients: a hint for the next look.
        models, masters, names: of each pair.
        devices: in the order of their first parameters.
        elsewhere: model parameters whose masters are on other ranks.
        called_elsewhere: what messages call these.
        names_elsewhere: theirs; None until :meth:`name` has given names that are the same on all ranks.
        has_dtensors: whether there are DTensors.
        apart: the masters, None in place of those that lie on their weights' memory.
        any_apart: whether one has memory of its own.
        unmastered: pairs without a master: frozen, and never with a gradient.
        halves_stepped: whether 16-bit weights themselves are stepped.
    """

    def __init__(self, groups: list[dict[str, Any]], names: dict[int, str], adopt: Adopt) -> None:
        self.generation = self.layout = 0
        self.read_of_grads: Any = None
        self.elsewhere: list[Tensor] = []
        self.called_elsewhere: list[str] = []
        self.names_elsewhere: list[str] | None = None
        self.all: list[ParamPair] = []
        self.group_sizes: list[int] = []
        self._take_in(groups, names, adopt, [])

    def __len__(self) -> int:
        return len(self.all)

    # -- following the groups ----------------------------------------------------------------------------------------

    def thawed(self) -> bool:
        """Whether a parameter is to get its master now: it trains, or has a gradient, for the first time."""
        return any([is_to_be_mastered(pair.model) for pair in self.unmastered])  # noqa: C419

    def put_masters_back(self, groups: list[dict[str, Any]]) -> None:
        """Where groups hold a parameter of the model in the place of its master, the master takes that again."""
        pairs = iter(self.all)
        for group in groups:
            for index, (param, pair) in enumerate(zip(group["params"], pairs, strict=False)):
                if param is pair.model:
                    group["params"][index] = pair.master

    def has_changed(self, groups: list[dict[str, Any]]) -> bool:
        """Whether the groups hold other parameters than this table, or in another order."""
        if len(groups) != len(self.group_sizes):
            return True
        position = 0
        for group, size in zip(groups, self.group_sizes, strict=True):
            params = group["params"]
            if len(params) != size or not are_items(params, self.masters, position):
                return True
            position += size
        return False

    def with_models(self, groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The groups with the model's parameters in the place of their masters."""
        models = {id(pair.master): pair.model for pair in self.all}
        return [{**group, "params": [models.get(id(p), p) for p in group["params"]]} for group in groups]

    def sync(self, groups: list[dict[str, Any]], names: dict[int, str], adopt: Adopt) -> list[ParamPair]:
        """Take in what the groups hold: new parameters get masters, known ones keep theirs.

        A model parameter whose master is known stands for its master, which takes its place in the group.

        Returns:
            The pairs that are gone.

        Raises:
            TypeError, ValueError: a parameter can't be served or is there twice; nothing has been changed then.
        """
        return self._take_in(groups, names, adopt, self.all)

    def _take_in(
        self, groups: list[dict[str, Any]], names: dict[int, str], adopt: Adopt, known: list[ParamPair]
    ) -> list[ParamPair]:
        by_id = {id(tensor): pair for pair in known for tensor in (pair.model, pair.master)}
        found: list[ParamPair] = []
        labelled: list[tuple[str, Tensor]] = []
        for number, group in enumerate(groups):
            for index, param in enumerate(group["params"]):
                name = name_of(group, index, param, names) or numbered(number, index)
                pair = by_id.get(id(param))
                if pair is None:
                    check_served(param, name, group)
                    pair = ParamPair(param, param, name, number, index, (param.dtype, param.shape, param.device))
                    by_id[id(param)] = pair
                if not pair.has_master:
                    check_plain(pair.model, name)
                found.append(pair)
                labelled.append((name if param is pair.model else pair.name, pair.model))
        check_apart(labelled)
        kept = {id(pair) for pair in found}
        gone = [pair for pair in known if id(pair) not in kept]
        position = 0
        for number, group in enumerate(groups):
            for index in range(len(group["params"])):
                pair = found[position]
                if pair.name == numbered(pair.group, pair.index):
                    pair.name = numbered(number, index)
                pair.group, pair.index = number, index
                if not pair.has_master and is_to_be_mastered(pair.model):
                    pair.master, pair.is_apart = adopt(pair.model)
                if group["params"][index] is not pair.master:
                    group["params"][index] = pair.master
                position += 1
        self.all = found
        self.group_sizes = [len(group["params"]) for group in groups]
        self._rebuild()
        return gone

    def give_masters(self, pairs: Iterable[ParamPair], groups: list[dict[str, Any]], adopt: Adopt) -> None:
        """Give masters to 16-bit parameters that were frozen until now: a checkpoint has masters for them."""
        for pair in pairs:
            pair.master, pair.is_apart = adopt(pair.model)
            groups[pair.group]["params"][pair.index] = pair.master
        self._rebuild()

    def changed(self) -> None:
        """Optimizer state or masters were replaced: no plan that was made of them holds."""
        self.generation += 1

    def _rebuild(self) -> None:
        by_device: dict[torch.device, list[int]] = {}
        for position, pair in enumerate(self.all):
            by_device.setdefault(pair.master.device, []).append(position)
        self.devices = [
            DeviceParams(device, positions, [self.all[i] for i in positions]) for device, positions in by_device.items()
        ]
        for device in self.devices:
            for row, (position, pair) in enumerate(zip(device.positions, device.pairs, strict=True)):
                pair.position, pair.row, pair.cast = position, row, device.cast
        self.models = [pair.model for pair in self.all]
        self.masters = [pair.master for pair in self.all]
        self.names = [pair.name for pair in self.all]
        self.has_dtensors = any(map(is_sharded, self.models))
        self.apart = [pair.master if pair.is_apart else None for pair in self.all]
        self.any_apart = any(pair.is_apart for pair in self.all)
        self.unmastered = [pair for pair in self.all if not pair.has_master]
        self.halves_stepped = any(
            pair.has_master and not pair.is_apart and pair.model.dtype in HALF_DTYPES for pair in self.all
        )
        self.generation += 1

    def follow_marks(self) -> None:
        """Before a step of a class's own, which may read them: ``p.lr_scale``."""
        for pair in self.all:
            if pair.has_master:
                pair.follow_marks()

    def keep_memory(self) -> None:
        """After a step of a class's own: masters on weights' memory lie there, also where it said ``p.data = ...``."""
        for pair in self.all:
            if pair.has_master and not pair.is_apart:
                pair.keep_memory()

    # -- what kernels get --------------------------------------------------------------------------------------------

    def leave_memory(self) -> None:
        """Keep no memory of the model's weights, which may move to another device, until :meth:`verify_moved`."""
        for pair in self.all:
            if pair.has_master and not pair.is_apart:
                hold(pair.master, local(pair.master).detach().new_empty(0))
        for device in self.devices:
            device.leave_pieces(self.has_dtensors)

    def find_pieces(self) -> None:
        """To be called before kernels get the model or the masters, where these are DTensors."""
        for device in self.devices:
            device.find_pieces()

    def verify_moved(self) -> tuple[Rows, ...]:
        """:meth:`verify`, where a parameter lies at another address than before. Does not sync.

        Returns:
            By device, the model's weights as they were just read, with versions.
        """
        if self.has_dtensors:
            self.find_pieces()
        weights = tuple(map(DeviceParams.read_models, self.devices))
        if not all(map(DeviceParams.lies_as, self.devices, weights)):
            self.verify()
            for pair in self.all:
                pair.follow_memory()
            self.layout += 1
            for device, rows in zip(self.devices, weights, strict=True):
                device.found(rows)
        return weights

    def versions(self, tensors: Sequence[Tensor | None]) -> list[int]:
        """How often each was written; -1 for None. Of DTensors this rank's pieces count too."""
        return versions(tensors) if self.has_dtensors else versions_of(tensors)

    def verify(self) -> None:
        """Raise ``RuntimeError`` naming the first parameter whose dtype, shape, device or memory is not what it was."""
        for pair in self.all:
            now = pair.model
            if pair.known == (now.dtype, now.shape, now.device):
                if pair.has_master and not has_memory(local(now)):
                    raise errors.MEMORY_FREED(name=pair.name)
                continue
            kinds = zip(("dtype", "shape", "device"), pair.known, (now.dtype, now.shape, now.device), strict=True)
            what, before, is_now = next(kind for kind in kinds if kind[1] != kind[2])
            if what == "shape":
                before, is_now = tuple(before), tuple(is_now)  # type: ignore[arg-type]
            raise errors.MODEL_CONVERTED(name=pair.name, what=what, before=before, now=is_now)

    # -- in words ----------------------------------------------------------------------------------------------------

    def unfit(self) -> list[tuple[str, int]]:
        """(name, bits of ``CastStats.overflow``) of masters that did not fit when they were last rounded. Syncs."""
        found = []
        for group in self.devices:
            if not backends.is_zero(group.cast.overflow):
                flags = zip(group.positions, group.cast.overflow.tolist(), strict=True)
                found += [(self.names[i], bits) for i, bits in flags if bits]
        return found

    def hold_elsewhere(self, params: list[Tensor], names: dict[int, str]) -> None:
        """Know the model's parameters that other ranks step, with names from ``id(parameter)`` where there are some."""
        known = self.called_elsewhere if len(self.called_elsewhere) == len(params) else [ELSEWHERE] * len(params)
        self.elsewhere = params
        self.called_elsewhere = [names.get(id(param), called) for param, called in zip(params, known, strict=True)]

    def name(self, names: dict[int, str]) -> None:
        """Give names, from ``id(parameter)``, to parameters that came without one."""
        for pair in self.all:
            if pair.name == numbered(pair.group, pair.index):
                pair.name = names.get(id(pair.model), pair.name)
        self.names = [pair.name for pair in self.all]
        others = zip(self.elsewhere, self.called_elsewhere, strict=True)
        unnamed = {id(p): names[id(p)] for p, called in others if called == ELSEWHERE and id(p) in names}
        self.hold_elsewhere(self.elsewhere, unnamed)
        if all(id(param) in names for param in self.elsewhere):
            self.names_elsewhere = list(self.called_elsewhere)  # chosen as those of pairs are

    def indices(self) -> list[tuple[int, int]]:
        """(group, index) of each pair."""
        return [(pair.group, pair.index) for pair in self.all]

    def describe(self, pairs: Iterable[ParamPair]) -> str:
        """Their names in a line."""
        return describe([pair.name for pair in pairs])

    def names_of(self, positions: Iterable[int]) -> str:
        """The names of those at these positions, in a line."""
        return describe([self.names[position] for position in positions])

    def chosen(self, params: object) -> set[int] | None:
        """The ids of the model's parameters among ``params``, which may be masters too; None where these are all.

        Raises:
            TypeError: they are no tensors.
            ValueError: one has a gradient and is not trained here.
        """
        given = [params] if isinstance(params, Tensor) else list(params) if isinstance(params, Iterable) else params
        if not isinstance(given, list) or not all(isinstance(param, Tensor) for param in given):
            raise TypeError(
                f"params: expected the parameters whose gradients are clipped, got {type(params).__name__}. Pass "
                "module.parameters(), or None for all of this optimizer."
            )
        mine = {id(tensor): pair.model for pair in self.all for tensor in (pair.model, pair.master)}
        mine.update({id(param): param for param in self.elsewhere})
        for place, param in enumerate(given):
            if id(param) not in mine and param.grad is not None:
                raise ValueError(
                    f"params: number {place}, of shape {tuple(param.shape)}, has a gradient and is not in this "
                    "optimizer, so its loss scale is not known. Clip it with the optimizer that trains it."
                )
        ids = {id(mine[id(param)]) for param in given if id(param) in mine}
        return None if len(ids) == len(self.all) + len(self.elsewhere) else ids

    def not_finite(self) -> list[str]:
        """Names of parameters whose weight, or this rank's piece of it, holds inf or nan. Syncs for each."""
        return [pair.name for pair in self.all if not bool(local(pair.model).detach().isfinite().all())]

    def check_model(self, model: object) -> None:
        """Raise where ``model`` is no module that these parameters are of, or where not all masters are here."""
        if not isinstance(model, torch.nn.Module):
            raise TypeError(f"model: expected a torch.nn.Module, got {type(model).__name__}.")
        if self.elsewhere:
            raise RuntimeError(
                "fp32_state_dict: this rank has a part of the masters only. Use fp16opt.distributed.fp32_state_dict."
            )
        mine = {id(param) for param in self.models}
        if not any(id(param) in mine for param in model.parameters()):
            raise ValueError("model: none of its parameters is in this optimizer. Pass the model that it trains.")


def not_in_model(what: str, name: str, param: Tensor, there: object) -> Exception:
    """A parameter of the optimizer is not in the module that the user gave: it was replaced, or deleted.

    Args:
        what: the argument.
        there: what the module has under that name; None where it has nothing.
    """
    has = errors.HAS_ANOTHER.format(shape=tuple(there.shape)) if isinstance(there, Tensor) else "has no"
    return errors.NOT_IN_THE_MODEL(argument=what, name=name, shape=tuple(param.shape), has=has)


def name_of(group: dict[str, Any], index: int, param: object, names: dict[int, str]) -> str | None:
    """The name given by ``named_parameters``, else by torch's own named param groups, else None."""
    if id(param) in names:
        return names[id(param)]
    own = group.get("param_names")
    return str(own[index]) if own is not None and index < len(own) else None


def numbered(group: int, index: int) -> str:
    """What a parameter without a name is called."""
    return f"group {group}, param {index}"


def labelled(groups: list[dict[str, Any]], names: dict[int, str], first: int = 0) -> list[tuple[str, Tensor]]:
    """(what a message calls it, the parameter) for all of some groups, of which the first has the number ``first``."""
    return [
        (name_of(group, index, param, names) or numbered(number, index), param)
        for number, group in enumerate(groups, first)
        for index, param in enumerate(group["params"])
    ]


# -- which parameters can be served ------------------------------------------------------------------------------------


def is_to_be_mastered(model: Tensor) -> bool:
    """Whether a parameter gets a master: it trains, or has a gradient."""
    return model.requires_grad or raw_grad(model) is not None


def check_plain(model: Tensor, name: str) -> None:
    """Raise ``ValueError`` for a parameter to train whose class computes in its own way, as torchao's float8 weights.

    What is frozen may be of any class: nothing reads it.
    """
    kind = type(local(model))
    if is_to_be_mastered(model) and kind.__torch_dispatch__ is not Tensor.__torch_dispatch__:
        raise ValueError(
            f"parameter {name!r} is a {kind.__name__}, a tensor subclass with operations of its own, of which a master "
            "can't be told. Convert the model without such weights (float8: enable_fsdp_float8_all_gather=False), or "
            "leave it out of the wrapped optimizer."
        )


def check_served(param: object, name: str, group: dict[str, Any]) -> None:
    """Raise ``ValueError`` or ``TypeError`` for a parameter of ``group`` that can't be served."""
    where = f"parameter {name!r}"
    if not isinstance(param, Tensor):
        raise TypeError(f"{where}: expected a tensor, got {type(param).__name__}.")
    if param.dtype not in HALF_DTYPES + OWN_DTYPES:
        wanted = "float16, bfloat16, float32 or float64"
        raise ValueError(
            f"{where}: expected {wanted}, got {str(param.dtype).removeprefix('torch.')}. "
            "Leave it out of the wrapped optimizer, or convert it first."
        )
    if param.device.type == "meta":
        raise errors.META(param=where)
    check_whole(param, where)
    if (
        param.layout is torch.strided
        and param.numel()
        and any(stride == 0 and size > 1 for stride, size in zip(param.stride(), param.shape, strict=True))
    ):
        raise ValueError(
            f"{where}: elements of an expanded parameter share memory, so they can't be trained apart, got strides "
            f"{param.stride()} for shape {tuple(param.shape)}. Make it a tensor of its own, with .clone()."
        )
    if group.get("fused") and param.dtype in OWN_DTYPES and param.numel() and not is_dense(param):
        raise ValueError(
            f"{where}: torch's fused steps are wrong on parameters whose memory is not dense, got strides "
            f"{param.stride()} for shape {tuple(param.shape)}. Use fused=False, or make it contiguous."
        )


def check_apart(labelled: Sequence[tuple[str, Tensor]]) -> None:
    """Raise ``ValueError`` naming two parameters that overlap in memory: each would undo the other's update.

    Parts of one buffer that lie one behind the other are apart, as cuDNN's LSTM has them; columns of a matrix are not.
    """
    spans = []
    for position, (_, param) in enumerate(labelled):
        piece = local(param)
        if piece.layout is torch.strided and piece.numel() and piece.device.type != "meta":
            start = piece.data_ptr()
            reach = sum(stride * (size - 1) for stride, size in zip(piece.stride(), piece.shape, strict=True))
            if start:
                spans.append((str(piece.device), start, start + (reach + 1) * piece.element_size(), position))
    for (device, _, end, one), (another, start, _, other) in itertools.pairwise(sorted(spans)):
        if device == another and start < end:
            (first, a), (second, b) = labelled[min(one, other)], labelled[max(one, other)]
            if a is b:
                raise ValueError(f"parameters {first!r} and {second!r} are one, in the optimizer twice. Leave one out.")
            raise ValueError(
                f"parameters {first!r} and {second!r} overlap in memory: an update of one would overwrite the other's. "
                "Give the optimizer one of the two, or give each memory of its own, with .clone()."
            )


# -- state, by parameter -----------------------------------------------------------------------------------------------


class StateByParam(MutableMapping[Any, Any]):
    """The wrapped optimizer's state, keyed by what it steps.

    A model's parameter stands for its master, and so does what ``master_params()`` shows of a split one.

    Args:
        state: the wrapped optimizer's own.
        params: who is trained.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(2, dtype=torch.float16))
        >>> adopt = lambda model: (torch.nn.Parameter(model.detach().float()), True)
        >>> table = ParamTable([{"params": [weight]}], {}, adopt)
        >>> StateByParam({table.masters[0]: {"step": 1}}, table)[weight]
        {'step': 1}
    """

    def __init__(self, state: MutableMapping[Any, Any], params: ParamTable) -> None:
        self._state = state
        self._params = params

    def _key(self, key: Any) -> Any:
        """The master of a model's parameter; any other key as it is."""
        if not isinstance(key, Tensor) or key in self._state:
            return key
        key = key.__dict__.get(MASTER_OF, key)
        return next((pair.master for pair in self._params.all if pair.model is key), key)

    def __getitem__(self, key: Any) -> Any:
        mine = self._key(key)
        if mine not in self._state and not any(master is mine for master in self._params.masters):
            raise KeyError(self._unknown(key))
        return self._state[mine]  # where a trained parameter has none yet, torch's defaultdict makes an empty one

    def _unknown(self, key: Any) -> str:
        if not isinstance(key, Tensor):
            return repr(key)
        return (
            f"no state of a tensor of shape {tuple(key.shape)} and {str(key.dtype)[6:]}: it is no parameter of this "
            f"optimizer, which trains {describe(self._params.names)}"
        )

    def get(self, key: Any, default: Any = None) -> Any:
        """The state of a parameter, or ``default``, which does not begin one."""
        mine = self._key(key)
        return self._state.get(mine, default)

    def __setitem__(self, key: Any, value: Any) -> None:
        self._state[self._key(key)] = value

    def __delitem__(self, key: Any) -> None:
        mine = self._key(key)
        if mine not in self._state:
            raise KeyError(self._unknown(key))
        del self._state[mine]

    def __contains__(self, key: object) -> bool:
        return self._key(key) in self._state

    def __iter__(self) -> Iterator[Any]:
        return iter(self._state)

    def __len__(self) -> int:
        return len(self._state)

    def __repr__(self) -> str:
        return repr(self._state)
