"""Real data: a run with fused steps ends where the general path ends. And every quotient that a root can meet."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from named_steps import adam_step

from fp16opt.kernels import native
from fp16opt.kernels.operations import AdamOptions, Factors


@pytest.mark.slow
@pytest.mark.skipif(not native.available(), reason="needs the compiled module")
@pytest.mark.parametrize("level", native.module.simd_levels() if native.available() else [])
def test_every_quotient_of_a_root(level: str) -> None:
    """All 2^24 significands and exponent parities over 40 divisors: the bits of numpy's division.

    amsgrad's maximum holds x*x, whose root is x; with beta1 = 0, lr = 1 and gradient -1 the update is 1 / (x / by).
    """
    before = native.module.simd_level()
    native.module.use_simd_level(level)
    try:
        x = np.concatenate([np.arange(1 << 23, dtype=np.uint32) + np.uint32(base) for base in (0x3F800000, 0x40000000)])
        x = x.view(np.float32)
        one, zeros = torch.tensor(1.0), torch.zeros(x.size)
        rng = np.random.default_rng(0)
        for beta2 in [0.999, 0.5, 0.99, 1 - 2.0**-20, *rng.uniform(0.01, 0.9999, 36)]:
            largest = torch.from_numpy(x * x)
            assert np.array_equal(np.sqrt(x * x), x)
            master = torch.zeros(x.size)
            options = [AdamOptions(1.0, 0.0, float(beta2), 0.0, 0.0, True, False)]
            adam_step(
                [torch.full((x.size,), -(2.0**-30))], [master], [zeros.clone()], [zeros.clone()], [torch.tensor(0.0)],
                options, [0], Factors(one, one), max_exp_avg_sqs=[largest],
            )  # fmt: skip
            by = np.float32((1 - float(beta2)) ** 0.5)
            assert np.array_equal(master.numpy(), np.float32(2.0**-30) / (x / by))
    finally:
        native.module.use_simd_level(before)
