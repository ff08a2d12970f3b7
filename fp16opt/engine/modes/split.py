"""Split masters: the model's own 16-bit weights and 16-bit remainders, 4 bytes a parameter instead of 6.

What the wrapped optimizer's groups hold are placeholders: FP32 parameters of the right shape, on the right device,
under which the optimizer keeps its state. They read as nan.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ... import kernels
from ...kernels.calls import Entries
from .. import errors
from ..dtensors import as_piece_of, different_bits, hold, is_sharded, local, pieces
from ..masters import REST, Home, Masters
from ..params import MASTER_OF, DeviceParams, ParamPair


def placeholder(param: Tensor) -> Tensor:
    """FP32 nan of ``param``'s shape, laid out over ranks as it is, on its device, in 4 bytes."""
    piece = local(param)
    shape = piece.shape if piece.numel() <= 1 else (1,) * piece.dim()  # one number must look contiguous
    made = torch.full(shape, float("nan"), dtype=torch.float32, device=piece.device).expand(piece.shape)
    return as_piece_of(made, param)


def plain_remainder(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """int16 or int8: what ``weight`` needs beside it to stand for itself."""
    rest = torch.zeros_like(weight, dtype=dtype, requires_grad=False)
    if weight.dtype == torch.float16:  # with a remainder of 0 an infinite weight would stand for 65520
        rest.masked_fill_(torch.isinf(weight), -1)
    return rest


@dataclass
class _Ties:
    """Where ``.bfloat16()`` of a master is not its weight, which is rounded away from zero: places and both weights."""

    where: tuple[Tensor, ...]
    away: Tensor
    even: Tensor


class RefusesWrites:
    """Mixed into the classes of split masters: there is no FP32 memory that an operation in place could write."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        name = getattr(func, "__name__", "")
        if _writes_in_place(name) or "out" in given:
            written = [given["out"]] if "out" in given else list(args[:1])
            flat = [part for one in written for part in (one if isinstance(one, list | tuple) else [one])]
            if any(isinstance(part, RefusesWrites) for part in flat):
                raise errors.SPLIT_MASTER_WRITTEN(operation=name)
        return torch._C._disabled_torch_function_impl(func, types, args, given)


def _writes_in_place(name: str) -> bool:
    """Whether a function of torch's of this name writes its first argument."""
    if name.startswith("__"):
        return name == "__setitem__" or (name.startswith("__i") and name not in ("__index__", "__int__", "__invert__"))
    return name.endswith("_") and name not in ("requires_grad_", "detach_")


class SplitMasters(Masters):
    """Remainders, which with the model's weights make masters.

    The weights are the model's own tensors, so a write to them is a refresh: it drops the remainders of the tensor.
    Remainders are plain tensors beside this rank's pieces of the weights.

    Args:
        bits: of a master: 32, or 24, of which those of bfloat16 are rounded by the number of the step.
    """

    keeps_gradients = False
    are_whole = False
    mixed_in: Any = RefusesWrites

    def __init__(self, home: Home, bits: int = 32) -> None:
        super().__init__(home)
        self.words = "with split masters" if bits == 32 else "with 24-bit masters"
        self.needs_number = bits == 24
        self.dtype = torch.int16 if bits == 32 else torch.int8
        self._made: list[Tensor] = []  # placeholders
        self._rests: dict[int, Tensor] = {}

    def __getstate__(self) -> dict[str, Any]:
        ties = [(master, self.ties[id(master)]) for master in self._made if id(master) in self.ties]
        made = [(master, self._rests[id(master)]) for master in self._made]
        return {"home": self.home, "made": made, "ties": ties, "bits": 24 if self.needs_number else 32}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["home"], state["bits"])  # type: ignore[misc]
        for master, rest in state["made"]:  # copying gave the placeholders memory of their own
            hold(master, placeholder(rest))
            self._made.append(master)
            self._rests[id(master)] = rest
        self.ties = {id(master): ties for master, ties in state["ties"]}

    def make(self, model: Tensor) -> Tensor:
        """A placeholder.

        Raises:
            ValueError: ``model`` is not plain memory.
        """
        master = torch.nn.Parameter(placeholder(model), requires_grad=True)
        master.__dict__.update(model.__dict__)
        rest = plain_remainder(local(model.detach()), self.dtype)
        self._made.append(master)
        self._rests[id(master)] = self.home.put(model, REST, rest)
        return master

    def bring_home(self, pair: ParamPair) -> None:
        """The remainder; the weight is the model's."""
        self._rests[id(pair.master)] = self.home.put(pair.model, REST, self._rests[id(pair.master)])

    def operand(self, pair: ParamPair) -> Tensor:
        """The remainder, which with the weight is the master; or the parameter, where it is its own."""
        return self._rests.get(id(pair.master), pair.master)

    def round_down(self, group: DeviceParams, rows: Sequence[int] | None = None) -> None:
        """Nothing to do: the weights are part of the masters."""

    def read(self, pairs: Sequence[ParamPair], see: Callable[[Tensor], Tensor] = Tensor.detach) -> list[Tensor]:
        """Values made for this call, in the strides that full masters would have."""
        apart = [pair for pair in pairs if id(pair.master) in self._rests]
        rests = [see(self.operand(pair)) for pair in apart]
        outs = [torch.empty_like(rest, dtype=torch.float32) for rest in rests]
        with torch.no_grad():
            kernels.multi_tensor_join(pieces([see(pair.model) for pair in apart]), rests, outs)
        made = {id(pair): as_piece_of(out, pair.model) for pair, out in zip(apart, outs, strict=True)}
        return [made[id(pair)] if id(pair) in made else see(pair.master) for pair in pairs]

    def write(self, pairs: Sequence[ParamPair], values: Sequence[Tensor]) -> None:
        """Weights and remainders take FP32 values."""
        models, rests = pieces([pair.model for pair in pairs]), [self.operand(pair) for pair in pairs]
        values = pieces(values)
        if pairs:
            stats = pairs[0].cast.beside([pair.row for pair in pairs])
            kernels.multi_tensor_split(values, models, rests, stats)
            for pair, flag in zip(pairs, stats.overflow, strict=True):
                pair.cast.overflow[pair.row] = flag
        for pair, model, value in zip(pairs, models, values, strict=True):
            ties = _find_ties(model.detach(), value)
            self.ties.pop(id(pair.master), None)
            if ties is not None:
                self.ties[id(pair.master)] = ties

    def mend(self, pairs: Sequence[ParamPair]) -> None:
        """Put weights back that hold the even neighbour of a tie.

        A checkpoint of full masters goes with a model rounded to even on ties: loading that model too is no write.
        """
        for pair in pairs:
            ties = self.ties.get(id(pair.master))
            if ties is not None:
                model = local(pair.model.detach())
                now = model[ties.where]
                to_even = ~different_bits(now, ties.even).view(now.shape)
                if to_even.any():
                    with torch.no_grad():
                        model[ties.where] = torch.where(to_even, ties.away, now)

    def differs(self, pair: ParamPair, sample_moved: bool) -> bool:
        """By the sample alone: what the weight was before is not known. A write that it misses keeps the low bits."""
        return sample_moved

    def take_up(self, pair: ParamPair) -> None:
        """As :meth:`refresh`: what the weights were before is not known."""
        self.refresh(pair)

    def take_up_on_device(
        self, group: DeviceParams, masters: Entries, now: Tensor, then: Tensor, taken: Tensor
    ) -> None:
        """See :class:`fp16opt.engine.masters.Masters`."""
        rests = [
            None if master is None else self.operand(pair) for pair, master in zip(group.pairs, masters, strict=True)
        ]
        kernels.multi_tensor_reset_remainders(group.apart_models, rests, now, then, taken, cache=group.caches["take"])

    def refresh(self, pair: ParamPair) -> None:
        """The weight stands for itself."""
        rest = self._rests.get(id(pair.master))
        if rest is not None:
            rest.copy_(plain_remainder(local(pair.model.detach()), self.dtype))
            self.ties.pop(id(pair.master), None)

    def shown(self, pairs: Sequence[ParamPair]) -> Iterator[Tensor]:
        """Masters decoded as they are asked for, with their gradients; and parameters that are their own."""
        for pair in pairs:
            apart = id(pair.master) in self._rests
            yield decoded(self.read([pair])[0], pair.master) if apart else pair.master

    def lay_out(self, pairs: Sequence[ParamPair], state: Mapping[Any, Any]) -> None:
        """Give the tensors of optimizer state the masters' strides, which placeholders do not show.

        torch's fused steps are silently wrong where a state's strides are not its parameter's.
        """
        for pair in pairs:
            rest = self._rests.get(id(pair.master))
            held = state.get(pair.master, {})
            if rest is None or not isinstance(held, dict):
                continue
            for key, value in held.items():
                alike = isinstance(value, Tensor) and value.layout is torch.strided and not is_sharded(value)
                if alike and value.shape == rest.shape and value.stride() != rest.stride():
                    held[key] = torch.empty_like(rest, dtype=value.dtype, device=value.device).copy_(value)


def _find_ties(model: Tensor, master: Tensor) -> _Ties | None:
    if model.dtype != torch.bfloat16:
        return None
    even = torch.empty_like(model)
    kernels.multi_tensor_cast([master], [even], kernels.CastStats.allocate(1, model.device))
    differs = different_bits(even, model).view(model.shape)
    if not differs.any():
        return None
    where = torch.nonzero(differs, as_tuple=True) if model.dim() else ()
    return _Ties(where, model[where].clone(), even[where].clone())


def _ordinary(master: Tensor, data: Tensor) -> torch.nn.Parameter:
    return torch.nn.Parameter(data, requires_grad=master.requires_grad)


@functools.cache
def _decoded_class(cls: Any) -> Any:
    """The subclass of ``cls`` (Parameter, or DTensor) whose gradient is that of the master behind it."""

    class DecodedMaster(RefusesWrites, cls):  # type: ignore[misc]
        if "__slots__" in cls.__dict__:
            __slots__ = ()

        fp16opt_master: Tensor

        @property
        def grad(self) -> Tensor | None:
            """The master's gradient: float32, or None."""
            return self.fp16opt_master.grad

        @grad.setter
        def grad(self, value: Tensor | None) -> None:
            self.fp16opt_master.grad = value

        @grad.deleter
        def grad(self) -> None:
            del self.fp16opt_master.grad

        def __deepcopy__(self, memo: dict[int, Any]) -> torch.nn.Parameter:
            return _ordinary(self, self.detach().clone())

        def __reduce_ex__(self, protocol: Any) -> Any:
            return _ordinary(self, self.detach()).__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    return DecodedMaster


DecodedMaster: Any = _decoded_class(torch.nn.Parameter)
"""A split master's value at the time that it was asked for. Its gradient is the master's: edits to it count.

Copies and pickles have its value and, like those of other parameters, no gradient.
"""


def decoded(value: Tensor, master: Tensor) -> Tensor:
    """``value`` with the gradient of ``master``."""
    made: Tensor = torch.nn.Parameter(value)
    made.__class__ = _decoded_class(type(made))
    made.__dict__[MASTER_OF] = master
    return made
