"""Loss scalers: how much the loss is multiplied by, and how that number follows the overflows.

FP16 holds nothing under 2**-24, so small gradients vanish. Multiplying the loss by a scale before backward
lifts every gradient, and the optimizer divides by the same scale afterwards. A scaler owns that number. It
never sees a gradient: after each step it is told whether one was inf or nan.
"""

from __future__ import annotations

import abc
import ctypes
import functools
import math
from collections.abc import Mapping
from numbers import Integral, Real
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

__all__ = ["DynamicLossScaler", "LossScaleError", "LossScaler", "StaticLossScaler"]

# Between these two, 1/scale is a finite float32 that is not 0, and exact when the scale is a power of two.
SMALLEST_SCALE = 2.0**-126
LARGEST_SCALE = 2.0**127
_INT32_MAX = 2**31 - 1
_SETTINGS = (
    *("init_scale", "growth_factor", "backoff_factor", "growth_interval"),
    *("hysteresis", "min_scale", "max_scale", "max_consecutive_skips"),
)  # DynamicLossScaler's arguments, attributes and state_dict keys
_POLICIES = ("doubling", "headroom")
# Of policy="headroom": what its state holds, and the numbers of its rule.
_HEADROOM = ("largest", "largest_before", "ceiling", "steps_left", "calibrated")
_ROOM = 2.0**15  # the largest norm, scaled; FP16 ends at 65504
_FIRST_DROP, _NEXT_DROPS = 2.0**10, 2.0**-10
_FIRST_BLOCK, _BLOCK = 8, 64  # finite steps
_RULE = ("growth_factor", "backoff_factor", "growth_interval", "hysteresis", "min_scale", "max_scale")


class LossScaleError(RuntimeError):
    """Too many steps in a row had non-finite gradients: lowering the loss scale does not help."""


class ScaleMemory(NamedTuple):
    """The tensors that a scaler's `update` reads and writes, for a kernel that does the same in one launch."""

    scale: Tensor  # float32, shape []
    trackers: Tensor  # int32: clean steps and skips in a row, shape [2]; of a static scale the skips alone, shape []
    settings: Tensor | None  # float64, shape [6], in the order of _RULE; None for a static scale


class LossScaler(abc.ABC):
    """What the optimizer asks of a loss scaler. Its tensors are 0-dim, on the scaler's device."""

    dynamic: ClassVar[bool]
    """Whether `update` ever changes the scale."""

    max_consecutive_skips: int | None = None
    """The optimizer raises `LossScaleError` at this many non-finite steps in a row. None: never."""

    follows_norms: bool = False
    """Whether `see` is to be called before `update`."""

    is_default: bool = False
    """Whether the user has asked for no scale, and this one of 1 stands in: with FP16 weights that is warned of."""

    generation: int
    """Grows by one when the scale changed or may have: lets 1/scale be cached without reading it."""

    backwards: ClassVar[int] = 0
    """How many have begun, with any scaler."""

    last_backward: int = 0
    """The number, among all, of the last one with this scaler, of any optimizer that it serves."""

    _scale: Tensor
    _known_one: tuple[int, bool] = (-1, False)

    @property
    def scale(self) -> Tensor:
        """The loss scale: float32, shape []. Reading it does not sync.

        A copy: what is read keeps its value (autograd graphs hold it). The scaler's own tensors are written in place,
        so that a CUDA graph that is replayed reads and writes the present ones.
        """
        return self._scale.clone()

    @property
    @abc.abstractmethod
    def consecutive_skips(self) -> Tensor:
        """Non-finite steps in a row, up to now: int32, shape []. Reading it does not sync."""

    @abc.abstractmethod
    def to(self, device: torch.device | str) -> LossScaler:
        """Move the scaler's tensors to ``device``; returns the scaler itself."""

    @abc.abstractmethod
    def set_scale(self, value: float) -> None:
        """Set the scale, and count finite steps from zero again. ValueError where out of range."""

    def is_one(self) -> bool:
        """Whether the scale is static and exactly 1: gradients are true ones. Syncs once for each value of it."""
        if self.dynamic:
            return False
        if self._known_one[0] != self.generation:
            self._known_one = self.generation, float(self.scale) == 1.0
        return self._known_one[1]

    def begin_backward(self) -> None:
        """One with this scaler begins."""
        LossScaler.backwards += 1
        self.last_backward = LossScaler.backwards

    @abc.abstractmethod
    def update(self, found_inf: Tensor) -> None:
        """Take note of one step. ``found_inf``: float32 [], exactly 0.0 or 1.0, any device. No sync."""

    def see(self, norm: Tensor) -> None:  # noqa: B027  # most scalers need not look
        """Take note of a step's gradients, where `follows_norms`. Several calls before `update` count as their largest.

        Args:
            norm: float32, shape [], any device: the largest of the norms of single tensors, unscaled and before a clip,
                the same on every rank. No element is larger. No sync.
        """

    @property
    def memory(self) -> ScaleMemory | None:
        """What a kernel needs to do what `update` does, but for `generation`; None where only `update` can. No sync."""
        return None

    @abc.abstractmethod
    def back_off(self) -> bool:
        """Lower the scale now, whatever hysteresis says. Returns whether it changed. Syncs."""

    @abc.abstractmethod
    def at_floor(self) -> bool:
        """Whether the scale can go no lower. Syncs."""

    @abc.abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """All settings and trackers: numbers and tensors, no references to live ones. Does not sync."""

    @abc.abstractmethod
    def check_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Raise the error that `load_state_dict` would raise. Changes nothing. Syncs."""

    @abc.abstractmethod
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Check, then load settings and trackers. Syncs."""


class StaticLossScaler(LossScaler):
    """A loss scale that stays as it is. Steps with non-finite gradients are still skipped, and counted.

    Args:
        scale: multiplies the loss, as float32; from 2**-126 to 2**127. Powers of two are exact.

    Raises:
        TypeError: ``scale`` is not a number.
        ValueError: ``scale`` is out of range, not finite, or a bool.

    Example:
        >>> scaler = StaticLossScaler(128.0)
        >>> scaler.update(torch.tensor(1.0))
        >>> scaler, int(scaler.consecutive_skips)
        (StaticLossScaler(scale=128.0), 1)
    """

    dynamic = False

    def __init__(self, scale: float = 1.0) -> None:
        value = _scale_number("loss_scale", scale)
        self.generation = 0
        self._scale = torch.tensor(value, dtype=torch.float32, device="cpu")
        self._skips = torch.zeros((), dtype=torch.int32, device="cpu")

    @property
    def consecutive_skips(self) -> Tensor:
        """Non-finite steps in a row, up to now: int32, shape []. Reading it does not sync."""
        return self._skips

    def to(self, device: torch.device | str) -> StaticLossScaler:
        """Move the scaler's tensors to ``device``; returns the scaler itself."""
        self._scale, self._skips = self._scale.to(device), self._skips.to(device)
        self.__dict__.pop("memory", None)
        return self

    def set_scale(self, value: float) -> None:
        """Set the scale. Raises ValueError where it is out of range. Does not sync."""
        self._scale.fill_(_scale_number("loss_scale", value))
        self.generation += 1

    def update(self, found_inf: Tensor) -> None:
        """Count skips in a row; the scale stays. ``found_inf``: float32 [], 0.0 or 1.0. No sync."""
        bad = found_inf.to(self._skips.device, torch.int32)
        self._skips.add_(1).mul_(bad)

    @functools.cached_property
    def memory(self) -> ScaleMemory | None:
        """The scale, which stays, and the skips in a row."""
        is_ours = type(self).update is StaticLossScaler.update
        return ScaleMemory(self._scale, self._skips, None) if is_ours else None

    def back_off(self) -> bool:
        """A static scale never changes: returns False."""
        return False

    def at_floor(self) -> bool:
        """A static scale can go no lower: returns True."""
        return True

    def state_dict(self) -> dict[str, Any]:
        """Keys: type ('static'), scale, consecutive_skips. Does not sync."""
        return {"type": "static", "scale": self._scale.clone(), "consecutive_skips": self._skips.clone()}

    def check_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Raise the error that `load_state_dict` would raise. Changes nothing. Syncs."""
        _read_static(state_dict)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Check, then load. Syncs.

        Raises:
            TypeError, ValueError: a field is missing or wrong, or it is a dynamic scaler's. Nothing changed.
        """
        scale, skips = _read_static(state_dict)
        self._scale.fill_(scale)
        self._skips.fill_(skips)
        self.generation += 1

    def __repr__(self) -> str:
        return f"StaticLossScaler(scale={self._scale.item()})"


class DynamicLossScaler(LossScaler):
    """A loss scale that backs off when gradients overflow and grows again while they don't.

    In plain numbers, ``update(found_inf)`` is::

        if found_inf:
            clean, skips = 0, skips + 1
            if skips >= hysteresis:
                scale = max(scale * backoff_factor, min_scale)
        else:
            clean, skips = clean + 1, 0
            if clean == growth_interval:
                scale, clean = min(scale * growth_factor, max_scale), 0

    Args:
        init_scale: the first scale; in [min_scale, max_scale].
        growth_factor: over 1.
        backoff_factor: between 0 and 1.
        growth_interval: finite steps in a row before the scale grows; at least 1.
        hysteresis: the scale backs off at this many non-finite steps in a row and each one after; at least 1.
        min_scale: the floor; at least 2**-126, so that 1/scale stays finite.
        max_scale: the ceiling; at most 2**127.
        max_consecutive_skips: at this many in a row the optimizer raises `LossScaleError`; None: never.
        policy: "doubling" is the rule above. "headroom" takes the scale from the gradients seen lately, as follows.

    With "headroom" an overflow before the first finite step, and each that follows another, drops the scale to 2**10
    at once, and from there by 2**-10, so that calibration takes one to three steps. From then on the optimizer, which
    sums squares anyway, says the norm of each step's largest tensor; no element is larger. After the first 8 finite
    steps, and then after every 64, the scale becomes the largest power of two at which the largest such norm of this
    block and the one before is at most 2**15: half of what FP16 holds, so that a rise never overflows on gradients like
    those seen. A norm over that lowers the scale before it overflows. Gradients inside of the model may be larger than
    those of parameters: where one overflows, the scale backs off as ever and stays under what overflowed, until
    ``growth_interval`` finite steps lift that ceiling by ``growth_factor``. All of it is in the checkpoint and the same
    on every rank. It costs some operations on single numbers a step and, where masters are spread over ranks, a message
    of 4 bytes.

    Scales and factors are rounded to float32. Scales stay powers of two if init_scale and both factors are.
    The rule is from Micikevicius et al., "Mixed Precision Training" (2018), section 3.2; the names are
    torch.amp.GradScaler's.

    Raises:
        TypeError, ValueError: an argument is no number or integer; it is out of range, not finite, or a bool.

    Example:
        >>> scaler = DynamicLossScaler(init_scale=8.0, growth_interval=2)
        >>> for found_inf in (1.0, 0.0, 0.0):
        ...     scaler.update(torch.tensor(found_inf))
        ...     print(scaler.scale.item())
        4.0
        4.0
        8.0
    """

    dynamic = True
    _wide_factors = False
    _other: Tensor
    _limits: Tensor
    _wrap: Tensor
    _factors: Tensor
    _settings: Tensor

    def __init__(
        self,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        hysteresis: int = 1,
        min_scale: float = 2.0**-14,
        max_scale: float = 2.0**24,
        max_consecutive_skips: int | None = None,
        policy: str = "doubling",
    ) -> None:
        self.policy = _policy("policy", policy)
        self.follows_norms = policy == "headroom"
        self.growth_factor = _factor("growth_factor", growth_factor, 1.0, math.inf)
        self.backoff_factor = _factor("backoff_factor", backoff_factor, 0.0, 1.0)
        self.growth_interval = _count("growth_interval", growth_interval)
        self.hysteresis = _count("hysteresis", hysteresis)
        self.min_scale = _scale_number("min_scale", min_scale)
        self.max_scale = _scale_number("max_scale", max_scale)
        if self.min_scale > self.max_scale:
            raise ValueError(f"min_scale must be at most max_scale, got {min_scale!r} and {max_scale!r}.")
        self.init_scale = self._inside("init_scale", init_scale)
        if max_consecutive_skips is not None:
            max_consecutive_skips = _count("max_consecutive_skips", max_consecutive_skips, optional=True)
        self.max_consecutive_skips = max_consecutive_skips
        self.generation = 0
        self._scale = torch.tensor(self.init_scale, dtype=torch.float32, device="cpu")
        self._trackers = torch.zeros(2, dtype=torch.int32, device="cpu")  # clean steps, skips: both in a row
        self._seen: Tensor | None = None
        self._lately = torch.tensor([0.0, 0.0, self.max_scale, _FIRST_BLOCK, 0.0], dtype=torch.float32, device="cpu")
        self._set_constants()

    def _set_constants(self) -> None:
        """The settings as tensors beside the trackers, most of them as [what clean steps do, what skips do]."""
        wide = torch.float32 if self._trackers.device.type == "mps" else torch.float64
        interval, factors = self.growth_interval, [self.growth_factor, self.backoff_factor]
        self._set_constant("_other", [1.0, 0.0], torch.float32)
        self._set_constant("_limits", [interval, self.hysteresis], torch.int32)
        self._set_constant("_wrap", [interval, _INT32_MAX], torch.int32)
        self._set_constant("_factors", factors, wide if self._wide_factors else torch.float32)
        self._set_constant("_settings", [float(getattr(self, name)) for name in _RULE], wide)
        self.__dict__.pop("memory", None)

    def _set_constant(self, name: str, values: list[float], dtype: torch.dtype) -> None:
        """In place where it is there: a CUDA graph that is replayed reads the present settings."""
        made, known = torch.tensor(values, dtype=dtype, device="cpu"), getattr(self, name, None)
        if known is not None and known.device == self._trackers.device and known.dtype == dtype:
            known.copy_(made)
        else:
            setattr(self, name, made.to(self._trackers.device))

    def _inside(self, name: str, value: object) -> float:
        number = _scale_number(name, value)
        if not self.min_scale <= number <= self.max_scale:
            raise ValueError(
                f"{name} must be from min_scale to max_scale ({self.min_scale!r} to {self.max_scale!r}), "
                f"got {value!r}. Choose another, or construct DynamicLossScaler with other limits."
            )
        return number

    @property
    def consecutive_skips(self) -> Tensor:
        """Non-finite steps in a row, up to now: int32, shape []. Reading it does not sync."""
        return self._trackers[1]

    @property
    def growth_tracker(self) -> Tensor:
        """Finite steps in a row since the scale last changed: int32, shape []. No sync."""
        return self._trackers[0]

    def to(self, device: torch.device | str) -> DynamicLossScaler:
        """Move the scaler's tensors to ``device``; returns the scaler itself."""
        if self._trackers.device != torch.device(device):
            self._scale, self._trackers = self._scale.to(device), self._trackers.to(device)
            self._lately = self._lately.to(device)
            self._set_constants()
        return self

    def set_scale(self, value: float) -> None:
        """Set the scale, and count finite steps from zero again. Does not sync.

        Raises:
            TypeError: ``value`` is not a number.
            ValueError: ``value`` is outside [min_scale, max_scale].
        """
        self._scale.fill_(self._inside("loss_scale", value))
        self._trackers[0] = 0
        self._lately[2].fill_(self.max_scale)
        self.generation += 1

    def update(self, found_inf: Tensor) -> None:
        """Take note of one step, by the rule above. Does not sync.

        Args:
            found_inf: float32, shape [], exactly 0.0 or 1.0, on any device.
        """
        # Both trackers move in each operation, as small tensors cost by the call and not by the element.
        happened = self._other.ne(found_inf.to(self._other.device))  # [clean, skipped]
        self._trackers.add_(1).mul_(happened)
        reached = self._trackers.ge(self._limits)
        factors = torch.where(reached, self._factors, 1.0)
        self._trackers.remainder_(self._wrap)  # growth_interval clean steps count as 0 again
        scale = self._scale * factors.prod() if self.policy == "doubling" else self._moved(happened[0], factors)
        self._scale.copy_(scale).clamp_(self.min_scale, self.max_scale)
        self.generation += 1

    def see(self, norm: Tensor) -> None:
        """See :meth:`LossScaler.see`. A norm that is not finite is not counted."""
        norm = norm.to(self._scale.device, torch.float32)
        norm = torch.where(norm.isfinite(), norm, 0.0)
        self._seen = norm if self._seen is None else torch.maximum(self._seen, norm)

    def _moved(self, clean: Tensor, factors: Tensor) -> Tensor:
        """The scale after a step, by policy "headroom"; what it remembers is brought up to date. No sync.

        Args:
            clean: bool, shape []: the step was finite.
            factors: [the growth factor where the ceiling is to be lifted, the backoff factor where it is to back off],
                1 elsewhere.
        """
        scale, (largest, before, ceiling, left, calibrated) = self._scale, self._lately.unbind()
        seen = torch.zeros_like(scale) if self._seen is None else self._seen
        self._seen = None
        grow, back = factors.to(torch.float32).unbind()
        backs_off = back < 1.0
        backed = scale * back
        first = torch.where(scale > _FIRST_DROP, _FIRST_DROP, scale * _NEXT_DROPS)
        far = (calibrated <= 0) | (self._trackers[1] > self._limits[1])  # nothing is known, or not any more
        dropped = torch.where(far, torch.minimum(backed, first), backed)
        largest = torch.where(clean, torch.maximum(largest, seen), largest)
        norm = torch.maximum(largest, before)
        room = torch.where(norm > 0, _power_of_two(_ROOM / norm), scale)
        left = left - clean.to(left.dtype)
        block_ends = clean & (left <= 0)
        ceiling = torch.where(backs_off, torch.minimum(ceiling, backed), (ceiling * grow).clamp(max=self.max_scale))
        risen = torch.where(norm > 0, torch.minimum(room, ceiling), scale)
        moved = torch.where(block_ends, risen, torch.minimum(scale, room))
        left = torch.where(block_ends | backs_off, float(_BLOCK), left)
        left = torch.where(backs_off & far, float(_FIRST_BLOCK), left)
        before = torch.where(block_ends, largest, before)
        largest = torch.where(block_ends, 0.0, largest)
        calibrated = torch.maximum(calibrated, clean.to(calibrated.dtype))
        self._lately.copy_(torch.stack([largest, before, ceiling, left, calibrated]))
        return torch.where(clean, moved, torch.where(backs_off, dropped, scale))

    @functools.cached_property
    def memory(self) -> ScaleMemory | None:
        """What `update` reads and writes. The rule is written again, bit for bit, in csrc/functors/loss_scale.h."""
        is_ours = type(self).update is DynamicLossScaler.update and self.policy == "doubling"
        return ScaleMemory(self._scale, self._trackers, self._settings) if is_ours else None

    def back_off(self) -> bool:
        """Lower the scale now, whatever hysteresis says; clean steps count from zero. Syncs.

        Returns:
            Whether the scale changed: False at the floor.
        """
        before = self._scale.clone()
        self._scale.copy_(before * self._factors[1]).clamp_(self.min_scale, self.max_scale)
        self._trackers[0] = 0
        self._lately[2].clamp_(max=self._scale.item())
        self.generation += 1
        return bool(self._scale < before)

    def at_floor(self) -> bool:
        """Whether the scale is at ``min_scale``. Syncs."""
        return bool(self._scale.item() <= self.min_scale)

    def state_dict(self) -> dict[str, Any]:
        """Keys: type ('dynamic'), every constructor argument, scale, growth_tracker, consecutive_skips.

        Does not sync: the last three are copies of the tensors. policy is there where it is "headroom", and with it
        headroom: what is known of gradients lately (float32, shape [5]).
        """
        clean, skips = self._trackers.clone()
        lately = {} if self.policy == "doubling" else {"policy": self.policy, "headroom": self._lately.clone()}
        return {
            "type": "dynamic",
            **{name: getattr(self, name) for name in _SETTINGS},
            "scale": self._scale.clone(),
            "growth_tracker": clean,
            "consecutive_skips": skips,
            **lately,
        }

    def check_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Raise the error that `load_state_dict` would raise. Changes nothing. Syncs."""
        _read_dynamic(state_dict)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Check, then load settings and trackers. Syncs.

        Raises:
            TypeError, ValueError: a field is missing or wrong, or it is a static scaler's. Nothing changed.
        """
        loaded = _read_dynamic(state_dict)
        for name in _SETTINGS:
            setattr(self, name, getattr(loaded, name))
        self.policy, self.follows_norms, self._seen = loaded.policy, loaded.follows_norms, None
        self._scale.copy_(loaded._scale)
        self._trackers.copy_(loaded._trackers)
        self._lately.copy_(loaded._lately)
        self._set_constants()
        self.generation += 1

    def __repr__(self) -> str:
        names = _SETTINGS if self.policy == "doubling" else (*_SETTINGS, "policy")
        settings = ", ".join(f"{name}={getattr(self, name)!r}" for name in names)
        return f"DynamicLossScaler({settings}; scale now {self._scale.item()})"


def _number(name: str, value: object) -> float:
    """``value`` as a float32 number, or an error that names it."""
    if value is True or value is False:
        raise ValueError(f"{name} must be a number, got the bool {value!r}.")
    if not isinstance(value, Real):
        raise TypeError(f"{name} must be a number, got {type(value).__name__}.")
    try:
        given = float(value)
    except OverflowError:
        given = math.inf
    if not math.isfinite(given):
        raise ValueError(f"{name} must be a finite number, got {given!r}.")
    return ctypes.c_float(given).value


def _scale_number(name: str, value: object) -> float:
    number = _number(name, value)
    if not SMALLEST_SCALE <= number <= LARGEST_SCALE:
        raise ValueError(f"{name} must be over 0, from 2**-126 to 2**127 so that 1/scale is finite, got {value!r}.")
    return number


def _factor(name: str, value: object, least: float, most: float) -> float:
    number = _number(name, value)
    if not least < number < most:
        raise ValueError(f"{name} must be over {least:g} and under {most:g} in float32, got {value!r}.")
    return number


def _count(name: str, value: object, optional: bool = False, least: int = 1) -> int:
    wanted = f"{name} must be an integer{' or None' if optional else ''}"
    if value is True or value is False:
        raise ValueError(f"{wanted}, got the bool {value!r}.")
    if not isinstance(value, Integral):
        raise TypeError(f"{wanted}, got {type(value).__name__}.")
    count = int(value)
    if not least <= count <= _INT32_MAX:
        raise ValueError(f"{name} must be from {least} to 2**31 - 1, got {count}.")
    return count


def _policy(name: str, value: object) -> str:
    if value not in _POLICIES:
        raise ValueError(f"{name} must be 'doubling' or 'headroom', got {value!r}.")
    return str(value)


def _power_of_two(value: Tensor) -> Tensor:
    """The largest power of two that is not larger; 0 under the normal float32 numbers, inf for inf. Exact, no sync."""
    return value.view(torch.int32).bitwise_and(0x7F800000).view(torch.float32)


def _lately(value: Any) -> Tensor:
    """What a checkpoint says of gradients lately: float32, on the CPU."""
    numbers = value.tolist() if isinstance(value, Tensor) and not value.is_meta else value
    count = len(numbers) if isinstance(numbers, list | tuple) else 0
    if count != len(_HEADROOM) or not all(isinstance(n, int | float) and 0 <= n < math.inf for n in numbers):
        raise ValueError(
            f"scaler state: headroom must be {len(_HEADROOM)} finite numbers ({', '.join(_HEADROOM)}), none negative, "
            f"got {numbers!r}."
        )
    return torch.tensor(numbers, dtype=torch.float32, device="cpu")


def _check_kind(state_dict: object, kind: str) -> None:
    if not isinstance(state_dict, Mapping):
        raise TypeError(f"scaler state must be a dict, got {type(state_dict).__name__}.")
    if "type" not in state_dict:
        raise ValueError("scaler state lacks the key 'type'. Pass the scaler's own state_dict().")
    found = state_dict["type"]
    other = {"dynamic": "DynamicLossScaler()", "static": "StaticLossScaler()"}
    if found == kind:
        return
    if isinstance(found, str) and found in other:
        raise ValueError(
            f"scaler state is of a {found} scaler, but this scaler is {kind}. "
            f"Construct the optimizer with scaler={other[found]} to load it."
        )
    raise ValueError(f"scaler state: type must be 'dynamic' or 'static', got {found!r}.")


def _field(state_dict: Mapping[str, Any], name: str) -> Any:
    """One field; a one-element tensor comes back as a number."""
    if name not in state_dict:
        raise ValueError(f"scaler state lacks the key {name!r}. Pass the scaler's own state_dict().")
    value = state_dict[name]
    if isinstance(value, Tensor):
        if value.numel() != 1 or value.is_meta:
            raise ValueError(f"scaler state: {name} must be one number, got a tensor {list(value.shape)}.")
        return value.item()
    return value


def _read_static(state_dict: Mapping[str, Any]) -> tuple[float, int]:
    _check_kind(state_dict, "static")
    skips = _count("scaler state: consecutive_skips", _field(state_dict, "consecutive_skips"), least=0)
    return _scale_number("scaler state: scale", _field(state_dict, "scale")), skips


def _read_dynamic(state_dict: Mapping[str, Any]) -> DynamicLossScaler:
    """A scaler on the CPU in the state that ``state_dict`` describes: the constructor checks the settings."""
    _check_kind(state_dict, "dynamic")
    settings = {name: _field(state_dict, name) for name in _SETTINGS}
    try:
        loaded = DynamicLossScaler(**settings, policy=state_dict.get("policy", "doubling"))
    except (TypeError, ValueError) as error:
        raise type(error)(f"scaler state: {error}") from None
    clean = _count("scaler state: growth_tracker", _field(state_dict, "growth_tracker"), least=0)
    skips = _count("scaler state: consecutive_skips", _field(state_dict, "consecutive_skips"), least=0)
    if clean >= loaded.growth_interval:
        raise ValueError(f"scaler state: growth_tracker must be under growth_interval, got {clean}.")
    loaded.set_scale(loaded._inside("scaler state: scale", _field(state_dict, "scale")))
    loaded._trackers.copy_(torch.tensor([clean, skips], dtype=torch.int32, device="cpu"))
    if loaded.policy == "headroom":
        if "headroom" not in state_dict:
            raise ValueError("scaler state lacks the key 'headroom'. Pass the scaler's own state_dict().")
        loaded._lately.copy_(_lately(state_dict["headroom"]))
    return loaded
