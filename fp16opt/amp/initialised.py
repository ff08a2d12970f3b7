"""What all optimizers that went through ``amp.initialize`` share: the decisions of that call, the log, apex's names."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from ..engine.diagnostics import Lines, Overflow, SkipLog
from ..engine.ranks import Origin
from ..scaling import LossScaler as EngineScaler
from ._amp_state import logger
from .scaler import LossScaler
from .stash import Stash
from .subclassing import Reducible


@dataclass
class Setup:
    """What one call of ``amp.initialize`` decided. Later calls change the scalers for all optimizers, and nothing else.

    Attributes:
        scalers: One a loss id. The session's own list, which every ``initialize`` fills anew; a copy or a pickle has a
            list of its own.
        master_weights: Whether 16-bit parameters get masters. If not, optimizers stay plain.
        function_casts: Whether functions cast their inputs (O1).
        verbosity: 0: silent.
        means_no_scale: Whether the script has written ``loss_scale=1.0``.
    """

    scalers: list[LossScaler]
    master_weights: bool
    function_casts: bool
    verbosity: int
    means_no_scale: bool = False


class AmpLog(SkipLog):
    """What the engine logs of skipped steps, with loss ids and the scalers of the losses."""

    def __init__(self, setup: Setup, lines: Lines) -> None:
        super().__init__(lines)
        self.setup = setup
        self._losses: list[int] = []
        self.blamed: list[int] = []  # ids of the scalers whose backwards of this step overflowed

    def skipped(
        self,
        scaler: EngineScaler,
        old: float,
        overflows: Sequence[Overflow],
        losses: Sequence[Tensor] = (),
        weights: Sequence[str] = (),
        origin: Origin | None = None,
    ) -> None:
        """A step was skipped; ``scaler`` is the engine's, which never changes."""
        if self.setup.verbosity == 0:
            return
        blamed = [(i, mine) for i, mine in enumerate(self.setup.scalers) if id(mine) in self.blamed]
        for _, mine in blamed:
            if mine.overflowed:  # not where a clean backward followed in the same step
                self._losses = [i for i, _ in blamed]
                super().skipped(mine.rule, float(mine.before), overflows, losses, weights, origin)
                return
        self._losses = [i for i, _ in blamed]
        text = "step skipped: non-finite gradients in %s."
        self.lines.say(logging.WARNING, text, self.where(overflows, origin), to=logger)

    def where(self, overflows: Sequence[Overflow], origin: Origin | None = None) -> str:
        """Which parameters overflowed; where there are several losses, in which."""
        names = super().where(overflows, origin)
        if len(self.setup.scalers) < 2 or not self._losses:
            return names
        return f"{names}, of loss {', '.join(map(str, self._losses))}"


class Initialised(Reducible):
    """What ``amp.initialize`` makes of an optimizer, under its own identity and class.

    With master weights that is an :class:`~fp16opt.amp.optimizers.AmpOptimizer`, without them a
    :class:`~fp16opt.amp.plain.PlainOptimizer`: this is what both show to ``scale_loss`` and to scripts.
    """

    amp: Setup

    # -- what scale_loss asks ------------------------------------------------------------------------------------------

    def enter(self, loss: Tensor, scaler: LossScaler) -> Tensor:
        """``loss`` scaled. A backward follows."""
        raise NotImplementedError

    def leave(self) -> None:
        """The backward is over, and its gradients stay as they are (``delay_unscale``)."""

    def abandon(self) -> None:
        """The backward raised: gradients are incomplete until they are cleared."""
        raise NotImplementedError

    def settle_gradients(self, scaler: LossScaler) -> Tensor:
        """Make true gradients of those of the last backward. Returns whether *its* overflowed: float32, 0-dim."""
        raise NotImplementedError

    def blame(self, scaler: LossScaler, found_inf: Tensor) -> None:
        """Skip the next step where ``found_inf`` (float32, 0-dim): another optimizer of this backward overflowed."""
        raise NotImplementedError

    # -- what scripts of old reach for ---------------------------------------------------------------------------------

    def pairs(self) -> list[list[tuple[Tensor, Tensor]]]:
        """Per group, each (model parameter, what is stepped for it)."""
        raise NotImplementedError

    def take_by_hand(self, scaler: LossScaler) -> None:
        """Gradients that are there were made of a loss that the caller multiplied by the scale of ``scaler``."""
        raise NotImplementedError

    @property
    def _amp_stash(self) -> Stash:
        return Stash(self.pairs)

    def _lazy_init_maybe_master_weights(self) -> None:
        """Masters are made by ``initialize``: nothing to do."""

    def _amp_lazy_init(self) -> None:
        """Masters are made by ``initialize``: nothing to do."""

    def _master_params_to_model_params(self) -> None:
        """Write every master, rounded, into its model parameter."""

    def _prepare_amp_backward(self) -> None:
        """What ``scale_loss`` does before a backward."""

    def _post_amp_backward(self, scaler: LossScaler) -> None:
        """Unscale the gradients of a backward whose loss the caller multiplied by the scale of ``scaler``."""
        self.take_by_hand(scaler)
        scaler.settle(self.settle_gradients(scaler))


def is_initialised(optimizer: object) -> bool:
    """Whether ``amp.initialize`` was given this optimizer."""
    return isinstance(optimizer, Initialised) and "amp" in optimizer.__dict__
