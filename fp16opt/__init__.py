"""FP32 masters, loss scaling and fused kernels for training 16-bit weights with any torch optimizer."""

from .apex import install_as_apex
from .averaging import AveragedMasters, ema
from .certify import Check, Report, certify
from .delta_patches import WeightPatch
from .deltas import WeightDelta, digests
from .engine.diagnostics import Overflow
from .engine.fused_registry import register_fused_step, register_one_pass
from .engine.modes.state8 import optimizer_state
from .foreign import Loaded, load_foreign
from .grad_scaler import GradScaler
from .memory import Memory
from .optimizer import MixedPrecisionOptimizer
from .reports import Diagnosis, Monitor, Preflight, PreflightFinding, check, diagnose
from .scaling import DynamicLossScaler, LossScaleError, LossScaler, StaticLossScaler

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
    "register_fused_step",
    "register_one_pass",
]
