"""fused_step in the engine: the recipe's bits, gradients that exist when read, edits that count, skips."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from engine.checks import assert_same_bits, steps_in_one_pass, stored_grad, tensor_bytes
from engine.split_cases import bytes_kept
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer

from fp16opt import MixedPrecisionOptimizer
from fused import oracle_fused as oracle
from fused.oracle_fused import Element
from fused.test_fused_bits import ADAM
from fused.test_fused_bits import SGD as SGD_DEFAULTS

SHAPES = ((3, 4), (), (130,), (0,), (2, 3, 5, 7))
MAKERS: dict[str, tuple[Callable[..., Optimizer], dict[str, Any]]] = {
    "sgd": (SGD, {"lr": 0.1}),
    "momentum": (SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.2, "weight_decay": 0.01}),
    "nesterov": (SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "maximize": True}),
    "adam": (Adam, {"lr": 0.01, "weight_decay": 0.1}),
    "amsgrad": (Adam, {"lr": 0.01, "betas": (0.8, 0.95), "amsgrad": True, "maximize": True}),
    "adamw": (AdamW, {"lr": 0.01, "weight_decay": 0.1}),
    "adamw tensor lr": (AdamW, {"lr": torch.tensor(0.01)}),
    "adamw fused inside": (AdamW, {"lr": 0.01, "fused": True}),
    "sgd fused inside": (SGD, {"lr": 0.1, "momentum": 0.9, "fused": True}),
}


def parameters(seed: int = 0, dtypes: tuple[torch.dtype, ...] = (torch.float16, torch.bfloat16)) -> list[Tensor]:
    rng = np.random.default_rng(seed)
    return [
        torch.nn.Parameter(
            torch.from_numpy(np.asarray(rng.standard_normal(shape), np.float32)).to(dtypes[k % len(dtypes)])
        )
        for k, shape in enumerate(SHAPES)
    ]


def give_grads(opt: MixedPrecisionOptimizer, params: list[Tensor], seed: int) -> None:
    """What a backward leaves: scaled gradients in the parameters' dtypes."""
    rng = np.random.default_rng(1000 + seed)
    opt.zero_grad()
    opt.scale_loss(torch.zeros(()))
    for p in params:
        values = torch.from_numpy(np.asarray(rng.standard_normal(p.shape), np.float32))
        p.grad = (values * 8.0).to(p.dtype)


def wrap(name: str, params: list[Tensor], fused: Any = True, **more: Any) -> MixedPrecisionOptimizer:
    cls, options = MAKERS[name]
    half = len(params) // 2
    groups = [{"params": params[:half]}, {"params": params[half:], "lr": 0.03}]
    more.setdefault("loss_scale", 8.0)
    return MixedPrecisionOptimizer(cls(groups, **options), fused_step=fused, **more)


def elements(opt: MixedPrecisionOptimizer, name: str) -> list[Element]:
    made = []
    for master in opt.master_params():
        e = Element(master.detach().numpy().reshape(-1).copy())
        if MAKERS[name][0] is not SGD:
            e.m, e.v, e.largest = np.zeros_like(e.p), np.zeros_like(e.p), np.zeros_like(e.p)
        made.append(e)
    return made


def recipe_step(name: str, all_elements: list[Element], params: list[Tensor], clip: float) -> None:
    cls, options = MAKERS[name]
    half = len(params) // 2
    for k, (e, p) in enumerate(zip(all_elements, params, strict=True)):
        o = {**(SGD_DEFAULTS if cls is SGD else ADAM), **options}
        o["lr"] = float(o["lr"]) if k < half else 0.03
        stored = p.grad.detach().float().numpy().reshape(-1)
        if cls is SGD:
            oracle.sgd(e, stored, 1 / 8.0, clip, **o)
        else:
            o["decoupled"] = cls is AdamW
            if "weight_decay" not in options:
                o["weight_decay"] = 0.01 if cls is AdamW else 0.0
            oracle.adam(e, stored, 1 / 8.0, clip, **o)


@pytest.mark.parametrize("max_norm", [None, 0.5])
@pytest.mark.parametrize("name", MAKERS)
def test_the_engine_gives_the_recipes_bits(name: str, max_norm: float | None) -> None:
    params = parameters(dtypes=(torch.float16, torch.bfloat16, torch.float32))
    opt = wrap(name, params)
    want = elements(opt, name)
    for step in range(4):
        give_grads(opt, params, step)
        recorded = [torch.nn.Parameter(p.detach().clone()) for p in params]
        for r, p in zip(recorded, params, strict=True):
            r.grad = p.grad.clone()
        clip = 1.0
        if max_norm is not None:
            norm = opt.clip_master_grads(max_norm)
            squares = sum(float((r.grad.double() / 8.0).square().sum()) for r in recorded)
            assert float(norm) == pytest.approx(squares**0.5, rel=1e-6)
            clip = float(np.float32(max_norm) / (np.float32(norm) + np.float32(1e-6)))
        opt.step()
        recipe_step(name, want, recorded, clip)
    for e, master, model in zip(want, opt.master_params(), params, strict=True):
        assert np.array_equal(master.detach().numpy().reshape(-1), e.p)
        assert_same_bits(model, master.detach().to(model.dtype))
        state = opt.state.get(master, {})
        for key, array in (("exp_avg", e.m), ("exp_avg_sq", e.v), ("momentum_buffer", e.m)):
            if key in state:
                assert np.array_equal(state[key].numpy().reshape(-1), array), key
    assert steps_in_one_pass(opt)


@pytest.mark.parametrize("name", ["momentum", "nesterov", "adam", "amsgrad", "adamw"])
def test_close_to_torchs_foreach_after_many_steps(name: str) -> None:
    """Within 2k ulp of max|p| after k steps: each of the two rounds to the ulp of p, as large as p was, once a step."""
    cls, options = MAKERS[name]
    params, plain = parameters(seed=3, dtypes=(torch.float16,)), parameters(seed=3, dtypes=(torch.float16,))
    plain = [torch.nn.Parameter(p.detach().float()) for p in plain]
    opt = MixedPrecisionOptimizer(cls(params, **options), loss_scale=8.0, fused_step=True)
    other = cls(plain, foreach=True, **options)
    largest = [0.0] * len(plain)
    for k in range(1, 51):
        give_grads(opt, params, k)
        for p, q in zip(params, plain, strict=True):
            q.grad = p.grad.float() / 8.0
        opt.step()
        other.step()
        for i, (master, q) in enumerate(zip(opt.master_params(), plain, strict=True)):
            if q.numel():
                largest[i] = max(largest[i], float(q.detach().abs().max()))
                off = (master.detach() - q.detach()).abs().max()
                assert float(off) <= 2 * k * float(np.spacing(np.float32(largest[i]))), k


def made(name: str = "adamw", fused: Any = True, **more: Any) -> tuple[list[Tensor], MixedPrecisionOptimizer]:
    params = parameters(dtypes=(torch.float16,))
    return params, wrap(name, params, fused, **more)


@pytest.mark.parametrize("name", ["adamw", "momentum", "adamw fused inside", "sgd fused inside"])
def test_no_fp32_gradient_exists_unless_it_is_read(name: str) -> None:
    params, opt = made(name)
    for step in range(3):
        give_grads(opt, params, step)
        opt.clip_master_grads(0.5)
        assert [stored_grad(m) for m in opt.master_params()] == [None] * len(params)
        opt.step()
        assert [stored_grad(m) for m in opt.master_params()] == [None] * len(params)
    give_grads(opt, params, 3)
    opt.update_master_grads()
    masters = list(opt.master_params())
    grad = masters[2].grad
    assert_same_bits(grad, params[2].grad.float() * 0.125)
    assert stored_grad(masters[2]) is grad
    opt.zero_grad()
    assert all(m.grad is None for m in masters)


def test_a_read_gradient_has_the_bits_that_the_step_uses() -> None:
    """Reading all, some or none of the gradients changes no bit of the step, clipped or not."""
    results = []
    for reads in ((), (2,), (0, 1, 2, 3, 4)):
        params, opt = made()
        for step in range(3):
            give_grads(opt, params, step)
            if step == 1:
                opt.update_master_grads()
                _ = [list(opt.master_params())[i].grad for i in reads]
            opt.clip_master_grads(0.5)
            masters = list(opt.master_params())
            for i in reads:
                norm = np.float32(np.sqrt(sum(float((p.grad.double() / 8).square().sum()) for p in params)))
                factor = float(np.float32(0.5) / (norm + np.float32(1e-6)))
                assert_same_bits(masters[i].grad, (params[i].grad.float() * 0.125) * factor)
            opt.step()
        results.append([m.detach().clone() for m in opt.master_params()])
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            assert_same_bits(a, b)


@pytest.mark.parametrize("accumulation", ["model", "fp32"])
def test_memory_between_steps(accumulation: str) -> None:
    """At most 6.25 bytes a parameter after zero_grad, moments aside: weight and master."""
    before = tensor_bytes()
    p = torch.nn.Parameter(torch.ones(100_000).half())
    opt = MixedPrecisionOptimizer(AdamW([p]), fused_step=True, grad_accumulation=accumulation)
    for _ in range(3):
        opt.backward(p.float().sum())
        opt.clip_master_grads(1.0)
        opt.step()
        opt.zero_grad()
    assert 6.0 <= bytes_kept(opt, before) / p.numel() <= (6.25 if accumulation == "model" else 10.25)
