"""Gradients: from what autograd left in the model to what the optimizer steps.

A 16-bit gradient waits where it is. It is looked at (flags, norm) when somebody needs to know, and an FP32 one is made
of it when somebody needs it: the wrapped optimizer's step, or whoever reads ``.grad`` of its master. A clip is a factor
until then. Gradients of parameters that are their own masters are unscaled in place, once a backward.
"""

from __future__ import annotations

import itertools
import operator
import weakref
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from .. import kernels
from ..kernels import counters
from ..kernels.counters import GRAD, count_there, store
from ..kernels.native import read_once
from .dtensors import different_bits, local, version
from .masters import Masters
from .pairs import HALF_DTYPES, DeviceGroup, Pairs
from .sweep import DeviceGradients, ToStep, as_master_grad, drop_gradients, total_norm, vector_norm

# -- what was seen -----------------------------------------------------------------------------------------------------


class Sight:
    """Gradients as they were at one moment: which tensors, in which versions.

    Args:
        grads: of all pairs, or of whatever list is looked at again later.
        versions: of these, where they were just read.

    Attributes:
        is_empty: whether there was none.
        versions: their counters.
    """

    def __init__(self, grads: list[Tensor | None], versions: list[int] | None = None) -> None:
        self.grads = grads
        self.is_empty = count_there(grads) == 0
        self.versions = versions_of(grads) if versions is None else versions

    def moved(self, now: list[Tensor | None]) -> list[int]:
        """Positions whose gradient is another one now, or none, or was written as far as version counters show."""
        versions = versions_of(now)
        if versions == self.versions and all(map(operator.is_, now, self.grads)):
            return []
        then = zip(self.grads, self.versions, strict=True)
        return [i for i, ((a, v), b, w) in enumerate(zip(then, now, versions, strict=True)) if a is not b or v != w]

    def forget(self, position: int) -> None:
        """There was no gradient there."""
        self.grads[position], self.versions[position] = None, -1
        self.is_empty = count_there(self.grads) == 0

    def holds(self, tensors: list[Tensor]) -> bool:
        """Whether these hold the very gradients that were seen, unwritten. False where that is not known at once."""
        return counters.hold_gradients(tensors, self.grads, self.versions)

    def among(self, now: list[Tensor | None], places: Sequence[int]) -> Sight:
        """What was seen is at ``places`` in a longer list; others there are seen as they are ``now``."""
        longer = Sight(now)
        for place, grad, counted in zip(places, self.grads, self.versions, strict=True):
            longer.grads[place], longer.versions[place] = grad, counted
        longer.is_empty = count_there(longer.grads) == 0
        return longer

    def was_carried(self, position: int, now: Tensor) -> bool:
        """Whether ``now`` has the bits of what was seen there, in other memory. Syncs."""
        then = self.grads[position]
        if then is None or then is now or self.versions[position] != version(then):
            return False
        a, b = local(then), local(now)
        alike = a.layout is b.layout is torch.strided and a.dtype == b.dtype and a.shape == b.shape
        return alike and a.dtype in HALF_DTYPES and not bool(different_bits(a, b).any())


class FadedSight:
    """What was seen, as a rule keeping no gradient alive.

    Args:
        sight: what was seen.
        keeps: keep it alive. A thousand weak references are a thousand objects for Python's garbage collector to run
            after.
    """

    def __init__(self, sight: Sight, keeps: bool = False) -> None:
        self._kept = sight.grads if keeps else None
        self._refs: list[Callable[[], Tensor | None]] = []
        self._versions = sight.versions
        try:
            self._refs = [] if keeps else list(map(weakref.ref, sight.grads))
        except TypeError:  # there is no weak reference to None
            self._refs = [_nothing if grad is None else weakref.ref(grad) for grad in sight.grads]

    def holds(self, position: int, grad: Tensor) -> bool:
        """Whether ``grad`` is what was seen there, unwritten since."""
        if position >= len(self._versions):
            return False
        then = self._refs[position]() if self._kept is None else self._kept[position]
        return then is grad and self._versions[position] == version(grad)

    def others(self, grads: list[Tensor | None], versions: list[int] | None) -> list[int]:
        """Positions of gradients that are not what was seen there, or were written since.

        Args:
            grads, versions: as they are now; as :func:`fp16opt.kernels.counters.see` gave them.
        """
        kept = map(_CALLED, self._refs) if self._kept is None else self._kept
        then = itertools.chain(zip(kept, self._versions, strict=True), itertools.repeat((None, -1)))
        now = zip(grads, versions_of(grads) if versions is None else versions, then, strict=False)
        found = []
        for position, (grad, counted, (seen, was)) in enumerate(now):
            if grad is not None and not (grad is seen and counted == was):
                found.append(position)
        return found

    def had(self, position: int) -> bool:
        """Whether there was a gradient."""
        return position < len(self._versions) and self._versions[position] != -1


_CALLED = operator.methodcaller("__call__")


def _nothing() -> None:
    """In place of a weak reference to a gradient that is not there."""


NOTHING_LEFT = FadedSight(Sight([], []))
"""Where no step has left a gradient."""


def versions_of(grads: list[Tensor | None]) -> list[int]:
    """The :func:`version` of each; -1 where there is no gradient."""
    try:
        found = counters.versions(grads)
    except RuntimeError:  # some were made in inference mode
        found = None
    return [-1 if g is None else version(g) for g in grads] if found is None else found


# -- what a GradScaler was handed --------------------------------------------------------------------------------------


class SharedGradients:
    """Which gradients a GradScaler was handed, and which of them 16-bit parameters share with their masters.

    Attributes:
        handed: the model's gradients as they were then, by pair; None where a step has used them, or there are none.
        shown: whether a GradScaler may have decided on them: ours has unscaled them, or ``param_groups``, where torch's
            finds them, were read since they came.
        counted: these gradients as they were when the skip that they led to was counted, as somebody asked while the
            iteration may go on; else None.
        is_over: whether it is: autograd has added others since.
        positions: pairs whose model and master share one; None: the GradScaler was handed none in FP32. The engine
            writes both; where they differ, the user has given the model another.
    """

    def __init__(self, pairs: Pairs) -> None:
        self.pairs = pairs
        self.handed: Sight | None = None
        self.shown = self.is_over = False
        self.counted: Sight | None = None
        self._watch: torch.utils.hooks.RemovableHandle | None = None
        self.positions: set[int] | None = None

    def share(self) -> None:
        """The model's parameters take the gradients of their masters, where both have one."""
        models, self.positions = self.pairs.models, set[int]()
        held = zip(counters.gradients(models), counters.gradients(self.pairs.masters), self.pairs.are_own, strict=True)
        for position, (grad, made, is_own) in enumerate(held):
            if grad is not None and made is not None and not is_own:
                models[position].grad_dtype = None
                GRAD.__set__(models[position], made)
                self.positions.add(position)

    def assign(self, model: Tensor, grad: Tensor | None) -> None:
        """The gradient of a parameter's master was set: it is the model's too."""
        model.grad_dtype = None
        GRAD.__set__(model, grad)
        self.positions = set[int]() if self.positions is None else self.positions
        self.positions.add(self.pairs.places[id(model)])
        self.handed = Sight(*counters.see(self.pairs.models))

    def hold(self) -> bool:
        """Whether the masters' gradients are the model's, in whatever versions.

        Where they were shared, and the model was given others since, its masters take these.
        """
        pairs = self.pairs
        now, was = counters.gradients(pairs.models), counters.gradients(pairs.masters)
        if all(map(operator.is_, now, was)):
            return True
        given = [i for i, (a, b) in enumerate(zip(now, was, strict=True)) if a is not b]
        if self.positions is None or not all(i in self.positions or was[i] is None for i in given):
            return False
        for position in given:
            pair, grad = pairs.all[position], now[position]
            if grad is not None:
                grad = as_master_grad(grad, pair.master, pair.name)
                pair.model.grad_dtype = None
                self.positions.add(position)
            store(pair.model, grad)
            store(pair.master, grad)
        return True

    def part(self) -> None:
        """Gradients were made that nobody was handed: shared are those that model and masters hold in common still."""
        now, was = counters.gradients(self.pairs.models), counters.gradients(self.pairs.masters)
        self.positions = {i for i in self.positions or () if now[i] is was[i]} or None

    def drop_gone(self) -> None:
        """Where the model's parameter has dropped a shared gradient, its master drops it."""
        for position in self.positions or ():
            if GRAD.__get__(self.pairs.models[position]) is None:
                store(self.pairs.masters[position], None)

    def are_there(self) -> bool:
        """Whether the model holds the very gradients that were handed over."""
        if self.handed is None:
            return False
        now = counters.gradients(self.pairs.models)
        return all(itertools.starmap(operator.is_, itertools.zip_longest(self.handed.grads, now)))

    def are_edited(self) -> bool:
        """Whether the model's gradients are still those of that iteration, some dropped or replaced by the user.

        Some are left then, or others came in FP32 in place of shared ones. Where 16-bit ones came in their place,
        autograd made them, unless what is left was not added to.
        """
        if self.handed is None:
            return False
        now = counters.gradients(self.pairs.models)
        shared = [grad for position in self.positions or () if (grad := now[position]) is not None]
        then = zip(now, self.handed.grads, self.handed.versions, strict=False)
        left = [version(a) == v for a, b, v in then if a is b and a is not None]
        if any(grad.dtype in HALF_DTYPES for grad in shared):
            return any(left)
        return bool(shared or left)

    def as_read(self) -> tuple[list[Tensor | None], list[bool]]:
        """(what was handed over, by pair; whether it is what a GradScaler reads: the model's own, or shared).

        Parameters that came since have None.
        """
        grads = [] if self.handed is None else self.handed.grads
        grads = grads + [None] * (len(self.pairs) - len(grads))
        are_read = list(self.pairs.are_own)
        for position in self.positions or ():
            grad = grads[position]
            are_read[position] = grad is not None and grad.dtype not in HALF_DTYPES
        return grads, are_read

    def withdraw(self, set_to_none: bool) -> None:
        """Gradients were cleared. Those that stay, as zeros, get their parameter's dtype again."""
        for model in () if set_to_none else self.pairs.models:
            grad = GRAD.__get__(model)
            if grad is not None and grad.dtype != model.dtype:
                store(model, torch.zeros_like(grad if grad.is_sparse else model, dtype=model.dtype))
        self.positions = None
        self.forget()

    def count(self) -> None:
        """The skip is counted now. A GradScaler of torch's does not say when the iteration is over; a backward does."""
        grads = [] if self.handed is None else self.handed.grads
        self.counted, mine = Sight(grads), weakref.ref(self)

        def end(_: Tensor) -> None:
            shared = mine()
            if shared is not None:
                shared.is_over = True

        for model, grad in zip(self.pairs.models, grads, strict=False):
            if grad is not None and model.requires_grad:
                self._watch = model.register_post_accumulate_grad_hook(end)  # type: ignore[no-untyped-call]
                break

    def forget(self) -> None:
        """What was handed over is used, or gone."""
        self.handed, self.counted, self.shown, self.is_over = None, None, False, False
        if self._watch is not None:
            self._watch.remove()
            self._watch = None


# -- all of them -------------------------------------------------------------------------------------------------------


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
            self._made_sight = self._made_sight.among(
                counters.gradients(self._apart), [places[position] for position in apart]
            )

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
        found = [*self.of_model(), *counters.gradients(self.pairs.masters), *counters.gradients(self.pairs.elsewhere)]
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
        held = counters.hold_gradients(self.pairs.models, sight.grads, sight.versions)
        return held and (not self.made or made is None or made.holds(self._apart))

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
        return [self._apart_positions[i] for i in made.moved(counters.gradients(self._apart))]

    # -- before and after a backward ---------------------------------------------------------------------------------

    def renew(self) -> None:
        """Others are about to come, or these are to be taken as they are now: what was found or clipped is undone."""
        self.made, self.sight = False, None
        for each in self._each:
            each.waiting = None

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
            with read_once():
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
        self._measured = self._measured or not self.made
        self.summing = True

    def sum_up(self, inv_scale: Tensor, keep: bool = False) -> None:
        """Add the model's gradients to FP32 sums, and free the 16-bit ones. No host sync.

        Sums that get nothing now are known as well as they were: those that were clipped are to be measured again.

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
            drop_gradients(each.copied_models, keep)
        if self.pairs.elsewhere:
            drop_gradients(self.pairs.elsewhere, keep)
        self._clipped, self.made = False, True
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
                each.read_late(used.holds)

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
        self.made = self._clipped = False
        self._measured = self.summing  # sums of zeros are
