"""The wrapped optimizer's own step on FP32 masters, with guards against faults of torch's fused ones."""

from __future__ import annotations

import contextlib
import itertools
import operator
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from ..kernels import counters
from ..kernels.native import read_anew
from .gradients import Gradients
from .masters import MasterClasses, Masters
from .pairs import HALF_DTYPES, Pairs
from .schema import is_torch_class

HOOKS = (
    "_optimizer_step_pre_hooks",
    "_optimizer_step_post_hooks",
    "_optimizer_state_dict_pre_hooks",
    "_optimizer_state_dict_post_hooks",
    "_optimizer_load_state_dict_pre_hooks",
    "_optimizer_load_state_dict_post_hooks",
)


class StepFailed(Exception):
    """Carries an exception out of a step, and whether the step itself had been done by then."""

    def __init__(self, error: BaseException, completed: bool) -> None:
        super().__init__(str(error))
        self.error = error
        self.completed = completed


class Stepper(Protocol):
    """What steps the masters. After it masters and model agree, but for masters that the user wrote."""

    @property
    def rounded_all(self) -> bool:
        """Whether the last step wrote all masters into the model, those that the user wrote too."""

    @property
    def all_or_nothing(self) -> bool:
        """Whether one gradient that is not finite leaves out the whole step."""
        return True

    @property
    def reads_once(self) -> bool:
        """Whether lists may be read once a step: nobody else's code runs in it, but hooks, and no gradient is freed."""
        return False

    def takes_waiting(self) -> bool:
        """Whether the next step takes gradients as they wait in 16 bits."""

    def skips_on_device(self) -> bool:
        """Whether the next step can be left out on the device, by a flag that nobody looks at. No sync."""

    def step(self, found_inf: Tensor | None, closure: Callable[[], Any] | None = None) -> Any:
        """Step, with the wrapped optimizer's hooks.

        Args:
            found_inf: float32, 0-dim, exactly 0.0 or 1.0: where it is 1.0 nothing is written. None: decided already.
            closure: handed to the wrapped optimizer where that steps itself.

        Raises:
            StepFailed: Around whatever the step or one of its hooks raised.
        """

    def describe(self) -> str:
        """For the wrapper's repr."""


own_step_hooks = operator.attrgetter("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
"""Whom torch calls before, and after, an optimizer's steps: two tables."""
STEP_HOOKS_OF_ALL = (_global_optimizer_pre_hooks, _global_optimizer_post_hooks)
"""The same for those of every optimizer."""


def run_hooks(optimizer: Optimizer, work: Callable[..., None], *given: object) -> None:
    """``work`` in the place of the optimizer's own step, between its step hooks.

    Without them, torch's frame around them, which times each step for a profiler, is left to the wrapper's own step.

    Args:
        work: Is told whether there are hooks, and what is ``given``.

    Raises:
        StepFailed: Around what it or a hook raised.
    """
    done: list[bool] = []

    def run(_: Optimizer) -> None:
        work(True, *given)
        done.append(True)

    optimizer._opt_called = True  # type: ignore[attr-defined]  # as a scheduler's patch of step would set it
    try:
        if any((*own_step_hooks(optimizer), *STEP_HOOKS_OF_ALL)):
            with read_anew():
                Optimizer.profile_hook_step(run)(optimizer)
        else:
            work(False, *given)
    except BaseException as error:
        raise StepFailed(error, bool(done)) from error


class WrappedStep:
    """Steps the wrapped optimizer itself.

    Args:
        optimizer: Its groups hold the masters of ``pairs``.
        classes: Of masters; ordinary parameters while they are stepped.
        why: What :meth:`describe` says of it.
    """

    all_or_nothing = True
    reads_once = False

    def __init__(
        self,
        optimizer: Optimizer,
        pairs: Pairs,
        masters: Masters,
        gradients: Gradients,
        classes: MasterClasses,
        why: str = "fused_step=False",
    ) -> None:
        self.optimizer = optimizer
        self.pairs = pairs
        self.masters = masters
        self.gradients = gradients
        self.classes = classes
        self.why = why
        self.rounded_all = True

    def takes_waiting(self) -> bool:
        """False: a wrapped optimizer wants FP32 gradients."""
        return False

    def skips_on_device(self) -> bool:
        """Where torch's own fused steps serve by torch's found_inf protocol."""
        return supports_found_inf(self.optimizer)

    def describe(self) -> str:
        """Why no kernel steps."""
        return f"general ({self.why})"

    def step(self, found_inf: Tensor | None, closure: Callable[[], Any] | None = None) -> Any:
        """See :class:`Stepper`."""
        self.gradients.write()
        before = self._versions()
        ordinary = self.classes.plain() if self.classes.adopted else contextlib.nullcontext()
        try:
            with ordinary:
                loss = run_step(self.optimizer, found_inf, closure)
        except StepFailed as failed:
            failed.completed = failed.completed or self._versions() != before
            if failed.completed:
                self.round_down()
            raise
        self.round_down()
        return loss

    def run(self, step: Callable[..., Any], *args: Any) -> Any:
        """``step``, in the midst of the optimizer's hooks, on ordinary parameters with FP32 gradients."""
        self.gradients.write()
        with self.classes.plain(), fused_steps_guarded(self.optimizer), read_anew():
            return step(*args)

    def round_down(self) -> None:
        """Write all masters into the model."""
        if self.pairs.has_pieces:
            self.pairs.take_pieces()
        with torch.no_grad():
            for group in self.pairs.devices:
                if group.copied:
                    self.masters.round_down(group)

    def _versions(self) -> list[int]:
        """Version counters of those masters whose steps are counted: torch's fused steps leave them as they are."""
        return [p._version for group in self.optimizer.param_groups if not group.get("fused") for p in group["params"]]


def run_step(optimizer: Optimizer, found_inf: Tensor | None, closure: Callable[[], Any] | None = None) -> Any:
    """Call ``optimizer.step``.

    Raises:
        StepFailed: Around whatever the step or one of its hooks raised.
    """
    completed: list[bool] = []
    with contextlib.ExitStack() as around:
        if any((*own_step_hooks(optimizer), *STEP_HOOKS_OF_ALL)):  # else what is raised was raised by the step
            around.enter_context(_first_post_hook(optimizer, lambda *_: completed.append(True)))
        around.enter_context(read_anew())
        if isinstance(optimizer, torch.optim.SGD):
            around.enter_context(fused_steps_guarded(optimizer))
        if found_inf is not None:
            around.enter_context(found_inf_given(optimizer, found_inf))
        try:
            return optimizer.step() if closure is None else optimizer.step(closure)
        except BaseException as error:
            raise StepFailed(error, bool(completed)) from error


@contextlib.contextmanager
def found_inf_given(optimizer: Any, found_inf: Tensor) -> Iterator[None]:
    """Within, torch's protocol for skipping on the device; gradients are unscaled already."""
    optimizer.grad_scale, optimizer.found_inf = None, found_inf
    try:
        yield
    finally:
        del optimizer.grad_scale, optimizer.found_inf


@contextlib.contextmanager
def _first_post_hook(optimizer: Optimizer, hook: Callable[..., None]) -> Iterator[None]:
    """Have ``hook`` run right after the step and before any hook of the user's, which might raise."""
    handle = optimizer.register_step_post_hook(hook)
    optimizer._optimizer_step_post_hooks.move_to_end(handle.id, last=False)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        handle.remove()


def supports_found_inf(optimizer: Optimizer) -> bool:
    """Whether ``optimizer.step`` skips on the device when ``optimizer.found_inf`` is 1.0, and can be trusted to now.

    torch's fused steps do. torch 2.13's fused SGD leaves ``momentum_buffer`` uninitialised when the flag is set on the
    step that makes it, so it must not be called with the flag until every gradient's buffer is there. Of other classes
    nothing is known: they are decided on the host.
    """
    if not getattr(optimizer, "_step_supports_amp_scaling", False) or not is_torch_class(optimizer):
        return False
    return not any(missing for _, missing, _ in _fused_momentum_groups(optimizer))


def _fused_momentum_groups(optimizer: Optimizer) -> Iterator[tuple[dict[str, Any], int, int]]:
    """(group, gradients without a momentum buffer, gradients with one) for each fused SGD group with momentum."""
    if not isinstance(optimizer, torch.optim.SGD):
        return
    for group in optimizer.param_groups:
        if group.get("fused") and group.get("momentum"):
            grads = counters.gradients(list(group["params"]))
            have = [
                optimizer.state[p].get("momentum_buffer") is not None if p in optimizer.state else False
                for p, grad in zip(group["params"], grads, strict=True)
                if grad is not None
            ]
            yield group, have.count(False), have.count(True)


def _fused_halves(optimizer: Optimizer) -> Iterator[dict[str, Any]]:
    """Fused SGD groups in which 16-bit parameters on the CPU are to be stepped: there are no masters."""
    if isinstance(optimizer, torch.optim.SGD):
        for group in optimizer.param_groups:
            halves = [p for p in group["params"] if p.dtype in HALF_DTYPES and p.device.type == "cpu"]
            if group.get("fused") and any(grad is not None for grad in counters.gradients(halves)):
                yield group


@contextlib.contextmanager
def fused_steps_guarded(optimizer: Optimizer) -> Iterator[None]:
    """Step a fused SGD group unfused where torch 2.13's fused step fails.

    It raises a TypeError where some momentum buffers exist and others don't (a parameter whose first gradient comes
    later than the others'), and on a CPU it leaves whole vectors of 16-bit parameters as they were.
    """
    unfused = [group for group, missing, there in _fused_momentum_groups(optimizer) if missing and there]
    unfused += [group for group in _fused_halves(optimizer) if not any(group is other for other in unfused)]
    for group in unfused:
        group["fused"] = False
    try:
        yield
    finally:
        for group in unfused:
            group["fused"] = True


# -- what an optimizer holds beside its state ------------------------------------------------------------------------


def make_hook_tables(*optimizers: Optimizer) -> None:
    """Give optimizers the tables of hooks that torch's own constructor makes, where they have none.

    Those around another optimizer, as Lookahead, often don't call it.
    """
    for optimizer, name in itertools.product(optimizers, HOOKS):
        if name not in optimizer.__dict__:
            setattr(optimizer, name, OrderedDict())


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
    """Attributes that torch's pickling of optimizers forgets (LBFGS needs its own), hooks and patches left out."""
    kept = optimizer.__getstate__()
    return {
        name: value
        for name, value in optimizer.__dict__.items()
        if name not in kept and name != "step" and not name.endswith("_hooks")
    }
