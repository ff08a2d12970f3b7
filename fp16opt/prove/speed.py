"""How fast the CUDA kernels are on a card: GB/s beside a copy's, and what a step costs its host."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import AdamW

from ..kernels import (
    CallCache,
    CastStats,
    GradStats,
    Snapshots,
    multi_tensor_axpby,
    multi_tensor_cast,
    multi_tensor_check,
    multi_tensor_compare,
    multi_tensor_join,
    multi_tensor_l2norm,
    multi_tensor_lerp,
    multi_tensor_measure,
    multi_tensor_refresh_masters,
    multi_tensor_reset_remainders,
    multi_tensor_scale,
    multi_tensor_split,
    multi_tensor_unscale,
    multi_tensor_unscale_clipped,
)
from ..kernels.formulas import FORMULAS, AdamOptions, LionOptions, SgdOptions
from ..kernels.operations import Factors, multi_tensor_step
from ..kernels.pieces import BLOCK
from ..kernels.state8 import multi_tensor_adam8, multi_tensor_sgd8
from ..optimizer import MixedPrecisionOptimizer
from ..scaling import DynamicLossScaler
from .where import Where

_cuda: Any = torch.cuda
TENSORS, MOST = 8, 1 << 26
"""How many tensors, and of how many elements together at most."""
LENGTHS = (10, 150, 1000)
"""Tensors of the steps whose host time is measured."""
_LAUNCHES, _ROUNDS = 5, 5
_HALF, _SINGLE = torch.float16, torch.float32


class Timed(NamedTuple):
    """One kernel's call.

    Attributes:
        bytes: that each element costs, read and written.
        call: launches it once.
    """

    bytes: int
    call: Callable[[], object]


class Lists:
    """Lists of large tensors on the card.

    Args:
        device: the card.
        numel: elements of all tensors of a list together.

    Attributes:
        device: as given.
    """

    def __init__(self, device: torch.device, numel: int) -> None:
        self.device, self._each = device, max(8, numel // TENSORS)

    def of(self, dtype: torch.dtype, value: float = 0.0) -> list[Tensor | None]:
        """A list of tensors, filled with ``value``."""
        return [torch.full((self._each,), value, dtype=dtype, device=self.device) for _ in range(TENSORS)]

    def number(self, value: float) -> Tensor:
        """One number on the card."""
        return torch.tensor(value, dtype=_SINGLE, device="cpu").to(self.device)

    def scales(self) -> list[Tensor | None]:
        """For lists of codes."""
        return [torch.ones(-(-self._each // BLOCK), dtype=_SINGLE, device=self.device) for _ in range(TENSORS)]

    def digests(self) -> tuple[Tensor, Tensor, Tensor]:
        """Of weights that were all written."""
        now = torch.ones(TENSORS, dtype=torch.int64, device=self.device)
        return now, torch.zeros_like(now), torch.zeros(TENSORS, dtype=torch.int32, device=self.device)


_ADAM = AdamOptions(1e-3, 0.9, 0.999, 1e-8, 0.01, True, False)
_SGD = SgdOptions(1e-3, 0.9, 0.0, 0.0, False, False)
_OPTIONS: dict[str, Any] = {"adam": _ADAM, "sgd": _SGD, "lion": LionOptions(1e-3, 0.9, 0.99, 0.0, False)}


def _step(on: Lists, formula: str, states: int, cache: CallCache) -> Timed:
    """FP16 weights and gradients, FP32 masters and state."""
    grads, masters, models = on.of(_HALF, 0.5), on.of(_SINGLE, 1.0), on.of(_HALF, 1.0)
    state, stats = [on.of(_SINGLE, 0.5) for _ in range(states)], CastStats.allocate(TENSORS, on.device)
    counters: list[Tensor | None] = [on.number(3.0) for _ in range(TENSORS)]
    more: dict[str, Any] = {"steps": counters} if FORMULAS[formula].counts else {}
    given = [_OPTIONS[formula]], [0] * TENSORS, Factors(on.number(1.0), on.number(1.0))

    def call() -> None:
        lists = (grads, masters, state)
        multi_tensor_step(formula, *lists, *given, models=models, stats=stats, cache=cache, **more)

    return Timed(2 + 8 + 8 * states + 2, call)


def _coded(on: Lists, adam: bool, split: bool, cache: CallCache) -> Timed:
    """FP16 weights and gradients, FP32 masters or remainders of 16 bits, and state of 8 bits."""
    masters = on.of(torch.int16, 3) if split else on.of(_SINGLE, 1.0)
    grads, models = on.of(_HALF, 0.5), on.of(_HALF, 1.0)
    first, second, scales = on.of(torch.int8, 3), on.of(torch.uint8, 9), on.scales()
    stats, one = CastStats.allocate(TENSORS, on.device), Factors(on.number(1.0), on.number(1.0))
    counters: list[Tensor | None] = [on.number(3.0) for _ in range(TENSORS)]
    common: dict[str, Any] = {"models": models, "stats": stats, "cache": cache}

    def call() -> None:
        behind = [0] * TENSORS, one, 3
        if adam:
            multi_tensor_adam8(grads, masters, first, second, scales, counters, [_ADAM], *behind, **common)
        else:
            multi_tensor_sgd8(grads, masters, first, scales, [_SGD], *behind, first=[False] * TENSORS, **common)

    return Timed(2 + (8 if split else 8 + 2) + (4 if adam else 2), call)


def _unscales(name: str, on: Lists, cache: CallCache) -> Timed:
    grads, outs, scale = on.of(_HALF, 0.5), on.of(_SINGLE), on.number(0.5)
    stats = GradStats.allocate(TENSORS, on.device)
    return {
        "unscale": Timed(6, lambda: multi_tensor_unscale(grads, outs, scale, stats, cache=cache)),
        "check": Timed(2, lambda: multi_tensor_check(grads, scale, stats, cache=cache)),
        "unscale_clipped": Timed(6, lambda: multi_tensor_unscale_clipped(grads, outs, scale, scale, cache=cache)),
    }[name]


def _weights(name: str, on: Lists, cache: CallCache) -> Timed:
    masters, params, rests = on.of(_SINGLE, 1.0), on.of(_HALF, 1.0), on.of(torch.int16, 1)
    stats, digests = CastStats.allocate(TENSORS, on.device), on.digests()
    return {
        "cast": Timed(6, lambda: multi_tensor_cast(masters, params, stats, cache=cache)),
        "split": Timed(8, lambda: multi_tensor_split(masters, params, rests, stats, cache=cache)),
        "join": Timed(8, lambda: multi_tensor_join(params, rests, masters, cache=cache)),
        "take": Timed(6, lambda: multi_tensor_refresh_masters(masters, params, *digests, cache=cache)),
        "renew": Timed(4, lambda: multi_tensor_reset_remainders(params, rests, *digests, cache=cache)),
    }[name]


def _arithmetic(name: str, on: Lists, cache: CallCache) -> Timed:
    single, half, factor = on.of(_SINGLE, 1.0), on.of(_HALF, 1.0), on.number(0.5)
    return {
        "scale": Timed(4, lambda: multi_tensor_scale(half, factor, cache=cache)),
        "axpby": Timed(10, lambda: multi_tensor_axpby(0.5, half, 0.5, single, single, cache=cache)),
        "lerp": Timed(10, lambda: multi_tensor_lerp(single, half, 0.1, cache=cache)),
        "l2norm": Timed(2, lambda: multi_tensor_l2norm(half, cache=cache)),
        "measure": Timed(2, lambda: multi_tensor_measure(half, cache=cache)),
    }[name]


def _compare(on: Lists, cache: CallCache) -> Timed:
    masters, weights = on.of(_SINGLE, 1.0), on.of(_HALF, 1.0)
    before = Snapshots(masters)
    return Timed(6, lambda: multi_tensor_compare(masters, weights, before, cache=cache))


_OF_LISTS = {
    _unscales: ("unscale", "check", "unscale_clipped"),
    _weights: ("cast", "split", "join", "take", "renew"),
    _arithmetic: ("scale", "axpby", "lerp", "l2norm", "measure"),
}
_MADE: dict[str, Callable[[Lists, CallCache], Timed]] = {
    **{name: functools.partial(make, name) for make, names in _OF_LISTS.items() for name in names},
    "compare": _compare,
    "adam8_half_full": lambda on, cache: _coded(on, True, False, cache),
    "adam8_half_32": lambda on, cache: _coded(on, True, True, cache),
    "sgd8_half_full": lambda on, cache: _coded(on, False, False, cache),
    "sgd8_half_32": lambda on, cache: _coded(on, False, True, cache),
    "adam": lambda on, cache: _step(on, "adam", 2, cache),
    "amsgrad": lambda on, cache: _step(on, "adam", 3, cache),
    "sgd": lambda on, cache: _step(on, "sgd", 0, cache),
    "momentum": lambda on, cache: _step(on, "sgd", 1, cache),
    "lion": lambda on, cache: _step(on, "lion", 1, cache),
}
"""By kernel: what makes its call. Kernels that mark, that look at a sample or at a few numbers are not timed."""


class Speed:
    """Times kernels and steps on a card.

    Args:
        where: the card. On a pretended one calls are made and not timed.
    """

    def __init__(self, where: Where) -> None:
        self._where = where
        self._numel = 4096
        if where.is_real:
            free, _ = torch.cuda.mem_get_info(where.device)
            self._numel = min(MOST, free // 64)

    def timed(self) -> Sequence[str]:
        """The kernels that are."""
        return tuple(_MADE)

    def copy(self) -> float:
        """GB/s of torch's copy between two stretches of the card's memory, read and written."""
        with self._where.serving():
            on = Lists(self._where.device, self._numel)
            pairs = list(zip(on.of(_SINGLE, 1.0), on.of(_SINGLE), strict=True))

            def call() -> None:
                for source, to in pairs:
                    if source is not None and to is not None:
                        to.copy_(source)

            return self._rate(Timed(8, call))

    def kernel(self, name: str) -> float:
        """GB/s of one kernel, read and written; 0 on a pretended card."""
        with self._where.serving():
            on = Lists(self._where.device, self._numel)
            return self._rate(_MADE[name](on, CallCache()))

    def _rate(self, timed: Timed) -> float:
        timed.call()
        if not self._where.is_real:
            return 0.0
        timed.call()
        took = []
        for _ in range(_ROUNDS):
            begin, end = (_cuda.Event(enable_timing=True) for _ in range(2))
            _cuda._sleep(2_000_000)  # the host queues all of it meanwhile
            begin.record()
            for _ in range(_LAUNCHES):
                timed.call()
            end.record()
            end.synchronize()
            took.append(begin.elapsed_time(end) / 1e3 / _LAUNCHES)
        rate: float = timed.bytes * (self._numel // TENSORS * TENSORS) / statistics.median(took) / 1e9
        return rate

    def host(self, length: int) -> float:
        """Microseconds that the host needs to queue the clip and the one-pass AdamW step of ``length`` FP16 tensors."""
        with self._where.serving():
            device = self._where.device
            params = [nn.Parameter(torch.ones(64, dtype=_HALF, device=device)) for _ in range(length)]
            inner, scaler = AdamW(params, lr=1e-3), DynamicLossScaler(init_scale=256.0)
            opt = MixedPrecisionOptimizer(inner, scaler=scaler, fused_step=True)
            grads, loss = [torch.ones_like(param) for param in params], torch.zeros((), dtype=_SINGLE, device=device)
            took = []
            for _ in range(3 + 20 * self._where.is_real):
                opt.zero_grad()
                opt.scale_loss(loss)
                for param, grad in zip(params, grads, strict=True):
                    param.grad = grad
                torch.cuda.synchronize()
                began = time.perf_counter()
                opt.clip_master_grads(1.0)
                opt.step()
                took.append(1e6 * (time.perf_counter() - began))
                torch.cuda.synchronize()
            return statistics.median(took[3:] or took)
