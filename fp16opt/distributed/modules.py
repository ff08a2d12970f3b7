"""What users hand over, opened: the module inside of its wrappings, the wrapper inside of a trainer's optimizer."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ..engine.arguments import clean
from ..engine.parts import Wrapper, inside, is_wrapper


def wrapper_of(opt: object) -> Wrapper:
    """The wrapper, also where a trainer's optimizer holds it.

    Raises:
        TypeError: it is anything else.
    """
    found: Any = inside(opt)
    if not is_wrapper(found):
        raise TypeError(
            f"opt: expected a fp16opt.MixedPrecisionOptimizer, got {type(opt).__name__}. Wrap the optimizer first."
        )
    wrapper: Wrapper = found
    return wrapper


def uncompiled(model: object) -> object:
    """The module inside of ``torch.compile``."""
    return getattr(model, "_orig_mod", model)  # torch's name for it, which has no public one


def unwrapped(model: nn.Module) -> nn.Module:
    """The module inside of DDP, compiled or not."""
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


def parameter_names(model: nn.Module) -> dict[int, str]:
    """From ``id(parameter)`` to its name, for a module or DDP around it."""
    return {id(param): clean(name) for name, param in with_pieces(model).named_parameters()}
