"""Parameters that are stepped in backward, each when its gradient has come: ``gradient_release=True``.

A protocol of its own, beside the table of stages: the scale is static, there is one backward a step, and one gradient a
parameter, which is checked, stepped and freed in the hook that autograd calls when it is complete. ``step`` only runs
the optimizer's hooks and counts.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.optim import Optimizer

from ... import kernels
from ...kernels.lists import same_walk
from ...kernels.reference_steps import Factors
from ...scaling import LossScaler
from ..dtensors import raw_grad, raw_grads, set_raw_grad
from ..fused_registry import CannotServe, require_fused_spec, steps_on_device
from ..fused_step import PerParameterStepper
from ..masters import Masters
from ..model_writes import ModelWrites
from ..params import ParamPair, ParamTable
from ..ranks import Ranks, Replicas
from ..stage import BackwardScale, OverflowCheck
from ..state_format import StateFormat
from ..wrapped_step import run_hooks

SAID = "gradient_release=True"
"""The argument, as the user writes it."""

_REFUSALS = {
    "clip_master_grads": (
        f"with {SAID} parameters are stepped before the norm over all gradients is known. Use gradient_release=False."
    ),
    "clip_master_values": (
        f"with {SAID} parameters are stepped, and gradients freed, as they come. Use gradient_release=False."
    ),
    "update_master_grads": (
        f"gradients are freed as they come, with {SAID}. Use gradient_release=False to edit or read gradients."
    ),
    "attach": (
        f"{SAID} takes gradients before DDP's reducer averages them, so it can't be attached to a DDP module. "
        "Use gradient_release=False."
    ),
}


def refuse_ranks(kind: type[Exception]) -> None:
    """Raise where there are several ranks: gradients are used before DDP's reducer has averaged them."""
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        raise kind(
            f"{SAID} takes gradients when they arrive, which is before DDP's reducer averages them over the "
            f"{dist.get_world_size()} ranks of the process group: each rank would step by its own. Use "
            "gradient_release=False on several ranks."
        )


class ParamSlot:
    """Where the gradient of one parameter arrives.

    Attributes:
        stats: what the check of it found, one row.
        has_come: whether it has, in this step.
        check_cache, step_cache: of the two kernel calls.
    """

    def __init__(self, pair: ParamPair) -> None:
        self.pair = pair
        self.stats = kernels.GradStats.allocate(1, pair.master.device)
        self.has_come = False
        self.check_cache = kernels.CallCache()
        self.step_cache = kernels.CallCache()

    def check(self, grad: Tensor, inv_scale: Tensor) -> None:
        """Flags and sum of squares of what ``grad * inv_scale`` is in FP32. No host sync."""
        self.stats.touched = True
        kernels.multi_tensor_check([grad], inv_scale, self.stats, cache=self.check_cache)
        self.has_come = True

    def as_stored(self, grad: Tensor) -> Tensor:
        """``grad`` as kernels take it: of the parameter's dtype and strides, or FP32.

        Raises:
            RuntimeError: it is sparse, or part of a graph.
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


class GradientRelease:
    """Steps each parameter when its gradient arrives: in place of ``Gradients``, ``StepState`` and a stepper.

    Args:
        optimizer: the wrapped one. Its class has a fused step.
        step_count: gives the number of the step that is being taken, by which 8-bit values are rounded.
        device: where what was found is kept.

    Attributes:
        slots: of all parameters, in the order of the table.
        losses: of the present backward, unscaled, where it is a single number.
        backwards: how many have begun.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        params: ParamTable,
        masters: Masters,
        model_writes: ModelWrites,
        state_format: StateFormat,
        step_count: Callable[[], int],
        device: torch.device,
    ) -> None:
        self.optimizer = optimizer
        self.params = params
        self.device = device
        self.backwards = 0
        self.losses: tuple[Tensor, ...] = ()
        self.origin = None  # masters are all here
        self.slots: list[ParamSlot] = []
        self._model_writes = model_writes
        self._waits = kernels.is_host(device)  # writes by others are looked for on the host
        spec = require_fused_spec(type(optimizer))
        self._stepper = PerParameterStepper(spec, optimizer, params, masters, state_format, step_count)
        self._scale: BackwardScale | None = None  # of the step's backward
        self._factors: dict[torch.device, Factors] = {}
        self._is_interrupted = False
        self._was_cleared = False  # by zero_grad, when parameters had been stepped already
        self._end_is_queued = False  # autograd is to call :meth:`_end`
        self._handles: list[Any] = []
        self._ranks, self._replicas = Ranks(), Replicas()
        self._release_hooks = weakref.finalize(self, _remove, self._handles)
        self.follow_params()

    def follow_params(self) -> None:
        """Parameters or masters came or went: hooks for all of them."""
        before = {id(slot.pair): slot for slot in self.slots}
        self.slots = [before.get(id(pair)) or ParamSlot(pair) for pair in self.params.all]
        self.stats = [kernels.GradStats.allocate(len(each), each.device) for each in self.params.devices]
        _remove(self._handles)
        self._generation = self.params.generation
        self._is_hooked = [pair.model.requires_grad and pair.model.is_leaf for pair in self.params.all]
        me = weakref.ref(self)
        for position, (slot, is_hooked) in enumerate(zip(self.slots, self._is_hooked, strict=True)):
            if is_hooked:
                model: Any = slot.pair.model
                self._handles.append(model.register_post_accumulate_grad_hook(_hook(me, position)))

    # -- the backward ------------------------------------------------------------------------------------------------

    def begin_backward(self, scaler: LossScaler, may_clear: bool = False, loss: Tensor | None = None) -> BackwardScale:
        """The step's backward, with ``scaler``'s present scale, is about to begin.

        One before it that made no gradients here, as that of another optimizer's loss, counts for nothing.

        Args:
            may_clear: Of no use here: no gradients are there but while a backward runs.
            loss: unscaled, where it is a single number.

        Raises:
            RuntimeError: there was one already, or it can't be served.
        """
        self._check_complete()
        if self._was_cleared:
            raise RuntimeError(
                f"zero_grad() was called in place of step(): with {SAID} the last backward has stepped parameters, and "
                "clearing gradients does not take that back. Call step() after each backward."
            )
        if self._any_came():
            raise RuntimeError(
                f"a further backward in one step: with {SAID} gradients are taken as they come, and can't be added up. "
                "Call step() after each backward, or use gradient_release=False. If the one before was of another "
                "optimizer's loss, switch requires_grad of these parameters off meanwhile."
            )
        refuse_ranks(RuntimeError)
        self.params.verify()
        self._check_no_others()
        if scaler.dynamic:
            raise RuntimeError(
                f"backward with a dynamic scaler: {SAID} steps parameters before an overflow elsewhere is known. Use a "
                "StaticLossScaler, or gradient_release=False."
            )
        if self._generation != self.params.generation or self._unfrozen():
            self.follow_params()
        self._model_writes.sync(waits=self._waits)
        self._stepper.begin()
        self._scale, self._factors = BackwardScale.of(scaler), {}
        self.losses = () if loss is None else (loss,)
        self.backwards += 1
        return self._scale

    def _unfrozen(self) -> bool:
        pairs = zip(self.params.all, self._is_hooked, strict=True)
        return any(pair.model.requires_grad > is_hooked for pair, is_hooked in pairs)

    def end_backward(self, stamp: bool) -> None:
        """No-op: autograd has called :meth:`_end`."""

    def interrupt(self) -> None:
        """A backward raised while gradients were being taken."""
        self._is_interrupted = True
        self._end()

    def arrive(self, position: int) -> None:
        """A gradient is complete: check it, step its parameter unless it is not finite, free it. Called by autograd.

        Raises:
            RuntimeError: it was not announced, it is a second one, or it can't be stepped.
        """
        slot = self.slots[position]
        name = slot.pair.name
        if self._scale is None:
            raise RuntimeError(
                f"a gradient of parameter {name!r} came that neither opt.backward(loss) nor opt.scale_loss(loss) "
                f"announced. With {SAID} it is used at once, so its loss scale must be known: call opt.backward(loss) "
                "on the optimizer of this parameter. If another optimizer's loss came through here, switch "
                "requires_grad of these parameters off meanwhile."
            )
        if slot.has_come:
            raise RuntimeError(
                f"a second gradient of parameter {name!r} came in one backward, as reentrant checkpointing of shared "
                f"weights makes them, and {SAID} has taken the first. Use use_reentrant=False, or "
                "gradient_release=False."
            )
        grad = raw_grad(slot.pair.model)
        if grad is None:
            return
        if not self._end_is_queued:
            torch.autograd.Variable._execution_engine.queue_callback(_end(weakref.ref(self)))
            self._end_is_queued = True
        with torch.no_grad():
            self._take(slot, slot.as_stored(grad), self._scale)
        set_raw_grad(slot.pair.model, None)

    def _take(self, slot: ParamSlot, grad: Tensor, scale: BackwardScale) -> None:
        factors = self._factors.get(grad.device)
        if factors is None:
            inv_scale = scale.inv_scale.to(grad.device)
            factors = self._factors[grad.device] = Factors(inv_scale, torch.ones_like(inv_scale))
        slot.check(grad, factors.inv_scale)
        found = slot.stats.found_inf
        pair = slot.pair
        if pair.is_apart:
            self._model_writes.expect(pair)  # an exception may come the moment the kernel returns
        try:
            if steps_on_device(found.device):
                self._stepper.step(pair, grad, factors, found, slot.step_cache)
            elif not bool(found):
                self._stepper.step(pair, grad, factors, None, slot.step_cache)
        except CannotServe as reason:
            raise RuntimeError(
                f"parameter {pair.name!r} can't be stepped in one pass any more: {reason}. gradient_release has no "
                "other step. Put back what was changed, or use gradient_release=False."
            ) from None
        if pair.is_apart:
            self._model_writes.accept_soon(pair)  # so that what others write from here on shows

    def _end(self) -> None:
        """A backward is over, well or not."""
        self._end_is_queued = False
        with torch.no_grad():
            self._model_writes.sample_accepted()

    def _notice_interrupted(self) -> None:
        """A backward of the user's own that raised: autograd has not called :meth:`_end`, and nothing else tells."""
        if self._end_is_queued:
            self._end_is_queued, self._is_interrupted = False, True
            with torch.no_grad():
                self._model_writes.doubt_accepted()

    def _check_complete(self) -> None:
        self._notice_interrupted()
        if self._is_interrupted:
            raise RuntimeError(
                f"a backward was interrupted, and {SAID} has taken some of its gradients. Call zero_grad() and go on; "
                "what was stepped stays stepped."
            )

    def _any_came(self) -> bool:
        return any(slot.has_come for slot in self.slots)

    def steps_ahead(self) -> int:
        """How many steps parameters have taken in backward that ``step`` has not counted yet: 1 or 0."""
        return int(self._any_came())

    def waits_for_step(self) -> bool:
        """Whether a backward has announced its scale, and ``step`` has not counted it yet."""
        return self._scale is not None

    # -- the step ----------------------------------------------------------------------------------------------------

    def finish(self) -> OverflowCheck | None:
        """What was found in the step's gradients; None where none came. No host sync.

        Raises:
            RuntimeError: a backward was interrupted, or there are gradients that no hook has heard of.
        """
        self._check_complete()
        self._check_no_others()
        came = [slot for slot in self.slots if slot.has_come]
        if self._scale is None or not came:
            self.reset()
            return None
        for device, stats in zip(self.params.devices, self.stats, strict=True):
            rows = [self.slots[position].stats for position in device.positions]
            stats.touched = True
            torch.cat([row.nonfinite for row in rows], out=stats.nonfinite)
            torch.amax(torch.stack([row.found_inf for row in rows]), 0, out=stats.found_inf)
        found = torch.stack([stats.found_inf.to(self.device) for stats in self.stats]).amax()
        scaler = self._scale.scaler
        if scaler.follows_norms:
            scaler.see(torch.stack([slot.stats.norm.to(self.device) for slot in came]).amax())
        return OverflowCheck(found, [(scaler, found)])

    def step(self) -> None:
        """Run the wrapped optimizer's step hooks: parameters were stepped in backward."""
        run_hooks(self.optimizer, _nothing)

    @property
    def ranks(self) -> Ranks:
        """Where the masters' other parts are: all are here."""
        return self._ranks

    @property
    def replicas(self) -> Replicas:
        """Which ranks share gradients with this one: none."""
        return self._replicas

    @replicas.setter
    def replicas(self, replicas: Replicas) -> None:
        if replicas.reduces:
            self.refuse("attach")
        self._replicas = replicas

    @property
    def scale(self) -> BackwardScale | None:
        """Of the step's backward."""
        return self._scale

    def scales_by_one(self) -> bool:
        """False: a GradScaler can't do the scaling, as parameters are stepped in backward."""
        return False

    def found_none(self) -> bool:
        """Whether the backward that has just ended has given no parameter a gradient."""
        return not self._any_came()

    def require_open(self, strictly: bool = False) -> None:
        """No-op: there is no clip before a change of parameters."""

    def flags(self) -> list[Tensor]:
        """By device: int32 bits of each row, as :meth:`finish` found them. No sync."""
        return [stats.nonfinite for stats in self.stats]

    def tensors(self) -> list[Tensor]:
        """Gradients that other code has put into parameters or masters; the engine's own are freed."""
        found = [*raw_grads(self.params.models), *raw_grads(self.params.masters)]
        return [grad for grad in found if grad is not None]

    def reset(self, keeps_true: bool = True) -> None:
        """The step is over, or was given up: nothing has come."""
        self._scale, self._is_interrupted, self._was_cleared, self.losses = None, False, False, ()
        for slot in self.slots:
            if slot.has_come:
                slot.has_come = False
                slot.stats.reset()
        for stats in self.stats:
            stats.reset()

    def forget(self) -> None:
        """A checkpoint was loaded: what parameters were stepped by counts no more."""
        self.reset()

    def clear(self, set_to_none: bool) -> None:
        """Gradients are cleared. That parameters were stepped stays to be counted by ``step``."""
        for param in [*self.params.models, *self.params.masters]:
            set_raw_grad(param, None)
        self._notice_interrupted()
        if self._is_interrupted:
            self.reset()
        self._was_cleared = self._any_came()

    def _check_no_others(self) -> None:
        """Raise where other code has put gradients into parameters: no hook hears of that."""
        models, masters = raw_grads(self.params.models), raw_grads(self.params.masters)
        each = zip(self.slots, models, masters, strict=True)
        found = [slot for slot, *grads in each if any(grad is not None for grad in grads)]
        if not found:
            return
        again = any(slot.has_come for slot in found)
        raise RuntimeError(
            f"gradients are there that no backward made: {self.params.describe(slot.pair for slot in found)}. With "
            f"{SAID} they are taken as backward makes them. "
            + ("If the model is in DDP, its reducer writes them back, on one rank too: train what it wraps. " * again)
            + f"Call zero_grad(){', then step()' * again}, or use gradient_release=False."
        )

    def refuse(self, what: str) -> NoReturn:
        """Raise ``RuntimeError`` for a call that does not go with it.

        Args:
            what: the method's name: clip_master_grads, clip_master_values, update_master_grads, or attach.
        """
        raise RuntimeError(f"{what}: {_REFUSALS[what]}")


def _nothing(has_hooks: bool) -> None:
    """In place of a step, between the optimizer's hooks."""


def _hook(me: weakref.ref[GradientRelease], position: int) -> Callable[[Tensor], None]:
    """A post-accumulate hook that does not keep the optimizer alive."""

    def arrive(param: Tensor) -> None:
        release = me()
        if release is not None:
            release.arrive(position)

    return arrive


def _end(me: weakref.ref[GradientRelease]) -> Callable[[], None]:
    """What autograd calls at the end of a backward; it does not keep the optimizer alive."""

    def end() -> None:
        release = me()
        if release is not None:
            release._end()

    return end


def _remove(handles: Sequence[Any]) -> None:
    for handle in handles:
        handle.remove()
    if isinstance(handles, list):
        handles.clear()
