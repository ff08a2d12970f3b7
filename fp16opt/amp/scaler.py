"""The loss scalers that scripts see: apex's names over the engine's own scalers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from .. import scaling
from ..engine.outcome import update_scale
from ..scaling import LARGEST_SCALE, SMALLEST_SCALE, DynamicLossScaler, StaticLossScaler

_INIT_SCALE = 2.0**16
_WINDOW = 2000


class LossScaler(scaling.LossScaler):
    """One of ``amp._amp_state.loss_scalers``: a view of a ``StaticLossScaler`` or ``DynamicLossScaler``.

    The engine scales with it. Its scale follows at the end of :func:`~fp16opt.amp.scale_loss`, after gradients were
    unscaled with the one they were made with, and not a second time in ``step``.

    Args:
        loss_scale: A number, or "dynamic".
        init_scale, scale_factor, scale_window: Of the dynamic rule.
        min_loss_scale: The floor; None for 2**-14.
        max_loss_scale: The ceiling; None for the largest that float32 allows.

    Raises:
        TypeError, ValueError: A number is out of range.

    Example:
        >>> scaler = LossScaler("dynamic")
        >>> scaler.loss_scale(), scaler._unskipped
        (65536.0, 0)
        >>> scaler._loss_scale = 2.0**20
        >>> scaler.loss_scale()
        1048576.0
    """

    def __init__(
        self,
        loss_scale: float | str,
        init_scale: float = _INIT_SCALE,
        scale_factor: float = 2.0,
        scale_window: int = _WINDOW,
        min_loss_scale: float | None = None,
        max_loss_scale: float | None = 2.0**24,
    ) -> None:
        self.rule: scaling.LossScaler
        if loss_scale == "dynamic":
            ceiling = LARGEST_SCALE if max_loss_scale is None else max_loss_scale
            floor = min(2.0**-14, ceiling) if min_loss_scale is None else max(min_loss_scale, SMALLEST_SCALE)
            first = max(min(ceiling, init_scale), floor)
            self.rule = DynamicLossScaler(
                first, scale_factor, 1.0 / scale_factor, scale_window, min_scale=floor, max_scale=ceiling
            )
        else:
            self.rule = StaticLossScaler(float(loss_scale))
        self._unsettled: Tensor | None = None
        self._found: Tensor | None = None
        self.before = self.rule.scale

    # -- what the engine asks ----------------------------------------------------------------------------------------

    @property
    def dynamic(self) -> bool:  # type: ignore[override]
        """Whether the scale follows the overflows."""
        return self.rule.dynamic

    @property
    def scale(self) -> Tensor:
        """The loss scale: float32, shape []. Reading it does not sync."""
        return self.rule.scale

    @property
    def generation(self) -> int:  # type: ignore[override]
        """Grows by one when the scale changed or may have."""
        return self.rule.generation

    @property
    def consecutive_skips(self) -> Tensor:
        """Overflowing backwards in a row: int32, shape []. Reading it does not sync."""
        return self.rule.consecutive_skips

    def to(self, device: torch.device | str) -> LossScaler:
        """Move the scaler's tensors to ``device``; returns the scaler itself."""
        self.rule.to(device)
        return self

    def set_scale(self, value: float) -> None:
        """Set the scale, and count clean backwards from zero again."""
        self.rule.set_scale(value)

    def update(self, found_inf: Tensor) -> None:
        """The engine's step tells what it found. It was taken note of when ``scale_loss`` was left; if not, now."""
        if self._unsettled is not None:
            self.settle(found_inf)

    def settle(self, found_inf: Tensor) -> None:
        """A backward's gradients were unscaled and checked: the scale follows. No sync.

        Args:
            found_inf: float32, 0-dim, 0.0 or 1.0.
        """
        if self._unsettled is not None:
            found_inf = torch.maximum(self._unsettled.to(found_inf.device), found_inf)
            self._unsettled = None
        self.before = self.rule.scale
        self._found = found_inf.clone()  # it may be a buffer of the kernels, which the next backward overwrites
        update_scale(self.rule, found_inf)

    def postpone(self, found_inf: Tensor) -> None:
        """As :meth:`settle`, but the scale follows at the next one, or in ``step`` (``delay_overflow_check``)."""
        earlier = self._unsettled
        self._found = found_inf if earlier is None else torch.maximum(earlier.to(found_inf.device), found_inf)
        self._unsettled = self._found.clone()

    def back_off(self) -> bool:
        """A closure's evaluation overflowed: whether the scale went down for it when ``scale_loss`` was left. Syncs."""
        return bool(self.rule.scale < self.before)

    def at_floor(self) -> bool:
        """Whether the scale can go no lower. Syncs."""
        return self.rule.at_floor()

    def state_dict(self) -> dict[str, Any]:
        """The engine's scaler's own; ``amp.state_dict()`` has the old format."""
        return self.rule.state_dict()

    def check_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Raise the error that `load_state_dict` would raise."""
        self.rule.check_state_dict(state_dict)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Check, then load what :meth:`state_dict` gave."""
        self.rule.load_state_dict(state_dict)

    # -- what scripts read and write ---------------------------------------------------------------------------------

    def loss_scale(self) -> float:
        """The present scale. Syncs with the device."""
        return float(self.rule.scale)

    @property
    def _loss_scale(self) -> float:
        return float(self.rule.scale)

    @_loss_scale.setter
    def _loss_scale(self, value: float) -> None:
        clean = self._unskipped
        self.rule.set_scale(float(value))
        self._unskipped = clean

    @property
    def _unskipped(self) -> int:
        """Clean backwards since the scale last changed; always 0 with a static scale."""
        return int(self.rule.growth_tracker) if isinstance(self.rule, DynamicLossScaler) else 0

    @_unskipped.setter
    def _unskipped(self, value: int) -> None:
        if isinstance(self.rule, DynamicLossScaler):
            # A count past the window never met it again under apex; here the next clean backward grows the scale.
            self.rule.growth_tracker.fill_(min(int(value), self.rule.growth_interval - 1))

    @property
    def _scale_seq_len(self) -> int:
        """Clean backwards in a row before a dynamic scale grows."""
        return self.rule.growth_interval if isinstance(self.rule, DynamicLossScaler) else _WINDOW

    @_scale_seq_len.setter
    def _scale_seq_len(self, value: int) -> None:
        if isinstance(self.rule, DynamicLossScaler):
            state = {**self.rule.state_dict(), "growth_interval": value}
            if isinstance(value, int) and value > 0:
                state["growth_tracker"] = min(self._unskipped, value - 1)
            self.rule.load_state_dict(state)

    @property
    def _max_loss_scale(self) -> float:
        return self.rule.max_scale if isinstance(self.rule, DynamicLossScaler) else self.loss_scale()

    @property
    def _min_loss_scale(self) -> float | None:
        return self.rule.min_scale if isinstance(self.rule, DynamicLossScaler) else None

    @property
    def overflowed(self) -> bool:
        """Whether the last checked backward overflowed; ``_has_overflow`` is apex's name for it. Syncs."""
        return self._found is not None and bool(self._found)

    @overflowed.setter
    def overflowed(self, value: bool) -> None:
        self._found = torch.tensor(float(value), dtype=torch.float32, device="cpu")

    _has_overflow = overflowed

    def clear_overflow_state(self) -> None:
        """Forget whether the last backward overflowed."""
        self._found = None

    def unscale(
        self, model_grads: Iterable[Tensor], master_grads: Iterable[Tensor], unused_scale: float = 1.0, **_: Any
    ) -> None:
        """``master = model / scale``, in place of what ``master_grads`` hold; notes an overflow. No sync."""
        from .. import kernels

        grads, outs = list(model_grads), list(master_grads)
        if not grads:
            return
        stats = kernels.GradStats.allocate(len(grads), grads[0].device)
        kernels.multi_tensor_unscale(grads, outs, (1.0 / self.scale).to(grads[0].device), stats)
        earlier = self._found
        self._found = stats.found_inf if earlier is None else torch.maximum(earlier, stats.found_inf)

    def update_scale(self) -> bool:
        """Let the scale follow :meth:`unscale`. Returns whether the step should be skipped. Syncs."""
        found = torch.zeros((), dtype=torch.float32, device="cpu") if self._found is None else self._found
        self.settle(found)
        return bool(found)

    # -- checkpoints -------------------------------------------------------------------------------------------------

    def saved(self) -> dict[str, float | int]:
        """The old format's entry: {"loss_scale": float, "unskipped": int}. Syncs."""
        return {"loss_scale": self.loss_scale(), "unskipped": self._unskipped}

    def load_saved(self, entry: Mapping[str, Any]) -> None:
        """Load what :meth:`saved` gave. The scale is moved into this scaler's bounds."""
        scale = float(entry["loss_scale"])
        if isinstance(self.rule, DynamicLossScaler):
            scale = min(max(scale, self.rule.min_scale), self.rule.max_scale)
        self.rule.set_scale(scale)
        self._unskipped = int(entry["unskipped"])

    def __repr__(self) -> str:
        return f"LossScaler({self.rule!r})"
