"""Gradients: from what autograd left in the model to what the optimizer steps.

A 16-bit gradient waits where it is. It is looked at (flags, norm) when somebody needs to know, and an FP32 one is made
of it when somebody needs it: the wrapped optimizer's step, or whoever reads ``.grad`` of its master. A clip is a factor
until then. Gradients of parameters that are their own masters are unscaled in place, once a backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from .. import kernels
from ..kernels import counters
from ..kernels.native import reading
from .device_gradients import DeviceGradients, ToStep
from .masters import Masters
from .pairs import DeviceGroup, Pairs
from .shared_gradients import SharedGradients
from .sights import GRAD, FadedSight, Sight, drop_grads, store, stored
from .sweep import total_norm, vector_norm


class Gradients:
    """The gradients of all pairs, device by device.

    Attributes:
        made: whether FP32 gradients are in the masters' ``.grad``: then these are what is stepped.
        own_are_scaled: whether a backward has added to gradients of parameters that are their own masters, and they
            were not unscaled since.
        summing: whether the next ones are added to FP32 sums.
        sight: the model's gradients when they were last brought up to date.
        shared: which of them a GradScaler was handed.
        stats: by device: where the passes write.
    """

    def __init__(self, pairs: Pairs, masters: Masters, shared: SharedGradients) -> None:
        self.pairs = pairs
        self.masters = masters
        self.shared = shared
        self.made = False
        self.own_are_scaled = False
        self.summing = False
        self.sight: Sight | None = None
        self._made_sight: Sight | None = None
        self._measured = False
        self._clipped = False
        self._late: FadedSight | None = None
        self._each: list[DeviceGradients] = []
        self._apart_positions: list[int] = []
        self.grow()

    def grow(self) -> None:
        """Parameters or masters came. What is known of the gradients of others stays so."""
        before, self._each = self._each, [DeviceGradients(g, self.pairs, self.masters) for g in self.pairs.devices]
        self._of = {id(each.group): each for each in self._each}
        self.stats = [each.sweep.stats for each in self._each]
        self._flags = [stats.nonfinite for stats in self.stats]
        for each in self._each:
            for old in before:
                each.take_over(old)
        apart, self._apart_positions = self._apart_positions, [i for i, o in enumerate(self.pairs.are_own) if not o]
        self._apart = [self.pairs.masters[i] for i in self._apart_positions]
        if self.sight is not None:
            self.sight = self.sight.among(self.of_model(), range(len(self.sight.grads)))
        if self._made_sight is not None:
            places = {position: place for place, position in enumerate(self._apart_positions)}
            self._made_sight = self._made_sight.among(stored(self._apart), [places[position] for position in apart])

    # -- what is there -----------------------------------------------------------------------------------------------

    def of_model(self) -> list[Tensor | None]:
        """The model's gradients, of all pairs."""
        return counters.gradients(self.pairs.models)

    def any_there(self) -> bool:
        """Whether a parameter holds a gradient, or a sum."""
        for each in self._each if self.summing else ():
            if each.summed:
                return True
        return counters.have_gradients(self.pairs.models) or counters.have_gradients(self.pairs.elsewhere)

    def tensors(self) -> list[Tensor]:
        """Every gradient that is there, the masters' too, and memory that is kept for them."""
        found = [*self.of_model(), *stored(self.pairs.masters), *stored(self.pairs.elsewhere)]
        for each in self._each:
            found += each.kept()
        return [tensor for tensor in found if tensor is not None]

    def see(self) -> Sight:
        """Remember the model's gradients as they are now."""
        self.sight = Sight(*counters.see(self.pairs.models))
        return self.sight

    def are_as_seen(self) -> bool:
        """Whether there are gradients, and all are the very ones that were there when they were last looked at.

        These are the model's, and the masters' where these are ``made``. False where it is not known at once.
        """
        sight, made = self.sight, self._made_sight
        if sight is None or (sight.is_empty and not (self.summing and self.any_there())):
            return False
        return sight.holds(self.pairs.models) and (not self.made or made is None or made.holds(self._apart))

    def moved(self) -> list[int]:
        """Positions of pairs whose gradient in the model was replaced, removed or written since."""
        if self.sight is None or self.sight.holds(self.pairs.models):
            return []
        return self.sight.moved(self.of_model())

    def was_carried(self, position: int) -> bool:
        """Whether a moved gradient holds the same bits as before: DDP rearranges its buckets once. Syncs."""
        now = self.pairs.models[position].grad
        return now is not None and self.sight is not None and self.sight.was_carried(position, now)

    def edited(self) -> list[int]:
        """Positions whose master gradient was written or replaced since it was ``made``. Own ones are the model's."""
        made = self._made_sight
        if made is None or made.holds(self._apart):
            return []
        return [self._apart_positions[i] for i in made.moved(stored(self._apart))]

    # -- before and after a backward ---------------------------------------------------------------------------------

    def set_aside(self, keep: bool = False) -> None:
        """Take true gradients from parameters that are their own masters, to be added back when the next are true.

        Otherwise autograd would add scaled gradients to unscaled ones. With ``keep``, zeros stay in place of None.
        """
        for each in () if self.own_are_scaled else self._each:
            each.set_aside(keep)
        self.own_are_scaled = True

    def unscale_own(self, inv_scale: Tensor) -> None:
        """Make gradients of parameters that are their own masters true, in place, and check and measure them.

        Args:
            inv_scale: float32, 0-dim: 1 / the scale of the backward that made them.
        """
        was_scaled, self.own_are_scaled = self.own_are_scaled, False
        if not was_scaled:
            return
        self.sight = None
        with torch.no_grad():
            for each in self._each:
                each.unscale_own(inv_scale.to(each.group.device), self.summing)

    # -- the passes --------------------------------------------------------------------------------------------------

    def bring(
        self, inv_scale: Tensor, write: bool, seen: list[Tensor | None] | None = None, hands_over: bool = False
    ) -> None:
        """Look at the model's gradients as they are now. No host sync.

        Args:
            inv_scale: float32, 0-dim: 1 / the scale of the backward that made them.
            write: make FP32 ones of all; else of those only that can't wait.
            seen: the 16-bit ones, where they were just read.
            hands_over: a GradScaler is handed what is written, and the model's parameters share it.
        """
        if self.summing:
            self.sum_up(inv_scale)
            return
        if self.pairs.has_own and self.own_are_scaled:
            self.unscale_own(inv_scale)
        self.made, self._clipped, self._measured = write, False, True
        self._late = None
        try:
            with torch.no_grad(), reading(once=True):
                for each in self._each:
                    each.look(inv_scale.to(each.group.device), write, seen)
        except (TypeError, ValueError, RuntimeError):
            self.pairs.verify()  # if a parameter was changed, this says which
            raise
        for each in self._each:
            if each.waiting is not None:
                break
        else:
            self.made = True
            self.forget_gone()
        if hands_over:
            self.shared.share()
        elif self.shared.positions is not None:
            self.shared.part()
        self._note_made(anew=hands_over)
        if hands_over:
            self.shared.handed = self.sight

    def forget_gone(self) -> None:
        """Masters have no gradient where the last pass found none in the model: what is there is of an earlier step."""
        for each in self._each:
            if len(each.live) < len(each.models):
                each.forget_gone()

    def _note_made(self, anew: bool = True) -> None:
        """Remember gradients as they are now; with ``anew`` False the model's are as they were seen, if they were."""
        if anew or self.sight is None:
            self.see()
        self._made_sight = Sight(*counters.see(self._apart)) if self.made and self._apart else None

    def write(self) -> None:
        """Make FP32 gradients of those that wait, in the bits that a one-pass step would use. No host sync."""
        if self.made:
            return
        with torch.no_grad():
            for each in self._each:
                each.write()
        self._clipped = False
        self.made = True
        self.forget_gone()
        self._note_made(anew=False)

    def judge(self) -> None:
        """Look at true gradients as they are now: somebody edited them. No host sync."""
        with torch.no_grad():
            for each in self._each:
                each.judge(self.made)
        self._measured = not self._clipped
        self._note_made()

    def judge_apart(self, values: list[Tensor | None], device: torch.device) -> Tensor:
        """float32, 0-dim, on ``device``: 1.0 where one of ``values``, true gradients by pair, is not finite.

        :meth:`flags` are theirs until the next pass. No host sync.
        """
        whole = [v.coalesce() if v is not None and v.layout is torch.sparse_coo else v for v in values]
        with torch.no_grad():
            for each in self._each:
                each.judge_apart([whole[position] for position in each.group.positions])
        return self.found_inf(device).clone()

    def drop(self, positions: list[int]) -> None:
        """Gradients that somebody has set to None are not part of the step."""
        for position in positions:
            pair = self.pairs.all[position]
            self._of[id(pair.device)].drop(pair.row)
        if self.sight is not None:
            self._note_made()

    def drop_gone(self, model: Tensor) -> None:
        """If a parameter's gradient is None and was not when it was seen, its master's goes too, which is no edit.

        That the model's was :meth:`moved` is still to be found.
        """
        position, sight = self.pairs.places[id(model)], self.sight
        if sight is None or self.summing or model.grad is not None or sight.grads[position] is None:
            return
        if self._made_sight is not None:
            self._made_sight.forget(self._apart_positions.index(position))
        pair = self.pairs.all[position]
        self._of[id(pair.device)].drop(pair.row)

    def rescale(self, factor: Tensor) -> None:
        """Multiply 16-bit gradients that are left from an earlier step by ``factor`` (float32, 0-dim). No host sync."""
        with torch.no_grad():
            for each in self._each:
                each.rescale(factor.to(each.group.device))

    # -- FP32 sums ---------------------------------------------------------------------------------------------------

    def start_summing(self) -> None:
        """From now on :meth:`sum_up` adds to the master gradients. What they hold counts; 16-bit ones are freed."""
        if self.summing:
            return
        for each in self._each:
            if each.waiting is not None:
                self.write()
        for each in self._each:
            each.start_summing(self.made)
        self.summing = True

    def sum_up(self, inv_scale: Tensor, keep: bool = False) -> None:
        """Add the model's gradients to FP32 sums, and free the 16-bit ones. No host sync.

        Args:
            keep: leave zeros where they would be freed.
        """
        for each in self._each:  # what earlier ones gave is in ``flags``, and is not this one's
            each.sweep.forget_flags()
        if self.pairs.has_own:
            self.unscale_own(inv_scale)
        with torch.no_grad():
            for each in self._each:
                each.sum_up(inv_scale.to(each.group.device))
        for each in self._each:
            drop_grads(each.copied_models, keep)
        if self.pairs.elsewhere:
            drop_grads(self.pairs.elsewhere, keep)
        self._measured, self._clipped = True, False
        self.made = True
        self.forget_gone()
        self._note_made()

    def sums(self) -> Iterator[tuple[DeviceGroup, list[Tensor | None]]]:
        """By device: the FP32 sums so far, by row, without what a backward has just left in own parameters.

        Raises:
            TypeError: a sum is sparse.
        """
        for each in self._each:
            yield each.group, each.sums(self.own_are_scaled)

    def put_sum(self, group: DeviceGroup, row: int, value: Tensor) -> Tensor:
        """Overwrite the sum of a row, or begin one; returns the tensor that holds it."""
        return self._of[id(group)].put_sum(row, value, self.own_are_scaled)

    def averaged(self, group: DeviceGroup, stats: kernels.GradStats) -> None:
        """The sums of a device are averages over ranks now, in which a pass has found ``stats``."""
        self._of[id(group)].averaged(stats)
        self._note_made()

    # -- what was found ----------------------------------------------------------------------------------------------

    def found_inf(self, device: torch.device) -> Tensor:
        """float32, 0-dim: 1.0 where the last pass met a non-finite gradient, else 0.0. Overwritten by the next."""
        if len(self._each) == 1:
            return self._each[0].sweep.stats.found_inf.to(device)
        found = [each.sweep.stats.found_inf.to(device) for each in self._each]
        return torch.stack(found).amax() if found else torch.zeros((), dtype=torch.float32, device=device)

    def flags(self) -> list[Tensor]:
        """By device: int32 bits ``kernels.INF | kernels.NAN`` of each row, which the next pass overwrites. No sync."""
        if not self.summing:
            return self._flags
        return [each.sweep.stats.nonfinite if each.flags is None else each.flags for each in self._each]

    def to_step(self, group: DeviceGroup) -> ToStep:
        """A device's gradients as a step finds them."""
        each = self._of[id(group)]
        if each.all_wait():
            return ToStep(each.waiting, None, each.factors)
        true = each.true_ones(self.made)
        return ToStep(each.waiting, true, each.factors, each.has_sparse)

    # -- norm and clip -----------------------------------------------------------------------------------------------

    def norm(self, norm_type: float, device: torch.device, of: set[int] | None = None) -> Tensor:
        """float64, 0-dim, on ``device``: the norm over all gradients. No host sync.

        The 2-norm was summed by the pass that looked; it is read again only after a clip.

        Args:
            of: ids of the model's parameters whose gradients are meant; None: all.
        """
        if of is not None:
            power = self.power_sum(norm_type, device, lambda param: id(param) in of)
            return power if norm_type == float("inf") else power.pow(1.0 / norm_type)
        if norm_type == 2.0 and self._measured:
            if len(self._each) == 1:
                return self._each[0].sweep.stats.norm.to(device)
            return total_norm([each.sweep.stats.norm for each in self._each], norm_type, device)
        self.write()
        with torch.no_grad():
            if norm_type == 2.0:
                parts = [each.sweep.norm(each.true_ones(self.made)) for each in self._each]
            else:
                values = [value for each in self._each for value in each.true_ones(self.made)]
                parts = [vector_norm(v, norm_type) for v in values if v is not None and v.numel()]
            return total_norm(parts, norm_type, device)

    def largest_norm(self, device: torch.device) -> Tensor:
        """float32, 0-dim, on ``device``: the largest of the norms of single tensors at the last pass. No host sync."""
        norms = [each.sweep.largest_norm().to(device) for each in self._each]
        return torch.stack(norms).amax() if norms else torch.zeros((), dtype=torch.float32, device=device)

    def power_sum(self, norm_type: float, device: torch.device, counted: Callable[[Tensor], bool]) -> Tensor:
        """float64, 0-dim: the sum of |g|**p over the elements that this rank counts (p = inf: the largest |g|)."""
        total = torch.zeros((), dtype=torch.float64, device=device)
        was_measured = norm_type == 2.0 and self._measured
        if not was_measured:
            self.write()
        with torch.no_grad():
            for each in self._each:
                if was_measured:
                    part = each.measured_power_sum(counted).to(total)
                else:
                    part = each.power_sum(norm_type, counted, self.made).to(total)
                total = torch.maximum(total, part) if norm_type == float("inf") else total + part
        return total

    def clip(self, factor: Tensor, of: set[int] | None = None) -> None:
        """Multiply all gradients by ``factor`` (float32, 0-dim): those that wait when they are used. No host sync.

        A second factor would be a third rounding, so gradients that wait are made before one. So they are where the
        factor is not for all.

        Args:
            of: ids of the model's parameters whose gradients are meant; None: all.
        """
        if self._clipped or of is not None:
            self.write()
        with torch.no_grad():
            for each in self._each:
                each.clip(factor.to(each.group.device), self.made, of)
        self._clipped, self._measured = not self.made, False
        if self.made or self.pairs.has_own:
            self._note_made()

    def clip_values(self, largest: float, found_inf: Tensor, of: set[int] | None = None) -> None:
        """Bring every element of all gradients to at most ``largest`` in size. No host sync.

        Args:
            largest: not negative.
            found_inf: float32, 0-dim. Where it is 1.0 gradients stay, or an inf would become a number.
            of: ids of the model's parameters whose gradients are meant; None: all.
        """
        self.write()
        bound = torch.full_like(found_inf, largest, dtype=torch.float64).masked_fill_(found_inf > 0, float("inf"))
        with torch.no_grad():
            for value in [value for each in self._each for value in each.meant(self.made, of)]:
                if value is not None:
                    mine = bound.to(value.device, value.dtype)
                    value.clamp_(-mine, mine)
        self._measured = False
        self._note_made()

    # -- reading late, clearing --------------------------------------------------------------------------------------

    def rest(self, used: FadedSight | None) -> None:
        """A step is over, and what was found is forgotten; what is in ``.grad`` stays.

        Args:
            used: the model's gradients as it has used them: while they stay so, what waited can still be read.
        """
        self._late = None if self.made else used
        frees = not (self.masters.keeps_gradients and self.made)
        for each in self._each:
            each.rest(frees, self.made)
        self.made = self._clipped = self._measured = self.summing = False
        self.sight = self._made_sight = None

    def read_late(self) -> None:
        """``.grad`` of a master is read after the step that used it."""
        used, self._late = self._late, None
        if used is None:
            return
        with torch.no_grad():
            for each in self._each:
                each.read_late(used)

    def forget_used(self, model: Tensor, used: FadedSight) -> None:
        """A parameter's master has no gradient where the model's, which a step has ``used``, is gone or was written."""
        position, grad = self.pairs.places[id(model)], model.grad
        if used.had(position) and (grad is None or not used.holds(position, grad)):
            store(self.pairs.masters[position], None)

    def clear(self, set_to_none: bool, sums_stay: bool = False) -> None:
        """Clear the model's and the masters' gradients.

        Args:
            sums_stay: zeros of master gradients are sums, to be added to.
        """
        self._late, self.sight, self._made_sight = None, None, None
        for tensor in [*self.pairs.models, *self.pairs.elsewhere, *self.pairs.masters]:
            if set_to_none:
                GRAD.__set__(tensor, None)
            elif (grad := GRAD.__get__(tensor)) is not None:
                if grad.requires_grad:
                    grad = grad.detach()
                    GRAD.__set__(tensor, grad)
                grad.zero_()
        if set_to_none:
            for each in self._each:
                each.clear(frees=not self.masters.keeps_gradients)
            self.summing = False
        else:
            self.summing = any([each.clear_to_zeros(sums_stay) for each in self._each])  # noqa: C419
        self.own_are_scaled = False
        self.made = self._clipped = self._measured = False
