"""Gradients of parameters that are their own masters, on the way to being true."""

from __future__ import annotations

import torch
from torch import Tensor

from .dtensors import aligned, local
from .gradient_forms import Taken, can_wait, coalesced
from .pairs import HALF_DTYPES, Pair
from .sweep import Sweep


class OwnGradients:
    """Those of one device, in whatever forms they come: sorted one by one, then made true by one pass.

    Args:
        pairs: of all rows of the device.
        sweep: the device's passes.
        held: by row, true gradients that were set aside during the backward, to be added.
        inv_scale: float32, 0-dim: 1 / the scale of that backward.

    Attributes:
        live: rows with a gradient.
        are_usual: whether all have one, dense and laid out as their parameters, and none was set aside.
    """

    def __init__(self, pairs: list[Pair], sweep: Sweep, held: dict[int, Tensor], inv_scale: Tensor) -> None:
        self.live: set[int] = set()
        self.are_usual = True
        self._pairs = pairs
        self._sweep = sweep
        self._held = held
        self._inv_scale = inv_scale
        self._taken = Taken(len(pairs))
        self._narrow: list[tuple[int, Tensor]] = []
        self._later: list[tuple[int, Tensor]] = []

    def add(self, row: int, grad: Tensor | None) -> None:
        """Sort one in."""
        param, before = self._pairs[row].model, self._held.get(row)
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
        param = self._pairs[row].model
        if grad.requires_grad:  # create_graph: it stays part of the graph
            self.are_usual = False
            with torch.enable_grad():
                true = grad * self._inv_scale
                param.grad = true if before is None else before + true
            return
        mine = aligned(grad, param)
        if before is not None and before.layout is torch.strided:
            self._taken.put(row, local(mine).detach(), local(before), True)
            if type(grad) is Tensor and grad.dtype == before.dtype and not grad._is_view():
                grad.data = before  # still the same tensor: torch's clip_grad_norm_ may have listed it already
            else:
                param.grad = before
            self.are_usual = False
            return
        if mine is not grad or local(mine).stride() != local(param).stride():
            # torch's fused steps are silently wrong where a gradient's strides are not its parameter's.
            self.are_usual = False
            mine = torch.empty_like(param, dtype=mine.dtype, requires_grad=False).copy_(mine)
            param.grad = mine
        self._taken.put(row, local(mine), local(mine))
        if before is not None:
            self._later.append((row, before))

    def _add_sparse(self, row: int, grad: Tensor, before: Tensor | None) -> None:
        self.are_usual = False
        pair = self._pairs[row]
        whole = coalesced(grad.detach(), pair.model.dtype, pair.name)
        if not grad.is_coalesced():
            pair.model.grad = whole
        elif grad.requires_grad or not whole._values().is_contiguous():
            pair.model.grad = whole = whole.clone()
        self._taken.put(row, whole._values(), whole._values())  # in place: a GradScaler may hold them
        if before is not None:
            self._later.append((row, before))

    def _add_half(self, row: int, grad: Tensor, before: Tensor | None) -> None:
        """16-bit parameters without masters: through FP32 memory, and rounded back."""
        pair = self._pairs[row]
        self.are_usual &= type(grad) is Tensor and before is None and can_wait(grad, pair.model)
        if grad.layout is not torch.strided:
            grad = coalesced(grad.detach(), torch.float32, pair.name)
            values = grad._values().to(pair.model.dtype)
            grad = torch.sparse_coo_tensor(grad._indices(), values, grad.shape, is_coalesced=True).coalesce()
        elif grad.requires_grad:
            grad = grad.detach().clone()
        source = local(grad if grad.layout is torch.strided else grad._values())
        self._taken.put(row, source, torch.empty_like(source, dtype=torch.float32))
        self._narrow.append((row, source))
        pair.model.grad = grad
        if before is not None:
            self._later.append((row, before))

    def run(self) -> None:
        """One pass over all of them."""
        sweep, taken = self._sweep, self._taken
        if taken.used:
            sweep.take(taken.sources, taken.outs, self._inv_scale, taken.adds if any(taken.adds) else False)
        if self._narrow:
            rows = [row for row, _ in self._narrow]
            sweep.round(rows, [taken.outs[row] for row in rows], [out for _, out in self._narrow])
        for row, before in self._later:
            param = self._pairs[row].model
            param.grad = before if param.grad is None else before + param.grad
