"""Optimizers without master weights (O0, O1, O3): they step the model's parameters, on gradients unscaled in place."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..engine import errors
from ..engine.arguments import check_loss
from ..engine.diagnostics import Lines, Overflow, warn_eps
from ..engine.modes.closures import Evaluation
from ..engine.passes import are_zero
from ..engine.stage import BackwardScale, GradientStamp
from ..grad_scaler.closures import ScaledReevaluations, split_closure
from ..grad_scaler.gradients import Found, OptimizerGradients, overflows, put_back, take_out
from ._amp_state import _amp_state
from .initialised import AmpLog, Initialised, Setup, is_initialised
from .scaler import LossScaler
from .subclassing import parts_of

_OURS = ("amp", "_waiting", "_own_step")  # what a plain optimizer has beside its own attributes


class PlainGradients:
    """Where the gradients of one plain optimizer stand between ``scale_loss`` and ``step``.

    ``.grad`` holds true gradients, which scripts read, clip and add to as they like. A backward leaves scaled ones:
    true ones of before are taken out until these are unscaled, and then added. With ``delay_unscale`` they wait,
    scaled, for a later one with the same scale, for one with another scale, or for the step.

    Args:
        setup: What ``amp.initialize`` decided.
        whose: The class of the optimizer, for the log.
        names: Of parameters, by id.

    Attributes:
        backwards: How many have begun.
        skipped: Whether the last step was skipped.
        skipped_steps: How many were.
        report: Which parameters overflowed where the last step was skipped.
    """

    def __init__(self, setup: Setup, whose: str, names: Mapping[int, str]) -> None:
        self.setup = setup
        self.names = dict(names)
        self.lines = Lines(whose)
        self.log = AmpLog(setup, self.lines)
        self.backwards = 0
        self.skipped = False
        self.skipped_steps = 0
        self.report: list[Overflow] = []
        self._gradients = OptimizerGradients()
        self._open: list[BackwardScale] = []  # of contexts that are not left yet
        self._last_scale: BackwardScale | None = None
        self._scale: BackwardScale | None = None
        self.forget()

    def forget(self) -> None:
        """A step has used the gradients, or they were cleared."""
        if not self._open:  # else the backward is yet to come, and its gradients are scaled
            self._scale = None
            self._losses: list[Tensor] = []
        self._taken: dict[Tensor, Tensor] = {}
        self._found: list[tuple[LossScaler | None, Tensor]] = []
        self._blamed: list[Found] = []
        self._delayed: set[int] = set()  # ids of scalers whose last backward was left as it is
        self._stamp: tuple[list[Tensor], GradientStamp] | None = None
        self._is_interrupted = False
        self._gradients.release()

    def _look(self, optimizer: Optimizer) -> None:
        """Forget what is known of gradients that were cleared since, in whatever way.

        Raises:
            RuntimeError: A backward was interrupted, and they were not.
        """
        params = _params_of(optimizer)
        grads = [param.grad for param in params]
        if self._is_interrupted:
            if not are_zero(grads):
                raise errors.INTERRUPTED()
            self.forget()
        if self._stamp is None:
            return
        known, stamp = self._stamp
        written, gone = stamp.compare([param.grad for param in known])
        if not (written or gone):
            return
        are_gone = all(grad is None for grad in grads)
        # Edits need no notice. Whether they were a zeroing is looked up where something would come of it.
        if are_gone or (written and (self._scale is not None or self._overflowed()) and are_zero(grads)):
            self.forget()

    def _note(self, optimizer: Optimizer) -> None:
        params = _params_of(optimizer)
        self._stamp = params, GradientStamp([param.grad for param in params])

    # -- backwards ---------------------------------------------------------------------------------------------------

    def enter(self, optimizer: Optimizer, scaler: LossScaler, loss: Tensor | None = None) -> BackwardScale:
        """A backward with ``scaler``'s present scale is about to come. No host sync, but where gradients were edited.

        Args:
            loss: Unscaled, where it is a single number: the log says whether it was finite.

        Raises:
            RuntimeError: A backward was interrupted, and its gradients are still there.
        """
        self._look(optimizer)
        if self._scale is not None and not self._scale.is_current(scaler):
            self.unscale(optimizer)
        scale = BackwardScale.of(scaler) if self._scale is None else self._scale
        self._go_on(optimizer, scale)
        self._open.append(scale)
        self._delayed.add(id(scaler))
        self.backwards += 1
        if loss is not None:
            self._losses.append(loss)
        return scale

    def _go_on(self, optimizer: Optimizer, scale: BackwardScale) -> None:
        """Gradients that come now are scaled."""
        if self._scale is None and not scale.scaler.is_one():
            self.take_out(optimizer)
        self._scale = self._last_scale = scale

    def take_out(self, optimizer: Optimizer) -> None:
        """Put true gradients aside. Those that no ``scale_loss`` of this step has made are checked before."""
        try:
            if self._stamp is None or self._stamp[1].is_empty:
                self._unscale(optimizer, None, torch.ones((), dtype=torch.float32, device=_device_of(optimizer)))
            self._taken = take_out(optimizer)
            self._note(optimizer)  # that there are none now is no clearing
        except BaseException:
            self.interrupt()
            raise

    def take_by_hand(self, scaler: LossScaler) -> None:
        """A backward was run of a loss that was multiplied by ``scaler``'s scale."""
        if self._scale is None:
            self._scale = self._last_scale = BackwardScale.of(scaler)

    def leave(self, optimizer: Optimizer) -> None:
        """Scaled gradients are left to wait."""
        self._open.pop()
        if all(param.grad is None for param in _params_of(optimizer)):  # the loss does not reach this optimizer
            put_back(self._taken)
            self._scale, self._taken = None, {}
        self._note(optimizer)

    def interrupt(self) -> None:
        """Gradients are incomplete."""
        self._open = []
        self.forget()
        self._is_interrupted = True

    def settle(self, optimizer: Optimizer, scaler: LossScaler) -> Tensor:
        """A backward is over: :meth:`unscale` its gradients, and ``scaler`` will hear of it at once."""
        self._delayed.discard(id(scaler))
        if self._open:
            self._open.pop()
        found = self.unscale(optimizer)
        if self._open:  # of the context around
            self._go_on(optimizer, self._open[-1])
        return found

    def unscale(self, optimizer: Optimizer) -> Tensor:
        """Make true gradients of scaled ones. Returns whether one of these overflowed: float32, 0-dim. No host sync."""
        scale, device = self._scale, _device_of(optimizer)
        if scale is None:
            return torch.zeros((), dtype=torch.float32, device=device)
        found = self._unscale(optimizer, scale.scaler, scale.inv_scale)
        self._scale, self._taken = None, {}
        return found

    def _unscale(self, optimizer: Optimizer, scaler: Any, inv_scale: Tensor) -> Tensor:
        gradients, device = self._gradients, _device_of(optimizer)
        gradients.collect(optimizer)
        has_grads = bool(gradients.rows or gradients.subclassed)
        try:
            flags = [flag.to(device) for flag in gradients.unscale(inv_scale, self._taken).values()]
        except BaseException:
            self.interrupt()
            raise
        found = torch.stack(flags).amax() if flags else torch.zeros((), dtype=torch.float32, device=device)
        if has_grads:
            self._found.append((scaler, found))
            self._blamed += [(places, stats.nonfinite.clone()) for places, stats in gradients.checked]
            self._note(optimizer)
        gradients.release()
        return found

    def blame(self, scaler: LossScaler, found: Tensor) -> None:
        """Count ``found`` (float32, 0-dim), of another optimizer, if a step would use gradients of this one."""
        if self._stamp is not None and not self._stamp[1].is_empty:
            self._found.append((scaler, found))

    # -- the step ----------------------------------------------------------------------------------------------------

    def check(self, optimizer: Optimizer) -> bool:
        """Whether the step is to be skipped. Gradients are true ones after it. Syncs."""
        self._look(optimizer)
        self.unscale(optimizer)
        return self._overflowed()

    def _overflowed(self) -> bool:
        return bool(self._found) and bool(torch.stack([found for _, found in self._found]).amax())

    def _by_scaler(self) -> list[tuple[LossScaler, Tensor]]:
        every: dict[LossScaler, Tensor] = {}
        for scaler, found in self._found:
            if scaler is not None:
                every[scaler] = torch.maximum(every[scaler], found) if scaler in every else found
        return list(every.items())

    def close(self, skipped: bool) -> None:
        """A step was taken, or skipped: scalers that have not heard of it do, it is counted and logged."""
        self.skipped, self.report = skipped, []
        if not self._found:
            return
        each = self._by_scaler()
        for scaler, found in each:
            if id(scaler) in self._delayed:
                scaler.settle(found)  # no scale_loss of this step came to it
            else:
                scaler.update(found)  # it may have been told to wait
        last = self._last_scale
        if skipped:
            self.skipped_steps += 1
            self.report = overflows(self._blamed, self.names)
            if last is not None:
                self.log.blamed = [id(scaler) for scaler, found in each if bool(found)]
                self.log.skipped(last.scaler, float(last.scale), self.report, self._losses)
        else:
            self.log.taken += 1
            if self.log.awaits_step and last is not None:
                self.log.stepped(float(last.scale))
        self.forget()

    # -- closures ----------------------------------------------------------------------------------------------------

    def evaluate(self, optimizer: Optimizer, closure: Callable[[], Any]) -> Evaluation:
        """Call a closure once. Its gradients are true ones then. Syncs."""
        before = self.backwards
        with torch.enable_grad():
            loss = closure()
        return Evaluation(loss, self.check(optimizer), self.backwards != before)

    def back_off(self, optimizer: Optimizer) -> bool:
        """An evaluation has overflowed: whether a scale went down for it. The next one finds no gradients."""
        lowered = False
        for scaler, found in self._by_scaler():
            if bool(found):
                lowered |= scaler.back_off()
        if lowered:
            optimizer.zero_grad()
        return lowered


class PlainOptimizer(Initialised, Optimizer):
    """What ``amp.initialize`` makes of an optimizer without master weights: itself, with steps that may be skipped.

    Its groups hold the model's own parameters, its state, its checkpoints and its hooks are those of its class. Hooks
    around ``step`` run where the step is taken.
    """

    _waiting: PlainGradients

    def adopt(self, setup: Setup, names: Iterable[tuple[str, Tensor]]) -> None:
        """Begin to wait for ``scale_loss``."""
        own_step = self.__dict__.pop("step", None)  # a scheduler's or the user's, in front of the class's
        self._begin(setup, {id(param): name for name, param in names})
        if own_step is not None:
            self.__dict__["_own_step"] = own_step
        warn_eps(self._waiting.lines, self.param_groups)

    def _begin(self, setup: Setup, names: Mapping[int, str]) -> None:
        self.__dict__.update(amp=setup, _waiting=PlainGradients(setup, type(self).__name__, names))

    def __getstate__(self) -> dict[str, Any]:
        state: dict[str, Any] = super().__getstate__()
        if not is_initialised(self):
            return state
        kept = {name: value for name, value in state.items() if name not in _OURS}
        names = [self._waiting.names.get(id(param)) for param in _params_of(self)]
        return {**kept, "amp": (self.amp, names, self._waiting.skipped_steps)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        state = dict(state)
        setup, names, skipped_steps = state.pop("amp", (None, (), 0))
        base: Any = (parts_of(self) or (None, Optimizer))[1]
        if not hasattr(base.step, "hooked"):  # no optimizer of its class was made in this process yet
            base.step = Optimizer.profile_hook_step(base.step)
            base.step.hooked = True
        super().__setstate__(state)
        if setup is not None:
            pairs = zip(names, _params_of(self), strict=True)
            self._begin(setup, {id(param): name for name, param in pairs if name is not None})
            self._waiting.skipped_steps = skipped_steps

    # -- gradients ---------------------------------------------------------------------------------------------------

    def enter(self, loss: Tensor, scaler: LossScaler) -> Tensor:
        """``loss`` scaled. A backward follows."""
        check_loss(loss)
        scale = self._waiting.enter(self, scaler, loss.detach() if loss.numel() == 1 else None)
        return loss.float() * scale.scale.to(loss.device)

    def leave(self) -> None:
        """The backward is over, and its gradients stay as they are (``delay_unscale``)."""
        self._waiting.leave(self)

    def abandon(self) -> None:
        """The backward raised: gradients are incomplete until they are cleared."""
        self._waiting.interrupt()

    def settle_gradients(self, scaler: LossScaler) -> Tensor:
        """Unscale the gradients of the last backward. Returns whether one overflowed: float32, 0-dim. No host sync."""
        return self._waiting.settle(self, scaler)

    def blame(self, scaler: LossScaler, found_inf: Tensor) -> None:
        """Skip the next step where ``found_inf`` (float32, 0-dim): another optimizer of this backward overflowed."""
        self._waiting.blame(scaler, found_inf.to(_device_of(self)))

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Clear gradients as the class does, and forget what was found in them."""
        if "set_grads_to_None" in kwargs:
            kwargs["set_to_none"] = kwargs.pop("set_grads_to_None")
        super().zero_grad(*args, **kwargs)
        if is_initialised(self):
            self._waiting.forget()

    # -- the step ----------------------------------------------------------------------------------------------------

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """The class's own step, unless a gradient that ``scale_loss`` has unscaled was not finite.

        Args:
            args, kwargs: Handed on. A ``closure`` clears the gradients, runs ``amp.scale_loss`` and returns the loss.
                It is evaluated again, at a lower scale, while gradients overflow; where no scale is low enough,
                parameters and state are put back, and the step counts as skipped. Costs a copy of both.

        Returns:
            What the class's step returns. None where it was skipped; the loss, with a closure.

        Raises:
            RuntimeError: A backward was interrupted, and its gradients are still there.

        Syncs: once, where the decision is taken.
        """
        if not is_initialised(self):  # another object that a script has made of this one's class
            return super().step(*args, **kwargs)
        closure, args, kwargs = split_closure(args, kwargs)
        if closure is not None:
            return self._step_with(closure, args, kwargs)
        skipped = self._waiting.check(self)
        result = None if skipped else self._step_on(args, kwargs)
        self._close(skipped)
        return result

    # By this mark schedulers know a step that tells them of steps. One made before ``initialize`` looks for it.
    step.hooked = step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]

    def _step_with(self, closure: Callable[[], Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        waiting = self._waiting
        casting = _amp_state.casts.keeping(closure)
        evaluations = ScaledReevaluations(lambda: waiting.evaluate(self, casting), lambda: waiting.back_off(self))
        stepped = evaluations.step(self, lambda finite: self._step_on((finite, *args), kwargs))
        self._close(skipped=not stepped)
        if not stepped:
            self.zero_grad()
        return evaluations.returned if stepped else evaluations.loss

    def _step_on(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        step = self.__dict__.get("_own_step", super().step)
        with _amp_state.casts.disabled():
            return step(*args, **kwargs)

    def _close(self, skipped: bool) -> None:
        self._waiting.close(skipped)
        self.__dict__["_opt_called"] = True  # what LR schedulers look for
        if self.amp.function_casts:
            _amp_state.casts.clear_cache()

    # -- state to read -----------------------------------------------------------------------------------------------

    @property
    def loss_scale(self) -> float:
        """What ``amp.scale_loss`` multiplies the first loss by now. Syncs."""
        return float(self.amp.scalers[0].loss_scale())

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last ``step`` was skipped for non-finite gradients."""
        return self._waiting.skipped

    @property
    def skipped_steps(self) -> int:
        """Steps skipped since ``initialize``."""
        return self._waiting.skipped_steps

    def overflow_report(self) -> list[Overflow]:
        """Which parameters had non-finite gradients when the last step was skipped; empty when it was not."""
        return list(self._waiting.report)

    def pairs(self) -> list[list[tuple[Tensor, Tensor]]]:
        """Per group, each parameter twice: it is stepped itself."""
        return [[(param, param) for param in group["params"]] for group in self.param_groups]

    def take_by_hand(self, scaler: LossScaler) -> None:
        """Gradients that are there were made of a loss that the caller multiplied by the scale of ``scaler``."""
        self._waiting.take_by_hand(scaler)

    def _prepare_amp_backward(self) -> None:
        """Put gradients of earlier backwards aside."""
        self._waiting.take_out(self)


def _params_of(optimizer: Optimizer) -> list[Tensor]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def _device_of(optimizer: Optimizer) -> torch.device:
    """Where the first parameter is; the CPU for none."""
    return next((param.device for param in _params_of(optimizer)), torch.device("cpu"))
