"""Stepping an optimizer on a part of its parameters at a time, each part as one group with the settings of its own."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

T = TypeVar("T")

NOT_SETTINGS = ("params", "param_names")


def settings_of(group: dict[str, Any]) -> dict[str, Any]:
    """What a param group holds besides its parameters and their names."""
    return {key: value for key, value in group.items() if key not in NOT_SETTINGS}


@contextlib.contextmanager
def hooks_muted(optimizer: Optimizer | None = None) -> Iterator[None]:
    """Within, no step hook runs, the optimizer's own or those of all: they belong to a step, not to a part of one."""
    tables: list[dict[Any, Any]] = [_global_optimizer_pre_hooks, _global_optimizer_post_hooks]
    if optimizer is not None:
        own = optimizer.__dict__
        tables += own["_optimizer_step_pre_hooks"], own["_optimizer_step_post_hooks"]
    kept = [(table, dict(table)) for table in tables if table]
    try:
        for table, _ in kept:
            table.clear()
        yield
    finally:
        for table, hooks in kept:
            now = {**hooks, **table}
            table.clear()
            table.update(now)


class BucketSteps:
    """One step of an optimizer, made in parts.

    Every part of a group starts with the settings that the group had before the step, and the group takes those that
    its last part leaves. So an optimizer that counts its steps in the group counts one. Settings that are tensors are
    copied for each part, and the group's own tensors take the last part's values.

    Args:
        optimizer: Its ``param_groups`` list is changed in place while a part is stepped, and put back after it.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._groups = optimizer.param_groups
        self._whole = list(self._groups)
        self._before = list(map(settings_of, self._whole))
        self._after: dict[int, tuple[dict[str, Tensor], dict[str, Any]]] = {}

    def run(self, number: int, params: list[Tensor], step: Callable[[], T]) -> T:
        """Call ``step`` while the optimizer has one group: ``params`` with the settings of group ``number``."""
        part, copies = {**self._before[number], "params": params}, {}
        for key, value in self._before[number].items():
            if isinstance(value, Tensor):
                part[key] = copies[key] = value.clone()
        try:
            self._groups[:] = [part]
            result = step()
            self._after[number] = copies, settings_of(part)
            return result
        finally:
            self._groups[:] = self._whole

    def finish(self) -> None:
        """The groups take the settings that their last parts left."""
        with torch.no_grad():
            for number, (copies, settings) in self._after.items():
                for key, copied in copies.items():
                    if settings.get(key) is copied:
                        settings[key] = self._before[number][key].copy_(copied)
                self._whole[number].update(settings)
