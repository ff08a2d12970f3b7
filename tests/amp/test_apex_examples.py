"""The programs in examples/apex run in their short modes, and a resumed training ends in the bits of a whole one."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from test_examples import EXAMPLES, run_example

MISSING = [name for name in ("sklearn", "tqdm", "PIL") if importlib.util.find_spec(name) is None]
pytestmark = [
    pytest.mark.skipif(not EXAMPLES.is_dir(), reason="run from an installed package, without the repository"),
    pytest.mark.skipif(bool(MISSING), reason=f"the examples need {', '.join(MISSING)} (requirements/examples.txt)"),
]


def run(name: str, output: Path, *arguments: str) -> str:
    return run_example(f"apex/{name}", output, "--short", "--quiet", *arguments)


def flat(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [item for key in value for item in (key, *flat(value[key]))]
    return [item for part in value for item in flat(part)] if isinstance(value, list | tuple) else [value]


@pytest.mark.slow
def test_classifier_trains_and_resumes_bit_for_bit(tmp_path: Path) -> None:
    (tmp_path / "whole").mkdir()
    (tmp_path / "parts").mkdir()
    text = run("main_amp.py", tmp_path / "whole", "--opt-level", "O2", "--epochs", "3")
    assert float(re.findall(r"top-1 +([\d.]+)", text)[-1]) > 60.0
    run("main_amp.py", tmp_path / "parts", "--opt-level", "O2", "--epochs", "3", "--stop-after", "1")
    checkpoint = tmp_path / "parts" / "checkpoint.pt"
    run("main_amp.py", tmp_path / "parts", "--opt-level", "O2", "--epochs", "3", "--resume", str(checkpoint))
    parts, whole = (
        flat(torch.load(path, weights_only=True)) for path in (checkpoint, tmp_path / "whole" / "checkpoint.pt")
    )
    assert len(parts) == len(whole)
    for a, b in zip(parts, whole, strict=True):
        assert type(a) is type(b)
        assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b
    weights = torch.load(checkpoint, weights_only=True)["model"]
    assert {value.dtype for value in weights.values()} == {torch.float32, torch.int64}


@pytest.mark.slow
def test_classifier_on_a_directory_with_overrides(tmp_path: Path) -> None:
    from PIL import Image

    for split, count in (("train", 6), ("val", 3)):
        for number, name in enumerate(("dark", "light")):
            (tmp_path / split / name).mkdir(parents=True)
            for k in range(count):
                picture = Image.new("RGB", (20, 16 + k), (200 * number + k,) * 3)
                picture.save(tmp_path / split / name / f"{k}.png")
    overrides = ("--opt-level", "O3", "--loss-scale", "128.0", "--keep-batchnorm-fp32", "True")
    shape = ("--size", "8", "--batch-size", "4", "--epochs", "2")
    text = run("main_amp.py", tmp_path, "--data", str(tmp_path), *overrides, *shape)
    assert "loss scale 128" in text


@pytest.mark.slow
def test_dcgan_writes_samples(tmp_path: Path) -> None:
    from PIL import Image

    text = run("dcgan.py", tmp_path, "--opt-level", "O1", "--epochs", "1")
    assert len(re.findall(r"scales \[[\d.]+, [\d.]+, [\d.]+\]", text)) == 1
    with Image.open(tmp_path / "samples.png") as picture:
        assert picture.size == (8 * 8 * 6, 8 * 8 * 6)
