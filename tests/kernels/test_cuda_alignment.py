"""The CUDA kernels take tensors that begin anywhere: the bits are those of aligned ones."""

from __future__ import annotations

import emulated
import numpy as np
import pretended
import pytest
import torch
from torch import Tensor

from fp16opt.kernels import (
    CastStats,
    multi_tensor_axpby,
    multi_tensor_join,
    multi_tensor_scale,
    multi_tensor_split,
)


def carved(values: Tensor, offset: int) -> Tensor:
    """The same values, ``offset`` elements behind an address that is a multiple of 16, between others."""
    memory = torch.empty(values.numel() + 64, dtype=values.dtype)
    memory.copy_(torch.arange(memory.numel()) % 101 + 1)  # numbers that nobody may read for values, or write
    start = (-memory.data_ptr() % 16) // memory.element_size() + 16 + offset
    return memory[start : start + values.numel()].copy_(values)


def around(tensor: Tensor) -> Tensor:
    """What lies before and behind."""
    memory = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())
    start = tensor.storage_offset()
    return torch.cat([memory[:start], memory[start + tensor.numel() :]])


@pytest.mark.parametrize("offset", range(16))
def test_elements_are_read_from_any_address(
    emulated_cuda: emulated.Emulated, monkeypatch: pytest.MonkeyPatch, offset: int
) -> None:
    """Of one, two and four bytes: the blocks of sixteen bytes that they lie in are read, and shifted."""
    sizes = [1, 2, 3, 4, 5, 6, 7, 8, 9, 15, 2048, 2049, 4093]
    rng = np.random.default_rng(offset)
    params = [torch.from_numpy(rng.standard_normal(n)).half() for n in sizes]
    params += [param.bfloat16() for param in params]
    values = [torch.from_numpy(rng.standard_normal(param.numel())).float() for param in params]
    rests = [torch.from_numpy(rng.integers(-128, 128, param.numel())).to(torch.int8) for param in params]
    aligned = [16 // size for size in (2, 1, 4)]

    def run(offsets: list[int]) -> list[list[Tensor]]:
        lists = [[carved(one, at) for one in of] for of, at in zip((params, rests, values), offsets, strict=True)]
        before = [[around(one) for one in of] for of in lists]
        multi_tensor_axpby(0.5, lists[0], 2.0, lists[2], lists[0])
        multi_tensor_join(lists[0], lists[1], lists[2])
        multi_tensor_scale(lists[0], torch.tensor(0.25))
        for of, there in zip(lists, before, strict=True):
            assert all(torch.equal(around(one), was) for one, was in zip(of, there, strict=True)), "nothing beside them"
        return lists

    wanted = run([0, 0, 0])
    emulated.use(emulated_cuda, monkeypatch)
    count = pretended.counting(monkeypatch)
    got = run([offset % aligned[0], offset % aligned[1], offset % aligned[2]])
    assert count.launches == {"axpby": 1, "join": 1, "scale": 1}
    for name, ours, theirs in zip(("params", "rests", "values"), got, wanted, strict=True):
        for k, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            assert torch.equal(a, b), f"{name}[{k}] of {a.numel()}"


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.int8])
@pytest.mark.parametrize("size", [65536, 65536 + 3 * 2048 + 77, 256 + 3, 250])
def test_threads_of_a_warp_store_blocks_together(
    emulated_cuda: emulated.Emulated, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, size: int
) -> None:
    """A warp of 32 threads has 256 elements, one behind the other. From any address all are stored in whole blocks, but
    what the first thread has of the block that it begins in, and what is behind the last whole block."""
    emulated.use(emulated_cuda, monkeypatch)
    masters, alone = torch.randn(size), min(16, 8 * dtype.itemsize) // dtype.itemsize
    for offset in range(16 // dtype.itemsize):
        before = emulated.single_stores(emulated_cuda)
        if dtype is torch.int8:
            weights, rests = carved(masters.bfloat16(), 0), carved(torch.zeros(size, dtype=dtype), offset)
            multi_tensor_split([masters], [weights], [rests], CastStats.allocate(1, "cpu"))
        else:
            multi_tensor_scale([carved(masters.to(dtype), offset)], torch.tensor(0.5))
        wanted = size % 8 if dtype is torch.int8 else 0  # of the weights
        for n in (min(256, size - first) for first in range(0, size, 256)):
            head = min(-(offset % alone) % 8, n)
            wanted += head + (n - head) % 8
        assert emulated.single_stores(emulated_cuda) - before == wanted, f"{offset=}"
