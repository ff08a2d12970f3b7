"""The tests of the tests: each comparison of the suite must fail for an optimizer that is broken on
purpose."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import oracle
import products
import pytest
import torch
from engine.checks import (
    array,
    assert_same,
    assert_same_bits,
    normal,
)
from specs import ALWAYS, CASES, LATER


@pytest.mark.parametrize(
    ("got", "want"),
    [
        (torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.0000002])),
        (torch.tensor([0.0]), torch.tensor([-0.0])),
        (torch.ones(2), torch.ones(2, dtype=torch.float64)),
        (torch.ones(2), torch.ones(2, 1)),
        (torch.ones(0), torch.ones(0, 1)),
        (torch.tensor(1.0), torch.tensor([1.0])),
    ],
    ids=["one_ulp", "sign_of_zero", "dtype", "shape", "empty_shape", "zero_dim"],
)
def test_assert_same_bits_fails_for(got: torch.Tensor, want: torch.Tensor) -> None:
    assert_same_bits(got, got.clone())
    with pytest.raises(AssertionError):
        assert_same_bits(got, want)


def test_assert_same_bits_ignores_strides_and_compares_nan_by_bits() -> None:
    a = torch.arange(6.0).reshape(2, 3)
    assert_same_bits(a.t().contiguous().t(), a)
    assert_same_bits(torch.tensor([float("nan")]), torch.tensor([float("nan")]))
    with pytest.raises(AssertionError):
        assert_same_bits(torch.tensor([float("nan")]), torch.tensor([1.0]))


@pytest.mark.parametrize(
    "other",
    [{"a": [1, 2]}, {"a": [1], "b": 0}, {"a": (1,)}, {"a": [1.0]}, {"a": []}, {"a": [torch.tensor(1)]}, {}],
    ids=str,
)
def test_assert_same_fails_for_other_structure(other: Any) -> None:
    assert_same({"a": [1]}, {"a": [1]})
    with pytest.raises(AssertionError):
        assert_same({"a": [1]}, other)


def test_no_optimizer_class_of_torch_is_without_a_case() -> None:
    there = {
        name
        for name, cls in vars(torch.optim).items()
        if isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer) and cls is not torch.optim.Optimizer
    }
    assert there <= {c.cls for c in CASES}, "a torch.optim class has no case in specs.py"
    runs = {c.cls for c in CASES if c.missing() is None}
    version = tuple(int(x) for x in torch.__version__.split(".")[:2])
    assert runs >= ALWAYS | {c for c, since in LATER.items() if version >= since}


def test_every_loop_foreach_and_fused_case_runs_on_a_recent_torch() -> None:
    version = tuple(int(x) for x in torch.__version__.split(".")[:2])
    if version < (2, 13):
        pytest.skip("older torch lacks some arguments")
    lost = {c.id: c.missing() for c in CASES if c.missing() and not c.id.endswith("-capturable")}
    assert lost == {}


# ---- the oracle against independent facts


def test_oracle_rounding_on_every_tie_of_the_halves() -> None:
    codes = np.arange(0, 0x7BFF, dtype=np.uint16)
    low, high = (
        codes.view(np.float16).astype(np.float64),
        (codes + np.uint16(1)).view(np.float16).astype(np.float64),
    )
    middle = ((low + high) / 2).astype(np.float32)
    want = np.where(codes % 2 == 0, codes, codes + 1).astype(np.uint16)
    np.testing.assert_array_equal(oracle.round_half(middle).view(np.uint16), want)
    assert oracle.round_half(np.float32(65519.996)) == 65504
    assert np.isinf(oracle.round_half(np.float32(65520)))


def test_oracle_bfloat16_agrees_with_torch() -> None:
    u = np.random.default_rng(3).integers(0, 2**32, 200_000, dtype=np.uint32)
    x = u.view(np.float32)
    x = x[~np.isnan(x)]
    got = torch.from_numpy(oracle.round_bfloat16(x))
    assert_same_bits(got, torch.from_numpy(x).bfloat16().float())


def test_oracle_sgd_agrees_with_torch_where_constants_are_powers_of_two() -> None:
    for nesterov in (False, True):
        p = torch.nn.Parameter(normal((40,), torch.float32, 1))
        mine = [p.detach().numpy().copy()]
        ours = oracle.SGD(0.25, momentum=0.5, weight_decay=0.125, nesterov=nesterov)
        theirs = torch.optim.SGD([p], lr=0.25, momentum=0.5, weight_decay=0.125, nesterov=nesterov, foreach=False)
        for k in range(5):
            g = normal((40,), torch.float32, 50 + k)
            p.grad = g.clone()
            theirs.step()
            ours.step(mine, [g.numpy()])
        assert_same_bits(p, torch.from_numpy(mine[0]))


def test_oracle_clip_factor() -> None:
    assert oracle.clip_factor(0.0, 1.0) == 1.0
    assert oracle.clip_factor(2.0, 1.0) == np.float32(1.0 / 2.000001)
    total, same = oracle.clip([np.array([1.0, np.inf], np.float32)], 1.0)
    assert np.isinf(total)
    assert np.isinf(same[0][1])
    assert oracle.norm([np.full(4, 1e30, np.float32), None]) == pytest.approx(2e30, rel=1e-7)  # 1e30 rounded to float32
    assert oracle.norm([array([3.0, -4.0]).numpy()], 1.0) == 7.0
    assert oracle.norm([array([3.0, -4.0]).numpy()], float("inf")) == 4.0


# ---- which cells of products are run


def cells_of(
    which: str, *tables: tuple[str, list[Any]], **fixtures: list[Any]
) -> list[tuple[str, str, dict[Any, Any]]]:
    """All cells of a test, as pytest collects them."""
    rows = itertools.product(*[values for _, values in tables], *fixtures.values())
    names = [[name] for name, _ in tables]
    each = [dict(zip([*(name for name, _ in tables), *fixtures], row, strict=True)) for row in rows]
    return [("test", which, products.axes_of(names, values)) for values in each]


def test_each_value_of_each_axis_is_run() -> None:
    cells = cells_of("", ("a", ["p", "q", "r"]), ("b", [10, 20, 30, 40, 50]), c=["x", "y"])
    taken = [cells[place][2] for place in products.chosen(cells)]
    assert 5 <= len(taken) <= 7
    for axis in cells[0][2]:
        assert {cell[axis] for cell in taken} == {cell[axis] for _, _, cell in cells}
