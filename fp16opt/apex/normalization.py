"""apex.normalization: torch's LayerNorm and RMSNorm under the old names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = [
    "FusedLayerNorm",
    "FusedLayerNormAffineFunction",
    "FusedLayerNormFunction",
    "FusedRMSNorm",
    "FusedRMSNormAffineFunction",
    "FusedRMSNormFunction",
    "MixedFusedLayerNorm",
    "MixedFusedRMSNorm",
    "fused_layer_norm",
    "fused_layer_norm_affine",
    "fused_rms_norm",
    "fused_rms_norm_affine",
    "mixed_dtype_fused_layer_norm_affine",
    "mixed_dtype_fused_rms_norm_affine",
]

Shape = int | Sequence[int]


def _sizes(shape: Shape) -> list[int]:
    return [shape] if isinstance(shape, int) else list(shape)


def fused_layer_norm(
    input: Tensor, normalized_shape: Shape, eps: float = 1e-6, memory_efficient: bool = False
) -> Tensor:
    """``F.layer_norm`` without weight and bias."""
    return F.layer_norm(input, _sizes(normalized_shape), eps=eps)


def fused_layer_norm_affine(
    input: Tensor,
    weight: Tensor,
    bias: Tensor,
    normalized_shape: Shape,
    eps: float = 1e-6,
    memory_efficient: bool = False,
) -> Tensor:
    """``F.layer_norm``."""
    return F.layer_norm(input, _sizes(normalized_shape), weight, bias, eps)


def fused_rms_norm(input: Tensor, normalized_shape: Shape, eps: float = 1e-6, memory_efficient: bool = False) -> Tensor:
    """``F.rms_norm`` without weight."""
    return F.rms_norm(input, _sizes(normalized_shape), eps=eps)


def fused_rms_norm_affine(
    input: Tensor, weight: Tensor, normalized_shape: Shape, eps: float = 1e-6, memory_efficient: bool = False
) -> Tensor:
    """``F.rms_norm``."""
    return F.rms_norm(input, _sizes(normalized_shape), weight, eps)


def mixed_dtype_fused_layer_norm_affine(
    input: Tensor,
    weight: Tensor,
    bias: Tensor,
    normalized_shape: Shape,
    eps: float = 1e-6,
    memory_efficient: bool = False,
) -> Tensor:
    """Layer norm of an input in one dtype with a weight in another: computed in the wider, given in the weight's."""
    wide = torch.promote_types(input.dtype, weight.dtype)
    out = F.layer_norm(input.to(wide), _sizes(normalized_shape), weight.to(wide), bias.to(wide), eps)
    return out.to(weight.dtype)


def mixed_dtype_fused_rms_norm_affine(
    input: Tensor, weight: Tensor, normalized_shape: Shape, eps: float = 1e-6, memory_efficient: bool = False
) -> Tensor:
    """RMS norm of an input in one dtype with a weight in another: computed in the wider, given in the weight's."""
    wide = torch.promote_types(input.dtype, weight.dtype)
    return F.rms_norm(input.to(wide), _sizes(normalized_shape), weight.to(wide), eps).to(weight.dtype)


class FusedLayerNorm(nn.LayerNorm):
    """``torch.nn.LayerNorm`` with apex's arguments.

    Example:
        >>> FusedLayerNorm(4)(torch.ones(2, 4)).shape
        torch.Size([2, 4])
    """

    def __init__(
        self, normalized_shape: Any, eps: float = 1e-5, elementwise_affine: bool = True, memory_efficient: bool = False
    ) -> None:
        super().__init__(normalized_shape, eps, elementwise_affine)
        self.memory_efficient = memory_efficient


class FusedRMSNorm(nn.RMSNorm):
    """``torch.nn.RMSNorm`` with apex's arguments, and apex's ``eps`` where none is given.

    Example:
        >>> FusedRMSNorm(4)(torch.ones(2, 4)).shape
        torch.Size([2, 4])
    """

    def __init__(
        self, normalized_shape: Any, eps: float = 1e-5, elementwise_affine: bool = True, memory_efficient: bool = False
    ) -> None:
        super().__init__(normalized_shape, eps, elementwise_affine)
        self.memory_efficient = memory_efficient


class MixedFusedLayerNorm(FusedLayerNorm):
    """A layer norm whose output has its weight's dtype, whatever the input's.

    Example:
        >>> MixedFusedLayerNorm(4)(torch.ones(2, 4).half()).dtype
        torch.float32
    """

    def __init__(self, normalized_shape: Any, eps: float = 1e-5, **kwargs: Any) -> None:
        super().__init__(normalized_shape, eps, **{**kwargs, "elementwise_affine": True})

    def forward(self, input: Tensor) -> Tensor:
        """Normalize ``input`` over the last dimensions."""
        return mixed_dtype_fused_layer_norm_affine(input, self.weight, self.bias, self.normalized_shape, self.eps)


class MixedFusedRMSNorm(FusedRMSNorm):
    """An RMS norm whose output has its weight's dtype, whatever the input's.

    Example:
        >>> MixedFusedRMSNorm(4)(torch.ones(2, 4).half()).dtype
        torch.float32
    """

    def __init__(self, normalized_shape: Any, eps: float = 1e-5, **kwargs: Any) -> None:
        super().__init__(normalized_shape, eps, **{**kwargs, "elementwise_affine": True})

    def forward(self, x: Tensor) -> Tensor:
        """Normalize ``x`` over the last dimensions."""
        return mixed_dtype_fused_rms_norm_affine(x, self.weight, self.normalized_shape, self.eps or 0.0)


class FusedLayerNormFunction:
    """``apply(input, normalized_shape, eps)``."""

    apply = staticmethod(fused_layer_norm)


class FusedLayerNormAffineFunction:
    """``apply(input, weight, bias, normalized_shape, eps)``."""

    apply = staticmethod(fused_layer_norm_affine)


class FusedRMSNormFunction:
    """``apply(input, normalized_shape, eps)``."""

    apply = staticmethod(fused_rms_norm)


class FusedRMSNormAffineFunction:
    """``apply(input, weight, normalized_shape, eps)``."""

    apply = staticmethod(fused_rms_norm_affine)
