"""numpy oracle == reference.py == compiled kernels, at every SIMD level and thread count, bit for bit."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import oracle_kernels as oracle
import pytest
import torch
from kernel_cases import (
    KINDS,
    LAYOUTS,
    SIXTEEN,
    UP_TO_SINGLE,
    assert_same_number,
    assert_same_values,
    copies,
    make,
    raw,
    seeds,
    shape_of,
)
from torch import Tensor

from fp16opt.kernels import (
    INF,
    NAN,
    CallCache,
    CastStats,
    GradStats,
    multi_tensor_axpby,
    multi_tensor_cast,
    multi_tensor_l2norm,
    multi_tensor_lerp,
    multi_tensor_scale,
    multi_tensor_unscale,
    multi_tensor_unscale_clipped,
)


def random_rows(
    rng: np.random.Generator, dtypes: list[tuple[torch.dtype, ...]], special: float
) -> list[list[Tensor | None]]:
    """Lists of 30 tensors: a row of tensors of one shape has one of the given combinations of dtypes; some are None."""
    rows: list[tuple[Tensor | None, ...]] = []
    for _ in range(30):
        shape, combination = shape_of(rng), dtypes[int(rng.integers(0, len(dtypes)))]
        layout = str(rng.choice(LAYOUTS))
        same = rng.random() < 0.6
        row = [make(rng, shape, d, layout if same else str(rng.choice(LAYOUTS)), special) for d in combination]
        rows.append(tuple(None if rng.random() < 0.05 else t for t in row))
    return [list(column) for column in zip(*rows, strict=True)]


# Lists and what the oracle makes of them are computed once for all implementations, and written by none.
UNSCALE_DTYPES = [*((d, torch.float32) for d in UP_TO_SINGLE), (torch.float64, torch.float64)]


@functools.cache
def unscale_case(seed: int, special: float) -> tuple[list[Tensor | None], list[Tensor | None], list[bool], np.float32]:
    rng = np.random.default_rng(seed)
    grads, outs = random_rows(rng, UNSCALE_DTYPES, special)
    adds = [bool(add) for add in rng.random(len(grads)) < 0.5]
    return grads, outs, adds, np.float32(rng.choice([2.0**-16, 0.3, 1.0, 3e5]))


@functools.cache
def unscale_wanted(seed: int, special: float, accumulate: bool) -> list[oracle.Unscaled | None]:
    grads, outs, adds, inv_scale = unscale_case(seed, special)
    wanted = []
    for grad, out, add in zip(grads, outs, adds, strict=True):
        if grad is None or out is None:
            wanted.append(None)
            continue
        before = raw(out) if add and accumulate else None
        wanted.append(oracle.unscale(raw(grad, out), KINDS[grad.dtype], inv_scale, before))
    return wanted


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("special", [0.0, 0.001])
@seeds(4)
def test_unscale_of_random_lists(implementation: str, seed: int, special: float, accumulate: bool) -> None:
    grads, firsts, adds, inv_scale = unscale_case(seed, special)
    outs = copies(firsts)
    stats = GradStats.allocate(len(grads), "cpu")
    stats.nonfinite.fill_(4)
    stats.sumsq.fill_(0.5)
    tables = CallCache()
    multi_tensor_unscale(
        grads, outs, torch.tensor(inv_scale), stats, accumulate=adds if accumulate else False, cache=tables
    )
    bits, sums = [], []
    for i, wanted in enumerate(unscale_wanted(seed, special, accumulate)):
        out = outs[i]
        bits.append(4 if wanted is None else wanted.nonfinite)
        sums.append(0.5 if wanted is None else wanted.sumsq)
        if wanted is not None and out is not None:
            assert_same_values(raw(out), wanted.out, KINDS[out.dtype], f"tensor {i}")
        assert_same_number(stats.sumsq[i].item(), sums[-1], f"sumsq of tensor {i}")
    assert stats.nonfinite.tolist() == bits
    assert_same_number(stats.norm.item(), oracle.norm(sums), "norm")
    assert stats.found_inf.item() == float(any(bits))


@functools.cache
def l2norm_case(seed: int) -> tuple[list[Tensor | None], list[float]]:
    """Tensors and their sums of squares."""
    (tensors,) = random_rows(np.random.default_rng(100 + seed), [(d,) for d in KINDS], 0.0)
    kinds = ["" if t is None else KINDS[t.dtype] for t in tensors]
    values = [None if t is None else oracle.decode(raw(t), KINDS[t.dtype]) for t in tensors]
    return tensors, [0.0 if v is None else oracle.sum_of_squares(v, k) for v, k in zip(values, kinds, strict=True)]


@seeds(4)
def test_l2norm_of_random_lists_and_of_what_unscale_wrote(implementation: str, seed: int) -> None:
    tensors, sums = l2norm_case(seed)
    norm, norms = multi_tensor_l2norm(tensors)
    assert norms.tolist() == [math.sqrt(s) for s in sums]
    assert norm.item() == oracle.norm(sums)
    masters = [t for t in copies(tensors) if t is not None and t.dtype == torch.float32]
    stats = GradStats.allocate(len(masters), "cpu")
    multi_tensor_unscale(masters, masters, torch.tensor(0.7), stats)
    assert multi_tensor_l2norm(masters)[0].item() == stats.norm.item()


class Operation(NamedTuple):
    """What writes to one of its lists and has no statistics."""

    dtypes: list[tuple[torch.dtype, ...]]
    written: int
    """The list that is written to."""
    call: Callable[[list[list[Tensor | None]], float], None]
    wanted: Callable[[list[Tensor], float], oracle.Array]
    """What the oracle makes of one entry of each list, in the memory order of the one that is written."""
    settings: tuple[float, ...]


AVERAGED = [*((torch.float32, value) for value in UP_TO_SINGLE), (torch.float64, torch.float64)]
SUMMED = list(itertools.product(UP_TO_SINGLE, repeat=3))


def axpby(lists: list[list[Tensor | None]], written: float) -> None:
    multi_tensor_axpby(0.1, lists[0], -3.0, lists[1], lists[int(written)])


def axpby_wanted(row: list[Tensor], written: float) -> oracle.Array:
    out = row[int(written)]
    u, v = (oracle.decode(raw(one, out), KINDS[one.dtype]) for one in row[:2])
    return oracle.axpby(0.1, u, -3.0, v, KINDS[out.dtype])


def clipped_wanted(row: list[Tensor], factor: float) -> oracle.Array:
    """In two roundings."""
    wide = oracle.unscale(raw(*row), KINDS[row[0].dtype], np.float32(0.3), None).out
    return oracle.scale(wide, KINDS[row[1].dtype], np.float32(factor))


OPERATIONS = {
    "scale": Operation(
        [(d,) for d in KINDS],
        0,
        lambda lists, factor: multi_tensor_scale(lists[0], torch.tensor(factor)),
        lambda row, factor: oracle.scale(raw(row[0]), KINDS[row[0].dtype], np.float32(factor)),
        (0.3, 2.0**-20, math.inf),
    ),
    "lerp": Operation(
        AVERAGED,
        0,
        lambda lists, weight: multi_tensor_lerp(*lists, weight, cache=CallCache()),
        lambda row, weight: oracle.lerp(raw(row[0]), raw(row[1], row[0]), KINDS[row[1].dtype], weight),
        (0.0, 1e-4, 0.3, 0.5, 0.9, 1.0),
    ),
    **{f"axpby into {'xyo'[into]}": Operation(SUMMED, into, axpby, axpby_wanted, (into,)) for into in range(3)},
    "unscale_clipped": Operation(
        UNSCALE_DTYPES,
        1,
        lambda lists, factor: multi_tensor_unscale_clipped(*lists, torch.tensor(0.3), torch.tensor(factor)),
        clipped_wanted,
        (0.7,),
    ),
}


@functools.cache
def operation_case(name: str, setting: float, seed: int) -> tuple[list[list[Tensor | None]], list[oracle.Array | None]]:
    operation = OPERATIONS[name]
    lists = random_rows(np.random.default_rng(200 + seed), operation.dtypes, 0.01)
    rows = zip(*lists, strict=True)
    return lists, [None if any(t is None for t in row) else operation.wanted(list(row), setting) for row in rows]


@seeds(4)
@pytest.mark.parametrize(("name", "setting"), [(name, at) for name, one in OPERATIONS.items() for at in one.settings])
def test_operations_of_random_lists(implementation: str, name: str, setting: float, seed: int) -> None:
    firsts, wanted = operation_case(name, setting, seed)
    lists = list(map(copies, firsts))
    OPERATIONS[name].call(lists, setting)
    for i, (tensor, values) in enumerate(zip(lists[OPERATIONS[name].written], wanted, strict=True)):
        if tensor is not None and values is not None:
            assert_same_values(raw(tensor), values, KINDS[tensor.dtype], f"tensor {i}")


@functools.cache
def cast_case(seed: int, special: float) -> tuple[list[Tensor | None], list[Tensor | None], list[oracle.Cast | None]]:
    masters, params = random_rows(np.random.default_rng(400 + seed), [(torch.float32, d) for d in SIXTEEN], special)
    wanted = [
        None if m is None or p is None else oracle.cast(raw(m, p), KINDS[p.dtype])
        for m, p in zip(masters, params, strict=True)
    ]
    return masters, params, wanted


@pytest.mark.parametrize("special", [0.0, 0.001])
@seeds(4)
def test_cast_of_random_lists(implementation: str, seed: int, special: float) -> None:
    masters, firsts, casts = cast_case(seed, special)
    params = copies(firsts)
    stats = CastStats.allocate(len(masters), "cpu")
    stats.overflow.fill_(8)
    multi_tensor_cast(masters, params, stats)
    for i, (param, wanted) in enumerate(zip(params, casts, strict=True)):
        if param is None or wanted is None:
            assert stats.overflow[i].item() == 8
            continue
        assert_same_values(raw(param), wanted.out, KINDS[param.dtype], f"tensor {i}")
        assert stats.overflow[i].item() == wanted.overflow


@pytest.mark.parametrize("dtype", [*UP_TO_SINGLE, torch.float64], ids=str)
@pytest.mark.parametrize("numel", [1, 7, 8, 9, 63, 64, 65, 2047, 2049, 65535, 65537])
def test_one_bad_element_is_found_wherever_it_is(level: str, numel: int, dtype: torch.dtype) -> None:
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    places = sorted({p for p in (0, 7, 8, 63, 64, 65535, 65536, numel // 2, numel - 1) if p < numel})
    grads = [torch.ones(numel, dtype=dtype) for _ in range(2 * len(places) + 1)]
    for i, place in enumerate(places):
        grads[2 * i][place] = math.nan
        grads[2 * i + 1][place] = -math.inf
    stats = GradStats.allocate(len(grads), "cpu")
    for accumulate in (False, True):
        outs = [torch.zeros(numel, dtype=wide) for _ in grads]
        multi_tensor_unscale(grads, outs, torch.tensor(0.5), stats, accumulate=accumulate)
        assert stats.nonfinite.tolist() == [NAN, INF] * len(places) + [0]
        assert stats.found_inf.item() == 1.0
    if numel > 1:
        both = torch.ones(numel, dtype=dtype)
        both[0], both[numel - 1] = math.inf, math.nan
        one = GradStats.allocate(1, "cpu")
        multi_tensor_unscale([both], [torch.zeros(numel, dtype=wide)], torch.tensor(0.5), one)
        assert one.nonfinite.item() == INF | NAN
    clean = GradStats.allocate(1, "cpu")
    clean.found_inf.fill_(1.0)
    multi_tensor_unscale(grads[-1:], outs[-1:], torch.tensor(0.5), clean)
    assert clean.found_inf.item() == 0.0


def test_finite_is_judged_on_the_product_and_on_the_sum(level: str) -> None:
    stats = GradStats.allocate(4, "cpu")
    grads = [torch.tensor([3e38]), torch.tensor([3e38]), torch.tensor([3e38]), torch.tensor([1.0])]
    outs = [torch.tensor([0.0]), torch.tensor([3e38]), torch.tensor([-3e38]), torch.tensor([math.inf])]
    multi_tensor_unscale(grads, outs, torch.tensor(1.0), stats, accumulate=True)
    assert stats.nonfinite.tolist() == [0, INF, 0, 0]  # the last was infinite before
    multi_tensor_unscale(grads[:1], outs[:1], torch.tensor(2.0), stats := GradStats.allocate(1, "cpu"))
    assert (stats.nonfinite.item(), stats.found_inf.item()) == (INF, 1.0)


def test_padding_of_an_odd_length_is_never_flagged_or_summed(level: str) -> None:
    stats = GradStats.allocate(1, "cpu")
    out = torch.zeros(3)
    multi_tensor_unscale([torch.ones(3)], [out], torch.tensor(math.inf), stats)
    assert stats.nonfinite.item() == INF  # not nan, which 0 * inf in the padding would be
    found_inf = torch.zeros(())
    multi_tensor_axpby(math.inf, [torch.ones(3)], 1.0, [torch.ones(3)], [out], found_inf=found_inf)
    assert found_inf.item() == 0.0  # the inputs are finite


@pytest.mark.parametrize("check", ["both", "x", "y"])
@pytest.mark.parametrize("bad", ["x", "y"])
def test_axpby_checks_what_it_is_told(level: str, bad: str, check: str) -> None:
    lists = {"x": [torch.ones(70).half()], "y": [torch.ones(70)]}
    lists[bad][0][69] = math.nan
    found_inf, outs = torch.zeros(()), [torch.zeros(70)]
    multi_tensor_axpby(1.0, lists["x"], 1.0, lists["y"], outs, found_inf=found_inf, check=check)  # type: ignore[arg-type]
    assert found_inf.item() == float(check in ("both", bad))
    found_inf.fill_(1.0)
    multi_tensor_axpby(1.0, outs, 0.0, [torch.zeros(70)], [torch.zeros(70)], found_inf=found_inf, check="y")
    assert found_inf.item() == 1.0  # never cleared


@pytest.mark.parametrize("write", [True, False])
@pytest.mark.parametrize("inv_scale", [2.0**112, 2.0**113, -(2.0**127), math.inf, math.nan, 0.0])
def test_halves_times_an_extreme_factor(implementation: str, inv_scale: float, write: bool) -> None:
    """Their squares are summed as they are stored, so the sum alone does not say that all products are finite."""
    for numel in (3, 4096 + 5):
        grad = torch.full((numel,), 3.0).half()
        grad[-1] = 65504.0
        wanted = oracle.unscale(raw(grad), "half", np.float32(inv_scale))
        out, stats = torch.zeros(numel), GradStats.allocate(1, "cpu")
        multi_tensor_unscale([grad], [out], torch.tensor(inv_scale), stats, write=write)
        assert stats.nonfinite.item() == wanted.nonfinite
        assert stats.found_inf.item() == float(inv_scale not in (2.0**112, 0.0))
        assert_same_number(stats.sumsq.item(), wanted.sumsq, "sumsq")


RANGES = [
    (torch.float16, -20, 12),
    (torch.bfloat16, -133, 126),
    (torch.float32, -148, 126),
    *((dtype, low, low + 8) for dtype in (torch.bfloat16, torch.float32) for low in (-57, -53, 55, 59)),
]


def of_exponents(rng: np.random.Generator, numel: int, dtype: torch.dtype, low: int, high: int) -> Tensor:
    """Random numbers of magnitudes from 2^low to 2^high, which are of one binade in each group of eight."""
    binades = np.repeat(rng.uniform(low, high, -(-numel // 8)), 8)[:numel]
    return torch.from_numpy(rng.uniform(1, 2, numel) * rng.choice([-1, 1], numel) * 2.0**binades).to(dtype)


@functools.cache
def in_range(dtype: torch.dtype, low: int, high: int) -> tuple[Tensor, float, list[float]]:
    """Values, their norm, and the norms of the first groups of eight, as exact as a float64 can say it."""
    values = of_exponents(np.random.default_rng(5), 70_003, dtype, low, high)
    true = [math.sqrt(math.fsum((part.double() ** 2).tolist())) for part in (values, *values[:1024].split(8))]
    return values, true[0], true[1:]


@pytest.mark.parametrize(("dtype", "low", "high"), RANGES, ids=str)
def test_norms_are_true_to_float32(level: str, dtype: torch.dtype, low: int, high: int) -> None:
    """The bound of each group's sum, and so of all that is added to it in float64:

    float16, bfloat16: squares have 22 and 16 bits and are exact, a sum of eight is rounded three times.
    float32: a square is rounded once, a sum of four twice, and the two halves are added in float64.
    So in float32's normal range the sum is true to (1 + 2^-24)^3. Squares that leave it at the lower end are off by
    2^-150 each, eight of them by 2^-147, which of a sum from 2^-100 on is 2^-47. A group below that, or whose sum is
    above the range, is computed in float64, where every square is exact. A norm has the root: half the error.
    Sums in float64 add less than 2^-40 here.
    """
    bound = 1.5 * 2.0**-24 + 2.0**-40
    values, true, of_groups = in_range(dtype, low, high)
    norm, norms = multi_tensor_l2norm([values, *values[:1024].split(8)])
    assert abs(norms[0].item() / true - 1.0) < bound
    assert norm.item() >= norms[0].item()
    for wanted, found in zip(of_groups, norms[1:].tolist(), strict=True):
        assert abs(found - wanted) <= bound * wanted


@pytest.mark.parametrize(("dtype", "low", "high"), RANGES, ids=str)
def test_norms_of_groups_in_and_out_of_range_have_the_bits_of_the_oracle(
    implementation: str, dtype: torch.dtype, low: int, high: int
) -> None:
    rng = np.random.default_rng(6)
    values = [of_exponents(rng, numel, dtype, low, high) for numel in (70_000, 4096, 64, 9)]
    values[1][64:640] = 0.0
    sums = [oracle.sum_of_squares(oracle.decode(raw(t), KINDS[dtype]), KINDS[dtype]) for t in values]
    assert multi_tensor_l2norm(values)[1].tolist() == [math.sqrt(s) for s in sums]
    for factor in (1.0, 0.3, 2.0**-60, 2.0**60):
        wanted = [oracle.unscale(raw(t), KINDS[dtype], np.float32(factor)) for t in values]
        stats = GradStats.allocate(len(values), "cpu")
        outs = [torch.empty(t.shape) for t in values]
        multi_tensor_unscale(values, outs, torch.tensor(factor), stats)
        assert stats.sumsq.tolist() == [w.sumsq for w in wanted]
        assert stats.nonfinite.tolist() == [w.nonfinite for w in wanted]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_blocks_behind_tiny_ones_have_the_bits_of_the_oracle(implementation: str, dtype: torch.dtype) -> None:
    """A loop that has met a block of 64 tiny elements expects more; from 2^-52 on a group may be in range again."""
    rng = np.random.default_rng(7)
    magnitudes = {"tiny": (-70, -60), "edge": (-53, -51), "plain": (-2, 2), "huge": (100, 120)}
    blocks = {kind: of_exponents(rng, 64, dtype, *span) for kind, span in magnitudes.items()}
    blocks["zero"] = torch.zeros(64, dtype=dtype)
    blocks["mixed"] = torch.cat([blocks[kind][:16] for kind in ("tiny", "plain", "zero", "huge")])
    for kinds in ("tiny zero", "tiny edge zero", "tiny edge zero plain", " ".join(blocks)):  # else the largest hide all
        order = [kind for pair in itertools.product(kinds.split(), kinds.split()) for kind in pair]
        values = torch.cat([*(blocks[kind] for kind in order), blocks["tiny"][:9]])
        wanted = oracle.sum_of_squares(oracle.decode(raw(values), KINDS[dtype]), KINDS[dtype])
        assert multi_tensor_l2norm([values])[0].item() == math.sqrt(wanted), kinds


def test_a_group_that_float32_can_not_hold_counts_whatever_is_beside_it(level: str) -> None:
    """Within one block of 64: tiny, huge, zero and plain groups."""
    values = torch.zeros(64)
    values[:8], values[8:16], values[16:24], values[63] = 1e-30, 3e38, 1.0, 1e-45
    one = (values.double() ** 2).tolist()
    squares = [8 * one[0], 8 * one[8], 8 * one[16], one[63]]
    stats = GradStats.allocate(4, "cpu")
    parts = [values.clone() for _ in squares]
    for keep, part in enumerate(parts):
        part.view(8, 8)[[row for row in range(8) if row != (keep if keep < 3 else 7)]] = 0.0
    multi_tensor_unscale(parts, parts, torch.tensor(1.0), stats)
    assert stats.sumsq.tolist() == squares
    assert multi_tensor_l2norm([values])[0].item() == pytest.approx(math.sqrt(math.fsum(squares)), rel=1e-15)


def test_empty_and_absent_lists(level: str) -> None:
    assert multi_tensor_l2norm([])[0].item() == 0.0
    assert multi_tensor_l2norm([None, torch.zeros(0)])[1].tolist() == [0.0, 0.0]
    stats = GradStats.allocate(2, "cpu")
    stats.sumsq.fill_(8.0)
    stats.nonfinite[1] = INF
    multi_tensor_unscale([None, None], [None, None], torch.tensor(1.0), stats)
    assert (stats.norm.item(), stats.found_inf.item()) == (4.0, 1.0)  # absent entries count with what they hold
    multi_tensor_scale([], torch.tensor(0.5))
    multi_tensor_cast([], [], CastStats.allocate(0, "cpu"))
    multi_tensor_axpby(1.0, [], 1.0, [], [])
    stats.reset()
    assert stats.sumsq.tolist() == [0.0, 0.0]
    assert not stats.norm.item()
    assert not stats.found_inf.item()
