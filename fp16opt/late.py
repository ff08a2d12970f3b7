"""What is found on a device and told later, when it can be read without waiting for the device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .diagnostics import warn_cast, warn_model_write
from .masters import MasterParams
from .shard import Shard


def is_host(device: torch.device) -> bool:
    """Whether tensors on ``device`` can be read at once, without waiting for work that was queued."""
    return device.type == "cpu"


def is_capturing(device: torch.device) -> bool:
    """Whether a CUDA graph is being captured. Then no event may be asked: CUDA would give the capture up."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


@dataclass
class _Waiting:
    """A copy on its way to the host: what it will hold, and an event behind it."""

    shard: Shard
    names: list[str]
    host: Tensor
    event: Any


def begin_copy(flags: Tensor) -> tuple[Tensor, Any] | None:
    """Start a copy to the host and put an event behind it; None where that would wait, or end up in a CUDA graph."""
    if flags.device.type != "cuda" or is_capturing(flags.device):
        return None
    with torch.cuda.device(flags.device):
        host = torch.empty(flags.shape, dtype=flags.dtype, pin_memory=True)
        host.copy_(flags, non_blocking=True)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call,unused-ignore]
        event.record()
    return host, event


class Late:
    """Warnings of what a step found on a device, logged by one of the next steps.

    Nothing waits: a copy of the flags is started, and looked at once it has arrived.
    """

    def __init__(self) -> None:
        self._waiting: list[_Waiting] = []

    def ask(self, params: MasterParams) -> None:
        """Start reading what the last copy to the model, and the look for model writes before it, found. No sync."""
        asked = {id(waiting.shard) for waiting in self._waiting}
        for shard in params.shards:
            if not shard.copied or id(shard) in asked:
                continue
            started = begin_copy(shard.found)
            if started is not None:
                names = [params.names[i] for i in shard.copied]
                self._waiting.append(_Waiting(shard, names, *started))

    def tell(self, warned: set[str]) -> None:
        """Log what has arrived. No sync.

        Args:
            warned: what was warned of; see :func:`fp16opt.diagnostics.warn_cast`.
        """
        if any(is_capturing(waiting.shard.device) for waiting in self._waiting):
            return
        for waiting in [waiting for waiting in self._waiting if waiting.event.query()]:
            self._waiting.remove(waiting)
            overflow, taken = waiting.host.tolist()
            warn_cast([(name, bits) for name, bits in zip(waiting.names, overflow, strict=True) if bits], warned)
            names = [name for name, bit in zip(waiting.names, taken, strict=True) if bit]
            if names:
                waiting.shard.taken.zero_()
                warn_model_write(names)
