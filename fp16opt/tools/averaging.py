"""AveragedMasters: running averages of a model's FP32 masters, to evaluate and to ship."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from .. import kernels
from ..engine.arguments import clean
from ..engine.dtensors import is_sharded, local, pieces
from ..engine.params import HALF_DTYPES, DeviceParams, ParamPair
from ..engine.parts import Wrapper, inside
from ..kernels.calls import Entries
from ..optimizer import MixedPrecisionOptimizer, outside_inference

Rule = Callable[[int], float]
"""From the number of updates until now to the weight of the newest values, 0 to 1."""

_BATCH = 1 << 20  # elements of split masters that are decoded at a time: few enough to stay in a cache
_COUNT, _PREFIX = "n_averaged", "module."  # how torch.optim.swa_utils.AveragedModel calls them
_HOW_SAVED = "Pass what state_dict() of an AveragedMasters, or of torch's AveragedModel, returned."


@dataclass(frozen=True)
class _Ema:
    decay: float

    def __call__(self, updates: int) -> float:
        return 1.0 - self.decay

    def __repr__(self) -> str:
        return f"ema({self.decay})"


def ema(decay: float) -> Rule:
    """The rule of an exponential moving average: ``average += (1 - decay) * (value - average)``.

    Args:
        decay: From 0 to 1, without 1: 0.999 averages over about the last thousand updates.

    Raises:
        TypeError, ValueError: It is no number, or out of range.

    Example:
        >>> ema(0.75)(10)
        0.25
    """
    if isinstance(decay, bool) or not isinstance(decay, (int, float)):
        raise TypeError(f"decay: expected a number, got {type(decay).__name__}.")
    if not 0.0 <= decay < 1.0:
        raise ValueError(f"decay: expected a number from 0 to 1, without 1, got {decay}.")
    return _Ema(float(decay))


class AveragedMasters:
    """Running averages of FP32 masters, in FP32.

    An average of 16-bit weights stands still: at a decay of 0.9999 an update moves it by a ten-thousandth of the
    difference, which 8 or 11 bits can't hold. Masters can be averaged, and are what was trained. FP32 parameters
    are averaged in float32, float64 ones in float64; buffers and parameters that the optimizer does not have are the
    model's own. One pass reads masters and reads and writes averages.

    As with ``torch.optim.swa_utils.AveragedModel``, the first :meth:`update` takes the values as they are.

    Args:
        model: The module, DDP or not, FSDP2 or not. Its parameters that ``optimizer`` has are averaged.
        optimizer: The ``MixedPrecisionOptimizer`` that trains them, or a trainer's optimizer that holds it. Not around
            a ZeroRedundancyOptimizer.
        rule: :func:`ema`, or a function from the number of updates until now to the weight of the newest values:
            ``lambda n: 1 / (n + 1)`` weighs all alike (SWA).

    Raises:
        TypeError: An argument is of another type.
        ValueError: None of the model's parameters is in the optimizer.
        RuntimeError: Masters are on other ranks (ZeRO).

    Memory: 4 bytes a parameter (8 of float64), and in :meth:`swap` a copy of the model's weights.

    Example:
        >>> model = torch.nn.Linear(1, 1, bias=False).half()
        >>> _ = torch.nn.init.ones_(model.weight)
        >>> opt = MixedPrecisionOptimizer(torch.optim.SGD(model.parameters(), lr=0.5))
        >>> averaged = AveragedMasters(model, opt, ema(0.75))
        >>> for _ in range(2):
        ...     opt.zero_grad()
        ...     opt.backward(8.0 * model.weight.float().sum())
        ...     opt.step()
        ...     averaged.update()
        >>> before = model.weight.item()
        >>> with averaged.swap():
        ...     print(model.weight.item() - before)  # three quarters of the step back
        3.0
        >>> model.weight.item() == before
        True
    """

    def __init__(self, model: torch.nn.Module, optimizer: Optimizer, rule: Rule) -> None:
        wrapper = inside(optimizer)
        if not isinstance(wrapper, MixedPrecisionOptimizer):
            raise TypeError(
                f"optimizer: expected a fp16opt.MixedPrecisionOptimizer, got {type(optimizer).__name__}. Wrap it first."
            )
        if not callable(rule):
            raise TypeError(f"rule: expected fp16opt.ema(decay) or another function, got {type(rule).__name__}.")
        self._model = model
        self._optimizer = wrapper
        self._averages: dict[Tensor, Tensor] = {}
        self._generation = -1
        self._devices: list[tuple[DeviceParams, Entries, kernels.CallCache]] = []
        self.rule = rule
        self.updates = 0
        self._follow(wrapper)
        if not self._averages:
            raise ValueError("model: none of its parameters is in this optimizer. Pass the model that it trains.")

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self._averages)} parameters, {self.rule!r}, updates={self.updates})"

    def _names(self) -> dict[int, str]:
        """Of the model's parameters, by ``id``. Puts FSDP2's gathered weights away, which would hide them."""
        from ..distributed.modules import parameter_names

        return parameter_names(self._model)

    @outside_inference
    def _follow(self, wrapper: Wrapper) -> None:
        """Averages for parameters that came, of the values that they have now."""
        table = wrapper.params
        if self._generation == table.generation:
            if table.has_dtensors:
                table.find_pieces()
            return
        names = self._names()
        if not names.keys().isdisjoint(map(id, table.elsewhere)):
            raise RuntimeError(
                "AveragedMasters needs all of the model's masters on each rank, and ZeroRedundancyOptimizer spreads "
                "them. Use FSDP2 (fully_shard), or average the model with torch.optim.swa_utils.AveragedModel."
            )
        for pair in table.all:
            if id(pair.model) in names and pair.model not in self._averages:
                value = wrapper.masters.read([pair])[0]
                dtype = torch.float64 if value.dtype == torch.float64 else torch.float32
                self._averages[pair.model] = torch.empty_like(value, dtype=dtype, requires_grad=False).copy_(value)
        if table.has_dtensors:
            table.find_pieces()
        self._devices = []
        for device in table.devices:
            averages = [self._averages.get(table.models[position]) for position in device.positions]
            entries = tuple([None if average is None else local(average) for average in averages])
            self._devices.append((device, entries, kernels.CallCache()))
        self._generation = table.generation

    # -- averaging -----------------------------------------------------------------------------------------------------

    @outside_inference
    def update(self) -> None:
        """Take the masters' present values into the averages. Call it after ``optimizer.step()``.

        After a skipped step it takes the same values again; ``if not optimizer.step_was_skipped`` leaves it out.

        Raises:
            TypeError, ValueError: The rule gave no number from 0 to 1. Nothing is changed.
            RuntimeError: It was called inside :meth:`swap`, or within a step.

        Syncs: never.
        """
        wrapper = self._optimizer
        wrapper.settle("AveragedMasters.update")
        wrapper.model_writes.require_not_swapped("AveragedMasters.update()")
        self._follow(wrapper)
        weight = self._weight()
        for device, averages, cache in self._devices:
            if wrapper.masters.are_whole:
                values: Entries = device.masters
                if any(average is None for average in averages):
                    values = [None if a is None else m for a, m in zip(averages, device.masters, strict=True)]
                kernels.multi_tensor_lerp(averages, values, weight, cache=cache)
            else:
                for rows in _batches(averages):
                    pairs = [wrapper.params.all[device.positions[row]] for row in rows]
                    values = pieces(wrapper.masters.read(pairs))
                    kernels.multi_tensor_lerp([averages[row] for row in rows], values, weight)
        self.updates += 1

    def _weight(self) -> float:
        if self.updates == 0:
            return 1.0
        weight = self.rule(self.updates)
        if isinstance(weight, bool) or not isinstance(weight, (int, float)):
            raise TypeError(f"rule: expected a number from 0 to 1 for update {self.updates}, got {_kind(weight)}.")
        if not 0.0 <= weight <= 1.0:
            raise ValueError(f"rule: expected a number from 0 to 1 for update {self.updates}, got {weight}.")
        return float(weight)

    # -- the model with averages ---------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def swap(self) -> Iterator[None]:
        """The model holds the averages, rounded to its dtypes, until the block ends; then its weights, bit for bit.

        It counts as no write to the model. Inside, calls of the optimizer that train, save or load raise
        ``RuntimeError``; what else writes the model's parameters there is lost. Buffers (the statistics of batch norm)
        stay the model's: ``torch.optim.swa_utils.update_bn`` makes them anew, also inside.

        Raises:
            RuntimeError: The model is swapped already; or it was written, and ``on_model_write="error"``.

        Syncs: where the optimizer's own look at the model's weights does.
        """
        wrapper = self._optimizer
        with torch.inference_mode(False):
            wrapper.settle("AveragedMasters.swap")
            wrapper.model_writes.require_not_swapped("swap()")
            if wrapper.params.has_dtensors:
                self._names()
            wrapper.model_writes.sync()
            self._follow(wrapper)
            wrapper.model_writes.swap("averages, inside AveragedMasters.swap()")
            mine = [pair for pair in wrapper.params.all if pair.model in self._averages]
            kept = [local(pair.model.detach()).clone() for pair in mine]
        try:
            with torch.inference_mode(False):
                self._write_averages()
            yield
        finally:
            with torch.inference_mode(False), torch.no_grad():
                if wrapper.params.has_dtensors:
                    self._names()
                    wrapper.params.find_pieces()
                _put_back(mine, kept)
                wrapper.model_writes.restore(mine)

    def _write_averages(self) -> None:
        with torch.no_grad():
            for device, averages, _ in self._devices:
                halves: list[tuple[Tensor, Tensor]] = []
                for average, model in zip(averages, device.models, strict=True):
                    if average is not None and model.dtype in HALF_DTYPES:
                        halves.append((average, model.detach()))
                    elif average is not None:
                        model.detach().copy_(average)
                stats = kernels.CastStats.allocate(len(halves), device.device)
                kernels.multi_tensor_cast([average for average, _ in halves], [model for _, model in halves], stats)

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    def fp32_state_dict(self) -> dict[str, Any]:
        """``model.state_dict()`` with the averages in place of parameters, under all their names.

        For ``model.load_state_dict``, or to ship: averages in FP32, buffers and other parameters the model's own, names
        without those of DDP and torch.compile. References to the live tensors; FSDP2: DTensors. Does not sync.
        """
        from ..distributed.modules import with_pieces

        state: Mapping[str, Any] = with_pieces(self._model).state_dict(keep_vars=True)
        return {clean(name): self._average_of(value) for name, value in state.items()}

    def _average_of(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return self._averages[value] if value in self._averages else value.detach()

    def state_dict(self) -> dict[str, Any]:
        """What ``torch.optim.swa_utils.AveragedModel(model)`` saves, with averages in FP32: either loads the other's.

        Keys: ``n_averaged``, an int64 tensor, and the entries of :meth:`fp32_state_dict` as ``module.NAME``. Tensors
        alone, so ``torch.load(weights_only=True)`` reads it. The rule is the code's. References to the live tensors.
        """
        state = {_PREFIX + name: value for name, value in self.fp32_state_dict().items()}
        return {_COUNT: torch.tensor(self.updates, dtype=torch.int64, device="cpu"), **state}

    @outside_inference
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load averages that :meth:`state_dict`, or torch's ``AveragedModel``, gave. The model stays as it is.

        Everything is validated first. Tensors are copied, 16-bit ones to FP32. Entries that are not of averaged
        parameters are passed over: load the model's own checkpoint for them.

        Raises:
            TypeError, ValueError: Something is lacking or does not fit. Named; nothing is changed.
        """
        if not isinstance(state_dict, Mapping):
            raise TypeError(f"state_dict: expected a dict, got {type(state_dict).__name__}. {_HOW_SAVED}")
        self._follow(self._optimizer)
        if _COUNT not in state_dict:
            raise ValueError(f"state_dict lacks {_COUNT!r}. {_HOW_SAVED}")
        updates = _count(state_dict[_COUNT])
        names = self._names()
        saved = {param: _saved(state_dict, names[id(param)], average) for param, average in self._averages.items()}
        for param, value in saved.items():
            self._averages[param].copy_(_spread(value, self._averages[param]))
        self.updates = updates


def _kind(value: object) -> str:
    return type(value).__name__


def _batches(averages: Entries) -> Iterator[list[int]]:
    """Rows in use, so many at a time that their masters are small beside all."""
    rows: list[int] = []
    size = 0
    for row, average in enumerate(averages):
        if average is None:
            continue
        if rows and size + average.numel() > _BATCH:
            yield rows
            rows, size = [], 0
        rows.append(row)
        size += average.numel()
    if rows:
        yield rows


def _put_back(pairs: list[ParamPair], kept: list[Tensor]) -> None:
    for pair, value in zip(pairs, kept, strict=True):
        local(pair.model.detach()).copy_(value)


def _count(saved: object) -> int:
    """The number of updates: an int, or what torch saves it as, an int64 tensor of one element."""
    if isinstance(saved, Tensor) and saved.numel() == 1 and saved.dtype == torch.int64:
        count: object = int(saved)
    else:
        count = saved
    if isinstance(count, bool) or not isinstance(count, int) or not 0 <= count < 2**63:
        raise ValueError(f"{_COUNT}: expected a number of updates, got {saved!r}. {_HOW_SAVED}")
    return count


def _saved(state_dict: Mapping[str, Any], name: str, average: Tensor) -> Tensor:
    """The entry of a parameter; of an AveragedModel around DDP too."""
    value = state_dict.get(_PREFIX + name, state_dict.get(_PREFIX + _PREFIX + name))
    if value is None:
        raise ValueError(f"state_dict lacks {_PREFIX + name!r}. {_HOW_SAVED}")
    if not isinstance(value, Tensor):
        raise TypeError(f"{_PREFIX + name}: expected a tensor, got {_kind(value)}. {_HOW_SAVED}")
    if value.shape != average.shape or not value.is_floating_point():
        raise ValueError(
            f"{_PREFIX + name}: expected floating values of shape {tuple(average.shape)}, got {value.dtype} of shape "
            f"{tuple(value.shape)}. Build the model as it was when the averages were saved."
        )
    if is_sharded(value) and not is_sharded(average):
        raise ValueError(
            f"{_PREFIX + name}: spread over ranks (DTensor), and this model is not. Save averages of FSDP2 through "
            "torch.distributed.checkpoint, or call full_tensor() on each first."
        )
    return value


def _spread(value: Tensor, average: Tensor) -> Tensor:
    """A whole value laid out over ranks as its average is."""
    if not is_sharded(average) or is_sharded(value):
        return value
    from torch.distributed.tensor import distribute_tensor

    mesh, placements = average.device_mesh, average.placements  # type: ignore[attr-defined]
    return distribute_tensor(value.to(average.dtype), mesh, placements)
