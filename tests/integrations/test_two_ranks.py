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
    run(PROGRAMS[trainer], 2, tmp_path)


def test_transformers_under_fsdp2(tmp_path: Path) -> None:
    """Saved on two ranks, resumed on two, on one and on three."""
    pytest.importorskip("transformers")
    plugin = pytest.importorskip("accelerate").FullyShardedDataParallelPlugin
    if not hasattr(plugin, "fsdp_version"):
        pytest.skip("Accelerate has FSDP2 from 1.6 on")
    for ranks in (2, 1, 3):
        run("two_ranks_transformers_fsdp2.py", ranks, tmp_path)


def run(program: str, ranks: int, folder: Path) -> None:
    """The program on so many ranks; each says that all is well."""
    path = os.pathsep.join([str(HERE.parent), *sys.path])  # in this order the trainers are those of this process
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    done = subprocess.run(
        [*launch, str(HERE / program), str(folder)],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("all is well") == ranks, done.stdout
