"""What ranks are compared by: a hash in which every bit of every element counts, wherever it lies."""

from __future__ import annotations

import pytest
import torch

from fp16opt.distributed.replicas import content_hash

DTYPES = [torch.float16, torch.bfloat16, torch.int16, torch.int8, torch.float32, torch.float64]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 7, 2**18, 2**18 + 3])
def test_one_bit_counts_at_every_border(dtype: torch.dtype, size: int) -> None:
    bits = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    value = torch.arange(size).to(torch.float32).to(dtype)
    plain = content_hash(value)
    for place in {0, size // 2, min(2**18 - 1, size - 1), size - 1}:
        for bit in (0, 8 * dtype.itemsize - 1):
            mask = 1 << bit if bit < 8 * dtype.itemsize - 1 else torch.iinfo(bits).min
            other = value.clone()
            other.view(bits)[place] ^= mask
            assert content_hash(other) != plain, (place, bit)
    assert content_hash(value.clone()) == plain


def test_order_counts_and_layout_does_not() -> None:
    x = torch.randn(6, 5, 4, generator=torch.Generator().manual_seed(0))
    assert content_hash(x) == content_hash(x.transpose(0, 2).contiguous().transpose(0, 2))
    assert content_hash(x) != content_hash(x.transpose(0, 1).reshape(6, 5, 4))
    assert content_hash(torch.zeros(0)) == content_hash(torch.zeros(0, 3))
    assert content_hash(torch.tensor(2.0)) == content_hash(torch.tensor([2.0]))


def test_differences_of_neighbours_do_not_cancel() -> None:
    """+1, -2, +1 would, were the weights on a line; swapped slabs would, were slabs added up alike."""
    bits = torch.full((64,), 1000, dtype=torch.int32)
    plain = content_hash(bits.view(torch.float32))
    for place in range(62):
        other = bits.clone()
        other[place : place + 3] += torch.tensor([1, -2, 1], dtype=torch.int32)
        assert content_hash(other.view(torch.float32)) != plain
    slabs = torch.randn(2, 2**18, generator=torch.Generator().manual_seed(0))
    assert content_hash(slabs) != content_hash(slabs.flip(0))
