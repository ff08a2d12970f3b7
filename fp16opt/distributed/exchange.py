"""Small exchanges of Python values between ranks: all know what any of them found, before anything else is sent.

gloo sums wrongly in silence, or aborts, where ranks send tensors of different sizes. ``all_gather_object`` sends sizes
first, so what could differ is compared through it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")


def require_process_group(what: str) -> None:
    """Raise unless torch.distributed is initialised."""
    if not (dist.is_available() and dist.is_initialized()):
        raise RuntimeError(
            f"{what} needs a process group and torch.distributed is not initialised. Call "
            "torch.distributed.init_process_group() first, in every process."
        )


def gather(value: Any, group: Any = None) -> list[Any]:
    """``value`` of every rank of ``group``, in rank order; alone, just this one's."""
    if not (dist.is_available() and dist.is_initialized()):
        return [value]
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def together(what: str, work: Callable[[], T], group: Any = None) -> T:
    """Run ``work`` on every rank; if it failed anywhere, raise everywhere.

    Args:
        what: is being done, for the message.
        work: must not communicate, or else communicate like ``torch.distributed.checkpoint``, failing on all ranks.
        group: None for all ranks.

    Raises:
        The error of ``work`` where it failed; elsewhere the first failed rank's type of error, where it is built in,
        with its text, or RuntimeError.
    """
    result: Any = None
    error: Exception | None = None
    try:
        result = work()
    except Exception as raised:
        error = raised
    reports = gather(None if error is None else (_kind(error), str(error)), group)
    if error is not None:
        raise error
    for rank, report in enumerate(reports):
        if report is not None:
            raise report[0](f"{what}: rank {rank} failed: {report[1]}")
    value: T = result
    return value


def _kind(error: Exception) -> type[Exception]:
    for kind in (TypeError, ValueError, FileExistsError, FileNotFoundError):
        if isinstance(error, kind):
            return kind
    return RuntimeError


def message_device(group: Any, fallback: torch.device) -> torch.device:
    """Where a small tensor must lie to be sent through ``group``: on the host if the group can, else ``fallback``."""
    backend = str(dist.get_backend(group))
    if "nccl" not in backend:
        return torch.device("cpu")
    return fallback if fallback.type == "cuda" else torch.device("cuda", torch.cuda.current_device())
