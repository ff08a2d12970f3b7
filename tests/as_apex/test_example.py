"""examples/apex/fp16_optimizer_minimal.py: it learns, resumes bit for bit, and runs with apex's own import line."""

from __future__ import annotations

import runpy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from engine.checks import assert_same

from .runs import python

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "apex" / "fp16_optimizer_minimal.py"
pytestmark = pytest.mark.skipif(not EXAMPLE.exists(), reason="run from an installed package, without the repository")


@pytest.fixture
def loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., float]:
    """Run the example with these arguments in this process, in a folder of its own; the loss that it prints."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> float:
        monkeypatch.setattr("sys.argv", [str(EXAMPLE), *arguments])
        runpy.run_path(str(EXAMPLE), run_name="__main__")
        return float(capsys.readouterr().out.rpartition(" ")[2])

    return run


def test_it_learns_and_masters_make_the_difference(loss: Callable[..., float]) -> None:
    with_masters = loss()
    assert with_masters < 2e-4
    assert loss("--no-masters") > 1.5 * with_masters
    assert loss("--dynamic-loss-scale", "--clip", "1.0") == pytest.approx(with_masters, rel=0.05)


def test_it_resumes_bit_for_bit(loss: Callable[..., float], tmp_path: Path) -> None:
    options = ("--dynamic-loss-scale", "--clip", "0.5")
    loss(*options, "--steps", "40", "--checkpoint", "whole.pt")
    loss(*options, "--steps", "15", "--checkpoint", "part.pt")
    loss(*options, "--steps", "40", "--resume", "part.pt", "--checkpoint", "resumed.pt")
    whole, resumed = (torch.load(tmp_path / f"{name}.pt", weights_only=True) for name in ("whole", "resumed"))
    assert_same(resumed, whole, "resumed ")
    with pytest.raises(AssertionError):
        assert_same(torch.load(tmp_path / "part.pt", weights_only=True), whole)


def test_apexs_own_import_line_works_after_the_opt_in(loss: Callable[..., float], tmp_path: Path) -> None:
    text = EXAMPLE.read_text().replace("from fp16opt.fp16_utils import", "from apex.fp16_utils import")
    (tmp_path / "script.py").write_text(text)
    aliased = python(tmp_path, "-m", "fp16opt.apex", "script.py", "--steps", "50")
    said, _, value = aliased.stdout.rpartition(" ")
    assert "loss after 50 steps" in said, aliased.stderr
    assert float(value) == loss("--steps", "50")
