"""What takes long to make, and depends on sources alone, is kept in pytest's cache by a digest of these."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

home: Path | None = None
"""A folder in pytest's cache (`--cache-clear` empties it); None where that is switched off: then the run keeps it."""


def digest(parts: Iterable[str]) -> str:
    """Of texts; none runs into the next."""
    found = hashlib.sha256()
    for part in parts:
        found.update(f"{len(part)} {part}".encode())
    return found.hexdigest()[:24]


@contextlib.contextmanager
def folder(name: str, made_of: Iterable[str], temporary: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder of what is called ``name`` and was made of these texts; empty the first time.

    No other process is in it meanwhile. What was made of other texts, under the same name, is thrown away.
    """
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID")
    base = home or (temporary.getbasetemp() if run is None else temporary.getbasetemp().parent / run)
    base.mkdir(parents=True, exist_ok=True)
    mine = base / f"{name}-{digest(made_of)}"
    with (base / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        mine.mkdir(exist_ok=True)
        yield mine
        for other in base.glob(f"{name}-*"):
            if other != mine:
                shutil.rmtree(other, ignore_errors=True)
