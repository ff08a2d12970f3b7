"""The recipes of examples/amp_recipes.py train, in both autocast dtypes, and the comparison writes what it says."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

EXAMPLES = Path(__file__).parent.parent / "examples"


@pytest.fixture(scope="module")
def recipes() -> ModuleType:
    for needed in ("sklearn", "tqdm", "matplotlib"):
        pytest.importorskip(needed)
    before = {name: sys.modules.get(name) for name in ("common", "amp_recipes")}
    for name in before:
        spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    yield sys.modules["amp_recipes"]
    for name, module in before.items():
        del sys.modules[name]
        if module is not None:
            sys.modules[name] = module
    torch.use_deterministic_algorithms(False)


NAMES = ["plain", "clipping", "accumulation", "penalty", "several", "function", "parallel", "resuming", "inspecting"]
LONG = ("penalty", "several")


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.all] if n in LONG else []) for n in NAMES])
@pytest.mark.filterwarnings("ignore")
def test_recipe_trains(recipes: ModuleType, name: str, dtype: str, tmp_path: Path) -> None:
    assert list(recipes.RECIPES) == NAMES
    setting = recipes.Setting(torch.device("cpu"), recipes.DTYPES[dtype], epochs=2, output=tmp_path)
    torch.manual_seed(0)
    assert recipes.RECIPES[name](setting) < 1.9, "an untrained network's loss is 2.3"


def test_inspecting_names_what_overflowed(recipes: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    recipes.main(["--recipe", "inspecting", "--epochs", "1", "--output", str(tmp_path)])
    printed = capsys.readouterr().out
    assert "skipped, the scale is" in printed
    assert ".weight (" in printed


@pytest.mark.all
def test_comparison(recipes: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    setting = recipes.Setting(torch.device("cpu"), torch.bfloat16, epochs=2, output=tmp_path)
    before, after = recipes.compare(setting, width=64)
    assert after.megabytes < before.megabytes
    assert min(before.accuracy, after.accuracy) > 0.6
    assert (tmp_path / "comparison.png").stat().st_size > 10_000
    assert "| autocast bfloat16 |" in capsys.readouterr().out
