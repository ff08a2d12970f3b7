"""The one-pass steps on CUDA; see :mod:`.cuda`.

Whatever a step multiplies by and whether it is skipped is read by the kernel, and so are counters of steps and learning
rates that are tensors on the device. Numbers that the host knows lie in a second small table, which is copied to the
device where one of them changed: every step only where the host counts the steps, or changes a learning rate.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from . import native
from .calls import Call
from .cuda import Copied, current_stream, queue, table_of
from .cuda_rows import KERNELS, MEMBER, Struct

if TYPE_CHECKING:
    from .reference_steps import Factors
    from .stats import CastStats


class Numbers(Copied):
    """What a step is told beyond its tensors: a member for each entry of the table, and behind them the param_groups.

    Attributes:
        groups: where these begin.
        group_count: how many there is room for.
    """

    def __init__(self, call: Call, group: Struct, group_count: int) -> None:
        plan, lists = call.plan, call.plan.operation.tables
        self._direct, self._rows = plan.direct, plan.rows
        self._places = None if len(plan.direct) == len(plan.rows) else plan.direct
        self._counters = range(lists, lists + 1) if plan.operation.counters and plan.counts_here else None
        self._group, self._member = group.packer, MEMBER.packer
        self._members: tuple[list[int], list[float]] | None = None
        self._packed = b""
        self.group_count = group_count
        self.groups = len(plan.direct) * self._member.size
        size = self.groups + group_count * self._group.size
        super().__init__(size, size, size)

    def point(self, call: Call, groups: list[tuple[Any, ...]], group_of: Sequence[int], numbers: list[float]) -> bool:
        """Take in what changed: whether anything did.

        Args:
            groups: the fields of each.
            group_of: by row, which of them.
            numbers: by place, the number of each entry's step, where the host counts; else empty.
        """
        members = list(group_of), numbers
        packed = b"".join([self._group.pack(*group) for group in groups])
        moved = members != self._members or packed != self._packed
        if members != self._members:
            self._members = members
            for k, place in enumerate(self._direct):
                number = numbers[place] if numbers else 0.0
                self._member.pack_into(self.host, k * self._member.size, 0, number, group_of[self._rows[place]])
        if self._counters is not None:
            moved = native.put_addresses(call, self._counters, self._places, self.address, self._member.size) or moved
        if packed != self._packed:
            self.put(self.groups, packed)
            self._packed = packed
        return moved


def _rate(value: float | Tensor, device: torch.device, kept: list[Tensor]) -> tuple[float, int, int]:
    """A learning rate as the kernel reads it; a tensor on ``device`` goes as its address. No sync there."""
    if not isinstance(value, Tensor) or (value.device.type == "cpu" and device.type != "cpu"):
        return float(value), 0, 0
    number = value.detach()
    if number.device != device or number.dtype not in (torch.float32, torch.float64):
        number = number.to(device, torch.float64)
    kept.append(number)
    return 0.0, number.data_ptr(), int(number.dtype == torch.float64)


def launch(
    call: Call,
    name: str,
    options: Sequence[tuple[Any, ...]],
    group_of: Sequence[int],
    factors: Factors,
    stats: CastStats | None,
    found_inf: Tensor | None,
    first: bool | Sequence[bool] | None = None,
    number: int = 0,
) -> None:
    """One step of the direct entries, in one launch; decided if the host counts the steps.

    Args:
        call: the lists: grads, masters, those of the state, models where there are ``stats``, counters where declared.
        name: of the kernel.
        options: of each param_group: the learning rate, then the other fields of the kernel's group.
        group_of: by row, its place in ``options``.
        factors, stats, found_inf: as for :func:`fp16opt.kernels.steps.multi_tensor_adam`.
        first: by row whether its state holds nothing yet; None where the kernel does not ask.
        number: of the step, by which what has few bits is rounded.
    """
    plan = call.plan
    if not plan.direct and (plan.by_reference or not plan.rows):
        return
    kernel, stream = KERNELS[name], current_stream(plan.device)
    kept: list[Tensor] = []
    groups = [(*_rate(o[0], plan.device, kept), *o[1:]) for o in options]
    counters: list[Tensor] = []
    numbers: list[float] = []
    if plan.operation.counters and not plan.counts_here:
        counters = call.column(plan.operation.tables)
        numbers = (torch.stack([step.reshape(()) for step in counters]) + 1.0).tolist()
        counters = [counters[place] for place in plan.direct]
    table = table_of(call, stream, first)
    beside = table.numbers
    if not isinstance(beside, Numbers) or beside.group_count != len(options):
        beside = table.numbers = Numbers(call, kernel.group or Struct("", ""), len(options))
    beside.bring(call, stream, groups, group_of, numbers)
    models = -1 if stats is None else len(plan.operation.lists) - 1
    overflow, members = None if stats is None else stats.overflow, beside.memory
    read = (members, table.memory + table.entries, overflow, models, number & 0xFFFFFFFF, members + beside.groups)
    queue(kernel, stream, (*factors, found_inf, *read), table)
    stream.hold(kept)
    native.count_writes(call, [] if overflow is None else [overflow])
    if counters:
        torch._foreach_add_(counters, 1.0)
