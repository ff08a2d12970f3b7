"""The module that holds the parameters, inside of what it was wrapped in."""

from __future__ import annotations

from torch import nn
from torch.nn.parallel import DistributedDataParallel


def uncompiled(model: object) -> object:
    """The module inside of ``torch.compile``."""
    return getattr(model, "_orig_mod", model)


def unwrapped(model: nn.Module) -> nn.Module:
    """The module inside of DDP, be that compiled or not."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: expected a torch.nn.Module, got {type(model).__name__}.")
    inner = uncompiled(model)
    return inner.module if isinstance(inner, DistributedDataParallel) else model


def with_pieces(model: nn.Module) -> nn.Module:
    """:func:`unwrapped`, with its parameters registered as the optimizer knows them. Sends nothing.

    After a forward without backward FSDP2 leaves gathered weights in the outermost module. They would hide the pieces
    from us, and what is loaded into these from the next forward.
    """
    inner = unwrapped(model)
    for module in inner.modules():
        if any(cls.__name__ == "FSDPModule" for cls in type(module).__mro__):
            module.reshard()  # type: ignore[operator]
    return inner
