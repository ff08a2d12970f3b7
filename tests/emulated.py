"""The CUDA kernels on a machine without a GPU: the same source, compiled as plain C++, in which a kernel's blocks and
threads take their turns one after the other, in an order that is shuffled for every launch and phase. What this shows:
packing, indices, tails, alignment, lane and tree order, who adds up when, that no order is relied on, and the Python
around it. What it can't show: races within a phase, barriers, and CUDA itself."""

from __future__ import annotations

import ctypes
import os
import runpy
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from fp16opt.kernels import backends, cuda, cuda_devices, cuda_rows, host_memory

CSRC = Path(__file__).resolve().parents[1] / "csrc"
FLAGS = ["-std=c++17", "-Og", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off", "-fno-math-errno"]
PARTS = 1  # compiled beside as many of those that mark; each part reads all headers


def flattened() -> str:
    """The sources of this tree as one text, whatever the installed one is."""
    return str(runpy.run_path(str(CSRC / "flatten.py"))["flatten"]())


def compiler() -> str | None:
    """The host's C++ compiler; None where there is none, or no sources."""
    return shutil.which(os.environ.get("CXX", "c++")) if CSRC.is_dir() else None


def made_of() -> list[str]:
    """All that the libraries depend on: the compiler, its flags, and the sources."""
    command = compiler()
    if command is None:
        pytest.skip("needs a C++ compiler and the sources")
    version = subprocess.run([command, "--version"], capture_output=True, text=True, check=False).stdout
    entries = [kernel.entry() for kernel in cuda_rows.KERNELS.values()]
    return [command, version, *FLAGS, str(PARTS), flattened(), Path(cuda_rows.__file__).read_text(), *entries]


class Emulated:
    """What :class:`fp16opt.kernels.cuda_driver.Card` is, on the host.

    Args:
        libraries: shared libraries with the kernels' entries.

    Attributes:
        paths: the same.
        libraries: these, loaded.
        locked: the pages of the host that are locked, by address, with their sizes.
        waits, locks: how often the host has waited for the card, and locked pages.
    """

    def __init__(self, libraries: Sequence[Path]) -> None:
        self.paths = list(libraries)
        self.libraries = [ctypes.CDLL(str(path)) for path in libraries]
        self._entries: dict[str, Any] = {}
        self._kept: dict[int, Any] = {}
        self.locked: dict[int, int] = {}
        self.waits = self.locks = 0

    def entry(self, name: str) -> Any:
        """A kernel's function, as cuLaunchKernel would call it."""
        if name not in self._entries:
            entry = next(getattr(one, f"fp16opt_{name}") for one in self.libraries if hasattr(one, f"fp16opt_{name}"))
            entry.argtypes, entry.restype = (ctypes.POINTER(ctypes.c_char_p), ctypes.c_int64), None
            self._entries[name] = entry
        return self._entries[name]

    def launch(self, name: str, blocks: int, stream: int, *arguments: bytes) -> None:
        self.entry(name)((ctypes.c_char_p * len(arguments))(*arguments), blocks)

    def keep(self, content: bytes, size: int) -> int:
        memory = ctypes.create_string_buffer(content, max(1, size))
        self._kept[ctypes.addressof(memory)] = memory
        return ctypes.addressof(memory)

    def give_back(self, address: int) -> None:
        del self._kept[address]

    def lock_pages(self, address: int, size: int) -> int:
        self.locked[address] = size
        self.locks += 1
        return address

    def unlock_pages(self, address: int) -> None:
        del self.locked[address]

    def wait(self) -> None:
        self.waits += 1

    def shares_memory(self) -> bool:
        return False

    def kept_tables(self) -> int:
        """How many tables of captured calls were not given back."""
        return len(self._kept)


class Shuffle:
    """The state of what puts the blocks and threads of all libraries in order: see csrc/launch/turns.h."""

    def __init__(self, libraries: Sequence[ctypes.CDLL]) -> None:
        self._states = [ctypes.c_uint64.in_dll(library, "fp16opt_shuffle") for library in libraries]

    @property
    def value(self) -> int:
        """0 is first to last; any other number is what the next order comes from."""
        return max(state.value for state in self._states)

    @value.setter
    def value(self, value: int) -> None:
        for state in self._states:
            state.value = value


def single_stores(device: Any) -> int:
    """How many elements emulated kernels stored one by one, and not in blocks of sixteen bytes, so far."""
    return max(ctypes.c_uint64.in_dll(library, "fp16opt_single_stores").value for library in device.libraries)


def shuffle(device: Any) -> Shuffle:
    """The state of what puts the blocks and threads of emulated kernels in order."""
    return Shuffle(device.libraries)


def build(folder: Path, *more: str) -> Emulated:
    """The kernels, compiled into ``folder`` if they are not there. Skips the test where there is no compiler."""
    command = compiler()
    if command is None:
        pytest.skip("needs a C++ compiler and the sources")
    kernels = list(cuda_rows.KERNELS.values())
    alike = [[kernel for kernel in kernels if kernel.marks is marks] for marks in (False, True)]
    parts = [kernels[part::PARTS] for kernels in alike for part in range(PARTS)]
    libraries, done = [folder / f"kernels{part}.so" for part in range(len(parts))], folder / "done"
    if not done.exists():
        running = []
        for part, library in zip(parts, libraries, strict=True):
            source = library.with_suffix(".cpp")
            first, *rest = part
            source.write_text(cuda_rows.source_of(first, flattened()) + "".join(kernel.entry() for kernel in rest))
            words = [command, *FLAGS, *more, "-shared", str(source), "-o", str(library)]
            running.append(subprocess.Popen(words))
        assert {job.wait() for job in running} == {0}, shlex.join(words)
        done.touch()
    return Emulated(libraries)


class HostStream:
    """What `cuda.Stream` is, on the host; notes what was asked of it."""

    capturing = False
    current = 0
    waits: ClassVar[list[tuple[int, int]]] = []
    copies: ClassVar[list[int]] = []
    held: ClassVar[list[int]] = []

    def __init__(self, device: torch.device) -> None:
        self.handle, self.index, self.captures = type(self).current, 0, type(self).capturing

    def wait_for(self, other: HostStream) -> None:
        type(self).waits.append((self.handle, other.handle))

    def hold(self, tensors: Sequence[object], of_any: bool = False) -> None:
        type(self).held.extend(tensor.data_ptr() for tensor in tensors if isinstance(tensor, Tensor))

    def staging(self, size: int) -> Tensor:
        type(self).copies.append(size)
        memory = torch.empty(size, dtype=torch.uint8)
        ctypes.memset(memory.data_ptr(), 0x5A, size)
        return memory


def use(device: Any, monkeypatch: pytest.MonkeyPatch) -> type[HostStream]:
    """Have the emulated kernels serve CPU tensors for one test. Returns the class that stands for streams."""
    monkeypatch.setattr(shuffle(device), "value", 1)

    class Noting(HostStream):
        waits: ClassVar[list[tuple[int, int]]] = []
        copies: ClassVar[list[int]] = []
        held: ClassVar[list[int]] = []

    def compiled(device: torch.device) -> Any:
        return cuda if device.type == "cpu" else None

    launch_on(device, monkeypatch)
    monkeypatch.setattr(host_memory, "shown", shown)
    monkeypatch.setattr(cuda, "Stream", Noting)
    monkeypatch.setattr(backends, "compiled_for", compiled)
    return Noting


def shown(given: Any, device: torch.device) -> Tensor:
    """As torch takes a card's memory from others: by its address, and it keeps what has given it."""
    interface = given.__cuda_array_interface__
    kind = type("Bytes", (ctypes.c_ubyte * interface["shape"][0],), {})
    memory = kind.from_address(interface["data"][0])  # type: ignore[attr-defined]
    memory.given = given
    return torch.frombuffer(memory, dtype=torch.uint8)


def launch_on(device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have every launch from now on go to ``device``, which has the methods of a card."""
    monkeypatch.setattr(cuda_devices, "kernels_on", lambda index: device)
