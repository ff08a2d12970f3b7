"""Every 16-bit value and every float32 that decides a rounding, through every cast."""

from __future__ import annotations

import functools

import numpy as np
import oracle_kernels as oracle
import products
import pytest
import torch
from kernel_cases import KINDS, SIXTEEN, assert_same_values, raw

from fp16opt.kernels import (
    CastStats,
    GradStats,
    multi_tensor_axpby,
    multi_tensor_cast,
    multi_tensor_scale,
    multi_tensor_unscale,
    native,
)

ALL = torch.from_numpy(np.arange(65536, dtype=np.uint16).view(np.int16).copy())


@pytest.mark.parametrize("dtype", SIXTEEN, ids=str)
def test_all_halves_and_bfloats_through_every_cast(level: str, dtype: torch.dtype) -> None:
    kind = KINDS[dtype]
    stored = ALL.view(dtype)
    wide = oracle.decode(raw(stored), kind)
    # Up: times one into float32.
    up, stats = torch.zeros(65536), GradStats.allocate(1, "cpu")
    multi_tensor_unscale([stored], [up], torch.tensor(1.0), stats)
    assert_same_values(up.numpy(), wide, "single", "up")
    # Up and scaled: exact for every finite half at a power of two.
    multi_tensor_unscale([stored], [up], torch.tensor(2.0**-24), stats)
    assert_same_values(up.numpy(), oracle.unscale(raw(stored), kind, np.float32(2.0**-24)).out, "single", "scaled")
    # Down again: every value comes back.
    down, cast_stats = torch.zeros(65536, dtype=dtype), CastStats.allocate(1, "cpu")
    multi_tensor_cast([torch.from_numpy(wide.copy())], [down], cast_stats)
    assert_same_values(raw(down), raw(stored), kind, "down")
    # Through axpby and scale, which read and write all types.
    multi_tensor_axpby(1.0, [stored], 0.0, [torch.zeros(65536)], [down])
    assert_same_values(raw(down), oracle.axpby(1.0, wide, 0.0, np.zeros(65536, "f4"), kind), kind, "axpby")
    doubled = stored.clone()
    multi_tensor_scale([doubled], torch.tensor(2.0))
    assert_same_values(raw(doubled), oracle.scale(raw(stored), kind, np.float32(2.0)), kind, "scale")


@functools.cache
def deciding_floats() -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    """For every 16-bit value and each neighbour in float32: the value, the ties around it, and one ulp beside them.

    Without ``--all`` every fifth of all these.
    """
    near = []
    for kind in ("half", "bfloat16"):
        bits = oracle.decode(np.arange(65536, dtype=np.uint16), kind).view(np.uint32).astype(np.int64)
        # ties: half a last place above the value, for normal halves, bfloats and, coarser, subnormal halves
        for above in (0, 0x1000, 0x8000, *(1 << k for k in range(13, 23, 3))):
            near += [bits + above + d for d in (-1, 0, 1)]
    chosen = np.concatenate(near)
    every = np.unique(chosen[(chosen >= 0) & (chosen < 1 << 32)].astype(np.uint32)).view(np.float32)
    return every[:: 1 if products.takes_all else 5]


@functools.cache
def rounded(kind: str) -> np.ndarray[tuple[int], np.dtype[np.uint16]]:
    return oracle.encode(deciding_floats(), kind)


@pytest.mark.parametrize("dtype", SIXTEEN, ids=str)
def test_ties_and_their_neighbours(level: str, dtype: torch.dtype) -> None:
    masters = deciding_floats()
    param, stats = torch.zeros(masters.size, dtype=dtype), CastStats.allocate(1, "cpu")
    multi_tensor_cast([torch.from_numpy(masters)], [param], stats)
    assert_same_values(raw(param), rounded(KINDS[dtype]), KINDS[dtype], "cast")


@pytest.mark.skipif(not native.available(), reason="the compiled CPU module is not installed")
@pytest.mark.parametrize("dtype", SIXTEEN, ids=str)
def test_nans_have_the_same_bits_at_every_level(dtype: torch.dtype) -> None:
    masters = (
        torch.arange(0x7F800001, 0x7F800001 + (1 << 23) - 1, 997, dtype=torch.int64).to(torch.int32).view(torch.float32)
    )
    before, seen = native.module.simd_level(), []
    for level in native.module.simd_levels():
        native.module.use_simd_level(level)
        param = torch.zeros(masters.numel(), dtype=dtype)
        multi_tensor_cast([masters], [param], CastStats.allocate(1, "cpu"))
        assert bool(torch.isnan(param).all())
        seen.append(raw(param).tolist())
    native.module.use_simd_level(before)
    assert all(bits == seen[0] for bits in seen)


@pytest.mark.slow
@pytest.mark.skipif(not native.available(), reason="the compiled CPU module is not installed")
@pytest.mark.parametrize("dtype", SIXTEEN, ids=str)
def test_all_floats_to_sixteen_bits(dtype: torch.dtype) -> None:
    """Against torch's own cast, which agrees with numpy's on all floats that are not nan."""
    before, step = native.module.simd_level(), 1 << 25
    stats, param = CastStats.allocate(1, "cpu"), torch.zeros(step, dtype=dtype)
    for start in range(-(1 << 31), 1 << 31, step):
        masters = torch.arange(start, start + step, dtype=torch.int32).view(torch.float32)
        wanted = masters.to(dtype)
        for name in native.module.simd_levels():
            native.module.use_simd_level(name)
            multi_tensor_cast([masters], [param], stats)
            different = param.view(torch.int16) != wanted.view(torch.int16)
            if different.any():
                assert torch.isnan(masters[different]).all(), (name, start)
                assert torch.isnan(param[different]).all(), (name, start)
    native.module.use_simd_level(before)
