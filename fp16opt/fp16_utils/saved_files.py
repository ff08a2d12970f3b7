"""Files that apex's FP16_Optimizer was saved in: read without running anything in them, and put into our terms.

Old apex pickled its live loss scaler into the optimizer's state_dict. ``torch.load(weights_only=True)`` refuses that
class, and ``weights_only=False`` runs whatever a file holds. Here torch's restricted unpickler is used, with empty
stand-ins for apex's three scaler classes admitted for the time of the call.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from .. import scaling
from ..saved_objects import admitted, stand_in

__all__ = ["engine_scaler", "engine_state", "face_state", "load_apex_file"]

KEYS = ("optimizer_state_dict", "fp32_from_fp16")


STAND_INS = (
    stand_in("apex.amp.scaler", "LossScaler"),
    stand_in("apex.fp16_utils.loss_scaler", "LossScaler"),
    stand_in("apex.fp16_utils.loss_scaler", "DynamicLossScaler"),
)


def load_apex_file(file: Any, map_location: Any = "cpu") -> Any:
    """Read a file with a state_dict of apex's FP16_Optimizer in it, by itself or inside a checkpoint.

    Nothing in the file is run: tensors, numbers, strings, containers and apex's loss scalers are read, any other class
    is refused. Give the FP16_Optimizer's part to ``FP16_Optimizer.load_state_dict``.

    Args:
        file: A path or an open binary file.
        map_location: As for ``torch.load``.

    Returns:
        What was saved, its loss scalers as plain objects with their attributes.

    Raises:
        pickle.UnpicklingError: The file holds another class. To admit one that you trust, call
            ``torch.serialization.add_safe_globals`` first.

    Syncs: only where ``map_location`` puts tensors on a device that does.
    """
    with admitted(STAND_INS):
        return torch.load(file, map_location=map_location, weights_only=True)


def engine_scaler(saved: object) -> scaling.LossScaler:
    """The engine's scaler in the state of one of apex's.

    Args:
        saved: apex's scaler (its attributes, or an object that has them), or what ``LossScaler.state_dict`` of the
            engine gave.

    Raises:
        TypeError, ValueError: It is nothing of the kind; or its scale is not a positive, finite number.
    """
    if isinstance(saved, Mapping) and "type" in saved:
        ours = scaling.DynamicLossScaler() if saved["type"] == "dynamic" else scaling.StaticLossScaler()
        ours.load_state_dict(saved)
        return ours
    fields: Mapping[str, Any] = saved if isinstance(saved, Mapping) else getattr(saved, "__dict__", {})
    inner = fields.get("scaler")
    if isinstance(inner, scaling.LossScaler):
        return engine_scaler(inner.state_dict())
    scale = fields.get("_loss_scale", fields.get("cur_scale"))
    if scale is None:
        raise TypeError(
            f"loss_scaler: expected a loss scaler of apex's, got {type(saved).__name__}. Read the file with "
            "load_apex_file, or leave the entry out to keep the optimizer's present scale."
        )
    scale = float(scale)
    if not (math.isfinite(scale) and scale > 0):
        raise ValueError(
            f"loss_scaler: expected a positive, finite scale, got {scale}. Leave the entry out to keep the optimizer's "
            "present scale."
        )
    amp = "_loss_scale" in fields
    if not (fields.get("dynamic", True) if amp else "scale_window" in fields):
        return scaling.StaticLossScaler(scale)
    return _dynamic(fields, scale, amp)


def _dynamic(fields: Mapping[str, Any], scale: float, amp: bool) -> scaling.DynamicLossScaler:
    """apex.amp's scaler, or apex.fp16_utils' one, which counts iterations and has a floor of 1 and no ceiling."""
    if amp:
        window, clean = int(fields.get("_scale_seq_len", 2000)), int(fields.get("_unskipped", 0))
        factor, least, most = 2.0, fields.get("_min_loss_scale"), fields.get("_max_loss_scale")
    else:
        window, factor = int(fields["scale_window"]), float(fields.get("scale_factor", 2.0))
        clean = int(fields.get("cur_iter", 0)) - 1 - int(fields.get("last_overflow_iter", -1))
        least, most = 1.0, None
    least = 2.0**-14 if least is None else float(least)
    ours = scaling.DynamicLossScaler(
        init_scale=scale,
        growth_factor=factor,
        backoff_factor=1.0 / factor,
        growth_interval=window,
        min_scale=min(least, scale),
        max_scale=scaling.LARGEST_SCALE if most is None else max(float(most), scale),
    )
    return _counted(ours, clean % window)


def _counted(scaler: scaling.DynamicLossScaler, clean: int) -> scaling.DynamicLossScaler:
    scaler.load_state_dict({**scaler.state_dict(), "growth_tracker": clean})
    return scaler


def face_state(engine_state: Mapping[str, Any], group_sizes: Sequence[int], dynamic: bool, overflow: bool) -> Any:
    """The engine's state_dict under the names that apex's had. Tensors are the same; no live object is in it."""
    masters = iter(engine_state["masters"])
    return {
        "loss_scaler": engine_state["scaler"],
        "dynamic_loss_scale": dynamic,
        "overflow": overflow,
        "first_closure_call_this_step": True,
        "optimizer_state_dict": engine_state["optimizer"],
        "fp32_from_fp16": [
            [master for master in (next(masters) for _ in range(size)) if master is not None] for size in group_sizes
        ],
    }


def engine_state(
    state_dict: Mapping[str, Any], copied: Sequence[Sequence[bool]], scaler: Mapping[str, Any]
) -> dict[str, Any]:
    """A state_dict of FP16_Optimizer's, ours or apex's, in the engine's terms.

    Args:
        state_dict: With apex's keys.
        copied: For each group, whether each of its parameters has a master beside it.
        scaler: The state of the scaler that is to be loaded.

    Raises:
        ValueError: Keys are missing, or there are more or fewer masters than here.
    """
    if "fp32_groups_flat" in state_dict:
        raise ValueError(
            "state_dict: expected masters one by one, got the flat ones of apex.optimizers.FP16_Optimizer (2018-19). "
            "Load the model's weights and start with a new optimizer."
        )
    lacking = [key for key in KEYS if key not in state_dict]
    if lacking:
        raise ValueError(
            f"state_dict: expected the keys {', '.join(KEYS)}, {' and '.join(lacking)} missing. Pass what "
            "FP16_Optimizer.state_dict() gave."
        )
    saved = state_dict["fp32_from_fp16"]
    wanted = [sum(group) for group in copied]
    if [len(group) for group in saved] != wanted:
        raise ValueError(
            f"state_dict: expected FP32 masters for {wanted} parameters in the groups, got "
            f"{[len(group) for group in saved]}. Build and convert the model as it was when the file was saved."
        )
    flat = iter([master for group in saved for master in group])
    return {
        "version": 1,
        "optimizer": state_dict["optimizer_state_dict"],
        "masters": [next(flat) if here else None for group in copied for here in group],
        "scaler": scaler,
    }
