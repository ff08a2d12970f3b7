"""What was found in another library's checkpoint, before it is known whether it fits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor


@dataclass
class Scale:
    """A loss scale and how many clean steps it has behind it."""

    value: float
    clean: int = 0


@dataclass
class Found:
    """Masters, moments and scale in the file's order or by its names.

    Attributes:
        kind: the format.
        weights: by parameter name: FP32 masters where the file has them, else the model's weights.
        masters: of 16-bit parameters alone, for each group, in order; for files that have no names for them.
        state: optimizer state by parameter name; None where ``optimizer`` has it.
        optimizer: of torch's form, by position.
        groups: settings, for each group.
        scale: None where the file has none.
        flat: the state of all parameters in one tensor each, in order.
    """

    kind: str
    weights: dict[str, Tensor] = field(default_factory=dict)
    masters: Sequence[Sequence[Tensor]] | None = None
    state: dict[str, dict[str, Any]] | None = None
    optimizer: Mapping[str, Any] | None = None
    groups: Sequence[Mapping[str, Any]] = ()
    scale: Scale | None = None
    flat: bool = False


def refuse(where: object, what: str, remedy: str) -> ValueError:
    """The error for a file that can't be taken."""
    return ValueError(f"{where}: {what}. {remedy}")


def entry(holder: Any, key: str, where: object, wanted: type = Mapping) -> Any:
    """``holder[key]``, checked."""
    if not isinstance(holder, Mapping) or key not in holder:
        raise refuse(where, f"lacks {key!r}", "Pass a checkpoint as it was saved, or name its kind.")
    if not isinstance(holder[key], wanted):
        kind = type(holder[key]).__name__
        raise refuse(where, f"{key!r} is a {kind}, expected a {wanted.__name__.lower()}", "Pass it as it was saved.")
    return holder[key]


def tensors(holder: Mapping[Any, Any]) -> dict[str, Tensor]:
    """The tensors of a model's state_dict, by name."""
    return {str(name): value for name, value in holder.items() if isinstance(value, Tensor)}


def torch_scale(state: Any) -> Scale | None:
    """Of a torch.amp.GradScaler's state_dict; None for a disabled one's."""
    if not isinstance(state, Mapping) or "scale" not in state:
        return None
    return Scale(float(state["scale"]), int(state.get("_growth_tracker", state.get("growth_tracker", 0))))
