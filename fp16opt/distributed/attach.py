"""attach: tell the optimizer which module's gradients are shared between ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn
from torch.distributed.algorithms.join import Joinable
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ..local import is_sharded
from .exchange import compare, require_process_group, together
from .facts import facts
from .modules import uncompiled, with_pieces
from .replicas import Compared, DdpReplicas, Independent

if TYPE_CHECKING:
    from ..optimizer import MixedPrecisionOptimizer


def check_optimizer(opt: object) -> None:
    """Raise ``TypeError`` for anything but the wrapper."""
    if not (isinstance(opt, Optimizer) and hasattr(opt, "master_params")):
        raise TypeError(
            f"opt: expected a fp16opt.MixedPrecisionOptimizer, got {type(opt).__name__}. Wrap the optimizer first."
        )


def attach(opt: MixedPrecisionOptimizer, ddp_model: nn.Module | None, *, verify_ranks_every: int = 0) -> None:
    """Tell the optimizer that ``ddp_model`` reduces its gradients. Collective: call it on every rank.

    With DDP, verdicts need no message: every rank has the same gradients. Attaching adds what the optimizer can't see
    by itself: gradients made under ``no_sync`` are this rank's own, compression hooks have a memory, and ranks that do
    not agree from the start never will.

    Args:
        opt: the wrapper, on every rank over the same parameters in the same order.
        ddp_model: a ``DistributedDataParallel``; or a module with DTensor parameters (``fully_shard``), to compare
            ranks now; or None: gradients are not shared between ranks.
        verify_ranks_every: compare masters and scalers over the ranks after every so many steps; 0: never. Costs a read
            of the masters and 8 bytes a rank. A difference raises ``RuntimeError`` on every rank.

    Raises:
        TypeError: an argument is of another type.
        ValueError: ranks have other parameters, groups or scaler settings, on every rank; ``opt`` has parameters that
            ``ddp_model`` lacks.
        RuntimeError: there is no process group.

    Syncs: yes.
    """
    check_optimizer(opt)
    if isinstance(verify_ranks_every, bool) or not isinstance(verify_ranks_every, int):
        raise TypeError(f"verify_ranks_every: expected an int, got {type(verify_ranks_every).__name__}.")
    if verify_ranks_every < 0:
        raise ValueError(f"verify_ranks_every: expected 0 or more, got {verify_ranks_every}.")
    Joinable.register(type(opt))
    if ddp_model is None:
        _replace(opt, Independent())
        return
    require_process_group("attach")
    module = uncompiled(ddp_model)
    sharded = isinstance(module, nn.Module) and any(map(is_sharded, module.parameters()))
    if not (sharded or isinstance(module, DistributedDataParallel)):
        raise TypeError(
            "ddp_model: expected a DistributedDataParallel, a module with DTensor parameters, or None, got "
            f"{type(ddp_model).__name__}."
        )
    group = getattr(module, "process_group", None) if not sharded else getattr(opt._steps.ranks, "group", None)
    together("attach", lambda: _check_parameters(opt, module), group)
    compare("the optimizer", facts(opt), group)
    if isinstance(module, DistributedDataParallel):
        _replace(opt, DdpReplicas(module, verify_ranks_every))
    else:
        _replace(opt, Compared(group, verify_ranks_every))


def _replace(opt: MixedPrecisionOptimizer, replicas: Any) -> None:
    before = opt._steps.replicas
    if isinstance(before, DdpReplicas):
        before.detach()
    opt._steps.replicas = replicas


def _check_parameters(opt: MixedPrecisionOptimizer, model: Any) -> None:
    known = {id(param) for param in with_pieces(model).parameters()}
    strange = [name for name, p in zip(opt._params.names, opt._params.model, strict=True) if id(p) not in known]
    if strange:
        raise ValueError(
            f"ddp_model has no parameter {strange[0]!r} of the optimizer ({len(strange)} such). Make the optimizer "
            "over the parameters of the module that is attached, after it was sharded or moved."
        )
