"""The factor by which gradients are clipped: torch's bits, whatever the norm."""

from __future__ import annotations

import pytest
import torch
from engine.checks import assert_same_bits

from fp16opt.kernels.backends import decide_clip

INF, NAN = float("inf"), float("nan")


def test_the_factor_on_the_host_has_the_bits_of_torch_operations() -> None:
    generator = torch.Generator().manual_seed(0)
    exponents = torch.rand(4000, generator=generator, dtype=torch.float64) * 76 - 38
    norms = [0.0, 1.0, 1e-6, 2.0**-149, 3.4e38, *(10.0**exponents).tolist()]
    limits = [1.0, 0.1, 1e-3, 5.0, 1e30, 0.0, *(10.0 ** exponents[:50] / 7).tolist()]
    for k, norm in enumerate(norms):
        max_norm = limits[k % len(limits)]
        wide = torch.tensor(norm, dtype=torch.float64)
        torchs = (max_norm / (wide.float() + 1e-6)).clamp(max=1.0)
        assert_same_bits(decide_clip(wide, None, max_norm)[1], torchs)
        assert_same_bits(decide_clip(wide, torch.tensor(0.0), max_norm)[1], torchs)
        assert float(decide_clip(wide, torch.tensor(1.0), max_norm)[1]) == 1.0


@pytest.mark.parametrize(("norm", "factor"), [(NAN, NAN), (INF, 0.0), (1e39, 1e-39), (1e300, 1e-300)], ids=str)
def test_the_factor_of_norms_beyond_float32(norm: float, factor: float) -> None:
    _, found = decide_clip(torch.tensor(norm, dtype=torch.float64), None, 1.0)
    assert_same_bits(found, torch.tensor(factor, dtype=torch.float64).float())
