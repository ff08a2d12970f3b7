"""The halves of the unscaling pass: one looks and writes nothing, one writes clipped."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import oracle_kernels as oracle
import pytest
import torch
from kernel_cases import KINDS, assert_same_values, raw
from test_kernel_bits import SEEDS, UNSCALE_DTYPES, random_rows
from torch import Tensor

from fp16opt.kernels import (
    GradStats,
    PointerTables,
    multi_tensor_unscale,
    multi_tensor_unscale_clipped,
)

ONE = torch.tensor(1.0)


def copies(tensors: list[Tensor | None]) -> list[Tensor | None]:
    return [None if t is None else torch.empty_strided(t.shape, t.stride(), dtype=t.dtype).copy_(t) for t in tensors]


@pytest.mark.parametrize("special", [0.0, 0.001])
@pytest.mark.parametrize("seed", SEEDS)
def test_looking_finds_what_writing_finds_and_writes_nothing(implementation: str, seed: int, special: float) -> None:
    grads, outs = random_rows(np.random.default_rng(600 + seed), UNSCALE_DTYPES, special)
    written, looked = (GradStats.allocate(len(grads), "cpu") for _ in range(2))
    inv_scale, tables = torch.tensor(0.3), PointerTables()
    multi_tensor_unscale(grads, copies(outs), inv_scale, written)
    before = [None if t is None else (t._version, raw(t)) for t in outs]
    multi_tensor_unscale(grads, outs, inv_scale, looked, write=False, tables=tables)
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
    grads, outs = random_rows(np.random.default_rng(700 + seed), UNSCALE_DTYPES, special)
    inv_scale, factor = np.float32(0.3), np.float32(0.7)
    multi_tensor_unscale_clipped(grads, outs, torch.tensor(inv_scale), torch.tensor(factor))
    for i, (grad, out) in enumerate(zip(grads, outs, strict=True)):
        if grad is not None and out is not None:
            wide = oracle.unscale(raw(grad, out), KINDS[grad.dtype], inv_scale, None).out
            wanted = oracle.scale(wide, KINDS[out.dtype], factor)
            assert_same_values(raw(out), wanted, KINDS[out.dtype], f"tensor {i}")


def test_in_place_unscaled_and_clipped(implementation: str) -> None:
    grad = torch.linspace(-3, 3, 1000)
    wanted = (grad * 0.3) * 0.7
    multi_tensor_unscale_clipped([grad], [grad], torch.tensor(0.3), torch.tensor(0.7))
    assert torch.equal(grad, wanted)


def test_a_finite_gradient_that_overflows_is_flagged_by_a_look(implementation: str) -> None:
    for numel in (1, 64, 100, 70000):
        grad = torch.zeros(numel)
        grad[-1] = 3e38
        stats = GradStats.allocate(1, "cpu")
        multi_tensor_unscale([grad], [torch.zeros(numel)], torch.tensor(4.0), stats, write=False)
        assert (stats.nonfinite.item(), stats.found_inf.item()) == (1, 1.0)
        assert grad[-1] == torch.tensor(3e38)


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
