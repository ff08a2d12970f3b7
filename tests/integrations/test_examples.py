"""The examples that need a trainer run in their short modes, and their tables say what they are for."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_examples import EXAMPLES, run_example

pytestmark = pytest.mark.skipif(not EXAMPLES.is_dir(), reason="run from an installed package, without the repository")


def run(name: str, output: Path) -> dict[str, list[str]]:
    """The cells of the table, by the first one of each row."""
    printed = run_example(name, output, "--short")
    table = (output / "table.md").read_text()
    assert table in printed
    return {cells[0]: cells[1:] for line in table.splitlines() if (cells := [c.strip() for c in line.split("|")[1:-1]])}


def test_lightning_digits(tmp_path: Path) -> None:
    pytest.importorskip("lightning")
    pytest.importorskip("sklearn")
    rows = run("lightning_digits.py", tmp_path)
    assert [rows[name][0] for name in ("32-true", "16-true", "16-true + masters")] == ["float32", "float16", "float16"]
    losses = {name: float(rows[name][1]) for name in rows if name.endswith(("true", "masters"))}
    assert abs(losses["16-true + masters"] - losses["32-true"]) < 0.05
    assert rows["16-true"][3] == "-"
    assert int(rows["16-true + masters"][3]) >= 0


def test_transformers_finetune(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    rows = run("transformers_finetune.py", tmp_path)
    moved = {name: float(cells[1].rstrip(" %")) for name, cells in rows.items() if cells[1].endswith("%")}
    assert set(moved) == {"fp32", "bf16", "bf16 + masters", "fp16 + masters"}
    assert moved["bf16"] < 0.7 * moved["bf16 + masters"], "what masters are for: small updates are not lost"
    assert rows["fp16 + masters"][2].isdigit()
