"""master_weights="split": with fused steps."""

from __future__ import annotations

import pytest
import torch
from specs import OptimizerCase
from torch import nn
from torch.optim import SGD

from engine.checks import (
    assert_same,
    assert_same_bits,
    one_step,
    steps_in_one_pass,
)
from engine.split_cases import (
    by_dtype,
    masters,
    pair,
    state_of,
    step_both,
    wrap,
)

FUSED = [
    OptimizerCase("AdamW", "AdamW", {"lr": 0.02, "weight_decay": 0.1}),
    OptimizerCase("Adam-amsgrad", "Adam", {"lr": 0.02, "amsgrad": True, "maximize": True, "weight_decay": 0.1}),
    OptimizerCase("SGD", "SGD", {"lr": 0.1}),
    OptimizerCase("SGD-nesterov", "SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    OptimizerCase("SGD-dampening", "SGD", {"lr": 0.1, "momentum": 0.9, "dampening": 0.5, "weight_decay": 0.1}),
]


by_fused_case = pytest.mark.parametrize("case", [pytest.param(case, id=case.id) for case in FUSED])


@by_fused_case
@by_dtype
@pytest.mark.parametrize("clip", [None, 0.5])
def test_fused_steps_on_split_masters_equal_those_on_full_ones(
    case: OptimizerCase, dtype: torch.dtype, clip: float | None
) -> None:
    """Bit for bit in bfloat16; float16 within what its remainders resolve below 2^-16."""
    kinds = (dtype, dtype, dtype, torch.float32)
    opts, models = pair(case, kinds, fused_step=True)
    assert steps_in_one_pass(opts[1])
    for k in range(5):
        step_both(opts, models, k, clip=clip)
        for full, split in zip(masters(opts[0]), masters(opts[1]), strict=True):
            if dtype == torch.bfloat16:
                assert_same_bits(split, full, f"{case.id} step {k}")
            assert torch.allclose(split, full, rtol=1e-6, atol=2.0**-38)
    if dtype == torch.bfloat16:
        assert_same(state_of(opts[1]), state_of(opts[0]), "optimizer state")


def test_a_sparse_gradient_is_refused_before_a_write() -> None:
    table = nn.Parameter(torch.ones(5, 3).bfloat16())
    opt = wrap(SGD([table], lr=0.5), named_parameters=[("table", table)])
    opt.backward(nn.functional.embedding(torch.tensor([1, 3, 1]), table, sparse=True).float().sum())
    with pytest.raises(RuntimeError, match=r"the gradient of 'table' is sparse. With master_weights=\"split\""):
        opt.step()
    assert_same([table], [torch.ones(5, 3).bfloat16()])
    opt.zero_grad()
    one_step(opt, [table], [1.0])
    assert table[0, 0].item() == 0.5
