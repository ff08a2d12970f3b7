"""master_weights="split": gradients exist where they are read, and are stepped as for full masters."""

from __future__ import annotations

import pytest
import torch
from specs import OptimizerCase
from torch import nn
from torch.optim import SGD

from engine import recipes
from engine.checks import (
    array,
    assert_same_bits,
    linear_loss,
    ones,
    stored_grad,
    tensor_bytes,
)
from engine.split_cases import bytes_kept, gradients, masters, pair, wrap


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
