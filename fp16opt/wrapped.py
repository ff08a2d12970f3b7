"""Stepping the wrapped optimizer: torch's found_inf protocol, guards against faults of its fused steps, snapshots."""

from __future__ import annotations

import contextlib
import copy
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from .buckets import settings_of
from .certify import check_found_inf
from .fused import has_grad
from .local import is_expanded
from .schema import is_torch_class
from .trials import factory_like

logger = logging.getLogger("fp16opt")

HOOKS = (
    "_optimizer_step_pre_hooks",
    "_optimizer_step_post_hooks",
    "_optimizer_state_dict_pre_hooks",
    "_optimizer_state_dict_post_hooks",
    "_optimizer_load_state_dict_pre_hooks",
    "_optimizer_load_state_dict_post_hooks",
)


class GaveUp(Exception):
    """Raised out of a closure's evaluation that overflows while the scale can't go lower."""


class StepFailed(Exception):
    """Carries an exception out of the wrapped optimizer's step, and whether the step itself had been done by then."""

    def __init__(self, error: BaseException, completed: bool) -> None:
        super().__init__(str(error))
        self.error = error
        self.completed = completed


def make_hook_tables(optimizer: Optimizer) -> None:
    """Give ``optimizer`` the tables of hooks that torch's own constructor would make, where it has none."""
    for name in HOOKS:
        if name not in optimizer.__dict__:
            setattr(optimizer, name, OrderedDict())


def supports_found_inf(optimizer: Optimizer) -> bool:
    """Whether ``optimizer.step`` skips on the device when ``optimizer.found_inf`` is 1.0, and can be trusted to now.

    torch's fused steps do. torch 2.13's fused SGD leaves ``momentum_buffer`` uninitialised when the flag is set on the
    step that makes it, so it must not be called with the flag until every gradient's buffer is there. What other
    classes say of themselves is tested, once, with small tensors on the CPU.
    """
    if not getattr(optimizer, "_step_supports_amp_scaling", False) or not _keeps_its_word(optimizer):
        return False
    return not any(missing for _, missing, _ in _fused_momentum_groups(optimizer))


def _keeps_its_word(optimizer: Optimizer) -> bool:
    """Whether an optimizer that takes ``found_inf`` honours it: torch's own, and others that pass certify's check."""
    if is_torch_class(optimizer):
        return True
    known = optimizer.__dict__.get("_fp16opt_honours_found_inf")
    if known is None:
        check = check_found_inf(factory_like(optimizer, settings_of(optimizer.param_groups[0])))
        known = optimizer._fp16opt_honours_found_inf = check.passed is True  # type: ignore[attr-defined]
        if not known:
            name = f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"
            logger.info("%s: whether to skip a step is decided on the host: %s.", name, check.detail)
    return bool(known)


def run_step(
    optimizer: Optimizer,
    found_inf: Tensor | None,
    closure: Callable[[], Any] | None = None,
    fused: Callable[..., Any] | None = None,
) -> Any:
    """Call ``optimizer.step``, or ``fused`` in its place.

    Args:
        optimizer: The wrapped optimizer; its param_groups hold masters with FP32 gradients.
        found_inf: float32, 0-dim, exactly 0.0 or 1.0, handed over by torch's protocol so that the step skips on the
            device; None where the decision was taken already.
        closure: Passed on when given.

    Raises:
        StepFailed: Around whatever the step or one of its hooks raised.
    """
    completed = []
    with _first_post_hook(optimizer, lambda *_: completed.append(True)), fused_steps_guarded(optimizer):
        if found_inf is not None:
            optimizer.grad_scale = None  # type: ignore[attr-defined]
            optimizer.found_inf = found_inf  # type: ignore[attr-defined]
        step: Callable[..., Any] = optimizer.step if fused is None else fused
        try:
            return step() if closure is None else step(closure)
        except BaseException as error:
            raise StepFailed(error, bool(completed)) from error
        finally:
            if found_inf is not None:
                del optimizer.grad_scale, optimizer.found_inf  # type: ignore[attr-defined]


@contextlib.contextmanager
def _first_post_hook(optimizer: Optimizer, hook: Callable[..., None]) -> Iterator[None]:
    """Have ``hook`` run right after the step and before any hook of the user's, which might raise."""
    handle = optimizer.register_step_post_hook(hook)
    optimizer._optimizer_step_post_hooks.move_to_end(handle.id, last=False)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        handle.remove()


def _fused_momentum_groups(optimizer: Optimizer) -> Iterator[tuple[dict[str, Any], int, int]]:
    """(group, gradients without a momentum buffer, gradients with one) for each fused SGD group with momentum."""
    if not isinstance(optimizer, torch.optim.SGD):
        return
    for group in optimizer.param_groups:
        if group.get("fused") and group.get("momentum"):
            have = [
                optimizer.state[p].get("momentum_buffer") is not None if p in optimizer.state else False
                for p in group["params"]
                if has_grad(p)
            ]
            yield group, have.count(False), have.count(True)


@contextlib.contextmanager
def fused_steps_guarded(optimizer: Optimizer) -> Iterator[None]:
    """Step a fused SGD group unfused for once where some momentum buffers exist and others don't.

    torch 2.13's fused step raises a TypeError there (a parameter whose first gradient comes later than the others').
    """
    unfused = [group for group, missing, there in _fused_momentum_groups(optimizer) if missing and there]
    for group in unfused:
        group["fused"] = False
    try:
        yield
    finally:
        for group in unfused:
            group["fused"] = True


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


class Snapshot:
    """A copy of what a step changes, to go back to: parameters, their state, and the groups' settings.

    Only steps with a closure take one, because such a step can fail half way through. Memory: as much as the masters
    and the optimizer state together. Placeholders of split masters hold nothing.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        params = [p for group in optimizer.param_groups for p in group["params"]]
        self.values = [(p, p.detach().clone()) for p in params if not is_expanded(p)]
        itself = {id(p): p for p in params}
        self.state = {p: copy.deepcopy(state, dict(itself)) for p, state in optimizer.state.items()}
        self.settings = [
            {key: copy.deepcopy(value) for key, value in group.items() if key != "params"}
            for group in optimizer.param_groups
        ]

    def restore(self) -> None:
        with torch.no_grad():
            for param, value in self.values:
                param.copy_(value)
        self.optimizer.state.clear()
        self.optimizer.state.update(self.state)
        for group, settings in zip(self.optimizer.param_groups, self.settings, strict=True):
            group.update(settings)
