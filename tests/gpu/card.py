"""A card that is pretended: what the tests of this folder ask of torch.cuda, on CPU tensors served by emulated kernels.

So all but those marked ``card`` run where there is no GPU: fixtures and helpers are called, and called rightly. Bits
are those of the emulation on both sides; tests/kernels compares these with the CPU's and the oracle's.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import warnings
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pretended
import pytest
import replaying
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from fp16opt.kernels import cuda

IS_THERE = torch.cuda.is_available()


def seeds(count: int) -> range:
    """Of random cases: all of them on a card, one where it is pretended."""
    return range(count if IS_THERE else 1)


class Looks(TorchDispatchMode):
    """What ``torch.cuda.set_sync_debug_mode`` does at "error" and "warn"."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self._how = how

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func).split(".")[1]
        if name in pretended.LOOKS and name != "lift_fresh":
            if self._how == "error":
                raise RuntimeError(f"{name}: called a synchronizing operation")
            warnings.warn(f"{name}: called a synchronizing operation", stacklevel=2)
        return func(*args, **(kwargs or {}))


class Stream:
    """A stream: all of them do what they are given at once, and their handles differ."""

    handles = itertools.count(1)

    def __init__(self, device: object = None) -> None:
        self.cuda_stream = next(self.handles)

    def wait_stream(self, other: Stream) -> None:
        assert isinstance(other, Stream)


class Graph:
    """A graph whose capture leaves all tensors as they were, as a real one does."""

    def __init__(self) -> None:
        self.recorded: replaying.Graph | None = None

    def replay(self) -> None:
        assert self.recorded is not None
        self.recorded.replay()


def small_storages() -> list[torch.UntypedStorage]:
    """The memory of all tensors that there are, each once; what tests capture is small."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some objects warn when they are looked at
        tensors = [thing for thing in gc.get_objects() if issubclass(type(thing), Tensor)]
    tensors = [tensor for tensor in tensors if not isinstance(tensor, FakeTensor)]  # the compiler's, without memory
    storages = [t.untyped_storage() for t in tensors if t.layout == torch.strided and t.device.type == "cpu"]
    return list({storage.data_ptr(): storage for storage in storages if 0 < storage.nbytes() < 1 << 22}.values())


class Card:
    """What there is of ``torch.cuda``."""

    CUDAGraph = Graph
    Stream = Stream

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch
        self._looks: TorchDispatchMode | None = None
        self._current = Stream()
        for name in (
            "CUDAGraph",
            "Stream",
            "stream",
            "current_stream",
            "synchronize",
            "_sleep",
            "graph",
            "set_sync_debug_mode",
        ):
            monkeypatch.setattr(torch.cuda, name, getattr(self, name))

    def current_stream(self, device: object = None) -> Stream:
        return self._current

    def synchronize(self, device: object = None) -> None:
        """Everything is done already."""

    def _sleep(self, cycles: int) -> None:
        assert cycles > 0

    @contextlib.contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self._current = self._current, stream
        with self._monkeypatch.context() as patch:
            patch.setattr(cuda.Stream, "current", stream.cuda_stream)
            yield
        self._current = before

    @contextlib.contextmanager
    def graph(self, graph: Graph) -> Iterator[None]:
        kept = [(storage, storage.clone()) for storage in small_storages()]
        with replaying.record(self._monkeypatch) as graph.recorded:
            yield
        for storage, value in kept:
            storage.copy_(value)

    def set_sync_debug_mode(self, mode: str) -> None:
        if self._looks is not None:
            self._looks.__exit__(None, None, None)
            self._looks = None
        if mode != "default":
            self._looks = Looks(mode)
            self._looks.__enter__()


def pretend(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """Have CPU tensors stand for a card's, for one test."""
    pretended.pretend(module, monkeypatch)
    Card(monkeypatch)
    return torch.device("cpu")
