"""Saving and resuming: N steps, save, load into fresh objects, N steps = 2N steps, bit for bit."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import pytest
import torch
from specs import CASES, OptimizerCase, one_per_class, params_by_class, params_of
from torch.optim import SGD, Adam, AdamW
from torch.utils._python_dispatch import TorchDispatchMode

from engine import recipes
from engine.checks import (
    Problem,
    assert_model_is_rounded_masters,
    assert_same,
    assert_same_bits,
    flatten,
    linear_loss,
    one_step,
    ones,
    parameters,
    train,
)
from fp16opt import MixedPrecisionOptimizer
from fp16opt.kernels import backend

STATIC: dict[str, Any] = {"loss_scale": 64.0}
DYNAMIC: dict[str, Any] = {"init_scale": 64.0, "growth_interval": 2, "hysteresis": 2}


@pytest.mark.parametrize("settings", [STATIC, DYNAMIC], ids=["static", "dynamic"])
@pytest.mark.parametrize("case", params_by_class(CASES))
def test_resume_bit_exact_for_every_optimizer(case: OptimizerCase, settings: dict[str, Any]) -> None:
    recipes.check_resume_bit_exact(recipes.engine, case, settings, model_first=True)


@pytest.mark.parametrize("case", params_by_class([case for case in CASES if case.cls in ("SGD", "Adam", "AdamW")]))
def test_resume_bit_exact_with_the_wrapped_optimizers_own_step(case: OptimizerCase) -> None:
    """Of the classes that the default steps in one pass."""
    recipes.check_resume_bit_exact(recipes.wrapped_step, case, DYNAMIC, model_first=True)


@pytest.mark.parametrize("order", ["model_first", "optimizer_first", "optimizer_alone"])
@pytest.mark.parametrize("settings", [STATIC, DYNAMIC], ids=["static", "dynamic"])
@pytest.mark.parametrize("case", params_of(one_per_class()))
def test_resume_bit_exact_for_every_optimizer_in_any_order(
    case: OptimizerCase, settings: dict[str, Any], order: str, caplog: pytest.LogCaptureFixture
) -> None:
    first = {"model_first": True, "optimizer_first": False, "optimizer_alone": None}[order]
    recipes.check_resume_bit_exact(recipes.engine, case, settings, first, dtypes=torch.float16)
    assert not [r for r in caplog.records if "wr" in r.getMessage() and "skipped" not in r.getMessage()], (
        "loading the model was taken for a write behind the back"
    )


def _trained(**settings: Any) -> tuple[list[torch.nn.Parameter], MixedPrecisionOptimizer]:
    params = parameters([(9,), (2, 3), (4,)], recipes.MIXED)
    opt = recipes.engine(AdamW(params, lr=0.05, weight_decay=0.1), **(settings or STATIC))
    problem = Problem(params)
    for _ in range(3):
        train(opt, params, problem)
    return params, opt


def _fresh(**settings: Any) -> tuple[list[torch.nn.Parameter], MixedPrecisionOptimizer]:
    params = parameters([(9,), (2, 3), (4,)], recipes.MIXED, seed=8)
    return params, recipes.engine(AdamW(params, lr=0.5), **(settings or STATIC))


def test_load_copies_so_that_training_never_edits_the_checkpoint() -> None:
    _, opt = _trained(**DYNAMIC)
    sd = copy.deepcopy(opt.state_dict())
    before = flatten(sd)
    fresh, resumed = _fresh(**DYNAMIC)
    resumed.load_state_dict(sd)
    problem = Problem(fresh)
    for _ in range(3):
        train(resumed, fresh, problem)
    assert_same(sd, before, "checkpoint ")
    _, second = _fresh(**DYNAMIC)
    second.load_state_dict(sd)
    assert_same(second.state_dict(), sd)


def test_load_discards_gradients_and_flags_of_before() -> None:
    _, opt = _trained()
    fresh, resumed = _fresh()
    resumed.backward(linear_loss(fresh, [float("inf")] * 3))
    resumed.load_state_dict(opt.state_dict())
    resumed.zero_grad()
    one_step(resumed, fresh, [0.5] * 3)
    assert not bool(resumed.step_was_skipped)
    assert_model_is_rounded_masters(resumed)


@pytest.mark.parametrize("fused", [False, True], ids=["foreach", "fused"])
def test_plain_torch_optim_state_dict_loads(fused: bool) -> None:
    """Coming from FP32 training: the plain optimizer's state continues on the masters."""
    wide = parameters([(9,), (2, 3)], torch.float32)
    plain = Adam(wide, lr=0.05, amsgrad=True)
    problem = Problem(wide)
    for _ in range(3):
        plain.zero_grad()
        problem.loss(wide).backward()
        plain.step()
    half = parameters([(9,), (2, 3)], torch.float16, seed=4)
    opt = MixedPrecisionOptimizer(Adam(half, lr=0.5, fused=fused or None), loss_scale=8.0)
    model_before = [p.detach().clone() for p in half]
    sd = plain.state_dict()
    before = flatten(sd)
    opt.load_state_dict(sd)
    assert_same([p.detach() for p in half], model_before, "a plain state_dict holds no weights: model ")
    assert opt.param_groups[0]["lr"] == 0.05
    assert opt.param_groups[0]["amsgrad"] is True
    for m, p in zip(opt.master_params(), wide, strict=True):
        for key in ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "step"):
            assert_same_bits(opt.state[m][key], plain.state[p][key], key)
    train(opt, half, Problem(half))
    assert_same(sd, before, "the plain checkpoint was edited ")
    assert float(opt.state[next(iter(opt.master_params()))]["step"]) == 4.0


def test_plain_16_bit_state_dict_loads_in_fp32() -> None:
    half = ones(4, torch.bfloat16)
    plain = AdamW([half], lr=0.1)
    half.grad = torch.full_like(half, 0.5)
    plain.step()
    q = ones(4, torch.bfloat16)
    opt = MixedPrecisionOptimizer(AdamW([q], lr=0.1))
    opt.load_state_dict(copy.deepcopy(plain.state_dict()))
    (m,) = opt.master_params()
    assert_same_bits(opt.state[m]["exp_avg"], plain.state[half]["exp_avg"].float())


def test_wrapped_optimizers_own_load_state_dict_is_followed() -> None:
    params, opt = _trained()
    sd = copy.deepcopy(opt.state_dict()["optimizer"])
    sd["param_groups"][0]["lr"] = 0.125
    opt.optimizer.load_state_dict(sd)
    assert opt.param_groups[0]["lr"] == 0.125
    assert opt.param_groups is opt.optimizer.param_groups
    train(opt, params, Problem(params))
    assert_model_is_rounded_masters(opt)


def test_state_dict_and_load_hooks_fire() -> None:
    p = ones()
    opt = MixedPrecisionOptimizer(SGD([p], lr=0.5), loss_scale=8.0)
    fired: list[str] = []
    opt.register_state_dict_post_hook(lambda o, sd: fired.append("saved"))
    opt.register_load_state_dict_post_hook(lambda o: fired.append("loaded"))
    opt.load_state_dict(opt.state_dict())
    assert fired == ["saved", "loaded"]


@pytest.mark.parametrize(
    ("saved", "now"),
    [
        ({}, {"foreach": True}),
        ({"foreach": False}, {}),
        ({}, {"fused": True}),
        ({"fused": True}, {}),
        ({"lr": 1}, {"lr": 0.5}),
        ({"lr": 0.5}, {"lr": torch.tensor(0.25)}),
        ({"weight_decay": 0}, {"weight_decay": 0.5}),
        ({"betas": [0.5, 0.75]}, {"betas": (0.9, 0.99)}),
    ],
    ids=str,
)
def test_options_given_in_another_way_load_as_torch_loads_them(saved: dict[str, Any], now: dict[str, Any]) -> None:
    p, q = ones(), ones()
    opt = MixedPrecisionOptimizer(AdamW([p], **saved), loss_scale=8.0)
    one_step(opt, [p], [0.5])
    other = MixedPrecisionOptimizer(AdamW([q], **now), loss_scale=8.0)
    other.load_state_dict(copy.deepcopy(opt.state_dict()))
    for key, value in saved.items():
        got = other.param_groups[0][key]
        assert (tuple(got) == tuple(value)) if isinstance(value, list) else (got == value)
    one_step(other, [q], [0.5])
    assert float(other.state[next(iter(other.master_params()))]["step"]) == 2.0
    assert_model_is_rounded_masters(other)


def test_a_good_checkpoint_loads_whatever_was_loaded_before() -> None:
    """What a checkpoint may hold is judged by the wrapped class, not by what an earlier load left in the
    groups."""
    p = ones()
    opt = MixedPrecisionOptimizer(AdamW([p]), loss_scale=8.0)
    good = copy.deepcopy(opt.state_dict())
    other = copy.deepcopy(good)
    for value in (True, 0, 1.5):
        other["optimizer"]["param_groups"][0]["foreach"] = value
        with contextlib.suppress(TypeError, ValueError):  # refusing an option of a strange kind is right too
            opt.load_state_dict(other)
        opt.load_state_dict(good)
    assert opt.param_groups[0]["foreach"] is None


class _Averaged(torch.optim.Optimizer):
    """Momentum of the parameters' dtype, or in bfloat16 by choice: torch's load casts it, and it says so again."""

    def __init__(self, params: Any, lr: float = 1e-2, narrow: bool = False, says_so: bool = False) -> None:
        self.narrow, self.says_so = narrow, says_so
        super().__init__(params, {"lr": lr})

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for kept in self.state.values() if self.says_so else ():
            kept["m"] = kept["m"].bfloat16()

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            dtype = torch.bfloat16 if self.narrow else p.dtype
            m = self.state[p].setdefault("m", torch.zeros_like(p, dtype=dtype))
            p.add_(m.lerp_(p.grad.to(dtype), 0.1).to(p.dtype), alpha=-self.param_groups[0]["lr"])


@pytest.mark.parametrize("masters", ["full", "none"])
@pytest.mark.parametrize(
    "make",
    [
        pytest.param(_Averaged, id="as_parameter"),
        pytest.param(lambda params: _Averaged(params, narrow=True), id="narrow"),
        pytest.param(lambda params: _Averaged(params, narrow=True, says_so=True), id="narrow_by_setstate"),
        pytest.param(torch.optim.Adagrad, id="Adagrad"),
        pytest.param(torch.optim.Adam, id="Adam"),
    ],
)
@pytest.mark.parametrize("plain", [False, True], ids=["ours", "plain"])
def test_state_keeps_its_dtype_over_a_resume(make: Any, masters: str, plain: bool) -> None:
    def made() -> tuple[torch.nn.Parameter, MixedPrecisionOptimizer]:
        weight = torch.nn.Parameter(torch.linspace(-1, 1, 64).bfloat16())
        return weight, MixedPrecisionOptimizer(make([weight]), loss_scale=64.0, master_weights=masters)

    def train(weight: torch.nn.Parameter, opt: MixedPrecisionOptimizer) -> None:
        for _ in range(3):
            opt.zero_grad()
            opt.backward((weight.float() - 0.3).square().sum())
            opt.step()

    def dtypes(opt: MixedPrecisionOptimizer) -> Any:
        return {key: value.dtype for key, value in opt.state_dict()["optimizer"]["state"][0].items()}

    weight, opt = made()
    train(weight, opt)
    other, resumed = made()
    other.data.copy_(weight.data)
    if plain:  # of 16-bit training where there are no masters, else of FP32 training
        resumed.load_state_dict(copy.deepcopy(opt.state_dict()))
        state = opt.optimizer.state_dict()
        unsaid = make([torch.nn.Parameter(torch.ones(1))])
        if isinstance(unsaid, _Averaged) and unsaid.narrow and not unsaid.says_so:
            pytest.skip("the class forgets its choice in plain torch too")
        if isinstance(unsaid, torch.optim.Adagrad) and masters == "none":
            pytest.skip("FP32 sums are the wrapper's, and plain files don't say so")
        resumed.load_state_dict(state)
    else:
        resumed.load_state_dict(copy.deepcopy(opt.state_dict()))
    assert dtypes(resumed) == dtypes(opt)
    train(weight, opt)
    train(other, resumed)
    assert torch.equal(weight, other)


def test_state_of_a_parameter_put_in_anothers_place_keeps_its_dtype_without_masters() -> None:
    weight, other = (torch.nn.Parameter(torch.ones(8, dtype=torch.bfloat16)) for _ in range(2))
    opt = MixedPrecisionOptimizer(_Averaged([weight]), master_weights="none")
    opt.backward(weight.float().sum())
    opt.step()
    opt.optimizer.state[other] = {"m": opt.state[weight]["m"]}
    opt.optimizer.param_groups[0]["params"][0] = other
    opt.zero_grad()
    opt.backward(other.float().sum())
    opt.step()
    assert opt.state[other]["m"].dtype == torch.bfloat16


class Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts what torch is asked to do."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.skipif(backend(torch.device("cpu")) == "reference", reason="without kernels each is rounded by many calls")
def test_loading_asks_torch_for_little_more_than_a_copy_of_each_tensor() -> None:
    """Of thousands of small parameters the number of calls decides how long a load takes."""
    params = parameters([(4,)] * 64)
    opt = MixedPrecisionOptimizer(AdamW(params), loss_scale=8.0)
    train(opt, params, Problem(params))
    saved = copy.deepcopy(opt.state_dict())
    with Operations() as operations:
        opt.load_state_dict(saved)
    one_each = 4 + 1  # three tensors of state and a master are copied, a count is read
    assert operations.count <= one_each * len(params) + 32
