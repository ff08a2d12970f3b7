"""Pairs: which parameters are trained, which master belongs to each, and where both lie.

Every parameter of the wrapped optimizer is one :class:`Pair`, and one row of its :class:`DeviceGroup`: the same row in
every list and every statistic of that device. A parameter without a master apart from itself is its own master.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .. import kernels
from ..kernels import backends
from ..kernels.tables import is_dense
from .arguments import quoted
from .diagnostics import describe
from .dtensors import check_whole, is_sharded, local

HALF_DTYPES = kernels.HALF_DTYPES
OWN_DTYPES = (torch.float32, torch.float64)

_PARAMS = operator.itemgetter("params")

Adopt = Callable[[Tensor], Tensor]
"""Makes the master of a 16-bit parameter, optimizer state included."""


class DeviceGroup:
    """The parameters of one device, in rows, as kernels take them: of DTensors this rank's pieces.

    Attributes:
        positions: of each row among all pairs.
        models, masters: of each row.
        copied: rows whose master is a tensor apart from the model's.
        own: the others.
        copied_models, copied_masters: as ``models`` and ``masters``, None in the rows of ``own``.
        is_host: whether they can be read at once, without waiting for work that was queued.
        cast: what the last rounding of masters to the model found.
        tables: the kernels' caches for lists of these rows, by call site.
    """

    def __init__(self, device: torch.device, positions: list[int], pairs: list[tuple[Tensor, Tensor]]) -> None:
        self.device = device
        self.is_host = kernels.is_host(device)
        self.positions = positions
        self.copied = [row for row, (model, master) in enumerate(pairs) if master is not model]
        self.own = [row for row, (model, master) in enumerate(pairs) if master is model]
        self.cast = kernels.CastStats.allocate(len(pairs), device)
        self.tables: defaultdict[str, kernels.PointerTables] = defaultdict(kernels.PointerTables)
        self.lay(pairs)

    def __len__(self) -> int:
        return len(self.positions)

    def lay(self, pairs: list[tuple[Tensor, Tensor]]) -> None:
        """Take (model, master) of each row as they are now: FSDP2 makes new pieces where a model is moved or loaded."""
        self.models = [local(model) for model, _ in pairs]
        self.masters = [local(master) for _, master in pairs]
        own = set(self.own)
        self.copied_models = [None if row in own else model for row, model in enumerate(self.models)]
        self.copied_masters = [None if row in own else master for row, master in enumerate(self.masters)]


@dataclass(eq=False, slots=True)
class Pair:
    """A parameter of the model and what the optimizer steps for it.

    Attributes:
        master: FP32, or ``model`` itself.
        group, index: where the wrapped optimizer's ``param_groups`` hold it.
        row: its row in ``device``.
    """

    model: Tensor
    master: Tensor
    name: str
    group: int
    index: int
    device: DeviceGroup
    row: int


class Pairs:
    """All pairs, in the order of the wrapped optimizer's param_groups.

    Args:
        groups: the wrapped optimizer's ``param_groups``. Their ``params`` lists are changed in place.
        names: from ``id(parameter)`` to its name; may be empty.
        adopt: makes masters; None where 16-bit parameters are to be their own.

    Raises:
        TypeError, ValueError: a parameter can't be served; nothing has been changed then.

    Attributes:
        generation: grows with every change of parameters, masters or optimizer state that is not a step. What was
            proved of them holds while it stands.
        layout: grows where parameters were laid out in other strides or memory of other kinds.
        models, masters, names: of each pair.
        places: by id of a model's parameter, where it is among them.
        devices: in the order of their first parameters.
        elsewhere: model parameters whose masters are on other ranks.
        names_elsewhere: theirs; None until :meth:`name` has given names that are the same on all ranks.
        has_pieces: whether there are DTensors.
        apart: the masters, None in place of those that are parameters themselves.
        are_own, has_own, has_apart: whether each parameter is its own master, whether one is, whether one is not.
        own_halves: pairs of 16-bit parameters that are their own masters.
    """

    def __init__(self, groups: list[dict[str, Any]], names: dict[int, str], adopt: Adopt | None) -> None:
        self.generation = self.layout = 0
        self.elsewhere: list[Tensor] = []
        self.names_elsewhere: list[str] | None = None
        self.all: list[Pair] = []
        self.group_sizes: list[int] = []
        self._known: list[tuple[torch.dtype, torch.Size, torch.device]] = []
        for number, group in enumerate(groups):
            check_group(group, number, names)
        check_apart(_labelled(groups, names))
        for number, group in enumerate(groups):
            self._append(group, number, names, adopt)
        self._rebuild()

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._place()  # a copy's parameters have other ids

    def __len__(self) -> int:
        return len(self.all)

    def _append(self, group: dict[str, Any], number: int, names: dict[int, str], adopt: Adopt | None) -> None:
        params = group["params"]
        nowhere = DeviceGroup(torch.device("cpu"), [], [])
        for index, param in enumerate(params):
            name = name_of(group, index, param, names) or numbered(number, index)
            pair = Pair(param, param, name, number, index, nowhere, 0)
            self.all.append(pair)
            self._known.append((param.dtype, param.shape, param.device))
            if adopt is not None and param.dtype in HALF_DTYPES and param.requires_grad:
                pair.master = params[index] = adopt(param)
        self.group_sizes.append(len(params))

    def check_new_group(self, group: dict[str, Any], number: int, names: dict[int, str]) -> None:
        """Raise for the first parameter of a group about to be added that can't be served."""
        check_group(group, number, names)
        known = {id(pair.model) for pair in self.all}
        for index, param in enumerate(group["params"]):
            if id(param) in known:
                raise ValueError(
                    f"group {number}, param {index}{quoted(name_of(group, index, param, names))}: this parameter is in "
                    "the optimizer already. Leave it out."
                )
        check_apart([(pair.name, pair.model) for pair in self.all] + _labelled([group], names, number))

    def add_group(self, group: dict[str, Any], number: int, names: dict[int, str], adopt: Adopt | None) -> None:
        """Take in a group whose ``params`` list is the wrapped optimizer's own."""
        self._append(group, number, names, adopt)
        self._rebuild()

    def are_more(self, groups: list[dict[str, Any]], are_apart: bool, verifies: bool = False) -> bool:
        """Whether parameters came through the wrapped optimizer itself, or some that get masters were unfrozen.

        Args:
            verifies: :meth:`verify` those that are known before.

        Raises:
            RuntimeError: a known group changed its length; or as :meth:`verify`.
        """
        if verifies and not self._seen.again(self.models):
            self._verify_each()
        sizes = list(map(len, map(_PARAMS, groups)))
        if sizes == self.group_sizes and not (are_apart and self.own_halves):
            return False
        known = len(self.group_sizes)
        if sizes[:known] != self.group_sizes:
            raise RuntimeError(
                f"the wrapped optimizer's param_groups were changed: expected groups of {self.group_sizes} parameters, "
                f"got {sizes}. Use add_param_group of the wrapper."
            )
        return len(groups) > known or (are_apart and any(pair.model.requires_grad for pair in self.own_halves))

    def take_in(self, groups: list[dict[str, Any]], names: dict[int, str], adopt: Adopt | None) -> None:
        """Take in parameters that came, and give masters to those that were unfrozen."""
        known = len(self.group_sizes)
        thawed = [] if adopt is None else [pair for pair in self.own_halves if pair.model.requires_grad]
        for number in range(known, len(groups)):
            self.check_new_group(groups[number], number, names)
            self._append(groups[number], number, names, adopt)
        if adopt is not None:
            self._give_masters(thawed, groups, adopt)
        self._rebuild()

    def give_masters(self, pairs: Iterable[Pair], groups: list[dict[str, Any]], adopt: Adopt) -> None:
        """Give masters to 16-bit parameters that were frozen when they came: a checkpoint has masters for them."""
        self._give_masters(pairs, groups, adopt)
        self._rebuild()

    def _give_masters(self, pairs: Iterable[Pair], groups: list[dict[str, Any]], adopt: Adopt) -> None:
        for pair in pairs:
            pair.master = groups[pair.group]["params"][pair.index] = adopt(pair.model)

    def changed(self) -> None:
        """Optimizer state or masters were replaced: nothing that was proved of them holds."""
        self.generation += 1

    def _rebuild(self) -> None:
        by_device: dict[torch.device, list[int]] = {}
        for position, pair in enumerate(self.all):
            by_device.setdefault(pair.master.device, []).append(position)
        self.devices = [
            DeviceGroup(device, positions, [(self.all[i].model, self.all[i].master) for i in positions])
            for device, positions in by_device.items()
        ]
        for group in self.devices:
            for row, position in enumerate(group.positions):
                self.all[position].device, self.all[position].row = group, row
        self.models = [pair.model for pair in self.all]
        self.masters = [pair.master for pair in self.all]
        self.names = [pair.name for pair in self.all]
        self._place()
        self.has_pieces = any(map(is_sharded, self.models))
        self.are_own = list(map(operator.is_, self.models, self.masters))
        self.has_own, self.has_apart = any(self.are_own), not all(self.are_own)
        self.apart = [None if own else master for own, master in zip(self.are_own, self.masters, strict=True)]
        self.own_halves = [pair for pair in self.all if pair.master is pair.model and pair.model.dtype in HALF_DTYPES]
        self._seen = kernels.Seen(None if self.has_pieces else self.models)
        self.generation += 1

    def _place(self) -> None:
        self.places = {id(model): position for position, model in enumerate(self.models)}

    # -- what kernels get --------------------------------------------------------------------------------------------

    def take_pieces(self) -> None:
        """To be called before kernels get the model or the masters, where these are DTensors."""
        for group in self.devices:
            group.lay([(self.models[i], self.masters[i]) for i in group.positions])

    def verify(self) -> None:
        """Raise ``RuntimeError`` naming the first parameter whose dtype, shape or device was changed since it came."""
        if not self._seen.again(self.models):
            self._verify_each()

    def _verify_each(self) -> None:
        for pair, (dtype, shape, device) in zip(self.all, self._known, strict=True):
            now = pair.model
            for what, before, is_now in (
                ("dtype", dtype, now.dtype),
                ("shape", tuple(shape), tuple(now.shape)),
                ("device", device, now.device),
            ):
                if before != is_now:
                    raise RuntimeError(
                        f"parameter {pair.name!r} had {what} {before} when the optimizer was wrapped and has {is_now} "
                        "now. Convert or move the model first, then make the optimizer and wrap it."
                    )
        self._seen = kernels.Seen(None if self.has_pieces else self.models)
        self.layout += 1

    # -- in words ----------------------------------------------------------------------------------------------------

    def unfit(self) -> list[tuple[str, int]]:
        """(name, bits of ``CastStats.overflow``) of masters that did not fit when they were last rounded. Syncs."""
        found = []
        for group in self.devices:
            if not backends.is_zero(group.cast.overflow):
                flags = zip(group.positions, group.cast.overflow.tolist(), strict=True)
                found += [(self.names[i], bits) for i, bits in flags if bits]
        return found

    def name(self, names: dict[int, str]) -> None:
        """Give names, from ``id(parameter)``, to parameters that came without one."""
        for pair in self.all:
            if pair.name == numbered(pair.group, pair.index):
                pair.name = names.get(id(pair.model), pair.name)
        self.names = [pair.name for pair in self.all]
        if all(id(param) in names for param in self.elsewhere):
            self.names_elsewhere = [names[id(param)] for param in self.elsewhere]

    def indices(self) -> list[tuple[int, int]]:
        """(group, index) of each pair."""
        return [(pair.group, pair.index) for pair in self.all]

    def describe(self, pairs: Iterable[Pair]) -> str:
        """Their names in a line."""
        return describe([pair.name for pair in pairs])

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


def name_of(group: dict[str, Any], index: int, param: object, names: dict[int, str]) -> str | None:
    """The name given by ``named_parameters``, else by torch's own named param groups, else None."""
    if id(param) in names:
        return names[id(param)]
    own = group.get("param_names")
    return str(own[index]) if own is not None and index < len(own) else None


def numbered(group: int, index: int) -> str:
    """What a parameter without a name is called."""
    return f"group {group}, param {index}"


def _labelled(groups: list[dict[str, Any]], names: dict[int, str], first: int = 0) -> list[tuple[str, Tensor]]:
    """(what a message calls it, the parameter) for all of some groups, of which the first has the number ``first``."""
    return [
        (name_of(group, index, param, names) or numbered(number, index), param)
        for number, group in enumerate(groups, first)
        for index, param in enumerate(group["params"])
    ]


# -- which parameters can be served ------------------------------------------------------------------------------------


def check_group(group: dict[str, Any], number: int, names: dict[int, str]) -> None:
    """Raise ``ValueError`` or ``TypeError`` for the first parameter of ``group`` that can't be served."""
    for index, param in enumerate(group["params"]):
        where = f"group {number}, param {index}{quoted(name_of(group, index, param, names))}"
        if not isinstance(param, Tensor):
            raise TypeError(f"{where}: expected a tensor, got {type(param).__name__}.")
        if param.dtype not in HALF_DTYPES + OWN_DTYPES:
            wanted = "float16, bfloat16, float32 or float64"
            raise ValueError(
                f"{where}: expected {wanted}, got {str(param.dtype).removeprefix('torch.')}. "
                "Leave it out of the wrapped optimizer, or convert it first."
            )
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
    """Raise ``ValueError`` naming two parameters that share bytes: each would undo the other's update.

    Disjoint parts of one buffer are apart, as cuDNN's LSTM has them.
    """
    spans = []
    for position, (_, param) in enumerate(labelled):
        piece = local(param)
        if piece.layout is torch.strided and piece.numel() and piece.device.type != "meta":
            start = piece.data_ptr()
            reach = sum(stride * (size - 1) for stride, size in zip(piece.stride(), piece.shape, strict=True))
            if start:
                spans.append((str(piece.device), start, start + (reach + 1) * piece.element_size(), position))
    reached: list[tuple[str, int, int, int]] = []
    for span in sorted(spans):
        reached = [other for other in reached if other[0] == span[0] and other[2] > span[1]]
        for other in reached:
            (first, a), (second, b) = labelled[min(other[3], span[3])], labelled[max(other[3], span[3])]
            if a is b:
                raise ValueError(f"parameters {first!r} and {second!r} are one, in the optimizer twice. Leave one out.")
            if _share_bytes(local(a), local(b)):
                raise ValueError(
                    f"parameters {first!r} and {second!r} share memory: an update of one would overwrite the other's. "
                    "Give the optimizer one of the two, or give each memory of its own, with .clone()."
                )
        reached.append(span)


def _share_bytes(a: Tensor, b: Tensor) -> bool:
    """Whether some byte belongs to both, of two tensors whose stretches of memory overlap."""
    if is_dense(a) and is_dense(b):
        return True
    low = min(a.data_ptr(), b.data_ptr())
    offsets = []
    for tensor in (a, b):
        reach = sum(stride * (size - 1) for stride, size in zip(tensor.stride(), tensor.shape, strict=True))
        elements = (
            torch.arange(reach + 1, dtype=torch.int64, device="cpu")
            .as_strided(tensor.shape, tensor.stride())
            .reshape(-1, 1)
        )
        of_one = torch.arange(tensor.element_size(), dtype=torch.int64, device="cpu")
        offsets.append((elements * tensor.element_size() + of_one).reshape(-1) + (tensor.data_ptr() - low))
    return bool(torch.isin(*offsets).any())
