"""The scale of a GradScaler and its settings: torch.amp's names and checkpoints around this library's loss scaler."""

from __future__ import annotations

import copy
import warnings
from collections import defaultdict, deque
from collections.abc import Mapping
from numbers import Real
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState

from ..scaling import LARGEST_SCALE, SMALLEST_SCALE, DynamicLossScaler

_EXTRAS = "fp16opt"  # the key of state_dict that torch's loader does not look at
_EXTRA_SETTINGS = ("min_scale", "max_scale", "hysteresis", "max_consecutive_skips")
_HEADROOM = ("policy", "headroom")  # there where it is not the doubling rule
_HOW_SAVED = "Pass a GradScaler's state_dict()."
_LOSSES = 64  # how many of an iteration's losses are remembered, for the log line of a skip
_TORCH_KEYS = ("scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker")


class _Rule(DynamicLossScaler):
    """DynamicLossScaler with factors in float64, in which torch.amp multiplies: 1.1 is no float32.

    The product is rounded to float32 where it is written to the scale.
    """

    _wide_factors = True

    def set_factors(self, growth_factor: float, backoff_factor: float) -> None:
        self.growth_factor, self.backoff_factor = float(growth_factor), float(backoff_factor)
        self._set_constants()

    def tensors(self) -> tuple[Tensor, Tensor]:
        """(scale, finite steps in a row): not copies, but what :meth:`update` writes."""
        return self._scale, self.growth_tracker


def new_state() -> dict[str, Any]:
    """What torch.amp keeps of an optimizer in one iteration, under torch's keys."""
    return {"stage": OptState.READY, "found_inf_per_device": {}}


def _check_scale(scale: object) -> None:
    if isinstance(scale, Tensor) and scale.numel() != 1:
        raise ValueError(f"state_dict: 'scale' must be one number, got a tensor {list(scale.shape)}. {_HOW_SAVED}")
    if not isinstance(scale, Real | Tensor):
        raise TypeError(f"state_dict: 'scale' must be a number, got {type(scale).__name__}. {_HOW_SAVED}")


class TorchScale(torch.amp.GradScaler):
    """The half of :class:`fp16opt.GradScaler` that knows no gradients. Its docstring says the arguments."""

    _scalings: int = 0  # how often something was scaled
    _allow_16bit_weights: bool = False

    def __init__(
        self,
        device: str = "cuda",
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        *,
        min_scale: float = SMALLEST_SCALE,
        max_scale: float = LARGEST_SCALE,
        hysteresis: int = 1,
        max_consecutive_skips: int | None = None,
        policy: str = "doubling",
        allow_16bit_weights: bool = False,
    ) -> None:
        if not isinstance(allow_16bit_weights, bool):
            raise TypeError(f"allow_16bit_weights: expected True or False, got {type(allow_16bit_weights).__name__}.")
        super().__init__(device, init_scale, growth_factor, backoff_factor, growth_interval, enabled)
        self._allow_16bit_weights = allow_16bit_weights
        if self._enabled:
            self._rule = _Rule(
                *(init_scale, growth_factor, backoff_factor, growth_interval),
                *(hysteresis, min_scale, max_scale, max_consecutive_skips),
                policy=policy,
            )
            self._rule.set_factors(growth_factor, backoff_factor)
            self._per_optimizer_states = defaultdict(new_state)
        self._forget()

    def _forget(self) -> None:
        """Start without what is tied to living optimizers and losses: at construction, and in a copy."""
        self._losses: deque[Tensor] = deque(maxlen=_LOSSES)

    def __repr__(self) -> str:
        name = type(self).__name__
        return f"{name}({self._rule!r})" if self._enabled else f"{name}(enabled=False)"

    # -- the scale, which torch's own methods read under torch's names -------------------------------------------------

    def _lazy_init_scale_growth_tracker(self, dev: torch.device) -> None:
        self._rule.to(dev)
        self._show()
        self._scale = self._rule.scale  # for scale(), which asked

    def _show(self) -> None:
        """Let torch's methods see the scaler's own tensors: a CUDA graph reads and writes the present ones. No sync."""
        self._scale, self._growth_tracker = self._rule.tensors()

    def scale(self, outputs: Any) -> Any:
        """Multiply by the scale: a tensor, or an iterable of tensors and iterables.

        The product keeps the scale of now: a graph that is retained past :meth:`update` runs backward with it.

        Args:
            outputs: On any devices.

        Returns:
            As ``outputs``; the same object where the scaler is disabled. Does not sync.
        """
        if not self._enabled:
            return outputs
        self._scalings += 1
        if isinstance(outputs, Tensor) and outputs.numel() == 1:
            self._losses.append(outputs.detach())
        live = self._scale
        if live is not None:
            self._scale = live.clone()  # which the graph keeps
        try:
            return super().scale(outputs)
        finally:
            if live is not None:
                self._scale = live
            elif self._scale is not None:
                self._show()

    def _set(self, **settings: Any) -> None:
        """Change settings or trackers, through the loss scaler's own checks. Syncs."""
        state = {**self._rule.state_dict(), **settings}
        clean, interval = state["growth_tracker"], state["growth_interval"]
        if isinstance(interval, int) and interval > 0 and isinstance(clean, int | Tensor):
            # torch never grows again where the interval is set below the steps counted already; here the next one does.
            state["growth_tracker"] = min(int(clean), interval - 1)
        self._rule.load_state_dict(state)
        self._rule.set_factors(state["growth_factor"], state["backoff_factor"])
        if self._scale is None:
            self._init_growth_tracker = int(self._rule.growth_tracker)
        else:
            self._show()

    def _change(self, **settings: Any) -> None:
        """:meth:`_set` for a call, not for a dict: the error names the setting alone. Syncs."""
        try:
            self._set(**settings)
        except (TypeError, ValueError) as error:
            raise type(error)(str(error).removeprefix("scaler state: ")) from None

    def set_growth_factor(self, new_factor: float) -> None:
        """Set the growth factor, over 1. Syncs.

        Raises:
            TypeError, ValueError: It is no number, or not over 1.
        """
        self._change(growth_factor=new_factor)
        super().set_growth_factor(new_factor)

    def set_backoff_factor(self, new_factor: float) -> None:
        """Set the backoff factor, between 0 and 1. Syncs.

        Raises:
            TypeError, ValueError: It is no number, or out of range.
        """
        self._change(backoff_factor=new_factor)
        super().set_backoff_factor(new_factor)

    def set_growth_interval(self, new_interval: int) -> None:
        """Set how many finite steps in a row make the scale grow, at least 1. Syncs.

        Where as many were counted already the next finite step makes it grow (under torch it would never grow again).

        Raises:
            TypeError, ValueError: It is no integer, or out of range.
        """
        self._change(growth_interval=new_interval)
        super().set_growth_interval(new_interval)

    def _set_scale(self, new_scale: float | Tensor) -> None:
        if isinstance(new_scale, Tensor):
            if new_scale.numel() != 1 or new_scale.requires_grad or new_scale.device.type != self._device:
                raise AssertionError(
                    f"new_scale: expected a number, or a tensor with one element on a {self._device} device that does "
                    f"not require grad, got shape {tuple(new_scale.shape)} on {new_scale.device}, requires_grad="
                    f"{new_scale.requires_grad}."
                )
            new_scale = float(new_scale)
        clean = self._rule.growth_tracker.clone()
        self._rule.set_scale(new_scale)
        self._rule.growth_tracker.copy_(clean)
        self._show()

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """torch's five entries, and under "fp16opt", which torch's loader ignores, the settings that torch has not.

        Numbers and None only. Empty where the scaler is disabled. Call it after :meth:`update`. Syncs.
        """
        state = super().state_dict()
        if self._enabled:
            extras: dict[str, Any] = {name: getattr(self._rule, name) for name in _EXTRA_SETTINGS}
            state[_EXTRAS] = {**extras, "consecutive_skips": int(self._rule.consecutive_skips)}
            if self._rule.follows_norms:
                lately = self._rule.state_dict()["headroom"].tolist()
                state[_EXTRAS].update(policy=self._rule.policy, headroom=lately)
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what :meth:`state_dict` gave, here or in torch. Validated first. Does nothing where disabled.

        torch's own leaves the settings that torch has not as they are; a scale outside their bounds is moved to the
        nearer one, with a warning.

        Raises:
            RuntimeError: It is empty (saved by a disabled scaler).
            KeyError: One of torch's entries is missing.
            TypeError, ValueError: An entry is of the wrong type or out of range.
        """
        if not self._enabled:
            return
        if not isinstance(state_dict, Mapping):
            raise TypeError(f"state_dict: expected a dict, got {type(state_dict).__name__}.")
        if not state_dict:
            raise RuntimeError(
                "The source state dict is empty, possibly because it was saved from a disabled instance of GradScaler."
            )
        missing = [key for key in _TORCH_KEYS if key not in state_dict]
        if missing:
            raise KeyError(f"state_dict lacks {', '.join(map(repr, missing))}. {_HOW_SAVED}")
        extras = state_dict.get(_EXTRAS, {"consecutive_skips": 0})
        if not isinstance(extras, Mapping):
            raise TypeError(f"state_dict: {_EXTRAS!r} must be a dict, got {type(extras).__name__}. {_HOW_SAVED}")
        extras = {name: extras[name] for name in (*_EXTRA_SETTINGS, "consecutive_skips", *_HEADROOM) if name in extras}
        low, high = (extras.get(name, getattr(self._rule, name)) for name in ("min_scale", "max_scale"))
        scale = state_dict["scale"]
        _check_scale(scale)
        if _EXTRAS not in state_dict and scale > 0.0 and not low <= scale <= high:
            warnings.warn(
                f"the loaded scale {scale:g} is outside [min_scale, max_scale] = [{low:g}, {high:g}]; the nearer of "
                "them is taken.",
                stacklevel=2,
            )
            scale = min(max(scale, low), high)
        shared = {name: state_dict[name] for name in ("growth_factor", "backoff_factor", "growth_interval")}
        clean = state_dict["_growth_tracker"]
        self._set(**extras, **shared, init_scale=scale, scale=scale, growth_tracker=clean)
        self._init_scale = scale
        self._growth_factor, self._backoff_factor, self._growth_interval = shared.values()

    def __getstate__(self) -> dict[str, Any]:
        """As torch's: refuses in the middle of an iteration."""
        state = super().__getstate__()
        if self._enabled:
            state["_rule"] = copy.deepcopy(self._rule).to("cpu")
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._forget()
