"""The routes that the step and memory benchmarks compare, each with the same weights and scaled gradients.

There is no forward and no backward pass: gradients are put in place by hand in ``prepare``, which is not
timed. What is timed is what a training loop does between ``backward`` and ``zero_grad``: unscale, check,
clip, step, copy down, update the scale.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

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
    "fp16opt": 2 + 6 + 28 + 6 + 2,  # look at gradients, up and clipped, step, weights down, look for foreign writes
    "fp16opt, writes ignored": 2 + 6 + 28 + 6,
    "fp16opt, unscaled by backward": 6 + 8 + 28 + 6 + 2,
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
    """

    weights: list[Tensor]
    scaled: list[Tensor]

    @classmethod
    def make(cls, shapes: list[tuple[int, ...]], seed: int = 0) -> Problem:
        generator = torch.Generator().manual_seed(seed)
        elements = sum(torch.Size(shape).numel() for shape in shapes)
        spread = 8.0 * MAX_NORM / elements**0.5 * SCALE  # a total norm of about 8 times MAX_NORM
        if spread * 8 > 65504:
            raise ValueError("so few elements that their scaled gradients would overflow float16")
        weights = [(torch.randn(shape, generator=generator) * 0.02).half() for shape in shapes]
        scaled = [(torch.randn(shape, generator=generator) * spread).half() for shape in shapes]
        return cls(weights, scaled)

    @property
    def elements(self) -> int:
        return sum(weight.numel() for weight in self.weights)


def leave_gradients(opt: MixedPrecisionOptimizer, model: list[Tensor], grads: list[Tensor], problem: Problem) -> None:
    """What a backward pass leaves to the wrapper: scaled 16-bit gradients, in the memory of ``grads``."""
    opt.zero_grad()
    opt.scale_loss(torch.zeros(()))
    torch._foreach_copy_(grads, problem.scaled)
    for param, grad in zip(model, grads, strict=True):
        param.grad = grad


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


def _leaves(weights: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    return [torch.nn.Parameter(weight.to(dtype, copy=True)) for weight in weights]


class Engine:
    """16-bit weights, ``fp16opt.MixedPrecisionOptimizer`` around torch's fused AdamW.

    The step follows ``backward(loss, update_master_grads=False)``; with ``early`` the plain ``backward(loss)``, whose
    own unscaling is then part of what is timed.
    """

    def __init__(self, problem: Problem, on_model_write: str = "refresh", early: bool = False) -> None:
        writes = "" if on_model_write == "refresh" else ", writes ignored"
        self.name = f"fp16opt{writes}{', unscaled by backward' if early else ''}"
        self.problem, self.max_norm, self.early = problem, MAX_NORM, early
        self.model = _leaves(problem.weights, torch.float16)
        self.grads = [grad.clone() for grad in problem.scaled]
        scaler = DynamicLossScaler(init_scale=SCALE)
        self.opt = MixedPrecisionOptimizer(adamw(self.model), scaler=scaler, on_model_write=on_model_write)
        self.norm = torch.zeros(())

    def prepare(self) -> None:
        leave_gradients(self.opt, self.model, self.grads, self.problem)

    def run(self) -> None:
        if self.early:
            self.opt.update_master_grads()
        self.norm = self.opt.clip_master_grads(self.max_norm)
        self.opt.step()

    def masters(self) -> list[Tensor]:
        return list(self.opt.master_params())


class ScalerRoute:
    """FP32 weights, ``torch.amp.GradScaler`` with ``clip_grad_norm_`` and torch's AdamW."""

    def __init__(self, problem: Problem, variant: str = "fused") -> None:
        self.name = f"GradScaler, {variant}"
        self.problem = problem
        self.params = _leaves(problem.weights, torch.float32)
        self.grads = [grad.float() for grad in problem.scaled]
        self.opt = adamw(self.params, variant)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)
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
        self.model = _leaves(problem.weights, torch.float16)
        self.params = _leaves(problem.weights, torch.float32)
        self.model_grads = [grad.clone() for grad in problem.scaled]
        self.grads = [torch.empty_like(param, requires_grad=False) for param in self.params]
        for param, grad in zip(self.params, self.grads, strict=True):
            param.grad = grad
        self.opt = adamw(self.params)
        self.scale, self.growth = torch.tensor(SCALE), torch.zeros((), dtype=torch.int32)
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
        self.params = _leaves(problem.weights, torch.float32)
        for param, grad in zip(self.params, problem.scaled, strict=True):
            param.grad = grad.float() / SCALE
        self.opt = adamw(self.params, variant)

    def prepare(self) -> None:
        for param, grad in zip(self.params, self.problem.scaled, strict=True):
            param.grad.copy_(grad)
            param.grad.div_(SCALE)

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


class Whole:
    """A route with what a loop does around it: scaling the loss, setting gradients and clearing them."""

    def __init__(self, route: Engine | ScalerRoute, scale: Callable[[], object]) -> None:
        self.name = f"{route.name}, with scale_loss and zero_grad"
        self.route, self.scale = route, scale
        self.params = route.model if isinstance(route, Engine) else route.params

    def prepare(self) -> None:
        self.route.prepare()
        self.route.opt.zero_grad()

    def run(self) -> None:
        self.scale()
        for param, grad in zip(self.params, self.route.grads, strict=True):
            param.grad = grad
        self.route.run()
        self.route.opt.zero_grad()
