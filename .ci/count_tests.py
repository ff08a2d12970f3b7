"""How many tests passed and failed in all pytest runs of a CI run, from the JUnit files that they left.

    python .ci/count_tests.py FOLDER

Prints ``N passed, M failed``. Errors in a test's set-up count as failures; skipped and expectedly failing
tests as neither.
"""

from __future__ import annotations

import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path


def count(folder: Path) -> tuple[int, int]:
    """(passed, failed) over all ``*.xml`` files in ``folder``."""
    passed = failed = 0
    for path in sorted(folder.glob("*.xml")):
        for case in ElementTree.parse(path).getroot().iter("testcase"):
            outcomes = {child.tag for child in case}
            if outcomes & {"failure", "error"}:
                failed += 1
            elif "skipped" not in outcomes:
                passed += 1
    return passed, failed


def main() -> None:
    (folder,) = sys.argv[1:]
    print("{} passed, {} failed".format(*count(Path(folder))))


if __name__ == "__main__":
    main()
