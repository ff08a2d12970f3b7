"""Small runs of any optimizer, always the same ones, and what they left compared bit by bit. For :mod:`certify`."""

from __future__ import annotations

import copy
import functools
import inspect
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from .buckets import settings_of

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
        except NoOptimizer as error:
            raise TypeError(str(error)) from None
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


def factory_like(optimizer: Optimizer, settings: dict[str, Any]) -> Factory:
    """Makes optimizers of the same class with the same settings."""
    cls = type(optimizer)
    known = inspect.signature(cls).parameters
    given = {key: value for key, value in settings.items() if key in known}

    def make(params: list[Parameter]) -> Optimizer:
        made: Optimizer = cls(params, **copy.deepcopy(given))
        for group in made.param_groups:
            group.update(copy.deepcopy(settings))
        return made

    return make


class NoOptimizer(Exception):
    """The factory returned something else."""


@dataclass
class Trial:
    """Makes parameters, optimizers over them, and steps: always the same ones."""

    factory: Factory
    setting: Setting
    device: str = "cpu"

    def make(self) -> tuple[list[Parameter], Optimizer]:
        rng = torch.Generator().manual_seed(7)
        values = [torch.randn(shape, generator=rng, device="cpu") for shape in self.setting.shapes]
        params = [Parameter(value.float().to(self.device)) for value in values]
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
            grad = torch.randn(param.shape, generator=rng, device="cpu").float() * 10.0 ** (1 - i)
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
                optimizer.step(functools.partial(self._evaluate, params, step, without))  # type: ignore[arg-type]
            else:
                self.give(params, step, without)
                optimizer.step()

    def give(self, params: list[Parameter], step: int, without: frozenset[int] = frozenset()) -> None:
        """Set ``.grad`` for one step."""
        for i, (param, grad) in enumerate(zip(params, self.gradients(params, step), strict=True)):
            param.grad = None if i in without else grad

    def _evaluate(self, params: list[Parameter], step: int, without: frozenset[int]) -> Tensor:
        """A quadratic bowl's loss, with its gradients in ``.grad``."""
        loss = torch.zeros(())
        for i, (param, target) in enumerate(zip(params, self.gradients(params, step), strict=True)):
            with torch.no_grad():
                away = param - target
                param.grad = None if i in without else away
                loss = loss + (away * away).sum() / 2
        return loss


# -- comparing -------------------------------------------------------------------------------------------------------


def same_bits(a: Any, b: Any) -> bool:
    """Whether two nested structures hold the same bits. Objects of kinds unknown here are taken as the same."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        if a.layout is not torch.strided or b.layout is not torch.strided:
            return a.layout is b.layout and same_bits(a.to_dense(), b.to_dense())
        if (a.dtype, a.shape) != (b.dtype, b.shape):
            return False
        return torch.equal(*(t.detach().cpu().contiguous().reshape(-1).view(torch.uint8) for t in (a, b)))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same_bits(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(map(same_bits, a, b))
    if isinstance(a, float) and isinstance(b, float) and a != a:
        return b != b
    known = bool | int | float | complex | str | None
    return type(a) is type(b) and (a == b if isinstance(a, known) else True)


def states_of(params: list[Parameter], optimizer: Optimizer) -> list[Any]:
    """The state of each parameter, as it is; None where there is none."""
    return [optimizer.state.get(param) for param in params]


def everything(params: list[Parameter], optimizer: Optimizer) -> tuple[Any, ...]:
    """What two runs are compared by: parameters, their state, and the groups' settings."""
    return params, states_of(params, optimizer), [settings_of(group) for group in optimizer.param_groups]


def difference(one: tuple[Any, ...], other: tuple[Any, ...]) -> str:
    """What differs first, or nothing."""
    for word, a, b in zip(("parameter", "state of parameter", "settings of group"), one, other, strict=True):
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            if not same_bits(x, y):
                return f"{word} {i}"
    return ""


def tensors_of(value: Any) -> Iterator[tuple[str, Tensor]]:
    """(key, tensor) of all tensors in a parameter's state."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list | tuple) else ()
    for key, item in items:
        if isinstance(item, Tensor):
            yield str(key), item
        else:
            yield from ((f"{key}.{inner}", tensor) for inner, tensor in tensors_of(item))


def quote(error: BaseException) -> str:
    """An error in one line of limited length."""
    return textwrap.shorten(f"{type(error).__name__}: {error}".replace("\n", " "), 200)
