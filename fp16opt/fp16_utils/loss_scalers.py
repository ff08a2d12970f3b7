"""Loss scalers under their old names: thin views of the engine's scalers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from .. import scaling
from .saved_files import engine_scaler

__all__ = ["DynamicLossScaler", "LossScaler", "make_scaler", "view_of"]

_DYNAMIC_ARGS = ("init_scale", "scale_factor", "scale_window", "min_loss_scale", "max_loss_scale")


class Scale(float):
    """A loss scale that is read as ``scaler.loss_scale`` (fp16_utils) and as ``scaler.loss_scale()`` (amp) alike.

    Example:
        >>> Scale(8.0), Scale(8.0)()
        (8.0, 8.0)
    """

    def __call__(self) -> float:
        return float(self)


class LossScaler:
    """A loss scale that stays as it is.

    Args:
        scale: Multiplies the loss; over 0. Powers of two are exact.

    Attributes:
        scaler: The engine's scaler, which holds all there is.

    Raises:
        TypeError, ValueError: ``scale`` is no number, or out of range.

    Example:
        >>> scaler = LossScaler(128.0)
        >>> scaler.has_overflow([torch.nn.Parameter(torch.ones(1))]), scaler.loss_scale
        (False, 128.0)
    """

    scaler: scaling.LossScaler

    def __init__(self, scale: float = 1) -> None:
        self.scaler = scaling.StaticLossScaler(scale)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Also what apex's scalers were pickled as."""
        self.scaler = state["scaler"] if "scaler" in state else engine_scaler(state)

    @property
    def dynamic(self) -> bool:
        """Whether overflows change the scale."""
        return self.scaler.dynamic

    @property
    def cur_scale(self) -> float:
        """The present scale. Reading syncs with the device."""
        return float(self.scaler.scale)

    @cur_scale.setter
    def cur_scale(self, value: float) -> None:
        self.scaler.set_scale(value)

    _loss_scale = cur_scale

    @property
    def loss_scale(self) -> Scale:
        """The present scale, as an attribute or as a call. Reading syncs with the device."""
        return Scale(self.cur_scale)

    def has_overflow(self, params: Iterable[Tensor]) -> bool:
        """Whether any element of any gradient of ``params`` is inf or nan. Syncs with the device."""
        grads = [param.grad for param in params if param.grad is not None]
        values = [grad.coalesce().values() if grad.is_sparse else grad for grad in grads]
        return any(not bool(torch.isfinite(value).all()) for value in values)

    def update_scale(self, overflow: bool) -> None:
        """Take note of one step. ``overflow``: whether its gradients held inf or nan."""
        self.scaler.update(torch.tensor(float(bool(overflow)), dtype=torch.float32, device="cpu"))

    def scale_gradient(self, module: Any, grad_in: tuple[Any, ...], grad_out: tuple[Any, ...]) -> tuple[Any, ...]:
        """A backward hook for modules: the gradients ``grad_in`` times the scale; None stays None."""
        return tuple(None if grad is None else grad * self.scaler.scale.to(grad.device) for grad in grad_in)

    def backward(self, loss: Tensor, retain_graph: bool = False) -> None:
        """``loss.float()`` times the scale, and its backward."""
        torch.autograd.backward(loss.float() * self.scaler.scale.to(loss.device), retain_graph=retain_graph)


class DynamicLossScaler(LossScaler):
    """A loss scale that is divided at each overflow, down to 1, and multiplied after a window without one.

    Args:
        init_scale: The first scale.
        scale_factor: Over 1.
        scale_window: Finite steps in a row before the scale grows; at least 1.

    Raises:
        TypeError, ValueError: An argument is no number, or out of range.

    Example:
        >>> scaler = DynamicLossScaler(init_scale=8.0)
        >>> scaler.update_scale(True)
        >>> scaler.cur_scale
        4.0
    """

    def __init__(self, init_scale: float = 2**32, scale_factor: float = 2.0, scale_window: int = 1000) -> None:
        self.scaler = make_scaler(
            {"init_scale": init_scale, "scale_factor": scale_factor, "scale_window": scale_window},
            floor=1.0,
            ceiling=None,
        )

    @property
    def scale_factor(self) -> float:
        """What the scale is multiplied with when it grows."""
        return float(getattr(self.scaler, "growth_factor", 2.0))

    @property
    def scale_window(self) -> int:
        """Finite steps in a row before the scale grows."""
        return int(getattr(self.scaler, "growth_interval", 0))

    @property
    def _unskipped(self) -> int:
        """Finite steps in a row since the scale last changed. Syncs with the device."""
        return int(getattr(self.scaler, "growth_tracker", 0))


def view_of(scaler: scaling.LossScaler) -> LossScaler:
    """The engine's scaler under the old names."""
    view = object.__new__(DynamicLossScaler if scaler.dynamic else LossScaler)
    view.scaler = scaler
    return view


def make_scaler(
    args: Mapping[str, Any] | None, floor: float = 2.0**-14, ceiling: float | None = 2.0**24
) -> scaling.DynamicLossScaler:
    """The engine's scaler for FP16_Optimizer's ``dynamic_loss_args``.

    Args:
        args: Of init_scale, scale_factor, scale_window, min_loss_scale and max_loss_scale, or None.
        floor: Where ``min_loss_scale`` is not given, or None.
        ceiling: Where ``max_loss_scale`` is not given. None, here or there: as high as 1/scale allows.

    Raises:
        TypeError, ValueError: It is no dict; it has another key; a value is out of range.
    """
    if args is not None and not isinstance(args, Mapping):
        raise TypeError(f"dynamic_loss_args: expected a dict or None, got {type(args).__name__}.")
    given = dict(args or {})
    unknown = sorted(set(map(str, given)) - set(_DYNAMIC_ARGS))
    if unknown:
        raise ValueError(
            f"dynamic_loss_args: expected keys among {', '.join(_DYNAMIC_ARGS)}, got {', '.join(unknown)}. "
            "Leave it out, or correct its name."
        )
    most = given.get("max_loss_scale", ceiling)
    most = scaling.LARGEST_SCALE if most is None else most
    first = given.get("init_scale", 2.0**16)
    least = given.get("min_loss_scale")
    factor = given.get("scale_factor", 2.0)
    _check_numbers({"init_scale": first, "max_loss_scale": most, "scale_factor": factor})
    first = min(first, most)
    return scaling.DynamicLossScaler(
        init_scale=first,
        growth_factor=factor,
        backoff_factor=1.0 / factor,
        growth_interval=given.get("scale_window", 2000),
        min_scale=min(floor, first) if least is None else least,
        max_scale=most,
    )


def _check_numbers(values: dict[str, Any]) -> None:
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise TypeError(f"{name}: expected a number, got {type(value).__name__}.")
        if not value > 0:
            raise ValueError(f"{name}: expected a number over 0, got {value!r}.")
