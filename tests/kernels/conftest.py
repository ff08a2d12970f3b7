"""Backends to run the kernel tests on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import emulated
import pytest
import torch
from products import ways_to_serve

from fp16opt.kernels import native

LEVELS = native.module.simd_levels() if native.available() else []


@pytest.fixture
def threads() -> Iterator[None]:
    """Puts torch's number of threads back."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def _use(name: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[str]:
    """Make ``name`` ("reference", "emulated", or SIMD level and thread count) what serves the CPU, for one test."""
    if name == "emulated":
        emulated.use(request.getfixturevalue("emulated_cuda"), monkeypatch)
        yield name
        return
    if name == "reference":
        monkeypatch.setattr(native, "module", None)
        yield name
        return
    level, _, count = name.partition("-")
    before = native.module.simd_level()
    native.module.use_simd_level(level)
    torch.set_num_threads(int(count))
    yield name
    native.module.use_simd_level(before)


@pytest.fixture(params=ways_to_serve(LEVELS, (1, 2, 3)))
def implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, threads: None) -> Iterator[str]:
    """Plain torch, and each SIMD level with one, two and three threads."""
    yield from _use(request.param, monkeypatch, request)


@pytest.fixture(params=ways_to_serve(LEVELS, (2,)))
def level(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, threads: None) -> Iterator[str]:
    """Plain torch, and each SIMD level: for what threads can't change."""
    yield from _use(request.param, monkeypatch, request)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where kernels and verdicts are kept for one test, with the log of the pretended compiler beside it."""
    monkeypatch.setenv("FP16OPT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("FAKE_NVRTC_LOG", str(tmp_path / "log"))
    return tmp_path / "cache"


@pytest.fixture
def host(emulated_cuda: emulated.Emulated, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Emulated kernels serve the CPU."""
    return emulated.use(emulated_cuda, monkeypatch)
