"""O1 and O2 under DistributedDataParallel, two processes on the CPU: ranks agree, and an inf on one skips on both."""

from __future__ import annotations

import os
from pathlib import Path

import interpreters
import pytest
import torch

import fp16opt

SCRIPT = """
import gc
import os

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import nn

from fp16opt import amp


def work(rank, level):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{os.getcwd()}/meet.{level}", rank=rank, world_size=2)
    train(rank, level)
    gc.collect()  # a reducer that is freed last waits for gloo's thread with the interpreter's lock held
    dist.destroy_process_group()


def train(rank, level):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.125, momentum=0.5)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    parallel = nn.parallel.DistributedDataParallel(model)
    torch.manual_seed(rank)
    x, y = torch.randn(16, 8), torch.randint(0, 3, (16,))
    skips = []
    for i in range(5):
        optimizer.zero_grad()
        out = parallel(x).float()
        loss = F.cross_entropy(out, y) * (float("inf") if (i, rank) == (2, 1) else 1.0)
        with amp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        skips.append(optimizer.step_was_skipped)
    result = {
        "skips": skips,
        "masters": [p.detach() for p in amp.master_params(optimizer)],
        "params": [p.detach() for p in model.parameters()],
        "amp": dict(amp.state_dict()),
    }
    torch.save(result, f"{level}.{rank}")


for level in ("O1", "O2"):  # of one process, which has imported torch, as it is before any level
    mp.start_processes(work, (level,), nprocs=2, start_method="fork")
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what each rank had in the end, at both levels."""
    folder = tmp_path_factory.mktemp("ranks")
    (folder / "work.py").write_text(SCRIPT)
    package = str(Path(fp16opt.__file__).resolve().parent.parent)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([package, os.environ.get("PYTHONPATH", "")])}
    done = interpreters.python("work.py", env=environment, cwd=folder, timeout=240)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no distributed package")
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_ranks_agree(level: str, trained: Path) -> None:
    first, second = (torch.load(trained / f"{level}.{rank}", weights_only=True) for rank in range(2))
    assert first["skips"] == second["skips"] == [False, False, True, False, False]
    assert first["amp"] == second["amp"]
    assert first["amp"]["loss_scaler0"] == {"loss_scale": 2.0**15, "unskipped": 2}
    for a, b in zip(first["masters"], second["masters"], strict=True):
        assert torch.equal(a, b)
    for param, master in zip(first["params"], first["masters"], strict=True):
        assert torch.equal(param, master.to(param.dtype))
    assert first["params"][0].dtype == (torch.float16 if level == "O2" else torch.float32)
