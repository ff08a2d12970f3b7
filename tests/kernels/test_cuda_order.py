"""No result of the CUDA kernels depends on the order in which blocks and threads run."""

from __future__ import annotations

from typing import Any

import emulated
import numpy as np
import pytest
import torch
from kernel_cases import UP_TO_SINGLE, make

from fp16opt.kernels import GradStats, multi_tensor_l2norm, multi_tensor_unscale

SIZES = (300 * 65536 + 5, 70_000, 0, 9, 65536)  # of the first one 301 chunks: more than a block has threads


@pytest.mark.parametrize("dtype", UP_TO_SINGLE)
def test_any_order_gives_the_same_bits(
    emulated_cuda: Any, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    rng = np.random.default_rng(3)
    grads = [make(rng, (1 << 16,), dtype).repeat(-(-n // 65536))[:n].clone() for n in SIZES]
    grads[1][7] = float("inf")
    emulated.use(emulated_cuda, monkeypatch)
    found = []
    for factor, offset in ((1, 0), (2_654_435_761, 3), (40_503, 200)):
        with emulated_cuda.shuffled(factor, offset):
            stats = GradStats.allocate(len(grads), "cpu")
            outs = [torch.zeros_like(grad, dtype=torch.float32) for grad in grads]
            multi_tensor_unscale(grads, outs, torch.tensor(0.3), stats)
            found.append((stats.nonfinite.tolist(), stats.sumsq.tolist(), multi_tensor_l2norm(grads)[1].tolist()))
    assert found[1] == found[0]
    assert found[2] == found[0]
    assert found[0][0] == [0, 1, 0, 0, 0]
