"""Scripts, notebooks too, as syntax trees whose lines can be named."""

from __future__ import annotations

import ast
import json
import os
import re
import tokenize
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SUFFIXES = (".py", ".ipynb")
_PASSED_BY = ("site-packages", "node_modules", "__pycache__")
_MAGIC = re.compile(r"^(\s*)(?:[%!?].*|[\w.]+\?{1,2}\s*|[\w, ]+=\s*[%!].*)$", re.MULTILINE)
"""What Jupyter has beside Python, by line."""


class UnreadableError(Exception):
    """A file can't be read, or what it has is no Python."""


@dataclass(frozen=True)
class Source:
    """A script.

    Attributes:
        tree: of all of it.
        lines: its text.
        places: for each line the name of its file, of a notebook with the cell, and its number there.
    """

    tree: ast.Module
    lines: list[str]
    places: list[tuple[str, int]]


def read(path: str | os.PathLike[str]) -> Source:
    """Read a script, in the encoding that it names, or the cells of code of a notebook.

    Raises:
        UnreadableError: says why it can't be read.
    """
    path = Path(path)
    try:
        return _notebook(path) if path.suffix == ".ipynb" else _script(path)
    except SyntaxError as error:
        line = f" (line {error.lineno})" if error.lineno else ""
        raise UnreadableError(f"{error.filename or path}: {error.msg}{line}") from None
    except (OSError, ValueError, RecursionError, MemoryError) as error:  # ValueError: no text, no JSON
        words = str(error) or type(error).__name__
        raise UnreadableError(words if str(path) in words else f"{path}: {words}") from None


def _parsed(source: str | bytes, name: str) -> ast.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the script's own strings
        return ast.parse(source, name)


def _script(path: Path) -> Source:
    tree = _parsed(path.read_bytes(), str(path))
    with tokenize.open(path) as file:
        lines = file.read().split("\n")  # not splitlines(): a form feed ends no line of Python
    return Source(tree, lines, [(str(path), number) for number in range(1, len(lines) + 1)])


def _notebook(path: Path) -> Source:
    body: list[ast.stmt] = []
    lines: list[str] = []
    places: list[tuple[str, int]] = []
    for number, text in _cells(json.loads(path.read_text("utf-8-sig")), path):
        if not text.lstrip().startswith("%%"):  # which is in another language, or is timed
            name = f"{path}, cell {number}"
            tree = ast.increment_lineno(_cell(text, name), len(lines))
            cell = text.split("\n")
            body, lines = body + tree.body, lines + cell
            places += [(name, line) for line in range(1, len(cell) + 1)]
    return Source(ast.Module(body, []), lines, places)


def _cell(text: str, name: str) -> ast.Module:
    try:
        return _parsed(text, name)
    except SyntaxError:
        return _parsed(_MAGIC.sub(r"\1pass", text), name)


def _cells(notebook: Any, path: Path) -> Iterator[tuple[int, str]]:
    """Number and text of the cells of code; they are counted from 1, those of text too."""
    try:
        sheets = [sheet["cells"] for sheet in notebook.get("worksheets", ())] or [notebook["cells"]]
        for number, cell in enumerate((cell for sheet in sheets for cell in sheet), 1):
            if cell["cell_type"] == "code":
                yield number, "".join(cell["source"] if "source" in cell else cell["input"])
    except (AttributeError, KeyError, TypeError):
        raise UnreadableError(f"{path}: is no notebook: it has no cells.") from None


def within(path: Path) -> list[Path]:
    """A file itself; of a folder its scripts and notebooks, without those of installed packages.

    Raises:
        UnreadableError: a folder has none.
    """
    if not path.is_dir():
        return [path]
    found = [file for file in sorted(path.rglob("*")) if file.suffix in SUFFIXES and file.is_file()]
    found = [file for file in found if not any(map(_is_passed_by, file.relative_to(path).parts))]
    if not found:
        raise UnreadableError(f"{path}: has no {' and no '.join(f'*{suffix}' for suffix in SUFFIXES)}.")
    return found


def _is_passed_by(part: str) -> bool:
    return part.startswith(".") or part in _PASSED_BY
