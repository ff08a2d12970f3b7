"""master_weights="none": 16-bit parameters are stepped themselves, scaled, checked and skipped like any other."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fp16opt import MixedPrecisionOptimizer, StaticLossScaler

DTYPES = [torch.float16, torch.bfloat16]


def wrapped(dtype: torch.dtype, **kwargs: Any) -> tuple[Tensor, Tensor, MixedPrecisionOptimizer]:
    half, full = torch.nn.Parameter(torch.ones(4, dtype=dtype)), torch.nn.Parameter(torch.ones(4))
    inner = torch.optim.SGD([half, full], lr=0.5, momentum=0.5)
    return half, full, MixedPrecisionOptimizer(inner, master_weights="none", **kwargs)


@pytest.mark.parametrize("dtype", DTYPES)
def test_it_trains_like_the_plain_optimizer_on_16_bit_weights(dtype: torch.dtype) -> None:
    half, full, optimizer = wrapped(dtype, loss_scale=128.0)
    plain_half, plain_full = torch.nn.Parameter(torch.ones(4, dtype=dtype)), torch.nn.Parameter(torch.ones(4))
    plain = torch.optim.SGD([plain_half, plain_full], lr=0.5, momentum=0.5)
    factor = torch.tensor([0.25, 1.0, -3.0, 8.0])
    for _ in range(4):
        for _ in range(2):  # the second is added to what the first one left, scaled
            optimizer.backward((half.float() * factor).sum() + (full * factor).sum())
            ((plain_half.float() * factor).sum() + (plain_full * factor).sum()).backward()
        optimizer.update_master_grads()
        for master, mine, other in zip(optimizer.master_params(), (half, full), (plain_half, plain_full), strict=True):
            assert torch.equal(master.grad, other.grad)
            assert master.grad.dtype == other.dtype
            assert torch.equal(mine.grad, other.grad * 128.0)
        optimizer.step()
        plain.step()
        optimizer.zero_grad()
        plain.zero_grad()
        assert torch.equal(half, plain_half)
        assert torch.equal(full, plain_full)
    master = next(iter(optimizer.master_params()))
    assert (master.data_ptr(), master.dtype, master is half) == (half.data_ptr(), dtype, False)
    assert optimizer.state[half]["momentum_buffer"].dtype == dtype
    assert "without masters" in repr(optimizer)
    assert optimizer.state_dict()["masters"] == [None, None]


def test_a_gradient_that_does_not_fit_after_unscaling_is_an_overflow() -> None:
    half, _, optimizer = wrapped(torch.float16, loss_scale=2.0**-4)
    optimizer.backward((half.float() * 2.0**13).sum() * 2.0**3 + 0.0)  # 2**16 is no half
    optimizer.step()
    assert optimizer.step_was_skipped


def test_sums_are_refused() -> None:
    """There is no FP32 memory for them: asked for, or by a second scale in one step."""
    with pytest.raises(ValueError, match=r'grad_accumulation="fp32" does not go with master_weights="none"'):
        wrapped(torch.float16, grad_accumulation="fp32")
    half, _, optimizer = wrapped(torch.float16, loss_scale=8.0)
    optimizer.backward((half.float() * 3.0).sum())
    with pytest.raises(RuntimeError, match=r"a further loss scale in one step: .* has no FP32 masters"):
        optimizer.backward(half.float().sum(), scaler=StaticLossScaler(64.0))
    optimizer.step()
    assert not optimizer.step_was_skipped


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("dtype", DTYPES)
def test_fused_sgd_steps_whole_vectors_of_16_bit_weights(dtype: torch.dtype, momentum: float) -> None:
    """torch 2.13's own leaves all but the last few elements as they were."""
    results = []
    for fused in (True, False):
        weight = torch.nn.Parameter(torch.linspace(-1.0, 1.0, 70).to(dtype))
        inner = torch.optim.SGD([weight], lr=0.5, momentum=momentum, fused=fused)
        optimizer = MixedPrecisionOptimizer(inner, master_weights="none", loss_scale=8.0)
        for _ in range(3):
            optimizer.backward((weight.float() * torch.linspace(0.5, 2.0, 70)).sum())
            optimizer.step()
            optimizer.zero_grad()
        assert inner.param_groups[0]["fused"] is fused
        results.append(weight.detach())
    assert bool((results[0] != torch.linspace(-1.0, 1.0, 70).to(dtype)).all())
    assert torch.equal(results[0], results[1])


@pytest.mark.parametrize("dtype", DTYPES)
def test_frozen_16_bit_weights_leave_fused_sgd_fused(dtype: torch.dtype) -> None:
    weight = torch.nn.Parameter(torch.ones(70))
    frozen = torch.nn.Parameter(torch.ones(70, dtype=dtype), requires_grad=False)
    inner = torch.optim.SGD([weight, frozen], lr=0.5, fused=True)
    seen: list[bool] = []
    inner.register_step_pre_hook(lambda optimizer, *_: seen.append(optimizer.param_groups[0]["fused"]))
    optimizer = MixedPrecisionOptimizer(inner, fused_step=False)
    optimizer.backward(weight.sum())
    optimizer.step()
    assert seen == [True]
    assert torch.equal(weight.detach(), torch.full((70,), 0.5))


# -- what is said of it ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "eps", "says"),
    [(torch.float16, 1e-8, True), (torch.float16, 1e-4, False), (torch.bfloat16, 1e-8, False)],
    ids=str,
)
def test_an_eps_that_is_0_in_fp16_is_named(
    dtype: torch.dtype, eps: float, says: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Where a gradient is 0 such a step is 0/0, and the weight nan."""
    groups = [{"params": [torch.nn.Parameter(torch.ones(2, dtype=one))]} for one in (torch.float32, dtype)]
    MixedPrecisionOptimizer(torch.optim.AdamW(groups, eps=eps), master_weights="none")
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == says
    if says:
        assert "group 1: eps=1e-08 is 0 in FP16" in said[0]
        assert "Use eps=1e-4 or more, or masters" in said[0]


@pytest.mark.parametrize(
    ("saved", "here", "says"),
    [
        ("none", "full", r'saved with master_weights="none": wrap it so here'),
        ("none", "split", r'saved with master_weights="none": wrap it so here'),
        ("full", "none", r'With master_weights="none" here: wrap it with masters'),
    ],
)
def test_a_checkpoint_of_the_other_kind_is_refused_by_the_option(saved: str, here: str, says: str) -> None:
    made = []
    for kind in (saved, here):
        weight = torch.nn.Parameter(torch.ones(4, dtype=torch.float16))
        opt = MixedPrecisionOptimizer(torch.optim.AdamW([weight], eps=1e-4), master_weights=kind, loss_scale=8.0)
        opt.backward(weight.float().sum())
        opt.step()
        made.append(opt)
    with pytest.raises(ValueError, match=says):
        made[1].load_state_dict(made[0].state_dict())
