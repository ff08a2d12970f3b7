"""Accumulation: the state machine of a step's gradients, and the scale that each backward made them with."""

from __future__ import annotations

import enum
from dataclasses import dataclass

import torch
from torch import Tensor

from . import kept
from .arguments import require
from .gradients import MasterGrads
from .kernels import decisions
from .norms import power_sum
from .ranks import Ranks, Replicas
from .scaling import LossScaler


class State(enum.Enum):
    """Where a step stands: nothing pending; gradients scaled by a backward; gradients unscaled into the masters."""

    READY = "ready"
    SCALED = "scaled"
    UNSCALED = "unscaled"


@dataclass
class Pending:
    """The scale that the model's present gradients were made with. It stays theirs whatever the scaler does.

    Attributes:
        driven: Whether gradients came without the engine (see driven.py), and none from its own backwards since.
    """

    scaler: LossScaler
    generation: int
    scale: Tensor
    inv_scale: Tensor
    driven: bool = False

    @classmethod
    def capture(cls, scaler: LossScaler) -> Pending:
        memory = scaler.memory()
        scale, inv_scale = decisions.capture_scale(scaler.scale if memory is None else memory.scale)
        return cls(scaler, scaler.generation, scale, inv_scale)

    def is_current(self, scaler: LossScaler) -> bool:
        return self.scaler is scaler and self.generation == scaler.generation


class Accumulation:
    """READY -> SCALED (a loss was scaled) -> UNSCALED (master gradients are up to date) -> READY (step, zero_grad).

    Backwards with one scale add up in the model's gradients. Where a second scale joins in, or ``folds`` asks for it,
    each backward is folded into FP32 master gradients with its own scale.

    Attributes:
        ranks: Where the masters' other parts are, if any.
        replicas: Which ranks share gradients with this one, if any.
        verdicts: For each scaler that took part, by ``id``: (scaler, found_inf of its own backwards).
    """

    def __init__(self, grads: MasterGrads, device: torch.device, folds: bool, ranks: Ranks) -> None:
        self.grads = grads
        self.device = device
        self.folds = folds
        self.ranks = ranks
        self.replicas = Replicas()
        self.last: Pending | None = None
        self.kept = kept.Kept()
        self.begin()

    def begin(self) -> None:
        """READY for the next step. What gradients hold stays."""
        self.grads.reset()
        self.state = State.READY
        self.pending: Pending | None = None
        self.verdicts: dict[int, tuple[LossScaler, Tensor]] = {}
        self.interrupted = False
        self._agreed = False
        self._unreduced: set[int] = set()

    def finish(self) -> None:
        """READY after a step, which has used the gradients up. Unless they are cleared the next ones are added."""
        self.kept.drop()
        if self.grads.folded is not None:
            self.kept.leave(self.grads)
        self.grads.mark_consumed()
        self.last = self.pending
        self.begin()

    def discard(self, zeroed: bool = False) -> None:
        """READY after gradients were cleared: set to None, or ``zeroed``."""
        self.last = None
        self.kept.drop(zeroed and self.folds)
        self.begin()

    def check_complete(self) -> None:
        if self.interrupted:
            raise RuntimeError(
                "a backward was interrupted while gradients were being added up, so they are incomplete. "
                "Call zero_grad() and do the step's backwards again."
            )

    # -- backwards ---------------------------------------------------------------------------------------------------

    def enter(self, scaler: LossScaler) -> Pending:
        """A backward with ``scaler``'s present scale is about to add to the model's gradients."""
        self.check_complete()
        if self.state is State.READY:
            self._enter_from_ready(scaler)
        elif require(self.pending).is_current(scaler):
            if self.state is State.UNSCALED:
                self.grads.set_aside_own(self.replicas.keeps)
        else:
            self._change_scale(scaler)
        self.state = State.SCALED
        pending: Pending = require(self.pending)
        pending.driven = False
        return pending

    def _enter_from_ready(self, scaler: LossScaler) -> None:
        if self.kept.take():
            kept.go_on_folding(self.grads)
        elif self.grads.has_model_grads() and self.last is not None and not self.last.is_current(scaler):
            self.pending = self.last  # gradients that no zero_grad cleared, made at another scale
            self.unscale()
            self._start_folding()
        elif self.folds:
            self._start_folding()
        found = kept.check(self.grads, self.device)
        if found is not None and self.grads.folded is not None:
            self.blame(scaler, found)
        self.grads.set_aside_own(self.replicas.keeps)
        self.pending = Pending.capture(scaler)

    def _change_scale(self, scaler: LossScaler) -> None:
        if self.state is State.SCALED:
            if not self.grads.has_any():
                raise RuntimeError(
                    "a loss was scaled with one scaler and its backward has not run, and now another one is asked for. "
                    "Run each scaled loss's backward before the next loss is scaled with another scaler."
                )
            self.unscale()
        self._start_folding()
        self.grads.set_aside_own(self.replicas.keeps)
        self.pending = Pending.capture(scaler)

    def abandon(self, state: State, pending: Pending | None, was_adding: bool) -> None:
        """After a backward that raised: as before it, or, where gradients were being added up, refuse to go on.

        Args:
            state, pending: As they were before :meth:`enter`.
            was_adding: Whether some parameter held a gradient when the backward began.
        """
        if was_adding:
            self.interrupted = True
            return
        self.grads.give_back_own()
        folded = state is State.SCALED and pending is not self.pending
        self.state, self.pending = (State.UNSCALED if folded else state), pending

    # -- unscaling ---------------------------------------------------------------------------------------------------

    def take_as_scaled(self, scaler: LossScaler) -> None:
        """Gradients came without :meth:`enter`; take them as made with ``scaler``'s present scale."""
        self.kept.take()
        self.pending = Pending.capture(scaler)
        self.grads.own_is_fresh = True
        if self.folds:
            self._start_folding()

    def waits(self) -> bool:
        """Whether the model's gradients are not to be read yet: DDP reduces them at a later backward."""
        return self.replicas.local and self.grads.folded is None and not self.folds

    def unscale(self) -> None:
        """Bring the master gradients up to date and take down the verdict. No host sync, no message but one: FP32 sums
        that were folded under DDP's ``no_sync`` are averaged over the ranks before reduced gradients are added.
        """
        pending = self._begin_unscaling()
        self.grads.unscale(pending.inv_scale, self.replicas.keeps)
        self._take_verdict(pending)

    def unscale_clipped(self, max_norm: float) -> Tensor:
        """:meth:`unscale` and a clip of the 2-norm, with one write; float32, 0-dim: the norm before. No host sync."""
        pending = self._begin_unscaling()

        def judge() -> tuple[Tensor, Tensor]:
            self._take_verdict(pending)
            return self.norm(2.0), self.found_inf()

        return self.grads.unscale_clipped(pending.inv_scale, max_norm, judge)

    def _begin_unscaling(self) -> Pending:
        pending: Pending = require(self.pending)
        if self.waits():
            raise RuntimeError(
                "the gradients were made under DDP's no_sync and are this rank's own. Run the last backward of a step "
                'outside of no_sync, or use grad_accumulation="fp32", which averages what is left.'
            )
        if self.replicas.local and self.grads.params.elsewhere:
            raise RuntimeError(
                "FP32 sums under DDP's no_sync need every master on every rank; ZeroRedundancyOptimizer spreads them. "
                'Use grad_accumulation="model", or leave no_sync.'
            )
        if not self.replicas.local:
            self._reduce_folded()
        return pending

    def _take_verdict(self, pending: Pending) -> None:
        found = self.grads.found_inf(self.device)
        key = id(pending.scaler)
        if self.replicas.local:  # other ranks hear of it when the sums are averaged
            self._unreduced.add(key)
        if self.grads.folded is not None:
            earlier = self.verdicts.get(key)
            found = found.clone() if earlier is None else torch.maximum(earlier[1], found)
        self.verdicts[key] = (pending.scaler, found)
        self._agreed = False
        self.state = State.UNSCALED

    def blame(self, scaler: LossScaler, found: Tensor) -> None:
        """Count ``found`` (float32, 0-dim) into what ``scaler``'s backwards gave: it was found in another optimizer."""
        earlier = self.verdicts.get(id(scaler))
        found = found.to(self.device)
        self.verdicts[id(scaler)] = (scaler, found if earlier is None else torch.maximum(earlier[1], found))

    def _reduce_folded(self) -> None:
        """Average over the ranks what was folded under ``no_sync``."""
        if self._unreduced:
            keys = [key for key in self.verdicts if key in self._unreduced]  # in one order on all ranks
            verdicts = self.replicas.reduce(self.grads, [self.verdicts[key][1] for key in keys])
            for key, found in zip(keys, verdicts, strict=True):
                scaler, earlier = self.verdicts[key]
                self.verdicts[key] = (scaler, torch.maximum(earlier, found.to(earlier.device)))
            self._unreduced = set()

    def _start_folding(self) -> None:
        if not self.grads.params.has_pieces:  # FSDP2 shows gradients only when they are reduced
            self.replicas.check_folding()
        self.grads.start_folding()
        # The verdict so far is the kernel's own buffer, which the next pass overwrites.
        self.verdicts = {key: (scaler, found.clone()) for key, (scaler, found) in self.verdicts.items()}

    # -- what was found ----------------------------------------------------------------------------------------------

    def found_inf(self) -> Tensor:
        """float32, 0-dim: 1.0 where any backward of this step gave a non-finite gradient, on any rank."""
        self._agree(None)
        found = [verdict for _, verdict in self.verdicts.values()]
        return found[0] if len(found) == 1 else torch.stack(found).amax()

    def norm(self, norm_type: float) -> Tensor:
        """float64, 0-dim: the norm over all master gradients, on all ranks. No host sync."""
        if self.ranks.alone:
            self._reduce_folded()
            return self.grads.norm(norm_type, self.device)
        norm: Tensor = require(self._agree(norm_type))
        return norm

    def _agree(self, norm_type: float | None) -> Tensor | None:
        """One message for verdicts and norm, at the first of clipping and stepping."""
        self._reduce_folded()
        if self.ranks.alone or (self._agreed and norm_type is None):
            return None
        power = None if norm_type is None else power_sum(self.grads, norm_type, self.device, self.ranks.counted)
        found, norm = self.ranks.agree([verdict for _, verdict in self.verdicts.values()], norm_type, power)
        for (key, (scaler, _)), verdict in zip(list(self.verdicts.items()), found, strict=True):
            self.verdicts[key] = (scaler, verdict)
        self._agreed = True
        return norm
