"""SplitParams: masters kept as the model's own 16-bit weights and 16-bit remainders, 4 bytes a parameter instead of 6.

What the wrapped optimizer's groups hold are placeholders: FP32 parameters of the right shape, on the right device,
under which the optimizer keeps its state. Their values exist while they are stepped; else they read as nan.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from . import kernels
from .kernels.tables import Entries
from .local import different_bits, quoted
from .masters import HALF_DTYPES, Carry, MasterParams, name_of
from .shard import Shard


def placeholder(param: Tensor) -> Tensor:
    """FP32 nan of ``param``'s shape, on its device, in 4 bytes."""
    shape = param.shape if param.numel() <= 1 else (1,) * param.dim()  # one number must look contiguous
    return torch.full(shape, float("nan"), dtype=torch.float32, device=param.device).expand(param.shape)


def plain_remainder(weight: Tensor) -> Tensor:
    """int16: what ``weight`` needs beside it to stand for itself."""
    rest = torch.zeros_like(weight, dtype=torch.int16, requires_grad=False)
    if weight.dtype == torch.float16:  # with a remainder of 0 an infinite weight would stand for 65520
        rest.masked_fill_(torch.isinf(weight), -1)
    return rest


def _hash(weights: Tensor, strides: tuple[int, ...]) -> Tensor:
    """int64, one element: the content hash that ``weights`` would have if they were laid out in ``strides``."""
    found = torch.zeros(1, dtype=torch.int64, device=weights.device)
    if weights.stride() != strides:
        weights = weights.new_empty_strided(weights.shape, strides).copy_(weights)
    kernels.multi_tensor_hash([weights], found)
    return found


@dataclass
class _Ties:
    """A tensor whose weights differ from ``.bfloat16()`` of its masters: which, and the hash it would have without."""

    where: tuple[Tensor, ...]
    weights: Tensor
    rounded: Tensor


class SplitParams(MasterParams):
    """Model parameters, and the remainders that make masters of those in 16 bits.

    The weights are the model's own tensors, so a write to them is a refresh: it drops the remainders of the tensor.

    Attributes:
        remainders: int16, by position, in the shape and strides of the model's parameter.
    """

    keeps_gradients = False

    def __init__(
        self, groups: list[dict[str, Any]], names: dict[int, str], carry: Carry, makes_masters: bool = True
    ) -> None:
        self.remainders: dict[int, Tensor] = {}
        self._ties: dict[int, _Ties] = {}
        self._layouts: dict[int, tuple[int, ...]] = {}
        super().__init__(groups, names, carry, makes_masters)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        for i in self.copied:  # copying gave the placeholders memory of their own
            self.master[i].data = placeholder(self.model[i])

    # -- which parameters ------------------------------------------------------------------------------------------

    def check_group(self, group: dict[str, Any], number: int, names: dict[int, str]) -> None:
        """As for full masters; tensors that are not plain memory are refused, too."""
        super().check_group(group, number, names)
        for place, param in enumerate(group["params"]):
            if type(param).__torch_dispatch__ is not Tensor.__torch_dispatch__ and param.dtype in HALF_DTYPES:
                where = f"group {number}, param {place}{quoted(name_of(group, place, param, names))}"
                raise ValueError(
                    f'{where}: master_weights="split" takes plain tensors, got {type(param).__name__}. '
                    'Use master_weights="full".'
                )

    def _give_master(self, i: int, params: list[Tensor], carry: Carry) -> None:
        model = self.model[i]
        master = torch.nn.Parameter(placeholder(model), requires_grad=True)
        master.__dict__.update(model.__dict__)
        carry(model, master)
        self.master[i] = master
        self.remainders[i] = plain_remainder(model.detach())
        params[self.places[i][1]] = master

    # -- masters, and what they are made of ------------------------------------------------------------------------

    def like(self, i: int) -> Tensor:
        """New FP32 memory in the shape and strides that a full master would have."""
        return torch.empty_like(self.remainders[i], dtype=torch.float32)

    def lay_out(self, state: Mapping[Any, Any]) -> None:
        """Give the tensors of optimizer state the masters' strides, which placeholders do not show.

        torch's fused steps are silently wrong where a state's strides are not its parameter's.
        """
        for i in self.copied:
            held, strides = state.get(self.master[i], {}), self.remainders[i].stride()
            for key, value in held.items() if isinstance(held, dict) else ():
                alike = isinstance(value, Tensor) and value.layout is torch.strided
                if alike and value.shape == self.remainders[i].shape and value.stride() != strides:
                    held[key] = torch.empty_like(self.remainders[i], dtype=value.dtype).copy_(value)

    def operand(self, i: int) -> Tensor:
        """The remainder, which with the weight is the master; or the parameter, where it is its own."""
        return self.remainders.get(i, self.master[i])

    def value(self, i: int) -> Tensor:
        """Master ``i``: made for this call where it is split."""
        return self.decoded([i])[0] if i in self.remainders else self.master[i].detach()

    def decoded(self, positions: Sequence[int]) -> list[Tensor]:
        """New FP32 tensors with the masters' values, in the strides that full masters would have. One device."""
        outs = [self.like(i) for i in positions]
        models = [self.model[i].detach() for i in positions]
        kernels.multi_tensor_join(models, [self.remainders[i] for i in positions], outs)
        return outs

    def saved(self) -> list[Tensor | None]:
        """Canonical FP32 masters, made for this call; None where a parameter is its own."""
        self.verify()
        split = set(self.copied)
        return [self.decoded([i])[0] if i in split else None for i in range(len(self))]

    def take_loaded(self, masters: Sequence[Tensor | None]) -> None:
        """Masters take the values of what :meth:`saved` gave, into which a checkpoint was loaded."""
        with torch.no_grad():
            for shard in self.shards:
                values = [masters[i] for i in shard.copied]
                rests = [self.remainders[i] for i in shard.copied]
                if values:
                    models = [self.model[i] for i in shard.copied]
                    kernels.multi_tensor_split(values, models, rests, shard.cast)
            self._ties = {i: ties for i in self.copied if (ties := self._find_ties(i, masters[i])) is not None}
        self._note_layouts()
        self.record_versions()

    def _find_ties(self, i: int, master: Tensor | None) -> _Ties | None:
        model = self.model[i].detach()
        if master is None or model.dtype != torch.bfloat16:
            return None
        rounded = torch.empty_like(model)
        scratch = kernels.CastStats.allocate(1, model.device)
        kernels.multi_tensor_cast([master], [rounded], scratch)
        differs = different_bits(rounded, model).view(model.shape)
        if not differs.any():
            return None
        where = torch.nonzero(differs, as_tuple=True) if model.dim() else ()
        return _Ties(where, model[where].clone(), scratch.hashes)

    def copy_down(self) -> None:
        """Nothing to do: the weights are part of the masters."""
        self.record_versions()

    def stepped(self) -> None:
        """Weights and remainders were written by a step."""
        self._ties = {}
        self.record_versions()

    def written_masters(self, versions: Sequence[int]) -> list[int]:
        """None: users write the model instead."""
        return []

    # -- writes behind the wrapper's back ----------------------------------------------------------------------------

    def differs(self, i: int) -> bool:
        """Whether parameter ``i``, whose hash has changed, was written.

        A checkpoint of full masters goes with a model rounded to even on ties: loading that model too is no write. Nor
        is laying it out in other strides, in whose order the hash goes.
        """
        model, ties, known = self.model[i].detach(), self._ties.get(i), self._known_hash(i)
        now = _hash(model, self._layouts[i])
        if torch.equal(now, known):
            self._layouts[i] = model.stride()
            known.copy_(_hash(model, model.stride()))
            return False
        if ties is None or not torch.equal(now, ties.rounded):
            return True
        with torch.no_grad():
            model[ties.where] = ties.weights
        return False

    def take_written(self) -> None:
        """As for full masters. Syncs where a checkpoint was loaded since the last step, for weights on ties."""
        if self._ties:
            self.take_from_model(self.written_models(passed_by=True))
            return
        super().take_written()

    def _take(
        self,
        shard: Shard,
        masters: Entries,
        now: Tensor,
        samples: tuple[Tensor, Tensor] | None,
        places: Tensor | None,
    ) -> None:
        rests = [self.remainders[i] for i in shard.copied]
        if places is not None:
            now = now[places]
            samples = None if samples is None else (samples[0][places], samples[1][places])
        then = shard.cast.hashes
        kernels.multi_tensor_renew(
            shard.models, rests, now, then, shard.taken, samples=samples, tables=shard.take_tables
        )

    def _known_hash(self, i: int) -> Tensor:
        """int64, one element: the hash of parameter ``i`` when it was last written with its master; to write to."""
        shard = next(shard for shard in self.shards if i in shard.copied)
        row = shard.copied.index(i)
        return shard.cast.hashes[row : row + 1]

    def record_all(self) -> None:
        super().record_all()
        self._note_layouts()

    def _note_layouts(self) -> None:
        """The hashes were taken of weights in these strides."""
        self._layouts = {i: self.model[i].stride() for i in self.copied}

    def take_from_model(self, positions: Iterable[int]) -> None:
        """Masters take the model's values, in all elements: what the weights were before is not known."""
        for i in positions:
            self.remainders[i].copy_(plain_remainder(self.model[i].detach()))
            self._ties.pop(i, None)
        self.record_all()

    def refresh(self) -> None:
        """Every master takes its model parameter's value."""
        self.take_from_model(self.copied)

    # -- for users ---------------------------------------------------------------------------------------------------

    def shown(self) -> Iterator[Tensor]:
        """Masters decoded as they are asked for, with their gradients; and parameters that are their own."""
        self.verify()
        split = set(self.copied)
        for i, master in enumerate(self.master):
            yield DecodedMaster.of(self.decoded([i])[0], master) if i in split else master

    def fp32_state(self, model: torch.nn.Module) -> dict[str, Any]:
        """``model.state_dict()`` with decoded masters for parameters that have one, under all their names."""
        state: dict[str, Any] = model.state_dict(keep_vars=True)
        position = {id(self.model[i]): i for i in self.copied}
        made: dict[int, Tensor] = {}
        for name, value in state.items():
            if isinstance(value, Tensor):
                i = position.get(id(value))
                if i is not None and i not in made:
                    made[i] = self.decoded([i])[0]
                state[name] = value.detach() if i is None else made[i]
        return state

    def summary(self) -> str:
        """Counts of the kinds of parameters, for ``repr``."""
        return super().summary().replace("with FP32 masters", "with split masters")


class DecodedMaster(torch.nn.Parameter):
    """A split master's value at the time that it was asked for. Its gradient is the master's: edits to it count."""

    _of: Tensor

    @classmethod
    def of(cls, value: Tensor, master: Tensor) -> DecodedMaster:
        """``value`` with the gradient of ``master``."""
        made = torch.Tensor._make_subclass(cls, value, True)
        made._of = master
        return made

    @property
    def grad(self) -> Tensor | None:
        """The master's gradient: float32, or None."""
        return self._of.grad

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        self._of.grad = value

    @grad.deleter
    def grad(self) -> None:
        del self._of.grad

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.nn.Parameter:
        """A copy has its value and, like copies of other parameters, no gradient."""
        return torch.nn.Parameter(self.detach().clone(), requires_grad=self.requires_grad)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return torch.nn.Parameter(self.detach(), requires_grad=self.requires_grad).__reduce_ex__(protocol)  # type: ignore[no-untyped-call]
