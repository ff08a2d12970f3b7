"""Accelerate's FSDP2 on CPU processes. Accelerate has it for accelerators alone, and passes a plugin over on a CPU."""

from __future__ import annotations

from typing import Any

import accelerate.accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DistributedType


class Sharded(AcceleratorState):
    """What Accelerate's state is where there are accelerators and a plugin."""

    def __init__(self, *args: Any, fsdp_plugin: Any = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if fsdp_plugin is not None:
            self.distributed_type = DistributedType.FSDP
            self.fsdp_plugin = fsdp_plugin
            PartialState._shared_state["distributed_type"] = DistributedType.FSDP


def as_on_accelerators() -> None:
    """From here on, in this process; and what a training before has left is gone."""
    for state in (AcceleratorState, GradientState):
        state._reset_state()
    accelerate.accelerator.AcceleratorState = Sharded
