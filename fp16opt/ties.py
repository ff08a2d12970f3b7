"""Whether a 16-bit weight is its rounded master, however a tie was rounded."""

from __future__ import annotations

import torch
from torch import Tensor

from . import kernels


def different_bits(a: Tensor, b: Tensor) -> Tensor:
    """Element-wise: whether two 16-bit tensors of one dtype differ in their bits (so -0.0 differs from 0.0)."""
    return a.contiguous().view(torch.int16) != b.contiguous().view(torch.int16)


def written_elements(master: Tensor, rounded: Tensor, model: Tensor) -> Tensor:
    """Element-wise: whether ``model`` has other bits than ``rounded``, its master to the nearest.

    A model that was trained with split masters rounds ties of bfloat16 away from zero: loading it is no write.
    """
    where = different_bits(rounded, model)
    if model.dtype == torch.bfloat16 and bool(where.any()):
        away, rest = torch.empty_like(model), torch.empty_like(model, dtype=torch.int16)
        kernels.multi_tensor_split([master], [away], [rest], kernels.CastStats.allocate(1, model.device))
        where &= different_bits(away, model)
    return where
