"""Parameters that are stepped in backward, each when its gradient arrives: ``gradient_release=True``."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from .. import kernels
from ..kernels.reference_steps import Factors
from ..scaling import LossScaler
from .arguments import require
from .arrivals import Place
from .masters import Masters
from .model_writes import ModelWrites
from .one_pass_rows import CannotServe, OnePassRow, steps_on_device
from .one_pass_step import OnePassStep, groups_obstacle
from .one_pass_trial import Trials
from .pairs import HALF_DTYPES, DeviceGroup, Pair, Pairs
from .state_formats import StateFormat
from .sweep import ToStep
from .wrapped_step import run_hooks


class One:
    """One pair, as :class:`OnePassStep` wants pairs; its statistics are the row's own."""

    def __init__(self, pairs: Pairs, pair: Pair) -> None:
        self._pairs = pairs
        self.all = [dataclasses.replace(pair, group=0)]  # of the groups that OneOptimizer shows
        self.models, self.masters, self.names = [pair.model], [pair.master], [pair.name]
        group = DeviceGroup(pair.master.device, [0], [(pair.model, pair.master)])
        group.cast = kernels.CastStats(pair.device.cast.overflow[pair.row : pair.row + 1])
        self.devices = [group]
        self.own_halves = [pair] if pair.master is pair.model and pair.model.dtype in HALF_DTYPES else []

    @property
    def generation(self) -> int:
        """See :class:`Pairs`."""
        return self._pairs.generation


class OneState(dict[Tensor, dict[str, Any]]):
    """The state of one master alone, as :class:`OnePassStep` wants that of all: what is missing is made among all.

    Args:
        of_all: The wrapped optimizer's.
    """

    def __init__(self, of_all: dict[Tensor, dict[str, Any]], master: Tensor) -> None:
        super().__init__({master: of_all[master]} if master in of_all else {})
        self._of_all = of_all

    def __missing__(self, master: Tensor) -> dict[str, Any]:
        made = self[master] = self._of_all[master]
        return made


class OneOptimizer:
    """The wrapped optimizer as :class:`OnePassStep` sees it for one pair: otherwise each would look through all.

    Args:
        optimizer: The wrapped one.
    """

    def __init__(self, optimizer: Optimizer, pair: Pair) -> None:
        self._optimizer = optimizer
        self._pair = pair

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The pair's own."""
        return [self._optimizer.param_groups[self._pair.group]]

    @property
    def state(self) -> OneState:
        """The master's, as it is now."""
        return OneState(self._optimizer.state, self._pair.master)


class OneGradient:
    """One gradient, as :class:`OnePassStep` wants gradients: it waits, whatever its dtype."""

    def __init__(self) -> None:
        self.grad: Tensor | None = None
        self.factors: Factors | None = None

    def to_step(self, group: DeviceGroup) -> ToStep:
        """The gradient, and what it is to be multiplied by."""
        return ToStep([self.grad], None, require(self.factors))


class OneByOne:
    """One-pass steps of single parameters.

    Args:
        row: Of the optimizer's class.
        form, needed_by, number, trials: As :class:`OnePassStep` has them.
    """

    def __init__(
        self,
        row: OnePassRow,
        optimizer: Optimizer,
        pairs: Pairs,
        masters: Masters,
        form: StateFormat,
        needed_by: str,
        number: Callable[[], int],
        trials: Trials,
    ) -> None:
        self._row = row
        self._optimizer = optimizer
        self._form = form
        self._forms = form, needed_by, number
        self._trials = trials
        self._pairs = pairs
        self._masters = masters
        self._steps: dict[int, tuple[int, OnePassStep, OneGradient]] = {}
        self._checked: set[int] = set()  # groups, since begin()

    def begin(self) -> None:
        """Parameters are about to be stepped: settings of groups are looked at anew, each once."""
        self._checked.clear()

    def step(self, place: Place, grad: Tensor, factors: Factors, found_inf: Tensor | None) -> None:
        """Step the parameter of ``place``.

        Args:
            grad: In the parameter's strides: of its dtype, or float32.
            found_inf: float32, 0-dim, on the device: where it is 1.0 nothing is written. None: decided already.

        Raises:
            RuntimeError: The kernel can't serve it any more.
        """
        kept = self._steps.get(place.position)
        if kept is None or kept[0] != self._pairs.generation:
            gradient = OneGradient()
            pairs: Any = One(self._pairs, place.pair)
            given: Any = gradient
            one: Any = OneOptimizer(self._optimizer, place.pair)
            parts = one, pairs, self._masters, given, *self._forms
            kept = self._pairs.generation, OnePassStep(True, self._row, *parts, None, self._trials), gradient
            self._steps[place.position] = kept
        _, step, gradient = kept
        gradient.grad, gradient.factors = grad, factors
        try:
            self._check(place.pair)
            step.take(found_inf)
        except CannotServe as reason:
            raise RuntimeError(
                f"parameter {place.pair.name!r} can't be stepped in one pass any more: {reason}. gradient_release has "
                "no other step. Put back what was changed, or use gradient_release=False."
            ) from None
        finally:
            gradient.grad = gradient.factors = None

    def _check(self, pair: Pair) -> None:
        if pair.group in self._checked:
            return
        groups = [(pair.group, self._optimizer.param_groups[pair.group])]
        reason = groups_obstacle(self._row, self._optimizer, groups, self._trials, self._form)
        if reason:
            raise CannotServe(reason)
        self._checked.add(pair.group)


class SteppedOnArrival:
    """Each gradient that arrives steps its parameter, unless it is not finite.

    Args:
        waits: Whether weights that others wrote are looked at on the host.
    """

    release = True
    can_drop = False

    def __init__(self, one_by_one: OneByOne, model_writes: ModelWrites, waits: bool) -> None:
        self._one_by_one = one_by_one
        self._model_writes = model_writes
        self._waits = waits
        self._decided_there: dict[torch.device, bool] = {}  # of the present backward

    def begin(self, scaler: LossScaler) -> None:
        """Weights that were written by others are noticed before they are stepped."""
        if scaler.dynamic:
            raise RuntimeError(
                "backward with a dynamic scaler: gradient_release=True steps parameters before an overflow elsewhere "
                'is known. Use a StaticLossScaler, or gradient_release="held".'
            )
        self._model_writes.notice(waits=self._waits)
        self._one_by_one.begin()
        self._decided_there.clear()

    def take(self, place: Place, grad: Tensor, factors: Factors) -> None:
        """Step it. Where that is decided on the device nobody waits."""
        found = place.stats.found_inf
        if found.device not in self._decided_there:
            self._decided_there[found.device] = steps_on_device(found.device)
        if self._decided_there[found.device]:
            self._one_by_one.step(place, grad, factors, found)
        elif not bool(found):
            self._one_by_one.step(place, grad, factors, None)
        if place.pair.master is not place.pair.model:
            self._model_writes.accept_soon(place.pair)  # so that what others write from here on shows

    def end(self, told: bool = True) -> None:
        """See :class:`Taker`."""
        if told:
            self._model_writes.sample_accepted()
        else:
            self._model_writes.doubt_accepted()

    def settle(self, places: Sequence[Place]) -> None:
        """They were stepped when they came."""

    def norm(self, norm_type: float, places: Sequence[Place], device: torch.device) -> Tensor:
        """Raise: parameters were stepped by now."""
        raise RuntimeError(
            "clip_master_grads: with gradient_release=True parameters are stepped before the norm over all gradients "
            'is known. Use gradient_release="held", or False.'
        )

    def clip(self, factor: Tensor) -> None:
        """Never asked: see :meth:`norm`."""

    def drop(self) -> None:
        """Nothing is kept."""

    def tensors(self) -> list[Tensor]:
        """Nothing is kept."""
        return []


class ReleasedStep:
    """What is left for ``step`` to do where parameters were stepped in backward: the optimizer's step hooks."""

    rounded_all = False
    all_or_nothing = False
    reads_once = False

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer

    def takes_waiting(self) -> bool:
        """True: no FP32 gradients are made."""
        return True

    def skips_on_device(self) -> bool:
        """True: it is decided already."""
        return True

    def describe(self) -> str:
        """See :class:`Stepper`."""
        return "fused, in backward"

    def step(self, found_inf: Tensor | None, closure: Callable[[], Any] | None = None) -> Any:
        """See :class:`Stepper`."""
        run_hooks(self.optimizer, _nothing)


def _nothing(hooked: bool) -> None:
    pass
