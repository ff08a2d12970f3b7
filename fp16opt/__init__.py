"""FP32 masters, loss scaling and fused kernels for training 16-bit weights with any torch optimizer."""

import sys

from .apex import install_as_apex
from .delta_patches import WeightPatch
from .deltas import WeightDelta, digests
from .engine.diagnostics import Overflow
from .engine.fused_registry import register_fused_step, register_one_pass
from .grad_scaler import GradScaler
from .memory import Memory
from .optimizer import MixedPrecisionOptimizer
from .scaling import DynamicLossScaler, LossScaleError, LossScaler, StaticLossScaler
from .tools import averaging as averaging
from .tools import foreign as foreign
from .tools import reports as reports
from .tools.averaging import AveragedMasters, ema
from .tools.certify import Check, Report, certify
from .tools.foreign import Loaded, load_foreign
from .tools.plain_state import optimizer_state
from .tools.plan import plan
from .tools.reports import Diagnosis, Monitor, Preflight, PreflightFinding, check, diagnose

# Scripts name modules of tools as they lay once: `from fp16opt.certify import closure_calls`, `fp16opt.averaging.ema`.
_tools = [name for name in sys.modules if name.startswith(f"{__name__}.tools.")]
sys.modules.update({name.replace(".tools", "", 1): sys.modules[name] for name in _tools})

__version__ = "0.2.0"

__all__ = [
    "AveragedMasters",
    "Check",
    "Diagnosis",
    "DynamicLossScaler",
    "GradScaler",
    "Loaded",
    "LossScaleError",
    "LossScaler",
    "Memory",
    "MixedPrecisionOptimizer",
    "Monitor",
    "Overflow",
    "Preflight",
    "PreflightFinding",
    "Report",
    "StaticLossScaler",
    "WeightDelta",
    "WeightPatch",
    "__version__",
    "certify",
    "check",
    "diagnose",
    "digests",
    "ema",
    "install_as_apex",
    "load_foreign",
    "optimizer_state",
    "plan",
    "register_fused_step",
    "register_one_pass",
]
