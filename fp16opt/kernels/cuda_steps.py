"""The one-pass steps on CUDA; see :mod:`.cuda`.

Whatever a step multiplies by and whether it is skipped is read by the kernel, and so are counters of steps and learning
rates that are tensors on the device. Numbers that the host knows lie in front of the table, and are copied to the
device with it, where one of them changed: every step only where the host counts the steps, or changes a learning rate.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from . import cuda, native
from .calls import BEGUN, Call
from .cuda import Table, kernel_of, queue, table_of
from .cuda_rows import MEMBER, Struct

if TYPE_CHECKING:
    from .reference_steps import StepValues


class StepTable(Table):
    """The table of a step, with a member for each entry, and behind these the numbers of the param_groups.

    Attributes:
        groups: where these begin.
        group_count: how many there is room for.
    """

    def __init__(self, call: Call, group: Struct, group_count: int) -> None:
        plan, lists = call.plan, call.plan.operation.width
        self._counters = range(lists, lists + 1) if plan.operation.counters and plan.counts_here else None
        self._group, self._member = group.packer, MEMBER.packer
        self._members: tuple[list[int], list[float]] | None = None
        self._packed_groups = b""
        self.group_count = group_count
        size = len(plan.direct) * self._member.size
        super().__init__(call, size + group_count * self._group.size)
        self.groups = self.more + size

    def point(self, call: Call, flags: bool | Sequence[bool] | None, *given: Any) -> bool:
        """Take in what changed: whether anything did.

        Args:
            call, flags: as for any table.
            given: the fields of each group; by row, which of the groups; the number of each entry's step, where
                the host counts, else nothing.
        """
        moved = super().point(call, flags)
        groups, group_of, numbers = given
        members, size = (list(group_of), numbers), self._member.size
        if members != self._members:
            self._members, moved = members, True
            for k, row in enumerate(self._rows):
                number = numbers[k] if numbers else 0.0
                self._member.pack_into(self.host, self.more + k * size, 0, number, group_of[row])
        if self._counters is not None:
            at = self.address + self.more
            moved = native.put_addresses(call, self._counters, self._places, at, size) or moved
        packed = b"".join([self._group.pack(*group) for group in groups])
        if packed != self._packed_groups:
            self._packed_groups, moved = packed, True
            self.put(self.groups, packed)
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


def launch(call: Call, values: StepValues) -> None:
    """One step of the direct entries, in one launch; decided if the host counts the steps.

    Args:
        call: the lists: grads, masters, those of the state, models where there are statistics, counters where declared.
        values: what they are stepped with. ``options`` are, of each param_group, the learning rate and the other fields
            of the kernel's group.
    """
    plan, stats, options = call.plan, values.stats, values.options
    if not plan.direct and (plan.by_reference or not plan.rows):
        call.returned.append(True)
        return
    kernel, marks = kernel_of(call, None if stats is None else stats.marks)
    stream = cuda.Stream(plan.device)
    kept: list[Tensor] = []
    groups = [(*_rate(o[0], plan.device, kept), *o[1:]) for o in options]
    counters: list[Tensor] = []
    numbers: list[float] = []
    if plan.operation.counters and not plan.counts_here:
        counters = [call.row(row)[-1] for row in plan.direct]
        numbers = (torch.stack([step.reshape(()) for step in counters]) + 1.0).tolist()
    if getattr(plan.compiled, "group_count", 0) != len(options):
        plan.compiled = None
    make = functools.partial(StepTable, group=kernel.group, group_count=len(options))
    table = table_of(call, stream, make, values.first, groups, values.group_of, numbers)
    models = -1 if stats is None else len(plan.operation.lists) - 1
    overflow, memory = None if stats is None else stats.overflow, table.memory
    members, groups_at = memory + table.more, memory + table.groups
    read = (members, memory + table.entries, overflow, models, values.number & 0xFFFFFFFF, groups_at)
    call.returned.append(BEGUN)
    queue(kernel, stream, (*marks, *values.factors, values.found_inf, *read), table)
    stream.hold(kept)
    native.count_writes(call, [] if overflow is None else [overflow])
    if counters:
        torch._foreach_add_(counters, 1.0)
    call.returned.append(True)
