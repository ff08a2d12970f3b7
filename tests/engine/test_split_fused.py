"""master_weights="split": with fused steps."""

from __future__ import annotations

import logging

import pytest
import torch
from specs import OptimizerCase
from torch import nn
from torch.optim import SGD, AdamW

from engine.checks import (
    assert_same,
    assert_same_bits,
    groups_params,
    linear_loss,
    normal,
    one_step,
    ones,
    steps_in_one_pass,
    tensor_bytes,
)
from engine.split_cases import (
    by_dtype,
    bytes_kept,
    gradients,
    half_sgd,
    masters,
    pair,
    state_of,
    step_both,
    through_file,
    trained,
    wrap,
)
from fp16opt import DynamicLossScaler

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


@by_dtype
def test_fused_steps_keep_strides_and_read_gradients(dtype: torch.dtype) -> None:
    values = normal((2, 3, 4, 5), torch.float32, 1)
    for layout in (values.to(memory_format=torch.channels_last), values.permute(3, 1, 0, 2)):
        opts, models = [], []
        for mode in ("full", "split"):
            param = nn.Parameter(layout.to(dtype))
            opts.append(wrap(AdamW([param], lr=0.1), mode, fused_step=True))
            models.append([param])
        for k in range(3):
            for opt, params in zip(opts, models, strict=True):
                opt.zero_grad()
                opt.backward(linear_loss(params, gradients(params, k, False)))
                if k == 1:
                    for m in opt.master_params():
                        m.grad.mul_(0.5)
                opt.step()
        full, split = (next(opt.master_params()) for opt in opts)
        assert split.stride() == full.stride()
        assert torch.allclose(split, full, rtol=1e-6, atol=2.0**-38)
        key = groups_params(opts[1])[0]
        assert opts[1].state[key]["exp_avg"].stride() == full.stride()


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


def test_fused_split_memory_skip_and_resume() -> None:
    kept = tensor_bytes()
    params = [nn.Parameter(torch.ones(200_000).bfloat16()) for _ in range(4)]
    opt = wrap(AdamW(params, lr=0.1), scaler=DynamicLossScaler(8.0), fused_step=True)
    one_step(opt, params, [1.0] * 4)
    before = masters(opt)
    one_step(opt, params, [1.0, 1.0, float("nan"), 1.0])
    assert opt.step_was_skipped
    assert_same(masters(opt), before)
    del before
    opt.zero_grad()
    assert 4.0 <= bytes_kept(opt, kept) / 800_000 <= 4.25
    saved = through_file(opt.state_dict())
    fresh = [nn.Parameter(torch.zeros_like(p)) for p in params]
    other = wrap(AdamW(fresh, lr=0.1), scaler=DynamicLossScaler(8.0))
    other.load_state_dict(saved)
    for o, ps in ((opt, params), (other, fresh)):
        one_step(o, ps, [0.5] * 4)
    for a, b in zip(masters(opt), masters(other), strict=True):
        assert torch.allclose(a, b, rtol=1e-6, atol=1e-6)


def test_writes_to_the_model_are_noticed_with_fused_steps() -> None:
    p = ones(3, torch.bfloat16)
    opt = wrap(SGD([p], lr=2.0**-13), fused_step=True)
    one_step(opt, [p], [1.0])
    p.data[1] = 4.0
    one_step(opt, [p], [1.0])
    assert masters(opt)[0].tolist() == [1 - 2.0**-13, 4 - 2.0**-13, 1 - 2.0**-13]


@pytest.mark.parametrize("mode", ["full", "split"])
def test_loading_the_other_modes_weights_is_no_write_with_fused_steps(
    mode: str, caplog: pytest.LogCaptureFixture
) -> None:
    opt, params = trained("full" if mode == "split" else "split", torch.bfloat16)
    fresh = [nn.Parameter(torch.zeros_like(p)) for p in params]
    loaded = wrap(half_sgd(fresh), mode, loss_scale=1.0, fused_step=True)
    loaded.load_state_dict(opt.state_dict())
    with torch.no_grad():
        for p, value in zip(fresh, params, strict=True):
            p.copy_(value)
    with caplog.at_level(logging.WARNING):
        for o, ps in ((opt, params), (loaded, fresh)):
            one_step(o, ps, gradients(ps, 50, False))
    assert "written" not in caplog.text
    assert_same(masters(loaded)[0], masters(opt)[0])
