"""What the numbers of a run do: records while it trains, a page to read, and the culprit of a nan."""

from .diagnosis import Diagnosis, diagnose
from .monitor import Monitor

__all__ = ["Diagnosis", "Monitor", "diagnose"]
