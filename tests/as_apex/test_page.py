"""docs/from-apex.md keeps its word: the tests that it names exist, and what it lists as missing is refused."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from fp16opt.apex import table

TESTS = Path(__file__).resolve().parent.parent
PAGE = TESTS.parent / "docs" / "from-apex.md"
pytestmark = pytest.mark.skipif(not PAGE.exists(), reason="run from an installed package, without the repository")


def test_the_tests_that_the_page_names_exist() -> None:
    defined = {
        name for path in TESTS.rglob("test_*.py") for name in re.findall(r"^def (test_\w+)", path.read_text(), re.M)
    }
    named = set(re.findall(r"`(test_\w+)`", PAGE.read_text()))
    assert len(named) > 15
    assert named <= defined


def test_the_page_names_all_that_the_messages_point_to() -> None:
    part = PAGE.read_text().partition("## What is not provided")[2]
    missing = {name for name in re.findall(r"`(apex\.[\w.]+)`", part) if table.entries_of(name) is None}
    assert {name for name in table.INSTEAD if name.startswith("apex.") and "multiproc" not in name} <= missing
    assert missing <= set(table.INSTEAD)


@pytest.mark.parametrize("name", [n for n in table.MODULES if n != "apex"])
def test_every_entry_of_the_table_resolves(name: str) -> None:
    entries = table.entries_of(name)
    assert entries is not None
    assert table.names_of(entries)


def test_import_lines_of_the_page_resolve() -> None:
    """The right-hand column of "Import lines", where it says fp16opt."""
    part = PAGE.read_text().partition("## Import lines")[2].partition("## FP16_Optimizer")[0]
    lines = [line for line in re.findall(r"`(from fp16opt[^`]* import [^`]*)`", part) if "import amp" not in line]
    assert len(lines) >= 3
    for line in lines:
        exec(line, {})
