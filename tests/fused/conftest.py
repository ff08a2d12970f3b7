"""Backends to run the tests of the one-pass steps on."""

from __future__ import annotations

from collections.abc import Iterator

import emulated
import pytest
import torch
from products import ways_to_serve

from fp16opt.kernels import native

LEVELS = native.module.simd_levels() if native.available() else []


@pytest.fixture(params=ways_to_serve(LEVELS, (1, 2, 3)))
def implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Plain torch, the emulated CUDA kernels, and each SIMD level with one, two and three threads."""
    if request.param == "emulated":
        emulated.use(request.getfixturevalue("emulated_cuda"), monkeypatch)
        yield request.param
        return
    if request.param == "reference":
        monkeypatch.setattr(native, "module", None)
        yield request.param
        return
    level, _, count = request.param.partition("-")
    before, threads = native.module.simd_level(), torch.get_num_threads()
    native.module.use_simd_level(level)
    torch.set_num_threads(int(count))
    yield request.param
    native.module.use_simd_level(before)
    torch.set_num_threads(threads)
