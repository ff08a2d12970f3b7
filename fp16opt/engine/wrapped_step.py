"""The wrapped optimizer's own step on FP32 masters, with guards against faults of torch's fused steps."""

from __future__ import annotations

import contextlib
import itertools
import operator
import sys
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from types import CodeType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from .. import kernels
from . import errors
from .diagnostics import Lines
from .dtensors import local, raw_grads, versions
from .folded import is_folded
from .look import Look
from .masters import Masters, ordinary_parameters
from .params import HALF_DTYPES, ParamTable
from .schema import is_torch_class
from .step import Step

HOOKS = (
    "_optimizer_step_pre_hooks",
    "_optimizer_step_post_hooks",
    "_optimizer_state_dict_pre_hooks",
    "_optimizer_state_dict_post_hooks",
    "_optimizer_load_state_dict_pre_hooks",
    "_optimizer_load_state_dict_post_hooks",
)


# -- step hooks --------------------------------------------------------------------------------------------------------


own_step_hooks = operator.attrgetter("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
"""Getter for an optimizer's step (pre, post) hooks: two tables."""
STEP_HOOKS_OF_ALL = (_global_optimizer_pre_hooks, _global_optimizer_post_hooks)
"""The step hooks of every optimizer: two tables."""


def has_step_hooks(optimizer: Optimizer) -> bool:
    """Whether code of the user's runs before or after a step of ``optimizer``."""
    return any((*own_step_hooks(optimizer), *STEP_HOOKS_OF_ALL))


def run_hooks(optimizer: Optimizer, work: Callable[..., None], *given: object) -> None:
    """``work`` in the place of the optimizer's own step, between its step hooks.

    Without hooks, torch's frame around them, which times each step for a profiler, is left to the wrapper's own step.

    Args:
        work: called with whether there are hooks, then with what is ``given``.
    """

    def run(_: Optimizer) -> None:
        work(True, *given)

    note_step(optimizer)
    if has_step_hooks(optimizer):
        Optimizer.profile_hook_step(run)(optimizer)
    else:
        work(False, *given)


def note_step(optimizer: Optimizer) -> None:
    """Tell schedulers of the wrapped optimizer that it was stepped, or skipped: else they warn of a wrong order."""
    optimizer._opt_called = True  # type: ignore[attr-defined]


def make_hook_tables(*optimizers: Optimizer) -> None:
    """Give optimizers the tables of hooks that torch's own constructor makes, where they have none.

    Classes around another optimizer, as Lookahead, often don't call torch's constructor.
    """
    for optimizer, name in itertools.product(optimizers, HOOKS):
        if name not in optimizer.__dict__:
            setattr(optimizer, name, OrderedDict())


# -- the guard ---------------------------------------------------------------------------------------------------------


class WrappedOptimizerGuard:
    """Has methods of the wrapped optimizer raise that write parameters or gradients, unless the wrapper calls them.

    They become attributes of the optimizer itself, in front of its class's methods, and of a scheduler's patch. There
    is no reference cycle. Make it when nothing of the wrapper's construction can fail any more.

    Args:
        optimizer: the wrapped one. It is not kept alive.
        wrapper: the name of the class to call instead.

    Example:
        >>> optimizer = torch.optim.SGD([torch.ones(1)])
        >>> guard = WrappedOptimizerGuard(optimizer)
        >>> optimizer.step()
        Traceback (most recent call last):
        RuntimeError: SGD.step() was called on an optimizer that MixedPrecisionOptimizer wraps, behind its back: ...
        >>> with guard.open():
        ...     optimizer.step()
    """

    def __init__(self, optimizer: Optimizer, wrapper: str = "MixedPrecisionOptimizer") -> None:
        self.wrapper = wrapper
        self._optimizer = weakref.ref(optimizer)
        self._opened: set[object] = set()
        for name in [name for name in GUARDED if hasattr(optimizer, name)]:
            before = optimizer.__dict__.get(name)
            inner = None if isinstance(before, _GuardedMethod) else before
            optimizer.__dict__[name] = _GuardedMethod(name, self, inner)

    def shut(self) -> None:
        """Close it, however often it was opened: an exception may have come before a ``with`` could do so."""
        self._opened.clear()

    @contextlib.contextmanager
    def open(self) -> Iterator[None]:
        """Within, the optimizer's methods are its own. May be nested."""
        key = object()
        try:
            self._opened.add(key)
            yield
        finally:
            self._opened.discard(key)

    def call(self, name: str, inner: Callable[..., Any] | None, args: Any, kwargs: Any) -> Any:
        """The optimizer's own method: ``inner``, which a scheduler put in front of the class's, or the class's.

        Raises:
            RuntimeError: the guard is not open.
        """
        optimizer = self._optimizer()
        if optimizer is None:
            raise ReferenceError(f"{name}() of an optimizer that was freed was called.")
        if not self._opened:
            raise errors.BEHIND_THE_BACK(optimizer=type(optimizer).__name__, method=name, wrapper=self.wrapper)
        if inner is not None:
            return inner(*args, **kwargs)
        return getattr(type(optimizer), name)(optimizer, *args, **kwargs)


GUARDED = ("step", "zero_grad", "train", "eval")
"""The methods of a wrapped optimizer that raise when they are called from elsewhere, where it has them."""


class _GuardedMethod:
    """A guarded method, found in the optimizer's ``__dict__`` before its class is asked.

    It has the attribute by which torch's schedulers know a ``step`` that tells them of steps: the wrapper sees to that.
    A copy of it guards nothing and raises: the wrapper of the copied optimizer makes a new one.
    """

    _wrapped_by_lr_sched = True  # torch from 2.5 on
    _with_counter = True  # torch 2.4

    def __init__(self, name: str, guard: WrappedOptimizerGuard | None, inner: Callable[..., Any] | None) -> None:
        self.__name__ = name
        self.guard = guard
        self.inner = inner

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.guard is None:
            raise RuntimeError(f"{self.__name__}() of a copied optimizer was called. Copy its wrapper, and call that.")
        return self.guard.call(self.__name__, self.inner, args, kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return _GuardedMethod, (self.__name__, None, None)


def _guarded(optimizer: Optimizer, name: str) -> _GuardedMethod | None:
    found = optimizer.__dict__.get(name)
    return found if isinstance(found, _GuardedMethod) and found.guard is not None else None


def is_guarded(optimizer: Optimizer) -> bool:
    """Whether a wrapper has put its guard on ``optimizer``: it is wrapped already."""
    return _guarded(optimizer, "step") is not None


def has_own_step(optimizer: Optimizer) -> bool:
    """Whether the ``step`` of this very optimizer was replaced, by other code than a scheduler's or the guard's."""
    method = _guarded(optimizer, "step")
    step = optimizer.__dict__.get("step") if method is None else method.inner
    return step is not None and not (hasattr(step, "_wrapped_by_lr_sched") or hasattr(step, "_with_counter"))


@contextlib.contextmanager
def guard_open(optimizer: Optimizer) -> Iterator[None]:
    """Within, the methods of ``optimizer`` are its own, guarded or not."""
    method = _guarded(optimizer, "step")
    if method is None or method.guard is None:
        yield
    else:
        with method.guard.open():
            yield


# -- the step ----------------------------------------------------------------------------------------------------------


class WrappedStep:
    """Steps the wrapped optimizer itself. After a step masters and model agree, but for masters that the user wrote.

    :class:`.one_pass.OnePassStep` and :class:`.modes.release.ReleasedStep` are asked the same.

    A class is believed when its step was seen to move a master or to make state of one, which AdaShift does some steps
    before, and to leave the model's gradients as they were. Until then each step is looked at, which syncs; torch's own
    classes are believed unseen.

    Args:
        optimizer: its groups hold the masters of ``params``.
        why: what :meth:`describe` says of it.
        part: inside of ZeroRedundancyOptimizer, the one that steps this rank's part.
        lines: where a warning goes about a class that goes round its ``param_groups``.

    Attributes:
        rounded_all: whether the last step wrote all masters into the model, also those that the user wrote.
        counts_steps: whether a step rounds by its number, so that the host must know how many were taken before it.
    """

    counts_steps = False  # the optimizer counts for itself

    def __init__(
        self, optimizer: Optimizer, params: ParamTable, masters: Masters, why: str, part: Optimizer, lines: Lines
    ) -> None:
        self.optimizer = optimizer
        self.params = params
        self.masters = masters
        self.why = why
        self.part = part
        self.lines = lines
        self.rounded_all = True
        self._is_believed = is_torch_class(part)
        self._unseen = 0

    def takes_scaled(self) -> bool:
        """Whether the next step takes gradients still scaled; else, as here, they are unscaled before it."""
        return False

    def skips_on_device(self, look: Look) -> bool:
        """Whether the next step can be skipped on the device, by a flag that the host does not read. No sync.

        Where torch's own fused steps serve by torch's found_inf protocol.
        """
        return supports_found_inf(self.optimizer, [device.device for device in self.params.devices])

    def describe(self) -> str:
        """For the wrapper's repr: why no kernel steps."""
        return f"general ({self.why})"

    def step(self, step: Step, look: Look, found_inf: Tensor | None, closure: Callable[[], Any] | None = None) -> Any:
        """Step, with the wrapped optimizer's hooks. Whatever the step or one of its hooks raises comes out.

        Masters are ordinary parameters while the optimizer steps them.

        Args:
            look: what this call has seen; no code of the user's has run since.
            step: is marked right before the first write and after the last one, both within the hooks.
            found_inf: float32, 0-dim, exactly 0.0 or 1.0: where it is 1.0 nothing is written. None: decided already.
            closure: handed to the wrapped optimizer where that steps itself.
        """
        before = None if self._is_believed else self._seen()
        with ordinary_parameters(self.params):
            loss = run_step(self.optimizer, step, found_inf, closure)
        if before is not None:
            self._compare(before)
        self.round_down()
        return loss

    def _seen(self) -> _Seen:
        masters = [master for master in self.params.apart if master is not None] or self.params.masters
        grads = [None if is_folded(grad) else grad for grad in raw_grads(self.params.models)]
        true_grads = _beginnings(raw_grads(masters))
        return _Seen(versions(masters), _beginnings(masters), true_grads, _beginnings(grads))

    def _compare(self, before: _Seen) -> None:
        """Believe the class, or log that three of its steps went round the masters."""
        now = self._seen()
        has_state = any(self.part.state.get(master) for master in self.params.masters)
        has_moved = has_state or before.versions != now.versions or not _are_equal(before.masters, now.masters)
        has_written = not _are_equal(before.grads, now.grads) and _are_any(now.grads)  # else they were cleared
        self._is_believed = has_moved and not has_written
        can_move = _are_any(before.true_grads) and any(group.get("lr", 1) != 0 for group in self.part.param_groups)
        if has_written or (can_move and not has_moved):
            self._unseen += 1
        if self._unseen == 3:
            self._is_believed = True
            what = errors.WROTE_GRADIENTS if has_written else errors.MOVED_NOTHING
            self.lines.tell(errors.GOES_ROUND, once=True, optimizer=type(self.part).__name__, what=what)

    def step_within_hooks(self, step: Step) -> None:
        """The optimizer's step without its hooks, which are running: a kernel could not step after all."""
        framed = type(self.part).step
        with ordinary_parameters(self.params), guard_open(self.part):
            run_code(self.part, step, None, getattr(framed, "__wrapped__", framed))
        self.round_down()

    def round_down(self) -> None:
        """Write all masters into the model."""
        if self.params.has_dtensors:
            self.params.find_pieces()
        with torch.no_grad():
            for device in self.params.devices:
                self.masters.round_down(device)


class _Seen(NamedTuple):
    """What a step may move, before or after it: beginnings of masters, of their gradients and of the model's."""

    versions: list[int]
    masters: list[Tensor]
    true_grads: list[Tensor]
    grads: list[Tensor]


def _beginnings(tensors: Sequence[Tensor | None]) -> list[Tensor]:
    """Copies of the first elements of dense tensors: enough to see a write that their versions don't tell of."""
    dense = [local(one.detach()) for one in tensors if one is not None and one.layout is torch.strided]
    return [one.reshape(-1)[:1024].clone() for one in dense]


def _are_equal(some: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    return len(some) == len(others) and all(map(torch.equal, some, others))


def _are_any(tensors: Sequence[Tensor]) -> bool:
    return any(bool(one.any()) for one in tensors)


def run_step(
    optimizer: Optimizer,
    step: Step | None = None,
    found_inf: Tensor | None = None,
    closure: Callable[[], Any] | None = None,
) -> Any:
    """Call ``optimizer.step``, guarded or not.

    Args:
        step: is marked around the class's own code, within its hooks; around these too where the step is not in torch's
            frame, or was put in the place of the class's.
        found_inf: as for :meth:`WrappedStep.step`.
    """
    note_step(optimizer)
    step = Step() if step is None else step
    code = _own_code(optimizer)

    def run(stepped: Optimizer, *given: Any, **named: Any) -> Any:
        return run_code(stepped, step, found_inf, code or _by_name, *given, **named)

    is_framed = code is not None and (has_step_hooks(optimizer) or torch.autograd.profiler._is_profiler_enabled)
    framed = Optimizer.profile_hook_step(run) if is_framed else run
    with guard_open(optimizer):
        return framed(optimizer, *(() if closure is None else (closure,)))


def _by_name(optimizer: Optimizer, *given: Any, **named: Any) -> Any:
    return optimizer.step(*given, **named)


def run_code(
    optimizer: Optimizer,
    step: Step,
    found_inf: Tensor | None,
    code: Callable[..., Any],
    *given: Any,
    **named: Any,
) -> Any:
    """Run the code of a step between the marks of ``step``: unfused where torch 2.13's fused SGD step fails.

    That raises a TypeError where some momentum buffers exist and others don't (a parameter whose first gradient comes
    later than the others'), and on a CPU it leaves whole vectors of 16-bit parameters as they were.

    Args:
        found_inf: as for :meth:`WrappedStep.step`; handed over by torch's protocol. Gradients are unscaled already.
        code: called with the optimizer, then with what is ``given`` and ``named``.
    """
    unfused = [group for group, missing, there in _fused_momentum_groups(optimizer) if missing and there]
    unfused += [group for group in _fused_half_groups(optimizer) if not any(group is other for other in unfused)]

    def put_back() -> None:
        for group in unfused:
            group["fused"] = True
        if found_inf is not None:
            _take_flags_back(optimizer)

    step.undo = put_back
    try:
        for group in unfused:
            group["fused"] = False
        if found_inf is not None:
            _hand_flags(optimizer, found_inf)
        step.about_to_write = True
        returned = code(optimizer, *given, **named)
        step.all_written = True
        return returned
    finally:
        put_back()


def _frame() -> CodeType | None:
    """What torch puts around the ``step`` of each optimizer class: its step hooks, and a frame for its profiler.

    None where it is not torch's own: other code has put something else in its place.
    """
    code: CodeType | None = getattr(Optimizer.profile_hook_step(lambda _: None), "__code__", None)
    own = sys.modules[Optimizer.__module__].__file__
    return code if code is not None and code.co_filename == own else None


_FRAME = _frame()


def _own_code(optimizer: Optimizer) -> Callable[..., Any] | None:
    """The class's own step without torch's frame, so that marks can be set within its hooks.

    A scheduler's patch only notes the call, as :func:`note_step` does. None where the step isn't in torch's frame, or
    other code has put its own in its place.
    """
    framed = type(optimizer).step
    if has_own_step(optimizer) or _FRAME is None or getattr(framed, "__code__", None) is not _FRAME:
        return None
    own: Callable[..., Any] = framed.__wrapped__  # type: ignore[attr-defined]
    return own


@contextlib.contextmanager
def found_inf_given(optimizer: Any, found_inf: Tensor) -> Iterator[None]:
    """Within, torch's protocol for skipping on the device; gradients are unscaled already."""
    try:
        _hand_flags(optimizer, found_inf)
        yield
    finally:
        _take_flags_back(optimizer)


def _hand_flags(optimizer: Any, found_inf: Tensor) -> None:
    optimizer.grad_scale, optimizer.found_inf = None, found_inf


def _take_flags_back(optimizer: Optimizer) -> None:
    for name in ("grad_scale", "found_inf"):  # gone already where the optimizer refused them
        vars(optimizer).pop(name, None)


# -- faults of torch's fused steps -------------------------------------------------------------------------------------


def supports_found_inf(optimizer: Optimizer, devices: Sequence[torch.device]) -> bool:
    """Whether ``optimizer.step`` skips on the device when ``optimizer.found_inf`` is 1.0, and can be trusted to now.

    torch's fused steps do. Where some of the parameters lie on the host, torch 2.13 copies the flag there without
    waiting for the copy, and would step by what the memory held before. torch 2.13's fused SGD leaves
    ``momentum_buffer`` uninitialised when the flag is set on the step that makes it, so it must not be called with the
    flag until every gradient's buffer is there. Of other classes nothing is known: the host decides for them.
    """
    if not getattr(optimizer, "_step_supports_amp_scaling", False) or not is_torch_class(optimizer):
        return False
    if len(devices) > 1 and any(kernels.is_host(device) for device in devices):
        return False
    return not any(missing for _, missing, _ in _fused_momentum_groups(optimizer))


def _fused_momentum_groups(optimizer: Optimizer) -> Iterator[tuple[dict[str, Any], int, int]]:
    """(group, gradients without a momentum buffer, gradients with one) for each fused SGD group with momentum."""
    if not isinstance(optimizer, torch.optim.SGD):
        return
    for group in optimizer.param_groups:
        if group.get("fused") and group.get("momentum"):
            grads = raw_grads(group["params"])
            have = [
                optimizer.state[p].get("momentum_buffer") is not None if p in optimizer.state else False
                for p, grad in zip(group["params"], grads, strict=True)
                if grad is not None
            ]
            yield group, have.count(False), have.count(True)


def _fused_half_groups(optimizer: Optimizer) -> Iterator[dict[str, Any]]:
    """Fused SGD groups in which 16-bit parameters on the CPU are to be stepped: there are no masters."""
    if isinstance(optimizer, torch.optim.SGD):
        for group in optimizer.param_groups:
            halves = [p for p in group["params"] if p.dtype in HALF_DTYPES and p.device.type == "cpu"]
            if group.get("fused") and any(grad is not None for grad in raw_grads(halves)):
                yield group


# -- what an optimizer holds beside its state ------------------------------------------------------------------------


def remake_first_state(optimizer: Optimizer, master: Tensor) -> None:
    """Give a master the FP32 state that its optimizer's constructor would have given it.

    Of torch's optimizers Adagrad alone makes state when it is constructed, then in the 16-bit parameter's dtype, in
    which ``initial_accumulator_value`` may not be exact.
    """
    if isinstance(optimizer, torch.optim.Adagrad) and master in optimizer.state:
        state = optimizer.state[master]
        if float(state["step"]) == 0.0:
            state["sum"].fill_(optimizer.defaults["initial_accumulator_value"])


def extras(optimizer: Optimizer) -> dict[str, Any]:
    """Attributes that torch's pickling of optimizers forgets (LBFGS needs its own), without hooks, patches, guard."""
    kept = optimizer.__getstate__()
    return {
        name: value
        for name, value in optimizer.__dict__.items()
        if name not in kept and name not in GUARDED and not name.endswith("_hooks")
    }
