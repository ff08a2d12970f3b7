"""One-pass optimizer steps: the wrapped SGD, Adam or AdamW done by one kernel, from 16-bit gradient to 16-bit weight."""

from .deferred import DeferredGrads
from .step import CHOICES, FusedStep

__all__ = ["CHOICES", "DeferredGrads", "FusedStep"]
