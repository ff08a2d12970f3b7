"""diagnose: each thing that can be wrong is named with its place and its remedy, and nothing is left changed."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fp16opt import DynamicLossScaler, GradScaler, MixedPrecisionOptimizer, amp, diagnose

HALF = torch.float16


def net(dtype: torch.dtype = HALF, width: int = 8) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Linear(4, width), nn.Tanh(), nn.Sequential(nn.Linear(width, width), nn.ReLU()), nn.Linear(width, 2)]
    return nn.Sequential(*layers).to(dtype)


def data(rows: int = 16, dtype: torch.dtype = HALF) -> Tensor:
    return torch.from_numpy(np.random.default_rng(0).standard_normal((rows, 4))).to(dtype)


def loss_of(model: nn.Module, factor: float = 1.0, x: Tensor | None = None) -> Callable[[], Tensor]:
    x = data() if x is None else x
    return lambda: model(x).float().square().mean() * factor


class Residual(nn.Module):
    """Adds up, outside of any module."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.inner, self.after = model, nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.inner(x).abs() * 0.1 + 6e4 + 6e4)


class Log(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.log()


# -- the forward -------------------------------------------------------------------------------------------------------


def test_a_module_that_leaves_fp16_is_named_with_its_inputs_and_fp32() -> None:
    model = net()
    with torch.no_grad():
        model[2][0].weight.fill_(3e4)
        model[2][0].bias.zero_()
        model[1] = nn.Hardtanh(0.5, 1.0)
        model[0].weight.zero_()
    found = diagnose(model, loss_of(model))
    assert (found.kind, found.culprit, found.largest_scale) == ("forward", "2.0", None)
    assert str(found).startswith("2.0 (Linear) is the first module whose output is not finite. Its inputs are: 0.5 to ")
    assert "FP32 would hold it: the output is 1.2e+05 to " in found.words  # 8 times 0.5 times 30000
    assert "FP16 ends at 65504" in found.words


def test_the_operation_itself_is_told_from_the_dtype() -> None:
    model = nn.Sequential(net(), Log())
    found = diagnose(model, loss_of(model))
    assert (found.kind, found.culprit) == ("forward", "1")
    assert "In FP32 it is not finite either: it is the operation, not the dtype." in found.words


def test_what_is_made_between_modules_is_said_to_be() -> None:
    model = Residual(net())
    found = diagnose(model, loss_of(model))
    assert (found.kind, found.culprit) == ("forward", "after")
    assert "Its input is not finite already, and no module before it made that" in found.words


def test_a_module_with_children_that_are_finite() -> None:
    class Outer(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * 6e4 * 10.0

    model = nn.Sequential(Outer(net()))
    found = diagnose(model, loss_of(model))
    assert (found.kind, found.culprit) == ("forward", "0")
    assert "Those inside of it are finite: it is made in the code of its own forward. FP32 would hold it" in found.words


def test_a_module_that_cannot_run_in_fp32() -> None:
    class Stubborn(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if x.dtype != HALF:
                raise RuntimeError("FP16 only")
            return x * 1e4 * 1e4

    model = nn.Sequential(net(), Stubborn())
    assert diagnose(model, loss_of(model)).words.endswith("Whether FP32 would hold it could not be tried.")


def test_input_weights_and_loss() -> None:
    model = net()
    x = data()
    x[3, 1] = math.inf
    found = diagnose(model, loss_of(model, x=x))
    assert (found.kind, found.culprit) == ("input", "the model's input")
    found = diagnose(model, lambda: (model(data()).float().square().mean() * 0).log())
    assert (found.kind, found.culprit) == ("loss", "the loss function")
    assert found.words.startswith("The loss is -inf, while the outputs of all modules are finite")
    with torch.no_grad():
        model[2][0].bias[1] = math.nan
    found = diagnose(model, loss_of(model))
    assert (found.kind, found.culprit) == ("weights", "2.0.bias")


def test_modules_that_return_containers_and_take_keywords() -> None:
    class Dicts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = Inner(1.0), Inner(1e4)

        def forward(self, *, x: Tensor) -> Tensor:
            return self.second(x=self.first(x=x)["y"][0])["y"][0]

    class Inner(nn.Module):
        def __init__(self, factor: float) -> None:
            super().__init__()
            self.factor, self.weight = factor, nn.Parameter(torch.ones(4, dtype=HALF))

        def forward(self, x: Tensor) -> dict[str, Any]:
            return {"y": [x * self.weight * self.factor * self.factor], "n": 3}

    model = Dicts()
    found = diagnose(model, lambda: model(x=data()).float().sum())
    assert (found.kind, found.culprit) == ("forward", "second")
    assert "FP32 would hold it" in found.words


# -- the backward ------------------------------------------------------------------------------------------------------


def overflows(model: nn.Module, make: Callable[[], Tensor], scale: float) -> bool:
    grads = torch.autograd.grad(make() * scale, list(model.parameters()))
    return not all(bool(grad.isfinite().all()) for grad in grads)


@pytest.mark.parametrize("factor", [1e3, 1.0, 0.05])
def test_the_largest_scale_is_the_largest(factor: float) -> None:
    model, scaler = net(), DynamicLossScaler(2.0**30, max_scale=2.0**30)
    make = loss_of(model, factor)
    opt = MixedPrecisionOptimizer(torch.optim.SGD(model.parameters()), scaler=scaler)
    found = diagnose(model, make, opt)
    assert found.kind == "overflow"
    assert found.scale == 2.0**30
    assert found.largest_scale is not None
    assert math.log2(found.largest_scale).is_integer()
    assert not overflows(model, make, found.largest_scale)
    assert overflows(model, make, 2.0 * found.largest_scale)
    assert found.words.startswith("The first gradient that overflows at the loss scale of 1.07374e+09 is that of ")
    assert f"The largest scale at which none does is {found.largest_scale:g}." in found.words
    scaler.set_scale(found.largest_scale)
    assert diagnose(model, make, opt).kind == "none"


def test_the_first_gradient_in_the_order_of_the_backward() -> None:
    class Steep(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * 1e3

    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), Steep(), nn.Identity()).to(HALF)
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(1e-3)
    found = diagnose(model, lambda: model(data()).float().sum(), GradScaler("cpu", init_scale=2.0**10))
    assert (found.kind, found.culprit) == ("overflow", "1 (its output's gradient)")


def test_an_fp16_loss_is_named() -> None:
    model = net()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
    found = diagnose(model, lambda: model(data()).square().mean(), scaler)
    assert (found.kind, found.culprit) == ("overflow", "the loss")
    assert "its own gradient is the loss scale: 65536 is infinite there" in found.words
    assert found.largest_scale is not None
    assert found.largest_scale <= 2.0**15


def test_a_backward_that_no_scale_helps() -> None:
    model = net()
    found = diagnose(model, lambda: (model(data()) * 0).float().norm() + (model(data()) * 0).float().abs().sqrt().sum())
    assert (found.kind, found.largest_scale) == ("overflow", None)
    assert "it is the operation's own backward" in found.words


def test_a_loss_that_is_too_large_as_it_is() -> None:
    model = net()
    found = diagnose(model, loss_of(model, 1e6))
    assert found.kind == "overflow"
    assert found.largest_scale is not None
    assert found.largest_scale < 1.0
    assert "Below 1 gradients are too large as they are" in found.words


@pytest.mark.parametrize("dtype", [HALF, torch.float32])
def test_underflow_is_told_by_parameter(dtype: torch.dtype) -> None:
    """Of FP32 parameters under autocast only what is zero here, and not at a larger scale, is lost for certain."""
    model = net(dtype)
    make = loss_of(model, 1e-7)

    def under_autocast() -> Tensor:
        with torch.autocast("cpu", dtype=HALF, enabled=dtype != HALF):
            return model(data(dtype=dtype)).float().square().mean() * 1e-7

    found = diagnose(model, make if dtype == HALF else under_autocast)
    assert found.kind == "underflow"
    named = dict(found.underflow)
    assert found.culprit == found.underflow[0][0]
    assert set(named) <= {name for name, _ in model.named_parameters()}
    assert [share for _, share in found.underflow] == sorted(named.values(), reverse=True)
    for name, param in model.named_parameters() if dtype == HALF else ():
        (grad,), (true,) = (torch.autograd.grad(make() * scale, param) for scale in (1.0, 2.0**20))
        values = grad.double().abs().numpy()
        lost = ((values == 0) & (true.double().numpy() != 0)) | ((values > 0) & (values < 2.0**-14))
        assert named.get(name, 0.0) == pytest.approx(lost.mean() if lost.mean() > 0.05 else 0.0)
    assert "gradients underflow" in found.words
    assert "A larger scale, or dynamic=True, would keep them." in found.words


def test_what_is_zero_at_every_scale_is_no_underflow() -> None:
    model, scaler = net(), GradScaler("cpu", init_scale=2.0**10)
    found = diagnose(model, lambda: (model(data()).float() * torch.tensor([1.0, 0.0])).square().mean(), scaler)
    assert (found.kind, found.culprit, found.underflow) == ("none", None, [])
    assert found.words.endswith("At 1024 gradients do not underflow.")


def test_bf16_needs_no_scale() -> None:
    model = net(torch.bfloat16)
    found = diagnose(model, loss_of(model, 1e-6, data(dtype=torch.bfloat16)))
    assert (found.kind, found.largest_scale) == ("none", 2.0**24)


@pytest.fixture
def amp_session() -> Iterator[None]:
    """Ends with torch as it was, and with a session that knows nothing."""
    yield
    casts = amp._amp_state.casts
    casts.deactivate()
    casts.registered.clear()
    amp._amp_state.__init__()
    amp._amp_state.casts = casts


@pytest.mark.usefixtures("amp_session")
def test_o1_casts_are_seen_and_fp32_is_tried_without_them() -> None:
    model = net(torch.float32)
    with torch.no_grad():
        model[2][0].weight.fill_(3e4)
    model[1] = nn.Hardtanh(0.9, 1.0)
    model, optimizer = amp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), opt_level="O1", verbosity=0)
    found = diagnose(model, loss_of(model, x=data(dtype=torch.float32)), optimizer)
    assert (found.kind, found.culprit) == ("forward", "2.0")
    assert "FP32 would hold it" in found.words
    with torch.no_grad():
        model[2][0].weight.mul_(1e-5)
    assert diagnose(model, loss_of(model, x=data(dtype=torch.float32)), optimizer).kind in ("none", "overflow")


# -- nothing is left changed -------------------------------------------------------------------------------------------


class Noisy(nn.Module):
    """Dropout, batch statistics, and random numbers of Python and numpy."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(4, 8).to(HALF), nn.BatchNorm1d(8)
        self.last = nn.Linear(8, 2).to(HALF)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(F.dropout(self.first(x), 0.5).float())
        return self.last(x.to(HALF)) * random.random() * float(np.random.rand())


@pytest.mark.parametrize("kind", ["none", "overflow", "underflow", "forward"])
def test_model_random_numbers_and_gradients_are_as_before(kind: str) -> None:
    torch.manual_seed(0), random.seed(0), np.random.seed(0)
    model = Noisy()
    factor = {"none": 1.0, "overflow": 1.0, "underflow": 1e-9, "forward": math.inf}[kind]
    scale = {"overflow": 2.0**24}.get(kind, 2.0**4)
    opt = MixedPrecisionOptimizer(torch.optim.AdamW(model.parameters()), loss_scale=scale)

    def make() -> Tensor:
        return model(data()).float().square().mean() * factor

    opt.backward(model(data()).float().square().mean())
    for param in model.parameters():
        param.register_post_accumulate_grad_hook(lambda _: pytest.fail("a gradient was accumulated"))
    grads = [param.grad for param in model.parameters()]
    torch.manual_seed(1), random.seed(1), np.random.seed(1)

    def state() -> list[Any]:
        tensors = [*grads, *model.parameters(), *model.buffers()]
        draws = torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()
        return [[(t._version, t.detach().clone()) for t in tensors if t is not None], draws, opt.state_dict()["scaler"]]

    before = state()
    found = diagnose(model, make, opt)
    assert found.kind == ("loss" if kind == "forward" else kind)
    after = state()
    assert all(param.grad is grad for param, grad in zip(model.parameters(), grads, strict=True))
    for place, ((v, a), (w, b)) in enumerate(zip(before[0], after[0], strict=True)):
        assert v == w or place >= 2 * len(grads), "only buffers are written, and written back"
        assert torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0))
    assert before[1] == after[1]
    assert str(before[2]) == str(after[2])
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    opt.step()
    assert opt.step_was_skipped == (kind == "overflow"), "the gradients from before are stepped"


def test_an_error_in_the_forward_leaves_nothing_behind() -> None:
    model = net()

    def make() -> Tensor:
        model(data())
        raise KeyError("no batch")

    state = torch.get_rng_state()
    with pytest.raises(KeyError, match="no batch"):
        diagnose(model, make)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert torch.equal(state, torch.get_rng_state())


def test_how_often_the_loss_is_made() -> None:
    model, calls = net(), []

    def make() -> Tensor:
        calls.append(1)
        return loss_of(model)()

    for scale, most in ((1.0, 2), (2.0**24, 3)):
        calls.clear()
        diagnose(model, make, GradScaler("cpu", init_scale=scale))
        assert len(calls) == most


def test_what_it_refuses() -> None:
    model = net()
    good = loss_of(model)
    with pytest.raises(TypeError, match=r"model: expected a torch.nn.Module, got int"):
        diagnose(1, good)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"loss_fn: expected a callable that gives the loss, got Tensor"):
        diagnose(model, good())  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"optimizer: expected a MixedPrecisionOptimizer or a GradScaler.*got SGD"):
        diagnose(model, good, torch.optim.SGD(model.parameters()))
    with pytest.raises(TypeError, match=r"loss_fn: expected it to return a floating tensor, the loss, got float"):
        diagnose(model, lambda: 1.0)  # type: ignore[arg-type, return-value]
    with pytest.raises(TypeError, match=r"got a tensor of torch.int64"):
        diagnose(model, lambda: torch.tensor(1))
    with pytest.raises(ValueError, match=r"expected a loss of one element, got shape \(16, 2\)"):
        diagnose(model, lambda: model(data()))
    with pytest.raises(ValueError, match=r"the loss does not require grad"):
        diagnose(model, lambda: good().detach())
