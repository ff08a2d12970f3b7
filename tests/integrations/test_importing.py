"""fp16opt imports no trainer, and the integrations are importable only where theirs is installed."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

import interpreters
import pytest

import fp16opt

TRAINERS = ("lightning", "accelerate", "transformers", "timm", "trl", "peft")
MAKERS = ("hydra", "jsonargparse")  # of optimizers by class path
QUESTION = """
import sys
import fp16opt, fp16opt.integrations, fp16opt.integrations.optimizer_group
found = sorted({{name.split(".")[0] for name in sys.modules}} & {set})
raise SystemExit(f"imported: {{found}}" if found else 0)
"""


def test_importing_fp16opt_imports_no_trainer(tmp_path: Path) -> None:
    package = str(Path(fp16opt.__file__).parent.parent)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([package, *sys.path])}
    done = interpreters.python("-c", QUESTION.format(set=set(TRAINERS)), cwd=tmp_path, env=environment)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("name", TRAINERS + MAKERS)
def test_all_of_them_are_here_where_they_must_be(name: str) -> None:
    """The stage of the CI that installs them says so; else its tests would be skipped unseen."""
    if os.environ.get("FP16OPT_REQUIRE_TRAINERS") != "1" and importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is not installed (requirements/trainers.txt)")
    assert importlib.util.find_spec(name) is not None
