"""MixedPrecisionOptimizer: composes the engine's components, and is what users call."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.optim import Optimizer

from . import kernels, parallel
from .engine import checkpoint, one_pass_step, state_formats
from .engine.accumulation import Accumulation, Pending, Stage, Verdict, are_finite
from .engine.arguments import (
    check_loss,
    check_number,
    check_scaler,
    make_scaler,
    named,
    naming_loss_scale,
    open_group,
)
from .engine.arrivals import Arrivals
from .engine.choices import Choices
from .engine.closures import ClosureHabits, Evaluations
from .engine.diagnostics import Overflow
from .engine.gradients import Gradients, SharedGradients, Sight
from .engine.held_step import HeldOnArrival, HeldStep
from .engine.masters import FullMasters, MasterClasses, Masters, NoMasters
from .engine.memory import Memory, measure
from .engine.model_writes import ModelWrites
from .engine.one_pass_rows import counters_saved, no_row, row_of
from .engine.one_pass_step import OnePassStep
from .engine.one_pass_trial import Trials
from .engine.outcome import Outcome, read_at_once, warn_no_gradients, warn_plain_backward
from .engine.pairs import HALF_DTYPES, Pairs
from .engine.parts import Engine
from .engine.ranks import Digest
from .engine.released_step import OneByOne, ReleasedStep, SteppedOnArrival
from .engine.schema import is_ours
from .engine.split import SplitMasters
from .engine.state_formats import StateFormat
from .engine.streamed_step import Certified, StreamedStep
from .engine.under_grad_scaler import CAN_SHARE, UnderGradScaler
from .engine.wrapped_step import (
    HOOKS,
    STEP_HOOKS_OF_ALL,
    StepFailed,
    Stepper,
    WrappedStep,
    extras,
    make_hook_tables,
    own_step_hooks,
    remake_first_state,
)
from .kernels import backends
from .kernels.native import read_anew, read_once
from .scaling import LossScaler

_NOT_COPIED = (
    *HOOKS,
    "step",
    "_gradients",
    "_accumulation",
    "_classes",
    "_state_format",
    "_stepper",
    "_shared",
    "_under",
    "_names",
)


Method = TypeVar("Method", bound=Callable[..., Any])


def outside_inference(method: Method) -> Method:
    """What a method makes are ordinary tensors, also where it is called under ``torch.inference_mode``."""

    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_inference_mode_enabled():
            return method(*args, **kwargs)
        with torch.inference_mode(False):
            return method(*args, **kwargs)

    return cast(Method, call)


def between_hooks(step: Method) -> Method:
    """An optimizer's ``step`` between its step hooks, and outside of inference mode.

    torch's own wrapper also opens a frame for the profiler in every step, which takes as long as a step of some small
    tensors does: it is opened where a profiler runs.
    """
    inner = outside_inference(step)
    framed = Optimizer.profile_hook_step(inner)

    @functools.wraps(step)
    def call(self: Optimizer, *args: Any, **kwargs: Any) -> Any:
        if any((*own_step_hooks(self), *STEP_HOOKS_OF_ALL)) or torch.autograd.profiler._is_profiler_enabled:
            return framed(self, *args, **kwargs)
        returned = (inner if torch.is_inference_mode_enabled() else step)(self, *args, **kwargs)
        _, of_this, _, of_all = *own_step_hooks(self), *STEP_HOOKS_OF_ALL
        for hook in (*of_this.values(), *of_all.values()):  # come meanwhile: torch, too, asks when the step is done
            hook(self, (self, *args), kwargs)
        return returned

    call.hooked = True  # type: ignore[attr-defined]  # by this torch knows that a step has its wrapper
    return cast(Method, call)


class MixedPrecisionOptimizer(parallel.AcrossRanks, Optimizer):
    """Any ``torch.optim.Optimizer``, stepping FP32 masters of a model with FP16 or BF16 weights.

    It keeps an FP32 master of every FP16 and BF16 parameter, owns the loss scale, and moves gradients up and weights
    down with fused kernels. FP32 and FP64 parameters are their own masters. ``param_groups``, ``state`` and
    ``defaults`` are the wrapped optimizer's own; groups hold what it steps.

    Args:
        optimizer: The optimizer to wrap; its param_groups then hold masters. Its state is kept, in FP32. Parameters may
            mix float16, bfloat16, float32 and float64 and lie on any device.
        dynamic: Use ``DynamicLossScaler()``.
        loss_scale: A static scale, 1.0 when nothing else is given. Powers of two unscale exactly.
        scaler: A ``LossScaler`` of your own; one may serve several optimizers. Give one of these three at most.
        named_parameters: ``model.named_parameters()``, for names in messages. torch's own named param groups serve too.
        grad_accumulation: "model": micro-batches add up in the model's 16-bit gradients. "fp32": every ``backward``
            folds its gradients into FP32 and frees the 16-bit ones (4 more bytes a parameter between backwards).
        on_model_write: What to do where something else wrote the model's weights, noticed in ``step``, ``state_dict``
            and ``fp32_state_dict``: "refresh" takes what differs into the masters and logs a warning, "error" raises,
            "ignore" does not look.
        master_weights: "full": FP32 masters. "split": the 16-bit weight and a 16-bit remainder, 4 bytes in place of 6.
            "split24": an 8-bit remainder, 3 bytes; masters of 24 bits, and one-pass steps only. "none": the optimizer
            steps 16-bit parameters, and loses small updates.
        fused_step: "auto": SGD, Adam and AdamW are stepped by one kernel in a single pass where a compiled one serves
            the device and the step can be had (see ``repr``). True: by such a kernel or, without a compiler, by torch
            operations with the same bits. False: the wrapped optimizer's own step, to the bit.
        optimizer_state: "fp32": moments are FP32 tensors, 8 bytes a parameter with Adam. "8bit": SGD with momentum,
            Adam and AdamW (without amsgrad) keep codes, 2 bytes a parameter with Adam, of parameters from 4,096
            elements on. They step in one pass. Checkpoints hold FP32.
        gradient_release: True: each parameter is stepped in backward when its gradient arrives, and the gradient is
            freed. It takes a one-pass step, one backward a step, a static scale and no clip; a gradient that is not
            finite leaves its parameter alone, while others are stepped. "held": a code of 8 bits of each gradient is
            kept and stepped from; any scaler, and a clip.

    Raises:
        TypeError: ``optimizer`` is no torch Optimizer, or wrapped already.
        ValueError: Two of dynamic, loss_scale and scaler are given; a value or a parameter's dtype can't be served.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(4, dtype=torch.float16))
        >>> opt = MixedPrecisionOptimizer(torch.optim.SGD([weight], lr=2.0**-13), loss_scale=128.0)
        >>> opt.backward(weight.float().sum())
        >>> opt.step()
        >>> weight[0].item(), next(opt.master_params())[0].item()
        (1.0, 0.9998779296875)
    """

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        dynamic: bool = False,
        loss_scale: float | None = None,
        scaler: LossScaler | None = None,
        named_parameters: Iterable[tuple[str, Tensor]] | None = None,
        grad_accumulation: str = "model",
        on_model_write: str = "refresh",
        fused_step: bool | str = "auto",
        master_weights: str = "full",
        optimizer_state: str = "fp32",
        gradient_release: bool | str = False,
    ) -> None:
        if not isinstance(optimizer, Optimizer):
            raise TypeError(f"optimizer: expected a torch.optim.Optimizer, got {type(optimizer).__name__}.")
        if isinstance(optimizer, MixedPrecisionOptimizer):
            raise TypeError("optimizer: expected an optimizer that is not wrapped yet, got a MixedPrecisionOptimizer.")
        self._choices = Choices(
            grad_accumulation, on_model_write, fused_step, master_weights, optimizer_state, gradient_release
        )
        self._names = {id(param): name for name, param in named(named_parameters)}
        self._trials, self._certified = Trials(), Certified()
        self.scaler = make_scaler(dynamic, loss_scale, scaler)
        is_zero = parallel.is_zero(optimizer)
        self._choices.check(optimizer, self.scaler, self._names, self._trials, self._certified, is_zero)
        self.optimizer = optimizer
        self.master_weights = master_weights
        self.grad_accumulation = grad_accumulation
        self.on_model_write = on_model_write
        self.fused_step = fused_step
        self.optimizer_state = optimizer_state
        self.gradient_release = gradient_release
        with torch.inference_mode(False):
            self._make(optimizer, master_weights, on_model_write)
        make_hook_tables(self, self.optimizer)
        self._patch_step_function()

    def _make(self, optimizer: Optimizer, master_weights: str, on_model_write: str) -> None:
        kinds: dict[str, Callable[[], Masters]] = {
            "full": FullMasters,
            "none": NoMasters,
            "split": SplitMasters,
            "split24": functools.partial(SplitMasters, 24),
        }
        self._masters = kinds[master_weights]()
        self._holder = parallel.holder_of(optimizer)
        self._pairs = Pairs(self._holder.param_groups, self._names, self._adopter())
        for pair in self._pairs.all if master_weights != "none" else ():
            if pair.master is pair.model:
                self._carry_state(pair.model, pair.model)
        self._device = parallel.device_of(optimizer, self._pairs.masters)
        self._on_host = kernels.is_host(self._device)
        self.scaler.to(self._device)
        self._model_writes = ModelWrites(self._pairs, self._masters, on_model_write)
        self._outcome = Outcome()
        self._habits = ClosureHabits()
        self._warned: set[str] = set()
        self._compose()
        state_formats.adopt_all(self._state_format, self._pairs.all, self._holder)

    def _compose(self) -> None:
        """The components that live with gradients, which no copy has."""
        me = weakref.ref(self)
        self._state_format = self._choices.state_format(self.optimizer)
        facts = _quietly(me, MixedPrecisionOptimizer._facts, [])
        round_down = _quietly(me, MixedPrecisionOptimizer.write_masters, None)
        ranks = parallel.ranks_of(self.optimizer, self._pairs, facts, round_down)
        self._shared = SharedGradients(self._pairs)
        self._gradients: Any
        self._accumulation: Any
        if self.gradient_release:
            self._gradients = self._accumulation = Arrivals(self._pairs, self._device, self._make_taker())
        else:
            self._gradients = Gradients(self._pairs, self._masters, self._shared)
            sums = self.grad_accumulation == "fp32"
            self._accumulation = Accumulation(self._gradients, self._device, sums, ranks)
        self._under = UnderGradScaler(self._pairs, self._gradients, self._accumulation, self._shared)
        self._classes = MasterClasses(
            _quietly(me, MixedPrecisionOptimizer._show_gradient, None),
            _quietly(me, MixedPrecisionOptimizer._prepare_edit, False),
            _quietly(weakref.ref(self._shared), SharedGradients.assign, None),
        )
        self._classes.adopt(self._pairs)
        self._stepper: Stepper = self._make_released() if self.gradient_release else self._make_stepper()

    def _make_taker(self) -> Any:
        """What is done with gradients that arrive."""
        row = one_pass_step.require_row(self.optimizer)
        one_by_one = OneByOne(row, self.optimizer, self._pairs, self._masters, *self._forms(), self._trials)
        if self.gradient_release == "held":
            return HeldOnArrival(one_by_one)
        return SteppedOnArrival(one_by_one, self._model_writes, self._on_host)

    def _make_released(self) -> Stepper:
        """What ``step`` does with gradients that have arrived."""
        taker = self._accumulation.taker
        if self.gradient_release == "held":
            return HeldStep(self.optimizer, taker)
        self._outcome.all_or_nothing = False
        self._outcome.log.what = "parameters left alone while the others were stepped"
        self._outcome.log.advice = "Use a lower scale."
        return ReleasedStep(self.optimizer)

    def _make_stepper(self) -> Stepper:
        parts = self.optimizer, self._pairs, self._masters, self._gradients
        row = row_of(type(self.optimizer)) if self.fused_step else None
        why = no_row(type(self.optimizer)) if self.fused_step else "fused_step=False"
        general: Stepper = WrappedStep(*parts, self._classes, why) if self._masters.are_whole else StreamedStep(*parts)
        if row is None:
            return general
        return OnePassStep(self.fused_step, row, *parts, *self._forms(), general, self._trials)

    def _forms(self) -> tuple[StateFormat, str, Callable[[], int]]:
        """What a one-pass step works on: the state, the argument that leaves no other step, the number of the step."""
        return self._state_format, self._choices.needed_by, self._outcome.number

    def _adopter(self) -> Callable[[Tensor], Tensor] | None:
        """What makes masters; None where 16-bit parameters are their own."""
        return self._adopt if self._masters.are_apart else None

    def _adopt(self, model: Tensor) -> Tensor:
        """The master of a 16-bit parameter, with the optimizer state that the parameter had, in FP32."""
        master = self._masters.make(model)
        self._carry_state(model, master)
        return master

    def _carry_state(self, param: Tensor, master: Tensor) -> None:
        checkpoint.carry_state(self._holder, param, master)
        remake_first_state(self._holder, master)

    # -- what a torch optimizer shows --------------------------------------------------------------------------------

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The wrapped optimizer's param_groups: masters where there are masters, model parameters elsewhere."""
        if self._under.serves(self.scaler):
            if self._pairs.own_halves or len(self._holder.param_groups) != len(self._pairs.group_sizes):
                self._follow_groups()  # a GradScaler of torch's refuses 16-bit parameters that have no masters
            self._close_renewed()
            self._under.see()
        return self.optimizer.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """The wrapped optimizer's state, keyed by master; FP32."""
        return self._holder.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """The wrapped optimizer's defaults."""
        return self._holder.defaults

    @property
    def engine(self) -> Engine:
        """What it is composed of, for faces and distributed training. Not a stable interface."""
        return Engine(
            optimizer=self.optimizer,
            holder=self._holder,
            pairs=self._pairs,
            masters=self._masters,
            model_writes=self._model_writes,
            gradients=self._gradients,
            accumulation=self._accumulation,
            outcome=self._outcome,
            scaler=self.scaler,
            device=self._device,
            choices=self._choices,
        )

    def __repr__(self) -> str:
        inner = repr(self.optimizer).replace("\n", "\n  ")
        return (
            f"{type(self).__name__}(\n  optimizer: {inner}\n  scaler: {self.scaler!r}\n"
            f"  parameters: {self._summary()}\n  grad_accumulation: {self.grad_accumulation!r}, "
            f"on_model_write: {self.on_model_write!r}, master_weights: {self.master_weights!r}, "
            f"optimizer_state: {self.optimizer_state!r}, gradient_release: {self.gradient_release!r}\n"
            f"  step: {self._stepper.describe()}\n  memory: {self._measured()}\n)"
        )

    def _summary(self) -> str:
        """Counts of the kinds of parameters."""
        counts: dict[str, int] = {}
        for pair in self._pairs.all:
            kind = str(pair.model.dtype).removeprefix("torch.")
            if pair.master is not pair.model:
                kind += f" {self._masters.words}"
            elif pair.model.dtype in HALF_DTYPES:
                kind += " without masters" if self.master_weights == "none" else " frozen"
            counts[kind] = counts.get(kind, 0) + 1
        return ", ".join(f"{count} {kind}" for kind, count in counts.items()) or "none"

    def __getstate__(self) -> dict[str, Any]:
        """All but hooks, a scheduler's patch of ``step``, and gradients (torch copies parameters without theirs)."""
        self._model_writes.check_home("a copy or pickle")
        self._count_driven()
        self._model_writes.see_masters()
        kept = {name: value for name, value in self.__dict__.items() if name not in _NOT_COPIED}
        return {**kept, "_wrapped_extras": extras(self.optimizer), "_steps_counted": self.engine.steps_counted()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        left, counted = state.pop("_wrapped_extras"), state.pop("_steps_counted")
        self.__dict__.update(state)
        self._outcome.steps_taken = counted
        for name, value in left.items():
            self.optimizer.__dict__.setdefault(name, value)
        self._names = {}
        self._model_writes.count_anew()
        self._compose()
        make_hook_tables(self, self.optimizer)
        self._patch_step_function()

    @outside_inference
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, like ``torch.optim.Optimizer.add_param_group``; its 16-bit parameters get masters.

        Raises:
            TypeError: It is no dict, or its params are no tensors, or a set.
            ValueError: A parameter is here already, or has a dtype that can't be served. Nothing is changed then.
        """
        parallel.refuse_on_zero(self.optimizer, "add_param_group", "Add groups to it before it is wrapped.")
        self._pairs.verify()
        group, params, names = open_group(param_group)
        number = len(self.optimizer.param_groups)
        names = {**self._names, **names}
        self._pairs.check_new_group({**group, "params": params}, number, names)
        parallel.check_meshes([*self._pairs.models, *params])
        new = {**group, "params": params}
        self._choices.check_new_group(self.optimizer, new, number, names, self._trials, self._certified)
        self.optimizer.add_param_group(group)
        self._pairs.add_group(self.optimizer.param_groups[-1], number, names, self._adopter())
        self._grow()

    def _follow(self, *, verifies: bool = True) -> None:
        """Notice parameters that were changed, unfrozen, or added through the wrapped optimizer itself.

        Args:
            verifies: False leaves those that were changed to the step, where only gradients are looked at till then.
        """
        if self._model_writes.lent:
            self._model_writes.check_home(type(self).__name__)
        groups = self._holder.param_groups
        if self._pairs.are_more(groups, self._masters.are_apart, verifies):
            if self.master_weights == "split":
                self._certified.check(self.optimizer)
            self._pairs.verify()
            self._pairs.take_in(groups, self._names, self._adopter())
            self._grow()

    @outside_inference
    def _follow_groups(self) -> None:
        self._follow(verifies=False)

    def _grow(self) -> None:
        """Parameters or masters came."""
        self._model_writes.grown()
        self._gradients.grow()
        self._classes.adopt(self._pairs)
        if self._pairs.has_pieces:  # ask anew who must hear of verdicts and norms
            me = weakref.ref(self)
            facts = _quietly(me, MixedPrecisionOptimizer._facts, [])
            self._accumulation.ranks = parallel.ranks_of(self.optimizer, self._pairs, facts, lambda: None)

    def train(self, mode: bool = True) -> None:
        """Call ``train`` of the wrapped optimizer, where it has one (schedule-free ones), and let the model follow.

        Args:
            mode: False is :meth:`eval`.
        """
        switch = getattr(self.optimizer, "train" if mode else "eval", None)
        if callable(switch):
            self._model_writes.notice()
            switch()
            self.write_masters()

    def eval(self) -> None:
        """Call ``eval`` of the wrapped optimizer, where it has one (schedule-free ones), and let the model follow."""
        self.train(False)

    # -- gradients ---------------------------------------------------------------------------------------------------

    def scale_loss(self, loss: Tensor, *, scaler: LossScaler | None = None) -> Tensor:
        """``loss.float()`` times the loss scale. Call ``.backward()`` on it yourself.

        Args:
            loss: Floating, any shape, any device.
            scaler: Scale with this one instead of the optimizer's own.

        Returns:
            float32, of the loss's shape and device. No host sync.

        Raises:
            TypeError: The loss is not a floating tensor.
        """
        check_loss(loss)
        check_scaler(scaler)
        return self._scaled(loss, scaler)

    def _scaled(self, loss: Tensor, scaler: LossScaler | None) -> Tensor:
        """:meth:`scale_loss` of what was checked."""
        if self._shared.shown:
            self._close_driven()
        self._follow(verifies=self.gradient_release is True)  # else only gradients are looked at until the step
        pending: Pending = self._accumulation.enter(self.scaler if scaler is None else scaler)
        if loss.numel() == 1:
            self._accumulation.losses.append(loss.detach())  # a skip's log line says whether it was finite
        return loss.float() * pending.scale.to(loss.device)

    def backward(
        self,
        loss: Tensor,
        *,
        update_master_grads: bool = True,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        inputs: Any = None,
        scaler: LossScaler | None = None,
    ) -> None:
        """Scale the loss and run autograd.

        Gradients of FP32 and FP64 parameters are true when it returns: unscaled in place. Those of 16-bit parameters
        are neither read nor written: FP32 ones are made of them when a clip, a step or a reader needs them.

        Args:
            loss: One floating element, any device. An FP16 loss limits the scale to 2**15: its own gradient, the scale,
                enters the FP16 graph. End the model with ``.float()`` to lift that.
            update_master_grads: False leaves all gradients, scaled, to the user until :meth:`update_master_grads`, a
                clip or a step looks at them. Until then several add up in the model's dtype, whatever
                ``grad_accumulation`` is.
            retain_graph, create_graph, inputs: As for ``torch.Tensor.backward``.
            scaler: Scale with this one instead. Each backward of such a step is added to FP32 sums with its own scale,
                each scaler is updated by what its own backwards gave, and any overflow skips the step.

        Raises:
            TypeError, ValueError: The loss is not one floating element.
            RuntimeError: An earlier backward was interrupted and its gradients are incomplete; gradients were edited
                where that would be lost, or are there that this optimizer did not make.

        Syncs: never (parameters' gradients stay on their devices).
        """
        check_loss(loss, scalar=True)
        if scaler is not None:
            check_scaler(scaler)
        scaled = self._scaled(loss, scaler)
        try:
            torch.autograd.backward(scaled, None, retain_graph, create_graph, inputs=inputs)
        except BaseException:
            self._accumulation.interrupt()
            raise
        if update_master_grads:
            self._accumulation.arrived()
        if not (self._gradients.any_there() or self._pairs.has_pieces):  # FSDP2 may add up gradients of its own first
            warn_no_gradients(self._pairs.names, self._warned)

    @outside_inference
    def update_master_grads(self) -> None:
        """Make master gradients anew of the model's: times 1/scale, in FP32, checked and measured in one pass.

        Uses the scale of the backward that made them; called with no backward before it, the scaler's present scale.
        Called again on the same model gradients it gives the same bits, and undoes a clip; gradients of parameters
        that are their own masters, and FP32 sums, are unscaled once and stay as they are. No host sync.

        Raises:
            RuntimeError: A parameter's dtype, shape or device was changed; or a backward was interrupted.
        """
        self._accumulation.check_complete()
        self._follow()
        if self._accumulation.stage is Stage.READY and self._accumulation.has_strange():
            self._accumulation.take_foreign(self.scaler)
        self._accumulation.update()

    @outside_inference
    def clip_master_grads(
        self,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        params: Iterable[Tensor] | Tensor | None = None,
    ) -> Tensor:
        """Scale all master gradients so that their total norm is at most ``max_norm``.

        The factor is torch's, max_norm / (norm + 1e-6), at most 1; at 1 no gradient memory is touched. 16-bit gradients
        are read once, for flags and norm, and meet the factor when FP32 ones are made of them, or in the step itself.
        Where an element is not finite all gradients stay: ``step`` skips.

        Args:
            max_norm: Not negative.
            norm_type: p of the norm, positive; ``math.inf`` for the largest magnitude.
            error_if_nonfinite: Raise instead of leaving a non-finite norm to ``step``. Syncs with the device.
            params: Parameters of the model, or masters that are kept whole: the norm is that of their gradients, and
                the others stay. None: all of this optimizer. Those without a gradient may be any.

        Returns:
            The norm before clipping: float32, 0-dim, on the device; 0 where there are no gradients. No host sync.

        Raises:
            TypeError, ValueError: ``max_norm`` or ``norm_type`` is no number, negative or nan; ``params`` are no
                tensors, or one has a gradient and is not in this optimizer.
            RuntimeError: The norm is not finite and ``error_if_nonfinite``.
        """
        max_norm = check_number("max_norm", max_norm)
        norm_type = check_number("norm_type", norm_type, above_zero=True)
        if not self._accumulation.ranks.alone:
            self._accumulation.ranks.check_norm_type(norm_type)
        self._follow(verifies=False)
        of = None if params is None else self._pairs.chosen(params)
        verdict = self._settle(write=of is not None, norm_type=norm_type, of=of)
        norm = None if verdict is None else verdict.norm
        if verdict is None or norm is None:
            return torch.zeros((), dtype=torch.float32, device=self._device)
        if error_if_nonfinite and not bool(norm.isfinite()):
            raise RuntimeError(
                f"the total norm of order {norm_type} of the master gradients is {norm.item()}: it can't be clipped. "
                "Leave error_if_nonfinite=False to have step() skip, or see overflow_report() after it."
            )
        single, factor = self._outcome.clipped = backends.decide_clip(norm, verdict.found_inf, max_norm)
        if not (self._on_host and factor.item() == 1.0):  # elsewhere the kernel looks: nobody waits
            self._gradients.clip(factor, of)
        return single

    @outside_inference
    def clip_master_values(self, max_value: float, params: Iterable[Tensor] | Tensor | None = None) -> None:
        """Bring every element of all master gradients to at most ``max_value`` in size, as ``clip_grad_value_`` does.

        Where an element is not finite all gradients stay, and ``step`` skips: torch's would make numbers of infs.

        Args:
            max_value: Not negative.
            params: Parameters of the model, or masters that are kept whole, whose gradients are meant; None: all of
                this optimizer.

        Raises:
            TypeError, ValueError: As :meth:`clip_master_grads`.

        Syncs: never.

        Example:
            >>> weight = torch.nn.Parameter(torch.ones(2, dtype=torch.float16))
            >>> opt = MixedPrecisionOptimizer(torch.optim.SGD([weight], lr=1.0), loss_scale=128.0)
            >>> opt.backward((weight.float() * torch.tensor([0.25, -4.0])).sum())
            >>> opt.clip_master_values(0.5)
            >>> next(opt.master_params()).grad
            tensor([ 0.2500, -0.5000])
        """
        max_value = check_number("max_value", max_value)
        self._follow()
        of = None if params is None else self._pairs.chosen(params)
        verdict = self._settle(write=True)
        if verdict is not None:
            self._gradients.clip_values(max_value, verdict.found_inf, of)

    @outside_inference
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the model's and the masters' gradients and forget what was found in them.

        Args:
            set_to_none: Set ``.grad`` to None. The engine keeps the masters' gradient memory for the next step.
        """
        self._close_driven()
        self._accumulation.clear(set_to_none)
        self._shared.withdraw(set_to_none)

    def _settle(self, write: bool, norm_type: float | None = None, of: set[int] | None = None) -> Verdict | None:
        """The verdict on the gradients as they are now, whoever made them; None where there is nothing to step."""
        flag = self.__dict__.get("found_inf")
        if flag is not None:
            self.check_driven()
        if self._accumulation.stage is Stage.READY:
            if self._accumulation.has_strange():
                self._take_foreign()
            else:
                self._accumulation.take_zeros(self.scaler)
        elif self.__dict__.get("grad_scale") is not None and self._is_foreign():
            self._take_foreign()  # it has looked at them and left the unscaling to this step
        verdict: Verdict | None = self._accumulation.settle(write, norm_type, of)
        if verdict is not None and flag is not None:  # torch's protocol: a GradScaler hands over its own verdict
            found = torch.maximum(verdict.found_inf, flag.to(self._device).reshape(()).clamp(max=1.0))
            verdict = Verdict(found, [(scaler, found) for scaler, _ in verdict.of], verdict.norm)
        return verdict

    def _take_foreign(self) -> None:
        """Gradients came without the engine, and are to be stepped as they are, or as a GradScaler says."""
        if not self._under.serves(self.scaler):
            self._drop_handed_over()
            raise RuntimeError(
                "gradients were found that neither opt.backward(loss) nor opt.scale_loss(loss) made, and the loss "
                f"scale is {self.loss_scale:g}: they would be unscaled wrongly. Use opt.backward(loss); or, for a "
                "GradScaler to do the scaling, construct MixedPrecisionOptimizer without dynamic, loss_scale, scaler. "
                "Trainers that call backward themselves: Lightning, Accelerate, transformers, timm have a module in "
                "fp16opt.integrations."
            )
        if self.grad_accumulation == "fp32":
            warn_plain_backward(self._warned)
        self._accumulation.take_foreign(self.scaler, self.__dict__.get("grad_scale"))

    def _show_gradient(self, model: Tensor, master_grad: Tensor | None) -> None:
        """The gradient of a parameter's master, ``master_grad`` so far, is read. Nothing is looked at in autograd."""
        if torch._C._current_graph_task_id() != -1:
            return
        if self._is_driven() and self._accumulation.is_strange(model, master_grad):
            self._under.hand_over(self.scaler)
        self._accumulation.read(model)

    def _prepare_edit(self, model: Tensor, master_grad: Tensor | None) -> bool:
        """The gradient of a parameter's master is set: the others are made, so that the edit shows.

        Returns:
            Whether it is the model's gradient too: the model's parameters share their masters' gradients, or there are
            none yet that wait for a step, so that this one does.
        """
        if torch._C._current_graph_task_id() != -1:
            return False
        driven = self._is_driven()
        if driven and (self._accumulation.is_strange(model, master_grad) or self._accumulation.strange()):
            self._under.hand_over(self.scaler)
        if self._accumulation.stage is Stage.READY:
            self._accumulation.assign(model)
            return driven and CAN_SHARE and not (self._gradients.summing or self.gradient_release)
        if not self._gradients.made:
            self._accumulation.read(model)
        return self._is_foreign() and self._shared.positions is not None

    def _is_driven(self) -> bool:
        """Whether a GradScaler may be driving. What it has left out is counted then, where others have come since."""
        if self.scaler.dynamic or not (self._accumulation.stage is Stage.READY or self._is_foreign()):
            return False
        if not self._under.serves(self.scaler):
            return False
        self._close_renewed()
        return True

    # -- the step ----------------------------------------------------------------------------------------------------

    @between_hooks
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step the wrapped optimizer on the masters and copy them to the model, unless a gradient was not finite.

        A skipped step leaves parameters, optimizer state and step counts as they were. Then the loss scale is updated.
        Without a backward before it there is nothing to do.

        Args:
            closure: Clears gradients, computes the loss, calls ``backward`` on this optimizer and returns the loss. It
                is evaluated once, before the step, and an overflow is one skip. Optimizers that evaluate more than once
                (LBFGS, SAM) do so: the model holds the masters' values before each evaluation, one that overflows
                lowers the scale and is evaluated again, and where the scale can't go lower, or the closure made no
                gradients, everything is restored and one skip is counted.

        Returns:
            The closure's loss, also where the step was skipped; what the wrapped optimizer's ``step`` returns without a
            closure, and where it evaluates more than once (LBFGS: the first loss).

        Raises:
            LossScaleError: ``max_consecutive_skips`` steps in a row were not finite.
            RuntimeError: Gradients came by a plain ``loss.backward()`` while the scale is not 1; they were written
                where that can't count; the model was written and ``on_model_write="error"``; parameters changed dtype,
                shape or device.

        Syncs: not on the CPU or where the step skips on the device itself (torch's fused ones, and CUDA's
        one-pass steps); once elsewhere, where the decision is taken.
        """
        if closure is not None:
            return self._step_with(closure)
        frees_gradients = self._gradients.summing  # which may leave others in their memory
        with (read_once if self._stepper.reads_once and not frees_gradients else read_anew)():
            return self._step_once(None)

    def _step_once(self, closure: Callable[[], Any] | None) -> Any:
        self._follow()
        verdict = self._settle(write=not self._stepper.takes_waiting())
        if verdict is None:
            self._outcome.nothing()
            return None
        found_inf = verdict.found_inf
        on_device = not self._on_host and self._skips_on_device(verdict)
        skipped: bool | Tensor = found_inf if on_device else bool(found_inf)
        if skipped is True and self._stepper.all_or_nothing:
            self.optimizer._opt_called = True  # type: ignore[attr-defined]  # else its scheduler warns of a wrong order
            self._close(verdict, skipped=True)
            return None
        self._model_writes.notice(waits=self._on_host)
        try:
            loss = self._stepper.step(found_inf if on_device else None, closure)
        except StepFailed as failed:
            if failed.completed:
                self._model_writes.agree(self._stepper.rounded_all, self._on_host)
                self._close(verdict, skipped=False if on_device else skipped)
            raise failed.error from None
        self._model_writes.agree(self._stepper.rounded_all, self._on_host)
        self._close(verdict, skipped=skipped)
        return loss

    def _step_with(self, closure: Callable[[], Any]) -> Any:
        if not callable(closure):
            raise TypeError(f"closure: expected a callable that returns the loss, got {type(closure).__name__}.")
        if self._holder is not self.optimizer:
            parallel.refuse_on_zero(
                self.optimizer, "step(closure)", "Use an optimizer that steps without one, or FSDP2."
            )
        self._close_driven()
        if self._evaluates_again():
            if not self._masters.are_whole:
                name = type(self.optimizer).__name__
                raise RuntimeError(
                    f"{name} evaluates its closure more than once in a step, or at a time of its own, "
                    'which does not go with master_weights="split". Use master_weights="full".'
                )
            return self._step_evaluating(closure)
        with self._evaluating(), torch.enable_grad():
            loss = closure()
        self._step_once(_Given(loss))
        return loss

    @contextlib.contextmanager
    def _evaluating(self) -> Iterator[None]:
        self._under.evaluates = True
        try:
            yield
        finally:
            self._under.evaluates = False

    def _evaluates_again(self) -> bool:
        """Whether the wrapped optimizer evaluates its closure more than once, or at a time of its own."""
        return self._habits.calls_again(self.optimizer)

    def _step_evaluating(self, closure: Callable[[], Any]) -> Any:
        self._follow()
        self._model_writes.notice()
        evaluations = Evaluations(closure, self.write_masters, self._accumulation)
        try:
            with self._evaluating():
                stepped = evaluations.step(self.optimizer, copies=self._masters.are_whole)
        except BaseException:
            self.zero_grad()
            raise
        if evaluations.verdict is None:
            self._outcome.nothing()
        else:
            self._close(evaluations.verdict, skipped=not stepped)
        if not stepped:
            self.zero_grad()
        return evaluations.returned if stepped else evaluations.loss

    def _skips_on_device(self, verdict: Verdict) -> bool:
        """Whether the decision can stay on a device at which a look would wait."""
        return (
            self._stepper.skips_on_device()
            and not self._accumulation.replicas.needs_decision
            and all(scaler.max_consecutive_skips is None for scaler, _ in verdict.of)
        )

    def _close(
        self, verdict: Verdict, skipped: bool | Tensor, used: Sight | None = None, goes_on: bool = False
    ) -> None:
        """The one end of every step: count, update the scalers (so that gradients met the scale of their backward).

        Args:
            used: The model's gradients that it was about, where others may be there by now.
            goes_on: A GradScaler's iteration is to be counted before it is over: gradients stay as they are.
        """
        if self._shared.counted is not None and bool(skipped):
            self._end_driven(used)
            return
        old = float(self.scaler.scale) if skipped is True else 0.0
        finite = are_finite(self._accumulation.losses) if skipped is True else None
        flags = [] if skipped is False else self._gradients.flags()
        skipped = self._outcome.close(verdict, skipped, flags, self._gradients.stats)
        if goes_on:
            self._shared.count()
        else:
            self._accumulation.finish(used)
            if self._shared.handed is not None:
                self._shared.forget()
        if not self._accumulation.replicas.alone:
            self._accumulation.replicas.after_step(skipped, self._digest)
        if skipped is not False or self._outcome.log.calibrating:
            self._outcome.tell(skipped, self.scaler, old, finite, verdict, self._pairs)

    # -- under a GradScaler ------------------------------------------------------------------------------------------

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Whether a GradScaler that comes is to tell ``step`` so, which refuses where there is a scale of its own.

        Elsewhere it must leave this alone, unless a user sets it: Lightning would refuse to clip, and Accelerate miss
        skips.
        """
        return self._tells_step or not self._under.serves(self.scaler)

    @_step_supports_amp_scaling.setter
    def _step_supports_amp_scaling(self, value: bool) -> None:
        self._tells_step = value

    _tells_step = False

    def _is_foreign(self) -> bool:
        pending = self._accumulation.pending
        return pending is not None and pending.foreign

    def check_driven(self) -> None:
        """A GradScaler came.

        Raises:
            RuntimeError: The gradients were made by :meth:`backward`, with a loss scale of this optimizer.
        """
        pending = self._accumulation.pending
        if pending is None or pending.foreign or self._under.serves(self.scaler):
            return
        self._drop_handed_over()
        raise RuntimeError(
            f"opt.backward(loss) made the gradients at this optimizer's loss scale of {self.loss_scale:g}, and a "
            "GradScaler came to unscale them by its own. Drop one of the two: call opt.step() without a GradScaler; or "
            "construct MixedPrecisionOptimizer without dynamic, loss_scale, scaler and call scaler.scale(loss)"
            ".backward()."
        )

    def _drop_handed_over(self) -> None:
        """What a GradScaler left for this step: torch's takes it back only where ``step`` returns."""
        for name in ("grad_scale", "found_inf"):
            self.__dict__.pop(name, None)

    def note_left_out(self, is_logged: bool = True) -> None:
        """A GradScaler did not call :meth:`step` because it found gradients that are not finite: count the skip.

        torch's own tells nobody; then it is counted when other gradients come, or when somebody asks.

        Args:
            is_logged: Whether the GradScaler logs it.
        """
        self._close_driven(is_logged, used=Sight(self._gradients.of_model()))  # edits since unscale_ count among them

    def _close_driven(self, is_logged: bool = False, used: Sight | None = None) -> None:
        """End the step that a GradScaler did not call because of what it found. Syncs where one drives."""
        if not self.scaler.dynamic and self._under.serves(self.scaler):
            if self._shared.counted is not None:
                self._close_renewed()
            if self._shared.counted is not None:
                self._end_driven(used or self._under.used())
            else:
                self._close_left_out(self._under.left_out(self.scaler), is_logged, used)

    def _end_driven(self, used: Sight | None) -> None:
        """The iteration is over whose skip was counted before."""
        self._accumulation.finish(used)
        self._shared.forget()

    def _count_driven(self) -> None:
        """Count it because somebody asks, be it in the midst of the iteration: what follows there changes nothing."""
        if not self.scaler.dynamic and self._under.serves(self.scaler):
            self._close_renewed()
            self._close_left_out(self._under.left_out(self.scaler), goes_on=True)

    def _close_renewed(self) -> None:
        """End it where gradients of the next iteration have come."""
        if self._shared.is_over:
            self._end_driven(self._shared.counted)
        elif self._shared.handed is not None:
            self._close_left_out(self._under.renewed(self.scaler))

    @outside_inference
    def unscale_driven(self, inv_scale: Tensor) -> Tensor | None:
        """Make unscaled FP32 gradients of those that came by a plain backward, in one pass: a GradScaler of ours asks.

        Args:
            inv_scale: float32, 0-dim, any device: 1 / the scale that they were made with.

        Returns:
            float32, 0-dim: 1.0 where one is not finite, else 0.0. None where nothing was done: there are none, or they
            are to be unscaled where they lie, for this optimizer has a scale of its own, no masters, or other ranks'
            gradients to hear of. No sync.
        """
        spread = self._pairs.has_pieces or not self._accumulation.ranks.alone or self._accumulation.replicas.local
        if spread or not self._masters.are_apart or not self._under.serves(self.scaler):
            return None
        self._follow(verifies=False)
        self._close_renewed()
        found = self._under.hand_over(self.scaler, inv_scale)
        if found is not None and self.grad_accumulation == "fp32":
            warn_plain_backward(self._warned)
        return found

    def _close_left_out(
        self, verdict: Verdict | None, is_logged: bool = False, used: Sight | None = None, goes_on: bool = False
    ) -> None:
        if verdict is None:
            return
        self._outcome.log.elsewhere = is_logged
        try:
            self._close(verdict, skipped=True, used=used or self._under.used(), goes_on=goes_on)
        finally:
            self._outcome.log.elsewhere = None

    # -- state to read -----------------------------------------------------------------------------------------------

    @property
    def loss_scale(self) -> float:
        """The scaler's present scale. Reading syncs with the device. Set it between steps only."""
        return float(self.scaler.scale)

    @loss_scale.setter
    def loss_scale(self, value: float) -> None:
        if self._accumulation.waits_for_step():
            raise RuntimeError(
                "loss_scale was set between backward and step: gradients made with the old scale would be unscaled "
                "wrongly. Set it after step() or zero_grad()."
            )
        with naming_loss_scale():
            self.scaler.set_scale(value)

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last ``step`` was skipped for non-finite gradients. Reading may sync with the device."""
        self._look_back()
        return self._outcome.last_was_skipped

    @property
    def skipped_steps(self) -> int:
        """Steps skipped, those before a checkpoint that was loaded included. Reading may sync with the device."""
        self._look_back()
        return self._outcome.skipped_steps

    def overflow_report(self) -> list[Overflow]:
        """Which parameters had non-finite gradients when the last step was skipped; empty when it was not. Syncs."""
        self._look_back()
        return self._outcome.report(self._pairs)

    def stats(self) -> dict[str, float]:
        """What is known of the run so far, in plain numbers under constant keys, for any logger.

        All comes from passes that are made anyway. Counts are of this rank, and go on where :meth:`load_state_dict`
        loaded what :meth:`state_dict` gave.

        Returns:
            ``loss_scale``: the next backward's.
            ``steps``: calls of ``step`` that had gradients (replays of a CUDA graph are not counted).
            ``skipped_steps``, ``skipped_in_a_row``: for non-finite gradients, in all and up to now.
            ``steps_since_calibration``: those taken, of which there are none before the scale is found.
            ``step_was_skipped``: 1 if the last one was, else 0; ``parameters_blamed``: how many then had a gradient
            that was not finite.
            ``grad_norm``, ``clip_factor``: the norm before the last ``clip_master_grads``, and what that multiplied
            gradients by; nan before the first.
            ``model_writes_taken``: weights that something else wrote and masters took, one each parameter and step.

        Syncs: once, where the numbers are on a device (and once more where a GradScaler drives).

        Example:
            >>> weight = torch.nn.Parameter(torch.ones(4, dtype=torch.float16))
            >>> opt = MixedPrecisionOptimizer(torch.optim.SGD([weight], lr=1.0), dynamic=True)
            >>> opt.backward(weight.float().sum() * float("inf"))
            >>> opt.step()
            >>> stats = opt.stats()
            >>> stats["loss_scale"], stats["skipped_steps"], stats["parameters_blamed"]
            (32768.0, 1, 1)
        """
        self._count_driven()
        norm, factor = self._outcome.clipped or (float("nan"), float("nan"))
        found = self._outcome.numbers()
        untold = [one.to(self._device) for one in self._model_writes.untold()]
        numbers = read_at_once(
            {
                "loss_scale": self.scaler.scale,
                **found,
                "skipped_in_a_row": self.scaler.consecutive_skips,
                "grad_norm": norm,
                "clip_factor": factor,
                "model_writes_taken": sum(untold, start=self._model_writes.taken),
            }
        )
        numbers["steps_since_calibration"] = max(0, numbers["steps"] - numbers["skipped_steps"])
        fractions = ("loss_scale", "grad_norm", "clip_factor")
        return {name: value if name in fractions else int(value) for name, value in numbers.items()}

    def _look_back(self) -> None:
        """Somebody asks what became of steps: count and tell what was not yet. May sync."""
        self._count_driven()
        self._model_writes.tell_if_due()

    def master_params(self) -> Iterator[Tensor]:
        """What the wrapped optimizer steps, in param_groups order: FP32 masters, and parameters that are their own."""
        self._pairs.verify()
        if self._pairs.own_halves:  # one that was unfrozen has a master too
            self._follow_groups()
        if self._masters.are_whole:
            return iter(list(self._pairs.masters))
        self._model_writes.check_home("master_params()")  # the weights are part of them
        return self._masters.shown(self._pairs.all)

    def model_params(self) -> Iterator[Tensor]:
        """The model's parameters, in param_groups order; pairs with :meth:`master_params`."""
        return iter(list(self._pairs.models))

    def memory(self) -> Memory:
        """What the tensors of this training take now on this rank, by kind; activations are the model's business.

        Gradients are those that are there: call it between ``backward`` and ``step`` to see them.

        Returns:
            Bytes; ``str`` of it says how many a parameter. No sync.

        Example:
            >>> weight = torch.nn.Parameter(torch.ones(1000, dtype=torch.float16))
            >>> opt = MixedPrecisionOptimizer(torch.optim.AdamW([weight]))
            >>> opt.memory().masters
            4000
        """
        self._pairs.verify()
        return self._measured()

    def _measured(self) -> Memory:
        """Bytes by kind, also where parameters were changed since."""
        apart = [pair for pair in self._pairs.all if pair.master is not pair.model]
        masters = [[pair.master for pair in apart], [self._masters.operand(pair) for pair in apart]]
        kinds = {
            "weights": self._pairs.models,
            "masters": masters,
            "moments": self._holder.state,
            "gradients": self._gradients.tensors(),
            "engine": self,
        }
        return measure(self._pairs.models, kinds)

    # -- checkpoints and the model's own weights ---------------------------------------------------------------------

    def state_dict(self, *, compact: bool = False) -> dict[str, Any]:
        """Plain tensors, numbers, strings, lists and dicts: ``torch.load(weights_only=True)`` reads them back.

        Keys: ``version``, ``optimizer`` (the wrapped optimizer's own), ``masters`` (FP32, in param_groups order, None
        where a parameter is its own master), ``scaler``, ``steps`` (how many were taken). Tensors are references, as in
        torch, but for FP32 ones of what is kept in fewer bits.

        Args:
            compact: Of state that is kept in 8 bits, give codes and not FP32 moments. Other programs can't read these.
        """
        parallel.refuse_plain_state(self._accumulation.ranks.alone, "state_dict")
        for pre_hook in self._optimizer_state_dict_pre_hooks.values():
            pre_hook(self)
        self._follow()
        self._model_writes.notice()
        self._look_back()
        counts = self.engine.steps_counted(), self._outcome.skipped_steps
        built = checkpoint.build(self.optimizer, self._saved_masters(), self.scaler, *counts)
        if row_of(type(self.optimizer)) is not None:
            built["optimizer"] = counters_saved(built["optimizer"])
        if self.optimizer_state == "8bit":
            built["optimizer"] = state_formats.saved(built["optimizer"], compact)
        for post_hook in self._optimizer_state_dict_post_hooks.values():
            changed = post_hook(self, built)
            built = built if changed is None else changed
        return built

    def _saved_masters(self) -> list[Tensor | None]:
        """FP32 masters in order, None where a parameter is its own: a value has one home in a checkpoint."""
        return [None if pair.master is pair.model else self._masters.read([pair])[0] for pair in self._pairs.all]

    @outside_inference
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what :meth:`state_dict` gave, or the wrapped class's own state_dict (from FP32 training).

        Everything is validated first. Masters are written to the model too, so model and optimizer may be loaded in
        either order. Tensors are copied. Gradients of :meth:`backward` that wait for a step are dropped from it.

        Raises:
            TypeError, ValueError: Something does not fit; the optimizer is as it was.
        """
        parallel.refuse_plain_state(self._accumulation.ranks.alone, "load_state_dict")
        if isinstance(state_dict, dict):
            state_dict = dict(state_dict)
        for pre_hook in self._optimizer_load_state_dict_pre_hooks.values():
            changed = pre_hook(self, state_dict)
            state_dict = state_dict if changed is None else changed
        self._follow()
        self.load_checked(state_dict)
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    def load_checked(self, state_dict: dict[str, Any], everywhere: Callable[..., Any] | None = None) -> None:
        """Check ``state_dict`` and load it, without hooks: for those who come with a form of their own.

        Args:
            everywhere: Calls what it is given, and refuses on all ranks what one of them refuses.

        Raises:
            TypeError, ValueError: Something does not fit; the optimizer is as it was.
        """
        check = everywhere or (lambda work: work())
        state_dict = check(lambda: self._decoded(state_dict))
        thawed = self._to_thaw(state_dict)
        masters = self._saved_masters()
        for position in thawed:  # they get a master if all fits
            masters[position] = self._pairs.models[position].detach().float()
        plan = check(lambda: self._plan(state_dict, masters))
        check(lambda: self._check_loaded(state_dict))
        if thawed:
            self._pairs.give_masters([self._pairs.all[i] for i in thawed], self._holder.param_groups, self._adopt)
            self._grow()
        if not plan.has_masters:  # else weights that were loaded just before would be undone below
            self._model_writes.notice()
        masters = self._saved_masters()
        self._plan(state_dict, masters).apply()
        if plan.has_masters:
            self._outcome.steps_taken = state_dict.get("steps", 0)
            self._outcome.skipped_steps = state_dict.get("skipped_steps", 0)
        self._take_loaded(masters)

    def _decoded(self, state_dict: Any) -> Any:
        """A checkpoint with FP32 state in place of codes, of which the optimizer can make its own.

        Raises:
            TypeError, ValueError: Codes are damaged, or a moment can't be kept in 8 bits.
        """
        found = state_formats.expanded(state_dict, self._pairs.names)
        if self.optimizer_state == "8bit":
            state_formats.check_moments(found, self._pairs.names)
        return found

    def _to_thaw(self, state_dict: Any) -> list[int]:
        """Where a checkpoint has a master, and the parameter is frozen here: the checkpoint decides."""
        saved = state_dict.get("masters") if isinstance(state_dict, dict) else None
        if not isinstance(saved, (list, tuple)) or len(saved) != len(self._pairs) or self.master_weights == "none":
            return []
        frozen = {id(pair) for pair in self._pairs.own_halves}
        return [i for i, pair in enumerate(self._pairs.all) if id(pair) in frozen and isinstance(saved[i], Tensor)]

    def _check_loaded(self, state_dict: Any) -> None:
        """Raise ``ValueError`` where a checkpoint's groups could not be stepped."""
        saved = (state_dict["optimizer"] if is_ours(state_dict) else state_dict).get("param_groups", [])
        groups = [
            {**here, **told, "params": [pair.model for pair in self._pairs.all if pair.group == number]}
            for number, (here, told) in enumerate(zip(self._holder.param_groups, saved, strict=False))
        ]
        self._choices.check_groups(self.optimizer, groups, 0, self._names, self._trials)

    def _plan(self, state_dict: Any, masters: list[Tensor | None]) -> checkpoint.LoadPlan:
        return checkpoint.plan_load(
            state_dict, optimizer=self._holder, masters=masters, names=self._pairs.names, scaler=self.scaler
        )

    def _take_loaded(self, masters: list[Tensor | None]) -> None:
        """Masters take the values into which a checkpoint was loaded; the model and the state follow."""
        for pair, value in zip(self._pairs.all, masters, strict=True):
            if value is not None and not self._masters.are_whole:
                self._masters.write([pair], [value])
        self._masters.lay_out(self._pairs.all, self.state)
        state_formats.adopt_all(self._state_format, self._pairs.all, self._holder)
        self._pairs.changed()
        self._accumulation.abandon()
        self.write_masters()

    def fp32_state_dict(self, model: torch.nn.Module) -> dict[str, Any]:
        """``model.state_dict()`` with FP32 masters in place of 16-bit parameters, under all their names.

        Buffers and parameters without a master are the model's own. Tensors are references to the live ones.

        Raises:
            TypeError: ``model`` is no Module.
            ValueError: None of its parameters is in this optimizer.
        """
        self._pairs.check_model(model)
        self._follow()
        self._model_writes.notice()
        self._model_writes.tell_if_due()
        apart = {id(pair.model): pair for pair in self._pairs.all if pair.master is not pair.model}
        state: dict[str, Any] = model.state_dict(keep_vars=True)
        made: dict[int, Tensor] = {}
        for name, value in state.items():
            if isinstance(value, Tensor):
                if id(value) not in made:
                    pair = apart.get(id(value))
                    made[id(value)] = value.detach() if pair is None else self._masters.read([pair])[0].detach()
                state[name] = made[id(value)]
        return state

    @outside_inference
    def refresh_masters(self) -> None:
        """Masters take the model parameters' values, for code that wrote the model in place. No host sync."""
        self._follow()
        for pair in self._pairs.all:
            if pair.master is not pair.model:
                self._masters.refresh(pair)
        self._model_writes.record()

    def write_masters(self) -> None:
        """The model takes the masters' values, rounded, for code that wrote the masters in place. No host sync."""
        self._model_writes.check_home(type(self).__name__)
        if self._pairs.has_pieces:
            self._pairs.take_pieces()
        with torch.no_grad():
            for group in self._pairs.devices:
                self._masters.round_down(group)
        self._model_writes.agree(rounded_all=True, waits=self._on_host)

    # -- on several ranks --------------------------------------------------------------------------------------------

    def _facts(self) -> list[str]:
        """What must be the same on every rank, in lines."""
        return parallel.facts(self.engine)

    def _digest(self) -> Digest:
        """What ranks that share gradients hold alike."""
        return parallel.digest(self.engine)


class _Given:
    """A closure that was evaluated already. An optimizer that calls it twice in a step is one that was misjudged."""

    def __init__(self, loss: Any) -> None:
        self._loss = loss
        self._called = False

    def __call__(self) -> Any:
        if self._called:
            raise RuntimeError(
                "the wrapped optimizer evaluated its closure a second time in one step, and on small tensors it did "
                "not. Evaluate the loss yourself, call backward(loss), then step() without a closure."
            )
        self._called = True
        return self._loss


def _quietly(me: weakref.ref[Any], method: Callable[..., Any], without: Any) -> Callable[..., Any]:
    """A call of a method that does not keep the optimizer alive; ``without`` once it is gone."""

    def call(*arguments: Any) -> Any:
        there = me()
        return without if there is None else method(there, *arguments)

    return call
