"""apex's optimizers against formulas in double, against torch's, and inside MixedPrecisionOptimizer."""

from __future__ import annotations

import copy
import io
import itertools
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from engine.checks import Problem, assert_same, assert_same_bits, parameters, snapshot, train
from torch import Tensor, nn

from fp16opt import DynamicLossScaler, MixedPrecisionOptimizer
from fp16opt.optimizers import (
    LARC,
    FusedAdagrad,
    FusedAdam,
    FusedLAMB,
    FusedMixedPrecisionLamb,
    FusedNovoGrad,
    FusedSGD,
)

from .oracle_optimizers import adam_step, lamb_step, larc_grads, novograd_step

SHAPES = [(7, 5), (70,), (), (0,), (3, 4, 2)]
Make = Callable[[Any], torch.optim.Optimizer]


def gradients(step: int, shapes: list[tuple[int, ...]] = SHAPES) -> list[Tensor]:
    rng = np.random.default_rng(100 + step)
    return [torch.from_numpy(np.asarray(rng.normal(size=shape), np.float32)) for shape in shapes]


def follow(optimizer: torch.optim.Optimizer, params: list[Any], oracle: Any, settings: dict[str, Any]) -> None:
    """Five steps of both; one parameter starts at zero, one gradient is all zeros.

    Tolerance: a step is some ten FP32 operations on numbers about 1, each within 2**-24 of the result, on updates of
    at most lr = 0.1 times a layer's rate: 1e-6 covers five of them, and any wrong term is larger by far.
    """
    with torch.no_grad():
        params[1].zero_()
    expected = [p.detach().double().numpy().copy() for p in params]
    state: dict[str, Any] = {}
    for step in range(5):
        grads = gradients(step, [tuple(p.shape) for p in params])
        grads[4:] = [g.zero_() for g in grads[4:]]
        for p, g in zip(params, grads, strict=True):
            p.grad = g.clone()
        before = [p.grad.clone() for p in params]
        optimizer.step()
        expected = oracle(expected, [g.double().numpy() for g in grads], state, **settings)
        for p, g, want in zip(params, before, expected, strict=True):
            np.testing.assert_allclose(p.detach().numpy(), want, rtol=1e-5, atol=1e-6)
            assert torch.equal(p.grad, g), "the gradient was written"  # apex's LAMB did (quirk 45)


LAMB = {"lr": 0.1, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.02, "bias_correction": True,
        "adam_w_mode": True, "grad_averaging": True, "max_grad_norm": 1.0, "use_nvlamb": False}  # fmt: skip
NOVOGRAD = {"lr": 0.1, "betas": (0.8, 0.95), "eps": 1e-8, "weight_decay": 0.02, "bias_correction": True,
            "grad_averaging": True, "norm_type": 2, "init_zero": False, "reg_inside_moment": False}  # fmt: skip
ADAM = {"lr": 0.1, "betas": (0.8, 0.95), "eps": 1e-8, "weight_decay": 0.02, "bias_correction": True,
        "adam_w_mode": True}  # fmt: skip


@pytest.mark.parametrize(
    "change",
    [
        {}, {"bias_correction": False}, {"adam_w_mode": False}, {"grad_averaging": False}, {"max_grad_norm": 0.0},
        {"max_grad_norm": 1e4}, {"weight_decay": 0.0}, {"weight_decay": 0.0, "use_nvlamb": True},
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("cls", [FusedLAMB, FusedMixedPrecisionLamb])
def test_lamb_follows_its_formula(cls: type[FusedLAMB], change: dict[str, Any]) -> None:
    settings = {**LAMB, **change}
    params = parameters(SHAPES, torch.float32)
    follow(cls(params, **settings), params, lamb_step, settings)


@pytest.mark.parametrize(
    ("norm_type", "init_zero", "inside"), list(itertools.product((2, 0), (False, True), (False, True)))
)
@pytest.mark.parametrize("change", [{}, {"bias_correction": False}, {"grad_averaging": False}], ids=str)
def test_novograd_follows_its_formula(norm_type: int, init_zero: bool, inside: bool, change: dict[str, Any]) -> None:
    settings = {**NOVOGRAD, "norm_type": norm_type, "init_zero": init_zero, "reg_inside_moment": inside, **change}
    params = parameters([s for s in SHAPES if s != (3, 4, 2)], torch.float32)  # zeros would be divided by eps
    follow(FusedNovoGrad(params, **settings), params, novograd_step, settings)


@pytest.mark.parametrize("adam_w", [True, False])
@pytest.mark.parametrize("correction", [True, False])
def test_adam_follows_its_formula(adam_w: bool, correction: bool) -> None:
    settings = {**ADAM, "adam_w_mode": adam_w, "bias_correction": correction}
    params = parameters(SHAPES, torch.float32)
    follow(FusedAdam(params, **settings), params, adam_step, settings)


# -- against torch ---------------------------------------------------------------------------------------------------


TWINS: list[tuple[str, Make, Make]] = [
    ("adamw", lambda p: FusedAdam(p, lr=0.1, weight_decay=0.1),
     lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.1, fused=True)),
    ("adam", lambda p: FusedAdam(p, lr=0.1, weight_decay=0.1, adam_w_mode=False),
     lambda p: torch.optim.Adam(p, lr=0.1, weight_decay=0.1, fused=True)),
    ("sgd", lambda p: FusedSGD(p, 0.1, 0.9, dampening=0.3, weight_decay=0.1),
     lambda p: torch.optim.SGD(p, 0.1, 0.9, dampening=0.3, weight_decay=0.1, foreach=True)),
    ("nesterov", lambda p: FusedSGD(p, 0.1, 0.9, nesterov=True, weight_decay=0.1),
     lambda p: torch.optim.SGD(p, 0.1, 0.9, nesterov=True, weight_decay=0.1, foreach=True)),
]  # fmt: skip


@pytest.mark.parametrize(("ours", "theirs"), [t[1:] for t in TWINS], ids=[t[0] for t in TWINS])
def test_the_same_bits_as_torchs_own(ours: Make, theirs: Make) -> None:
    """Parameters whose first gradient comes later too: apex's FusedSGD reset the others' momentum (quirk 44)."""
    mine, twins = parameters(SHAPES, torch.float32), parameters(SHAPES, torch.float32)
    a, b = ours(mine), theirs(twins)
    for step in range(5):
        grads = gradients(step)
        for i, (p, q, g) in enumerate(zip(mine, twins, grads, strict=True)):
            late = i == 1 and step < 2
            p.grad, q.grad = (None, None) if late else (g.clone(), g.clone())
        a.step()
        b.step()
        for p, q, g in zip(mine, twins, grads, strict=True):
            assert_same_bits(p, q.detach(), f"step {step}")
            assert p.grad is None or torch.equal(p.grad, g), "torch's foreach form writes the gradients of nesterov SGD"


def test_adagrad_is_torchs() -> None:
    for decoupled in (False, True):
        mine, twins = parameters(SHAPES, torch.float32), parameters(SHAPES, torch.float32)
        a = FusedAdagrad(mine, lr=0.1, weight_decay=0.1, adagrad_w_mode=decoupled)
        b = torch.optim.Adagrad(twins, lr=0.1, weight_decay=0.0 if decoupled else 0.1)
        for step in range(4):
            for p, q, g in zip(mine, twins, gradients(step), strict=True):
                p.grad, q.grad = g.clone(), g.clone()
            old = [q.detach().clone() for q in twins]
            a.step()
            b.step()
            if decoupled:
                with torch.no_grad():
                    for q, before in zip(twins, old, strict=True):
                        q.sub_(0.1 * 0.1 * before)
            for p, q in zip(mine, twins, strict=True):
                torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


def test_sgd_weight_decay_after_momentum() -> None:
    p = nn.Parameter(torch.tensor([2.0]))
    optimizer = FusedSGD([p], lr=0.5, momentum=0.5, weight_decay=0.25, wd_after_momentum=True)
    for grad, want in ((1.0, 2 - 0.5 * (1 + 0.5)), (1.0, 1.25 - 0.5 * (1.5 + 0.25 * 1.25))):
        p.grad = torch.tensor([grad])
        optimizer.step()
        assert p.item() == want


def test_transposed_and_gapped_parameters() -> None:
    """torch's fused steps are silently wrong where a gradient's strides differ from its parameter's."""
    base = torch.arange(24.0).view(4, 6)
    for make in (lambda t: t.t(), lambda t: t[:, ::2]):
        p, q = nn.Parameter(make(base.clone())), nn.Parameter(make(base.clone()).contiguous())
        a, b = FusedAdam([p], lr=0.1), torch.optim.AdamW([q], lr=0.1, weight_decay=0.0, foreach=False)
        for step in range(3):
            g = gradients(step, [tuple(p.shape)])[0]
            p.grad, q.grad = g.clone(), g.clone()
            a.step()
            b.step()
        torch.testing.assert_close(p.contiguous(), q.detach(), rtol=1e-6, atol=1e-6)


# -- 16-bit parameters -----------------------------------------------------------------------------------------------

ALL: list[tuple[str, Make]] = [
    ("adam", lambda p: FusedAdam(p, lr=0.01, weight_decay=0.1)),
    ("sgd", lambda p: FusedSGD(p, lr=0.01, momentum=0.9)),
    ("lamb", lambda p: FusedLAMB(p, lr=0.01)),
    ("novograd", lambda p: FusedNovoGrad(p, lr=0.01)),
    ("adagrad", lambda p: FusedAdagrad(p, lr=0.01)),
]
each = pytest.mark.parametrize("make", [m for _, m in ALL], ids=[n for n, _ in ALL])


@pytest.mark.parametrize(
    "make",
    [*(m for n, m in ALL if n != "sgd"), lambda p: FusedSGD(p, 0.01, 0.9, weight_decay=0.1, wd_after_momentum=True)],
    ids=[*(n for n, _ in ALL if n != "sgd"), "sgd-wd-after"],
)
def test_half_parameters_have_fp32_state_through_a_checkpoint(make: Make) -> None:
    """torch rounds the state of a half parameter to half when it loads."""
    params = parameters(SHAPES, torch.float16)
    optimizer = make(params)
    for step in range(2):
        for p, g in zip(params, gradients(step), strict=True):
            p.grad = g.half()
        optimizer.step()
    kept = [v for p in params for v in optimizer.state[p].values() if isinstance(v, Tensor)]
    assert all(v.dtype == torch.float32 for v in kept)
    assert any(not torch.equal(v, v.half().float()) for v in kept), "rounding would show"
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    others = [nn.Parameter(p.detach().clone()) for p in params]
    again = make(others)
    again.load_state_dict(torch.load(file, weights_only=True))
    for p, q, g in zip(params, others, gradients(7), strict=True):
        p.grad, q.grad = g.half(), g.half()
    optimizer.step()
    again.step()
    for p, q in zip(params, others, strict=True):
        assert_same_bits(q, p.detach(), "resumed")
        assert_same(again.state[q], optimizer.state[p], "resumed state ")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize(
    "settings",
    [{}, {"momentum": 0.125}, {"momentum": 0.9, "weight_decay": 0.1}, {"momentum": 0.9, "dampening": 0.5},
     {"momentum": 0.9, "nesterov": True}, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}],
)  # fmt: skip
def test_sgd_is_torchs_to_the_bit_in_every_dtype(dtype: torch.dtype, settings: dict[str, Any]) -> None:
    """The setting of apex's own test: numbers from [0, 1), lr 0.25, seven steps, at most 1e-3 apart after each.

    With FP32 momentum 16-bit weights get up to 3e-3 away: torch rounds it, and the product before it adds.
    A checkpoint goes in between.
    """
    torch.manual_seed(9876)
    start = [torch.rand(shape).to(dtype) for shape in [(2781,), (), (7, 5)]]
    ours, theirs = [nn.Parameter(t.clone()) for t in start], [nn.Parameter(t.clone()) for t in start]
    fused, plain = FusedSGD(ours, lr=0.25, **settings), torch.optim.SGD(theirs, lr=0.25, **settings)
    for step in range(7):
        for p, q in zip(ours, theirs, strict=True):
            q.grad = torch.rand_like(q)
            p.grad = q.grad.clone()
        fused.step()
        plain.step()
        for p, q in zip(ours, theirs, strict=True):
            assert_same_bits(p, q.detach(), f"step {step}")
        if step == 3:
            saved, fused = fused.state_dict(), FusedSGD(ours, lr=0.25, **settings)
            fused.load_state_dict(copy.deepcopy(saved))


@pytest.mark.parametrize("cls", [FusedSGD, FusedAdam, FusedLAMB, FusedNovoGrad, FusedAdagrad, FusedMixedPrecisionLamb])
def test_groups_may_bring_their_own_lr(cls: Any) -> None:
    p, q, r = (nn.Parameter(torch.zeros(3)) for _ in range(3))
    optimizer = cls([{"params": p, "lr": 0.25}, {"params": [q], "lr": 0.5}])
    optimizer.add_param_group({"params": [r], "lr": 0.125})
    assert [float(group["lr"]) for group in copy.deepcopy(optimizer).param_groups] == [0.25, 0.5, 0.125]
    for param in (p, q, r):
        param.grad = torch.ones(3)
    optimizer.step()
    moved = [param[0].item() for param in (p, q, r)]
    assert moved[1] == pytest.approx(2 * moved[0], rel=1e-6)  # one FP32 rounding each
    assert moved[2] == pytest.approx(moved[0] / 2, rel=1e-6)
    with pytest.raises(ValueError, match=r"group 3: lr: expected a finite number that is not negative, got -1"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))], "lr": -1})
    assert len(optimizer.param_groups) == 3


def test_sgd_without_any_lr_is_refused() -> None:
    p, q = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
    with pytest.raises(
        ValueError, match=r"group 1: lr: expected a number, here or for all groups, got none\. Add 'lr'"
    ):
        FusedSGD([{"params": [p], "lr": 0.25}, {"params": [q]}], momentum=0.5)
    with pytest.raises(ValueError, match="group 0: lr: expected a number"):
        FusedSGD([p])
    optimizer = FusedSGD([{"params": [p], "lr": 0.25}])
    with pytest.raises(ValueError, match="group 1: lr: expected a number"):
        optimizer.add_param_group({"params": [q]})


@pytest.mark.parametrize(
    "make",
    [lambda p: FusedAdam(p, lr=2.0**-14, capturable=True, master_weights=True),
     lambda p: FusedMixedPrecisionLamb(p, lr=2.0**-14, weight_decay=0.0)],
    ids=["adam", "lamb"],
)  # fmt: skip
def test_masters_in_the_state_keep_small_updates_and_are_saved(make: Make) -> None:
    """apex's FusedAdam left its masters out of checkpoints, and never stepped later groups (quirk 43)."""
    p, q = nn.Parameter(torch.ones(2).half()), nn.Parameter(torch.ones(2).half())
    optimizer = make([{"params": [p]}, {"params": [q]}])
    for _ in range(3):
        p.grad, q.grad = torch.ones(2).half(), torch.ones(2).half()
        optimizer.step()
    for one in (p, q):
        master = optimizer.state[one]["master_param"]
        assert master.dtype == torch.float32
        assert 1 - 4 * 2.0**-14 < master[0].item() < 1 - 2 * 2.0**-14
    saved = copy.deepcopy(optimizer.state_dict())
    other = make([{"params": [nn.Parameter(p.detach().clone())]}, {"params": [nn.Parameter(q.detach().clone())]}])
    other.load_state_dict(saved)
    mine = other.param_groups[1]["params"][0]
    assert_same_bits(other.state[mine]["master_param"], optimizer.state[q]["master_param"], "master")


def test_a_grad_scaler_drives_mixed_precision_lamb() -> None:
    """FP16 gradients under torch's own GradScaler: unscaled inside, skipped where they overflow."""
    p, q = nn.Parameter(torch.full((4,), 2.0).half()), nn.Parameter(torch.full((4,), 2.0))
    optimizer, twin = FusedMixedPrecisionLamb([p], lr=0.1, step=3), FusedLAMB([q], lr=0.1)
    twin.state[q] = {"step": 3, "exp_avg": torch.zeros(4), "exp_avg_sq": torch.zeros(4)}
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for bad in (False, True, False):
        optimizer.zero_grad()
        scaler.scale((p.float() ** 2).sum() * (float("inf") if bad else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
        if not bad:
            q.grad = (2 * q.detach().half().float()).half().float()
            twin.step()
        torch.testing.assert_close(optimizer.state[p]["master_param"], q.detach(), rtol=1e-6, atol=1e-6)
    assert scaler.get_scale() == 512.0
    assert optimizer.state[p]["step"] == 5


@pytest.mark.parametrize("masters", [True, False], ids=["masters", "no masters"])
def test_capturable_adam_divides_by_the_scale_in_fp32(masters: bool) -> None:
    """True gradients that FP16 can't hold: what is stepped are FP32 ones, to the bit, and an overflow is left out."""
    p, q = nn.Parameter(torch.ones(8).half()), nn.Parameter(torch.ones(8))
    options: Any = {"lr": 2.0**-8, "eps": 2.0**-30, "weight_decay": 0.5}
    optimizer = FusedAdam([p], capturable=True, master_weights=masters, **options)
    plain = torch.optim.AdamW([q], fused=True, **options)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
    for bad in (False, True, False):
        before = p.detach().clone()
        scaler.scale((p.float() * (float("inf") if bad else 2.0**-28)).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        if bad:
            assert torch.equal(p, before)
            continue
        if not masters:
            q.data.copy_(before)
        q.grad = torch.full((8,), 2.0**-28)
        plain.step()
        assert_same_bits(optimizer.state[p]["exp_avg"], plain.state[q]["exp_avg"], "exp_avg")
        assert_same_bits(p, q.detach().half(), "weight")
        if masters:
            assert_same_bits(optimizer.state[p]["master_param"], q.detach(), "master")
    assert optimizer.state[p]["step"].item() == 2


def test_apexs_own_checkpoints_load() -> None:
    """apex counted steps in the group."""
    p, q = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    ours, torchs = FusedAdam([p], lr=0.1), torch.optim.AdamW([q], lr=0.1, weight_decay=0.0, fused=True)
    for one in (torchs,):
        for step in range(3):
            q.grad = gradients(step, [(3,)])[0]
            one.step()
    state = {k: v.clone() for k, v in torchs.state[q].items() if k != "step"}
    group = {**ours.state_dict()["param_groups"][0], "step": 3}
    ours.load_state_dict({"state": {0: state}, "param_groups": [group]})
    with torch.no_grad():
        p.copy_(q)
    p.grad, q.grad = torch.ones(3), torch.ones(3)
    ours.step()
    torchs.step()
    assert_same_bits(p, q.detach(), "weight")


# -- in the engine ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "make",
    [*[m for _, m in ALL], lambda p: LARC(torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=0.01))],
    ids=[*[n for n, _ in ALL], "larc"],
)
def test_inside_the_engine_with_a_skip_and_a_resume(make: Make) -> None:
    """An overflow is left out, masters are FP32, resuming is bit-exact."""
    shapes = [(7, 5), (70,), (3, 4, 2)]

    def run(opt: Any, params: Any, first: int, last: int) -> None:
        problem = Problem(params)
        for step in range(first, last):
            train(opt, params, problem, factor=float("inf") if step == 2 else 1.0)

    params = parameters(shapes, torch.float16)
    start = [p.detach().clone() for p in params]
    optimizer = MixedPrecisionOptimizer(make(params), scaler=DynamicLossScaler(init_scale=256.0))
    run(optimizer, params, 0, 5)
    assert optimizer.skipped_steps == 1
    saved = copy.deepcopy(optimizer.state_dict())
    run(optimizer, params, 5, 8)
    others = parameters(shapes, torch.float16, seed=3)
    resumed = MixedPrecisionOptimizer(make(others), scaler=DynamicLossScaler(init_scale=2.0))
    resumed.load_state_dict(saved)
    run(resumed, others, 5, 8)
    assert_same(snapshot(resumed, others, scaler=True), snapshot(optimizer, params, scaler=True), "resumed ")
    assert all(m.dtype == torch.float32 for m in optimizer.master_params())
    assert any(not torch.equal(p, s) for p, s in zip(params, start, strict=True))


# -- LARC ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("clip", [True, False])
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_larc_follows_its_formula_and_gives_everything_back(clip: bool, decay: float) -> None:
    params = parameters([(4, 3), (5,), (2,)], torch.float32)
    twins = parameters([(4, 3), (5,), (2,)], torch.float32)
    optimizer = LARC(torch.optim.SGD(params, lr=0.5, momentum=0.9, weight_decay=decay), 0.02, clip, 1e-8)
    plain = torch.optim.SGD(twins, lr=0.5, momentum=0.9)
    with torch.no_grad():
        params[1].zero_()
        twins[1].zero_()
    for step in range(4):
        grads = gradients(step, [(4, 3), (5,), (2,)])
        grads[2].mul_(0.0 if step == 0 else 1.0)
        for p, g in zip(params, grads, strict=True):
            p.grad = g
        before = [p.grad for p in params]
        optimizer.step()
        wanted = larc_grads(
            [q.detach().double().numpy() for q in twins],
            [g.double().numpy() for g in grads],
            0.5,
            decay,
            0.02,
            clip,
            1e-8,
        )
        for q, g in zip(twins, wanted, strict=True):
            q.grad = torch.from_numpy(g).float()
        plain.step()
        for p, q, g in zip(params, twins, before, strict=True):
            torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)
            assert p.grad is g
    assert optimizer.param_groups[0]["weight_decay"] == decay


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
@pytest.mark.parametrize(
    "make",
    [
        lambda params: FusedAdam(params, adam_w_mode=False, weight_decay=0.25, capturable=True, master_weights=True),
        lambda params: FusedSGD(params, lr=0.5, momentum=0.5, weight_decay=0.25, wd_after_momentum=True),
        lambda params: FusedAdagrad(params, adagrad_w_mode=True, weight_decay=0.25),
        lambda params: FusedLAMB(params, adam_w_mode=False, weight_decay=0.25, use_nvlamb=True),
        lambda params: FusedNovoGrad(params, reg_inside_moment=True, weight_decay=0.25),
        lambda params: FusedMixedPrecisionLamb(params, use_nvlamb=True, reduced_precision_dtype=torch.bfloat16),
    ],
    ids=["adam", "sgd", "adagrad", "lamb", "novograd", "mixed lamb"],
)
def test_copies_step_as_they_were_told(make: Make, how: str) -> None:
    params = [nn.Parameter(grad) for grad in gradients(0, [(4, 3)])]
    pair = params, make(params)
    step_with(pair, 1)
    again = copy.deepcopy(pair) if how == "deepcopy" else pickle.loads(pickle.dumps(pair))
    assert getattr(again[1], "_step_supports_amp_scaling", None) is getattr(pair[1], "_step_supports_amp_scaling", None)
    for one in (pair, again):
        step_with(one, 2)
    assert_same_bits(again[0][0].detach(), params[0].detach(), "copied")


def step_with(pair: tuple[list[nn.Parameter], torch.optim.Optimizer], step: int) -> None:
    params, optimizer = pair
    for param, grad in zip(params, gradients(step, [(4, 3)]), strict=True):
        param.grad = grad
    optimizer.step()


def test_larc_is_an_optimizer_and_undoes_its_changes_when_the_step_fails() -> None:
    p = nn.Parameter(torch.ones(2))
    optimizer = LARC(torch.optim.SGD([p], lr=0.5, momentum=0.5, weight_decay=0.1))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    p.grad = torch.ones(2)
    assert optimizer.step(lambda: torch.tensor(3.0)).item() == 3.0
    scheduler.step()
    assert optimizer.optim.param_groups[0]["lr"] == 0.25
    again = copy.deepcopy(optimizer)
    again.load_state_dict(optimizer.state_dict())
    assert_same(again.state_dict(), optimizer.state_dict(), "copied ")
    q = nn.Parameter(torch.ones(1))
    optimizer.add_param_group({"params": [q]})
    assert len(optimizer.param_groups) == 2
    assert "LARC(SGD" in repr(optimizer)

    def fail(*_: Any) -> None:
        raise OSError("broken")

    optimizer.optim.register_step_pre_hook(fail)
    grad = p.grad
    with pytest.raises(OSError, match="broken"):
        optimizer.step()
    assert p.grad is grad
    assert optimizer.param_groups[0]["weight_decay"] == 0.1
    optimizer.zero_grad()
    assert p.grad is None


# -- bad input -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda p: FusedAdam(p, amsgrad=True), RuntimeError, "FusedAdam has no AMSGrad variant"),
        (lambda p: FusedLAMB(p, amsgrad=True), RuntimeError, "FusedLAMB has no AMSGrad variant"),
        (lambda p: FusedNovoGrad(p, amsgrad=True), RuntimeError, "FusedNovoGrad has no AMSGrad variant"),
        (lambda p: FusedAdam(p, master_weights=True), RuntimeError, "master_weights=True was given without capturable"),
        (lambda p: FusedAdam(p, lr=-1.0), ValueError, "lr: expected a finite number that is not negative, got -1.0"),
        (lambda p: FusedSGD(p, lr=float("nan")), ValueError, "lr: expected a finite number"),
        (lambda p: FusedSGD(p, lr=0.1, momentum=-0.5), ValueError, "momentum: expected a finite number"),
        (lambda p: FusedSGD(p, lr=0.1, nesterov=True), ValueError, "nesterov: expected a momentum over 0 and no damp"),
        (lambda p: FusedLAMB(p, betas=(0.9, 1.0)), ValueError, r"betas\[1\]: expected a number from 0 to under 1"),
        (lambda p: FusedAdagrad(p, weight_decay=-1.0), ValueError, "weight_decay: expected a finite number"),
        (lambda p: FusedNovoGrad(p, norm_type=1), ValueError, "norm_type: expected 2 or 0"),
        (lambda p: LARC(p), TypeError, r"optimizer: expected a torch\.optim\.Optimizer, got list"),
    ],
)
def test_bad_arguments_are_refused(make: Make, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make([nn.Parameter(torch.ones(1))])


@each
def test_sparse_gradients_are_refused_and_nothing_changes(make: Make) -> None:
    p, q = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(3, 2))
    optimizer = make([p, q])
    p.grad, q.grad = torch.ones(2), torch.ones(3, 2).to_sparse(1)
    with pytest.raises(RuntimeError, match=r"group 0, param 1: \w+ takes dense gradients, got layout torch.sparse_coo"):
        optimizer.step()
    assert p.tolist() == [1.0, 1.0]
    assert not optimizer.state


def test_zero_grad_follows_set_grad_none_and_closures_work() -> None:
    for none in (True, False):
        p = nn.Parameter(torch.ones(1))
        optimizer = FusedAdam([p], set_grad_none=none)
        p.grad = torch.ones(1)
        optimizer.zero_grad()
        assert (p.grad is None) is none
        assert optimizer.step(lambda: torch.tensor(2.0)).item() == 2.0
        optimizer.zero_grad(set_to_none=True)
        assert p.grad is None
