"""Makes of these sources what the compilers get: the list of formulas, and one text of all that CUDA kernels need.

What NVRTC compiles on the machine with the card has no folders to look into. ``python csrc/flatten.py FOLDER`` writes
the list, formulas.h, into a folder.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

CSRC = Path(__file__).resolve().parent
ROOT = CSRC / "launch" / "cuda_entries.cuh"
FORMULAS = "formulas.h"
_OURS = re.compile(r'^#include "(.+)"$')
_FORMULA = re.compile(r"^struct (\w+) : Formula \{$", re.MULTILINE)


def formulas() -> str:
    """The header formulas.h: it has all formulas of functors/, and FP16OPT_FORMULAS(F), which is F(struct) for each."""
    found = [(path.name, _FORMULA.search(path.read_text(encoding="utf-8"))) for path in (CSRC / "functors").glob("*.h")]
    of_file = sorted((name, struct[1]) for name, struct in found if struct is not None)
    includes = [f'#include "functors/{name}"' for name, _ in of_file]
    each = " ".join(f"F({struct})" for _, struct in of_file)
    return "\n".join(["#pragma once", *includes, f"#define FP16OPT_FORMULAS(F) {each}", ""])


def write_formulas(folder: Path) -> None:
    """Have formulas.h in a folder; one that is right already is left as it is."""
    path, text = folder / FORMULAS, formulas()
    if not path.is_file() or path.read_text(encoding="utf-8") != text:
        path.write_text(text, encoding="utf-8")


def flatten(path: Path = ROOT, seen: set[Path] | None = None) -> str:
    """The file with each of our headers in place of its first ``#include``, and system headers where ROOT has them.

    Args:
        path: the file.
        seen: what was put in before.
    """
    seen = set() if seen is None else seen
    made, label = path.name == FORMULAS, f"{path.parent.name}/{path.name}"
    lines = [f'#line 1 "{label}"']
    for number, line in enumerate((formulas() if made else path.read_text(encoding="utf-8")).splitlines(), 1):
        ours = _OURS.match(line)
        if ours is not None:
            header = CSRC / FORMULAS if ours[1] == FORMULAS else (path.parent / ours[1]).resolve()
            if header not in seen:
                seen.add(header)
                lines += [flatten(header, seen).rstrip("\n"), f'#line {number + 1} "{label}"']
        elif line != "#pragma once" and (path == ROOT or not line.startswith("#include <")):
            lines.append(line)
        else:
            lines.append("")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    write_formulas(Path(sys.argv[1]))
