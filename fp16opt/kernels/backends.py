"""Which implementation serves a device."""

from __future__ import annotations

from types import ModuleType

import torch

from . import cuda, native

_HOST = torch.device("cpu")


def compiled_for(device: torch.device) -> ModuleType | None:
    """The file that calls the compiled kernels for a device; None where torch operations serve. Does not sync."""
    if device == _HOST or device.type == "cpu":  # asking for the type makes a string by way of a C++ stream
        return native if native.module is not None else None
    return cuda if cuda.serves(device) else None


def captures(device: torch.device) -> bool:
    """Whether work on ``device`` goes into a CUDA graph now. Does not sync.

    Example:
        >>> captures(torch.device("cpu"))
        False
    """
    on_card = device.type == "cuda" or compiled_for(device) is cuda
    return on_card and cuda.Stream(device).captures


def backend(device: torch.device | str) -> str:
    """Which implementation serves tensors on ``device``.

    Args:
        device: a torch device or its name.

    Returns:
        "cpu" and "cuda" for the compiled kernels, "reference" for plain torch operations.

    Example:
        >>> backend("meta")
        'reference'
    """
    served_by = compiled_for(torch.device(device))
    return "reference" if served_by is None else "cpu" if served_by is native else "cuda"
