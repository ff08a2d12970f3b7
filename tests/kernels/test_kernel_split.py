"""Split masters: every float32 that decides a rounding in CI, every float32 there is in a slow test."""

from __future__ import annotations

from typing import Any

import numpy as np
import oracle_kernels as oracle
import products
import pytest
import torch
from kernel_cases import KINDS, SIXTEEN, assert_same_values, lay_out, make, raw, shape_of
from test_kernel_casts import deciding_floats

from fp16opt.kernels import (
    NOT_FINITE,
    TOO_LARGE,
    CallCache,
    CastStats,
    multi_tensor_join,
    multi_tensor_split,
    native,
)

Array = np.ndarray[Any, Any]
HALF, BFLOAT = SIXTEEN
by_dtype = pytest.mark.parametrize("dtype", SIXTEEN, ids=str)
LIMIT = 65520.0  # the first magnitude that float16 rounds to infinity


def split(values: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, CastStats]:
    weight = torch.full_like(values, 7.0, dtype=dtype)
    rest = torch.full_like(values, 7, dtype=torch.int16)
    stats = CastStats.allocate(1, "cpu")
    multi_tensor_split([values], [weight], [rest], stats)
    return weight, rest, stats


def joined(weight: torch.Tensor, rest: torch.Tensor) -> torch.Tensor:
    out = torch.full_like(weight, 7.0, dtype=torch.float32)
    multi_tensor_join([weight], [rest], [out])
    return out


# -- the oracle: numpy, in float64 and integers


def weights_wanted(x: Array, dtype: torch.dtype) -> Array:
    """uint16 bits; those of nans are whatever."""
    if dtype == HALF:
        with np.errstate(all="ignore"):
            return x.astype(np.float16).view(np.uint16)
    bits = x.view(np.uint32).astype(np.int64)
    return ((bits + 0x8000) >> 16).astype(np.uint16)


def masters_wanted(x: Array, dtype: torch.dtype) -> Array:
    """What a master is after it was split and joined."""
    if dtype == BFLOAT:
        return x.copy()
    with np.errstate(all="ignore"):
        h = x.astype(np.float16).astype(np.float64)
        exponent = np.maximum(np.frexp(np.where(np.isfinite(h), h, 1.0))[1] - 1, -14)
        exponent = np.where(h == 0, -14, exponent)
        step = np.ldexp(1.0, exponent - 26)
        steps = np.clip(np.rint((x.astype(np.float64) - h) / step), -32767, 32767)
        near = np.where(steps == 0, h, h + steps * step).astype(np.float32)
    beyond = np.abs(x) >= LIMIT
    magnitude = x.view(np.uint32) & np.uint32(0x7FFFFFFF)
    coarse = ((magnitude - np.uint32(0x477FF000)) >> np.uint32(14) << np.uint32(14)) + np.uint32(0x477FF000)
    far = np.copysign(np.where(np.isinf(x), x, coarse.astype(np.uint32).view(np.float32)), x)
    result = np.where(beyond, far, near).astype(np.float32)
    zero = (h == 0) & (steps == 0)
    return np.where(zero, np.copysign(np.float32(0), x), result).astype(np.float32)


def check(x: Array, dtype: torch.dtype) -> None:
    """Split and join ``x``, and compare with the oracle."""
    weight, rest, _ = split(torch.from_numpy(x.copy()), dtype)
    back = joined(weight, rest)
    number = ~np.isnan(x)
    kind = KINDS[dtype]
    wanted = weights_wanted(np.where(number, x, 0), dtype)
    assert_same_values(np.where(number, raw(weight), 0).astype(np.uint16), np.where(number, wanted, 0), kind, "weight")
    assert np.isnan(oracle.decode(raw(weight), kind)[~number]).all()
    assert not rest[torch.from_numpy(~number)].any(), "a nan has no remainder"
    assert_same_values(
        back.numpy(), np.where(number, masters_wanted(np.where(number, x, 0), dtype), x), "single", "back"
    )
    again, rest_again, _ = split(back, dtype)
    assert_same_values(raw(again), raw(weight), kind, "again")
    assert torch.equal(rest_again, rest)


def bounds(x: Array, back: Array) -> None:
    """float16's promise, said apart from how it is kept."""
    size = np.abs(x)
    exact = (size >= 2.0**-16) & (size < LIMIT)
    assert (back.view(np.uint32) == x.view(np.uint32))[exact].all()
    below = size < 2.0**-16
    error = np.abs(back[below].astype(np.float64) - x[below])
    assert error.max(initial=0) <= 2.0**-40
    assert (np.signbit(back) == np.signbit(x))[~np.isnan(x)].all()
    huge = (size >= LIMIT) & np.isfinite(x)
    assert np.isfinite(back[huge]).all()
    relative = np.abs(back[huge].astype(np.float64) - x[huge]) / size[huge].astype(np.float64)
    assert relative.max(initial=0) < 2.0**-9


def borders() -> Array:
    """Deciding floats of both dtypes, and the neighbourhood of each limit that the formulas have."""
    limits = [0.0, 2.0**-133, 2.0**-126, 2.0**-41, 2.0**-40, 2.0**-25, 2.0**-24, 2.0**-17, 2.0**-16, 2.0**-15, 2.0**-14]
    limits += [1.0, 2048.0, 65504.0, LIMIT, 65536.0, 3.3895e38, np.finfo(np.float32).max]
    bits = np.array(limits, dtype=np.float32).view(np.uint32).astype(np.int64)
    reach = 2000 if products.takes_all else 100
    near = (bits[:, None] + np.arange(-reach, reach + 1)).reshape(-1)
    infinite = np.arange(0x7F800000, 0x7F800100)
    near = np.concatenate([near, 0x477FF000 + np.arange(-20 * reach, 20 * reach), infinite])
    near = np.concatenate([near[(near >= 0) & (near <= 0x7FFFFFFF)], [0x7FFFFFFF, 0x7FC00000, 0x7F7F8000, 0x7F7F7FFF]])
    both = np.concatenate([near, near + 0x80000000]).astype(np.uint32).view(np.float32)
    return np.concatenate([both, deciding_floats()])


@by_dtype
def test_borders(level: str, dtype: torch.dtype) -> None:
    x = borders()
    check(x, dtype)
    if dtype == HALF:
        weight, rest, _ = split(torch.from_numpy(x), dtype)
        bounds(x, joined(weight, rest).numpy())


@by_dtype
def test_random_bits(level: str, dtype: torch.dtype) -> None:
    rng = np.random.default_rng(5)
    check(rng.integers(0, 2**32, 300_000, dtype=np.uint32).view(np.float32), dtype)


@pytest.mark.parametrize("width", [torch.int16, torch.int8], ids=str)
@by_dtype
def test_a_zero_with_any_remainder_is_a_master_that_rounds_to_it(
    level: str, dtype: torch.dtype, width: torch.dtype
) -> None:
    """Remainders of the other sign are those of a weight that was there before: the zero stands for itself."""
    most = torch.iinfo(width).max
    rest = torch.arange(-most - (dtype == BFLOAT), most + 1).to(width)
    steps = rest.long().numpy()
    for sign, bits in ((1, 0), (-1, -0x8000)):
        zero = torch.full(rest.shape, bits, dtype=torch.int16).view(dtype)
        master = joined(zero, rest)
        kept = steps * sign if dtype == HALF else steps  # of bfloat16 a remainder counts away from zero
        if dtype == HALF:
            size = np.ldexp(kept.clip(0).astype(np.float32), -40 if width == torch.int16 else -32)
        else:
            size = (kept.clip(0) << (0 if width == torch.int16 else 8)).astype(np.uint32).view(np.float32)
        assert_same_values(master.numpy(), np.copysign(size, sign), "single", f"{sign} 0")
        weight, again, stats = torch.full_like(zero, 7.0), torch.full_like(rest, 7), CastStats.allocate(1, "cpu")
        multi_tensor_split([master], [weight], [again], stats)
        assert torch.equal(weight.view(torch.int16), zero.view(torch.int16)), "it rounds to the weight that is there"
        assert torch.equal(again, torch.where(torch.from_numpy(kept > 0), rest, 0).to(width))


@by_dtype
def test_a_weight_alone_stands_for_itself(level: str, dtype: torch.dtype) -> None:
    """What refresh relies on: all weights but float16's infinities have the remainder 0."""
    every = torch.from_numpy(np.arange(65536, dtype=np.uint16).view(np.int16).copy()).view(dtype)
    weight, rest, _ = split(every.float(), dtype)
    assert_same_values(raw(weight), raw(every), KINDS[dtype], "weight")
    infinite = torch.isinf(every) & (dtype == HALF)
    assert torch.equal(rest, torch.where(infinite, -1, 0).short())
    assert_same_values(joined(weight, rest).numpy(), every.float().numpy(), "single", "back")


@by_dtype
def test_flags(level: str, dtype: torch.dtype) -> None:
    first = LIMIT if dtype == HALF else float(np.uint32(0x7F7F8000).view(np.float32))
    for value, bits in (
        *((1.0, 0), (np.nextafter(np.float32(first), np.float32(0)), 0), (first, TOO_LARGE), (-first, TOO_LARGE)),
        *((np.inf, NOT_FINITE), (-np.inf, NOT_FINITE), (np.nan, NOT_FINITE)),
    ):
        for numel, place in ((1, 0), (64, 63), (130, 129), (70_000, 65_536)):
            values = torch.zeros(numel)
            values[place] = float(value)
            assert split(values, dtype)[2].overflow.item() == bits, (value, numel)


def test_lists_of_any_layout(implementation: str) -> None:
    rng = np.random.default_rng(7)
    layouts = ("plain", "reversed", "channels_last", "sliced", "odd_ones")
    for dtype in SIXTEEN:
        masters, params, rests, outs = [], [], [], []
        for n in range(24):
            shape, layout = shape_of(rng), layouts[n % 5]
            master = make(rng, shape, torch.float32, layout, special=0.05)
            masters.append(master)
            params.append(lay_out(torch.full(shape, 7.0, dtype=dtype), layouts[n % 5 if n % 3 else (n + 1) % 5]))
            rests.append(torch.full_like(master, 7, dtype=torch.int16))
            outs.append(lay_out(torch.full(shape, 7.0), layout))
        masters[3] = None
        stats = CastStats(torch.full((24,), 9, dtype=torch.int32))
        tables, back = CallCache(), CallCache()
        for _ in range(2):
            multi_tensor_split(masters, params, rests, stats, cache=tables)
            multi_tensor_join(
                params, rests, [None if m is None else o for m, o in zip(masters, outs, strict=True)], cache=back
            )
        assert stats.overflow[3].item() == 9
        assert (params[3] == 7).all()
        assert (rests[3] == 7).all()
        for n, (master, out) in enumerate(zip(masters, outs, strict=True)):
            if master is not None:
                values = master.contiguous().reshape(-1).numpy()
                found = out.contiguous().reshape(-1).numpy()
                number = ~np.isnan(values)
                wanted = np.where(number, masters_wanted(np.where(number, values, 0), dtype), values)
                assert_same_values(found, wanted, "single", f"tensor {n}")


@pytest.mark.slow
@pytest.mark.skipif(not native.available(), reason="the compiled module is not there")
@by_dtype
def test_every_float32(dtype: torch.dtype) -> None:
    """All 2^32: weights are torch's casts (bfloat16: but for ties), and masters come back as promised."""
    exact = 0
    for start in range(0, 2**32, 2**24):
        bits = np.arange(start, start + 2**24, dtype=np.uint64).astype(np.uint32)
        x = torch.from_numpy(bits.view(np.float32))
        weight, rest, _ = split(x, dtype)
        back = joined(weight, rest)
        number = ~torch.isnan(x)
        assert torch.equal(torch.isnan(back), ~number)
        assert torch.equal(torch.isnan(weight), ~number)
        same = (back.view(torch.int32) == x.view(torch.int32)) & number
        exact += int(same.sum())
        differs = (weight.view(torch.int16) != x.to(dtype).view(torch.int16)) & number
        if dtype == BFLOAT:
            assert bool(same.sum() == number.sum())
            tie = torch.from_numpy((bits & 0x1FFFF) == 0x8000)
            assert torch.equal(differs, tie & number)
        else:
            assert not differs.any()
            found = back.numpy()
            bounds(np.where(number.numpy(), x.numpy(), 1), np.where(number.numpy(), found, 1).astype(np.float32))
            again, rest_again, _ = split(back, dtype)
            assert torch.equal(again.view(torch.int16)[number], weight.view(torch.int16)[number])
            assert torch.equal(rest_again, rest)
    nans = 2 * (2**23 - 1)
    if dtype == BFLOAT:
        assert exact == 2**32 - nans
    else:
        # [2^-16, 65520) holds what is promised; both infinities come back, too.
        low, high = (int(np.float32(v).view(np.uint32)) for v in (2.0**-16, LIMIT))
        assert exact >= 2 * (high - low) + 2
