"""Small runs of any optimizer, always the same ones."""

from __future__ import annotations

import functools
import textwrap
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

Factory = Callable[[list[Parameter]], Optimizer]

# -- what an optimizer can be stepped with ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Setting:
    """What an optimizer is stepped with: ``kind`` is "dense", "sparse", or "closure" where that makes the gradients."""

    shapes: tuple[tuple[int, ...], ...]
    kind: str
    words: str
    error: Exception | None = None
    on_cuda_only: bool = False


_MIXED: tuple[tuple[int, ...], ...] = ((5, 7), (9,), (), (3, 2, 2), (70,))
_MATRICES: tuple[tuple[int, ...], ...] = ((5, 7), (6, 4), (3, 3), (8, 2), (4, 9))
_SETTINGS = (
    Setting(_MIXED, "dense", "parameters of 0 to 3 dimensions"),
    Setting(_MATRICES, "dense", "matrices only"),
    Setting(_MATRICES, "sparse", "sparse gradients of matrices"),
    Setting(_MIXED, "closure", "steps with a closure"),
)


def setting_for(factory: Factory) -> tuple[Setting, str]:
    """The first setting in which two steps raise nothing, and the optimizer's name."""
    refused: list[Exception] = []
    failed: list[Exception] = []
    name, on_cuda_only = "", False
    for setting in _SETTINGS:
        trial = Trial(factory, setting)
        try:
            params, optimizer = trial.make()
        except NoOptimizer:
            raise
        except Exception as error:
            refused.append(error)
            continue
        name = f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"
        on_cuda_only = any(group.get("capturable") for group in optimizer.param_groups)
        try:
            trial.train(params, optimizer, 2)
        except Exception as error:
            failed.append(error)
            continue
        return setting, name
    if not name:
        raise ValueError(f"optimizer_factory could not make an optimizer: {quote(refused[0])}") from refused[0]
    first = _SETTINGS[0]
    words = "not tested" if on_cuda_only else f"every step raised {quote(failed[0])}"
    return Setting(first.shapes, first.kind, words, failed[0], on_cuda_only), name


# -- making optimizers -----------------------------------------------------------------------------------------------


class NoOptimizer(TypeError):
    """The factory returned something else."""


def check_factory(factory: object) -> None:
    """Raise ``TypeError`` for what can't be called."""
    if not callable(factory):
        raise TypeError(
            f"optimizer_factory: expected a callable that takes parameters and returns an optimizer, "
            f"got {type(factory).__name__}."
        )


# -- stepping them ---------------------------------------------------------------------------------------------------


@dataclass
class Trial:
    """Makes parameters, optimizers over them, and steps: always the same ones."""

    factory: Factory
    setting: Setting
    device: str = "cpu"

    def make(self) -> tuple[list[Parameter], Optimizer]:
        """New FP32 parameters on the device, and an optimizer over them."""
        rng = torch.Generator().manual_seed(7)
        values = [torch.randn(shape, generator=rng, dtype=torch.float32, device="cpu") for shape in self.setting.shapes]
        params = [Parameter(value.to(self.device)) for value in values]
        return params, self.over(params)

    def over(self, params: list[Parameter]) -> Optimizer:
        """A new optimizer over ``params``."""
        optimizer = self.factory(list(params))
        if not isinstance(optimizer, Optimizer):
            raise NoOptimizer(
                f"optimizer_factory: expected it to return a torch.optim.Optimizer, got {type(optimizer).__name__}."
            )
        if callable(getattr(optimizer, "train", None)):  # schedule-free optimizers step in this mode only
            optimizer.train()  # type: ignore[attr-defined]
        return optimizer

    def gradients(self, params: list[Parameter], step: int) -> list[Tensor]:
        """Gradients of very different sizes: what depends on all of them at once then shows."""
        rng = torch.Generator().manual_seed(1000 + step)
        grads = []
        for i, param in enumerate(params):
            grad = torch.randn(param.shape, generator=rng, dtype=torch.float32, device="cpu") * 10.0 ** (1 - i)
            grads.append((grad.to_sparse(1) if self.setting.kind == "sparse" else grad).to(self.device))
        return grads

    def train(
        self,
        params: list[Parameter],
        optimizer: Optimizer,
        steps: int,
        *,
        first: int = 0,
        without: frozenset[int] = frozenset(),
    ) -> None:
        """Steps number ``first`` and on; the parameters at ``without`` get no gradient."""
        for step in range(first, first + steps):
            if self.setting.kind == "closure":
                optimizer.step(functools.partial(self.evaluate, params, step, without))  # type: ignore[arg-type]
            else:
                self.give(params, step, without)
                optimizer.step()

    def give(self, params: list[Parameter], step: int, without: frozenset[int] = frozenset()) -> None:
        """Set ``.grad`` for one step."""
        for i, (param, grad) in enumerate(zip(params, self.gradients(params, step), strict=True)):
            param.grad = None if i in without else grad

    def evaluate(self, params: list[Parameter], step: int, without: frozenset[int] = frozenset()) -> Tensor:
        """A quadratic bowl's loss, with its gradients in ``.grad``."""
        loss = torch.zeros((), dtype=torch.float32, device="cpu")
        for i, (param, target) in enumerate(zip(params, self.gradients(params, step), strict=True)):
            with torch.no_grad():
                away = param - (target.to_dense() if target.is_sparse else target)
                loss = loss + (away * away).sum() / 2
                param.grad = None if i in without else away.to_sparse(1) if target.is_sparse else away
        return loss


def quote(error: BaseException) -> str:
    """An error in one line of limited length."""
    return textwrap.shorten(f"{type(error).__name__}: {error}".replace("\n", " "), 200)
