"""The formulas of one-pass steps: a row each, and what it says in torch operations.

A row and its functor, a file in csrc/functors/, are all that there is of a formula. Loops for the CPU, kernels for
CUDA, the calls of both, the engine's rows, what :func:`fp16opt.register_one_pass` takes and ``python -m fp16opt plan``
knows are made of these.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, get_type_hints

import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer

from .reference_steps import lerp, power, single

Reference = Callable[[Tensor, Tensor, "list[Tensor]", Any, float, bool], None]
Keys = Mapping[str, "str | tuple[str, ...]"]


@dataclass(frozen=True)
class Formula:
    """One formula.

    Attributes:
        struct: the functor, in the namespace fp16opt.
        options: what a param_group says: a NamedTuple of ``lr``, then the fields of the functor's ``Group`` in their
            order, a double for a ``float`` and an int32_t for a ``bool``. Named as the settings of a group are, but for
            ``beta1`` and ``beta2``, which are the setting ``betas``; ``maximize`` is one of them.
        state: names of the state, FP32 tensors of the parameter's shape.
        reference: what is specified: ``(g, p, state, options, t, first)``, flat float32 tensors of one size, of which p
            and those of the state are written. ``g`` was unscaled, and negated to maximize. ``t``: the number of the
            step, from 1, where the formula counts. ``first``: the state holds nothing yet. Operations that round once.
        wanted: settings without which there is no step.
        neutral: settings that an optimizer class may lack, and what they are then.
        kernels: the names of its CUDA kernels: the last has all of the state, the one before it one tensor less.
        needs: from a group's settings: how many of the state a step has.
        read: from a group's settings to ``options``, where these are not under the same names. No sync: an lr that is a
            tensor stays one.
        counts: whether each parameter counts its steps, in a float32 tensor "step" of one element.
        fills_first: whether state that is new holds nothing before the first step, which fills it.
        classes: of torch.optim, that step so.
        packaged: classes of packages, as "package.Class", with the keys that their groups have for settings.
    """

    struct: str
    options: type[Any]
    state: tuple[str, ...]
    reference: Reference
    wanted: tuple[str, ...]
    neutral: Mapping[str, Any]
    kernels: tuple[str, ...]
    needs: Callable[[dict[str, Any]], int] | None = None
    read: Callable[[dict[str, Any]], Any] | None = None
    counts: bool = False
    fills_first: bool = False
    classes: tuple[type[Optimizer], ...] = ()
    packaged: Mapping[str, Keys] = field(default_factory=dict)

    @functools.cached_property
    def fields(self) -> dict[str, type]:
        """The fields of ``options`` behind the lr, each float or bool."""
        return {name: kind for name, kind in get_type_hints(self.options).items() if name != "lr"}

    def numbers(self) -> tuple[str, ...]:
        """Settings that must be numbers, but for the lr and the betas."""
        return tuple(name for name, kind in self.fields.items() if kind is float and not name.startswith("beta"))

    def least(self) -> int:
        """How many of the state every step has."""
        return len(self.state) + 1 - len(self.kernels)

    def options_of(self, group: dict[str, Any]) -> Any:
        """``options`` of a param_group. No sync."""
        if self.read is not None:
            return self.read(group)
        found: list[Any] = [lr_of(group)]
        for name, kind in self.fields.items():
            found.append(kind(group["betas"][int(name[-1]) - 1] if name in ("beta1", "beta2") else group[name]))
        return self.options(*found)

    def state_of(self, group: dict[str, Any]) -> tuple[str, ...]:
        """Names of the state that parameters of a group have, their counter of steps first."""
        count = len(self.state) if self.needs is None else self.needs(group)
        return (("step",) if self.counts else ()) + self.state[:count]


def lr_of(group: dict[str, Any]) -> float | Tensor:
    """A group's learning rate as kernels take it: a number, or a tensor as it is."""
    lr = group["lr"]
    return lr if isinstance(lr, Tensor) else float(lr)


_DECAYED = {"weight_decay": 0.0, "maximize": False}


# -- SGD ---------------------------------------------------------------------------------------------------------------


class SgdOptions(NamedTuple):
    """What a param_group of SGD says.

    Attributes:
        lr, momentum, dampening, weight_decay, nesterov, maximize: as ``torch.optim.SGD`` holds them; an ``lr`` that is
            a tensor has one element.
    """

    lr: float | Tensor
    momentum: float
    dampening: float
    weight_decay: float
    nesterov: bool
    maximize: bool


def _sgd(g: Tensor, p: Tensor, state: list[Tensor], o: SgdOptions, t: float, first: bool) -> None:
    if o.weight_decay != 0.0:
        g = g + p * single(o.weight_decay)
    for buffer in state:
        buffer.copy_(g if first else buffer * single(o.momentum) + g * single(1.0 - o.dampening))
        g = g + buffer * single(o.momentum) if o.nesterov else buffer
    p.copy_(p + g * single(-float(o.lr)))


_SGD = Formula(
    "Sgd",
    SgdOptions,
    ("momentum_buffer",),
    _sgd,
    wanted=("lr",),
    neutral={**_DECAYED, "momentum": 0.0, "dampening": 0.0, "nesterov": False},
    kernels=("sgd", "momentum"),
    needs=lambda group: int(bool(group["momentum"])),
    fills_first=True,
    classes=(SGD,),
)


# -- Adam and AdamW ----------------------------------------------------------------------------------------------------


class AdamOptions(NamedTuple):
    """What a param_group of Adam or AdamW says, apart from ``amsgrad``, which shows in the lists.

    Attributes:
        lr, beta1, beta2, eps, weight_decay: as ``torch.optim.AdamW`` holds them; an ``lr`` that is a tensor has one
            element.
        decoupled: whether the weight decay is AdamW's.
        maximize: as ``torch.optim.AdamW`` holds it.
    """

    lr: float | Tensor
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    decoupled: bool
    maximize: bool


def _adam(g: Tensor, p: Tensor, state: list[Tensor], o: AdamOptions, t: float, first: bool) -> None:
    lr, (m, v, *largest) = float(o.lr), state
    if o.weight_decay != 0.0 and not o.decoupled:
        g = g + p * single(o.weight_decay)
    decayed = p * single(1.0 - lr * o.weight_decay) if o.decoupled else p
    m.copy_(lerp(m, g, single(1.0 - o.beta1)))
    v.copy_(v * single(o.beta2) + (g * single(1.0 - o.beta2)) * g)
    second = v
    if largest:
        second = largest[0].copy_(torch.where((largest[0] > v) | largest[0].isnan(), largest[0], v))
    # By a number torch's CUDA kernels do not divide: they multiply by its reciprocal. A tensor they divide by.
    root = torch.full((), math.sqrt(1.0 - power(o.beta2, t)), dtype=torch.float32, device=p.device)
    denominator = second.double().sqrt().float() / root + single(o.eps)
    p.copy_(decayed + (m * single(-(lr / (1.0 - power(o.beta1, t))))) / denominator)


def _adam_options(group: dict[str, Any], decoupled: bool = False) -> AdamOptions:
    beta1, beta2 = group["betas"]
    eps, weight_decay = float(group["eps"]), float(group["weight_decay"])
    decoupled, maximize = bool(group.get("decoupled_weight_decay", decoupled)), bool(group["maximize"])
    return AdamOptions(lr_of(group), float(beta1), float(beta2), eps, weight_decay, decoupled, maximize)


_ADAM = Formula(
    "Adam",
    AdamOptions,
    ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"),
    _adam,
    wanted=("lr", "betas", "eps"),
    neutral={**_DECAYED, "amsgrad": False},
    kernels=("adam", "amsgrad"),
    needs=lambda group: 3 if group["amsgrad"] else 2,
    read=_adam_options,
    counts=True,
    classes=(Adam,),
)


# -- Lion (Chen et al. 2023, "Symbolic Discovery of Optimization Algorithms", algorithm 2) -----------------------------


class LionOptions(NamedTuple):
    """What a param_group of Lion says.

    Attributes:
        lr, beta1, beta2, weight_decay: as ``lion_pytorch.Lion`` holds them; weights shrink by lr * weight_decay in a
            step. An ``lr`` that is a tensor has one element.
        maximize: whether steps go up the gradient.
    """

    lr: float | Tensor
    beta1: float
    beta2: float
    weight_decay: float
    maximize: bool


def _lion(g: Tensor, p: Tensor, state: list[Tensor], o: LionOptions, t: float, first: bool) -> None:
    (m,) = state
    mixed = m * single(o.beta1) + g * single(1.0 - o.beta1)
    direction = (mixed > 0).float() - (mixed < 0).float()
    p.copy_(p * single(1.0 - float(o.lr) * o.weight_decay) + direction * single(-float(o.lr)))
    m.copy_(m * single(o.beta2) + g * single(1.0 - o.beta2))


_LION = Formula(
    "Lion",
    LionOptions,
    ("exp_avg",),
    _lion,
    wanted=("lr", "betas"),
    neutral=_DECAYED,
    kernels=("lion",),
    packaged={"lion_pytorch.Lion": {"lr": "lr", "betas": "betas", "weight_decay": "weight_decay"}},
)


FORMULAS = {
    "sgd": _SGD,
    "adam": _ADAM,
    "adamw": replace(_ADAM, read=lambda group: _adam_options(group, decoupled=True), classes=(AdamW,)),
    "lion": _LION,
}
"""By the name that :func:`fp16opt.register_one_pass` has for it; "adamw" is "adam" with weight decay of its own."""
