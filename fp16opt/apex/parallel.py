"""apex.parallel: torch's DistributedDataParallel and SyncBatchNorm under the old names and arguments."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

__all__ = [
    "DistributedDataParallel",
    "SyncBatchNorm",
    "convert_syncbn_model",
    "create_syncbn_process_group",
    "flat_dist_call",
]


class DistributedDataParallel(nn.parallel.DistributedDataParallel):
    """torch's DistributedDataParallel with apex's arguments.

    Parameters and buffers are broadcast from rank 0, and gradients averaged while backward runs. apex's settings of how
    that is done (``message_size``, streams, buffers) are taken and not needed.

    Args:
        module: Wrapped as ``.module``.
        delay_allreduce: Parameters may go unused in a forward pass (torch's ``find_unused_parameters``).
        gradient_average: Must be True.
        The others: ignored.

    Raises:
        ValueError: ``gradient_average=False``, or ``shared_param``, which apex refused too.
    """

    def __init__(
        self,
        module: nn.Module,
        message_size: int = 10000000,
        delay_allreduce: bool = False,
        shared_param: Any = None,
        allreduce_trigger_params: Any = None,
        retain_allreduce_buffers: bool = False,
        allreduce_always_fp32: bool = False,
        num_allreduce_streams: int = 1,
        allreduce_communicators: Any = None,
        gradient_average: bool = True,
        gradient_predivide_factor: float = 1.0,
        gradient_average_split_factor: Any = None,
        prof: bool = False,
    ) -> None:
        if not gradient_average:
            raise ValueError(
                "gradient_average: expected True, got False. Multiply the loss by the number of ranks instead."
            )
        if shared_param is not None:
            raise ValueError("shared_param: expected None. Leave it out; use delay_allreduce=True if need be.")
        super().__init__(module, find_unused_parameters=delay_allreduce)


class SyncBatchNorm(nn.SyncBatchNorm):
    """torch's SyncBatchNorm with apex's arguments.

    Args:
        channel_last: Taken; torch follows the input's memory format.
        fuse_relu: Apply a ReLU to the result.
        The others: as for ``torch.nn.SyncBatchNorm``.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_group: Any = None,
        channel_last: bool = False,
        fuse_relu: bool = False,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats, process_group)
        self.channel_last = channel_last
        self.fuse_relu = fuse_relu

    def forward(self, input: Tensor, z: Tensor | None = None) -> Tensor:
        """Normalize ``input``, add ``z`` where given, apply the ReLU where asked for."""
        out = super().forward(input)
        out = out if z is None else out + z
        return out.relu() if self.fuse_relu else out


def convert_syncbn_model(module: nn.Module, process_group: Any = None, channel_last: bool = False) -> nn.Module:
    """Replace all batch norms by ``torch.nn.SyncBatchNorm``: weights, buffers and train or eval mode are kept.

    Example:
        >>> convert_syncbn_model(nn.Sequential(nn.BatchNorm1d(2)).eval())[0].training
        False
    """
    converted: nn.Module = nn.SyncBatchNorm.convert_sync_batchnorm(module, process_group)  # type: ignore[no-untyped-call]
    return converted


def create_syncbn_process_group(group_size: int) -> Any:
    """A process group of ``group_size`` neighbouring ranks, this one among them. Every rank must call it.

    Args:
        group_size: Must divide the number of ranks; 0 means all of them.

    Returns:
        The group; None for all ranks.

    Raises:
        ValueError: The number of ranks can't be divided so.
    """
    if group_size == 0:
        return None
    ranks = dist.get_world_size()
    if not 0 < group_size <= ranks or ranks % group_size:
        raise ValueError(f"group_size: expected a divisor of the {ranks} ranks, or 0, got {group_size}.")
    groups = [dist.new_group(range(first, first + group_size)) for first in range(0, ranks, group_size)]
    return groups[dist.get_rank() // group_size]


def flat_dist_call(
    tensors: Sequence[Tensor], call: Callable[..., Any], extra_args: Sequence[Any] | None = None
) -> None:
    """Call a collective on tensors laid end to end, one call for each dtype, and copy the results back.

    Args:
        tensors: Changed in place; ``dist.all_reduce`` gives averages, as in apex.
        call: Such as ``dist.all_reduce`` or ``dist.broadcast``.
        extra_args: Passed on after the tensor.
    """
    by_type: dict[str, list[Tensor]] = {}
    for tensor in tensors:
        by_type.setdefault(tensor.type(), []).append(tensor)
    with torch.no_grad():
        for bucket in by_type.values():
            flat = _flatten_dense_tensors(bucket)  # type: ignore[no-untyped-call]
            call(flat, *(extra_args or ()))
            if call is dist.all_reduce:
                flat /= dist.get_world_size()
            parts = _unflatten_dense_tensors(flat, bucket)  # type: ignore[no-untyped-call]
            for tensor, synced in zip(bucket, parts, strict=True):
                tensor.copy_(synced)
