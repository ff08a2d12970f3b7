"""Gradients of any optimizer, unscaled where they lie: checked, measured and clipped in as few passes as possible.

The engine moves gradients up into masters. This serves optimizers that hold the model's parameters themselves.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from .. import kernels
from ..engine import errors
from ..engine.diagnostics import Overflow, describe, overflows_from_flags
from ..engine.params import HALF_DTYPES, OWN_DTYPES, name_of
from ..engine.passes import coalesced, round_to, total_norm, vector_norm
from ..engine.stage import GradientStamp
from ..kernels import backends

_SERVED = (*HALF_DTYPES, *OWN_DTYPES)


class ParamWithGrad(NamedTuple):
    """A parameter that has a gradient, and where it is in the optimizer's ``param_groups``."""

    param: Tensor
    param_group: dict[str, Any]
    group: int
    index: int  # type: ignore[assignment]  # hides tuple.index

    @property
    def grad(self) -> Tensor:
        """The parameter's ``.grad`` as it is now."""
        grad = self.param.grad
        if grad is None:
            raise RuntimeError(f"{self.name()}: its gradient was cleared in the middle of a call.")
        return grad

    def name(self, names: Mapping[int, str] | None = None) -> str:
        """Made when it is asked for: a step that is taken needs none.

        Args:
            names: by the id of the parameter, where the user gave some.
        """
        return name_of(self.param_group, self.index, self.param, dict(names or {})) or _where(self.group, self.index)


Found = tuple[list[ParamWithGrad], Tensor]
"""Parameters, and int32 bits ``kernels.INF | kernels.NAN`` of what a pass has found in the gradient of each."""


def overflows(found: Iterable[Found], names: Mapping[int, str] | None = None) -> list[Overflow]:
    """Which parameters had non-finite gradients in one of several passes, in param_groups order. Syncs.

    Args:
        names: by the id of the parameter, where the user gave some.
    """
    bits: dict[tuple[int, int], int] = {}
    where: dict[tuple[int, int], ParamWithGrad] = {}
    for places, flags in found:
        for place, flag in zip(places, flags.tolist(), strict=True):
            if flag:
                at = (place.group, place.index)
                bits[at], where[at] = bits.get(at, 0) | flag, place
    blamed = sorted(bits)
    return overflows_from_flags([bits[at] for at in blamed], [where[at].name(names) for at in blamed], blamed)


@dataclass
class DeviceRows:
    """The gradients of one device, in the order of the optimizer's parameters.

    ``values`` are dense and real: the values of sparse gradients, complex ones seen as pairs of real numbers. Where
    all are ``plain`` they are the gradients themselves, float32 or float64.
    """

    device: torch.device
    places: list[ParamWithGrad] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)
    is_plain: bool = True

    def is_dense(self) -> bool:
        """Whether no gradient is sparse."""
        return self.is_plain or all(place.grad.layout is torch.strided for place in self.places)


class OptimizerGradients:
    """The gradients of one optimizer's parameters. They are held on to from :meth:`collect` to :meth:`release`.

    Attributes:
        subclassed: Parameters whose gradients are tensor subclasses with operations of their own (DTensor); torch's
            operations serve them, and do not tell which of them overflowed.
        rows: The others, by device.
        checked: Those that were unscaled, and what the pass has found in them.
    """

    def __init__(self) -> None:
        self._stats: dict[torch.device, kernels.GradStats] = {}
        self.release()

    def release(self) -> None:
        """Let go of the gradients."""
        self.rows: list[DeviceRows] = []
        self.subclassed: list[Tensor] = []
        self._measured: GradientStamp | None = None
        self.checked: list[tuple[list[ParamWithGrad], kernels.GradStats]] = []

    def params(self) -> Iterator[Tensor]:
        """The parameters that have a gradient."""
        for rows in self.rows:
            yield from (place.param for place in rows.places)
        yield from self.subclassed

    def device(self) -> torch.device:
        """Where the first of them is; the CPU for none."""
        return self.rows[0].device if self.rows else torch.device("cpu")

    # -- finding them ------------------------------------------------------------------------------------------------

    def collect(self, optimizer: Optimizer, allow_fp16: bool = True) -> None:
        """Take in the gradients as they are now. 16-bit sparse ones are coalesced in FP32, in place of the old ones.

        Raises:
            TypeError: A parameter is no tensor, or its gradient has a dtype or layout that can't be served. Named; no
                gradient has been touched then.
            ValueError: There are FP16 gradients and not ``allow_fp16``: torch's error. As above.
        """
        places: list[tuple[ParamWithGrad, Tensor | None]] = []
        subclassed: list[Tensor] = []
        refused: list[str] = []
        seen: set[int] = set()
        for number, group in enumerate(optimizer.param_groups):
            for index, param in enumerate(group["params"]):
                if not isinstance(param, Tensor):
                    raise TypeError(f"{_where(number, index)}: expected a tensor, got {type(param).__name__}.")
                grad = param.grad
                if grad is None or id(param) in seen:
                    continue
                seen.add(id(param))
                if type(grad) is Tensor and grad.dtype in OWN_DTYPES and grad.layout is torch.strided:
                    memory = grad.detach() if grad.requires_grad else grad
                    places.append((ParamWithGrad(param, group, number, index), memory))
                    continue
                if not allow_fp16 and grad.dtype is torch.float16:
                    refused.append(name_of(group, index, param, {}) or _where(number, index))
                if _is_subclassed(grad):
                    subclassed.append(param)
                else:
                    place = ParamWithGrad(param, group, number, index)
                    _check(place, grad)
                    places.append((place, None))
        if refused:
            raise errors.NEVER_WRAPPED(names=describe(refused))
        self.subclassed = subclassed
        by_device: dict[torch.device, DeviceRows] = {}
        for place, plain in places:
            values = _memory_of(place) if plain is None else plain
            rows = by_device.setdefault(values.device, DeviceRows(values.device))
            rows.places.append(place)
            rows.values.append(values)
            rows.is_plain = rows.is_plain and plain is not None
        self.rows = list(by_device.values())

    def halves(self) -> list[str]:
        """Names of the 16-bit parameters that have a gradient."""
        return [place.name() for rows in self.rows for place in rows.places if place.param.dtype in HALF_DTYPES]

    def coalesce(self) -> None:
        """Sum the duplicates of sparse gradients, so that norms and factors meet each element once."""
        with torch.no_grad():
            for rows in self.rows:
                for row, place in enumerate(rows.places):
                    if place.grad.layout is torch.sparse_coo and not place.grad.is_coalesced():
                        place.param.grad = place.grad.coalesce()
                        rows.values[row] = _memory_of(place)

    # -- the passes --------------------------------------------------------------------------------------------------

    def unscale(self, inv_scale: Tensor, earlier: Mapping[Tensor, Tensor] | None = None) -> dict[torch.device, Tensor]:
        """Multiply all gradients by ``inv_scale`` in place, check and measure them. One pass; no host sync.

        16-bit gradients go through FP32 memory that lives as long as this call, and are rounded back.

        Args:
            inv_scale: float32, 0-dim, any device.
            earlier: What :func:`take_out` gave, and is added to them: the sum lies in its memory, where it can. A
                parameter that has no gradient now gets it back.

        Returns:
            For each device with gradients: float32, 0-dim, 1.0 where one was not finite after unscaling (or the sum too
            large for its dtype), else 0.0. Overwritten by the next call.
        """
        self.checked, self._measured = [], None
        found: dict[torch.device, Tensor] = {}
        left = dict(earlier or {})
        with torch.no_grad():
            for rows in self.rows:
                sums = [_sum_for(place, left) if left else None for place in rows.places]
                stats = self._stats_of(rows)
                _unscale(rows.values, sums, stats, kernels.moved(inv_scale, rows.device))
                for row, (place, sum_) in enumerate(zip(rows.places, sums, strict=True)):
                    if sum_ is not None:
                        place.param.grad = rows.values[row] = sum_
                self.checked.append((rows.places, stats))
                found[rows.device] = stats.found_inf
            for device, flag in self._unscale_subclassed(inv_scale).items():
                found[device] = torch.maximum(found[device], flag) if device in found else flag
            for param, before in left.items():
                param.grad = before if param.grad is None else before + param.grad
        if not left and all([rows.is_dense() for rows in self.rows]):  # noqa: C419
            self._measured = GradientStamp(self._grads())
        return found

    def _unscale_subclassed(self, inv_scale: Tensor) -> dict[torch.device, Tensor]:
        """By device, whether one of the subclassed gradients was not finite: what torch's own GradScaler does."""
        if not self.subclassed:
            return {}
        torchs = torch.amp.GradScaler(inv_scale.device.type, enabled=False)
        as_optimizer: Any = SimpleNamespace(param_groups=[{"params": self.subclassed}])
        flags: dict[torch.device, Tensor] = torchs._unscale_grads_(
            as_optimizer, inv_scale, torch.zeros_like(inv_scale), True
        )
        return flags

    def unscale_and_clip(self, inv_scale: Tensor, max_norm: float) -> tuple[Tensor, Tensor] | None:
        """Unscale and clip in one pass that reads and one that writes. No host sync.

        Returns:
            (norm before clipping, found_inf), each float32, 0-dim, as :meth:`unscale` would find them. None where
            nothing was done: gradients are not all float32 and dense on one device.
        """
        if self.subclassed or len(self.rows) != 1:
            return None
        (rows,) = self.rows
        if not rows.is_plain or any([value.dtype is not torch.float32 for value in rows.values]):  # noqa: C419
            return None
        stats, inv_scale = self._stats_of(rows), kernels.moved(inv_scale, rows.device)
        kernels.multi_tensor_check(rows.values, inv_scale, stats)
        norm, factor = backends.decide_clip(stats.norm, stats.found_inf, max_norm)
        kernels.multi_tensor_unscale_clipped(rows.values, rows.values, inv_scale, factor)
        self.checked, self._measured = [(rows.places, stats)], None
        return norm, stats.found_inf

    def norm(self, norm_type: float, device: torch.device) -> Tensor:
        """The norm over all gradients: float64, 0-dim, on ``device``. No host sync.

        The 2-norm was summed by :meth:`unscale`; it is read again only where a gradient changed since. :meth:`collect`
        first, so that gradients that were replaced are seen.
        """
        with torch.no_grad():
            if norm_type != 2.0:
                grads = [grad for grad in self._grads() if grad is not None]
                dense = [grad._values() if grad.layout is torch.sparse_coo else grad for grad in grads]
                parts = [vector_norm(grad, norm_type) for grad in dense if grad.numel()]
            elif self._is_measured():
                parts = [stats.norm for _, stats in self.checked]
            else:
                parts = [kernels.multi_tensor_l2norm(rows.values)[0] for rows in self.rows]
            return total_norm(parts, norm_type, device)

    def largest_norm(self, device: torch.device) -> Tensor:
        """float32, 0-dim, on ``device``: the largest of the norms of single gradients, as unscaled. No host sync.

        Of DTensors the norms over all ranks: a message each.
        """
        norms = [stats.sumsq.amax().sqrt().float().to(device) for _, stats in self.checked]
        for grad in (param.grad for param in self.subclassed):
            if grad is not None:
                norm = torch.linalg.vector_norm(grad.detach(), dtype=torch.float32)
                norms.append((norm.full_tensor() if hasattr(norm, "full_tensor") else norm).to(device))
        return torch.stack(norms).amax() if norms else torch.zeros((), dtype=torch.float32, device=device)

    def scale(self, factor: Tensor) -> None:
        """Multiply all gradients by ``factor`` (float32, 0-dim), in place. On the CPU 1.0 touches no memory."""
        for rows in self.rows:
            kernels.multi_tensor_scale(rows.values, factor.to(rows.device))

    def _stats_of(self, rows: DeviceRows) -> kernels.GradStats:
        """Kept while as many gradients come as before."""
        stats = self._stats.get(rows.device)
        if stats is None or len(stats.nonfinite) != len(rows.values):
            stats = self._stats[rows.device] = kernels.GradStats.allocate(len(rows.values), rows.device)
        return stats

    def _grads(self) -> list[Tensor | None]:
        """As they are now; None where one was cleared."""
        return [place.param.grad for rows in self.rows for place in rows.places]

    def _is_measured(self) -> bool:
        """Whether no gradient came, was written or replaced since :meth:`unscale` summed its squares."""
        return self._measured is not None and self._measured.compare(self._grads()) == ([], [])


def take_out(optimizer: Optimizer) -> dict[Tensor, Tensor]:
    """Gradients as they are now, which parameters give up: a backward that follows leaves its own alone there."""
    taken: dict[Tensor, Tensor] = {}
    for param in (param for group in optimizer.param_groups for param in group["params"]):
        if param.grad is not None:
            taken[param], param.grad = param.grad, None
    return taken


def put_back(taken: Mapping[Tensor, Tensor]) -> None:
    """Undo :func:`take_out`, where no gradient came since."""
    for param, grad in taken.items():
        if param.grad is None:
            param.grad = grad


def _sum_for(place: ParamWithGrad, earlier: dict[Tensor, Tensor]) -> Tensor | None:
    """The earlier gradient of a parameter, out of ``earlier``, if a kernel can add the present one to it."""
    grad, before = place.grad, earlier.get(place.param)
    if before is None or not all(type(one) is Tensor and one.layout is torch.strided for one in (grad, before)):
        return None
    if grad.is_complex() or grad.dtype != before.dtype or grad.stride() != before.stride() or before.requires_grad:
        return None
    return earlier.pop(place.param)


def _unscale(values: list[Tensor], sums: list[Tensor | None], stats: kernels.GradStats, inv_scale: Tensor) -> None:
    """``values *= inv_scale``; or ``sums += values * inv_scale``, where there is one."""
    outs = [value if sum_ is None else sum_ for value, sum_ in zip(values, sums, strict=True)]
    halves = [row for row, out in enumerate(outs) if out.dtype in HALF_DTYPES]
    wide = list(outs)
    for row in halves:
        sum_ = sums[row]
        wide[row] = torch.empty_like(values[row], dtype=torch.float32) if sum_ is None else sum_.float()
    adds = [sum_ is not None for sum_ in sums]
    kernels.multi_tensor_unscale(values, wide, inv_scale, stats, accumulate=adds if any(adds) else False)
    if halves:
        rounded = [out if row in halves else None for row, out in enumerate(wide)]
        round_to(rounded, [out if row in halves else None for row, out in enumerate(outs)], stats)


def _is_subclassed(grad: Tensor) -> bool:
    """Whether the tensor's address is not where its values are: DTensor and other subclasses."""
    return getattr(type(grad), "__torch_dispatch__", None) is not Tensor.__torch_dispatch__


def _real_dtype(dtype: torch.dtype) -> torch.dtype:
    """float32 for complex64, and so on; other dtypes as they are."""
    return torch.empty((), dtype=dtype, device="meta").real.dtype if dtype.is_complex else dtype


def _where(group: int, index: int) -> str:
    return f"group {group}, param {index}"


def _check(place: ParamWithGrad, grad: Tensor) -> None:
    if grad.layout is torch.strided and grad.dtype in _SERVED:
        return
    if grad.layout not in (torch.strided, torch.sparse_coo):
        raise TypeError(
            f"{place.name()}: expected a dense or a sparse COO gradient, got layout {grad.layout}. Convert it first."
        )
    if _real_dtype(grad.dtype) not in _SERVED:
        raise TypeError(
            f"{place.name()}: expected a gradient in float16, bfloat16, float32, float64 or a complex dtype, got "
            f"{str(grad.dtype).removeprefix('torch.')}. Leave the parameter out of the optimizer."
        )


def _memory_of(place: ParamWithGrad) -> Tensor:
    """The memory of a parameter's gradient as the kernels take it, ``.grad`` replaced where that needs other memory."""
    param, grad = place.param, place.grad
    if grad.dtype in OWN_DTYPES and grad.layout is torch.strided:
        return grad.detach() if grad.requires_grad else grad
    if grad.layout is torch.sparse_coo:
        if not grad.is_coalesced() and _real_dtype(grad.dtype) in HALF_DTYPES:
            with torch.no_grad():
                param.grad = grad = _coalesced_wide(grad, place.name())
        grad = grad._values()
    if grad.is_conj():
        param.grad = grad = grad.resolve_conj()
    grad = grad.detach()
    return torch.view_as_real(grad) if grad.is_complex() else grad


def _coalesced_wide(grad: Tensor, name: str) -> Tensor:
    """A 16-bit sparse gradient with duplicates summed in FP32. What does not fit after that is inf, and is flagged."""
    summed = coalesced(grad, torch.complex64 if grad.is_complex() else torch.float32, name)
    return torch.sparse_coo_tensor(
        summed._indices(), summed._values().to(grad.dtype), grad.shape, is_coalesced=True, check_invariants=False
    )
