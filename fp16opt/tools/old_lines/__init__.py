"""``python -m fp16opt old-lines FILE``: lines of a script that mean something else once its optimizer is wrapped."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .rules import RULES, Rule
from .scan import Found, find, look
from .script import Scaling
from .sources import UnreadableError, within

__all__ = ["RULES", "Found", "Rule", "UnreadableError", "add_arguments", "answer", "find"]


def add_arguments(parser: Any) -> None:
    """Of the command."""
    parser.add_argument("files", nargs="+", metavar="FILE", help="a script or notebook; a folder is searched for them")


def answer(given: argparse.Namespace, say: Callable[[str], object], refuse: Callable[[object], object]) -> int:
    """Say what was found, a file after the other.

    Args:
        say: is given the lines of the answer.
        refuse: is given what says why a file can't be read. The others are read.

    Returns:
        0 where nothing was found, 1 where something was, 2 where a file, or a folder with none, could not be read.
    """
    found = files = unread = 0
    for name in given.files:
        try:
            paths = within(Path(name))
        except UnreadableError as error:
            refuse(error)
            unread += 1
            continue
        for path in paths:
            try:
                lines, scaling = look(path)
            except UnreadableError as error:
                refuse(error)
                unread += 1
                continue
            files, found = files + 1, found + len(lines)
            for one in lines:
                say(str(one))
            if scaling is Scaling.GRAD_SCALER:
                say(f"{path}: has a GradScaler and wraps no optimizer. docs/from-gradscaler.md is the page for it.")
    if files:
        not_read = f", {_counted(unread, 'file')} not read" if unread else ""
        say(f"{_counted(found, 'line')} in {_counted(files, 'file')}{not_read}. docs/old-lines.md has what each does.")
    return 2 if unread else int(bool(found))


def _counted(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
