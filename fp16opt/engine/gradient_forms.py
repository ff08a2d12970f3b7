"""The forms in which gradients come: dense, sparse, of other dtypes or layouts than their parameters."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..kernels.tables import same_walk
from .dtensors import local


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


def as_master_grad(grad: Tensor, master: Tensor, name: str) -> Tensor:
    """A gradient in FP32 and laid out as its master, or sparse and coalesced: itself where it is.

    Raises:
        TypeError: as :func:`coalesced`.
    """
    grad = grad.detach()
    if grad.layout is not torch.strided:
        whole = coalesced(grad, torch.float32, name)
        return whole if whole.dtype is torch.float32 else whole.to(torch.float32)
    if can_wait(local(grad), local(master)):
        return grad
    return torch.empty_like(master, requires_grad=False).copy_(grad)


def kernel_values(grads: Sequence[Tensor | None]) -> list[Tensor | None]:
    """The tensors that hold gradients' elements, as kernels take them; of sparse ones their values."""
    values: list[Tensor | None] = []
    for grad in grads:
        if grad is not None:
            if grad.layout is torch.sparse_coo:
                grad = grad._values()
            if type(grad) is not Tensor:
                grad = local(grad)
            grad = grad.detach() if grad.requires_grad else grad
        values.append(grad)
    return values
