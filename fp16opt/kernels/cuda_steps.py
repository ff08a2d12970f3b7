"""The calls of the one-pass steps into the compiled CUDA module; see :mod:`.cuda`.

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
from .cuda import Queued, Site, Stream

if TYPE_CHECKING:
    from .reference_steps import AdamOptions, Factors, SgdOptions
    from .stats import CastStats


class NumbersSite(Site):
    """The numbers of one call site's steps in the GPU's memory.

    Attributes:
        groups: how many param_groups there is room for.
    """

    def __init__(self, call: Call, is_adam: bool, groups: int) -> None:
        self.groups = groups
        self.table = native.cuda_module().Numbers(call.plan.direct, is_adam, groups)
        self._memory: Tensor | None = None
        self._stream: Stream | None = None


class QueuedStep(Queued):
    """A step ready to be launched.

    Args:
        call: the lists of the step.
        first: for each entry whether its momentum buffer holds nothing yet; None where there are no such.
        is_adam: whether ``groups`` are those of Adam.
        groups: the numbers of each param_group, as the compiled module takes them.
        group_of: the group of each place.
        counted: whether the last list are counters of steps on the device.
        numbers: the number of each entry's step, where there are no counters.
    """

    def __init__(
        self,
        call: Call,
        first: bool | Sequence[bool] | None,
        is_adam: bool,
        groups: list[tuple[Any, ...]],
        group_of: list[int],
        counted: bool = False,
        numbers: Sequence[float] = (),
    ) -> None:
        super().__init__(call, first)
        given = [groups, group_of, native.addresses_of(call) if counted else None, list(numbers)]
        if self._stream.captures:
            site = NumbersSite(call, is_adam, len(groups))
            self.numbers_where = site.place_for_graph(given, None, self._stream, call.owner)
        else:
            site = self._numbers_site(call, is_adam, len(groups))
            try:
                self.numbers_where = site.place(given, None, self._device, self._stream)
            except BaseException:
                call.plan.compiled = None  # what of the numbers arrived is not known
                raise
        self.numbers = site.table

    @property
    def _device(self) -> torch.device:
        return self._call.plan.device

    def _numbers_site(self, call: Call, is_adam: bool, groups: int) -> NumbersSite:
        kept = call.plan.compiled.numbers
        if not isinstance(kept, NumbersSite) or kept.groups != groups:
            kept = call.plan.compiled.numbers = NumbersSite(call, is_adam, groups)
        return kept

    def launch(
        self,
        operation: Any,
        factors: Factors,
        found_inf: Tensor | None,
        stats: CastStats | None,
        more_state: bool,
        also_read: Sequence[Tensor],
    ) -> None:
        """Launch, then hold what the kernel reads and tell autograd what it writes.

        Args:
            operation: of the compiled module.
            more_state: whether the lists have what a plain step has not: amsgrad's, or SGD's buffers.
            also_read: tensors on the device that ``groups`` have the addresses of.
        """
        operation(
            *(self.table, self.where, self._call.plan.count, self.numbers, self.numbers_where),
            *(factors.inv_scale.data_ptr(), factors.coefficient.data_ptr()),
            0 if found_inf is None else found_inf.data_ptr(),
            stats is not None,
            0 if stats is None else stats.overflow.data_ptr(),
            more_state,
        )
        results = [] if stats is None else [stats.overflow]
        self.done([*factors, found_inf, *also_read, *results], results)


def _numbers(
    values: Sequence[float | Tensor], device: torch.device
) -> tuple[list[tuple[float, int, bool]], list[Tensor]]:
    """Learning rates as the compiled module takes them, and the tensors on ``device`` among them. No sync there."""
    found: list[tuple[float, int, bool]] = []
    kept: list[Tensor] = []
    for value in values:
        if not isinstance(value, Tensor) or (value.device.type == "cpu" and device.type != "cpu"):
            found.append((float(value), 0, False))
            continue
        number = value.detach()
        if number.device != device or number.dtype not in (torch.float32, torch.float64):
            number = number.to(device, torch.float64)
        found.append((0.0, number.data_ptr(), number.dtype == torch.float64))
        kept.append(number)
    return found, kept


def adam(
    call: Call,
    options: Sequence[AdamOptions],
    group_of: Sequence[int],
    factors: Factors,
    stats: CastStats | None,
    found_inf: Tensor | None,
) -> None:
    """:func:`fp16opt.kernels.steps.multi_tensor_adam` for the direct entries; decided if the host counts."""
    plan = call.plan
    if not plan.rows:
        return
    lrs, kept = _numbers([o.lr for o in options], plan.device)
    groups = [
        (lr, o.beta1, o.beta2, o.eps, o.weight_decay, o.decoupled, o.maximize)
        for lr, o in zip(lrs, options, strict=True)
    ]
    counters = call.column(len(plan.operation.lists))
    here = plan.counts_here
    numbers = [] if here else (torch.stack([step.reshape(()) for step in counters]) + 1.0).tolist()
    counters = [counters[place] for place in plan.direct]
    groups_of_places = [group_of[row] for row in plan.rows]
    queued = QueuedStep(call, None, True, groups, groups_of_places, here, numbers)
    amsgrad = len(plan.operation.lists) > (4 if stats is None else 5)
    queued.launch(native.cuda_module().adam, factors, found_inf, stats, amsgrad, kept)
    if not here and counters:
        torch._foreach_add_(counters, 1.0)


def sgd(
    call: Call,
    options: Sequence[SgdOptions],
    group_of: Sequence[int],
    first: bool | Sequence[bool],
    factors: Factors,
    stats: CastStats | None,
    found_inf: Tensor | None,
) -> None:
    """:func:`fp16opt.kernels.steps.multi_tensor_sgd` for the direct entries."""
    plan = call.plan
    if not plan.rows:
        return
    lrs, kept = _numbers([o.lr for o in options], plan.device)
    groups = [
        (lr, o.momentum, o.dampening, o.weight_decay, o.nesterov, o.maximize)
        for lr, o in zip(lrs, options, strict=True)
    ]
    queued = QueuedStep(call, first, False, groups, [group_of[row] for row in plan.rows])
    has_momentum = len(plan.operation.lists) > (2 if stats is None else 3)
    queued.launch(native.cuda_module().sgd, factors, found_inf, stats, has_momentum, kept)
