"""What is refused, with which words."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fp16opt.kernels import (
    CallCache,
    CastStats,
    GradStats,
    Snapshots,
    backend,
    multi_tensor_axpby,
    multi_tensor_cast,
    multi_tensor_compare,
    multi_tensor_join,
    multi_tensor_l2norm,
    multi_tensor_lerp,
    multi_tensor_measure,
    multi_tensor_refresh_masters,
    multi_tensor_sample,
    multi_tensor_scale,
    multi_tensor_split,
    multi_tensor_unscale,
    multi_tensor_unscale_clipped,
    native,
)
from fp16opt.kernels.operations import Factors, LionOptions, SgdOptions, multi_tensor_step

ONE = torch.tensor(1.0)


def unscale(grads: Any, outs: Any, inv: Any = ONE, n: int = 1, **more: Any) -> None:
    multi_tensor_unscale(grads, outs, inv, GradStats.allocate(n, "cpu"), **more)


def refresh(masters: list[Tensor], now: Tensor, then: Tensor, taken: Tensor) -> None:
    multi_tensor_refresh_masters(masters, [HALF], now, then, taken)


def stats_with(name: str, tensor: Tensor) -> GradStats:
    """Statistics are checked when they are made."""
    return dataclasses.replace(GradStats.allocate(1, "cpu"), **{name: tensor})


HALF, SINGLE, DOUBLE, INTS = (
    torch.ones(3, dtype=d) for d in (torch.float16, torch.float32, torch.float64, torch.int32)
)
SPARSE = torch.ones(3).to_sparse()
META = torch.ones(3, device="meta")
DIGEST, FLAG = torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int32)
# What is said, and the call that is refused.
WRONG_TYPES: list[tuple[str, Callable[[], object]]] = [
    (
        r"float16, bfloat16 or float32 into .* got grads\[0\] float16, outs\[0\] float64",
        lambda: unscale([HALF], [DOUBLE]),
    ),
    (r"grads\[0\] float64, outs\[0\] float32", lambda: unscale([DOUBLE], [SINGLE])),
    (r"grads\[0\] must be a tensor or None, got list", lambda: unscale([[1.0]], [SINGLE])),
    (r"grads\[0\] must be a dense tensor, got layout torch.sparse_coo", lambda: unscale([SPARSE], [SINGLE])),
    (r"inv_scale must be a tensor, got float", lambda: unscale([HALF], [SINGLE], 1.0)),
    (r"inv_scale must be float32, got float64", lambda: unscale([HALF], [SINGLE], ONE.double())),
    (
        r"GradStats: sumsq must be float64, got float32",
        lambda: multi_tensor_unscale([HALF], [SINGLE], ONE, stats_with("sumsq", torch.zeros(1))),
    ),
    (r"multi_tensor_l2norm: wants float16, .* got tensors\[0\] int32", lambda: multi_tensor_l2norm([INTS])),
    (r"multi_tensor_scale: wants", lambda: multi_tensor_scale([INTS], torch.tensor(0.5))),
    (r"factor must be a tensor, got float", lambda: multi_tensor_scale([SINGLE], 0.5)),
    (r"factor must be float32, got float64", lambda: multi_tensor_scale([SINGLE], ONE.double())),
    (r"b must be a float, got bool", lambda: multi_tensor_axpby(1.0, [], True, [], [])),
    (
        r"got xs\[0\] float32, ys\[0\] float64, outs\[0\] float32",
        lambda: multi_tensor_axpby(1.0, [SINGLE], 1.0, [DOUBLE], [SINGLE]),
    ),
    (
        r"found_inf must be float32, got int32",
        lambda: multi_tensor_axpby(
            1.0, [SINGLE], 1.0, [SINGLE], [SINGLE.clone()], found_inf=torch.zeros((), dtype=torch.int32)
        ),
    ),
    (
        r"multi_tensor_lerp: wants float32 averages of .*, got averages\[0\] float16, values\[0\] float32",
        lambda: multi_tensor_lerp([HALF], [SINGLE], 0.5),
    ),
    (r"weight must be a number, got bool", lambda: multi_tensor_lerp([], [], True)),
    (
        r"float32 masters into float16 or bfloat16 params, got masters\[0\] float32, params\[0\] float32",
        lambda: multi_tensor_cast([SINGLE], [SINGLE.clone()], CastStats.allocate(1, "cpu")),
    ),
    (r"CastStats: overflow must be int32, got int64", lambda: CastStats(torch.zeros(1, dtype=torch.int64))),
    (r"GradStats: norm must be a tensor, got float", lambda: stats_with("norm", 0.0)),
    (
        r"wants float16 or bfloat16, got tensors\[0\] float32",
        lambda: multi_tensor_sample([SINGLE], torch.zeros(1, dtype=torch.int64)),
    ),
    (
        r"unscale_clipped: factor must be float32, got float64",
        lambda: multi_tensor_unscale_clipped([], [], ONE, ONE.double()),
    ),
    (r"unscale_clipped: inv_scale must be a tensor, got float", lambda: multi_tensor_unscale_clipped([], [], 1.0, ONE)),
    (r"refresh_masters: now must be int64, got int32", lambda: refresh([SINGLE], FLAG, DIGEST, FLAG)),
    (r"refresh_masters: taken must be int32, got int64", lambda: refresh([SINGLE], DIGEST, DIGEST, DIGEST)),
    (r"refresh_masters: wants float32 masters and", lambda: refresh([HALF], DIGEST, DIGEST, FLAG)),
    (
        r"multi_tensor_split: wants float32 masters into float16 or bfloat16 params and int16.*params\[0\] float32",
        lambda: multi_tensor_split([SINGLE], [SINGLE], [SINGLE.short()], CastStats.allocate(1, "cpu")),
    ),
    (
        r"multi_tensor_join: wants .*int16 or int8 remainders into float32, got .*remainders\[0\] float16",
        lambda: multi_tensor_join([HALF], [HALF], [SINGLE]),
    ),
    (
        r"multi_tensor_measure: wants float16, bfloat16, float32 or float64, got grads\[0\] int32",
        lambda: multi_tensor_measure([INTS]),
    ),
    (
        r"multi_tensor_compare: wants float32 masters .*, got masters\[0\] float32, weights\[0\] float64",
        lambda: multi_tensor_compare([SINGLE], [DOUBLE], Snapshots([SINGLE])),
    ),
    (
        r"multi_tensor_sample: samples must be int64, got int32",
        lambda: multi_tensor_sample([HALF], torch.zeros(1, dtype=torch.int32)),
    ),
]
WRONG_VALUES: list[tuple[str, Callable[[], object]]] = [
    (r"outs has 2 entries, grads has 1", lambda: unscale([HALF], [SINGLE, SINGLE])),
    (r"grads\[0\] has shape \(2,\), but outs\[0\] has \(3,\)", lambda: unscale([HALF[:2]], [SINGLE])),
    (r"has shape \(3, 1\)", lambda: unscale([HALF[:, None]], [SINGLE])),
    (r"outs\[0\] is on meta, the first tensor of the call on cpu", lambda: unscale([HALF], [META])),
    (r"tensors\[1\] is on meta", lambda: multi_tensor_l2norm([SINGLE, META])),
    (r"inv_scale must be contiguous with 1 element", lambda: unscale([HALF], [SINGLE], SINGLE)),
    (r"inv_scale must be on cpu", lambda: unscale([HALF], [SINGLE], ONE.to("meta"))),
    (r"stats.nonfinite must be contiguous with 1 element", lambda: unscale([HALF], [SINGLE], n=2)),
    (
        r"GradStats: nonfinite must be contiguous of shape",
        lambda: multi_tensor_unscale(
            [HALF] * 2,
            [SINGLE.clone(), SINGLE.clone()],
            ONE,
            GradStats(
                torch.zeros(4, dtype=torch.int32)[::2],
                torch.zeros(2).double(),
                torch.zeros(()).double(),
                torch.zeros(()),
            ),
        ),
    ),
    (r"accumulate has 2 entries, grads has 1", lambda: unscale([HALF], [SINGLE], accumulate=[True] * 2)),
    (r"write=False goes with accumulate=False only", lambda: unscale([HALF], [SINGLE], accumulate=True, write=False)),
    (r"then must be contiguous with 1 element\(s\)", lambda: refresh([SINGLE], DIGEST, DIGEST.repeat(2), FLAG)),
    (
        r"remainders\[0\] has shape \(1,\)",
        lambda: multi_tensor_split([SINGLE], [HALF], [HALF[:1].short()], CastStats.allocate(1, "cpu")),
    ),
    (
        r"before\.offsets must be contiguous with 1 element\(s\)",
        lambda: multi_tensor_compare([SINGLE], [HALF], Snapshots([])),
    ),
    (
        r"before has 8 element\(s\) for masters\[0\], which needs 16 of its dtype",
        lambda: multi_tensor_compare([torch.ones(9)], [torch.ones(9).half()], Snapshots([SINGLE])),
    ),
    (
        r"before has 8 element\(s\) for masters\[0\], which needs 8 of its dtype",
        lambda: multi_tensor_compare([DOUBLE], [DOUBLE], Snapshots([SINGLE])),
    ),
    (
        r"weights\[0\] has shape \(2,\), but masters\[0\] has \(3,\)",
        lambda: multi_tensor_compare([SINGLE], [HALF[:2]], Snapshots([SINGLE])),
    ),
    (r"factor must be on cpu", lambda: multi_tensor_scale([SINGLE], ONE.to("meta"))),
    (r"check must be 'both', 'x' or 'y', got 'z'", lambda: multi_tensor_axpby(1.0, [], 1.0, [], [], check="z")),
    (r"a must fit into float32, got 1e\+39", lambda: multi_tensor_axpby(1e39, [], 1.0, [], [])),
    (r"weight must be from 0 to 1, got 1.5", lambda: multi_tensor_lerp([], [], 1.5)),
    (r"weight must be from 0 to 1, got nan", lambda: multi_tensor_lerp([], [], float("nan"))),
    (
        r"stats.overflow must be contiguous with 1 element",
        lambda: multi_tensor_cast([SINGLE], [HALF], CastStats.allocate(3, "cpu")),
    ),
    (
        r"GradStats: found_inf must be on cpu like the others, got meta",
        lambda: stats_with("found_inf", torch.zeros((), device="meta")),
    ),
    (
        r"multi_tensor_cast: stats.overflow must be on cpu like the tensors of the call, got meta",
        lambda: multi_tensor_cast([SINGLE], [HALF], CastStats.allocate(1, "meta")),
    ),
]
CASES = [(TypeError, *case) for case in WRONG_TYPES] + [(ValueError, *case) for case in WRONG_VALUES]


@pytest.mark.cells("each")
@pytest.mark.parametrize(("error", "match", "call"), CASES)
def test_refused(level: str, error: type[Exception], match: str, call: Callable[[], object]) -> None:
    values = [t.clone() for t in (HALF, SINGLE, DOUBLE)]
    with pytest.raises(error, match=match):
        call()
    assert all(torch.equal(t, v) for t, v in zip((HALF, SINGLE, DOUBLE), values, strict=True))


def test_the_position_named_counts_entries_that_are_none() -> None:
    with pytest.raises(TypeError, match=r"tensors\[2\] int32"):
        multi_tensor_l2norm([None, SINGLE, INTS])


class Site:
    """A call site: gradients, outputs and a cache, and what a call gives."""

    def __init__(self) -> None:
        self.grads: list[Tensor | None] = [torch.arange(12.0).reshape(3, 4).half() + i for i in range(3)]
        self.outs = [torch.zeros(3, 4) for _ in range(3)]
        self.cache = CallCache()
        self.stats = GradStats.allocate(3, "cpu")
        self.check()

    def check(self) -> int:
        """Call, compare with plain torch, and return how many times the lists were checked so far."""
        multi_tensor_unscale(self.grads, self.outs, torch.tensor(0.5), self.stats, cache=self.cache)
        for grad, out in zip(self.grads, self.outs, strict=True):
            if grad is not None:
                assert torch.equal(out, grad.float() * 0.5)
        return self.cache.rebuilds


@pytest.fixture
def site(level: str) -> Site:
    return Site()


def test_backend_per_device(level: str) -> None:
    wanted = {"reference": "reference", "emulated": "cuda"}.get(level, "cpu")
    assert backend("cpu") == wanted
    assert backend(torch.device("meta")) == "reference"


PLAIN, MIXED, ADDRESS = ([1], [[2]], [0]), ([1], [[2], [3]], [0]), ONE.data_ptr()


@pytest.mark.skipif(not native.available(), reason="the compiled CPU module is not installed")
class TestCompiledModule:
    """The module's own checks, behind those of native.py."""

    @pytest.mark.parametrize(
        ("table", "match"),
        [
            (([1], [[]], [0]), "dtypes must have one entry"),
            (([1], [[7]], [0]), "unknown dtype code"),
            (([1], [[2]], [1]), "a place lies outside"),
            (([-1], [[2]], [0]), "negative"),
        ],
    )
    def test_tables_that_do_not_fit_together(self, table: Any, match: str) -> None:
        with pytest.raises(ValueError, match=match):
            native.module.Table(*table)

    @pytest.mark.parametrize(
        ("table", "name", "lists", "arguments", "match"),
        [
            (PLAIN, "cast", 2, (1, 4, 0, 0, 0), "another number of lists"),
            (PLAIN, "compare", 2, (1, 4, 0, 0, 0), "another number of lists"),
            (PLAIN, "l2norm", 1, (1, 0, 0, 0, 0), "outside the statistics"),
            (PLAIN, "sample", 1, (1, 0, 0), "a row lies outside the lists"),
            (PLAIN, "sample", 1, (1, 4, 0), "16-bit"),
            (PLAIN, "measure", 1, (1, 0, 0), "a row lies outside the numbers"),
            (([1], [[3]], [0]), "measure", 1, (1, 1, 0), "numbers are of float16, bfloat16 and float32"),
            (([1], [[3]] * 3, [0]), "axpby", 3, (1, 1, 1.0, 1.0, 0, 0), "float64"),
            (MIXED, "lerp", 2, (1, 1, 0.5, False), "averages must be float32, or float64 of float64"),
            (MIXED, "unscale", 2, (1, 1, ADDRESS, 0, 0, 0, 0, True, False), "outs must be float32"),
            (MIXED, "unscale_clipped", 2, (1, 1, ADDRESS, ADDRESS), "outs must be float32"),
            (MIXED, "cast", 2, (1, 1, 0, 0, 0), "masters must be float32"),
            (
                ([0], [[2], [2]], [0]),
                "unscale",
                2,
                (1, 1, ADDRESS, 0, 0, 0, 0, False, True),
                "not written can't be added to",
            ),
        ],
    )
    def test_lists_that_do_not_fit_the_table(
        self, table: Any, name: str, lists: int, arguments: tuple[Any, ...], match: str
    ) -> None:
        with pytest.raises(ValueError, match=match):
            getattr(native.module, name)(native.module.Table(*table), [[0]] * lists, *arguments)


def test_a_step_by_a_formula_refuses_what_is_none_of_it() -> None:
    one, master, average = torch.tensor(1.0), torch.ones(2), torch.zeros(2)
    right = LionOptions(0.5, 0.5, 0.5, 0.0, False)
    for formula, options, error, message in (
        ("foo", right, ValueError, "formula: expected one of 'sgd', 'adam', 'adamw', 'lion', got 'foo'"),
        (
            "lion",
            SgdOptions(0.5, 0.0, 0.0, 0.0, False, False),
            TypeError,
            r"must be LionOptions, .* got Sgd",
        ),
        ("lion", right._replace(lr=None), TypeError, r"a number or a tensor for lr, got LionOptions\(lr=None"),
    ):
        with pytest.raises(error, match=message):
            multi_tensor_step(formula, [torch.ones(2)], [master], [[average]], [options], [0], Factors(one, one))
    assert master.tolist() == [1.0, 1.0]


@pytest.mark.parametrize("kind", ["zero tensor", "resized storage"])
def test_tensors_without_memory_are_refused(level: str, kind: str) -> None:
    tensor = torch.ones(8, dtype=torch.float16)
    if kind == "zero tensor":
        tensor = torch._efficientzerotensor(8, dtype=torch.float16)
    else:
        tensor.untyped_storage().resize_(0)
    with pytest.raises(ValueError, match=r"\[0\] has 8 elements and no memory"):
        unscale([tensor], [torch.zeros(8)])
