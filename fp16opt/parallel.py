"""The engine's side of training on several ranks: it looks for signs of it, and calls fp16opt.distributed on the first.

Nothing here imports torch.distributed unless parameters or the wrapped optimizer are its own already.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

from .local import is_sharded
from .ranks import Ranks

if TYPE_CHECKING:
    from .optimizer import MixedPrecisionOptimizer

_ELSEWHERE = "fp16opt.distributed.state_dict and load_state_dict, or save and load,"


def is_zero(optimizer: object) -> bool:
    """Whether this is a ZeroRedundancyOptimizer."""
    module = sys.modules.get("torch.distributed.optim.zero_redundancy_optimizer")
    return module is not None and isinstance(optimizer, module.ZeroRedundancyOptimizer)


def holder_of(optimizer: Optimizer) -> Optimizer:
    """The optimizer that holds what is stepped on this rank: ``optimizer``, or the one inside of ZeRO."""
    if is_zero(optimizer):
        from .distributed import zero

        return zero.prepare(optimizer)
    params = [param for group in optimizer.param_groups for param in group["params"]]
    if any(map(is_sharded, params)):
        from .distributed import shards

        shards.root_mesh(params)  # raises before anything is changed
    return optimizer


def device_of(engine: MixedPrecisionOptimizer) -> torch.device:
    """Where verdicts are kept: the first parameter's device, be it on this rank or on another."""
    params = [*engine._params.master, *(p for group in engine.optimizer.param_groups for p in group["params"])]
    device: torch.device = params[0].device if params else torch.device("cpu")
    return device


def ranks_of(engine: MixedPrecisionOptimizer) -> Ranks:
    """Who must hear of verdicts and norms."""
    params = engine._params
    if is_zero(engine.optimizer):
        from .distributed import facts, zero

        params.elsewhere = zero.elsewhere(engine.optimizer, params.model)
        zero.copy_down_before_broadcast(engine.optimizer, _weak(engine))
        return zero.ZeroRanks(engine.optimizer, lambda: facts.facts(engine))
    if params.has_pieces:
        from .distributed import facts, shards

        return shards.MeshRanks(params.model, lambda: facts.facts(engine))
    return Ranks()


def check_new(engine: MixedPrecisionOptimizer, params: list[Any]) -> None:
    """Raise where ``params``, about to be added, can't share a verdict with those that are here."""
    everyone = [*engine._params.model, *params]
    if any(map(is_sharded, everyone)):
        from .distributed import shards

        shards.root_mesh(everyone)


def regroup(engine: MixedPrecisionOptimizer) -> None:
    """Parameters came: ask anew who must hear of verdicts and norms."""
    if engine._params.has_pieces:
        engine._steps.ranks = ranks_of(engine)


def _weak(engine: MixedPrecisionOptimizer) -> Callable[[], None]:
    """The engine's copy of masters to the model, as a call that does not keep the engine alive."""
    known = weakref.ref(engine)

    def copy_down() -> None:
        there = known()
        if there is not None:
            there._copy_down()

    return copy_down


def refuse_plain_state(engine: MixedPrecisionOptimizer, what: str) -> None:
    """Raise where masters are spread over ranks, or where torch's checkpointing asks: it can't hold masters."""
    if not engine._steps.ranks.alone:
        raise RuntimeError(
            f"{what}: masters and optimizer state are spread over ranks. Use {_ELSEWHERE} which go by parameter name."
        )
    frame = sys._getframe(1)
    for _ in range(4):
        if frame.f_globals.get("__name__") == "torch.distributed.checkpoint.state_dict":
            raise RuntimeError(
                f"{what}: torch.distributed.checkpoint.state_dict has no place for FP32 masters and the loss scaler. "
                f"Use {_ELSEWHERE} instead."
            )
        if frame.f_back is None:
            return
        frame = frame.f_back


def refuse_on_zero(engine: MixedPrecisionOptimizer, what: str, instead: str) -> None:
    """Raise where the wrapped optimizer is a ZeroRedundancyOptimizer."""
    if is_zero(engine.optimizer):
        raise RuntimeError(f"{what} can't be done around a ZeroRedundancyOptimizer. {instead}")


class AcrossRanks:
    """What makes the wrapper a ``torch.distributed.algorithms.join.Joinable``, and tells the order of wrapping."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        if args and isinstance(args[0], list):  # as ZeroRedundancyOptimizer calls its optimizer_class
            raise TypeError(
                "optimizer: expected a torch.optim.Optimizer, got list. Make the optimizer first; around ZeRO "
                f"the right order is {cls.__name__}(ZeroRedundancyOptimizer(params, AdamW, ...))."
            )
        return super().__new__(cls)

    def join_hook(self, **kwargs: Any) -> Any:
        """For ``Join([ddp, opt])``: at the end every rank gets masters, state and scaler of the last to join."""
        from .distributed import joining

        return joining.hook(self)

    @property
    def _join_config(self) -> Any:
        return self.__dict__["_joined_with"]

    @_join_config.setter
    def _join_config(self, config: Any) -> None:
        if config.enable and config.is_first_joinable:
            raise RuntimeError(
                "Join counts iterations by its first entry: give the DDP module first, Join([ddp, opt])."
            )
        self.__dict__["_joined_with"] = config

    @property
    def join_device(self) -> torch.device:
        """See ``torch.distributed.algorithms.join.Joinable``."""
        device: torch.device = self._device  # type: ignore[attr-defined]
        return device

    @property
    def join_process_group(self) -> Any:
        """The process group of the DDP module that the optimizer was attached to."""
        from .distributed import joining

        return joining.process_group(self)
