"""The half of the unscaling pass that looks and writes nothing."""

from __future__ import annotations

import pytest
import torch
from kernel_cases import copies, raw, seeds
from test_kernel_bits import unscale_case

from fp16opt.kernels import (
    CallCache,
    GradStats,
    multi_tensor_unscale,
)


@pytest.mark.parametrize("special", [0.0, 0.001])
@seeds(4)
def test_looking_finds_what_writing_finds_and_writes_nothing(implementation: str, seed: int, special: float) -> None:
    grads, outs, _, _ = unscale_case(600 + seed, special)
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


def test_a_finite_gradient_that_overflows_is_flagged_by_a_look(implementation: str) -> None:
    for numel in (1, 64, 100, 70000):
        grad = torch.zeros(numel)
        grad[-1] = 3e38
        stats = GradStats.allocate(1, "cpu")
        multi_tensor_unscale([grad], [torch.zeros(numel)], torch.tensor(4.0), stats, write=False)
        assert (stats.nonfinite.item(), stats.found_inf.item()) == (1, 1.0)
        assert grad[-1] == torch.tensor(3e38)
