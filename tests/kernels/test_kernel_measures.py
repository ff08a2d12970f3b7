"""multi_tensor_measure and multi_tensor_compare: the numbers of reports, of every backend against the oracle."""

from __future__ import annotations

import functools

import numpy as np
import oracle_kernels as oracle
import pytest
import torch
from kernel_cases import KINDS, LAYOUTS, SIXTEEN, UP_TO_SINGLE, assert_same_number, lay_out, make, raw, seeds, shape_of
from torch import Tensor

from fp16opt.kernels import COMPARED, MEASURED, CallCache, Snapshots, multi_tensor_compare, multi_tensor_measure

LONG = [16384, 16385, 16520, 65535, 65536, 65537, 131073, 200000]
SHARED = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


def assert_same(found: Tensor, wanted: list[float], names: tuple[str, ...], where: str) -> None:
    for name, one, other in zip(names, found.tolist(), wanted, strict=True):
        assert_same_number(one, other, f"{where}: {name}")


def any_shape(rng: np.random.Generator) -> tuple[int, ...]:
    return (int(rng.choice(LONG)),) if rng.random() < 0.2 else shape_of(rng)


# What is measured, and what the oracle says of it, is computed once for all implementations; nobody writes to it.


@functools.cache
def gradients(seed: int) -> tuple[list[Tensor | None], list[list[float]]]:
    rng = np.random.default_rng(seed)
    grads: list[Tensor | None] = []
    for _ in range(24):
        dtype, layout = SHARED[int(rng.integers(0, 4))], LAYOUTS[int(rng.integers(0, len(LAYOUTS)))]
        grad = make(rng, any_shape(rng), dtype, layout, special=0.02 * (rng.random() < 0.3))
        grads.append(None if rng.random() < 0.1 else grad)
    return grads, [[0.0] * 5 if g is None else oracle.measured(raw(g), KINDS[g.dtype]) for g in grads]


@seeds(4)
def test_gradients_of_random_lists(implementation: str, seed: int) -> None:
    (grads, wanted), tables = gradients(seed), CallCache()
    for _ in range(2):
        numbers = multi_tensor_measure(grads, cache=tables)
        for i, want in enumerate(wanted):
            assert_same(numbers[i], want, MEASURED, f"tensor {i}")


@functools.cache
def every_number(dtype: torch.dtype) -> tuple[list[Tensor], list[list[float]]]:
    """Some of the numbers alone, and all of them together."""
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    tensors = [*every.split(1)[::97], every]
    return tensors, [oracle.measured(raw(one), KINDS[dtype]) for one in tensors]


@pytest.mark.parametrize("dtype", SIXTEEN, ids=str)
def test_every_16_bit_number_is_counted_as_what_it_is(level: str, dtype: torch.dtype) -> None:
    tensors, wanted = every_number(dtype)
    numbers = multi_tensor_measure(tensors)
    for i, want in enumerate(wanted):
        assert_same(numbers[i], want, MEASURED, f"tensor {i}")
    _, _, bits = oracle.TYPES[KINDS[dtype]]
    assert numbers[-1, 2].item() == 2
    assert numbers[-1, 3].item() == 2 * (2**bits - 1)


@pytest.mark.parametrize("place", [0, 4095, 4096, 65535, 65536, 70000])
@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan, 6e4])
def test_the_largest_is_found_wherever_it_is(level: str, place: int, bad: float) -> None:
    grad = torch.full((70001,), 0.5, dtype=torch.float16)
    grad[place] = bad
    _, largest, _, _, near = multi_tensor_measure([grad])[0].tolist()
    assert_same_number(largest, abs(float(grad[place])), "largest")
    assert near == 1


def pair(rng: np.random.Generator, shape: tuple[int, ...], layout: str) -> tuple[Tensor, Tensor, Tensor, str]:
    """(a master before, after, its weight, the kind of the weight); 16-bit weights may have no master."""
    weight_of, has_master = SHARED[int(rng.integers(0, 4))], rng.random() < 0.7
    of = torch.float32 if has_master and weight_of in UP_TO_SINGLE else weight_of
    special = 0.01 * (rng.random() < 0.2)
    before = make(rng, shape, of, "plain", special)
    tiny = make(rng, shape, of) * 10.0 ** float(rng.integers(-6, 0))
    tiny[torch.from_numpy(np.asarray(rng.random(shape) < 0.2))] = 0.0
    after = before + tiny.to(of)
    before, after = lay_out(before, layout), lay_out(after, layout)
    return before, after, lay_out(after.to(weight_of), layout) if of != weight_of else after, KINDS[weight_of]


Row = tuple[Tensor, Tensor, Tensor, str]


def compared(before: Tensor, after: Tensor, weight: Tensor, kind: str) -> list[float]:
    return oracle.compared(*(oracle.decode(raw(t, after), KINDS[t.dtype]) for t in (after, before, weight)), kind)


@functools.cache
def steps(seed: int) -> tuple[list[Row], list[list[float]]]:
    """Rows of :func:`pair`; the fourth is left out by the test."""
    rng = np.random.default_rng(seed)
    rows = [pair(rng, any_shape(rng), LAYOUTS[int(rng.integers(0, len(LAYOUTS)))]) for _ in range(16)]
    return rows, [[0.0] * 7 if i == 3 else compared(*row) for i, row in enumerate(rows)]


@seeds(6)
def test_steps_of_random_lists(implementation: str, seed: int) -> None:
    (rows, wanted), tables = steps(seed), CallCache()
    masters: list[Tensor | None] = [row[1] for row in rows]
    masters[3] = None
    snapshots = Snapshots([None if i == 3 else row[0] for i, row in enumerate(rows)])
    for _ in range(2):
        numbers = multi_tensor_compare(masters, [row[2] for row in rows], snapshots, cache=tables)
        for i, ((_, after, _, kind), want) in enumerate(zip(rows, wanted, strict=True)):
            assert_same(numbers[i], want, COMPARED, f"row {i}, {kind}, {tuple(after.shape)}")


@functools.cache
def long_step(weight_of: torch.dtype, numel: int) -> tuple[Row, list[float]]:
    rng = np.random.default_rng(numel)
    before = torch.cat([torch.zeros(3), make(rng, (numel,), torch.float32)])[3:]
    after = torch.cat([torch.zeros(1), before + 1e-4 * make(rng, (numel,), torch.float32)])[1:]
    row = before, after, torch.cat([torch.zeros(1), after])[1:].to(weight_of), KINDS[weight_of]
    return row, compared(*row)


@pytest.mark.parametrize("weight_of", SIXTEEN, ids=str)
@pytest.mark.parametrize("numel", LONG)
def test_steps_of_long_tensors_at_any_alignment(implementation: str, weight_of: torch.dtype, numel: int) -> None:
    (before, after, weight, _), want = long_step(weight_of, numel)
    found = multi_tensor_compare([after], [weight], Snapshots([before]))[0]
    assert_same(found, want, COMPARED, str(numel))
    assert 0 < want[-1] < want[-2] <= numel


def test_a_long_tensor_is_estimated_well() -> None:
    """Of independent updates a share of 1/17: the sum of squares is off by about sqrt(2 * 17 / n), here 0.6 %."""
    draw = torch.Generator().manual_seed(0)
    before, change = torch.randn(1000, 1000, generator=draw), torch.randn(1000, 1000, generator=draw) * 1e-3
    after = before + change
    found = multi_tensor_compare([after], [after.half()], Snapshots([before]))[0]
    true = (after - before).double()
    assert found[2].item() == pytest.approx(true.square().sum().item(), rel=0.02)
    assert found[3].item() == pytest.approx(true.abs().sum().item(), rel=0.02)


def test_snapshots_hold_what_was_there_and_no_more() -> None:
    draw = torch.Generator().manual_seed(0)
    for numel in (0, 1, 9, 16384, 16385, 16385 + 5, 17 * 8 * 121, 17 * 8 * 121 + 3, 10**6):
        tensor = torch.randn(numel, generator=draw)
        there = Snapshots([tensor])
        place = torch.arange(numel)
        inside = tensor if numel <= 16384 else tensor[place // 8 % 17 == 0]
        assert torch.equal(there.of(0)[: inside.numel()], inside)
        assert there.shares.item() == (1.0 if numel == 0 else numel / inside.numel()) or numel == 0
        assert there.values.numel() - inside.numel() < 8
