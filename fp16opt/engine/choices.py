"""Choices: how the wrapper is asked to train, and which of it goes together."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from ..certify.buckets import settings_of
from ..scaling import LossScaler
from . import one_pass_step, state_formats
from .arguments import check_choice, quoted
from .arrivals import refuse_ranks
from .model_writes import POLICIES
from .one_pass_rows import row_of
from .one_pass_trial import Trials
from .pairs import HALF_DTYPES, name_of, numbered
from .split import check_plain
from .state_formats import EightBitState, FullState, StateFormat
from .streamed_step import Certified

_CHOICES: dict[str, tuple[bool | str, ...]] = {
    "grad_accumulation": ("model", "fp32"),
    "on_model_write": POLICIES,
    "fused_step": (False, True, "auto"),
    "master_weights": ("full", "none", "split", "split24"),
    "optimizer_state": ("fp32", "8bit"),
    "gradient_release": (False, True, "held"),
}
_SPLIT24 = 'master_weights="split24"'


@dataclass(frozen=True)
class Choices:
    """The arguments of ``MixedPrecisionOptimizer`` that are one of several, under their names there.

    Raises:
        ValueError: one is none of these.
    """

    grad_accumulation: str
    on_model_write: str
    fused_step: bool | str
    master_weights: str
    optimizer_state: str
    gradient_release: bool | str

    def __post_init__(self) -> None:
        for name, choices in _CHOICES.items():
            check_choice(name, getattr(self, name), choices)

    @property
    def makes_masters(self) -> bool:
        """Whether 16-bit parameters get masters."""
        return self.master_weights != "none"

    @property
    def splits(self) -> bool:
        """Whether the weights are part of the masters."""
        return self.master_weights in ("split", "split24")

    @property
    def needed_by(self) -> str:
        """The argument that leaves no step but the one-pass one, as one writes it; "" where there is none."""
        if self.optimizer_state == "8bit":
            return EightBitState.needed_by
        if self.master_weights == "split24":
            return _SPLIT24
        return f"gradient_release={self.gradient_release!r}" if self.gradient_release else ""

    def state_format(self, optimizer: Optimizer) -> StateFormat:
        """What an optimizer's state is made of."""
        row = row_of(type(optimizer))
        return FullState(row) if row is None or self.optimizer_state == "fp32" else EightBitState(row)

    # -- an optimizer about to be wrapped ----------------------------------------------------------------------------

    def check(
        self,
        optimizer: Optimizer,
        scaler: LossScaler,
        names: dict[int, str],
        trials: Trials,
        certified: Certified,
        is_zero: bool,
    ) -> None:
        """Raise ``ValueError`` where they don't go with each other, or with an optimizer about to be wrapped.

        Args:
            names: by id of a parameter.
            trials, certified: what is known of classes of optimizers, which learn of this one.
            is_zero: whether it is torch's ZeroRedundancyOptimizer.
        """
        obstacle = functools.cache(lambda: self._obstacle(optimizer, names, trials, is_zero))
        if self.optimizer_state == "8bit":
            self._check_needed(EightBitState.needed_by, 'optimizer_state="fp32"', obstacle)
            called = [name for group in _called(list(enumerate(optimizer.param_groups)), names) for name in group]
            state_formats.check_moments(optimizer.state_dict(), called)
        if self.splits:
            self._check_split(optimizer, names, is_zero)
        if self.master_weights == "split24":
            self._check_needed(_SPLIT24, 'master_weights="split"', obstacle)
        if self.fused_step is True:
            reason = obstacle() or ("" if self.makes_masters else one_pass_step.NO_MASTERS)
            if reason:
                raise ValueError(
                    f"fused_step=True can't be served: {reason}. Use fused_step=False, which steps the wrapped "
                    'optimizer itself, or "auto", which does so where a fused step does not apply.'
                )
        if self.master_weights == "split":
            certified.check(optimizer)
        if self.gradient_release:
            self._check_release(scaler, obstacle)

    def _obstacle(self, optimizer: Optimizer, names: dict[int, str], trials: Trials, is_zero: bool) -> str:
        """Why it can't be stepped in one pass, in words; "" where it can."""
        if is_zero:
            return "ZeroRedundancyOptimizer steps its part of the parameters itself"
        row, form = row_of(type(optimizer)), None
        if self.optimizer_state == "8bit":
            if row is None or not state_formats.has_eight_bits(row):
                return f"{type(optimizer).__name__} is not exactly SGD, Adam or AdamW of torch.optim"
            form = EightBitState(row)
        groups = list(enumerate(optimizer.param_groups))
        params = [param for _, group in groups for param in group["params"]]
        called = [name for group in _called(groups, names) for name in group]
        return one_pass_step.obstacle(optimizer, params, called, trials, form)

    def _check_needed(self, needed_by: str, instead: str, obstacle: Callable[[], str]) -> None:
        if self.fused_step is False:
            raise ValueError(
                f"{needed_by} does not go with fused_step=False: it is a form of the one-pass step. "
                f'Use fused_step="auto", or {instead}.'
            )
        if not self.makes_masters:
            raise ValueError(
                f'{needed_by} does not go with master_weights="none": the one-pass step is one of masters. '
                f'Use master_weights="split", or {instead}.'
            )
        if obstacle():
            raise ValueError(f"{needed_by} can't be served: {obstacle()}. Use {instead}.")

    def _check_split(self, optimizer: Optimizer, names: dict[int, str], is_zero: bool) -> None:
        if self.on_model_write == "ignore":
            raise ValueError(
                f'on_model_write="ignore" does not go with master_weights="{self.master_weights}": the model\'s '
                'weights are part of the masters, so a write to them can\'t be ignored. Use "refresh" or "error".'
            )
        if is_zero:
            raise ValueError(
                f'master_weights="{self.master_weights}" does not go with ZeroRedundancyOptimizer: it sends 16-bit '
                'weights and knows of no remainders. Use master_weights="full", which ZeRO spreads over the ranks.'
            )
        for number, group in enumerate(optimizer.param_groups):
            self._check_plain(group, number, names)

    def _check_plain(self, group: dict[str, Any], number: int, names: dict[int, str]) -> None:
        for index, param in enumerate(group["params"]):
            if isinstance(param, Tensor) and param.dtype in HALF_DTYPES:
                where = f"group {number}, param {index}{quoted(name_of(group, index, param, names))}"
                check_plain(where, param, self.master_weights)

    def _check_release(self, scaler: LossScaler, obstacle: Callable[[], str]) -> None:
        said = f"gradient_release={self.gradient_release!r}"
        if self.fused_step is False:
            raise ValueError(
                f'{said} needs the one-pass step, and fused_step=False rules it out. Use fused_step="auto".'
            )
        if self.grad_accumulation != "model":
            raise ValueError(
                f"{said} frees each gradient when it comes, so grad_accumulation={self.grad_accumulation!r} has "
                'nothing to add up. Use grad_accumulation="model" and one backward a step, or gradient_release=False.'
            )
        if scaler.dynamic and self.gradient_release is True:
            raise ValueError(
                f"{said} does not go with a dynamic loss scale (dynamic=True, or such a scaler): parameters are "
                "stepped before all gradients are known, and an overflow could not be undone. Use loss_scale=..., or "
                'gradient_release="held".'
            )
        refuse_ranks(said, ValueError)
        reason = obstacle() or ("" if self.makes_masters else one_pass_step.NO_MASTERS)
        if reason:
            raise ValueError(
                f"{said} needs the one-pass step, which can't be had: {reason}. Use gradient_release=False."
            )

    # -- groups that are to come -------------------------------------------------------------------------------------

    def check_groups(
        self, optimizer: Optimizer, groups: list[dict[str, Any]], first: int, names: dict[int, str], trials: Trials
    ) -> None:
        """Raise ``ValueError`` for groups, as they are to be, where only a one-pass step can step them, and it can't.

        Args:
            groups: defaults filled in; "params" are the model's.
            first: the number of the first of them.
        """
        row = row_of(type(optimizer))
        if not self.needed_by or row is None:
            return
        form, each = self.state_format(optimizer), list(enumerate(groups, first))
        for (number, group), called in zip(each, _called(each, names), strict=True):
            reason = one_pass_step.params_obstacle(group["params"], called)
            reason = reason or one_pass_step.groups_obstacle(row, optimizer, [(number, group)], trials, form)
            if reason:
                raise ValueError(
                    f"{self.needed_by} needs the one-pass step, which group {number} can't have: {reason}. Change "
                    f"that, or wrap the optimizer without {self.needed_by}."
                )

    def check_new_group(
        self,
        optimizer: Optimizer,
        group: dict[str, Any],
        number: int,
        names: dict[int, str],
        trials: Trials,
        certified: Certified,
    ) -> None:
        """The same for a group that is to be added, without defaults, and whether its masters can be had."""
        self.check_groups(optimizer, [{**optimizer.defaults, **group}], number, names, trials)
        if self.splits:
            self._check_plain(group, number, names)
        if self.master_weights == "split":
            certified.check_settings(optimizer, {**optimizer.defaults, **settings_of(group)})


def _called(groups: list[tuple[int, dict[str, Any]]], names: dict[int, str]) -> list[list[str]]:
    """What messages call the parameters of groups with these numbers."""
    return [
        [name_of(group, i, param, names) or numbered(number, i) for i, param in enumerate(group["params"])]
        for number, group in groups
    ]
