"""multi_tensor_refresh_masters: masters follow a written model without anybody looking."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from kernel_cases import BORDERS, make

from fp16opt.kernels import multi_tensor_refresh_masters


def digests(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


def flags(n: int) -> torch.Tensor:
    return torch.zeros(n, dtype=torch.int32)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_takes_what_differs_where_a_digest_moved(level: str, dtype: torch.dtype) -> None:
    rng = np.random.default_rng(4)
    sizes = [0, 1, 7, *BORDERS]
    masters = [make(rng, (n,), torch.float32, special=0.1 if n % 2 else 0.0) for n in sizes]
    params = [master.to(dtype) for master in masters]
    expected = []
    for k, (master, param) in enumerate(zip(masters, params, strict=True)):
        places = torch.from_numpy(rng.integers(0, max(master.numel(), 1), 3)) % max(master.numel(), 1)
        if master.numel():
            param[places] = torch.tensor([-0.0, 2.0, float("inf")]).to(dtype)
        rounded = master.to(dtype)
        differs = rounded.view(torch.int16) != param.view(torch.int16)
        expected.append(torch.where(differs, param.float(), master) if k % 3 else master.clone())
    moved = [k % 3 != 0 for k in range(len(sizes))]
    now, taken = digests(*[5 + bit for bit in moved]), flags(len(sizes))
    multi_tensor_refresh_masters(masters, params, now, torch.full_like(now, 5), taken)
    for k, (got, want) in enumerate(zip(masters, expected, strict=True)):
        same = (got.view(torch.int32) == want.view(torch.int32)) | (got.isnan() & want.isnan())
        assert same.all(), f"tensor {k} of {sizes[k]} elements"
    assert taken.tolist() == [int(bit and n > 0) for bit, n in zip(moved, sizes, strict=True)]


def test_low_bits_stay_and_flags_are_never_cleared(level: str) -> None:
    masters = [torch.full((3,), 1.0001) for _ in range(3)]
    params = [torch.tensor([1.0, 1.0, 4.0]).half() for _ in range(3)]
    taken = torch.tensor([0, 0, 1], dtype=torch.int32)
    multi_tensor_refresh_masters(masters, params, digests(0, 1, 0), digests(0, 0, 0), taken)
    assert [master[2].item() for master in masters] == [pytest.approx(1.0001), 4.0, pytest.approx(1.0001)]
    assert masters[1][0].item() == pytest.approx(1.0001), "an element that was not written keeps its low bits"
    assert taken.tolist() == [0, 1, 1]


def test_entries_that_are_none_and_layouts(level: str) -> None:
    masters = [None, torch.ones(4, 6)[:, ::2], torch.ones(3, 4).t()]
    params = [torch.zeros(2).half(), torch.zeros(4, 3).half(), torch.zeros(3, 4).half().t()]
    taken = flags(3)
    multi_tensor_refresh_masters(masters, params, digests(1, 1, 1), digests(0, 0, 0), taken)
    assert masters[1] is not None
    assert masters[2] is not None
    assert not masters[1].any()
    assert not masters[2].any()
    assert taken.tolist() == [0, 1, 1]
