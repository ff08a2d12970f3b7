"""Gradients that are taken one by one as they arrive in backward, and freed: ``gradient_release``.

:class:`Arrivals` stands where :class:`Accumulation` and :class:`Gradients` stand otherwise: it knows the stage and the
scale of the one backward of a step, looks at each gradient, and gives the verdict. What is done with a gradient belongs
to its :class:`Taker`: one steps the parameter there and then (released_step.py), one keeps a code of it (held_step.py).
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from .. import kernels
from ..kernels import counters
from ..kernels.counters import GRAD, store
from ..kernels.reference_steps import Factors
from ..kernels.tables import same_walk
from ..scaling import LossScaler
from .accumulation import Pending, Stage, Verdict
from .pairs import Pair, Pairs
from .ranks import Ranks, Replicas

# -- what goes with it -------------------------------------------------------------------------------------------------


def refuse_ranks(said: str, kind: type[Exception]) -> None:
    """Raise where a process group is there: gradients are taken before DDP's reducer has averaged them."""
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        raise kind(
            f"{said} takes gradients when they arrive, which is before DDP's reducer averages them over the "
            f"{dist.get_world_size()} ranks of the process group: each rank would step by its own. Use "
            "gradient_release=False on several ranks."
        )


# -- one parameter's gradient ------------------------------------------------------------------------------------------


class Place:
    """Where the gradient of one pair arrives.

    Attributes:
        stats: what the look at it found, one row.
        has_come: whether it has, in this step.
    """

    def __init__(self, pair: Pair, position: int) -> None:
        self.pair = pair
        self.position = position
        self.stats = kernels.GradStats.allocate(1, self.pair.master.device)
        self.has_come = False
        self._tables = kernels.PointerTables()

    def look(self, grad: Tensor, inv_scale: Tensor) -> None:
        """Flags and sum of squares of what ``grad * inv_scale`` is in FP32. No host sync."""
        self.stats.touched = True
        kernels.multi_tensor_check([grad], inv_scale, self.stats, tables=self._tables)

    def as_stored(self, grad: Tensor) -> Tensor:
        """``grad`` as kernels take it: of the parameter's dtype and strides, or FP32.

        Raises:
            RuntimeError: It is sparse, or part of a graph.
        """
        model = self.pair.model
        if grad.layout is not torch.strided:
            raise RuntimeError(
                f"parameter {self.pair.name!r}: expected a dense gradient, got {grad.layout}: gradient_release has no "
                "sparse step. Use sparse=False, or gradient_release=False."
            )
        if grad.requires_grad:
            raise RuntimeError(
                f"parameter {self.pair.name!r}: its gradient is part of a graph (create_graph=True), and "
                "gradient_release frees it. Use gradient_release=False."
            )
        dtype = grad.dtype if grad.dtype == model.dtype else torch.float32
        if dtype == grad.dtype and same_walk(grad, model):
            return grad
        return torch.empty_like(model, dtype=dtype, requires_grad=False).copy_(grad)


class Taker(Protocol):
    """What is done with gradients as they arrive.

    Attributes:
        release: the value of ``gradient_release`` that asks for it.
        can_drop: whether gradients that came can be cleared, or have done their work.
    """

    release: bool | str
    can_drop: bool

    def begin(self, scaler: LossScaler) -> None:
        """A backward is about to begin.

        Raises:
            RuntimeError: It can't be served.
        """

    def take(self, place: Place, grad: Tensor, factors: Factors) -> None:
        """A gradient has come and was looked at; after this it is freed."""

    def end(self, told: bool = True) -> None:
        """A backward is over, well or not; without ``told`` it has raised, some time ago."""

    def settle(self, places: Sequence[Place]) -> None:
        """Somebody asks for the verdict on these."""

    def norm(self, norm_type: float, places: Sequence[Place], device: torch.device) -> Tensor:
        """float64, 0-dim: the norm over all that came.

        Raises:
            RuntimeError: Such a norm can't be had.
        """

    def clip(self, factor: Tensor) -> None:
        """Multiply all by ``factor`` (float32, 0-dim) when they are stepped."""

    def drop(self) -> None:
        """Forget what is kept of gradients."""

    def tensors(self) -> list[Tensor]:
        """What is kept of gradients, to be counted."""


# -- all of them -------------------------------------------------------------------------------------------------------


class Arrivals:
    """READY -> SCALED (a loss was scaled; gradients come and are taken) -> READY (step).

    One backward a step, and one gradient a parameter: what was taken can't be added to.

    Args:
        device: where verdicts are kept.

    Attributes:
        losses: Of the present gradients, unscaled, where they are single numbers.
        stats: By device: what was found, row by row.
        made: False: masters have no FP32 gradients to show.
        last: The scale of the last step.
    """

    made = False
    summing = False

    def __init__(self, pairs: Pairs, device: torch.device, taker: Taker) -> None:
        self.pairs = pairs
        self.device = device
        self.taker = taker
        self._said = f"gradient_release={taker.release!r}"
        self.ranks = Ranks()
        self.stage = Stage.READY
        self.pending: Pending | None = None
        self.backwards = 0
        self.interrupted = False
        self._cleared = False  # zero_grad was called, of gradients that have done their work
        self._factors: dict[torch.device, Factors] = {}  # of the present backward
        self._waits_for_end = False  # autograd knows that it is to call us
        self.losses: list[Tensor] = []
        self._replicas = Replicas()
        self.places: list[Place] = []
        self._handles: list[Any] = []
        self._release = weakref.finalize(self, _remove, self._handles)
        self.grow()

    @property
    def replicas(self) -> Replicas:
        """Which ranks share gradients with this one: none."""
        return self._replicas

    @replicas.setter
    def replicas(self, replicas: Replicas) -> None:
        if replicas.reduces:
            raise RuntimeError(
                f"{self._said} takes gradients before DDP's reducer averages them, so it can't "
                "be attached to a DDP module. Use gradient_release=False."
            )
        self._replicas = replicas

    def grow(self) -> None:
        """Parameters or masters came: hooks for all of them."""
        before = {id(place.pair): place for place in self.places}
        self.places = [before.get(id(pair)) or Place(pair, i) for i, pair in enumerate(self.pairs.all)]
        self.stats = [kernels.GradStats.allocate(len(group), group.device) for group in self.pairs.devices]
        _remove(self._handles)
        self._hooked = [pair.model.requires_grad and pair.model.is_leaf for pair in self.pairs.all]
        me = weakref.ref(self)
        for place, is_hooked in zip(self.places, self._hooked, strict=True):
            if is_hooked:
                model: Any = place.pair.model
                self._handles.append(model.register_post_accumulate_grad_hook(_hook(me, place.position)))

    # -- a backward --------------------------------------------------------------------------------------------------

    def enter(self, scaler: LossScaler) -> Pending:
        """The step's backward, with ``scaler``'s present scale, is about to begin.

        One before it that made no gradients here, as that of another optimizer's loss, counts for nothing.

        Raises:
            RuntimeError: There was one already.
        """
        self.check_complete()
        if self._cleared:
            raise RuntimeError(
                f"zero_grad() was called in place of step(): with {self._said} the last backward has stepped "
                "parameters, and clearing gradients does not take that back. Call step() after each backward."
            )
        if self.any_there():
            raise RuntimeError(
                f"a further backward in one step: with {self._said} gradients are taken as they "
                "come, and can't be added up. Call step() after each backward, or use gradient_release=False. If the "
                "one before was of another optimizer's loss, switch requires_grad of these parameters off meanwhile."
            )
        refuse_ranks(self._said, RuntimeError)
        self._check_none()
        if any(pair.model.requires_grad > known for pair, known in zip(self.pairs.all, self._hooked, strict=True)):
            self.grow()  # unfrozen since
        self.taker.begin(scaler)
        self.pending, self.stage, self.losses = Pending.capture(scaler), Stage.SCALED, []
        self._factors = {}
        self.backwards += 1
        return self.pending

    def arrive(self, position: int) -> None:
        """A gradient is complete: look at it, have it taken, free it. Called by autograd."""
        place = self.places[position]
        pending = self.pending
        if self.stage is not Stage.SCALED or pending is None:
            raise RuntimeError(
                f"a gradient of parameter {place.pair.name!r} came that neither opt.backward(loss) nor "
                f"opt.scale_loss(loss) announced. With {self._said} it is used at once, so its "
                "loss scale must be known: call opt.backward(loss) on the optimizer of this parameter. If another "
                "optimizer's loss came through here, switch requires_grad of these parameters off meanwhile."
            )
        if place.has_come:
            raise RuntimeError(
                f"a second gradient of parameter {place.pair.name!r} came in one backward, as reentrant checkpointing "
                f"of shared weights makes them, and {self._said} has taken the first. Use "
                "use_reentrant=False, or gradient_release=False."
            )
        grad = GRAD.__get__(place.pair.model)
        if grad is None:
            return
        if not self._waits_for_end:
            torch.autograd.Variable._execution_engine.queue_callback(_end(weakref.ref(self)))
            self._waits_for_end = True
        with torch.no_grad():
            grad = place.as_stored(grad)
            factors = self._factors_on(grad.device, pending)
            place.look(grad, factors.inv_scale)
            place.has_come = True
            self.taker.take(place, grad, factors)
        store(place.pair.model, None)

    def _factors_on(self, device: torch.device, pending: Pending) -> Factors:
        if device not in self._factors:
            inv_scale = pending.inv_scale.to(device)
            self._factors[device] = Factors(inv_scale, torch.ones_like(inv_scale))
        return self._factors[device]

    def end(self) -> None:
        """A backward is over, whoever called it. By autograd, or where ours raised."""
        self._waits_for_end = False
        with torch.no_grad():
            self.taker.end()

    def arrived(self) -> None:
        """A backward is over: :meth:`end` knows already."""

    def interrupt(self) -> None:
        """A backward raised while gradients were being taken."""
        self.interrupted = True
        self.end()

    def steps_ahead(self) -> int:
        """How many steps parameters have taken in backward that ``step`` has not counted yet: 1 or 0."""
        return int(not self.taker.can_drop and self.any_there())

    def _see_interrupted(self) -> None:
        """A backward that raised is never ended by autograd, and where the user called it nobody told."""
        if self._waits_for_end:
            self._waits_for_end, self.interrupted = False, True
            with torch.no_grad():
                self.taker.end(told=False)

    def check_complete(self) -> None:
        """Raise ``RuntimeError`` after an interrupted backward, until ``zero_grad``."""
        self._see_interrupted()
        if self.interrupted:
            raise RuntimeError(
                f"a backward was interrupted, and {self._said} has taken some of its gradients. "
                "Call zero_grad() and go on; what was stepped stays stepped."
            )

    # -- the verdict -------------------------------------------------------------------------------------------------

    def settle(self, write: bool, norm_type: float | None = None, of: set[int] | None = None) -> Verdict | None:
        """The verdict on what came; None where nothing did. No host sync.

        Raises:
            RuntimeError: A backward was interrupted; or a norm is asked for that can't be had: any more, or of some
                parameters alone.
        """
        self.check_complete()
        if of is not None:
            raise RuntimeError(
                f"a clip of some parameters' gradients: with {self._said} they were freed one by one. Clip all of "
                "them, or use gradient_release=False."
            )
        came = [place for place in self.places if place.has_come]
        if self.stage is Stage.READY or self.pending is None or not came:
            self._start()
            return None
        self._check_none()
        self.taker.settle(came)
        for group, stats in zip(self.pairs.devices, self.stats, strict=True):
            stats.touched = True
            torch.cat([self.places[i].stats.nonfinite for i in group.positions], out=stats.nonfinite)
            torch.amax(torch.stack([self.places[i].stats.found_inf for i in group.positions]), 0, out=stats.found_inf)
        found = torch.stack([stats.found_inf.to(self.device) for stats in self.stats]).amax()
        if self.pending.scaler.follows_norms:
            self.pending.scaler.see(torch.stack([place.stats.norm.to(self.device) for place in came]).amax())
        norm = None if norm_type is None else self.taker.norm(norm_type, came, self.device)
        return Verdict(found, [(self.pending.scaler, found)], norm)

    def clip(self, factor: Tensor, of: set[int] | None = None) -> None:
        """See :class:`Taker`."""
        self.taker.clip(factor)

    def clip_values(self, largest: float, found_inf: Tensor, of: set[int] | None = None) -> None:
        """Raise ``RuntimeError``: there are no FP32 gradients to clip one by one."""
        raise RuntimeError(
            f"clip_master_values: with {self._said} gradients are freed when they come. Use clip_master_grads where "
            "that goes, or gradient_release=False."
        )

    def flags(self) -> list[Tensor]:
        """By device: int32 bits of each row, which the next settling overwrites. No sync."""
        return [stats.nonfinite for stats in self.stats]

    def tensors(self) -> list[Tensor]:
        """What is kept of gradients, and any that somebody else has put into parameters or masters."""
        found = [*counters.gradients(self.pairs.models), *counters.gradients(self.pairs.masters)]
        return [*self.taker.tensors(), *(grad for grad in found if grad is not None)]

    # -- the end -----------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        self.stage, self.pending, self.interrupted, self._cleared = Stage.READY, None, False, False
        self.losses = []
        for place in self.places:
            if place.has_come:
                place.has_come = False
                place.stats.reset()
        self.taker.drop()

    def finish(self, used: object = None) -> None:
        """READY after a step."""
        for stats in self.stats:
            stats.reset()
        self._start()

    def abandon(self) -> None:
        """READY without a step."""
        self.clear(set_to_none=True)
        self._start()

    def forget(self) -> None:
        """As :meth:`abandon`."""
        self.abandon()

    def clear(self, set_to_none: bool) -> None:
        """Gradients are cleared. What parameters were stepped by stays to be counted by ``step``."""
        for param in [*self.pairs.models, *self.pairs.masters]:
            store(param, None)
        self._see_interrupted()
        if self.interrupted or self.taker.can_drop:
            self._start()
        self._cleared = self.any_there()

    # -- gradients that came otherwise -------------------------------------------------------------------------------

    def of_model(self) -> list[Tensor | None]:
        """No gradients stay in the model."""
        return [None] * len(self.pairs)

    def any_there(self) -> bool:
        """Whether a parameter's gradient has come."""
        return any(place.has_come for place in self.places)

    def strange(self) -> list[int]:
        """Gradients that came without a backward of ours are refused where they come."""
        return []

    def is_strange(self, model: Tensor, master_grad: Tensor | None) -> bool:
        """As :meth:`strange`."""
        return False

    def has_strange(self) -> bool:
        """Raise ``RuntimeError`` where somebody has put gradients into parameters: no hook hears of that."""
        self._check_none()
        return False

    def _check_none(self) -> None:
        models, masters = counters.gradients(self.pairs.models), counters.gradients(self.pairs.masters)
        held = zip(self.places, models, masters, strict=True)
        found = [place for place, *grads in held if any(grad is not None for grad in grads)]
        if not found:
            return
        again = any(place.has_come for place in found)
        raise RuntimeError(
            f"gradients are there that no backward made: {self.pairs.describe(place.pair for place in found)}. With "
            f"{self._said} they are taken as backward makes them. "
            + ("If the model is in DDP, its reducer writes them back, on one rank too: train what it wraps. " * again)
            + f"Call zero_grad(){', then step()' * again}, or use gradient_release=False."
        )

    def take_zeros(self, scaler: LossScaler) -> None:
        """There are none: ``zero_grad`` frees."""

    def waits(self) -> bool:
        """False: nothing is reduced over ranks."""
        return False

    def assign(self, model: Tensor) -> None:
        """A master's gradient is set: it is refused by the next step."""

    def read(self, model: Tensor) -> None:
        """A master's gradient is read: there is none."""

    def update(self) -> None:
        """Raise ``RuntimeError``: gradients that were freed can't be made true again."""
        raise RuntimeError(
            f"update_master_grads: gradients are freed as they come, with {self._said}. Use "
            "gradient_release=False to edit or read gradients."
        )


def _hook(me: weakref.ref[Arrivals], position: int) -> Callable[[Tensor], None]:
    """A post-accumulate hook that does not keep the optimizer alive."""

    def arrive(param: Tensor) -> None:
        arrivals = me()
        if arrivals is not None:
            arrivals.arrive(position)

    return arrive


def _end(me: weakref.ref[Arrivals]) -> Callable[[], None]:
    """What autograd calls at the end of a backward, as :func:`_hook`."""

    def end() -> None:
        arrivals = me()
        if arrivals is not None:
            arrivals.end()

    return end


def _remove(handles: list[Any]) -> None:
    for handle in handles:
        handle.remove()
    handles.clear()
