"""Ranks that die: the others hear of it in time, and what is on disk is whole."""

from __future__ import annotations

import datetime
import os
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.optim import AdamW

from distributed.models import Net, loss_of
from distributed.world import World, raised, torchrun
from fp16opt import MixedPrecisionOptimizer, distributed

SCRIPT = Path(__file__).with_name("failing.py")


def failing(folder: Path, trouble: str, restarts: int) -> subprocess.CompletedProcess[str]:
    folder.mkdir(exist_ok=True)
    return torchrun(folder, SCRIPT, str(folder), trouble, restarts=restarts)


@pytest.mark.slow
def test_elastic_restarts_go_on_bit_for_bit(tmp_path: Path) -> None:
    """Killed in a step or in a save, restarted by torchrun: the end is that of a training without trouble."""
    done = failing(tmp_path / "calm", "none", 0)
    assert done.returncode == 0, done.stdout
    first, wanted = torch.load(tmp_path / "calm" / "result.pt")
    assert first == 0
    for trouble in ("step", "save"):
        done = failing(tmp_path / trouble, trouble, 1)
        assert done.returncode == 0, done.stdout
        first, weights = torch.load(tmp_path / trouble / "result.pt")
        assert first == 3, "went on after the last complete checkpoint"
        assert all(torch.equal(weights[name], wanted[name]) for name in wanted)
        names = {path.name for path in (tmp_path / trouble / "checkpoints").iterdir() if not path.name.startswith(".")}
        assert names == {f"step{k}" for k in range(6)}


def dies(rank: int, size: int, folder: str, where: str) -> str:
    """Rank 1 goes without a word; rank 0 tells what it got, and how long it took."""
    net = Net(norm=False)
    for layer in (net.a, net.b, net):
        fully_shard(layer)
    opt = MixedPrecisionOptimizer(AdamW(net.parameters(), lr=1e-2), dynamic=True)
    opt.backward(loss_of(net, 0, rank))
    opt.step()
    distributed.save(Path(folder) / "good", net, opt)
    opt.zero_grad()
    opt.backward(loss_of(net, 1, rank))
    if rank == 1 and where == "step":
        os._exit(9)
    before = [p._local_tensor.clone() for p in opt.master_params()]
    began = time.monotonic()
    try:
        if where == "step":
            opt.step()
        else:
            if rank == 1:
                original: Any = distributed.files.FileSystemWriter.write_data
                distributed.files.FileSystemWriter.write_data = lambda *a, **k: (original(*a, **k), os._exit(9))
            distributed.save(Path(folder) / "half", net, opt)
    except RuntimeError as error:
        assert time.monotonic() - began < 25
        assert all(torch.equal(a, b._local_tensor) for a, b in zip(before, opt.master_params(), strict=True))
        return f"RuntimeError: {error}"
    return "nothing was raised"


@pytest.mark.parametrize("where", ["step", "save"])
def test_survivors_hear_of_a_dead_rank_and_disk_holds_whole_checkpoints(tmp_path: Path, where: str) -> None:
    world = World(2)
    try:
        with pytest.raises(AssertionError, match="rank 1: died") as failed:
            world.run(dies, str(tmp_path), where)
    finally:
        world.stop(kill=True)
    assert "rank 0" not in str(failed.value), "rank 0 raised what it should, and in time"
    assert distributed.latest(tmp_path) == tmp_path / "good"
    assert not (tmp_path / "half").exists()


def nothing(rank: int, size: int) -> None:
    """The ranks are there."""


def at_once(*tasks: tuple[Any, ...]) -> list[list[Any]]:
    """What the ranks of a world each return: while one world waits for a time-out, so does the other."""
    worlds = [World(2) for _ in tasks]
    try:
        for world in worlds:
            world.run(nothing)
        with ThreadPoolExecutor(len(tasks)) as pool:
            return [job.result() for job in [pool.submit(w.run, *task) for w, task in zip(worlds, tasks, strict=True)]]
    finally:
        for world in worlds:
            world.stop(kill=True)


def silent(rank: int, size: int) -> str:
    """A rank that does not come: the group's timeout ends the waiting."""
    group = dist.new_group(timeout=datetime.timedelta(seconds=2))
    if rank == 1:
        time.sleep(3)
        return ""
    began = time.monotonic()
    try:
        distributed.exchange.gather("here", group)
    except RuntimeError:
        assert time.monotonic() - began < 10
        return "timed out"
    return "nothing was raised"


def others_do_other_things(rank: int, size: int, folder: str) -> list[str]:
    """Time-outs of a second or two in place of the world's; what each rank hears, call by call."""
    short, said = datetime.timedelta(seconds=2), []
    dist.distributed_c10d._set_pg_timeout(short)  # of the group of all; that of its store is not asked
    own = dist.new_group(timeout=short)

    def hears(*calls: Any) -> None:
        began = time.monotonic()
        said.append(raised(RuntimeError, calls[rank]))
        assert time.monotonic() - began < 10
        dist.barrier()

    net = fully_shard(Net(norm=False), mesh=DeviceMesh.from_group(own, "cpu"))
    opt = MixedPrecisionOptimizer(AdamW(net.parameters(), lr=1e-2))
    distributed.attach(opt, net)
    opt.backward(loss_of(net, 0, rank))
    opt.step()
    distributed.save(f"{folder}/all", net, opt)
    hears(
        lambda: distributed.save(f"{folder}/one", net, opt),
        lambda: distributed.load(f"{folder}/all", net, opt),
    )
    distributed.save(f"{folder}/again", net, opt)  # what failed is forgotten
    hears(lambda: distributed.save(f"{folder}/one", net, opt), lambda: net(torch.ones(1, 16)))
    return said


def leaves_a_step_out(rank: int, size: int, verifies: bool) -> str:
    """Where ranks are compared the clip was of all, and the comparison alone waits; its messages mix with no others."""
    short = datetime.timedelta(seconds=2)
    dist.distributed_c10d._get_default_store().set_timeout(short)
    net = fully_shard(Net(norm=False), mesh=DeviceMesh.from_group(dist.new_group(timeout=short), "cpu"))
    opt = MixedPrecisionOptimizer(AdamW(net.parameters(), lr=1e-2))
    distributed.attach(opt, net, verify_ranks_every=2 * verifies)
    for number in range(2):
        opt.zero_grad()
        opt.backward(loss_of(net, number, rank))
        if verifies:
            opt.clip_master_grads(1.0)
        if number == 0:
            opt.step()
    masters = [p.to_local().clone() for p in opt.master_params()]
    heard = raised(RuntimeError, (opt.step, lambda: loss_of(net, 2, rank))[rank])
    is_stepped = verifies and rank == 0
    assert is_stepped != all(torch.equal(a, b.to_local()) for a, b in zip(masters, opt.master_params(), strict=True))
    return heard


def comes_late(rank: int, size: int) -> None:
    """A step's messages have the group's time-out, as torch's have; a store that the user made has one of its own."""
    dist.distributed_c10d._get_default_store().set_timeout(datetime.timedelta(seconds=1))
    patient = dist.new_group(timeout=datetime.timedelta(seconds=30))
    net = fully_shard(Net(norm=False), mesh=DeviceMesh.from_group(patient, "cpu"))
    opt = MixedPrecisionOptimizer(AdamW(net.parameters(), lr=1e-2))
    opt.backward(loss_of(net, 0, rank))
    opt.step()
    opt.backward(loss_of(net, 1, rank), update_master_grads=False)
    time.sleep(2.0 * rank)  # it reads a file, say
    opt.step()


def test_a_rank_that_does_not_come_is_given_up_and_one_that_comes_late_waited_for() -> None:
    heard, _ = at_once((silent,), (comes_late,))
    assert heard[0] == "timed out"


def test_ranks_that_do_other_things_are_named(tmp_path: Path) -> None:
    heard = at_once((others_do_other_things, str(tmp_path)), (leaves_a_step_out, False), (leaves_a_step_out, True))
    first, second = heard[0]
    called = "was not called by all ranks"
    assert first[0].startswith(
        f"save('one') {called} within 2 s: rank 1 is in load('all'). Every rank must make the same calls"
    )
    assert second[0].startswith(
        f"load('all') {called} within 2 s: rank 0 is in save('one'). Every rank must make the same calls"
    )
    assert "put no `if rank == 0:` around save" in first[0]
    assert first[1].startswith(f"save('one') {called} within 2 s: rank 1 is in a forward of the model.")
    assert second[1].startswith(f"a forward of the model {called}: rank 0 is in save('one').")
    assert not (tmp_path / "one").exists()
    first, second = heard[1]
    assert first.startswith(f"a clip or a step {called}: rank 1 is in a forward of the model.")
    assert second.startswith(f"a forward of the model {called}: rank 0 is in a clip or a step.")
    first, second = heard[2]
    assert first.startswith(f"a step with verify_ranks_every {called} within 2 s: rank 1 is in a forward of the model.")
    assert second.startswith(f"a forward of the model {called}: rank 0 is in a step with verify_ranks_every.")
