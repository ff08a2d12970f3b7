"""Page-locked memory of the host, against a driver that only takes notes."""

from __future__ import annotations

import mmap
from pathlib import Path

import cards
import pytest

from fp16opt.kernels import cuda_devices, host_memory


def test_pages_are_locked_mapped_and_unlocked_after_the_work_of_the_card(
    libraries: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    host = cards.pretend(cards.build(libraries), monkeypatch)
    found = cuda_devices.kernels_on(1)
    assert found is not None
    host.noted()
    slab = host_memory.Slab.allocate(5000, found)
    size = 2 * mmap.PAGESIZE
    assert len(slab) == size
    assert host.noted("cuMemHostRegister", "cuMemHostGetDevicePointer", "cuCtxPushCurrent") == [
        "cuCtxPushCurrent 1000",
        f"cuMemHostRegister {size} flags 3",  # portable, and mapped
        "cuMemHostGetDevicePointer",
    ]
    assert slab.card_address != slab.host_address
    assert bytes(slab) == bytes(size)
    found.wait()
    assert host.noted("cuCtxSynchronize", "cuMemHostUnregister") == ["cuCtxSynchronize"]
    del slab
    assert host.noted("cuCtxSynchronize", "cuMemHostUnregister") == ["cuCtxSynchronize", "cuMemHostUnregister"]
    assert found.shares_memory() is False


@pytest.mark.parametrize("name", ["cuMemHostRegister", "cuMemHostGetDevicePointer"])
def test_what_the_driver_says_is_told_and_nothing_stays_locked(
    libraries: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.undo()
    host = cards.pretend(cards.build(libraries), monkeypatch)
    found = cuda_devices.kernels_on(0)
    assert found is not None
    host.fail(name, 2)
    try:
        with pytest.raises(host_memory.CannotLock, match=f"ulimit -l is .*; {name}_v2: CUDA reports CUDA_ERROR_OTHER"):
            host_memory.Slab.allocate(100, found)
    finally:
        host.fail(name, 0)
    assert len(host.noted("cuMemHostUnregister")) == (name != "cuMemHostRegister")
