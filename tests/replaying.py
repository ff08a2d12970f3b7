"""A CUDA graph, pretended on the CPU: everything that reaches the dispatcher or emulated kernels while it is recorded
is done again at each replay, on the same memory, and nothing else is: no Python of the library runs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import emulated
import pytest
import torch
from pretended import LOOKS, Counting
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fp16opt.kernels import cuda, cuda_devices

NEW = ("empty", "empty_like", "empty_strided", "new_empty")  # memory whose values nobody may rely on


class _Launches(Counting):
    """The emulated kernels, every launch of which goes into the recording."""

    def __init__(self, device: Any, calls: list[Callable[[], None]]) -> None:
        super().__init__(device)
        self._calls = calls

    def launch(self, name: str, blocks: int, stream: int, *arguments: bytes) -> None:
        self._calls.append(lambda: self._device.launch(name, blocks, stream, *arguments))
        super().launch(name, blocks, stream, *arguments)


class Graph(TorchDispatchMode):
    """What was recorded. Looks at tensors are refused while it is."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Callable[[], None]] = []
        self.pool: list[Tensor] = []  # a graph keeps the memory that was allocated in it

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = str(func).split(".")[1], kwargs or {}
        assert name not in LOOKS or name == "lift_fresh", f"{name} waits for the device"
        result = func(*args, **kwargs)
        in_place = func._schema.is_mutable or any(r.alias_info is not None for r in func._schema.returns)
        if in_place:
            self.calls.append(lambda: func(*args, **kwargs))
        elif name in NEW:
            self.pool.append(result)
        elif not name.startswith("_record_function"):
            self.calls.append(lambda: self._again(func, args, kwargs, result))
        return result

    @staticmethod
    def _again(func: Any, args: Any, kwargs: Any, result: Any) -> None:
        found = func(*args, **kwargs)
        pairs = [(result, found)] if isinstance(result, Tensor) else zip(result, found, strict=True)
        for there, now in pairs:
            if isinstance(there, Tensor):
                there.copy_(now)

    def replay(self) -> None:
        with torch.no_grad():
            for call in self.calls:
                call()


@contextlib.contextmanager
def record(monkeypatch: pytest.MonkeyPatch) -> Iterator[Graph]:
    """Record what happens in the block, as a stream in capture would; it happens once, too, unlike there."""
    graph = Graph()
    with monkeypatch.context() as patch, graph:
        emulated.launch_on(_Launches(cuda_devices.kernels_on(0), graph.calls), patch)
        patch.setattr(cuda.Stream, "capturing", True)
        yield graph
