"""The routes that the step and memory benchmarks compare, each with the same weights and scaled gradients.

There is no forward pass, and autograd computes nothing: gradients lie ready and are put in place by hand in
``prepare``, which is not timed, or by the backward pass of :func:`arriving`, where ``backward`` itself is timed. What
is timed is what a training loop does between ``backward`` and ``zero_grad``: unscale, check, clip, step, copy down,
update the scale.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import AdamW

from fp16opt import DynamicLossScaler, MixedPrecisionOptimizer

SCALE = 2.0**16
MAX_NORM = 1.0
LR, BETAS, EPS, WEIGHT_DECAY = 1e-4, (0.9, 0.999), 1e-8, 0.01

# Bytes read and written per parameter, counted for tensors larger than the caches: unscale, norm, clip, step,
# copies. torch's fused AdamW moves 28 (weight 4+4, gradient 4, two moments 8+8), its foreach version 80.
BYTES = {
    "fp16opt": 2 + 6 + 28 + 6,  # look at gradients, up and clipped, step, weights down
    "fp16opt, writes ignored": 2 + 6 + 28 + 6,
    "fp16opt, after a plain backward": 2 + 6 + 28 + 6 + 2,
    "fp16opt, with a closure": 2 + 6 + 28 + 6 + 2,
    "GradScaler, fused": 8 + 4 + 8 + 28,
    "GradScaler, foreach": 8 + 4 + 8 + 80,
    "three passes": 6 + 8 + 4 + 8 + 28 + 6,
    "plain FP32, fused": 28,
    "plain FP32, foreach": 80,
    "memory copy": 8,
}


@dataclass
class Problem:
    """Weights to start from and gradients as a backward pass with the loss scale ``SCALE`` leaves them.

    Attributes:
        weights: float16.
        scaled: float16; far from overflow, with an unscaled norm far above ``MAX_NORM``: a clip clips.
        scale: the loss scale that they were made with.
    """

    weights: list[Tensor]
    scaled: list[Tensor]
    scale: float = SCALE

    @classmethod
    def make(cls, shapes: list[tuple[int, ...]], seed: int = 0, scale: float = SCALE) -> Problem:
        generator = torch.Generator().manual_seed(seed)
        elements = sum(torch.Size(shape).numel() for shape in shapes)
        spread = 8.0 * MAX_NORM / elements**0.5 * scale  # a total norm of about 8 times MAX_NORM
        if spread * 8 > 65504:
            raise ValueError("so few elements that their scaled gradients would overflow float16")
        weights = [(torch.randn(shape, generator=generator) * 0.02).half() for shape in shapes]
        scaled = [(torch.randn(shape, generator=generator) * spread).half() for shape in shapes]
        return cls(weights, scaled, scale)

    @property
    def elements(self) -> int:
        return sum(weight.numel() for weight in self.weights)


def leave_gradients(opt: MixedPrecisionOptimizer, model: list[Tensor], grads: list[Tensor], problem: Problem) -> None:
    """What a backward pass leaves to the wrapper where the user still works on gradients: scaled 16-bit ones, in the
    memory of ``grads``."""
    opt.zero_grad()
    opt.scale_loss(torch.zeros(()))
    torch._foreach_copy_(grads, problem.scaled)
    for param, grad in zip(model, grads, strict=True):
        param.grad = grad


def prepare_backward(
    opt: MixedPrecisionOptimizer, model: list[Tensor], grads: list[Tensor], problem: Problem
) -> Tensor:
    """A loss whose ``backward`` leaves what :func:`leave_gradients` leaves."""
    opt.zero_grad()
    torch._foreach_copy_(grads, problem.scaled)
    return arriving(model, grads)


class _Arriving(torch.autograd.Function):
    """A loss whose backward pass puts gradients in place and computes nothing."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor, params: list[Tensor], grads: list[Tensor]) -> Tensor:
        ctx.pairs = list(zip(params, grads, strict=True))
        return leaf.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, None]:
        for param, ready in ctx.pairs:
            param.grad = ready
        return None, None, None


def arriving(params: list[Tensor], grads: list[Tensor]) -> Tensor:
    """A loss, 0-dim float32, whose backward pass sets ``params[i].grad = grads[i]``: 0.1 us a parameter, any size."""
    return _Arriving.apply(torch.zeros((), requires_grad=True), params, grads)


def gpt_shapes(layers: int, width: int, vocabulary: int, context: int) -> list[tuple[int, ...]]:
    """Shapes of GPT-2's parameters: 12 tensors a layer, and embeddings and a last norm."""
    layer = [
        (width,), (width,),  # norm
        (width, 3 * width), (3 * width,), (width, width), (width,),  # attention
        (width,), (width,),  # norm
        (width, 4 * width), (4 * width,), (4 * width, width), (width,),  # MLP
    ]  # fmt: skip
    return [(vocabulary, width), (context, width), *(layer * layers), (width,), (width,)]


def adamw(params: list[Tensor], variant: str = "fused") -> AdamW:
    """AdamW over ``params``; variant "fused", "foreach" or "plain"."""
    return AdamW(
        params,
        lr=LR,
        betas=BETAS,
        eps=EPS,
        weight_decay=WEIGHT_DECAY,
        fused=variant == "fused",
        foreach=variant == "foreach",
    )


def leaves(weights: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    return [torch.nn.Parameter(weight.to(dtype, copy=True)) for weight in weights]


class Engine:
    """16-bit weights, ``fp16opt.MixedPrecisionOptimizer`` around torch's fused AdamW, which does the step itself.

    The step follows ``backward(loss, update_master_grads=False)``. ``after`` "backward" times the plain
    ``backward(loss)`` with it, whatever that adds to autograd; "closure" calls it, and the clip, in the step's closure.
    """

    def __init__(
        self, problem: Problem, on_model_write: str = "refresh", after: str = "", fused_step: bool | str = False
    ) -> None:
        writes = "" if on_model_write == "refresh" else ", writes ignored"
        words = {"": "", "backward": ", after a plain backward", "closure": ", with a closure"}[after]
        self.name = f"fp16opt{writes}{words}"
        self.problem, self.max_norm, self.after = problem, MAX_NORM, after
        self.model = leaves(problem.weights, torch.float16)
        self.grads = [grad.clone() for grad in problem.scaled]
        self.opt = MixedPrecisionOptimizer(
            adamw(self.model),
            scaler=DynamicLossScaler(init_scale=problem.scale),
            on_model_write=on_model_write,
            fused_step=fused_step,
        )
        self.norm = self.loss = torch.zeros(())

    def prepare(self) -> None:
        if self.after:
            self.loss = prepare_backward(self.opt, self.model, self.grads, self.problem)
        else:
            leave_gradients(self.opt, self.model, self.grads, self.problem)

    def run(self) -> None:
        if self.after == "closure":
            self.opt.step(self._evaluate)
        else:
            self._evaluate()
            self.opt.step()

    def _evaluate(self) -> Tensor:
        if self.after:
            self.opt.backward(self.loss)
        self.norm = self.opt.clip_master_grads(self.max_norm)
        return self.loss

    def masters(self) -> list[Tensor]:
        return list(self.opt.master_params())


class ScalerRoute:
    """FP32 weights, ``torch.amp.GradScaler`` with ``clip_grad_norm_`` and torch's AdamW."""

    def __init__(self, problem: Problem, variant: str = "fused") -> None:
        self.name = f"GradScaler, {variant}"
        self.problem = problem
        self.params = leaves(problem.weights, torch.float32)
        self.grads = [grad.float() for grad in problem.scaled]
        self.opt = adamw(self.params, variant)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=problem.scale)
        self.norm = torch.zeros(())

    def prepare(self) -> None:
        self.opt.zero_grad()
        self.scaler.scale(torch.zeros(()))
        torch._foreach_copy_(self.grads, self.problem.scaled)
        for param, grad in zip(self.params, self.grads, strict=True):
            param.grad = grad

    def run(self) -> None:
        self.scaler.unscale_(self.opt)
        self.norm = torch.nn.utils.clip_grad_norm_(self.params, MAX_NORM)
        self.scaler.step(self.opt)
        self.scaler.update()

    def masters(self) -> list[Tensor]:
        return self.params


class ThreePasses:
    """16-bit weights and hand-written FP32 masters, one torch call for each pass."""

    name = "three passes"

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.model = leaves(problem.weights, torch.float16)
        self.params = leaves(problem.weights, torch.float32)
        self.model_grads = [grad.clone() for grad in problem.scaled]
        self.grads = [torch.empty_like(param, requires_grad=False) for param in self.params]
        for param, grad in zip(self.params, self.grads, strict=True):
            param.grad = grad
        self.opt = adamw(self.params)
        self.scale, self.growth = torch.tensor(problem.scale), torch.zeros((), dtype=torch.int32)
        self.norm = torch.zeros(())

    def prepare(self) -> None:
        torch._foreach_copy_(self.model_grads, self.problem.scaled)

    @torch.no_grad()
    def run(self) -> None:
        found_inf = torch.zeros(())
        torch._foreach_copy_(self.grads, self.model_grads)
        torch._amp_foreach_non_finite_check_and_unscale_(self.grads, found_inf, 1.0 / self.scale)
        self.norm = torch.nn.utils.clip_grad_norm_(self.params, MAX_NORM)
        if not found_inf.item():
            self.opt.step()
            torch._foreach_copy_(self.model, self.params)
        torch._amp_update_scale_(self.scale, self.growth, found_inf, 2.0, 0.5, 2000)

    def masters(self) -> list[Tensor]:
        return self.params


class PlainStep:
    """FP32 weights and torch's AdamW with nothing else: no scale, no check, no clip."""

    def __init__(self, problem: Problem, variant: str = "fused") -> None:
        self.name = f"plain FP32, {variant}"
        self.problem = problem
        self.params = leaves(problem.weights, torch.float32)
        for param, grad in zip(self.params, problem.scaled, strict=True):
            param.grad = grad.float() / problem.scale
        self.opt = adamw(self.params, variant)

    def prepare(self) -> None:
        for param, grad in zip(self.params, self.problem.scaled, strict=True):
            param.grad.copy_(grad)
            param.grad.div_(self.problem.scale)

    def run(self) -> None:
        self.opt.step()

    def masters(self) -> list[Tensor]:
        return self.params


class Clip:
    """``clip_master_grads`` alone, on gradients that are unscaled already."""

    def __init__(self, engine: Engine, name: str, max_norm: float) -> None:
        self.name, self.engine, self.max_norm = name, engine, max_norm

    def prepare(self) -> None:
        self.engine.prepare()
        self.engine.opt.update_master_grads()

    def run(self) -> None:
        self.engine.opt.clip_master_grads(self.max_norm)
