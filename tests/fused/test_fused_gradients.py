"""Where FP32 gradients exist, in every mode: those that are read, and no others."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from engine.checks import assert_same_bits, linear_loss, ones
from torch import Tensor, nn
from torch.optim import SGD

from fp16opt import MixedPrecisionOptimizer
from fused.test_fused_steps import give_grads, made


def wrapped(params: list[Tensor], mode: dict[str, Any], lr: float = 1.0, **more: Any) -> MixedPrecisionOptimizer:
    return MixedPrecisionOptimizer(SGD(params, lr=lr), **mode, **more)


def test_the_norm_has_the_same_bits_once_gradients_were_read() -> None:
    params, opt = made("sgd")
    give_grads(opt, params, 0)
    norm = opt.clip_master_grads(1e9)
    _ = [master.grad for master in opt.master_params()]
    assert_same_bits(opt.clip_master_grads(1e9), norm)


def test_gradients_do_not_wait_for_a_step_that_has_begun() -> None:
    """The option is gone by the time that the closure runs, but the optimizer steps itself all the same."""
    p = ones(4)
    inner = SGD([p], lr=1.0)
    opt = MixedPrecisionOptimizer(inner, fused_step=True)
    inner.param_groups[0]["differentiable"] = True
    inner.register_step_pre_hook(lambda o, *_: o.param_groups[0].update(differentiable=False))

    def closure() -> Tensor:
        opt.zero_grad()
        loss = linear_loss([p], [0.5])
        opt.backward(loss)
        return loss.detach()

    opt.step(closure)
    assert p.tolist() == [0.5] * 4


def test_repr_says_so_when_a_sparse_gradient_has_ended_steps_in_one_pass() -> None:
    weight = nn.Parameter(torch.ones(8, 4, dtype=torch.float16))
    opt = wrapped([weight], {"fused_step": "auto"}, loss_scale=8.0)
    assert "step: fused" in repr(opt)
    for sparse, says in ((True, "step: general (the gradient of"), (False, "step: fused")):
        opt.zero_grad()
        opt.backward(nn.functional.embedding(torch.tensor([1, 1, 2]), weight, sparse=sparse).float().sum())
        opt.step()
        assert says in repr(opt)


@pytest.mark.parametrize("mode", [{"fused_step": False}, {"fused_step": True}, {"grad_accumulation": "fp32"}], ids=str)
def test_a_sparse_gradient_has_torch_warn_of_nothing(mode: dict[str, Any]) -> None:
    weight = nn.Parameter(torch.ones(8, 4, dtype=torch.bfloat16))  # torch adds no sparse FP16 ones on a CPU
    opt = wrapped([weight], mode, loss_scale=8.0)
    always = torch.is_warn_always_enabled()
    torch.set_warn_always(True)  # else torch warns once in a process
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for _ in range(2):
                opt.backward(nn.functional.embedding(torch.tensor([1, 1, 2]), weight, sparse=True).float().sum())
            opt.clip_master_grads(100.0)
            opt.step()
    finally:
        torch.set_warn_always(always)
    assert weight.tolist() == [[1.0] * 4, [-3.0] * 4, [-1.0] * 4] + [[1.0] * 4] * 5


def test_a_gradient_of_another_shape_put_in_between_clip_and_step_is_not_walked() -> None:
    """``.data`` counts no version, so the kernels' own checks are the last that can tell."""
    params = [nn.Parameter(torch.ones(64, 64).half()) for _ in range(3)]
    opt = MixedPrecisionOptimizer(SGD(params, lr=0.5), loss_scale=8.0, fused_step=True)
    for _ in range(3):  # the call sites know their lists
        one_more(opt, params)
        opt.step()
    before = [p.detach().clone() for p in params]
    one_more(opt, params)
    assert params[1].grad is not None
    params[1].grad.data = torch.ones(1, 1).half()
    with pytest.raises(ValueError, match=r"has shape \(1, 1\)"):
        opt.step()
    assert all(torch.equal(p, old) for p, old in zip(params, before, strict=True))


def one_more(opt: MixedPrecisionOptimizer, params: list[nn.Parameter]) -> None:
    opt.zero_grad()
    opt.backward(torch.stack([p.float().sum() for p in params]).sum())
    opt.clip_master_grads(1e9)
