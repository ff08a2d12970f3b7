"""Parameters that are stepped in backward, each when its gradient has come: ``gradient_release=True``.

The scale is static, there is one backward a step, and one gradient a parameter, which is checked, stepped and freed in
the hook that autograd calls when it is complete. So there is one more stage, RELEASING, between READY and ``step``, and
none of those in which gradients wait. ``step`` only runs the optimizer's hooks and counts.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from ... import kernels
from ...kernels.lists import same_walk
from ...kernels.steps import Factors
from ...scaling import LossScaler
from ..dtensors import any_raw_grad, is_sharded, raw_grad, raw_grads, set_raw_grad
from ..fused_registry import CannotServe, steps_on_device
from ..look import Look
from ..model_writes import ModelWrites
from ..params import ParamPair
from ..passes import DeviceGradients
from ..stage import BackwardScale, Check, Interrupted, answering
from ..step import Step
from ..wrapped_step import run_hooks
from .sums import SummingState

SAID = "gradient_release=True"
"""The argument, as the user writes it."""


def check_release(optimizer: Optimizer, scaler: LossScaler, is_zero: bool) -> None:
    """Raise ``ValueError`` where parameters of an optimizer about to be wrapped can't be stepped in backward.

    Args:
        optimizer: the one inside, where it is torch's ZeroRedundancyOptimizer.
        is_zero: whether it is.
    """
    if scaler.dynamic:
        raise ValueError(
            f"{SAID} does not go with a dynamic loss scale (dynamic=True, or such a scaler): parameters are stepped "
            "before all gradients are known, and an overflow could not be undone. Use loss_scale=..., or "
            "gradient_release=False."
        )
    if is_zero or any(is_sharded(param) for group in optimizer.param_groups for param in group["params"]):
        raise ValueError(
            f"{SAID} takes plain tensors and an optimizer that steps them, got "
            f"{'ZeroRedundancyOptimizer' if is_zero else 'DTensors'}. Use gradient_release=False on shards."
        )
    refuse_ranks(ValueError)


def refuse_ranks(kind: type[Exception]) -> None:
    """Raise where there are several ranks: gradients are used before DDP's reducer has averaged them."""
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        raise kind(
            f"{SAID} takes gradients when they arrive, which is before DDP's reducer averages them over the "
            f"{dist.get_world_size()} ranks of the process group: each rank would step by its own. Use "
            "gradient_release=False on several ranks."
        )


# -- one backward ------------------------------------------------------------------------------------------------------


class Arrivals:
    """What a backward has brought so far.

    Attributes:
        came: positions of the parameters whose gradient has come.
        factors: by device, what gradients are multiplied by.
        end_is_queued: whether autograd is to say when the backward is over.
    """

    def __init__(self) -> None:
        self.came: set[int] = set()
        self.factors: dict[torch.device, Factors] = {}
        self.end_is_queued = False


@answering()
class Releasing(NamedTuple):
    """A backward was announced. Parameters are stepped as their gradients come, and ``step`` is yet to count that.

    Attributes:
        arrivals: what has come. This one object is filled while the backward runs.
        losses: of the backward, unscaled, where it is a single number.
        check: what was found in all that came, from the moment that ``step`` asks on.
        was_cleared: whether ``zero_grad`` was called in the place of ``step``, when parameters had been stepped.
    """

    scale: BackwardScale
    arrivals: Arrivals
    losses: tuple[Tensor, ...] = ()
    check: Check | None = None
    is_measured: bool = True
    was_cleared: bool = False


class ParamSlot:
    """Where the gradient of one parameter arrives.

    Args:
        each: the gradients of its device.
        found_inf, norm: 0-dim, of this parameter alone.

    Attributes:
        stats: what the check of it found: its row of the device's.
    """

    def __init__(self, pair: ParamPair, each: DeviceGradients, found_inf: Tensor, norm: Tensor) -> None:
        self.pair = pair
        self._of_device, row = each.stats, slice(pair.row, pair.row + 1)
        self.stats = kernels.GradStats(each.stats.nonfinite[row], each.stats.sumsq[row], norm, found_inf)
        self.step_cache = kernels.CallCache()
        self._check_cache = kernels.CallCache()

    def check(self, grad: Tensor, inv_scale: Tensor) -> None:
        """Flags and sum of squares of what ``grad * inv_scale`` is in FP32. No host sync."""
        self._of_device.touched = True
        kernels.multi_tensor_check([grad], inv_scale, self.stats, cache=self._check_cache)

    def take_found(self, earlier: ParamSlot) -> None:
        """What was found is that of a slot that the same parameter had before."""
        self._of_device.touched = True
        self.stats.nonfinite.copy_(earlier.stats.nonfinite)
        self.stats.sumsq.copy_(earlier.stats.sumsq)

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


# -- the state ---------------------------------------------------------------------------------------------------------


class ReleasingState(SummingState):
    """READY -> RELEASING (a loss was scaled) -> READY (step); INTERRUPTED where a backward raised, until ``zero_grad``.

    Nothing is ever summed: one backward a step has one scaler.

    Args:
        given: as :class:`~fp16opt.engine.gradients.StepState` has them.
        model_writes: is told of weights that were stepped.

    Attributes:
        stepper: steps a parameter whose gradient has come.
        slots: of all parameters, in the order of the table.
    """

    stepper: Any

    def __init__(self, *given: Any, model_writes: ModelWrites) -> None:
        super().__init__(*given)
        self.slots: list[ParamSlot] = []
        self._model_writes = model_writes
        self._waits = kernels.is_host(self.device)  # writes by others are looked for on the host
        self._handles: list[Any] = []
        self._me = weakref.ref(self)
        self._release_hooks = weakref.finalize(self, _remove, self._handles)
        self._make_slots()

    def _make_slots(self) -> None:
        """A slot for every parameter, and a hook on those that are trained."""
        slots: dict[int, ParamSlot] = {}
        for each in self.gradients.each:
            found, norms = torch.zeros_like(each.stats.sumsq, dtype=torch.float32), torch.zeros_like(each.stats.sumsq)
            for row, pair in enumerate(each.pairs):
                slots[pair.position] = ParamSlot(pair, each, found[row], norms[row])
        self.slots = [slots[position] for position in range(len(self.params))]
        self._is_hooked = [pair.model.requires_grad and pair.model.is_leaf for pair in self.params.all]
        _remove(self._handles)
        for position, (slot, is_hooked) in enumerate(zip(self.slots, self._is_hooked, strict=True)):
            if is_hooked:
                model: Any = slot.pair.model
                self._handles.append(model.register_post_accumulate_grad_hook(_calling(self._me, "arrive", position)))

    def _unfrozen(self) -> bool:
        pairs = zip(self.params.all, self._is_hooked, strict=True)
        return any(pair.model.requires_grad > is_hooked for pair, is_hooked in pairs)

    def _came(self) -> set[int]:
        """Positions of the parameters that were stepped, and that ``step`` has not counted yet."""
        stage = self.stage
        return stage.arrivals.came if type(stage) is Releasing else set()

    # -- looking -----------------------------------------------------------------------------------------------------

    def see(self, look: Look) -> Look:
        """What other code has done to gradients, of which there are none but while a backward runs.

        Raises:
            RuntimeError: a backward was interrupted, or there are gradients that no hook has heard of.
        """
        self._notice_interrupted()
        if type(self.stage) is Interrupted:
            raise RuntimeError(
                f"a backward was interrupted, and {SAID} has taken some of its gradients. Call zero_grad() and go on; "
                "what was stepped stays stepped."
            )
        grads = look.grads.tensors
        others = raw_grads(self.params.masters)
        found = [at for at, each in enumerate(zip(grads, others, strict=True)) if any(one is not None for one in each)]
        if not found:
            return look
        names = self.params.describe(self.params.all[at] for at in found)
        again = not self._came().isdisjoint(found)
        raise RuntimeError(
            f"gradients are there that no backward made: {names}. With {SAID} they are taken as backward makes them. "
            + ("If the model is in DDP, its reducer writes them back, on one rank too: train what it wraps. " * again)
            + f"Call zero_grad(){', then step()' * again}, or use gradient_release=False."
        )

    def _notice_interrupted(self) -> None:
        """A backward of the user's own that raised: autograd has not called :meth:`end`, and nothing else tells."""
        stage = self.stage
        if type(stage) is Releasing and stage.arrivals.end_is_queued:
            self.stage = Interrupted()
            with torch.no_grad():
                self._model_writes.doubt_accepted()

    def _are_cleared(self, grads: Any) -> bool:
        """False: that no gradients are there says nothing of what was stepped."""
        return False

    @property
    def ahead(self) -> int:  # type: ignore[override]
        """1 where parameters were stepped, and ``step`` has not counted it yet."""
        return int(bool(self._came()))

    def is_one(self, scaler: LossScaler | None = None) -> bool:
        """False: a GradScaler can't do the scaling, as parameters are stepped in backward."""
        return False

    # -- the backward ------------------------------------------------------------------------------------------------

    def begin_backward(
        self, look: Look, scaler: LossScaler, may_clear: bool = False, losses: tuple[Tensor, ...] = ()
    ) -> BackwardScale:
        """RELEASING: the step's backward, with ``scaler``'s present scale, is about to begin.

        One before it that made no gradients here, as that of another optimizer's loss, counts for nothing.

        Args:
            may_clear: of no use here: no gradients are there but while a backward runs.
            losses: unscaled, where they are single numbers.

        Raises:
            RuntimeError: there was one already, or it can't be served.
        """
        self.see(look)
        stage = self.stage
        if type(stage) is Releasing and stage.was_cleared:
            raise RuntimeError(
                f"zero_grad() was called in place of step(): with {SAID} the last backward has stepped parameters, and "
                "clearing gradients does not take that back. Call step() after each backward."
            )
        if self._came():
            raise RuntimeError(
                f"a further backward in one step: with {SAID} gradients are taken as they come, and can't be added up. "
                "Call step() after each backward, or use gradient_release=False. If the one before was of another "
                "optimizer's loss, switch requires_grad of these parameters off meanwhile."
            )
        refuse_ranks(RuntimeError)
        self.params.verify()
        if scaler.dynamic:
            raise RuntimeError(
                f"backward with a dynamic scaler: {SAID} steps parameters before an overflow elsewhere is known. Use a "
                "StaticLossScaler, or gradient_release=False."
            )
        if self._unfrozen():
            self._make_slots()
        self._model_writes.sync(waits=self._waits)
        scale = BackwardScale.of(scaler)
        self.stage = Releasing(scale, Arrivals(), losses)
        self.backwards += 1
        scaler.begin_backward()
        return scale

    def arrive(self, position: int) -> None:
        """A gradient is complete: check it, step its parameter unless it is not finite, free it. Called by autograd.

        Raises:
            RuntimeError: it was not announced, it is a second one, or it can't be stepped.
        """
        stage, slot = self.stage, self.slots[position]
        name = slot.pair.name
        if type(stage) is not Releasing or stage.check is not None:
            raise RuntimeError(
                f"a gradient of parameter {name!r} came that neither opt.backward(loss) nor opt.scale_loss(loss) "
                f"announced. With {SAID} it is used at once, so its loss scale must be known: call opt.backward(loss) "
                "on the optimizer of this parameter. If another optimizer's loss came through here, switch "
                "requires_grad of these parameters off meanwhile."
            )
        arrivals = stage.arrivals
        if position in arrivals.came:
            raise RuntimeError(
                f"a second gradient of parameter {name!r} came in one backward, as reentrant checkpointing of shared "
                f"weights makes them, and {SAID} has taken the first. Use use_reentrant=False, or "
                "gradient_release=False."
            )
        grad = raw_grad(slot.pair.model)
        if grad is None:
            return
        if not arrivals.end_is_queued:
            torch.autograd.Variable._execution_engine.queue_callback(_calling(self._me, "end"))
            arrivals.end_is_queued = True
        with torch.no_grad():
            grad = slot.as_stored(grad)
            factors = arrivals.factors.get(grad.device)
            if factors is None:
                inv_scale = stage.scale.inv_scale.to(grad.device)
                factors = arrivals.factors[grad.device] = Factors(inv_scale, torch.ones_like(inv_scale))
            slot.check(grad, factors.inv_scale)
            arrivals.came.add(position)
            self._step(slot, grad, factors)
        set_raw_grad(slot.pair.model, None)

    def _step(self, slot: ParamSlot, grad: Tensor, factors: Factors) -> None:
        """Step a parameter, unless something was found in its gradient."""
        pair, found = slot.pair, slot.stats.found_inf
        if pair.is_apart:
            self._model_writes.expect(pair)  # an exception may come the moment the kernel returns
        try:
            if steps_on_device(found.device):
                self.stepper.step_one(pair, grad, factors, found, slot.step_cache)
            elif not bool(found):
                self.stepper.step_one(pair, grad, factors, None, slot.step_cache)
        except CannotServe as reason:
            raise RuntimeError(
                f"parameter {pair.name!r} can't be stepped in one pass any more: {reason}. gradient_release has no "
                "other step. Put back what was changed, or use gradient_release=False."
            ) from None
        if pair.is_apart:
            self._model_writes.accept_soon(pair)  # so that what others write from here on shows

    def end(self) -> None:
        """A backward is over, the optimizer's or one of the user's own. Called by autograd."""
        if type(self.stage) is Releasing:
            self.stage.arrivals.end_is_queued = False
        with torch.no_grad():
            self._model_writes.sample_accepted()

    def end_backward(self, stamp: bool) -> None:
        """No-op: autograd has called :meth:`end`."""

    def interrupt(self) -> None:
        """INTERRUPTED: a backward raised while gradients were being taken; READY where none had come."""
        stage = self.stage
        has_none = not any_raw_grad(self.params.models)
        if has_none and type(stage) is Releasing and not stage.arrivals.came:
            self.reset()
        else:
            self.stage = Interrupted()
        self.end()

    # -- the step ----------------------------------------------------------------------------------------------------

    def finalize(
        self,
        look: Look,
        write: bool = False,
        norm_type: float | None = None,
        of: set[int] | None = None,
        max_norm: float | None = None,
    ) -> Check | None:
        """What was found in the step's gradients; None where none came. No host sync.

        Raises:
            RuntimeError: a backward was interrupted; there are gradients that no hook has heard of; or true gradients,
                or their norm, are wanted, and there are none.
        """
        if write or norm_type is not None:
            raise _freed("clip_master_values" if write else "clip_master_grads")
        return super().finalize(look)

    def update(self, look: Look) -> None:
        """Raise ``RuntimeError``: there are no gradients to take."""
        raise _freed("update_master_grads")

    def bring_up(self, look: Look, write: bool) -> bool:
        """Bring together what was found in single gradients; False where none came. Raises as finalize."""
        self.see(look)
        stage = self.stage
        if type(stage) is not Releasing or not stage.arrivals.came:
            self.reset()
            return False
        if stage.check is None:
            for each in self.gradients.each:
                each.stats.found_inf.copy_(each.stats.nonfinite.ne(0).any())
            scaler = stage.scale.scaler
            check = Check(((scaler, self.gradients.found_inf(self.device)),))
            self.stage = stage._replace(check=self._with_norm(check, scaler))
        return True

    # -- the end -----------------------------------------------------------------------------------------------------

    def follow_params(self, came_from: Sequence[int | None], is_thaw: bool = False) -> None:
        """Parameters or masters came or went; arguments as ever. That some were stepped stays to be counted."""
        came, before = self._came(), self.slots
        super().follow_params(came_from, is_thaw)
        self._make_slots()
        kept = {now: then for now, then in enumerate(came_from) if then is not None and then in came}
        for now, then in kept.items():
            self.slots[now].take_found(before[then])
        came.clear()
        came.update(kept)

    def forget(self) -> None:
        """READY: a checkpoint was loaded, and what parameters were stepped by counts no more."""
        self.reset(keeps_true=False)

    def clear(self, set_to_none: bool) -> None:
        """Gradients that others have put there are cleared. That parameters were stepped stays to be counted."""
        self._notice_interrupted()
        stage = self.stage
        if type(stage) is Releasing and stage.arrivals.came:
            self.gradients.clear(set_to_none=True)
            self.stage = stage._replace(was_cleared=True)
        else:
            super().clear(set_to_none=True)


def _freed(call: str) -> RuntimeError:
    return RuntimeError(
        f"{call}: with {SAID} parameters are stepped, and gradients freed, as they come: there are none to clip, edit "
        "or read. Use gradient_release=False."
    )


# -- the step ----------------------------------------------------------------------------------------------------------


class ReleasedStep:
    """The step, as :class:`~fp16opt.engine.wrapped_step.WrappedStep` is one, where backward has stepped parameters."""

    rounded_all = False
    counts_steps = False  # all are counted, so that their number is known

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer

    def takes_scaled(self) -> bool:
        """True: it takes none at all."""
        return True

    def skips_on_device(self, look: Look) -> bool:
        """True: each parameter was skipped by its own flag."""
        return True

    def describe(self) -> str:
        """When a kernel steps."""
        return "fused, in backward"

    def step(self, step: Step, look: Look, found_inf: Tensor | None, closure: Callable[[], Any] | None = None) -> None:
        """Run the wrapped optimizer's step hooks, also where a parameter was left alone."""
        run_hooks(self.optimizer, _note_end, step)


def _note_end(has_hooks: bool, step: Step) -> None:
    """In the place of a step, between the optimizer's hooks."""
    step.all_written = True


# -- hooks -------------------------------------------------------------------------------------------------------------


def _calling(me: weakref.ref[Any], method: str, *given: int) -> Callable[..., None]:
    """What autograd calls: a method of the state. It does not keep the optimizer alive."""

    def call(*_: Tensor) -> None:
        state = me()
        if state is not None:
            getattr(state, method)(*given)

    return call


def _remove(handles: list[Any]) -> None:
    for handle in handles:
        handle.remove()
    handles.clear()
