"""MixedPrecisionOptimizer: composes the engine's components, and is what users call."""

from __future__ import annotations

import contextlib
import functools
import operator
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch import Tensor
from torch.optim import Optimizer

from . import kernels, parallel
from .deltas import WeightDelta
from .engine import checkpoint, errors
from .engine.arguments import (
    check_loss,
    check_number,
    check_scaler,
    make_scaler,
    named,
)
from .engine.attributes import convert_attributes
from .engine.config import Config, GradAccumulation, MasterWeights, OffloadTo, OnModelWrite, OptimizerState
from .engine.diagnostics import (
    HeldLine,
    Lines,
    Overflow,
    describe,
    warn_eps,
)
from .engine.folded import unmark
from .engine.fused_registry import counters_saved, no_fused_step, steps_on_device
from .engine.gradients import StepState
from .engine.look import Look
from .engine.masters import Home, Masters, NoMasters, on_memory_of, ordinary_parameters, own_masters
from .engine.missing_scale import WayToScale, warn_missing_scale, without_scale
from .engine.model_writes import ModelWrites
from .engine.modes import state8
from .engine.modes.changes import Changes, require_tensors
from .engine.modes.closures import EvaluatedClosure, MasterReevaluations, closure_mode
from .engine.modes.offload import OnHost
from .engine.modes.release import ReleasedStep, ReleasingState, check_release
from .engine.modes.split import SplitMasters
from .engine.modes.sums import SummingState
from .engine.one_pass import OnePassStep, check_one_pass
from .engine.outcome import Outcome, read_at_once
from .engine.params import HALF_DTYPES, ParamTable, StateByParam, labelled
from .engine.passes import Gradients
from .engine.ranks import Facts
from .engine.schema import is_ours
from .engine.stage import BackwardScale, Check, Ready, ScaledBy
from .engine.step import Step
from .engine.true_gradients import TrueGradients
from .engine.wrapped_step import (
    HOOKS,
    STEP_HOOKS_OF_ALL,
    WrappedOptimizerGuard,
    WrappedStep,
    extras,
    is_guarded,
    make_hook_tables,
    note_step,
    own_step_hooks,
    remake_first_state,
)
from .kernels import backends
from .kernels.host_memory import Shelf
from .kernels.readings import Rows
from .memory import Memory, apart_from, found_in, measure
from .scaling import LossScaler

_NOT_COPIED = (
    *HOOKS,
    "step",
    "gradients",
    "step_state",
    "_true_gradients",
    "_spec",
    "_shelf",
    "_stepper",
    "_guard",
    "_names",
)

Method = TypeVar("Method", bound=Callable[..., Any])


def outside_inference(method: Method) -> Method:
    """Have a method make ordinary tensors, also where it is called under ``torch.inference_mode``."""

    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_inference_mode_enabled():
            return method(*args, **kwargs)
        with torch.inference_mode(False):
            return method(*args, **kwargs)

    return cast(Method, call)


def public(method: Method) -> Method:
    """A call of the user's, which makes ordinary tensors, and runs between what ``torch.compile`` makes graphs of."""
    return cast(Method, torch._disable_dynamo(outside_inference(method)))  # type: ignore[attr-defined]


def between_hooks(step: Method) -> Method:
    """An optimizer's ``step`` between its step hooks, and outside of inference mode.

    torch's own wrapper also opens a frame for the profiler in every step, which takes as long as a step of some small
    tensors does: it is opened where a profiler runs.
    """
    inner = outside_inference(step)
    framed = Optimizer.profile_hook_step(inner)

    @functools.wraps(step)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            if any((*own_step_hooks(self), *STEP_HOOKS_OF_ALL)) or torch.autograd.profiler._is_profiler_enabled:
                returned = framed(self, *args, **kwargs)
                self.model_writes.write_edited()
                return returned
            return (inner if torch.is_inference_mode_enabled() else step)(self, *args, **kwargs)
        except BaseException:
            for name in ("grad_scale", "found_inf"):  # torch's GradScaler takes them back only where ``step`` returns
                self.__dict__.pop(name, None)
            raise

    hidden = torch._disable_dynamo(call)  # type: ignore[attr-defined]
    hidden.hooked = True  # type: ignore[attr-defined]  # by this torch knows that a step has its wrapper
    return cast(Method, hidden)


class MixedPrecisionOptimizer(parallel.AcrossRanks, Optimizer):
    """Any ``torch.optim.Optimizer``, stepping FP32 masters of a model with FP16 or BF16 weights.

    It keeps an FP32 master of every FP16 and BF16 parameter, owns the loss scale, and moves gradients up and weights
    down with fused kernels. The master of an FP32 or FP64 parameter lies on the weight's memory. Each has a ``.grad``
    of its own: the model's is the scaled one, the master's the true one, always. ``param_groups``, ``state`` and
    ``defaults`` are the wrapped optimizer's own; groups hold what it steps: masters.

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
            "split24": an 8-bit remainder, 3 bytes; masters of 24 bits. Both are stepped in one pass alone. "none": the
            optimizer steps 16-bit parameters, and loses small updates.
        fused_step: "auto": SGD, Adam, AdamW, Lion and registered classes are stepped by one kernel in a single pass,
            where a compiled kernel serves the device and nothing stands in the way (see ``repr``). True: by such a
            kernel or, without one, by torch operations with the same bits. False: the wrapped optimizer's own step, to
            the bit.
        optimizer_state: "fp32": moments are FP32 tensors, 8 bytes a parameter with Adam. "8bit": SGD with momentum,
            Adam and AdamW (without amsgrad) keep codes, 2 bytes a parameter with Adam, of matrices from 4,096
            elements and 64 a row on. They step in one pass. Checkpoints hold FP32.
        offload: "cpu": masters or remainders, moments or codes lie in page-locked memory of the host, asked for here,
            and the card steps them over the link. Results are those without. It takes a one-pass step on a CUDA card.
        gradient_release: True: each parameter is stepped in backward when its gradient arrives, and the gradient is
            freed. It takes a one-pass step, one backward a step, a static scale and no clip; a gradient that is not
            finite leaves its parameter alone, while others are stepped.
        track_changes: True: every pass that writes the model's weights marks which got other bits, one bit a parameter,
            for :meth:`take_delta`.
        closure: How ``step(closure)`` evaluates. "once": once, before the step. "reevaluate": whenever the wrapped
            optimizer calls it (SAM and its like); the model holds the masters' values each time, and an evaluation that
            overflows lowers the scale and is made again. None: "reevaluate" for LBFGS, "once" for all others.

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

    _step_supports_amp_scaling = True
    """torch.amp.GradScaler's protocol: it calls ``step`` for a skip too, and hands over its scale and what it found."""

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        dynamic: bool = False,
        loss_scale: float | None = None,
        scaler: LossScaler | None = None,
        named_parameters: Iterable[tuple[str, Tensor]] | None = None,
        grad_accumulation: GradAccumulation = "model",
        on_model_write: OnModelWrite = "refresh",
        fused_step: bool | str = "auto",
        master_weights: MasterWeights = "full",
        optimizer_state: OptimizerState = "fp32",
        offload: OffloadTo | None = None,
        gradient_release: bool = False,
        closure: str | None = None,
        track_changes: bool = False,
    ) -> None:
        if not isinstance(optimizer, Optimizer):
            raise TypeError(f"optimizer: expected a torch.optim.Optimizer, got {type(optimizer).__name__}.")
        if isinstance(optimizer, MixedPrecisionOptimizer) or is_guarded(optimizer):
            raise errors.WRAPPED_TWICE(optimizer=type(optimizer).__name__)
        self.config = Config(
            grad_accumulation,
            on_model_write,
            fused_step,
            master_weights,
            optimizer_state,
            gradient_release,
            closure,
            track_changes,
            offload,
        )
        self._names = {id(param): name for name, param in named(named_parameters)}
        self.scaler = make_scaler(dynamic, loss_scale, scaler)
        self._may_lack_scale = self.scaler.is_default
        part = parallel.part_of(optimizer)
        if gradient_release:
            check_release(part, self.scaler, part is not optimizer)
        self._check_new(part)
        self.optimizer = optimizer
        self.master_weights = master_weights
        self.grad_accumulation = grad_accumulation
        self.on_model_write = on_model_write
        self.fused_step = fused_step
        self.optimizer_state = optimizer_state
        self.gradient_release = gradient_release
        self.offload_to = offload
        with torch.inference_mode(False):
            self._make(optimizer, master_weights, on_model_write)
        make_hook_tables(self, self.optimizer)
        self._patch_step_function()
        self.way_to_scale = self._way_to_scale()

    def _check_new(self, optimizer: Optimizer) -> None:
        """Raise ``ValueError`` where an optimizer that is about to be wrapped does not go with the arguments."""
        self._spec: Any = state8.spec_of(self.config.optimizer_state, type(optimizer))
        groups = optimizer.param_groups
        kinds: dict[str, Callable[[Home], Masters]] = {
            "full": Masters,
            "none": NoMasters,
            "split": SplitMasters,
            "split24": functools.partial(SplitMasters, bits=24),
        }
        self.masters = kinds[self.config.master_weights](OnHost() if self.config.offload else Home())
        check_one_pass(self.config, optimizer, self._spec, groups, self._names, is_new=True)
        if self.config.optimizer_state == "8bit":
            state8.check_moments(optimizer.state_dict(), [name for name, _ in labelled(groups, self._names)])
        self.masters.home.prepare(self._spec, self.masters, groups)

    def _check_groups(self, groups: list[dict[str, Any]], names: dict[int, str], first: int = 0) -> None:
        """Raise, before anything is changed, where groups that come do not go with the arguments, or find no memory."""
        check_one_pass(self.config, self.inner, self._spec, groups, names, first)
        self.masters.home.prepare(self._spec, self.masters, groups)

    def _make(self, optimizer: Optimizer, master_weights: str, on_model_write: str) -> None:
        self.inner = parallel.inner_of(optimizer)
        self.params = ParamTable(self.inner.param_groups, self._names, self._adopt)
        self.device = parallel.device_of(optimizer, self.params.masters)
        self._on_host = kernels.is_host(self.device)
        self.scaler.to(self.device)
        self.lines = Lines(type(self.inner).__name__, self.params)
        self.model_writes = ModelWrites(self.params, self.masters, on_model_write, self.lines)
        convert_attributes(self.inner, self.params, self.lines)
        if master_weights == "none":
            warn_eps(self.lines, self.inner.param_groups)
        self._changes = Changes(self.params) if self.config.track_changes else None
        self.outcome = Outcome(self.lines, all_or_nothing=not self.gradient_release)
        self._compose()
        self._convert_state()

    def _compose(self) -> None:
        """Make the components that hold gradients. A copy or pickle is made without them, and makes its own here."""
        me, self._shelf = weakref.ref(self), Shelf()
        self._guard = WrappedOptimizerGuard(self.optimizer)
        facts = _weakly(me, parallel.facts, Facts([], []))
        round_down = _weakly(me, MixedPrecisionOptimizer._round_all, None)
        ranks = parallel.ranks_of(self.optimizer, self.params, self._names, facts, round_down)
        self.gradients = Gradients(self.params, self.masters)
        sums, scaler = self.grad_accumulation == "fp32", _weakly(me, operator.attrgetter("scaler"), self.scaler)
        parts = self.params, self.gradients, scaler, self.device, sums, ranks
        self.step_state: StepState
        self._stepper: OnePassStep | WrappedStep | ReleasedStep
        if self.gradient_release:
            self.step_state = released = ReleasingState(*parts, model_writes=self.model_writes)
            released.stepper = self._make_stepper(weakref.proxy(released))
            self._stepper = ReleasedStep(self.optimizer)
        else:
            self.step_state = SummingState(*parts)
            self._stepper = self._make_stepper(self.step_state)
        self._true_gradients = TrueGradients(self.step_state)
        own_masters(self.params, self._true_gradients, self.masters.mixed_in)

    def _make_stepper(self, state: StepState) -> OnePassStep | WrappedStep:
        why = no_fused_step(type(self.inner)) if self.fused_step else "fused_step=False"
        general = WrappedStep(self.optimizer, self.params, self.masters, why, self.inner, self.lines)
        if not self.fused_step or self._spec is None:
            return general
        parts = self.params, self.masters, state, self._spec, self.outcome.number
        run = parallel.run_hooks_of(self.optimizer, self.model_writes.round_written)
        return OnePassStep(self.config, self.inner, *parts, general, run, self.lines)

    def _adopt(self, model: Tensor) -> tuple[Tensor, bool]:
        """The master of a parameter, with the optimizer state that the parameter had, in FP32 where it was in 16 bits.

        Also whether it has memory of its own: of FP32 and FP64 parameters, and without masters, it lies on the weight.
        """
        is_apart = self.masters.are_apart and model.dtype in HALF_DTYPES
        master = self.masters.make(model) if is_apart else on_memory_of(model)
        self._carry_state(model, master)
        return master, is_apart

    def _carry_state(self, param: Tensor, master: Tensor) -> None:
        checkpoint.carry_state(self.inner, param, master)
        remake_first_state(self.inner, master)

    # -- what a torch optimizer shows --------------------------------------------------------------------------------

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The wrapped optimizer's param_groups, which hold masters. What they hold is brought up to date first.

        A parameter that is frozen and has never had a gradient stands there itself.
        """
        if self._is_behind():
            with torch.inference_mode(False):
                self._begin("param_groups")
        return self.optimizer.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """The wrapped optimizer's state, FP32, keyed by master; a model's parameter stands for its master."""
        return StateByParam(self.inner.state, self.params)

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """The wrapped optimizer's defaults."""
        return self.inner.defaults

    if not TYPE_CHECKING:  # a type checker would take any name for an attribute

        def __getattr__(self: Any, name: str) -> Any:
            """Attributes of the wrapped optimizer are not the wrapper's: the error says where they are."""
            kind, inner = type(self).__name__, self.__dict__.get("optimizer")
            words = f"{kind!r} object has no attribute {name!r}"
            if inner is None or name.startswith("_") or not hasattr(inner, name):
                raise AttributeError(words)
            more = f"The wrapped {type(inner).__name__} has: opt.optimizer.{name}."
            if callable(getattr(inner, name)):
                more += (
                    " Where it moves parameters, these are the masters: call opt.write_masters() after it. SAM and its "
                    'like are stepped by opt.step(closure) with closure="reevaluate".'
                )
            raise AttributeError(f"{words}. {more}")

    def steps_counted(self) -> int:
        """How many steps were taken, with one that was taken in backward and that ``step`` is yet to count."""
        return self.outcome.steps_taken + self.step_state.ahead

    def __repr__(self) -> str:
        inner = repr(self.optimizer).replace("\n", "\n  ")
        return (
            f"{type(self).__name__}(\n  optimizer: {inner}\n  scaler: {self.scaler!r}\n"
            f"  parameters: {self._summary()}\n  grad_accumulation: {self.grad_accumulation!r}, "
            f"on_model_write: {self.on_model_write!r}, master_weights: {self.master_weights!r}, "
            f"optimizer_state: {self.optimizer_state!r}, offload: {self.offload_to!r}, "
            f"gradient_release: {self.gradient_release!r}\n"
            f"  step: {self._stepper.describe()}\n  memory: {self._measured()}\n)"
        )

    def _summary(self) -> str:
        """Counts of the kinds of parameters."""
        counts: dict[str, int] = {}
        for pair in self.params.all:
            kind = str(pair.model.dtype).removeprefix("torch.")
            if pair.is_apart:
                kind += f" {self.masters.words}"
            elif pair.model.dtype in HALF_DTYPES:
                kind += " without masters" if self.master_weights == "none" else " frozen"
            counts[kind] = counts.get(kind, 0) + 1
        return ", ".join(f"{count} {kind}" for kind, count in counts.items()) or "none"

    @outside_inference
    def __getstate__(self) -> dict[str, Any]:
        """All but hooks, a scheduler's patch of ``step``, and gradients (torch copies parameters without theirs)."""
        self.model_writes.require_not_swapped("a copy or pickle")
        ranks = self.step_state.ranks
        if ranks.within is not ranks:
            raise RuntimeError(
                "a copy or pickle of an optimizer that shares its verdict with a pipeline would belong to "
                "no process group. Copy it before fp16opt.distributed.attach(opt, model, process_group=...)."
            )
        self.settle("copy.deepcopy or pickle")
        self.model_writes.see_masters()
        kept = {name: value for name, value in self.__dict__.items() if name not in _NOT_COPIED}
        return {**kept, "_wrapped_extras": extras(self.optimizer), "_steps_counted": self.steps_counted()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        left, counted = state.pop("_wrapped_extras"), state.pop("_steps_counted")
        self.__dict__.update(state)
        self.outcome.steps_taken = counted
        for name, value in left.items():
            self.optimizer.__dict__.setdefault(name, value)
        self._names = {}
        self._spec = state8.spec_of(self.optimizer_state, type(self.inner))
        check_one_pass(self.config, self.inner, self._spec, [], {})
        self.masters.home.bring_all(self.masters, self.params.all, self.inner.state)
        self.model_writes.count_anew()
        self._compose()
        make_hook_tables(self, self.optimizer)
        self._patch_step_function()

    @public
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, like ``torch.optim.Optimizer.add_param_group``; its 16-bit parameters get masters.

        Raises:
            TypeError: It is no dict, or its params are no tensors, or a set.
            ValueError: A parameter is here already, or has a dtype that can't be served. Nothing is changed then.
            RuntimeError: Gradients of the coming step were checked already. Nothing is changed then.
        """
        parallel.refuse_on_zero(self.optimizer, "add_param_group", "Add groups to it before it is wrapped.")
        self._begin("add_param_group")
        self.step_state.require_open(strictly=True)
        groups = self.optimizer.param_groups
        there = list(groups)
        self.optimizer.add_param_group(param_group)
        try:
            self._begin("add_param_group")
        except BaseException:
            groups[:] = there
            raise

    # -- the look with which every call begins ----------------------------------------------------------------------

    def _is_behind(self) -> bool:
        """Whether what is known is not what the groups hold, or a step was interrupted."""
        if self.step_state.step is not None:
            return not self.step_state.is_stepping
        if self.params.has_changed(self.inner.param_groups):
            return not self.step_state.holds_groups()  # then the next call raises
        return self.params.thawed()

    def settle(self, call: str) -> None:
        """Finish a step that an exception has stopped, and whose own ``except`` was cut too.

        Args:
            call: what the user has called, in words.

        Raises:
            RuntimeError: a step of this optimizer is under way: a hook has called, a signal handler or another thread.
        """
        step = self.step_state.step
        if step is not None and step.runs:
            raise errors.WITHIN_A_STEP(call=call)
        if self._shelf.is_taken:
            raise errors.OFFLOADED(call=call)
        if step is not None:
            self._finish_step(step)

    def _look(self, call: str, verifies: bool = True, rounds: bool = True, gives_up: bool = False) -> Look:
        """What every call that needs gradients begins with: :meth:`_begin`, then a look at what there is."""
        look = self.step_state.look(self._begin(call, verifies, rounds, gives_up))
        is_freed = self.step_state.stage.is_to_fold  # what the call has seen: nothing may keep it
        return self.step_state.see(look) if is_freed else look

    def _begin(
        self, call: str, verifies: bool = True, rounds: bool = True, gives_up: bool = False
    ) -> tuple[Rows, ...] | None:
        """What every call begins with: finish a stopped step, follow the groups, write edited masters.

        Args:
            call: what the user has called, in words.
            verifies: look whether a known parameter was moved or converted. A backward leaves that to the check.
            rounds: write masters that the user has written to the model. Not while a graph of it is alive.
            gives_up: the call ends the present step: groups may change.

        Returns:
            The weights as they were read, where the call verifies them and writes none.

        Raises:
            RuntimeError: it is called within a step; the model's weights are swapped; a parameter's dtype, shape or
                device was changed; or parameters came or went between a check and its step.
            TypeError, ValueError: a parameter can't be served. Nothing is changed then.
        """
        self.settle(call)
        if self.model_writes.swapped:
            self.model_writes.require_not_swapped(type(self).__name__)
        weights = self.params.verify_moved() if verifies else None
        groups, generation = self.inner.param_groups, self.params.generation
        has_changed = self.params.has_changed(groups)
        if has_changed:
            self.params.put_masters_back(groups)
            has_changed = self.params.has_changed(groups)
        if has_changed:
            self._follow_groups(groups, gives_up)
        elif self.params.unmastered and self.params.thawed():
            came_from = [n if pair.has_master else None for n, pair in enumerate(self.params.all)]
            self.params.sync(groups, self._names, self._adopt)
            convert_attributes(self.inner, self.params, self.lines)
            self._params_changed(came_from, is_thaw=True)
        if rounds:
            self.model_writes.write_edited()
        return None if rounds or generation != self.params.generation else weights

    def _follow_groups(self, groups: list[dict[str, Any]], gives_up: bool) -> None:
        """Parameters were added, removed, replaced or reordered."""
        if not gives_up:
            self.step_state.require_open()
        self._check_groups(self.params.with_models(groups), self._names)
        if gives_up:
            self._count_given_up()  # while its stage is there
        self.model_writes.write_edited()  # while those that leave are known
        before = {id(pair): position for position, pair in enumerate(self.params.all)}
        gone = self.params.sync(groups, self._names, self._adopt)
        unmark([pair.model for pair in gone])
        for pair in gone:
            self.inner.state.pop(pair.master, None)
        convert_attributes(self.inner, self.params, self.lines)
        self._params_changed([before.get(id(pair)) for pair in self.params.all])

    def _params_changed(self, came_from: list[int | None], is_thaw: bool = False) -> None:
        """Parameters came, went or moved; arguments as for :meth:`.StepState.follow_params`."""
        self._may_lack_scale = self.scaler.is_default
        if self._changes is not None:
            self._changes.follow_params()
        self.model_writes.follow_params()
        self.step_state.follow_params(came_from, is_thaw)
        own_masters(self.params, self._true_gradients, self.masters.mixed_in)
        if self.params.has_dtensors:  # ask anew who must hear of overflows and norms
            facts = _weakly(weakref.ref(self), parallel.facts, Facts([], []))
            asked = functools.partial(parallel.ranks_of, self.optimizer, self.params, self._names, facts, lambda: None)
            self.step_state.ranks = self.step_state.ranks.followed_by(asked)

    @outside_inference
    def train(self, mode: bool = True) -> None:
        """Call ``train`` of the wrapped optimizer, where it has one (schedule-free ones), and let the model follow.

        Args:
            mode: False is :meth:`eval`.

        Raises:
            RuntimeError: It is inside of a ZeroRedundancyOptimizer, and would move this rank's part alone.
        """
        name = "train" if mode else "eval"
        switch = getattr(self.inner, name, None)
        if callable(switch):
            parallel.refuse_on_zero(self.optimizer, f"{name}()", "Use FSDP2, or an optimizer without it.")
            self._begin(f"{name}()")
            self.model_writes.sync()
            whole = self.masters.are_whole  # split ones refuse to be written
            with self._guard.open(), ordinary_parameters(self.params) if whole else contextlib.nullcontext():
                switch()
            self._round_all()

    def eval(self) -> None:
        """Call ``eval`` of the wrapped optimizer, where it has one (schedule-free ones), and let the model follow."""
        self.train(False)

    # -- gradients ---------------------------------------------------------------------------------------------------

    @public
    def scale_loss(self, loss: Tensor, *, scaler: LossScaler | None = None) -> Tensor:
        """``loss.float()`` times the loss scale. Call ``.backward()`` on it yourself.

        Args:
            loss: Floating, any shape, any device.
            scaler: Scale with this one instead of the optimizer's own.

        Returns:
            float32, of the loss's shape and device. No host sync with gradients that were cleared.

        Raises:
            TypeError: The loss is not a floating tensor.
            RuntimeError: As :meth:`backward`; but gradients of an earlier step may be cleared after this call, as where
                ``autograd.grad`` takes what it returns. Else the next call that needs gradients raises.
        """
        check_loss(loss)
        check_scaler(scaler)
        return self._scaled(loss, scaler, may_clear=True)

    def _scaled(self, loss: Tensor, scaler: LossScaler | None, may_clear: bool = False) -> Tensor:
        """:meth:`scale_loss` of what was checked."""
        look = self._look("scale_loss" if may_clear else "backward", verifies=False, rounds=False)
        told = (loss.detach(),) if loss.numel() == 1 else ()  # a skip's log line says whether it was finite
        scale: BackwardScale = self.step_state.begin_backward(
            look, self.scaler if scaler is None else scaler, may_clear, told
        )
        return loss.float() * scale.scale.to(loss.device)

    @public
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

        The model's ``.grad`` holds what autograd made, scaled, of FP32 parameters too, and goes on holding it after a
        clip and the step; several backwards add up there. True gradients are the masters'. With FP32 sums the model's
        are added to the masters' and freed.

        Args:
            loss: One floating element, any device. An FP16 loss limits the scale to 2**15: its own gradient, the scale,
                enters the FP16 graph. End the model with ``.float()`` to lift that.
            update_master_grads: True notes which gradients there are, and an edit of one raises at the next call (call
                :meth:`update_master_grads` to have it count). False leaves them to the user until then. FP32 sums take
                them in either case: now, or at the next call.
            retain_graph, create_graph, inputs: As for ``torch.Tensor.backward``.
            scaler: Scale with this one instead. Each backward of such a step is added to FP32 sums with its own scale,
                each scaler is updated by what its own backwards gave, and any overflow skips the step.

        Raises:
            TypeError, ValueError: The loss is not one floating element.
            RuntimeError: An earlier backward was interrupted and its gradients are incomplete; gradients were written
                since the last one; master gradients were clipped or edited, which this one would undo; or gradients of
                an earlier step are there, made at another scale.

        Syncs: not with gradients that were cleared. Gradients that an earlier step left are looked at once, where the
        scale is not 1, for whether they are zeros.
        """
        check_loss(loss, scalar=True)
        if scaler is not None:
            check_scaler(scaler)
        scaled = self._scaled(loss, scaler)
        try:
            torch.autograd.backward(scaled, None, retain_graph, create_graph, inputs=inputs)
        except BaseException as error:
            self.step_state.interrupt()
            parallel.explain(error, "a backward")
            raise
        self.step_state.end_backward(stamp=update_master_grads)

    @public
    def update_master_grads(self) -> None:
        """Take the model's gradients as they are now, from any writer, and write true FP32 ones to the masters.

        One pass: times 1/scale of the backward that made them (with none before it, the scaler's present scale), with
        flags and norm. Called again on the same gradients it gives the same bits, and undoes a clip; FP32 sums are
        unscaled once and stay as they are. No host sync.

        Raises:
            RuntimeError: A parameter's dtype, shape or device was changed; a backward was interrupted; the gradients
                were made under DDP's ``no_sync``; a GradScaler has unscaled them; or ``gradient_release=True``.
        """
        self.step_state.update(self._look("update_master_grads"))

    @public
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
            After ``step`` that is too late for it: gradients that are left belong to the next one (at a scale of 1),
            or raise.

        Raises:
            TypeError, ValueError: ``max_norm`` or ``norm_type`` is no number, negative or nan; ``params`` are no
                tensors, or one has a gradient and is not in this optimizer.
            RuntimeError: The norm is not finite and ``error_if_nonfinite``; or, as for :meth:`step`, gradients can't be
                taken as they are.
        """
        max_norm = check_number("max_norm", max_norm)
        norm_type = check_number("norm_type", norm_type, above_zero=True)
        if not self.step_state.ranks.alone:
            self.step_state.ranks.check_clip(norm_type, params is None)
        look = self._look("clip_master_grads", verifies=False)  # the step looks at weights
        of = None if params is None else self.params.chosen(params)
        check: Check | None = self.step_state.finalize(look, norm_type=norm_type, of=of, max_norm=max_norm)
        norm = None if check is None else check.norm
        if check is None or norm is None:
            return torch.zeros((), dtype=torch.float32, device=self.device)
        if error_if_nonfinite and not bool(norm.isfinite()):
            raise RuntimeError(
                f"the total norm of order {norm_type} of the master gradients is {norm.item()}: it can't be clipped. "
                "Leave error_if_nonfinite=False to have step() skip, or see overflow_report() after it."
            )
        norm_before, factor = self.outcome.clipped = backends.decide_clip(norm, check.found_inf, max_norm)
        # Elsewhere the kernel looks, and the host does not wait.
        self.step_state.clip(look, factor, of, is_one=self._on_host and factor.item() == 1.0)
        return norm_before

    @public
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
        look = self._look("clip_master_values")
        of = None if params is None else self.params.chosen(params)
        check: Check | None = self.step_state.finalize(look, write=True)
        if check is not None:
            self.gradients.clip_values(max_value, check.found_inf, of)
            self.step_state.close(is_measured=False)

    @public
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the model's and the masters' gradients and forget what was found in them.

        Args:
            set_to_none: Set the model's ``.grad`` to None, and not to zeros. Masters' are None in either case; the
                engine keeps their memory for the next step.
        """
        # Where a hook has called the step goes on with what it has found.
        if not (self.step_state.is_stepping or self._shelf.is_taken):
            self._begin("zero_grad", verifies=False, gives_up=True)
            self._count_given_up()
        self.step_state.clear(set_to_none)

    def _count_given_up(self) -> None:
        """A batch that the user has found not finite, and goes on from without a step, is a skip: the scale falls.

        A limit on skips in a row is told by the next step that is skipped.
        """
        check = self.step_state.given_up()
        if check is None:
            return
        if not self._on_host:
            self.outcome.give_up(check)
        elif bool(check.found_inf):
            self._record(check, skipped=True)
            self.outcome.tell(True, self.scaler, check, self.params, raises=False)

    @between_hooks
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step the wrapped optimizer on the masters and copy them to the model, unless a gradient was not finite.

        A skipped step leaves parameters, optimizer state and step counts as they were. Then the loss scale is updated.
        Where the device itself skips, step hooks of the wrapped optimizer run all the same, and a first step leaves
        fresh state.
        Without a backward before it there is nothing to do.

        Args:
            closure: Clears gradients, computes the loss, calls ``backward`` on this optimizer and returns the loss. It
                is evaluated once, before the step, and an overflow is one skip. With ``closure="reevaluate"`` (LBFGS by
                itself, SAM and its like if you say so) the wrapped optimizer evaluates it when it likes: the model
                holds the masters' values before each evaluation, one that overflows lowers the scale and is evaluated
                again, and where the scale can't go lower, or the closure made no gradients, everything is restored and
                one skip is counted.

        Returns:
            The closure's loss, also where the step was skipped; what the wrapped optimizer's ``step`` returns without a
            closure, and where it evaluates more than once (LBFGS: the first loss).

        Raises:
            LossScaleError: ``max_consecutive_skips`` steps in a row were not finite.
            RuntimeError: Gradients came by a plain ``loss.backward()`` while the scale is not 1; they were written
                where that can't count; the model was written and ``on_model_write="error"``; parameters changed dtype,
                shape or device; or groups were changed after a check of the gradients.

        Any other exception (Ctrl-C, an error of a hook) leaves everything as it was, a whole step, or one that counts
        as taken and of which a warning says that it was stopped in the middle: docs/engine.md. Within the step other
        calls of this optimizer raise; what a closure calls is its own.

        Syncs: not on the CPU or where the step skips on the device itself (torch's fused ones, and CUDA's
        one-pass steps); once elsewhere, where the decision is taken. Where such a step is numbered, as with 8 bits of
        state or ``master_weights="split24"``, or skips are limited, it waits for the check, and not for the step.
        """
        return self._step_once(None) if closure is None else self._step_with(closure)

    def _step_once(self, closure: EvaluatedClosure | None) -> Any:
        outer, held = self.lines.held, list[HeldLine]()
        self.lines.held = held  # a handler is code of the user's, which may write weights
        try:
            look = self._look("step", rounds=False)  # the step rounds masters
            return self._run_step(self._take_step, look, closure)
        finally:
            self.lines.held = outer
            if held:
                self.lines.log(held)

    def _run_step(self, take: Callable[..., Any], *given: object) -> Any:
        """One step from its beginning to its end: ``take`` makes it of what is ``given``, and sets its marks."""
        step = Step()
        try:
            self.step_state.step = step
            result = take(step, *given)
            self.step_state.step = None
        except BaseException:
            step.runs = False  # a plain store: from here on the next call finishes it, if an exception stops this too
            if self.step_state.step is not None:
                self._finish_step(step)
            raise
        if step.check is not None:
            self._after_step(step.check, self.outcome.last)
        return result

    def _take_step(self, step: Step, look: Look, closure: EvaluatedClosure | None) -> Any:
        """Check, decide, step or skip, count."""
        check = self._finalize(look, write=not self._stepper.takes_scaled())
        if check is None:
            self.model_writes.write_edited()
            self._found_nothing()
            return None
        if self._may_lack_scale:
            self._tell_of_missing_scale()
        skipped, step.awaited = self._decide(look, check)
        if skipped is not True:
            self.model_writes.sync(self._on_host, look.weights)
            if closure is not None:
                closure.before_step()
        step.check, step.skipped = check, skipped
        result = None
        if skipped is True:
            note_step(self.optimizer)
        else:
            found_inf = None if skipped is False else check.found_inf
            result = self._stepper.step(step, look, found_inf, closure)
        step.all_written = True
        self._close_step(step, check, self._stepper.rounded_all)
        return result

    def _close_step(self, step: Step, check: Check, rounded_all: bool) -> None:
        """Masters and model agree; the step is counted, scalers follow, READY."""
        if step.skipped is True:
            self.model_writes.write_edited()
        else:
            self.model_writes.agree(rounded_all, self._on_host)
        self._record(check, step.skipped if step.awaited is None else step.awaited.read())

    @outside_inference
    def _finish_step(self, step: Step) -> None:
        """Finish a step that an exception has stopped; where nothing was written all is as it was.

        Else masters are the truth, the model follows them, the engine's writes are known as its own, and the step is
        counted. Which parameters were stepped isn't known.
        """
        state = self.step_state
        self._guard.shut()
        step.undo()
        own_masters(self.params, self._true_gradients, self.masters.mixed_in)
        if step.check is None or not (step.about_to_write or step.all_written):
            state.stop_step()
            state.step = None
            self.model_writes.write_edited()  # the call had left that to its step
            return
        is_whole = step.all_written or (step.awaited is not None and step.awaited.read())  # the device has skipped it
        if not step.is_counted:
            self.masters.ties.clear()
            with torch.no_grad():
                if step.skipped is not True:
                    self._round_down()
                self._close_step(step, step.check, rounded_all=True)
        elif type(state.stage) is not Ready:  # a scaler may have been stopped
            is_whole = False
            state.reset()
        state.step = None
        if not is_whole:
            self.lines.tell(errors.STEP_STOPPED)

    def _finalize(self, look: Look, write: bool) -> Check | None:
        """The check of the gradients as they are now; under a GradScaler, by torch's protocol."""
        if "found_inf" in self.__dict__:
            return self._finalize_under_grad_scaler(look, write)
        check: Check | None = self.step_state.finalize(look, write)
        if check is not None and self.grad_accumulation == "fp32" and not self.step_state.stage.is_own:
            self.lines.tell(errors.SUMS_WITHOUT_BACKWARD, once=True)
        return check

    def _finalize_under_grad_scaler(self, look: Look, write: bool) -> Check | None:
        """A GradScaler has set ``found_inf``, and ``grad_scale``: what gradients must still be divided by, or None."""
        state, flag, grad_scale = self.step_state, self.__dict__["found_inf"], self.__dict__.get("grad_scale")
        self.check_external_scale()
        if grad_scale is not None:
            inv_scale = grad_scale.to(self.device).double().reciprocal().float().reshape(())
            state.tell(look, inv_scale, ScaledBy.TOLD_IN_STEP)
        else:
            state.take_external(look, self.scaler)  # torch's protocol: without a scale they are true ones
        check: Check | None = state.finalize(look, write)
        if check is None or not isinstance(flag, Tensor):
            return check
        found = torch.maximum(check.found_inf, flag.to(self.device).reshape(()).clamp(max=1.0))
        return check._replace(found=tuple((scaler, found) for scaler, _ in check.found))

    def _tell_of_missing_scale(self) -> None:
        """Warn where FP16 weights are about to be stepped without a loss scale, and none was chosen. Syncs."""
        scale = self.step_state.stage.scale
        is_told = "found_inf" in self.__dict__ or scale.by.is_told  # a GradScaler's
        if not (is_told or scale.scaler.dynamic or float(scale.scale) != 1.0):
            pairs = without_scale(self.params.all)
            if pairs:
                warn_missing_scale(self.lines, pairs, self.way_to_scale, not self.step_state.stage.is_own)
        self._may_lack_scale = False

    def _way_to_scale(self) -> WayToScale:
        """In this face's words, unless a trainer has put its own in the place of ``way_to_scale``."""
        return WayToScale(f"MixedPrecisionOptimizer(optimizer, {self.config.arguments_that_scale})")

    def check_external_scale(self) -> None:
        """Raise ``RuntimeError`` where a GradScaler can't be the one that scales, with both ways out."""
        made_here = self.step_state.stage.is_own
        if made_here or not self.step_state.is_one():
            raise errors.TWO_SCALES(scale=self.loss_scale, made=errors.MADE_HERE if made_here else "")

    @public
    def check_external(self, inv_scale: Tensor) -> Tensor | None:
        """Check gradients that came by a plain backward, for a GradScaler of this library. Makes no FP32 ones.

        Args:
            inv_scale: float32, 0-dim, any device: 1 / the scale that they were made with.

        Returns:
            float32, 0-dim: 1.0 where one times ``inv_scale`` is not finite, else 0.0; None where there are none. No
            sync.

        Raises:
            RuntimeError: This optimizer has a scale of its own.
        """
        look = self._look("unscale_")
        self.check_external_scale()
        self.step_state.tell(look, inv_scale, ScaledBy.TOLD)
        check: Check | None = self.step_state.finalize(look)
        return None if check is None else check.found_inf.clone()

    def _found_nothing(self) -> None:
        """``step`` was called, and no parameter has a gradient."""
        self.outcome.nothing()
        if self.outcome.empty.is_due():
            self.lines.tell(errors.NO_GRADIENTS, once=True, names=describe(self.params.names))

    # -- closures ----------------------------------------------------------------------------------------------------

    def _step_with(self, closure: Callable[[], Any]) -> Any:
        if not callable(closure):
            raise TypeError(f"closure: expected a callable that returns the loss, got {type(closure).__name__}.")
        if self.inner is not self.optimizer:
            parallel.refuse_on_zero(
                self.optimizer, "step(closure)", "Use an optimizer that steps without one, or FSDP2."
            )
        if closure_mode(self.config.closure, self.optimizer) == "once":
            with torch.enable_grad():
                loss = closure()
            self._step_once(EvaluatedClosure(loss, self.params.masters))
            return loss
        return self._step_reevaluating(closure)

    def _step_reevaluating(self, closure: Callable[[], Any]) -> Any:
        self._begin("step")
        self.model_writes.sync()
        self.params.follow_marks()
        evaluations = MasterReevaluations(closure, self._take_moved, self.step_state)
        stepped: bool = self._run_step(self._reevaluate, evaluations)
        if not stepped:
            self.zero_grad()
        return evaluations.returned if stepped else evaluations.loss

    def _take_moved(self) -> None:
        """The model takes what the optimizer has written to masters, in whatever memory."""
        self.params.keep_memory()
        self._round_all()

    def _reevaluate(self, step: Step, evaluations: MasterReevaluations) -> bool:
        try:
            stepped = evaluations.step_masters(self.optimizer)
        except BaseException:
            self.step_state.step = None  # all is put back
            self.zero_grad()
            raise
        if evaluations.check is None:
            self._found_nothing()
            return stepped
        step.check, step.skipped, step.all_written = evaluations.check, not stepped, True
        if self._may_lack_scale:
            self._tell_of_missing_scale()
        self._record(step.check, step.skipped)
        return stepped

    # -- the end of a step -------------------------------------------------------------------------------------------

    def _decide(self, look: Look, check: Check) -> tuple[bool | Tensor, kernels.AwaitedFlag | None]:
        """(whether the step is skipped: decided, or the device's flag; that flag on its way to a host that awaits it).

        A step whose flag is on its way is queued before the host waits. The host decides before the step where one that
        is to be skipped must not begin: under ZeRO, whose step sends messages, so that all ranks must go one way; where
        a write to the model would raise; and in a CUDA graph.
        """
        if not self.outcome.all_or_nothing:  # what is left of the step runs, whatever was found
            is_known = self._on_host or self._must_know(check)
            awaited = kernels.AwaitedFlag(check.found_inf) if is_known else None
            return check.found_inf, awaited
        if self._on_host or self.inner is not self.optimizer or not self._stepper.skips_on_device(look):
            return bool(check.found_inf), None
        if not self._must_know(check):
            return check.found_inf, None
        is_captured = any([backends.captures(each.device) for each in self.params.devices])  # noqa: C419
        if is_captured or self.model_writes.policy == "error":
            return bool(check.found_inf), None
        return check.found_inf, kernels.AwaitedFlag(check.found_inf)

    def _must_know(self, check: Check) -> bool:
        """Whether the host has to know at the end of the step whether it was skipped."""
        return bool(
            self._stepper.counts_steps
            or self.step_state.replicas.needs_decision
            or any(scaler.max_consecutive_skips is not None for scaler, _ in check.found)
        )

    def _record(self, check: Check, skipped: bool | Tensor) -> None:
        """Count the step, update the scalers, go to READY. A batch that is given up may count as one too.

        The scale moves here, after the step: gradients were divided by the one that they were multiplied with.
        """
        state = self.step_state
        is_told = skipped is True or (skipped is False and self.outcome.log.awaits_step)
        self.outcome.before = float(self.scaler.scale) if is_told else None
        self.outcome.losses = state.stage.losses if is_told else ()
        numbers = check.origin if skipped is True else None
        self.outcome.origin = None if numbers is None else state.ranks.origin(numbers)
        if state.stage.scale is not None:
            self.outcome.scale = state.stage.scale.scale
        stats = [] if skipped is False else self.gradients.stats
        self.outcome.record(check, skipped, stats, state.step or Step())
        state.steps += 1
        state.reset()

    def _after_step(self, check: Check, skipped: bool | Tensor) -> None:
        """Tell other ranks, and the log, of a step that is over."""
        if not self.step_state.replicas.alone:
            self.step_state.replicas.after_step(skipped, lambda: parallel.digest(self))
        if self.outcome.before is not None:
            self.outcome.tell(skipped, self.scaler, check, self.params, "found_inf" in self.__dict__)

    # -- state to read -----------------------------------------------------------------------------------------------

    @property
    def loss_scale(self) -> float:
        """The scaler's present scale. Reading syncs with the device. Set it between steps only."""
        return float(self.scaler.scale)

    @loss_scale.setter
    def loss_scale(self, value: float) -> None:
        self.settle("loss_scale = ...")
        if self.step_state.waits_for_step():
            raise errors.SCALE_SET()
        self.scaler.set_scale(value)

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last ``step`` was skipped for non-finite gradients. Reading may sync with the device."""
        self.model_writes.warn_if_due()
        return bool(self.outcome.last)

    @property
    def skipped_steps(self) -> int:
        """Steps skipped, those before a checkpoint that was loaded included. Reading may sync with the device."""
        self.model_writes.warn_if_due()
        return self.outcome.skipped_steps

    def overflow_report(self) -> list[Overflow]:
        """Which parameters had non-finite gradients when the last step was skipped; empty when it was not. Syncs."""
        self.model_writes.warn_if_due()
        return self.outcome.report(self.params)

    def stats(self) -> dict[str, float]:
        """What is known of the run so far, in plain numbers under constant keys, for any logger.

        All comes from passes that are made anyway. Counts are of this rank, and go on where :meth:`load_state_dict`
        loaded what :meth:`state_dict` gave.

        Returns:
            ``loss_scale``: the next backward's.
            ``steps``: calls of ``step`` that had gradients, skipped ones included (replays of a CUDA graph are not
            counted). ``steps_taken``: what :meth:`state_dict` has as ``steps``: those that were not skipped, and with
            ``gradient_release`` all, as a skip there leaves single parameters alone.
            ``skipped_steps``, ``skipped_in_a_row``: for non-finite gradients, in all and up to now.
            ``steps_since_calibration``: steps that were not skipped: 0 while a dynamic scaler looks for its scale.
            ``step_was_skipped``: 1 if the last one was, else 0; ``parameters_blamed``: how many then had a gradient
            that was not finite.
            ``grad_norm``, ``clip_factor``: the norm before the last ``clip_master_grads``, and what that multiplied
            gradients by; nan before the first.
            ``model_writes_taken``: weights that something else wrote and masters took, one each parameter and step.

        Syncs: once, where the numbers are on a device.

        Example:
            >>> weight = torch.nn.Parameter(torch.ones(4, dtype=torch.float16))
            >>> opt = MixedPrecisionOptimizer(torch.optim.SGD([weight], lr=1.0), dynamic=True)
            >>> opt.backward(weight.float().sum() * float("inf"))
            >>> opt.step()
            >>> stats = opt.stats()
            >>> stats["loss_scale"], stats["skipped_steps"], stats["parameters_blamed"]
            (32768.0, 1, 1)
        """
        norm, factor = self.outcome.clipped or (float("nan"), float("nan"))
        found = self.outcome.numbers()
        untold = [one.to(self.device) for one in self.model_writes.not_warned()]
        numbers = read_at_once(
            {
                "loss_scale": self.scaler.scale,
                **found,
                "skipped_in_a_row": self.scaler.consecutive_skips,
                "grad_norm": norm,
                "clip_factor": factor,
                "model_writes_taken": sum(untold, start=self.model_writes.taken),
            }
        )
        # Skips that a CUDA graph replayed count, its steps don't.
        numbers["steps_taken"] = max(0, numbers["steps_taken"])
        numbers["steps_since_calibration"] = max(0, numbers["steps"] - numbers["skipped_steps"])
        fractions = ("loss_scale", "grad_norm", "clip_factor")
        return {name: value if name in fractions else int(value) for name, value in numbers.items()}

    @public
    def master_params(self) -> Iterator[Tensor]:
        """What the wrapped optimizer steps, in param_groups order: masters.

        Those of FP32 and FP64 parameters lie on the weights' memory. A parameter that is frozen and has never had a
        gradient stands there itself.
        """
        if not self.step_state.is_stepping:
            self._begin("master_params", rounds=False)
        if self.masters.are_whole:
            return iter(list(self.params.masters))
        return self.masters.shown(self.params.all)

    @public
    def model_params(self) -> Iterator[Tensor]:
        """The model's parameters, in param_groups order; pairs with :meth:`master_params`."""
        models = {id(pair.master): pair.model for pair in self.params.all}
        held = [param for group in self.inner.param_groups for param in group["params"]]
        return iter([models.get(id(param), param) for param in held])

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
        if not self._shelf.is_taken:  # else the model may be away, too
            self.params.verify_moved()
        return self._measured()

    def _measured(self) -> Memory:
        """Bytes by kind, also where parameters were changed since."""
        apart = [pair for pair in self.params.all if pair.is_apart]
        masters = [[pair.master for pair in apart], [self.masters.operand(pair) for pair in apart]]
        weights = [*self.params.models, *self.params.elsewhere]  # around ZeRO other ranks' are here too
        kinds = {
            "weights": weights,
            "masters": masters,
            "moments": [self.inner.state, self.masters.home],
            "gradients": self.gradients.tensors(),
            "engine": self,
        }
        return measure(weights, kinds)

    # -- phases of a run ---------------------------------------------------------------------------------------------

    @public
    def offload(self) -> None:
        """Bring all that the engine keeps on the card to page-locked memory of the host, until :meth:`onload`.

        Masters, remainders, state, sums, scales, statistics; weights and their gradients are the model's and its
        framework's. In between calls that need any of it raise. The host's memory is kept for the next time. With
        ``offload="cpu"`` most lies there already. CUDA graphs must be captured anew after it.

        Raises:
            RuntimeError: There is too little host memory, or gradients wait for a step. Nothing is changed then.

        Syncs.
        """
        if self._shelf.is_taken:
            return
        self._begin("offload")
        if self.step_state.waits_for_step():
            raise errors.OFFLOAD_BETWEEN()
        self._shelf.put(self._own_tensors())
        self.params.leave_memory()  # which the framework frees

    @public
    def onload(self) -> None:
        """Bring back to the card what :meth:`offload` has brought to the host: the same bits. Syncs."""
        if self._shelf.is_taken:
            self._shelf.take_back(self._own_tensors())
            self._begin("onload")

    def _own_tensors(self) -> list[Tensor]:
        """This rank's pieces of all that lies on a card and is not the model's; no call knows addresses after this."""
        self.params.changed()
        weights = [*self.params.models, *self.params.elsewhere]
        found = list(found_in([self, self.inner.state, self.gradients.tensors()]))
        for item in found:
            if isinstance(item, (kernels.CallCache, OnePassStep)):
                item.forget()
        return [one for one in apart_from(weights, found) if one.device.type != "cpu" or steps_on_device(one.device)]

    # -- checkpoints and the model's own weights ---------------------------------------------------------------------

    @public
    def state_dict(self, *, compact: bool = False) -> dict[str, Any]:
        """Plain tensors, numbers, strings, lists and dicts: ``torch.load(weights_only=True)`` reads them back.

        Keys: ``version``, ``optimizer`` (the wrapped optimizer's own), ``masters`` (FP32, in param_groups order, None
        where a master lies on the weight's memory), ``scaler``, ``steps`` and ``skipped_steps`` (how many were taken,
        and skipped). Tensors are references, as in torch, but for FP32 ones of what is kept in fewer bits.

        Args:
            compact: Of state that is kept in 8 bits, give codes and not FP32 moments. Other programs can't read these.
        """
        parallel.refuse_plain_state(self.step_state.ranks.alone, "state_dict")
        for pre_hook in self._optimizer_state_dict_pre_hooks.values():
            pre_hook(self)
        self._begin("state_dict")
        self.model_writes.sync()
        self.model_writes.warn_if_due()
        counts = self.steps_counted(), self.outcome.skipped_steps
        # None where one lies on the weight's memory: a value has one home in a checkpoint.
        masters = [self.masters.to_save(pair) if pair.is_apart else None for pair in self.params.all]
        built = checkpoint.build(self.optimizer, masters, self.scaler, *counts)
        if self._spec is not None:
            inner = counters_saved(built["optimizer"])
            state = {key: self.state_to_save(entry, compact) for key, entry in inner["state"].items()}
            built["optimizer"] = {**inner, "state": state}
        for post_hook in self._optimizer_state_dict_post_hooks.values():
            changed = post_hook(self, built)
            built = built if changed is None else changed
        return built

    def state_to_save(self, entry: Any, compact: bool = False) -> Any:
        """A parameter's state, in FP32 under torch's names or ``compact``, where it is to be saved from."""
        kept = self.masters.home.state_to_save(entry)
        return state8.compact_entry(kept) if compact else state8.whole_entry(kept)

    @public
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what :meth:`state_dict` gave, or the wrapped class's own state_dict (from FP32 training).

        Everything is validated first. Masters are written to the model too, so model and optimizer may be loaded in
        either order. Tensors are copied. What was found in gradients that wait for a step is forgotten.

        Raises:
            TypeError, ValueError: Something does not fit; the optimizer is as it was.
        """
        parallel.refuse_plain_state(self.step_state.ranks.alone, "load_state_dict")
        if isinstance(state_dict, dict):
            state_dict = dict(state_dict)
        for pre_hook in self._optimizer_load_state_dict_pre_hooks.values():
            changed = pre_hook(self, state_dict)
            state_dict = state_dict if changed is None else changed
        self._begin("load_state_dict", gives_up=True)
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
        masters = list(self.params.apart)  # their shapes: of split ones values are not made
        for position in thawed:  # they get a master if all fits
            masters[position] = self.params.models[position]
        names, scaler = self.params.names, self.scaler
        check(lambda: checkpoint.check(state_dict, self.inner, masters, names, scaler))
        check(lambda: self._check_loaded(state_dict))
        if thawed:
            self.params.give_masters([self.params.all[i] for i in thawed], self.inner.param_groups, self._adopt)
            self._params_changed([None if n in thawed else n for n in range(len(self.params))], is_thaw=True)
        if not is_ours(state_dict):  # else weights that were loaded just before would be undone below
            self.model_writes.sync()
        steps = self._convert_loaded, lambda: self._finish_load(state_dict)
        checkpoint.load(state_dict, self.inner, names, scaler, *steps, where=self.masters.home.saved_on)

    def _decoded(self, state_dict: Any) -> Any:
        """A checkpoint with FP32 state in place of codes, of which the optimizer can make its own.

        Raises:
            TypeError, ValueError: Codes are damaged, or a moment can't be kept in 8 bits.
        """
        found = state8.expanded(state_dict, self.params.names)
        if self.optimizer_state == "8bit":
            state8.check_moments(found, self.params.names)
        return found

    def _to_thaw(self, state_dict: Any) -> list[int]:
        """Where a checkpoint has a master, and the parameter is frozen here: the checkpoint decides."""
        saved = state_dict.get("masters") if isinstance(state_dict, dict) else None
        if not isinstance(saved, (list, tuple)) or len(saved) != len(self.params) or self.master_weights == "none":
            return []
        frozen = {id(pair) for pair in self.params.unmastered if pair.model.dtype in HALF_DTYPES}
        return [i for i, pair in enumerate(self.params.all) if id(pair) in frozen and isinstance(saved[i], Tensor)]

    def _check_loaded(self, state_dict: Any) -> None:
        """Raise ``ValueError`` where a checkpoint's groups could not be stepped."""
        saved = (state_dict["optimizer"] if is_ours(state_dict) else state_dict).get("param_groups", [])
        groups = [
            {**here, **told, "params": [pair.model for pair in self.params.all if pair.group == number]}
            for number, (here, told) in enumerate(zip(self.inner.param_groups, saved, strict=False))
        ]
        self._check_groups(groups, self._names)

    def _convert_loaded(self) -> None:
        """Loaded state comes to the form in which it is kept."""
        self.masters.lay_out(self.params.all, self.inner.state)
        self._convert_state()

    def _convert_state(self) -> None:
        if self._spec is not None:
            self._spec.convert_all(self.params.all, self.inner)

    def _finish_load(self, state_dict: dict[str, Any]) -> None:
        """Masters and counts of a checkpoint that has them are taken, and the model follows."""
        self.masters.home.bring_all(self.masters, self.params.all, self.inner.state)
        if is_ours(state_dict):
            for pair, saved in zip(self.params.all, state_dict["masters"], strict=True):
                if saved is not None:  # one by one: FP32 values of all would take the memory that split masters save
                    value = saved if self.masters.are_whole else self.masters.read([pair])[0].copy_(saved)
                    self.masters.write([pair], [value])
            self.outcome.steps_taken = state_dict.get("steps", 0)
            self.outcome.skipped_steps = state_dict.get("skipped_steps", 0)
        self.params.changed()
        self.step_state.forget()
        self._round_all()

    @public
    def fp32_state_dict(self, model: torch.nn.Module) -> dict[str, Any]:
        """``model.state_dict()`` with FP32 masters in place of 16-bit parameters, under all their names.

        Buffers and parameters without a master are the model's own. Tensors are references to the live ones.

        Raises:
            TypeError: ``model`` is no Module.
            ValueError: None of its parameters is in this optimizer.
        """
        self.params.check_model(model)
        self._begin("fp32_state_dict")
        self.model_writes.sync()
        self.model_writes.warn_if_due()
        apart = {id(pair.model): pair for pair in self.params.all if pair.is_apart}
        state: dict[str, Any] = model.state_dict(keep_vars=True)
        made: dict[int, Tensor] = {}
        for name, value in state.items():
            if isinstance(value, Tensor):
                if id(value) not in made:
                    pair = apart.get(id(value))
                    made[id(value)] = value.detach() if pair is None else self.masters.to_save(pair).detach()
                state[name] = made[id(value)]
        return state

    @public
    def take_delta(self, model: torch.nn.Module) -> WeightDelta:
        """What changed in the model since the last call, or since it was wrapped; the next one begins here.

        It covers all of ``model.state_dict()``: weights that steps wrote by their changed elements, and whole what
        other code wrote, and buffers and parameters without masters where they changed. After an overflow it is empty.
        The first one has buffers whole, and takes parameters that nothing trains as unchanged. What it holds stays on
        the parameters' device.

        Args:
            model: The module that holds all parameters of this optimizer, always the same one. On several ranks each
                takes its part, at the same steps: :meth:`WeightDelta.gather` brings them together.

        Raises:
            RuntimeError: ``track_changes`` is False, or the model's weights are swapped.
            TypeError: ``model`` is no Module, or its ``state_dict`` holds something else than tensors.
            ValueError: A parameter of the optimizer is not in it. Nothing is taken then.

        Syncs.

        Example:
            >>> model = torch.nn.Linear(2, 1, bias=False, dtype=torch.bfloat16)
            >>> opt = MixedPrecisionOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), track_changes=True)
            >>> opt.backward(model(torch.tensor([[1.0, 0.0]], dtype=torch.bfloat16)).float().sum())
            >>> opt.step()
            >>> opt.take_delta(model).num_changed
            1
        """
        if self._changes is None:
            raise RuntimeError("take_delta: changes are not tracked. Wrap with track_changes=True.")
        if not isinstance(model, torch.nn.Module):
            raise TypeError(f"model: expected a torch.nn.Module, got {type(model).__name__}.")
        self._begin("take_delta")
        with self._changes.all_or_nothing():
            changes = self._changes.take(require_tensors(model.state_dict(keep_vars=True)))
            return WeightDelta(self._changes.sequence, self._changes.sequence - 1, changes, self._changes.source)

    @public
    def refresh_masters(self) -> None:
        """Masters take the model parameters' values, for code that wrote the model in place. No host sync."""
        self._begin("refresh_masters")
        for pair in self.params.all:
            if pair.is_apart:
                self.masters.refresh(pair)
        self.model_writes.record()

    @public
    def write_masters(self) -> None:
        """The model takes the masters' values, rounded, for code that wrote the masters in place. No host sync."""
        if self.step_state.is_stepping:
            self._round_down()
            return
        self._begin("write_masters", verifies=False)
        self._round_all()

    def _round_all(self) -> None:
        """Round all masters into the model; both agree then."""
        self.model_writes.require_not_swapped(type(self).__name__)
        self._round_down()
        self.model_writes.agree(rounded_all=True, waits=self._on_host)

    def _round_down(self) -> None:
        if self.params.has_dtensors:
            self.params.find_pieces()
        with torch.no_grad():
            for group in self.params.devices:
                self.masters.round_down(group)


def _weakly(me: weakref.ref[Any], method: Callable[..., Any], without: Any) -> Callable[..., Any]:
    """A call of a method that does not keep the optimizer alive. Once the optimizer is gone it gives ``without``."""

    def call(*arguments: Any) -> Any:
        there = me()
        return without if there is None else method(there, *arguments)

    return call
