"""What the two files of scaler tests share."""

from __future__ import annotations

from typing import Any

import torch

from fp16opt.scaling import DynamicLossScaler, LossScaler

# Every field away from its default.
ODD: dict[str, Any] = {
    "init_scale": 48.0,
    "growth_factor": 3.0,
    "backoff_factor": 0.25,
    "growth_interval": 4,
    "hysteresis": 3,
    "min_scale": 0.5,
    "max_scale": 4096.0,
    "max_consecutive_skips": 17,
}


def tell(scaler: LossScaler, *overflows: bool | int) -> None:
    for overflow in overflows:
        scaler.update(torch.tensor(float(overflow)))


def trackers(scaler: DynamicLossScaler) -> tuple[float, int, int]:
    return scaler.scale.item(), int(scaler.growth_tracker), int(scaler.consecutive_skips)
