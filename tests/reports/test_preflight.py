"""check: planted faults that it names and measures, nothing left changed, and what it refuses."""

from __future__ import annotations

import copy
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import LambdaLR

from fp16opt import (
    DynamicLossScaler,
    GradScaler,
    MixedPrecisionOptimizer,
    PreflightFinding,
    amp,
    check,
)

pytestmark = pytest.mark.usefixtures("seeded")
HALF, BF16 = torch.float16, torch.bfloat16
Case = dict[str, Any]


def mlp(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    layers = OrderedDict(fc1=nn.Linear(8, 16), act=nn.Tanh(), fc2=nn.Linear(16, 4))
    return nn.Sequential(layers).to(dtype)


def batch(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(16, 8).to(dtype)


def loss_of(model: nn.Module) -> Callable[[], Tensor]:
    x, y = batch(next(model.parameters()).dtype), torch.randn(16, 4)
    return lambda: (model(x).float() - y).square().mean()


def wrapped(model: nn.Module, inner: Any = AdamW, lr: float = 1e-3, **options: Any) -> MixedPrecisionOptimizer:
    return MixedPrecisionOptimizer(
        inner(model.parameters(), lr=lr), named_parameters=model.named_parameters(), **options
    )


# -- makers of cases ---------------------------------------------------------------------------------------------------


def ours(dtype: torch.dtype = HALF, **options: Any) -> Case:
    """The MLP under a wrapped optimizer."""
    model = mlp(dtype)
    return {"model": model, "loss_fn": loss_of(model), "optimizer": wrapped(model, **options)}


def looped(case: Case, between: Callable[[], Any] = int, after: Callable[[], Any] = int) -> Case:
    """With a loop of the user's: something between the backward and the step, and after it."""
    opt, loss = case["optimizer"], case["loss_fn"]

    def train_step() -> None:
        opt.zero_grad()
        opt.backward(loss())
        between()
        opt.step()
        after()

    return {**case, "train_step": train_step}


# -- sound loops -------------------------------------------------------------------------------------------------------


def conv_with_batch_norm() -> Case:
    layers = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 2)
    model = nn.Sequential(*layers)
    x = torch.randn(8, 1, 6, 6)
    opt = SGD(model.parameters(), lr=0.1, momentum=0.9)
    return {"model": model, "loss_fn": lambda: model(x).square().mean(), "optimizer": opt}


def near_the_end(dynamic: bool) -> Case:
    """At a scale where the largest gradient of a weight is at three quarters of FP16's range."""
    case = ours(loss_scale=1024.0)
    grads = torch.autograd.grad(case["loss_fn"](), list(case["model"].parameters()))
    scale = 0.75 * 65504.0 / max(float(grad.abs().max()) for grad in grads)
    options: dict[str, Any] = {"scaler": DynamicLossScaler(init_scale=scale)} if dynamic else {"loss_scale": scale}
    return {**case, "optimizer": wrapped(case["model"], SGD, 1e-6, **options)}


def test_a_dynamic_scale_may_be_near_the_end() -> None:
    assert check(**near_the_end(dynamic=True)).findings == []
    found = {one.key: one for one in check(**near_the_end(dynamic=False)).findings}
    assert found["near_the_end"].level == "warning"
    assert "dynamic=True" in found["near_the_end"].sentence + found["near_the_end"].line


# -- planted faults ----------------------------------------------------------------------------------------------------


def a_clip_of_scaled_gradients() -> Case:
    case = ours(dynamic=True)
    return looped(case, lambda: torch.nn.utils.clip_grad_norm_(case["model"].parameters(), 1.0))


def a_scheduler_that_runs_ahead() -> Case:
    case = ours(dynamic=True)
    return looped(case, after=LambdaLR(case["optimizer"], lambda step: 1 / (1 + step)).step)


def test_the_line_and_its_file_are_named() -> None:
    """A loop's text that `exec` is given has no file: what stands in one is quoted with its place."""
    scheduler = a_scheduler_that_runs_ahead()
    for case, line in (
        (a_clip_of_scaled_gradients(), 'clip_grad_norm_(case["model"].parameters(), 1.0))'),
        (scheduler, "after()"),
    ):
        (sentence,) = (one.sentence for one in check(**case).findings if one.key in ("clip", "scheduler"))
        assert f"{line}` (test_preflight.py" in sentence


def test_an_error_in_the_report_stands_before_every_warning() -> None:
    case = a_scheduler_that_runs_ahead()
    model = case["model"]
    model.register_parameter("unused", nn.Parameter(torch.ones(2, dtype=HALF)))
    found = check(model, case["loss_fn"], wrapped(model))
    assert [finding.level for finding in found.findings] == ["error", "warning"]
    assert [finding.key for finding in found.findings] == ["no_loss_scale", "no_gradient"]
    assert str(found).startswith("fp16opt.check: 1 error and 1 warning.\n\n1. error: FP16 weights are trained without")
    assert "\n2. warning: " in str(found)
    assert "\n   -> " in str(found)


def test_modes_that_a_loss_changes_are_put_back() -> None:
    case = conv_with_batch_norm()
    model, inner = case["model"], case["loss_fn"]

    def loss() -> Tensor:
        model.eval()
        model[1].train()
        return inner()  # type: ignore[no-any-return]

    assert check(model, loss, case["optimizer"]).findings == []
    assert all(module.training for module in model.modules())


def test_shares_are_by_layer_and_by_what_masters_would_keep() -> None:
    """Of one weight in four the update is half of what BF16 can hold; SGD's is the rate, so that it can be counted."""
    weight = nn.Parameter(torch.ones(4, dtype=BF16))
    model = nn.Module()
    model.weight, model.large = weight, nn.Parameter(torch.ones(12, dtype=BF16))
    factor = torch.tensor([1.0, 1.0, 1.0, 2.0**-12])
    loss = lambda: (weight.float() * factor).sum() + model.large.float().sum()  # noqa: E731
    (one,) = check(model, loss, SGD(model.parameters(), lr=2.0**-7)).findings
    assert (one.key, one.layer, one.by_layer) == ("lost_updates", "weight", {"weight": 0.25})
    assert one.numbers == {"without_masters": 1 / 16, "with_masters": 0.0}


def test_shares_of_gradients_are_exact() -> None:
    weight = nn.Parameter(torch.ones(8, dtype=HALF))
    model = nn.Module()
    model.weight = weight
    factor = torch.tensor([1.0] * 5 + [2.0**-20] * 3)
    loss = lambda: (weight.float() * factor).sum()  # noqa: E731
    (one,) = check(model, loss, MixedPrecisionOptimizer(SGD([weight], lr=1e-3))).findings
    assert one.numbers == {"underflow": 3 / 8, "loss_scale": 1.0, "largest_scale": 2.0**15}
    assert one.by_layer == {"weight": 3 / 8}


def test_an_fp16_loss_limits_the_scale() -> None:
    model = mlp(HALF)
    x = batch(HALF)
    found = check(model, lambda: model(x).square().mean(), wrapped(model, dynamic=True))
    assert found.findings == []
    assert (
        "1 of them skipped to find the loss scale. The loss scale is 32,768; the largest possible is" in found.facts[0]
    )
    assert "is 32,768, as the loss is FP16: end the model with .float()" in found.facts[0]


# -- everything is put back --------------------------------------------------------------------------------------------


def same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        a, b = a.to_dense(), b.to_dense()
        return isinstance(b, Tensor) and a.dtype == b.dtype and torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


def test_what_a_loss_or_a_loop_raises_comes_through_and_all_is_put_back() -> None:
    case, filters = looped(ours(dynamic=True)), list(logging.getLogger("fp16opt").filters)
    before = copy.deepcopy((case["model"].state_dict(), case["optimizer"].state_dict()))
    calls: list[int] = []

    def loss() -> Tensor:
        calls.append(1)
        if len(calls) == 5:
            raise KeyError("data")
        return case["loss_fn"]()  # type: ignore[no-any-return]

    with pytest.raises(KeyError, match="data"):
        check(case["model"], loss, case["optimizer"])

    def train_step() -> None:
        case["train_step"]()
        raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine"):
        check(**{**case, "train_step": train_step})
    assert same((case["model"].state_dict(), case["optimizer"].state_dict()), before)
    assert logging.getLogger("fp16opt").filters == filters


def test_parameters_outside_of_the_model_are_put_back() -> None:
    """A loss with a temperature of its own, which the optimizer steps too."""
    model, temperature = mlp(BF16), nn.Parameter(torch.ones((), dtype=BF16))
    opt = MixedPrecisionOptimizer(SGD([*model.parameters(), temperature], lr=0.1))
    inner = loss_of(model)
    assert check(model, lambda: inner() * temperature.float(), opt).findings == []
    assert temperature.item() == 1.0
    assert temperature.grad is None


def test_it_runs_no_more_than_it_says() -> None:
    case = ours(dynamic=True)
    calls: list[int] = []

    def loss() -> Tensor:
        calls.append(1)
        return case["loss_fn"]()  # type: ignore[no-any-return]

    for steps in (4, 8, 20):
        calls.clear()
        found = check(case["model"], loss, case["optimizer"], steps=steps)
        assert found.steps == len(calls) == steps


# -- what it refuses ---------------------------------------------------------------------------------------------------


def test_what_it_refuses() -> None:
    model = mlp()
    loss, opt = loss_of(model), SGD(model.parameters(), lr=0.1)
    with pytest.raises(TypeError, match=r"model: expected a torch.nn.Module, got str"):
        check("model", loss)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"loss_fn: expected a callable that takes nothing, got Tensor"):
        check(model, loss())  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"loss_fn: expected it to return a floating tensor"):
        check(model, lambda: 3.0)  # type: ignore[arg-type, return-value]
    with pytest.raises(TypeError, match=r"train_step: expected a callable"):
        check(model, loss, opt, train_step=3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"got GradScaler\. A GradScaler goes by scaler="):
        check(model, loss, GradScaler("cpu"))
    with pytest.raises(TypeError, match=r"scaler: expected a GradScaler, got float"):
        check(model, loss, opt, scaler=2.0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"steps: expected an integer of 4 or more, got 3"):
        check(model, loss, opt, steps=3)
    with pytest.raises(ValueError, match=r"lr"):
        check(model, loss, lr=float("nan"))
    with pytest.raises(ValueError, match=r"model: expected parameters that require grad, got none"):
        check(mlp().requires_grad_(False), loss)


class Uncopied(SGD):
    """Is stepped by one thread at a time."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.lock = threading.Lock()


class TwoCalls(SGD):
    """Evaluates its closure twice."""

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        return closure() + closure()


def test_optimizers_that_it_can_t_step_or_undo_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = mlp()
    loss, params = loss_of(model), list(model.parameters())
    with pytest.raises(TypeError, match=r"no copy of this Uncopied could be made \(TypeError: cannot"):
        check(model, loss, Uncopied(params, lr=0.1))
    with pytest.raises(TypeError, match=r"TwoCalls\.step\(\) raised TypeError: .*closure=\"reevaluate\""):
        check(model, loss, TwoCalls(params, lr=0.1))
    with pytest.raises(TypeError, match="train_step: expected the optimizer that it steps, too, got none"):
        check(model, loss, train_step=lambda: None)
    with pytest.raises(ValueError, match="leaves no gradient to look at"):
        check(model, loss, MixedPrecisionOptimizer(SGD(mlp().parameters(), lr=0.1), gradient_release=True))
    plain = amp.initialize(model, SGD(params, lr=0.1), opt_level="O0", verbosity=0)[1]
    with pytest.raises(TypeError, match=r"amp\.initialize has made this SGD, at a level without master weights"):
        check(model, loss, plain)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        monkeypatch.setattr(dist, "get_world_size", lambda *_: 2)
        with pytest.raises(RuntimeError, match="called in a training of several processes"):
            check(model, loss, SGD(params, lr=0.1))
    finally:
        dist.destroy_process_group()


def test_findings_are_plain_values() -> None:
    finding = PreflightFinding("eps", "error", "It is 0.", "eps=1e-4")
    assert str(finding) == "error: It is 0.\n    eps=1e-4"
    assert (finding.layer, finding.numbers, finding.by_layer) == (None, {}, {})
