"""Makes one text of the CUDA sources: what NVRTC compiles on the machine with the card has no folders to look into."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent / "launch" / "cuda_entries.cuh"
_OURS = re.compile(r'^#include "(.+)"$')


def flatten(path: Path = ROOT, seen: set[Path] | None = None) -> str:
    """The file with each of our headers in place of its first ``#include``, and system headers where ROOT has them.

    Args:
        path: the file.
        seen: what was put in before.
    """
    seen = set() if seen is None else seen
    lines = [f'#line 1 "{path.parent.name}/{path.name}"']
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        ours = _OURS.match(line)
        if ours is not None:
            header = (path.parent / ours[1]).resolve()
            if header not in seen:
                seen.add(header)
                lines += [flatten(header, seen).rstrip("\n"), f'#line {number + 1} "{path.parent.name}/{path.name}"']
        elif line != "#pragma once" and (path == ROOT or not line.startswith("#include <")):
            lines.append(line)
        else:
            lines.append("")
    return "\n".join(lines) + "\n"
