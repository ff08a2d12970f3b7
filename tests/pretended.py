"""A pretended device: CPU tensors that nobody may look at, served by the emulated CUDA kernels."""

from __future__ import annotations

import contextlib
import gc
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import emulated
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fp16opt import kernels
from fp16opt.kernels import cuda_devices

LOOKS = ("_local_scalar_dense", "equal", "nonzero", "is_nonzero", "unique", "masked_select", "lift_fresh")
NO_KERNEL = (
    *("empty", "empty_like", "empty_strided", "new_empty", "view", "_unsafe_view", "detach", "alias", "as_strided"),
    *("select", "slice", "unbind", "split", "split_with_sizes", "t", "transpose", "permute", "expand", "unsqueeze"),
    *("squeeze", "lift_fresh", "_record_function_enter_new", "_record_function_exit"),
)


class Watching(TorchDispatchMode):
    """Notes every torch operation: those that would wait for a device, and those that would launch a kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.looks: list[str] = []
        self.launches: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func).split(".")[1]
        if name in LOOKS:
            self.looks.append(name)
        if name not in NO_KERNEL:
            self.launches[name] += 1
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def watching(monkeypatch: pytest.MonkeyPatch) -> Iterator[Watching]:
    """Notes what happens in the block. Reading a tensor on the host by another way counts as a look too."""
    mode = Watching()

    def note(name: str) -> None:
        original = getattr(Tensor, name)

        def noted(self: Tensor, *args: Any, **kwargs: Any) -> Any:
            mode.looks.append(name)
            return original(self, *args, **kwargs)

        patch.setattr(Tensor, name, noted)

    with monkeypatch.context() as patch, mode:
        for name in ("tolist", "numpy", "cpu"):
            note(name)
        yield mode


def who_waits() -> Any:
    """The module whose ``is_host`` says whether tensors of a device can be read without a wait: one place for all."""
    return kernels


def pretend(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the library take the CPU for a device of another kind, for one test: one that runs behind the host."""
    emulated.use(module, monkeypatch)
    monkeypatch.setattr(who_waits(), "is_host", lambda device: False)


def unlocked_after(emulated: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """For a fixture: the pretended card, on which no pages may be locked when a test is over.

    The garbage collector sees what is made since, alone: it looks through little, and so does who asks it.
    """
    gc.freeze()
    pretend(emulated, monkeypatch)
    yield emulated
    gc.collect()
    assert emulated.locked == {}, "pages are still locked"


class Counting:
    """The emulated kernels, counting launches."""

    def __init__(self, device: Any) -> None:
        self._device = device
        self.launches: Counter[str] = Counter()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._device, name)

    def launch(self, name: str, blocks: int, stream: int, *arguments: bytes) -> None:
        self.launches[name] += 1
        self._device.launch(name, blocks, stream, *arguments)


def counting(monkeypatch: pytest.MonkeyPatch) -> Counting:
    """Count the emulated kernels' launches from now on."""
    device = Counting(cuda_devices.kernels_on(0))
    emulated.launch_on(device, monkeypatch)
    return device


def launched(optimizer: torch.optim.Optimizer, native: Counting, run: Callable[[], object]) -> Counter[str]:
    """What ``run`` launches besides what ``optimizer``, the wrapped one, launches in its step.

    "copy" are the copies that bring addresses to the device, which are no kernels.
    """
    theirs: Counter[str] = Counter()
    seen = Watching()
    before: Counter[str] = Counter()

    def begin(*_: Any) -> None:
        before.update(seen.launches)

    def end(*_: Any) -> None:
        theirs.update(seen.launches - before)
        before.clear()

    native.launches.clear()
    hooks = optimizer.register_step_pre_hook(begin), optimizer.register_step_post_hook(end)
    try:
        with seen:
            run()
    finally:
        for hook in hooks:
            hook.remove()
    ours = seen.launches - theirs + native.launches
    ours["copy"] = ours.pop("copy_", 0)  # of torch's, all ours that is left is the table's copy
    return ours
