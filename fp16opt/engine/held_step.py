"""Gradients that are held in 8 bits from backward to ``step``: ``gradient_release="held"``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from .. import kernels
from ..kernels.reference_steps import Factors
from ..scaling import LossScaler
from .arrivals import Place
from .pairs import HALF_DTYPES
from .released_step import OneByOne
from .sweep import total_norm, vector_norm
from .wrapped_step import run_hooks

SMALLEST = 4096  # elements: smaller gradients, and those of FP32 parameters, are held as they are


class Codes(NamedTuple):
    """A gradient in 8 bits.

    Attributes:
        codes: int8, of its shape and strides.
        scales: float32, the largest magnitude of each block of 256.
    """

    codes: Tensor
    scales: Tensor


class HeldOnArrival:
    """Each gradient that arrives is looked at as it is, and a code of it is kept until the step."""

    release = "held"
    can_drop = True

    def __init__(self, one_by_one: OneByOne) -> None:
        self._one_by_one = one_by_one
        self._tables: dict[int, tuple[kernels.PointerTables, kernels.PointerTables]] = {}  # of coding and decoding
        self._held: dict[int, tuple[Place, Codes | Tensor, Factors]] = {}
        self._factor: Tensor | None = None

    def begin(self, scaler: LossScaler) -> None:
        """Any scaler serves: the verdict is there before the step."""

    def take(self, place: Place, grad: Tensor, factors: Factors) -> None:
        """Code it, or keep it as it is where it is small."""
        model = place.pair.model
        coded = model.numel() >= SMALLEST and model.dtype in HALF_DTYPES
        self._held[place.position] = place, self._encoded(place, grad) if coded else grad.detach(), factors

    def _tables_of(self, place: Place) -> tuple[kernels.PointerTables, kernels.PointerTables]:
        if place.position not in self._tables:
            self._tables[place.position] = kernels.PointerTables(), kernels.PointerTables()
        return self._tables[place.position]

    def _encoded(self, place: Place, grad: Tensor) -> Codes:
        codes = torch.empty_like(grad, dtype=torch.int8, requires_grad=False)
        scales = torch.empty(-(-grad.numel() // kernels.HELD_BLOCK), dtype=torch.float32, device=grad.device)
        kernels.multi_tensor_encode([grad], [codes], [scales], tables=self._tables_of(place)[0])
        return Codes(codes, scales)

    def _decoded(self, place: Place, held: Codes) -> Tensor:
        grad = torch.empty_like(place.pair.model, requires_grad=False)
        kernels.multi_tensor_decode([held.codes], [grad], [held.scales], tables=self._tables_of(place)[1])
        return grad

    def end(self, told: bool = True) -> None:
        """See :class:`Taker`."""

    def settle(self, places: Sequence[Place]) -> None:
        """Nothing was written."""

    def norm(self, norm_type: float, places: Sequence[Place], device: torch.device) -> Tensor:
        """Of the gradients as they came, and not of their codes."""
        if self._factor is not None:
            raise RuntimeError(
                'clip_master_grads was called a second time in one step: with gradient_release="held" gradients meet '
                "one factor, when they are stepped. Clip once."
            )
        if norm_type == 2.0:
            by_device: dict[torch.device, list[Tensor]] = {}
            for place in places:
                by_device.setdefault(place.stats.sumsq.device, []).append(place.stats.sumsq)
            return total_norm([torch.cat(each).sum().sqrt() for each in by_device.values()], 2.0, device)
        if norm_type == float("inf"):
            sizes = [self._largest(place).to(device) for place in places if place.pair.model.numel()]
            return torch.stack(sizes).amax() if sizes else torch.zeros((), dtype=torch.float64, device=device)
        raise RuntimeError(
            f'clip_master_grads(norm_type={norm_type:g}): gradient_release="held" measures 2-norms and largest '
            "magnitudes. Use norm_type=2.0 or math.inf, or gradient_release=False."
        )

    def _largest(self, place: Place) -> Tensor:
        """The largest magnitude of a true gradient: scales are those of its blocks."""
        _, held, factors = self._held[place.position]
        values = held.scales if isinstance(held, Codes) else held
        return vector_norm(values.float() * factors.inv_scale, float("inf"))

    def clip(self, factor: Tensor) -> None:
        """See :class:`Taker`."""
        self._factor = factor

    def drop(self) -> None:
        """See :class:`Taker`."""
        self._held.clear()
        self._factor = None

    def tensors(self) -> list[Tensor]:
        """Codes, and gradients that are kept as they are."""
        found: list[Tensor] = []
        for _, held, _ in self._held.values():
            found += held if isinstance(held, Codes) else [held]
        return found

    def step(self) -> None:
        """Step all parameters, one decoded gradient at a time."""
        self._one_by_one.begin()
        with torch.no_grad():
            for position in sorted(self._held):
                place, held, factors = self._held[position]
                if isinstance(held, Codes):
                    held = self._decoded(place, held)
                if self._factor is not None:
                    factors = Factors(factors.inv_scale, self._factor.to(held.device))
                self._one_by_one.step(place, held, factors, None)


class HeldStep:
    """Steps all parameters from what is held of their gradients.

    Args:
        optimizer: The wrapped one, whose step hooks run.
    """

    rounded_all = False
    all_or_nothing = True
    reads_once = False

    def __init__(self, optimizer: Optimizer, held: HeldOnArrival) -> None:
        self.optimizer = optimizer
        self.held = held

    def takes_waiting(self) -> bool:
        """True: no FP32 gradients are made."""
        return True

    def skips_on_device(self) -> bool:
        """False: the host decides, once a step."""
        return False

    def describe(self) -> str:
        """See :class:`Stepper`."""
        return "fused, from held gradients"

    def step(self, found_inf: Tensor | None, closure: Callable[[], Any] | None = None) -> Any:
        """See :class:`Stepper`."""
        run_hooks(self.optimizer, lambda hooked: self.held.step())
