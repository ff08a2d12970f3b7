"""The trainers on two processes with gloo between them, each a program that compares itself with a loop by hand."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
PROGRAMS = {
    "lightning": "two_ranks_lightning.py",
    "accelerate": "two_ranks_accelerate.py",
    "accelerate, FSDP2": "two_ranks_accelerate_fsdp2.py",
}


@pytest.mark.parametrize("trainer", PROGRAMS)
def test_two_ranks(trainer: str, tmp_path: Path) -> None:
    package = pytest.importorskip(trainer.split(",")[0])
    if trainer == "accelerate, FSDP2" and not hasattr(package.FullyShardedDataParallelPlugin, "fsdp_version"):
        pytest.skip("Accelerate has FSDP2 from 1.6 on")
    path = os.pathsep.join([str(HERE.parent), *sys.path])  # in this order the trainers are those of this process
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*launch, str(HERE / PROGRAMS[trainer]), str(tmp_path)],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("all is well") == 2, done.stdout
