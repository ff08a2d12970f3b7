"""One-pass steps: what SGD, Adam or AdamW would do, by one kernel, from 16-bit gradient to 16-bit weight."""

from .deferred import DeferredGrads, has_grad, stored_grad
from .step import FusedStep, check_fused_step

__all__ = ["DeferredGrads", "FusedStep", "check_fused_step", "has_grad", "stored_grad"]
