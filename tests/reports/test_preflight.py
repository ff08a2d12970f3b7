"""check: twenty sound loops of which it says nothing, planted faults that it names, and nothing left changed."""

from __future__ import annotations

import copy
import logging
import random
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import LambdaLR

import fp16opt.optim
from fp16opt import (
    AveragedMasters,
    DynamicLossScaler,
    GradScaler,
    MixedPrecisionOptimizer,
    PreflightFinding,
    amp,
    check,
    ema,
)
from fp16opt.fp16_utils import FP16_Optimizer
from fp16opt.optimizers import Lion
from fp16opt.tools.reports.findings import worst_first

HALF, BF16 = torch.float16, torch.bfloat16
Case = dict[str, Any]


@pytest.fixture(autouse=True)
def seeded() -> Iterator[None]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield


def mlp(dtype: torch.dtype = torch.float32, width: int = 16) -> nn.Sequential:
    layers = OrderedDict(fc1=nn.Linear(8, width), act=nn.Tanh(), fc2=nn.Linear(width, 4))
    return nn.Sequential(layers).to(dtype)


def batch(dtype: torch.dtype = torch.float32, rows: int = 16) -> Tensor:
    return torch.randn(rows, 8).to(dtype)


def loss_of(model: nn.Module, factor: float = 1.0, dtype: torch.dtype | None = None) -> Callable[[], Tensor]:
    x = batch(next(model.parameters()).dtype if dtype is None else dtype)
    y = torch.randn(16, 4)
    return lambda: (model(x).float() - y).square().mean() * factor


def wrapped(model: nn.Module, inner: Any = AdamW, lr: float = 1e-3, **options: Any) -> MixedPrecisionOptimizer:
    return MixedPrecisionOptimizer(
        inner(model.parameters(), lr=lr), named_parameters=model.named_parameters(), **options
    )


class TinyGPT(nn.Module):
    """One block, tied embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.emb, self.pos = nn.Embedding(24, 16), nn.Embedding(8, 16)
        self.norm = nn.LayerNorm(16)
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)
        self.drop = nn.Dropout(0.1)
        self.head = nn.Linear(16, 24, bias=False)
        self.head.weight = self.emb.weight
        nn.init.normal_(self.emb.weight, std=0.1)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.emb(ids) + self.pos(torch.arange(ids.shape[1]))
        q, k, v = (part.view(*ids.shape, 2, 8).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(x.shape)
        return self.head(x + self.drop(self.out(mixed)))  # type: ignore[no-any-return]


def gpt_loss(model: TinyGPT) -> Callable[[], Tensor]:
    ids = torch.randint(0, 24, (4, 8))
    return lambda: F.cross_entropy(model(ids).float().flatten(0, 1)[:-1], ids.flatten()[1:])


class Adapted(nn.Module):
    """A frozen layer with a low-rank adapter, which begins at zero."""

    def __init__(self, base: torch.dtype, adapter: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.base = nn.Linear(8, 4).to(base).requires_grad_(False)
        self.down, self.up = nn.Linear(8, 2, bias=False).to(adapter), nn.Linear(2, 4, bias=False).to(adapter)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x.to(self.down.weight.dtype))).to(x.dtype)  # type: ignore[no-any-return]


# -- sound loops -----------------------------------------------------------------------------------------------------


def fp32_plain() -> Case:
    model = mlp()
    return {"model": model, "loss_fn": loss_of(model), "optimizer": AdamW(model.parameters(), lr=1e-3)}


def fp32_without_an_optimizer() -> Case:
    model = mlp()
    return {"model": model, "loss_fn": loss_of(model)}


def bf16_masters() -> Case:
    model = mlp(BF16)
    return {"model": model, "loss_fn": loss_of(model), "optimizer": wrapped(model, lr=1e-5)}


def fp16_dynamic() -> Case:
    model = mlp(HALF)
    return {"model": model, "loss_fn": loss_of(model), "optimizer": wrapped(model, dynamic=True)}


def fp16_static() -> Case:
    model = mlp(HALF)
    return {"model": model, "loss_fn": loss_of(model), "optimizer": wrapped(model, loss_scale=1024.0)}


def gpt_tied_and_dropped_out() -> Case:
    model = TinyGPT().bfloat16()
    opt = wrapped(model, lr=3e-4)
    loss = gpt_loss(model)
    scheduler = LambdaLR(opt, lambda step: 1 / (1 + step))

    def train_step() -> None:
        opt.zero_grad()
        opt.backward(loss())
        opt.clip_master_grads(1.0)
        opt.step()
        if not opt.step_was_skipped:
            scheduler.step()

    return {"model": model, "loss_fn": loss, "optimizer": opt, "train_step": train_step}


def gpt_fp16_dynamic() -> Case:
    model = TinyGPT().half()
    return {"model": model, "loss_fn": gpt_loss(model), "optimizer": wrapped(model, dynamic=True)}


def conv_with_batch_norm() -> Case:
    layers = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 2)
    model = nn.Sequential(*layers)
    x = torch.randn(8, 1, 6, 6)
    opt = SGD(model.parameters(), lr=0.1, momentum=0.9)
    return {"model": model, "loss_fn": lambda: model(x).square().mean(), "optimizer": opt}


def rnn_under_autocast() -> Case:
    rnn = nn.LSTM(8, 8)
    x = torch.randn(5, 3, 8)

    def loss() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return rnn(x)[0].float().square().mean()  # type: ignore[no-any-return]

    return {"model": rnn, "loss_fn": loss, "optimizer": AdamW(rnn.parameters(), lr=1e-3)}


def lora() -> Case:
    model = Adapted(BF16)
    opt = AdamW([param for param in model.parameters() if param.requires_grad], lr=1e-4)
    return {"model": model, "loss_fn": loss_of(model, dtype=BF16), "optimizer": opt}


def lora_on_fp16() -> Case:
    model = Adapted(HALF)
    opt = AdamW([param for param in model.parameters() if param.requires_grad], lr=1e-4)
    opt = MixedPrecisionOptimizer(opt, dynamic=True)  # type: ignore[assignment]
    return {"model": model, "loss_fn": loss_of(model, dtype=HALF), "optimizer": opt}


def grad_scaler_and_autocast() -> Case:
    model = mlp()
    opt, scaler, plain = AdamW(model.parameters(), lr=1e-3), torch.amp.GradScaler("cpu"), loss_of(model)

    def loss() -> Tensor:
        with torch.autocast("cpu", torch.float16):
            return plain()

    def train_step() -> None:
        opt.zero_grad()
        scaler.scale(loss()).backward()
        scaler.unscale_(opt)
        clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(opt)
        scaler.update()

    return {"model": model, "loss_fn": loss, "optimizer": opt, "scaler": scaler, "train_step": train_step}


def grad_scaler_and_masters() -> Case:
    model = mlp(HALF)
    opt, scaler, loss = wrapped(model), GradScaler("cpu"), loss_of(model)

    def train_step() -> None:
        opt.zero_grad()
        scaler.scale(loss()).backward()
        scaler.unscale_(opt)
        clip_grad_norm_(opt.master_params(), 1.0)
        scaler.step(opt)
        scaler.update()

    return {"model": model, "loss_fn": loss, "optimizer": opt, "scaler": scaler, "train_step": train_step}


def frozen_parts() -> Case:
    model = mlp(BF16)
    model.fc1.requires_grad_(False)  # type: ignore[union-attr]
    return {"model": model, "loss_fn": loss_of(model), "optimizer": wrapped(model, lr=1e-4)}


def sgd_with_momentum() -> Case:
    model = mlp(HALF)
    opt = MixedPrecisionOptimizer(SGD(model.parameters(), lr=0.1, momentum=0.9), dynamic=True)
    return {"model": model, "loss_fn": loss_of(model), "optimizer": opt}


def lion() -> Case:
    model = mlp(BF16)
    return {"model": model, "loss_fn": loss_of(model), "optimizer": wrapped(model, Lion, 1e-4)}


def split_masters() -> Case:
    model = mlp(BF16)
    return {"model": model, "loss_fn": loss_of(model), "optimizer": wrapped(model, master_weights="split")}


def eight_bits() -> Case:
    model = mlp(BF16, width=512)
    opt = wrapped(model, master_weights="split24", optimizer_state="8bit")
    return {"model": model, "loss_fn": loss_of(model), "optimizer": opt}


def sums_in_fp32() -> Case:
    model = mlp(HALF)
    opt, loss = wrapped(model, dynamic=True, grad_accumulation="fp32"), loss_of(model)

    def train_step() -> None:
        opt.zero_grad()
        for _ in range(3):
            opt.backward(loss() / 3)
        opt.clip_master_grads(1.0)
        opt.step()

    return {"model": model, "loss_fn": loss, "optimizer": opt, "train_step": train_step}


def apex_fp16_optimizer() -> Case:
    model = mlp(HALF)
    opt = FP16_Optimizer(SGD(model.parameters(), lr=0.1), dynamic_loss_scale=True, verbose=False)
    loss = loss_of(model)

    def train_step() -> None:
        opt.zero_grad()
        opt.backward(loss())
        opt.clip_master_grads(1.0)
        opt.step()

    return {"model": model, "loss_fn": loss, "optimizer": opt, "train_step": train_step}


def apex_o2() -> Case:
    model, plain = mlp(), None
    plain = AdamW(model.parameters(), lr=1e-3)
    model, opt = amp.initialize(model, plain, opt_level="O2", verbosity=0)
    return {"model": model, "loss_fn": loss_of(model, dtype=torch.float32), "optimizer": opt}


def by_class_path_with_an_average() -> Case:
    model = mlp(BF16)
    opt = fp16opt.optim.AdamW(model.named_parameters(), lr=1e-3)
    averaged, loss = AveragedMasters(model, opt, ema(0.9)), loss_of(model)

    def train_step() -> None:
        opt.zero_grad()
        loss().backward()  # type: ignore[no-untyped-call]
        clip_grad_norm_(model.parameters(), 1.0)  # at a scale of 1 these count
        opt.step()
        averaged.update()
        with averaged.swap():
            pass

    return {"model": model, "loss_fn": loss, "optimizer": opt, "train_step": train_step}


def lbfgs() -> Case:
    model = mlp()
    opt = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=2)
    return {"model": model, "loss_fn": loss_of(model), "optimizer": opt}


class SAM(SGD):
    """Evaluates its closure twice."""

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        with torch.enable_grad():
            closure()
            loss = closure()
        super().step()
        return loss


def sam() -> Case:
    model = mlp(HALF)
    opt = wrapped(model, SAM, dynamic=True, closure="reevaluate")
    loss = loss_of(model)

    def closure() -> Tensor:
        opt.zero_grad()
        found = loss()
        opt.backward(found)
        return found

    return {"model": model, "loss_fn": loss, "optimizer": opt, "train_step": lambda: opt.step(closure)}


def sparse_gradients() -> Case:
    model = nn.Embedding(24, 8, sparse=True).bfloat16()
    ids = torch.randint(0, 24, (6, 4))
    opt = MixedPrecisionOptimizer(SGD(model.parameters(), lr=0.1))
    return {"model": model, "loss_fn": lambda: model(ids).float().square().sum(), "optimizer": opt}


def fp64() -> Case:
    model = mlp(torch.float64)
    return {"model": model, "loss_fn": loss_of(model), "optimizer": AdamW(model.parameters(), lr=1e-3)}


def apex_closure_with_a_scheduler() -> Case:
    """The closure is evaluated again where it overflows, so that no step is skipped."""
    model = mlp(HALF)
    opt = FP16_Optimizer(SGD(model.parameters(), lr=0.1), dynamic_loss_scale=True, verbose=False)
    loss, scheduler = loss_of(model), LambdaLR(opt, lambda step: 1 / (1 + step))

    def closure() -> Tensor:
        opt.zero_grad()
        found = loss()
        opt.backward(found)
        return found

    def train_step() -> None:
        opt.step(closure)
        scheduler.step()

    return {"model": model, "loss_fn": loss, "optimizer": opt, "train_step": train_step}


def scale_near_the_end(model: nn.Module, loss: Callable[[], Tensor]) -> float:
    """At which the largest gradient of a weight is at three quarters of FP16's range."""
    grads = torch.autograd.grad(loss(), list(model.parameters()))
    return 0.75 * 65504.0 / max(float(grad.abs().max()) for grad in grads)


def a_dynamic_scale_near_the_end() -> Case:
    case = fp16_static()
    scaler = DynamicLossScaler(init_scale=scale_near_the_end(case["model"], case["loss_fn"]))
    return {**case, "optimizer": wrapped(case["model"], SGD, 1e-6, scaler=scaler)}


def a_scale_that_follows_headroom() -> Case:
    model = mlp(HALF)
    return {
        "model": model,
        "loss_fn": loss_of(model, 1e-3),
        "optimizer": wrapped(model, scaler=DynamicLossScaler(policy="headroom")),
    }


SOUND = [
    fp32_plain,
    fp32_without_an_optimizer,
    bf16_masters,
    fp16_dynamic,
    fp16_static,
    gpt_tied_and_dropped_out,
    gpt_fp16_dynamic,
    conv_with_batch_norm,
    rnn_under_autocast,
    lora,
    lora_on_fp16,
    grad_scaler_and_autocast,
    grad_scaler_and_masters,
    frozen_parts,
    sgd_with_momentum,
    lion,
    split_masters,
    eight_bits,
    sums_in_fp32,
    apex_fp16_optimizer,
    apex_o2,
    by_class_path_with_an_average,
    lbfgs,
    a_scale_that_follows_headroom,
    sam,
    sparse_gradients,
    fp64,
    apex_closure_with_a_scheduler,
    a_dynamic_scale_near_the_end,
]


@pytest.mark.parametrize("loop", SOUND)
def test_nothing_is_said_of_a_sound_loop(loop: Callable[[], Case]) -> None:
    found = check(**loop())
    assert found.findings == []
    assert found.ok
    assert "nothing to change" in str(found)
    assert str(found.steps) in str(found)


# -- planted faults --------------------------------------------------------------------------------------------------


def no_scale_and_no_masters() -> Case:
    return {**(case := fp16_dynamic()), "optimizer": AdamW(case["model"].parameters(), lr=1e-3, eps=1e-4)}


def no_scale() -> Case:
    return {**(case := fp16_dynamic()), "optimizer": wrapped(case["model"])}


def no_scale_and_a_small_loss() -> Case:
    model = mlp(HALF)
    return {"model": model, "loss_fn": loss_of(model, 1e-6), "optimizer": wrapped(model)}


def autocast_without_a_scaler() -> Case:
    case = grad_scaler_and_autocast()
    return {name: case[name] for name in ("model", "loss_fn", "optimizer")}


def lora_on_fp16_without_a_scale() -> Case:
    case = lora_on_fp16()
    params = [param for param in case["model"].parameters() if param.requires_grad]
    return {**case, "optimizer": AdamW(params, lr=1e-4)}


def fp16_under_bf16_autocast() -> Case:
    case = fp16_dynamic()
    inner = case["loss_fn"]

    def loss() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return inner()  # type: ignore[no-any-return]

    return {**case, "loss_fn": loss}


def bf16_at_a_large_rate() -> Case:
    model = mlp(BF16)
    return {"model": model, "loss_fn": loss_of(model), "optimizer": AdamW(model.parameters(), lr=1e-2)}


def bf16_at_a_small_rate() -> Case:
    model = mlp(BF16)
    return {"model": model, "loss_fn": loss_of(model), "optimizer": AdamW(model.parameters(), lr=1e-5)}


def bf16_sgd() -> Case:
    model = mlp(BF16)
    return {"model": model, "loss_fn": loss_of(model), "optimizer": SGD(model.parameters(), lr=1e-4)}


def bf16_and_no_optimizer_yet() -> Case:
    model = mlp(BF16)
    return {"model": model, "loss_fn": loss_of(model), "lr": 1e-5}


def masters_turned_off() -> Case:
    model = mlp(BF16)
    return {"model": model, "loss_fn": loss_of(model), "optimizer": wrapped(model, lr=1e-5, master_weights="none")}


def a_scale_too_low() -> Case:
    model = mlp(HALF)
    return {"model": model, "loss_fn": loss_of(model, 1e-7), "optimizer": wrapped(model, loss_scale=2.0)}


def a_scale_too_high() -> Case:
    model = mlp(HALF)
    return {"model": model, "loss_fn": loss_of(model), "optimizer": wrapped(model, loss_scale=2.0**24)}


def a_scale_near_the_end() -> Case:
    case = fp16_static()
    scale = scale_near_the_end(case["model"], case["loss_fn"])
    return {**case, "optimizer": wrapped(case["model"], inner=SGD, lr=1e-6, loss_scale=scale)}


def eps_without_masters() -> Case:
    case = fp16_static()
    return {**case, "optimizer": wrapped(case["model"], loss_scale=1024.0, master_weights="none")}


def eps_of_a_plain_adam() -> Case:
    case = fp16_static()
    return {**case, "optimizer": AdamW(case["model"].parameters(), lr=1e-1), "scaler": GradScaler("cpu")}


class Amplifier(nn.Module):
    """Multiplies."""

    def __init__(self, by: float) -> None:
        super().__init__()
        self.by = by

    def forward(self, x: Tensor) -> Tensor:
        return x * self.by


def large_activations(by: float) -> Case:
    model = mlp(HALF)
    model.act = nn.Sequential(nn.Tanh(), Amplifier(by), Amplifier(1 / by))  # type: ignore[assignment]
    return {"model": model, "loss_fn": loss_of(model), "optimizer": wrapped(model, loss_scale=8.0)}


def an_activation_near_the_end() -> Case:
    return large_activations(5e4)


def an_activation_beyond_the_end() -> Case:
    return large_activations(3e5)


class Norm(nn.Module):
    """Of the root of the mean square, in the dtype of what it gets."""

    def __init__(self, writes: bool = False) -> None:
        super().__init__()
        self.writes = writes

    def forward(self, x: Tensor) -> Tensor:
        squares = x.clone().mul_(x) if self.writes else x.pow(2)
        return x * torch.rsqrt(squares.mean(-1, keepdim=True) + 1e-6)


def large_inputs(norm: nn.Module, factor: float = 1500.0) -> Case:
    model = mlp(HALF)
    model.act = norm  # type: ignore[assignment]
    x, y = batch(HALF) * factor, torch.randn(16, 4)
    return {
        "model": model,
        "loss_fn": lambda: (model(x).float() - y).square().mean(),
        "optimizer": wrapped(model, dynamic=True),
    }


def a_norm_that_squares_in_fp16() -> Case:
    return large_inputs(Norm())


def a_norm_that_squares_in_place() -> Case:
    return large_inputs(Norm(writes=True))


def a_batch_norm_in_fp16() -> Case:
    return large_inputs(nn.BatchNorm1d(16, affine=False).half())


class Gelu(nn.Module):
    """By its usual polynomial, of which the cube overflows."""

    def forward(self, x: Tensor) -> Tensor:
        return 0.5 * x * (1.0 + torch.tanh(0.8 * (x + 0.045 * x.pow(3))))


def a_cube_whose_gradient_is_nan() -> Case:
    return large_inputs(Gelu(), 100.0)


def a_nan_in_a_weight() -> Case:
    case = bf16_masters()
    with torch.no_grad():
        case["model"].fc2.weight[0, 0] = float("nan")
    return {**case, "optimizer": wrapped(case["model"])}


def a_parameter_in_no_optimizer() -> Case:
    case = fp32_plain()
    return {**case, "optimizer": AdamW(case["model"].fc1.parameters(), lr=1e-3)}


def a_detached_branch() -> Case:
    model = mlp()
    x = batch()
    loss = lambda: (model.fc2(torch.tanh(model.fc1(x)).detach())).square().mean()  # type: ignore[operator] # noqa: E731
    return {"model": model, "loss_fn": loss, "optimizer": AdamW(model.parameters(), lr=1e-3)}


def an_optimizer_of_another_copy() -> Case:
    case = fp32_plain()
    return {**case, "optimizer": AdamW(copy.deepcopy(case["model"]).parameters(), lr=1e-3)}


def an_optimizer_made_before_a_new_layer() -> Case:
    model = mlp(HALF)
    opt, loss = wrapped(model, dynamic=True), loss_of(model)
    model.fc2 = copy.deepcopy(model.fc2)
    return {"model": model, "loss_fn": loss, "optimizer": opt}


def a_clip_of_scaled_gradients(**options: Any) -> Case:
    model = mlp(HALF)
    opt, loss = wrapped(model, dynamic=True, **options), loss_of(model)

    def train_step() -> None:
        opt.zero_grad()
        opt.backward(loss())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()

    return {"model": model, "loss_fn": loss, "optimizer": opt, "train_step": train_step}


def a_clip_hidden_by_fp32_sums() -> Case:
    return a_clip_of_scaled_gradients(grad_accumulation="fp32")


def a_clip_before_unscale() -> Case:
    case = grad_scaler_and_autocast()
    model, loss, opt, scaler = (case[name] for name in ("model", "loss_fn", "optimizer", "scaler"))

    def train_step() -> None:
        opt.zero_grad()
        scaler.scale(loss()).backward()
        clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(opt)
        scaler.update()

    return {**case, "train_step": train_step}


def a_clip_of_the_model_under_a_grad_scaler() -> Case:
    case = grad_scaler_and_masters()
    model, loss, opt, scaler = (case[name] for name in ("model", "loss_fn", "optimizer", "scaler"))

    def train_step() -> None:
        opt.zero_grad()
        scaler.scale(loss()).backward()
        scaler.unscale_(opt)
        clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(opt)
        scaler.update()

    return {**case, "train_step": train_step}


def autocast_and_a_small_loss() -> Case:
    case = grad_scaler_and_autocast()
    loss = case["loss_fn"]
    return {"model": case["model"], "loss_fn": lambda: loss() * 1e-6, "optimizer": case["optimizer"]}


def a_clamp_through_data() -> Case:
    model = mlp(HALF)
    opt, loss = wrapped(model, loss_scale=1024.0), loss_of(model)

    def train_step() -> None:
        opt.zero_grad()
        opt.backward(loss())
        for param in model.parameters():
            param.grad.data.clamp_(-1, 1)  # type: ignore[union-attr]
        opt.step()

    return {"model": model, "loss_fn": loss, "optimizer": opt, "train_step": train_step}


def a_scheduler_that_runs_ahead() -> Case:
    case = gpt_fp16_dynamic()
    opt, loss = case["optimizer"], case["loss_fn"]
    scheduler = LambdaLR(opt, lambda step: 1 / (1 + step))

    def train_step() -> None:
        opt.zero_grad()
        opt.backward(loss())
        opt.step()
        scheduler.step()

    return {**case, "train_step": train_step}


def a_scheduler_under_a_grad_scaler() -> Case:
    case = grad_scaler_and_autocast()
    scheduler, inner = LambdaLR(case["optimizer"], lambda step: 1 / (1 + step)), case["train_step"]

    def train_step() -> None:
        inner()
        scheduler.step()

    return {**case, "train_step": train_step}


def weights_tied_by_a_copy() -> Case:
    case = bf16_masters()
    model, inner = case["model"], case["loss_fn"]

    def loss() -> Tensor:
        with torch.no_grad():
            model.fc2.weight.copy_(model.fc1.weight.t()[:4])
        return inner()  # type: ignore[no-any-return]

    return {**case, "loss_fn": loss}


def weights_clamped_after_the_step() -> Case:
    model = mlp(BF16)
    opt, loss = wrapped(model, lr=1e-2), loss_of(model)

    def train_step() -> None:
        opt.zero_grad()
        opt.backward(loss())
        opt.step()
        for param in model.parameters():
            param.data.clamp_(-0.1, 0.1)

    return {"model": model, "loss_fn": loss, "optimizer": opt, "train_step": train_step}


def two_scales() -> Case:
    return {**fp16_dynamic(), "scaler": GradScaler("cpu")}


def a_plain_backward_at_a_scale() -> Case:
    model = mlp(HALF)
    opt, loss = wrapped(model, dynamic=True), loss_of(model)

    def train_step() -> None:
        opt.zero_grad()
        loss().backward()  # type: ignore[no-untyped-call]
        opt.step()

    return {"model": model, "loss_fn": loss, "optimizer": opt, "train_step": train_step}


PLANTED: dict[Callable[[], Case], tuple[str, str, str | None, str]] = {
    # fault: key, level, layer, words of the sentence or of the line to change
    no_scale_and_no_masters: ("no_loss_scale", "error", None, "MixedPrecisionOptimizer(optimizer, dynamic=True"),
    no_scale: ("no_loss_scale", "error", None, "dynamic=True"),
    no_scale_and_a_small_loss: ("no_loss_scale", "error", "fc1.weight", "of the gradients' elements underflow"),
    autocast_without_a_scaler: ("no_loss_scale", "error", None, 'fp16opt.GradScaler("cpu")'),
    autocast_and_a_small_loss: (
        "no_loss_scale",
        "error",
        "fc1.weight",
        "% of the gradients' elements underflow in this",
    ),
    lora_on_fp16_without_a_scale: ("no_loss_scale", "error", None, "FP16 activations without a loss scale"),
    fp16_under_bf16_autocast: ("autocast", "error", "fc1.weight", "bf16=False"),
    bf16_at_a_large_rate: ("lost_updates", "warning", None, "and more later on, as the learning rate"),
    bf16_at_a_small_rate: ("lost_updates", "error", "fc1.weight", "With FP32 masters 0 % are lost"),
    bf16_sgd: ("lost_updates", "error", None, "MixedPrecisionOptimizer(optimizer, named_parameters"),
    bf16_and_no_optimizer_yet: ("lost_updates", "error", "fc1.weight", "MixedPrecisionOptimizer"),
    masters_turned_off: ("lost_updates", "error", "fc1.weight", 'leave master_weights="none" out'),
    a_scale_too_low: ("underflow", "error", "fc1.weight", "dynamic=True"),
    a_scale_too_high: ("overflow", "error", None, "The largest scale at which none does is"),
    a_scale_near_the_end: ("near_the_end", "warning", None, "dynamic=True"),
    eps_without_masters: ("eps", "error", None, "eps=1e-08 is 0 in FP16"),
    eps_of_a_plain_adam: ("eps", "error", None, "masters are FP32"),
    an_activation_near_the_end: ("near_the_end", "warning", "act.1", "of where FP16 ends"),
    an_activation_beyond_the_end: ("not_finite", "error", "act.1", "FP32 would hold it"),
    a_norm_that_squares_in_fp16: ("inside", "error", "act", "pow makes inf: FP16 ends at 65504, and FP32 would hold"),
    a_norm_that_squares_in_place: ("inside", "error", "act", "mul_ makes inf"),
    a_cube_whose_gradient_is_nan: ("inside", "error", "act", "is right all the same, and its gradient is not finite"),
    a_batch_norm_in_fp16: ("buffers", "error", "act.running_var", "model.get_submodule('act').float()"),
    a_nan_in_a_weight: ("not_finite", "error", "fc2.weight", "the weight itself holds inf or nan"),
    a_parameter_in_no_optimizer: ("not_in_optimizer", "warning", "fc2.weight", "in no optimizer"),
    a_detached_branch: ("no_gradient", "warning", "fc1.weight", "detach()"),
    an_optimizer_of_another_copy: ("other_parameters", "error", None, "made for another model"),
    an_optimizer_made_before_a_new_layer: (
        "other_parameters",
        "error",
        None,
        "2 of the optimizer's parameters are",
    ),
    a_clip_of_scaled_gradients: ("clip", "error", None, "clip_grad_norm_(model.parameters(), 1.0)` (test_preflight.py"),
    a_clip_hidden_by_fp32_sums: ("clip", "error", None, "clip_master_grads(max_norm)"),
    a_clip_before_unscale: ("clip", "error", None, "scaler.unscale_(optimizer)  # before that line"),
    a_clip_of_the_model_under_a_grad_scaler: (
        "clip",
        "error",
        None,
        "clip_grad_norm_(optimizer.master_params(), max_norm)",
    ),
    a_clamp_through_data: ("gradients_written", "error", None, "clip_master_values"),
    a_scheduler_that_runs_ahead: ("scheduler", "warning", None, "`scheduler.step()` (test_preflight.py"),
    a_scheduler_under_a_grad_scaler: ("scheduler", "warning", None, "although the step was skipped"),
    weights_tied_by_a_copy: ("weights_written", "error", "fc2.weight", "a.weight = b.weight"),
    weights_clamped_after_the_step: ("weights_written", "error", "fc1.weight", "write_masters()"),
    two_scales: ("two_scales", "error", None, "a loss scale of its own (65536)"),
    a_plain_backward_at_a_scale: ("refused", "error", None, "backward(loss)"),
}


@pytest.mark.parametrize("fault", PLANTED)
def test_a_planted_fault_is_named(fault: Callable[[], Case]) -> None:
    key, level, layer, words = PLANTED[fault]
    found = check(**fault())
    named = {finding.key: finding for finding in found.findings}
    assert key in named, str(found)
    one = named[key]
    assert one.level == level
    assert layer is None or one.layer == layer
    assert words in one.sentence or words in one.line
    assert one.sentence in " ".join(str(found).split()) or "`" in one.sentence
    assert found.ok is all(finding.level != "error" for finding in found.findings)


def test_an_error_in_the_report_stands_before_every_warning() -> None:
    case = a_scheduler_that_runs_ahead()
    model = case["model"]
    model.unused = nn.Linear(2, 2).half()
    found = check(model, case["loss_fn"], wrapped(model))
    assert [finding.level for finding in found.findings] == ["error", "warning"]
    assert [finding.key for finding in found.findings] == ["no_loss_scale", "no_gradient"]
    assert str(found).startswith("fp16opt.check: 1 error and 1 warning.\n\n1. error: FP16 weights are trained without")
    assert "\n2. warning: " in str(found)
    assert "\n   -> " in str(found)


def test_errors_come_first_and_each_kind_in_its_order() -> None:
    said = [("scheduler", "warning"), ("weights_written", "warning"), ("other_parameters", "error"), ("eps", "error")]
    found = worst_first([PreflightFinding(key, level, "", "") for key, level in said])
    assert [finding.key for finding in found] == ["eps", "other_parameters", "weights_written", "scheduler"]


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


def test_no_scale_is_offered_at_which_a_step_was_skipped() -> None:
    case = a_norm_that_squares_in_fp16()
    found = check(**case)
    opt, scales = case["optimizer"], [float("inf")]
    while scales[-1] == float("inf") or opt.step_was_skipped:
        scales.append(float(opt.loss_scale))
        opt.zero_grad()
        opt.backward(case["loss_fn"]())
        opt.step()
    assert len(scales) > 2
    (fact,) = (one for one in found.facts if "largest possible" in one)
    offered = [one.numbers["largest_scale"] for one in found.findings if "largest_scale" in one.numbers]
    offered.append(float(fact.split("largest possible is ")[1].split(", for")[0].replace(",", "")))
    assert max(offered) == scales[-1]


def test_a_scale_that_is_offered_was_tried() -> None:
    case = a_norm_that_squares_in_fp16()
    model, loss = case["model"], case["loss_fn"]
    named = {one.key: one for one in check(model, loss, wrapped(model)).findings}
    scale = named["no_loss_scale"].numbers["largest_scale"]
    for factor, is_finite in ((1.0, True), (2.0, False)):
        grads = torch.autograd.grad(loss() * (scale * factor), list(model.parameters()))
        assert all(bool(grad.isfinite().all()) for grad in grads) is is_finite


def minus_inf(x: Tensor) -> Tensor:
    return torch.zeros_like(x).masked_fill(x > 0, float("-inf"))


def the_least_of_fp32(x: Tensor) -> Tensor:
    return torch.full(x.shape, torch.finfo(torch.float32).min).triu(2).clamp(max=0.0).to(x.dtype)


@pytest.mark.parametrize("mask", [minus_inf, the_least_of_fp32, lambda x: torch.full_like(x, -65504.0).tril()])
def test_masks_are_no_overflow(mask: Callable[[Tensor], Tensor]) -> None:
    class Masked(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.softmax(torch.cat([x + mask(x), torch.zeros_like(x[:, :1])], 1), -1)[:, :-1]

    assert check(**large_inputs(Masked(), 1.0)).findings == []


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


def a_round(case: Case) -> None:
    """One round of a case's loop."""
    if "train_step" in case:
        case["train_step"]()
        return
    model, opt, loss, scaler = case["model"], case["optimizer"], case["loss_fn"], case.get("scaler")

    def closure() -> Tensor:
        opt.zero_grad()
        found = loss()
        found.backward()
        return found  # type: ignore[no-any-return]

    if isinstance(opt, torch.optim.LBFGS):
        opt.step(closure)  # type: ignore[no-untyped-call]
        return
    opt.zero_grad()
    if hasattr(opt, "amp"):
        with amp.scale_loss(loss(), opt) as scaled:
            scaled.backward()
    elif isinstance(opt, MixedPrecisionOptimizer) and scaler is None:
        opt.backward(loss())
    else:
        loss().backward()
    opt.step()
    assert model is not None


def everything(case: Case) -> dict[str, Any]:
    model, opt = case["model"], case["optimizer"]
    return {
        "model": model.state_dict(),
        "grads": [param.grad for param in model.parameters()],
        "modes": [module.training for module in model.modules()],
        "optimizer": opt.state_dict(),
        "scaler": case["scaler"].state_dict() if "scaler" in case else None,
        "random": (torch.get_rng_state(), random.getstate()),
    }


def same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        a, b = a.to_dense(), b.to_dense()
        return isinstance(b, Tensor) and a.dtype == b.dtype and torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


def running(make: Callable[[], Case]) -> Case:
    """A case after two rounds, with all seeds set."""
    torch.manual_seed(0)
    random.seed(0)
    case = make()
    for _ in range(2):
        a_round(case)
    return case


TRAINED = [loop for loop in SOUND if loop is not fp32_without_an_optimizer]


@pytest.mark.parametrize("loop", [*TRAINED, a_scheduler_that_runs_ahead, a_scheduler_under_a_grad_scaler])
def test_a_run_goes_on_as_if_it_had_not_been_checked(
    loop: Callable[[], Case], caplog: pytest.LogCaptureFixture
) -> None:
    """In the middle of a training, between two steps; bit for bit, and without a word in its log."""
    unchecked = running(loop)
    for _ in range(3):
        a_round(unchecked)
    expected = everything(unchecked)
    case = running(loop)
    before = copy.deepcopy(everything(case))
    with caplog.at_level(logging.DEBUG):
        caplog.clear()
        check(**case)
        assert caplog.messages == []
    assert same(everything(case), before)
    for _ in range(3):
        a_round(case)
    assert same(everything(case), expected)


def test_a_check_that_finds_faults_leaves_the_run_alone_too() -> None:
    for fault in (a_clip_of_scaled_gradients, a_clip_before_unscale, weights_tied_by_a_copy, a_detached_branch):
        torch.manual_seed(0)
        case = fault()
        model, opt = case["model"].eval(), case["optimizer"]
        grads = [torch.ones_like(param) for param in model.parameters()]
        for param, grad in zip(model.parameters(), grads, strict=True):
            param.grad = grad
        before = copy.deepcopy((model.state_dict(), opt.state_dict()))
        assert check(**case).findings
        assert same((model.state_dict(), opt.state_dict()), before), fault
        assert not any(module.training for module in model.modules())
        for param, grad in zip(model.parameters(), grads, strict=True):
            assert param.grad is grad
            assert grad.eq(1).all()


def test_what_a_loss_or_a_loop_raises_comes_through_and_all_is_put_back() -> None:
    case, filters = gpt_tied_and_dropped_out(), list(logging.getLogger("fp16opt").filters)
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
    case = fp16_dynamic()
    calls: list[int] = []

    def loss() -> Tensor:
        calls.append(1)
        return case["loss_fn"]()  # type: ignore[no-any-return]

    for steps in (4, 8, 20):
        calls.clear()
        found = check(case["model"], loss, case["optimizer"], steps=steps)
        assert found.steps == len(calls) == steps


# -- what it refuses ---------------------------------------------------------------------------------------------------


def test_what_it_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
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
    with pytest.raises(TypeError, match=r"train_step: expected the optimizer that it steps, too, got none"):
        check(model, loss, train_step=lambda: None)
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
    with pytest.raises(TypeError, match=r'SAM\.step\(\) raised TypeError: .*closure="reevaluate"'):
        check(model, loss, SAM(model.parameters(), lr=0.1))
    released = MixedPrecisionOptimizer(SGD(mlp(BF16).parameters(), lr=0.1), gradient_release=True)
    with pytest.raises(ValueError, match=r"gradient_release=True steps parameters in every backward"):
        check(model, loss, released)
    other = mlp()
    _, plain = amp.initialize(other, SGD(other.parameters(), lr=0.1), opt_level="O0", verbosity=0)
    with pytest.raises(TypeError, match=r"amp\.initialize has made this SGD, at a level without master weights"):
        check(other, loss, plain)

    class Odd(SGD):
        def __deepcopy__(self, memo: Any) -> Any:
            raise ValueError("not this one")

    with pytest.raises(TypeError, match=r"no copy of this Odd could be made \(ValueError: not this one\)"):
        check(model, loss, Odd(model.parameters(), lr=0.1))
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    with pytest.raises(RuntimeError, match=r"a training of several processes"):
        check(model, loss, opt)


def test_findings_are_plain_values() -> None:
    finding = PreflightFinding("eps", "error", "It is 0.", "eps=1e-4")
    assert str(finding) == "error: It is 0.\n    eps=1e-4"
    assert (finding.layer, finding.numbers, finding.by_layer) == (None, {}, {})
