"""The distributed examples under torchrun, and what importing the package does not import."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

from distributed.world import of_this_package, torchrun

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "distributed"
MISSING = [name for name in ("sklearn", "matplotlib", "tqdm") if importlib.util.find_spec(name) is None]
examples = [
    pytest.mark.skipif(not EXAMPLES.is_dir(), reason="run from an installed package, without the repository"),
    pytest.mark.skipif(bool(MISSING), reason=f"the examples need {', '.join(MISSING)} (requirements/examples.txt)"),
]
LOSS = re.compile(r"^step (\d+): loss ([\d.]+)", re.MULTILINE)


def example(folder: Path, script: str, ranks: int, *arguments: str, restarts: int = 0) -> str:
    """Run an example on ``ranks`` processes; returns what it printed."""
    arguments = ("--output", str(folder / "output"), *arguments)
    done = torchrun(folder, EXAMPLES / script, *arguments, ranks=ranks, restarts=restarts)
    assert done.returncode == 0, done.stdout
    return done.stdout


class TestExamples:
    """Programs that users start."""

    pytestmark = examples

    @pytest.mark.slow
    @pytest.mark.parametrize("script", ["train_ddp.py", "train_fsdp2.py"])
    def test_trains_and_goes_on(self, tmp_path: Path, script: str) -> None:
        """Two ranks train; then another program goes on from their checkpoint on one rank."""
        output = example(tmp_path, script, 2, "--steps", "6", "--save-every", "3")
        losses = [float(loss) for _, loss in LOSS.findall(output)]
        assert [step for step, _ in LOSS.findall(output)] == ["3", "6"], output
        assert losses[1] < losses[0]
        assert "validation loss" in output
        other = "train_fsdp2.py" if script == "train_ddp.py" else "train_ddp.py"
        again = example(tmp_path, other, 1, "--steps", "8", "--save-every", "8")
        assert "resumed from" in again
        assert [step for step, _ in LOSS.findall(again)] == ["8"], again
        assert float(LOSS.findall(again)[0][1]) < losses[0]

    @pytest.mark.slow
    @pytest.mark.parametrize("script", ["train_ddp.py", "train_fsdp2.py"])
    def test_a_killed_rank_changes_nothing_in_the_end(self, tmp_path: Path, script: str) -> None:
        """Killed in step 5 and started again by torchrun: the last losses are those of an undisturbed training."""
        ends = []
        for name, extra, restarts in (("calm", (), 0), ("killed", ("--die-at", "5"), 1)):
            (tmp_path / name).mkdir()
            output = example(tmp_path / name, script, 2, "--steps", "8", "--save-every", "4", *extra, restarts=restarts)
            assert ("resumed from" in output) == bool(extra)
            ends.append((LOSS.findall(output)[-1], re.findall(r"validation loss ([\d.]+)", output)))
        assert ends[0] == ends[1]


@pytest.mark.all
def test_one_process_does_not_load_the_distributed_rooms(tmp_path: Path) -> None:
    code = """
import sys, torch
before = set(sys.modules)
import fp16opt
new = {name for name in set(sys.modules) - before if name.startswith("torch.distributed")}
p = torch.nn.Parameter(torch.ones(3).half())
opt = fp16opt.MixedPrecisionOptimizer(torch.optim.SGD([p], lr=0.5), dynamic=True)
opt.backward(p.float().sum() / 64)
opt.clip_master_grads(1.0)
opt.step()
opt.state_dict()
loaded = new | {name for name in sys.modules if name.startswith("fp16opt.distributed")}
raise SystemExit(f"loaded {loaded}" if loaded or p[0] >= 1 else 0)
"""
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, env=of_this_package(), cwd=tmp_path, timeout=60)
    assert done.returncode == 0, done.stderr
