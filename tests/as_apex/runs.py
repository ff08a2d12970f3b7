"""Run Python as a user does, in a process of its own, with the package that these tests import."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import interpreters

import fp16opt

PACKAGE = str(Path(fp16opt.__file__).resolve().parent.parent)


def python(where: Path, *arguments: str, path: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    """``python arguments...`` in ``where``; ``path`` comes first in PYTHONPATH."""
    parts = [*path, PACKAGE, *filter(None, [os.environ.get("PYTHONPATH")])]
    return interpreters.python(*arguments, cwd=where, env={**os.environ, "PYTHONPATH": os.pathsep.join(parts)})
