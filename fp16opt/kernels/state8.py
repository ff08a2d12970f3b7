"""The one-pass steps with optimizer state in 8 bits, and the way from FP32 state to codes and back.

Formats: see :mod:`fp16opt.kernels.reference_state8`. A code's rounding depends on the element's index, the number of
the step and the value, and on nothing else; so every backend, thread count and vector width gives the same bits.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from . import reference_state8
from .calls import CallCache, Entries
from .formulas import AdamOptions, SgdOptions
from .pieces import BLOCK, WHOLE, Piece
from .reference_state8 import ratio_limit
from .reference_steps import Factors
from .stats import CastStats
from .steps import NamedStep, StepValues, run_step, steps_of

__all__ = [
    "BLOCK",
    "decode_moments",
    "decode_momentum",
    "encode_moments",
    "encode_momentum",
    "multi_tensor_adam8",
    "multi_tensor_sgd8",
    "named_step",
    "ratio_limit",
]


def _with_limit(o: AdamOptions) -> tuple[Any, ...]:
    return (*o, ratio_limit(o.beta1, o.beta2))


_ADAM = steps_of(
    "multi_tensor_adam8",
    "Adam8",
    AdamOptions,
    reference_state8.adam,
    ("exp_avg_codes", "exp_avg_sq_codes"),
    "adam8",
    counts=True,
    block=BLOCK,
    packed=_with_limit,
)
_SGD = steps_of(
    "multi_tensor_sgd8",
    "Sgd8",
    SgdOptions,
    reference_state8.sgd,
    ("momentum_codes",),
    "sgd8",
    counts=False,
    block=BLOCK,
)


def named_step(names: Collection[str], has_models: bool) -> NamedStep:
    """The step that keeps such state in 8 bits: Adam's, or momentum.

    Args:
        names: of the lists of state.
    """
    if "momentum_codes" in names:
        return NamedStep(_SGD[has_models], ("momentum_codes",), ("momentum_scales",), True)
    codes, behind = ("exp_avg_codes", "exp_avg_sq_codes"), ("exp_avg_sq_scales", "step")
    return NamedStep(_ADAM[has_models], codes, behind, False)


def multi_tensor_adam8(
    grads: Entries,
    masters: Entries,
    exp_avg_codes: Entries,
    exp_avg_sq_codes: Entries,
    scales: Entries,
    steps: Entries,
    options: Sequence[AdamOptions],
    group_of: Sequence[int],
    factors: Factors,
    number: int,
    *,
    models: Entries | None = None,
    stats: CastStats | None = None,
    found_inf: Tensor | None = None,
    pieces: Sequence[Piece] | None = None,
    cache: CallCache | None = None,
) -> None:
    """One Adam or AdamW step of n tensors whose moments are kept in 8 bits, in one pass over their memory.

    Args:
        grads, masters, steps, options, group_of, factors: as for :func:`fp16opt.kernels.steps.multi_tensor_step`.
        exp_avg_codes: n int8 tensors of the same shapes. Written, as all the following.
        exp_avg_sq_codes: n uint8 tensors of the same shapes.
        scales: n contiguous float32 tensors, each of one number for every 128 elements, of a piece's each unit.
        number: of the step, which the rounding of codes goes by; modulo 2**32.
        models, stats, found_inf, pieces, cache: as for :func:`fp16opt.kernels.steps.multi_tensor_step`.

    Raises:
        TypeError: a wrong type or dtype. ValueError: lengths, shapes or devices that differ. Nothing is written then.

    Example:
        >>> master, step = [torch.ones(1)], [torch.zeros(())]
        >>> codes = [torch.zeros(1, dtype=torch.int8)], [torch.zeros(1, dtype=torch.uint8)], [torch.zeros(1)]
        >>> options = [AdamOptions(0.1, 0.9, 0.999, 1e-8, 0.0, True, False)]
        >>> one = torch.tensor(1.0)
        >>> multi_tensor_adam8([torch.ones(1)], master, *codes, step, options, [0], Factors(one, one), 1)
        >>> master[0], codes[1][0]
        (tensor([0.9000]), tensor([255], dtype=torch.uint8))
    """
    found = None if models is None else stats
    values = StepValues(options, group_of, factors, found, found_inf, False, number, pieces)
    lists = (grads, masters, exp_avg_codes, exp_avg_sq_codes, models, scales, steps)
    run_step(_ADAM[models is not None], lists, values, cache)


def multi_tensor_sgd8(
    grads: Entries,
    masters: Entries,
    momentum_codes: Entries,
    scales: Entries,
    options: Sequence[SgdOptions],
    group_of: Sequence[int],
    factors: Factors,
    number: int,
    *,
    first: Sequence[bool],
    models: Entries | None = None,
    stats: CastStats | None = None,
    found_inf: Tensor | None = None,
    pieces: Sequence[Piece] | None = None,
    cache: CallCache | None = None,
) -> None:
    """One SGD step of n tensors whose momentum is kept in 8 bits, in one pass over their memory.

    Args:
        grads, masters, options, group_of, factors: as for :func:`fp16opt.kernels.steps.multi_tensor_step`.
        momentum_codes: n int8 tensors of the same shapes. Written, as ``scales``.
        scales, number: as for :func:`multi_tensor_adam8`.
        first: which of the n hold nothing yet.
        models, stats, found_inf, pieces, cache: as for :func:`fp16opt.kernels.steps.multi_tensor_step`.

    Raises:
        TypeError: a wrong type or dtype. ValueError: lengths, shapes or devices that differ. Nothing is written then.

    Example:
        >>> master, one = [torch.ones(1)], torch.tensor(1.0)
        >>> codes, scales = [torch.zeros(1, dtype=torch.int8)], [torch.zeros(1)]
        >>> options = [SgdOptions(0.25, 0.9, 0.0, 0.0, False, False)]
        >>> multi_tensor_sgd8([torch.ones(1)], master, codes, scales, options, [0], Factors(one, one), 1, first=[True])
        >>> master[0], codes[0]
        (tensor([0.7500]), tensor([127], dtype=torch.int8))
    """
    found = None if models is None else stats
    values = StepValues(options, group_of, factors, found, found_inf, first, number, pieces)
    run_step(_SGD[models is not None], (grads, masters, momentum_codes, models, scales), values, cache)


# -- from FP32 state to codes and back ---------------------------------------------------------------------------------


def encode_moments(
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    exp_avg_codes: Tensor,
    exp_avg_sq_codes: Tensor,
    scales: Tensor,
    limit: float,
    piece: Piece = WHOLE,
) -> None:
    """Write codes of Adam's moments, rounded to nearest. No host sync.

    What :func:`decode_moments` gave is encoded as it was.

    Args:
        exp_avg, exp_avg_sq: float32, of one shape; the latter not negative.
        exp_avg_codes, exp_avg_sq_codes: int8 and uint8 of that shape.
        scales: float32, contiguous, one for every 128 elements of each unit.
        limit: what :func:`ratio_limit` says of the betas.
        piece: by whose units blocks begin anew.

    Example:
        >>> codes = torch.zeros(2, dtype=torch.int8), torch.zeros(2, dtype=torch.uint8), torch.zeros(1)
        >>> encode_moments(torch.tensor([1.0, -0.5]), torch.tensor([4.0, 1.0]), *codes, 8.0)
        >>> codes
        (tensor([ 64, -64], dtype=torch.int8), tensor([255, 180], dtype=torch.uint8), tensor([2.]))
    """
    with torch.no_grad():
        codes = exp_avg_codes, exp_avg_sq_codes, scales
        reference_state8.encode_moments(exp_avg, exp_avg_sq, codes, limit, piece)


def decode_moments(
    exp_avg_codes: Tensor,
    exp_avg_sq_codes: Tensor,
    scales: Tensor,
    limit: float,
    *,
    block: int = BLOCK,
    piece: Piece = WHOLE,
) -> tuple[Tensor, Tensor]:
    """Adam's moments that codes stand for: new float32 tensors in the codes' strides. No host sync.

    Args:
        exp_avg_codes, exp_avg_sq_codes, scales, limit, piece: as for :func:`encode_moments`.
        block: how many elements have one scale: a power of two up to 65,536.

    Example:
        >>> codes = torch.zeros(1, dtype=torch.int8), torch.full((1,), 255, dtype=torch.uint8), torch.full((1,), 2.0)
        >>> decode_moments(*codes, 8.0)
        (tensor([0.]), tensor([4.]))
    """
    with torch.no_grad():
        first, second = (torch.empty_like(exp_avg_codes, dtype=torch.float32) for _ in range(2))
        codes = exp_avg_codes, exp_avg_sq_codes, scales
        reference_state8.decode_moments(codes, limit, first, second, block, piece)
        return first, second


def encode_momentum(momentum_buffer: Tensor, momentum_codes: Tensor, scales: Tensor, piece: Piece = WHOLE) -> None:
    """Write codes of SGD's momentum, rounded to nearest. No host sync.

    Args:
        momentum_buffer: float32.
        momentum_codes: int8 of the same shape.
        piece: as for :func:`encode_moments`.
        scales: float32, contiguous, one for every 128 elements of each unit.

    Example:
        >>> codes, scales = torch.zeros(2, dtype=torch.int8), torch.zeros(1)
        >>> encode_momentum(torch.tensor([4.0, -2.0]), codes, scales)
        >>> codes, scales
        (tensor([ 127, -111], dtype=torch.int8), tensor([4.]))
    """
    with torch.no_grad():
        reference_state8.encode_momentum(momentum_buffer, (momentum_codes, scales), piece)


def decode_momentum(momentum_codes: Tensor, scales: Tensor, *, block: int = BLOCK, piece: Piece = WHOLE) -> Tensor:
    """SGD's momentum that codes stand for: a new float32 tensor in the codes' strides. No host sync.

    Args:
        momentum_codes, scales: as for :func:`encode_momentum`.
        block, piece: as for :func:`decode_moments`.

    Example:
        >>> decode_momentum(torch.tensor([127], dtype=torch.int8), torch.tensor([4.0]))
        tensor([4.])
    """
    with torch.no_grad():
        made = torch.empty_like(momentum_codes, dtype=torch.float32)
        reference_state8.decode_momentum((momentum_codes, scales), made, block, piece)
        return made
