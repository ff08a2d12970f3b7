"""What the numbers of a run do: records while it trains, a page to read, and the culprit of a nan."""

from .diagnosis import Diagnosis, diagnose
from .findings import PreflightFinding
from .monitor import Monitor
from .preflight import Preflight, check

__all__ = ["Diagnosis", "Monitor", "Preflight", "PreflightFinding", "check", "diagnose"]
