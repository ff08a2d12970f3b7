"""attach: tell the optimizer which ranks share its gradients, or its verdict."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ..engine.dtensors import is_sharded
from ..engine.params import ParamTable
from ..engine.parts import Wrapper
from ..engine.ranks import Replicas
from .alike import Reach, compare, ranks_in
from .exchange import message_device, require_process_group, together
from .facts import facts, is_zero
from .modules import parameter_names, uncompiled, wrapper_of
from .replicas import DdpReplicas, Independent, ScheduledDdp, Sharded
from .shards import MeshRanks, StageRanks
from .waiting import meet


def attach(
    opt: Optimizer, ddp_model: nn.Module | None, *, process_group: Any = None, verify_ranks_every: int = 0
) -> None:
    """Tell the optimizer which module reduces its gradients, and which ranks are stages of its pipeline.

    Collective: call it on every rank, over the same parameters in the same order, or those of the rank's stage.

    With DDP, verdicts need no message: every rank has the same gradients. Attaching adds what the optimizer can't see
    by itself: gradients made under ``no_sync`` are this rank's own, compression hooks have a memory, and ranks that do
    not agree from the start never will. Parameters that had no names take those of the module, for messages.

    With ``process_group`` a step is skipped on all of its ranks or on none, and a clip goes by the norm over all of
    them, in one message of 32 bytes. Ranks may hold different parameters then; settings and scaler must be alike.
    Parameters are told apart by name: those of ``named_parameters=``, else the module's. Each is counted once, whether
    it is cut into pieces or repeated, by DTensors or by DDP. Attach again after parameters were added. Where a rank has
    several chunks of the model, one optimizer holds them all, over ``nn.ModuleDict(chunks)``: a clip of one of several
    optimizers raises.

    Args:
        opt: the wrapper.
        ddp_model: a ``DistributedDataParallel``; or a module with DTensor parameters (``fully_shard``), to compare
            ranks now; or, with ``process_group``, any module, of this rank's stage; or None: gradients are not shared
            between ranks.
        process_group: every rank of every stage of the pipeline, with all ranks of its data parallelism and meshes:
            ``torch.distributed.group.WORLD`` where all ranks train this model. None: no pipeline.
        verify_ranks_every: compare masters, settings and scalers over the ranks after every so many steps; 0: never.
            Of shards the pieces that several ranks have. Costs a read of the masters, in which every bit counts, and
            a hash for the whole ones and for each set of copies. A difference raises ``RuntimeError`` on every
            rank. In a pipeline only masters of a ``DistributedDataParallel`` can be compared.

    Raises:
        TypeError: an argument is of another type.
        ValueError: ranks have other parameters, groups or scaler settings, on every rank; ``opt`` has parameters that
            ``ddp_model`` lacks; ``process_group`` can't serve this optimizer, lacks a rank, or has two parameters of
            one name.
        RuntimeError: there is no process group; or ``gradient_release=True`` under DDP.

    Syncs: yes.
    """
    wrapper = wrapper_of(opt)
    if isinstance(verify_ranks_every, bool) or not isinstance(verify_ranks_every, int):
        raise TypeError(f"verify_ranks_every: expected an int, got {type(verify_ranks_every).__name__}.")
    if verify_ranks_every < 0:
        raise ValueError(f"verify_ranks_every: expected 0 or more, got {verify_ranks_every}.")
    if ddp_model is None and process_group is None:
        _leave_stages(wrapper)
        _replace(wrapper, Independent())
        return
    require_process_group("attach")
    module = uncompiled(ddp_model)
    sharded = isinstance(module, nn.Module) and any(map(is_sharded, module.parameters()))
    ddp = module if isinstance(module, DistributedDataParallel) and not sharded else None
    if process_group is not None:
        _check_stage(wrapper, module, process_group, verify_ranks_every if ddp is None else 0)
        meet("attach()", process_group)
        together("attach", lambda: _take_names(wrapper.params, module), process_group)
        _attach_stage(wrapper, ddp, process_group, verify_ranks_every)
        return
    if not (sharded or ddp is not None):
        raise TypeError(
            "ddp_model: expected a DistributedDataParallel, a module with DTensor parameters, or None, got "
            f"{type(ddp_model).__name__}."
        )
    if ddp is not None and wrapper.config.gradient_release:
        raise RuntimeError(
            "attach: gradient_release=True takes gradients before DDP's reducer averages them, so it can't be attached "
            "to a DDP module. Use gradient_release=False."
        )
    _leave_stages(wrapper)
    ranks = wrapper.step_state.ranks
    group = ranks.group if ddp is None else ddp.process_group
    meet("attach()", group)
    together("attach", lambda: _take_names(wrapper.params, module), group)
    everyone = tuple(sorted(ranks_in(group)))
    reach = ranks.reach if isinstance(ranks, MeshRanks) else lambda _: Reach(everyone, everyone)
    compare("the optimizer", facts(wrapper), reach, group)
    if ddp is None:
        _replace(wrapper, Sharded(module, group, verify_ranks_every))
    else:
        _replace(wrapper, DdpReplicas(ddp, verify_ranks_every, wrapper.step_state))


def _check_stage(wrapper: Wrapper, module: object, group: Any, every: int) -> None:
    """Raise where an optimizer can't share its verdict with the ranks of ``group``. Sends nothing."""
    if not isinstance(group, dist.ProcessGroup) or dist.get_rank(group) < 0:
        raise TypeError(
            f"process_group: expected a torch.distributed.ProcessGroup with this rank in it, got "
            f"{type(group).__name__}. Pass one of all ranks of the pipeline, such as torch.distributed.group.WORLD; "
            "attach on these alone."
        )
    if not isinstance(module, nn.Module):
        raise TypeError(
            f"ddp_model: with process_group expected the module of this rank's stage, got {type(module).__name__}. Its "
            "names tell the parameters of stages apart."
        )
    if is_zero(wrapper):
        raise ValueError(
            "process_group: expected masters that are DTensors or whole, got a ZeroRedundancyOptimizer. Shard the "
            "stage by fully_shard instead."
        )
    if wrapper.config.gradient_release:
        raise ValueError(
            "process_group: gradient_release=True steps in backward, before other stages have theirs. Use "
            "gradient_release=False in a pipeline."
        )
    if wrapper.config.grad_accumulation == "fp32":
        raise ValueError(
            'process_group: expected grad_accumulation="model", got "fp32": the schedule adds micro-batches up and '
            "divides their sum, and sums of this optimizer would be left as they are."
        )
    if every:
        raise ValueError(
            f"verify_ranks_every: expected 0 with process_group, but for a DistributedDataParallel, got {every}: a "
            "stage's masters are on no other rank."
        )


def _attach_stage(wrapper: Wrapper, ddp: DistributedDataParallel | None, group: Any, every: int) -> None:
    state = wrapper.step_state
    within = state.ranks.within
    copies = (dist.get_rank(),) if ddp is None else tuple(sorted(ranks_in(ddp.process_group)))
    device = message_device(group, wrapper.device)
    state.ranks = StageRanks(group, device, facts(wrapper), wrapper.optimizer, within, copies, state)
    _replace(wrapper, Independent() if ddp is None else ScheduledDdp(ddp, every, state))


def _leave_stages(wrapper: Wrapper) -> None:
    wrapper.step_state.ranks = wrapper.step_state.ranks.within


def _replace(wrapper: Wrapper, replicas: Replicas) -> None:
    before = wrapper.step_state.replicas
    if isinstance(before, (DdpReplicas, Sharded)):
        before.detach()
    wrapper.step_state.replicas = replicas


def _take_names(table: ParamTable, model: Any) -> None:
    """The module's names for parameters that have none; raise where it lacks one of them."""
    names = parameter_names(model)
    lacking = [pair.name for pair in table.all if id(pair.model) not in names]
    others = zip(table.elsewhere, table.called_elsewhere, strict=True)
    lacking += [called for param, called in others if id(param) not in names]
    if lacking:
        raise ValueError(
            f"ddp_model has no parameter {lacking[0]!r} of the optimizer ({len(lacking)} such). Make the optimizer "
            "over the parameters of the module that is attached, after it was sharded or moved."
        )
    table.name(names)
