"""The gradients of one device, by row: where they lie, and what is done to one that is not as usual."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import kernels
from ..kernels.reference_steps import Factors
from ..kernels.tables import same_walk
from .dtensors import aligned, local
from .pairs import HALF_DTYPES, DeviceGroup, Pairs
from .sights import store
from .sweep import Sweep


class Rows:
    """The gradients of one device.

    Attributes:
        models, masters: the tensors whose ``.grad`` is read and set, by row.
        waiting: 16-bit gradients that were looked at and stay where they are, by row; None: there are none.
        buffers: memory for FP32 gradients, by row.
        held: own gradients that were set aside during a backward, by row.
        sums: rows whose master gradient is a sum that the next one is added to.
        flags: of all that went into sums; None where nothing is summed.
        live: rows that had a gradient at the last pass.
    """

    def __init__(self, group: DeviceGroup, pairs: Pairs) -> None:
        self.group = group
        self.pairs = [pairs.all[i] for i in group.positions]
        self.models = [pair.model for pair in self.pairs]
        self.masters = [pair.master for pair in self.pairs]
        self.own_models = [self.models[row] for row in group.own]
        self.copied_models = [self.models[row] for row in group.copied]
        self.sweep = Sweep(group.device, len(group))
        self.waiting: list[Tensor | None] | None = None
        self.buffers: list[Tensor | None] = [None] * len(group)
        self.has_buffers = False
        self.held: dict[int, Tensor] = {}
        self.sums: set[int] = set()
        self.flags: Tensor | None = None
        self.live: set[int] = set()
        self.usual = kernels.Seen()
        self.usual_own = kernels.Seen()
        self.factors = Factors(self.sweep.one, self.sweep.one)

    def spread(self, rows: list[int], values: list[Any]) -> list[Any]:
        """``values`` at ``rows``, None elsewhere."""
        if len(rows) == len(self.models):
            return values
        entries: list[Any] = [None] * len(self.models)
        for row, value in zip(rows, values, strict=True):
            entries[row] = value
        return entries


class Taken:
    """Gradients that an unscaling pass writes at once, by row."""

    def __init__(self, count: int) -> None:
        self.sources: list[Tensor | None] = [None] * count
        self.outs: list[Tensor | None] = [None] * count
        self.adds = [False] * count
        self.used = False

    def put(self, row: int, source: Tensor, out: Tensor, add: bool = False) -> None:
        """A row's ``source`` goes to ``out``, or is added there."""
        self.sources[row], self.outs[row], self.adds[row], self.used = source, out, add, True


class OwnRows:
    """Gradients of parameters that are their own masters, one by one, on the way to being true."""

    def __init__(self, rows: Rows, held: dict[int, Tensor], inv_scale: Tensor) -> None:
        self.rows = rows
        self.held = held
        self.inv_scale = inv_scale
        self.taken = Taken(len(rows.models))
        self.live: set[int] = set()
        self.are_usual = True
        self._narrow: list[tuple[int, Tensor]] = []
        self.later: list[tuple[int, Tensor]] = []

    def add(self, row: int, grad: Tensor | None) -> None:
        """Sort one in."""
        param, before = self.rows.models[row], self.held.get(row)
        if grad is None:
            self.are_usual = False
            if before is not None:
                param.grad = before
                self.live.add(row)
            return
        self.live.add(row)
        if param.dtype in HALF_DTYPES and grad.dtype in HALF_DTYPES:
            self._add_half(row, grad, before)
        elif grad.layout is not torch.strided:
            self._add_sparse(row, grad, before)
        else:
            self._add_dense(row, grad, before)

    def _add_dense(self, row: int, grad: Tensor, before: Tensor | None) -> None:
        param = self.rows.models[row]
        if grad.requires_grad:  # create_graph: it stays part of the graph
            self.are_usual = False
            with torch.enable_grad():
                true = grad * self.inv_scale
                param.grad = true if before is None else before + true
            return
        mine = aligned(grad, param)
        if before is not None and before.layout is torch.strided:
            self.taken.put(row, local(mine), local(before), True)
            param.grad = before
            self.are_usual = False
            return
        if mine is not grad or local(mine).stride() != local(param).stride():
            # torch's fused steps are silently wrong where a gradient's strides are not its parameter's.
            self.are_usual = False
            mine = torch.empty_like(param, dtype=mine.dtype, requires_grad=False).copy_(mine)
            param.grad = mine
        self.taken.put(row, local(mine), local(mine))
        if before is not None:
            self.later.append((row, before))

    def _add_sparse(self, row: int, grad: Tensor, before: Tensor | None) -> None:
        self.are_usual = False
        pair = self.rows.pairs[row]
        grad = coalesced(grad.detach(), pair.model.dtype, pair.name)
        out = torch.empty_like(grad._values())
        self.taken.put(row, grad._values(), out)
        pair.model.grad = torch.sparse_coo_tensor(grad._indices(), out, grad.shape, is_coalesced=True).coalesce()
        if before is not None:
            self.later.append((row, before))

    def _add_half(self, row: int, grad: Tensor, before: Tensor | None) -> None:
        """16-bit parameters without masters: through FP32 memory, and rounded back."""
        self.are_usual = False
        pair = self.rows.pairs[row]
        if grad.layout is not torch.strided:
            grad = coalesced(grad.detach(), torch.float32, pair.name)
            values = grad._values().to(pair.model.dtype)
            grad = torch.sparse_coo_tensor(grad._indices(), values, grad.shape, is_coalesced=True).coalesce()
        elif grad.requires_grad:
            grad = grad.detach().clone()
        source = local(_values_of(grad))
        self.taken.put(row, source, torch.empty_like(source, dtype=torch.float32))
        self._narrow.append((row, source))
        pair.model.grad = grad
        if before is not None:
            self.later.append((row, before))

    def run(self) -> None:
        """One pass over all of them."""
        sweep, taken = self.rows.sweep, self.taken
        if taken.used:
            sweep.take(taken.sources, taken.outs, self.inv_scale, taken.adds if any(taken.adds) else False)
        if self._narrow:
            rows = [row for row, _ in self._narrow]
            sweep.round(rows, [taken.outs[row] for row in rows], [out for _, out in self._narrow])
        for row, before in self.later:
            param = self.rows.models[row]
            param.grad = before if param.grad is None else before + param.grad


def _values_of(grad: Tensor) -> Tensor:
    return grad if grad.layout is torch.strided else grad._values()


def coalesced(grad: Tensor, dtype: torch.dtype, name: str) -> Tensor:
    """A sparse gradient with duplicates summed in ``dtype``, not in 16 bits.

    Raises:
        TypeError: it is neither dense nor sparse COO.
    """
    if grad.layout is not torch.sparse_coo:
        raise TypeError(
            f"parameter {name!r}: expected a dense or a sparse COO gradient, got layout {grad.layout}. Convert it in a "
            "hook."
        )
    if grad.is_coalesced():
        return grad
    return torch.sparse_coo_tensor(grad._indices(), grad._values().to(dtype), grad.shape).coalesce()


def can_wait(grad: Tensor, model: Tensor) -> bool:
    """Whether kernels can walk a gradient along with its parameter, so that it stays where it is until a step."""
    return grad.layout is torch.strided and grad.dtype == model.dtype and same_walk(grad, model)


def dense(grads: list[Tensor | None], rows: Rows) -> list[Tensor | None]:
    """The tensors that hold the gradients' elements, for kernels; of 16-bit ones without masters FP32 copies."""
    values: list[Tensor | None] = []
    for row, grad in enumerate(grads):
        if grad is None:
            values.append(None)
            continue
        if grad.layout is torch.sparse_coo:
            if not grad.is_coalesced():
                grad = grad.coalesce()
                store(rows.masters[row], grad)
            grad = grad._values()
        if type(grad) is not Tensor:
            grad = local(grad)
        values.append(grad.detach() if grad.requires_grad else grad)
    return values


def total_norm(parts: list[Tensor], norm_type: float, device: torch.device) -> Tensor:
    """The norm over tensors whose norms are ``parts``: float64, 0-dim, on ``device``."""
    if len(parts) == 1:
        return parts[0].to(device)
    if not parts:
        return torch.zeros((), dtype=torch.float64, device=device)
    return vector_norm(torch.stack([part.to(device) for part in parts]), norm_type)


def vector_norm(value: Tensor, norm_type: float) -> Tensor:
    """The norm of one dense tensor: float64, 0-dim. No host sync."""
    dtype = torch.complex128 if value.is_complex() else torch.float64
    norm: Tensor = torch.linalg.vector_norm(value, norm_type, dtype=dtype)
    return norm
