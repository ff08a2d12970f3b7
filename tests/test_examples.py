"""The examples run in their short modes, and an interrupted and resumed run ends in the same bits as a whole one."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import fp16opt
from fp16opt.tools.reports import sinks

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
NEEDED = ("sklearn", "matplotlib", "tqdm")
MISSING = [name for name in NEEDED if importlib.util.find_spec(name) is None]
pytestmark = [
    pytest.mark.skipif(not EXAMPLES.is_dir(), reason="run from an installed package, without the repository"),
    pytest.mark.skipif(bool(MISSING), reason=f"the examples need {', '.join(MISSING)} (requirements/examples.txt)"),
]


def run_example(name: str, output: Path, *arguments: str) -> str:
    """Run an example as a user does, with the package that these tests import. Returns what it printed."""
    package = str(Path(fp16opt.__file__).resolve().parent.parent)
    path = os.pathsep.join([package, *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name), "--output", str(output), *arguments],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=540,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr, done.stderr  # none of torch, of matplotlib, of schedulers
    return done.stdout


def load(path: Path) -> dict[str, Any]:
    """A checkpoint without the figures that the clock gave."""
    checkpoint: dict[str, Any] = torch.load(path, weights_only=True)
    checkpoint.pop("seconds", None)
    checkpoint.get("progress", {}).pop("seconds", None)
    return checkpoint


def assert_same_bits(a: Any, b: Any, where: str = "checkpoint") -> None:
    """Equal structure, equal numbers, and tensors equal in dtype and in every bit."""
    assert type(a) is type(b), where
    if isinstance(a, torch.Tensor):
        assert a.dtype == b.dtype, where
        assert a.shape == b.shape, where
        assert a.contiguous().flatten().view(torch.uint8).equal(b.contiguous().flatten().view(torch.uint8)), where
    elif isinstance(a, dict):
        assert list(a) == list(b), where
        for key in a:
            assert_same_bits(a[key], b[key], f"{where}.{key}")
    elif isinstance(a, list | tuple):
        assert len(a) == len(b), where
        for index, (x, y) in enumerate(zip(a, b, strict=True)):
            assert_same_bits(x, y, f"{where}[{index}]")
    else:
        assert a == b, where


def assert_is_picture(path: Path) -> None:
    assert path.read_bytes().startswith(b"\x89PNG")
    assert path.stat().st_size > 10_000


def test_the_comparison_of_bits_notices_a_changed_bit() -> None:
    state = {"a": [torch.tensor([0.0, 1.0])], "n": 3}
    assert_same_bits(state, {"a": [torch.tensor([0.0, 1.0])], "n": 3})
    for other in ({"a": [torch.tensor([-0.0, 1.0])], "n": 3}, {"a": [torch.tensor([0.0, 1.0])], "n": 4}, {"n": 3}):
        with pytest.raises(AssertionError):
            assert_same_bits(state, other)


@pytest.mark.slow
def test_train_digits_short_mode_and_resume_bit_exact(tmp_path: Path) -> None:
    """An epoch and another one, against two at once: weights, masters, momentum, loss scale, curves."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    printed = run_example("train_digits.py", whole, "--short")
    table = (whole / "table.md").read_text()
    assert table in printed
    rows = {cells[1].strip(): cells for line in table.splitlines() if (cells := line.split("|"))}
    # Bytes a parameter: of the weights; with gradients and momentum, and masters, whose gradients are not made.
    expected = {"fp32": ["4.0", "12.0"], "fp16": ["2.0", "6.0"], "fp16+masters": ["2.0", "12.0"]}
    for mode, sizes in expected.items():
        assert [cell.strip() for cell in rows[mode][6:8]] == sizes
    assert_is_picture(whole / "curves.png")
    run_example("train_digits.py", parts, "--epochs", "1")
    middle = {mode: load(parts / f"{mode}-seed0.pt") for mode in expected}
    run_example("train_digits.py", parts, "--short", "--resume")
    for mode in expected:
        assert_same_bits(load(whole / f"{mode}-seed0.pt"), load(parts / f"{mode}-seed0.pt"))
        with pytest.raises(AssertionError):  # and the second epoch did train
            assert_same_bits(middle[mode]["model"], load(parts / f"{mode}-seed0.pt")["model"])


@pytest.mark.slow
def test_language_model_short_mode_and_resume_bit_exact(tmp_path: Path) -> None:
    """Interrupted after three of eight steps, against eight at once: also the schedule of the learning rate."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    printed = run_example("language_model.py", whole, "--short")
    for dtype in ("fp32", "fp16", "bf16"):
        assert f"| {dtype} " in printed
    assert "The class statement " in printed
    assert_is_picture(whole / "loss.png")
    run_example("language_model.py", parts, "--short", "--dtype", "fp16", "bf16", "--stop-after", "3")
    for dtype in ("fp16", "bf16"):
        assert load(parts / f"{dtype}.pt")["progress"]["step"] == 3
    run_example("language_model.py", parts, "--short", "--dtype", "fp16", "bf16", "--resume", "--monitor")
    for dtype in ("fp16", "bf16"):
        steps = [r["step"] for r in sinks.read(parts / f"{dtype}.jsonl") if r["kind"] == "step"]
        assert steps == [4, 5, 6, 7, 8]
        assert_same_bits(load(whole / f"{dtype}.pt"), load(parts / f"{dtype}.pt"))


@pytest.mark.slow
def test_rl_fp16_quick_mode(tmp_path: Path) -> None:
    """Every way, with a sampler whose weights are the trainer's after every step; the sampler's process ends."""
    printed = run_example("rl_fp16.py", tmp_path, "--quick")
    table = (tmp_path / "table.md").read_text()
    assert table in printed
    rows = {cells[1].strip(): cells for line in table.splitlines() if (cells := line.split("|"))}
    for way in ("fp16 + masters", "fp16", "bf16 + masters", "bf16"):
        assert rows[way][8].strip() == "4 of 4"
        assert 0 < float(rows[way][4]) < 100, "a step changed weights"
        assert 0 < int(rows[way][6]) < 100, "and less than the model was sent"
    assert float(rows["fp16 + masters"][7]) < float(rows["bf16 + masters"][7]) / 3
    assert_is_picture(tmp_path / "rl.png")


@pytest.mark.slow
def test_rl_fp16_stops_where_the_sampler_has_other_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    rl = importlib.import_module("rl_fp16")
    model = rl.Sorter().half()
    rl.require_equal(model, rl.digest(model))
    other = rl.digest(model)
    with torch.no_grad():
        model.blocks[1].down.weight[5, 7] += 1e-3
    with pytest.raises(SystemExit, match="The sampler's weights are not the trainer's"):
        rl.require_equal(model, other)


def test_a_checkpoint_made_with_other_settings_is_refused(tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("examples_common", EXAMPLES / "common.py")
    assert spec is not None
    assert spec.loader is not None
    common = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(common)
    common.save_checkpoint(tmp_path / "run.pt", {"settings": {"seed": 0}, "weight": torch.ones(2)})
    assert common.load_checkpoint(tmp_path / "run.pt", {"seed": 0})["weight"].equal(torch.ones(2))
    with pytest.raises(SystemExit, match=r"run\.pt was made with \{'seed': 0\}, not \{'seed': 1\}\. Use another"):
        common.load_checkpoint(tmp_path / "run.pt", {"seed": 1})
    assert [path.name for path in tmp_path.iterdir()] == ["run.pt"], "nothing is left of writing beside it"
