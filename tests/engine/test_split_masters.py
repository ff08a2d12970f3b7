"""master_weights="split": the masters and the state of full ones, in 4 bytes a parameter."""

from __future__ import annotations

import pytest
import torch
from specs import OptimizerCase, params_of
from torch.optim import SGD

from engine import recipes
from engine.checks import assert_same, assert_same_bits, groups_params, ones
from engine.split_cases import ONE_PASS, masters, pair, state_of, step_both, wrap


@pytest.mark.parametrize("case", params_of(ONE_PASS))
@pytest.mark.parametrize("clip", [None, 0.5])
def test_masters_and_state_equal_full_ones_in_bfloat16(case: OptimizerCase, clip: float | None) -> None:
    opts, models = pair(case, torch.bfloat16)
    start = masters(opts[1])
    for k in range(5):
        step_both(opts, models, k, case.kind, clip=clip)
        for full, split in zip(masters(opts[0]), masters(opts[1]), strict=True):
            assert_same_bits(split, full, f"{case.id} step {k}")
    assert_same(state_of(opts[1]), state_of(opts[0]), "optimizer state")
    assert any(not torch.equal(a, b) for a, b in zip(start, masters(opts[1]), strict=True))


@pytest.mark.parametrize("case", params_of(ONE_PASS))
def test_masters_equal_full_ones_in_mixed_dtypes_with_clip(case: OptimizerCase) -> None:
    opts, models = pair(case, recipes.MIXED)
    for k in range(4):
        step_both(opts, models, k, case.kind, clip=0.5)
        for full, split in zip(masters(opts[0]), masters(opts[1]), strict=True):
            # float16: a step of 2^-40 is what the remainder resolves below 2^-16; weights of N(0, 1) drift by that
            assert torch.allclose(split, full, rtol=1e-6, atol=2.0**-38)


@pytest.mark.parametrize("mode", ["full", "split"])
def test_marks_on_parameters_are_on_what_is_stepped(mode: str) -> None:
    """Optimizers such as Muon variants read marks that users set."""
    p = ones(2)
    p.use_muon = True  # type: ignore[attr-defined]
    opt = wrap(SGD([p], lr=0.5), mode)
    assert groups_params(opt)[0].use_muon is True
