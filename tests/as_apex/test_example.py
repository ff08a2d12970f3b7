"""examples/apex/fp16_optimizer_minimal.py: it learns, resumes bit for bit, and runs with apex's own import line."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from engine.checks import assert_same

from .runs import python

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "apex" / "fp16_optimizer_minimal.py"
pytestmark = pytest.mark.skipif(not EXAMPLE.exists(), reason="run from an installed package, without the repository")


def loss(where: Path, *arguments: str) -> float:
    done = python(where, *arguments)
    assert done.returncode == 0, done.stderr
    return float(done.stdout.rpartition(" ")[2])


def test_it_learns_and_masters_make_the_difference(tmp_path: Path) -> None:
    with_masters = loss(tmp_path, str(EXAMPLE))
    assert with_masters < 2e-4
    assert loss(tmp_path, str(EXAMPLE), "--no-masters") > 1.5 * with_masters
    assert loss(tmp_path, str(EXAMPLE), "--dynamic-loss-scale", "--clip", "1.0") == pytest.approx(
        with_masters, rel=0.05
    )


def test_it_resumes_bit_for_bit(tmp_path: Path) -> None:
    options = ("--dynamic-loss-scale", "--clip", "0.5")
    loss(tmp_path, str(EXAMPLE), *options, "--steps", "40", "--checkpoint", "whole.pt")
    loss(tmp_path, str(EXAMPLE), *options, "--steps", "15", "--checkpoint", "part.pt")
    loss(tmp_path, str(EXAMPLE), *options, "--steps", "40", "--resume", "part.pt", "--checkpoint", "resumed.pt")
    whole, resumed = (torch.load(tmp_path / f"{name}.pt", weights_only=True) for name in ("whole", "resumed"))
    assert_same(resumed, whole, "resumed ")
    with pytest.raises(AssertionError):
        assert_same(torch.load(tmp_path / "part.pt", weights_only=True), whole)


def test_apexs_own_import_line_works_after_the_opt_in(tmp_path: Path) -> None:
    text = EXAMPLE.read_text().replace("from fp16opt.fp16_utils import", "from apex.fp16_utils import")
    (tmp_path / "script.py").write_text(text)
    assert python(tmp_path, "script.py").returncode != 0
    assert loss(tmp_path, "-m", "fp16opt.apex", "script.py") == loss(tmp_path, str(EXAMPLE))
