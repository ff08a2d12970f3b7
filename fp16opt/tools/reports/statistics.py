"""Tables of numbers about a run, a row for each parameter, on whichever devices these are.

Nothing here waits for a device: what is found stays there until it is read with all the others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from ... import kernels
from ...kernels import stats

GRADIENT = ("count", *kernels.MEASURED)
"""The columns of :func:`of_gradients`."""

UPDATE = ("count", *kernels.COMPARED)
"""The columns of :func:`of_updates`."""

Earlier = list[tuple[list[int], kernels.Snapshots]]
"""Some elements of masters as they were, with the positions of the parameters, by device."""


def _by_device(tensors: Mapping[int, Tensor]) -> list[list[int]]:
    found: dict[torch.device, list[int]] = {}
    for position, tensor in tensors.items():
        found.setdefault(tensor.device, []).append(position)
    return list(found.values())


def _table(rows: int, columns: tuple[str, ...], device: torch.device) -> Tensor:
    return torch.zeros(rows, len(columns), dtype=stats.sum_dtype(device), device=device)


def _sizes(tensors: Sequence[Tensor | None]) -> Tensor:
    sizes = [0 if tensor is None else tensor.numel() for tensor in tensors]
    return torch.tensor(sizes, dtype=torch.int64, device="cpu")


def of_gradients(grads: Sequence[Tensor | None], device: torch.device) -> Tensor:
    """The numbers of gradients as they are, scaled or not.

    Args:
        grads: n dense tensors, float16 to float64, or None.
        device: where the table goes.

    Returns:
        float64, shape [n, 6], in the order of ``GRADIENT``; see :func:`fp16opt.kernels.multi_tensor_measure`. Zeros for
        None. No sync.

    Example:
        >>> of_gradients([torch.tensor([0.0, 2.0**-20, 3.0, 4e4]).half(), None], torch.device("cpu"))[:, 2:].tolist()
        [[40000.0, 1.0, 1.0, 1.0], [0.0, 0.0, 0.0, 0.0]]
    """
    there = {position: grad for position, grad in enumerate(grads) if grad is not None}
    table = _table(len(grads), GRADIENT, device)
    for positions in _by_device(there):
        table[positions, 1:] = kernels.multi_tensor_measure([there[one] for one in positions]).to(table)
    table[:, 0] = _sizes(grads).to(table)
    return table


def underflow(count: float, zero: float, subnormal: float) -> float:
    """The share of a gradient's 16-bit elements that the loss depends on and FP16 does not hold as normal numbers.

    Subnormal ones, and zeros as far as subnormal ones make it likely that they are no true zeros.

    Args:
        count, zero, subnormal: columns of :func:`of_gradients`; ``count`` is not 0.

    Example:
        >>> underflow(10.0, 4.0, 1.0), underflow(10.0, 6.0, 3.0), underflow(10.0, 10.0, 0.0)
        (0.2, 0.9, 1.0)
    """
    most = zero if subnormal > (count - zero) / 2 or zero == count else min(zero, subnormal)
    return (subnormal + most) / count


def take(masters: Mapping[int, Tensor]) -> Earlier:
    """Keep some elements of masters, by position, as they are before a step. No sync."""
    return [(positions, kernels.Snapshots([masters[one] for one in positions])) for positions in _by_device(masters)]


def of_updates(
    before: Earlier,
    now: Callable[[int], tuple[Tensor, Tensor]],
    rows: int,
    device: torch.device,
) -> Tensor:
    """The numbers of a step.

    Args:
        before: what :func:`take` kept of masters.
        now: the master (or the parameter itself, where that is stepped) and the weight at a position, after the step.
        rows: of the table.
        device: where it goes.

    Returns:
        float64, shape [rows, 8], in the order of ``UPDATE``; see :func:`fp16opt.kernels.multi_tensor_compare`. Zeros
        for parameters of which nothing was kept. No sync.
    """
    table = _table(rows, UPDATE, device)
    for positions, snapshots in before:
        masters, weights = zip(*map(now, positions), strict=True)
        table[positions, 1:] = kernels.multi_tensor_compare(masters, weights, snapshots).to(table)
        table[positions, 0] = _sizes(masters).to(table)
    return table
