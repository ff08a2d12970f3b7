"""Checkpoints of other libraries: their masters, moments and scale, into a wrapped optimizer."""

from .loading import Loaded, load_foreign

__all__ = ["Loaded", "load_foreign"]
