"""Ranks that meet in the store: one late among hundreds, one that comes in the last moment, keys that are left."""

from __future__ import annotations

import copy
import datetime
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

from fp16opt import MixedPrecisionOptimizer, distributed
from fp16opt.distributed import waiting


@pytest.fixture
def alone() -> Iterator[None]:
    """A process group of this process, with a short time-out."""
    short = datetime.timedelta(seconds=0.2)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=short)
    yield
    dist.destroy_process_group()


class Store(dist.HashStore):
    """As the ranks of a world share it; ``late`` are the ranks that come when the first one has waited in vain."""

    def __init__(self, size: int, late: range = range(0)) -> None:
        super().__init__()
        self.size, self.late = size, late

    def wait(self, keys: Any, timeout: Any = None) -> None:
        (key,) = keys
        name, _, turn = key.rpartition("/")
        for _ in self.late:
            if self.add(name, 1) % self.size == 0:
                self.set(key, "all")
        raise RuntimeError(f"wait timeout for {turn}")


def ranks_of(monkeypatch: pytest.MonkeyPatch, store: Any, size: int) -> None:
    monkeypatch.setattr(waiting, "_store", lambda: store)
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda _: list(range(size)))


def test_a_late_rank_among_hundreds_is_named(alone: None, monkeypatch: pytest.MonkeyPatch) -> None:
    size = 500
    store = dist.HashStore()
    ranks_of(monkeypatch, store, size)
    elsewhere = {137: "a forward of the model", 318: "load('x')"}
    for rank in range(1, size):
        place = elsewhere.get(rank, "save('x')")
        store.set(f"at/{rank}", place)
        store.set(f"in/{rank}/{place}", "")
    with pytest.raises(RuntimeError, match=r"save\('x'\) was not called by all ranks within 0.2 s") as caught:
        waiting.meet("save('x')")
    assert ": rank 137 is in a forward of the model, rank 318 is in load('x'). Every" in str(caught.value)
    for rank in range(1, size):
        store.delete_key(f"in/{rank}/save('x')")
        store.set(f"at/{rank}", "attach()")
    with pytest.raises(RuntimeError, match=r"rank 1 is in attach\(\), .*rank 8 is in attach\(\), and more\. Every"):
        waiting.meet("save('x')")


def test_one_that_comes_just_as_another_gives_up(alone: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has found all there and goes on; so does the one that was about to raise, and the next meeting is in step."""
    store = Store(3, late=range(2))
    ranks_of(monkeypatch, store, 3)
    for turn in (1, 2):
        waiting.meet("save('x')")
        counts = [store.add(f"save('x')/{hash((0, 1, 2))}", 0)]
        assert counts == [3 * turn]
    store.late = range(1)
    with pytest.raises(RuntimeError, match="was not called by all ranks"):
        waiting.meet("save('x')")


def test_keys_do_not_pile_up(alone: None, monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.HashStore()
    ranks_of(monkeypatch, store, 1)
    counts = []
    for number in range(6):
        for _ in range(1 + number % 2):
            waiting.meet(f"save('step{number}')")
        counts.append(store.num_keys())
    assert counts[1:] == counts[1:2] * 5


def test_copies_and_pickles_of_what_is_attached(alone: None) -> None:
    """The module's hooks belong to this optimizer: a copy of the module tells it nothing."""
    net = nn.Linear(4, 3)
    ddp = DistributedDataParallel(net)
    opt = MixedPrecisionOptimizer(SGD(net.parameters(), lr=0.1))
    distributed.attach(opt, ddp)

    def step(model: nn.Module, optimizer: Any) -> None:
        optimizer.zero_grad()
        optimizer.backward(model(torch.ones(2, 4)).sum())
        optimizer.step()

    step(ddp, opt)
    for model, optimizer in (pickle.loads(pickle.dumps((ddp, opt))), copy.deepcopy((ddp, opt))):
        with model.no_sync():
            model(torch.ones(2, 4))
        assert not opt.step_state.replicas.local
        step(model, optimizer)
        assert optimizer.stats()["steps_taken"] == 2
    with ddp.no_sync():
        ddp(torch.ones(2, 4))
    assert opt.step_state.replicas.local
