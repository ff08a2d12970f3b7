"""Lists whose entries are all None, through a cache that has served others: nothing is touched or stale."""

from __future__ import annotations

import pytest
import torch

from fp16opt.kernels import (
    CallCache,
    CastStats,
    GradStats,
    multi_tensor_cast,
    multi_tensor_check,
    multi_tensor_l2norm,
    multi_tensor_refresh_masters,
    multi_tensor_sample,
    multi_tensor_unscale,
)


@pytest.mark.parametrize("again", [True, False])
def test_lists_without_tensors_after_lists_with_some(implementation: str, again: bool) -> None:
    grads, outs = [torch.full((9,), 2.0).half(), None], [torch.zeros(9), None]
    absent: list[torch.Tensor | None] = [None, None]
    one, stats, tables = torch.tensor(1.0), GradStats.allocate(2, "cpu"), [CallCache() for _ in range(6)]
    cast, now = CastStats.allocate(2, "cpu"), torch.zeros(2, dtype=torch.int64)
    then, taken = torch.ones(2, dtype=torch.int64), torch.zeros(2, dtype=torch.int32)

    def run(first: list[torch.Tensor | None], second: list[torch.Tensor | None]) -> torch.Tensor:
        multi_tensor_unscale(first, second, one, stats, cache=tables[0])
        multi_tensor_check(first, one, stats, cache=tables[1])
        multi_tensor_cast(second, first, cast, cache=tables[2])
        multi_tensor_sample(first, now, cache=tables[3])
        multi_tensor_refresh_masters(second, first, now, then, taken, cache=tables[4])
        return multi_tensor_l2norm(first, cache=tables[5])[0]

    for _ in range(2 if again else 0):
        assert run(grads, outs) == 6.0
    before = [None if t is None else t.clone() for t in (*grads, *outs, cast.overflow, now)]
    sums = stats.sumsq.clone()
    for _ in range(2):
        assert run(absent, absent) == 0.0
    for old, new in zip(before, (*grads, *outs, cast.overflow, now), strict=True):
        assert (old is None and new is None) or (old is not None and new is not None and torch.equal(old, new))
    assert torch.equal(stats.sumsq, sums), "rows of absent entries stay as they are"
    assert stats.norm.item() == float(sums.sum()) ** 0.5
    outs[0] = torch.zeros(9)
    if again:
        grads[0].fill_(4.0)
        assert run(grads, outs) == 12.0


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_the_norm_of_nothing(device: str) -> None:
    """Statistics say where the numbers of lists without tensors lie."""
    stats = GradStats.allocate(2, device)
    multi_tensor_check([None, None], torch.tensor(1.0, device=device), stats)
    assert stats.norm.device.type == device
    if device == "cpu":
        assert stats.norm.item() == 0.0
