"""SGD, Adam, AdamW and Lion by class path: optimizers with FP32 masters for programs that make theirs from a name."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any, TypeAlias

import torch
from torch import Tensor

from . import parallel
from .engine.missing_scale import WayToScale
from .kernels.readings import Rows
from .optimizer import MixedPrecisionOptimizer
from .optimizers import lion

__all__ = ["SGD", "Adam", "AdamW", "Lion"]

Params: TypeAlias = Iterable[Any]


def _pair(betas: Any) -> tuple[float, float]:
    """A tuple of what a config gives as its own kind of list, which ``torch.load`` would not read from a checkpoint.

    Raises:
        ValueError: They are not two.
    """
    if isinstance(betas, str) or len(betas) != 2:
        raise ValueError(f"betas: expected two numbers, got {betas!r}. Write betas: [0.9, 0.999].")
    return betas[0], betas[1]


def _check_numbers(**settings: Any) -> None:
    """Raise ``TypeError`` for a text, as YAML makes one of ``1e-3``; torch would compare it with a number."""
    for name, value in settings.items():
        if isinstance(value, str):
            raise TypeError(
                f"{name}: expected a number, got the text {value!r}. YAML takes 1e-3 for one: write 1.0e-3."
            )


class _ByClass(MixedPrecisionOptimizer):
    """A wrapper that was made with the optimizer in it, and often before its model was what will be trained.

    Programs that make optimizers from a name convert and move the model later: Lightning's CLI for ``--optimizer``,
    kohya's scripts for ``--full_bf16``. Until anything was stepped, skipped or loaded, the optimizer follows.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Parameters are fine here, but for those of a ``ZeroRedundancyOptimizer``.

        Raises:
            TypeError: ZeRO makes it, and would decide about overflows on each rank alone.
        """
        caller = inspect.currentframe()
        caller = None if caller is None else caller.f_back
        if caller is not None and parallel.is_zero(caller.f_locals.get("self")):
            raise TypeError(
                f"optimizer_class: expected a class of torch.optim, got fp16opt.optim.{cls.__name__}. The right order "
                f"is MixedPrecisionOptimizer(ZeroRedundancyOptimizer(params, torch.optim.{cls.__name__}, ...))."
            )
        return super().__new__(cls)

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The wrapped optimizer's, of the model as it is now: a GradScaler's ``unscale_`` asks before a first step."""
        self._follow()
        return super().param_groups

    def _begin(
        self, call: str, verifies: bool = True, rounds: bool = True, gives_up: bool = False
    ) -> tuple[Rows, ...] | None:
        self._follow()
        return super()._begin(call, verifies, rounds, gives_up)

    def _follow(self) -> None:
        if not self.steps_counted() and self._was_converted() and not self.skipped_steps:  # the last one syncs
            self._wrap_anew()

    def _was_converted(self) -> bool:
        """Whether parameters have another dtype or device than when they came."""
        return any(pair.known != (pair.model.dtype, pair.model.shape, pair.model.device) for pair in self.params.all)

    def _wrap_anew(self) -> None:
        """Make masters of the parameters as they are now, where none hold anything else: else the engine refuses."""
        if self.gradient_release or self.inner.state or self.model_writes.swapped or not self._masters_are_new():
            return
        for pair in self.params.all:
            self.optimizer.param_groups[pair.group]["params"][pair.index] = pair.model
        with torch.inference_mode(False):
            self._check_new(self.optimizer)
            self._make(self.optimizer, self.master_weights, self.on_model_write)

    def _way_to_scale(self) -> WayToScale:
        """As the wrapper's, for the class that a program names."""
        return WayToScale(f"fp16opt.optim.{type(self).__name__}(..., {self.config.arguments_that_scale})")

    def _masters_are_new(self) -> bool:
        """Whether masters have the model's values, and not those of a checkpoint. Syncs."""
        if not self.masters.are_whole:
            return True
        pairs = [pair for pair in self.params.all if pair.is_apart]
        return all(torch.equal(pair.master.detach(), pair.model.detach().to(pair.master)) for pair in pairs)


class SGD(_ByClass):
    """``torch.optim.SGD`` in a ``MixedPrecisionOptimizer``.

    Args:
        params: Parameters, ``(name, parameter)`` pairs, or groups of them; a generator may be any of these.
        lr, momentum, dampening, weight_decay, nesterov, maximize, foreach, differentiable, fused: As in torch.
        **options: Of ``MixedPrecisionOptimizer``: ``dynamic``, ``loss_scale``, ``scaler``, ``master_weights``, ...

    Raises:
        TypeError, ValueError: As torch and ``MixedPrecisionOptimizer`` raise them.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
        >>> optimizer = SGD([weight], lr=2.0**-10)
        >>> for _ in range(4):
        ...     optimizer.zero_grad()
        ...     weight.sum().backward()
        ...     optimizer.step()
        >>> weight[0].item(), next(optimizer.master_params())[0].item()
        (0.99609375, 0.99609375)
    """

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-3,
        momentum: float = 0,
        dampening: float = 0,
        weight_decay: float | Tensor = 0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        differentiable: bool = False,
        fused: bool | None = None,
        **options: Any,
    ) -> None:
        _check_numbers(lr=lr, momentum=momentum, dampening=dampening, weight_decay=weight_decay)
        inner = torch.optim.SGD(
            params,
            lr,
            momentum,
            dampening,
            weight_decay,
            nesterov,
            maximize=maximize,
            foreach=foreach,
            differentiable=differentiable,
            fused=fused,
        )
        super().__init__(inner, **options)


class Adam(_ByClass):
    """``torch.optim.Adam`` in a ``MixedPrecisionOptimizer``.

    Args:
        params: Parameters, ``(name, parameter)`` pairs, or groups of them; a generator may be any of these.
        lr, betas, eps, weight_decay, amsgrad, foreach, maximize, capturable, differentiable, fused: As in torch.
        decoupled_weight_decay: As in torch, from 2.7 on.
        **options: Of ``MixedPrecisionOptimizer``: ``dynamic``, ``loss_scale``, ``scaler``, ``master_weights``, ...

    Raises:
        TypeError, ValueError: As torch and ``MixedPrecisionOptimizer`` raise them.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(2, dtype=torch.float16))
        >>> optimizer = Adam([weight], lr=0.5, dynamic=True)
        >>> optimizer.backward(weight.float().sum() * 0.25)
        >>> optimizer.step()
        >>> weight.tolist(), optimizer.loss_scale
        ([0.5, 0.5], 65536.0)
    """

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        amsgrad: bool = False,
        *,
        foreach: bool | None = None,
        maximize: bool = False,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        decoupled_weight_decay: bool = False,
        **options: Any,
    ) -> None:
        _check_numbers(lr=lr, eps=eps, weight_decay=weight_decay)
        inner = torch.optim.Adam(
            params,
            lr,
            _pair(betas),
            eps,
            weight_decay,
            amsgrad,
            foreach=foreach,
            maximize=maximize,
            capturable=capturable,
            differentiable=differentiable,
            fused=fused,
            **({"decoupled_weight_decay": True} if decoupled_weight_decay else {}),  # torch has it from 2.7 on
        )
        super().__init__(inner, **options)


class AdamW(_ByClass):
    """``torch.optim.AdamW`` in a ``MixedPrecisionOptimizer``.

    Args:
        params: Parameters, ``(name, parameter)`` pairs, or groups of them; a generator may be any of these.
        lr, betas, eps, weight_decay, amsgrad, maximize, foreach, capturable, differentiable, fused: As in torch.
        **options: Of ``MixedPrecisionOptimizer``: ``dynamic``, ``loss_scale``, ``scaler``, ``master_weights``, ...

    Raises:
        TypeError, ValueError: As torch and ``MixedPrecisionOptimizer`` raise them.

    Example:
        >>> model = torch.nn.Linear(4, 2, dtype=torch.bfloat16)
        >>> optimizer = AdamW(model.named_parameters(), lr=1e-3, weight_decay=0.1, master_weights="split")
        >>> model(torch.ones(1, 4, dtype=torch.bfloat16)).sum().backward()
        >>> norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        >>> optimizer.step()
        >>> isinstance(optimizer, MixedPrecisionOptimizer), type(optimizer.optimizer) is torch.optim.AdamW
        (True, True)
    """

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        **options: Any,
    ) -> None:
        _check_numbers(lr=lr, eps=eps, weight_decay=weight_decay)
        inner = torch.optim.AdamW(
            params,
            lr,
            _pair(betas),
            eps,
            weight_decay,
            amsgrad,
            maximize=maximize,
            foreach=foreach,
            capturable=capturable,
            differentiable=differentiable,
            fused=fused,
        )
        super().__init__(inner, **options)


class Lion(_ByClass):
    """:class:`fp16opt.optimizers.Lion`, as torch.optim has none, in a ``MixedPrecisionOptimizer``.

    Args:
        params: Parameters, ``(name, parameter)`` pairs, or groups of them; a generator may be any of these.
        lr, betas, weight_decay, maximize: As for ``fp16opt.optimizers.Lion``.
        **options: Of ``MixedPrecisionOptimizer``: ``dynamic``, ``loss_scale``, ``scaler``, ``master_weights``, ...

    Raises:
        TypeError, ValueError: A setting is out of range; or as ``MixedPrecisionOptimizer`` raises them.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
        >>> optimizer = Lion([weight], lr=0.25)
        >>> weight.sum().backward()
        >>> optimizer.step()
        >>> weight.tolist()
        [0.75, 0.75]
    """

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        **options: Any,
    ) -> None:
        _check_numbers(lr=lr, weight_decay=weight_decay)
        super().__init__(lion.Lion(params, lr, _pair(betas), weight_decay, maximize=maximize), **options)
