"""The one-pass optimizer steps in torch operations, one tensor at a time: specification and fallback.

Here is what formulas have in common; :mod:`.formulas` has a row for each. As in :mod:`.reference` only operations that
round once, so that every backend gives the same bits. Numbers of a step are computed in double and rounded once.
"""

from __future__ import annotations

import contextlib
import functools
import math
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import reference_split
from .pieces import WHOLE, Piece
from .reference import cast, flatten, memory_order, slabs, write_back
from .stats import CastStats


class Factors(NamedTuple):
    """What stored gradients are multiplied by, one after the other: float32, shape [], on the device."""

    inv_scale: Tensor
    coefficient: Tensor


class StepValues(NamedTuple):
    """What a step is given beside its lists; see :func:`.steps.multi_tensor_step`.

    Attributes:
        options: of the param_groups.
        group_of: for each entry, its place in these.
        factors: what gradients are multiplied by.
        stats: of the 16-bit models; None where the step has no models, whatever the caller gave.
        found_inf: where it is not 0, nothing is written.
        first: which state holds nothing yet; False for all.
        number: of the step, by which what has 8 bits is rounded.
        pieces: which part of a whole tensor each is; None: all are whole.
    """

    options: Sequence[Any]
    group_of: Sequence[int]
    factors: Factors
    stats: CastStats | None
    found_inf: Tensor | None
    first: bool | Sequence[bool]
    number: int
    pieces: Sequence[Piece] | None = None


class OneStep(NamedTuple):
    """What one tensor is stepped with.

    Attributes:
        options: of its param_group.
        factors: what its gradient is multiplied by.
        t: the number of its step, from 1, for formulas that count.
        first: whether its state holds nothing yet.
        number: of the step, by which what has 8 bits is rounded.
        piece: which part of a whole tensor it is, by whose indices that is rounded.
    """

    options: Any
    factors: Factors
    t: float = 0.0
    first: bool = False
    number: int = 0
    piece: Piece = WHOLE


def single(value: float) -> float:
    """``value`` rounded to float32; beyond its range, infinity.

    Example:
        >>> single(0.1), single(1e300)
        (0.10000000149011612, inf)
    """
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
        self.order = memory_order(tensors[0])
        self.tensors = tensors
        self.flats = [flatten(tensor, self.order) for tensor in tensors]

    def parts(self, part: slice) -> list[Tensor]:
        return [flat.values[part] for flat in self.flats]

    def write_back(self) -> None:
        for flat, tensor in zip(self.flats, self.tensors, strict=True):
            write_back(flat, tensor, self.order)


def lerp(start: Tensor, end: Tensor, weight: float) -> Tensor:
    """torch.lerp's two formulas, each operation rounded. ``weight`` fits float32.

    Example:
        >>> lerp(torch.zeros(1), torch.ones(1), 0.25)
        tensor([0.2500])
    """
    step = end - start
    return start + step * weight if weight < 0.5 else end - step * single(1.0 - weight)


def step(
    reference: Callable[[Tensor, Tensor, list[Tensor], Any, float, bool], None],
    grad: Tensor,
    master: Tensor,
    state: Sequence[Tensor],
    one: OneStep,
) -> None:
    """One step of one tensor.

    Args:
        reference: of a :class:`.formulas.Formula`.
        grad: float16, bfloat16 or float32, as stored. Read only.
        master: float32. Written.
        state: float32 tensors of its shape. Written.
        one: what it is stepped with.
    """
    views = _Views(master, *state)
    source = flatten(grad, views.order).values
    for part in slabs(source.numel()):
        p, *kept = views.parts(part)
        gradient = _gradient(source[part], one.factors, one.options.maximize)
        reference(gradient, p, kept, one.options, one.t, one.first)
    views.write_back()


@contextlib.contextmanager
def whole(
    row: int, master: Tensor, model: Tensor | None, stats: CastStats | None, number: int = 0, piece: Piece = WHOLE
) -> Iterator[Tensor]:
    """A master in float32 to be stepped within, and then rounded into its 16-bit parameter, where it has one.

    Args:
        row: of ``stats``.
        master: float32, or the int16 or int8 remainder of a split one.
        model: float16 or bfloat16, or None.
        stats: as for :func:`fp16opt.kernels.multi_tensor_cast`.
        number: of the step, by which int8 remainders are rounded.
        piece: by whose indices they are.
    """
    if model is None or stats is None:
        yield master
    elif master.dtype in (torch.int16, torch.int8):
        single = torch.empty_like(model, dtype=torch.float32)
        reference_split.join(model, master, single)
        yield single
        reference_split.split(row, single, model, master, stats, number, piece)
    else:
        yield master
        cast(row, master, model, stats)
