"""Gradients that nobody cleared between one step and the next: in torch they add up, so they do here.

A parameter's own gradient shows whether it was cleared. Sums that were folded into a master's gradient don't, because
the 16-bit gradient that ``model.zero_grad()`` would clear was freed; so one small gradient of zeros is left instead.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import kernels
from .gradients import MasterGrads
from .masters import HALF_DTYPES


class Kept:
    """Whether the masters' gradients are folded sums of earlier steps that are still to be added to."""

    def __init__(self) -> None:
        self._marked: tuple[Tensor, Tensor, int] | None = None
        self._zeroed = False

    def leave(self, grads: MasterGrads) -> None:
        """A step has used folded sums: see to it that a ``model.zero_grad()`` will be noticed. No host sync."""
        params = grads.params
        held = [params.model[i] for i in params.copied if params.master[i].grad is not None]
        if held:
            param = min(held, key=lambda one: one.numel())
            if param.grad is None:
                param.grad = torch.zeros_like(param, requires_grad=False)
            self._marked = (param, param.grad, param.grad._version)

    def drop(self, zeroed: bool = False) -> None:
        """Gradients were cleared: the masters' are gone, or, where ``zeroed``, zeros that go into the next step."""
        self._marked, self._zeroed = None, zeroed

    def take(self) -> bool:
        """Whether there are sums to be added to, or zeros. Says so once, and takes the mark away."""
        marked, zeroed = self._marked, self._zeroed
        self.drop()
        if marked is None:
            return zeroed
        param, grad, version = marked
        kept = param.grad is grad and grad._version == version
        if kept:
            param.grad = None
        return kept or zeroed


def go_on_folding(grads: MasterGrads) -> None:
    """Add to what the masters' gradients hold."""
    grads.folded = [torch.zeros_like(shard.stats.nonfinite) for shard in grads.params.shards]
    grads._measured = []  # what they hold was measured by nobody


def check(grads: MasterGrads, device: torch.device) -> Tensor | None:
    """Note which gradients that the next backward's are added to are not finite: the passes look at what they add.

    Returns:
        float32, 0-dim, on ``device``: 1.0 where one is not finite. None where nothing was kept. No host sync.
    """
    params = grads.params
    kept = set(params.own) if grads.folded is None else {*params.own, *params.copied}
    kept = {i for i in kept if params.master[i].grad is not None}
    if not kept:
        return None
    found = []
    for number, shard in enumerate(params.shards):
        values = [v if i in kept else None for i, v in zip(shard.index, grads.values(shard), strict=True)]
        outs = [None if value is None else _room_for(value) for value in values]
        stats = kernels.GradStats.allocate(len(values), shard.device)
        with torch.no_grad():
            kernels.multi_tensor_unscale(values, outs, torch.ones((), device=shard.device), stats, write=False)
        shard.stats.nonfinite |= stats.nonfinite
        shard.stats.touched = True
        if grads.folded is not None:
            grads.folded[number] |= stats.nonfinite
        found.append(stats.found_inf.to(device))
    return torch.stack(found).amax()


def _room_for(value: Tensor) -> Tensor:
    """What the pass, which writes nothing, takes for the place to write to."""
    return torch.empty_like(value, dtype=torch.float32) if value.dtype in HALF_DTYPES else value
