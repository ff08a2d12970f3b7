"""The CUDA kernels on a machine without a GPU: the same source, compiled as plain C++, in which a kernel's blocks and
threads take their turns one after the other, in an order that is shuffled for every launch and phase. What this shows:
packing, indices, tails, alignment, lane and tree order, who adds up when, that no order is relied on, and the Python
around it. What it can't show: races within a phase, barriers, and CUDA itself."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import shlex
import shutil
import subprocess
import sysconfig
from collections.abc import Sequence
from importlib.machinery import ExtensionFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from fp16opt.kernels import backends, cuda, native

CSRC = Path(__file__).resolve().parents[1] / "csrc"
FLAGS = ["-std=c++17", "-O1", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off", "-fno-math-errno"]


def build(folder: Path, *more: str) -> ModuleType:
    """The module, compiled into ``folder``. Skips the test where there is no compiler."""
    compiler = shutil.which(os.environ.get("CXX", "c++"))
    if compiler is None or not CSRC.is_dir() or importlib.util.find_spec("pybind11") is None:
        pytest.skip("needs a C++ compiler, pybind11 and the sources")
    import pybind11

    sources = [CSRC / "bindings_cuda.cpp", CSRC / "backends" / "cuda_table.cpp"]
    sources += sorted((CSRC / "backends").glob("*.cu"))
    include = ["-I", pybind11.get_include(), "-I", sysconfig.get_paths()["include"]]
    command = [compiler, *FLAGS, *more, *include, '-DFP16OPT_CUDA_NAMES="none: emulated"']
    objects, running = [], []
    for source in sources:
        objects.append(str(folder / f"{source.stem}.o"))
        running.append(subprocess.Popen([*command, "-x", "c++", "-c", str(source), "-o", objects[-1]]))
    assert [job.wait() for job in running] == [0] * len(running), shlex.join(command)
    library = folder / "_cuda.so"
    subprocess.run([compiler, *more, "-shared", *objects, "-o", str(library)], check=True)
    loader = ExtensionFileLoader("_cuda", str(library))
    spec = importlib.util.spec_from_loader("_cuda", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


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

    def hold(self, tensors: Sequence[Tensor]) -> None:
        assert all(isinstance(tensor, Tensor) for tensor in tensors)
        type(self).held.extend(tensor.data_ptr() for tensor in tensors)

    def staging(self, size: int) -> Tensor:
        type(self).copies.append(size)
        memory = torch.empty(size, dtype=torch.uint8)
        ctypes.memset(memory.data_ptr(), 0x5A, size)
        return memory


def shuffle(module: ModuleType) -> ctypes.c_uint64:
    """The state of what puts the module's blocks and threads in order: see csrc/launch/cuda.cuh. 0 is first to last."""
    return ctypes.c_uint64.in_dll(ctypes.CDLL(str(module.__file__)), "fp16opt_shuffle")


def use(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> type[HostStream]:
    """Have the emulated kernels serve CPU tensors for one test. Returns the class that stands for streams."""
    monkeypatch.setattr(shuffle(module), "value", 1)

    class Noting(HostStream):
        waits: ClassVar[list[tuple[int, int]]] = []
        copies: ClassVar[list[int]] = []
        held: ClassVar[list[int]] = []

    def compiled(device: torch.device) -> Any:
        return cuda if device.type == "cpu" else None

    monkeypatch.setattr(native, "_cpu", module)  # which reads addresses for it
    monkeypatch.setattr(native, "_cuda", module)
    monkeypatch.setattr(cuda, "Stream", Noting)
    monkeypatch.setattr(backends, "compiled_for", compiled)
    return Noting
