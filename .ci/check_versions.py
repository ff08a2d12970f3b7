"""Exits with an error unless the packages that are found are those that requirements files pin."""

import importlib.metadata
import sys
from pathlib import Path


def main() -> None:
    """Later files win."""
    pinned: dict[str, str] = {}
    for path in sys.argv[1:]:
        lines = [line for line in Path(path).read_text().splitlines() if line and not line.startswith("#")]
        pinned.update(line.split("==") for line in lines)  # type: ignore[arg-type]
    found = {name: importlib.metadata.version(name) for name in pinned}
    wrong = [f"{name}: {found[name]}, pinned {want}" for name, want in pinned.items() if found[name] != want]
    sys.exit("\n".join(wrong) or 0)


main()
