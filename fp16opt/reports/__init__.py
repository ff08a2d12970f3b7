"""What the numbers of a run do: records while it trains, a page to read, and the culprit of a nan."""

from .diagnosis import Diagnosis, diagnose

__all__ = ["Diagnosis", "diagnose"]
