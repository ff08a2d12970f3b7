"""Runs the README's ten lines with the package that is installed, as its reader would.

    python .ci/ten_lines.py BACKEND README.md

BACKEND is what must serve the CPU: ``cpu``, the compiled kernels, or ``reference``, torch operations.
"""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path


def main() -> None:
    """Exits with an error where the lines fail, or something else serves."""
    wanted, readme = sys.argv[1:]
    (ten_lines,) = re.findall(
        r"^## In ten lines\n+```python\n(.*?)^```", Path(readme).read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
    )
    exec(compile(ten_lines, readme, "exec"), {"__name__": "__main__"})
    import fp16opt.kernels
    from fp16opt import __main__ as report

    print(report.report())
    found = fp16opt.kernels.backend("cpu")
    if found != wanted:
        sys.exit(f"the wheel's kernels for the CPU are {found!r}, expected {wanted!r}")
    if importlib.util.find_spec("numpy") is not None:
        print("numpy came along")
    print("the README's ten lines ran, with", Path(fp16opt.kernels.__file__).parent)


main()
