"""The trainers on two processes with gloo between them, each a program that compares itself with a loop by hand."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
DOCS = HERE.parents[1] / "docs"


def need_fsdp2() -> None:
    if not hasattr(pytest.importorskip("accelerate").FullyShardedDataParallelPlugin, "fsdp_version"):
        pytest.skip("Accelerate has FSDP2 from 1.6 on")


@pytest.mark.parametrize("trainer", ["lightning", "accelerate"])
def test_two_ranks(trainer: str, tmp_path: Path) -> None:
    pytest.importorskip(trainer)
    run("two_ranks.py", 2, tmp_path, trainer)


@pytest.mark.slow
@pytest.mark.parametrize("trainer", ["lightning", "accelerate"])
def test_other_numbers_of_ranks_go_on_and_export(trainer: str, tmp_path: Path) -> None:
    go_on_elsewhere(trainer, tmp_path)


def test_transformers_under_fsdp2(tmp_path: Path) -> None:
    go_on_elsewhere("transformers", tmp_path)


def go_on_elsewhere(trainer: str, folder: Path) -> None:
    """Saved on two ranks, resumed on two, on one and on three."""
    pytest.importorskip(trainer)
    if trainer != "lightning":
        need_fsdp2()
    for ranks in (2, 1, 3):
        run("two_ranks.py", ranks, folder, trainer)


@pytest.mark.skipif(not DOCS.exists(), reason="run from an installed package, without the repository")
@pytest.mark.parametrize("trainer", ["lightning", "accelerate", "transformers"])
def test_the_lines_for_fsdp2_of_a_page(trainer: str, tmp_path: Path) -> None:
    pytest.importorskip(trainer)
    if trainer != "lightning":
        need_fsdp2()
    run("two_ranks_pages.py", 2, tmp_path, str(DOCS / f"{trainer}.md"))


def run(program: str, ranks: int, folder: Path, *more: str) -> None:
    """The program on so many ranks; each says that all is well."""
    path = os.pathsep.join([str(HERE.parent), *sys.path])  # in this order the trainers are those of this process
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    done = subprocess.run(
        [*launch, str(HERE / program), str(folder), *more],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("all is well") == ranks, done.stdout
