"""Steps with 8-bit optimizer state, written plainly in torch: the specification of ``csrc/functors/ratio8.h``.

See :mod:`.reference`. Blocks are 128 consecutive elements in the memory order of the codes; they begin anew at each
unit of a :class:`.pieces.Piece`, and a tail acts as if padded with zeros. Adam ("ratio8"): with r = sqrt(v) and S the
block's largest r, v is kept as uint8 c with r = S (c / 255)^2, and m as int8 that stands for m / r. SGD ("block8"): the
momentum is kept as int8 that stands for its share of the block's largest.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch
from torch import Tensor

from . import reference_steps
from .formulas import FORMULAS
from .pieces import BLOCK, WHOLE, Piece
from .reference import SLAB, flatten, memory_order, write_back
from .reference_steps import OneStep

_SATURATED = 64.0  # the limit where the ratio has no bound
_INDEX_STRIDE, _STEP_STRIDE = 0x9E3779B1, 0x85EBCA77
_LARGEST_ROOT, _LEAST_SCALE = 2.0**62, 2.0**-46
_LARGEST_MOMENTUM, _LEAST_MOMENTUM = 2.0**126, 2.0**-100
_LARGEST_MOMENT = torch.finfo(torch.float32).max
_SHARES = float.fromhex("0x1.fe0004p7")
_SHIFT, _ONE_BITS = 19, 0x3F800000


@functools.lru_cache(maxsize=64)
def ratio_limit(beta1: float, beta2: float) -> float:
    """The largest \\|m\\| / sqrt(v) that exact Adam can reach, up to the next power of two.

    From Cauchy and Schwarz: (1 - beta1) / sqrt((1 - beta2) (1 - beta1^2 / beta2)). Where beta1^2 >= beta2 there is no
    bound; then the codes end at 64, and larger ratios are kept as 64.

    Args:
        beta1, beta2: at least 0, less than 1.

    Example:
        >>> ratio_limit(0.9, 0.999), ratio_limit(0.9, 0.95), ratio_limit(0.9, 0.5)
        (8.0, 2.0, 64.0)
    """
    if beta1 * beta1 >= beta2:
        return _SATURATED
    bound = (1.0 - beta1) / math.sqrt((1.0 - beta2) * (1.0 - beta1 * beta1 / beta2))
    return float(2.0 ** math.ceil(math.log2(bound)))


class _Dither(NamedTuple):
    """What rounds elements up or down: 32 bits each, or None for nearest, ties to even."""

    bits: Tensor | None

    @classmethod
    def of(cls, index: Tensor, step: int) -> _Dither:
        return cls((index * _INDEX_STRIDE + (step & 0xFFFFFFFF) * _STEP_STRIDE) & 0xFFFFFFFF)

    def low(self) -> Tensor | int:
        return 1 << 18 if self.bits is None else self.bits & 0x7FFFF

    def round(self, values: Tensor) -> Tensor:
        if self.bits is None:
            return values.round().long()
        return (values + (self.bits >> 16).float() * 2.0**-16).long()


def _single(value: float) -> float:
    return float(torch.tensor(value, dtype=torch.float32, device="cpu"))


def _root(values: Tensor) -> Tensor:
    return values.double().sqrt().float()


def _largest(values: Tensor, block: int = BLOCK) -> Tensor:
    """Of each block."""
    missing = -values.numel() % block
    return torch.nn.functional.pad(values, (0, missing)).view(-1, block).amax(1)


def _each(per_block: Tensor, numel: int, block: int = BLOCK) -> Tensor:
    return per_block.repeat_interleave(block)[:numel]


def _decode_root(codes: Tensor, scales: Tensor, block: int = BLOCK) -> Tensor:
    share = codes.float() * _single(1.0 / 255.0)
    return _each(scales, codes.numel(), block) * (share * share)


def _decode_signed(codes: Tensor, per: Tensor, limit: float) -> Tensor:
    wide = ((codes.long().abs() << _SHIFT) + _ONE_BITS).to(torch.int32).view(torch.float32)
    value = ((wide - 1.0) * (limit * _single(1.0 / 247.0))) * per
    return torch.where(codes < 0, -value, value)


def _encode_signed(values: Tensor, per: Tensor, limit: float, dither: _Dither) -> Tensor:
    values = torch.where(values < _LARGEST_MOMENT, values, _LARGEST_MOMENT)  # a nan has a sign that means nothing
    share = torch.where(per > 0, values.abs() / per, 0.0)
    wide = share * (247.0 * (1.0 / limit)) + 1.0
    bits = wide.contiguous().view(torch.int32).long() & 0x7FFFFFFF
    code = ((bits + dither.low() - _ONE_BITS) >> _SHIFT).clamp(max=127)
    return torch.where(values.signbit(), -code, code)


def _encode_moments(
    first: Tensor, second: Tensor, limit: float, dither: _Dither, codes: tuple[Tensor, Tensor, Tensor]
) -> None:
    """``codes`` of ``first`` and ``second``, one-dimensional, from a multiple of a block on."""
    root = _root(second)
    kept = torch.where(root < _LARGEST_ROOT, root, _LARGEST_ROOT)
    largest = _largest(kept)
    scales = torch.where(largest >= _LEAST_SCALE, largest, 0.0)
    each = _each(scales, kept.numel())
    inverse = _each(torch.where(scales > 0, torch.ones_like(scales) / scales, 0.0), kept.numel())
    shares = dither.round(_root(kept * inverse) * _SHARES).clamp(max=255)
    shares = torch.maximum(shares, (kept > 0).long())
    ratios = _encode_signed(first, kept, limit, dither)
    codes[0].copy_(torch.where(each > 0, ratios, 0))
    codes[1].copy_(torch.where(each > 0, shares, 0))
    codes[2].copy_(scales)


def _encode_momentum(momentum: Tensor, dither: _Dither, codes: Tensor, scales: Tensor) -> None:
    magnitude = momentum.abs()
    largest = _largest(torch.where(magnitude < _LARGEST_MOMENTUM, magnitude, _LARGEST_MOMENTUM))
    scales.copy_(torch.where(largest >= _LEAST_MOMENTUM, largest, 0.0))
    codes.copy_(_encode_signed(momentum, _each(scales, momentum.numel()), 1.0, dither))


class _Codes:
    """Codes of one tensor, flattened in their memory order, with other tensors of its shape.

    Where units are no multiples of a block each is padded with zeros to one: so every block is one of 128 elements.
    """

    def __init__(self, scales: Tensor, *tensors: Tensor, block: int = BLOCK, piece: Piece = WHOLE) -> None:
        self.order = memory_order(tensors[0])
        self.scales = scales
        self.block = block  # a power of two, up to a slab
        self.tensors = tensors
        self.piece = piece
        self.flats = [flatten(tensor, self.order) for tensor in tensors]
        self.unit = piece.unit if piece.unit % block else 0
        self.width = -(-self.unit // block) * block
        self.values = [self._padded(flat.values) for flat in self.flats]

    def _padded(self, flat: Tensor) -> Tensor:
        if not self.unit:
            return flat
        return torch.nn.functional.pad(flat.view(-1, self.unit), (0, self.width - self.unit)).view(-1)

    def like(self, tensor: Tensor) -> Tensor:
        """Another tensor of their shape, laid out as they are."""
        return self._padded(flatten(tensor, self.order).values)

    def parts(self) -> list[tuple[slice, Tensor, list[Tensor]]]:
        """By slab: which elements, their blocks' scales, and the tensors' elements."""
        found = []
        numel = self.values[0].numel()
        for start in range(0, numel, SLAB):
            part = slice(start, min(start + SLAB, numel))
            blocks = slice(start // self.block, -(-part.stop // self.block))
            found.append((part, self.scales[blocks], [values[part] for values in self.values]))
        return found

    def dither(self, part: slice, step: int) -> _Dither:
        """Of the elements of a part, by their indices in the whole."""
        place = torch.arange(part.start, part.stop, dtype=torch.int64, device=self.scales.device)
        if self.unit:  # what is padding gets the index of another element, and nothing is made of it
            place = place // self.width * self.unit + (place % self.width).clamp(max=self.unit - 1)
        return _Dither.of(self.piece.indices(place), step)

    def write_back(self, which: slice = slice(None)) -> None:
        """Into the tensors, or only into some: a tensor that was read alone keeps its version."""
        for flat, values, tensor in list(zip(self.flats, self.values, self.tensors, strict=True))[which]:
            if self.unit:
                flat.values.copy_(values.view(-1, self.width)[:, : self.unit].reshape(-1))
            write_back(flat, tensor, self.order)


def adam(grad: Tensor, master: Tensor, state: list[Tensor], one: OneStep) -> None:
    """One Adam or AdamW step of one tensor.

    Args:
        grad: float16, bfloat16 or float32, as stored. Read only.
        master: float32. Written.
        state: int8 of m, uint8 of v, of the master's shape, and float32 scales. Written.
        one: what it is stepped with.
    """
    limit = ratio_limit(one.options.beta1, one.options.beta2)
    views = _Codes(state[2], state[0], state[1], master, piece=one.piece)
    source = views.like(grad)
    for part, scales, (first, second, single) in views.parts():
        root = _decode_root(second, scales)
        m, v = _decode_signed(first, root, limit), root * root
        reference_steps.step(FORMULAS["adam"].reference, source[part], single, [m, v], one)
        _encode_moments(m, v, limit, views.dither(part, one.number), (first, second, scales))
    views.write_back()


def sgd(grad: Tensor, master: Tensor, state: list[Tensor], one: OneStep) -> None:
    """One SGD step of one tensor with momentum.

    Args:
        grad, master, one: as for :func:`adam`.
        state: int8 of the momentum buffer, and float32 scales. Written.
    """
    views = _Codes(state[1], state[0], master, piece=one.piece)
    source = views.like(grad)
    for part, scales, (shares, single) in views.parts():
        buffer = _decode_signed(shares, _each(scales, shares.numel()), 1.0)
        reference_steps.step(FORMULAS["sgd"].reference, source[part], single, [buffer], one)
        _encode_momentum(buffer, views.dither(part, one.number), shares, scales)
    views.write_back()


def encode_moments(
    exp_avg: Tensor, exp_avg_sq: Tensor, codes: tuple[Tensor, Tensor, Tensor], limit: float, piece: Piece = WHOLE
) -> None:
    """``codes`` of float32 moments, rounded to nearest; see :func:`adam`."""
    views = _Codes(codes[2], codes[0], codes[1], exp_avg, exp_avg_sq, piece=piece)
    for _, scales, (first, second, m, v) in views.parts():
        _encode_moments(m, v, limit, _Dither(None), (first, second, scales))
    views.write_back(slice(2))


def decode_moments(
    codes: tuple[Tensor, Tensor, Tensor],
    limit: float,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    block: int,
    piece: Piece = WHOLE,
) -> None:
    """Write the moments that ``codes`` stand for, with a scale for each ``block`` elements; see :func:`adam`."""
    views = _Codes(codes[2], codes[0], codes[1], exp_avg, exp_avg_sq, block=block, piece=piece)
    for _, scales, (first, second, m, v) in views.parts():
        root = _decode_root(second, scales, block)
        m.copy_(_decode_signed(first, root, limit))
        v.copy_(root * root)
    views.write_back(slice(2, None))


def encode_momentum(momentum_buffer: Tensor, codes: tuple[Tensor, Tensor], piece: Piece = WHOLE) -> None:
    """``codes`` of a float32 momentum buffer, rounded to nearest; see :func:`sgd`."""
    views = _Codes(codes[1], codes[0], momentum_buffer, piece=piece)
    for _, scales, (shares, buffer) in views.parts():
        _encode_momentum(buffer, _Dither(None), shares, scales)
    views.write_back(slice(1))


def decode_momentum(codes: tuple[Tensor, Tensor], momentum_buffer: Tensor, block: int, piece: Piece = WHOLE) -> None:
    """Write the momentum buffer that ``codes`` stand for, with a scale for each ``block`` elements; see :func:`sgd`."""
    views = _Codes(codes[1], codes[0], momentum_buffer, block=block, piece=piece)
    for _, scales, (shares, buffer) in views.parts():
        buffer.copy_(_decode_signed(shares, _each(scales, shares.numel(), block), 1.0))
    views.write_back(slice(1, None))
