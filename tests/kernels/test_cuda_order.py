"""No result of the CUDA kernels depends on the order in which blocks and threads run."""

from __future__ import annotations

from types import ModuleType

import emulated
import numpy as np
import pytest
import torch
from kernel_cases import UP_TO_SINGLE, make

from fp16opt.kernels import GradStats, multi_tensor_l2norm, multi_tensor_unscale

SIZES = (300 * 65536 + 5, 70_000, 0, 9, 65536)  # of the first one 301 chunks: more than a block has threads


FIRST, *OTHERS = UP_TO_SINGLE


@pytest.mark.parametrize("dtype", [FIRST, *(pytest.param(dtype, marks=pytest.mark.all) for dtype in OTHERS)])
def test_any_order_gives_the_same_bits(
    emulated_cuda: ModuleType, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    rng = np.random.default_rng(3)
    grads = [make(rng, (1 << 16,), dtype).repeat(-(-n // 65536))[:n].clone() for n in SIZES]
    grads[1][7] = float("inf")
    emulated.use(emulated_cuda, monkeypatch)
    state, found = emulated.shuffle(emulated_cuda), []
    for seed in (0, 1, 2**40 + 1):
        state.value = seed
        stats = GradStats.allocate(len(grads), "cpu")
        outs = [torch.zeros_like(grad, dtype=torch.float32) for grad in grads]
        multi_tensor_unscale(grads, outs, torch.tensor(0.3), stats)
        assert (state.value != seed) == (seed != 0), "the launch was shuffled"
        found.append((stats.nonfinite.tolist(), stats.sumsq.tolist(), multi_tensor_l2norm(grads)[1].tolist()))
    assert found[1] == found[0]
    assert found[2] == found[0]
    assert found[0][0] == [0, 1, 0, 0, 0]
