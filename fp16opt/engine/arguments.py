"""Checks of what users pass to the engine: which item, what was wanted, what came, what to do."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from torch import Tensor

from ..scaling import DynamicLossScaler, LossScaler, StaticLossScaler

_WRAPPINGS = ("_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module.")
_OF_DDP = "module."


def make_scaler(dynamic: bool, loss_scale: float | None, scaler: LossScaler | None) -> LossScaler:
    """The scaler that the constructor's three ways of asking for one mean."""
    if not isinstance(dynamic, bool):
        raise TypeError(f"dynamic: expected True or False, got {type(dynamic).__name__}.")
    check_scaler(scaler)
    ways = {"dynamic": dynamic, "loss_scale": loss_scale is not None, "scaler": scaler is not None}
    given = [name for name, is_given in ways.items() if is_given]
    if len(given) > 1:
        raise ValueError(f"{' and '.join(given)} were given: each of them chooses the loss scaler. Give one of them.")
    if isinstance(loss_scale, str):
        raise TypeError(f"loss_scale: expected a number, got {loss_scale!r}. For a scale that moves use dynamic=True.")
    if scaler is not None:
        return scaler
    if dynamic:
        return DynamicLossScaler()
    made = StaticLossScaler(1.0 if loss_scale is None else loss_scale)
    made.is_default = loss_scale is None
    return made


def check_scaler(scaler: object) -> None:
    """Raise ``TypeError`` for anything but a ``LossScaler`` or None."""
    if scaler is not None and not isinstance(scaler, LossScaler):
        raise TypeError(f"scaler: expected a fp16opt.LossScaler, got {type(scaler).__name__}.")


def check_choice(name: str, value: object, choices: Sequence[bool | str | None]) -> None:
    """Raise ``ValueError`` where ``value`` is not among ``choices``."""
    if not isinstance(value, (bool, str, type(None))) or value not in choices:  # 1 == True
        raise ValueError(f"{name}: expected one of {', '.join(map(repr, choices))}, got {value!r}.")


def check_number(name: str, value: float, *, above_zero: bool = False) -> float:
    """A float that is not negative, or not 0 either (inf is allowed)."""
    if isinstance(value, bool) or not isinstance(value, (int, float, Tensor)):
        raise TypeError(f"{name}: expected a number, got {type(value).__name__}.")
    number = float(value)
    if math.isnan(number) or number < 0 or (above_zero and number == 0):
        wanted = "positive" if above_zero else "not negative"
        raise ValueError(f"{name}: expected a number that is {wanted}, got {number}.")
    return number


def check_loss(loss: object, scalar: bool = False) -> None:
    """A floating tensor; with ``scalar``, of one element."""
    if not isinstance(loss, Tensor):
        raise TypeError(f"loss: expected a tensor, got {type(loss).__name__}.")
    if not loss.is_floating_point():
        raise TypeError(f"loss: expected a floating dtype, got {loss.dtype}. Compute the loss in float32.")
    if scalar and loss.numel() != 1:
        raise ValueError(
            f"loss: expected one element, got shape {tuple(loss.shape)}. Reduce it, for instance with .mean()."
        )


def clean(name: str) -> str:
    """A parameter's name without what torch.compile, activation checkpointing and FSDP1 add to it.

    Example:
        >>> clean("_orig_mod.fc.weight")
        'fc.weight'
    """
    for part in _WRAPPINGS:
        name = name.replace(part, "")
    return name


def named(named_parameters: Iterable[tuple[str, Tensor]] | None) -> list[tuple[str, Tensor]]:
    """The pairs of ``model.named_parameters()``, checked, by the names that they have in the module itself.

    Example:
        >>> import torch
        >>> [name for name, _ in named([("module._orig_mod.weight", torch.ones(1)), ("module.bias", torch.ones(1))])]
        ['weight', 'bias']
    """
    given = [] if named_parameters is None else named_parameters
    pairs = list(given) if isinstance(given, Iterable) else [given]
    for pair in pairs:
        if not (
            isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], str) and isinstance(pair[1], Tensor)
        ):
            raise TypeError(
                f"named_parameters: expected (name, parameter) pairs, got an item of type {type(pair).__name__}. "
                "Pass model.named_parameters()."
            )
    cleaned = [(clean(name), param) for name, param in pairs]
    if all(name.startswith(_OF_DDP) for name, _ in cleaned):
        return [(name.removeprefix(_OF_DDP), param) for name, param in cleaned]
    return cleaned
