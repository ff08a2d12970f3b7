"""Where a fused step keeps Adam's counters of steps: beside the parameters, where kernels that can skip count them.

torch keeps the counters of groups that are neither ``fused`` nor ``capturable`` on the host. Its own steps take others,
but wait for each; so they go back before torch's own step runs, and in checkpoints.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from .. import kernels


def serves(device: torch.device) -> bool:
    """Whether kernels step parameters on ``device`` that read counters and the decision to skip there. No sync.

    Example:
        >>> serves(torch.device("meta"))
        False
    """
    return kernels.backend(device) == "cuda"


def device_for(group: dict[str, Any], device: torch.device) -> torch.device:
    """Where new counters of a group belong whose parameters are on ``device``."""
    beside = group.get("fused") or group.get("capturable") or serves(device)
    return device if beside else torch.device("cpu")


def bring(state: dict[str, Any], device: torch.device) -> None:
    """Have a parameter's counter on ``device`` where kernels want it there. No sync."""
    step = state.get("step")
    if isinstance(step, Tensor) and step.device != device and serves(device):
        state["step"] = step.to(device, non_blocking=True)


def _stays(group: dict[str, Any]) -> bool:
    return bool(group.get("fused") or group.get("capturable"))


def _is_away(state: dict[str, Any] | None) -> bool:
    step = None if state is None else state.get("step")
    return isinstance(step, Tensor) and step.device.type != "cpu" and step.numel() == 1


def _on_host(steps: list[Tensor]) -> list[Tensor]:
    """Copies on the host, with one wait for each device."""
    found: list[Tensor] = list(steps)
    for device in {step.device for step in steps}:
        places = [k for k, step in enumerate(steps) if step.device == device]
        values = torch.stack([steps[k].reshape(()) for k in places]).cpu()
        for k, value in zip(places, values.unbind(), strict=True):
            found[k] = value.clone().reshape(steps[k].shape)
    return found


def to_host(optimizer: Optimizer) -> None:
    """Before ``optimizer`` steps itself: its counters where torch has them. Syncs where one was elsewhere."""
    groups = [group for group in optimizer.param_groups if not _stays(group)]
    states = [optimizer.state[p] for group in groups for p in group["params"] if _is_away(optimizer.state.get(p))]
    for state, step in zip(states, _on_host([state["step"] for state in states]), strict=True):
        state["step"] = step


def saved(state_dict: dict[str, Any]) -> dict[str, Any]:
    """An optimizer's ``state_dict()`` with the counters where torch has them; the optimizer keeps its own.

    Syncs where one was elsewhere.
    """
    groups = [group for group in state_dict["param_groups"] if not _stays(group)]
    keys = [key for group in groups for key in group["params"] if _is_away(state_dict["state"].get(key))]
    if not keys:
        return state_dict
    states = dict(state_dict["state"])
    for key, step in zip(keys, _on_host([states[key]["step"] for key in keys]), strict=True):
        states[key] = {**states[key], "step": step}
    return {**state_dict, "state": states}
