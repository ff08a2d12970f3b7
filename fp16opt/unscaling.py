"""Gradients of any optimizer, unscaled where they lie: checked, measured and clipped in as few passes as possible.

:class:`fp16opt.MixedPrecisionOptimizer` moves gradients up into masters of its own. This room serves optimizers that
hold the model's parameters themselves, as they do under :class:`fp16opt.GradScaler`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from . import kernels
from .diagnostics import Overflow, overflows_from_flags
from .masters import HALF_DTYPES, OWN_DTYPES, name_of
from .norms import clip_factor, vector_norm

_SERVED = (*HALF_DTYPES, *OWN_DTYPES)


class Label(NamedTuple):
    """What a parameter is called, and where the optimizer keeps it."""

    name: str
    group: int
    place: int


class Place(NamedTuple):
    """A parameter that has a gradient, and where it is in the optimizer's ``param_groups``."""

    param: Tensor
    holder: dict[str, Any]
    group: int
    place: int

    @property
    def grad(self) -> Tensor:
        grad = self.param.grad
        if grad is None:
            raise RuntimeError(f"{self.label().name}: its gradient was cleared in the middle of a call.")
        return grad

    def label(self) -> Label:
        """Made when it is asked for: a step that is taken needs none."""
        name = name_of(self.holder, self.place, self.param, {}) or _where(self.group, self.place)
        return Label(name, self.group, self.place)


@dataclass
class _Shard:
    """The gradients of one device, in the order of the optimizer's parameters.

    ``values`` are dense and real: the values of sparse gradients, complex ones seen as pairs of real numbers.
    """

    device: torch.device
    places: list[Place] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)


@dataclass
class _Tables:
    """The kernels' caches for the gradients of one device, kept from step to step."""

    unscale: kernels.PointerTables = field(default_factory=kernels.PointerTables)
    norm: kernels.PointerTables = field(default_factory=kernels.PointerTables)
    scale: kernels.PointerTables = field(default_factory=kernels.PointerTables)


class Gradients:
    """The gradients of one optimizer's parameters. They are held on to from :meth:`collect` to :meth:`release`.

    Attributes:
        shards: what the last :meth:`collect` found, by device.
        foreign: parameters whose gradients are tensor subclasses with operations of their own (DTensor); torch's
            operations serve them.
        skipped: whether the optimizer's last step was skipped: decided, or the device's flag (float32, 0-dim). None
            where there was nothing to step.
    """

    def __init__(self) -> None:
        self.skipped: bool | Tensor | None = None
        self._tables: dict[torch.device, _Tables] = {}
        self._stats: dict[torch.device, kernels.GradStats] = {}
        self._blamed: list[tuple[list[Label], Tensor]] = []
        self.release()

    def release(self) -> None:
        """Let go of the gradients. What became of the step stays known."""
        self.shards: list[_Shard] = []
        self.foreign: list[Tensor] = []
        self._measured: list[tuple[Tensor, int]] | None = None
        self._checked: list[tuple[list[Place], kernels.GradStats]] = []

    def __bool__(self) -> bool:
        """Whether any parameter has a gradient."""
        return bool(self.shards or self.foreign)

    def params(self) -> Iterator[Tensor]:
        """The parameters that have a gradient."""
        for shard in self.shards:
            yield from (place.param for place in shard.places)
        yield from self.foreign

    # -- finding them ------------------------------------------------------------------------------------------------

    def collect(self, optimizer: Optimizer) -> None:
        """Take in the gradients as they are now. 16-bit sparse ones are coalesced in FP32, in place of the old ones.

        Raises:
            TypeError: A parameter is no tensor, or its gradient has a dtype or layout that can't be served. Named; no
                gradient has been touched then.
        """
        places, self.foreign = [], []
        seen: set[int] = set()
        for number, group in enumerate(optimizer.param_groups):
            for index, param in enumerate(group["params"]):
                if not isinstance(param, Tensor):
                    raise TypeError(f"{_where(number, index)}: expected a tensor, got {type(param).__name__}.")
                grad = param.grad
                if grad is None or id(param) in seen:
                    continue
                seen.add(id(param))
                if _is_foreign(grad):
                    self.foreign.append(param)
                else:
                    place = Place(param, group, number, index)
                    _check(place, grad)
                    places.append(place)
        shards: dict[torch.device, _Shard] = {}
        for place in places:
            values = _values(place)
            shard = shards.setdefault(values.device, _Shard(values.device))
            shard.places.append(place)
            shard.values.append(values)
        self.shards = list(shards.values())

    def halves(self) -> list[str]:
        """Names of the 16-bit parameters that have a gradient."""
        return [p.label().name for shard in self.shards for p in shard.places if p.param.dtype in HALF_DTYPES]

    # -- the pass ----------------------------------------------------------------------------------------------------

    def unscale(self, inv_scale: Tensor) -> dict[torch.device, Tensor]:
        """Multiply all gradients by ``inv_scale`` in place, check and measure them. One pass; no host sync.

        16-bit gradients go through FP32 memory that lives as long as this call, and are rounded back.

        Args:
            inv_scale: float32, 0-dim, any device.

        Returns:
            For each device that holds gradients of :attr:`shards`: float32, 0-dim, 1.0 where one was not finite after
            unscaling (or too large for its 16-bit dtype), else 0.0. Overwritten by the next call.
        """
        self._checked, self._measured = [], None
        found = {}
        with torch.no_grad():
            for shard in self.shards:
                stats = self._stats_of(shard)
                self._unscale_shard(shard, stats, inv_scale.to(shard.device, non_blocking=True))
                self._checked.append((shard.places, stats))
                found[shard.device] = stats.found_inf
        if all(place.grad.layout is torch.strided for shard in self.shards for place in shard.places):
            self._measured = [(value, value._version) for shard in self.shards for value in shard.values]
        return found

    def _stats_of(self, shard: _Shard) -> kernels.GradStats:
        stats = self._stats.get(shard.device)
        if stats is None or len(stats.nonfinite) != len(shard.values):
            stats = self._stats[shard.device] = kernels.GradStats.allocate(len(shard.values), shard.device)
        return stats

    def _tables_of(self, shard: _Shard) -> _Tables:
        return self._tables.setdefault(shard.device, _Tables())

    def _unscale_shard(self, shard: _Shard, stats: kernels.GradStats, inv_scale: Tensor) -> None:
        outs, narrow = list(shard.values), []
        for i, value in enumerate(shard.values):
            if value.dtype in HALF_DTYPES:
                outs[i] = torch.empty_like(value, dtype=torch.float32)
                narrow.append(i)
        tables = self._tables_of(shard).unscale
        kernels.multi_tensor_unscale(shard.values, outs, inv_scale, stats, tables=tables)
        if narrow:
            cast = kernels.CastStats.allocate(len(narrow), shard.device)
            kernels.multi_tensor_cast([outs[i] for i in narrow], [shard.values[i] for i in narrow], cast)
            stats.nonfinite[narrow] |= (cast.overflow & kernels.TOO_LARGE).ne(0) * kernels.INF
            stats.found_inf.copy_(stats.nonfinite.ne(0).any())

    def unscale_and_clip(self, inv_scale: Tensor, max_norm: float) -> tuple[Tensor, Tensor] | None:
        """Unscale and clip in one pass that reads and one that writes. No host sync.

        Returns:
            (norm before clipping, found_inf), each float32, 0-dim, as :meth:`unscale` would find them. None where
            nothing was done: gradients are not all float32 and dense on one device.
        """
        if self.foreign or len(self.shards) != 1:
            return None
        (shard,) = self.shards
        if not all(p.grad.dtype is torch.float32 and p.grad.layout is torch.strided for p in shard.places):
            return None
        stats, tables, values = self._stats_of(shard), self._tables_of(shard).unscale, shard.values
        inv_scale = inv_scale.to(shard.device, non_blocking=True)
        with torch.no_grad():
            kernels.multi_tensor_unscale(values, values, inv_scale, stats, write=False, tables=tables)
            factor = clip_factor(stats.norm, max_norm, stats.found_inf)
            kernels.multi_tensor_unscale_clipped(values, values, inv_scale, factor, tables=tables)
        self._checked, self._measured = [(shard.places, stats)], None
        return stats.norm.float(), stats.found_inf

    # -- what was found ----------------------------------------------------------------------------------------------

    def record(self, skipped: bool | Tensor | None) -> None:
        """Note what became of the step, and who is to blame where it was, or may have been, skipped. No sync."""
        self.skipped = skipped
        blames = skipped is not None and skipped is not False
        checked = self._checked if blames else []
        self._blamed = [([place.label() for place in places], stats.nonfinite.clone()) for places, stats in checked]

    def report(self) -> list[Overflow]:
        """Which parameters had non-finite gradients if the last step was skipped, in param_groups order. Syncs."""
        if not self.skipped:
            return []
        found = []
        for labels, flags in self._blamed:
            names, places = [label.name for label in labels], [label[1:] for label in labels]
            found += overflows_from_flags(flags.tolist(), names, places)
        return sorted(found, key=lambda overflow: (overflow.group, overflow.index))

    # -- norm and clipping -------------------------------------------------------------------------------------------

    def _is_measured(self) -> bool:
        """Whether no gradient was written or replaced since :meth:`unscale` summed its squares."""
        if self._measured is None:
            return False
        now = [value for shard in self.shards for value in shard.values]
        return len(now) == len(self._measured) and all(
            _same_memory(value, before) and value._version == version
            for value, (before, version) in zip(now, self._measured, strict=True)
        )

    def norm(self, norm_type: float, device: torch.device) -> Tensor:
        """The norm over all gradients: float64, 0-dim, on ``device``. No host sync.

        The 2-norm was summed by :meth:`unscale`; it is read again only where a gradient changed since. :meth:`collect`
        first, so that gradients that were replaced are seen.
        """
        with torch.no_grad():
            if norm_type == 2.0:
                parts = self._norms_of_shards()
            else:
                grads = [place.grad for shard in self.shards for place in shard.places]
                dense = [grad._values() if grad.layout is torch.sparse_coo else grad for grad in grads]
                parts = [vector_norm(grad, norm_type) for grad in dense if grad.numel()]
            parts = [part.to(device) for part in parts]
            if len(parts) == 1:
                return parts[0]
            return vector_norm(torch.stack(parts), norm_type) if parts else torch.zeros((), device=device)

    def _norms_of_shards(self) -> list[Tensor]:
        if self._is_measured():
            return [stats.norm for _, stats in self._checked]
        return [
            kernels.multi_tensor_l2norm(shard.values, tables=self._tables_of(shard).norm)[0] for shard in self.shards
        ]

    def coalesce(self) -> None:
        """Sum the duplicates of sparse gradients, so that norms and factors meet each element once."""
        with torch.no_grad():
            for shard in self.shards:
                for i, place in enumerate(shard.places):
                    if place.grad.layout is torch.sparse_coo and not place.grad.is_coalesced():
                        place.param.grad = place.grad.coalesce()
                        shard.values[i] = _values(place)

    def scale(self, factor: Tensor) -> None:
        """Multiply all gradients by ``factor`` (float32, 0-dim), in place. On the CPU 1.0 touches no memory."""
        for shard in self.shards:
            tables = self._tables_of(shard).scale
            kernels.multi_tensor_scale(shard.values, factor.to(shard.device), tables=tables)


def _is_foreign(grad: Tensor) -> bool:
    """Whether the tensor's address is not where its values are: DTensor and other subclasses."""
    return getattr(type(grad), "__torch_dispatch__", None) is not Tensor.__torch_dispatch__


def _real_dtype(dtype: torch.dtype) -> torch.dtype:
    """float32 for complex64, and so on; other dtypes as they are."""
    return torch.empty((), dtype=dtype, device="meta").real.dtype if dtype.is_complex else dtype


def _where(group: int, index: int) -> str:
    return f"group {group}, param {index}"


def _check(place: Place, grad: Tensor) -> None:
    if grad.layout is torch.strided and grad.dtype in _SERVED:
        return
    name = place.label().name
    if grad.layout not in (torch.strided, torch.sparse_coo):
        raise TypeError(
            f"{name}: expected a dense or a sparse COO gradient, got layout {grad.layout}. Convert it first."
        )
    if _real_dtype(grad.dtype) not in _SERVED:
        raise TypeError(
            f"{name}: expected a gradient in float16, bfloat16, float32, float64 or a complex dtype, got "
            f"{str(grad.dtype).removeprefix('torch.')}. Leave the parameter out of the optimizer."
        )


def _values(place: Place) -> Tensor:
    """The memory of a parameter's gradient as the kernels take it, ``.grad`` replaced where that needs other memory."""
    param, grad = place.param, place.grad
    if grad.dtype in OWN_DTYPES and grad.layout is torch.strided:
        return grad.detach() if grad.requires_grad else grad
    if grad.layout is torch.sparse_coo:
        if not grad.is_coalesced() and _real_dtype(grad.dtype) in HALF_DTYPES:
            with torch.no_grad():
                param.grad = grad = _coalesced_wide(grad)
        grad = grad._values()
    if grad.is_conj():
        param.grad = grad = grad.resolve_conj()
    grad = grad.detach()
    return torch.view_as_real(grad) if grad.is_complex() else grad


def _coalesced_wide(grad: Tensor) -> Tensor:
    """A 16-bit sparse gradient with duplicates summed in FP32. What does not fit after that is inf, and is flagged."""
    wide = torch.complex64 if grad.is_complex() else torch.float32
    summed = torch.sparse_coo_tensor(grad._indices(), grad._values().to(wide), grad.shape).coalesce()
    return torch.sparse_coo_tensor(summed._indices(), summed._values().to(grad.dtype), grad.shape, is_coalesced=True)


def _same_memory(a: Tensor, b: Tensor) -> bool:
    return a.data_ptr() == b.data_ptr() and a.shape == b.shape and a.dtype == b.dtype
