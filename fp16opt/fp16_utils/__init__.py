"""The face of apex.fp16_utils, which apex removed in May 2025: FP16_Optimizer, its scalers, and helpers for networks.

Names, arguments and defaults are the old ones. :class:`FP16_Optimizer` is a ``fp16opt.MixedPrecisionOptimizer``; new
code should use that one.
"""

from .loss_scalers import DynamicLossScaler, LossScaler
from .networks import BN_convert_float, FP16Model, convert_module, convert_network, network_to_half, tofp16
from .optimizer import FP16_Optimizer
from .params import (
    clip_grad_norm,
    master_params_to_model_params,
    model_grads_to_master_grads,
    prep_param_lists,
    to_python_float,
)
from .saved_files import load_apex_file

__all__ = [
    "BN_convert_float",
    "DynamicLossScaler",
    "FP16Model",
    "FP16_Optimizer",
    "LossScaler",
    "clip_grad_norm",
    "convert_module",
    "convert_network",
    "load_apex_file",
    "master_params_to_model_params",
    "model_grads_to_master_grads",
    "network_to_half",
    "prep_param_lists",
    "to_python_float",
    "tofp16",
]
