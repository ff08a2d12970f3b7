"""Networks to 16 bits, their affine batch norms left in FP32: apex.fp16_utils' converters."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["BN_convert_float", "FP16Model", "convert_module", "convert_network", "network_to_half", "tofp16"]


def _stays_float(module: nn.Module) -> bool:
    """Affine batch norms keep FP32 parameters and running statistics."""
    return isinstance(module, nn.modules.batchnorm._BatchNorm) and module.affine


def _half(value: Any) -> Any:
    """A floating tensor in FP16; anything else (indices, masks, flags) as it is."""
    return value.half() if isinstance(value, Tensor) and value.is_floating_point() else value


class tofp16(nn.Module):
    """A layer that casts a floating input to FP16 and leaves others alone.

    Example:
        >>> tofp16()(torch.ones(1)).dtype, tofp16()(torch.ones(1, dtype=torch.long)).dtype
        (torch.float16, torch.int64)
    """

    def forward(self, input: Any) -> Any:
        """``input.half()`` for a floating tensor of any shape and device. No sync."""
        return _half(input)


def BN_convert_float(module: nn.Module) -> nn.Module:
    """Convert all affine batch norms in ``module``, or ``module`` itself, to FP32, in place.

    Returns:
        ``module``. No sync.

    Example:
        >>> BN_convert_float(nn.BatchNorm1d(2).half()).weight.dtype
        torch.float32
    """
    for inner in module.modules():
        if _stays_float(inner):
            inner.float()
    return module


def convert_module(module: nn.Module, dtype: torch.dtype) -> None:
    """Convert what ``module`` itself holds, and not its children: floating parameters, their gradients, and buffers.

    Args:
        module: Changed in place; its Parameters stay the same objects.
        dtype: A floating dtype, FP16 as a rule.

    Raises:
        TypeError: ``dtype`` is no floating dtype.

    Example:
        >>> layer = nn.Linear(2, 2)
        >>> convert_module(layer, torch.float16)
        >>> layer.weight.dtype
        torch.float16
    """
    if not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise TypeError(f"dtype: expected a floating torch.dtype such as torch.float16, got {dtype!r}.")
    for param in module.parameters(recurse=False):
        if param.is_floating_point():
            grad, param.grad = param.grad, None  # a gradient must have its parameter's dtype at any time
            param.data = param.data.to(dtype)
            param.grad = None if grad is None else grad.to(dtype)
    for name, buffer in module._buffers.items():
        if buffer is not None and buffer.is_floating_point():
            module._buffers[name] = buffer.to(dtype)


def convert_network(network: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Convert all of ``network`` but its affine batch norms, in place. Weights of RNNs are laid out anew.

    Args:
        network: Any module; its Parameters stay the same objects.
        dtype: A floating dtype, FP16 as a rule.

    Returns:
        ``network``. No sync.

    Raises:
        TypeError: ``dtype`` is no floating dtype.

    Example:
        >>> net = convert_network(nn.Sequential(nn.Conv1d(1, 2, 1), nn.BatchNorm1d(2)), torch.float16)
        >>> net[0].weight.dtype, net[1].weight.dtype
        (torch.float16, torch.float32)
    """
    for module in network.modules():
        if _stays_float(module):
            continue
        convert_module(module, dtype)
        if isinstance(module, nn.RNNBase):
            module.flatten_parameters()
    return network


def network_to_half(network: nn.Module) -> nn.Sequential:
    """``Sequential(tofp16(), network)``, with the network in FP16 and its affine batch norms in FP32.

    The batch norms are not rounded through FP16 on the way.

    Example:
        >>> network_to_half(nn.Linear(2, 1))(torch.ones(1, 2)).dtype
        torch.float16
    """
    return nn.Sequential(tofp16(), BN_convert_float(convert_network(network, torch.float16)))


class FP16Model(nn.Module):
    """A network in FP16 (affine batch norms in FP32) that casts its floating inputs to FP16.

    Args:
        network: Converted in place; kept as ``.network``.

    Example:
        >>> model = FP16Model(nn.Embedding(4, 2))
        >>> model(torch.tensor([1, 3])).dtype
        torch.float16
    """

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = convert_network(network, torch.float16)

    def forward(self, *inputs: Any) -> Any:
        """Call the network with each floating tensor of ``inputs`` in FP16."""
        return self.network(*map(_half, inputs))
