"""Pretended cards: a CUDA driver and an NVRTC that note what they are asked, and a torch that says there are cards.

What this shows: which functions are called with which arguments, in which context, on which stream, by which thread;
with emulated kernels, that a call's whole way to the driver carries the right bytes. What it can't show: CUDA."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fp16opt.kernels import backends, cuda, cuda_devices, cuda_driver, cuda_rows, nvrtc

NATIVE = Path(__file__).resolve().parent / "native"
LIBRARIES = {"fake_cuda": "libcuda.so.1", "fake_nvrtc": "libnvrtc.so.14"}
RELEASE = "14.3"  # of CUDA: a release whose NVRTC is nowhere else


FLAGS = ["-std=c++17", "-O1", "-fPIC", "-shared"]


def made_of() -> list[str]:
    """All that both libraries depend on. Skips the test where there is no compiler."""
    compiler = shutil.which(os.environ.get("CXX", "c++"))
    if compiler is None:
        pytest.skip("needs a C++ compiler")
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False).stdout
    return [compiler, version, *FLAGS, *((NATIVE / f"{source}.cpp").read_text() for source in LIBRARIES)]


def build(folder: Path) -> Path:
    """Both libraries, compiled into ``folder`` if they are not there."""
    compiler, done = made_of()[0], folder / "done"
    if not done.exists():
        for source, library in LIBRARIES.items():
            command = [compiler, *FLAGS, str(NATIVE / f"{source}.cpp"), "-o", str(folder / library), "-ldl"]
            subprocess.run(command, check=True)
        done.touch()
    return folder


class Driver:
    """The pretended driver's notes."""

    def __init__(self, folder: Path) -> None:
        self.path = str(folder / LIBRARIES["fake_cuda"])
        self._library = ctypes.CDLL(self.path)
        self._library.fake_noted.argtypes = (ctypes.c_char_p, ctypes.c_int64)
        self._library.fake_noted.restype = ctypes.c_int64

    def noted(self, *names: str) -> list[str]:
        """What was called since the last time; of the functions with these names, or of all."""
        room = ctypes.create_string_buffer(self._library.fake_noted(None, 0) + 1)
        self._library.fake_noted(room, len(room))
        lines = room.value.decode().splitlines()
        return [line for line in lines if not names or line.split()[0] in names]

    def fail(self, name: str, code: int) -> None:
        """Have a function report ``code``; 0 for no more."""
        self._library.fake_fail(name.encode(), code)

    def mute(self, yes: bool) -> None:
        """Have launches noted no more, or again."""
        self._library.fake_mute(yes)

    def run(self, libraries: Sequence[Path]) -> None:
        """Have launches run these libraries' kernels."""
        self._library.fake_open(None)
        assert all(self._library.fake_open(str(path).encode()) for path in libraries)

    def context(self, device: int) -> None:
        """The context of this thread from now on is that of a device; -1 for none."""
        self._library.fake_context(device)


def pretend(
    folder: Path, monkeypatch: pytest.MonkeyPatch, cards: Sequence[tuple[int, int]] = ((9, 0), (8, 0))
) -> Driver:
    """Have torch say that there are cards of these compute capabilities; driver and NVRTC are the pretended ones.

    Streams are those of `torch.cuda.current_stream`, which a test may replace; the handle is 0x7700000000000010 plus
    the device's number.
    """
    driver = Driver(folder)
    driver.noted()
    driver.context(-1)

    def stream(device: Any = None) -> SimpleNamespace:
        index = torch.device(device).index or 0
        handle = 0x7700000000000010 + index
        return SimpleNamespace(cuda_stream=handle, device_index=index, wait_stream=lambda other: None)

    faked = {
        "is_available": lambda: True,
        "device_count": lambda: len(cards),
        "current_device": lambda: 0,
        "get_device_capability": lambda index: cards[index],
        "get_device_name": lambda index: f"Pretended {index}",
        "current_stream": stream,
        "default_stream": stream,
        "is_current_stream_capturing": lambda: False,
    }
    for name, function in faked.items():
        monkeypatch.setattr(torch.cuda, name, function)
    monkeypatch.setattr(torch.version, "cuda", RELEASE)
    monkeypatch.setattr(cuda_devices, "Driver", lambda: cuda_driver.Driver(driver.path))
    found = str(folder / LIBRARIES["fake_nvrtc"])
    monkeypatch.setattr(cuda_devices, "find", lambda majors: nvrtc.Nvrtc(found))
    monkeypatch.setattr(cuda_devices.Proof, "verdicts_on", lambda *given: None)  # test_proof.py has the proof
    monkeypatch.setattr(cuda_devices, "_known", cuda_devices._Known())
    monkeypatch.setattr(cuda.Stream, "staging", lambda self, size: torch.empty(size, dtype=torch.uint8))
    return driver


def serve_host_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have tensors of the CPU taken for those of cuda:0."""
    monkeypatch.setattr(backends, "compiled_for", lambda device: cuda if device.type == "cpu" else None)


FIRST = len(cuda_rows.FIRST)
