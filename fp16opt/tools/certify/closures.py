"""How often an optimizer calls its closure."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from .comparing import difference, everything, same_bits
from .surroundings import undisturbed
from .trials import Factory, NoOptimizer, Setting, Trial, check_factory

ClosureCalls = Literal["never", "once", "elsewhere", "several", "untested"]

_SMALL = (  # the kinds that certify tries, in its order
    Setting(((2, 3), (4,)), "dense", "vectors and matrices"),
    Setting(((2, 3), (3, 2)), "dense", "matrices only"),
    Setting(((2, 3), (3, 2)), "sparse", "sparse gradients of matrices"),
)
_STEPS = 12  # SAM variants that save evaluations make the second one in every fifth or tenth step


def closure_calls(optimizer_factory: Factory) -> ClosureCalls:
    """How often an optimizer calls its closure in a step, tried on small FP32 tensors of the CPU in some milliseconds.

    What a caller needs to know is whether it may evaluate before the step, and hand over a closure that returns the
    loss. So a single call counts as "once" only where twelve steps done that way leave the same bits. It holds for the
    settings that the factory gives: ``LBFGS(max_iter=1)`` is "once", because that is what it does then.

    Args:
        optimizer_factory: Called with a list of FP32 parameters, returns an optimizer over them. Called a few times.
            Optimizers that have a ``train`` method get it called.

    Returns:
        - "never": it ignores its closure. Evaluating before the step does no harm, and gives it gradients.
        - "once": at most once in a step, and evaluating before the step is the same. All of torch.optim but LBFGS.
        - "elsewhere": at most once, but evaluating before the step is not the same: it moves or clears something first
          (SAM, whose first gradients come from before ``step``; schedule-free optimizers for closures), or leaves the
          closure out in some steps.
        - "several": more than once in one of twelve steps, which ends at the second call (LBFGS, line searches).
        - "untested": it can't be made or stepped here; a class for GPUs only, for instance. Assume "several".

        torch's global random state, defaults and modes are left as they were, and no hooks of all optimizers hear of
        it. Does not sync.

    Raises:
        TypeError: ``optimizer_factory`` is not callable, or what it returns is no torch optimizer. What the class
            itself raises is not passed on.

    Example:
        >>> closure_calls(torch.optim.LBFGS), closure_calls(torch.optim.AdamW)
        ('several', 'once')
    """
    check_factory(optimizer_factory)
    with undisturbed():
        for setting in _SMALL:
            try:
                return _calls(Trial(optimizer_factory, setting))
            except NoOptimizer:
                raise
            except Exception:
                continue  # another kind of parameters may suit it
    return "untested"


class _CalledAgain(BaseException):
    """Ends a step at the second call. No ``Exception``, which classes that try again would catch."""


class _Closure:
    """Evaluates the trial's loss, once."""

    def __init__(self, evaluate: Callable[[], Tensor]) -> None:
        self.evaluate = evaluate
        self.calls = 0

    def __call__(self) -> Tensor:
        self.calls += 1
        if self.calls > 1:
            raise _CalledAgain
        return self.evaluate()


def _calls(trial: Trial) -> ClosureCalls:
    whole = _make(trial)
    params, optimizer = whole
    losses, counts = [], set()
    for step in range(_STEPS):
        closure = _begin(trial, params, step)
        try:
            losses.append(optimizer.step(closure))  # type: ignore[arg-type]
        except (_CalledAgain, Exception):
            if closure.calls < 2:
                raise
        if closure.calls > 1:  # seen here too where it caught what the second call raised
            return "several"
        counts.add(closure.calls)
    if counts == {0}:
        return "never"
    ahead = _make(trial)
    params, optimizer = ahead
    for step in range(_STEPS):
        loss = _begin(trial, params, step)()
        returned = optimizer.step(functools.partial(_given, loss))  # type: ignore[arg-type]
        if not same_bits(returned, losses[step]):
            return "elsewhere"
    return "elsewhere" if difference(everything(*whole), everything(*ahead)) else "once"


def _make(trial: Trial) -> tuple[list[Parameter], Optimizer]:
    """Parameters and an optimizer, and the random state of the beginning: what draws numbers draws the same ones."""
    torch.default_generator.manual_seed(1)
    params, optimizer = trial.make()
    for group in optimizer.param_groups:
        if group.get("capturable"):  # torch steps those on GPUs only; closures are called all the same
            group["capturable"] = False
    return params, optimizer


def _begin(trial: Trial, params: list[Parameter], step: int) -> _Closure:
    """The closure of a step that finds gradients of an earlier backward: SAM takes its first ones from there."""
    trial.give(params, _STEPS + step)
    return _Closure(functools.partial(trial.evaluate, params, step))


def _given(loss: Tensor) -> Tensor:
    return loss
