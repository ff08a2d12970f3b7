"""attach: tell the optimizer which module's gradients are shared between ranks."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.algorithms.join import Joinable
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ..engine.dtensors import is_sharded
from ..engine.params import ParamTable
from ..engine.parts import Wrapper, inside
from ..engine.ranks import Replicas
from .exchange import compare, require_process_group, together
from .facts import facts
from .modules import parameter_names, uncompiled, wrapper_of
from .replicas import Compared, DdpReplicas, Independent


def attach(opt: Optimizer, ddp_model: nn.Module | None, *, verify_ranks_every: int = 0) -> None:
    """Tell the optimizer that ``ddp_model`` reduces its gradients. Collective: call it on every rank.

    With DDP, verdicts need no message: every rank has the same gradients. Attaching adds what the optimizer can't see
    by itself: gradients made under ``no_sync`` are this rank's own, compression hooks have a memory, and ranks that do
    not agree from the start never will. Parameters that had no names take those of the module, for messages.

    Args:
        opt: the wrapper, on every rank over the same parameters in the same order.
        ddp_model: a ``DistributedDataParallel``; or a module with DTensor parameters (``fully_shard``), to compare
            ranks now; or None: gradients are not shared between ranks.
        verify_ranks_every: compare masters and scalers over the ranks after every so many steps; 0: never. Costs a read
            of the masters, in which every bit counts, and 8 bytes a rank. A difference raises ``RuntimeError`` on every
            rank.

    Raises:
        TypeError: an argument is of another type.
        ValueError: ranks have other parameters, groups or scaler settings, on every rank; ``opt`` has parameters that
            ``ddp_model`` lacks.
        RuntimeError: there is no process group.

    Syncs: yes.
    """
    wrapper = wrapper_of(opt)
    if isinstance(verify_ranks_every, bool) or not isinstance(verify_ranks_every, int):
        raise TypeError(f"verify_ranks_every: expected an int, got {type(verify_ranks_every).__name__}.")
    if verify_ranks_every < 0:
        raise ValueError(f"verify_ranks_every: expected 0 or more, got {verify_ranks_every}.")
    Joinable.register(type(inside(opt)))
    if ddp_model is None:
        _replace(wrapper, Independent())
        return
    require_process_group("attach")
    module = uncompiled(ddp_model)
    sharded = isinstance(module, nn.Module) and any(map(is_sharded, module.parameters()))
    if not (sharded or isinstance(module, DistributedDataParallel)):
        raise TypeError(
            "ddp_model: expected a DistributedDataParallel, a module with DTensor parameters, or None, got "
            f"{type(ddp_model).__name__}."
        )
    group = wrapper.step_state.ranks.group
    if isinstance(module, DistributedDataParallel) and not sharded:
        group = module.process_group
    together("attach", lambda: _take_names(wrapper.params, module), group)
    compare("the optimizer", facts(wrapper), group)
    if isinstance(module, DistributedDataParallel):
        _replace(wrapper, DdpReplicas(module, verify_ranks_every, wrapper.step_state))
    else:
        _replace(wrapper, Compared(group, verify_ranks_every))


def _replace(wrapper: Wrapper, replicas: Replicas) -> None:
    before = wrapper.step_state.replicas
    if isinstance(before, DdpReplicas):
        before.detach()
    wrapper.step_state.replicas = replicas


def _take_names(table: ParamTable, model: Any) -> None:
    """The module's names for parameters that have none; raise where it lacks one of them."""
    names = parameter_names(model)
    lacking = [pair.name for pair in table.all if id(pair.model) not in names]
    lacking += ["of another rank" for param in table.elsewhere if id(param) not in names]
    if lacking:
        raise ValueError(
            f"ddp_model has no parameter {lacking[0]!r} of the optimizer ({len(lacking)} such). Make the optimizer "
            "over the parameters of the module that is attached, after it was sharded or moved."
        )
    table.name(names)
