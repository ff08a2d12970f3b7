"""Questions about an optimizer, answered by stepping others like it on small tensors of the CPU.

``fp16opt.certify`` is the function, which hides this package under its name: import the rest ``from fp16opt.certify``.
"""

from .checks import certify
from .closures import ClosureCalls, closure_calls
from .report import Check, Report
from .trials import Factory

__all__ = [
    "Check",
    "ClosureCalls",
    "Factory",
    "Report",
    "certify",
    "closure_calls",
]
