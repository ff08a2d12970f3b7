"""The halves of the unscaling pass: one looks and writes nothing, one writes clipped."""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
import oracle_kernels as oracle
import pytest
import torch
from kernel_cases import KINDS, assert_same_values, copies, raw
from oracle_kernels import Array
from test_kernel_bits import SEEDS, UNSCALE_DTYPES, random_rows
from torch import Tensor

from fp16opt.kernels import (
    CallCache,
    GradStats,
    multi_tensor_unscale,
    multi_tensor_unscale_clipped,
)

ONE = torch.tensor(1.0)


@functools.cache
def lists(seed: int, special: float) -> list[list[Tensor | None]]:
    """Gradients and what they are unscaled into, for all implementations; written by none."""
    return random_rows(np.random.default_rng(seed), UNSCALE_DTYPES, special)


INV_SCALE, FACTOR = np.float32(0.3), np.float32(0.7)


@functools.cache
def clipped(seed: int, special: float) -> list[Array | None]:
    """What the oracle makes of :func:`lists`, in two roundings."""
    wanted: list[Array | None] = []
    for grad, out in zip(*lists(seed, special), strict=True):
        if grad is None or out is None:
            wanted.append(None)
            continue
        wide = oracle.unscale(raw(grad, out), KINDS[grad.dtype], INV_SCALE, None).out
        wanted.append(oracle.scale(wide, KINDS[out.dtype], FACTOR))
    return wanted


@pytest.mark.parametrize("special", [0.0, 0.001])
@pytest.mark.parametrize("seed", SEEDS)
def test_looking_finds_what_writing_finds_and_writes_nothing(implementation: str, seed: int, special: float) -> None:
    grads, outs = lists(600 + seed, special)
    written, looked = (GradStats.allocate(len(grads), "cpu") for _ in range(2))
    inv_scale, tables = torch.tensor(0.3), CallCache()
    multi_tensor_unscale(grads, copies(outs), inv_scale, written)
    before = [None if t is None else (t._version, raw(t)) for t in outs]
    multi_tensor_unscale(grads, outs, inv_scale, looked, write=False, cache=tables)
    for out, kept in zip(outs, before, strict=True):
        if out is not None and kept is not None:
            assert out._version == kept[0]
            assert (raw(out).view("u1") == kept[1].view("u1")).all()
    assert torch.equal(written.nonfinite, looked.nonfinite)
    assert torch.equal(written.found_inf, looked.found_inf)
    for name in ("sumsq", "norm"):
        assert torch.equal(getattr(written, name).nan_to_num(nan=-1), getattr(looked, name).nan_to_num(nan=-1)), name


@pytest.mark.parametrize("special", [0.0, 0.001])
@pytest.mark.parametrize("seed", SEEDS)
def test_unscaled_and_clipped_is_rounded_twice(implementation: str, seed: int, special: float) -> None:
    grads, firsts = lists(700 + seed, special)
    multi_tensor_unscale_clipped(grads, outs := copies(firsts), torch.tensor(INV_SCALE), torch.tensor(FACTOR))
    for i, (out, wanted) in enumerate(zip(outs, clipped(700 + seed, special), strict=True)):
        if out is not None and wanted is not None:
            assert_same_values(raw(out), wanted, KINDS[out.dtype], f"tensor {i}")


def test_a_finite_gradient_that_overflows_is_flagged_by_a_look(implementation: str) -> None:
    for numel in (1, 64, 100, 70000):
        grad = torch.zeros(numel)
        grad[-1] = 3e38
        stats = GradStats.allocate(1, "cpu")
        multi_tensor_unscale([grad], [torch.zeros(numel)], torch.tensor(4.0), stats, write=False)
        assert (stats.nonfinite.item(), stats.found_inf.item()) == (1, 1.0)
        assert grad[-1] == torch.tensor(3e38)


@pytest.mark.cells("each")
@pytest.mark.parametrize(
    ("error", "match", "call"),
    [
        (
            ValueError,
            r"write=False goes with accumulate=False only",
            lambda: multi_tensor_unscale(
                [ONE], [ONE.clone()], ONE, GradStats.allocate(1, "cpu"), accumulate=True, write=False
            ),
        ),
        (
            TypeError,
            r"multi_tensor_unscale_clipped: factor must be float32, got float64",
            lambda: multi_tensor_unscale_clipped([ONE], [ONE.clone()], ONE, ONE.double()),
        ),
        (
            TypeError,
            r"multi_tensor_unscale_clipped: inv_scale must be a tensor, got float",
            lambda: multi_tensor_unscale_clipped([ONE], [ONE.clone()], 1.0, ONE),  # type: ignore[arg-type]
        ),
    ],
)
def test_refused(level: str, error: type[Exception], match: str, call: Callable[[], object]) -> None:
    with pytest.raises(error, match=match):
        call()
