"""Functions of the user's that cast their inputs under O1."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from ._amp_state import _amp_state
from .handle import NoOpHandle
from .policy import AmpError

__all__ = [
    "float_function",
    "half_function",
    "init",
    "promote_function",
    "register_float_function",
    "register_half_function",
    "register_promote_function",
]

F = TypeVar("F", bound=Callable[..., Any])


def _decorated(function: F, kind: str) -> F:
    if not callable(function):
        raise TypeError(f"{kind}_function: expected a function, got {type(function).__name__}.")
    casting: F = getattr(_amp_state.casts, kind)(function)
    return casting


def half_function(fn: F) -> F:
    """Decorator: FP32 tensors among the arguments are cast to FP16 while O1's casts are on.

    Example:
        >>> @half_function
        ... def fused(x):
        ...     return x
    """
    return _decorated(fn, "half")


def float_function(fn: F) -> F:
    """Decorator: 16-bit tensors among the arguments are cast to FP32 while O1's casts are on."""
    return _decorated(fn, "float")


def promote_function(fn: F) -> F:
    """Decorator: FP16 tensors are cast to the widest floating dtype among the arguments while O1's casts are on."""
    return _decorated(fn, "promote")


def register_half_function(module: Any, name: str) -> None:
    """Have ``module.name`` cast its FP32 inputs to FP16 under O1. Call it before ``initialize``.

    Raises:
        AmpError: ``module`` has no such function (a ``ValueError``).
    """
    _amp_state.casts.register(module, name, "half")


def register_float_function(module: Any, name: str) -> None:
    """Have ``module.name`` cast its 16-bit inputs to FP32 under O1. Call it before ``initialize``.

    Raises:
        AmpError: ``module`` has no such function (a ``ValueError``).
    """
    _amp_state.casts.register(module, name, "float")


def register_promote_function(module: Any, name: str) -> None:
    """Have ``module.name`` cast its inputs to the widest of them under O1. Call it before ``initialize``.

    Raises:
        AmpError: ``module`` has no such function (a ``ValueError``).
    """
    _amp_state.casts.register(module, name, "promote")


def init(enabled: bool = True, *arguments: Any, **settings: Any) -> NoOpHandle:
    """The interface of 2018, for scripts that turn it off.

    Returns:
        A handle whose ``scale_loss`` yields the loss itself.

    Raises:
        AmpError: ``enabled``, where apex raises in the handle's ``scale_loss``. It says what to call.
    """
    if enabled:
        raise AmpError(
            "init: handles were replaced by model, optimizer = amp.initialize(model, optimizer, opt_level='O1') and "
            "amp.scale_loss(loss, optimizer)."
        )
    handle = _amp_state.handle = NoOpHandle()
    return handle
