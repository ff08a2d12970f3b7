"""The optimizer's side of training on several ranks: it looks for signs of it, and calls fp16opt.distributed on them.

Nothing here imports torch.distributed unless parameters or the wrapped optimizer are its own already.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from .engine.params import ParamTable
from .engine.ranks import ELSEWHERE, Digest, Facts, Ranks, refuse_torch_checkpointing
from .engine.wrapped_step import run_hooks


def is_zero(optimizer: object) -> bool:
    """Whether this is a ZeroRedundancyOptimizer."""
    module = sys.modules.get("torch.distributed.optim.zero_redundancy_optimizer")
    return module is not None and isinstance(optimizer, module.ZeroRedundancyOptimizer)


def part_of(optimizer: Any) -> Optimizer:
    """As :func:`inner_of`, before anything is made ready."""
    part: Optimizer = getattr(optimizer, "optim", optimizer) if is_zero(optimizer) else optimizer
    return part


def run_hooks_of(optimizer: Optimizer, round_written: Callable[[], None]) -> Callable[..., None]:
    """What runs a one-pass step in the place of the optimizer's own: see :func:`.engine.wrapped_step.run_hooks`.

    Args:
        round_written: rounds masters that the user wrote into the model, before ZeRO sends it.
    """
    if not is_zero(optimizer):
        return run_hooks
    from .distributed import zero

    return functools.partial(zero.run_part, optimizer, round_written)


def inner_of(optimizer: Optimizer) -> Optimizer:
    """The optimizer that holds what is stepped on this rank: ``optimizer``, or the one inside of ZeRO."""
    if is_zero(optimizer):
        from .distributed import zero

        return zero.prepare(optimizer)
    return optimizer


def device_of(optimizer: Optimizer, masters: list[Tensor]) -> torch.device:
    """Where verdicts are kept: the device of the first parameter, of this rank's or of another's."""
    params = [*masters, *(p for group in optimizer.param_groups for p in group["params"])]
    device: torch.device = params[0].device if params else torch.device("cpu")
    return device


def ranks_of(
    optimizer: Optimizer,
    params: ParamTable,
    names: dict[int, str],
    facts: Callable[[], Facts],
    round_down: Callable[[], None],
) -> Ranks:
    """Who must hear of verdicts and norms.

    Args:
        names: from ``id(parameter)``, those that the user gave.
        facts: what must be the same on every rank. It must not keep the wrapper alive, and neither must ``round_down``.
        round_down: writes this rank's masters into the model.
    """
    if is_zero(optimizer):
        from .distributed import zero

        params.hold_elsewhere(zero.elsewhere(optimizer, params.models), names)
        ranks = zero.ZeroRanks(optimizer, facts)
        zero.after_part(optimizer, round_down, ranks)
        return ranks
    if params.has_dtensors:
        from .distributed import shards

        return shards.MeshRanks(params.models, facts, optimizer)
    return Ranks()


def facts(optimizer: Any) -> Facts:
    """What must be the same on several ranks."""
    from .distributed import facts

    return facts.facts(optimizer)


def digest(optimizer: Any) -> Digest:
    """What ranks that share gradients hold alike."""
    from .distributed import facts

    return facts.digest(optimizer)


def explain(error: BaseException, place: str) -> None:
    """Put into an error of torch.distributed which ranks did other things, as far as they say so."""
    waiting = sys.modules.get(f"{__package__}.distributed.waiting")
    if waiting is not None:
        waiting.explain(error, place)


def refuse_plain_state(alone: bool, what: str) -> None:
    """Raise where masters are spread over ranks, or where torch's checkpointing asks: it can't hold masters."""
    if not alone:
        raise RuntimeError(
            f"{what}: masters and optimizer state are spread over ranks. Use {ELSEWHERE} which go by parameter name."
        )
    refuse_torch_checkpointing(what)


def refuse_on_zero(optimizer: Optimizer, what: str, instead: str) -> None:
    """Raise where the wrapped optimizer is a ZeroRedundancyOptimizer."""
    if is_zero(optimizer):
        raise RuntimeError(f"{what} can't be done around a ZeroRedundancyOptimizer. {instead}")


class AcrossRanks:
    """What the wrapper answers where it is used in a way that several ranks can't go together with."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Raises ``TypeError`` where ZeRO would make one of each rank's parameters."""
        if args and isinstance(args[0], list):  # as ZeroRedundancyOptimizer calls its optimizer_class
            raise TypeError(
                "optimizer: expected a torch.optim.Optimizer, got list. Make the optimizer first; around ZeRO "
                f"the right order is {cls.__name__}(ZeroRedundancyOptimizer(params, AdamW, ...))."
            )
        return super().__new__(cls)

    def join_hook(self, **kwargs: Any) -> Any:
        """What ``torch.distributed.algorithms.join.Join`` asks for: it can't be had."""
        raise RuntimeError(
            "Join can't serve an optimizer with masters and a loss scale: a rank without data would skip and count "
            "otherwise than the others. Even out the inputs, as DistributedSampler(drop_last=True) does."
        )
