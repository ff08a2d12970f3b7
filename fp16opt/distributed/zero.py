"""ZeroRedundancyOptimizer inside the wrapper: masters and state of this rank's part of the parameters only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..engine.ranks import Facts
from ..engine.wrapped_step import guard_open, note_step
from .alike import Holders
from .exchange import message_device
from .shards import GroupRanks


def prepare(zero: Any) -> Optimizer:
    """The optimizer of this rank's part, ready for masters.

    ZeRO shares the dicts of its groups with its table of who owns what, by which it broadcasts: masters in there would
    be sent in place of parameters. So the part gets dicts of its own.
    """
    if zero._overlap_with_ddp:
        raise ValueError(
            "optimizer: expected a ZeroRedundancyOptimizer that steps when it is told to, got overlap_with_ddp=True: "
            "it would step before gradients are checked. Construct it without."
        )
    part: Optimizer = zero.optim
    part.param_groups[:] = [{**group, "params": list(group["params"])} for group in part.param_groups]
    return part


def elsewhere(zero: Any, here: list[Tensor]) -> list[Tensor]:
    """The model's parameters that other ranks step."""
    mine = {id(param) for param in here}
    return [param for group in zero.param_groups for param in group["params"] if id(param) not in mine]


class ZeroRanks(GroupRanks):
    """Every parameter is stepped by one rank, and counted there."""

    def __init__(self, zero: Any, facts: Callable[[], Facts]) -> None:
        super().__init__(zero.process_group, message_device(zero.process_group, zero._default_device), facts, zero)
        self._holders = tuple(sorted(torch.distributed.get_process_group_ranks(zero.process_group)))

    def must_hold(self, param: Any) -> Holders:
        """See :class:`GroupRanks`: every rank has the model's parameters."""
        return self._holders


def after_part(zero: Any, copy_down: Callable[[], None], ranks: ZeroRanks) -> None:
    """Have this rank's masters written to the model after its part was stepped: ZeRO then broadcasts the model.

    What the step has written to its groups goes to those that users see only then, and each rank has its own.
    """

    def stepped(*_: Any) -> None:
        ranks.see_step(zero.param_groups, zero.optim.param_groups)
        copy_down()

    hook = zero.optim.register_step_post_hook(stepped)
    zero.optim._optimizer_step_post_hooks.move_to_end(hook.id, last=False)


def run_part(
    zero: Any, round_written: Callable[[], None], part: Any, work: Callable[..., None], *given: object
) -> None:
    """``zero.step()`` with ``work`` in place of the step of its ``part``: ZeRO sends the weights that it has made.

    Args:
        round_written: rounds masters that the user wrote, and that have no gradient, into the model.
        work: called with True (settings may have changed), then with what is ``given``.
    """

    def step(closure: object = None) -> None:
        work(True, *given)
        round_written()

    before = part.__dict__.get("step")
    part.step = step
    note_step(zero)
    try:
        with guard_open(zero):
            zero.step()
    finally:
        part.__dict__.pop("step", None)
        if before is not None:
            part.step = before


def owners(zero: Any) -> dict[int, int]:
    """From ``id(model parameter)`` to the global rank that steps it."""
    ranks = torch.distributed.get_process_group_ranks(zero.process_group)
    return {id(param): ranks[rank] for param, rank in zero._param_to_rank.items()}


def sync(zero: Any, part: Any) -> None:
    """After this rank's part was loaded: its settings go to the groups that users see, and its weights to all ranks."""
    zero._sync_param_groups(part.param_groups, zero.param_groups)  # torch has these two for its own loading only
    zero._sync_params()
