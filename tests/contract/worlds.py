"""A world: an optimizer in one of the modes, its parameters, and a `Reference` that says where they must be."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from engine.checks import assert_same_bits, linear_loss
from torch import Tensor, nn
from torch.optim import SGD, AdamW

from contract.reference import Reference, Scale, total_norm
from fp16opt import DynamicLossScaler, MixedPrecisionOptimizer, StaticLossScaler

INF, NAN = float("inf"), float("nan")
HALF, SINGLE = torch.float16, torch.float32
SHAPES = ((4,), (2, 3), (5,))
NAMES = ("first.weight", "second.weight", "third.weight")
Given = Sequence[Tensor | float | None]


def sgd(params: Any, **options: Any) -> SGD:
    """torch's plain loop, so that ``fused_step=False`` is compared to the bit with the reference's."""
    return SGD(params, **{"lr": 0.25, "foreach": False, **options})


def adamw(params: Any, **options: Any) -> AdamW:
    return AdamW(params, **{"lr": 2.0**-6, "weight_decay": 0.125, "foreach": False, **options})


@dataclass(frozen=True)
class Mode:
    """One way to run the engine.

    Attributes:
        exact: Steps are the wrapped optimizer's own, so they are compared to the bit; others within ``World.bound``.
        folds: Gradients are summed in FP32, and the model's own are freed by each backward.
        has_masters: Masters are tensors that the user may write.
    """

    name: str
    make: Callable[..., torch.optim.Optimizer] = sgd
    dtypes: tuple[torch.dtype, ...] = (HALF, HALF, HALF)
    arguments: dict[str, Any] = field(default_factory=dict)
    exact: bool = False
    folds: bool = False
    has_masters: bool = True

    @property
    def is_mixed(self) -> bool:
        return SINGLE in self.dtypes


MIXED = (HALF, SINGLE, HALF)
WRAPPED = Mode("wrapped", arguments={"fused_step": False}, exact=True)
FUSED = Mode("fused-sgd", arguments={"fused_step": "auto"})
FUSED_ADAMW = Mode("fused-adamw", adamw, arguments={"fused_step": "auto"})
SPLIT = Mode("split", adamw, arguments={"master_weights": "split", "on_model_write": "refresh"}, has_masters=False)
FOLDING = Mode("fp32", arguments={"grad_accumulation": "fp32", "fused_step": False}, exact=True, folds=True)
MIXED_WRAPPED = Mode("mixed", dtypes=MIXED, arguments={"fused_step": False}, exact=True)
MIXED_FUSED = Mode("mixed-fused", adamw, dtypes=MIXED, arguments={"fused_step": "auto"})
MIXED_FOLDING = Mode("mixed-fp32", dtypes=MIXED, arguments={"grad_accumulation": "fp32"}, folds=True)

ALL = (WRAPPED, FUSED, SPLIT, FOLDING, MIXED_FUSED, MIXED_FOLDING)  # the others are named where they matter
WAYS = ("backward", "unstamped", "scale_loss")
KEEPS = tuple(mode for mode in ALL if not mode.folds)
SCALES = ("one", "static", "dynamic")


def by(modes: Sequence[Mode]) -> Any:
    return pytest.mark.parametrize("mode", modes, ids=lambda mode: mode.name)


every_mode = by(ALL)
every_mode_that_keeps_gradients = by(KEEPS)
every_way = pytest.mark.parametrize("how", WAYS)
every_scale = pytest.mark.parametrize("scale", SCALES)
every_scale_but_one = pytest.mark.parametrize("scale", SCALES[1:])


def scale_of(scale: str, **settings: Any) -> tuple[Any, Scale]:
    """The engine's scaler and the reference's."""
    if scale == "one":
        return StaticLossScaler(1.0), Scale(1.0)
    if scale == "static":
        return StaticLossScaler(64.0), Scale(64.0)
    settings = {"growth_interval": 3, "min_scale": 1.0, "max_scale": 4096.0, **settings}
    return DynamicLossScaler(64.0, **settings), Scale(64.0, **settings)


def values(*numbers: float) -> list[Tensor]:
    """A gradient for each parameter: multiples of a number, exact in 16 bits at every scale used here."""
    return [
        torch.arange(1, int(np.prod(shape)) + 1, dtype=torch.float32).reshape(shape) % 4 * number
        for shape, number in zip(SHAPES, numbers, strict=False)
    ]


class World:
    """See the module. ``wrap`` is the class under test, so that broken ones can be put in its place."""

    wrap: Callable[..., Any] = MixedPrecisionOptimizer

    def __init__(
        self,
        mode: Mode,
        scale: str = "static",
        *,
        shapes: Sequence[tuple[int, ...]] = SHAPES,
        make: Callable[..., torch.optim.Optimizer] | None = None,
        scaler_settings: dict[str, Any] | None = None,
        arguments: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        self.mode = mode
        make = make or mode.make
        starts = [torch.linspace(-1.0, 1.0, int(np.prod(s)), dtype=SINGLE).reshape(s) for s in shapes]
        self.params = [
            nn.Parameter(torch.round(start * 64).div(64).to(dtype))
            for start, dtype in zip(starts, mode.dtypes, strict=False)
        ]
        self.names = NAMES[: len(self.params)]
        scaler, ours = scale_of(scale, **(scaler_settings or {}))
        self.reference = Reference.of(self.params, lambda params: make(params, **options), ours)
        self.opt = type(self).wrap(
            make(self.params, **options),
            scaler=scaler,
            named_parameters=zip(self.names, self.params, strict=True),
            **{**mode.arguments, **(arguments or {})},
        )

    # -- what is there ---------------------------------------------------------------------------------------------

    @property
    def masters(self) -> list[Tensor]:
        return list(self.opt.master_params())

    @property
    def scale(self) -> float:
        return self.reference.scale.value

    def half(self) -> int:
        """A parameter in 16 bits."""
        return next(i for i, p in enumerate(self.params) if p.dtype is HALF)

    def single(self) -> int:
        """A parameter in FP32, whose master lies on its memory."""
        return next(i for i, p in enumerate(self.params) if p.dtype is SINGLE)

    def model_zero_grad(self) -> None:
        """What ``model.zero_grad()`` does."""
        for p in self.params:
            p.grad = None

    # -- what is done ----------------------------------------------------------------------------------------------

    def loss(self, grads: Given) -> Tensor:
        return linear_loss(self.params, grads)

    def backward(self, grads: Given, **options: Any) -> None:
        self.opt.backward(self.loss(grads), **options)

    def leave(self, how: str, grads: Given) -> None:
        """Gradients by one of the three ways in which they come: ``backward``, ``unstamped`` or ``scale_loss``."""
        if how == "scale_loss":
            self.opt.scale_loss(self.loss(grads)).backward()
        else:
            self.backward(grads, update_master_grads=how == "backward")

    # -- what must be ----------------------------------------------------------------------------------------------

    def expect_step(self, grads: Sequence[Tensor | None]) -> None:
        """``step`` steps exactly these true gradients, and nothing is skipped."""
        self.opt.step()
        self.expect_stepped(grads)

    def expect_stepped(self, grads: Sequence[Tensor | None]) -> None:
        """The step that just was took exactly these."""
        if self.reference.step(grads):
            raise AssertionError("the test expects a step and gives gradients that are not finite")
        self.check()

    def expect_skip(self) -> None:
        """``step`` skips: nothing moves but the count and the scale."""
        self.opt.step()
        self.expect_skipped()

    def expect_skipped(self) -> None:
        self.reference.step([torch.full_like(m, NAN) for m in self.reference.masters])
        self.check()

    def expect_norm(self, norm: Tensor, grads: Sequence[Tensor | None]) -> float:
        """The FP32 norm within two roundings to FP32; returns it, for the factor that the engine has from it."""
        want = total_norm(grads)
        if np.isfinite(want):
            assert float(norm) == pytest.approx(want, rel=2.0**-22)
        else:
            assert not np.isfinite(float(norm))
        return float(norm)

    def bound(self, i: int) -> float:
        """How far master i may be off in modes with kernels.

        As tests/fused bounds them: the kernel and torch's loop each round to the ulp of the parameter, as large as it
        was, once a step: within 2k ulp after k steps.
        """
        k = max(self.reference.steps, 1)
        return 0.0 if self.mode.exact else 2 * k * float(np.spacing(np.float32(self.reference.largest[i])))

    def check(self) -> None:
        """Masters, model, scale and counts are the reference's."""
        assert float(self.opt.loss_scale) == self.reference.scale.value
        assert bool(self.opt.step_was_skipped) == self.reference.step_was_skipped
        assert int(self.opt.skipped_steps) == self.reference.skipped_steps
        self.check_weights()

    def check_weights(self) -> None:
        masters = self.masters
        for i, (p, got, want) in enumerate(zip(self.params, masters, self.reference.masters, strict=True)):
            off = (got.detach().double() - want.detach().double()).abs().max().item()
            assert off <= self.bound(i), f"{self.names[i]}: {got.tolist()}, wanted {want.tolist()}"
            assert_same_bits(p, got.detach().to(p.dtype), f"model weight {self.names[i]}")

    def check_master_grads(self, grads: Sequence[Tensor | None]) -> None:
        """What ``.grad`` of all masters shows, in whatever order they are read."""
        masters = self.masters
        for name, master, want in zip(self.names, masters, grads, strict=True):
            got = master.grad
            if want is None:
                assert got is None, f"{name}: {got}, wanted None"
            else:
                assert got is not None, f"{name}: None, wanted {want.tolist()}"
                assert_same_bits(got.detach(), want.to(got.dtype), f"gradient of {name}")


def plus(*many: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Sums, parameter by parameter."""
    sums: list[Tensor | None] = []
    for column in zip(*many, strict=True):
        there = [g for g in column if g is not None]
        sums.append(sum(there[1:], there[0]) if there else None)
    return sums


def times(grads: Sequence[Tensor | None], factor: float) -> list[Tensor | None]:
    return [None if g is None else g * factor for g in grads]


def instead(grads: Sequence[Tensor | None], i: int, grad: Tensor | None) -> list[Tensor | None]:
    """``grads`` with another one at i."""
    return [grad if k == i else g for k, g in enumerate(grads)]
