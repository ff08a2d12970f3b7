"""How the state of an optimizer that fused kernels step is kept: FP32 tensors, or what a mode makes of it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

from torch import Tensor
from torch.optim import Optimizer

from .fused_registry import FusedStepSpec
from .params import ParamPair


class StateFormat(Protocol):
    """How the state of an optimizer that is stepped by fused kernels is kept.

    Attributes:
        spec: of the wrapped optimizer's class; None where it has none, and only :meth:`convert` is called.
        needs_number: whether steps round state by the number of the step.
    """

    spec: Any
    needs_number: bool

    def spec_for(self, settings: dict[str, Any], model: Tensor) -> FusedStepSpec:
        """How a model's parameter of a group with these settings is stepped; alike on all ranks."""

    def deciding(self, settings: dict[str, Any]) -> tuple[Any, ...]:
        """What of a group's settings decides which state a step needs: a plan holds while this stays equal."""

    def obstacle(self, group: dict[str, Any]) -> str:
        """Why a group can't have state of this format, in words; "" where it can."""

    def convert(self, state: dict[str, Any], settings: dict[str, Any], model: Tensor) -> None:
        """Bring the state of a model's parameter to this format. No host sync."""


class FullState:
    """FP32 tensors of the parameters' shapes under torch's names.

    Args:
        spec: of the wrapped optimizer's class; None where it has none, and only :meth:`convert` is called.
    """

    needs_number = False

    def __init__(self, spec: FusedStepSpec | None) -> None:
        self.spec: Any = spec

    def spec_for(self, settings: dict[str, Any], model: Tensor) -> FusedStepSpec:
        """The class's own."""
        spec: FusedStepSpec = self.spec
        return spec

    def deciding(self, settings: dict[str, Any]) -> tuple[Any, ...]:
        """Names of state tensors."""
        names: tuple[str, ...] = self.spec.state_names(settings)
        return names

    def obstacle(self, group: dict[str, Any]) -> str:
        """Returns "": no obstacle."""
        return ""

    def convert(self, state: dict[str, Any], settings: dict[str, Any], model: Tensor) -> None:
        """No-op: already FP32."""


def convert_all(state_format: StateFormat, pairs: Iterable[ParamPair], optimizer: Optimizer) -> None:
    """Bring all of an optimizer's state to the format in which it is kept. No host sync."""
    for pair in pairs:
        if pair.master in optimizer.state:
            group = optimizer.param_groups[pair.group]
            state_format.convert(optimizer.state[pair.master], group, pair.model)
