"""Accumulation: where a step's gradients stand, the scale that each backward made them with, and the verdict."""

from __future__ import annotations

import contextlib
import enum
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ..kernels import backends, counters
from ..scaling import LossScaler
from .diagnostics import describe
from .gradients import NOTHING_LEFT, FadedSight, Gradients, Sight
from .ranks import Ranks, Replicas


class Stage(enum.Enum):
    """What is known of a step's gradients.

    READY: nothing is pending. SCALED: a backward has made some. LOOKED: they were checked and measured. TAKEN: FP32
    ones were written to the masters.
    """

    READY = "ready"
    SCALED = "scaled"
    LOOKED = "looked"
    TAKEN = "taken"


@dataclass
class Pending:
    """The scale that the present gradients were made with. It stays theirs whatever the scaler does.

    Attributes:
        foreign: Whether they came without the engine, as under a GradScaler, and none from its own backwards since.
    """

    scaler: LossScaler
    generation: int
    scale: Tensor
    inv_scale: Tensor
    foreign: bool = False

    @classmethod
    def capture(cls, scaler: LossScaler) -> Pending:
        """``scaler``'s present scale. No sync."""
        memory = scaler.memory
        scale, inv_scale = backends.capture_scale(scaler.scale if memory is None else memory.scale)
        return cls(scaler, scaler.generation, scale, inv_scale)

    def is_current(self, scaler: LossScaler) -> bool:
        """Whether a backward with ``scaler`` would use this scale."""
        return self.scaler is scaler and self.generation == scaler.generation


def are_finite(losses: list[Tensor]) -> bool | None:
    """Whether all losses of a step are; None where nobody has seen any. Syncs."""
    return all([bool(loss.isfinite().all()) for loss in losses]) if losses else None  # noqa: C419


@dataclass
class Verdict:
    """Whether the gradients that are about to be stepped are finite, over all ranks.

    Attributes:
        found_inf: float32, 0-dim, on the engine's device: 1.0 where one is not.
        of: each scaler that took part, with what its own backwards gave.
        norm: float64, 0-dim: over all master gradients, on all ranks, where it was asked for.
    """

    found_inf: Tensor
    of: list[tuple[LossScaler, Tensor]]
    norm: Tensor | None = None


def _refuse_ranks() -> None:
    """Raise where gradients are about to be folded into FP32 sums that DDP might never reduce."""
    dist = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return
    raise RuntimeError(
        'gradients are to be folded into FP32 (grad_accumulation="fp32", or several loss scales in one step) in a '
        f"process group of {dist.get_world_size()} ranks: under DDP's no_sync the ranks would drift apart. Call "
        "fp16opt.distributed.attach(opt, ddp_model); or attach(opt, None), if ranks don't share gradients."
    )


class Accumulation:
    """READY -> SCALED (a loss was scaled) -> LOOKED or TAKEN (settled) -> READY (step, zero_grad).

    Backwards with one scale add up in the model's gradients. Where a second scale joins in, or ``sums`` asks for it,
    each backward is added to FP32 sums with its own scale.

    Attributes:
        ranks: Where the masters' other parts are, if any.
        replicas: Which ranks share gradients with this one, if any.
        pending: The scale of the present gradients.
        backwards: How many have begun.
        interrupted: Whether a backward raised half-way.
        losses: Of the present gradients, unscaled, where they are single numbers.
    """

    def __init__(self, gradients: Gradients, device: torch.device, sums: bool, ranks: Ranks) -> None:
        self.gradients = gradients
        self.device = device
        self.sums = sums
        self.ranks = ranks
        self.replicas = Replicas()
        self.last: Pending | None = None
        self._captured: Pending | None = None
        self.backwards = 0
        self.left_over: FadedSight | None = None
        self._left_elsewhere: FadedSight | None = None
        self._cleared_here = False  # since the last step, and by :meth:`clear`
        self._start()

    def _start(self) -> None:
        self.stage = Stage.READY
        self.pending: Pending | None = None
        self.interrupted = False
        self._verdicts: dict[int, tuple[LossScaler, Tensor]] = {}
        self._are_zeros = False  # zero_grad(set_to_none=False) has left what there is
        self._arrived = False  # backward(loss) has said that gradients are up to date
        self._edited: list[str] = []  # names of parameters whose master gradients were
        self._agreed = False
        self._unreduced: set[int] = set()
        self.losses: list[Tensor] = []
        self._norms: dict[int, Tensor] = {}  # of scalers that follow them, which were not told yet
        self._assigned: set[int] = set()  # ids of parameters whose masters the user gave a gradient when none waited

    # -- the stages --------------------------------------------------------------------------------------------------

    def finish(self, used: Sight | None = None) -> None:
        """READY after a step, which has used the gradients up. Unless they are cleared the next ones are added.

        Args:
            used: The model's gradients that the step was about; None: those that are there.
        """
        if used is not None:
            self.gradients.sight = used
        elif self.gradients.sight is not None and self.gradients.pairs.has_own:
            self.gradients.see()  # optimizers may write the gradients that they step
        if self.gradients.sight is not None:
            self._leave(self.gradients.sight)
        if self.gradients.pairs.elsewhere:
            self._leave_elsewhere()
        self.last = self.pending
        self.gradients.rest(self.left_over)
        self._start()

    def _leave(self, sight: Sight) -> None:
        """What a step has used may stay in the model.

        Nothing is kept alive, but where the last step's gradients came to :meth:`clear`: so do these, as a rule.
        """
        self.left_over = None if sight.is_empty else FadedSight(sight, keeps=self._cleared_here)
        self._cleared_here = False

    def _leave_elsewhere(self) -> None:
        """What parameters hold that other ranks step is known."""
        self._left_elsewhere = FadedSight(Sight([param.grad for param in self.gradients.pairs.elsewhere]))

    @contextlib.contextmanager
    def rewriting(self) -> Iterator[None]:
        """Within, a GradScaler divides gradients where they lie: those that a step has used stay used."""
        used = self.left_over is not None and self.stage is Stage.READY and not self.strange()
        yield
        if used:
            self._leave(Sight(self.gradients.of_model()))

    def abandon(self) -> None:
        """READY without a step; gradients that wait for one count as used. Those that came without us are as they were.

        So are those that a GradScaler was handed: it has its own scale, and steps what it has unscaled.
        """
        if self.stage is not Stage.READY and not self._are_shared():
            self.gradients.see()
            self.finish()

    def clear(self, set_to_none: bool) -> None:
        """Gradients are cleared, the masters' too, and what was found in them is forgotten."""
        self._cleared_here = self._cleared_here or self.gradients.any_there()
        self.gradients.clear(set_to_none, sums_stay=self.sums)
        self.last = self.left_over = self._left_elsewhere = None
        if not set_to_none:
            self._leave(self.gradients.see())
            if self.gradients.pairs.elsewhere:
                self._leave_elsewhere()
        self._start()
        self._are_zeros = not set_to_none

    def interrupt(self) -> None:
        """A backward raised while gradients were being added up."""
        self.interrupted = True

    def steps_ahead(self) -> int:
        """0: no parameter is stepped in backward."""
        return 0

    def check_complete(self) -> None:
        """Raise ``RuntimeError`` after an interrupted backward, until its gradients are cleared, by whomever."""
        if self.interrupted and not self.gradients.any_there():
            self.forget()
        if self.interrupted:
            raise RuntimeError(
                "a backward was interrupted while gradients were being added up, so they are incomplete. "
                "Call zero_grad() and do the step's backwards again."
            )

    # -- backwards ---------------------------------------------------------------------------------------------------

    def enter(self, scaler: LossScaler) -> Pending:
        """A backward with ``scaler``'s present scale is about to add to the model's gradients."""
        if self.interrupted:
            self.check_complete()
        pending = self.pending
        if pending is None or self.stage is Stage.READY or not self.waits_for_step():
            pending = self._enter_from_ready(scaler)
        else:
            self._check_moved()
            if not pending.is_current(scaler):
                pending = self._change_scale(scaler, pending)
            elif self._edited and not self.gradients.summing:
                raise RuntimeError(
                    f"master gradients were edited and a further backward follows: {describe(self._edited)}. The edits "
                    "would be lost, as gradients add up in the model. Clip and edit after the last backward of a step, "
                    'or use grad_accumulation="fp32", which keeps edits.'
                )
        if self.gradients.pairs.has_own:
            self.gradients.set_aside(self.replicas.keeps)
        self.gradients.renew()
        self.backwards += 1
        pending.foreign = False
        self.pending, self.stage, self._arrived = pending, Stage.SCALED, False
        return pending

    def waits_for_step(self) -> bool:
        """Whether gradients do. READY where somebody has cleared them, in whatever way: an abandoned batch."""
        if self.stage is not Stage.READY and not self.gradients.any_there():
            self.forget()
        return self.stage is not Stage.READY

    def forget(self) -> None:
        """READY; what was found counts for nothing, and nothing is known of what is in the model."""
        self.gradients.rest(None)
        self.gradients.forget_gone()
        self._start()

    def _enter_from_ready(self, scaler: LossScaler) -> Pending:
        strange = self.strange()
        if strange:
            self._check_strange(strange, float(scaler.scale))
        elif self.last is not None and self.left_over is not None and not self.last.is_current(scaler):
            # Gradients that no zero_grad cleared, made at another scale: bring them to the one that is added now.
            self.gradients.rescale(scaler.scale.to(self.device) * self.last.inv_scale.to(self.device))
        if self.sums:
            self._start_summing()
        captured = self._captured
        # It serves as long as the scale stays; not on a GPU, where a graph that is captured would go on reading it.
        if captured is None or not (captured.is_current(scaler) and captured.scale.is_cpu):
            captured = self._captured = Pending.capture(scaler)
        return captured

    def _change_scale(self, scaler: LossScaler, pending: Pending) -> Pending:
        if self.stage is Stage.SCALED:
            unseen = not self.gradients.summing and (self.gradients.made or self.gradients.pairs.has_own)
            if not self.gradients.summing:
                self._verdicts.pop(id(pending.scaler), None)  # it was on fewer gradients, or on some that are gone
            self._sum_up(pending)
            if unseen:  # those that were true already: the pass over the others did not look at them
                self.gradients.judge()
                self._take_verdict(pending)
        else:
            self._start_summing()
        return Pending.capture(scaler)

    def arrived(self) -> None:
        """A backward is over, and gradients are up to date as far as nobody needs more. No host sync."""
        pending = self.pending
        if pending is None or (self.replicas.local and self.waits()):
            return
        self._arrived = True
        if self.gradients.summing:
            self._sum_up(pending)
            self.stage = Stage.TAKEN
            return
        if self.gradients.pairs.has_own:
            self.gradients.unscale_own(pending.inv_scale)
            if pending.scaler.follows_norms:
                self._take_norm(pending.scaler)  # now, as these are true, and may be clipped by anybody
        self.gradients.made = False
        self.gradients.see()

    def waits(self) -> bool:
        """Whether the model's gradients are not to be read yet: DDP reduces them at a later backward."""
        return self.replicas.local and not self.gradients.summing and not self.sums

    # -- gradients that came without us ------------------------------------------------------------------------------

    def strange(self) -> list[int]:
        """Positions with gradients that neither a backward of ours nor a step has seen."""
        if not counters.have_gradients(self.gradients.pairs.models):
            return []
        return (self.left_over or NOTHING_LEFT).others(*counters.see(self.gradients.pairs.models))

    def is_strange(self, model: Tensor, master_grad: Tensor | None) -> bool:
        """Whether one parameter has such a gradient, or none while its master still has one; zeros ask for all."""
        if self._are_zeros and not self.gradients.made:
            return True  # reading them makes all
        grad = model.grad
        if grad is None:
            return master_grad is not None
        return self.left_over is None or not self.left_over.holds(self.gradients.pairs.places[id(model)], grad)

    def has_strange(self) -> bool:
        """Whether there are such gradients, be it of parameters that other ranks step: then all ranks take part."""
        if self.strange():
            return True
        return bool((self._left_elsewhere or NOTHING_LEFT).others(*counters.see(self.gradients.pairs.elsewhere)))

    def _check_strange(self, positions: list[int], scale: float) -> None:
        pairs = self.gradients.pairs
        if scale == 1.0:
            return
        apart = [i for i in positions if not pairs.are_own[i]]  # others are set aside, and added
        grads = [(i, pairs.models[i].grad) for i in apart]
        found = [pairs.all[i] for i, grad in grads if grad is not None and bool((grad != 0).any())]
        if found:
            raise RuntimeError(
                f"gradients are there that backward(loss) of this optimizer did not make: {pairs.describe(found)}. "
                f"They would be unscaled by the loss scale of {scale:g}. Call zero_grad() first, or make all gradients "
                "with backward(loss) or scale_loss(loss).backward()."
            )

    def take_zeros(self, scaler: LossScaler) -> None:
        """Where ``zero_grad(set_to_none=False)`` has left zeros, they are the gradients of a step."""
        if self.stage is Stage.READY and self._are_zeros and self.gradients.any_there():
            self.pending, self.stage = Pending.capture(scaler), Stage.SCALED

    def take_foreign(self, scaler: LossScaler, grad_scale: Tensor | None = None) -> Pending:
        """Gradients came without :meth:`enter`; take them as made with ``scaler``'s present scale.

        Args:
            grad_scale: What they are divided by, where a GradScaler did not.
        """
        if self.stage is Stage.READY and self.gradients.summing:
            self.gradients.rest(None)  # zeros of cleared sums: nothing is added to them
        pending = Pending.capture(scaler)
        pending.foreign = True
        if grad_scale is not None:
            pending.inv_scale = (1.0 / grad_scale.to(pending.scale.device)).reshape(())
        self.pending, self.stage = pending, Stage.SCALED
        self.gradients.own_are_scaled, self.gradients.made = self.gradients.pairs.has_own, False
        return pending

    # -- settling ----------------------------------------------------------------------------------------------------

    def settle(self, write: bool, norm_type: float | None = None, of: set[int] | None = None) -> Verdict | None:
        """The verdict on the gradients as they are now; None where no backward left anything. No host sync.

        Where masters are spread over ranks it costs one message, with the norm or without. FP32 sums that were made
        under DDP's ``no_sync`` are averaged over the ranks.

        Args:
            write: make FP32 gradients of all; else a look is enough.
            norm_type: p of the norm that is wanted too.
            of: ids of the model's parameters whose norm it is; None: of all.

        Raises:
            RuntimeError: a backward was interrupted; or gradients were written that were read already.
        """
        if self.interrupted:
            self.check_complete()
        if self.stage is Stage.READY or self.pending is None:
            return None
        if not self.gradients.are_as_seen():
            if self.ranks.alone and not self.gradients.any_there():
                self.forget()
                return None
            self._check_moved()
        if self.stage is Stage.SCALED:
            self._bring(self.pending, write)
        return self._verdict(norm_type, of)

    def hand_over(self, scaler: LossScaler, inv_scale: Tensor | None = None) -> Tensor | None:
        """Gradients came without :meth:`enter`: make FP32 ones for a GradScaler, which the model's parameters share.

        Args:
            inv_scale: float32, 0-dim: what they are multiplied by. None: they stay scaled, and are judged later, as the
                GradScaler is about to write them.

        Returns:
            float32, 0-dim: 1.0 where one is not finite, else 0.0, in memory that the next pass overwrites; None where
            nothing was found yet. No host sync.
        """
        pending = self.take_foreign(scaler)
        self.gradients.bring(pending.inv_scale if inv_scale is None else inv_scale, write=True, hands_over=True)
        if inv_scale is not None:
            self.stage = Stage.TAKEN
            return self._take_verdict(pending)
        if scaler.follows_norms:  # now, as who reads them may clip them
            self._take_norm(scaler)
        return None

    def update(self) -> None:
        """Make FP32 gradients anew of what is in the model now, a clip undone; what was edited there counts."""
        self.check_complete()
        if self.stage is Stage.READY or self.pending is None:
            return
        if self.gradients.summing and self.stage is not Stage.SCALED:
            return
        shares = self._are_shared()
        self.gradients.renew()
        self._edited = []  # no edit is left that a further backward could lose
        self._bring(self.pending, write=True, hands_over=shares)

    def assign(self, model: Tensor) -> None:
        """The user gives a parameter's master a gradient while none wait for a step."""
        self._assigned.add(id(model))

    def read(self, model: Tensor) -> None:
        """Somebody reads the gradient of a parameter's master: make all of them true. What that ends is nothing."""
        if self.interrupted:
            return
        if self.gradients.made:
            if self.pending is not None and not (self.pending.foreign and self.gradients.shared.handed is not None):
                self.gradients.drop_gone(model)
        elif self.stage is Stage.READY and self._are_zeros:
            self.gradients.bring(torch.ones((), dtype=torch.float32, device=self.device), write=True)
        elif self.stage is Stage.READY:
            self.gradients.read_late()
            if self.left_over is not None and id(model) not in self._assigned:
                self.gradients.forget_used(model, self.left_over)
        elif self.stage is Stage.LOOKED:
            self.gradients.drop_gone(model)
            self.gradients.write()
            self.stage = Stage.TAKEN
        elif self.pending is not None and not self.waits():
            if self.gradients.summing:
                self._sum_up(self.pending)
                self.stage = Stage.TAKEN
            else:
                self.gradients.bring(self.pending.inv_scale, write=True)
                if self.pending.scaler.follows_norms:  # now, as who reads them may clip them
                    self._take_norm(self.pending.scaler)

    def _bring(self, pending: Pending, write: bool, hands_over: bool = False) -> None:
        if self.replicas.local and self.waits():
            raise RuntimeError(
                "the gradients were made under DDP's no_sync and are this rank's own. Run the last backward of a step "
                'outside of no_sync, or use grad_accumulation="fp32", which averages what is left.'
            )
        if self.gradients.summing:
            self._sum_up(pending)
        else:
            if not self.gradients.made:  # else somebody has read them since
                sight = self.gradients.sight  # that nothing has moved was just seen
                seen = None if sight is None else sight.grads
                self.gradients.bring(pending.inv_scale, write, seen, hands_over)
            elif pending.foreign:
                self.gradients.judge()  # torch's GradScaler writes gradients behind their version counters
            self._take_verdict(pending)
        self.stage = Stage.TAKEN if self.gradients.made else Stage.LOOKED

    def _are_shared(self) -> bool:
        """Whether a GradScaler was handed the gradients that wait for a step, and model and masters hold them still."""
        foreign = self.pending is not None and self.pending.foreign
        return foreign and self.gradients.made and self.gradients.shared.hold()

    def _check_moved(self) -> None:
        """Take in what became of gradients since they were brought up to date.

        Raises:
            RuntimeError: 16-bit ones were written where that can't count any more.
        """
        gradients, pairs = self.gradients, self.gradients.pairs
        unread = self.stage is Stage.SCALED
        foreign = self.pending is not None and self.pending.foreign
        if self._are_shared():
            self.stage = Stage.SCALED  # whoever wrote them, as a GradScaler does: they are judged when they are brought
            return
        moved, edited = gradients.moved(), gradients.edited() if gradients.made else []
        if not (moved or edited):
            return
        self._edited += [pairs.all[i].name for i in edited]
        grads = gradients.of_model()
        own = [i for i in moved if pairs.are_own[i]]
        others = [i for i in moved if not pairs.are_own[i]]
        written = [i for i in others if grads[i] is not None]
        gone = [i for i in others if grads[i] is None]
        if written and not self._writes_count(unread or gradients.summing):
            written = [i for i in written if not gradients.was_carried(i)]
            self._refuse_writes([pairs.all[i].name for i in written], unread or gradients.summing)
        if unread:
            if others and not edited:
                gradients.renew()  # to be made again, of what is there now
            elif gradients.made:
                if gone and not gradients.summing:
                    gradients.drop(gone)
                gradients.judge()
            return
        if gradients.summing:
            if written and not foreign:
                self.stage = Stage.SCALED
        elif gone:
            gradients.drop(gone)
        if own or edited:
            gradients.judge()
        if foreign or not written:
            gradients.see()
        if self.pending is not None:
            before = self._verdicts.copy()
            self._take_verdict(self.pending)
            if edited or own:
                self._take_edits(self.pending, before)

    def _writes_count(self, unread: bool) -> bool:
        """Whether 16-bit gradients are the user's still."""
        return unread and (not self._arrived or (self.pending is not None and float(self.pending.scale) == 1.0))

    def _refuse_writes(self, names: list[str], unread: bool) -> None:
        if not names:
            return
        words = "backward(loss) had made them" if unread else "they were looked at"
        raise RuntimeError(
            f"the model's gradients were written after {words}: {describe(names)}. To edit them before they are used, "
            "call backward(loss, update_master_grads=False), edit, then update_master_grads(). To clip, call "
            "clip_master_grads(max_norm) in place of clip_grad_norm_(model.parameters()). To accumulate, call "
            "backward(loss) of this optimizer each time. To give a step up, call zero_grad() of this optimizer."
        )

    # -- FP32 sums ---------------------------------------------------------------------------------------------------

    def _start_summing(self) -> None:
        if self.gradients.summing:
            return
        if not (self.replicas.are_told or self.gradients.pairs.has_pieces):  # FSDP2 shows gradients that are reduced
            _refuse_ranks()
        self.gradients.start_summing()
        for key, (scaler, found) in self._verdicts.items():  # the kernel's own buffer, which the next pass overwrites
            self._verdicts[key] = (scaler, found.clone())

    def _sum_up(self, pending: Pending) -> None:
        """Add the gradients of one scale to the sums."""
        if self.replicas.local and self.gradients.pairs.elsewhere:
            raise RuntimeError(
                "FP32 sums under DDP's no_sync need every master on every rank; ZeroRedundancyOptimizer spreads them. "
                'Use grad_accumulation="model", or leave no_sync.'
            )
        if not self.gradients.summing:
            self._start_summing()
        if self._unreduced and not self.replicas.local:
            self._reduce_sums()
        self.gradients.sum_up(pending.inv_scale, self.replicas.keeps)
        self._take_verdict(pending)
        if self.replicas.local:  # other ranks hear of it when the sums are averaged
            self._unreduced.add(id(pending.scaler))

    def _reduce_sums(self) -> None:
        """Average over the ranks what was summed under ``no_sync``."""
        if self._unreduced:
            keys = [key for key in self._verdicts if key in self._unreduced]  # in one order on all ranks
            verdicts = self.replicas.reduce(self.gradients, [self._verdicts[key][1] for key in keys])
            for key, found in zip(keys, verdicts, strict=True):
                scaler, earlier = self._verdicts[key]
                self._verdicts[key] = (scaler, torch.maximum(earlier, found.to(earlier.device)))
                if scaler.follows_norms:
                    self._take_norm(scaler)
            self._unreduced = set()

    # -- what was found ----------------------------------------------------------------------------------------------

    def _take_verdict(self, pending: Pending) -> Tensor:
        found = self.gradients.found_inf(self.device)
        key = id(pending.scaler)
        if self.gradients.summing:
            earlier = self._verdicts.get(key)
            found = found.clone() if earlier is None else torch.maximum(earlier[1], found)
        self._verdicts[key] = (pending.scaler, found)
        self._agreed = False
        if pending.scaler.follows_norms and not self.replicas.local:
            self._take_norm(pending.scaler)
        return found

    def _take_edits(self, pending: Pending, before: dict[int, tuple[LossScaler, Tensor]]) -> None:
        """What is stepped is what was found now. It counts for those that had found something; else for the last."""
        found = self.gradients.found_inf(self.device).clone()
        if len(self._verdicts) > 1 and before:
            nobody = 1.0 - torch.stack([one for _, one in before.values()]).amax()
            had = {key: one for key, (_, one) in before.items()}
            had[id(pending.scaler)] = torch.maximum(nobody, had.get(id(pending.scaler), nobody))
            self._verdicts = {key: (scaler, found * had[key]) for key, (scaler, _) in self._verdicts.items()}
        else:
            self._verdicts = {key: (scaler, found) for key, (scaler, _) in self._verdicts.items()}

    def _take_norm(self, scaler: LossScaler) -> None:
        """For a scaler that follows norms: that of the gradients as the last pass has found them."""
        norm, earlier = self.gradients.largest_norm(self.device), self._norms.get(id(scaler))
        self._norms[id(scaler)] = norm if earlier is None else torch.maximum(earlier, norm)

    def _tell_norms(self) -> None:
        """Scalers hear of norms: where masters are spread over ranks, by one message. No host sync."""
        norms = torch.stack(list(self._norms.values()))
        if not self.ranks.alone:
            norms = self.ranks.largest(norms)
        of = {id(scaler): scaler for scaler, _ in self._verdicts.values()}
        for key, norm in zip(self._norms, norms.unbind(), strict=True):
            of[key].see(norm)
        self._norms = {}

    def blame(self, scaler: LossScaler, found: Tensor) -> None:
        """Count ``found`` (float32, 0-dim) into what ``scaler``'s backwards gave: it was found in another optimizer."""
        earlier = self._verdicts.get(id(scaler))
        found = found.to(self.device)
        self._verdicts[id(scaler)] = (scaler, found if earlier is None else torch.maximum(earlier[1], found))

    def scalers(self) -> list[tuple[LossScaler, Tensor]]:
        """Each scaler that took part so far, with what its own backwards gave on this rank."""
        return list(self._verdicts.values())

    def verdict(self) -> Verdict | None:
        """The last verdict on gradients of the coming step; None where nobody has looked. No look, no host sync."""
        return self._verdict(None) if self._verdicts else None

    def _verdict(self, norm_type: float | None, of: set[int] | None = None) -> Verdict:
        norm = None
        if self._unreduced:
            self._reduce_sums()
        if not self.ranks.alone:
            norm = self._agree(norm_type, of)
        elif norm_type is not None:
            norm = self.gradients.norm(norm_type, self.device, of)
        if self._norms:
            self._tell_norms()
        each = list(self._verdicts.values())
        found = each[0][1] if len(each) == 1 else torch.stack([one for _, one in each]).amax()
        return Verdict(found, each, norm)

    def _agree(self, norm_type: float | None, of: set[int] | None) -> Tensor | None:
        """One message for verdicts and norm, at the first of clipping and stepping; returns the norm."""
        if self._agreed and norm_type is None:
            return None
        power = None
        if norm_type is not None:
            counted = self.ranks.counted
            power = self.gradients.power_sum(
                norm_type, self.device, lambda param: (of is None or id(param) in of) and counted(param)
            )
        found, norm = self.ranks.agree([verdict for _, verdict in self._verdicts.values()], norm_type, power)
        for (key, (scaler, _)), verdict in zip(list(self._verdicts.items()), found, strict=True):
            self._verdicts[key] = (scaler, verdict)
        self._agreed = True
        return norm
