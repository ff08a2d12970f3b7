"""The commands that the README tells its readers to run, so that CI runs those and no others.

    python .ci/readme_commands.py README.md

A command is the fenced block that follows a line ``<!-- ci: command -->``. They are printed in order, each
followed by a NUL byte.
"""

from __future__ import annotations

import sys
from pathlib import Path

MARK = "<!-- ci: command -->"


def commands(text: str) -> list[str]:
    """The text of every marked block.

    Args:
        text: a Markdown document.

    Raises:
        ValueError: a mark is not followed by a fenced block, or the block is empty or never closed.

    Example:
        >>> commands("Run:\\n<!-- ci: command -->\\n```sh\\nmake all\\n```\\n")
        ['make all']
    """
    found = []
    lines = text.splitlines()
    for number, line in enumerate(lines, 1):
        if line.strip() != MARK:
            continue
        rest = lines[number:]
        if not rest or not rest[0].startswith("```"):
            raise ValueError(f"line {number}: {MARK} must stand right above an opening ``` line.")
        if "```" not in rest[1:]:
            raise ValueError(f"line {number + 1}: this block is never closed. Close it with a ``` line.")
        command = "\n".join(rest[1 : rest.index("```", 1)]).strip()
        if not command:
            raise ValueError(f"line {number + 1}: this block holds no command.")
        found.append(command)
    return found


def main() -> None:
    (path,) = sys.argv[1:]
    found = commands(Path(path).read_text(encoding="utf-8"))
    if not found:
        sys.exit(f"{path}: no block is marked with {MARK}")
    sys.stdout.write("".join(command + "\0" for command in found))


if __name__ == "__main__":
    main()
