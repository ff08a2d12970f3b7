"""optimizer_state="8bit" and master_weights="split24" in the engine: state, bits, checkpoints, crossings, refusals."""

from __future__ import annotations

import copy
import gc
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from engine.checks import assert_same, assert_same_bits, snapshot, tensor_bytes
from rooms import through_file
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Muon, RMSprop

from fp16opt import MixedPrecisionOptimizer
from fused import oracle_split24, oracle_state8
from fused.test_fused_bits import ADAM
from fused.test_fused_bits import SGD as SGD_DEFAULTS

LARGE, SMALL = (38, 128), (40, 100)  # 4,864 elements, in 8 bits; 4,000, in FP32
MAKERS: dict[str, Callable[..., Any]] = {
    "adamw": lambda params, **more: AdamW(params, lr=0.01, weight_decay=0.1, **more),
    "adam": lambda params, **more: Adam(params, lr=0.01, betas=(0.9, 0.95), weight_decay=0.1, **more),
    "momentum": lambda params, **more: SGD(params, lr=0.1, momentum=0.9, dampening=0.1, **more),
    "nesterov": lambda params, **more: SGD(params, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01, **more),
    "sgd": lambda params, **more: SGD(params, lr=0.1, **more),
}
MASTERS = ("full", "split", "split24")
by_masters = pytest.mark.parametrize("masters", MASTERS)
by_maker = pytest.mark.parametrize("name", MAKERS)


def parameters(dtype: torch.dtype = torch.float16, seed: int = 0) -> list[nn.Parameter]:
    rng = np.random.default_rng(seed)
    made = [torch.from_numpy(rng.standard_normal(shape).astype(np.float32)) for shape in (LARGE, SMALL, LARGE)]
    dtypes = (dtype, dtype, torch.float32)  # the last is its own master
    return [nn.Parameter(values.to(d)) for values, d in zip(made, dtypes, strict=True)]


def wrapped(params: list[Any], name: str = "adamw", masters: str = "full", state: str = "8bit", **more: Any) -> Any:
    inner = {key: more.pop(key) for key in ("amsgrad",) if key in more}
    more = {"loss_scale": 8.0, **more}
    return MixedPrecisionOptimizer(
        MAKERS[name](params, **inner), master_weights=masters, optimizer_state=state, **more
    )  # fmt: skip


def step(opt: Any, params: list[Any], seed: int, clip: bool = False) -> list[Tensor]:
    rng = np.random.default_rng(1000 + seed)
    opt.zero_grad()
    opt.scale_loss(torch.zeros(()))
    for p in params:
        spread = rng.standard_normal(p.shape) * 10.0 ** rng.uniform(-3, 0, p.shape)
        p.grad = torch.from_numpy(spread.astype(np.float32) * 8.0).to(p.dtype)
    grads = [p.grad.clone() for p in params]
    if clip:
        opt.clip_master_grads(0.5)
    opt.step()
    return grads


def trained(name: str = "adamw", masters: str = "full", steps: int = 4, dtype: Any = torch.float16, **more: Any) -> Any:
    params = parameters(dtype)
    opt = wrapped(params, name, masters, **more)
    for k in range(steps):
        step(opt, params, k)
    return opt, params


def own_names(opt: Any) -> list[set[str]]:
    return [set(opt.state[p]) if p in opt.state else set() for group in opt.param_groups for p in group["params"]]


def everything(opt: Any, params: list[Any]) -> Any:
    """What must be equal where two trainings are."""
    state = [opt.state.get(p, {}) for group in opt.param_groups for p in group["params"]]
    return copy.deepcopy([state, [m.detach() for m in opt.master_params()], [p.detach() for p in params]])


# -- what it is --------------------------------------------------------------------------------------------------------


def test_names_dtypes_and_bytes() -> None:
    opt, _ = trained()
    large, small, own = own_names(opt)
    assert (
        large == own == {"step", "exp_avg_codes", "exp_avg_sq_codes", "exp_avg_sq_scales", "ratio_limit", "codes_unit"}
    )
    assert small == {"step", "exp_avg", "exp_avg_sq"}
    state = opt.state[opt.param_groups[0]["params"][0]]
    assert (state["exp_avg_codes"].dtype, state["exp_avg_sq_codes"].dtype) == (torch.int8, torch.uint8)
    assert state["exp_avg_codes"].shape == torch.Size(LARGE)
    assert state["exp_avg_sq_scales"].shape == (38,)
    assert state["ratio_limit"] == 8.0
    assert "optimizer_state: '8bit'" in repr(opt)
    assert "step: fused" in repr(opt)
    momentum, _ = trained("momentum")
    assert own_names(momentum)[:2] == [{"momentum_codes", "momentum_scales", "codes_unit"}, {"momentum_buffer"}]
    assert own_names(trained("sgd")[0]) == [set(), set(), set()]


@pytest.mark.parametrize(("masters", "state", "bytes_"), [("split", "8bit", 8.1), ("split24", "8bit", 7.1)])
def test_bytes_kept_with_the_gradient(masters: str, state: str, bytes_: float) -> None:
    n = 1 << 18
    gc.collect()
    before = tensor_bytes()
    params = [nn.Parameter(torch.zeros(n // 1024, 1024, dtype=torch.float16))]
    opt = MixedPrecisionOptimizer(AdamW(params), master_weights=masters, optimizer_state=state, loss_scale=8.0)
    for k in range(2):
        step(opt, params, k)
    assert (tensor_bytes(params[0].grad) - before) / n <= bytes_


@by_masters
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["adamw", "momentum"])
def test_the_engine_gives_the_oracles_bits(name: str, dtype: torch.dtype, masters: str) -> None:
    """Weights, masters and codes of six steps, a skip among them, which is no step and moves no rounding."""
    params = parameters(dtype)[:1]
    opt = wrapped(params, name, masters)
    kind = "half" if dtype == torch.float16 else "bfloat16"
    n = params[0].numel()
    state = oracle_state8.Moments.zeros(n) if name == "adamw" else oracle_state8.Momentum.zeros(n)
    e = oracle_state8.Element(next(opt.master_params()).detach().numpy().reshape(-1).copy(), state)
    number = 0
    for k in range(6):
        if k == 3:
            opt.zero_grad()
            opt.backward((params[0].float() * float("inf")).sum())
            opt.step()
            assert opt.step_was_skipped
            continue
        grad = step(opt, params, k)[0].float().numpy().reshape(-1)
        number += 1
        if name == "adamw":
            o = {**ADAM, "lr": 0.01, "weight_decay": 0.1}
            oracle_state8.adam(e, grad, 1 / 8, 1.0, number, **o)
        else:
            o = {**SGD_DEFAULTS, "lr": 0.1, "momentum": 0.9, "dampening": 0.1}
            oracle_state8.sgd(e, grad, 1 / 8, 1.0, number, number == 1, **o)
        if masters == "split24":
            e.p = oracle_split24.JOIN[kind](*oracle_split24.SPLIT[kind](e.p, number))
        elif masters == "split":
            e.p = next(opt.master_params()).detach().numpy().reshape(-1).copy()  # other tests have their bits
    got = opt.state[opt.param_groups[0]["params"][0]]
    if name == "adamw":
        assert np.array_equal(got["exp_avg_codes"].numpy().reshape(-1), e.state.m)
        assert np.array_equal(got["exp_avg_sq_codes"].numpy().reshape(-1), e.state.v)
        assert np.array_equal(got["exp_avg_sq_scales"].numpy(), e.state.scales)
    else:
        assert np.array_equal(got["momentum_codes"].numpy().reshape(-1), e.state.codes)
    assert np.array_equal(next(opt.master_params()).detach().numpy().reshape(-1), e.p)
    assert opt.state_dict()["steps"] == 5


@by_maker
def test_close_to_fp32_state(name: str) -> None:
    """Masters after 40 steps: within a few rates of those with FP32 state."""
    (eight, params), (full, others) = trained(name, steps=40), trained(name, steps=40, state="fp32")
    lr = eight.param_groups[0]["lr"]
    for a, b in zip(eight.master_params(), full.master_params(), strict=True):
        moved = (b.detach() - a.detach()).abs().mean() / lr
        assert float(moved) < (0.0 if name == "sgd" else 0.6) + 1e-9
    assert_same_bits(params[1], others[1])  # FP32 state: the same


# -- checkpoints -------------------------------------------------------------------------------------------------------


@by_masters
@by_maker
@pytest.mark.parametrize("compact", [False, True])
def test_resume_bit_exact(name: str, masters: str, compact: bool) -> None:
    opt, params = trained(name, masters, 3, dtype=torch.bfloat16)
    saved = through_file({"opt": opt.state_dict(compact=compact), "model": [p.detach() for p in params]})
    fresh = parameters(torch.bfloat16, seed=9)
    loaded = wrapped(fresh, name, masters)
    loaded.load_state_dict(saved["opt"])
    with torch.no_grad():
        for p, value in zip(fresh, saved["model"], strict=True):
            p.copy_(value)
    assert_same(everything(loaded, fresh), everything(opt, params))
    for k in range(3):
        step(opt, params, 50 + k, clip=True)
        step(loaded, fresh, 50 + k, clip=True)
    assert_same(everything(loaded, fresh), everything(opt, params))
    assert_same(loaded.state_dict(compact=compact), opt.state_dict(compact=compact))


def test_torchs_own_class_reads_it() -> None:
    opt, params = trained("adamw")
    sd = opt.state_dict()
    assert set(sd["optimizer"]["state"][0]) == {"step", "exp_avg", "exp_avg_sq"}
    plain = AdamW([nn.Parameter(p.detach().float()) for p in params], lr=0.01)
    plain.load_state_dict(sd["optimizer"])
    for p in plain.param_groups[0]["params"]:
        p.grad = torch.ones_like(p)
    plain.step()
    state = plain.state[plain.param_groups[0]["params"][0]]
    assert float(state["step"]) == 5.0
    assert state["exp_avg"].dtype == torch.float32


CROSSINGS = [
    (a, b) for a in [("full", "fp32"), ("split", "8bit"), ("split24", "8bit"), ("split24", "fp32")]
    for b in [("full", "fp32"), ("full", "8bit"), ("split", "fp32"), ("split24", "8bit"), ("split24", "fp32")] if a != b
]  # fmt: skip


@pytest.mark.parametrize("name", ["adamw", "momentum"])
@pytest.mark.parametrize(("source", "target"), CROSSINGS, ids=str)
def test_every_crossing_loads(source: tuple[str, str], target: tuple[str, str], name: str) -> None:
    opt, params = trained(name, source[0], state=source[1], dtype=torch.bfloat16)
    fresh = parameters(torch.bfloat16, seed=5)
    loaded = wrapped(fresh, name, target[0], target[1])
    loaded.load_state_dict(through_file(opt.state_dict()))
    with torch.no_grad():
        fresh[2].copy_(params[2])  # its own master: a value has one home in a checkpoint
    for a, b in zip(loaded.master_params(), opt.master_params(), strict=True):
        tolerance = 2.0**-16 if target[0] == "split24" else 0.0
        assert torch.allclose(a.detach(), b.detach(), rtol=tolerance, atol=0)
    before, after = opt.state_dict()["optimizer"]["state"], loaded.state_dict()["optimizer"]["state"]
    for i, entry in before.items():
        for key, value in entry.items():
            if target[1] == "fp32" or source[1] == "8bit" or i == 1:  # codes come back as they were
                assert_same_bits(after[i][key], value, key)
            elif key == "step":
                assert torch.equal(after[i][key], value)
    for k in range(2):
        step(loaded, fresh, k)
    assert loaded.state_dict()["steps"] == 6
    assert_same(own_names(loaded)[1], own_names(opt)[1])


def test_files_of_version_1_load() -> None:
    opt, _ = trained("adamw", state="fp32")
    old = {key: value for key, value in opt.state_dict().items() if key != "steps"}
    old["version"] = 1
    fresh = parameters(seed=5)
    loaded = wrapped(fresh)
    loaded.load_state_dict(through_file(old))
    assert loaded.state_dict()["steps"] == 0
    assert "exp_avg_codes" in own_names(loaded)[0]
    step(loaded, fresh, 1)


def test_an_optimizer_that_was_used_before_keeps_its_state_in_codes() -> None:
    params = [nn.Parameter(torch.ones(LARGE)), nn.Parameter(torch.ones(SMALL))]
    inner = AdamW(params, lr=0.01)
    for p in params:
        p.grad = torch.full_like(p, 0.5)
    inner.step()
    wanted = inner.state[params[0]]["exp_avg"].clone()
    opt = MixedPrecisionOptimizer(inner, optimizer_state="8bit")
    assert [("exp_avg" in names) for names in own_names(opt)] == [False, True]
    assert torch.allclose(opt.state_dict()["optimizer"]["state"][0]["exp_avg"], wanted, rtol=1 / 16)


def test_state_that_was_loaded_behind_the_back_is_taken_up() -> None:
    opt, params = trained("adamw")
    full, _ = trained("adamw", state="fp32")
    opt.optimizer.load_state_dict(full.optimizer.state_dict())
    before = params[0].detach().clone()
    step(opt, params, 7)
    assert "exp_avg_codes" in own_names(opt)[0]
    assert not torch.equal(before, params[0])


def test_other_betas_between_steps() -> None:
    opt, params = trained("adamw")
    before = opt.state_dict()["optimizer"]["state"][0]["exp_avg"]
    opt.param_groups[0]["betas"] = (0.9, 0.95)
    opt.param_groups[0]["lr"] = 0.0
    step(opt, params, 9)
    assert opt.state[opt.param_groups[0]["params"][0]]["ratio_limit"] == 2.0
    after = opt.state_dict()["optimizer"]["state"][0]["exp_avg"]
    assert torch.allclose(after, before, atol=float(before.abs().max()) * 2)
    step(opt, params, 10)


# -- compact files that are not ours, or damaged -----------------------------------------------------------------------


def compact() -> Any:
    return through_file(trained("adamw", "split")[0].state_dict(compact=True))


def test_codes_of_another_block_size_and_limit_load_by_decoding() -> None:
    sd = compact()
    entry = sd["optimizer"]["state"][0]
    n = entry["exp_avg_codes"].numel()
    entry["exp_avg_sq_scales"] = entry["exp_avg_sq_scales"].repeat_interleave(2)[: -(-n // 64)].clone()
    entry["codes_block"] = 64
    loaded = wrapped(parameters(seed=3), masters="split")
    loaded.load_state_dict(sd)
    want = compact()["optimizer"]["state"][0]
    got = loaded.state[loaded.param_groups[0]["params"][0]]
    assert torch.equal(got["exp_avg_codes"], want["exp_avg_codes"])
    assert torch.equal(got["exp_avg_sq_codes"], want["exp_avg_sq_codes"])
    entry["ratio_limit"] = 16.0
    loaded.load_state_dict(sd)
    doubled = loaded.state_dict()["optimizer"]["state"][0]["exp_avg"]
    once = compact_moments(want)
    assert torch.allclose(doubled.clamp(-once.abs().max(), once.abs().max()), doubled, rtol=1)
    full = wrapped(parameters(seed=3), masters="split", state="fp32")
    full.load_state_dict(compact())
    assert full.state_dict()["optimizer"]["state"][0]["exp_avg"].dtype == torch.float32


def compact_moments(entry: Any) -> Tensor:
    state = oracle_state8.Moments(
        entry["exp_avg_codes"].numpy().reshape(-1), entry["exp_avg_sq_codes"].numpy().reshape(-1),
        entry["exp_avg_sq_scales"].numpy(), entry["ratio_limit"],
    )  # fmt: skip
    return torch.from_numpy(state.decode()[0])


@pytest.mark.parametrize("name", ["adamw", "momentum"])
def test_a_save_only_reads_the_codes(name: str) -> None:
    """They may be shared with another thread, and their versions are what tells of writes."""
    params = parameters()
    opt = wrapped(params, name)
    step(opt, params, 0)
    values = [value for entry in opt.state.values() for value in entry.values() if isinstance(value, Tensor)]
    before = [value._version for value in values]
    opt.state_dict()
    assert [value._version for value in values] == before


def test_a_compact_file_is_smaller() -> None:
    import io

    sizes = []
    opt, _ = trained("adamw", "split")
    for is_compact in (False, True):
        file = io.BytesIO()
        torch.save(opt.state_dict(compact=is_compact)["optimizer"]["state"][0], file)
        sizes.append(len(file.getvalue()))
    assert sizes[1] < sizes[0] / 3


def set_(key: str, value: Any) -> Callable[[Any], None]:
    def damage(sd: Any) -> None:
        entry = sd["optimizer"]["state"][0]
        if value is None:
            del entry[key]
        else:
            entry[key] = value(entry[key]) if callable(value) else value

    return damage


DAMAGED: list[tuple[Callable[[Any], None], type[Exception], str]] = [
    (set_("codes_format", "fancy4"), ValueError, "codes_format must be 'ratio8' or 'block8', got 'fancy4'"),
    (set_("codes_block", 100), ValueError, "codes_block must be a power of two up to 65536, got 100"),
    (set_("codes_block", True), ValueError, "codes_block must be a power of two"),
    (set_("exp_avg_codes", None), ValueError, "exp_avg_codes must be a dense tensor, .*, got NoneType"),
    (set_("exp_avg_codes", lambda t: t.float()), ValueError, "exp_avg_codes must be a dense tensor, int8 of shape"),
    (set_("exp_avg_codes", lambda t: t.clone().fill_(-128)), ValueError, "exp_avg_codes must hold codes, got -128"),
    (set_("exp_avg_sq_codes", lambda t: t[:5]), ValueError, "exp_avg_sq_codes must be a dense tensor, uint8 of shape"),
    (set_("exp_avg_sq_scales", lambda t: t[:5]), ValueError, r"exp_avg_sq_scales must be .*float32 of shape \[38\]"),
    (set_("codes_format", ["ratio8"]), ValueError, r"codes_format must be 'ratio8' or 'block8', got \['ratio8'\]"),
    (
        set_("exp_avg_codes", lambda t: t.to_sparse()),
        ValueError,
        "exp_avg_codes must be .* int8 .*, got int8 .*, sparse_coo",
    ),
    (
        set_("exp_avg_codes", lambda t: t.to("meta")),
        ValueError,
        "exp_avg_codes must be .* int8 .*, got int8 .* on meta",
    ),
    (
        set_("exp_avg_sq_scales", lambda t: t.to_sparse()),
        ValueError,
        "exp_avg_sq_scales must .*, got float32 .*, sparse_coo",
    ),
    (set_("exp_avg_sq_scales", lambda t: t.clone().fill_(3e38)), ValueError, r"must be from 0 to 4.61169e\+18"),
    (set_("exp_avg_sq_scales", lambda t: t * torch.nan), ValueError, "exp_avg_sq_scales must be from 0 to"),
    (set_("exp_avg_sq_scales", lambda t: -1 - t), ValueError, "exp_avg_sq_scales must be from 0 to"),
    (set_("ratio_limit", float("nan")), ValueError, "ratio_limit must be a number from"),
    (set_("exp_avg_codes", lambda t: t[:5]), ValueError, "must be .* of shape"),
    (lambda sd: sd.update(steps=-1), ValueError, "steps must be from 0, got -1"),
    (lambda sd: sd.update(steps=1.5), TypeError, "steps must be an int, got float"),
    (lambda sd: sd.pop("steps"), ValueError, "state_dict lacks 'steps'"),
    (lambda sd: sd["optimizer"]["state"][1]["exp_avg_sq"].fill_(-1.0), ValueError, "exp_avg_sq holds numbers"),
    (lambda sd: sd["optimizer"]["state"][1]["exp_avg"].fill_(torch.nan), ValueError, "exp_avg holds numbers"),
]


@pytest.mark.parametrize(("damage", "error", "message"), DAMAGED, ids=[d[2][:40] for d in DAMAGED])
def test_damaged_files_are_refused(damage: Callable[[Any], None], error: type[Exception], message: str) -> None:
    sd = compact()
    damage(sd)
    opt, params = trained("adamw", "split", 1)
    before = snapshot(opt, params)
    with pytest.raises(error, match=message):
        opt.load_state_dict(sd)
    assert_same(snapshot(opt, params), before)


# -- what is refused ---------------------------------------------------------------------------------------------------


def construct(inner: Callable[[list[Any]], Any], **more: Any) -> Callable[[], Any]:
    return lambda: MixedPrecisionOptimizer(inner(parameters()), **{"optimizer_state": "8bit", **more})


REFUSED: list[tuple[Callable[[], Any], str]] = [
    (construct(AdamW, fused_step=False), r'optimizer_state="8bit" needs .*: fused_step=False. Use .*="fp32"'),
    (construct(AdamW, master_weights="none"), r'optimizer_state="8bit" needs .*master_weights=.none.'),
    (construct(lambda p: AdamW(p, amsgrad=True)), r'"8bit" needs .*: group 0 has amsgrad=True.*="fp32"'),
    (construct(RMSprop), r'optimizer_state="8bit" needs .*: RMSprop is not exactly SGD, Adam or AdamW'),
    (construct(lambda p: Muon(p[:2])), r'optimizer_state="8bit" needs .*: Muon is not'),
    (construct(lambda p: AdamW(p, differentiable=True)), "can't be had: group 0 has differentiable=True"),
    (construct(AdamW, optimizer_state="4bit"), "optimizer_state: expected .*got '4bit'"),
    (construct(AdamW, optimizer_state="fp32", master_weights="split24", fused_step=False),
     r'master_weights="split24" needs .*: fused_step=False'),
    (construct(RMSprop, optimizer_state="fp32", master_weights="split24"),
     r'master_weights="split24" needs .*: RMSprop .* Use master_weights="full"'),
    (construct(AdamW, master_weights="split24", on_model_write="ignore"),
     r'on_model_write="ignore" does not go with master_weights="split24"'),
]  # fmt: skip


@pytest.mark.parametrize(("make", "message"), REFUSED, ids=[r[1][:50] for r in REFUSED])
def test_refusals_name_both_arguments(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_a_group_with_amsgrad_is_refused_and_nothing_added() -> None:
    opt, params = trained()
    with pytest.raises(ValueError, match=r'"8bit" needs the one-pass step, .*: group 1 has amsgrad=True'):
        opt.add_param_group({"params": [nn.Parameter(torch.ones(3))], "amsgrad": True})
    assert len(opt.param_groups) == 1
    opt.add_param_group({"params": [nn.Parameter(torch.ones(LARGE).half())]})
    step(opt, [*params, opt.params.models[-1]], 3)
    assert "exp_avg_codes" in own_names(opt)[3]


@pytest.mark.parametrize("mode", [{"state": "8bit"}, {"state": "fp32", "masters": "split24"}], ids=str)
@pytest.mark.parametrize("obstacle", ["differentiable", "sparse"])
def test_a_step_that_can_only_be_the_wrapped_optimizers_raises_before_it_changes_anything(
    mode: dict[str, str], obstacle: str
) -> None:
    opt, params = trained("adamw", **mode)
    named = 'optimizer_state="8bit"' if mode["state"] == "8bit" else 'master_weights="split24"'
    before = everything(opt, params)
    if obstacle == "sparse":
        opt.zero_grad()
        opt.scale_loss(torch.zeros(()))
        params[2].grad = torch.ones(LARGE).to_sparse()
    else:
        opt.param_groups[0]["differentiable"] = True
    with pytest.raises(RuntimeError, match=f"this step can't be taken in one pass: .*With {named} there is no other"):
        opt.step() if obstacle == "sparse" else step(opt, params, 8)
    assert_same(everything(opt, params), before)
    opt.param_groups[0]["differentiable"] = False
    opt.zero_grad()
    step(opt, params, 9)


MODES: dict[str, tuple[str, dict[str, Any]]] = {
    "8bit": ('optimizer_state="8bit"', {"optimizer_state": "8bit"}),
    "split24": ('master_weights="split24"', {"master_weights": "split24"}),
    "release": ("gradient_release=True", {"gradient_release": True}),
}
LATER: dict[str, tuple[dict[str, Any], torch.dtype, str]] = {
    "float64": ({}, torch.float64, "parameter 'group 1, param 0' is float64"),
    "differentiable": ({"differentiable": True}, torch.float16, "group 1 has differentiable=True"),
    "capturable": ({"capturable": True}, torch.float16, "group 1 has capturable=True"),
    "betas": ({"betas": (0.9, 1.5)}, torch.float16, "group 1 has betas of"),
    "lr": ({"lr": torch.ones(2)}, torch.float16, "group 1 has an lr that is a tensor of several elements"),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("case", LATER)
def test_groups_that_could_never_be_stepped_are_refused_when_they_come(case: str, mode: str) -> None:
    more, dtype, message = LATER[case]
    said, given = MODES[mode]
    opt = MixedPrecisionOptimizer(AdamW([nn.Parameter(torch.ones(LARGE).half())]), **given)
    wanted = f"{said} needs the one-pass step, which can't be had: {message}"
    with pytest.raises(ValueError, match=re.escape(wanted)):
        opt.add_param_group({"params": [nn.Parameter(torch.ones(3, dtype=dtype))], **more})
    assert len(opt.param_groups) == len(opt.optimizer.param_groups) == 1
    opt.backward(opt.params.models[0].float().sum())
    opt.step()
    plain = MixedPrecisionOptimizer(AdamW([nn.Parameter(torch.ones(LARGE).half())]), fused_step="auto")
    plain.add_param_group({"params": [nn.Parameter(torch.ones(3))], "differentiable": True})


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("key", ["differentiable", "capturable"])
@pytest.mark.parametrize("of_torch", [False, True])
def test_checkpoints_whose_groups_could_never_be_stepped_are_refused(key: str, mode: str, of_torch: bool) -> None:
    said, given = MODES[mode]
    params = [nn.Parameter(torch.ones(LARGE).half())]
    opt = MixedPrecisionOptimizer(AdamW(params), **given)
    opt.backward(params[0].float().sum())
    opt.step()
    saved = copy.deepcopy(opt.state_dict())
    saved["optimizer"]["param_groups"][0][key] = True
    before = everything(opt, params)
    wanted = f"{said} needs the one-pass step, which can't be had: group 0 has {key}=True"
    with pytest.raises(ValueError, match=re.escape(wanted)):
        opt.load_state_dict(saved["optimizer"] if of_torch else saved)
    assert_same(everything(opt, params), before)


def test_a_checkpoint_with_amsgrad_is_refused() -> None:
    params = [nn.Parameter(torch.ones(LARGE).half())]
    opt = MixedPrecisionOptimizer(AdamW(params), optimizer_state="8bit")
    other = MixedPrecisionOptimizer(AdamW([nn.Parameter(torch.ones(LARGE).half())], amsgrad=True))
    before = everything(opt, params)
    with pytest.raises(ValueError, match=r'optimizer_state="8bit" needs .* group 0 has amsgrad=True'):
        opt.load_state_dict(other.state_dict())
    assert_same(everything(opt, params), before)
