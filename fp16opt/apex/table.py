"""Which module of apex resolves to what, and what to use where nothing here stands in for it.

An entry is ``"module of apex": "module of ours"``, for all its public names, or ``("module of ours", "name name")``.
Modules of ours are imported when apex's are: this room depends on no other face.
"""

from __future__ import annotations

import importlib
import importlib.util
from types import ModuleType
from typing import Any

ROOTS = ("apex", "amp_C", "apex_C")

_FP16_UTILS = "fp16opt.fp16_utils"
_OPTIMIZERS = "fp16opt.optimizers"
_NORMS = "fp16opt.apex.normalization"
_PARALLEL = "fp16opt.apex.parallel"
_APPLY = ("fp16opt.apex.multi_tensor", "MultiTensorApply multi_tensor_applier")
_SCALERS = "LossScaler DynamicLossScaler"
_FUSED = "FusedAdagrad FusedAdam FusedLAMB FusedMixedPrecisionLamb FusedNovoGrad FusedSGD"
_SYNC = "SyncBatchNorm convert_syncbn_model create_syncbn_process_group"

Entry = str | tuple[str, str]

MODULES: dict[str, tuple[Entry, ...]] = {
    "apex": (),
    "apex.fp16_utils": (_FP16_UTILS,),
    "apex.fp16_utils.fp16_optimizer": ((_FP16_UTILS, "FP16_Optimizer"),),
    "apex.fp16_utils.fp16util": (_FP16_UTILS + ".networks", _FP16_UTILS + ".params"),
    "apex.fp16_utils.loss_scaler": ((_FP16_UTILS, f"{_SCALERS} to_python_float"),),
    "apex.multi_tensor_apply": (_APPLY,),
    "apex.multi_tensor_apply.multi_tensor_apply": ((_APPLY[0], "MultiTensorApply"),),
    "apex.normalization": ((_NORMS, "FusedLayerNorm FusedRMSNorm MixedFusedLayerNorm MixedFusedRMSNorm"),),
    "apex.normalization.fused_layer_norm": (_NORMS,),
    "apex.optimizers": ((_OPTIMIZERS, _FUSED), (_FP16_UTILS, "FP16_Optimizer")),
    "apex.optimizers.fp16_optimizer": ((_FP16_UTILS, "FP16_Optimizer"),),
    "apex.optimizers.fused_adagrad": ((_OPTIMIZERS, "FusedAdagrad"),),
    "apex.optimizers.fused_adam": ((_OPTIMIZERS, "FusedAdam"),),
    "apex.optimizers.fused_lamb": ((_OPTIMIZERS, "FusedLAMB"),),
    "apex.optimizers.fused_mixed_precision_lamb": ((_OPTIMIZERS, "FusedMixedPrecisionLamb"),),
    "apex.optimizers.fused_novograd": ((_OPTIMIZERS, "FusedNovoGrad"),),
    "apex.optimizers.fused_sgd": ((_OPTIMIZERS, "FusedSGD"),),
    "apex.parallel": ((_PARALLEL, f"DistributedDataParallel {_SYNC}"), (_OPTIMIZERS, "LARC")),
    "apex.parallel.LARC": ((_OPTIMIZERS, "LARC"),),
    "apex.parallel.distributed": ((_PARALLEL, "DistributedDataParallel flat_dist_call"),),
    "apex.parallel.optimized_sync_batchnorm": ((_PARALLEL, "SyncBatchNorm"),),
    "apex.parallel.sync_batchnorm": ((_PARALLEL, "SyncBatchNorm"),),
    "amp_C": (
        (
            "fp16opt.apex.multi_tensor",
            "multi_tensor_adam multi_tensor_axpby multi_tensor_l2norm multi_tensor_lamb multi_tensor_scale "
            "multi_tensor_sgd multi_tensor_unscale_l2norm update_scale_hysteresis",
        ),
    ),
    "apex_C": (("fp16opt.apex.multi_tensor", "flatten unflatten"),),
}
# apex.amp and what is in it: the face of the same name, submodule by submodule.
AMP = "apex.amp"
AMP_FACE = "fp16opt.amp"
AMP_MODULES = (
    *("_amp_state", "_initialize", "_process_optimizer", "amp", "compat", "frontend", "handle", "lists"),
    *("lists.functional_overrides", "lists.tensor_overrides", "lists.torch_overrides"),
    *("opt", "rnn_compat", "scaler", "utils", "wrap"),
)

# Parts that a real apex without amp lacks: these are ours beside it.
FORCED = (AMP, "apex.fp16_utils", "apex.parallel")

INSTEAD = {
    "apex.RNN": "torch.nn.LSTM, GRU and RNN",
    "apex.contrib": "torch.nn.functional.scaled_dot_product_attention, torch.nn and torch.optim, or the apex of today, "
    "which still has apex.contrib",
    "apex.fused_dense": "torch.nn.Linear",
    "apex.mlp": "torch.nn.Sequential of torch.nn.Linear and an activation",
    "apex.parallel.Reducer": "torch.distributed.all_reduce, or torch's DistributedDataParallel with no_sync()",
    "apex.parallel.multiproc": "torchrun",
    "apex.pyprof": "torch.profiler",
    "apex.reparameterization": "torch.nn.utils.parametrizations.weight_norm",
    "apex.transformer": "Megatron-Core",
    "amp_C": "fp16opt.kernels and torch.optim",
    "apex_C": "torch.nn.utils.parameters_to_vector",
}


def entries_of(name: str) -> tuple[Entry, ...] | None:
    """What the module ``name`` of apex takes its names from; None where it is not provided."""
    if name in MODULES:
        return MODULES[name]
    inside = name.removeprefix(AMP + ".")
    if name != AMP and (inside == name or inside not in AMP_MODULES):
        return None
    if importlib.util.find_spec(AMP_FACE) is None:
        return None
    if name == AMP:
        return (AMP_FACE,)
    own = f"{AMP_FACE}.{inside}"
    try:
        return (own,) if importlib.util.find_spec(own) is not None else (AMP_FACE,)
    except ModuleNotFoundError:  # its parent is no package
        return (AMP_FACE,)


def children_of(name: str) -> list[str]:
    """The modules right under ``name`` that are provided."""
    there = [*MODULES, AMP, *(f"{AMP}.{inside}" for inside in AMP_MODULES)]
    return [child for child in there if child.rpartition(".")[0] == name and entries_of(child) is not None]


def names_of(entries: tuple[Entry, ...]) -> dict[str, Any]:
    """The names that these entries bring, imported now."""
    found: dict[str, Any] = {}
    for entry in entries:
        module = importlib.import_module(entry if isinstance(entry, str) else entry[0])
        found.update({name: getattr(module, name) for name in _chosen(module, entry)})
    return found


def _chosen(module: ModuleType, entry: Entry) -> list[str]:
    if not isinstance(entry, str):
        return entry[1].split()
    if not entry.startswith(AMP_FACE):
        return list(module.__all__)
    return [name for name in vars(module) if not name.startswith("__")]  # scripts reach for amp's private names


def not_provided(name: str) -> str:
    """The message for a name of apex's that is not here: which, and what to use."""
    known = next((key for key in sorted(INSTEAD, key=len, reverse=True) if f"{name}.".startswith(f"{key}.")), None)
    instead = INSTEAD[known] if known else "what docs/from-apex.md says of it"
    return f"{name} is not provided by fp16opt, which stands in for apex here. Use {instead}."
