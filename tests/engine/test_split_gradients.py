"""master_weights="split": gradients exist where they are read, and are stepped as for full masters."""

from __future__ import annotations

import pytest
import torch
from specs import OptimizerCase
from torch import nn
from torch.optim import SGD, AdamW

from engine import recipes
from engine.checks import (
    array,
    assert_same_bits,
    by_step,
    groups_params,
    linear_loss,
    one_step,
    ones,
    stored_grad,
    tensor_bytes,
)
from engine.split_cases import bytes_kept, gradients, masters, pair, wrap
from fp16opt import DynamicLossScaler

pytestmark = by_step


def test_gradients_are_made_when_read_and_edits_count() -> None:
    p, q = ones(3), ones(2)
    opt = wrap(SGD([p, q], lr=0.5))
    opt.backward(linear_loss([p, q], [2.0, 4.0]))
    first, second = opt.master_params()
    assert [stored_grad(m) for m in (first, second)] == [None, None], "nobody has read them"
    assert_same_bits(first.grad, array([2.0] * 3, torch.float32))
    first.grad.mul_(0.25)
    next(opt.master_params()).grad.add_(0.5)
    opt.step()
    assert p.tolist() == [0.5] * 3
    assert q.tolist() == [-1.0] * 2
    second.grad = None
    opt.zero_grad()
    assert first.grad is None


def test_a_gradient_that_is_set_counts() -> None:
    p = ones(2)
    opt = wrap(SGD([p], lr=0.5))
    opt.backward(linear_loss([p], [2.0]))
    for m in opt.master_params():
        m.grad = torch.full((2,), 0.5)
    opt.step()
    assert p.tolist() == [0.75] * 2


@pytest.mark.parametrize("through", ["master_params", "param_groups"])
def test_torchs_own_clip_works_on_masters(through: str) -> None:
    p, q = ones(3), ones(1)
    opt = wrap(SGD([p, q], lr=1.0))
    opt.backward(linear_loss([p, q], [2.0, 2.0]))
    clipped = list(opt.master_params()) if through == "master_params" else groups_params(opt)
    assert float(nn.utils.clip_grad_norm_(clipped, 2.0)) == 4.0
    opt.step()
    assert torch.allclose(q.float(), torch.zeros(1), atol=1e-3)


def test_clip_gives_the_norm_and_the_bits_of_full_masters() -> None:
    opts, models = pair(OptimizerCase("", "SGD", {"lr": 0.5, "momentum": 0.9}), recipes.MIXED)
    for k, clips in enumerate(([1.0], [0.5, 2.0], [1e9], [0.25, 0.125, 1.0], [3.0])):
        norms = []
        for opt, params in zip(opts, models, strict=True):
            opt.zero_grad()
            opt.backward(linear_loss(params, gradients(params, k, False)))
            norms.append([float(opt.clip_master_grads(c, norm_type=1.0 if k == 4 else 2.0)) for c in clips])
        assert norms[0] == pytest.approx(norms[1], rel=1e-7)
        grads = [[m.grad for m in opt.master_params()] for opt in opts] if k == 3 else [[], []]
        for a, b in zip(*grads, strict=True):
            assert_same_bits(b, a)
        for opt in opts:
            opt.step()
    for full, split in zip(masters(opts[0]), masters(opts[1]), strict=True):
        assert torch.allclose(split, full, rtol=1e-6, atol=2.0**-38)


def test_update_again_undoes_a_clip_and_reads_gradients_anew() -> None:
    p = ones(2)
    opt = wrap(SGD([p], lr=1.0))
    opt.backward(linear_loss([p], [4.0]))
    opt.clip_master_grads(0.5)
    next(opt.master_params()).grad.zero_()
    opt.update_master_grads()
    assert_same_bits(next(opt.master_params()).grad, array([4.0] * 2, torch.float32))


def test_at_a_scale_of_one_a_gradient_written_after_backward_counts_and_is_checked() -> None:
    p = ones(2)
    opt = wrap(SGD([p], lr=0.5), loss_scale=1.0)
    opt.backward(linear_loss([p], [1.0]))
    p.grad.mul_(2.0)
    opt.step()
    assert p.tolist() == [0.0, 0.0]
    opt.zero_grad()
    opt.backward(linear_loss([p], [1.0]))
    with torch.no_grad():
        p.grad[1] = float("inf")
    opt.step()
    assert opt.step_was_skipped
    assert p.tolist() == [0.0, 0.0]


@pytest.mark.parametrize("call", ["backward", "clip_master_grads", "step"])
def test_at_another_scale_a_gradient_written_after_backward_is_refused_by_name(call: str) -> None:
    """Scaled or true, nobody can tell."""
    p, q = ones(2), ones(2)
    opt = wrap(SGD([p, q], lr=0.5), loss_scale=8.0, named_parameters=[("first", p), ("second", q)])
    opt.backward(linear_loss([p, q], [1.0, 1.0]))
    q.grad.mul_(2.0)
    arguments = {"backward": (linear_loss([p, q], [1.0, 1.0]),), "clip_master_grads": (1.0,)}.get(call, ())
    with pytest.raises(RuntimeError, match="second"):
        getattr(opt, call)(*arguments)
    assert (p.tolist(), q.tolist()) == ([1.0, 1.0], [1.0, 1.0])
    one_step(opt, [p, q], [1.0, 1.0])
    assert (p.tolist(), q.tolist()) == ([0.5, 0.5], [0.5, 0.5])


def test_accumulation_in_fp32_and_with_two_scalers() -> None:
    p = ones(2)
    opt = wrap(SGD([p], lr=1.0), loss_scale=4.0, grad_accumulation="fp32")
    opt.backward(linear_loss([p], [1.0]))
    for _ in range(100):
        opt.backward(p.float().sum() * 2.0**-13)
    assert p.grad is None
    opt.step()
    assert_same_bits(next(opt.master_params()), array([-100 * 2.0**-13] * 2, torch.float32))
    opt.zero_grad()
    other = DynamicLossScaler(2.0)
    opt.backward(linear_loss([p], [1.0]))
    opt.backward(linear_loss([p], [0.5]), scaler=other)
    opt.step()
    assert_same_bits(next(opt.master_params()), array([-1.5 - 100 * 2.0**-13] * 2, torch.float32))


def test_no_fp32_gradient_stays_in_memory_after_zero_grad() -> None:
    before = tensor_bytes()
    p = nn.Parameter(torch.ones(100_000).half())
    opt = wrap(SGD([p], lr=1.0), loss_scale=4.0, grad_accumulation="fp32")
    for _ in range(2):
        opt.backward(linear_loss([p], [1.0]))
        opt.backward(linear_loss([p], [1.0]))
        opt.step()
        opt.zero_grad()
    assert 4.0 <= bytes_kept(opt, before) / 100_000 <= 4.25


def test_a_parameter_without_gradient_is_left_alone() -> None:
    p, q = ones(2), ones(2)
    opt = wrap(AdamW([{"params": [p]}, {"params": [q]}], lr=0.5, weight_decay=0.5))
    one_step(opt, [p, q], [1.0, None])
    assert q.tolist() == [1.0, 1.0]
    assert len(opt.state) == 1
    one_step(opt, [p, q], [1.0, 1.0])
    one_step(opt, [p, q], [None, 1.0])
    assert [int(opt.state[m]["step"]) for m in groups_params(opt)] == [2, 2]


def test_a_plain_backward_and_a_grad_scaler() -> None:
    p = ones(2)
    opt = wrap(SGD([p], lr=0.5), loss_scale=1.0)
    linear_loss([p], [1.0]).backward()
    opt.step()
    assert p.tolist() == [0.5, 0.5]
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for bad in (False, True):
        opt.zero_grad()
        scaler.scale(linear_loss([p], [float("inf") if bad else 1.0])).backward()
        scaler.unscale_(opt)
        scaler.step(opt)
        scaler.update()
        assert p.tolist() == [0.0, 0.0]
