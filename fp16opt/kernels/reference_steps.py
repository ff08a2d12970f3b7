"""The one-pass optimizer steps written plainly in torch, one tensor at a time: specification and fallback.

As in :mod:`fp16opt.kernels.reference`: only operations that round once, in the order of the formulas, so that every
backend gives the same bits. Numbers of a step are computed in double and rounded to float32 once.
"""

from __future__ import annotations

import contextlib
import functools
import math
import struct
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from . import reference, reference_split
from .stats import CastStats


class AdamOptions(NamedTuple):
    """What a param_group of Adam or AdamW says, apart from ``amsgrad``, which shows in the lists.

    Attributes:
        lr, beta1, beta2, eps, weight_decay: as ``torch.optim.AdamW`` holds them; an ``lr`` that is a tensor has one
            element.
        decoupled: whether the weight decay is AdamW's.
        maximize: as ``torch.optim.AdamW`` holds it.
    """

    lr: float | Tensor
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    decoupled: bool
    maximize: bool


class SgdOptions(NamedTuple):
    """What a param_group of SGD says.

    Attributes:
        lr, momentum, dampening, weight_decay, nesterov, maximize: as ``torch.optim.SGD`` holds them; an ``lr`` that is
            a tensor has one element.
    """

    lr: float | Tensor
    momentum: float
    dampening: float
    weight_decay: float
    nesterov: bool
    maximize: bool


class LionOptions(NamedTuple):
    """What a param_group of Lion says.

    Attributes:
        lr, beta1, beta2, weight_decay: as ``lion_pytorch.Lion`` holds them; weights shrink by lr * weight_decay in a
            step. An ``lr`` that is a tensor has one element.
        maximize: whether steps go up the gradient.
    """

    lr: float | Tensor
    beta1: float
    beta2: float
    weight_decay: float
    maximize: bool


class Factors(NamedTuple):
    """What stored gradients are multiplied by, one after the other: float32, shape [], on the device."""

    inv_scale: Tensor
    coefficient: Tensor


def _single(value: float) -> float:
    """``value`` rounded to float32; beyond its range, infinity."""
    try:
        return float(struct.unpack("<f", struct.pack("<f", value))[0])
    except OverflowError:
        return math.copysign(math.inf, value)


def _product(a: int, b: int) -> int:
    """The product of two multiples of 2^-128, as csrc/functors/power.h truncates it."""
    (a1, a0), (b1, b0) = divmod(a, 1 << 64), divmod(b, 1 << 64)
    return a1 * b1 + (a1 * b0 >> 64) + (a0 * b1 >> 64)


@functools.lru_cache(maxsize=1024)
def power(base: float, count: float) -> float:
    """``base`` to the ``count``, the same bits on every machine: what C libraries give differs in the last place.

    Args:
        base: at least 0, less than 1.
        count: a number of steps; a fraction is dropped.

    Example:
        >>> power(0.5, 3.0), power(0.9, 0.0)
        (0.125, 1.0)
    """
    left = int(min(count, 9e18)) if count >= 1.0 else 0
    numerator, denominator = base.as_integer_ratio()
    square, result = (numerator << 128) // denominator, 1 << 128
    begun = False
    while left:
        if left & 1:
            result, begun = (_product(result, square) if begun else square), True
        square, left = _product(square, square), left >> 1
    return result / (1 << 128)  # rounded correctly


def _gradient(grad: Tensor, factors: Factors, maximize: bool) -> Tensor:
    """The unscaled, clipped gradient in float32, with two roundings."""
    unscaled = (grad.float() * factors.inv_scale) * factors.coefficient
    return -unscaled if maximize else unscaled


class _Views:
    """Tensors of one shape, each flattened in the memory order of the first, to be written back when done."""

    def __init__(self, *tensors: Tensor) -> None:
        self.order = reference.memory_order(tensors[0])
        self.tensors = tensors
        self.flats = [reference.flatten(tensor, self.order) for tensor in tensors]

    def parts(self, part: slice) -> list[Tensor]:
        return [flat.values[part] for flat in self.flats]

    def write_back(self) -> None:
        for flat, tensor in zip(self.flats, self.tensors, strict=True):
            reference.write_back(flat, tensor, self.order)


def adam(
    grad: Tensor,
    master: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    max_exp_avg_sq: Tensor | None,
    t: float,
    options: AdamOptions,
    factors: Factors,
) -> None:
    """One Adam or AdamW step of one tensor.

    Args:
        grad: float16, bfloat16 or float32, as stored. Read only.
        master: float32. Written, and so are exp_avg, exp_avg_sq and, with amsgrad, max_exp_avg_sq.
        t: the number of this step, from 1.
        options: of the tensor's param_group.
        factors: what ``grad`` is multiplied by.
    """
    o = options
    lr = float(o.lr)
    step_size = _single(-(lr / (1.0 - power(o.beta1, t))))
    # By a number torch's CUDA kernels do not divide: they multiply by its reciprocal. A tensor they divide by.
    root = torch.full((), math.sqrt(1.0 - power(o.beta2, t)), dtype=torch.float32, device=master.device)
    state = [master, exp_avg, exp_avg_sq, *([] if max_exp_avg_sq is None else [max_exp_avg_sq])]
    views = _Views(*state)
    source = reference.flatten(grad, views.order).values
    for part in reference.slabs(source.numel()):
        p, m, v, *largest = views.parts(part)
        g = _gradient(source[part], factors, o.maximize)
        if o.weight_decay != 0.0 and not o.decoupled:
            g = g + p * _single(o.weight_decay)
        decayed = p * _single(1.0 - lr * o.weight_decay) if o.decoupled else p
        m.copy_(_lerp(m, g, _single(1.0 - o.beta1)))
        v.copy_(v * _single(o.beta2) + (g * _single(1.0 - o.beta2)) * g)
        second = v
        if largest:
            second = largest[0].copy_(torch.where((largest[0] > v) | largest[0].isnan(), largest[0], v))
        denominator = second.double().sqrt().float() / root + _single(o.eps)
        p.copy_(decayed + (m * step_size) / denominator)
    views.write_back()


def _lerp(start: Tensor, end: Tensor, weight: float) -> Tensor:
    """torch.lerp's two formulas, each operation rounded. ``weight`` fits float32."""
    step = end - start
    return start + step * weight if weight < 0.5 else end - step * _single(1.0 - weight)


def sgd(
    grad: Tensor, master: Tensor, momentum_buffer: Tensor | None, first: bool, options: SgdOptions, factors: Factors
) -> None:
    """One SGD step of one tensor.

    Args:
        grad: float16, bfloat16 or float32, as stored. Read only.
        master: float32. Written, and so is momentum_buffer; None is a step without momentum.
        first: whether the buffer holds nothing yet.
        options: of the tensor's param_group.
        factors: what ``grad`` is multiplied by.
    """
    o = options
    views = _Views(master) if momentum_buffer is None else _Views(master, momentum_buffer)
    source = reference.flatten(grad, views.order).values
    for part in reference.slabs(source.numel()):
        p, *buffer = views.parts(part)
        g = _gradient(source[part], factors, o.maximize)
        if o.weight_decay != 0.0:
            g = g + p * _single(o.weight_decay)
        if buffer:
            kept = g if first else buffer[0] * _single(o.momentum) + g * _single(1.0 - o.dampening)
            buffer[0].copy_(kept)
            g = g + buffer[0] * _single(o.momentum) if o.nesterov else buffer[0]
        p.copy_(p + g * _single(-float(o.lr)))
    views.write_back()


def lion(grad: Tensor, master: Tensor, exp_avg: Tensor, options: LionOptions, factors: Factors) -> None:
    """One Lion step of one tensor (Chen et al. 2023, "Symbolic Discovery of Optimization Algorithms", algorithm 2).

    Args:
        grad: float16, bfloat16 or float32, as stored. Read only.
        master: float32. Written, and so is exp_avg.
        options: of the tensor's param_group.
        factors: what ``grad`` is multiplied by.
    """
    o = options
    views = _Views(master, exp_avg)
    source = reference.flatten(grad, views.order).values
    for part in reference.slabs(source.numel()):
        p, m = views.parts(part)
        g = _gradient(source[part], factors, o.maximize)
        mixed = m * _single(o.beta1) + g * _single(1.0 - o.beta1)
        direction = (mixed > 0).float() - (mixed < 0).float()
        p.copy_(p * _single(1.0 - float(o.lr) * o.weight_decay) + direction * _single(-float(o.lr)))
        m.copy_(m * _single(o.beta2) + g * _single(1.0 - o.beta2))
    views.write_back()


@contextlib.contextmanager
def whole(row: int, master: Tensor, model: Tensor | None, stats: CastStats | None, number: int = 0) -> Iterator[Tensor]:
    """A master in float32 to be stepped within, and then rounded into its 16-bit parameter, where it has one.

    Args:
        row: of ``stats``.
        master: float32, or the int16 or int8 remainder of a split one.
        model: float16 or bfloat16, or None.
        stats: as for :func:`fp16opt.kernels.multi_tensor_cast`.
        number: of the step, by which int8 remainders are rounded.
    """
    if model is None or stats is None:
        yield master
    elif master.dtype in (torch.int16, torch.int8):
        single = torch.empty_like(model, dtype=torch.float32)
        reference_split.join(model, master, single)
        yield single
        reference_split.split(row, single, model, master, stats, number)
    else:
        yield master
        reference.cast(row, master, model, stats)
